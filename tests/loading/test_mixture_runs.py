"""Runs and evaluations on several loaders: resumed, on several ranks, with results for each loader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from cadenza import Callback, Evaluation, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading import Mixture, TensorBatches, current_source
from cadenza.loading.batches import moved
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

        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log("source", "ab".find(current_source() or "c"))

        compute: dict[str, Any] = {"compute_loss": zip_loss} if mode == "zip" else {}
        return tiny_trainer(directory=directory, seed=1, epochs=2, loader=mixture, accumulate=2, callbacks=[log], **compute)

    prove_resume(make, at=[1, 2, 4], in_process=True)


def test_hooks_and_compute_loss_know_the_loader_also_after_an_evaluation() -> None:
    seen: list[tuple[str, str | None]] = []

    def compute(model: nn.Module, batch: Any) -> Tensor:
        seen.append(("compute", current_source()))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    @on(Callback.on_step_end)
    def note(run: Run) -> None:
        seen.append(("hook", current_source()))

    train = Mixture({"a": tiny_loader(1), "b": tiny_loader(1)}, "cycle")
    valid = Mixture({"x": tiny_loader(1), "y": tiny_loader(1)}, "cycle")
    tiny_run(loader=train, compute_loss=compute, callbacks=[Evaluate(valid, every=1), note])
    evaluated = [("compute", "x"), ("compute", "y")]
    assert seen == [("compute", "a"), *evaluated, ("hook", "a"), ("compute", "b"), *evaluated, ("hook", "b")]
    seen.clear()
    tiny_run(loader=tiny_loader(1), compute_loss=compute, callbacks=[note])
    assert seen == [("compute", None), ("hook", None)], "nothing is left of the earlier run"


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass
class Record:
    inputs: Tensor
    targets: Tensor


@pytest.mark.parametrize(
    "kind", [tuple, list, Pair._make, lambda two: dict(enumerate(two)), lambda two: Record(*two), lambda two: two[0]]
)
def test_batches_of_all_kinds_keep_their_type_and_move_to_a_device(kind: Callable[[Any], Any]) -> None:
    given = kind([torch.ones(2), torch.zeros(2)])
    for mode in ("cycle", "zip"):
        (batch,) = Mixture({"a": [given]}, mode)
        there = moved(batch, torch.device("meta"))
        there = there["a"] if mode == "zip" else there
        assert type(there) is type(given)


def test_another_mixture_inside_an_epoch_is_refused(tmp_path: Path) -> None:
    def make(**weights: float) -> Any:
        mixture = Mixture({name: pairs(8) for name in weights}, "weighted", weights=weights, stop="longest")
        return tiny_trainer(directory=tmp_path, seed=1, steps=3, epochs=None, loader=mixture, callbacks=[Checkpoint("3 steps")])

    make(a=1, b=1).fit()
    longer = make(a=1, b=2)
    longer.max_steps = 5
    with pytest.raises(CheckpointMismatchError, match=r"weights: saved \[1.0, 1.0\], now \[1.0, 2.0\]"):
        longer.fit(resume="auto")


def test_an_empty_loader_is_an_error_before_the_run() -> None:
    with pytest.raises(DataError, match="the loader 'b' is empty"):
        tiny_run(loader=Mixture({"a": tiny_loader(), "b": []}, "sequential"))


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


def evaluated(mode: Any, **options: Any) -> dict[str, float]:
    inner = Mixture({"c": pairs(7, start=9), "d": list(pairs(6, start=4, shuffle=False))}, "cycle")
    mixture = Mixture({"a": pairs(10), "b": pairs(13, batch_size=3, start=1), "n": inner}, mode)
    metrics = {"error": torchmetrics.MeanSquaredError(), "order": Largest()}
    one = trainer(loader(24), compute_loss=judged, model=nn.Linear(1, 1), max_steps=1)
    with torch.no_grad():
        for weight in one.model.parameters():
            weight.fill_(0.5)
    return one.evaluate(mixture, metrics=metrics, **options)


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


def test_several_ranks_have_the_results_of_one() -> None:
    alone = evaluated("cycle")
    for ranks in (2, 3):
        for results in launch(lambda: evaluated("cycle"), ranks):
            assert results == pytest.approx(alone)
            assert list(results) == list(alone)


def test_an_evaluation_in_the_mode_zip_has_the_results_of_all_loaders() -> None:
    def evaluate(stop: Any) -> dict[str, float]:
        mixture = Mixture({"a": pairs(10), "b": list(pairs(14, start=1, shuffle=False))}, "zip", stop=stop)
        one = trainer(loader(24), compute_loss=zip_loss, model=nn.Linear(1, 1), max_steps=1)
        nn.init.constant_(one.model.weight, 0.5)  # type: ignore[arg-type]
        nn.init.constant_(one.model.bias, 0.5)  # type: ignore[arg-type]
        return one.evaluate(mixture)

    for stop in ("shortest", "longest"):
        alone = evaluate(stop)
        assert list(alone) == ["eval/loss"]
        for results in launch(lambda stop=stop: evaluate(stop), 2):  # type: ignore[misc]
            assert results == pytest.approx(alone)


def predicted(last: Any = None) -> Tensor:
    loaders = {
        "a": [torch.arange(i, i + 1.0).unsqueeze(1) for i in range(3)],
        "b": last or list(torch.arange(10.0, 14).view(4, 1, 1)),
    }
    one = trainer(loader(24), model=nn.Identity(), optimizer=lambda _: torch.optim.SGD([torch.zeros(1)], 0.1))
    predictions: Tensor = one.predict(Mixture(loaders, "sequential"), compute=lambda model, batch: model(batch))
    return predictions.flatten()


def test_predictions_are_in_the_order_of_the_loaders_on_several_ranks() -> None:
    assert predicted().tolist() == [0, 1, 2, 10, 11, 12, 13]
    assert [one.tolist() for one in launch(predicted, 2)] == [predicted().tolist()] * 2


def test_sanity_batches_try_each_loader() -> None:
    tried: list[str | None] = []

    class Note(Callback):
        def on_sanity_end(self, run: Run, evaluation: Evaluation) -> None:
            tried.extend(evaluation.results)

    mixture = Mixture({"a": tiny_loader(3), "b": tiny_loader(4)}, "sequential")
    tiny_run(callbacks=[Evaluate(mixture, sanity_batches=1), Note()], steps=1)
    assert tried == ["eval/a/loss", "eval/b/loss", "eval/loss"]


def test_a_loader_without_batches_in_an_evaluation_is_named() -> None:
    with pytest.raises(DataError, match="the loader 'b' of 'eval' gave no batch"):
        tiny_trainer().evaluate(Mixture({"a": tiny_loader(), "b": iter(())}, "sequential"))


# -- several ranks -------------------------------------------------------------------------------------


def mixed(mode: Any) -> Mixture:
    return Mixture({"a": loader(26, 2), "b": loader(38, 2)}, mode, stop="shortest" if mode == "sequential" else "longest")


def part(directory: Path, mode: Any, steps: int | None) -> tuple[list[tuple[str, int]], int, bool]:
    """Continue the run until a step; return what this rank saw as (loader, sample), and the number of samples of the run."""
    seen: list[tuple[str, int]] = []
    lengths: set[int | None] = set()

    @on(Callback.on_batch_end)
    def measure(run: Run, batch: Any, outputs: Any) -> None:
        lengths.add(run.progress.batches_per_epoch)

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Any) -> None:
        alike = session_of(run).cursor.source.replicated_at == run.progress.batch_in_epoch and run.driver.rank > 0
        for name, one in batch.items() if mode == "zip" else [(current_source() or "", batch)]:
            seen.extend((name, number) for number in (() if alike else one[2].tolist()))

    compute = (
        (lambda model, batch: sum(squared_error(model, one) for one in batch.values())) if mode == "zip" else squared_error
    )
    callbacks = [see, measure, Checkpoint("100 steps")]
    one = trainer(mixed(mode), directory=directory, max_steps=steps, callbacks=callbacks, max_epochs=1, compute_loss=compute)
    run = one.fit(resume="auto")
    assert steps is not None or lengths == {run.progress.batch}, "the length of the epoch was known"
    return seen, run.progress.samples, run.progress.epoch == 1


@pytest.mark.parametrize("mode", ["sequential", "zip", "cycle"])
def test_a_run_goes_from_two_ranks_to_three_inside_an_epoch(tmp_path: Path, mode: Any) -> None:
    first = launch(lambda: part(tmp_path / "run", mode, 4), 2)
    second = launch(lambda: part(tmp_path / "run", mode, None), 3)
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
