"""The number of samples in a batch comes from the outputs, from the batch sampler of the loader, or from the batch."""

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
from cadenza.loading.sample_counts import with_sample_counts
from cadenza.testing import tiny_run, tiny_trainer


class Images(Dataset[Tensor]):
    """Ten images of 3 channels with different heights."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 4 + index, 5), float(index))


class Streamed(IterableDataset[Tensor]):
    """The same images as a stream."""

    def __iter__(self) -> Iterator[Tensor]:
        images = Images()
        yield from (images[index] for index in range(10))


BUCKETS = [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9]]  # a batch sampler with batches of different sizes


def as_list(samples: list[Tensor]) -> list[Tensor]:
    return samples


def mean_of(model: nn.Module, images: Any) -> Tensor:
    pixels = torch.stack([image.mean() for image in images])
    return model(pixels.unsqueeze(1)).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_the_indices_of_the_batch_sampler(workers: int) -> None:
    seen: list[int] = []
    for options in ({"batch_size": 4}, {"batch_sampler": BUCKETS}):
        loader = DataLoader(Images(), collate_fn=as_list, num_workers=workers, **options)
        seen.append(tiny_run(loader=loader, compute_loss=mean_of, epochs=2).progress.samples)
    assert seen == [20, 20]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
def test_samples_of_a_stream_are_counted(options: dict[str, Any]) -> None:
    stream: Any = DataLoader(Streamed(), batch_size=4, collate_fn=as_list, **options)
    assert tiny_run(loader=stream, compute_loss=mean_of).progress.samples == 10


def test_samples_of_a_limited_loader_are_counted() -> None:
    images: Any = DataLoader(Images(), batch_size=4, collate_fn=as_list)
    assert tiny_run(loader=images, compute_loss=mean_of, callbacks=[Limit(train=2)]).progress.samples == 8


def test_a_run_that_resumes_inside_an_epoch_continues_the_count(tmp_path: Path) -> None:
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


def test_outputs_samples_takes_precedence() -> None:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).mean() * 0 + batch[0][0, 0], "samples": numpy.int64(5) if len(batch[0]) == 2 else 1}

    batches = [(torch.zeros(2, 1), None), (torch.ones(3, 1), None)]
    run = tiny_run(loader=batches, compute_loss=compute, epochs=3)
    assert run.progress.samples == 3 * 6
    assert tiny_trainer().evaluate(batches, compute=compute) == {"eval/loss": pytest.approx(1 / 6)}


@pytest.mark.parametrize("samples", [1.5, -1, "two", torch.tensor(2, device="meta")])
def test_an_invalid_number_of_samples_is_an_error(samples: Any) -> None:
    with pytest.raises(LossError, match=r"outputs\['samples'\] must be a whole number of at least 0, on the host; got"):
        tiny_run(compute_loss=lambda model, batch: {"loss": model(batch[0]).mean(), "samples": samples})


def test_the_loader_of_an_evaluation_does_not_change_and_its_persistent_workers_are_reused() -> None:
    loader: Any = DataLoader(Images(), batch_size=5, collate_fn=as_list, num_workers=1, persistent_workers=True)
    assert with_sample_counts(loader) is with_sample_counts(loader)
    for _ in range(2):
        assert [one.samples for one in with_sample_counts(loader)] == [5, 5]
    assert loader.collate_fn is as_list
    assert loader._iterator is None
    loader.collate_fn = list
    assert with_sample_counts(loader).collate_fn.collate is list
