"""What a loop of one's own does not keep is named in the first steps, if the run writes checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Loop, Run, attach
from cadenza.callbacks import Checkpoint

MODULE = SimpleNamespace(rng=random.Random(1))


def begun(directory: Path, *others: Any, save: bool = True) -> Loop:
    model = nn.Linear(1, 1)
    callbacks = [Checkpoint("2 steps"), *others] if save else [*others]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return attach(model, optimizer, callbacks=callbacks, directory=directory, max_steps=6, progress=False)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "moved in the first steps" in one.getMessage()]


def play(loop: Loop, *draw: Any) -> None:
    while not loop.over():
        with loop.step():
            for one in draw:
                one()
            loop.update()


def test_each_kind_of_generator_is_named_by_the_path_that_the_user_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = SimpleNamespace(world=SimpleNamespace(rng=np.random.default_rng(1)), legacy=np.random.RandomState(1))
    own, still = torch.Generator(), torch.Generator()
    envs = [SimpleNamespace(rng=random.Random(2))]
    with begun(tmp_path) as loop:
        play(
            loop,
            env.world.rng.random,
            env.legacy.rand,
            lambda: torch.rand(1, generator=own),
            envs[0].rng.random,
            MODULE.rng.random,
        )
    assert still.initial_seed()
    [text] = warned(caplog)
    paths = text.partition(" moved")[0].split(", ")
    assert sorted(paths) == ["MODULE.rng", "env.legacy", "env.world.rng", "envs[0].rng", "own"]
    assert "loop.keep('env.world.rng', env.world.rng)" in text


def test_what_is_kept_or_saved_anyway_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class World:
        def __init__(self) -> None:
            self.inner = SimpleNamespace(rng=random.Random(1))

        def state_dict(self) -> dict[str, Any]:
            return {"rng": self.inner.rng.getstate()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    class Draws(Callback):
        def __init__(self) -> None:
            self.rng = random.Random(1)

        def on_step_end(self, run: Run) -> None:
            self.rng.random()

    world, own, closed, draws = World(), torch.Generator(), np.random.default_rng(1), Draws()
    with begun(tmp_path, draws) as loop:
        loop.keep("world", world)
        loop.keep("own", own)
        loop.keep("closed", (lambda: closed.bit_generator.state, lambda state: None))
        play(
            loop,
            world.inner.rng.random,
            lambda: torch.rand(1, generator=own),
            closed.random,
            random.random,
            np.random.rand,
            lambda: torch.rand(1),
        )
    assert warned(caplog) == []


def test_without_checkpoints_nothing_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = random.Random(1)
    with begun(tmp_path, save=False) as loop:
        play(loop, own.random)
    assert warned(caplog) == []


def test_iterators_without_a_position_are_named_if_they_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def forever() -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand(1)

    class Position:
        at = 0

        def __iter__(self) -> Position:
            return self

        def __next__(self) -> int:
            self.at += 1
            return self.at

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    batches, loaded, drawn, unread = iter([*range(9)]), iter(DataLoader(TensorDataset(torch.zeros(9)))), forever(), iter([1, 2])
    known = Position()
    next(drawn)
    with begun(tmp_path) as loop:
        loop.keep("known", known)
        play(loop, lambda: next(batches), lambda: next(loaded), lambda: next(drawn), lambda: next(known))
    assert next(unread)
    [text] = warned(caplog)
    assert {"batches", "loaded"} <= set(text.partition(" moved")[0].split(", ")) <= {"batches", "loaded", "drawn"}


def test_a_generator_that_moves_later_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = random.Random(1)
    steps: list[float] = []
    with begun(tmp_path) as loop:
        play(loop, lambda: steps.append(own.random() if len(steps) > 1 else 0))
    assert [text.partition(" ")[0] for text in warned(caplog)] == ["own"]
