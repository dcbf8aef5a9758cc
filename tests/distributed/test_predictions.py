"""Predictions of several ranks in one file: the rows, and their order, are those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from cadenza.drivers import FsdpDriver
from cadenza.errors import DataError, DistributedError
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, rank, samples, trainer


def numbered(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"number": batch[2], "score": model(batch[0]), "name": [f"sample {number}" for number in batch[2].tolist()]}


class Stream(IterableDataset[Any]):
    """Batches of one sample, two, three, ..., and no length."""

    def __iter__(self) -> Iterator[Any]:
        data = samples(36)
        yield from (data[number * (number + 1) // 2 : (number + 1) * (number + 2) // 2] for number in range(8))


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pyarrow.parquet.read_table(path).to_pylist())


def predicted(folder: Path, **arguments: Any) -> list[list[dict[str, Any]]]:
    """Return the rows of files from loaders of several kinds."""
    one, own = trainer(**arguments), folder / str(rank())
    loaders = {
        "uneven": (loader(37, shuffle=False), None),
        "limited": (loader(37, shuffle=False), 4),
        "stream": (DataLoader(Stream(), batch_size=None), None),
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_file_of_several_ranks_is_that_of_one_process(tmp_path: Path, ranks: int) -> None:
    alone = predicted(tmp_path)
    assert [row["number"] for row in alone[0]] == [row["index"] for row in alone[0]] == list(range(37))
    for got in launch(lambda: predicted(tmp_path), ranks):
        assert all(same(one, expected) for one, expected in zip(got, alone, strict=True))
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"uneven.parquet", "limited.parquet", "stream.parquet"}, "no temporary file is left"


def test_a_rank_without_batches_writes_none(tmp_path: Path) -> None:
    class Short(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield samples(4)[0:4]

    def short() -> list[dict[str, Any]]:
        return rows(trainer().predict(DataLoader(Short(), batch_size=None), compute=numbered, to=tmp_path / "a.parquet"))

    assert [[row["number"] for row in got] for got in launch(short, 3)] == [[0, 1, 2, 3]] * 3


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

    first, second = launch(changing, 2)
    assert first == "DataError: every batch must have the same columns: the first has ['early'], a later one ['late']"
    assert second.startswith("DistributedError: the main process could not write")
    assert first in second
    assert os.listdir(tmp_path) == []


def test_weights_in_shards_predict_the_same_file(tmp_path: Path) -> None:
    alone = predicted(tmp_path)

    def sharded() -> list[list[dict[str, Any]]]:
        return predicted(tmp_path, driver=FsdpDriver(shard=[nn.Linear], device="cpu"))

    for got in launch(sharded, 2):
        assert all(same(one, expected) for one, expected in zip(got, alone, strict=True))
