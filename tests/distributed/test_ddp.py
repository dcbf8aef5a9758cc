"""Several processes do what one does: the same data, the same gradients, the same results."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from torch.utils.data import DataLoader, DistributedSampler

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, LearningRate, LogTraining, StopOnNonFinite
from cadenza.drivers import DdpDriver, Driver, FsdpDriver
from cadenza.engine.session import session_of
from cadenza.errors import NonFiniteError
from cadenza.hooks.listener import Listener
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.distributed.drivers import blocks, ddp, fsdp, sharded, single
from tests.distributed.parts import (
    Batch,
    Partly,
    Stream,
    driver,
    loader,
    momentum,
    own_rank,
    rank,
    samples,
    seeing,
    squared_error,
    trainer,
    vector,
    weighted,
    weights_of,
)
from tests.distributed.standing import on_ranks


def in_memory(count: int = 24) -> TensorBatches[tuple[Tensor, ...]]:
    return TensorBatches(*samples(count).tensors, batch_size=4, shuffle=True)


@pytest.mark.parametrize("make", [loader, in_memory])
def test_two_ranks_train_and_evaluate_as_one_process_that_accumulates_two_batches(make: Callable[[int], Any]) -> None:
    def trained(accumulate: int = 1) -> tuple[Tensor, dict[int, float], dict[str, float]]:
        one = trainer(make(24), accumulate=accumulate, callbacks=[LogTraining("1 step", throughput=False)])
        logged = one.fit().history["train/loss"]
        results = one.evaluate(make(22), compute=lambda model, batch: {"loss": squared_error(model, batch)})
        return weights_of(one), dict(logged), results

    expected, losses, results = trained(accumulate=2)
    first, second = on_ranks(trained)
    assert torch.equal(first[0], second[0])
    assert torch.allclose(first[0], expected, atol=1e-6)
    for _, logged, judged in (first, second):  # the loss is that of all ranks
        assert logged == pytest.approx(losses, rel=1e-6)
        assert judged == pytest.approx(results, rel=1e-5)


def test_every_sample_is_seen_once_an_epoch_though_they_do_not_come_out_even() -> None:
    def seen() -> tuple[list[int], list[int]]:
        numbers: list[int] = []
        totals: list[int] = []
        total = on(Callback.on_epoch_end)(lambda run: totals.append(run.progress.samples))
        run = trainer(loader(37), max_epochs=2, callbacks=[seeing(numbers), total]).fit()
        assert run.progress.batch == run.progress.epoch * (run.progress.batches_per_epoch or 0)
        return numbers, totals

    ranks = on_ranks(seen, 4)
    assert Counter(number for numbers, _ in ranks for number in numbers) == dict.fromkeys(range(37), 2)
    assert all(totals == [37, 74] for _, totals in ranks)


def test_every_sample_in_memory_is_seen_once_an_epoch_and_a_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    def seen(directory: Path, steps: int | None) -> tuple[list[int], Tensor]:
        numbers: list[int] = []
        callbacks = [seeing(numbers), Checkpoint("5 steps")]
        one = trainer(in_memory(37), max_steps=steps, directory=directory, callbacks=callbacks)
        one.fit(resume="auto")
        return numbers, weights_of(one)

    def three() -> tuple[list[int], list[int], bool]:
        whole, expected = seen(tmp_path / "whole", None)
        first, _ = seen(tmp_path / "cut", 5)
        rest, weights = seen(tmp_path / "cut", None)
        return whole, first + rest, torch.equal(weights, expected)

    ranks = on_ranks(three)
    assert Counter(number for whole, _, _ in ranks for number in whole) == dict.fromkeys(range(37), 2)
    assert all(whole == cut and same for whole, cut, same in ranks)


@pytest.mark.parametrize("make", [ddp, sharded])
def test_weighted_groups_have_the_gradients_of_one_process_on_all_their_samples(make: Callable[[], Driver]) -> None:
    def trained(driver: Driver, sizes: list[int], **arguments: Any) -> Tensor:
        batches = list(zip(*(tensor.split(sizes) for tensor in samples(10).tensors), strict=True))
        one = trainer(batches, model=blocks(), driver=driver, max_epochs=1, **arguments)
        one.fit()
        return weights_of(one)

    whole = trained(single(), [10])
    sizes = [4, 2, 1, 3]  # rank 0 gets 4 and 1, rank 1 gets 2 and 3
    for weights in on_ranks(lambda: trained(make(), sizes, accumulate=2, compute_loss=weighted)):
        assert torch.allclose(weights, whole, atol=1e-6)


def test_gradients_are_reduced_once_a_step_also_where_a_group_is_short_or_its_last_batch_is_skipped() -> None:
    def two() -> tuple[Tensor, list[int]]:
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

        one = trainer(Stream(24), accumulate=2, max_epochs=1, driver=Counting("cpu"), callbacks=[skip, note])
        one.fit()
        assert synced == [False, False]  # the second batch is skipped on both; the third is a group by itself
        return weights_of(one), reduced

    first, second = on_ranks(two)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == [1, 1]


class AveragesWeights(DdpDriver):
    """Averages weights after every third step, and no gradients: local SGD."""

    def __init__(self) -> None:
        super().__init__("cpu", timeout_s=100)
        self.reduces = False
        self.steps: list[int] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def reduce_gradients(self, parameters: Any) -> None:
        return

    def after_update(self, model: nn.Module, step: int) -> None:
        self.steps.append(step)
        if step % 3 == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(self.reduce(parameter))


def test_a_driver_may_average_weights_after_an_update_and_on_after_optimizer_step_sees_the_mean() -> None:
    def averaged() -> tuple[list[int], list[Tensor]]:
        own, after = AveragesWeights(), list[Tensor]()
        note = on(Callback.on_after_optimizer_step)(lambda run: after.append(vector(run.model.parameters()).clone()))
        trainer(driver=own, callbacks=[note]).fit()
        return own.steps, after

    (steps, first), (same_steps, second) = on_ranks(averaged)
    assert steps == same_steps == [1, 2, 3, 4, 5, 6]
    alike = [torch.equal(own, other) for own, other in zip(first, second, strict=True)]
    assert alike == [False, False, True, False, False, True]


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

    alone = trainer()
    alone.fit()
    ((name, weights),) = launch(one, 1)
    assert name == "DdpDriver('cpu', rank 0 of 1)"
    assert torch.equal(weights, weights_of(alone))


def test_a_schedule_is_given_the_total_of_each_ranks_steps() -> None:
    def totals() -> tuple[set[int], int]:
        given: set[int] = set()

        def constant(optimizer: Optimizer, total: int) -> LRScheduler:
            given.add(total)
            return ConstantLR(optimizer)

        run = trainer(callbacks=[LearningRate(constant)]).fit()
        return given, run.progress.step

    assert on_ranks(totals) == [({6}, 6)] * 2


def test_of_a_loader_that_does_not_know_its_length_the_last_batches_that_are_no_full_turn_are_left_out() -> None:
    def steps() -> tuple[int, int]:
        progress = trainer(Stream(28)).fit().progress
        return progress.step, progress.samples

    assert on_ranks(steps) == [(6, 48)] * 2  # 3 turns of 7 batches, in two epochs


def test_a_loader_with_a_distributed_sampler_is_read_as_it_is() -> None:
    def seen() -> list[int]:
        numbers: list[int] = []
        sampler: DistributedSampler[Any] = DistributedSampler(samples(24), 2, own_rank())
        run = trainer(loader(24, shuffle=False, sampler=sampler), callbacks=[seeing(numbers)]).fit()
        assert run.progress.batches_per_epoch == 3
        return numbers

    first, second = on_ranks(seen)
    for epoch in (slice(0, 12), slice(12, 24)):
        assert sorted(first[epoch] + second[epoch]) == list(range(24))
    assert first[:12] != first[12:]  # set_epoch was called


def test_a_list_of_samples_is_counted_as_on_one_process() -> None:
    """Each rank counts its own, and what the outputs say is added when the ranks exchange numbers."""

    def counted(samples_of: Callable[[Any], int] | None = None) -> int:
        def compute(model: nn.Module, parts: Any) -> dict[str, Any]:
            loss = model(torch.stack([inputs for inputs, *_ in parts])).square().mean()
            return {"loss": loss} if samples_of is None else {"loss": loss, "samples": samples_of(parts)}

        data: Any = DataLoader(samples(37), batch_size=4, collate_fn=list)
        return trainer(data, compute_loss=compute).fit().progress.samples

    assert on_ranks(lambda: (counted(), counted(lambda parts: 2 * len(parts)))) == [(74, 148)] * 2


def test_a_parameter_of_the_loss_trains_under_ddp_and_fsdp_as_on_one_process_that_accumulates() -> None:
    def shifted(driver: Driver, first: float, accumulate: int = 1) -> float:
        """Train a model and a shift that is known to the loss alone; return the shift."""
        shift = nn.Parameter(torch.tensor(first))

        def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]) + shift, batch[1])

        trainer(
            driver=driver,
            accumulate=accumulate,
            compute_loss=compute_loss,
            optimizer=lambda parameters: [momentum(parameters), torch.optim.SGD([shift], 0.1, momentum=0.9)],
        ).fit()
        return shift.item()

    def both() -> list[float]:
        first = 0.5 + own_rank()  # the main process's counts
        return [shifted(made, first) for made in (ddp(), fsdp())]

    alone = shifted(single(), 0.5, accumulate=2)
    one, other = on_ranks(both)
    assert one == other
    torch.testing.assert_close(torch.tensor(one), torch.tensor([alone, alone]), atol=1e-6, rtol=1e-5)


# -- a step_fn that calls the user's own module and updates some optimizers

RARE = 4  # samples in a batch: of every two batches the second uses `rare`


class Judge(nn.Module):
    """Judges samples. In one process, half of each batch uses `rare`; of two ranks, only the second one uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rare = nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("last", torch.tensor(-1))

    def forward(self, points: Tensor, numbers: Tensor) -> Tensor:
        self.last = numbers.max()
        judged: Tensor = self.layer(points)
        if (rare := numbers // RARE % 2 == 1).any():
            judged = judged + self.rare(points).tanh() * rare.unsqueeze(1)
        return judged


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(3, 3), Judge()


def both(model: nn.Module) -> list[Optimizer]:
    assert isinstance(model, Gan)
    return [SGD(model.judge.parameters(), lr=0.05, momentum=0.9), SGD(model.maker.parameters(), lr=0.05)]


def play(run: Run, batch: Batch) -> Tensor:
    """Update the judge in each step and the maker in every second one. The maker's loss leaves gradients in the judge."""
    points, _, numbers = batch
    model: Any = run.model
    made = model.maker(points)
    loss: Tensor = (model.judge(points, numbers) - 1).pow(2).mean() + model.judge(made.detach(), numbers).pow(2).mean()
    run.backward(loss)
    run.update(run.optimizers[0])
    run.backward((model.judge(made, numbers) - 1).pow(2).mean())
    if run.progress.step % 2:
        run.update(run.optimizers[1])
    return loss.detach()


def trained(make: Callable[[], Any], batch_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the weights, the gradients that the last step left, and the buffer of the judge as each step found it."""
    found: list[int] = []

    def step(run: Run, batch: Batch) -> Tensor:
        found.append(int(run.model.judge.last))  # type: ignore[arg-type,union-attr]
        return play(run, batch)

    model = Gan()
    data = loader(24, batch_size, shuffle=False)
    optimizer = (lambda parameters: both(model)) if rank() is not None else both(model)
    one = trainer(data, model=model, optimizer=optimizer, driver=make(), compute_loss=None, step_fn=step, max_epochs=1)
    one.fit()
    parameters = list(model.parameters())
    return vector(parameters), vector(one.grad for one in parameters if one.grad is not None), found


def in_parts(*shard: str) -> FsdpDriver:
    return fsdp(shard=shard or ("maker", "judge"))


@pytest.mark.parametrize("make", [driver, in_parts], ids=["ddp", "fsdp"])
def test_two_optimizers_update_as_in_one_process_on_the_whole_batch(make: Callable[[], Any]) -> None:
    weights, gradients, _ = trained(driver, 2 * RARE)
    first, second = on_ranks(lambda: trained(make, RARE))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.allclose(first[0], weights, atol=1e-6)
    assert torch.allclose(first[1], gradients, atol=1e-6)
    if make is driver:
        assert first[2] == second[2]  # buffers are those of the main process


@pytest.mark.parametrize("make", [driver, in_parts], ids=["ddp", "fsdp"])
def test_a_backward_pass_into_one_optimizer_leaves_no_gradients_in_others_on_any_rank(make: Callable[[], Any]) -> None:
    def step(run: Run, batch: Batch) -> Tensor:
        (judges, makers), model = run.optimizers, run.model
        assert isinstance(model, Gan)
        judged = model.judge(batch[0], batch[2]).pow(2).mean() + model.judge(model.maker(batch[0]), batch[2]).mean()
        run.backward(judged, into=judges)
        run.update(judges)
        run.backward(-model.judge(model.maker(batch[0]), batch[2]).mean(), into=[makers])
        assert all(one.grad is None for one in model.judge.parameters())
        run.update(makers)
        return torch.zeros(())

    def trained(batch_size: int) -> Tensor:
        model, data = Gan(), loader(24, batch_size, shuffle=False)
        optimizer = (lambda parameters: both(model)) if rank() is not None else both(model)
        one = trainer(
            data,
            model=model,
            optimizer=optimizer,
            driver=make() if rank() is not None else None,
            step_fn=step,
            compute_loss=None,
            max_epochs=1,
        )
        one.fit()
        return weights_of(one)

    whole = trained(2 * RARE)
    assert all(torch.allclose(own, whole, atol=1e-6) for own in on_ranks(lambda: trained(RARE)))


def test_a_closure_trains_the_same_weights_on_all_ranks_by_the_mean_of_losses_and_gradients() -> None:
    def trained(batch_size: int) -> tuple[Tensor, list[float]]:
        losses: list[float] = []

        def step(run: Run, batch: Batch) -> Tensor:
            def closure() -> Tensor:
                run.optimizers[0].zero_grad()
                loss = squared_error(run.model, batch)
                loss.backward()
                return loss

            losses.append(float(loss := run.update(run.optimizers[0], closure)))
            return loss  # type: ignore[no-any-return]

        one = trainer(
            loader(24, batch_size, shuffle=False),
            optimizer=lambda parameters: LBFGS(parameters, max_iter=3),
            compute_loss=None,
            step_fn=step,
            max_epochs=1,
        )
        one.fit()
        return weights_of(one), losses

    weights, losses = trained(8)
    (first, first_losses), (second, second_losses) = on_ranks(lambda: trained(4))
    assert torch.equal(first, second)
    assert first_losses == second_losses == pytest.approx(losses, rel=1e-3)
    assert torch.allclose(first, weights, atol=1e-3)


def test_with_fsdp_a_part_of_the_model_that_is_called_alone_must_be_sharded_by_name() -> None:
    def failing() -> list[str]:
        with pytest.raises(RuntimeError) as caught:
            trained(lambda: in_parts("judge"), RARE)
        return caught.value.__notes__

    for notes in launch(failing):
        assert "likely cure: with FSDP" in notes[0]
        assert "in shard=" in notes[0]


def test_gradients_of_one_dtype_are_averaged_in_one_exchange() -> None:
    def averaged() -> tuple[list[int], list[list[float] | None]]:
        sizes: list[int] = []
        reduce = dist.all_reduce

        def count(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            sizes.append(tensor.numel())
            return reduce(tensor, *arguments, **options)

        own = rank() or 0
        parameters = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64) for _ in range(4)]
        for parameter in parameters[1::4] + parameters[2::4] * own:  # the third of each dtype only on rank 1
            parameter.grad = torch.full_like(parameter, 2.0 * own)
        parameters[1].requires_grad_(False)  # its optimizer updates it all the same
        parameters[3].grad = torch.eye(2)[own].to_sparse() if own else None
        made = driver()
        with patch.object(dist, "all_reduce", count):
            made.average_gradients(parameters)
        return sizes, [None if one.grad is None else one.grad.to_dense().tolist() for one in parameters]

    first, second = on_ranks(averaged)
    assert first == second
    assert first[0][:1] + first[0][2:] == [8, 4, 4]  # which have a gradient, then one exchange per dtype
    assert first[1] == [None, [1.0, 1.0], [1.0, 1.0], [0.0, 0.5], None, [1.0, 1.0], [1.0, 1.0], None]


# -- a batch that one rank drops alone: the step is the mean over the others


def spoiled(model: nn.Module, batch: Batch, *, samples: set[int], weighted: bool = False) -> Any:
    """Return a loss that is NaN in all its parts if the batch has one of these samples."""
    bad = bool(samples & set(batch[2].tolist()))
    loss = squared_error(model, (batch[0] * (math.nan if bad else 1.0), batch[1]))
    return {"loss": loss, "weight": 1.0 + float(batch[2][0] % 3)} if weighted else loss


def train_spoiled(samples: set[int], *, accumulate: int = 1, weighted: bool = False) -> tuple[Tensor, int, dict[int, float]]:
    """Train on two ranks, or in one process with twice the accumulation. A rank takes every second batch of 4 samples."""
    one = trainer(
        loader(40, shuffle=False),
        compute_loss=partial(spoiled, samples=samples, weighted=weighted),
        accumulate=accumulate if rank() is not None else 2 * accumulate,
        callbacks=[StopOnNonFinite("skip"), LogTraining(1, throughput=False)],
    )
    run = one.fit()
    return weights_of(one), run.progress.step, dict(run.history["train/loss"])


ONE, SOME = {13}, {1, 13, 22, 30}  # sample 13 is in the fourth batch


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("samples", "accumulate"), [(ONE, 1), (ONE, 2), (SOME, 1), (SOME, 3), pytest.param({9, 13}, 1, id="all of a step")]
)
def test_a_dropped_batch_leaves_the_mean_over_the_others(samples: set[int], accumulate: int, weighted: bool) -> None:
    train = partial(train_spoiled, samples, accumulate=accumulate, weighted=weighted)
    expected, steps, losses = train()
    for weights, own_steps, own_losses in on_ranks(train):
        assert weights.isfinite().all()
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert own_steps == steps
        assert own_losses == pytest.approx(losses, rel=1e-5)


class Rows(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.last = nn.Embedding(40, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.last(self.rows(numbers))  # type: ignore[no-any-return]


def of_rows(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[2]) * (math.nan if 13 in batch[2] else 1.0), batch[1])


@pytest.mark.parametrize(("model", "compute"), [(Partly, partial(spoiled, samples=ONE)), (Rows, of_rows)])
def test_a_batch_is_dropped_with_parameters_that_are_not_used_and_with_sparse_gradients(
    model: type[nn.Module], compute: Callable[..., Any]
) -> None:
    def training() -> Tensor:
        torch.manual_seed(0)
        one = trainer(
            loader(40, shuffle=False),
            model=model(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
            compute_loss=compute,
            accumulate=2 if rank() is None else 1,
            callbacks=[StopOnNonFinite("skip")],
            driver=None if rank() is None else ddp(find_unused_parameters=model is Partly),
        )
        one.fit()
        return weights_of(one)

    expected = training()
    for weights in on_ranks(training):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_a_loop_of_ones_own_drops_the_batch_of_one_rank() -> None:
    def training() -> tuple[Tensor, list[str]]:
        one = trainer(
            loader(40, shuffle=False),
            compute_loss=None,
            accumulate=2 if rank() is None else 1,
            callbacks=[StopOnNonFinite("skip")],
        )
        for step in one.steps():
            for batch in step:
                step.backward(step.forward(partial(spoiled, samples=ONE), batch))
        return weights_of(one), [decision.what for decision in one.run.decisions]

    expected, decisions = training()
    for weights, own in on_ranks(training):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert own == decisions == ["batch skipped"] * 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_ranks_stop_at_the_step_of_the_loss_that_is_not_finite_or_raise_before_its_update(accumulate: int) -> None:
    compute = partial(spoiled, samples=ONE)

    def training(action: Literal["stop", "raise"]) -> Trainer:
        data, callbacks = loader(40, shuffle=False), [StopOnNonFinite(action)]
        return trainer(data, compute_loss=compute, accumulate=accumulate, callbacks=callbacks)

    def stopping() -> tuple[int, str, str, Tensor]:
        run, raising = training("stop").fit(), training("raise")
        with pytest.raises(NonFiniteError) as raised:
            raising.fit()
        return run.progress.step, run.why("batch skipped"), str(raised.value), weights_of(raising)

    (first, why, main, weights), (second, other_why, other, others) = on_ranks(stopping)
    assert first == second == 2 // accumulate
    assert "the loss of another rank is not finite" in why
    assert "the loss is nan" in other_why
    assert main.startswith("the loss of another rank is not finite in batch 2")
    assert other.startswith("the loss is nan in batch 2")
    assert torch.equal(weights, others)
    assert weights.isfinite().all()


def test_a_silent_listener_may_not_skip_a_batch_on_several_ranks() -> None:
    class Quiet(Callback):
        def listeners(self) -> list[Listener]:
            return [Listener(Callback.on_batch_start, self.skip, silent=True)]

        def skip(self, run: Run, batch: Any) -> None:
            run.skip_batch("unexpected")

    def training() -> str:
        with pytest.raises(RuntimeError, match="Remove silent=True") as raised:
            trainer(callbacks=[Quiet()]).fit()
        return str(raised.value)

    first, _ = on_ranks(training)
    assert first.startswith("a listener of Quiet is silent, so other ranks expect no skip")
