"""Every callback of Cadenza with two processes: decisions and weights alike, results as in one process, files written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from cadenza import Callback, Run, callbacks, on
from cadenza.callbacks import (
    BestWeights,
    Checkpoint,
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
from tests.distributed.parts import Batch, judged, loader, network, rank, squared_error, trainer, weights_of

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])

# In test_left_evaluations.py, in files of their own in tests/callbacks and, with LoRA, in tests/recipes/test_pages.py;
# ReplayCheck in test_replay_check.py:
ELSEWHERE = ("SlurmRequeue", "OptunaPruning", "Alert", "SequenceLength", "OmitFrozen", "Fingerprint", "ReplayCheck")
shown: set[type] = {getattr(callbacks, name) for name in (*ELSEWHERE, "Capsule", "Recover")}


def shows(*classes: type) -> Callable[[Test], Test]:
    """Note which callbacks a test is about."""

    def note(test: Test) -> Test:
        shown.update(classes)
        return test

    return note


def test_every_callback_is_shown_here() -> None:
    """A new one must be added to a test below: what does it do with two processes?"""
    assert {one.__name__ for one in shown} == {*callbacks.__all__}


def on_two(function: Callable[[], T]) -> tuple[T, T]:
    """Return what a function returns on each of two ranks."""
    first, second = launch(function)
    return first, second


def as_one(**arguments: Any) -> dict[str, Any]:
    """Return the arguments with which one process does what two do: it takes the batches of both in a step."""
    return arguments if rank() is not None else {"accumulate": 2, **arguments}


def same_numbers(one: Any, other: Any) -> bool:
    return bool(torch.allclose(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-5, atol=1e-6))


@shows(Evaluate, EarlyStopping, BestWeights, LearningRate, LogTraining)
def test_what_watches_results_sees_and_does_what_it_does_in_one_process() -> None:
    def watched() -> tuple[dict[str, list[tuple[int, float]]], tuple[Any, ...], Tensor]:
        # What is watched falls and "max" is wanted, so it never gets better.
        rate = LearningRate(lambda optimizer: ReduceLROnPlateau(optimizer, "max", 0.5, patience=0), monitor="eval/loss")
        best = BestWeights("eval/loss", "min")
        stop = EarlyStopping("eval/loss", mode="max", patience=3, restore_best=True)
        judge = Evaluate(loader(37, shuffle=False), compute=judged)
        one = trainer(**as_one(max_epochs=9, callbacks=[judge, rate, best, stop, LogTraining("1 step", throughput=False)]))
        run = one.fit()
        assert run.outcome is not None
        decided = (run.outcome.kind, run.progress.epoch, run.progress.step, best.step, stop.stale)
        assert best.weights is not None
        return {name: run.history[name] for name in run.history.names}, decided, weights_of(one)

    alone = watched()
    for history, decided, weights in on_two(watched):
        assert decided == alone[1]
        assert decided[0] == "stopped"
        assert history.keys() == alone[0].keys() == {"eval/loss", "train/loss", "train/lr"}
        for name, series in history.items():
            assert dict(series) == pytest.approx(dict(alone[0][name]), rel=1e-5)
        assert len(set(dict(history["train/lr"]).values())) > 2
        assert same_numbers(weights, alone[2])


def normed() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(3), network())


def all_of(model: nn.Module) -> Tensor:
    """Return weights and statistics as one vector."""
    return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()])


@shows(Swa)
def test_swa_takes_the_statistics_of_all_data_as_one_process_does() -> None:
    def averaged() -> tuple[Tensor, str]:
        model = normed()
        run = trainer(model=model, **as_one(max_epochs=4, callbacks=[Swa(0.5, lr=0.01, anneal_steps=3)])).fit()
        return all_of(model), run.why("averaged weights in place")

    expected, why = averaged()
    assert "the average of 3 updates" in why
    for vector, told in on_two(averaged):
        assert same_numbers(vector, expected)
        assert "the average of 3 updates" in told


@shows(Ema)
def test_an_average_is_the_same_everywhere_and_judged_as_in_one_process() -> None:
    def averaged() -> tuple[Tensor, list[tuple[int, float]]]:
        judge = Evaluate(loader(13, shuffle=False), weights="ema", every="2 steps")
        one = trainer(**as_one(callbacks=[Ema(0.8, rampup=True, use_at_end=True), judge]))
        run = one.fit()
        return weights_of(one), run.history["eval/loss"]

    expected, results = averaged()
    first, second = on_two(averaged)
    assert torch.equal(first[0], second[0])
    for weights, judged_as in (first, second):
        assert same_numbers(weights, expected)
        assert dict(judged_as) == pytest.approx(dict(results), rel=1e-5)


@shows(Freeze, Warmup, ClipGradients, ScheduleValue)
def test_what_changes_updates_changes_them_as_in_one_process() -> None:
    def changed() -> tuple[Tensor, list[Tensor], list[tuple[int, float]]]:
        model, of_first = network(), list[Tensor]()

        @on(Callback.on_step_end)
        def note(run: Run) -> None:
            of_first.append(next(model.parameters()).detach().clone())

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
        return weights_of(one), of_first, run.history["norm"]

    expected, of_first, norms = changed()
    assert torch.equal(of_first[0], of_first[3])
    assert not torch.equal(of_first[3], of_first[4])
    first, second = on_two(changed)
    assert torch.equal(first[0], second[0])
    for weights, frozen, norm in (first, second):
        assert same_numbers(weights, expected)
        assert all(map(same_numbers, frozen, of_first))
        assert dict(norm) == pytest.approx(dict(norms), rel=1e-4)


@shows(StopOnNonFinite)
@pytest.mark.parametrize("gradients", [False, True])
def test_a_loss_that_is_not_finite_on_one_rank_is_dropped_and_told_on_all(gradients: bool) -> None:
    def spoiled(model: nn.Module, batch: Batch) -> Tensor:
        loss = squared_error(model, batch)
        spoils = rank() == 1 and 7 in batch[2]
        if gradients and spoils:
            loss.register_hook(lambda gradient: gradient * torch.nan)
        return loss * torch.nan if spoils and not gradients else loss

    def looked_at() -> tuple[Any, ...]:
        data = loader(24, shuffle=False)  # sample 7 is in the second batch, the first of rank 1
        skipping = trainer(data, compute_loss=spoiled, callbacks=[StopOnNonFinite("skip", gradients=gradients)])
        run = skipping.fit()
        stopping = trainer(data, compute_loss=spoiled, callbacks=[StopOnNonFinite("stop", gradients=gradients)]).fit()
        assert stopping.outcome is not None
        return run.progress.step, weights_of(skipping), stopping.progress.step, stopping.outcome.kind

    first, second = on_two(looked_at)
    assert (first[0], *first[2:]) == (second[0], *second[2:]) == (6, 1, "stopped")
    assert first[1].isfinite().all()
    assert torch.equal(first[1], second[1])


@shows(ConfusionMatrix, SavePredictions)
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
    first, second = on_two(lambda: predicted("two"))
    assert first[0] == second[0] == counts
    assert (first[2], second[2]) == (1, 0)
    written = first[1]
    assert len(written) == 38
    for got, expected in zip(written[1:], lines[1:], strict=True):
        assert same_numbers([*map(float, got.split(","))], [*map(float, expected.split(","))])


@shows(FindLearningRate)
def test_the_rate_that_is_found_is_that_of_one_process_and_the_same_everywhere() -> None:
    def found() -> tuple[list[float], float | None, Tensor]:
        find = FindLearningRate(start=1e-4, end=1.0, steps=20, apply=True)
        one = trainer(**as_one(callbacks=[find], max_epochs=1))
        one.fit()
        return find.losses, find.suggestion, weights_of(one)

    losses, suggestion, weights = found()
    first, second = on_two(found)
    assert first[:2] == second[:2]
    assert torch.equal(first[2], second[2])
    assert first[1] == suggestion is not None
    assert same_numbers(first[0], losses)
    assert same_numbers(first[2], weights)


@shows(callbacks.FindBatchSize, ConvertSyncBatchNorm)
def test_what_cannot_be_done_with_several_processes_or_without_gpus_says_so_on_all() -> None:
    def refused() -> tuple[list[str], str]:
        told = []
        model = normed()
        for one in (callbacks.FindBatchSize(lambda size: loader(batch_size=size), max_size=8), ConvertSyncBatchNorm()):
            with pytest.raises(ValueError) as caught:  # noqa: PT011  # what it says is looked at below
                trainer(model=model, callbacks=[one]).fit()
            told.append(str(caught.value))
        return told, type(model[0]).__name__

    for told, kind in on_two(refused):
        assert "FindBatchSize works in one process; got 2" in told[0]
        assert "SyncBatchNorm trains on GPUs only, and the ranks are on the CPU" in told[1]
        assert kind == "SyncBatchNorm"


@shows(Limit)
def test_limits_are_those_of_each_rank_in_training_and_of_all_in_an_evaluation() -> None:
    seen: list[int] = []

    def limited() -> tuple[int, int, list[int]]:
        @on(Callback.on_eval_batch_start)
        def see(run: Run, evaluation: Any, batch: Batch) -> None:
            seen.extend(batch[2].tolist())

        judge = Evaluate(loader(37, shuffle=False), every="1 epoch")
        run = trainer(callbacks=[Limit(train=2, evaluation=3), judge, see], max_epochs=1).fit()
        return run.progress.step, run.progress.samples, seen

    first, second = on_two(limited)
    assert first[:2] == second[:2] == (2, 16)
    assert sorted(first[2] + second[2]) == [*range(12)]


class Centre(nn.Module):
    """A loss with a part that learns, beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((1,), float(rank() or 0)))

    def forward(self, predictions: Tensor) -> Tensor:
        return ((predictions - self.place) ** 2).mean()


@shows(callbacks.MoveModules)
def test_what_learns_beside_the_model_learns_as_in_one_process() -> None:
    def learned() -> tuple[Tensor, Tensor]:
        centre, model = Centre(), network()

        def both(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD([*parameters, *centre.parameters()], 0.05)

        one = trainer(
            model=model,
            optimizer=both,
            compute_loss=lambda model, batch: squared_error(model, batch) + centre(model(batch[0])),
            **as_one(callbacks=[callbacks.MoveModules(centre)]),
        )
        one.fit()
        return centre.place.detach(), weights_of(one)

    place, weights = learned()
    first, second = on_two(learned)
    assert torch.equal(first[0], second[0])
    assert same_numbers(first[0], place)
    assert same_numbers(first[1], weights)


@shows(TimeLimit)
def test_the_time_is_up_at_the_same_step_on_all_though_clocks_differ() -> None:
    class Slow(Callback):
        def on_step_end(self, run: Run) -> None:
            if rank() == 1 and run.progress.step == 2:
                run.progress._began -= 100

    def limited() -> tuple[int, str]:
        run = trainer(max_epochs=9, callbacks=[Slow(), TimeLimit("50 s")]).fit()
        assert run.outcome is not None
        return run.progress.step, run.outcome.reason

    first, second = on_two(limited)
    assert first == second == (3, "the time limit of 50 s is reached")


class Records(Callback):
    """Keeps the names of what is logged."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_log(self, run: Run, record: Record) -> None:
        self.names |= {*record.values, *record.media}


@shows(callbacks.DeviceStats, callbacks.Histograms, callbacks.SampleImages, callbacks.Summary, Profile, Derive, callbacks.Timer)
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

    (names, steps, _), (others, same_steps, _) = on_two(shown_once)
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


@shows(Checkpoint)
def test_checkpoints_are_written_once_and_the_best_is_kept(tmp_path: Path) -> None:
    def saved() -> tuple[list[int], int]:
        keep = Checkpoint("1 epoch", keep_best=("eval/loss", "min"), keep_last=1)
        judge = Evaluate(loader(9), every="2 steps")
        run = trainer(directory=tmp_path, callbacks=[judge, keep]).fit()
        run = trainer(directory=tmp_path, max_epochs=3, callbacks=[Evaluate(loader(9), every="2 steps"), keep]).fit("auto")
        return [one["step"] for one in keep.writer.retention.bests()], run.progress.step

    (best, step), (_, other_step) = on_two(saved)  # the main process reads the folder
    assert step == other_step == 9
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {f"step-{one:08d}" for one in (*best, 9)}
