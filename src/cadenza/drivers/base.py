"""How tensors and processes are run. All other code asks a driver, also in a run of one process."""

from __future__ import annotations

import hashlib
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from cadenza.drivers.consensus import Meeting
from cadenza.drivers.first_error import Post
from cadenza.drivers.meta_tensors import check_can_materialize
from cadenza.drivers.sharding import Readable, total_norm
from cadenza.loading.shards import Shard

Reduction = Literal["mean", "sum", "min", "max", "total"]
T = TypeVar("T")


class Driver(ABC):
    """How a run uses devices and processes: one device, or many ranks.

    ``run.driver`` is the driver of a run. A callback that communicates uses its methods. A method that exchanges values says
    so; every rank must call it, in the same order.

    >>> import torch
    >>> from cadenza.drivers import SingleDriver
    >>> driver = SingleDriver("cpu")
    >>> driver.rank, driver.world_size, driver.reduce(torch.tensor([1.0, 2.0]), "sum"), driver.gather("mine")
    (0, 1, tensor([1., 2.]), ['mine'])
    """

    device: torch.device
    """The device of this rank."""

    rank: int
    """The index of this process among all processes, from 0."""

    local_rank: int
    """The index of this process among those on this machine, from 0."""

    world_size: int
    """The number of processes."""

    tensor_parallel: int = 1
    """The number of consecutive ranks that compute together on the same batches; see `TensorParallel`."""

    reduces: bool
    """Whether gradients are reduced over ranks, so that `no_sync` has an effect."""

    reduces_later = True
    """Whether `reduce_gradients` can reduce the gradients of `no_sync` without another backward pass."""

    in_step = False
    """Whether a forward pass needs all ranks, so that all ranks must do the same number of them, in an evaluation too."""

    shards = False
    """Whether each rank holds a shard of every weight."""

    copies: bool = False
    """Whether other ranks hold the same weights as this one, at each step."""

    adds_nothing: bool = False
    """Whether `add_no_gradients` works, so that one rank alone can drop a batch."""

    after_start: Callable[[], object] | None = None
    """To be called on every rank after the first step of a fit, or the first batch of an evaluation without a fit: from then
    on, ranks wait for each other as long as a step may take."""

    to_device: Callable[[Any], Any]
    """Returns a batch with every tensor in it on the device; raises `DataError` if something cannot be moved."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The index of the shard of the data that this rank reads. Ranks that compute together have the same."""
        return self.rank // self.tensor_parallel

    @property
    def data_world_size(self) -> int:
        """The number of shards of the data: the ranks, of which those that compute together count once."""
        return self.world_size // self.tensor_parallel

    @property
    def counts(self) -> bool:
        """Whether sums over ranks include this rank: of the ranks that compute together, the first."""
        return not self.rank % self.tensor_parallel

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Move `model` to the device and, on many ranks, wrap or shard it; return the result. Every rank must call this.

        Tensors of the model that are on the device ``meta`` get values, by ``reset_parameters()`` of their modules.

        Raises:
            ValueError: Such a tensor got no value.
        """

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module inside a prepared one."""

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients are added on this rank only. The last batch of the window reduces them."""

    @abstractmethod
    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average over all ranks the gradients that were added in `no_sync`. Every rank must call this."""

    def average_gradients(self, parameters: Iterable[Tensor], also: Sequence[float] = ()) -> Sequence[float]:
        """Average over all ranks the gradients that no backward pass has reduced. Every rank must call this.

        These are the gradients of a ``step_fn`` with DDP, and those of parameters outside of the model. The ranks first
        exchange, in one all-reduce, which parameters have a gradient on any rank. A rank without that gradient takes part with
        zeros, so all ranks do the same all-reduces: one per dtype, for at most 64 MiB each, and one for each sparse gradient.
        A parameter without a gradient on every rank keeps None.

        Args:
            parameters: The same on all ranks, in the same order.
            also: Numbers to sum over ranks in the first exchange; ranks that compute together count once.

        Returns:
            The sums of `also`.
        """
        return also

    @abstractmethod
    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor:
        """Return `value` reduced over all ranks, shape unchanged. Every rank must call this, in the same order.

        Ranks that compute together count once in a ``"sum"``, which is that over the data, and each in a ``"total"``.
        """

    @abstractmethod
    def reduce_later(self, value: Tensor) -> Callable[[], Tensor]:
        """Start to sum `value`, a tensor on the host, over all ranks; return a function that waits for the sum and returns it.

        Each rank counts, also those that compute together.
        Every rank must call this, and the function, in the same order.
        """

    def count_later(self, flag: bool) -> Callable[[], int]:
        """Start to count the ranks with a true `flag`; return a function that waits for it, as `reduce_later`."""
        arrives = self.reduce_later(torch.tensor(int(flag)))
        return lambda: int(arrives())

    @abstractmethod
    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. Every rank must call this, in the same order."""

    def least(self, number: int) -> int:
        """Return the least of the numbers of all ranks. Every rank must call this, in the same order."""
        return int(self.reduce(torch.tensor(number), "min"))

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Every rank must call this, in the same order."""

    def gather_unequal(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank; this rank's alone if all have an equal one. Every rank must call this.

        Equal values cost the exchange of two numbers, whatever the number of ranks.
        """
        digest = int.from_bytes(hashlib.blake2b(pickle.dumps(value), digest_size=7).digest(), "big")
        return self.gather(value) if self.differing(torch.tensor([digest]), of_weights=False) else [value]

    def parcels(self) -> Any:
        """Return a process group for messages from one rank to another, beside the training; None for one process."""
        return None

    def data_group(self, shards: Sequence[int] | None = None) -> Any:
        """Return the process group of ranks that read different data; None for the default group. Every rank must call this.

        With `shards`, it has the ranks with these `data_rank` alone.
        """
        return None

    def gather_data(self, value: Any) -> list[Any]:
        """Return the values of all shards of the data, by `data_rank`. Every rank must call this, in the same order."""
        return self.gather(value if self.counts else None)[:: self.tensor_parallel]

    def gather_on_main(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank, on the main process; an empty list on the others. Every rank must call this."""
        everyone = self.gather(value)
        return everyone if self.is_main else []

    def differing(self, numbers: Tensor, *, of_weights: bool) -> list[int]:
        """Return the indices of the numbers, int64 of shape (N,), that are not equal on all ranks. Every rank must call this.

        Args:
            numbers: They are above -2**63.
            of_weights: Whether they are numbers of the weights that a rank holds: it is compared with its `copies`.
        """
        return []

    def in_turns(self, parts: Iterator[T], count: int, *, first: int = 0) -> Iterator[T]:
        """Yield on the main process the parts of all shards of the data, one of each in turn; none elsewhere.

        Every rank must exhaust it. No rank but the main process holds more than its own parts.

        Args:
            parts: Those of this rank.
            count: How many they are.
            first: The shard with the first part.
        """
        for number in range(int(self.reduce(torch.tensor(count), "max"))):
            own = [next(parts)] if number < count and self.counts else []
            everyone = self.gather_on_main(own)[:: self.tensor_parallel]
            yield from chain.from_iterable(everyone[first:] + everyone[:first])

    @abstractmethod
    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of the rank `source`. Every rank must call this, in the same order."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here. Every rank must call this."""

    def add_no_gradients(self, model: nn.Module, loss: Tensor) -> None:  # noqa: B027  # one process has nothing to do
        """Do what a backward pass of `loss` does for the other ranks: reduce gradients, without any of this rank.

        Args:
            model: The prepared model. Its gradients are those of other batches on this rank, and those of the other ranks.
            loss: The loss of a batch that this rank drops. It may be NaN.
        """

    # -- with a default that fits most drivers -----------------------------------------------------

    def check(self, *, optimizer: object, precision: str) -> None:  # noqa: B027  # most accept all arguments
        """Raise `ValueError` for arguments of a trainer that this driver does not support."""

    def check_model(self, model: nn.Module) -> None:
        """Raise `ValueError` for lazy tensors, and for those on the device ``meta`` to which `prepare` could give no values."""
        if self.device.type != "meta":
            check_can_materialize(model)

    def keep_dumps(self, directory: Path) -> None:  # noqa: B027  # most write none
        """Write the records of collectives to this directory after a failure."""

    def check_trainable(self, model: nn.Module) -> None:  # noqa: B027  # most train all layers
        """Raise `ValueError` if a layer of `model` cannot be trained with this driver."""

    def after_update(self, model: nn.Module, step: int) -> None:  # noqa: B027  # most have nothing to do
        """Called on every rank after each update of the weights, before ``on_after_optimizer_step``. It may communicate.

        A driver that averages weights instead of gradients does it here, such as every eighth step.

        Args:
            model: The prepared model.
            step: The number of the current step, from 1. With several updates in a step, each calls it. An update that the
                loss scale of fp16 skips calls it too.
        """

    def reshard(self, model: nn.Module) -> None:  # noqa: B027  # most keep nothing of a forward pass
        """Free the memory that forward passes without a backward pass have kept. Every rank must call this."""

    def placed(self, stored: Readable) -> Tensor:
        """Read a stored tensor in the layout of this driver: the whole tensor, or the shard of this rank."""
        return stored.read()

    def total_norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        """Return the norm of all gradients, of which some are sharded, shape (). Every rank must call this."""
        return total_norm(gradients, norm_type)

    @property
    def meeting(self) -> Meeting:
        """All ranks, as they exchange values in the thread of the training."""
        return Meeting(self.rank, self.world_size, self.gather_on_main, self.broadcast)

    def aside(self) -> Meeting:
        """Return the ranks, for exchanges in one other thread than that of the training. Every rank must call this."""
        return self.meeting

    def data_shard(self) -> Shard:
        """Return the shard of every loader that this rank reads."""
        return Shard(self.data_rank, self.data_world_size, self.any_rank, self.least, self.count_later)

    def share_buffers(self, model: nn.Module) -> None:  # noqa: B027  # one process has nothing to do
        """Copy the buffers of rank 0, such as BatchNorm statistics, to all ranks. Every rank must call this."""

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:  # noqa: B027  # one process has nothing to do
        """Copy the values of rank 0 into tensors of the same shapes on all ranks. Every rank must call this."""

    def renew(self, model: nn.Module) -> None:  # noqa: B027  # one process has nothing to do
        """Adapt a prepared model to changes of ``requires_grad``. Every rank must call this, between two steps."""

    def watched(
        self,
        look: Callable[[], Post],
        also: Callable[[], object] = lambda: None,
        *,
        most_s: float = math.inf,
        summary: Path | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which this rank posts where it is, for the messages about a rank that is behind.

        Args:
            look: Returns where the training thread is. It is called in another thread, about once a second.
            also: Called in that thread after each post.
            most_s: The longest time between two posts.
            summary: Where the main process writes which ranks are slow.
        """
        return nullcontext()

    def compared(
        self, limit_s: float, caller: Callable[[], tuple[str, str]], warn: Callable[[str], object]
    ) -> AbstractContextManager[None]:
        """Return a context, inside of `watched`, in which each collective is compared over the ranks before it runs.

        Args:
            limit_s: After this time, a rank that does not make the same call is named.
            caller: Returns the callback and moment that calls, or an empty string, and the position in the run with its line.
            warn: Shows a warning.
        """
        return nullcontext()

    def entering(self, where: str) -> AbstractContextManager[None]:
        """Return a context in which a wait without an end names the ranks that did not come. Every rank must call this.

        Args:
            where: The part of the script, such as ``"in evaluate"``.
        """
        return nullcontext()

    def error_at_end(self, error: BaseException | None) -> BaseException | None:
        """Return the error that ended this rank, or else that of another rank, after the last exchange of a run or evaluation.

        Every rank must call this.
        """
        return error

    def first_error(self, error: BaseException) -> BaseException:
        """Send the error that ends this rank to the other ranks. Return it, or the error of the rank that caused it."""
        return error
