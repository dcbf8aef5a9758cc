"""What waits for other ranks in a step besides requests and records: schedules, weights, skips, loops of one's own, streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, ClipGradients, Recover, StopOnNonFinite
from cadenza.compat import fastnlp
from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.engine.session import session_of
from cadenza.errors import LossError
from cadenza.hooks.schedule import Every, Schedule, When
from cadenza.testing import launch
from tests.distributed.parts import (
    Batch,
    Stream,
    ddp,
    fsdp,
    loader,
    own_rank,
    rank,
    samples,
    squared_error,
    trainer,
    weights_of,
)
from tests.distributed.standing import on_ranks
from tests.scale.test_steps import plain_steps


def never(run: Run) -> bool:
    return False


class Skips(Callback):
    """A callback that may skip batches, and does not."""

    def on_batch_start(self, run: Run, batch: Any) -> None: ...
    def on_before_backward(self, run: Run, outputs: Any) -> None: ...


class Logs(Skips):
    skips = False


class OfFastnlp(fastnlp.Callback):
    def on_train_batch_end(self, trainer: Any) -> None: ...


class OfAccelerated(TrainerCallback):
    def on_train_step_end(self, trainer: Any, *_: Any, **__: Any) -> None: ...


def scheduled(function: Callable[[Run], bool] | Schedule) -> Callback:
    return on(Callback.on_step_end, every=function)(lambda run: None)


def weighted(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return a loss with a weight; that of every fifth batch is 0, and its loss NaN, as for padding."""
    weight = float(batch[2][0] // 4 % 5)
    return {"loss": squared_error(model, batch) * (1.0 if weight else math.nan), "weight": weight}


def own_step(run: Run, batch: Batch) -> Tensor:
    loss = squared_error(run.model, batch)
    run.backward(loss)
    run.update()
    return loss.detach()


def own_loop(one: Trainer, compute_loss: Callable[..., Any] = squared_error) -> None:
    for step in one.steps():
        for batch in step:
            step.backward(step.forward(compute_loss, batch))


def log_two(run: Run) -> None:
    run.log({"a": 1.0, "b": torch.tensor(2.0)})


def sharded() -> dict[str, Any]:
    return {"driver": fsdp()}


def own_weights() -> dict[str, Any]:
    data = loader(4 * 2 * 12, shuffle=False)  # no step in which both ranks have a batch of weight 0
    return {"compute_loss": None, "train": partial(own_loop, compute_loss=weighted), "data": data}


Case = tuple[int, Callable[[], list[Callback]], Callable[[], dict[str, Any]]]
OWN_STEP: dict[str, Any] = {"compute_loss": None, "step_fn": own_step}
OWN_LOOP: dict[str, Any] = {"compute_loss": None, "train": own_loop}
CASES: dict[str, Case] = {  # with one more for loops of one's own and a step_fn with DDP: their reduction of gradients
    "two schedules that are functions": (0, lambda: [scheduled(never), Checkpoint(never)], dict),
    "a function and a length": (0, lambda: [scheduled(When(never) & Every("100 steps"))], dict),
    "a function or a length": (1, lambda: [scheduled(When(never) | Every("100 steps"))], dict),
    "a callback that may skip": (2, lambda: [Skips()], dict),
    "a callback that skips nothing": (0, lambda: [Logs()], dict),
    "a batch hook of fastNLP": (1, lambda: [cast("Any", OfFastnlp())], dict),
    "a batch hook of pytorch-accelerated": (1, lambda: [cast("Any", OfAccelerated())], dict),
    "losses that may break": (0, lambda: [Recover(), Checkpoint("100 steps", background=False)], dict),
    "weights": (0, list, lambda: {"compute_loss": weighted}),
    "logged numbers": (1, lambda: [on(Callback.on_step_end)(log_two)], dict),
    "a norm that is logged in each step": (1, lambda: [ClipGradients(1.0, log="norm", log_every=1)], dict),
    "a norm that is seldom logged": (0, lambda: [ClipGradients(1.0, log="norm")], dict),
    "FSDP with weights": (0, list, lambda: {"compute_loss": weighted, **sharded()}),
    "FSDP and non-finite losses": (1, lambda: [StopOnNonFinite()], sharded),
    "FSDP and non-finite gradients": (2, lambda: [StopOnNonFinite(gradients=True)], sharded),
    "a step_fn": (1 + 2, list, lambda: OWN_STEP),
    "a step_fn and non-finite losses": (1 + 3, lambda: [StopOnNonFinite()], lambda: OWN_STEP),
    "a step_fn and FSDP": (0, list, lambda: {**OWN_STEP, **sharded()}),
    "a loop": (1 + 1, list, lambda: OWN_LOOP),
    "a loop with weights and non-finite losses": (1 + 1, lambda: [StopOnNonFinite()], own_weights),
}


def test_the_waits_of_plain_steps_are_those_of_the_guide(tmp_path: Path) -> None:
    def counted() -> dict[str, tuple[list[int], int]]:
        found = {}
        for name, (_, make, arguments) in CASES.items():
            waited, started = plain_steps(make, tmp_path / name, **arguments())
            found[name] = waited, max(started)
        return found

    for found in launch(counted):
        assert {name: waited for name, (waited, _) in found.items()} == {
            name: [waits] * 5 for name, (waits, *_) in CASES.items()
        }
        assert all(most - CASES[name][0] <= 4 for name, (_, most) in found.items())


# -- weights ----------------------------------------------------------------------------------------


def train_weighted(steps: int | None = None, **arguments: Any) -> tuple[Tensor, float | None]:
    """Return the weights of the model, and the unit of the weights of batches."""
    accumulate = 2 if rank() is not None else 4  # two ranks take as many samples in a step as one process
    callbacks = [Checkpoint()] if "directory" in arguments else []
    arguments = {"compute_loss": weighted, "accumulate": accumulate, **arguments}
    one = trainer(loader(4 * 30, shuffle=False), max_steps=steps, callbacks=callbacks, **arguments)
    run = one.fit(resume="auto" if callbacks else False)
    return weights_of(one), session_of(run).step.weight_unit


def test_weights_that_travel_with_the_batches_give_the_result_of_one_process_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    def both() -> Any:
        train_weighted(7, directory=tmp_path / "cut")
        return train_weighted(), train_weighted(directory=tmp_path / "cut")

    expected, alone = train_weighted()
    assert alone is None
    for (weights, unit), (again, kept) in on_ranks(both):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, again)
        assert unit == kept == 0.5  # the weights of the first batches are 0 and 1


def test_a_weight_on_some_ranks_only_is_an_error_on_all() -> None:
    def training() -> str:
        def sometimes(model: nn.Module, batch: Batch) -> dict[str, Any]:
            outputs = weighted(model, batch)
            return {"loss": squared_error(model, batch)} if own_rank() == 1 and batch[2][0] > 30 else outputs

        with pytest.raises(LossError, match="on some ranks only"):
            train_weighted(compute_loss=sometimes)
        return "raised"

    assert on_ranks(training) == ["raised"] * 2


# -- schedules that are functions -------------------------------------------------------------------


def due_at(function: Callable[[Run], bool] | Schedule, data: Any = None, **arguments: Any) -> list[int]:
    """Return the steps after which a listener with this schedule is called on this rank, in two epochs of 4 steps."""
    steps: list[int] = []
    note = on(Callback.on_step_end, every=function)(lambda run: steps.append(run.progress.step))
    trainer(loader(4 * 2 * 4) if data is None else data, callbacks=[note], **arguments).fit()
    return steps


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (lambda run: run.progress.step in (2, 3, 8), [2, 3, 8]),  # on all ranks: at once
        (lambda run: rank() == 1 and run.progress.step in (2, 6), [3, 7]),  # on one: a step later
        (lambda run: run.progress.step == 2 + own_rank(), [3, 4]),  # on one, then on the other
        (lambda run: rank() == 0 and run.progress.step in (4, 8), [4, 8]),  # at the end of an epoch all ranks wait
    ],
)
def test_a_schedule_that_is_a_function_is_due_at_the_same_steps_on_all_ranks(
    own: Callable[[Run], bool], expected: list[int]
) -> None:
    assert on_ranks(lambda: due_at(own)) == [expected] * 2


def test_a_function_that_is_part_of_a_schedule_is_due_at_once_if_it_is_on_one_rank() -> None:
    part = When(lambda run: rank() == 1 and run.progress.step == 2)
    assert on_ranks(lambda: due_at(part | Every("5 steps"))) == [[2, 5]] * 2


@pytest.mark.parametrize(("limits", "expected"), [({"max_epochs": 2}, [4, 8]), ({"max_steps": 8, "max_epochs": None}, [5, 8])])
def test_a_function_that_is_true_on_one_rank_in_the_last_step_of_a_stream_is_not_lost(
    limits: dict[str, Any], expected: list[int]
) -> None:
    def on_one(run: Run) -> bool:
        return rank() == 1 and run.progress.step in (4, 8)

    assert on_ranks(lambda: due_at(on_one, Stream(4 * 2 * 4), **limits)) == [expected] * 2


def test_a_checkpoint_holds_that_a_schedule_is_due_at_the_next_step(tmp_path: Path) -> None:
    def trained(resume: Any) -> tuple[Tensor, list[int]]:
        calls: list[int] = []

        @on(Callback.on_step_end, every=lambda run: rank() == 1 and run.progress.step % 3 == 2)
        def halve(run: Run) -> None:
            calls.append(run.progress.step)
            run.optimizers[0].param_groups[0]["lr"] *= 0.5

        folder = tmp_path / ("again" if resume else "whole")
        one = trainer(loader(96), max_steps=9, directory=folder, callbacks=[halve, Checkpoint("5 steps", keep_last=9)])
        one.fit(resume=resume)
        return weights_of(one), calls

    def both() -> Any:
        whole = trained(False)
        (saved,) = (tmp_path / "whole" / "checkpoints").glob("*5")
        return whole, trained(saved)

    for (weights, calls), (others, later) in on_ranks(both):
        assert (calls, later) == ([3, 6, 9], [6, 9])
        assert weights.equal(others)


# -- streams without a length -----------------------------------------------------------------------


class Shards(IterableDataset[Any]):
    """Four shards of different lengths: rank 0 of 2 has 14 batches of 4 samples, and rank 1 has 13."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def shards(self) -> list[range]:
        return [range(25), range(25, 50), range(50, 81), range(81, 108)]

    def read_shard(self, shard: range, start: int) -> Iterator[Any]:
        for number in shard[start:]:
            self.read.append(number)
            yield samples(108)[number]

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the shards are read")


class OwnPart(IterableDataset[Any]):
    """A stream that is sharded already, without positions: 12 batches of 4 on rank 0, and 14 on rank 1."""

    def __iter__(self) -> Iterator[Any]:
        return (samples(112)[number] for number in range(own_rank(), (96, 112)[own_rank()], 2))


def test_the_end_of_a_stream_is_known_a_batch_before_if_batches_can_be_read_ahead(tmp_path: Path) -> None:
    def counted() -> list[tuple[list[int], int]]:
        found = []
        for make, options in ((Shards, {}), (OwnPart, {"num_workers": 1}), (OwnPart, {})):
            driver = None if make is Shards else ddp(share_data=False)
            data = DataLoader(make(), 4, **options)
            waited, started = plain_steps(list, tmp_path / f"{make.__name__} {options}", data, driver=driver)
            found.append((waited, max(started)))
        return found

    assert launch(counted) == [[([waits] * 5, 2) for waits in (0, 0, 1)]] * 2


def test_a_stream_of_shards_ends_with_the_first_rank_and_continues_at_the_batch_after_the_last_one_used(tmp_path: Path) -> None:
    def trained(folder: str, steps: int | None) -> tuple[Tensor, int, list[int]]:
        data = Shards()
        callbacks = [Checkpoint()]
        one = trainer(DataLoader(data, 4), max_steps=steps, max_epochs=2, directory=tmp_path / folder, callbacks=callbacks)
        run = one.fit(resume="auto")
        return weights_of(one), run.progress.step, data.read

    def both() -> Any:
        whole = trained("whole", None)
        trained("cut", 5)
        return whole, trained("cut", None)

    for (weights, steps, read), (again, total, after) in on_ranks(both):
        assert steps == total == 26
        assert torch.equal(weights, again)
        assert after == read[4 * 5 :]
