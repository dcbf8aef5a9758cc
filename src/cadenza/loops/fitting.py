"""How a run begins and ends: its files, its checkpoint, its session."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from os import PathLike
from typing import Any

from cadenza.adapters.lightning.before_fit import freeze_early
from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.checkpoint import resuming
from cadenza.checkpoint.continuation import beginning
from cadenza.checkpoint.snapshot import config_of
from cadenza.checkpoint.starting import Start
from cadenza.engine import rank_checks
from cadenza.engine.arguments import check_not_empty, check_resume, given_by
from cadenza.engine.course import Beginning
from cadenza.engine.loop import Training, fit
from cadenza.engine.monitor_checks import monitors_in
from cadenza.engine.recipe import Recipe
from cadenza.engine.session import UNDER_WAY, Loops, Session
from cadenza.engine.start_checks import note_never_fired, warn_of_loader, warn_of_no_checkpoint, warn_of_trained_weights
from cadenza.engine.whereabouts import caller, whereabouts
from cadenza.errors import add_note
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import Callback
from cadenza.loops.handle import Handle
from cadenza.loops.part import Part
from cadenza.loops.steps import end_abandoned
from cadenza.optim.settings import Given, shown, tell_given
from cadenza.records.directory import RunDirectory
from cadenza.run import Run
from cadenza.status.decisions import Outcome
from cadenza.status.progress import Progress
from cadenza.status.requests import RESUMABLE, GoBack


class Fitting(Recipe):
    """A recipe that can be carried out: the parts of `Trainer.fit`."""

    _last_progress: Progress | None = None  # of this trainer's last run
    _run: Run | None = None
    _handle: Handle | None = None  # of its last run in the background

    @property
    def run(self) -> Run:
        """The run that began last."""
        if self._run is None:
            raise AttributeError(
                "trainer.run is the run that began last, and none has begun. Call fit(...), begin the loop over "
                "steps(...), or enter `with attach(...) as loop:`."
            )
        return self._run

    def _given(self, resume: object, override: object) -> Given:
        """Return the settings that a run is given, if it may begin.

        Raises:
            TypeError, ValueError: An argument is wrong.
            RuntimeError: The trainer trains in the background.
        """
        check_resume(resume)
        if self._handle is not None and not self._handle.done:
            raise RuntimeError(
                "this trainer trains in the background already. Call stop(...) and join() of the handle that start() returned."
            )
        return given_by(override, resume)

    def _train(
        self,
        resume: bool | str | PathLike[str],
        given: Given,
        *,
        strict: bool = False,
        replay: bool = False,
        begun: Callable[[Session], object] = lambda session: None,
    ) -> Run:
        """Carry out a run. `begun` is called with its session.

        A run that goes back to a checkpoint has another part, with a session of its own.
        """
        part: bool | str | PathLike[str] | GoBack | None = resume
        while part is not None:
            with self._part(part, given, strict=strict, replay=replay) as training:
                begun(training.session)
                self._do_steps(training)
            part = training.session.sync.requests.back
        return self.run

    def _do_steps(self, training: Training) -> None:
        """Do the steps of a run."""
        fit(training)

    def _part(
        self,
        resume: bool | str | PathLike[str] | GoBack,
        given: Given,
        *,
        strict: bool,
        replay: bool,
        loop: Loops = Loops.FIT,
    ) -> Part:
        """Return a run, or a part of one, to begin."""

        def begin(ending: ExitStack) -> Training:
            end_abandoned("another run began")
            if any(one.run is self._run for one in UNDER_WAY):
                raise RuntimeError("this trainer has a run that is not over. End its loop first, or make another trainer.")
            with self.driver.entering("at the start of a run"):
                files = self._opened_files(ending, resume=bool(resume))
                session, start, over = self._new_fit(files, resume, replay, given, loop=loop)
            self._run = session.run
            session.advises &= not isinstance(resume, GoBack)  # the part before has said it
            if session.rank_log is not None:
                ending.callback(session.rank_log.write_due, ends=True)
            training = Training(session)
            if over:
                resuming.as_it_ended(session, files, start)
                return training
            self._watch(session, ending)
            ending.push(partial(self._end, session))
            self._begin(session, start, resume, strict=strict)
            training.verbs.begin(ending)
            ending.enter_context(training).begin()
            return training

        return Part(begin)

    def _watch(self, session: Session, ending: ExitStack) -> None:
        """Post where this rank is until `ending`, and compare its collectives with those of others if that was asked for."""
        settle = () if session.rank_log is None else (session.rank_log.write_due,)
        limit_s = self._names_ranks_after_s
        most_s = math.inf if limit_s is None else limit_s / 20
        ending.enter_context(self.driver.watched(partial(whereabouts, session), *settle, most_s=most_s))
        if limit_s is not None:
            ending.enter_context(self.driver.compared(limit_s, partial(caller, session), session.warn))

    def _beginning(self, resume: bool | str | PathLike[str], hooks: Hooks, progress: Progress) -> Beginning:
        given = resume, self.directory, self._elsewhere
        return beginning(*given, hooks, progress, self.loader, self.driver.data_shard())

    @property
    def _elsewhere(self) -> list[str]:
        """The folders and URLs of checkpoints outside of `directory`."""
        return [one.directory for one in self.callbacks if isinstance(one, Checkpoint) and one.directory]

    def _opened_files(self, ending: ExitStack, *, resume: bool) -> RunDirectory | None:
        """Return the files of the run directory, on the main process, locked until `ending`. Every rank must call this."""
        check_not_empty(self.loader, self.driver.data_shard())
        path = self.directory
        files = rank_checks.main_only(self.driver, lambda: RunDirectory(path, resume=resume)) if path else None
        if files is not None:
            ending.callback(files.release)
        return files

    def _new_fit(
        self,
        files: RunDirectory | None,
        resume: bool | str | PathLike[str] | GoBack,
        replay: bool,
        given: Given,
        *,
        loop: Loops,
    ) -> tuple[Session, Start, bool]:
        """Return the session of a new fit, its start, and whether the run is over already."""
        start = resuming.chosen_on_all_ranks(self.driver, resume, files, self._elsewhere)
        freeze_early(self.callbacks, self.model)
        session = self._new_session(training=True, files=files, replay=replay, given=given, loop=loop)
        session.branch, session.restored.recovery = start.branch, start.recovery
        if self.driver.broadcast(rank_checks.main_only(self.driver, lambda: resuming.is_over(files, session.progress, start))):
            return session, start, True
        if start.loaded is not None:
            own = start.loaded.by_rank[0].get("callbacks of the rank", {})
            session.restored.expect({**start.loaded.state.get("callbacks", {}), **own})
        resuming.begin(session, files, start, {} if files is None else self._written_facts(session, given))
        return session, start, False

    def _written_facts(self, session: Session, given: Given) -> dict[str, Any]:
        """Return the facts of a run that its ``run.json`` holds."""
        facts: dict[str, Any] = {
            "arguments": session.arguments,
            "steps": session.progress.total("step"),
            "seed": self.seed,
            "device": str(session.device),
            "plan": self._plan(session.optimizers, session.hooks, session).text(),
        }
        facts |= {"override": shown(given)} if given.override else {}
        facts |= {"checkpoints": self._elsewhere} if self._elsewhere else {}
        facts |= {"monitors": monitors} if (monitors := monitors_in(session.hooks)) else {}
        return facts

    def _begin(self, session: Session, start: Start, resume: object, *, strict: bool) -> None:
        """Set up the run, and restore it if it resumes."""
        self._set_up(session)
        self.driver.check_trainable(session.module)  # after the callbacks, which may change layers
        session.restored.config = config_of(session)
        before, self._last_progress = self._last_progress, session.progress
        if start.loaded is None:
            tell_given(session)
            warn_of_trained_weights(session, before)
        if resume or all(isinstance(one, Callback) for one in self.callbacks):  # adapters may write checkpoints of their own
            warn_of_no_checkpoint(session, resume)
        warn_of_loader(session)
        if start.loaded is not None:
            resuming.restored(session, session.files, start, strict=strict)
            start.loaded = None  # its memory is free during the training

    def _end(self, session: Session, kind: object, raised: BaseException | None, traceback: object) -> None:
        """Write the outcome of a run. If an error of another rank ended it, raise that rank's error."""
        if raised is not None or session.sync.requests.back is not None:
            session.module_flags.rewind()
        if raised is None:
            if session.sync.requests.back is None:
                note_never_fired(session)
            _write_outcome(session)
            return
        error = self.driver.first_error(raised)
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
