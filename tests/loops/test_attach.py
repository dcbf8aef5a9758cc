"""`cadenza.attach`: a loop that brings its own data is a run. The scripts of "From your own loop" run."""

from __future__ import annotations

import asyncio
import os
import random
import re
import runpy
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Loop, Run, attach, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, FindBatchSize, FindLearningRate, Limit, LogTraining, Timer
from cadenza.errors import DataError, ScheduleError
from cadenza.report import small, story_at
from cadenza.report.commands.following import Following
from cadenza.report.commands.watch import lines
from cadenza.report.sections import card
from cadenza.sinks import Console, ProgressBar
from cadenza.status.decisions import Outcome
from cadenza.testing import Recorder, launch, prove_resume, tiny_trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

from own_loop import EXAMPLES, SCRIPTS, STAGES, changed


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


def saving(model: Any, directory: Path, steps: int, **arguments: Any) -> Loop:
    """Attach a loop that continues in its directory, and saves each step."""
    arguments = {"max_steps": steps, "directory": directory, "resume": "auto", "progress": False, **arguments}
    optimizer = arguments.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.1)
    return attach(model, optimizer, callbacks=[Checkpoint("1 step")], **arguments)


def attached(**arguments: Any) -> Loop:
    model = nn.Linear(2, 1)
    return attach(model, torch.optim.SGD(model.parameters(), 0.1), **{"progress": False, **arguments})


def one_step(loop: Loop, data: Any = None) -> None:
    with loop.step():
        if data is None:
            loop.backward(loop.run.model(torch.ones(1, 2)).square().mean())
        else:
            with loop.batch(data) as batch:
                loop.backward(loop.run.model(batch).square().mean())
        loop.update()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def seeded() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def play(directory: Path | None = None, *, steps: int = 8, callbacks: Any = (), **arguments: Any) -> tuple[Run, list[Tensor]]:
    policy = seeded()
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
    begin, end = ["on_setup", "on_fit_start", "on_epoch_start"], ["on_epoch_end", "on_fit_end"]
    assert recorder.names == [*begin, *STEP, "on_log", *STEP, "on_log", *end]
    assert run.outcome is not None
    assert (run.outcome.kind, run.progress.step, run.progress.batch, run.progress.samples) == ("finished", 2, 2, 2)
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
        world, dice = World(), random.Random(1)
        with saving(model := nn.Linear(2, 1), tmp_path, steps) as loop:
            loop.keep("world", world)
            loop.keep("dice", dice)
            while not loop.over():
                with loop.step():
                    loop.backward(model(world.rollout()).sum() * dice.random())
                    loop.update()
        return [*world.seen, dice.random()]

    assert worlds(3) == worlds(3)
    assert "this loop keeps" not in caplog.text


def rollouts(directory: Path, *callbacks: Callback, steps: int = 20, resume: bool | str = "auto") -> Run:
    """Four updates on each rollout, as in PPO: the rollout is drawn between two calls of over()."""
    model = seeded()
    arguments: dict[str, Any] = {"max_steps": steps, "seed": 1, "directory": directory, "progress": False, "resume": resume}
    arguments["callbacks"] = [Checkpoint("3 steps"), *callbacks]
    with attach(model, torch.optim.Adam(model.parameters(), 0.01), **arguments) as loop:
        while not loop.over():
            rollout = torch.randn(8, model.in_features)
            for _ in range(4):
                with loop.step():
                    loop.backward((model(rollout) - rollout.sum(1, keepdim=True)).square().mean())
                    loop.update()
    return loop.run


@pytest.mark.parametrize("how", ["error", "stop", "killed"])
def test_steps_without_over_between_them_belong_together(how: str, tmp_path: Path) -> None:
    """A run that continues has no rollout, so it is saved between two of them only, and ends there when it is asked to stop."""

    @on(Callback.on_step_end)
    def end(run: Run) -> None:
        if run.progress.step == 10 and how == "stop":
            run.stop("asked")
        if run.progress.step == 10 and how == "error":
            raise ZeroDivisionError

    whole = rollouts(tmp_path / "whole")
    saved = {int(one.name[-8:]) for one in (tmp_path / "whole" / "checkpoints").glob("step-*")}
    assert saved == {16, 20}
    if how == "error":
        with pytest.raises(ZeroDivisionError):
            rollouts(tmp_path / "cut", end)
    else:
        cut = rollouts(tmp_path / "cut", end, steps=12 if how == "killed" else 20)
        assert cut.progress.step == 12
    again = rollouts(tmp_path / "cut", resume="last")
    assert again.progress.step == 20
    assert torch.equal(flat(again.model), flat(whole.model))


def test_a_loop_that_never_asks_whether_it_is_over_saves_before_each_step(tmp_path: Path) -> None:
    model = seeded()
    optimizer = torch.optim.Adam(model.parameters())
    with attach(model, optimizer, max_steps=9, directory=tmp_path, callbacks=[Checkpoint("3 steps", keep_last=None)]) as loop:
        for _ in range(8):
            one_step(loop)
    assert {one.name for one in (tmp_path / "checkpoints").glob("step-*")} == {f"step-0000000{step}" for step in (3, 6, 8)}


def test_several_models_and_optimizers_are_updated_in_turn(tmp_path: Path) -> None:
    """Two networks that train against each other."""

    def train(cut: int | None, directory: Path) -> list[Tensor]:
        torch.manual_seed(0)
        makes, judges = nn.Linear(2, 2), nn.Linear(2, 1)
        first, second = (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (makes, judges))
        with saving({"makes": makes, "judges": judges}, directory, 6, optimizer=[first, second], seed=2) as loop:
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
        return [flat(makes), flat(judges)]

    whole = train(None, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        train(3, tmp_path / "b")
    assert all(map(torch.equal, whole, train(None, tmp_path / "b")))


def test_evaluations_and_early_stopping_end_the_loop() -> None:
    rows = [torch.ones(1, 2)]
    judge = Evaluate(rows, every="1 step", compute=lambda model, batch: {"loss": model(batch).square().mean()})
    run, _ = play(steps=50, callbacks=[judge, EarlyStopping("eval/loss", "min", patience=2, min_delta=100)])
    assert (run.outcome.kind, run.progress.step) == ("stopped", 3)  # type: ignore[union-attr]


def test_an_error_in_the_loop_ends_the_run_with_every_end() -> None:
    recorder, errors = Recorder(), []
    keep = on(Callback.on_exception)(lambda run, error: errors.append(error))

    def loop_of_its_own() -> None:
        with attached(callbacks=[recorder, keep], max_steps=3) as loop, loop.step(), loop.batch():
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        loop_of_its_own()
    assert errors == [caught.value]
    for kind in ("fit", "epoch", "step", "batch"):
        assert recorder.names.count(f"on_{kind}_start") == recorder.names.count(f"on_{kind}_end") == 1


def test_a_batch_that_a_callback_skips_changes_nothing() -> None:
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("on purpose"))
    weights = []
    with attached(callbacks=[skip], max_steps=3) as loop:
        while not loop.over():
            one_step(loop, torch.ones(1, 2))
            weights.append(flat(loop.run.model))
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("batch", [np.ones((3, 2), dtype="f4"), torch.ones(3, 2), {"x": [1]}, None])
def test_a_batch_may_be_any_object(batch: Any) -> None:
    with attached(max_steps=1) as loop, loop.step(), loop.batch(batch):
        loop.backward(loop.run.model(torch.ones(2)).sum())
        loop.update()
    assert loop.run.progress.batch == 1


def test_calls_at_the_wrong_place_are_errors_that_say_where() -> None:
    loop = attached(max_steps=1)
    with pytest.raises(RuntimeError, match=r"with cadenza\.attach"):
        loop.over()
    with loop:
        with pytest.raises(RuntimeError, match=r"inside of `with loop.step\(\):`"):
            loop.backward(torch.zeros(()))
        with pytest.raises(RuntimeError, match=r"inside of `with loop.step\(\):`"), loop.batch():
            pass
        with loop.step():
            with pytest.raises(RuntimeError, match="between two steps"):
                loop.over()
            loop.backward(loop.run.model(torch.ones(2)).sum())
        with pytest.raises(RuntimeError, match="the run is over"), loop.step():
            pass
        with pytest.raises(TypeError, match=r"expected an object with state_dict"):
            loop.keep("thing", object())
    for name in ("loader", "compute_loss", "step_fn", "accumulate"):
        with pytest.raises(TypeError, match=f"attach has no argument '{name}'. The loop brings its own data"):
            attached(max_steps=1, **{name: None})


def test_ranks_train_the_same_weights_keep_their_own_objects_and_continue_to_the_same_bits(tmp_path: Path) -> None:
    def train(name: str, steps: int) -> tuple[Tensor, list[float]]:
        rank, model, world = int(os.environ["RANK"]), seeded(), World()
        world.random.seed(rank)
        with saving(model, tmp_path / name, steps, seed=3) as loop:
            loop.keep("world", world)
            while not loop.over():
                rollout = world.rollout() * (1 + rank)
                with loop.step():
                    loop.backward((model(rollout) + torch.rand(())).square().sum())
                    loop.update()
        return flat(model), [*world.seen]

    def both() -> list[tuple[Tensor, list[float]]]:
        return [train("whole", 5), train("cut", 2), train("cut", 5)]

    first, second = launch(both)
    for (weights, seen), _, (same, again) in (first, second):
        assert torch.equal(weights, same)
        assert torch.equal(weights, first[0][0])
        assert seen == again
    assert first[0][1] != second[0][1]


def test_each_rank_resumes_with_the_gradients_that_it_has_accumulated_over_steps(tmp_path: Path) -> None:
    """An update every third step; the run is cut two backward passes after one, and continues on two ranks or on one."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(torch.tensor([1.0 + rank, float(step % 3)])).square().sum()  # type: ignore[no-any-return]

    def train(name: str, steps: int) -> Tensor:
        with saving(model := seeded(), tmp_path / name, steps, seed=3) as loop:
            while not loop.over():
                step = loop.run.progress.step
                with loop.step():
                    loop.backward(loss(model, int(os.environ.get("RANK", "0")), step))
                    if step % 3 == 2:
                        loop.update()
        return flat(model)

    for _, whole, _, continued in launch(lambda: [train("alone", 5), train("whole", 6), train("cut", 5), train("cut", 6)]):
        assert torch.equal(whole, continued)
    model = seeded()
    for last in ([0, 1], [0]):  # the ranks that do the last backward pass
        model.zero_grad()
        for step, ranks in enumerate(([0, 1], [0, 1], last)):
            torch.stack([loss(model, rank, step) for rank in ranks]).mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    torch.testing.assert_close(train("alone", 6), flat(model))


def make(directory: Path) -> Loop:
    torch.manual_seed(0)
    return attached(max_steps=6, seed=1, directory=directory)


def steps_of(loop: Loop, *, keeps: bool = True) -> None:
    world = World()
    with loop:
        if keeps:
            loop.keep("world", world)
        while not loop.over():
            one_step(loop, world.rollout())


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.long)])
def test_prove_resume_finds_what_a_loop_does_not_keep(in_process: bool) -> None:
    prove_resume(make, at=[1, 4], loop=steps_of, in_process=in_process)
    with pytest.raises(AssertionError, match="differs from the whole one in batches"):
        prove_resume(make, at=[2], loop=partial(steps_of, keeps=False), in_process=True)
    with pytest.raises(TypeError, match="needs loop="):
        prove_resume(make, at=[2], in_process=True)


def played(*, data: Any = None, **arguments: Any) -> Loop:
    with attached(**arguments) as loop:
        while not loop.over():
            one_step(loop, data)
    return loop


def test_without_a_limit_the_run_ends_when_the_loop_is_left_or_asked_to_stop(tmp_path: Path) -> None:
    recorder, reward = Recorder(), 0
    with attached(directory=tmp_path, callbacks=[Checkpoint("100 steps"), recorder]) as loop:
        while reward < 5 and not loop.over():
            one_step(loop)
            reward += 1
    assert loop.run.outcome == Outcome("stopped", "the loop was left")
    assert [name for name in recorder.names[-4:] if name != "on_save"] == ["on_stop", "on_epoch_end", "on_fit_end"]
    assert loop.run.progress.step == 5
    assert [one.name for one in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000005"]
    with attached(directory=tmp_path, callbacks=[Checkpoint("100 steps")], resume="auto") as again:
        assert again.over()
    with attached() as loop:
        while not loop.over():
            one_step(loop)
            if loop.run.progress.step == 3:
                loop.run.stop("enough")
    assert loop.run.outcome == Outcome("stopped", "enough")
    assert loop.run.progress.step == 3
    assert loop.run.why("stopped") == "stopped by the script at step 3: enough"  # it has no epochs, and no batches


def test_schedules_limits_and_callbacks_that_need_what_a_loop_does_not_have_are_refused() -> None:
    with pytest.raises(ScheduleError, match="max_steps="), attached(callbacks=[LogTraining("50%")]):
        pass
    with pytest.raises(ScheduleError, match=r"LogTraining: .* a loop of cadenza\.attach has no epochs"):
        played(max_steps=2, callbacks=[LogTraining("0.5 epoch")])
    with pytest.raises(TypeError, match=r"attach has no argument 'max_epochs'\. The loop has no epochs\. Give max_steps="):
        attached(max_epochs=3)
    run = played(data=torch.ones(4, 2), max_tokens=20, tokens=lambda batch: int(batch.numel())).run
    assert (run.progress.step, run.progress.tokens) == (3, 24)
    with pytest.raises(DataError, match=r"max_tokens=20 counts the tokens of batches, and this step has none"):
        played(max_tokens=20)
    needs_a_loader = [Limit(train=3), FindLearningRate(), FindBatchSize(lambda size: [torch.ones(size, 2)], max_size=4)]
    for callback in needs_a_loader:
        with pytest.raises(ValueError, match=r"a loop of cadenza\.attach"):
            played(max_steps=8, callbacks=[callback])


@pytest.mark.parametrize(
    "callback",
    [Checkpoint, lambda: Evaluate([torch.ones(1, 2)], compute=lambda model, batch: {}), lambda: LogTraining("1 epoch")],
)
def test_a_schedule_in_epochs_is_named_as_never_due(
    callback: Callable[[], Callback], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    played(max_steps=2, directory=tmp_path, callbacks=[callback()])
    assert 'never fires in this run: a loop of cadenza.attach has no epochs. Use a schedule in "steps" or "min"' in caplog.text


def running(place: str) -> Generator[Run, None, None]:
    if place == "steps":
        with tiny_trainer(epochs=1).steps() as steps:
            for step in steps:
                for inputs, _ in step:
                    step.backward(step.run.model(inputs).sum())
                yield step.run
    with attached() as loop:
        if place == "between":
            one_step(loop)
            assert not loop.over()
            yield loop.run
        with loop.step(), loop.batch(torch.ones(1, 2)) if place == "batch" else nullcontext():
            yield loop.run


@pytest.mark.parametrize("place", ["step", "batch", "between", "steps"])
def test_a_generator_that_is_closed_leaves_its_loop_as_break_does(place: str) -> None:
    generator = running(place)
    run = next(generator)
    generator.close()
    assert run.outcome == Outcome("stopped", "the loop was left")
    assert run.progress.step == 1


def test_a_cancelled_task_ends_its_run_with_this_error() -> None:
    runs: list[Run] = []

    async def train() -> None:
        with attached() as loop:
            runs.append(loop.run)
            while not loop.over():
                one_step(loop)
                await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(train())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert runs[0].outcome == Outcome("failed", "CancelledError()")


def test_no_number_is_shown_of_what_a_loop_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    parts = [LogTraining("2 steps"), Timer(), Console(epochs=True), ProgressBar("plain")]
    run = played(max_steps=4, directory=directory, callbacks=parts).run
    shown = capsys.readouterr().out
    assert re.search(r"^step 2  train/loss \S+ +train/lr 0.1  train/steps_per_s ", shown, re.MULTILINE)
    assert re.search(r"^finished after 4 steps, ", shown, re.MULTILINE)
    assert re.search(r"^train  step 4/4  100%  loss \S+ .* steps/s$", shown, re.MULTILINE)
    assert run.history.names == ["train/loss", "train/lr", "train/steps_per_s"]
    summary = re.sub(r"<[^>]+>", " ", str(card(story_at(directory), None)))
    following = Following(directory)
    following.update()
    texts = [shown, summary, small(run), *lines(following, 100, 40)]
    for text in texts:
        assert not re.search(r"epoch|sample", text), text


def test_batches_that_the_loop_names_are_counted_and_not_known_beforehand(capsys: pytest.CaptureFixture[str]) -> None:
    run = played(data=torch.ones(4, 2), max_steps=4, callbacks=[LogTraining("2 steps"), Console()]).run
    assert (run.progress.batch, run.progress.samples) == (4, 16)
    assert "train/samples_per_s" in run.history.names
    shown = capsys.readouterr().out
    assert "train/samples_per_s" in shown
    assert "epoch" not in shown
    assert "finished after 4 steps" in shown
    calendar = attached(max_steps=6, callbacks=[LogTraining("2 batches"), LogTraining("3 steps")]).trainer.calendar()
    assert [call.step for call in calendar.rows] == [3, 6]
    assert [why for _, _, why in calendar.unknown] == ["the loop decides which batches a step has"]


def test_hooks_of_the_fetch_are_named_as_never_called(caplog: pytest.LogCaptureFixture) -> None:
    class Fetched(Callback):
        def on_fetch_end(self, run: Run) -> None:
            raise AssertionError

    loop = played(max_steps=2, callbacks=[Fetched(), Timer()])
    why = "a loop of cadenza.attach brings its own batches"
    assert f"! Fetched, on_fetch_end, never fires: {why}" in str(loop.trainer.plan()).splitlines()
    assert caplog.text.count(f"never fires in this run: {why}") == 1


# -- the scripts of the documentation -----------------------------------------------------------------


def run_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, *, shuffle: bool = True) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    text = (EXAMPLES / f"{script}.py").read_text(encoding="utf-8")
    copy = folder / "script.py"
    copy.write_text(text if shuffle else text.replace("shuffle=True", "shuffle=False"), encoding="utf-8")
    return runpy.run_path(str(copy), run_name="__main__")


@pytest.mark.parametrize("stage", [f"{folder}/{stage}" for folder, stages in STAGES.items() for stage in stages])
def test_each_stage_runs(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_in(tmp_path, stage, monkeypatch)
    if not stage.endswith("by_hand"):
        run = (names.get("trainer") or names["loop"]).run
        assert run.outcome.kind in ("finished", "stopped")
        assert ("eval" in {name.partition("/")[0] for name in run.history.latest}) == any(
            feature in stage for feature in ("evaluation", "stopping", "sinks", "resume", "ranks")
        )


def test_the_first_stages_train_the_weights_of_the_loops_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, model, stage in (("steps", "model", "trainer"), ("attach", "policy", "attached")):
        before, after = (
            run_in(tmp_path, f"{folder}/{one}", monkeypatch, shuffle=False)[model].state_dict() for one in ("by_hand", stage)
        )
        assert all(map(torch.equal, before.values(), after.values())), folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_at_most_twelve_lines_are_changed(script: str) -> None:
    written, _ = changed(f"{script}_by_hand", script)
    assert written <= 12
