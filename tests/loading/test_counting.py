"""The number of samples in a batch: from the outputs, from the loader's batch sampler, or from the batch itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from cadenza import Run
from cadenza.callbacks import Checkpoint, Evaluate, Limit
from cadenza.errors import LossError
from cadenza.loading.counting import counting
from cadenza.testing import tiny_run, tiny_trainer


class Images(Dataset[Tensor]):
    """Ten images of 3 channels, each of a height of its own."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 4 + index, 5), float(index))


class Streamed(IterableDataset[Tensor]):
    """The same, without indices."""

    def __iter__(self) -> Iterator[Tensor]:
        images = Images()
        yield from (images[index] for index in range(10))


BUCKETS = [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9]]  # a batch sampler of its own sizes


def as_list(samples: list[Tensor]) -> list[Tensor]:
    return samples


def mean_of(model: nn.Module, images: Any) -> Tensor:
    pixels = torch.stack([image.mean() for image in images])
    return model(pixels.unsqueeze(1)).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_those_that_the_batch_sampler_asked_for(workers: int) -> None:
    seen: list[int] = []
    for options in ({"batch_size": 4}, {"batch_sampler": BUCKETS}):
        loader = DataLoader(Images(), collate_fn=as_list, num_workers=workers, **options)
        seen.append(tiny_run(loader=loader, compute_loss=mean_of, epochs=2).progress.samples)
    assert seen == [20, 20]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_so_are_those_of_a_stream(options: dict[str, Any]) -> None:
    stream: Any = DataLoader(Streamed(), batch_size=4, collate_fn=as_list, **options)
    assert tiny_run(loader=stream, compute_loss=mean_of).progress.samples == 10


def test_so_are_those_of_a_limited_loader() -> None:
    images: Any = DataLoader(Images(), batch_size=4, collate_fn=as_list)
    assert tiny_run(loader=images, compute_loss=mean_of, callbacks=[Limit(train=2)]).progress.samples == 8


def test_a_run_that_continues_inside_an_epoch_counts_on(tmp_path: Path) -> None:
    def fit(steps: int) -> Run:
        loader: Any = DataLoader(Images(), batch_sampler=BUCKETS, collate_fn=as_list)
        one = tiny_trainer(
            loader=loader, compute_loss=mean_of, steps=steps, seed=1, directory=tmp_path, callbacks=[Checkpoint("1 step")]
        )
        return one.fit(resume="auto")

    assert [fit(steps).progress.samples for steps in (1, 2, 5)] == [4, 5, 15]


def test_the_mean_loss_of_an_evaluation_counts_samples_not_channels() -> None:
    def compute(model: nn.Module, images: Any) -> dict[str, Any]:
        return {"loss": torch.stack([image.mean() for image in images]).mean()}

    for options in ({"batch_size": 4}, {"batch_sampler": BUCKETS}, {"batch_size": 3, "num_workers": 1}):
        loader = DataLoader(Images(), collate_fn=as_list, **options)
        assert tiny_trainer().evaluate(loader, compute=compute) == {"eval/loss": pytest.approx(4.5)}
    stream: Any = DataLoader(Streamed(), batch_size=4, collate_fn=as_list)
    run = tiny_run(callbacks=[Evaluate(stream, compute=compute, limit=2)])
    assert run.history["eval/loss"][-1][1] == pytest.approx(3.5)


def test_what_the_outputs_say_comes_first() -> None:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean() * 0 + batch[0][0, 0], "samples": numpy.int64(5) if len(batch[0]) == 2 else 1}

    batches = [(torch.zeros(2, 1), None), (torch.ones(3, 1), None)]
    run = tiny_run(loader=batches, compute_loss=compute, epochs=3)
    assert run.progress.samples == 3 * 6
    assert tiny_trainer().evaluate(batches, compute=compute) == {"eval/loss": pytest.approx(1 / 6)}


@pytest.mark.parametrize("samples", [1.5, -1, "two", torch.tensor(2, device="meta")])
def test_a_number_of_samples_that_is_none_is_an_error(samples: Any) -> None:
    with pytest.raises(LossError, match=r"outputs\['samples'\] must be a whole number of at least 0, on the host; got"):
        tiny_run(compute_loss=lambda model, batch: {"loss": model(batch[0]).mean(), "samples": samples})


def test_the_loader_of_an_evaluation_is_left_as_it_is_and_its_workers_may_stay() -> None:
    loader: Any = DataLoader(Images(), batch_size=5, collate_fn=as_list, num_workers=1, persistent_workers=True)
    assert counting(loader) is counting(loader)
    for _ in range(2):
        assert [one.samples for one in counting(loader)] == [5, 5]
    assert loader.collate_fn is as_list
    assert loader._iterator is None
    loader.collate_fn = list
    assert counting(loader).collate_fn.collate is list
