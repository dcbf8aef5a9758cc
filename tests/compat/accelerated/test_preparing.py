"""What a trainer makes before a run, its callback handler, and a resume: methods that users of pytorch-accelerated override."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.callbacks import (
    CallbackHandler,
    CallbackMethodNotImplementedError,
    ProgressBarCallback,
    SaveTrainingStateCallback,
    TrainerCallback,
)
from cadenza.compat.accelerated.checks import check_padding
from cadenza.compat.accelerated.trainer import Trainer
from tests.compat.accelerated.parts import HERE, Noting, data, noting_trainer, train, trainer_of


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.get_model().parameters()])


# -- before a run ---------------------------------------------------------------------------------------------------------


def test_run_config_takes_the_arguments_of_the_original_in_their_order() -> None:
    class Mine(Trainer):
        def _create_run_config(self, per_device_batch_size: int, num_epochs: int, *others: Any, **named: Any) -> Any:
            seen.append((per_device_batch_size, num_epochs, others, named))
            return super()._create_run_config(per_device_batch_size, num_epochs, *others, **named)

    seen: list[Any] = []
    rest = {"gradient_accumulation_steps": 1, "max_num_train_steps": None, "gradient_clip_value": None}
    trainer = trainer_of(Mine)
    train(trainer, 3, data(4))
    assert seen == [(2, 3, (), rest)]
    config = trainer._create_run_config(4, 5, 2, None, 0.5)
    assert (config.num_epochs, config.gradient_accumulation_steps, config.gradient_clip_value) == (5, 2, 0.5)
    assert (config.train_total_batch_size, config.num_update_steps_per_epoch, config.max_num_train_steps) == (4, 2, 10)
    trainer.evaluate(data(1), per_device_batch_size=7, dataloader_kwargs=HERE)
    assert trainer.run_config is not None
    shown = trainer.run_config.to_dict()
    assert (shown["train_per_device_batch_size"], shown["num_update_steps_per_epoch"], shown["train_dl_kwargs"]) == (7, 0, None)


def test_the_last_batches_of_an_evaluation_are_checked_before_a_run() -> None:
    class Config:
        is_distributed, num_processes, eval_per_device_batch_size, eval_total_batch_size = True, 4, 2, 8

    trainer: Any = trainer_of()
    trainer.run_config = Config()
    trainer._check_eval_batch_size()
    trainer.eval_dataset = range(16)
    trainer._check_eval_batch_size()
    for samples, message in ((22, "some processes get none"), (23, "differ in size")):
        trainer.eval_dataset = range(samples)
        with pytest.warns(UserWarning, match=message):
            trainer._check_eval_batch_size()
    trainer.eval_dataset = range(7)
    with pytest.raises(ValueError, match="takes 8 samples at a time"):
        trainer._check_eval_batch_size()


def test_padded_evaluation_batches_are_an_error_on_several_processes() -> None:
    check_padding(True, 1)
    check_padding(False, 2)
    with pytest.raises(ValueError, match="expected False on several processes"):
        check_padding(True, 2)
    assert trainer_of()._pad_uneven_eval_batches is False


def test_model_and_optimizer_may_be_set_after_the_constructor() -> None:
    class Lazy(Trainer):
        def _prepare_model_optimizer_and_dataloaders(self) -> None:
            self.model = nn.Linear(1, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            super()._prepare_model_optimizer_and_dataloaders()

    nothing: Any = None
    trainer = Lazy(nothing, nn.MSELoss(), nothing, callbacks=())
    train(trainer, 1, data(1))
    assert trainer.run_history.get_metric_names() == {"train_loss_epoch"}


def test_an_evaluation_needs_no_optimizer_and_callbacks_may_change_its_results() -> None:
    class Shift(TrainerCallback):
        def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            batch_output["model_outputs"] = "shifted"

    no_optimizer: Any = None
    noting = Noting()
    trainer = Trainer(nn.Linear(1, 1), nn.MSELoss(), no_optimizer, callbacks=(Shift, noting))
    trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert trainer.run_history.get_metric_names() == {"evaluation_loss"}
    assert noting.of("on_eval_step_end")[0]["batch_output"]["model_outputs"] == "shifted"


def test_the_precision_comes_with_the_accelerator() -> None:
    class Half(Trainer):
        def _create_accelerator(self) -> Accelerator:
            return Accelerator(mixed_precision="bf16", cpu=True)

        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            output = super().calculate_train_batch_loss(batch)
            types.append(output["model_outputs"].dtype)
            with self._accelerator.autocast():
                types.append(self.model(batch[0]).dtype)
            return output

    types: list[torch.dtype] = []
    trainer = trainer_of(Half)
    train(trainer, 1, data(1))
    assert types == [torch.bfloat16] * 2
    assert trainer.run_config is not None
    assert trainer.run_config.mixed_precision == "bf16"
    with pytest.raises(ValueError, match="mixed_precision must be one of no, bf16, fp16; got 'fp8'"):
        Accelerator(mixed_precision="fp8")


def test_the_loaders_have_the_device() -> None:
    class Move(TrainerCallback):
        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            devices.extend((trainer._train_dataloader.device, trainer._eval_dataloader.device))

    devices: list[torch.device] = []
    trainer = trainer_of(callbacks=[Move])
    train(trainer, 1, data(1), data(1))
    assert devices == [trainer.device] * 2


def test_an_accelerator_of_another_package_is_an_error_that_says_where_to_import_it_from() -> None:
    class Foreign(Trainer):
        def _create_accelerator(self) -> Any:
            return object()

    with pytest.raises(TypeError, match=r"Import Accelerator from there: it takes mixed_precision="):
        trainer_of(Foreign)


def test_gradients_can_be_clipped_by_norm_with_the_accelerator() -> None:
    class Norm(Trainer):
        def _clip_gradients(self) -> None:
            assert self.run_config is not None
            assert self.run_config.gradient_clip_value is not None
            self._accelerator.clip_grad_norm_(self.model.parameters(), self.run_config.gradient_clip_value)

    trainer = trainer_of(Norm, lr=1.0)
    before = weights_of(trainer)
    train(trainer, 1, data(1), gradient_clip_value=0.25)
    assert (weights_of(trainer) - before).norm().item() == pytest.approx(0.25, rel=1e-4)


def test_modules_are_placed_and_tensors_padded_by_the_accelerator() -> None:
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(1, 1), torch.zeros(2)
    assert accelerator.prepare(first) is first
    assert accelerator.prepare(first, second) == (first, second)
    assert accelerator.pad_across_processes(second) is not None
    assert accelerator.gather_for_metrics([second])[0] is second
    assert accelerator.is_last_process
    assert accelerator.free_memory(first) == [None]
    assert accelerator.distributed_type == "NO"
    with pytest.raises(AttributeError, match="no attribute 'init_trackers': add a sink"):
        accelerator.init_trackers  # type: ignore[attr-defined]  # noqa: B018  # of accelerate
    assert not hasattr(accelerator, "nothing_like_it")


# -- the handler ------------------------------------------------------------------------------------------------------------


def test_the_list_of_callbacks_may_be_changed() -> None:
    trainer, noting = noting_trainer()
    late = Noting()
    assert trainer.callback_handler.callbacks == [noting]
    trainer.callback_handler.callbacks.append(late)  # the same class twice, which add_callback refuses
    train(trainer, 1, data(1))
    trainer.callback_handler.callbacks.remove(noting)
    count = len(noting.log)
    train(trainer, 1, data(1))
    assert late.log.count("on_train_epoch_start") == 2
    assert noting.log.count("on_train_epoch_start") == 1
    assert "on_training_run_start" not in noting.log[count:]


def test_a_disabled_handler_calls_no_event() -> None:
    trainer, noting = noting_trainer()
    trainer.callback_handler._enabled = False
    noting.log.clear()
    train(trainer, 1, data(1), data(1))
    assert [name for name in noting.log if not name.startswith("[")] == []


def test_a_handler_with_its_own_call_event_gets_every_event_of_a_run() -> None:
    class Own(CallbackHandler):
        def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
            for callback in self.callbacks:
                try:
                    getattr(callback, event)(*args, **kwargs)
                except CallbackMethodNotImplementedError:
                    missing.append(event)

    class Mine(Trainer):
        def _create_callback_handler(self) -> CallbackHandler:
            return Own(self._callbacks)

        def train_epoch_end(self) -> None:
            self.callback_handler.call_event("on_my_event", self)

    missing: list[str] = []
    mine, plain = Noting(), Noting()
    for trainer in (trainer_of(Mine, [mine]), trainer_of(callbacks=[plain])):
        train(trainer, 2, data(3), data(2))
        trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert mine.log == plain.log
    assert mine.of("on_train_step_end")[1]["step"] == 1
    assert missing == ["on_my_event"] * 2


def test_an_attribute_that_a_callback_lacks_is_a_named_error() -> None:
    callback: Any = Noting()
    with pytest.raises(CallbackMethodNotImplementedError, match="'Noting' object has no attribute 'verify'"):
        _ = callback.verify
    bar: Any = ProgressBarCallback()
    with pytest.raises(AttributeError, match=r"no attribute 'pbar'\. The native bar draws in a thread"):
        _ = bar.pbar
    assert not hasattr(callback, "verify")
    assert getattr(callback, "verify", None) is None


# -- a resumed run ------------------------------------------------------------------------------------------------------------


def test_an_overridden_load_training_state_is_called_when_a_training_resumes(tmp_path: Path) -> None:
    class Mine(Trainer):
        def load_training_state(self, input_dir: Any) -> dict[str, Any]:
            loaded: Mapping[str, Any] = super().load_training_state(input_dir)
            found.append(loaded)
            return {**loaded}

    found: list[Mapping[str, Any]] = []
    train(trainer_of(callbacks=[SaveTrainingStateCallback(tmp_path)]), 1, data(2))
    trainer = trainer_of(Mine)
    train(trainer, 2, data(2), resume_from=tmp_path / "final")
    assert found == [{"current_epoch": 2, "global_step": 2}]
    assert trainer.run_history.current_epoch == 3
