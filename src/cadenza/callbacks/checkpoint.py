"""When checkpoints are written: on a schedule, when a result gets better, after an error or a signal, and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cadenza.checkpoint.keep_rules import KEEP_LAST, BestOf, Keep, KeepRules
from cadenza.checkpoint.retention import Member
from cadenza.checkpoint.store import Store
from cadenza.checkpoint.store.checkpoints import probe_on_all_ranks
from cadenza.checkpoint.store.files import absolute_path
from cadenza.checkpoint.writer import CheckpointWriter, writer_for
from cadenza.engine.monitor import Monitor
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointLostError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic
from cadenza.lazy import imported
from cadenza.optim.held_weights import holders_in
from cadenza.status.decisions import COMPLETE, Outcome
from cadenza.status.signals import handle_signals
from cadenza.text.hints import answered

if TYPE_CHECKING:
    from cadenza.drivers import Driver
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class Checkpoint(Callback):
    """Write checkpoints at step boundaries, and keep the newest and the best.

    Several of this class may stand in one list. Those that save to the same folder at the same step share one write. The rules
    of each see the checkpoints it asked for, and one that a rule of any of them keeps stays.

    A checkpoint appears whole or not at all. Before the first step a small file is written and removed, so that a folder that
    cannot be written is an error at the start. A write that fails later is reported; older checkpoints stay, and the training
    goes on. The write is repeated after 1 s, 2 s, 4 s, ... until the next save. If the last write fails, so does the run.

    With multiple ranks: communicates in each save, so every rank must call ``run.save``. The main process writes.

    Args:
        every: The interval between checkpoints. The end of the run writes one.
        keep: Keep rules, in a list or joined by ``|``: ``[Last(2), Best("eval/acc", 3, mode="max"), Every("6 h")]``. A
            checkpoint that one rule keeps stays. ``Last(2)`` keeps the newest two, ``Last("6 h")`` those of the last 6 hours
            before the newest; ``First`` likewise; ``Every("6 h")`` the first that reaches each multiple; ``At("3 epochs")`` the
            first that reaches this point. Lengths count from the start of the run, time with pauses. See also `Best`. A
            function gets the checkpoints, oldest first, and returns those to keep; of these it keeps the same ones again. Each
            has `name`, `values` (results by name) and `position`, such as ``position("step")`` or ``position("epoch")``.
        keep_last: Short for ``Last(n)``: the number of newest checkpoints to keep; None keeps all.
        keep_best: Short for ``Best(name, mode=...)``: a pair such as ``("eval/acc", "max")``, a loss, or several.
        on_exception: Write one when an error ends the run. In the middle of a step it is marked as not exact.
        on_signal: During a run in the main thread, SIGTERM, SIGUSR1, SIGHUP and SIGINT (Ctrl-C) end the run: the step is
            completed, a checkpoint is written, and the process exits with 128 + the number of the signal. A second signal ends
            the process at once; a second Ctrl-C raises KeyboardInterrupt, a second SIGHUP is ignored. Your own handler for
            SIGINT is not replaced, nor is SIGHUP handled if it is ignored, as under nohup.
        grace_s: The seconds between SIGTERM, SIGUSR1 or Ctrl-C and the kill, such as SLURM's KillWait. If the last write is
            expected to take longer than the rest of this time, the weights are written first, then the whole checkpoint. A
            process that is killed in between leaves the weights, and the run continues at the checkpoint before. The
            expectation comes from earlier writes; for the first one it is 50 MB a second. None: the time is unknown.
        background: Copy the run to the host, then write in a thread while the training goes on. The memory of the copy is kept
            for the next save, until the run ends.
        weights_only: Write the model alone. It is smaller, and for `load_weights`; a run cannot continue it.
        directory: A local folder or an fsspec URL. None: ``checkpoints`` in the directory of the run.
        local: Instead of `directory`: a folder that each machine has for itself under this path, in memory or on a local disk.
            Each machine holds what its ranks read, and the same for one neighbour. A restart takes the newest checkpoint that
            all ranks can read, here or elsewhere; a machine that is new gets its part from the others.
        strict: Raise the error of a failed write, and do not repeat the write.

    Raises:
        ValueError: `keep_last` is below 1, neither the run nor this has a directory, or `local` stands with `directory` or
            `weights_only`, or is a URL.
        TypeError: A value in `keep` is no keep rule.
        DirectoryError: At the start of a run: the folder cannot be written.
        CheckpointLostError: At the end of a run: its last checkpoint could not be written. ``run.outcome.kind`` is "failed".

    >>> import tempfile
    >>> from cadenza.testing import tiny_trainer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saves = Checkpoint(every="2 steps", keep_last=1)
    ...     first = tiny_trainer(steps=5, directory=folder, callbacks=[saves]).fit()
    ...     second = tiny_trainer(steps=8, directory=folder, callbacks=[Checkpoint(every="2 steps")]).fit(resume="auto")
    >>> first.progress.step, second.progress.step, [one.when.step for one in second.decisions if one.what == "resumed"]
    (5, 8, [5])
    """

    phase: Phase | None = Phase.SAVE
    decides: tuple[str, ...] = ("saved",)

    @answered("checkpoint")
    def __init__(
        self,
        every: Interval = "1 epoch",
        *,
        keep: Keep | None = None,
        keep_last: int | None = KEEP_LAST,
        keep_best: BestOf = (),
        on_exception: bool = True,
        on_signal: bool = True,
        grace_s: float | None = None,
        background: bool = True,
        weights_only: bool = False,
        directory: str | PathLike[str] | None = None,
        local: str | PathLike[str] | None = None,
        strict: bool = False,
    ) -> None:
        if grace_s is not None and (isinstance(grace_s, bool) or not grace_s > 0):
            raise ValueError(f"grace_s must be above 0 seconds, or None if no limit is known; got {grace_s!r}")
        self.every: Schedule = Schedule.parse(every)
        self.keep: KeepRules = KeepRules(keep, keep_last, keep_best)
        self._monitors = [Monitor(best.monitor, best.mode, owner="Checkpoint") for best in self.keep.best]
        if local is not None and (directory is not None or weights_only or "://" in fspath(local)):
            raise ValueError(
                f"local must be a folder that each machine has for itself, without directory= and weights_only=; got "
                f"{local!r}. Add another Checkpoint to the list for them."
            )
        self.directory: str | None = None if directory is None else absolute_path(directory)
        self.local: str | None = None if local is None else absolute_path(local)
        self.own_folder: str | None = self.directory or self.local
        self._lacks = (
            "" if self.own_folder else "Checkpoint needs a folder: give Trainer(directory=...) or Checkpoint(directory=...)"
        )
        self.watch_errors: bool = on_exception
        self.watch_signals: bool = on_signal
        self.grace_s: float | None = grace_s
        self.background: bool = background
        self.weights_only: bool = weights_only
        self.strict: bool = strict
        self.member: Member = self._member("Checkpoint")  # an evaluation outside of a fit has no on_setup

    def _member(self, name: str) -> Member:
        return Member(name, self.keep, self.monitors, saves_errors=self.watch_errors)

    def listeners(self) -> list[Listener]:
        watching = [Listener(Callback.on_eval_end, self._watch)] if self.monitors else []
        return [*super().listeners(), *watching, periodic(self.every, partial(self._ask, reason=str(self.every)))]

    @property
    def monitors(self) -> list[Monitor]:
        """The monitors of the rules that keep the best."""
        return self._monitors

    def waits_for(self) -> list[str]:
        return [f"a result better than {best.name!r} = {best.best:.6g} is saved too" for best in self.monitors]

    def on_setup(self, run: Run) -> None:
        directory = run.info.directory
        folder = self.own_folder or (directory and directory / "checkpoints")
        if folder is None:
            raise ValueError(self._lacks)
        branch = session_of(run).restored.branch
        for monitor in self.monitors:
            monitor.reset()
        store = Store(folder, branch.run, branch)  # several runs may write to one folder: each deletes only its own checkpoints
        if self.local and run.driver.world_size > 1:
            store = self._machines().store_of(Path(folder), branch, run.driver)
        probe_on_all_ranks(store, run.driver)
        self.writer: CheckpointWriter = writer_for(session_of(run), store, weights_only=self.weights_only)
        self.store: Store = self.writer.store
        self.member = self._member(hooks_of(run).name_of(self))
        self.writer.join(self.member, background=self.background, strict=self.strict, grace_s=self.grace_s)

    def collect(self, driver: Driver) -> None:
        """Bring each machine what its ranks read of the `local` checkpoints. Every rank must call this before a read."""
        if self.local and driver.world_size > 1:
            self._machines().complete(Path(self.local), driver)

    def _machines(self) -> ModuleType:
        return imported("cadenza.parallel.local", needed_by="Checkpoint(local=...)")

    def on_fit_start(self, run: Run) -> None:
        for monitor in self.monitors:
            monitor.check(run)
        self.writer.begin()
        if self.watch_signals:
            session_of(run).sync.requests.from_signals = True
            run.at_end(handle_signals(session_of(run).sync.requests.preempt, show=run.is_main))
        run.at_end(self.writer.finish)  # called before the one above: a signal must not interrupt the last write

    def on_stop(self, run: Run, reason: str) -> None:
        self.writer.save(reason)

    def on_exception(self, run: Run, error: BaseException) -> None:
        self.writer.save_error(error)

    def on_fit_end(self, run: Run) -> None:
        try:
            if run.outcome is not None and run.outcome.kind in COMPLETE:
                self.writer.save("the end of the run", last=True)
            self.writer.finish()
            self.writer.report_best()
        except BaseException:
            self._lost(run, failed=True)
            raise
        if lost := self._lost(run):
            error = CheckpointLostError(lost)
            session_of(run).end(Outcome("failed", repr(error)))  # on all ranks, before the sinks close, since they report it
            raise error

    def _lost(self, run: Run, *, failed: bool = False) -> str | None:
        """Return why the last checkpoint is lost on a rank; None if it is not. Every rank must call this.

        Args:
            run: The run.
            failed: Whether this rank raises an error of its own, which the others will report. They return None.
        """
        lost = self.writer.lost
        if not session_of(run).sync.together:
            return lost
        everyone = run.driver.gather_unequal((failed, lost))
        reasons = [reason for _, reason in everyone if reason]
        return reasons[0] if reasons and not any(rank_failed for rank_failed, _ in everyone) else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.member.earlier = state.get("best", {})  # version 0.1: today, the manifests have the results

    def _watch(self, run: Run, evaluation: Evaluation) -> None:
        for watching in self.member.watching:
            value = watching.monitor.value_of(run, evaluation)
            if value is None:
                continue
            watching.monitor.update(run, value)
            holder = holders_in(hooks_of(run)).get(evaluation.weights or "")
            watching.step, watching.value = run.progress.step, value
            watching.weights = evaluation.weights if holder is not None and holder.held is not None else None
            if run.driver.broadcast(self.writer.retention.enters(self.member, watching)):
                self.member.pending = True
                watching.chosen_at = watching.step
                among = "the best" if watching.best.count == 1 else f"among the best {watching.best.count}"
                self._ask(run, reason=f"{watching.best.name} is {value:g}, {among} so far")

    def _ask(self, run: Run, *, reason: str) -> None:
        self.writer.ask(self.member.name, reason)
