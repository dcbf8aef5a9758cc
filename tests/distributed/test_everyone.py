"""Every callback of Cadenza with two processes: decisions and weights alike, results as in one process, files written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from cadenza import Callback, Run, callbacks, on
from cadenza.callbacks import (
    BestWeights,
    ClipGradients,
    ConfusionMatrix,
    ConvertSyncBatchNorm,
    Derive,
    EarlyStopping,
    Ema,
    Evaluate,
    FindLearningRate,
    Freeze,
    LearningRate,
    Limit,
    LogTraining,
    Profile,
    SavePredictions,
    ScheduleValue,
    StopOnNonFinite,
    Swa,
    TimeLimit,
    Warmup,
)
from cadenza.records.record import Record
from cadenza.testing import launch
from tests.distributed.parts import Batch, judged, loader, network, rank, squared_error, trainer, vector, weights_of
from tests.distributed.standing import on_ranks


class Seen(NamedTuple):
    """What a run ends with; `numbers` and `facts` by name."""

    weights: Tensor
    numbers: dict[Any, Any]
    facts: Any = None


Run_ = TypeVar("Run_", bound=Callable[[], Seen])
RUNS: list[Callable[[], Seen]] = []
"""Those that must end on two processes as on one."""


def ends_as_in_one_process(run: Run_) -> Run_:
    """Note a run that must end on two processes as on one."""
    RUNS.append(run)
    return run


def as_one(**arguments: Any) -> dict[str, Any]:
    """Return the arguments with which one process does what two do: it takes the batches of both in a step."""
    return arguments if rank() is not None else {"accumulate": 2, **arguments}


@ends_as_in_one_process
def watch_results() -> Seen:
    # What is watched falls and "max" is wanted, so it never gets better.
    rate = LearningRate(lambda optimizer: ReduceLROnPlateau(optimizer, "max", 0.5, patience=0), monitor="eval/loss")
    best = BestWeights("eval/loss", "min")
    stop = EarlyStopping("eval/loss", mode="max", patience=3, restore_best=True)
    judge = Evaluate(loader(37, shuffle=False), compute=judged)
    one = trainer(**as_one(max_epochs=9, callbacks=[judge, rate, best, stop, LogTraining("1 step", throughput=False)]))
    run = one.fit()
    assert (run.outcome and run.outcome.kind) == "stopped"
    assert best.weights is not None
    history = {name: dict(run.history[name]) for name in run.history.names}
    assert history.keys() == {"eval/loss", "train/loss", "train/lr"}
    assert len({*history["train/lr"].values()}) > 2
    return Seen(weights_of(one), history, (run.progress.epoch, run.progress.step, best.step, stop.stale))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(3), network())


@ends_as_in_one_process
def average_statistics_of_all_data() -> Seen:
    model = normed()
    run = trainer(model=model, **as_one(max_epochs=4, callbacks=[Swa(0.5, lr=0.01, anneal_steps=3)])).fit()
    assert "the average of 3 updates" in run.why("averaged weights in place")
    weights_and_statistics = vector(value.double() for value in model.state_dict().values())
    return Seen(weights_and_statistics, {})


@ends_as_in_one_process
def judge_an_average() -> Seen:
    judge = Evaluate(loader(13, shuffle=False), weights="ema", every="2 steps")
    one = trainer(**as_one(callbacks=[Ema(0.8, rampup=True, use_at_end=True), judge]))
    run = one.fit()
    return Seen(weights_of(one), dict(run.history["eval/loss"]))


@ends_as_in_one_process
def change_updates() -> Seen:
    model, of_first = network(), list[Tensor]()
    note = on(Callback.on_step_end)(lambda run: of_first.append(next(model.parameters()).detach().clone()))

    def group(run: Run) -> dict[str, Any]:
        return run.optimizers[0].param_groups[0]

    changing: list[Callback] = [
        Freeze({"0": "4 steps", "3.bias": "1 epoch"}),
        Warmup("5 steps"),
        ClipGradients(max_norm=0.5, log="norm", log_every="1 step"),
        ScheduleValue(group, "weight_decay", {0: 0.0, 6: 0.1}),
        Evaluate(loader(9), every="2 steps"),
    ]
    one = trainer(model=model, **as_one(max_epochs=3, callbacks=[*changing, note]))
    run = one.fit()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(of_first[0], of_first[3])
    assert not torch.equal(of_first[3], of_first[4])
    return Seen(torch.cat([weights_of(one), vector(of_first)]), dict(run.history["norm"]))


@ends_as_in_one_process
def find_a_rate() -> Seen:
    find = FindLearningRate(start=1e-4, end=1.0, steps=20, apply=True)
    one = trainer(**as_one(callbacks=[find], max_epochs=1))
    one.fit()
    assert find.suggestion is not None
    return Seen(weights_of(one), {"losses": find.losses}, find.suggestion)


class Centre(nn.Module):
    """A loss with a part that learns, beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((1,), float(rank() or 0)))

    def forward(self, predictions: Tensor) -> Tensor:
        return ((predictions - self.place) ** 2).mean()


@ends_as_in_one_process
def learn_beside_the_model() -> Seen:
    centre = Centre()

    def both(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, *centre.parameters()], 0.05)

    def compute(model: nn.Module, batch: Batch) -> Tensor:
        return squared_error(model, batch) + centre(model(batch[0]))  # type: ignore[no-any-return]

    one = trainer(optimizer=both, compute_loss=compute, **as_one(callbacks=[callbacks.MoveModules(centre)]))
    one.fit()
    return Seen(torch.cat([centre.place.detach(), weights_of(one)]), {})


@pytest.mark.parametrize("run", RUNS, ids=[run.__name__ for run in RUNS])
def test_callbacks_do_on_two_processes_what_they_do_on_one(run: Callable[[], Seen]) -> None:
    alone = run()
    first, second = on_ranks(run)
    assert torch.equal(first.weights, second.weights)
    for seen in (first, second):
        torch.testing.assert_close(seen.weights, alone.weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen.numbers, alone.numbers, rtol=1e-5, atol=1e-12)
        assert seen.facts == alone.facts


def test_a_gradient_that_is_not_finite_on_one_rank_is_dropped_and_told_on_all() -> None:
    """Losses are in test_dropped_batches.py."""

    def spoiled(model: nn.Module, batch: Batch) -> Tensor:
        loss = squared_error(model, batch)
        if rank() == 1 and 7 in batch[2]:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss

    def fitted(action: Literal["skip", "stop"]) -> tuple[int, str, Tensor]:
        data = loader(24, shuffle=False)  # sample 7 is in the second batch, the first of rank 1
        one = trainer(data, compute_loss=spoiled, callbacks=[StopOnNonFinite(action, gradients=True)])
        run = one.fit()
        assert run.outcome is not None
        return run.progress.step, run.outcome.kind, weights_of(one)

    first, second = on_ranks(lambda: [fitted("skip"), fitted("stop")])
    for (step, kind, weights), (other_step, other_kind, others) in zip(first, second, strict=True):
        assert (step, kind) == (other_step, other_kind)
        assert weights.isfinite().all()
        assert torch.equal(weights, others)
    assert (first[0][0], first[1][:2]) == (6, (1, "stopped"))


def test_predictions_of_all_ranks_are_counted_and_written_in_the_order_of_the_data(tmp_path: Path) -> None:
    torch.manual_seed(4)
    inputs, classes = torch.randn(37, 3), torch.randint(3, (37,))
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, classes), 4)

    def chosen(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"predictions": next(model.children())(batch[0])[:, :3], "targets": batch[1]}

    def predicted(folder: str) -> tuple[list[list[int]], list[str], int]:
        matrix = ConfusionMatrix(classes=3)
        save = SavePredictions("valid.csv", evaluation="eval")
        judge = Evaluate(rows, compute=chosen, every="3 steps")
        run = trainer(**as_one(max_steps=3, directory=tmp_path / folder, callbacks=[judge, matrix, save])).fit()
        assert matrix.counts is not None
        saved = [one for one in run.decisions if one.what == "saved predictions"]
        return matrix.counts.tolist(), (tmp_path / folder / "valid.csv").read_text().splitlines(), len(saved)

    counts, lines, _ = predicted("alone")
    first, second = on_ranks(lambda: predicted("two"))
    assert first[0] == second[0] == counts
    assert (first[2], second[2]) == (1, 0)
    written = first[1]
    assert len(written) == 38
    for got, expected in zip(written[1:], lines[1:], strict=True):
        assert [*map(float, got.split(","))] == pytest.approx([*map(float, expected.split(","))], rel=1e-5, abs=1e-6)


def test_what_cannot_be_done_with_several_processes_or_without_gpus_says_so_on_all() -> None:
    def refused() -> tuple[list[str], str]:
        told = []
        model = normed()
        for one in (callbacks.FindBatchSize(lambda size: loader(batch_size=size), max_size=8), ConvertSyncBatchNorm()):
            with pytest.raises(ValueError) as caught:  # noqa: PT011  # what it says is looked at below
                trainer(model=model, callbacks=[one]).fit()
            told.append(str(caught.value))
        return told, type(model[0]).__name__

    for told, kind in on_ranks(refused):
        assert "FindBatchSize works in one process; got 2" in told[0]
        assert "SyncBatchNorm trains on GPUs only, and the ranks are on the CPU" in told[1]
        assert kind == "SyncBatchNorm"


def test_limits_are_those_of_each_rank_in_training_and_of_all_in_an_evaluation() -> None:
    seen: list[int] = []

    def limited() -> tuple[int, int, list[int]]:
        see = on(Callback.on_eval_batch_start)(lambda run, evaluation, batch: seen.extend(batch[2].tolist()))
        judge = Evaluate(loader(37, shuffle=False), every="1 epoch")
        run = trainer(callbacks=[Limit(train=2, evaluation=3), judge, see], max_epochs=1).fit()
        return run.progress.step, run.progress.samples, seen

    first, second = on_ranks(limited)
    assert first[:2] == second[:2] == (2, 16)
    assert sorted(first[2] + second[2]) == [*range(12)]


def test_the_time_is_up_at_the_same_step_on_all_though_clocks_differ() -> None:
    class Slow(Callback):
        def on_step_end(self, run: Run) -> None:
            if rank() == 1 and run.progress.step == 2:
                run.progress._began -= 100

    def limited() -> tuple[int, str]:
        run = trainer(max_epochs=9, callbacks=[Slow(), TimeLimit("50 s")]).fit()
        assert run.outcome is not None
        return run.progress.step, run.outcome.reason

    first, second = on_ranks(limited)
    assert first == second == (3, "the time limit of 50 s is reached")


class Records(Callback):
    """Keeps the names of what is logged."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_log(self, run: Run, record: Record) -> None:
        self.names |= {*record.values, *record.media}


def test_what_shows_and_measures_writes_once_on_the_main_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def shown_once() -> tuple[set[str], int, list[float]]:
        doubled: list[float] = []

        @on(Callback.on_step_end)
        def ask(run: Run) -> None:
            doubled.append(float(run.outputs["doubled"]))
            assert doubled[-1] == pytest.approx(2 * run.outputs["loss"].item())

        logged = Records()
        looking: list[Callback] = [
            Profile(window=(1, 2), torch_profiler={"wait": 1, "warmup": 1, "active": 1}),
            callbacks.Summary(),
            callbacks.DeviceStats("2 steps"),
            callbacks.Timer("3 steps"),
            callbacks.Histograms("2 steps", parameters="0.weight", gradients=True),
            callbacks.SampleImages(2, every="2 steps", images=lambda batch, outputs: torch.rand(4, 1, 5, 5)),
            Derive(doubled=lambda run: 2 * run.outputs["loss"].detach()),
        ]
        run = trainer(directory=tmp_path, callbacks=[*looking, ask, logged], progress=True).fit()
        assert run.profile is not None
        return logged.names, run.profile.steps, doubled

    (names, steps, _), (others, same_steps, _) = launch(shown_once)
    media = {"parameters/0.weight", "gradients/0.weight", "train/images"}
    assert names == {
        *media,
        "process/memory_gib",
        "process/cpu_percent",
        *(f"time/{one}_s" for one in ("step", "epoch", "fit")),
    }
    assert others == set()
    assert steps == same_steps == 6
    said, progress = capfd.readouterr()
    assert progress.count("epoch 2/2  step 6/6  100%  loss ") == 1
    assert said.count("profile: ") == said.count("MiB: ") == 1
    for name in ("profile.json", "trace.json", "torch-trace.json"):
        assert json.loads((tmp_path / name).read_text())
    assert not list(tmp_path.glob("*trace-2*"))
