"""Prove that a trainer's runs continue to the same bits: whole against cut and resumed."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cadenza.batching import tensors_in
from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.listener import Listener
from cadenza.moments import Callback, moments_of
from cadenza.run import Run
from cadenza.seeding import Streams
from cadenza.store.tree import first_difference
from cadenza.trainer import Trainer

CLOCKS = ("*_per_s", "time/*")


def prove_resume(
    make_trainer: Callable[[Path], Trainer], at: Sequence[int], *, ignore: Sequence[str] = CLOCKS, replay: bool = False
) -> None:
    """Run whole; then, for each step, cut a run right after that step and continue it; compare everything bit for bit.

    Compared are the final weights, optimizers, schedulers and all other states of callbacks, random streams, history and
    records, and from the cut on the moments and the content of every batch.

    Args:
        make_trainer: Makes the trainer anew for a directory, with a seed: model, loader and callbacks too, always the same.
            Without a `Checkpoint` in its list, one is added.
        at: Steps, counted from 1, after which to cut.
        ignore: Patterns of names in records that depend on the clock.
        replay: See `Trainer.fit`.

    Raises:
        AssertionError: Something differs; the message names the first thing, and the step of the cut.
        ValueError: The trainer has no seed, or a step is beyond the end of the run.

    >>> from cadenza.testing import tiny_trainer
    >>> prove_resume(lambda directory: tiny_trainer(directory=directory, epochs=2, seed=1), at=[1, 7])
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = _Take(make_trainer, Path(folder, "whole"))
        whole.fit()
        for step in at:
            directory = Path(folder, f"cut-{step}")
            cut = _Take(make_trainer, directory, cut_after=step)
            cut.fit()
            if cut.run is not None:
                raise ValueError(f"the run cannot be cut after step {step}: it ended at {cut.run.progress.now()}")
            continued = _Take(make_trainer, directory)
            continued.fit(resume="auto", replay=replay)
            difference = whole.difference(continued, step, ignore)
            assert difference is None, f"the run that was cut after step {step} differs from the whole one in {difference}"


class _Cut(BaseException):
    """Ends a run as a kill would: nothing that it does in the end is looked at."""


class _Witness(Callback):
    """Notes the moments, and a checksum of every batch, by step."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str]] = []
        self.batches: dict[int, int] = {}

    def listeners(self) -> list[Listener]:
        return [Listener(moment, self._noting(name)) for name, moment in self.moments_of_interest().items()]

    def moments_of_interest(self) -> dict[str, Callable[..., None]]:
        """Return the moments that a continued run repeats exactly."""
        # Records come when their numbers have left the device; they are compared as such.
        once = {"on_setup", "on_fit_start", "on_load", "on_save", "on_log"}
        return {name: moment for name, moment in moments_of(Callback).items() if name not in once}

    def _noting(self, name: str) -> Callable[..., None]:
        def note(run: Run, *arguments: Any) -> None:
            self.heard.append((run.progress.step, name))
            if name == "on_batch_start":
                content = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors_in(arguments[0]))
                self.batches[run.progress.batch] = zlib.crc32(content)

        return note

    def since(self, step: int) -> list[tuple[int, str]]:
        """Return the moments after the end of a step; of a run that continues there, all but that its epoch starts again."""
        if (step, "on_step_end") in self.heard:
            return self.heard[self.heard.index((step, "on_step_end")) + 1 :]
        return self.heard[1:] if self.heard[:1] == [(step, "on_epoch_start")] else self.heard


class _Cutter(Callback):
    """Has a checkpoint written after a step, and cuts the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.step:
            run.save("the run is cut here")
            run.at_next_border(self._cut)

    def _cut(self) -> None:
        raise _Cut


class _Take:
    """One run with a witness."""

    def __init__(self, make: Callable[[Path], Trainer], directory: Path, cut_after: int | None = None) -> None:
        self.trainer = trainer = make(directory)
        self.witness = _Witness()
        if trainer.seed is None:
            raise ValueError("two runs can only be compared if they are random alike: expected Trainer(seed=...); got none")
        if not any(isinstance(callback, Checkpoint) for callback in trainer.callbacks):
            trainer.callbacks.append(Checkpoint(lambda run: False))
        trainer.callbacks.append(self.witness)
        if cut_after is not None:
            trainer.callbacks.append(_Cutter(cut_after))
        self.run: Run | None = None

    def fit(self, **arguments: Any) -> None:
        try:
            self.run = self.trainer.fit(**arguments)
            self.streams = Streams.capture().to_plain()
        except _Cut:
            return

    def difference(self, other: _Take, step: int, ignore: Sequence[str]) -> str | None:
        batches = {batch: crc for batch, crc in self.witness.batches.items() if batch in other.witness.batches}
        pairs = {
            "batches": (batches, other.witness.batches),
            "model": (dict(self.trainer.model.state_dict()), dict(other.trainer.model.state_dict())),
            "states": (self._states(), other._states()),
            "random streams": (self.streams, other.streams),
            "history": (self._history(ignore), other._history(ignore)),
            "records": (self._records(ignore), other._records(ignore)),
            "moments": (self.witness.since(step), other.witness.since(step)),
        }
        for name, (mine, theirs) in pairs.items():
            if difference := first_difference(mine, theirs, name):
                return difference
        return None

    def _states(self) -> dict[str, Any]:
        assert self.run is not None, "the run was cut"
        run, apart = self.run, (Checkpoint, _Witness)
        states = {n: c.state_dict() for n, c in run.hooks.callbacks.items() if not isinstance(c, apart)}
        optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
        own = {"progress": str(run.progress.now()), "run.state": dict(run.state), "precision": run.precision.state_dict()}
        return {**own, "optimizers": optimizers, "callbacks": states}

    def _history(self, ignore: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
        assert self.run is not None, "the run was cut"
        history = self.run.history
        return {name: history[name] for name in history.names if not any(fnmatch(name, clock) for clock in ignore)}

    def _records(self, ignore: Sequence[str]) -> list[dict[str, Any]]:
        path = Path(str(self.trainer.directory), "metrics.jsonl")
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        clocks = ("time", *ignore)
        return [{k: v for k, v in record.items() if not any(fnmatch(k, clock) for clock in clocks)} for record in records]
