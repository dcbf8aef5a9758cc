"""The small objects in which the engine keeps where a run is. Each has one writer; others call its methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from cadenza.engine.window import AccumulationWindow
from cadenza.loading import ResumableLoader
from cadenza.loading.data_course import DataCourse
from cadenza.loading.orders import PERMUTED
from cadenza.loading.rng import RNGState
from cadenza.status.outputs import Outputs

if TYPE_CHECKING:
    from cadenza.run import Run


# -- blocked saves ---------------------------------------------------------------------------------


class Saver(Protocol):
    """Writes checkpoints of a run."""

    def request(self, reason: str) -> None:
        """Save the run, at a step boundary."""


class SaveBlock(NamedTuple):
    """A block that is open."""

    owner: str
    """The callback that opened it."""
    reason: str
    step: int
    """The number of complete steps when it was opened."""

    def __str__(self) -> str:
        return f"{self.owner}, since step {self.step}{f' ({self.reason})' if self.reason else ''}"


class SaveBlocks:
    """The blocks of a run on this rank. They may be nested, and may stay open from one moment to another."""

    def __init__(self) -> None:
        self.open: list[SaveBlock] = []
        """The blocks that are open, oldest first."""
        self._left: tuple[SaveBlock, BaseException] | None = None

    @contextmanager
    def block(self, owner: str, reason: str, step: int) -> Iterator[None]:
        """Block saves in a context."""
        block = SaveBlock(owner, reason, step)
        self.open.append(block)
        try:
            yield
        except BaseException as error:
            self._left = block, error
            raise
        finally:
            self.open.remove(block)

    def left_by(self, error: BaseException) -> SaveBlock | None:
        """Return the block that this error, or its cause, left in the middle; None if there is none."""
        if self._left is not None and self._left[1] in (error, error.__cause__):
            return self._left[0]
        return None


class Cursor:
    """The position of a run in its training loader, and between or inside steps. Written by the loop."""

    __slots__ = ("at_boundary", "batches", "course", "exhausted", "in_epoch", "permuted", "source")

    source: ResumableLoader
    """The training loader, readable from any batch of an epoch on."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())
        """The iterator of the current epoch."""
        self.course: DataCourse = DataCourse()
        """The batches that each step has read, as ``run.json`` and checkpoints hold them."""
        self.in_epoch: bool = False
        """Whether an epoch has begun and ``on_epoch_end`` is still to come."""
        self.exhausted: bool = False
        """Whether the loader has no more batches in this epoch."""
        self.at_boundary: bool = True
        """Whether the run is between two steps, after all hooks of the last one, and of the epoch if it is over."""
        self.permuted: int = PERMUTED
        """The largest number of samples with the order of ``torch.randperm``; see `resumable`."""

    def resume(self, source: ResumableLoader) -> None:
        """Read from `source`, which is at another position."""
        self.source = source

    def leave_boundary(self) -> None:
        """Note that hooks run: a save waits for the next boundary."""
        self.at_boundary = False

    def leave_epoch(self) -> None:
        """End the current epoch."""
        self.batches, self.in_epoch, self.exhausted = iter(()), False, False

    def close(self) -> None:
        """End the workers of the training loader."""
        self.batches = iter(())
        self.source.close()


class StepState:
    """The current batch and the batches of the current step. Written by the loop."""

    __slots__ = (
        *("batch", "counted", "derived", "discarded", "dropped", "drops", "guard", "in_update", "last_window", "left_out"),
        *("may_skip", "most", "next_change", "outputs", "owner", "raised", "run", "shown", "skipping"),
        *("undone", "updated", "updates", "updating", "weight_unit", "window"),
    )

    def __init__(self, window: Callable[[], AccumulationWindow], optimizers: Sequence[Optimizer]) -> None:
        self.window: AccumulationWindow = window()
        self.last_window: AccumulationWindow = window()
        """The accumulation windows of the current step and of the last one."""
        self.shown: AccumulationWindow = self.window
        """That of the current step or, between two steps, of the last one."""
        self.most: int = self.window.size
        """The most batches that a step of the run has."""
        self.weight_unit: float | None = None
        """What loss scales of several ranks assume as the weight of each batch, in the whole run."""
        self.next_change: float = math.inf
        """The number of complete steps at which the size of the windows may change."""
        self.batch: Any = None
        """The current batch, on the device."""
        self.counted: bool = True
        """Whether the progress of the run counts the current batch."""
        self.outputs: Outputs = Outputs()
        """The outputs of the current batch: the same object until the next batch starts."""
        self.run: Callable[[], Run | None] | None = None
        self.derived: dict[str, Callable[[Run], Any]] = {}
        """Functions of the run by the name of the output that they compute; see `Derive`."""
        self.skipping: bool = False
        """Whether the current batch is dropped, on all ranks."""
        self.dropped: bool = False
        """Whether this rank alone drops the current batch."""
        self.undone: bool = False
        """Whether the current batch is dropped as if it was never read: what its forward pass changed is restored."""
        self.guard: float = 0
        """The number of the last step in which a batch may be dropped in this way; 0: in none."""
        self.discarded: bool = False
        """Whether the current batch is dropped, on all ranks or on this one."""
        self.drops: int = 0
        """How many ranks have dropped their current batch alone; 0 until the batch is over."""
        self.may_skip: bool = False
        """Whether the current batch can still be dropped."""
        self.raised: BaseException | None = None
        """What a verb of the run raised in a custom loop, until its next batch."""
        self.owner: object = None
        """What stands for the current step in a loop of the user's own."""
        self.updating: Sequence[Optimizer] = optimizers
        """The optimizers that the current step updates."""
        self.in_update: bool = False
        """Whether the optimizers step now."""
        self.updates: int = 0
        """How often the optimizers have stepped in this session."""
        self.updated: bool = True
        """Whether the last update took place, of one optimizer at least; fp16 skips it when gradients overflow."""
        self.left_out: Sequence[Optimizer] = ()
        """The optimizers that skipped their last update for this reason."""

    def begin(self) -> None:
        """Begin a step."""
        self.window.clear()
        self.shown = self.window

    def begin_batch(self, batch: Any) -> None:
        """Replace the current batch."""
        self.batch, self.counted, self.raised = batch, False, None
        self.outputs = outputs = Outputs()
        if self.derived:
            outputs.run, outputs.derived = self.run, self.derived
        self.skipping, self.may_skip, self.dropped, self.drops, self.discarded = False, True, False, 0, False
        self.undone = False

    def skip(self, *, undone: bool = False) -> None:
        """Drop the current batch. `undone`: what its forward pass changed must be restored."""
        self.skipping = self.discarded = True
        self.undone = undone

    def drop(self, *, undone: bool = False) -> None:
        """Drop the current batch on this rank alone. `undone`: as for `skip`."""
        self.dropped = self.discarded = True
        self.undone = undone

    def finish(self) -> None:
        """End the step: its accumulation window becomes the last one."""
        self.window, self.last_window = self.last_window, self.window

    def resize(self, batches: int) -> None:
        """Have the next steps hold so many batches."""
        self.window.resize(batches)
        self.last_window.resize(batches)

    def undo_update(self) -> None:
        """Count the last update as skipped: a callback has restored the weights."""
        self.updated = False


class Restored:
    """What a run that continues takes from its checkpoint later. Written by restore."""

    __slots__ = ("callback_states", "config", "gradients", "recovery", "rng_state")

    def __init__(self) -> None:
        self.rng_state: RNGState | None = None
        """The RNG state to continue with."""
        self.gradients: Sequence[tuple[Tensor, Tensor]] = ()
        """Parameters, and the gradients that a ``step_fn`` or an attached loop had left in them."""
        self.recovery: Mapping[str, Any] | None = None
        """The data of the rollback with which the present branch began; see `GoBack`."""
        self.config: dict[str, Any] = {}
        """The configuration of the run at its start, before training or a checkpoint changed it."""
        self.callback_states: Mapping[str, Mapping[str, Any]] = {}
        """The states by callback, for what must be known in ``on_setup``."""

    @property
    def pending(self) -> bool:
        """Whether the run has not restored all of its checkpoint yet, so its state is no state of its own."""
        return self.rng_state is not None

    def put(self, *, rng_state: RNGState | None = None, gradients: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Continue with this RNG state and these gradients."""
        self.rng_state, self.gradients = rng_state, gradients

    def expect(self, callback_states: Mapping[str, Mapping[str, Any]]) -> None:
        """Announce the states of callbacks, before they are restored."""
        self.callback_states = callback_states

    def take_rng_state(self) -> None:
        """Set the RNG state of the checkpoint, once."""
        if self.rng_state is not None:
            self.rng_state.restore()
            self.rng_state = None

    def take_gradients(self) -> None:
        """Set the gradients of the checkpoint, once."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        self.gradients = ()
