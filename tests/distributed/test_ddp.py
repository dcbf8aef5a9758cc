"""Several processes do what one does: the same data, the same gradients, the same results."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from torch.utils.data import DistributedSampler

from cadenza import Callback, Run, on
from cadenza.callbacks import LearningRate, LogTraining
from cadenza.drivers import DdpDriver
from cadenza.engine.session import session_of
from cadenza.testing import launch
from tests.distributed.parts import Batch, judged, loader, network, samples, squared_error, trainer, weights_of


def test_two_ranks_train_as_one_process_that_accumulates_two_batches() -> None:
    def two() -> tuple[Tensor, list[tuple[int, float]]]:
        one = trainer(callbacks=[LogTraining("1 step", throughput=False)])
        logged = one.fit().history["train/loss"]
        return weights_of(one), logged

    alone = trainer(accumulate=2, callbacks=[LogTraining("1 step", throughput=False)])
    history = alone.fit().history["train/loss"]
    ranks = launch(two)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert torch.allclose(ranks[0][0], weights_of(alone), atol=1e-6)
    for _, logged in ranks:  # the loss is that of all ranks
        assert dict(logged) == pytest.approx(dict(history), rel=1e-6)


def test_every_sample_is_seen_once_an_epoch_though_they_do_not_come_out_even() -> None:
    def seen() -> tuple[list[int], list[int]]:
        numbers: list[int] = []
        totals: list[int] = []

        @on(Callback.on_batch_start)
        def see(run: Run, batch: Batch) -> None:
            numbers.extend(batch[2].tolist())

        @on(Callback.on_epoch_end)
        def total(run: Run) -> None:
            totals.append(run.progress.samples)

        run = trainer(loader(37), max_epochs=2, callbacks=[see, total]).fit()
        assert run.progress.batch == run.progress.epoch * (run.progress.batches_per_epoch or 0)
        return numbers, totals

    ranks = launch(seen, 4)
    assert Counter(number for numbers, _ in ranks for number in numbers) == dict.fromkeys(range(37), 2)
    assert all(totals == [37, 74] for _, totals in ranks)


class Share:
    """A metric as one writes it by hand: how many of all predictions are above the median."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.predictions: list[Tensor] = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.predictions.append(predictions)

    def compute(self) -> float:
        joined = torch.cat(self.predictions)
        return float(joined.median() + joined[0].sum())  # also of their order


def test_an_evaluation_counts_each_sample_once_and_equals_that_of_one_process() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def results() -> tuple[dict[str, float], Tensor]:
        one = trainer(model=nn.Sequential(nn.BatchNorm1d(3), network()))
        metrics = {"own": Share(), "mse": torchmetrics.MeanSquaredError()}
        data = loader(37, shuffle=False)
        evaluated = one.evaluate(data, metrics=metrics, compute=judged)
        return evaluated, one.predict(data, compute=lambda model, batch: model(batch[0]))

    expected, predictions = results()
    for got, predicted in launch(results):
        assert got == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(predicted, predictions, atol=1e-6)


def weighted(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {"loss": squared_error(model, batch), "weight": len(batch[0])}


def test_weighted_groups_have_the_gradients_of_one_process_on_all_their_samples() -> None:
    def two() -> Tensor:
        rows, sizes = samples(10).tensors, [4, 2, 1, 3]  # rank 0 gets 4 and 1, rank 1 gets 2 and 3
        batches = list(zip(*(tensor.split(sizes) for tensor in rows), strict=True))
        one = trainer(batches, accumulate=2, max_epochs=1, compute_loss=weighted)
        one.fit()
        return weights_of(one)

    whole = trainer([samples(10).tensors], max_epochs=1)
    whole.fit()
    for weights in launch(two):
        assert torch.allclose(weights, weights_of(whole), atol=1e-6)


def test_gradients_are_reduced_once_a_step_also_where_a_group_is_short_or_its_last_batch_is_skipped() -> None:
    class Stream:
        """Batches of which nobody knows how many there are."""

        def __iter__(self) -> Any:
            return iter(loader(24, shuffle=False))

    def two() -> tuple[Tensor, list[int], int]:
        reduced: list[int] = []
        synced: list[bool] = []

        class Counting(DdpDriver):
            def reduce_gradients(self, parameters: Any) -> None:
                reduced.append(1)
                super().reduce_gradients(parameters)

        @on(Callback.on_batch_start)
        def skip(run: Run, batch: Batch) -> None:
            if run.progress.batch == 1 and run.driver.rank == 1:
                run.skip_batch("on one rank alone")

        @on(Callback.on_before_backward)
        def note(run: Run, outputs: Any) -> None:
            wrapper = session_of(run).model
            assert isinstance(wrapper, DistributedDataParallel)
            synced.append(wrapper.require_backward_grad_sync)

        one = trainer(Stream(), accumulate=2, max_epochs=1, driver=Counting("cpu"), callbacks=[skip, note])
        one.fit()
        assert synced == [False, False]  # the second batch is skipped on both; the third is a group by itself
        return weights_of(one), reduced, len(synced)

    first, second = launch(two)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == [1, 1]


def test_a_process_group_that_exists_is_used_and_left_alone() -> None:
    def one() -> tuple[bool, bool, int]:
        dist.init_process_group("gloo", init_method="env://")
        run = trainer().fit()
        return dist.is_initialized(), isinstance(session_of(run).model, DistributedDataParallel), run.driver.world_size

    assert launch(one) == [(True, True, 2)] * 2


def test_a_world_of_one_process_works_and_auto_takes_ddp_under_a_launcher() -> None:
    def one() -> tuple[str, Tensor]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        alone = trainer(driver="auto")
        return repr(alone.fit().driver), weights_of(alone)

    single = trainer()
    single.fit()
    ((driver, weights),) = launch(one, 1)
    assert driver == "DdpDriver('cpu', rank 0 of 1)"
    assert torch.equal(weights, weights_of(single))


def test_a_schedule_is_given_the_total_of_each_ranks_steps() -> None:
    def totals() -> tuple[set[int], int]:
        given: set[int] = set()

        def constant(optimizer: Optimizer, total: int) -> LRScheduler:
            given.add(total)
            return ConstantLR(optimizer)

        run = trainer(callbacks=[LearningRate(constant)]).fit()
        return given, run.progress.step

    assert launch(totals) == [({6}, 6)] * 2


def test_of_a_loader_that_does_not_know_its_length_the_last_batches_that_are_no_full_turn_are_left_out() -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(loader(28, shuffle=False))

    def steps() -> tuple[int, int]:
        progress = trainer(Stream()).fit().progress
        return progress.step, progress.samples

    assert launch(steps) == [(6, 48)] * 2  # 3 turns of 7 batches, in two epochs


def test_a_loader_with_a_distributed_sampler_is_read_as_it_is() -> None:
    def seen() -> list[list[int]]:
        numbers: list[list[int]] = []

        @on(Callback.on_epoch_start)
        def begin(run: Run) -> None:
            numbers.append([])

        @on(Callback.on_batch_start)
        def see(run: Run, batch: Batch) -> None:
            numbers[-1] += batch[2].tolist()

        sampler: DistributedSampler[Any] = DistributedSampler(samples(24), 2, int(os.environ["RANK"]))
        run = trainer(loader(24, shuffle=False, sampler=sampler), callbacks=[see, begin]).fit()
        assert run.progress.batches_per_epoch == 3
        return numbers

    first, second = launch(seen)
    for epoch in range(2):
        assert sorted(first[epoch] + second[epoch]) == list(range(24))
    assert first[0] != first[1]  # set_epoch was called
