"""The live run: parts, counters, state; what every hook receives."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from torch import Tensor
from torch.optim import Optimizer

from cadenza.engine import agreement, loop
from cadenza.engine.losses import LossCheck
from cadenza.engine.parts import Parts
from cadenza.engine.switches import Switches
from cadenza.hooks.dispatch import Closer, Fault, Hooks
from cadenza.hooks.habits import FLAGS, RUN, advised
from cadenza.loading import Past, Positioned, positioned
from cadenza.loading.batches import Group
from cadenza.loading.seeding import Streams
from cadenza.optim.outside import Outside
from cadenza.optim.rates import Rates
from cadenza.records import delivery
from cadenza.records.directory import RunDirectory, console_of
from cadenza.records.history import History
from cadenza.records.record import Book, Loggable
from cadenza.records.writer import Writer
from cadenza.status.branches import Branch
from cadenza.status.decisions import Decision, Outcome, why
from cadenza.status.outputs import Outputs
from cadenza.status.progress import Progress
from cadenza.status.requests import Requests
from cadenza.status.run_info import RunInfo
from cadenza.status.state import State

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.profiling.timings import Timings

P = ParamSpec("P")
logger = logging.getLogger("cadenza")


@advised(RUN, refused=FLAGS, once=("accumulate", "seed"))
class Run:
    """One execution. Hooks read it, and change its course by its verbs: `stop`, `end_epoch`, `skip_batch`, `log`."""

    updated = True
    """Whether the last update took place, of one optimizer at least; fp16 leaves it out when gradients overflow."""
    left_out: Sequence[Optimizer] = ()
    """The optimizers that skipped their last update for this reason."""
    at_border = True
    """Whether no step is under way, and all callbacks heard the end of the last one; likewise of the epoch."""
    in_epoch = False
    """Whether an epoch is under way whose end is still to be heard."""
    exhausted = False
    """Whether the loader has no more batches in this epoch."""
    skipping = False
    """Whether the batch under way is to be dropped."""
    may_skip = False
    """Whether the batch under way can still be dropped."""
    source: Positioned
    """The training loader as the loop reads it: from any batch of an epoch on."""
    outcome: Outcome | None = None
    """How the run ended; None while it goes on."""
    branch = Branch()
    """The line of checkpoints that the run is on."""
    profile: Timings | None = None
    """What took how long, if a `Profile` is in the list."""

    def __init__(self, parts: Parts, hooks: Hooks, progress: Progress, directory: RunDirectory | None = None) -> None:
        self.model = parts.model
        """The prepared model: placed on the device and, on many ranks, wrapped."""
        self.optimizers, self.loader = parts.optimizers, parts.loader
        """The training loader; may be replaced in ``on_setup``."""
        self.compute = parts.precision.wrap(parts.compute)
        """``compute(model, batch)``: the forward pass of training, in the run's precision."""
        self.outside = Outside(parts.compute)
        self.step_fn = None if parts.step_fn is None else parts.precision.wrap(parts.step_fn)
        self.driver = parts.driver
        self.device, self.is_main = parts.driver.device, parts.driver.is_main
        """Where this rank's tensors live; and whether it prints and writes."""
        self.precision, self.accumulate = parts.precision, parts.accumulate
        self.seed, self.replay, self.arguments, self.given = parts.seed, parts.replay, parts.arguments, parts.given
        self.hooks, self.progress = hooks, progress
        """Who is called; and counters of completed work, with the limits."""

        self.batch: Any = None
        """The batch under way, on the device."""
        self.outputs = Outputs()
        """What the batch under way gave: the same object until the next batch starts."""
        self.derived: dict[str, Callable[[Run], Any]] = {}
        """Functions of the run by the name of the output that they compute; see `Derive`."""
        self.evaluations: dict[str, Evaluation] = {}
        """The evaluations that will take place, by name."""
        self.guests: dict[str, Any] = {}
        """What a dialect of callbacks keeps of this run, by its name."""
        self.updating: Sequence[Optimizer] = self.optimizers
        """The optimizers that the step under way updates."""

        self.state = State()
        """Yours: saved in checkpoints and restored."""
        self.history = History()
        """Every record's numbers."""
        self.decisions: list[Decision] = []
        """Every stop, skip, evaluation, disabled callback."""
        self.faults: list[Fault] = []
        """Errors of callbacks that were disabled for them."""

        reduce = parts.driver.reduce if parts.driver.reduces else None
        self.group, self.last_group = Group(parts.accumulate, reduce), Group(parts.accumulate, reduce)
        """The batches of the step under way, and those of the last one."""
        self.batches: Iterator[Any] = iter(())
        """The training loader's iterator in this epoch."""
        self.data_seed: int = parts.data_seed
        """What is random in the training data depends on it, the epoch and the batch alone."""
        self.streams: Streams | None = None
        """Random streams to go on with, of a run that continues."""
        self.gradients: list[tuple[Tensor, Tensor]] = []
        """Parameters and what a ``step_fn`` had left as their gradients, of a run that continues."""
        self.weight_sets: dict[str, Callable[[], AbstractContextManager[None]]] = {}
        """By name, averaged weights: inside of what the function returns, the model holds them."""
        self.rates, self.switches = Rates(), Switches(parts.driver.unwrap(parts.model), parts.optimizers)
        """What scales the learning rates; and what hooks froze, let go, or put in another mode."""
        self.former: dict[str, dict[str, Any]] = {}
        """By callback, the states in the checkpoint at which the run continues: for what must be known in ``on_setup``."""
        self.requests = Requests()
        """What was asked for and is not taken yet."""
        self.writer = Writer()
        """The thread for what may block."""
        self.book, self.word, self.losses = Book(), agreement.Word(), LossCheck()
        """What was logged and is not handed out yet; what the ranks exchange; and which losses are not finite."""
        self._directory, self._place, self._home = directory, parts.directory, parts.home
        self._keep = console_of(directory, parts.directory, parts.driver.rank)
        self.savers: list[Callable[[Run, str], object]] = []
        """What writes a checkpoint of this run, for a reason."""
        self._at_border, self._closers = list[Closer](), list[Closer]()

    @property
    def directory(self) -> Path | None:
        """Where the run writes, on all ranks, of which the main one alone does; None if nothing is written."""
        return self._place

    @property
    def id(self) -> str:
        """What tells this run from all others; the same when it is continued. Empty without a directory."""
        return self._directory.run_id if self._directory else ""

    @property
    def facts(self) -> RunInfo:
        """What sinks must know of it."""
        continued = self._directory is not None and self._directory.former is not None
        return RunInfo(self.id, self.directory, self.arguments, self.progress.step, continued, self._home)

    @property
    def directory_of_checkpoints(self) -> Path | None:
        """Where the run's checkpoints lie; None if nothing is written."""
        return self._place / "checkpoints" if self._place else None

    @property
    def loss(self) -> Tensor | None:
        """The mean loss of the last step's batches, undivided, shape (), on the device; None before the first.

        Reading it does not wait for the device; converting it to a number does.
        """
        return self.last_group.mean_loss()

    def loss_of_all_ranks(self) -> Tensor | None:
        """Return the (weighted) mean of `loss` over all ranks. Every rank must call this, in the same order."""
        return agreement.loss(self)

    def _repr_html_(self) -> str:
        """Return what notebooks show of it."""
        from cadenza.report import small  # here, as most runs are in no notebook

        return small(self)

    # -- verbs: requests with a reason, taken at a fixed place -------------------------------------

    def stop(self, reason: str, *, data: Mapping[str, Any] | None = None) -> None:
        """Ask for the end of the run at the end of the step under way; the first request counts. One rank may, for all."""
        self.requests.ask_stop(self.decide("stopped", reason, data=data))

    def save(self, reason: str) -> None:
        """Ask for a checkpoint at the border of the step under way, when all have heard its end. Every rank must call this.

        Raises:
            RuntimeError: No callback writes checkpoints.
        """
        if not self.savers:
            raise RuntimeError("nobody writes checkpoints in this run; add Checkpoint(...) to its callbacks")
        for saver in self.savers:
            self.at_next_border(partial(saver, self, reason))

    def at_next_border(self, act: Callable[[], object]) -> None:
        """Have `act` called when the step under way is complete, its end was heard by all, and its record is out."""
        self._at_border.append(Closer(self.hooks.speaker() or "the run", act))

    def end_epoch(self, reason: str) -> None:
        """Ask for the end of the epoch at the end of the step under way; it counts as whole. One rank may, for all."""
        self.requests.ask_end_epoch(self.decide("epoch ended", reason))

    def skip_batch(self, reason: str) -> None:
        """Drop the gradient of the batch under way; one rank may, for all.

        Raises:
            RuntimeError: Asked for outside of ``on_batch_start`` and ``on_before_backward``: it would come too late.
        """
        if not self.may_skip:
            raise RuntimeError("skip_batch must be asked for in on_batch_start or on_before_backward; later is too late")
        self.decide("batch skipped", reason)
        self.skipping = True

    def log(self, name: str | dict[str, Loggable], value: Loggable | None = None) -> None:
        """Note a value, or a dict of them, for this step's record; its numbers are means over the ranks that log them.

        Args:
            name: Such as ``"train/lr"``.
            value: A number, a tensor of shape () (it leaves the device with all others, without stalling it), or an
                `Image`, `Audio`, `Figure`, `Histogram` or `Text`.

        Raises:
            TypeError: The value is none of these.
        """
        if isinstance(name, dict):
            for key, one in name.items():
                self.book.add(key, one)
        else:
            self.book.add(name, value)

    def fire(self, moment: Callable[Concatenate[Any, Run, P], None], *arguments: P.args, **keywords: P.kwargs) -> None:
        """Call a moment of your own, such as ``PruneMoments.on_prune``, on all that hear it. Every rank should call this.

        Raises:
            MomentError: `moment` is not declared in a class with ``declares=True``, or the arguments do not fit it.
        """
        self.hooks.fire(moment, self, *arguments, **keywords)

    def decide(self, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> Decision:
        """Record a decision: `what` in the past tense, plain values in `data`. Its author is the callback whose hook runs."""
        decision = Decision(what, who or self.hooks.speaker() or "the script", why, self.progress.now(), data or {})
        self.decisions.append(decision)
        if self._directory and self.is_main:
            self._directory.add_decision(decision.to_dict())
        return decision

    def at_end(self, close: Callable[[], object]) -> None:
        """Have `close` called when the last record is out, after ``on_fit_end``: the place to close files and connections.

        For hooks only. An error in it is the callback's own, and ``on_fault`` says what it does.
        """
        owner = self.hooks.speaker()
        if owner is None:
            raise RuntimeError("at_end is asked for in a hook, such as on_fit_start: outside of one there is nobody to blame")
        self._closers.append(Closer(owner, close))

    def why(self, what: str) -> str:
        """Return in a sentence why something, such as ``"stopped"``, was decided last.

        >>> from cadenza.testing import tiny_run
        >>> tiny_run(steps=1).why("stopped")
        "nothing was 'stopped' in this run. Decided were: nothing"
        """
        return why(what, self.decisions)

    def print(self, text: str) -> None:
        """Show a line to the user, on the main process only; each rank keeps it in its own ``console.log``."""
        if self.is_main:
            print(text)  # noqa: T201
        self._keep(text)

    def warn(self, text: str) -> None:
        """Show a warning on stderr through ``logging``, and keep it as `print` does; other ranks show what they cannot keep."""
        if self.is_main or self._place is None:
            logger.warning(text if self.is_main else f"rank {self.driver.rank}: {text}")
        self._keep(text)

    def report(self, fault: Fault) -> None:
        """Show the error of a callback that is disabled for it, with its traceback, once."""
        self.faults.append(fault)
        data = {"moment": fault.moment, "error": repr(fault.error)}
        self.decide("disabled", f"{fault.moment} raised {data['error']}", who=fault.callback, data=data)
        self.warn(f"{fault}\n{''.join(traceback.format_exception(fault.error))}".rstrip())

    # -- for a step_fn: the same moments as in the loop --------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, with the moments around it. For a ``step_fn``. Every rank must call this.

        They are added to every parameter that took part, also to those of an optimizer that is not updated next:
        ``requires_grad_(False)`` keeps these out.

        Args:
            loss: Shape (); a callback may put another in its place.

        Raises:
            LossError: `loss` is not a tensor of shape () that has a gradient.
        """
        with self.precision.outside():
            loop.backward(self, Outputs(loss=loss))

    def update(self, *optimizers: Optimizer) -> None:
        """Let `optimizers` (none: all) update the weights, drop the gradients. For a ``step_fn``. Every rank must call this."""
        with self.precision.outside():
            loop.update(self, optimizers or self.optimizers)

    # -- for the loop ------------------------------------------------------------------------------

    def finish_step(self) -> None:
        """Count the step; its batches are now those of the last one."""
        self.group, self.last_group = self.last_group, self.group
        self.progress.finish_step()

    def begin_batch(self, batch: Any) -> None:
        """Forget the last batch; take this one."""
        self.batch = batch
        self.outputs = outputs = Outputs()
        if self.derived:
            outputs.run, outputs.derived = self, self.derived
        self.skipping, self.may_skip = False, True

    @property
    def stopping(self) -> Decision | None:
        """The stop that was asked for on this rank, if one was."""
        asked = self.requests
        noted = asked.stop or asked.signalled
        if asked.signal is not None and noted is None and self.driver.world_size == 1:  # else when all agreed
            noted = asked.signalled = agreement.stopped_by_signal(self, asked.signal)
        return noted

    def open_source(self, past: Past = ()) -> None:
        """Give the training loader a position; `past` is what others did of the epoch under way."""
        share, pin = self.driver.share().after(past), self.device.type == "cuda"
        self.source = positioned(self.loader, self.data_seed, replay=self.replay, share=share, pin=pin)

    def restore_streams(self) -> None:
        """Put the random streams of the checkpoint back, once."""
        if self.streams is not None:
            self.streams.restore()
            self.streams = None

    def offsets(self) -> dict[str, int]:
        """Return how far the run's files are written, by name."""
        return self._directory.offsets() if self._directory else {}

    def sync_files(self) -> None:
        """Have records and decisions outlive a power cut; callable from any thread. Raises OSError."""
        if self._directory:
            self._directory.sync()

    def settle(self, *, closing: bool = False) -> None:
        """Hand out the step's record, then do what was put off to the border of the step. Every rank must call this."""
        if agreement.together(self):
            self.word.settle(self)
        self.flush(wait=closing)
        self.at_border |= not closing
        while self._at_border:
            act = self._at_border.pop(0)
            with self.hooks.during("border", act.owner):
                act()

    @property
    def over(self) -> bool:
        """Whether no further step is to be done. Every rank must ask, in the same order."""
        return self.progress.finished or agreement.ending(self)

    @property
    def leaving_epoch(self) -> bool:
        """Whether no further step is to be done in this epoch. Every rank must ask, in the same order."""
        return self.exhausted or self.progress.finished or agreement.leaving(self)

    def finish_epoch(self) -> None:
        """Count the epoch if it is whole: all batches seen, or ended on request."""
        progress = self.progress
        if self.exhausted or self.requests.end_epoch or progress.batch_in_epoch == progress.batches_per_epoch:
            progress.finish_epoch()
            self.at_border = False  # until the end of the epoch was heard

    def close(self) -> None:
        """Hand out the last records, then close what callbacks opened, the last one first. An earlier error stays the first."""
        closers, self._closers = self._closers, []
        settle = partial(self.settle, closing=True)
        # Twice at first, for what was logged while the last record was handed out; at last what the closing gave rise to.
        self.hooks.carry_out([settle, settle, *reversed(closers), settle, self.writer.stop], self)

    def flush(self, *, wait: bool = False) -> None:
        """Hand closed records to history, directory and sinks; with `wait` also those whose numbers are on their way."""
        if self.book.idle:
            return
        self.book.close(self.progress.now())
        self.hand_out(wait=wait)

    def hand_out(self, *, wait: bool) -> None:
        """Hand out the closed records that have arrived; with `wait` all of them, so that they are part of a checkpoint."""
        delivery.deliver(self, self.book.ready(wait=wait), self._directory)
