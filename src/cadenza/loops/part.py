"""A run from its first file to its last: its files, its checkpoint, its session, and what ends them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from os import PathLike
from typing import Any

from cadenza.adapters.lightning.before_fit import freeze_early
from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.checkpoint import resuming
from cadenza.checkpoint.snapshot import config_of
from cadenza.checkpoint.starting import Start, chosen_on_all_ranks
from cadenza.engine import rank_checks
from cadenza.engine.arguments import check_not_empty
from cadenza.engine.loop import OVER, Training
from cadenza.engine.monitor_checks import monitors_in
from cadenza.engine.recipe import Recipe
from cadenza.engine.session import UNDER_WAY, Loops, Session
from cadenza.engine.start_checks import note_never_fired, warn_of_loader, warn_of_no_checkpoint, warn_of_trained_weights
from cadenza.engine.whereabouts import caller, whereabouts
from cadenza.errors import add_note
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.loops.steps import end_abandoned
from cadenza.optim.settings import Settings
from cadenza.records.directory import RunDirectory
from cadenza.status.decisions import RESUMABLE, GoBack, Outcome
from cadenza.status.preemption import exit_after_signal


class Part:
    """A run, or the part of one up to where it goes back to a checkpoint, for ``with``: the block does its steps.

    Args:
        trainer: The arguments of the run.
        resume: Where the run begins: that of `Trainer.fit`, or where it goes back to.
        given: The settings of ``override=``.
        strict: That of `Trainer.fit`.
        replay: That of `Trainer.fit`.
        loop: Which loop does the steps.
    """

    def __init__(
        self,
        trainer: Recipe,
        resume: bool | str | PathLike[str] | GoBack,
        given: Settings,
        *,
        strict: bool,
        replay: bool,
        loop: Loops = Loops.FIT,
    ) -> None:
        self._trainer, self._resume, self._given = trainer, resume, given
        self._strict, self._replay, self._loop = strict, replay, loop

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
            if self._training.open != OVER:
                self._training.finish()
        session = self._training.session
        if session.sync.requests.signal is not None:
            resuming.tell_how_to_go_on(session, self._resume)
        exit_after_signal(session.sync.requests.signal)

    # -- how it begins -----------------------------------------------------------------------------

    def _begin(self, ending: ExitStack) -> Training:
        """Begin the run, and push what ends it."""
        trainer = self._trainer
        end_abandoned("another run began")
        if any(one.run is trainer._run for one in UNDER_WAY):
            raise RuntimeError("this trainer has a run that is not over. End its loop first, or make another trainer.")
        with trainer.driver.entering("at the start of a run"):
            files = self._opened_files(ending)
            start = chosen_on_all_ranks(trainer.driver, self._resume, files, elsewhere(trainer.callbacks))
            session, over = self._new_session(files, start)
        trainer._run = session.run
        session.advises &= not isinstance(self._resume, GoBack)  # the part before has said it
        if session.rank_log is not None:
            ending.callback(session.rank_log.write_due, ends=True)
        training = Training(session)
        if over:
            resuming.as_it_ended(session, files, start)
            return training
        self._watch(session, ending)
        ending.push(partial(_end, session))
        self._set_up(session, start)
        training.verbs.begin(ending)
        ending.enter_context(training).begin()
        return training

    def _opened_files(self, ending: ExitStack) -> RunDirectory | None:
        """Return the files of the run directory, on the main process, locked until `ending`. Every rank must call this."""
        trainer, resume = self._trainer, bool(self._resume)
        check_not_empty(trainer.loader, trainer.driver.data_shard())
        path = trainer.directory
        files = rank_checks.main_only(trainer.driver, lambda: RunDirectory(path, resume=resume)) if path else None
        if files is not None:
            ending.callback(files.release)
        return files

    def _new_session(self, files: RunDirectory | None, start: Start) -> tuple[Session, bool]:
        """Return the session of the run, and whether the run is over already."""
        trainer, driver, given = self._trainer, self._trainer.driver, self._given
        freeze_early(trainer.callbacks, trainer.model)
        session = trainer._new_session(training=True, files=files, replay=self._replay, given=given, loop=self._loop)
        session.branch, session.restored.recovery = start.branch, start.recovery
        if driver.broadcast(rank_checks.main_only(driver, lambda: resuming.is_over(files, session.progress, start))):
            return session, True
        if start.loaded is not None:
            own = start.loaded.by_rank[0].get("callbacks of the rank", {})
            session.restored.expect({**start.loaded.state.get("callbacks", {}), **own})
        resuming.begin(session, files, start, {} if files is None else self._written_facts(session))
        return session, False

    def _written_facts(self, session: Session) -> dict[str, Any]:
        """Return the facts of a run that its ``run.json`` holds."""
        trainer = self._trainer
        facts: dict[str, Any] = {
            "arguments": session.arguments,
            "steps": session.progress.total("step"),
            "seed": session.seed,
            "device": str(session.device),
            "plan": trainer._plan(session.optimizers, session.hooks, session).text(),
        }
        facts |= {"override": self._given.shown()} if self._given.override else {}
        facts |= {"checkpoints": folders} if (folders := elsewhere(trainer.callbacks)) else {}
        facts |= {"monitors": monitors} if (monitors := monitors_in(session.hooks)) else {}
        return facts

    def _watch(self, session: Session, ending: ExitStack) -> None:
        """Post where this rank is until `ending`, and compare its collectives with those of others if that was asked for."""
        driver, limit_s = self._trainer.driver, self._trainer._names_ranks_after_s
        settle = () if session.rank_log is None else (session.rank_log.write_due,)
        most_s = math.inf if limit_s is None else limit_s / 20
        ending.enter_context(driver.watched(partial(whereabouts, session), *settle, most_s=most_s))
        if limit_s is not None:
            ending.enter_context(driver.compared(limit_s, partial(caller, session), session.warn))

    def _set_up(self, session: Session, start: Start) -> None:
        """Set up the run, and restore it if it resumes."""
        trainer, resume = self._trainer, self._resume
        trainer._set_up(session)
        trainer.driver.check_trainable(session.module)  # after the callbacks, which may change layers
        session.restored.config = config_of(session)
        before, trainer._last_progress = trainer._last_progress, session.progress
        if start.loaded is None:
            session.given.tell_values(session.run)
            warn_of_trained_weights(session, before)
        if resume or all(isinstance(one, Callback) for one in trainer.callbacks):  # adapters may write checkpoints of their own
            warn_of_no_checkpoint(session, resume)
        warn_of_loader(session)
        if start.loaded is not None:
            resuming.restored(session, session.files, start, strict=self._strict)
            start.loaded = None  # its memory is free during the training


def elsewhere(callbacks: Iterable[BaseCallback]) -> list[str]:
    """Return the folders and URLs of checkpoints outside of the run directory."""
    return [one.directory for one in callbacks if isinstance(one, Checkpoint) and one.directory]


def _end(session: Session, kind: object, raised: BaseException | None, traceback: object) -> None:
    """Write the outcome of a run. If an error of another rank ended it, raise that rank's error."""
    if raised is not None or session.sync.requests.back is not None:
        session.module_flags.rewind()
    if raised is None:
        if session.sync.requests.back is None:
            note_never_fired(session)
        _write_outcome(session)
        return
    error = session.driver.first_error(raised)
    session.end(Outcome("failed", repr(error)))
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
