"""Instants at which a training of `kill.py` sends itself a signal: at an operation on its files, or in a hook."""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza import Callback, Run, on

# Operations in which a directory is read, written and pruned, by their audit events.
OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.symlink", "os.link", "os.remove", "os.rmdir"})
REMOVALS = frozenset({"os.remove", "os.rmdir"})
PHASE_FROM = {"on_setup": "start", "on_step_start": "training", "on_fit_end": "end"}
MOMENTS = (
    Callback.on_setup,
    Callback.on_fit_start,
    Callback.on_epoch_start,
    Callback.on_fetch_end,
    Callback.on_step_start,
    Callback.on_after_backward,
    Callback.on_before_optimizer_step,
    Callback.on_step_end,
    Callback.on_eval_start,
    Callback.on_eval_batch_end,
    Callback.on_eval_end,
    Callback.on_log,
    Callback.on_save,
    Callback.on_epoch_end,
    Callback.on_fit_end,
)


@dataclass(frozen=True)
class Instant:
    """The `number`-th time that a process reaches a file operation of a phase, or a moment."""

    place: str
    number: int
    signal: int

    @staticmethod
    def draw(directory: Path, signal: int, dice: random.Random) -> Instant:
        """Return an instant in a process that continues the run in `directory`, based on the counts of earlier processes."""
        counts = json.loads(_counts_of(directory).read_text())
        moments = sorted(counts.keys() & {moment.__name__ for moment in MOMENTS})
        place = dice.choice(["start", "training", "prune", "end", dice.choice(moments)])
        reached = counts.get(place, 1) * dice.random() ** 2  # the later process may have less work
        return Instant(place, dice.randint(1, 1 + int(reached)), signal)


class Watch:
    """Counts operations of this process and sends it the signal at the instant."""

    def __init__(self, directory: Path, instant: Instant | None) -> None:
        self.directory, self.instant, self.process = directory, instant, os.getpid()
        self.phase, self.counts = "start", Counter[str]()
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count an operation on a file of the run. Loader workers are forks, and do not count."""
        if event in OPERATIONS and os.getpid() == self.process and self._is_of_the_run(event, arguments):
            self.reach("prune" if event in REMOVALS else self.phase)

    def reach(self, place: str) -> None:
        """Count a place."""
        self.counts[place] += 1
        if self.instant and (self.instant.place, self.instant.number) == (place, self.counts[place]):
            os.kill(self.process, self.instant.signal)

    def hook(self, moment: str) -> None:
        """Count a moment. The first step marks the start of the training."""
        if (phase := PHASE_FROM.get(moment, self.phase)) != self.phase:
            self.phase = phase
            if phase == "training":
                self.write({"start": self.counts["start"]})
                began_of(self.directory).touch()
        self.reach(moment)

    def write(self, counts: Mapping[str, int]) -> None:
        """Write counts next to the directory, replacing those of earlier processes."""
        path, beside = _counts_of(self.directory), self.directory.with_suffix(".counts-new")
        before = json.loads(path.read_text()) if path.exists() else {}
        beside.write_text(json.dumps({**before, **counts}))
        beside.replace(path)

    def _is_of_the_run(self, event: str, arguments: tuple[Any, ...]) -> bool:
        beneath = f"{self.directory}{os.sep}"
        # `shutil.rmtree` removes names relative to an open folder, whose descriptor is the second argument.
        return any(str(path).startswith(beneath) for path in arguments[:2]) or (event in REMOVALS and arguments[1] != -1)


_watching: list[Watch] = []


def watch(directory: Path, instant: Instant | None) -> Watch:
    """Watch this process, which trains in `directory`."""
    _watching[:] = [Watch(directory, instant)]
    return _watching[0]


def among(callbacks: Iterable[Any], dice: random.Random) -> list[Any]:
    """Return callbacks with a function for each moment among them, which notifies the watch."""
    placed = list(callbacks)
    for moment in MOMENTS:

        @on(moment)
        def tell(run: Run, *_: Any, name: str = moment.__name__) -> None:
            _watching[0].hook(name)

        placed.insert(dice.randint(0, len(placed)), tell)
    return placed


def began_of(directory: Path) -> Path:
    """Return the file that exists once a process has begun to train in `directory`."""
    return directory.with_suffix(".began")


def _counts_of(directory: Path) -> Path:
    return directory.with_suffix(".counts")
