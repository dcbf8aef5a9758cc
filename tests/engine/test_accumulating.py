"""`Trainer(accumulate={0: 1, "2000 steps": 4})`: the batches in a step change at points of the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, Warmup
from cadenza.engine.accumulating import checked_accumulate
from cadenza.errors import CheckpointMismatchError
from cadenza.records import read_decisions
from cadenza.status.accumulation import Accumulation
from cadenza.status.progress import Counters, Progress
from cadenza.testing import launch, tiny_loader, tiny_run, tiny_trainer
from tests.engine.parts import Stream
from tests.long import LONG


class Sizes(Callback):
    """Keeps the number of batches of each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._before = 0

    def on_step_start(self, run: Run) -> None:
        self._before = run.progress.batch

    def on_step_end(self, run: Run) -> None:
        self.steps.append(run.progress.batch - self._before)


SAMPLES = TensorDataset(torch.arange(20.0).unsqueeze(1) / 20, torch.ones(20, 1))
STREAM: DataLoader[Any] = DataLoader(Stream(SAMPLES), 2)


def sizes(accumulate: Any, **arguments: Any) -> list[int]:
    seen = Sizes()
    tiny_run(callbacks=[seen], accumulate=accumulate, **arguments)
    return seen.steps


@pytest.mark.parametrize(
    ("accumulate", "arguments", "expected"),
    [
        ({0: 1, "2 steps": 3}, {}, [1, 1, 3, 3, 2, 3, 3, 3, 1]),
        ({0: 1, 2: 3}, {}, [1, 1, 3, 3, 2, 3, 3, 3, 1]),
        ({"1 epoch": 4}, {}, [1] * 10 + [4, 4, 2]),
        ({0: 4, "1 epoch": 1}, {}, [4, 4, 2] + [1] * 10),
        ({0: 2, "0.5 epoch": 5}, {}, [2, 2, 2, 4, 5, 5]),
        ({0: 2, "3 batches": 3}, {}, [2, 2, 3, 3, 3, 3, 3, 1]),
        ({"50%": 5}, {}, [1] * 10 + [5, 5]),
        ({"25%": 5, "1 epoch": 2}, {}, [1] * 5 + [5] + [2] * 5),
        ({0: 1, "6 samples": 2, "3 steps": 7}, {}, [1, 1, 1, 7, 7, 3]),
        ({0: 3, "99 steps": 1}, {}, [3, 3, 3, 1, 3, 3, 3, 1]),
        ({"50%": 2}, {"epochs": 5, "steps": 6}, [1, 1, 1, 2, 2, 2]),  # of the limit that is nearest
        ({"6 tokens": 3}, {"epochs": 1, "batches": 6, "tokens": lambda batch: 3}, [1, 1, 3, 1]),
        ({"2 steps": 4, "1 epoch": 5}, {"loader": STREAM}, [1, 1, 4, 4, 5, 5]),  # without a length
    ],
)
def test_a_change_takes_effect_at_the_next_step(accumulate: Any, arguments: dict[str, Any], expected: list[int]) -> None:
    assert sizes(accumulate, **{"batches": 10, "epochs": 2, **arguments}) == expected


def test_a_part_of_an_epoch_needs_a_loader_that_knows_its_length() -> None:
    with pytest.raises(ValueError, match=r"changes at '0\.5 epoch'.*knows its length"):
        sizes({"0.5 epoch": 4}, loader=STREAM, epochs=2)


def test_gradients_are_means_over_the_batches_of_each_step() -> None:
    first, *three, last = tiny_loader(5)
    inputs, targets = (torch.cat(parts) for parts in zip(*three, strict=True))
    joined = tiny_run(loader=[first, (inputs, targets), last])
    grouped = tiny_run(loader=[first, *three, last], accumulate={0: 1, "1 step": 3})
    torch.testing.assert_close(grouped.model.state_dict(), joined.model.state_dict(), rtol=1e-6, atol=0)


def test_each_change_is_a_decision_and_a_line_of_the_plan() -> None:
    trainer = tiny_trainer(batches=10, accumulate={0: 1, "2 steps": 3, "500 steps": 9})
    plan = trainer.plan()
    assert "5 steps of 1 batch, 3 from 2 steps on, 9 from 500 steps on" in str(plan)
    assert "! accumulate=9 from 500 steps on never takes effect: the run ends after 5 steps" in str(plan)
    assert plan.to_dict()["accumulate"] == {"0": 1, "2 steps": 3, "500 steps": 9}
    (decision,) = [one for one in trainer.fit().decisions if one.what == "accumulation changed"]
    assert (decision.when.step, dict(decision.data)) == (2, {"before": 1, "batches": 3})


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unit": ({"2 stps": 3}, ValueError, "Did you mean 'steps'"),
    "time": ({"2 min": 3}, ValueError, "no point of a run that is the same after a resume"),
    "share": ({"120%": 3}, ValueError, "a run has 100%"),
    "kind": ({2.5: 3}, ValueError, "2.5 is no schedule: a number must be whole"),
    "batches": ({"2 steps": 0}, ValueError, r"accumulate\['2 steps'\] must be at least 1; got 0"),
    "order": ({"5 steps": 2, "2 steps": 3}, ValueError, "in order; got '5 steps' before '2 steps'"),
    "zero": ({"5 steps": 2, 0: 3}, ValueError, "0 first"),
    "step_fn": ({"5 steps": 2}, ValueError, "step_fn does its own accumulation"),
}


@pytest.mark.parametrize(("given", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_schedules_are_errors_when_the_trainer_is_made(given: Any, kind: type[Exception], message: str) -> None:
    own: dict[str, Any] = {"step_fn": lambda run, batch: None} if "step_fn" in message else {}
    with pytest.raises(kind, match=message):
        tiny_trainer(accumulate=given, **own)


# -- what is computed from it -----------------------------------------------------------------------


def simulated(accumulation: Accumulation, limits: Progress) -> tuple[int, int, int]:
    """Return the steps, batches and epochs of a run, counted one by one."""
    per_epoch = limits.batches_per_epoch
    assert per_epoch is not None
    at = Progress(max_epochs=limits.max_epochs, max_steps=limits.max_steps, batches_per_epoch=per_epoch)
    at.begin(limits.origin, per_epoch)
    while not at.finished:
        size = accumulation.batches(at, limits)
        for _ in range(min(size, per_epoch - at.batch_in_epoch)):
            at.finish_batch(1)
        at.finish_step()
        if at.batch_in_epoch == per_epoch:
            at.finish_epoch()
    return at.step, at.batch, at.epoch


def test_totals_equal_those_that_are_counted_one_by_one_also_inside_of_an_epoch() -> None:
    draw = random.Random(18)
    units: list[Callable[[], str]] = [
        lambda: f"{draw.choice([1, 2, 3, 4, 0.25, 0.5, 1.5, 2.3])} epochs",
        lambda: f"{draw.randint(1, 40)} steps",
        lambda: f"{draw.randint(1, 60)} batches",
        lambda: f"{draw.randint(1, 99)}%",
    ]
    for _ in range(200):
        points = {unit(): draw.randint(1, 6) for unit in draw.sample(units, draw.randint(1, 3))}
        given: dict[int | str, int] = {0: draw.randint(1, 4)}
        given.update(points)
        accumulation = checked_accumulate(given, None)
        assert isinstance(accumulation, Accumulation)
        per_epoch = draw.randint(1, 15)
        steps = draw.choice([None, draw.randint(1, 50)])
        limits = Progress(
            max_epochs=draw.randint(1, 5) if steps is None else draw.choice([None, draw.randint(1, 5)]),
            max_steps=steps,
            batches_per_epoch=per_epoch,
        )
        if draw.random() < 0.5:
            inside = draw.randrange(min(per_epoch, steps or per_epoch))
            limits.begin(Counters(0, inside, inside, inside), per_epoch)
        expected = simulated(accumulation, limits)
        found = tuple(limits.total(unit, accumulation) for unit in ("step", "batch", "epoch"))
        assert found == expected, (accumulation, limits, limits.origin)


def test_a_total_that_depends_on_samples_is_not_known() -> None:
    limits = Progress(max_epochs=3, batches_per_epoch=10)
    assert limits.total("step", checked_accumulate({"50 samples": 2}, None)) is None
    assert Progress(max_steps=9, batches_per_epoch=10).total("step", checked_accumulate({"50 samples": 2}, None)) == 9


def test_a_schedule_of_the_total_ends_with_the_run_and_a_warm_up_with_its_epoch() -> None:
    rates: list[float] = []
    note = on(Callback.on_before_optimizer_step)(lambda run: rates.append(float(run.optimizers[0].param_groups[0]["lr"])))
    fall = LearningRate(lambda optimizer, total: LinearLR(optimizer, 1.0, 0.0, total_iters=total))
    run = tiny_run(callbacks=[fall, note], batches=10, epochs=2, accumulate={0: 1, "0.5 epoch": 5})
    assert run.progress.step == 5 + 1 + 2
    assert rates == pytest.approx([0.1 * (1 - step / 8) for step in range(8)])
    warm = Warmup("1 epoch")
    tiny_run(callbacks=[warm], batches=10, epochs=2, accumulate={0: 1, "0.5 epoch": 5})
    assert warm.steps == 6


def test_callbacks_by_batches_are_called_in_time_when_steps_become_longer() -> None:
    evaluate = Evaluate(tiny_loader(1), every="20 batches")
    run = tiny_run(callbacks=[evaluate], batches=100, epochs=1, accumulate={0: 1, "11 steps": 8})
    assert [one.when.batch for one in run.decisions if one.what == "evaluated"] == [27, 43, 67, 83, 100]


# -- after a resume, and on several ranks -----------------------------------------------------------

DATA = TensorDataset(torch.arange(40.0).unsqueeze(1) / 40, torch.ones(40, 1))
SCHEDULE = {0: 1, "3 steps": 3, "1 epoch": 2, "60%": 4}


def trainer(directory: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    options: dict[str, Any] = {"accumulate": SCHEDULE, "epochs": 3, "steps": 22, "seed": 3, **arguments}
    loader, optimizer = DataLoader(DATA, 4, shuffle=True), partial(torch.optim.Adam, lr=0.01)
    return tiny_trainer(callbacks=callbacks, loader=loader, optimizer=optimizer, directory=directory, **options)


def train(directory: Path, steps: int | None, **arguments: Any) -> tuple[Run, Sizes]:
    """Train to a step, which a callback ends, and save there; None: to the end."""
    seen = Sizes()

    @on(Callback.on_step_end)
    def stop(run: Run) -> None:
        if run.progress.step == steps:
            raise KeyboardInterrupt

    try:
        return trainer(directory, seen, Checkpoint("1 step", keep_last=None), stop, **arguments).fit(resume="auto"), seen
    except KeyboardInterrupt:
        return None, seen  # type: ignore[return-value]


def weights(directory: Path) -> bytes:
    return (max((directory / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()


def test_a_run_that_is_killed_at_any_step_ends_with_the_same_bits_and_steps(tmp_path: Path) -> None:
    run, whole = train(tmp_path / "whole", None)
    assert whole.steps == [1, 1, 1, 3, 3, 1, 2, 2, 2, 2, 2, 4, 4, 2]
    for kill in range(1, len(whole.steps)) if LONG else (3, 6, 11):
        directory = tmp_path / f"killed-{kill}"
        _, first = train(directory, kill)
        again, second = train(directory, None)
        done = again.progress.origin.step
        assert first.steps[:done] + second.steps == whole.steps
        assert again.progress.now() == run.progress.now()
        assert weights(directory) == weights(tmp_path / "whole")
        told = [one for one in read_decisions(directory / "decisions.jsonl") if one.what == "accumulation changed"]
        assert [(one.when.step, one.data["batches"]) for one in told] == [(3, 3), (6, 2), (10, 4)]


def test_another_schedule_at_a_resume_is_refused_unless_it_is_declared(tmp_path: Path) -> None:
    train(tmp_path, 4)
    with pytest.raises(CheckpointMismatchError, match=r"accumulate: saved .*'3 steps': 3.*override=\('accumulate',\)"):
        train(tmp_path, None, accumulate=2)
    run = trainer(tmp_path, seen := Sizes()).fit(resume="auto", override={"accumulate": {0: 1, "1 epoch": 5}})
    done = run.progress.origin.step
    assert seen.steps == [1] * (10 - [0, 1, 2, 3, 6][done]) + [5, 5, 5, 5]
    assert run.why("override").endswith("the run uses the present value")


def test_two_ranks_change_at_the_same_step(tmp_path: Path) -> None:
    def rank() -> Any:
        seen = Sizes()
        run = tiny_run(
            callbacks=[seen, Checkpoint("2 steps")],
            loader=DataLoader(DATA, 2, shuffle=True),
            epochs=2,
            seed=3,
            driver="ddp",
            device="cpu",
            accumulate={0: 1, "16 samples": 2, "1 epoch": 3, "75%": 4},
            directory=tmp_path,
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )
        return seen.steps, run.progress.now(), [dict(one.data) for one in run.decisions if "changed" in one.what]

    first, second = launch(rank, 2)
    assert first == second
    assert first[0] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 4]
    assert [one["batches"] for one in first[2]] == [2, 3, 4]
