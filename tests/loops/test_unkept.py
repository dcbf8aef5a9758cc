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

from cadenza import Callback, Loop, Run, Steps, Trainer, attach
from cadenza.callbacks import Checkpoint, Ema, LearningRate
from cadenza.testing import prove_resume

MODULE = SimpleNamespace(rng=random.Random(1))


def begun(directory: Path, *others: Any, save: bool = True) -> Loop:
    model = nn.Linear(1, 1)
    callbacks = [Checkpoint("2 steps"), *others] if save else [*others]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return attach(model, optimizer, callbacks=callbacks, directory=directory, max_steps=6, progress=False)


def warned(caplog: pytest.LogCaptureFixture) -> list[list[str]]:
    """Return what each warning names."""
    texts = [one for one in caplog.messages if "moved in the first steps" in one]
    return [sorted(text.partition(" moved")[0].split(", ")) for text in texts]


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
    draws = [env.world.rng.random, env.legacy.rand, lambda: torch.rand(1, generator=own), envs[0].rng.random, MODULE.rng.random]
    with begun(tmp_path / "without", save=False) as loop:
        play(loop, *draws)
    assert warned(caplog) == []  # without checkpoints nothing is named
    with begun(tmp_path / "with") as loop:
        play(loop, *draws)
    assert still.initial_seed()
    assert warned(caplog) == [["MODULE.rng", "env.legacy", "env.world.rng", "envs[0].rng", "own"]]
    assert "loop.keep('env.world.rng', env.world.rng)" in caplog.text


def test_what_is_kept_or_saved_anyway_is_not_named_nor_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    with (tmp_path / "log").open("w") as log, begun(tmp_path / "run", draws) as loop:
        loop.keep("world", world)
        loop.keep("own", own)
        loop.keep("closed", (lambda: closed.bit_generator.state, lambda state: None))
        kept = [world.inner.rng.random, lambda: torch.rand(1, generator=own), closed.random]
        play(loop, *kept, random.random, np.random.rand, lambda: torch.rand(1), lambda: log.write("a step\n"))
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
    [named] = warned(caplog)
    assert {"batches", "loaded"} <= set(named) <= {"batches", "loaded", "drawn"}


def test_a_generator_that_moves_later_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = random.Random(1)
    steps: list[float] = []
    with begun(tmp_path) as loop:
        play(loop, lambda: steps.append(own.random() if len(steps) > 1 else 0))
    assert warned(caplog) == [["own"]]


def test_a_model_an_optimizer_and_a_schedule_beside_those_of_the_run_are_named_when_they_move(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(tmp_path) as loop:
        trained, agent = loop.run.model, SimpleNamespace(target=nn.Linear(2, 2), policy=loop.run.model, frozen=nn.Linear(2, 2))
        frozen, average = nn.Linear(2, 2), torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        head = nn.Linear(2, 1)
        other = torch.optim.Adam(head.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(other, 1)

        def train_head() -> None:
            head(torch.ones(1, 2)).sum().backward()
            other.step()

        def follow() -> None:
            agent.target.weight.data.mul_(0.9)  # `.data` raises no version

        def once() -> None:
            if loop.run.progress.step == 3:
                average.update_parameters(nn.Linear(2, 2))

        play(loop, follow, train_head, schedule.step, once)
    assert trained.weight is not None
    assert frozen.weight is not None
    assert warned(caplog) == [["agent.target", "head", "other", "schedule"], ["average"]]


def test_models_and_schedules_that_checkpoints_hold_are_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target, model = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    callbacks = [Checkpoint("2 steps"), LearningRate(schedule), Ema(0.9)]
    agent = SimpleNamespace(model=model, target=target)
    with attach([model], optimizer, callbacks=callbacks, directory=tmp_path, max_steps=6, progress=False) as loop:
        loop.keep("target", target)
        while not loop.over():
            with loop.step():
                loop.backward(agent.model(torch.ones(2)).sum())
                loop.update()
                agent.target.load_state_dict(agent.model.state_dict())
    assert warned(caplog) == []


# -- in a loop over trainer.steps() -----------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that draws numbers."""

    def __init__(self) -> None:
        self.dice = random.Random(4)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.dice.random()])


def trainer(directory: Path, data: Any, *, save: bool = True, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    callbacks = [Checkpoint("2 steps")] if save else []
    return Trainer(model, optimizer, data, callbacks=callbacks, directory=directory, max_steps=6, progress=False, **arguments)


def train(steps: Any, *draw: Any) -> None:
    for step in steps:
        for batch in step:
            for one in draw:
                one()
            step.backward(step.run.model(batch).square().mean())


def shuffled(data: Any) -> Any:
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


def test_steps_name_what_the_loop_does_not_keep(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own, chance, dice = torch.Generator(), np.random.default_rng(1), random.Random(6)
    others = iter(DataLoader(TensorDataset(torch.zeros(99))))
    loader, still = shuffled(torch.ones(12, 1)), random.Random(8)
    draw: list[Any] = [lambda: torch.rand(1, generator=own), chance.random, dice.random, lambda: next(others)]
    for _, step in enumerate(trainer(tmp_path, loader).steps()):
        for batch in step:
            for one in (*draw, random.random, np.random.rand):
                one()
            step.backward(step.run.model(batch).square().mean())
    assert still.random()
    assert warned(caplog) == [["chance", "dice", "others", "own"]]
    assert "Write `with trainer.steps(...) as steps:` and, before the loop, steps.keep(" in caplog.text
    assert "steps.keep('dice', dice)" in caplog.text


def test_steps_name_neither_what_is_kept_nor_what_the_trainer_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader, dice = shuffled(torch.ones(12, 1)), random.Random(6)
    steps = trainer(tmp_path / "kept", loader).steps()
    steps.keep("dice", dice)
    train(steps, dice.random, random.random)
    train(trainer(tmp_path / "no checkpoint", loader, save=False).steps(), dice.random)
    assert warned(caplog) == []


def test_a_generator_of_the_data_set_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = shuffled(Noisy())
    for step in trainer(tmp_path, loader).steps():
        for batch in step:
            step.backward(step.run.model(batch).square().mean())
    assert warned(caplog) == [["loader.dataset.dice"]]


def test_what_steps_keep_is_restored(tmp_path: Path) -> None:
    def make(directory: Path) -> Trainer:
        return trainer(directory, shuffled(torch.ones(12, 1)), seed=1)

    def loop(steps: Steps, *, keeps: bool = True) -> None:
        dice = random.Random(6)
        if keeps:
            steps.keep("dice", dice)
        for step in steps:
            for batch in step:
                step.backward(step.run.model(batch).square().mean() * dice.random())

    prove_resume(make, at=[2], loop=loop, in_process=True)
    with pytest.raises(AssertionError, match="differs from the whole one"):
        prove_resume(make, at=[2], loop=lambda steps: loop(steps, keeps=False), in_process=True)


def test_each_loop_of_a_trainer_keeps_its_own_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, dice = trainer(tmp_path / "one", shuffled(torch.ones(12, 1))), [random.Random(6)]

    def loop(one: Trainer, until: int, *, resume: bool = False, **kept: Any) -> None:
        with one.steps(resume=resume) as steps:
            for name, held in kept.items():
                steps.keep(name, held)
            for step in steps:
                if step.run.progress.step == until:
                    raise InterruptedError
                for batch in step:
                    step.backward(step.run.model(batch).square().mean() * dice[-1].random())

    with pytest.raises(InterruptedError):
        loop(one, 2, dice=dice[-1])
    dice.append(random.Random(7))
    loop(one, 9, resume=True, dice=dice[-1])
    whole = random.Random(6)
    assert [whole.random() for _ in range(7)][-1] == dice[-1].random()
    again = trainer(tmp_path / "again", shuffled(torch.ones(12, 1)))
    with pytest.raises(InterruptedError):
        loop(again, 2, dice=dice[-1])
    loop(again, 9, resume=True, other=dice[-1])
    assert "the checkpoint holds ['dice'], which this loop does not keep. Call steps.keep(...) before the loop" in caplog.text


def test_objects_are_kept_before_the_loop(tmp_path: Path) -> None:
    steps, own = trainer(tmp_path, shuffled(torch.ones(12, 1))).steps(), random.Random(6)
    with pytest.raises(TypeError, match=r"keep\('none', ...\) expected an object with state_dict"):
        steps.keep("none", object())
    steps.keep("own", own)
    with pytest.raises(ValueError, match="called twice"):
        steps.keep("own", own)
    for _ in steps:
        with pytest.raises(RuntimeError, match="must be called before the loop"):
            steps.keep("late", own)
        break
