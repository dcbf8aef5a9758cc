"""FindBatchSize: the largest batch that fits, and a run that goes on with it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lr
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Trainer, on
from cadenza.callbacks import Checkpoint, FindBatchSize, FindLearningRate, LearningRate, Limit
from cadenza.drivers import DdpDriver
from cadenza.engine.memory import is_out_of_memory
from cadenza.errors import DataError
from cadenza.testing import launch, prove_resume, tiny_run, tiny_trainer


def samples(size: int, *, count: int = 64, **arguments: Any) -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, count).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, 2 * inputs + 1), batch_size=size, **arguments)


class Greedy(nn.Module):
    """Asks, in truth, for more memory than any machine has when a batch is larger than so many samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.most, self.asked = nn.Linear(1, 1), most, list[int]()

    def forward(self, inputs: Tensor) -> Any:
        self.asked.append(len(inputs))
        room = torch.empty(2**48 if len(inputs) > self.most else 1, dtype=torch.uint8)
        return self.linear(inputs) + 0.0 * room.ndim


@pytest.mark.parametrize(
    ("most", "start", "max_size", "size", "why"),
    [
        (20, 1, 64, 16, "32 is too large: out of memory (RuntimeError)"),
        (16, 4, 64, 16, "32 is too large: out of memory (RuntimeError)"),
        (100, 4, 32, 32, "max_size fits"),
        (100, 3, 20, 20, "max_size fits"),  # 3, 6, 12, and max_size itself
        (20, 8, 8, 8, "max_size fits"),
    ],
)
def test_the_largest_size_that_fits_is_used(most: int, start: int, max_size: int, size: int, why: str) -> None:
    trained: list[int] = []
    look = on(Callback.on_batch_start)(lambda run, batch: trained.append(len(batch[0])))
    find = FindBatchSize(samples, start=start, max_size=max_size)
    model = Greedy(most)
    run = tiny_run(model=model, callbacks=[look, find], loader=samples(1))
    assert find.size == size
    assert run.why("batch size found").endswith(f"{size}: {why}")
    assert set(trained[:-1]) == {size}
    assert run.progress.samples == 64
    assert model.asked == trained, "what the model counted in the trials is undone as well"


@pytest.mark.parametrize(
    ("drop_last", "reason"), [(False, "the largest batch has 24 samples"), (True, "the loader has no such batch")]
)
def test_more_than_the_data_set_holds_is_not_tried_for_ever(drop_last: bool, reason: str) -> None:
    find = FindBatchSize(lambda size: samples(size, count=24, drop_last=drop_last), max_size=10_000)
    run = tiny_run(callbacks=[find])
    assert find.size == 16
    assert run.why("batch size found").endswith(f"16: 32 is too large: {reason}")


def test_not_even_the_first_size_is_an_error_that_says_so_and_another_error_stays_itself() -> None:
    with pytest.raises(RuntimeError, match=r"can't allocate memory|out of memory") as caught:
        tiny_run(model=Greedy(3), callbacks=[FindBatchSize(samples, start=4, max_size=8)])
    assert any("which does not fit. Lower it" in note for note in caught.value.__notes__)
    with pytest.raises(DataError, match=r"make_loader\(8\) returned an empty loader\. Lower start="):
        tiny_run(callbacks=[FindBatchSize(lambda size: samples(size, count=4, drop_last=True), start=8, max_size=8)])

    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        tiny_run(compute_loss=broken, callbacks=[FindBatchSize(samples, max_size=8)])


class _RunsOut(torch.autograd.Function):
    """Passes its input on; the backward pass of a batch that is too large runs out of memory."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if len(gradient) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return gradient


class HalfBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.last(_RunsOut.apply(self.first(inputs)))  # type: ignore[no-untyped-call]


def test_ddp_trains_with_the_size_that_fits_after_a_backward_pass_that_ran_out_of_memory() -> None:
    def found() -> tuple[int | None, int]:
        find = FindBatchSize(samples, max_size=64)
        run = tiny_run(model=HalfBackward(), callbacks=[find], driver=DdpDriver("cpu"))
        return find.size, run.progress.samples

    assert launch(found, ranks=1) == [(8, 64)]


def test_what_says_that_memory_ran_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"))
    not_contiguous = "CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
    assert is_out_of_memory(RuntimeError(not_contiguous))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))


def test_others_see_the_loader_that_was_found() -> None:
    totals: list[int] = []

    def fall(optimizer: torch.optim.Optimizer, total: int) -> LRScheduler:
        totals.append(total)
        return lr.LinearLR(optimizer, 1.0, 0.5, total_iters=total)

    callbacks = [LearningRate(fall), Limit(train=3), FindBatchSize(samples, start=16, max_size=16)]
    run = tiny_run(callbacks=callbacks, epochs=2, loader=samples(1))
    assert totals == [6]
    assert run.progress.step == 6


def test_a_run_that_continues_takes_the_size_of_its_first_start(tmp_path: Path) -> None:
    """Also when there is less memory now; and it tries nothing."""
    tried: list[int] = []

    def make_loader(size: int) -> Iterable[Any]:
        tried.append(size)
        return samples(size, shuffle=True)

    def trainer(most: int, epochs: int) -> Trainer:
        callbacks = [FindBatchSize(make_loader, start=2, max_size=64), Checkpoint(every="1 epoch")]
        return tiny_trainer(model=Greedy(most), callbacks=callbacks, epochs=epochs, directory=tmp_path, seed=1)

    first = trainer(20, 1).fit()
    assert tried == [2, 4, 8, 16, 32, 16]
    tried.clear()
    second = trainer(17, 2).fit(resume="auto")
    assert tried == [16]
    assert (first.progress.step, second.progress.step) == (4, 8)
    assert second.why("batch size found").endswith("16: as in the run that is continued")


def test_a_run_that_continues_with_a_batch_size_that_was_found_has_the_same_bits() -> None:
    def make(directory: Path) -> Trainer:
        def make_loader(size: int) -> DataLoader[Any]:
            return samples(size, count=16 + int(torch.randint(8, ())), shuffle=True)  # made once when it continues

        callbacks = [FindBatchSize(make_loader, max_size=4), FindLearningRate(start=1e-3, steps=10)]
        return tiny_trainer(callbacks=callbacks, directory=directory, epochs=2, seed=3)

    prove_resume(make, at=[5], in_process=True)
