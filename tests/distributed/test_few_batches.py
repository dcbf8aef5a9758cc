"""Evaluations with fewer batches than ranks, or another number on each rank: each sample counts once, and all ranks go on.

A computation that communicates is done equally often on all ranks; another one only with the batches of its rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics import MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.utilities import dim_zero_cat

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate, SavePredictions
from cadenza.drivers import Driver
from cadenza.errors import DistributedError
from cadenza.loading import Mixture, TensorBatches
from tests.distributed.drivers import blocks, ddp, fsdp, single
from tests.distributed.parts import Batch, InOrder, Stream, loader, samples, squared_error, trainer
from tests.distributed.standing import on_ranks


def with_errors(model: nn.Module, batch: Batch) -> dict[str, Any]:
    predictions = model(batch[0]).flatten()
    errors = predictions - batch[1].flatten()
    return {"loss": errors.square().mean(), "predictions": predictions, "targets": batch[1].flatten()}


class Median(Metric):
    """A metric of torchmetrics that keeps a list on each rank."""

    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.values.append(predictions - targets)

    def compute(self) -> Tensor:
        return dim_zero_cat(self.values).median()


def metrics() -> dict[str, Any]:
    return {
        "own": InOrder(),
        "all": MetricCollection([MeanSquaredError(), PearsonCorrCoef()]),
        "order": Median(),
    }


class Largest:
    """A metric that returns a number, and reduces over the ranks by itself."""

    reduces_itself = True

    def reset(self) -> None:
        self.most = torch.zeros(())

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.most = torch.maximum(self.most, (predictions - targets).abs().max())

    def compute(self) -> float:
        if dist.is_initialized():
            dist.all_reduce(self.most, dist.ReduceOp.MAX)
        return float(self.most)


SHAPES = [(3, 4), (12, 4), (14, 4), (17, 4)]
"""Samples and batch sizes: one, three, four and five batches, the last ones short."""


@pytest.mark.parametrize("make", [ddp, fsdp])
def test_a_set_of_few_batches_is_evaluated_as_in_one_process(make: Callable[[], Driver]) -> None:
    def results(make: Callable[[], Driver]) -> list[Any]:
        one = trainer(model=nn.Sequential(nn.BatchNorm1d(3), blocks()), driver=make())
        found: list[Any] = []
        for count, size in SHAPES:
            data = loader(count, size, shuffle=False)
            found.append(one.evaluate(data, compute=with_errors, metrics={**metrics(), "largest": Largest()}))
            found.append(one.predict(data, compute=lambda model, batch: batch[2], everywhere=True).tolist())
        tensors = TensorBatches(*samples(4).tensors, batch_size=4)
        mixture = Mixture({"a": loader(12, 4, shuffle=False), "b": loader(5, 4, shuffle=False), "c": tensors}, "sequential")
        return [*found, one.evaluate(mixture, compute=with_errors, metrics=metrics())]

    expected = results(single)
    for got in on_ranks(partial(results, make), 3):
        for each, right in zip(got, expected, strict=True):
            assert each == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("make", [ddp, fsdp])
def test_a_run_evaluates_one_batch_on_three_ranks_before_during_and_after_its_training(make: Callable[[], Driver]) -> None:
    def work() -> tuple[str, list[int]]:
        seen: list[int] = []

        @on(Callback.on_eval_batch_end)
        def note(run: Run, evaluation: Any, batch: Batch, outputs: Any) -> None:
            seen.extend(batch[2].tolist())

        few = Evaluate(loader(4, 4), compute=with_errors, metrics=metrics(), sanity_batches=1, every="2 steps")
        run = trainer(callbacks=[note, few], model=blocks(), driver=make(), max_steps=4).fit()
        assert run.outcome is not None
        return run.outcome.kind, seen

    (first, seen), *others = on_ranks(work, 3)
    assert first == "finished"
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert others == [("finished", [])] * 2


@pytest.mark.parametrize("data", [loader(4, 4), loader(20, 4), Stream(20)], ids=["one batch", "five", "no length"])
@pytest.mark.parametrize("make", [ddp, fsdp])
def test_a_loss_that_gathers_from_all_ranks_is_evaluated_on_each_number_of_batches(
    make: Callable[[], Driver], data: Any
) -> None:
    def work() -> tuple[dict[str, float], int]:
        computed: list[int] = []

        def contrastive(model: nn.Module, batch: Batch) -> dict[str, Any]:
            computed.append(len(batch[0]))
            parts = [torch.zeros(1) for _ in range(3)]
            dist.all_gather(parts, torch.ones(1))  # as the features of the other ranks
            return {"loss": squared_error(model, batch), "ranks": torch.cat(parts).sum()}

        one = trainer(model=blocks(), driver=make())
        return one.evaluate(data, compute=contrastive), len(computed)

    alone = trainer(model=blocks(), driver=single()).evaluate(data, compute=squared_error)
    rounds = 1 if len([*data]) == 1 else 2
    for results, computed in on_ranks(work, 3):
        assert results == pytest.approx({**alone, "eval/ranks": 3.0}, rel=1e-5)
        assert computed == rounds


def test_a_computation_that_does_not_communicate_sees_each_sample_once() -> None:
    def work() -> list[int]:
        seen: list[int] = []

        def noted(model: nn.Module, batch: Batch) -> Tensor:
            seen.extend(batch[2].tolist())
            return squared_error(model, batch)

        trainer(driver=ddp()).evaluate(loader(18, 4), compute=noted)
        return seen

    assert sorted(chain(*on_ranks(work, 4))) == [*range(18)]


class Keeps(InOrder):
    """Counts the ranks that hold predictions, and keeps none of them after ``compute``."""

    def compute(self) -> float:
        return float(len(self.seen))


def test_no_rank_but_the_main_process_holds_the_predictions_of_others(tmp_path: Path) -> None:
    def work() -> tuple[Any, ...]:
        metric, one = Keeps(), trainer(callbacks=[SavePredictions(tmp_path / "all.csv", evaluation="predict")], driver=ddp())
        updates: list[int] = []
        metric.update = lambda predictions, targets: updates.append(len(predictions))  # type: ignore[method-assign]
        one.evaluate(loader(24, 4), compute=with_errors, metrics={"own": metric})
        predicted = one.predict(loader(24, 4, shuffle=False), compute=lambda model, batch: batch[2])
        gc.collect()
        return updates, None if predicted is None else predicted.tolist()

    main, *others = on_ranks(work, 3)
    assert main == ([4] * 6, [*range(24)])
    assert others == [([], None)] * 2
    assert len((tmp_path / "all.csv").read_text().splitlines()) == 25


@pytest.mark.parametrize("where", ["update", "compute"])
def test_an_error_in_a_metric_of_the_main_process_is_raised_on_all_ranks(where: str) -> None:
    def work() -> str:
        metric = InOrder()

        def fail(*_: Any) -> float:
            raise ValueError("no such class")

        setattr(metric, where, fail)
        with pytest.raises((ValueError, DistributedError)) as caught:
            trainer(driver=ddp()).evaluate(loader(24, 4), compute=with_errors, metrics={"own": metric})
        return str(caught.value)

    main, other = on_ranks(work, 2)
    assert main == "no such class"
    assert other == "a metric of 'eval' failed on the main process: ValueError: no such class"


def test_a_metric_that_communicates_and_does_not_say_so_is_an_error_with_what_to_do() -> None:
    def work() -> str:
        metric = InOrder()

        def gathers() -> float:
            dist.all_reduce(total := torch.ones(1))
            return float(total)

        metric.compute = gathers  # type: ignore[method-assign]
        with pytest.raises(DistributedError) as caught:
            trainer(driver=ddp()).evaluate(loader(24, 4), compute=with_errors, metrics={"own": metric})
        return str(caught.value)

    for message in on_ranks(work, 2):
        assert "calls the collective allreduce" in message
        assert message.endswith("give it reduces_itself = True: it then gets the inputs of its rank alone.")
