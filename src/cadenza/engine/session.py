"""The engine's side of a run. Hooks see the small `Run`; the engine, adapters and Cadenza's own callbacks use the session."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakMethod, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.engine.metric_log import LossCheck, MetricLog
from cadenza.engine.module_state import ModuleFlags
from cadenza.engine.rank_sync import RankSync, SharedSync
from cadenza.engine.step_state import AccumulationWindow, Cursor, DueEvaluations, Restored, SaveBlocks, Saver, StepState
from cadenza.errors import drop_tracebacks
from cadenza.hooks.dispatch import Closer, Fault, Hooks
from cadenza.loading.evaluation import Evaluation
from cadenza.optim.parameters import ExtraParameters
from cadenza.optim.precision import Precision
from cadenza.optim.rates import Rates
from cadenza.optim.settings import Settings
from cadenza.records.directory import RunDirectory
from cadenza.records.logs import RankLog
from cadenza.status.decisions import Decision, Outcome
from cadenza.status.encoding import State
from cadenza.status.formats import for_screen
from cadenza.status.progress import Progress
from cadenza.status.run_info import working_directory

if TYPE_CHECKING:
    from cadenza.run import Run

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
    return run._session


class Verbs(Protocol):
    """What `Run.backward` and `Run.update` do: in a ``step_fn``, or in a custom loop."""

    def backward(self, loss: Tensor, into: Optimizer | Sequence[Optimizer] | None = None) -> None: ...
    def update(self, arguments: Sequence[Any]) -> Any: ...
    def check_window(self) -> None: ...


@dataclass(kw_only=True, eq=False, slots=True, weakref_slot=True)
class Session:
    """The parts of a run, what it knows of itself, and the small objects in which the engine keeps where it is.

    Of those each has one writer: `cursor` and `step` the loop, `metrics` logging, `sync` the exchange between ranks, `restored`
    the resume. All others call their methods.

    A `Run` holds its session. The session and its parts refer to the run and to each other's methods weakly, so the model and
    its tensors are free as soon as the last reference to the run goes, without a garbage collection.
    """

    model: nn.Module
    """The prepared model: placed on the device and, on multiple ranks, wrapped. `Run.model` is the user's own module."""
    optimizers: list[Optimizer]
    loader: Iterable[Any]
    compute: Callable[[nn.Module, Any], Any]
    """``compute(model, batch)``: the forward pass of training, in the run's precision."""
    driver: Driver
    precision: Precision
    hooks: Hooks
    progress: Progress
    make_run: Callable[[Session], Run]
    """Makes what hooks receive."""
    accumulate: int = 1
    step_fn: Callable[[Run, Any], Any] | None = None
    loop: Loops = Loops.FIT
    """Which loop does the steps."""
    tokens: Callable[[Any], int] | None = None
    """Counts the tokens of a batch that is not on the device yet; None: the outputs of a batch may say them."""
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
    outcome: Outcome | None = field(default=None, init=False)
    """How the run ended; None while it goes on."""
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
    _run: Callable[[], Run | None] = field(default=lambda: None, init=False)
    acts: PendingActions = field(init=False)
    """What waits for a step boundary, or for the end of the run."""

    def __post_init__(self) -> None:
        driver, progress = self.driver, self.progress
        self.acts = PendingActions(self.hooks)
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
        losses = LossCheck(self.step, progress, driver, decide, weakly(self.warn), may_overflow)
        self.cursor.replay = self.replay
        self.metrics = MetricLog(self.hooks, losses, self.files if driver.is_main else None, decide)
        self.sync = self._new_sync()
        own = self.files.add_text if self.files is not None else self.rank_log.add if self.rank_log is not None else None
        self._keep = own or (lambda text: None)
        held = ref(self)
        self.step.run = lambda: None if (session := held()) is None else session.run

    def _new_sync(self) -> RankSync:
        own = self.progress, self.cursor, self.step, weakly(self.decide), self.tokens
        if not self.driver.reduces:
            return RankSync(*own)
        is_fit = self.loop is Loops.FIT
        stepped = self.optimizers if is_fit and self.step_fn is not None else ()
        return SharedSync(*own, self.driver, self.model, self.hooks, self.metrics.buffer, stepped, not is_fit)

    # -- what it knows of itself -------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """What hooks receive."""
        if (run := self._run()) is None:
            run = self.make_run(self)
            self._run = ref(run)
        return run

    @property
    def module(self) -> nn.Module:
        """The user's own module."""
        return self.driver.unwrap(self.model)

    def end(self, outcome: Outcome) -> None:
        """Set how the run ended."""
        self.outcome = outcome
        self.sync.broken = outcome.kind == "failed"

    # -- what it says ------------------------------------------------------------------------------

    def decide(self, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> Decision:
        """Record a decision: `what` in the past tense, plain values in `data`. The author is the running callback."""
        decision = Decision(what, who or self.hooks.current_owner() or "the script", why, self.progress.now(), data or {})
        self.decisions.append(decision)
        if self.files and self.driver.is_main:
            self.files.add_decision(decision.to_dict())
        return decision

    def print(self, text: str) -> None:
        """See `Run.print`."""
        if self.driver.is_main:
            print(for_screen(text, sys.stdout))  # noqa: T201
        self._keep(text)

    def warn(self, text: str) -> None:
        """See `Run.warn`. Ranks that write no ``console.log`` show the warning."""
        if self.driver.is_main or self.directory is None:
            first, *others = text.split("\n")  # the others may be a traceback
            shown = text if logger.hasHandlers() else "\n".join([for_screen(first, sys.stderr), *others])
            logger.warning(shown if self.driver.is_main else f"rank {self.driver.rank}: {text}")
        self._keep(text)

    def report(self, fault: Fault) -> None:
        """Show the error of a callback that is disabled for it or tried again, with its traceback, once."""
        self.faults.append(fault)
        data = {"moment": fault.moment, "error": repr(fault.error)}
        what = "failed" if fault.retried else "disabled"
        self.decide(what, f"{fault.moment} raised {data['error']}", who=fault.callback, data=data)
        self.warn(f"{fault}\n{''.join(traceback.format_exception(fault.error))}".rstrip())
        drop_tracebacks(fault.error)


class PendingActions:
    """What callbacks have asked for at a later point of the run."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.next: list[Closer] = []
        """At the next step boundary, in order."""
        self.later: list[Closer] = []
        """At the boundary after it."""
        self.closers: list[Closer] = []
        """At the end of the run: the last one first."""

    def after_step(self, act: Callable[[], object]) -> None:
        """See `Run.after_step`."""
        self.next.append(Closer(self._hooks.here().listener, act))

    def after_next_step(self, act: Callable[[], object]) -> None:
        """Call `act` at the step boundary after this one, or at the end of the epoch."""
        self.later.append(Closer(self._hooks.here().listener, act))


UNDER_WAY: list[Session] = []
"""The runs that this process trains, the one that began last at the end. Loops may take turns, and a hook may train too."""


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls a method and does not keep its object alive."""
    held = WeakMethod(method)

    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        return cast("Callable[P, T]", held())(*arguments, **keywords)

    return call
