"""When checkpoints are written: on a schedule, when a result gets better, after an error or a signal, and at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from cadenza.checkpoint.retention import Pair, Retention
from cadenza.checkpoint.store import Store
from cadenza.checkpoint.store.files import absolute_path
from cadenza.checkpoint.store.probing import probe_on_all_ranks
from cadenza.checkpoint.writer import CheckpointWriter
from cadenza.engine.monitor import Monitor
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointLostError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.habits import CHECKPOINT, answered
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic
from cadenza.optim.held_weights import holders_in
from cadenza.status.decisions import Outcome
from cadenza.status.preemption import handle_signals

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class Checkpoint(Callback):
    """Write checkpoints at step boundaries, and keep the newest and the best.

    A checkpoint appears whole or not at all. Before the first step a small file is written and removed, so that a folder that
    cannot be written is an error at the start. A write that fails later is reported; older checkpoints stay, and the training
    goes on. The write is repeated after 1 s, 2 s, 4 s, ... until the next save. If the last write fails, so does the run.

    Args:
        every: The interval between checkpoints. The end of the run always writes one.
        keep_last: The number of newest checkpoints to keep; None keeps all.
        keep_best: A pair such as ``("eval/acc", "max")``, or several. When this result gets better, a checkpoint is written,
            and the best one is kept. Weights that are not finite are never the best. If ``Evaluate(weights="ema")`` found the
            best result, `load_weights` takes the averaged weights of this checkpoint.
        on_exception: Write one when an error ends the run. In the middle of a step it is marked as not exact.
        on_signal: During a run in the main thread, SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) end the run: the step is completed, a
            checkpoint is written, and the process exits with 128 + the number of the signal. A second signal ends the process
            at once; a second Ctrl-C raises KeyboardInterrupt. Your own handler for SIGINT is not replaced.
        grace_s: The seconds between SIGTERM, SIGUSR1 or Ctrl-C and the kill, such as SLURM's KillWait. If the last write is
            expected to take longer than the rest of this time, the weights are written first, then the whole checkpoint. A
            process that is killed in between leaves the weights, and the run continues at the checkpoint before. The
            expectation comes from earlier writes; for the first one it is 50 MB a second. None: the time is unknown.
        background: Copy the run to the host, then write in a thread while the training goes on.
        weights_only: Write the model alone. It is smaller, and for `load_weights`; a run cannot continue it.
        directory: A local folder or an fsspec URL. None: ``checkpoints`` in the directory of the run.
        strict: Raise the error of a failed write, and do not repeat the write.

    Raises:
        ValueError: `keep_last` is below 1, or neither the run nor this has a directory.
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

    @answered(CHECKPOINT)
    def __init__(
        self,
        every: Interval = "1 epoch",
        *,
        keep_last: int | None = 2,
        keep_best: Pair | Sequence[Pair] = (),
        on_exception: bool = True,
        on_signal: bool = True,
        grace_s: float | None = None,
        background: bool = True,
        weights_only: bool = False,
        directory: str | PathLike[str] | None = None,
        strict: bool = False,
    ) -> None:
        if grace_s is not None and not grace_s > 0:
            raise ValueError(f"grace_s must be above 0 seconds, or None if no limit is known; got {grace_s!r}")
        self.every: Schedule = Schedule.parse(every)
        self.retention: Retention = Retention(keep_last, keep_best)
        self.directory: str | None = None if directory is None else absolute_path(directory)
        self.watch_errors: bool = on_exception
        self.watch_signals: bool = on_signal
        self.grace_s: float | None = grace_s
        self.background: bool = background
        self.weights_only: bool = weights_only
        self.strict: bool = strict

    def listeners(self) -> list[Listener]:
        watching = [Listener(Callback.on_eval_end, self._watch)] if self.monitors else []
        return [*super().listeners(), *watching, periodic(self.every, partial(self._ask, reason=str(self.every)))]

    @property
    def monitors(self) -> list[Monitor]:
        """The monitors of `keep_best`."""
        return [best.monitor for best in self.retention.best]

    def waits_for(self) -> list[str]:
        return [f"a result better than {best.name!r} = {best.best:.6g} is saved too" for best in self.monitors]

    def on_setup(self, run: Run) -> None:
        folder = self.directory or session_of(run).checkpoints_directory
        if folder is None:
            raise ValueError("Checkpoint needs a folder: give Trainer(directory=...) or Checkpoint(directory=...)")
        # Several runs, or several of this class, may write to one folder: each deletes only its own checkpoints.
        owner, name = session_of(run).branch.run, hooks_of(run).name_of(self)
        self.store: Store = Store(folder, owner if name == "Checkpoint" else f"{owner}/{name}", session_of(run).branch)
        self.retention.reset()
        probe_on_all_ranks(self.store, run.driver)
        self.writer: CheckpointWriter = CheckpointWriter(
            session_of(run),
            self.store,
            self.retention,
            name,
            background=self.background,
            strict=self.strict,
            weights_only=self.weights_only,
            grace_s=self.grace_s,
        )
        session_of(run).savers.append(self._save)

    def on_fit_start(self, run: Run) -> None:
        for monitor in self.monitors:
            monitor.check_reported_by(run.evaluations)
        self.writer.begin()
        if self.watch_signals:
            session_of(run).sync.requests.from_signals = True
            run.at_end(handle_signals(session_of(run).sync.requests.preempt, show=run.is_main))
        run.at_end(self.writer.finish)  # called before the one above: a signal must not interrupt the last write

    def on_stop(self, run: Run, reason: str) -> None:
        self.writer.save(reason)

    def on_exception(self, run: Run, error: BaseException) -> None:
        if self.watch_errors and run.progress.step:
            self.writer.save(f"an error: {error!r}")

    def on_fit_end(self, run: Run) -> None:
        if run.outcome is not None and run.outcome.kind in ("finished", "stopped"):
            self.writer.save("the end of the run")
        self.writer.finish()
        self.writer.report_best()
        lost = self.writer.lost
        if session_of(run).sync.together:
            lost = next((one for one in run.driver.gather(lost) if one), None)
        if lost:
            error = CheckpointLostError(lost)
            session_of(run).end(Outcome("failed", repr(error)))  # on all ranks, before the sinks close, since they report it
            raise error

    def state_dict(self) -> dict[str, Any]:
        return {"best": {best.monitor.name: best.state_dict() for best in self.retention.best}} if self.retention.best else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for best in self.retention.best:
            if (saved := state.get("best", {}).get(best.monitor.name)) is not None:
                best.load_state_dict(saved)

    def _watch(self, run: Run, evaluation: Evaluation) -> None:
        for best in self.retention.best:
            value = best.monitor.value_of(run, evaluation)
            if value is not None and run.driver.broadcast(best.monitor.update(run, value)):
                holder = holders_in(hooks_of(run)).get(evaluation.weights or "")
                best.choose(run.progress.step, evaluation.weights if holder is not None and holder.held is not None else None)
                self._ask(run, reason=f"{best.monitor.name} is {value:g}, the best so far")

    def _ask(self, run: Run, *, reason: str) -> None:
        run.after_step(partial(self.writer.save, reason))

    def _save(self, run: Run, reason: str) -> None:
        self.writer.save(reason)
