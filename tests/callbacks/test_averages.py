"""Ema and Swa: averages of the weights, with which a run is evaluated, and may end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, update_bn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import BestWeights, Checkpoint, Ema, Evaluate, Freeze, LearningRate, LogTraining, Swa
from cadenza.errors import DataError
from cadenza.hooks import HeldWeights
from cadenza.hooks.dispatch import hooks_of
from cadenza.optim.averaging import Average
from cadenza.optim.held_weights import holders_in
from cadenza.status.encoding import same
from cadenza.testing import prove_resume, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import normed, own_step, state_of


def averaged(ema: Ema) -> dict[str, Tensor]:
    assert ema.average is not None
    return dict(ema.average.module.state_dict())


OLD_NORMS: list[Any] = [nn.utils.weight_norm, nn.utils.spectral_norm]


def normed_layer(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return norm(nn.Linear(1, 1))


def judged(**options: Any) -> Evaluate:
    return Evaluate(tiny_loader(2), **options)


@pytest.mark.parametrize(
    ("decay", "rampup", "tenth", "every"),
    [(0.0, False, 0, 1), (0.5, False, 0, 1), (0.9, False, 0, 1), (0.5, True, 10, 1), (0.5, 4, 4, 1), (0.5, False, 0, 2)],
)
def test_the_average_is_that_of_the_formula(decay: float, rampup: bool | int, tenth: int, every: int) -> None:
    seen: list[float] = []
    look = on(Callback.on_step_end, every=every)(lambda run: seen.append(run.model.get_parameter("weight").item()))
    ema = Ema(decay, rampup=rampup, every=f"{every} steps")
    tiny_run(steps=11, callbacks=[look, ema])
    expected = seen[0]  # the average begins with the first weights it sees
    for updates, weight in enumerate(seen[1:], start=1):
        now = min(decay, (1 + updates) / (tenth + updates)) if rampup else decay  # a ramp-up gives it a short memory first
        expected = now * expected + (1 - now) * weight
    assert averaged(ema)["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_the_counter_of_torchs_class_is_exact_in_a_run_and_after_it() -> None:
    seen: list[int] = []
    ema = Ema(0.5)
    look = on(Callback.on_step_end)(lambda run: seen.append(int(cast("Any", ema.average).n_averaged)))
    tiny_run(steps=3, callbacks=[ema, look])
    assert seen == [1, 2, 3]
    again = Average(nn.Linear(1, 1))
    assert again.n_averaged == 0
    again.load_state_dict(cast("Any", ema.average).state_dict())
    assert again.n_averaged == again.updates == 3


def test_buffers_and_weights_of_whole_numbers_are_copied_and_a_module_may_replace_a_buffer_by_a_new_tensor() -> None:
    model, ema = normed(), Ema(0.9)
    model.register_parameter("codes", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    change = on(Callback.on_step_start)(lambda run: run.model.get_parameter("codes").add_(1))
    tiny_run(model=model, steps=5, callbacks=[change, ema])
    for name, buffer in model.named_buffers():
        assert torch.equal(averaged(ema)[name], buffer), name
    assert averaged(ema)["codes"].tolist() == [5, 5]
    assert not torch.equal(averaged(ema)["0.weight"], model.state_dict()["0.weight"])

    class Counting(nn.Linear):
        seen: Tensor

        def forward(self, inputs: Tensor) -> Tensor:
            self.seen = self.seen + 1  # a new tensor each time, where BatchNorm changes the one it has
            return super().forward(inputs)

    counting, ema = Counting(1, 1), Ema(0.5)
    counting.register_buffer("seen", torch.tensor(0))
    run = tiny_run(model=counting, steps=3, callbacks=[ema])
    assert averaged(ema)["seen"] == 3
    with ema.in_place(run):
        counting(torch.ones(1, 1))
        assert counting.seen == 4
    assert counting.seen == 3


class Remembering(nn.Linear):
    """Keeps its outputs, with their graph."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.kept: dict[str, list[Tensor]] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.kept = {"outputs": [outputs]}
        return outputs


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("make", [Remembering, *(partial(normed_layer, one) for one in OLD_NORMS)])
@pytest.mark.parametrize("average", [partial(Ema, 0.5), partial(Swa, 0.0, "1 step", use_at_end=False)])
def test_models_that_hold_computed_tensors_are_averaged(average: Callable[..., Any], make: Callable[[], nn.Module]) -> None:
    """Deepcopy refuses tensors with a graph, as the old ``weight_norm`` makes one when it is applied, and others in a call."""
    model, kept = make(), average(name="kept")
    for _ in range(2):
        model(torch.ones(2, 1))
        run = tiny_run(model=model, epochs=2, callbacks=[kept, judged(weights="kept", every="1 epoch")])
        fresh = make()
        assert kept.average is not None
        fresh.load_state_dict(kept.average.module.state_dict())
        assert not torch.equal(kept.average.module.get_parameter("bias"), model.get_parameter("bias"))
        expected = tiny_trainer(model=fresh).evaluate(tiny_loader(2))
        assert run.history["eval/loss"][-1][-1] == pytest.approx(expected["eval/loss"])


def test_half_precision_is_averaged_in_float32_so_that_small_weights_count() -> None:
    def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        return model(batch[0].bfloat16()).float().sum() * 0

    model, ema = nn.Linear(1, 1, dtype=torch.bfloat16), Ema(0.999)

    @on(Callback.on_step_end)
    def move(run: Run) -> None:
        with torch.no_grad():
            model.weight.fill_(1.0 if run.progress.step == 1 else 2.0)

    run = tiny_run(model=model, compute_loss=compute_loss, steps=4, callbacks=[move, ema])
    assert averaged(ema)["weight"].dtype is torch.float32
    assert averaged(ema)["weight"].item() == pytest.approx(2 - 0.999**3)
    with ema.in_place(run):
        assert model.weight.dtype is torch.bfloat16
    assert model.weight.item() == 2.0


def test_before_the_first_update_the_model_keeps_its_own_weights(caplog: pytest.LogCaptureFixture) -> None:
    run = tiny_run(steps=1)
    with pytest.raises(RuntimeError, match="no average yet: it is made when a run is set up"), Ema().in_place(run):
        pass
    ema, inside = Ema(every="4 steps"), []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        own = state_of(run)
        with ema.in_place(run):
            inside.append(same(state_of(run), own))

    tiny_run(steps=6, callbacks=[ema, look])
    assert inside == [True, True, True, True, False, False]
    run = tiny_run(steps=2, callbacks=[Ema(every="3 steps", use_at_end=True)])
    assert "Ema: the run ended before the first average, so the model keeps its own weights" in caplog.text
    assert same(state_of(run), state_of(tiny_run(steps=2)))


def test_in_place_gives_the_same_tensors_the_average_and_then_their_own_weights_also_after_an_error() -> None:
    ema = Ema(0.9)
    run = tiny_run(model=normed(), steps=5, callbacks=[ema])
    own, average = state_of(run), {name: value.clone() for name, value in averaged(ema).items()}
    tensors = [(id(one), one.data_ptr()) for one in run.model.parameters()]
    with ema.in_place(run):
        assert same(dict(run.model.state_dict()), average)
        assert [(id(one), one.data_ptr()) for one in run.model.parameters()] == tensors
    assert same(dict(run.model.state_dict()), own)
    assert [(id(one), one.data_ptr()) for one in run.model.parameters()] == tensors

    def fail_inside() -> None:
        with ema.in_place(run):
            run.model.get_parameter("0.weight").data.fill_(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert same(dict(run.model.state_dict()), own)
    assert same(averaged(ema), average)


def test_using_the_average_during_a_run_does_not_change_the_run() -> None:
    ema = Ema(0.9)

    def final(*more: Callback) -> dict[str, Tensor]:
        run = tiny_run(model=normed(), epochs=2, callbacks=[ema, *more], accumulate=2)
        return {**run.model.state_dict(), "rate": torch.tensor(run.optimizers[0].param_groups[0]["lr"])}

    @on(Callback.on_step_end)
    def inside(run: Run) -> None:
        with ema.in_place(run):
            run.model.eval()(torch.ones(2, 1))
        run.model.train()

    alone = final()
    assert same(final(inside), alone)
    assert same(final(judged(every="1 step", weights="ema", sanity_batches=1)), alone)


def test_the_run_can_end_with_the_average_and_two_averages_have_two_names() -> None:
    ema = Ema(0.5, use_at_end=True)
    run = tiny_run(steps=4, callbacks=[ema, Ema(0.99, name="slow")])
    assert same(dict(run.model.state_dict()), averaged(ema))
    assert run.why("averaged weights in place").startswith("averaged weights in place by Ema at epoch 1, step 4")
    assert list(holders_in(hooks_of(run))) == ["ema", "slow"]
    assert list(hooks_of(run).callbacks) == ["Ema", "Ema(slow)"]


def test_a_run_with_several_averages_continues_to_the_same_bits() -> None:
    def make(directory: Path) -> Trainer:
        averages = [Ema(0.9, rampup=True, use_at_end=True), Ema(0.5, every="3 steps", name="fast")]
        return tiny_trainer(model=normed(), directory=directory, epochs=2, seed=1, callbacks=averages)

    prove_resume(make, at=[1, 5], in_process=True)


def test_the_result_is_that_of_the_model_with_the_averaged_weights() -> None:
    ema = Ema(0.9)
    trainer = tiny_trainer(model=normed(), epochs=2, callbacks=[ema, judged(), judged(weights="ema", name="averaged")])
    run = trainer.fit()
    with ema.in_place(run):
        expected = trainer.evaluate(tiny_loader(2))["eval/loss"]
    assert run.history["averaged/loss"][-1][1] == expected
    assert run.history["eval/loss"][-1][1] != expected
    assert run.history["eval/loss"][-1][1] == trainer.evaluate(tiny_loader(2))["eval/loss"]


@pytest.mark.parametrize("first", [True, False])
def test_the_average_has_the_weights_of_this_step_wherever_it_stands_in_the_list(first: bool) -> None:
    ema, evaluate, best = Ema(0.5), judged(every="1 step", weights="ema"), BestWeights("eval/loss", "min")
    updates: list[int] = []
    look = on(Callback.on_eval_end)(lambda run, evaluation: updates.append(cast("Any", ema.average).updates))
    run = tiny_run(steps=5, callbacks=[look, *([ema, evaluate] if first else [evaluate, ema]), best])
    assert updates == [1, 2, 3, 4, 5]
    assert best.step == 5
    assert same(dict(run.model.state_dict()), averaged(ema))  # listeners see the evaluated weights


def test_after_an_error_in_the_evaluation_the_model_has_its_own_weights_in_on_exception_and_later() -> None:
    own, seen = list[dict[str, Tensor]](), list[dict[str, Tensor]]()

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert not same(dict(model.state_dict()), own[-1])
        raise ZeroDivisionError

    keep = on(Callback.on_step_end)(lambda run: own.append(state_of(run)))
    watch = on(Callback.on_exception)(lambda run, error: seen.append(state_of(run)))
    with pytest.raises(ZeroDivisionError):
        tiny_run(model=normed(), callbacks=[Ema(0.9), keep, watch, judged(compute=compute, weights="ema")])
    assert same(seen[0], own[-1])
    ema = Ema(0.9)
    trainer = tiny_trainer(callbacks=[ema, Evaluate([], weights="ema")])
    with pytest.raises(DataError, match="the loader of 'eval' gave no batch"):
        trainer.fit()
    assert not same(dict(trainer.model.state_dict()), averaged(ema))


class Doubled(Callback):
    """Holds the weights with which the run begins, the first of them twice as large."""

    def on_setup(self, run: Run) -> None:
        self.weights = state_of(run)
        self.weights["0.weight"] *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"doubled": self.weights}

    def held_weights(self) -> dict[str, HeldWeights]:
        return {"doubled": HeldWeights("doubled")}


def test_the_trial_before_the_first_epoch_takes_the_same_way() -> None:
    seen: list[float] = []

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        seen.append(model.get_parameter("0.weight").sum().item())
        return {"loss": torch.tensor(0.0)}

    model = normed()
    first = model.get_parameter("0.weight").sum().item()
    tiny_run(model=model, callbacks=[Doubled(), judged(compute=compute, sanity_batches=1, weights="doubled")])
    assert seen[0] == 2 * first


def test_what_is_saved_for_the_best_result_are_the_weights_with_which_the_run_goes_on(tmp_path: Path) -> None:
    def make(directory: Path) -> Trainer:
        saving = Checkpoint("2 steps", keep_best=("eval/loss", "min"))
        callbacks = [saving, judged(every="3 steps", weights="ema", sanity_batches=1), Ema(0.9, rampup=True)]
        return tiny_trainer(model=normed(), directory=directory, epochs=2, seed=1, callbacks=callbacks)

    prove_resume(make, at=[3], in_process=True)


def test_before_swa_begins_the_model_itself_is_judged() -> None:
    callbacks = [Swa("2 epochs"), judged(), judged(weights="swa", name="swa")]
    run = tiny_run(epochs=4, callbacks=callbacks)
    alike = [one == other for one, other in zip(run.history["eval/loss"], run.history["swa/loss"], strict=True)]
    assert alike == [True, True, False, False]  # after 2 epochs the average is that of one set of weights


# -- Swa ----------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))


def shuffled() -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, 20).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, 2 * inputs + 1), batch_size=4, shuffle=True)


class Weights(Callback):
    """Notes the weight after each step, and the rate with which it was made."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}
        self.rates: list[float] = []

    def on_before_optimizer_step(self, run: Run) -> None:
        self.rates.append(float(run.optimizers[0].param_groups[0]["lr"]))

    def on_step_end(self, run: Run) -> None:
        self.at[run.progress.step] = run.model.get_parameter("weight").item()


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, [30, 35, 40]),  # 8 epochs of 5 steps: from 0.75 of them on
        ({"start": 0.7}, [30, 35, 40]),
        ({"start": "7 epochs"}, [35, 40]),
        ({"start": "37 steps"}, [40]),
        ({"start": 0.9, "every": "2 steps"}, [36, 38, 40]),
        ({"start": "1.5 epoch", "every": "2.5 epoch"}, [13, 25, 38]),
    ],
)
def test_the_run_ends_with_the_mean_of_the_weights_from_the_start_on(arguments: dict[str, Any], steps: list[int]) -> None:
    weights = Weights()
    run = tiny_run(epochs=8, callbacks=[weights, Swa(**arguments)])
    expected = sum(weights.at[step] for step in steps) / len(steps)
    assert run.model.get_parameter("weight").item() == pytest.approx(expected, rel=1e-6)
    assert run.why("averaged weights in place").endswith(f"'swa', the average of {len(steps)} updates")


def test_a_stop_ends_with_the_average_so_far_and_one_before_the_start_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def stopped(step: int) -> Run:
        stop = on(Callback.on_step_end, at=step)(lambda run: run.stop("enough"))
        return tiny_run(epochs=8, callbacks=[Swa("2 epochs"), stop])

    assert stopped(23).why("averaged weights in place").endswith("the average of 3 updates")
    stopped(7)
    assert "Swa: the run ended before the first average, so the model keeps its own weights" in caplog.text
    caplog.clear()
    tiny_run(epochs=2, callbacks=[Swa("3 epochs", use_at_end=False)])
    assert "Swa never averages in this run: start is at epoch 3, and the run ends after 2 epochs" in caplog.text


def test_it_lives_beside_an_ema_and_another_swa_and_can_only_keep_the_average() -> None:
    weights, kept = Weights(), Swa("2 epochs", use_at_end=False)
    run = tiny_run(epochs=4, callbacks=[weights, kept, Swa("3 epochs", name="late", use_at_end=False), Ema(0.9)])
    assert run.model.get_parameter("weight").item() == weights.at[20]
    with kept.in_place(run):
        mean = sum(weights.at[step] for step in (10, 15, 20)) / 3
        assert run.model.get_parameter("weight").item() == pytest.approx(mean, rel=1e-6)
    run = tiny_run(epochs=4, callbacks=[weights, kept, Swa("3 epochs", name="late"), Ema(0.9)])
    assert list(holders_in(hooks_of(run))) == ["swa", "late", "ema"]
    assert run.model.get_parameter("weight").item() == pytest.approx((weights.at[15] + weights.at[20]) / 2, rel=1e-6)


def rates_of_torch(steps: int, anneal: int) -> list[float]:
    """Return the rates of so many updates, after torch's own scheduler was stepped before each."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.5, anneal_epochs=anneal)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("anneal", [0, 1, 4, 30])
def test_the_rates_are_those_of_torchs_scheduler_and_each_is_logged_before_its_update(anneal: int) -> None:
    weights = Weights()
    run = tiny_run(epochs=4, callbacks=[weights, Swa(0.5, lr=0.5, anneal_steps=anneal), LogTraining("1 step")])
    assert weights.rates == pytest.approx([0.1] * 10 + rates_of_torch(10, anneal))
    logged = dict(run.history["train/lr"])
    assert [logged[step] for step in range(11, 20)] == weights.rates[11:]


def falling(optimizer: Optimizer) -> ExponentialLR:
    return ExponentialLR(optimizer, 0.9)


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=100)


@pytest.mark.parametrize("swa_first", [True, False])
@pytest.mark.parametrize("schedule", ["1 step", "1 epoch", "evaluation"])
def test_from_the_start_on_its_rate_is_in_force_whatever_other_schedule_there_is(swa_first: bool, schedule: Any) -> None:
    rate = LearningRate(plateau, monitor="eval/loss") if schedule == "evaluation" else LearningRate(falling, every=schedule)
    weights, swa = Weights(), Swa("2 epochs", lr=0.5)
    both = [swa, rate] if swa_first else [rate, swa]
    run = tiny_run(epochs=4, callbacks=[weights, judged(), *both, LogTraining("1 step")])
    assert weights.rates[10:] == [0.5] * 10
    assert all(rate <= 0.1 for rate in weights.rates[:10])
    assert min(weights.rates) < 0.1
    logged = dict(run.history["train/lr"])
    assert [logged[step] for step in range(11, 20)] == [0.5] * 9  # the rate of the next update


def test_each_group_goes_there_from_its_own_rate() -> None:
    rates: list[list[float]] = []

    @on(Callback.on_before_optimizer_step)
    def look(run: Run) -> None:
        rates.append([float(group["lr"]) for group in run.optimizers[0].param_groups])

    def two(parameters: Any) -> Optimizer:
        return SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": torch.tensor(0.3)}], lr=1.0)

    run = tiny_run(epochs=4, optimizer=two, callbacks=[look, Swa(0.5, lr=0.5, anneal_steps=2)])
    assert rates[9:12] == [pytest.approx([0.1, 0.3]), pytest.approx([0.3, 0.4]), pytest.approx([0.5, 0.5])]
    assert isinstance(run.optimizers[0].param_groups[1]["lr"], Tensor)  # a compiled step reads it there


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


@pytest.mark.parametrize(("batches", "seen"), [(None, 5), (2, 2), (9, 5), (0, 0)])
def test_the_statistics_are_those_of_torchs_own_function(batches: int | None, seen: int) -> None:
    swa = Swa(0.5, update_batch_norm=batches)
    run = tiny_run(model=normed(), epochs=4, callbacks=[swa])
    if seen:
        expected = normed()
        expected.load_state_dict(run.model.state_dict())
        update_bn(tiny_loader()[:seen], expected)
    else:  # those of the last weights
        expected = cast("nn.Sequential", tiny_run(model=normed(), epochs=4).model)
    assert same(buffers(run.model), buffers(expected))
    assert cast("nn.BatchNorm1d", cast("nn.Sequential", run.model)[1]).momentum == 0.1
    assert run.model.training
    with swa.in_place(run):
        assert same(buffers(run.model), buffers(expected))


@pytest.mark.parametrize("first", [True, False])
def test_frozen_statistics_do_not_change(first: bool) -> None:
    model = nn.Sequential(normed(), nn.BatchNorm1d(1))
    before = buffers(model[0])
    callbacks = [Swa(0.5), Freeze("0.1")] if first else [Freeze("0.1"), Swa(0.5)]
    tiny_run(model=model, epochs=4, callbacks=callbacks)
    assert same(buffers(model[0]), before)
    assert cast("nn.BatchNorm1d", model[1]).num_batches_tracked == 5  # those of the last pass
    assert model[0].training


def test_taking_them_disturbs_no_random_stream() -> None:
    def stream(batches: int | None) -> Tensor:
        tiny_run(model=network(), loader=shuffled(), epochs=4, seed=1, callbacks=[Swa(0.5, update_batch_norm=batches)])
        return torch.get_rng_state()

    assert torch.equal(stream(None), stream(0))


def test_a_loader_that_is_used_up_is_named_and_the_statistics_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = tiny_run(model=normed(), loader=iter(tiny_loader(9)), steps=9, callbacks=[Swa(0.5, every="1 step")])
    assert "the loader has no more batches for BatchNorm statistics" in caplog.text
    assert cast("nn.BatchNorm1d", cast("nn.Sequential", run.model)[1]).num_batches_tracked == 9


def test_an_error_on_the_way_leaves_modes_and_momenta_as_they_were() -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            raise ZeroDivisionError
        return model(batch[0]).square().mean()

    trainer = tiny_trainer(model=normed(), epochs=4, compute_loss=compute_loss, callbacks=[Swa(0.5)])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit()
    assert "raised in Swa.at_end" in caught.value.__notes__[0]
    assert cast("nn.BatchNorm1d", cast("nn.Sequential", trainer.model)[1]).momentum == 0.1
    assert trainer.model.training


@pytest.mark.parametrize(("start", "at"), [(0.5, [4, 10, 13]), ("2 epochs", [11]), ("9 steps", [9, 19])])
def test_it_continues_to_the_same_bits_before_at_and_after_the_start(start: float | str, at: list[int]) -> None:
    def make(directory: Path) -> Trainer:
        swa = Swa(start, "2 steps", lr=0.05, anneal_steps=4)
        given: dict[str, Any] = {"callbacks": [LearningRate(falling), swa, Evaluate(shuffled(), weights="swa")], "epochs": 4}
        return tiny_trainer(model=network(), loader=shuffled(), directory=directory, seed=1, **given)

    prove_resume(make, at=at, in_process=True)


def test_with_a_step_fn_swa_cannot_update_the_statistics() -> None:
    with pytest.raises(ValueError, match=r"this run has a step_fn instead\. Give Swa\(update_batch_norm=0\)"):
        tiny_run(model=normed(), step_fn=own_step, epochs=4, callbacks=[Swa(0.5)])
    run = tiny_run(model=normed(), step_fn=own_step, epochs=4, callbacks=[Swa(0.5, update_batch_norm=0)])
    assert all(math.isfinite(value.sum()) for value in run.model.state_dict().values())


def test_the_plan_names_the_evaluated_weights_and_from_when_on_they_are_averaged() -> None:
    callbacks = [judged(weights="ema", limit=2), Ema(), Swa(), Swa("6 epochs", "10 steps", name="late")]
    plan = str(tiny_trainer(epochs=8, callbacks=callbacks).plan())
    assert "Evaluate (every epoch, 2 batches, weights 'ema')" in plan
    assert "order: Evaluate comes after Ema" in plan
    assert "Swa (every epoch, after 0.75 of the run)" in plan
    assert "Swa(late) (every 10 steps, at epoch 6)" in plan
