"""The methods that users of pytorch-accelerated override, besides the hooks: preparing, a run, an epoch, a batch, the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.callbacks import SaveTrainingStateCallback, StepBasedEvaluationCallback, StopTrainingError
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.compat.accelerated.utils import DataLoaderSlice
from cadenza.drivers.single import SingleDriver
from tests.compat.accelerated.parts import HERE, Hooks, Noting, data, metrics_of, run_of, train, trainer_of, weights_of


def test_parts_replaced_while_preparing_are_trained_with_the_returned_config_and_driver() -> None:
    class Other(Trainer):
        def _create_accelerator(self) -> Accelerator:
            return Accelerator(driver)

        def _create_run_config(self, *arguments: Any, **keywords: Any) -> TrainerRunConfig:
            asked = super()._create_run_config(*arguments, **keywords)
            return replace(asked, num_epochs=2, gradient_accumulation_steps=3, max_num_train_steps=3)

        def _prepare_model_optimizer_and_dataloaders(self) -> None:
            super()._prepare_model_optimizer_and_dataloaders()
            self.model = other
            self.optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            self._train_dataloader = [data(6)[:]] * 6

    driver, other = SingleDriver("cpu"), nn.Linear(1, 1)
    before, noting = other.weight.item(), Noting()
    trainer = train(trainer_of(Other, [noting]), 9, data(5))
    assert trainer.model is other
    assert other.weight.item() != before
    assert len(noting.of("on_train_step_end")) == 9
    assert run_of(trainer).driver is driver
    assert (run_of(trainer).progress.step, run_of(trainer).progress.batch) == (3, 9)


@pytest.mark.parametrize("event", ["on_training_run_start", "on_train_epoch_start"])
def test_a_training_loader_that_a_callback_replaces_is_used(event: str) -> None:
    def shorten(trainer: Any, **kwargs: Any) -> None:
        if trainer.run_history.current_epoch == 1:
            trainer._train_dataloader = DataLoaderSlice(trainer._train_dataloader, 2)

    noting = Noting()
    train(trainer_of(callbacks=[Hooks(**{event: shorten}), noting]), 2, data(5))
    assert [end["step"] for end in noting.of("on_train_step_end")] == [0, 1, 0, 1]


# -- an epoch -----------------------------------------------------------------------------------------------------------


class StopsEpoch(Trainer):
    def _run_train_epoch(self, train_dl: Any) -> bool:
        super()._run_train_epoch(train_dl)
        raise StopTrainingError("enough")


class StopsEvaluation(Trainer):
    def _run_eval_epoch(self, *arguments: Any, **keywords: Any) -> None:
        raise StopTrainingError("enough")


class StopsPass(Trainer):
    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        if step == 1:
            raise StopTrainingError("enough")
        super()._perform_forward_and_backward_passes(batch, step)


@pytest.mark.parametrize(
    ("kind", "last", "updates"),
    [(StopsEpoch, "on_train_epoch_end", 3), (StopsEvaluation, "on_train_epoch_end", 3), (StopsPass, "on_train_step_start", 1)],
)
def test_a_stop_in_an_overridden_part_is_a_stop(kind: type[Trainer], last: str, updates: int) -> None:
    noting = Noting()
    trainer = train(trainer_of(kind, [noting]), 3, data(3), data(1))
    assert noting.log[-3:] == [last, "on_stop_training_error", "on_training_run_end"]
    assert trainer.run_history.current_epoch == 1
    assert torch.equal(weights_of(trainer), weights_of(train(trainer_of(), 1, data(3), max_num_train_steps=updates)))
    noting.log.clear()
    trainer.evaluate(data(1), dataloader_kwargs=HERE)
    stopped = ["on_evaluation_run_start", "on_stop_training_error", "on_evaluation_run_end"]
    assert (noting.log == stopped) == (kind is StopsEvaluation)


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

    def stop(trainer: Any, **kwargs: Any) -> None:
        if log[2:] == ["evaluation", "evaluation is over", "epoch"] or log[5:]:
            raise StopTrainingError("enough")

    log: list[str] = []
    trainer = train(trainer_of(Around, [Hooks(on_train_step_end=stop, on_eval_step_end=stop)]), 3, data(2), data(1))
    assert log == ["epoch", "epoch is over", "evaluation", "evaluation is over", "epoch"]
    trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert log[5:] == ["evaluation"]
    assert [one.why for one in run_of(trainer).decisions if one.what == "stopped"] == ["enough"]


@pytest.mark.parametrize("name", ["_run_train_epoch", "_run_training", "_run_evaluation"])
def test_a_loop_that_does_not_call_the_loop_of_the_trainer_is_an_error_in_the_constructor(name: str) -> None:
    def own(self: Trainer, *arguments: Any) -> None:
        for _ in arguments:
            self.train_epoch_start()

    with pytest.raises(TypeError, match=rf"Mine\.{name} must call super\(\)\.{name}\(\.\.\.\): .*Override "):
        trainer_of(type("Mine", (Trainer,), {name: own}))


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
    idle = trainer_of()
    idle._run_train_epoch = lambda train_dl: False  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"did not do the steps of the epoch.*calculate_train_batch_loss"):
        train(idle, 1, data(1))


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
    mine, other = (
        train(trainer, 2, data(5), data(2), gradient_accumulation_steps=accumulate)
        for trainer in (trainer_of(kind, [seen]), trainer_of(callbacks=[plain]))
    )
    assert steps == [0, 1, 2, 3, 4] * 2
    assert torch.allclose(weights_of(mine), weights_of(other), atol=1e-7)
    assert seen.log == plain.log
    assert metrics_of(mine) == {name: pytest.approx(values) for name, values in metrics_of(other).items()}


def test_a_pass_may_call_backward_twice_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    class Twice(Trainer):
        def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
            super()._perform_forward_and_backward_passes(batch, step)
            super()._perform_forward_and_backward_passes(batch, step)

    twice, fast = train(trainer_of(Twice, lr=0.05), 1, data(3)), train(trainer_of(lr=0.1), 1, data(3))
    assert torch.allclose(weights_of(twice), weights_of(fast))
    whole, first, second = (trainer_of(OwnPass, [SaveTrainingStateCallback(tmp_path / str(n))]) for n in range(3))
    train(whole, 2, data(3))
    train(first, 1, data(3))
    train(second, 2, data(3), resume_from=tmp_path / "1" / "final")
    assert torch.equal(weights_of(second), weights_of(whole))


# -- the results of the hooks, and the loss -------------------------------------------------------------------------------


class OnlyLoss(Trainer):
    """Returns the keys that the original reads, and no more."""

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.loss_func(self.model(batch[0]), batch[1]), "batch_size": len(batch[1])}

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        squares = (self.model(batch[0]) - batch[1]) ** 2
        return {"loss": squares, "batch_size": len(batch[1])}  # a loss for each sample: its mean is recorded


def test_results_need_a_loss_and_a_batch_size_and_callbacks_get_what_the_hook_returned() -> None:
    noting = Noting()
    trainer = train(trainer_of(OnlyLoss, [noting]), 2, data(3), data(2))
    plain = train(trainer_of(), 2, data(3), data(2))
    assert {tuple(one["batch_output"]) for one in noting.of("on_train_step_end")} == {("loss", "batch_size")}
    assert {tuple(one["batch_output"]) for one in noting.of("on_eval_step_end")} == {("loss", "batch_size")}
    assert torch.equal(weights_of(trainer), weights_of(plain))
    assert metrics_of(trainer) == {name: pytest.approx(values) for name, values in metrics_of(plain).items()}


@pytest.mark.parametrize(
    ("hook", "result", "error"),
    [
        ("calculate_train_batch_loss", {"loss": torch.ones(())}, KeyError),
        ("calculate_train_batch_loss", None, TypeError),
        ("calculate_train_batch_loss", torch.ones(()), TypeError),
        ("calculate_eval_batch_loss", {"loss": torch.zeros(())}, KeyError),
    ],
)
def test_a_wrong_result_of_a_hook_is_an_error_with_the_missing_entries(hook: str, result: Any, error: type[Exception]) -> None:
    def short(self: Trainer, batch: Any) -> Any:
        return result

    short.__name__ = hook
    with pytest.raises(error, match=f"{hook} must return a dict with 'loss' and 'batch_size'"):
        train(trainer_of(type("Short", (Trainer,), {hook: short})), 1, data(1), data(1))


class Items(Trainer):
    """Divides the loss by the number of items, as models of transformers do, on the first of four processes."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.processes = 4
        self.got: list[float] = []

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        output = super().calculate_train_batch_loss(batch)
        return {**output, "loss": output["loss"] * 0 + 1, "num_items_in_batch": 7}

    def _create_run_config(self, *arguments: Any, **named: Any) -> TrainerRunConfig:
        config = super()._create_run_config(*arguments, **named)
        return replace(config, is_distributed=self.processes > 1, num_processes=self.processes)

    def backward_step(self, loss: Tensor) -> None:
        self.got.append(loss.item())
        super().backward_step(loss)


@pytest.mark.parametrize(("processes", "accumulate", "loss"), [(4, 2, 2.0), (4, 1, 1.0), (1, 2, 0.5)])
def test_losses_of_items_sum_over_processes_and_report_the_true_one(processes: int, accumulate: int, loss: float) -> None:
    trainer: Any = trainer_of(Items)
    trainer.processes = processes
    train(trainer, 1, data(4), gradient_accumulation_steps=accumulate)
    assert trainer.got == [loss] * 4
    assert trainer.run_history.get_latest_metric("train_loss_epoch") == 1.0


def test_the_loss_tracker_holds_the_last_epoch_or_evaluation_and_is_fed_and_read_by_two_methods() -> None:
    class Mine(Trainer):
        def _update_loss_tracker(self, batch_loss: Any, batch_size: int) -> None:
            sizes.append(batch_size)
            super()._update_loss_tracker(batch_loss * 0 + 3.0, batch_size)

        def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
            super()._add_epoch_loss_to_run_history(f"my_{metric_name}")

    def count(trainer: Any, is_intermediate: bool | None = None) -> None:
        seen.append((trainer._loss_tracker.running_count, is_intermediate))

    sizes: list[int] = []
    seen: list[Any] = []
    counts = Hooks(on_train_epoch_end=count, on_eval_epoch_end=count, on_training_run_epoch_end=count)
    train(trainer_of(callbacks=[StepBasedEvaluationCallback(2), counts]), 1, data(3), data(2))
    assert seen == [(4, True), (6, None), (4, False), (4, None)]
    trainer = train(trainer_of(Mine), 1, data(2), data(1))
    assert sizes == [2, 2, 2]
    assert metrics_of(trainer) == {"my_train_loss_epoch": [3.0], "my_eval_loss_epoch": [3.0]}
