"""Requeue a SLURM job after a signal has ended its run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation
from cadenza.status.decisions import decide
from cadenza.status.signals import WatchesSignals

if TYPE_CHECKING:
    from cadenza.run import Run

_PATIENCE_S = 30.0


class SlurmRequeue(Callback):
    """Requeue this SLURM job with ``scontrol requeue`` after SIGTERM or SIGUSR1 ended the run and a checkpoint is written.

    Use it with ``sbatch --requeue --signal=USR1@120``. SLURM sends the signal before the time limit, and `Checkpoint` saves.
    Then the script starts again and continues with ``fit(resume="auto")``. Only the main process calls ``scontrol``. The job is
    not requeued after Ctrl-C, or if the last checkpoint could not be written. The callback only warns, at the start, if it
    runs outside of a SLURM job, if ``scontrol`` does not exist, or if no `Checkpoint` handles signals.

    With multiple ranks: the main process requeues the job when all ranks have saved; it does not communicate.

    Args:
        command: The command that requeues a job. The id of the job is added as the last argument.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[SlurmRequeue()]).outcome.kind
    'finished'
    """

    before: Relation = (Phase.SAVE,)  # the first registered cleanup runs last, after the checkpoint is written

    def __init__(self, command: tuple[str, ...] = ("scontrol", "requeue")) -> None:
        if isinstance(command, str) or not command:
            raise TypeError(f'command must be a tuple of strings such as ("scontrol", "requeue"); got {command!r}')
        self.command: tuple[str, ...] = tuple(command)

    def on_fit_start(self, run: Run) -> None:
        job = job_of(os.environ)
        if job is None:
            run.warn(
                "SlurmRequeue has no effect: SLURM_JOB_ID is not set. Start the script with sbatch, or remove the callback."
            )
        elif shutil.which(self.command[0]) is None:
            run.warn(f"SlurmRequeue has no effect: the program {self.command[0]!r} is not on PATH. Run on a SLURM node.")
        elif not any(
            isinstance(callback, WatchesSignals) and callback.watch_signals for callback in hooks_of(run).callbacks.values()
        ):
            run.warn("SlurmRequeue has no effect: no callback handles signals. Add Checkpoint(...) to callbacks.")
        elif run.is_main:
            # The result of the last write is recorded after all cleanups, and the requeue comes after that.
            run.at_end(lambda: run.after_step(partial(self._requeue, run, job)))

    def _requeue(self, run: Run, job: str) -> None:
        if run.outcome is None or run.outcome.kind != "preempted":  # it is "failed" if the last checkpoint could not be written
            return
        if threading.current_thread() is threading.main_thread():
            # SLURM sends SIGTERM to a job that it requeues; this process is about to end anyway.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            done = subprocess.run([*self.command, job], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
            problem = (done.stderr or done.stdout).strip() or f"status {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.SubprocessError) as error:
            problem = repr(error)
        if problem:
            run.warn(f"the job {job} could not be requeued: {problem}. Submit it again with sbatch.")
        decide(run, "not requeued" if problem else "requeued", problem or f"{' '.join(self.command)} {job}", who="SlurmRequeue")


def job_of(environment: Mapping[str, str]) -> str | None:
    """Return the id of the SLURM job of this process. In a job array, it is the id of the task. None without SLURM.

    >>> job_of({"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "7"})
    '40_7'
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")
