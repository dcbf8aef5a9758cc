"""What the ranks exchange in a step: no rank waits for another in a step in which nothing was requested or logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import (
    Checkpoint,
    ClipGradients,
    EarlyStopping,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
    StopOnNonFinite,
    Swa,
    Timer,
)
from cadenza.drivers import DdpDriver
from cadenza.engine import silence
from cadenza.errors import DataError, DistributedError
from cadenza.loading import TensorBatches
from cadenza.sinks import Console, JsonLines, ProgressBar
from cadenza.testing import launch
from tests.distributed.parts import loader, samples, squared_error, trainer
from tests.distributed.parts import own_rank as rank

BLOCKING: tuple[str, ...] = ("all_reduce", "broadcast", "reduce", "gather", "all_gather", "all_gather_object", "gather_object")
BLOCKING += ("broadcast_object_list", "barrier", "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")


class Watched:
    """All calls of collectives in this process, other than the reduction of gradients: those for which the rank waits.

    A wait for a collective that was started before the last backward pass does not count: it had that long to arrive.
    """

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.started = 0
        self.passes = 0
        for name in BLOCKING:
            setattr(dist, name, self._watching(name, getattr(dist, name)))

    def _watching(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
            self.started += 1
            if async_op:
                return self.Work(self, name, collective(*arguments, async_op=True, **options))
            self.waited.append(name)
            return collective(*arguments, **options)

        return watched

    class Work:
        def __init__(self, watched: Watched, name: str, work: Any) -> None:
            self.watched, self.name, self.work, self.since = watched, name, work, watched.passes

        def wait(self) -> None:
            if self.watched.passes == self.since:
                self.watched.waited.append(f"{self.name}, started in this batch")
            self.work.wait()


class Mark(Callback):
    """Notes at the start of each step what was waited for until then."""

    asks = False

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.waited: list[int] = []
        self.started: list[int] = []

    def on_step_start(self, run: Run) -> None:
        self.waited.append(len(self.watched.waited))
        self.started.append(self.watched.started)

    def on_after_backward(self, run: Run, outputs: Any) -> None:
        self.watched.passes += 1


class Own(Callback):
    """A callback of a user, which may make a request in any step and does not."""

    def on_step_end(self, run: Run) -> None: ...
    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None: ...
    def on_after_backward(self, run: Run, outputs: Any) -> None: ...


def schedule(one: Any) -> Any:
    return StepLR(one, 10)


LISTS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "a hook of one's own": lambda: [Own()],
    "a function": lambda: [on(Callback.on_step_end)(lambda run: None)],
    "updates": lambda: [Ema(), ClipGradients(1.0), LearningRate(schedule)],
    "logs": lambda: [LogTraining(50), ClipGradients(1.0, log="norm", log_every=50)],
    "a progress bar": lambda: [ProgressBar("plain", interval_s=60), Own()],
    "the usual ones": lambda: [LogTraining(50), Ema(), ClipGradients(1.0), LearningRate(schedule), Console(), Own()],
    "checkpoints": lambda: [Checkpoint("100 steps"), JsonLines("rows.jsonl"), Own()],
    "evaluations": lambda: [Evaluate(loader(8), every="100 steps"), EarlyStopping("eval/loss", "min"), Own()],
    "averages": lambda: [Swa("50%"), Ema(), Own()],
    "checks": lambda: [StopOnNonFinite(gradients=True), Own()],
    "times": lambda: [Timer("50 steps"), LogTraining("50 steps"), Own()],
}


def plain_steps(
    make: Callable[[], list[Callback]],
    folder: Path,
    data: Any = None,
    train: Callable[[Trainer], object] = Trainer.fit,
    **arguments: Any,
) -> tuple[list[int], list[int]]:
    """Return for each of the steps 5 to 10 of an epoch how often this rank waited, and how many collectives it started."""
    watched = Watched()
    mark = Mark(watched)
    data = loader(4 * 2 * 12) if data is None else data
    train(trainer(data, max_epochs=1, callbacks=[mark, *make()], directory=folder, **arguments))
    waited, started = (numbers[4:10] for numbers in (mark.waited, mark.started))
    return _differences(waited), _differences(started)


def _differences(numbers: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(numbers)]


def test_no_rank_waits_in_a_plain_step(tmp_path: Path) -> None:
    def counted() -> dict[str, tuple[list[int], list[int]]]:
        return {name: plain_steps(make, tmp_path / name) for name, make in LISTS.items()}

    for found in launch(counted):
        assert {name: waited for name, (waited, _) in found.items()} == dict.fromkeys(LISTS, [0] * 5)
        assert {name: max(started) <= 2 for name, (_, started) in found.items()} == dict.fromkeys(LISTS, True)


def test_ranks_exchange_nothing_in_steps_of_callbacks_that_only_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(silence, "LONGEST_S", math.inf)  # however slow the steps are
    usual: list[Callback] = [LogTraining(50), Ema(), ClipGradients(1.0), LearningRate(schedule), Console(), Checkpoint()]

    class Count(Mark):
        _reads_totals = False

    def exchanges() -> tuple[int, int, int]:
        watched = Watched()
        count = Count(watched)
        run = trainer(loader(4 * 2 * 100), max_epochs=1, callbacks=[count, *usual], directory=tmp_path / "run").fit()
        assert run.progress.step == 100
        assert [step for step, _ in run.history["train/loss"]] == [50, 100]
        assert run.progress.samples == 800
        return watched.started, count.started[50] - count.started[49], count.started[99] - count.started[51]

    for at_all, with_record, between_records in launch(exchanges):
        assert at_all < 70  # many of them at the start and at the end
        assert with_record == 2  # with the batch, and at the end of the step: the loss is in the record
        assert between_records == 0  # the quiet window ends where the next record is due


def test_no_rank_waits_for_the_next_batch_of_data_that_is_sharded_already() -> None:
    """The ranks exchange the lengths of their loaders once in an epoch."""

    def waits(own: Any) -> tuple[list[int], int]:
        mark = Mark(Watched())
        run = trainer(own, max_epochs=2, callbacks=[mark, Own()], driver=DdpDriver("cpu", share_data=False)).fit()
        return _differences(mark.waited[4:10]), run.progress.batch

    def counted() -> list[tuple[list[int], int]]:
        data: Any = samples(4 * 2 * 12)
        tensors = TensorBatches(data.tensors[0][rank() :: 2], data.tensors[1][rank() :: 2], batch_size=4)
        return [
            waits(own) for own in (DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank())), list(tensors), tensors)
        ]

    assert launch(counted) == [[([0] * 5, 24)] * 3] * 2


@pytest.mark.parametrize(("length", "message"), [(7, "returned only 6"), (5, "returned more")])
def test_a_sharded_loader_with_a_wrong_length_is_an_error_on_all_ranks(length: int, message: str) -> None:
    class Wrong(DistributedSampler[Any]):
        def __len__(self) -> int:
            return 4 * length

    def training() -> str:
        data = samples(48)
        with pytest.raises((DataError, DistributedError)) as raised:
            trainer(DataLoader(data, 4, sampler=Wrong(data, 2, rank(), shuffle=False)), max_epochs=1).fit()
        return str(raised.value)

    assert all(message in told for told in launch(training))


@pytest.mark.parametrize("source", [0, 1])
def test_numbers_of_one_rank_alone_are_sent_by_it_and_nothing_is_gathered_from_all(source: int) -> None:
    """Such as what the main process logs for itself: what a rank receives does not grow with the ranks."""

    def training() -> tuple[set[str], list[tuple[int, float]]]:
        during: list[str] = []
        watched = Watched()

        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            during[:] = watched.waited
            if rank() == source:
                run.log({f"a{number}": float(run.progress.step) for number in range(40)})

        begin = on(Callback.on_fit_start)(lambda run: watched.waited.clear())
        run = trainer(loader(4 * 2 * 4), max_epochs=1, callbacks=[begin, log]).fit()
        return {*during}, run.history["a39"]

    for names, logged in launch(training):
        assert "broadcast_object_list" in names
        assert not {name for name in names if "gather" in name}
        assert logged == [(step, float(step)) for step in range(1, 5)]


def test_an_exchange_of_the_default_group_never_meets_one_of_a_run() -> None:
    """A callback may communicate with torch's functions at any moment, also while an exchange of the run is under way."""

    def training() -> list[float]:
        sums: list[float] = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            own = torch.tensor([1.0 + rank()] * 8)
            dist.all_reduce(own)
            sums.append(float(own.sum()))
            return squared_error(model, batch)

        trainer(loader(96), max_epochs=1, compute_loss=loss, callbacks=[Own()]).fit()
        return sums

    assert launch(training) == [[24.0] * 12] * 2
