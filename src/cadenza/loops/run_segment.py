"""The arguments of a run, and the run from its first file to its last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.checkpoint import resumption
from cadenza.checkpoint.resumption import Start, chosen_on_all_ranks
from cadenza.checkpoint.snapshot import config_of
from cadenza.drivers import Driver
from cadenza.engine import boundary, start_checks
from cadenza.engine.arguments import absolute_folder, check_not_empty, checked_accumulate, checked_debugging, plain_accumulate
from cadenza.engine.error_context import caller, whereabouts
from cadenza.engine.loop import Open, Training
from cadenza.engine.module_state import BackwardOfGraphs, breaks_so_far, compile_model, has_graphs
from cadenza.engine.monitor import monitors_in
from cadenza.engine.plan import LIMITS, Plan, plan_changes, plan_in
from cadenza.engine.session import UNDER_WAY, Loops, Session
from cadenza.engine.step_state import SharedProgress
from cadenza.errors import DirectoryError, add_note
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.lazy import imported
from cadenza.loading import num_batches
from cadenza.loading.loaders import check_loader
from cadenza.loading.rng import derive_seed, draw_seed, seed_all
from cadenza.loading.settings import loader_hints, with_batch_size
from cadenza.loops.argument_texts import arguments_of, described, frozen_modes, plain
from cadenza.loops.foreign_callbacks import adapted_list, before_fit, beforehand
from cadenza.loops.steps import end_abandoned
from cadenza.optim import optimizers as updates
from cadenza.optim.model_state import Walk
from cadenza.optim.optimizers import Optimizers
from cadenza.optim.parameters import ModelParameters, modules_of
from cadenza.optim.precision import precision_of
from cadenza.optim.settings import Settings
from cadenza.records.directory import RunDirectory
from cadenza.records.logs import RankLog
from cadenza.run import Run
from cadenza.status import stragglers
from cadenza.status.decisions import RESUMABLE, GoBack
from cadenza.status.progress import Counters, Progress
from cadenza.status.reprs import brief
from cadenza.status.run_info import working_directory
from cadenza.status.signals import exit_after_signal


@dataclass(kw_only=True, eq=False, repr=False)
class TrainerArguments:
    """The arguments of a run, and the session that is made of them. `repr` and notebooks show those that are set."""

    max_epochs: int | None
    max_steps: int | None
    max_tokens: int | None
    tokens: Callable[[Any], int] | None
    accumulate: int
    model: nn.Module
    optimizer: Optimizers
    loader: Iterable[Any]
    compute_loss: Callable[[nn.Module, Any], Any]
    precision: str
    seed: int | None
    step_fn: Callable[[Run, Any], Any] | None
    directory: Path | None
    callbacks: list[BaseCallback]
    driver: Driver
    debug_ranks: bool | float
    compile: InitVar[dict[str, Any] | None]
    notes: InitVar[list[str]]  # for the plan

    def __post_init__(self, compile: dict[str, Any] | None, notes: list[str]) -> None:
        self._compile: dict[str, Any] | None = compile
        self._step_compiler: Any = None  # of ``compile="step"``
        if compile is not None and compile.pop("step", False):
            wing, own_step = imported("cadenza.compiled.step", needed_by="compile='step'"), self.step_fn is not None
            self._step_compiler = wing.StepCompiler(compile, self.driver, self.precision, own_step=own_step)
            self._compile = None
        self._notes, self._home = notes, working_directory()
        self._names_ranks_after_s = checked_debugging(self.debug_ranks)  # None: calls of the ranks are not compared
        self._facts: dict[str, Any] = {}  # what an adapter adds to the arguments that sinks get
        self._run: Run | None = None  # that began last
        self._last_progress: Progress | None = None  # of the last run that trained

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in arguments_of(self))})"

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from cadenza.status.markup import notebook_table  # imported here: few runs are in a notebook

        return notebook_table(type(self).__name__, (), arguments_of(self))

    def _hooks(self) -> Hooks:
        """Return a dispatch of the callbacks that are in the list now."""
        self.callbacks = adapted_list(self.callbacks)  # with those of other systems that were added to it
        return Hooks(self.callbacks)

    @property
    def _own_optimizer(self) -> bool:
        """Whether the settings of the optimizers stay as they are given."""
        return not callable(self.optimizer) or updates.is_kept(self.optimizer)

    def _checked(self, optimizers: object) -> list[Optimizer]:
        own_step = self.step_fn is not None or updates.is_kept(self.optimizer)
        checked = updates.checked(optimizers, self.model, own_step=own_step)
        if self._step_compiler is not None:
            self._step_compiler.check_optimizers(checked)
        return checked

    def _plan(self, optimizers: Sequence[Optimizer], hooks: Hooks, session: Session | None = None) -> Plan:
        compiled = (
            None
            if self._compile is None
            else " ".join(
                f"{name}={value if isinstance(value, str) else brief(value)}" for name, value in self._compile.items()
            )
        )
        compiled = compiled if self._step_compiler is None else "step"
        facts = {"on": self.driver.device, "in": self.precision, "compiled": compiled, "seed": self.seed}
        facts = {name: value for name, value in (*facts.items(), ("into", self.directory)) if value is not None}
        own, kind = self._own_optimizer, self.driver.device.type
        notes = [*updates.notes(optimizers, self.model, own=own, device_type=kind), *loader_hints(self.loader), *self._notes]
        notes += [*frozen_modes(self.model, optimizers), *beforehand(hooks)[0]]
        notes += () if self._step_compiler is None else self._step_compiler.notes(hooks)
        limits = self._limits(self.loader if session is None else session.loader)
        return Plan(hooks, limits, self.accumulate if session is None else session.accumulate, facts, notes)

    def _compared(self, plan: Plan, since: str | PathLike[str] | None) -> Plan:
        """Return a plan with its differences from the plan of an earlier run."""
        directory = self.directory if since is None else absolute_folder(since)
        before = None if directory is None else plan_in(directory)
        if since is not None and before is None:
            raise DirectoryError(f"{str(directory)!r} holds no plan. Expected the directory of a run, with a run.json.")
        return plan if before is None else replace(plan, changes=plan_changes(before, plan.text()))

    def _make_session(
        self, segment: RunSegment | None = None, files: RunDirectory | None = None, make_run: Callable[[Session], Run] = Run
    ) -> Session:
        """Return the session of a part of a run; without one, of an evaluation."""
        training, loop = segment is not None, Loops.FIT if segment is None else segment.loop
        given = Settings() if segment is None else segment.given
        accumulate, loader = self._in_effect(given)
        hooks, several = self._hooks(), self.driver.world_size > 1
        if training:
            if several:
                facts = start_checks.facts_of(self.model, loader) | {"override": given.shown()}
                start_checks.check_alike(self.driver, plain(self, hooks.callbacks) | facts | {"debug_ranks": self.debug_ranks})
            if self.seed is not None:  # each rank draws its own dropout masks, for its own data
                seed_all(derive_seed(self.seed, rank) if (rank := self.driver.data_rank) else self.seed)
        model = self._prepared_model()
        parameters = ModelParameters(model)
        elements = sum(parameter.numel() for parameter in parameters)
        optimizers = updates.made(self.optimizer, model, parameters, own_step=self.step_fn is not None) if training else []
        given.give_to(optimizers)
        if training and several:
            start_checks.check_alike(self.driver, {"the list of optimizers": [*map(updates.described, optimizers)]})
        # A list, and what cadenza.attach trains, draw nothing by hand.
        draws = training and loop is not Loops.ATTACHED and not isinstance(loader, list | tuple)
        return Session(
            model=model,
            optimizers=optimizers,
            loader=loader,
            compute=self.compute_loss,
            driver=self.driver,
            precision=precision_of(self.precision, self.driver.device.type),
            accumulate=accumulate,
            step_fn=self.step_fn,
            loop=loop,
            tokens=self.tokens,
            data_seed=self.driver.broadcast(draw_seed(keep=not draws) if self.seed is None else self.seed),
            replay=segment is not None and segment.replay,
            arguments=described(self, elements, hooks.callbacks, optimizers) | {"accumulate": plain_accumulate(accumulate)},
            given=given,
            hooks=hooks,
            progress=self._limits(loader),
            directory=self.directory if training else None,
            files=files,
            rank_log=None if segment is None else segment.rank_log,
            home=self._home,
            make_run=make_run,
        )

    def _prepared_model(self) -> nn.Module:
        model = self.driver.prepare(self.model)
        if self._compile is not None:
            compile_model(self.driver.unwrap(model), self._compile)
        for module in modules_of(self.compute_loss):
            module.to(self.driver.device)
        return model

    def _set_up_session(self, session: Session) -> None:
        for warning in beforehand(session.hooks)[1]:
            session.warn(warning)
        session.hooks.on_setup(session.run)
        check_loader(session.loader, "run.loader")
        walk = session.module_flags.walk = Walk(session.module)
        session.extra_parameters.begin(session.run, walk)
        session.given.check(session.run)
        session.progress.begin(Counters(), num_batches(session.loader, self.driver.data_shard()))
        boundary.open_loader(session)
        start_checks.check_schedules(session)
        start_checks.check_computes(session)
        start_checks.check_evaluation_loaders(session)
        start_checks.warn_of_doubts(session, walk, own_optimizer=self._own_optimizer)
        if self._step_compiler is not None:
            self._step_compiler.install(session)
        if self._compile is not None:
            one_pass = self.accumulate == 1 and self.step_fn is None and session.loop is Loops.FIT  # in each step
            if has_graphs(self._compile) and not one_pass:
                session.precision.backward_pass = BackwardOfGraphs(session.module)
            session.acts.after_step(partial(start_checks.tell_of_compilation, session, breaks_so_far(), time.perf_counter()))

    def _in_effect(self, given: Settings) -> tuple[int, Iterable[Any]]:
        """Return the accumulation and the loader of a run, with the values that ``fit(override=...)`` gives."""
        accumulate, batch_size = given.values.get("accumulate", self.accumulate), given.values.get("batch_size")
        if "accumulate" in given.values:
            accumulate = checked_accumulate(accumulate, self.step_fn)
            given.note("accumulate", plain_accumulate(self.accumulate), plain_accumulate(accumulate))
        if batch_size is None:
            return accumulate, self.loader
        given.note("batch_size", getattr(self.loader, "batch_size", None), batch_size)
        loader = with_batch_size(self.loader, batch_size)
        check_not_empty(loader, self.driver.data_shard())
        return accumulate, loader

    def _limits(self, loader: Iterable[Any]) -> Progress:
        kind = Progress if self.driver.world_size == 1 else SharedProgress
        batches = num_batches(loader, self.driver.data_shard())
        limits = {name: getattr(self, name) for name in LIMITS}
        has_epochs = getattr(loader, "has_epochs", True)
        return kind(**limits, batches_per_epoch=batches, has_epochs=has_epochs, accumulate=self.accumulate)


# -- a run: its files, its checkpoint, its session, and what ends them -----------------------------


@dataclass(eq=False, repr=False)
class RunSegment:
    """A run, or the part of one up to where it goes back to a checkpoint, for ``with``: the block does its steps."""

    trainer: TrainerArguments
    """The arguments of the run."""
    resume: bool | str | PathLike[str] | GoBack
    """Where the run begins: that of `Trainer.fit`, or where it goes back to."""
    given: Settings
    """The settings of ``override=``."""
    strict: bool = False
    """That of `Trainer.fit`."""
    replay: bool = False
    """That of `Trainer.fit`."""
    loop: Loops = Loops.FIT
    """Which loop does the steps."""
    rank_log: RankLog | None = field(default=None, init=False)
    """The log in the directory of the run, on the other ranks than the main process."""

    def __enter__(self) -> Training:
        """Begin; return the training, with nothing open if the run is over already. Every rank must call this."""
        with ExitStack() as ending:
            self._training = self._begin(ending)
            self._ending = ending.pop_all()
        return self._training

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End the run, as its block does.

        Raises:
            BaseException: Another error than `error` is the cause, or has come first.
            SystemExit: A signal has ended the run.
        """
        if error is not None:
            self._ending.__exit__(type(error), error, error.__traceback__)
            return
        with self._ending:
            if self._training.open != Open.NOTHING:
                self._training.finish()
        session = self._training.session
        if session.sync.requests.signal is not None:
            resumption.tell_how_to_go_on(session, self.resume)
        exit_after_signal(session.sync.requests.signal)

    # -- how it begins -----------------------------------------------------------------------------

    def _begin(self, ending: ExitStack) -> Training:
        """Begin the run, and push what ends it."""
        trainer = self.trainer
        end_abandoned("another run began")
        if any(session.run is trainer._run for session in UNDER_WAY):
            raise RuntimeError("this trainer has a run that is not over. End its loop first, or make another trainer.")
        with trainer.driver.entering("at the start of a run"):
            files = self._opened_files(ending)
            if self.resume and not isinstance(self.resume, GoBack):
                collect(trainer.callbacks, trainer.driver)
            start = chosen_on_all_ranks(trainer.driver, self.resume, files, external_folders(trainer.callbacks))
            session, over = self._new_session(files, start)
        trainer._run = session.run
        session.advises &= not isinstance(self.resume, GoBack)  # the part before has said it
        if self.rank_log is not None:
            ending.callback(self.rank_log.write_due, ends=True)
        training = Training(session)
        if over:
            resumption.as_it_ended(session, files, start)
            return training
        self._watch(session, ending)
        ending.push(partial(_end, session))
        self._set_up(session, start)
        training.verbs.begin(ending)
        ending.enter_context(training).begin()
        return training

    def _opened_files(self, ending: ExitStack) -> RunDirectory | None:
        """Return the files of the run directory, on the main process, locked until `ending`. Every rank must call this."""
        trainer, path = self.trainer, self.trainer.directory
        check_not_empty(trainer.loader, trainer.driver.data_shard())
        given = self.resume, external_folders(trainer.callbacks)
        files = start_checks.main_only(trainer.driver, lambda: resumption.opened(path, *given)) if path else None
        if files is not None:
            ending.callback(files.release)
        return files

    def _new_session(self, files: RunDirectory | None, start: Start) -> tuple[Session, bool]:
        """Return the session of the run, and whether the run is over already."""
        trainer, driver = self.trainer, self.trainer.driver
        self.rank_log = RankLog.of(trainer.directory, driver.rank)  # before the main process can print
        before_fit(trainer.callbacks, trainer.model)
        session = trainer._make_session(self, files)
        session.restored.branch, session.restored.recovery = start.branch, start.recovery
        if driver.broadcast(start_checks.main_only(driver, lambda: resumption.is_over(files, session.progress, start))):
            return session, True
        if start.loaded is not None:
            own = start.loaded.by_rank[0].get("callbacks of the rank", {})
            session.restored.callback_states = {**start.loaded.state.get("callbacks", {}), **own}
        resumption.begin(session, files, start, {} if files is None else self._written_facts(session))
        return session, False

    def _written_facts(self, session: Session) -> dict[str, Any]:
        """Return the facts of a run that its ``run.json`` holds."""
        trainer = self.trainer
        facts: dict[str, Any] = {
            "arguments": session.arguments,
            "steps": session.progress.total("step"),
            "seed": trainer.seed,
            "device": str(session.driver.device),
            "plan": trainer._plan(session.optimizers, session.hooks, session).text(),
        }
        facts |= {"override": self.given.shown()} if self.given.override else {}
        facts |= {"checkpoints": folders} if (folders := external_folders(trainer.callbacks)) else {}
        facts |= {"monitors": monitors} if (monitors := monitors_in(session.hooks)) else {}
        return facts

    def _watch(self, session: Session, ending: ExitStack) -> None:
        """Post where this rank is until `ending`, and compare its collectives with those of others if that was asked for."""
        driver, limit_s = self.trainer.driver, self.trainer._names_ranks_after_s
        if session.directory is not None:
            driver.keep_dumps(session.directory)
        summary = None if session.directory is None else session.directory / stragglers.FILE
        if summary is not None and session.files is not None:
            with suppress(OSError):
                summary.unlink()  # of the ranks of an earlier attempt
        settle = () if self.rank_log is None else (self.rank_log.write_due,)
        most_s = math.inf if limit_s is None else limit_s / 20
        ending.enter_context(driver.watched(partial(whereabouts, session), *settle, most_s=most_s, summary=summary))
        if limit_s is not None:
            ending.enter_context(driver.compared(limit_s, partial(caller, session), session.warn))

    def _set_up(self, session: Session, start: Start) -> None:
        """Set up the run, and restore it if it resumes."""
        trainer, resume = self.trainer, self.resume
        trainer._set_up_session(session)
        if trainer.driver.after_start is not None:
            session.acts.after_step(trainer.driver.after_start)
        trainer.driver.check_trainable(session.module)  # after the callbacks, which may change layers
        session.restored.config = config_of(session)  # a callback that is attached later may save
        before, trainer._last_progress = trainer._last_progress, session.progress
        if start.loaded is None:
            session.given.tell_values(session.run)
            start_checks.warn_of_trained_weights(session, before)
            start_checks.warn_of_notes(session, trainer._notes if before is None else ())
        if resume or all(isinstance(callback, Callback) for callback in trainer.callbacks):  # adapters may save by themselves
            start_checks.warn_of_no_checkpoint(session, resume)
        start_checks.warn_of_loader(session)
        if start.loaded is not None:
            session.module_flags.walk = None  # on_load may change the model
            resumption.restored(session, session.files, start, strict=self.strict)
            start.loaded = None  # its memory is free during the training


def collect(callbacks: Iterable[BaseCallback], driver: Driver) -> None:
    """Bring each machine what its ranks read of checkpoints in folders of machines. Every rank must call this."""
    for callback in callbacks:
        if isinstance(callback, Checkpoint):
            callback.collect(driver)


def external_folders(callbacks: Iterable[BaseCallback]) -> list[str]:
    """Return the folders and URLs of checkpoints outside of the run directory."""
    return [callback.own_folder for callback in callbacks if isinstance(callback, Checkpoint) and callback.own_folder]


def _end(session: Session, kind: object, raised: BaseException | None, traceback: object) -> None:
    """Write the outcome of a run. If an error of another rank ended it, raise that rank's error."""
    ended = raised
    if session.outcome is not None and session.sync.together:  # all ranks have come to their end
        exits = isinstance(raised, SystemExit)  # which is no error: the others end as they do
        ended = session.driver.error_at_end(None if exits else raised) or raised
    if ended is not None or session.sync.requests.back is not None:
        session.module_flags.rewind()
    if ended is None:
        if session.sync.requests.back is None:
            start_checks.note_never_fired(session)
        _write_outcome(session)
        return
    error = boundary.fail(session, ended)
    try:
        _write_outcome(session)
    except OSError as later:  # the first error is the one that is raised
        add_note(error, f"then run.json could not be written: {later!r}")
    if error is not raised:
        raise error from raised


def _write_outcome(session: Session) -> None:
    if session.files is not None and session.outcome is not None:
        resumable = {RESUMABLE: True} if session.sync.requests.is_resumable else {}
        outcome = {"kind": session.outcome.kind, "reason": session.outcome.reason, **resumable}
        session.files.end(outcome, session.progress.now())
