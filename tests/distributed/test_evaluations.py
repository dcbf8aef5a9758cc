"""Evaluations and predictions on multiple ranks: results, rows and their order are those of one process.

With which= and weights=, every rank has the chosen weights meanwhile, and its own shard again afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

from cadenza import Trainer, load_weights
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.drivers import Driver
from cadenza.drivers.sharding import local
from cadenza.errors import DataError, DistributedError
from cadenza.testing import launch
from tests.distributed.drivers import blocks, ddp, fsdp, sharded, single
from tests.distributed.parts import Batch, InOrder, judged, loader, network, rank, samples, trainer
from tests.distributed.standing import on_ranks


def two_losses(model: nn.Module, batch: Batch) -> dict[str, Any]:
    predictions = model(batch[0])
    errors = (predictions - batch[1]).flatten()
    outputs = {"loss": errors.square().mean(), "kl": float(errors.mean()), "weight": batch[2].sum() + 1}
    if batch[2][0] == 8:  # on one rank alone
        outputs["rare"] = errors.abs().mean()
    return {**outputs, "a": predictions, "b": batch[1]}


class Stream(IterableDataset[Any]):
    """Batches of these sizes, and no length."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[Any]:
        ends = [*accumulate(self.sizes)]
        data = samples(sum(self.sizes))
        return (data[end - size : end] for size, end in zip(self.sizes, ends, strict=True))


def stream(*sizes: int) -> DataLoader[Any]:
    return DataLoader(Stream(*sizes), batch_size=None)


def results(data: Any, limit: int | None = None) -> dict[str, float]:
    metrics = {
        "mse": (MeanSquaredError(), "a", "b"),
        "order": (InOrder(), "a", "b"),
        "both": (MetricCollection({"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)}), "b", "a"),
        "mean": (MeanMetric(), "kl"),
    }
    return trainer().evaluate(data, compute=two_losses, metrics=metrics, limit=limit)


@pytest.mark.parametrize("ranks", [2, 3])
def test_numbers_and_metrics_with_named_inputs_are_those_of_one_process(ranks: int) -> None:
    def all_kinds() -> list[dict[str, float]]:
        uneven = loader(37, shuffle=False)
        return [results(uneven), results(uneven, limit=4), results(stream(*[4] * 7))]

    alone = all_kinds()
    assert set(alone[0]) == {f"eval/{name}" for name in ("loss", "kl", "rare", "mse", "order", "both/mse", "both/rmse", "mean")}
    for got in on_ranks(all_kinds, ranks):
        for one, expected in zip(got, alone, strict=True):
            assert one == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("make", "ranks"), [(ddp, 2), (sharded, 4)])  # 37 samples: ten batches for four ranks
def test_an_evaluation_and_a_prediction_equal_those_of_one_process(make: Callable[[], Driver], ranks: int) -> None:
    def results(make: Callable[[], Driver]) -> tuple[dict[str, float], Tensor]:
        one = trainer(model=nn.Sequential(nn.BatchNorm1d(3), blocks()), driver=make())
        data, metrics = loader(37, shuffle=False), {"own": InOrder(), "mse": MeanSquaredError()}
        evaluated = one.evaluate(data, metrics=metrics, compute=judged)
        return evaluated, one.predict(data, compute=lambda model, batch: model(batch[0]), everywhere=True)

    expected, predictions = results(single)
    for got, predicted in on_ranks(partial(results, make), ranks):
        assert got == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(predicted, predictions, atol=1e-6)


def test_a_rank_without_any_batch_takes_part_with_nothing() -> None:
    def short() -> dict[str, float]:
        metrics = {"order": (InOrder(), "a", "b"), "mse": (MeanSquaredError(), "a", "b")}
        return trainer().evaluate(stream(4, 4), compute=two_losses, metrics=metrics)

    alone = short()
    assert on_ranks(short, 3) == [pytest.approx(alone, rel=1e-6)] * 3


def test_a_loader_without_any_batch_is_an_error_on_all_ranks() -> None:
    def short() -> str:
        with pytest.raises(DataError) as caught:
            trainer().evaluate(stream(), compute=two_losses)
        return str(caught.value)

    message = "the loader of 'eval' gave no batch. Give one that has at least one, and can be read again."
    assert on_ranks(short, 2) == [message] * 2


# -- predictions


def numbered(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"number": batch[2], "score": model(batch[0]), "name": [f"sample {number}" for number in batch[2].tolist()]}


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(path).to_pylist())


def predicted(folder: Path, **arguments: Any) -> list[list[dict[str, Any]]]:
    """Return the rows of files from loaders of several kinds."""
    one, own = trainer(**arguments), folder / str(rank())
    loaders = {
        "uneven": (loader(37, shuffle=False), None),
        "limited": (loader(37, shuffle=False), 4),
        "stream": (stream(*range(1, 9)), None),
    }
    paths = [
        one.predict(data, compute=numbered, limit=limit, to=(folder if rank() is not None else own) / f"{name}.parquet")
        for name, (data, limit) in loaders.items()
    ]
    return [rows(path) for path in paths]


def same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    names = all(one.keys() == other.keys() for one, other in zip(got, expected, strict=True))
    scores = [torch.tensor([row["score"] for row in table]) for table in (got, expected)]
    rest = [[{**row, "score": None} for row in table] for table in (got, expected)]
    return names and rest[0] == rest[1] and torch.allclose(scores[0], scores[1], atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "make"), [(2, ddp), (3, ddp), (2, partial(fsdp, shard=[nn.Linear]))], ids=["2", "3", "shards"]
)
def test_the_file_of_several_ranks_is_that_of_one_process(tmp_path: Path, ranks: int, make: Callable[[], Driver]) -> None:
    alone = predicted(tmp_path)
    assert [row["number"] for row in alone[0]] == [row["index"] for row in alone[0]] == list(range(37))
    for got in on_ranks(lambda: predicted(tmp_path, driver=make()), ranks):
        assert all(same(one, expected) for one, expected in zip(got, alone, strict=True))
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"uneven.parquet", "limited.parquet", "stream.parquet"}, "no temporary file is left"


def test_a_rank_without_batches_writes_none(tmp_path: Path) -> None:
    def short() -> list[dict[str, Any]]:
        return rows(trainer().predict(stream(4), compute=numbered, to=tmp_path / "a.parquet"))

    assert [[row["number"] for row in got] for got in on_ranks(short, 3)] == [[0, 1, 2, 3]] * 3


def failing_on(which: int) -> Callable[[nn.Module, Batch], Tensor]:
    def compute(model: nn.Module, batch: Batch) -> Tensor:
        if rank() == which and int(batch[2][0]) >= 8:
            raise ZeroDivisionError("in the forward pass")
        return batch[2]

    return compute


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_on_one_rank_leaves_the_earlier_file_and_nothing_else(tmp_path: Path, which: int) -> None:
    (tmp_path / "a.parquet").write_text("earlier")
    with pytest.raises(ExceptionGroup) as caught:
        launch(lambda: trainer().predict(loader(37, shuffle=False), compute=failing_on(which), to=tmp_path / "a.parquet"))
    assert "in the forward pass" in str([*caught.value.exceptions])
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.parquet", "earlier")]


def test_what_the_main_process_cannot_write_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def changing() -> str:
        def compute(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return {"late" if 8 in batch[2] else "early": batch[2]}

        with pytest.raises((DataError, DistributedError)) as caught:
            trainer().predict(loader(37, shuffle=False), compute=compute, to=tmp_path / "a.parquet")
        with pytest.raises((OSError, DistributedError)):
            trainer().predict(loader(37, shuffle=False), compute=compute, to="/proc/a.parquet")
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = on_ranks(changing, 2)
    assert first == "DataError: every batch must have the same columns: the first has ['early'], a later one ['late']"
    assert second.startswith("DistributedError: the main process could not write")
    assert first in second
    assert os.listdir(tmp_path) == []


# -- which= and weights=


def evaluated(directory: Path, driver: Callable[[], Driver]) -> list[Any]:
    """Return the live results, those of the best and of its average, predictions, and whether the shards are as before."""
    data = loader(shuffle=False)
    one = trainer(
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        compute_loss=judged,
        max_epochs=None,
        max_steps=6,
        seed=1,
        directory=directory,
        driver=driver(),
        callbacks=[Ema(0.5), Evaluate(data, "2 steps"), Checkpoint("3 steps", keep_last=1, keep_best=("eval/loss", "max"))],
    )
    run = one.fit()
    before = {name: local(value).clone() for name, value in one.model.state_dict().items()}
    live, best = one.evaluate(data), one.evaluate(data, which="best")
    averaged = one.evaluate(data, which="best", weights="ema")
    memory, last = one.evaluate(data, weights="ema"), one.evaluate(data, which="last", weights="ema")
    predicted = one.predict(data, compute=lambda model, batch: model(batch[0]), which="best", weights="ema")
    problems = [problem_of(one, which, weights) for which, weights in (("best:eval/acc", None), ("best", "emma"))]
    same = all(torch.equal(local(value), before[name]) for name, value in one.model.state_dict().items())
    highest = max(run.history["eval/loss"], key=lambda point: point[1])
    results = [found["eval/loss"] for found in (live, best, averaged, memory, last)]
    return [results, highest, predicted, same and one.evaluate(data) == live, problems]


def problem_of(one: Trainer, which: str, weights: str | None) -> str:
    with pytest.raises(Exception, match=r"best|emma") as caught:
        one.evaluate(loader(shuffle=False), which=which, weights=weights)
    return str(caught.value)


@pytest.mark.parametrize("driver", [ddp, partial(fsdp, shard=nn.Linear)], ids=["ddp", "fsdp"])
def test_every_rank_evaluates_the_chosen_weights_and_gets_its_own_back(tmp_path: Path, driver: Callable[[], Driver]) -> None:
    ranks = on_ranks(partial(evaluated, tmp_path / "run", driver), 2)
    for (live, best, averaged, memory, last), (step, highest), _, unchanged, problems in ranks:
        assert step == 2
        assert best == highest
        assert len({live, best, averaged, memory}) == 4
        assert memory == last
        assert unchanged
        assert "is the best by 'eval/acc'" in problems[0]
        assert "holds no weights 'emma'" in problems[1]
    assert ranks[0][0] == ranks[1][0]
    model, data = network(), loader(shuffle=False)
    load_weights(tmp_path / "run", model, which="best", weights="ema")  # in one process, whatever wrote it
    expected = torch.cat([model.eval()(batch[0]) for batch in data])
    torch.testing.assert_close(ranks[0][2], expected)
    assert ranks[1][2] is None
    one = trainer(data, compute_loss=judged, directory=tmp_path / "run")
    for weights, result in ((None, ranks[0][0][1]), ("ema", ranks[0][0][2])):
        assert one.evaluate(data, which="best", weights=weights)["eval/loss"] == pytest.approx(result)
