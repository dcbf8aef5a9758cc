"""Repeat a past step of a run: from the nearest checkpoint before it, without touching the run."""

from __future__ import annotations

import atexit
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.engine.loop import END, Training
from cadenza.engine.monitor import Monitor
from cadenza.engine.session import Session, session_of
from cadenza.engine.step_state import Cursor
from cadenza.errors import DataError, DistributedError, add_note
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.parallel.slurm_requeue import SlurmRequeue
from cadenza.records.record import Record
from cadenza.run import Run
from cadenza.sinks.sink import Sink
from cadenza.status.encoding import same
from cadenza.status.formats import counted
from cadenza.testing.proof import depends_on_clock
from cadenza.timetravel.replay_start import ReplayStart
from cadenza.trackers.alert import Alert
from cadenza.trackers.optuna_pruning import OptunaPruning
from cadenza.trackers.save_predictions import SavePredictions
from cadenza.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Difference:
    """The first recorded value that a repeated run does not have."""

    step: int
    """The step of the record."""
    name: str
    """The name of the value, such as ``"train/loss"``."""
    recorded: float
    """The value that the run recorded."""
    repeated: float
    """The value now."""

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: recorded {self.recorded!r}, repeated {self.repeated!r}"


class Replay:
    """A run that was repeated up to a past step, and stands before it. `replay_step` returns it.

    It has its own temporary directory. Use it in a ``with`` block, or call `close`.
    """

    def __init__(self, trainer: Trainer, start: ReplayStart, step: int, witness: _Witness) -> None:
        self._trainer, self._start, self._target, self._witness = trainer, start, step, witness
        self._part: AbstractContextManager[Training] | None = None
        self._pauses: Iterator[None] = iter(())
        self._over = False
        self._folder = Folder(start.folder, owned=trainer.driver.is_main)
        if trainer.driver.world_size == 1:  # other ranks may be gone by then
            close_at_exit(self)
        self.batch: Any = None
        """The first batch of the next step, on the device. With accumulation, the step reads its other batches when it runs."""
        self.checkpoint: str = start.checkpoint
        """The path of the checkpoint from which the run was repeated."""
        self.difference: Difference | None = None
        """The first recorded value that differs. None: all values that were compared are equal, to the bit."""
        self.compared: int = 0
        """The number of recorded values that were compared so far. 0 if the run recorded none in these steps."""

    @property
    def run(self) -> Run:
        """The run. Its model, optimizers and callbacks have the state before the next step."""
        return self._witness.session.run

    @property
    def step(self) -> int:
        """The number of the next step, from 1: ``run.progress.step + 1``."""
        return self.run.progress.step + 1

    @property
    def over(self) -> bool:
        """Whether no step follows: the run reached its end, failed, or was closed."""
        return self._over

    @property
    def recorded(self) -> Mapping[str, float]:
        """The values that the run recorded at the next step; empty if it recorded none. On the main process only."""
        return self._start.recorded.get(self.step, {})

    def step_once(self) -> float | None:
        """Do the next step; return its loss, the mean over its batches and all ranks. Every rank must call this.

        The values that it records are compared with those of the run. None if all batches of the step were skipped.

        Raises:
            RuntimeError: The replay is over.
            DistributedError: Another rank called `close`.
            Exception: The error that the step raises. The replay is over then.
        """
        if self._over:
            raise RuntimeError("this replay is over. Call replay_step(...) again.")
        self._meet("step_once()")
        self._witness.loss = None
        self._go_on()
        self._compare()
        return self._witness.loss

    def close(self) -> None:
        """End the run before its next step, and delete its temporary directory. Every rank must call this.

        The hooks of the end of an epoch and of a run are called. An error of one of them is a warning.

        Raises:
            DistributedError: Another rank called `step_once`.
        """
        if not self._over and self._witness.begun:
            self._meet("close()")
            self._witness.leaving = True
            session = self._witness.session
            session.run.stop("the replay is closed")
            try:
                self._go_on()
            except Exception as error:  # such as that of a callback that needs whole epochs
                session.warn(f"an error at the end of the replay, which was closed before its next step: {error!r}")
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self._over and self._trainer.driver.world_size > 1:
            self._end(error)  # the hooks at the end of a run would wait for ranks without this error
        self.close()

    def __repr__(self) -> str:
        state = "over" if self._over else f"before step {self.step}"
        differs = f", differs in {self.difference}" if self.difference else f", {counted(self.compared, 'value')} equal"
        return f"<Replay: {state}, from {self.checkpoint}{differs}>"

    def _begin(self, override: Sequence[str] | Mapping[str, Any], *, replay: bool) -> None:
        part = within(self._folder, self._trainer._part(self.checkpoint, override, replay=replay))
        training = part.__enter__()
        self._part, self._pauses = part, self._witness.pauses(training)
        self._go_on()
        if self._over:
            raise ValueError(
                f"the run of this trainer ends at {self._witness.session.progress}, before step {self._target} begins. Give "
                "the trainer that did this step, with its limits (max_epochs, max_steps, max_tokens)."
            )
        session = self._witness.session
        for reason in self._start.warnings:
            session.warn(reason)
        self._compare()

    def _meet(self, verb: str) -> None:
        """Raise `DistributedError` if another rank called another verb, instead of a wait for each other without an end."""
        driver = self._trainer.driver
        verbs = driver.gather(verb) if driver.world_size > 1 else []
        other = next((rank for rank, evaluation in enumerate(verbs) if evaluation != verb), None)
        if other is not None:
            error = DistributedError(
                f"rank {driver.rank} called {verb} of a replay, and rank {other} called {verbs[other]}. Every rank must call "
                "replay_step, step_once and close, in the same order: not inside of `if rank == 0`."
            )
            self._end(error)
            raise error

    def _go_on(self) -> None:
        """Train to the next pause."""
        self.batch = None
        try:
            self._over = next(self._pauses, END) is END
        except BaseException as error:
            self._end(error)
            raise
        if self._over:
            self._end()
        else:
            self.batch = self._witness.batch

    def _compare(self) -> None:
        """Compare the new records with those of the run. Every rank must call this."""
        session = self._witness.session
        if not self._over:
            session.metrics.deliver(session.run, wait=True)
        found = None
        for record in self._witness.taken():
            recorded = self._start.recorded.get(record.step, {})
            for name, value in record.values.items():
                if name in recorded and not depends_on_clock(name):
                    self.compared += 1
                    if found is None and not same(recorded[name], float(value)):
                        found = Difference(record.step, name, recorded[name], float(value))
        found, self.compared = session.driver.broadcast((found, self.compared))
        if self.difference is None and found is not None:
            self.difference = found
            session.warn(
                f"the repeated run differs from the recorded one. The first difference is {found}. Equal bits need the code, "
                "the data, the arguments, the torch build, the device type and the number of threads and ranks of the run."
            )

    def _end(self, error: BaseException | None = None) -> None:
        """End the run, also with an error that other ranks may not have, and delete its directory."""
        part, self._part, self._over = self._part, None, True
        try:
            if part is not None:
                part.__exit__(None if error is None else type(error), error, None)
        finally:
            self._folder.delete()


def replay_step(
    trainer: Trainer,
    run: str | PathLike[str],
    step: int,
    *,
    leave_out: type | tuple[type, ...] = (),
    replay: bool = False,
    override: Sequence[str] | Mapping[str, Any] = (),
) -> Replay:
    """Repeat a run up to a past step, and return it as it stands before this step, with its batch. Every rank must call this.

    The run continues from the newest checkpoint before the step, in a temporary directory. The directory of `run` is only read.
    Sinks, `Checkpoint` and callbacks that act outside of the run (`Alert`, `OptunaPruning`, `SavePredictions`, `SlurmRequeue`,
    loggers and checkpoints of other systems) are left out. The recorded values of the repeated steps are compared with the
    repeated ones, to the bit; values that depend on the clock are not. See `Replay.difference`.

    Args:
        trainer: A trainer with the arguments of the run, made as the script makes it, for the same number of ranks. Its model
            and its callbacks get the state of the repeated run, so it must not have a run under way. Nothing is written to its
            ``directory``.
        run: The directory of the run.
        step: The number of the step, from 1: the step that makes ``progress.step`` equal to it. A step that failed counts.
        leave_out: Classes of further callbacks to leave out, such as one of your own that writes files.
        replay: As for ``fit``: read and drop batches, if the loader cannot start inside an epoch.
        override: As for ``fit``, for steps after a resume with ``override=`` and before its first checkpoint.

    Raises:
        DirectoryError: `run` holds no run.
        ValueError: The run did not do this step; or ranks gave different steps.
        DistributedError: Another rank has one of these errors.
        RuntimeError: The model of the trainer is in a run or a replay that is not over.
        CheckpointError: No checkpoint before the step can be used.
        CheckpointMismatchError: The trainer has other arguments than the run.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint, LogTraining
    >>> from cadenza.testing import tiny_trainer
    >>> def make(folder):
    ...     callbacks = [LogTraining("1 step", throughput=False), Checkpoint("5 steps", keep_last=None)]
    ...     return tiny_trainer(steps=20, seed=1, directory=folder, callbacks=callbacks)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorded = make(folder).fit().history["train/loss"]
    ...     with replay_step(make(folder), folder, 13) as again:
    ...         print(again.run.progress.step, again.step_once() == dict(recorded)[13], again.difference)
    12 True None
    """
    start = ReplayStart.on_all_ranks(trainer, run, step)
    witness = _Witness(step, start.recovery)
    repeated = Replay(_separate(trainer, start, leave_out, witness), start, step, witness)
    try:
        repeated._begin(override, replay=replay)
    except BaseException as error:
        repeated._end()
        if isinstance(error, DataError) and witness.begun and witness.session.cursor.source.obstacle is not None:
            add_note(error, "Here: replay_step(trainer, run, step, replay=True), or save checkpoints at the end of epochs.")
        raise
    return repeated


class _Witness(Callback):
    """Pauses the run before each step from the target on, and keeps its records."""

    def __init__(self, target: int, recovery: Mapping[str, Any] | None) -> None:
        self.target: int = target
        self.recovery: Mapping[str, Any] | None = recovery
        self.begun: bool = False
        self.leaving: bool = False
        self.batch: Any = None
        self.loss: float | None = None
        self.session: Session
        self._records: list[Record] = []

    def on_setup(self, run: Run) -> None:
        self.session, self.begun = session_of(run), True
        self.session.advises = False
        if self.recovery is not None:
            self.session.restored.recovery = self.recovery

    def on_log(self, run: Run, record: Record) -> None:
        self._records.append(record)

    def taken(self) -> list[Record]:
        """Return the records since the last call."""
        records, self._records = self._records, []
        return records

    def pauses(self, training: Training) -> Iterator[None]:
        """Train, and pause before each step from the target on. A run that is being left ends its epoch."""
        session = training.session
        while training.next_epoch():
            while not self.leaving and training.advance():
                if session.progress.step + 1 >= self.target and self._read_batch(session.cursor):
                    yield
                    self.batch = None
                if self.leaving or not training.next_step():
                    break
                while training.next_batch():
                    training.compute()
                training.end_step()
                if session.progress.step >= self.target and (loss := session.sync.mean_loss()) is not None:
                    self.loss = loss.item()

    def _read_batch(self, cursor: Cursor) -> bool:
        """Read the first batch of the next step, and put it back. Return whether there is one."""
        first = next(cursor.batches, END)
        cursor.batches = chain([] if first is END else [first], cursor.batches)
        if first is not END:
            self.batch = self.session.driver.to_device(first)
        return first is not END


def _separate(trainer: Trainer, start: ReplayStart, leave_out: type | tuple[type, ...], witness: _Witness) -> Trainer:
    """Return a trainer for the replay, with the same model, optimizer and loader."""
    again = copy(trainer)
    again._run = again._handle = again._last_progress = None
    again.directory = Path(start.folder)
    names = {id(callback): name for name, callback in trainer._hooks().callbacks.items()}
    again.callbacks = [
        left_out(callback, names[id(callback)]) if acts_outside(callback, leave_out) else callback
        for callback in trainer.callbacks
    ]
    again.callbacks.append(witness)
    return again


_NATIVE = (Sink, Alert, Checkpoint, OptunaPruning, SavePredictions, SlurmRequeue)
_MODULES = ("loggers", "integrations")
_PARTS = ("Checkpoint", "Logger", "Tracker", "TensorBoard", "BackupAndRestore", "RemoteMonitor", "Wandb", "MLflow")
"""Modules, and parts of the names of classes, that other systems have for loggers and for what saves the model."""


class LeftOut(Callback):
    """Stands for a callback that a replay leaves out: its name and its saved state are known, and it does nothing."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state."""


class LeftOutCheckpoint(LeftOut):
    """Stands for a `Checkpoint`: others see what it watches, and may request saves, which write nothing."""

    def __init__(self, name: str, given: Checkpoint) -> None:
        super().__init__(name)
        self.monitors: list[Monitor] = given.monitors

    def on_setup(self, run: Run) -> None:
        session_of(run).savers.append(self)

    def request(self, reason: str) -> None:
        """Write nothing."""


def left_out(callback: BaseCallback, name: str) -> LeftOut:
    """Return what stands for a callback that a replay leaves out."""
    return LeftOutCheckpoint(name, callback) if isinstance(callback, Checkpoint) else LeftOut(name)


def acts_outside(callback: BaseCallback, others: type | tuple[type, ...] = ()) -> bool:
    """Return whether a callback writes files, or calls a service, outside of the directory of its run; or is one of `others`.

    Sinks count, also those that only show the run.
    """
    if isinstance(callback, ForeignCallback):
        kind = type(callback.callback)
        names = [base.__name__ for base in kind.__mro__]
        parts = {part for base in kind.__mro__ for part in base.__module__.split(".")}
        known = any(part in name for part in _PARTS for name in names) or any(evaluation in parts for evaluation in _MODULES)
        return known or isinstance(callback.callback, others)
    return isinstance(callback, (*_NATIVE, others)) or type(callback).__module__.startswith("cadenza.sinks.")


class Folder:
    """A temporary directory. The process that owns it deletes it at the latest when nothing refers to this object."""

    def __init__(self, path: str, *, owned: bool) -> None:
        self._finalizer = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        if not owned:
            self._finalizer.detach()

    def delete(self) -> None:
        """Delete it, once."""
        self._finalizer()


@contextmanager
def within(folder: Folder, part: AbstractContextManager[Training]) -> Iterator[Training]:
    """Delete the folder after the run: also if the replay is left open, and its run ends when nothing refers to it."""
    try:
        with part as training:
            yield training
    finally:
        folder.delete()


def close_at_exit(opened: Any) -> None:
    """Call ``opened.close()`` at the end of the process, while all modules are there, if the object exists then."""
    held = weakref.ref(opened)

    def close() -> None:
        if (left := held()) is not None:
            left.close()

    atexit.register(close)
