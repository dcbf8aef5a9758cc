"""Save a run so that it can be continued to the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.kept import Best, Kept, KeptBest, pairs_of
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.checkpoint.store.background import Background
from cadenza.checkpoint.store.files import absolute_place
from cadenza.checkpoint.store.grace import Grace
from cadenza.checkpoint.store.probing import probe_on_all_ranks
from cadenza.checkpoint.store.retries import Retries
from cadenza.checkpoint.store.shards import Gather
from cadenza.engine.agreement import together
from cadenza.engine.monitor import Monitor
from cadenza.errors import CheckpointLostError
from cadenza.hooks.cadence import Cadence, Interval
from cadenza.hooks.dispatch import periodic
from cadenza.hooks.habits import CHECKPOINT, answered
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase
from cadenza.optim.averaging import averages_of
from cadenza.status.decisions import Outcome
from cadenza.status.preemption import signals_heard
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class Checkpoint(Callback):
    """Write checkpoints at the border of steps, and keep the newest and the best.

    A checkpoint appears whole or not at all. When a run starts, a small file is written and removed again, so that a place that
    cannot be written is known before the first step. A write that fails is reported, what was there stays, and the training
    goes on; it is tried again after 1 s, 2 s, 4 s, ... until the next save. If the last one of a run fails, so does the run.

    Args:
        every: A cadence; at the end of the run one is written in any case.
        keep_last: How many of the newest to keep; None keeps all.
        keep_best: A pair such as ``("eval/acc", "max")``, or several: when this result gets better, a checkpoint is written,
            and the best is kept. Weights that are not finite are never the best. If ``Evaluate(weights="ema")`` chose it,
            `load_weights` takes the averaged weights of this checkpoint.
        on_exception: Write one when an error ends the run. In the middle of a step it is marked as not exact.
        on_signal: While the run goes on in the main thread, let SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) ask for its end: the step
            is completed, a checkpoint is written, and the process exits with 128 + the signal's number. A second signal ends it
            at once; a second Ctrl-C raises KeyboardInterrupt. A handler for SIGINT of your own stays.
        grace_s: Seconds that the process has after SIGTERM, SIGUSR1 or Ctrl-C until it is killed, such as SLURM's KillWait. If
            the last save is expected to take longer than what is left of them, the weights alone are written first, then the
            whole checkpoint: whoever is killed in between still has the weights, and continues at the checkpoint before. The
            time is expected from the writes before, and for the first one from 50 MB a second. None: no limit is known.
        background: Copy to the host, then write in a thread while the training goes on.
        weights_only: Write the model alone: smaller, and for `load_weights`; a run cannot continue there.
        directory: Where; a local folder or an fsspec URL. None: ``checkpoints`` in the run's directory.
        strict: Raise when a write fails; nothing is tried again.

    Raises:
        ValueError: `keep_last` is below 1, or neither the run nor this has a directory.
        DirectoryError: When a run starts: nothing can be written there.
        CheckpointLostError: When a run ends: its last checkpoint could not be written. ``run.outcome.kind`` is "failed" then.
    """

    phase = Phase.SAVE

    @answered(CHECKPOINT)
    def __init__(
        self,
        every: Interval = "1 epoch",
        *,
        keep_last: int | None = 2,
        keep_best: Best | Sequence[Best] = (),
        on_exception: bool = True,
        on_signal: bool = True,
        grace_s: float | None = None,
        background: bool = True,
        weights_only: bool = False,
        directory: str | PathLike[str] | None = None,
        strict: bool = False,
    ) -> None:
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"keep_last must be a whole number of at least 1, or None to keep all; got {keep_last!r}")
        self.every = Cadence.parse(every)
        self.keep_last, self.strict = keep_last, strict
        self.directory = None if directory is None else absolute_place(directory)
        self.weights_only = weights_only
        self.watch_errors, self.watch_signals, self.background = on_exception, on_signal, background
        self.best = [KeptBest(Monitor(name, mode, owner="Checkpoint")) for name, mode in pairs_of(keep_best)]
        self._writer = Background()
        self._last: Counters | None = None
        self._lost: dict[KeptBest, Kept] = {}
        self._regained: dict[KeptBest, Kept] = {}
        self._unsaved: _Unsaved | None = None
        self._retries = Retries()
        self._failure: BaseException | None = None
        self._gather: Gather | None = None
        self._grace = Grace(grace_s)

    def listeners(self) -> list[Listener]:
        watching = [Listener(Callback.on_eval_end, self._watch)] if self.best else []
        return [*super().listeners(), *watching, periodic(self.every, partial(self._ask, reason=str(self.every)))]

    @property
    def monitors(self) -> list[Monitor]:
        """What `keep_best` watches."""
        return [best.monitor for best in self.best]

    def on_setup(self, run: Run) -> None:
        place = self.directory or run.directory_of_checkpoints
        if place is None:
            raise ValueError("Checkpoint needs a place: Trainer(directory=...), or Checkpoint(directory=...)")
        # Several runs, or several of this class, may share a place: each deletes only what it wrote.
        writer, name = run.branch.run, run.hooks.name_of(self)
        self.store = Store(place, writer if name == "Checkpoint" else f"{writer}/{name}", run.branch)
        self._last, self._failure, self._lost, self._regained, self._unsaved = None, None, {}, {}, None
        probe_on_all_ranks(self.store, run.driver)
        self._gather = run.driver.aside() if run.driver.shards else None
        self._retries = Retries(self._gather)
        for best in self.best:
            best.forget()
        run.savers.append(self._save)

    def on_fit_start(self, run: Run) -> None:
        for best in self.best:
            best.monitor.check_reported_by(run.evaluations)
        snapshot.check_states(run)  # now, not when the first checkpoint is due
        if run.is_main:
            self.store.sweep()
        self._forget_best_that_are_gone(run)
        # Of a moment that goes on the checkpoint holds the beginning: what follows is to be saved, though no counter moves.
        self._last = run.progress.now() if run.progress.step and run.requests.suspended is None else None
        if self.watch_signals:
            run.requests.from_signals = True
            run.at_end(signals_heard(run.requests.preempt, show=run.is_main))
        run.at_end(partial(self._finish, run))  # called before the one above: a signal shall not cut the last write short

    def on_stop(self, run: Run, reason: str) -> None:
        self._save(run, reason)  # a stop is taken at the border of a step

    def on_exception(self, run: Run, error: BaseException) -> None:
        if self.watch_errors and run.progress.step:
            self._save(run, f"an error: {error!r}")

    def on_fit_end(self, run: Run) -> None:
        if run.outcome is not None and run.outcome.kind in ("finished", "stopped"):
            self._save(run, "the end of the run")
        self._finish(run)
        lost = self._why_lost(run)
        if together(run):
            lost = next((one for one in run.driver.gather(lost) if one), None)
        if lost:
            error = CheckpointLostError(lost)
            run.outcome = Outcome("failed", repr(error))  # on all ranks, before the sinks close, since they report it
            raise error

    def state_dict(self) -> dict[str, Any]:
        return {"best": {best.monitor.name: best.state_dict() for best in self.best}} if self.best else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for best in self.best:
            if (saved := state.get("best", {}).get(best.monitor.name)) is not None:
                best.load_state_dict(saved)

    # -- saving ------------------------------------------------------------------------------------

    def _watch(self, run: Run, evaluation: Evaluation) -> None:
        for best in self.best:
            value = best.monitor.value_of(run, evaluation)
            if value is not None and run.driver.broadcast(best.monitor.update(run, value)):
                best.pending, best.chosen_at = True, run.progress.step
                best.weights = evaluation.weights if evaluation.weights in averages_of(run) else None
                self._ask(run, reason=f"{best.monitor.name} is {value:g}, the best so far")

    def _ask(self, run: Run, *, reason: str) -> None:
        run.at_next_border(partial(self._save, run, reason))

    def _forget_best_that_are_gone(self, run: Run) -> None:
        """Restart the search for a best checkpoint that an abandoned branch has replaced."""
        if not any(best.name for best in self.best):
            return
        there = run.driver.broadcast({saved.name for saved in self.store.saved()} if run.is_main else None)
        for best in self.best:
            if best.name is not None and best.name not in there:
                run.warn(
                    f"{best.name}, the best by {best.monitor.name}, no longer exists: the search for the best starts again"
                )
                best.forget()

    def _save(self, run: Run, reason: str) -> None:
        if self._failure is not None and self.strict:
            failure, self._failure = self._failure, None
            raise failure
        there = self._last == run.progress.now() and run.at_border and not any(best.pending for best in self.best)
        if together(run):  # only the main process knows whether a write failed
            there = run.driver.broadcast(there)
        if there:
            return
        with run.hooks.during("saving"):
            self._save_now(run, reason)

    def _save_now(self, run: Run, reason: str) -> None:
        if run.driver.shards and run.driver.world_size > 1 and not together(run):
            why, data = "after an error a rank cannot count on the others' parts", {"step": run.progress.step, "error": None}
            run.decide("not saved", f"step {run.progress.step}: {why}", data=data)
            return
        if self._writer.busy:
            run.decide("waited", "the last checkpoint is still being written", who=run.hooks.name_of(self))
        self._writer.wait()
        self._retries.stop()  # the save that begins is newer
        name, judging = self._next_name(run) if run.is_main else "", any(best.pending for best in self.best)
        if together(run):
            judging = run.driver.broadcast(judging)
        writes = run.is_main or run.driver.shards
        finite = writes and judging and snapshot.is_finite(run)
        former = {best: best.kept for best in self.best}
        for best in self.best:
            if not run.is_main:
                best.pending = False
            elif best.pending:
                best.put_back((name, best.monitor.best) if finite else best.kept)
        taken = snapshot.take(run, reason)
        if not writes:
            return
        # If several monitors chose this step, the first in `keep_best` counts, also if the step is saved again.
        judged = next((best.weights for best in self.best if best.chosen_at == run.progress.step), None)
        content = taken.content(exact=snapshot.is_exact(run), weights_only=self.weights_only, judged=judged)
        self._last = run.progress.now()
        write = partial(self._write, run, _Unsaved(content, self._last, former, {best: best.kept for best in self.best}))
        if self.background:
            self._writer.start(write)
        else:
            write()
            self._raise_failure()

    def _next_name(self, run: Run) -> str:
        """Return the name of the checkpoint to write. If the folder cannot be read, the write reports the error."""
        self._take_back()
        try:
            return self.store.next_name(run.progress.step)
        except Exception:
            return f"step-{run.progress.step:08d}"

    def _write(self, run: Run, save: _Unsaved) -> None:
        """Write, then let go of what is no longer kept. Errors are told at the next border: this may run in a thread."""
        try:
            saved = self._written(run, save.content)
        except Exception as error:
            save.error = error
            self._lose(run, save)
        else:
            self._keep(run, saved, save)

    def _write_again(self, run: Run, save: _Unsaved) -> bool:
        save.attempts += 1
        try:
            saved = self._written(run, save.content)
        except Exception as error:
            save.error = error
            return False
        self._last, self._regained = save.at, save.kept
        run.at_next_border(self._take_back)
        self._keep(run, saved, save)
        return True

    def _written(self, run: Run, content: Content) -> Saved:
        if run.is_main:
            with suppress(OSError):  # lost rows are written again from the history when the run continues
                run.sync_files()
        if self._gather is None:
            return self._grace.write(self.store, content, run.requests.signalled_at)
        return self.store.write_together(content, run.driver.rank, self._gather)

    def _keep(self, run: Run, saved: Saved, save: _Unsaved) -> None:
        self._unsaved = None
        if not run.is_main:
            return
        again = f", at attempt {save.attempts}" if save.attempts > 1 else ""
        reason, data = save.content.facts["reason"], {"checkpoint": saved.name, "step": saved.step, "attempts": save.attempts}
        best = [
            monitored.monitor.best_data(value=value, step=saved.step)
            for monitored, (name, value) in save.kept.items()
            if name == saved.name
        ]
        self._note(run, "saved", f"{saved.name}: {reason}{again}", {**data, "reason": reason, "best": best})
        try:
            self._prune(run, saved)
        except Exception as error:  # it is written, and that counts
            self._note(run, "not pruned", repr(error), {"error": repr(error)})

    def _prune(self, run: Run, newest: Saved) -> None:
        if self.keep_last is None:
            return
        newest_of_step = {rank[:-1]: saved.name for rank, saved in self.store.saved_by_run()}
        last = list(newest_of_step.values())[-self.keep_last :]  # abandoned branches come first
        gone = self.store.prune({newest.name, *last, *(best.name for best in self.best if best.name)})
        if gone:
            self._note(run, "pruned", ", ".join(gone), {"checkpoints": list(gone)})

    def _note(self, run: Run, what: str, why: str, data: Mapping[str, Any]) -> None:
        run.at_next_border(partial(run.decide, what, why, who=run.hooks.name_of(self), data=data))

    def _lose(self, run: Run, save: _Unsaved) -> None:
        """Report at the end of the step that a checkpoint was not written, keep the previous best, and try again."""
        self._failure, self._last, self._lost, self._unsaved = save.error, None, save.former, save
        run.at_next_border(partial(self._tell, run, save.at.step, save.error))
        if not self.strict:
            self._retries.start(partial(self._write_again, run, save))

    def _take_back(self) -> None:
        """Set the best to a checkpoint that is written. If a later attempt succeeds, its checkpoint is the best again."""
        lost, self._lost = self._lost, {}
        regained, self._regained = self._regained, {}
        for best, kept in (*lost.items(), *regained.items()):
            best.kept = kept
            if not best.pending:  # else a better one came meanwhile
                best.monitor.best = best.value

    def _tell(self, run: Run, step: int, error: Exception | None) -> None:
        self._take_back()
        data = {"step": step, "error": repr(error)}
        run.decide("not saved", f"step {step}: {error!r}", who=run.hooks.name_of(self), data=data)
        next_try = "" if self.strict else ". It is tried again until the next save"
        run.warn(f"the checkpoint of step {step} could not be written, and the training goes on: {error!r}{next_try}")
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None and self.strict:
            raise failure

    def _finish(self, run: Run) -> None:
        with run.hooks.during("saving"):
            self._writer.wait()
            self._retries.stop()
            save = self._unsaved
            if save is not None and not self.strict and (self._gather is None or together(run)):
                self._retries.finish(partial(self._write_again, run, save))
        self._raise_failure()

    def _why_lost(self, run: Run) -> str | None:
        """Return the reason why the last checkpoint of the run is lost; None if it is written."""
        save = self._unsaved
        if save is None:
            return None
        return (
            f"the run ended, and its last checkpoint, of step {save.at.step}, could not be written to {self.store.files} in "
            f"{save.attempts} attempts: {save.error!r}. Free space there; then fit(resume='auto') continues at the newest "
            "written checkpoint. Or keep the weights with save_weights(model, path) before this process ends."
        )


@dataclass(slots=True)
class _Unsaved:
    """A checkpoint that is not written yet."""

    content: Content
    at: Counters
    former: dict[KeptBest, Kept]
    kept: dict[KeptBest, Kept]
    error: Exception | None = None
    attempts: int = 1
