"""`cadenza.attach`: a loop that brings its own data and optimizers is a run."""

from __future__ import annotations

import os
import random
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Loop, Run, attach, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, FindBatchSize, FindLearningRate, Limit, LogTraining
from cadenza.testing import Recorder, launch, prove_resume


class World:
    """An environment with a state of its own."""

    def __init__(self) -> None:
        self.random, self.seen = random.Random(3), deque[float](maxlen=3)

    def rollout(self) -> Tensor:
        self.seen.append(self.random.random())
        return torch.tensor([[self.seen[-1], sum(self.seen)]])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [*self.seen], "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.extend(state["seen"])
        self.random.setstate(state["random"])


def play(directory: Path | None = None, *, steps: int = 8, callbacks: Any = (), **arguments: Any) -> tuple[Run, list[Tensor]]:
    torch.manual_seed(0)
    policy = nn.Linear(2, 1)
    world, noise = World(), torch.Generator().manual_seed(4)
    chance, dice = np.random.default_rng(5), random.Random(6)
    log = LogTraining("1 step")
    arguments = {"seed": 1, "progress": False, "max_steps": steps, "directory": directory} | arguments
    with attach(policy, torch.optim.Adam(policy.parameters(), 0.01), callbacks=[*callbacks, log], **arguments) as loop:
        loop.keep("world", world)
        for name, generator in {"noise": noise, "chance": chance, "dice": dice}.items():
            loop.keep(name, generator)
        while not loop.over():
            rollout = world.rollout() + torch.rand(1, generator=noise) + chance.random() + dice.random()
            with loop.step():
                with loop.batch(rollout) as batch:
                    loop.backward((policy(batch) + torch.rand(())).square().mean())
                loop.update()
                loop.run.log("reward", float(rollout.sum()))
    return loop.run, [weight.detach().clone() for weight in policy.parameters()]


STEP = [
    *("on_step_start", "on_batch_start", "on_before_backward", "on_after_backward", "on_batch_end"),
    *("on_before_optimizer_step", "on_after_optimizer_step", "on_before_zero_grad", "on_after_zero_grad", "on_step_end"),
]


def test_its_moments_are_those_of_a_run_without_fetches() -> None:
    recorder = Recorder()
    run, _ = play(steps=2, callbacks=[recorder])
    ends = ["on_log"]
    assert recorder.names == [
        *("on_setup", "on_fit_start", "on_epoch_start"), *STEP, *ends, *STEP, *ends, "on_epoch_end", "on_fit_end",
    ]  # fmt: skip
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert (run.progress.step, run.progress.batch, run.progress.samples) == (2, 2, 2)
    assert [step for step, _ in run.history["reward"]] == [1, 2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_that_continues_ends_in_the_same_bits(tmp_path: Path, precision: str) -> None:
    saved: dict[str, Any] = {"callbacks": [Checkpoint("1 step")], "precision": precision}
    whole, weights = play(tmp_path / "whole", **saved)
    play(tmp_path / "cut", steps=3, **saved)
    torch.manual_seed(99)
    continued, same = play(tmp_path / "cut", resume="auto", **saved)
    assert all(map(torch.equal, weights, same))
    assert continued.history["reward"] == whole.history["reward"]


def test_a_run_that_is_over_gives_back_what_was_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def worlds(steps: int) -> list[float]:
        model, world, dice = nn.Linear(2, 1), World(), random.Random(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with attach(model, optimizer, max_steps=steps, directory=tmp_path, resume="auto", callbacks=[Checkpoint("1 step")],
                    progress=False) as loop:  # fmt: skip
            loop.keep("world", world)
            loop.keep("dice", dice)
            while not loop.over():
                with loop.step():
                    loop.backward(model(world.rollout()).sum() * dice.random())
                    loop.update()
        return [*world.seen, dice.random()]

    assert worlds(3) == worlds(3)
    assert "this loop keeps" not in caplog.text


def test_several_models_and_optimizers_are_updated_in_turn() -> None:
    """Two networks that train against each other."""

    def train(cut: int | None, directory: Path) -> list[Tensor]:
        torch.manual_seed(0)
        makes, judges = nn.Linear(2, 2), nn.Linear(2, 1)
        first, second = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (makes, judges))
        models = {"makes": makes, "judges": judges}
        with attach(models, [first, second], max_steps=6, seed=2, directory=directory, resume="auto", progress=False,
                    callbacks=[Checkpoint("1 step")]) as loop:  # fmt: skip
            while not loop.over():
                if loop.run.progress.step == cut:
                    raise KeyboardInterrupt
                with loop.step():
                    fake = makes(torch.randn(4, 2))
                    loop.backward((judges(fake.detach()) - judges(torch.ones(4, 2))).mean())
                    loop.update(second)
                    loop.backward(-judges(fake).mean())
                    loop.update(first)
                    second.zero_grad()
        return [weight.detach().clone() for model in (makes, judges) for weight in model.parameters()]

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        whole = train(None, Path(folder, "a"))
        with pytest.raises(KeyboardInterrupt):
            train(3, Path(folder, "b"))
        assert all(map(torch.equal, whole, train(None, Path(folder, "b"))))


def test_evaluations_and_early_stopping_end_the_loop() -> None:
    rows = [torch.ones(1, 2)]
    judge = Evaluate(rows, every="1 step", compute=lambda model, batch: {"loss": model(batch).square().mean()})
    run, _ = play(steps=50, callbacks=[judge, EarlyStopping("eval/loss", "min", patience=2, min_delta=100)])
    assert run.outcome is not None
    assert (run.outcome.kind, run.progress.step) == ("stopped", 3)


def test_an_error_in_the_loop_ends_the_run_with_every_end() -> None:
    recorder, errors = Recorder(), []
    keep = on(Callback.on_exception)(lambda run, error: errors.append(error))
    model = nn.Linear(2, 1)

    def loop_of_its_own() -> None:
        with attach(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[recorder, keep], max_steps=3,
                    progress=False) as loop, loop.step(), loop.batch():  # fmt: skip
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        loop_of_its_own()
    assert errors == [caught.value]
    for kind in ("fit", "epoch", "step", "batch"):
        assert recorder.names.count(f"on_{kind}_start") == recorder.names.count(f"on_{kind}_end") == 1


def test_a_loop_that_is_left_stops_the_run() -> None:
    model, recorder = nn.Linear(2, 1), Recorder()
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[recorder], max_steps=9, progress=False) as loop:
        for _ in range(2):
            with loop.step():
                loop.backward(model(torch.ones(2)).sum())
                loop.update()
    assert loop.run.outcome is not None
    assert (loop.run.outcome.kind, loop.run.outcome.reason) == ("stopped", "the loop was left")
    assert recorder.names[-3:] == ["on_stop", "on_epoch_end", "on_fit_end"]
    assert loop.run.progress.step == 2


def test_a_batch_that_a_callback_skips_changes_nothing() -> None:
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("on purpose"))
    model = nn.Linear(2, 1)
    weights = []
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=[skip], max_steps=3, progress=False) as loop:
        while not loop.over():
            with loop.step(), loop.batch(torch.ones(1, 2)) as batch:
                loop.backward(model(batch).sum())
                loop.update()
            weights.append(model.weight.detach().clone())
    assert not torch.equal(weights[0], model.weight)
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("batch", [np.ones((3, 2), dtype="f4"), torch.ones(3, 2), {"x": [1]}, None])
def test_a_batch_may_be_any_object(batch: Any) -> None:
    model = nn.Linear(2, 1)
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=1, progress=False) as loop:
        while not loop.over():
            with loop.step(), loop.batch(batch):
                loop.backward(model(torch.ones(2)).sum())
                loop.update()
    assert loop.run.progress.batch == 1


def test_calls_at_the_wrong_place_are_errors_that_say_where() -> None:
    model = nn.Linear(2, 1)
    attached = attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=1, progress=False)
    with pytest.raises(RuntimeError, match=r"with cadenza\.attach"):
        attached.over()
    with attached as loop:
        with pytest.raises(RuntimeError, match=r"inside of `with loop.step\(\):`"):
            loop.backward(torch.zeros(()))
        with pytest.raises(RuntimeError, match=r"inside of `with loop.step\(\):`"), loop.batch():
            pass
        with loop.step():
            with pytest.raises(RuntimeError, match="between two steps"):
                loop.over()
            loop.backward(model(torch.ones(2)).sum())
        with pytest.raises(RuntimeError, match="the run is over"), loop.step():
            pass
        with pytest.raises(TypeError, match=r"expected an object with state_dict"):
            loop.keep("thing", object())
    for name in ("loader", "compute_loss", "step_fn", "accumulate"):
        given: dict[str, Any] = {name: None}
        with pytest.raises(TypeError, match=f"attach.* takes no {name}="):
            attach(model, torch.optim.SGD, max_steps=1, **given)


def test_two_processes_train_the_same_weights_and_continue_to_the_same_bits(tmp_path: Path) -> None:
    def train(name: str, steps: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        world = World()
        with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=steps, seed=3, directory=tmp_path / name,
                    resume="auto", callbacks=[Checkpoint("1 step")], progress=False) as loop:  # fmt: skip
            loop.keep("world", world)
            while not loop.over():
                rollout = world.rollout() * (1 + int(os.environ["RANK"]))
                with loop.step():
                    loop.backward((model(rollout) + torch.rand(())).square().sum())
                    loop.update()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    def both() -> tuple[Tensor, Tensor]:
        whole = train("whole", 5)
        train("cut", 2)
        return whole, train("cut", 5)

    first, second = launch(both)
    assert torch.equal(*first)
    assert torch.equal(*second)
    assert torch.equal(first[0], second[0])


def test_each_rank_keeps_what_is_its_own(tmp_path: Path) -> None:
    def train(name: str, steps: int) -> tuple[Tensor, list[float]]:
        torch.manual_seed(0)
        model, world = nn.Linear(2, 1), World()
        world.random.seed(int(os.environ["RANK"]))
        with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=steps, seed=3, directory=tmp_path / name,
                    resume="auto", callbacks=[Checkpoint("1 step")], progress=False) as loop:  # fmt: skip
            loop.keep("world", world)
            while not loop.over():
                with loop.step():
                    loop.backward(model(world.rollout()).square().sum())
                    loop.update()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()]), [*world.seen]

    def both() -> tuple[Any, Any]:
        whole = train("whole", 5)
        train("cut", 2)
        return whole, train("cut", 5)

    first, second = launch(both)
    assert first[0][1] != second[0][1]
    for (weights, seen), (same, again) in (first, second):
        assert torch.equal(weights, same)
        assert seen == again


def test_each_rank_resumes_with_the_gradients_that_it_has_accumulated_over_steps(tmp_path: Path) -> None:
    """An update every third step; the run is cut two backward passes after one, and continues on two ranks or on one."""

    def train(name: str, steps: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=steps, seed=3, directory=tmp_path / name,
                    resume="auto", callbacks=[Checkpoint("1 step")], progress=False) as loop:  # fmt: skip
            while not loop.over():
                step = loop.run.progress.step
                with loop.step():
                    rank = int(os.environ.get("RANK", "0"))
                    loop.backward(model(torch.tensor([1.0 + rank, float(step % 3)])).square().sum())
                    if step % 3 == 2:
                        loop.update()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    def both() -> tuple[Tensor, Tensor]:
        train("alone", 5)
        whole = train("whole", 6)
        train("cut", 5)
        return whole, train("cut", 6)

    for whole, continued in launch(both):
        assert torch.equal(whole, continued)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    def loss(rank: int, step: int) -> Tensor:
        return model(torch.tensor([1.0 + rank, float(step)])).square().sum()  # type: ignore[no-any-return]

    for last in ([0, 1], [0]):  # the ranks that do the last backward pass
        model.zero_grad()
        for step, ranks in enumerate(([0, 1], [0, 1], last)):
            torch.stack([loss(rank, step) for rank in ranks]).mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(train("alone", 6), torch.cat([weight.detach().flatten() for weight in model.parameters()]))


def make(directory: Path) -> Loop:
    torch.manual_seed(0)
    policy = nn.Linear(2, 1)
    return attach(policy, torch.optim.Adam(policy.parameters(), 0.01), max_steps=6, seed=1, directory=directory, progress=False)


def steps_of(attached: Loop, *, keeps: bool = True) -> None:
    world = World()
    with attached as loop:
        if keeps:
            loop.keep("world", world)
        while not loop.over():
            with loop.step(), loop.batch(world.rollout()) as batch:
                loop.backward(loop.run.model(batch).square().mean())
                loop.update()


def test_prove_resume_finds_what_a_loop_does_not_keep() -> None:
    prove_resume(make, at=[1, 4], loop=steps_of)
    with pytest.raises(AssertionError, match="differs from the whole one in batches"):
        prove_resume(make, at=[2], loop=partial(steps_of, keeps=False), in_process=True)
    with pytest.raises(TypeError, match="needs loop="):
        prove_resume(make, at=[2], in_process=True)


NEEDS_A_LOADER = [Limit(train=3), FindLearningRate(), FindBatchSize(lambda size: [torch.ones(size, 2)], max_size=4)]


@pytest.mark.parametrize("callback", NEEDS_A_LOADER)
def test_a_callback_that_needs_the_loader_of_a_trainer_is_refused_before_the_first_step(callback: Callback) -> None:
    with pytest.raises(ValueError, match=r"a loop of cadenza\.attach"):
        play(callbacks=[callback])
