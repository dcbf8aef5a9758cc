"""The adapter's trainer: its arguments and parts, what it makes before a run, its handler, its history, seeds and precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from cadenza import Callback, Run
from cadenza.callbacks import EarlyStopping, Evaluate
from cadenza.compat.accelerated import callbacks
from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.callbacks import CallbackMethodNotImplementedError, LogMetricsCallback, TrainerCallback
from cadenza.compat.accelerated.checks import check_padding
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.tracking import InMemoryRunHistory, LossTracker
from cadenza.compat.accelerated.trainer import Trainer, TrainerWithTimmScheduler
from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import hooks_of
from cadenza.testing import tiny_loader, tiny_run
from tests.compat.accelerated import parts
from tests.compat.accelerated.parts import HERE, Hooks, Noting, config_of, data, run_of, train, trainer_of, weights_of


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_epochs": None}, ValueError, "num_epochs must be a whole number of at least 1; got None"),
        ({"num_epochs": 0}, ValueError, "num_epochs must be a whole number of at least 1; got 0"),
        ({"num_epochs": True}, ValueError, "num_epochs must be a whole number of at least 1; got True"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps must be a whole number of at least 1"),
        ({"max_num_train_steps": 0}, ValueError, "max_num_train_steps must be None or a whole number of at least 1"),
        ({"gradient_clip_value": -1.0}, ValueError, "gradient_clip_value must be a number greater than 0"),
        ({"gradient_clip_value": "1"}, ValueError, "gradient_clip_value must be a number greater than 0, or None; got '1'"),
        ({"create_scheduler_fn": 3}, TypeError, "create_scheduler_fn must be a function"),
        ({"create_scheduler_fn": lambda optimizer: None}, TypeError, "create_scheduler_fn must return a scheduler"),
        ({"train_dataset": DataLoader(data(1))}, TypeError, "expected a data set; got a DataLoader"),
        ({"create_scheduler_fn": lambda optimizer: 3}, TypeError, "Trainer calls step of the scheduler .*; got a int"),
        ({"train_dataset": None}, TypeError, "expected a data set, with __getitem__ .*; got None"),
        ({"train_dataloader_kwargs": "x"}, TypeError, "arguments of a loader must be a mapping .*; got 'x'"),
        ({"train_dataset": [{"x": 1.0}]}, TypeError, r"batch must be \(inputs, targets\); got a mapping with \['x'\]"),
    ],
)
def test_a_wrong_argument_of_a_training_is_an_error_that_names_it(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trainer_of().train(**{"train_dataset": data(1), "num_epochs": 1, "train_dataloader_kwargs": HERE, **arguments})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"model": "linear"}, "model must be an nn.Module"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "Call it first"),
        ({"optimizer": None}, "Without one, only evaluate works"),
        ({"callbacks": LogMetricsCallback}, r"Write callbacks=\(...,\)"),
        ({"run_history": {}}, r"instance of a subclass of RunHistory; got \{\}, which lacks _increment_epoch, _set_epoch, "),
        ({"run_history": InMemoryRunHistory}, r"got <class '.*InMemoryRunHistory'>\. Call it first"),
    ],
)
def test_a_wrong_part_of_a_trainer_is_an_error_before_anything_runs(part: Any, message: str) -> None:
    linear = nn.Linear(1, 1)
    parts: dict[str, Any] = {"model": linear, "optimizer": torch.optim.SGD(linear.parameters(), lr=0.1), "callbacks": ()}
    with pytest.raises(TypeError, match=message):
        train(Trainer(loss_func=nn.MSELoss(), **{**parts, **part}), 1, data(1))


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("create_eval_dataloader", "loader"),
        ("_create_run_config", "TrainerRunConfig"),
        ("_create_callback_handler", "CallbackHandler"),
    ],
)
def test_an_override_without_a_return_statement_is_an_error(method: str, wanted: str) -> None:
    kind = type("Forgetful", (Trainer,), {method: lambda *arguments, **keywords: None})
    with pytest.raises(TypeError, match=f"must return a {wanted}; got None"):
        train(trainer_of(kind), 1, data(1), data(1))


def test_a_scheduler_needs_the_method_that_its_trainer_calls() -> None:
    class Own(Trainer):
        def scheduler_step(self) -> None:
            self.scheduler.advance()

    class Scheduler:
        steps = 0

        def advance(self) -> None:
            self.steps += 1

    with pytest.raises(TypeError, match="TrainerWithTimmScheduler calls step_update of the scheduler"):
        train(trainer_of(TrainerWithTimmScheduler), 1, data(1), create_scheduler_fn=partial(ExponentialLR, gamma=0.9))
    assert train(trainer_of(Own), 1, data(3), create_scheduler_fn=lambda optimizer: Scheduler()).scheduler.steps == 3


class Mistyped(TrainerCallback):
    def on_train_epoch_ends(self, trainer: Any, **kwargs: Any) -> None:
        """Never called."""

    def on_verify(self, trainer: Any) -> None:
        """A custom event with a name unlike the others."""


@pytest.mark.parametrize("native", [False, True])
def test_a_method_named_almost_like_an_event_is_a_warning(native: bool, caplog: pytest.LogCaptureFixture) -> None:
    if native:
        tiny_run(callbacks=[Mistyped()])
    else:
        train(trainer_of(callbacks=[Mistyped]), 1, data(1))
    (message,) = [record.getMessage() for record in caplog.records if "is not an event" in record.getMessage()]
    assert "Mistyped.on_train_epoch_ends" in message
    assert "Did you mean 'on_train_epoch_end'" in message


def test_run_config_takes_the_originals_arguments_and_numpy_integers_and_names_the_nearest_setting() -> None:
    class Mine(Trainer):
        def _create_run_config(self, per_device_batch_size: int, num_epochs: int, *others: Any, **named: Any) -> Any:
            seen.append((per_device_batch_size, num_epochs, others, named))
            return super()._create_run_config(per_device_batch_size, num_epochs, *others, **named)

    seen: list[Any] = []
    rest = {"gradient_accumulation_steps": 1, "max_num_train_steps": None, "gradient_clip_value": None}
    trainer = train(trainer_of(Mine), 3, data(4))
    assert seen == [(2, 3, (), rest)]
    config = trainer._create_run_config(4, 5, 2, None, 0.5)
    assert (config.num_epochs, config.gradient_accumulation_steps, config.gradient_clip_value) == (5, 2, 0.5)
    assert (config.train_total_batch_size, config.num_update_steps_per_epoch, config.max_num_train_steps) == (4, 2, 10)
    trainer.evaluate(data(1), per_device_batch_size=7, dataloader_kwargs=HERE)
    shown = config_of(trainer).to_dict()
    assert (shown["train_per_device_batch_size"], shown["num_update_steps_per_epoch"], shown["train_dl_kwargs"]) == (7, 0, None)
    two: Any = np.int64(2)
    config = config_of(train(trainer_of(), two, data(4), gradient_accumulation_steps=two, max_num_train_steps=np.int64(9)))
    lengths = (config.num_epochs, config.gradient_accumulation_steps, config.max_num_train_steps)
    assert [type(length) for length in lengths] == [int] * 3
    with pytest.raises(KeyError, match="Did you mean 'num_epochs'"):
        config["num_epoch"]


def test_the_last_batches_of_an_evaluation_on_several_processes_are_checked_before_a_run() -> None:
    class Config:
        is_distributed, num_processes, eval_per_device_batch_size, eval_total_batch_size = True, 4, 2, 8

    trainer: Any = trainer_of()
    trainer.run_config = Config()
    for dataset in (None, range(16)):
        trainer.eval_dataset = dataset
        trainer._check_eval_batch_size()
    for samples, message in ((22, "so some processes get none"), (23, "differ in size")):
        trainer.eval_dataset = range(samples)
        with pytest.warns(UserWarning, match=message):
            trainer._check_eval_batch_size()
    trainer.eval_dataset = range(7)
    with pytest.raises(ValueError, match="takes 8 samples at a time over all processes, but the data set has 7"):
        trainer._check_eval_batch_size()
    check_padding(True, 1)
    check_padding(False, 2)
    with pytest.raises(ValueError, match="expected False on several processes"):
        check_padding(True, 2)
    assert trainer._pad_uneven_eval_batches is False


def test_model_and_optimizer_may_be_set_after_the_constructor_and_an_evaluation_needs_no_optimizer() -> None:
    class Lazy(Trainer):
        def _prepare_model_optimizer_and_dataloaders(self) -> None:
            self.model = nn.Linear(1, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            super()._prepare_model_optimizer_and_dataloaders()

    nothing: Any = None
    trainer = train(Lazy(nothing, nn.MSELoss(), nothing, callbacks=()), 1, data(1))
    assert trainer.run_history.get_metric_names() == {"train_loss_epoch"}
    trainer = Trainer(nn.Linear(1, 1), nn.MSELoss(), nothing, callbacks=())
    trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert trainer.run_history.get_metric_names() == {"evaluation_loss"}


def test_callbacks_get_more_entries_of_a_batch_and_may_change_them_and_loaders_have_a_device() -> None:
    class More(Trainer):
        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            return {**super().calculate_train_batch_loss(batch), "extra": 42}

    shift = Hooks(on_eval_step_end=lambda trainer, batch_output, **_: batch_output.update(model_outputs="shifted"))
    noting = Noting()
    train(trainer_of(More, [shift, noting]), 1, data(1), data(1))
    assert noting.of("on_train_step_end")[0]["batch_output"]["extra"] == 42
    assert noting.of("on_eval_step_end")[0]["batch_output"]["model_outputs"] == "shifted"

    def look(trainer: Any, **kwargs: Any) -> None:
        devices.extend((trainer._train_dataloader.device, trainer._eval_dataloader.device))

    devices: list[torch.device] = []
    trainer = train(trainer_of(callbacks=[Hooks(on_training_run_start=look)]), 1, data(1), data(1))
    assert devices == [trainer.device] * 2


def test_the_accelerator_places_modules_pads_tensors_and_says_what_it_lacks() -> None:
    class Foreign(Trainer):
        def _create_accelerator(self) -> Any:
            return object()

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
    with pytest.raises(ValueError, match="mixed_precision must be one of no, bf16, fp16; got 'fp8'"):
        Accelerator(mixed_precision="fp8")
    with pytest.raises(TypeError, match=r"Import Accelerator from there: it takes mixed_precision="):
        trainer_of(Foreign)


def test_a_trainer_can_be_used_again_after_an_error_and_after_a_stop() -> None:
    def once(error: Exception) -> TrainerCallback:
        errors = [error]

        def fail(trainer: Any, **kwargs: Any) -> None:
            if errors:
                raise errors.pop()

        return Hooks(on_train_epoch_start=fail)

    noting = Noting()
    trainer = trainer_of(callbacks=[once(RuntimeError("once")), noting])
    with pytest.raises(RuntimeError, match="once"):
        train(trainer, 1, data(1))
    train(trainer, 1, data(1))
    assert noting.log[-1] == "on_training_run_end"
    stopped = train(trainer_of(callbacks=[once(callbacks.StopTrainingError("once"))]), 2, data(1))
    assert train(stopped, 2, data(1)).run_history.current_epoch == 3


def test_native_callbacks_evaluations_monitors_and_sinks_work_in_the_adapter_s_trainer() -> None:
    noting = Noting()
    native = [Evaluate(tiny_loader(2), name="other"), EarlyStopping("eval/loss", mode="min", threshold=100.0)]
    trainer = train(trainer_of(callbacks=[*native, noting]), 5, data(3), data(2))
    outcome = run_of(trainer).outcome
    assert outcome is not None
    assert outcome.kind == "stopped"
    assert len(trainer.run_history.get_metric_values("other_loss_epoch")) == 1
    assert noting.log[-2:] == ["on_stop_training_error", "on_training_run_end"]
    trainer = train(trainer_of(), 2, data(3), data(2))
    recorded = run_of(trainer).history["eval_loss_epoch"]
    assert recorded == [*zip((3, 6), trainer.run_history.get_metric_values("eval_loss_epoch"), strict=True)]

    class Steps(Callback):
        def on_step_end(self, run: Run) -> None:
            steps.append(run.progress.step)

    steps: list[int] = []
    trainer = train(trainer_of(callbacks=[Steps(), Noting(), Steps()]), 1, data(4), gradient_accumulation_steps=2)
    assert steps == [1, 1, 2, 2]
    listed = ["Trainer's hooks", "Steps", "Noting", "Steps#2", "Trainer's evaluation"]
    assert list(hooks_of(run_of(trainer)).callbacks) == listed


def test_the_order_of_the_data_depends_on_the_seed_of_the_user_and_training_does_not_change_the_seed() -> None:
    def order(seed: int) -> tuple[list[float], float]:
        seen: list[float] = []
        see = Hooks(on_train_step_end=lambda trainer, batch, **_: seen.extend(batch[0].flatten().tolist()))
        torch.manual_seed(seed)
        train(trainer_of(callbacks=[see]), 2, data(8), train_dataloader_kwargs=HERE)
        return seen, torch.rand(()).item()

    (first, drawn), (again, _), (other, also_drawn) = order(1), order(1), order(2)
    assert first == again != other
    assert first[:16] != first[16:]
    assert drawn != also_drawn


@pytest.mark.parametrize("by", ["launcher", "accelerator"])
def test_the_launcher_or_the_accelerator_sets_the_precision(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(Trainer):
        def _create_accelerator(self) -> Accelerator:
            return super()._create_accelerator() if by == "launcher" else Accelerator(mixed_precision="bf16", cpu=True)

        def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
            with self._accelerator.autocast():
                kinds.append(self.model(batch[0]).dtype)
            return super().calculate_train_batch_loss(batch)

    def look(trainer: Trainer, batch_output: Any, **kwargs: Any) -> None:
        kinds.append(batch_output["model_outputs"].dtype)

    kinds: list[torch.dtype] = []
    if by == "launcher":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    trainer = train(trainer_of(Half, [Hooks(on_train_step_end=look, on_eval_step_end=look)]), 1, data(1), data(1))
    assert kinds == [torch.bfloat16] * 3
    assert config_of(trainer).mixed_precision == "bf16"


def test_a_scheduler_is_not_stepped_if_the_scaler_of_fp16_skips_the_update_also_of_an_own_optimizer_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights: list[float] = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    see = Hooks(on_train_step_start=lambda trainer, **_: weights.append(weights_of(trainer)[0].item()))
    trainer, noting = parts.noting_trainer(see)
    train(trainer, 1, data(8), create_scheduler_fn=partial(ExponentialLR, gamma=0.9))
    changed = sum(one != other for one, other in pairwise([*weights, weights_of(trainer)[0].item()]))
    assert 0 < changed < noting.log.count("[optimizer_step]") == 8  # the first scale is too large for float16
    assert noting.log.count("[scheduler_step]") == changed

    class Overflows(Trainer):
        updates = 0

        def calculate_train_batch_loss(self, batch: Any) -> Any:
            output = super().calculate_train_batch_loss(batch)
            return {**output, "loss": output["loss"] * (float("inf") if self.run_history.current_epoch == 2 else 1)}

    class OwnStep(Overflows):
        def optimizer_step(self) -> None:
            self.optimizer.step()

    class EverySecond(Overflows):
        def optimizer_step(self) -> None:
            self.updates += 1
            if self.updates % 2:
                self.optimizer.step()

    def trained(kind: type[Trainer]) -> float:
        trainer = train(trainer_of(kind), 3, data(8), create_scheduler_fn=partial(ExponentialLR, gamma=0.9))
        return weights_of(trainer)[0].item()

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert trained(OwnStep) == trained(Overflows)
    every_second = trained(EverySecond)
    assert math.isfinite(every_second)
    assert every_second != trained(Overflows)


# -- the handler ------------------------------------------------------------------------------------------------------------


def test_a12_a_second_callback_of_the_same_class_is_an_error_but_a_subclass_is_not() -> None:
    class Other(LogMetricsCallback):
        pass

    handler = CallbackHandler([LogMetricsCallback, callbacks.PrintProgressCallback(), Other])
    assert handler.callback_list == ["LogMetricsCallback", "PrintProgressCallback", "Other"]
    said = "LogMetricsCallback is already in the list; got a second one beside LogMetricsCallback, Print"
    with pytest.raises(ValueError, match=said):
        handler.add_callback(LogMetricsCallback())
    handler.clear_callbacks()
    handler.add_callbacks([LogMetricsCallback])
    assert len(handler) == 1


def test_a12_events_are_called_in_the_order_of_the_list_which_may_be_changed_also_during_a_run() -> None:
    noting, again = Noting(), parts.Again()
    again.log = noting.log
    handler = CallbackHandler([noting, again])
    assert handler.call_event("on_train_epoch_start", trainer_of()) is None  # type: ignore[func-returns-value]  # the point
    assert handler.call_event("on_nothing_at_all", trainer_of(), more=1) is None  # type: ignore[func-returns-value]  # likewise
    assert noting.log == ["on_train_epoch_start"] * 2
    assert list(handler) == [noting, again]
    trainer, noting = parts.noting_trainer()
    late = Noting()
    assert trainer.callback_handler.callbacks == [noting]
    trainer.callback_handler.callbacks.append(late)  # the same class twice, which add_callback refuses
    train(trainer, 1, data(1))
    trainer.callback_handler.callbacks.remove(noting)
    count = len(noting.log)
    train(trainer, 1, data(1))
    assert (late.log.count("on_train_epoch_start"), noting.log.count("on_train_epoch_start")) == (2, 1)
    assert "on_training_run_start" not in noting.log[count:]
    late.log.clear()
    trainer.callback_handler._enabled = False
    train(trainer, 1, data(1), data(1))
    assert late.log == []
    added, removed = Noting(), Noting()
    adding = Hooks(on_train_epoch_end=lambda trainer, **_: trainer.callback_handler.add_callback(added))
    train(trainer_of(callbacks=[adding]), 1, data(2), data(1))
    assert added.log == [
        *["on_train_epoch_end", "on_eval_epoch_start", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end"],
        *["on_training_run_epoch_end", "on_training_run_end"],
    ]
    clearing = Hooks(on_train_epoch_start=lambda trainer, **_: trainer.callback_handler.clear_callbacks())
    train(trainer_of(callbacks=[clearing, removed]), 1, data(2))
    assert removed.log == ["on_init_end", "on_training_run_start"]


@pytest.mark.parametrize("thing", [42, object(), int])
def test_a12_an_object_that_is_no_callback_is_an_error(thing: Any) -> None:
    with pytest.raises(CallbackError, match="expected an instance or a subclass of TrainerCallback"):
        trainer_of(callbacks=[thing])


class Verify(TrainerCallback):
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def verify_train_batch(self, trainer: Trainer, xb: Any, yb: Any) -> None:
        assert len(xb) == config_of(trainer)["train_per_device_batch_size"]
        self.shapes.append(tuple(xb.shape))


class Verifying(Trainer):
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        xb, yb = batch
        self.callback_handler.call_event("verify_train_batch", trainer=self, xb=xb, yb=yb)
        return super().calculate_train_batch_loss(batch)


def test_a13_a_custom_event_is_called_on_the_callbacks_that_define_it_and_its_errors_are_raised() -> None:
    verify, noting = Verify(), Noting()
    train(trainer_of(Verifying, [noting, verify]), 1, data(2))
    assert verify.shapes == [(2, 1), (2, 1)]

    class Broken(TrainerCallback):
        def verify_train_batch(self, trainer: Trainer, xb: Any, yb: Any) -> None:
            self.nothing  # type: ignore[attr-defined]  # noqa: B018  # the mistake that is meant

    with pytest.raises(AttributeError, match="nothing"):
        train(trainer_of(Verifying, [Broken]), 1, data(1))


def test_a_handler_with_its_own_call_event_gets_every_event_of_a_run_and_a_history_can_be_passed() -> None:
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
    mine, plain, history = Noting(), Noting(), InMemoryRunHistory()
    trainers = (trainer_of(partial(Mine, run_history=history), [mine]), trainer_of(callbacks=[plain]))  # type: ignore[arg-type]
    for trainer in trainers:
        train(trainer, 2, data(3), data(2))
        assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 2
        trainer.evaluate(data(1), dataloader_kwargs=HERE)
    assert trainers[0].run_history is history
    assert mine.log == plain.log
    assert mine.of("on_train_step_end")[1]["step"] == 1
    assert missing == ["on_my_event"] * 2


def test_an_attribute_that_a_callback_lacks_is_a_named_error() -> None:
    callback: Any = Noting()
    with pytest.raises(CallbackMethodNotImplementedError, match="'Noting' object has no attribute 'verify'"):
        _ = callback.verify
    bar: Any = callbacks.ProgressBarCallback()
    with pytest.raises(AttributeError, match=r"no attribute 'pbar'\. The native bar draws in a thread"):
        _ = bar.pbar
    assert not hasattr(callback, "verify")
    assert getattr(callback, "verify", None) is None


def test_a20_the_run_history_keeps_values_by_name_with_a_prefix_in_writes() -> None:
    history = InMemoryRunHistory()
    history.update_metric("accuracy", 0.5)
    values = history.get_metric_values("accuracy")  # the list that grows
    history.update_metric("accuracy", 0.7)
    history.update_metric("loss", 1.0)
    assert history.get_metric_names() == {"accuracy", "loss"}
    assert history.get_metric_values("accuracy") == values == [0.5, 0.7]
    assert history.get_latest_metric("accuracy") == 0.7
    with pytest.raises(ValueError, match="Did you mean 'accuracy'"):
        history.get_latest_metric("acuracy")
    assert history.get_metric_values("acuracy") == history._metrics["nothing"] == []
    assert history.get_metric_names() == {"accuracy", "loss"}  # a look-up does not create a metric
    history._metrics["f1"].append(0.5)
    assert history.get_latest_metric("f1") == 0.5
    history.delete_metric("loss")
    with pytest.raises(KeyError):
        history.delete_metric("loss")
    history = InMemoryRunHistory()
    history.set_metric_name_prefix("ema_")
    history.update_metric("loss", 1.0)
    assert history.get_metric_names() == {"ema_loss"}
    assert history.get_latest_metric("ema_loss") == 1.0
    history._increment_epoch()
    history.reset()
    assert (history.get_metric_names(), history.current_epoch, history.metric_name_prefix) == (set(), 1, "ema_")


def test_the_loss_of_an_epoch_is_the_mean_over_samples() -> None:
    tracker = LossTracker()
    assert tracker.average == 0
    for losses in ([1.0, 2.0], [6.0]):
        tracker.update(torch.tensor(losses).mean(), len(losses))
    assert (tracker.average, tracker.total_loss, tracker.running_count, tracker.loss_value) == (3.0, 9.0, 3, 6.0)


def test_metrics_named_train_are_logged_after_steps_and_others_after_evaluations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Keep(LogMetricsCallback):
        def log_metrics(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
            logged.append(set(metrics))

    def update(trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("pretrained", 1)
        trainer.run_history.update_metric("other", 2)

    logged: list[set[str]] = []
    train(trainer_of(callbacks=[Hooks(on_train_epoch_end=update), Keep, LogMetricsCallback]), 1, data(1), data(1))
    assert logged == [{"train_loss_epoch", "pretrained"}, {"eval_loss_epoch", "other"}]
    assert "\nother: 2\n" in capsys.readouterr().out


def test_an_overridden_load_training_state_is_called_when_a_training_resumes(tmp_path: Path) -> None:
    class Mine(Trainer):
        def load_training_state(self, input_dir: Any) -> dict[str, Any]:
            found.append(super().load_training_state(input_dir))
            return {**found[-1]}

    found: list[Mapping[str, Any]] = []
    train(trainer_of(callbacks=[callbacks.SaveTrainingStateCallback(tmp_path)]), 1, data(2))
    trainer = train(trainer_of(Mine), 2, data(2), resume_from=tmp_path / "final")
    assert found == [{"current_epoch": 2, "global_step": 2}]
    assert trainer.run_history.current_epoch == 3


class FreezesStatistics(Trainer):
    """Puts a part into evaluation mode at the start of each epoch."""

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.get_model().get_submodule("layers.2").eval()


def test_the_model_is_left_in_the_mode_of_the_original() -> None:
    for kind, evaluated, modes in (
        (Trainer, data(1), {False}),
        (Trainer, None, {True}),
        (FreezesStatistics, None, {True, False}),
    ):
        model = parts.Dropping()
        model.layers[2].eval()
        trainer = train(kind(model, nn.MSELoss(), SGD(model.parameters(), 0.1), callbacks=()), 2, data(2), evaluated)
        assert {module.training for module in model.modules()} == modes
        trainer.evaluate(data(1), dataloader_kwargs=HERE)
        assert not any(module.training for module in model.modules())


def test_a_loss_of_one_element_trains() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, targets).reshape(1)

    plain, trained = (
        train(Trainer(model := parts.model(), one, SGD(model.parameters(), 0.1), callbacks=()), 2, data(3), data(2))
        for one in (nn.functional.mse_loss, loss)
    )
    assert torch.equal(weights_of(trained), weights_of(plain))
    assert trained.run_history.get_metric_values("eval_loss_epoch") == plain.run_history.get_metric_values("eval_loss_epoch")
