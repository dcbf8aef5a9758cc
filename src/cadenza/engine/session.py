"""The engine's side of a run. Hooks see the small `Run`; the engine, adapters and Cadenza's own callbacks use the session."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakMethod, ref

import torch
from torch import nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.engine import accumulating
from cadenza.engine.due_evaluations import DueEvaluations
from cadenza.engine.loss_check import LossCheck
from cadenza.engine.metric_log import MetricLog
from cadenza.engine.module_flags import ModuleFlags
from cadenza.engine.rank_sync import RankSync, TokenCount
from cadenza.engine.shared_sync import SharedSync
from cadenza.engine.step_state import Cursor, Restored, SaveBlocks, Saver, StepState
from cadenza.engine.why_not import why_not
from cadenza.engine.window import AccumulationWindow
from cadenza.errors import drop_tracebacks
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.faults import Closer, Fault
from cadenza.loading import Consumed, ResumableLoader, resumable
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.mixture import set_source
from cadenza.loading.resumable_base import changed
from cadenza.optim.parameters import ExtraParameters, parameters_of
from cadenza.optim.precision import Precision
from cadenza.optim.rates import Rates
from cadenza.optim.settings import Settings
from cadenza.profiling.spans import Timings
from cadenza.records.directory import RunDirectory
from cadenza.records.logs import RankLog
from cadenza.run import Run, Verbs
from cadenza.status.branches import Branch
from cadenza.status.decisions import Decision, Outcome, WhyNot
from cadenza.status.folding import for_screen
from cadenza.status.formats import counted
from cadenza.status.outputs import Window
from cadenza.status.progress import Progress
from cadenza.status.run_info import RunInfo, working_directory
from cadenza.status.state import State

P = ParamSpec("P")
T = TypeVar("T")
logger: logging.Logger = logging.getLogger("cadenza")


class Loops(Enum):
    """The loops that can do the steps of a run."""

    FIT = "the loop of the trainer, with ``compute_loss`` or a ``step_fn``"
    STEPS = "a loop over ``trainer.steps()``, which computes the losses"
    ATTACHED = "a loop of ``attach``, which brings its own data, too"


def session_of(run: Run) -> Session:
    """Return the session behind a run: for adapters and for Cadenza's own callbacks.

    A callback of your own needs `Run` alone. The session has no stable names.
    """
    return cast("Session", run._session)


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Session:
    """The parts of a run, what it knows of itself, and the small objects in which the engine keeps where it is.

    Of those each has one writer: `cursor` and `step` the loop, `metrics` logging, `sync` the exchange between ranks, `restored`
    the resume. All others call their methods.

    A `Run` holds its session. The session and its parts refer to the run and to each other's methods weakly, so the model and
    its tensors are free as soon as the last reference to the run goes, without a garbage collection.
    """

    model: nn.Module
    """The prepared model: placed on the device and, on several ranks, wrapped. `Run.model` is the user's own module."""
    optimizers: list[Optimizer]
    loader: Iterable[Any]
    compute: Callable[[nn.Module, Any], Any]
    """``compute(model, batch)``: the forward pass of training, in the run's precision."""
    driver: Driver
    precision: Precision
    hooks: Hooks
    progress: Progress
    accumulate: int = 1
    step_fn: Callable[[Run, Any], Any] | None = None
    loop: Loops = Loops.FIT
    """Which loop does the steps."""
    tokens: Callable[[Any], int] | None = None
    """Counts the tokens of a batch that is not on the device yet; None: the outputs of a batch may say them."""
    seed: int | None = None
    data_seed: int = 0
    """The random order of the training data depends on this seed, the epoch and the batch alone."""
    replay: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    given: Settings = field(default_factory=Settings)
    directory: Path | None = None
    """The directory in which the main process writes; None if nothing is written."""
    files: RunDirectory | None = None
    """The files in `directory`, on the main process."""
    rank_log: RankLog | None = None
    """The log in `directory`, on the other ranks."""
    home: Path = field(default_factory=working_directory)
    """The working directory when the trainer was made: relative paths of callbacks start there if there is no directory."""
    show: Callable[[Run], str] = repr
    """Returns what notebooks show of the run."""

    device: torch.device = field(init=False)
    is_main: bool = field(init=False)
    cursor: Cursor = field(init=False)
    step: StepState = field(init=False)
    metrics: MetricLog = field(init=False)
    sync: RankSync = field(init=False)
    restored: Restored = field(init=False)
    extra_parameters: ExtraParameters = field(init=False)
    """The trained parameters outside of the model."""
    rates: Rates = field(init=False)
    """The factors on the learning rates."""
    module_flags: ModuleFlags = field(init=False)
    """The flags of the model that hooks changed."""
    branch: Branch = field(default_factory=Branch, init=False)
    """The line of checkpoints to which the run belongs."""
    outcome: Outcome | None = field(default=None, init=False)
    """How the run ended; None while it goes on."""
    profile: Timings | None = field(default=None, init=False)
    state: State = field(default_factory=State, init=False)
    decisions: list[Decision] = field(default_factory=list, init=False)
    faults: list[Fault] = field(default_factory=list, init=False)
    evaluations: dict[str, Evaluation] = field(default_factory=dict, init=False)
    due: DueEvaluations = field(default_factory=DueEvaluations, init=False)
    blocks: SaveBlocks = field(default_factory=SaveBlocks, init=False)
    """The callbacks that block saves."""
    savers: list[Saver] = field(default_factory=list, init=False)
    """The writers of checkpoints."""
    adapters: dict[str, Any] = field(default_factory=dict, init=False)
    """What an adapter of another system keeps of this run, by the system's name."""
    verbs: Verbs | None = field(default=None, init=False)
    """What `Run.backward` and `Run.update` call, in a run that trains."""
    advises: bool = field(default=True, init=False)
    """Whether the notes of the start suggest arguments of the native trainer. The trainer of an adapter has other arguments."""
    _keep: Callable[[str], object] = field(init=False)
    change: Callable[[Any], Any] | None = field(default=None, init=False)  # of each training batch, set in on_setup
    _run: Callable[[], Run | None] = field(default=lambda: None, init=False)
    _after_step: list[Closer] = field(default_factory=list, init=False)
    _after_next_step: list[Closer] = field(default_factory=list, init=False)
    _closers: list[Closer] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        driver, progress = self.driver, self.progress
        self.device, self.is_main = driver.device, driver.is_main
        self.extra_parameters, self.rates = ExtraParameters(self.compute), Rates()
        self.module_flags = ModuleFlags(self.module, self.optimizers)
        self.compute = self.precision.wrap(self.compute)
        self.step_fn = None if self.step_fn is None else self.precision.wrap(self.step_fn)
        is_fit = self.loop is Loops.FIT
        reduce = driver.reduce if driver.reduces and is_fit else None
        window = partial(AccumulationWindow, self.accumulate, reduce, uneven=driver.reduces and not is_fit)
        self.cursor, self.step, self.restored = Cursor(), StepState(window, self.optimizers), Restored()
        may_overflow = self.precision.name == "fp16"
        decide = weakly(self.decide)
        losses = LossCheck(self.step, progress, driver, decide, weakly(self.warn), may_overflow=may_overflow)
        self.metrics = MetricLog(self.hooks, losses, self.files if self.is_main else None, decide)
        self.sync = self._new_sync()
        own = self.files.add_text if self.files is not None else self.rank_log.add if self.rank_log is not None else None
        self._keep = own or (lambda text: None)
        held = ref(self)
        self.step.run = lambda: None if (session := held()) is None else session.run

    def _new_sync(self) -> RankSync:
        decide = weakly(self.decide)
        tokens = TokenCount(self.tokens, self.progress.max_tokens)
        if not self.driver.reduces:
            return RankSync(self.progress, self.cursor, self.step, decide, tokens)
        return SharedSync(
            *(self.driver, self.model, self.hooks, self.progress, self.cursor, self.step, self.metrics.buffer, decide),
            stepped=() if self.step_fn is None or self.loop is not Loops.FIT else self.optimizers,
            uneven=self.loop is not Loops.FIT,
            tokens=tokens,
        )

    # -- what it knows of itself -------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """What hooks receive."""
        run = self._run()
        if run is None:
            self.run = run = Run(self)
        return run

    @run.setter
    def run(self, run: Run) -> None:
        self._run = ref(run)

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.driver.unwrap(self.model)

    @property
    def window(self) -> Window:
        """See `Run.window`."""
        window, optimizers = self.step.shown, tuple(self.step.updating)
        return Window(window.seen, window.size, tuple(window.weights), window.loss_scale, optimizers)

    @property
    def info(self) -> RunInfo:
        """What sinks are given. The id is the same when the run continues, and empty without a directory."""
        continued = self.files is not None and self.files.previous is not None
        id_ = self.files.run_id if self.files else ""
        named = self.cursor.course.samples, self.progress.step + 1
        return RunInfo(id_, self.directory, self.arguments, self.progress.step, continued, self.home, self.accumulate, *named)

    @property
    def checkpoints_directory(self) -> Path | None:
        """The directory of the run's checkpoints; None if nothing is written."""
        return self.directory / "checkpoints" if self.directory else None

    def end(self, outcome: Outcome) -> None:
        """Set how the run ended."""
        self.outcome = outcome
        self.sync.broken = outcome.kind == "failed"

    # -- requests ----------------------------------------------------------------------------------

    def request_stop(self, reason: str, data: Mapping[str, Any] | None = None) -> None:
        """See `Run.stop`."""
        self.sync.requests.ask_stop(self.decide("stopped", reason, data=data))

    def request_end_of_epoch(self, reason: str) -> None:
        """See `Run.end_epoch`."""
        self.sync.requests.ask_end_epoch(self.decide("epoch ended", reason))

    def request_save(self, reason: str) -> None:
        """See `Run.save`."""
        if not self.savers:
            raise RuntimeError("run.save(...) needs a callback that writes checkpoints. Add Checkpoint(...) to callbacks.")
        for saver in self.savers:  # a save that fails is no fault of the callback that requests it
            self._after_step.append(Closer(None, partial(saver.request, reason)))

    def block_saves(self, reason: str) -> AbstractContextManager[None]:
        """See `Run.block_saves`."""
        return self.blocks.block(self.hooks.current_owner() or "the script", reason, self.progress.step)

    def skip_batch(self, reason: str) -> None:
        """See `Run.skip_batch`."""
        if not self.step.may_skip:
            raise RuntimeError("run.skip_batch(...) must be called in on_batch_start or on_before_backward; later is too late.")
        self.sync.check_skip(self.hooks.here().listener)
        self.decide("batch skipped", reason)
        self.step.skip()

    def after_step(self, act: Callable[[], object]) -> None:
        """See `Run.after_step`."""
        self._after_step.append(Closer(self.hooks.here().listener, act))

    def after_next_step(self, act: Callable[[], object]) -> None:
        """Call `act` at the step boundary after this one, or at the end of the epoch."""
        self._after_next_step.append(Closer(self.hooks.here().listener, act))

    def at_end(self, close: Callable[[], object]) -> None:
        """See `Run.at_end`."""
        listener = self.hooks.here().listener
        if listener is None:
            raise RuntimeError(
                "run.at_end(...) must be called inside a hook, such as on_fit_start, so that an error in it can be attributed "
                "to a callback."
            )
        self._closers.append(Closer(listener, close))

    def why_not(self, what: str) -> WhyNot:
        """See `Run.why_not`."""
        return why_not(self, what)

    # -- parts that are replaced -------------------------------------------------------------------

    def replace_loader(self, loader: Iterable[Any]) -> None:
        """See `Run.replace_loader`."""
        self._check_in_setup("replace_loader")
        self.loader = loader

    def replace_model(self, model: nn.Module) -> None:
        """See `Run.replace_model`."""
        self._check_in_setup("replace_model")
        if self.driver.world_size > 1:
            raise RuntimeError(
                "run.replace_model(...) works in one process only. Change the model before Trainer(...) gets it."
            )
        held = {id(parameter) for parameter in parameters_of(self.optimizers)}
        lost = {id(one): name for name, one in self.module.named_parameters() if id(one) in held}
        for parameter in model.parameters():
            lost.pop(id(parameter), None)
        if lost:
            raise ValueError(
                f"run.replace_model(...): the optimizers hold {counted(len(lost), 'parameter')} of the present model "
                "that the new one "
                f"does not have: {', '.join([*lost.values()][:5])}. Keep the parameters, or give the new model to Trainer(...)."
            )
        self.model = self.driver.prepare(model)
        self.module_flags = ModuleFlags(self.module, self.optimizers)

    def replace_precision(self, precision: Precision) -> None:
        """Run the backward pass and the update with `precision`, for an adapter, in ``on_setup``."""
        self.precision = precision

    def reseed_data(self, data_seed: int) -> None:
        """Draw the order of the training data from `data_seed`, for an adapter or a resume."""
        self.data_seed = data_seed

    def open_loader(self, past: Consumed = ()) -> None:
        """Give the training loader a position; `past` is what other ranks did of the current epoch."""
        set_source(None)
        self.cursor.resume(self.new_source(past))

    def new_source(self, past: Consumed = ()) -> ResumableLoader:
        """Return the training loader, readable from any batch of an epoch on."""
        shard, pin = self.driver.data_shard().resumed(past), self.device.type == "cuda"
        options: dict[str, Any] = {"replay": self.replay, "shard": shard, "pin": pin, "permuted": self.cursor.permuted}
        return changed(resumable(self.loader, self.data_seed, **options), self.change)

    def _check_in_setup(self, verb: str) -> None:
        if hasattr(self.cursor, "source"):
            raise RuntimeError(f"run.{verb}(...) must be called in on_setup: later the loader and the model are in use.")

    # -- what it says ------------------------------------------------------------------------------

    def decide(self, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> Decision:
        """Record a decision: `what` in the past tense, plain values in `data`. The author is the running callback."""
        decision = Decision(what, who or self.hooks.current_owner() or "the script", why, self.progress.now(), data or {})
        self.decisions.append(decision)
        if self.files and self.is_main:
            self.files.add_decision(decision.to_dict())
        return decision

    def print(self, text: str) -> None:
        """See `Run.print`."""
        if self.is_main:
            print(for_screen(text, sys.stdout))  # noqa: T201
        self._keep(text)

    def warn(self, text: str) -> None:
        """See `Run.warn`. Ranks that write no ``console.log`` show the warning."""
        if self.is_main or self.directory is None:
            first, *others = text.split("\n")  # the others may be a traceback
            shown = text if logger.hasHandlers() else "\n".join([for_screen(first, sys.stderr), *others])
            logger.warning(shown if self.is_main else f"rank {self.driver.rank}: {text}")
        self._keep(text)

    def report(self, fault: Fault) -> None:
        """Show the error of a callback that is disabled for it or tried again, with its traceback, once."""
        self.faults.append(fault)
        data = {"moment": fault.moment, "error": repr(fault.error)}
        what = "failed" if fault.retried else "disabled"
        self.decide(what, f"{fault.moment} raised {data['error']}", who=fault.callback, data=data)
        self.warn(f"{fault}\n{''.join(traceback.format_exception(fault.error))}".rstrip())
        drop_tracebacks(fault.error)

    # -- for the loop ------------------------------------------------------------------------------

    def reach_boundary(self, *, closing: bool = False, after_step: bool = False) -> None:
        """Run the due evaluations, deliver the step's record, then carry out what waits for the step boundary.

        Every rank must call this. With `after_step`, wait for the other ranks only if this rank has a request, has logged a
        number or has this to do. With `closing`, run no evaluation.
        """
        if (closing or self.due.run(self)) and after_step and self.sync.several:
            self.sync.end_step(acts=bool(self._after_step or self._after_next_step))
        elif self.sync.several:
            self.sync.synchronize()
        if not self.metrics.buffer.idle:
            self.metrics.deliver(self.run, self.progress.now(), wait=closing)
        self.cursor.at_boundary |= not closing
        if self._after_next_step:
            self._after_step, self._after_next_step = self._after_step + self._after_next_step, []
        while self._after_step:
            self.hooks.carry_out([self._after_step.pop(0)], self.run, "after_step")

    def finish_step(self) -> None:
        """Count the step."""
        progress = self.progress
        progress.finish_step()
        self.metrics.losses.end_step()
        if progress.step >= self.step.next_change:
            accumulating.change(self)

    def take_stop(self) -> None:
        """Call ``on_stop``, once, if a stop was requested."""
        self.sync.leaves()  # a request of the last step of an epoch may not be known to all ranks yet
        self.metrics.deliver(self.run, wait=False)  # nor its record have been complete
        stop = self.sync.take_stop()
        if stop is not None and self.outcome is None:
            self.end(Outcome(self.sync.requests.kind, stop.why))
            if self.sync.requests.back is None:
                self.hooks.on_stop(self.run, stop.why)

    def leave_epoch(self) -> None:
        """Reach the boundary after ``on_epoch_end``. A request for the end of this epoch has nothing left to end."""
        self.due.run(self)
        self.sync.requests.drop_epoch()
        self.metrics.losses.end_epoch()
        self.reach_boundary()

    def finish_epoch(self) -> None:
        """Count the epoch if it is whole: all batches seen, or ended on request; and no evaluation before its end is due.

        A run that a limit ends inside an epoch is saved now, as at a stop: a longer run continues in this epoch.
        """
        progress, cursor = self.progress, self.cursor
        if self.due.state is not None:
            return
        if cursor.exhausted or self.sync.requests.end_epoch or progress.batch_in_epoch == progress.batches_per_epoch:
            progress.finish_epoch()
            accumulating.change(self)
            self.hooks.measure(progress)
            cursor.at_boundary = False  # until the hooks of on_epoch_end are called
        elif self.outcome is None:
            for saver in self.savers:
                saver.request("the end of the run")

    def close_of(self, owner: str) -> None:
        """Close what one callback opened, the last one first: it leaves the run before its end."""
        own = [one for one in self._closers if one.listener is not None and one.listener.owner == owner]
        self._closers = [one for one in self._closers if one not in own]
        self.hooks.carry_out(reversed(own), self.run)

    def close(self) -> None:
        """Deliver the last records, then close what callbacks opened, the last one first. An earlier error stays the first."""
        self.sync.close()
        finish = partial(self.reach_boundary, closing=True)
        closers = iter(lambda: self._closers.pop() if self._closers else None, None)  # also those that a closer adds
        # Twice first, for values that are logged while the last record is delivered; once more for those logged in closing.
        self.hooks.carry_out(chain((finish, finish), closers, (finish, self.metrics.close)), self.run)
        for block in self.blocks.open:
            self.warn(f"the run ended while saves were blocked by {block}. Leave the context of run.block_saves() before")


UNDER_WAY: list[Session] = []
"""The runs that this process trains, the one that began last at the end. Loops may take turns, and a hook may train too."""


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls a method and does not keep its object alive."""
    held = WeakMethod(method)

    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        return cast("Callable[P, T]", held())(*arguments, **keywords)

    return call
