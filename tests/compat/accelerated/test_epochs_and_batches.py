"""The methods that are private in pytorch-accelerated and that its users override: an epoch and a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza.compat.accelerated.callbacks import (
    DataLoaderSlice,
    SaveTrainingStateCallback,
    StepBasedEvaluationCallback,
    StopTrainingError,
    TrainerCallback,
)
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.trainer import Trainer
from tests.compat.accelerated.parts import HERE, Noting, NotingTrainer, data, train, trainer_of


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.get_model().parameters()])


# -- the results of the hooks ---------------------------------------------------------------------------------------


class OnlyLoss(Trainer):
    """Returns the keys that the original reads, and no more."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss_func(self.model(batch[0]), batch[1]), "batch_size": len(batch[1])}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        squares = (self.model(batch[0]) - batch[1]) ** 2
        return {"loss": squares, "batch_size": len(batch[1])}  # a loss for each sample: its mean is recorded


def test_results_need_a_loss_and_a_batch_size_and_callbacks_get_what_the_hook_returned() -> None:
    noting = Noting()
    trainer, plain = trainer_of(OnlyLoss, [noting]), trainer_of()
    train(trainer, 2, data(3), data(2))
    train(plain, 2, data(3), data(2))
    assert {tuple(one["batch_output"]) for one in noting.of("on_train_step_end")} == {("loss", "batch_size")}
    assert {tuple(one["batch_output"]) for one in noting.of("on_eval_step_end")} == {("loss", "batch_size")}
    assert torch.equal(weights_of(trainer), weights_of(plain))
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert trainer.run_history.get_metric_values(name) == pytest.approx(plain.run_history.get_metric_values(name))


def test_an_evaluation_result_without_a_batch_size_is_an_error_that_names_the_hook() -> None:
    class Short(Trainer):
        def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {"loss": torch.zeros(())}

    with pytest.raises(KeyError, match="calculate_eval_batch_loss must return a dict with 'loss' and 'batch_size'"):
        trainer_of(Short).evaluate(data(1), dataloader_kwargs=HERE)


# -- an epoch -----------------------------------------------------------------------------------------------------------


class AroundEpoch(NotingTrainer):
    def _run_train_epoch(self, train_dl: Any) -> bool:
        self.log.append("before" if train_dl is self._train_dataloader else "another loader")
        reached = super()._run_train_epoch(train_dl)
        self.log.append(f"after, {reached}")
        return reached


def around_epoch() -> AroundEpoch:
    noting, linear = Noting(), nn.Linear(1, 1)
    NotingTrainer.log = noting.log
    trainer = AroundEpoch(linear, nn.MSELoss(), torch.optim.SGD(linear.parameters(), lr=0.1), callbacks=[noting])
    noting.log.clear()
    return trainer


def test_an_overridden_training_epoch_contains_its_hooks_and_events_but_not_the_evaluation() -> None:
    trainer = around_epoch()
    train(trainer, 2, data(2), data(1), max_num_train_steps=3)
    log = trainer.log
    start = log.index("before")
    assert log[start - 1 : start + 4] == [
        *["on_training_run_start", "before", "[train_epoch_start]", "on_train_epoch_start", "on_train_step_start"]
    ]
    end = log.index("after, False")
    assert log[end - 2 : end + 2] == ["[train_epoch_end]", "on_train_epoch_end", "after, False", "[eval_epoch_start]"]
    assert log.count("before") == 2
    assert log.count("after, True") == 1  # the limit of two updates is reached


def test_a_stop_after_the_steps_of_an_overridden_epoch_leaves_out_its_evaluation() -> None:
    class Stops(AroundEpoch):
        def _run_train_epoch(self, train_dl: Any) -> bool:
            super()._run_train_epoch(train_dl)
            raise StopTrainingError("enough")

    AroundEpoch.log = (noting := Noting()).log
    trainer = trainer_of(Stops, [noting])
    noting.log.clear()
    train(trainer, 3, data(1), data(1))
    assert noting.log[-4:] == ["after, False", "on_stop_training_error", "[training_run_end]", "on_training_run_end"]
    assert trainer.run_history.current_epoch == 1


def test_a_stop_inside_an_overridden_epoch_or_evaluation_leaves_the_override() -> None:
    class Around(Trainer):
        def _run_train_epoch(self, train_dl: Any) -> bool:
            log.append("epoch")
            reached = super()._run_train_epoch(train_dl)
            log.append("epoch is over")
            return reached

        def _run_eval_epoch(self, *arguments: Any, **keywords: Any) -> None:
            log.append("evaluation")
            super()._run_eval_epoch(*arguments, **keywords)
            log.append("evaluation is over")

    class Stop(TrainerCallback):
        def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
            if "evaluation" in log:
                raise StopTrainingError("enough")

        def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            if log.count("evaluation") == 2:
                raise StopTrainingError("enough")

    log: list[str] = []
    trainer = trainer_of(Around, [Stop])
    train(trainer, 3, data(2), data(1))
    assert log == ["epoch", "epoch is over", "evaluation", "evaluation is over", "epoch"]
    trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert log[5:] == ["evaluation"]
    assert trainer.native_run is not None
    assert [one.why for one in trainer.native_run.decisions if one.what == "stopped"] == ["enough"]


@pytest.mark.parametrize("name", ["_run_train_epoch", "_run_training", "_run_evaluation"])
def test_a_loop_that_does_not_call_the_loop_of_the_trainer_is_an_error_in_the_constructor(name: str) -> None:
    def own(self: Trainer, *arguments: Any) -> None:
        for _ in arguments:
            self.train_epoch_start()

    kind = type("Mine", (Trainer,), {name: own})
    with pytest.raises(TypeError, match=rf"Mine\.{name} must call super\(\)\.{name}\(\.\.\.\): .*Override "):
        trainer_of(kind)


def test_an_epoch_without_steps_is_an_error_that_says_what_to_override() -> None:
    trainer = trainer_of()
    trainer._run_train_epoch = lambda train_dl: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"did not do the steps of the epoch.*calculate_train_batch_loss"):
        train(trainer, 1, data(1))


def test_an_epoch_runs_once_and_with_the_loader_of_the_trainer() -> None:
    class Twice(Trainer):
        def _run_train_epoch(self, train_dl: Any) -> bool:
            super()._run_train_epoch(train_dl)
            return super()._run_train_epoch(train_dl)

    class Other(Trainer):
        def _run_train_epoch(self, train_dl: Any) -> bool:
            return super()._run_train_epoch(DataLoader(data(1)))

    with pytest.raises(RuntimeError, match="called twice"):
        train(trainer_of(Twice), 1, data(1))
    with pytest.raises(ValueError, match="_train_dataloader; got"):
        train(trainer_of(Other), 1, data(1))
    with pytest.raises(RuntimeError, match="needs a training in progress"):
        trainer_of()._run_train_epoch([])


@pytest.mark.parametrize("event", ["on_training_run_start", "on_train_epoch_start"])
def test_a_training_loader_that_a_callback_replaces_is_used(event: str) -> None:
    class Shorter(TrainerCallback):
        def replace(self, trainer: Any, **kwargs: Any) -> None:
            if trainer.run_history.current_epoch == 1:
                trainer._train_dataloader = DataLoaderSlice(trainer._train_dataloader, 2)

    setattr(Shorter, event, Shorter.replace)
    noting = Noting()
    trainer = trainer_of(callbacks=[Shorter, noting])
    train(trainer, 2, data(5))
    assert [end["step"] for end in noting.of("on_train_step_end")] == [0, 1, 0, 1]


# -- a batch ------------------------------------------------------------------------------------------------------------


class OwnPass(Trainer):
    """What the original does for a batch, written out."""

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        steps.append(step)
        output = self.calculate_train_batch_loss(batch)
        self._update_loss_tracker(output["loss"], output["batch_size"])
        self.callback_handler.call_event("on_train_step_end", self, batch_output=output, batch=batch, step=step)
        assert self.run_config is not None
        self.backward_step(output["loss"] / self.run_config.gradient_accumulation_steps)


class PassThrough(Trainer):
    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        steps.append(step)
        super()._perform_forward_and_backward_passes(batch, step)


steps: list[int] = []


@pytest.mark.parametrize("kind", [OwnPass, PassThrough])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overridden_pass_trains_like_the_trainer(kind: type[Trainer], accumulate: int) -> None:
    steps.clear()
    seen, plain = Noting(), Noting()
    mine, other = trainer_of(kind, [seen]), trainer_of(callbacks=[plain])
    for trainer in (mine, other):
        train(trainer, 2, data(5), data(2), gradient_accumulation_steps=accumulate)
    assert steps == [0, 1, 2, 3, 4] * 2
    assert torch.allclose(weights_of(mine), weights_of(other), atol=1e-7)
    assert seen.log == plain.log
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        assert mine.run_history.get_metric_values(name) == pytest.approx(other.run_history.get_metric_values(name))


def test_a_pass_may_call_backward_twice() -> None:
    class Twice(Trainer):
        def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
            super()._perform_forward_and_backward_passes(batch, step)
            super()._perform_forward_and_backward_passes(batch, step)

    twice, fast = trainer_of(Twice, lr=0.05), trainer_of(lr=0.1)
    for trainer in (twice, fast):
        train(trainer, 1, data(3))
    assert torch.allclose(weights_of(twice), weights_of(fast))


def test_a_stop_in_an_overridden_pass_stops_before_the_update() -> None:
    class Stops(Trainer):
        def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
            if step == 1:
                raise StopTrainingError("enough")
            super()._perform_forward_and_backward_passes(batch, step)

    noting = Noting()
    trainer, one = trainer_of(Stops, [noting]), trainer_of()
    train(trainer, 2, data(3))
    train(one, 1, data(3), max_num_train_steps=1)
    assert noting.log[-2:] == ["on_stop_training_error", "on_training_run_end"]
    assert torch.equal(weights_of(trainer), weights_of(one))


def test_an_overridden_pass_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole, first, second = (trainer_of(OwnPass, [SaveTrainingStateCallback(tmp_path / str(n))]) for n in range(3))
    train(whole, 2, data(3))
    train(first, 1, data(3))
    train(second, 2, data(3), resume_from=tmp_path / "1" / "final")
    assert torch.equal(weights_of(second), weights_of(whole))


def test_losses_of_items_are_summed_over_processes_under_accumulation() -> None:
    class Items(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {"loss": torch.ones(()), "batch_size": 1, "num_items_in_batch": 7}

        def backward_step(self, loss: Tensor) -> None:
            got.append(loss.item())

    got: list[float] = []
    trainer = trainer_of(Items)
    config: dict[str, Any] = dict.fromkeys(TrainerRunConfig.__dataclass_fields__)
    for processes, accumulate in ((4, 2), (4, 1), (1, 2)):
        more = {"num_processes": processes, "gradient_accumulation_steps": accumulate, "is_distributed": processes > 1}
        trainer.run_config = TrainerRunConfig(**{**config, **more})
        trainer._perform_forward_and_backward_passes(None, 0)
    assert got == [2.0, 1.0, 0.5]


def test_a_training_gives_such_a_loss_to_the_backward_step_and_reports_the_true_one() -> None:
    class Items(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * 0 + 1, "num_items_in_batch": 7}

        def _create_run_config(self, *arguments: Any, **named: Any) -> TrainerRunConfig:
            return replace(super()._create_run_config(*arguments, **named), is_distributed=True, num_processes=4)

        def backward_step(self, loss: Tensor) -> None:
            got.append(loss.item())
            super().backward_step(loss)

    got: list[float] = []
    trainer = trainer_of(Items)
    train(trainer, 1, data(4), gradient_accumulation_steps=2)
    assert got == [2.0] * 4
    assert trainer.run_history.get_latest_metric("train_loss_epoch") == 1.0


def test_the_loss_tracker_holds_the_last_epoch_or_evaluation() -> None:
    class Counts(TrainerCallback):
        def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            seen.append(trainer._loss_tracker.running_count)

        def on_eval_epoch_end(self, trainer: Any, is_intermediate: bool = False, **kwargs: Any) -> None:
            seen.append((trainer._loss_tracker.running_count, is_intermediate))

        on_training_run_epoch_end = on_train_epoch_end

    seen: list[Any] = []
    train(trainer_of(callbacks=[StepBasedEvaluationCallback(2), Counts]), 1, data(3), data(2))
    assert seen == [(4, True), 6, (4, False), 4]


def test_the_loss_tracker_is_fed_and_read_by_two_methods() -> None:
    class Mine(Trainer):
        def _update_loss_tracker(self, batch_loss: Any, batch_size: int) -> None:
            sizes.append(batch_size)
            super()._update_loss_tracker(batch_loss * 0 + 3.0, batch_size)

        def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
            super()._add_epoch_loss_to_run_history(f"my_{metric_name}")

    sizes: list[int] = []
    trainer = trainer_of(Mine)
    train(trainer, 1, data(2), data(1))
    assert sizes == [2, 2, 2]
    history = trainer.run_history
    assert {name: history.get_metric_values(name) for name in history.get_metric_names()} == {
        "my_train_loss_epoch": [3.0],
        "my_eval_loss_epoch": [3.0],
    }
