"""fastNLP's callbacks that end a training early, change learning rates and clip gradients: cases 17 and 28."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from cadenza.compat.fastnlp import (
    Callback,
    EarlyStopCallback,
    LRSchedCallback,
    TorchGradClipCallback,
    TorchWarmupCallback,
    Trainer,
)
from tests.compat.fastnlp.toy import Scribe, Scripted, Toy, toy_trainer

# -- early stop ------------------------------------------------------------------------------------------


def test_case_17_evaluations_between_batches_stop_before_the_next_fetch() -> None:
    scribe = Scribe("on_fetch_data_begin", "on_evaluate_end", "on_train_epoch_end", "on_exception", "on_train_end")
    metrics = {"acc": Scripted(0.0, 0.4, 0.3, 0.9, 0.9, 0.9)}
    callbacks = [scribe, EarlyStopCallback("acc#acc", patience=2)]
    toy_trainer(20, callbacks, metrics, evaluate_every=2, n_epochs=4).run()
    assert len(scribe.at("on_evaluate_end")) == 5
    assert scribe.at("on_train_epoch_end") == [(1, 0, 5)]
    assert scribe.seen[-3:] == [("on_fetch_data_begin", 1, 5, 10), ("on_exception", 1, 5, 10), ("on_train_end", 1, 5, 10)]


def test_a_training_that_ends_first_is_not_stopped() -> None:
    scribe = Scribe("on_exception", "on_train_epoch_end")
    toy_trainer(8, [scribe, EarlyStopCallback("acc", patience=2)], {"acc": Scripted(0.0, 3.0, 2.0, 1.0)}, n_epochs=3).run()
    assert scribe.names == ["on_train_epoch_end"] * 3


def test_a_checkpoint_restores_the_patience(tmp_path: Path) -> None:
    def stopped(*values: float, **run: Any) -> Trainer:
        class Saving(Callback):
            def on_train_epoch_end(self, trainer: Any) -> None:
                if trainer.cur_epoch_idx == 2 and not run:
                    trainer.save_checkpoint(tmp_path)

        stop = EarlyStopCallback("acc", larger_better=False, patience=3)
        metrics = {"acc": Scripted(9.0, *values)}
        trainer = toy_trainer(8, [stop, Saving()], metrics, n_epochs=len(values))
        trainer.run(**run)
        return trainer

    assert stopped(0.1, 0.2, 0.3, 0.4, 0.5).cur_epoch_idx == 4
    assert stopped(0.3, 0.2, 0.1, resume_from=tmp_path).cur_epoch_idx == 3  # one was without gain before, two are now
    assert EarlyStopCallback("acc", patience=3).callback_name == "EarlyStopCallback#monitor-acc#patience-3"


def test_an_early_stop_needs_a_monitor_and_patience() -> None:
    with pytest.raises(RuntimeError, match="EarlyStopCallback needs a monitor"):
        toy_trainer(8, EarlyStopCallback(), {"acc": Scripted(0.0)})
    with pytest.raises(ValueError, match="patience must be a whole number of at least 1; got 0"):
        EarlyStopCallback("acc", patience=0)


# -- learning rates --------------------------------------------------------------------------------------


class Rates(Callback):
    """Notes the rates after each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any) -> None:
        self.seen.append(round(trainer.driver.optimizers[0].param_groups[0]["lr"], 6))


def rates(callback: Any, count: int = 20, **arguments: Any) -> list[float]:
    notes = Rates()
    toy_trainer(count, [callback, notes], n_epochs=arguments.pop("n_epochs", 2), **arguments).run()
    return notes.seen


def test_case_28_a_warm_up_is_followed_by_decay_or_a_constant_rate() -> None:
    down = [0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125, 0.0]
    assert rates(TorchWarmupCallback(0.2)) == rates(TorchWarmupCallback(2, schedule="linear")) == down
    assert rates(TorchWarmupCallback(0.2, schedule="constant")) == [0.05, *[0.1] * 9]


def test_a_warm_up_as_long_as_the_training_or_of_no_length_is_no_division_by_zero() -> None:
    assert rates(TorchWarmupCallback(1.0))[-1] == 0.1
    assert rates(TorchWarmupCallback(-3))[0] == 0.09


def test_with_accumulation_a_warm_up_moves_with_each_update() -> None:
    seen = rates(TorchWarmupCallback(0.5, "constant"), accumulation_steps=2, count=16)
    assert seen == [0.1, 0.075, 0.075, *[0.1] * 5]


def test_a_warm_up_scales_each_optimizer_by_its_own_rates() -> None:
    model = Toy()
    optimizers = [torch.optim.SGD([model.linear.weight], 0.1), torch.optim.SGD([model.linear.bias], 0.4)]
    toy_trainer(20, TorchWarmupCallback(1.0), model=model, optimizers=optimizers, n_batches=5).run()
    toy_trainer(20, TorchWarmupCallback(1.0), model=model, optimizers=optimizers, n_batches=5).run()
    assert [one.param_groups[0]["lr"] for one in optimizers] == [0.1, 0.4]


def test_a_resumed_warm_up_uses_the_initial_rates(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any) -> None:
            if trainer.global_forward_batches == 6:
                trainer.save_checkpoint(tmp_path)

    toy_trainer(20, [TorchWarmupCallback(0.2), Saving()], n_epochs=2).run()
    notes = Rates()
    toy_trainer(20, [TorchWarmupCallback(0.2), notes], n_epochs=2).run(resume_from=tmp_path)
    assert notes.seen == [0.0375, 0.025, 0.0125, 0.0]


def test_an_unknown_schedule_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="schedule must be 'constant' or 'linear'; got 'cosine'"):
        TorchWarmupCallback(schedule="cosine")  # type: ignore[arg-type]


class Counting:
    """Something that can be stepped, and is no scheduler of torch's."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def test_case_28_a_scheduler_is_stepped_once_an_update_or_once_an_epoch() -> None:
    for step_on, even, odd in (("batch", 4, 5), ("epoch", 2, 2), ("anything else", 2, 2)):
        for count, times in ((16, even), (20, odd)):  # in two epochs of five batches, the third window is in both
            mine = Counting()
            toy_trainer(count, LRSchedCallback(mine, step_on), accumulation_steps=2, n_epochs=2).run()
            model = Toy()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            callback = LRSchedCallback(halving(optimizer), step_on)
            trainer = toy_trainer(count, callback, model=model, optimizers=optimizer, accumulation_steps=2, n_epochs=2)
            trainer.run()
            assert (mine.steps, optimizer.param_groups[0]["lr"]) == (times, 0.1 * 0.5**times)


@pytest.mark.parametrize("torchs", [True, False])
def test_a_checkpoint_holds_the_schedulers_state(tmp_path: Path, torchs: bool) -> None:
    def made() -> tuple[Trainer, Any]:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = halving(optimizer) if torchs else Counting()
        return toy_trainer(8, LRSchedCallback(scheduler), model=model, optimizers=optimizer, n_epochs=2), scheduler

    first, one = made()
    first.run()
    first.save_checkpoint(tmp_path)
    again, other = made()
    again.run(resume_from=tmp_path)
    assert other.state_dict() == one.state_dict()


def test_a_scheduler_of_another_training_is_an_error() -> None:
    with pytest.raises(AssertionError, match="must be an object with a method step"):
        LRSchedCallback(object())
    with pytest.raises(AssertionError, match=r"got <class .*LambdaLR"):
        LRSchedCallback(LambdaLR)
    foreign = halving(torch.optim.SGD(Toy().parameters(), 0.1))
    with pytest.raises(ValueError, match="belongs to an optimizer that this run does not have"):
        toy_trainer(8, LRSchedCallback(foreign)).run()
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a result"):
        toy_trainer(8, LRSchedCallback(ReduceLROnPlateau(optimizer)), model=model, optimizers=optimizer).run()


# -- gradients -------------------------------------------------------------------------------------------


class Steep(Toy):
    """Has the gradient 3 for each of its five weights, and 4 for its bias."""

    def train_step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]  # it needs no targets
        return {"loss": 3 * self.linear.weight.sum() + 4 * self.linear.bias.sum()}


def step_of(model: Steep, callback: Any) -> tuple[float, float]:
    """Return how far one update with a learning rate of 1 moves a weight, and the bias."""
    before = model.linear.weight[0, 0].item(), model.linear.bias.item()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    toy_trainer(4, callback, model=model, optimizers=optimizer, n_epochs=1).run()
    after = model.linear.weight[0, 0].item(), model.linear.bias.item()
    return round(before[0] - after[0], 4), round(before[1] - after[1], 4)


def test_gradients_are_clipped_together_by_norm_or_each_by_value() -> None:
    norm = (5 * 3.0**2 + 4.0**2) ** 0.5
    assert step_of(Steep(), TorchGradClipCallback()) == (round(3 / norm, 4), round(4 / norm, 4))
    assert step_of(Steep(), TorchGradClipCallback(0.5, "value")) == (0.5, 0.5)
    assert step_of(Steep(), TorchGradClipCallback(100)) == (3.0, 4.0)


def test_the_given_parameters_are_clipped_and_no_others() -> None:
    model = Steep()
    assert step_of(model, TorchGradClipCallback(1, "norm", parameters=[model.linear.bias])) == (3.0, 1.0)
    assert step_of(model, TorchGradClipCallback(1, "value", parameters=model.linear.weight)) == (1.0, 4.0)


def test_a_warm_up_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(TypeError, match="warmup must be a fraction of the training, or a number of batches; got 'x'"):
        TorchWarmupCallback("x")  # type: ignore[arg-type]


def test_wrong_arguments_of_clipping_are_errors() -> None:
    with pytest.raises(ValueError, match="clip_type must be 'norm' or 'value'; got 'max'"):
        TorchGradClipCallback(1, "max")  # type: ignore[arg-type]
    for wrong in (0, "norm", float("nan")):
        with pytest.raises(ValueError, match="clip_value must be a number greater than 0"):
            TorchGradClipCallback(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chose no parameter of the model"):
        toy_trainer(8, TorchGradClipCallback(parameters=[nn.Parameter(torch.zeros(1))])).run()
