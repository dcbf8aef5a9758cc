"""Warmup, ScheduleValue and SequenceLength: rates, any value and the length of batches, by the step of the run."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, StepLR
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, LogTraining, ScheduleValue, SequenceLength, Warmup
from cadenza.checkpoint.store import Store
from cadenza.engine.session import session_of
from cadenza.errors import DataError
from cadenza.records import read_decisions
from cadenza.testing import launch, prove_resume, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.parts import two_optimizers
from tests.long import LONG


def slope(model: nn.Module, batch: Any) -> Any:
    """A loss with a gradient of 1 for the bias, so that each update lowers the bias by the rate."""
    return model(batch[0]).mean()


class Steps(Callback):
    """Notes by how much the bias falls, which is the rate that an update really had."""

    def on_setup(self, run: Run) -> None:
        self.rates: list[float] = []
        self._last = run.model.get_parameter("bias").item()

    def on_step_end(self, run: Run) -> None:
        bias = run.model.get_parameter("bias").item()
        self.rates.append(self._last - bias)
        self._last = bias


class InUpdates(Callback):
    """Notes the rates of all groups of all optimizers in each update."""

    after = (Warmup,)

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_before_optimizer_step(self, run: Run) -> None:
        self.rates.append([group["lr"] for one in run.optimizers for group in one.param_groups])


def rates_in_updates(*callbacks: Callback, **arguments: Any) -> list[float]:
    steps = Steps()
    tiny_run(callbacks=[steps, *callbacks], compute_loss=slope, **arguments)
    return steps.rates


CONSTANT = Warmup("2 steps", shape="constant", start=0.5)


@pytest.mark.parametrize(
    ("warmups", "factors"),
    [
        ([Warmup("4 steps")], [0.25, 0.5, 0.75, 1.0, 1.0]),
        ([Warmup("4 steps", start=0.2)], [0.4, 0.6, 0.8, 1.0, 1.0]),
        ([Warmup("4 steps", shape="cosine")], [(1 - math.cos(math.pi * n / 4)) / 2 for n in (1, 2, 3, 4)] + [1.0]),
        ([Warmup("4 steps", shape="constant", start=0.1)], [0.1, 0.1, 0.1, 0.1, 1.0]),
        ([Warmup("1 step", shape="constant", start=0.1)], [0.1, 1.0, 1.0, 1.0, 1.0]),
        ([Warmup(0.5)], [0.4, 0.8, 1.0, 1.0, 1.0]),  # two and a half of five steps
        ([Warmup("0.8 epoch")], [0.25, 0.5, 0.75, 1.0, 1.0]),
        ([Warmup("4 steps"), CONSTANT], [0.125, 0.25, 0.75, 1.0, 1.0]),  # several of one optimizer multiply
    ],
)
def test_the_updates_have_the_rate_of_the_formula(warmups: list[Warmup], factors: list[float]) -> None:
    assert rates_in_updates(*warmups, steps=5) == pytest.approx([0.1 * factor for factor in factors], rel=1e-5)


def test_with_a_straight_fall_it_gives_the_numbers_of_fastnlp() -> None:
    """Ten batches, a warm-up of 0.2, "linear": spec/fastnlp.md 5.8."""
    fall = LearningRate(lambda o, total: LambdaLR(o, lambda k: min(1.0, (total - k - 1) / (total * 0.8))))
    rates = rates_in_updates(Warmup(0.2), fall, batches=10)
    assert rates == pytest.approx([0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125, 0.0], abs=1e-6)
    epoch = Warmup("1 epoch")
    tiny_run(callbacks=[epoch], batches=5, accumulate=2)
    assert epoch.count == 3, "an epoch counts steps and not batches"


def test_a_schedule_never_sees_a_scaled_rate() -> None:
    """Each of its own rates follows from the one before, so one scaled rate would spoil all that come."""

    def rates(*callbacks: Callback) -> list[float]:
        seen: list[float] = []
        look = on(Callback.on_step_end)(lambda run: seen.append(run.optimizers[0].param_groups[0]["lr"]))
        tiny_run(callbacks=[*callbacks, look], steps=5)
        return seen

    schedule = LearningRate(lambda optimizer: ExponentialLR(optimizer, 0.9))
    assert rates(schedule) == rates(Warmup("4 steps"), schedule) == rates(schedule, Warmup("4 steps"))


def test_each_group_is_scaled_and_is_afterwards_exactly_what_it_was() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "lr": rate} for one, rate in zip(parameters, (0.1, 0.3), strict=True)])

    look = InUpdates()
    run = tiny_run(optimizer=groups, callbacks=[look, Warmup("3 steps")], steps=2)
    assert look.rates == [[0.1 * (1 / 3), 0.3 * (1 / 3)], [0.1 * (2 / 3), 0.3 * (2 / 3)]]
    assert [group["lr"] for group in run.optimizers[0].param_groups] == [0.1, 0.3]


def test_where_optimizers_take_turns_only_the_one_that_is_updated_is_scaled() -> None:
    def turns(run: Run, batch: Any) -> Any:
        loss = slope(run.model, batch)
        run.backward(loss)
        for optimizer in run.optimizers:
            run.update(optimizer)
        return loss

    callbacks = [Warmup("2 steps", optimizer=0), Warmup("4 steps", optimizer=1), look := InUpdates()]
    tiny_run(optimizer=two_optimizers, step_fn=turns, callbacks=callbacks, steps=1)
    assert look.rates == [[0.05, 0.1], [0.1, 0.025]]
    first, second = (rates_in_updates(Warmup("2 steps", optimizer=one), optimizer=two_optimizers, steps=2) for one in (0, 1))
    assert first == pytest.approx([0.1, 0.1], rel=1e-5)
    assert second == pytest.approx([0.05, 0.1], rel=1e-5)


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


def rates_saved(directory: Path) -> list[float]:
    store = Store(directory / "checkpoints")
    return [store.read(one).state["optimizers"][0]["param_groups"][0]["lr"] for one in store.saved()]


@pytest.mark.parametrize("first", [True, False])
def test_after_an_update_that_fails_nothing_is_scaled_nor_saved_so(tmp_path: Path, first: bool) -> None:
    model = tiny_model()
    optimizer = Breaking(model.parameters(), 0.1)
    warmup, checkpoint = Warmup("4 steps"), Checkpoint(lambda run: False, on_exception=True)
    callbacks = [warmup, checkpoint] if first else [checkpoint, warmup]
    with pytest.raises(RuntimeError, match="on purpose"):
        tiny_run(model=model, optimizer=optimizer, callbacks=callbacks, steps=5, directory=tmp_path / "failing")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert rates_saved(tmp_path / "failing") == [0.1]
    tiny_run(callbacks=[Warmup("4 steps"), Checkpoint(every="2 steps")], steps=3, directory=tmp_path / "middle")
    assert set(rates_saved(tmp_path / "middle")) == {0.1}


COMBINED = [(shape, length) for shape in ("linear", "constant", "cosine") for length in ("5 steps", "0.5 epoch", 0.7)]


@pytest.mark.parametrize(
    ("shape", "length"),
    [one if number % 4 == 0 else pytest.param(*one, marks=pytest.mark.long) for number, one in enumerate(COMBINED)],
)
def test_a_run_that_continues_inside_of_a_warm_up_has_the_same_bits(shape: Any, length: Any) -> None:
    def make(directory: Path) -> Any:
        schedule = LearningRate(lambda optimizer: StepLR(optimizer, 2, 0.5))
        callbacks = [Warmup(length, shape=shape, start=0.1), schedule, Warmup("3 steps")]
        return tiny_trainer(callbacks=callbacks, directory=directory, steps=7, batches=6, seed=1)

    prove_resume(make, at=[1, 3, 6] if LONG else [1, 3], in_process=True)


def test_with_a_limit_that_is_raised_later_it_does_not_begin_again(tmp_path: Path) -> None:
    rates: list[float] = []
    look = on(Callback.on_step_start)(lambda run: rates.extend(session_of(run).rates.of(run)))
    for steps in (4, 40):
        rates.clear()
        callbacks = [Warmup(0.5), Checkpoint(), look]
        tiny_trainer(callbacks=callbacks, directory=tmp_path, steps=steps).fit(resume="auto")
    assert set(rates) == {0.1}


def test_an_update_left_out_by_fp16_counts_as_a_step() -> None:
    def overflowing(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).float().mean() * next(factors)

    factors = iter([1e-3, math.inf, 1e-3])  # the scale begins at 65536, and fp16 ends there
    updated: list[bool] = []
    look = on(Callback.on_after_optimizer_step)(lambda run: updated.append(session_of(run).step.updated))
    steps = Steps()
    run = tiny_run(callbacks=[Warmup("3 steps"), steps, look], compute_loss=overflowing, precision="fp16", batches=3)
    assert updated == [True, False, True]
    assert steps.rates == pytest.approx([1e-4 / 3, 0.0, 1e-4], rel=1e-3)
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1


# -- ScheduleValue ------------------------------------------------------------------------------------


def values_in_steps(schedule: Any, *, steps: int = 6, **arguments: Any) -> list[Any]:
    """Return the value that each step had."""
    target, seen = SimpleNamespace(value=-1.0), list[Any]()
    look = on(Callback.on_step_start)(lambda run: seen.append(target.value))
    tiny_run(callbacks=[ScheduleValue(target, "value", schedule, **arguments), look], steps=steps)
    return seen


@pytest.mark.parametrize(
    ("schedule", "arguments", "values"),
    [
        (lambda step: step * 10, {}, [0, 10, 20, 30, 40, 50]),
        (lambda step, total: step / total, {"steps": 5}, [0.0, 0.2, 0.4, 0.6, 0.8]),
        (lambda step: step, {"every": "2 steps"}, [0, 0, 2, 2, 4, 4]),
        (lambda step: step, {"every": "1 epoch"}, [0, 0, 0, 0, 0, 5]),
        ({0: 1.0, 4: 0.0}, {}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ({2: 1, 4: 3}, {}, [1, 1, 1, 2, 3, 3]),  # the first one counts before its step too
        ({4: 0.0, 0: 1.0, 2: 3.0}, {}, [1.0, 2.0, 3.0, 1.5, 0.0, 0.0]),
        ({0: "warm", 3: "cold"}, {"between": "hold"}, ["warm", "warm", "warm", "cold", "cold", "cold"]),
        ({5: 7}, {}, [7] * 6),
    ],
)
def test_each_step_has_the_value_of_the_schedule(schedule: Any, arguments: dict[str, Any], values: list[Any]) -> None:
    assert values_in_steps(schedule, **arguments) == values


def test_the_target_may_be_a_module_a_tensor_or_a_mapping_and_the_last_value_stays_when_the_run_is_over() -> None:
    model: Any = nn.Linear(1, 1)
    dropout, strength = nn.Dropout(0.9), torch.tensor(0.0)
    model.register_buffer("strength", strength)
    model.level = 0.0
    several = [
        ScheduleValue(dropout, "p", {0: 0.5, 10: 0.0}),
        ScheduleValue(model, "strength", {0: 0.0, 4: 1.0}),
        ScheduleValue(model, "level", lambda step: float(step)),  # it can be called, and is no function of the run
        ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "weight_decay", {0: 0.0, 4: 0.4}),
    ]
    run = tiny_run(model=model, callbacks=several, steps=2)
    assert (dropout.p, model.level) == (0.4, 2.0)
    assert model.strength is strength
    assert strength.item() == 0.5
    assert run.optimizers[0].param_groups[0]["weight_decay"] == pytest.approx(0.2)


@pytest.mark.parametrize(("every", "at"), [("1 step", 1), ("3 steps", 5), ("1 epoch", 7)])
def test_a_run_that_continues_between_two_changes_has_the_same_bits(every: str, at: int) -> None:
    def make(directory: Path) -> Trainer:
        schedule = ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "momentum", lambda step: step / 20, every=every)
        return tiny_trainer(callbacks=[schedule], directory=directory, steps=9, batches=4, seed=1)

    prove_resume(make, at=[at], in_process=True)


def test_a_run_that_continues_sets_what_no_checkpoint_holds(tmp_path: Path) -> None:
    seen: list[float] = []
    for steps in (2, 4):
        dropout = nn.Dropout(0.9)
        model = nn.Sequential(nn.Linear(1, 1), dropout)
        look = on(Callback.on_step_start)(lambda run: seen.append(cast("nn.Dropout", run.model.get_submodule("1")).p))
        callbacks = [ScheduleValue(dropout, "p", {0: 0.5, 5: 0.0}), look, Checkpoint()]
        tiny_trainer(model=model, callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")
    assert seen == pytest.approx([0.5, 0.4, 0.3, 0.2])


# -- SequenceLength -----------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """24 samples of 16 tokens, and a label."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.rand(16) + index, "mask": torch.ones(16), "label": torch.tensor(float(index))}


class Lengths(Callback):
    """Keeps the lengths of the batches."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self.seen.append((batch["ids"].shape[1], batch["mask"].shape[1]))


def text_loss(model: nn.Module, batch: Any) -> Any:
    return (model(batch["ids"].mean(1, keepdim=True) / 24).squeeze(1) - batch["label"] / 24).square().mean()


SCHEDULE: dict[int | str, int] = {0: 4, "3 steps": 8, "1 epoch": 16}


def text_trainer(directory: Path | None, callbacks: list[Any], *, workers: int = 0, **arguments: Any) -> Any:
    loader = DataLoader(Texts(), 4, shuffle=True, num_workers=workers)
    options = {"epochs": 2, "seed": 3, "compute_loss": text_loss, **arguments}
    return tiny_trainer(loader=loader, callbacks=callbacks, directory=directory, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_has_the_length_of_its_step(workers: int) -> None:
    run = text_trainer(None, [SequenceLength(SCHEDULE, ("ids", "mask")), look := Lengths()], workers=workers).fit()
    assert look.seen == [(4, 4)] * 3 + [(8, 8)] * 3 + [(16, 16)] * 6
    told = [(one.when.step, dict(one.data)) for one in run.decisions if one.what == "sequence length changed"]
    assert told == [(3, {"before": 4, "length": 8}), (6, {"before": 8, "length": 16})]


def test_only_the_given_keys_are_cut_and_evaluations_see_everything() -> None:
    seen: list[int] = []
    look = on(Callback.on_eval_batch_start)(lambda run, evaluation, batch: seen.append(batch["ids"].shape[1]))
    lengths = Lengths()
    text_trainer(None, [SequenceLength(4, ["ids"]), lengths, Evaluate(DataLoader(Texts(), 12)), look], epochs=1).fit()
    assert ({*lengths.seen}, seen) == ({(4, 16)}, [16, 16])
    with pytest.raises(DataError, match=r"cuts 'idz', which a batch does not have\. Did you mean 'ids'"):
        text_trainer(None, [SequenceLength(4, ("idz",))]).fit()


@pytest.mark.parametrize(("workers", "cuts"), [(0, [3, 4, 7]), (2, [5])])
def test_a_run_that_is_interrupted_ends_with_the_same_bits_and_decisions(workers: int, cuts: list[int], tmp_path: Path) -> None:
    def ended(directory: Path, *cut: int) -> tuple[Any, ...]:
        seen: list[Any] = []
        for at in (*cut, 99):

            @on(Callback.on_step_end, at=at)
            def interrupt(run: Run) -> None:
                raise KeyboardInterrupt

            callbacks = [SequenceLength(SCHEDULE), look := Lengths(), Checkpoint("1 step", keep_last=None), interrupt]
            made = text_trainer(directory, callbacks, workers=workers)
            with suppress(KeyboardInterrupt):
                made.fit(resume="auto")
            seen += look.seen[: at - 1]
        told = [one for one in read_decisions(directory / "decisions.jsonl") if one.what == "sequence length changed"]
        decided = [(one.when.step, one.data["length"]) for one in told]
        return decided, seen, str(made.model.state_dict()), made.run.progress.now()

    whole = ended(tmp_path / "whole")
    assert whole[0] == [(3, 8), (6, 16)]
    for cut in cuts:
        assert ended(tmp_path / str(cut), cut) == whole


def test_two_ranks_have_the_same_lengths() -> None:
    def rank() -> Any:
        look = Lengths()
        arguments: dict[str, Any] = {"driver": "ddp", "device": "cpu", "accumulate": {0: 1, "2 steps": 2}}
        text_trainer(None, [SequenceLength({0: 4, "40%": 8}), look], **arguments).fit()
        return look.seen

    first, second = launch(rank, 2)
    assert first == second
    assert [one for one, _ in first] == [4, 4, 4, 8, 8, 8]
