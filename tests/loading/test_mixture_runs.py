"""Runs and evaluations on several loaders: resumed, on several ranks, with results for each loader."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading import Mixture, TensorBatches, current_source
from cadenza.testing import launch, prove_resume, tiny_loader, tiny_run, tiny_trainer
from tests.distributed.parts import loader, squared_error, trainer


def pairs(count: int, batch_size: int = 2, *, start: float = 0.0, shuffle: bool = True) -> TensorBatches[tuple[Tensor, ...]]:
    inputs = torch.arange(count).unsqueeze(1) / 10 + start
    return TensorBatches(inputs, 2 * inputs + 1, batch_size=batch_size, shuffle=shuffle)


def zip_loss(model: nn.Module, batch: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in batch.values()]
    return torch.stack(losses).mean()


MODES: list[tuple[Any, Any]] = [("zip", "longest"), ("cycle", "longest"), ("sequential", "shortest"), ("weighted", "longest")]


@pytest.mark.parametrize(("mode", "stop"), MODES)
def test_a_run_resumes_inside_an_epoch_bit_for_bit(mode: Any, stop: Any) -> None:
    def make(directory: Path) -> Any:
        weights = {"a": 2, "b": 1} if mode == "weighted" else None
        mixture = Mixture({"a": pairs(9), "b": tiny_loader(3)}, mode, weights=weights, stop=stop)

        log = on(Callback.on_step_end)(lambda run: run.log("source", "ab".find(current_source() or "c")))
        compute: dict[str, Any] = {"compute_loss": zip_loss} if mode == "zip" else {}
        return tiny_trainer(directory=directory, seed=1, epochs=2, loader=mixture, accumulate=2, callbacks=[log], **compute)

    prove_resume(make, at=[1, 4], in_process=True)


def test_hooks_and_compute_loss_know_the_loader_also_after_an_evaluation() -> None:
    seen: list[tuple[str, str | None]] = []

    def compute(model: nn.Module, batch: Any) -> Tensor:
        seen.append(("compute", current_source()))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    note = on(Callback.on_step_end)(lambda run: seen.append(("hook", current_source())))
    train, valid = (Mixture({name: tiny_loader(1) for name in names}, "cycle") for names in ("ab", "xy"))
    tiny_run(loader=train, compute_loss=compute, callbacks=[Evaluate(valid, every=1), note])
    evaluated = [("compute", "x"), ("compute", "y")]
    assert seen == [("compute", "a"), *evaluated, ("hook", "a"), ("compute", "b"), *evaluated, ("hook", "b")]
    seen.clear()
    tiny_run(loader=tiny_loader(1), compute_loss=compute, callbacks=[note])
    assert seen == [("compute", None), ("hook", None)], "nothing is left of the earlier run"


def test_another_mixture_inside_an_epoch_is_refused(tmp_path: Path) -> None:
    def make(steps: int, **weights: float) -> Any:
        mixture = Mixture({name: pairs(8) for name in weights}, "weighted", weights=weights, stop="longest")
        return tiny_trainer(directory=tmp_path, seed=1, steps=steps, loader=mixture, callbacks=[Checkpoint("3 steps")])

    make(3, a=1, b=1).fit()
    with pytest.raises(CheckpointMismatchError, match=r"weights: saved \[1.0, 1.0\], now \[1.0, 2.0\]"):
        make(5, a=1, b=2).fit(resume="auto")


def test_an_empty_loader_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="the loader 'b' is empty"):
        tiny_run(loader=Mixture({"a": tiny_loader(), "b": []}, "sequential"))
    with pytest.raises(DataError, match="the loader 'b' of 'eval' gave no batch"):
        tiny_trainer().evaluate(Mixture({"a": tiny_loader(), "b": iter(())}, "sequential"))


# -- evaluation ----------------------------------------------------------------------------------------


def judged(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    predictions = model(batch[0])
    return {"loss": nn.functional.mse_loss(predictions, batch[1]), "predictions": predictions, "targets": batch[1]}


class Largest:
    """A metric that does not reduce over ranks itself: it must see all predictions, in their order."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.seen += targets.flatten().tolist()

    def compute(self) -> float:
        return sum(value * (index + 1) for index, value in enumerate(self.seen))


def halves(**arguments: Any) -> Trainer:
    """Return a trainer of a model of which all weights are 0.5."""
    one = trainer(loader(24), model=nn.Linear(1, 1), max_steps=1, **arguments)
    with torch.no_grad():
        for weight in one.model.parameters():
            weight.fill_(0.5)
    return one


def evaluated(mode: Any, **options: Any) -> dict[str, float]:
    inner = Mixture({"c": pairs(7, start=9), "d": list(pairs(6, start=4, shuffle=False))}, "cycle")
    mixture = Mixture({"a": pairs(10), "b": pairs(13, batch_size=3, start=1), "n": inner}, mode)
    metrics = {"error": torchmetrics.MeanSquaredError(), "order": Largest()}
    return halves(compute_loss=judged).evaluate(mixture, metrics=metrics, **options)


def test_an_evaluation_has_results_for_each_loader_and_for_all() -> None:
    results = evaluated("sequential")
    names = ["a", "b", "n/c", "n/d"]
    assert list(results) == [
        *(f"eval/{name}/{result}" for name in names for result in ("loss", "error", "order")),
        *("eval/loss", "eval/error", "eval/order"),
    ]
    counts = dict(zip(names, (10, 13, 7, 6), strict=True))
    for result in ("loss", "error"):
        whole = sum(results[f"eval/{name}/{result}"] * count for name, count in counts.items()) / sum(counts.values())
        assert results[f"eval/{result}"] == pytest.approx(whole)
    assert evaluated("cycle") == results, "each loader is read once, to its end, in every mode but zip"
    limited = evaluated("cycle", limit=1)
    assert limited["eval/b/loss"] != results["eval/b/loss"]


def judge(stop: Any) -> dict[str, float]:
    mixture = Mixture({"a": pairs(10), "b": list(pairs(14, start=1, shuffle=False))}, "zip", stop=stop)
    return halves(compute_loss=zip_loss).evaluate(mixture)


def predicted() -> Tensor:
    loaders = {"a": [torch.arange(i, i + 1.0).unsqueeze(1) for i in range(3)], "b": list(torch.arange(10.0, 14).view(4, 1, 1))}
    one = trainer(loader(24), model=nn.Identity(), optimizer=lambda _: torch.optim.SGD([torch.zeros(1)], 0.1))
    predictions: Tensor = one.predict(Mixture(loaders, "sequential"), compute=lambda model, batch: model(batch))
    return predictions.flatten()


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_have_the_results_and_predictions_of_one(ranks: int) -> None:
    def results() -> list[dict[str, float]]:
        return [evaluated("cycle"), judge("shortest"), judge("longest")]

    alone = results()
    assert [list(one) for one in alone[1:]] == [["eval/loss"]] * 2, "in the mode zip, of all loaders"
    assert predicted().tolist() == [0, 1, 2, 10, 11, 12, 13]
    for found, predictions in launch(lambda: (results(), predicted()), ranks):
        assert [list(one) for one in found] == [list(one) for one in alone]
        assert found == [pytest.approx(one) for one in alone]
        assert predictions.tolist() == predicted().tolist()


def test_sanity_batches_try_each_loader() -> None:
    tried: list[str | None] = []
    note = on(Callback.on_sanity_end)(lambda run, evaluation: tried.extend(evaluation.results))
    mixture = Mixture({"a": tiny_loader(3), "b": tiny_loader(4)}, "sequential")
    tiny_run(callbacks=[Evaluate(mixture, sanity_batches=1), note], steps=1)
    assert tried == ["eval/a/loss", "eval/b/loss", "eval/loss"]


def mixed(mode: Any) -> Mixture:
    return Mixture({"a": loader(26, 2), "b": loader(38, 2)}, mode, stop="shortest" if mode == "sequential" else "longest")


def part(directory: Path, mode: Any, steps: int | None) -> tuple[list[tuple[str, int]], int, bool]:
    """Continue the run until a step; return what this rank saw as (loader, sample), and the number of samples of the run."""
    seen: list[tuple[str, int]] = []
    lengths: set[int | None] = set()
    measure = on(Callback.on_batch_end)(lambda run, *_: lengths.add(run.progress.batches_per_epoch))

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Any) -> None:
        alike = session_of(run).cursor.source.replicated_at == run.progress.batch_in_epoch and run.driver.rank > 0
        for name, one in batch.items() if mode == "zip" else [(current_source() or "", batch)]:
            seen.extend((name, number) for number in (() if alike else one[2].tolist()))

    def zipped(model: nn.Module, batch: Any) -> Any:
        return sum(squared_error(model, one) for one in batch.values())

    options: dict[str, Any] = {"max_steps": steps, "max_epochs": 1, "compute_loss": zipped if mode == "zip" else squared_error}
    one = trainer(mixed(mode), directory=directory, callbacks=[see, measure, Checkpoint("100 steps")], **options)
    run = one.fit(resume="auto")
    assert steps is not None or lengths == {run.progress.batch}, "the length of the epoch was known"
    return seen, run.progress.samples, run.progress.epoch == 1


MIXED = ("sequential", "zip", "cycle")


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what two ranks, and then three, see of an epoch in each mode."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = (
        launch(lambda steps=steps: [part(folder / mode, mode, steps) for mode in MIXED], ranks)  # type: ignore[misc]
        for ranks, steps in ((2, 4), (3, None))
    )
    return {mode: ([one[index] for one in first], [one[index] for one in second]) for index, mode in enumerate(MIXED)}


@pytest.mark.parametrize("mode", MIXED)
def test_a_run_goes_from_two_ranks_to_three_inside_an_epoch(continued: dict[str, Any], mode: str) -> None:
    first, second = continued[mode]
    seen = Counter(one for own, _, _ in (*first, *second) for one in own)
    assert all(over for _, _, over in second)
    assert seen.total() == second[0][1], "progress.samples counts each once"
    assert {number for name, number in seen if name == "b"} == set(range(38))
    if mode == "sequential":
        assert set(seen.values()) == {1}
        assert {number for name, number in seen if name == "a"} == set(range(26))
    else:
        assert {count for (name, _), count in seen.items() if name == "a"} <= {1, 2, 3}
        assert {count for (name, _), count in seen.items() if name == "b"} <= {1, 2}
