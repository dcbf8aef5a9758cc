"""Warmup: small steps first, whatever schedule there is besides."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, StepLR

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, LearningRate, LogTraining, Warmup
from cadenza.checkpoint.store import Store
from cadenza.engine.session import session_of
from cadenza.errors import ScheduleError
from cadenza.testing import prove_resume, tiny_loader, tiny_model, tiny_run, tiny_trainer


def slope(model: nn.Module, batch: Any) -> Tensor:
    """A loss with a gradient of 1 for the bias, so that each update lowers the bias by the rate."""
    loss: Tensor = model(batch[0]).mean()
    return loss


class Steps(Callback):
    """Notes by how much the bias falls, which is the rate that an update really had."""

    def on_setup(self, run: Run) -> None:
        self.rates: list[float] = []
        self._last = run.model.get_parameter("bias").item()

    def on_step_end(self, run: Run) -> None:
        bias = run.model.get_parameter("bias").item()
        self.rates.append(self._last - bias)
        self._last = bias


def rates_in_updates(*callbacks: Callback, **arguments: Any) -> list[float]:
    steps = Steps()
    tiny_run(callbacks=[steps, *callbacks], compute_loss=slope, **arguments)
    return steps.rates


@pytest.mark.parametrize(
    ("warmup", "factors"),
    [
        (Warmup("4 steps"), [0.25, 0.5, 0.75, 1.0, 1.0]),
        (Warmup("4 steps", start=0.2), [0.4, 0.6, 0.8, 1.0, 1.0]),
        (Warmup("4 steps", shape="cosine"), [(1 - math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4)] + [1.0]),
        (Warmup("4 steps", shape="constant", start=0.1), [0.1, 0.1, 0.1, 0.1, 1.0]),
        (Warmup("1 step", shape="constant", start=0.1), [0.1, 1.0, 1.0, 1.0, 1.0]),
        (Warmup(0.5), [0.4, 0.8, 1.0, 1.0, 1.0]),  # two and a half of five steps
        (Warmup("0.8 epoch"), [0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
)
def test_the_updates_have_the_rate_of_the_formula(warmup: Warmup, factors: list[float]) -> None:
    assert rates_in_updates(warmup, steps=5) == pytest.approx([0.1 * factor for factor in factors], rel=1e-5)


def test_with_a_straight_fall_it_gives_the_numbers_of_fastnlp() -> None:
    """Ten batches, a warm-up of 0.2, "linear": spec/fastnlp.md 5.8."""
    fall = LearningRate(lambda o, total: LambdaLR(o, lambda k: min(1.0, (total - k - 1) / (total * 0.8))))
    rates = rates_in_updates(Warmup(0.2), fall, batches=10)
    assert rates == pytest.approx([0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125, 0.0], abs=1e-6)


def test_an_epoch_counts_steps_and_not_batches() -> None:
    warmup = Warmup("1 epoch")
    tiny_run(callbacks=[warmup], batches=5, accumulate=2)
    assert warmup.steps == 3


@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_never_sees_a_scaled_rate(first: bool) -> None:
    """Each of its own rates follows from the one before, so one scaled rate would spoil all that come."""
    seen: dict[bool, list[float]] = {}
    for warm in (True, False):
        schedule = LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.9))
        callbacks = [Warmup("4 steps"), schedule] if first else [schedule, Warmup("4 steps")]
        values = seen[warm] = []

        @on(Callback.on_step_end)
        def look(run: Run, values: list[float] = values) -> None:
            values.append(run.optimizers[0].param_groups[0]["lr"])

        tiny_run(callbacks=[*(callbacks if warm else [schedule]), look], steps=5)
    assert seen[True] == seen[False]


def test_each_group_is_scaled_and_is_afterwards_exactly_what_it_was() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "lr": rate} for one, rate in zip(parameters, (0.1, 0.3), strict=True)])

    during: list[list[float]] = []

    class Look(Callback):
        after = (Warmup,)

        def on_before_optimizer_step(self, run: Run) -> None:
            during.append([group["lr"] for group in run.optimizers[0].param_groups])

    run = tiny_run(optimizer=groups, callbacks=[Look(), Warmup("3 steps")], steps=2)
    assert during == [[0.1 * (1 / 3), 0.3 * (1 / 3)], [0.1 * (2 / 3), 0.3 * (2 / 3)]]
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1, 0.3]


def test_several_of_one_optimizer_multiply() -> None:
    rates = rates_in_updates(Warmup("4 steps"), Warmup("2 steps", shape="constant", start=0.5), steps=5)
    assert rates == pytest.approx([0.0125, 0.025, 0.075, 0.1, 0.1], rel=1e-5)


def test_each_optimizer_has_its_own() -> None:
    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters[:1], 0.1), torch.optim.SGD(parameters[1:], 0.1)]

    assert rates_in_updates(Warmup("2 steps", optimizer=0), optimizer=two, steps=2) == pytest.approx([0.1, 0.1], rel=1e-5)
    assert rates_in_updates(Warmup("2 steps", optimizer=1), optimizer=two, steps=2) == pytest.approx([0.05, 0.1], rel=1e-5)


def test_where_optimizers_take_turns_only_the_one_that_is_updated_is_scaled() -> None:
    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters[:1], 0.1), torch.optim.SGD(parameters[1:], 0.1)]

    during: list[list[float]] = []

    class Look(Callback):
        after = (Warmup,)

        def on_before_optimizer_step(self, run: Run) -> None:
            during.append([one.param_groups[0]["lr"] for one in run.optimizers])

    def turns(run: Run, batch: Any) -> Tensor:
        loss = slope(run.model, batch)
        run.backward(loss)
        for optimizer in run.optimizers:
            run.update(optimizer)
        return loss

    callbacks = [Warmup("2 steps", optimizer=0), Warmup("4 steps", optimizer=1), Look()]
    tiny_run(optimizer=two, step_fn=turns, callbacks=callbacks, steps=1)
    assert during == [[0.05, 0.1], [0.1, 0.025]]


def test_the_scaled_rates_are_logged() -> None:
    rates: list[list[float]] = []
    look = on(Callback.on_step_start)(lambda run: rates.append(session_of(run).rates.of(run)))
    log = LogTraining(every="1 step", throughput=False)
    run = tiny_run(callbacks=[Warmup("2 steps"), look, log], steps=3)
    assert rates == [[0.05], [0.1], [0.1]]
    assert run.history["train/lr"] == [(1, 0.1), (2, 0.1), (3, 0.1)]  # that of the next update


@pytest.mark.parametrize("groups", [1, 2])
def test_a_rate_that_is_a_tensor_is_scaled_in_place_and_once(groups: int) -> None:
    def capturable(parameters: Any) -> torch.optim.Optimizer:
        rate = torch.tensor(0.1)
        return torch.optim.SGD([{"params": [one], "lr": rate} for one in parameters] if groups == 2 else parameters, lr=rate)

    identities: set[int] = set()
    look = on(Callback.on_before_optimizer_step)(lambda run: identities.add(id(run.optimizers[0].param_groups[0]["lr"])))
    steps = Steps()
    run = tiny_run(callbacks=[Warmup("4 steps"), steps, look], compute_loss=slope, optimizer=capturable, steps=5)
    assert steps.rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1], rel=1e-5)
    assert torch.equal(run.optimizers[0].param_groups[0]["lr"], torch.tensor(0.1))
    assert identities == {id(run.optimizers[0].param_groups[0]["lr"])}


class Breaking(torch.optim.SGD):
    """Fails in its second update."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if self.count == 2:
            raise RuntimeError("the update failed on purpose")
        return super().step(closure)


@pytest.mark.parametrize("first", [True, False])
def test_after_an_update_that_fails_nothing_is_scaled_nor_saved_so(tmp_path: Path, first: bool) -> None:
    model = tiny_model()
    optimizer = Breaking(model.parameters(), 0.1)
    warmup, checkpoint = Warmup("4 steps"), Checkpoint(lambda run: False, on_exception=True)
    callbacks = [warmup, checkpoint] if first else [checkpoint, warmup]
    with pytest.raises(RuntimeError, match="on purpose"):
        tiny_run(model=model, optimizer=optimizer, callbacks=callbacks, steps=5, directory=tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.1
    store = Store(tmp_path / "checkpoints")
    saved = [store.read(one).state["optimizers"][0]["param_groups"][0]["lr"] for one in store.saved()]
    assert saved == [0.1]


def test_a_checkpoint_in_the_middle_holds_the_rates_of_the_schedule(tmp_path: Path) -> None:
    tiny_run(callbacks=[Warmup("4 steps"), Checkpoint(every="2 steps")], steps=3, directory=tmp_path)
    store = Store(tmp_path / "checkpoints")
    assert {store.read(one).state["optimizers"][0]["param_groups"][0]["lr"] for one in store.saved()} == {0.1}


@pytest.mark.parametrize("shape", ["linear", "constant", "cosine"])
@pytest.mark.parametrize("length", ["5 steps", "0.5 epoch", 0.7])
def test_a_run_that_continues_inside_of_it_has_the_same_bits(shape: Any, length: Any) -> None:
    def make(directory: Path) -> Any:
        schedule = LearningRate(lambda optimizer: StepLR(optimizer, 2, 0.5))
        callbacks = [Warmup(length, shape=shape, start=0.1), schedule, Warmup("3 steps")]
        return tiny_trainer(callbacks=callbacks, directory=directory, steps=7, batches=6, seed=1)

    prove_resume(make, at=[1, 3, 6], in_process=True)


def test_with_a_limit_that_is_raised_later_it_does_not_begin_again(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        return tiny_trainer(callbacks=[Warmup(0.5), Checkpoint()], directory=tmp_path, steps=steps)

    trainer(4).fit()
    rates: list[float] = []
    longer = trainer(40)
    longer.callbacks.append(on(Callback.on_step_start)(lambda run: rates.extend(session_of(run).rates.of(run))))
    longer.fit(resume="auto")
    assert set(rates) == {0.1}


def test_an_update_left_out_by_fp16_counts_as_a_step() -> None:
    def overflowing(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).float().mean() * next(factors)
        return loss

    factors = iter([1e-3, math.inf, 1e-3])  # the scale begins at 65536, and fp16 ends there
    updated: list[bool] = []
    look = on(Callback.on_after_optimizer_step)(lambda run: updated.append(session_of(run).step.updated))
    steps = Steps()
    run = tiny_run(
        callbacks=[Warmup("3 steps"), steps, look], compute_loss=overflowing, precision="fp16", batches=3, optimizer=sgd
    )
    assert updated == [True, False, True]
    assert steps.rates == pytest.approx([1e-4 / 3, 0.0, 1e-4], rel=1e-3)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def test_a_part_of_a_run_without_end_in_sight_is_an_error() -> None:
    endless = (batch for batch in tiny_loader())
    with pytest.raises(
        ValueError, match=r"Warmup\(0\.1\), a fraction of the run, needs a run of known length: its loader does not"
    ):
        tiny_run(callbacks=[Warmup(0.1)], loader=endless)
    with pytest.raises(ValueError, match=r"Warmup\('1 epoch'\) needs a loader with __len__; this loader has none"):
        tiny_run(callbacks=[Warmup("1 epoch")], loader=(batch for batch in tiny_loader()), steps=3)
    assert tiny_run(callbacks=[Warmup(0.5)], loader=(batch for batch in tiny_loader()), steps=4).progress.step == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((500,), r'length must be such as "500 steps" .*; got 500\. Did you mean "500 steps"\?'),
        ((0.0,), r"got 0\.0\."),
        ((1.5,), r"got 1\.5\."),
        (("10 min",), "got '10 min'"),
        (("5 steps", "square"), "shape must be 'linear', 'constant' or 'cosine'; got 'square'"),
        (("5 steps", "linear", 2.0), r"start must be a factor from 0 to 1; got 2\.0"),
        (("5 steps", "constant"), "a constant warm-up with start=0 has a rate of 0"),
    ],
)
def test_wrong_arguments_are_errors(arguments: tuple[Any, ...], message: str) -> None:
    length, *rest = arguments
    named = cast("dict[str, Any]", dict(zip(("shape", "start"), rest, strict=False)))
    with pytest.raises(ValueError, match=message):
        Warmup(length, **named)


def test_what_the_run_does_not_have_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="unknown unit 'stps'"):
        Warmup("5 stps")
    with pytest.raises(ValueError, match=r"Warmup: optimizer must be an index from 0 to 0; got 1"):
        tiny_run(callbacks=[Warmup("5 steps", optimizer=1)])


def test_a_second_run_warms_up_again() -> None:
    steps = Steps()
    schedule = LearningRate(lambda optimizer, total: CosineAnnealingLR(optimizer, total, eta_min=0.1))
    trainer = tiny_trainer(callbacks=[steps, Warmup("2 steps"), schedule], compute_loss=slope, steps=2)
    for _ in range(2):
        trainer.fit()
        assert steps.rates == pytest.approx([0.05, 0.1], rel=1e-5)
