"""How tensors and processes are run. Everything outside of this folder asks a driver, also where there is one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cadenza.drivers.sharding import Readable
from cadenza.loading.shards import Share

Reduction = Literal["mean", "sum", "min", "max"]


class Driver(ABC):
    """One way to run: on a single device, or on many ranks."""

    device: torch.device
    """Where this rank's tensors live."""

    rank: int
    """This process among all, from 0."""

    local_rank: int
    """This process among those on this machine, from 0."""

    world_size: int
    """How many processes there are."""

    reduces: bool
    """Whether gradients are reduced over ranks, and so can be held back with `no_sync`."""

    reduces_later = True
    """Whether what was held back can still be reduced by `reduce_gradients`, without another backward pass."""

    in_step = False
    """Whether each forward pass takes all ranks, so that they must do as many, in an evaluation too."""

    shards = False
    """Whether each rank holds a part of every weight."""

    to_device: Callable[[Any], Any]
    """Returns a batch with every tensor in it on the device; raises `DataError` if something cannot be moved."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Return `model` placed on the device and, on many ranks, wrapped or sharded. Every rank must call this."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module inside a prepared one."""

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, gradients are added on this rank only; they are reduced with the last batch of the group."""

    @abstractmethod
    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average over all ranks what was added inside `no_sync` only. Every rank must call this."""

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027  # one process has nothing to do
        """Average over all ranks the gradients of parameters that this driver has not prepared. Every rank must call this."""

    @abstractmethod
    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor:
        """Return `value` reduced over all ranks, shape unchanged. Every rank must call this, in the same order."""

    @abstractmethod
    def reduce_later(self, value: Tensor) -> Callable[[], Tensor]:
        """Begin to add up `value`, on the host, over all ranks; the function returned waits for the sum, and returns it.

        Every rank must call this, in the same order, and the function as well.
        """

    @abstractmethod
    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank. Every rank must call this, in the same order."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank. Every rank must call this, in the same order."""

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value`. Every rank must call this, in the same order."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here. Every rank must call this."""

    # -- what most drivers need not say otherwise --------------------------------------------------

    def check(self, *, optimizer: object, precision: str) -> None:  # noqa: B027  # most take all that a trainer does
        """Raise ValueError for what a trainer is given and this driver cannot do."""

    def settle(self, model: nn.Module) -> None:  # noqa: B027  # most keep nothing of a forward pass
        """Let go of what forward passes without a backward pass have left. Every rank must call this."""

    def placed(self, stored: Readable) -> Tensor:
        """Return a tensor that is stored in parts as this driver shares tensors out: whole, or this rank's part of it."""
        return stored.read()

    def aside(self) -> Callable[[Any], list[Any]]:
        """Return another `gather`, for one thread beside the training. Every rank must call this."""
        return self.gather

    def share(self) -> Share:
        """Return which part of every loader this rank reads."""
        return Share(self.rank, self.world_size, self.any_rank)

    def share_buffers(self, model: nn.Module) -> None:  # noqa: B027  # one process has nothing to do
        """Give every rank the main process's buffers, such as the statistics of BatchNorm. Every rank must call this."""

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:  # noqa: B027  # one process has nothing to do
        """Give every rank the main process's values of tensors that are alike in shape. Every rank must call this."""

    def renew(self, model: nn.Module) -> None:  # noqa: B027  # one process has nothing to do
        """Let a prepared model know that other parameters of it are trained from now on. Every rank must call this.

        Between two steps, when ``requires_grad`` was changed after `prepare`.
        """

    def first_error(self, error: BaseException) -> BaseException:
        """Tell the other ranks of an error that ends this one; return it, or the one of another rank that it comes from."""
        return error
