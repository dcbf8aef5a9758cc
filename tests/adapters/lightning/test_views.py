"""``trainer`` and ``pl_module`` have the values that Lightning's own trainer shows; what they do not have is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the tests of Lightning's callbacks need the package lightning")

import lightning.pytorch as pl
import numpy
import torch
from torchmetrics import MeanMetric

from cadenza import Trainer
from cadenza.callbacks import LogTraining
from cadenza.errors import AdapterError
from tests.adapters.lightning.home import Lit, at_home, batches_of, native, native_trainer, optimizer_of

PLAIN = [
    *("current_epoch", "global_step", "max_epochs", "min_epochs", "max_steps", "min_steps", "is_last_batch", "should_stop"),
    *("training", "validating", "testing", "predicting", "sanity_checking", "evaluating", "enable_validation"),
    *("is_global_zero", "global_rank", "local_rank", "node_rank", "world_size", "num_devices", "num_nodes"),
    *("num_training_batches", "num_val_batches", "limit_train_batches", "limit_val_batches", "estimated_stepping_batches"),
    *("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "fast_dev_run", "barebones", "precision"),
    *("datamodule", "received_sigterm", "interrupted"),
    *("early_stopping_callback", "early_stopping_callbacks", "progress_bar_callback"),
]
"""Attributes that must be equal in both trainers, at each of the hooks below."""

LOOPS: dict[str, Callable[[Any], Any]] = {
    "batch_idx": lambda trainer: trainer.fit_loop.batch_idx,
    "total_batch_idx": lambda trainer: trainer.fit_loop.total_batch_idx,
    "max_batches": lambda trainer: trainer.fit_loop.max_batches,
    "should_accumulate": lambda trainer: trainer.fit_loop._should_accumulate(),
    "root_device": lambda trainer: trainer.strategy.root_device,
    "decision": lambda trainer: trainer.strategy.reduce_boolean_decision(True, all=False),
    "broadcast": lambda trainer: trainer.strategy.broadcast("mine"),
    "optimizer": lambda trainer: trainer.optimizers[0].param_groups[0]["lr"],
    "fn": lambda trainer: trainer.state.fn.value,
    "metrics": lambda trainer: sorted(set(trainer.callback_metrics) & {"val_loss"}),
}


class Look(pl.Callback):
    """Reads the attributes at three hooks."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], dict[str, Any]] = {}

    def look(self, hook: str, trainer: Any) -> None:
        values = {name: getattr(trainer, name) for name in PLAIN}
        self.seen[hook, trainer.global_step] = values | {name: read(trainer) for name, read in LOOPS.items()}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.look("start", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look("end", trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.look("validation", trainer)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_has_the_values_of_lightning(tmp_path: Path, accumulate: int) -> None:
    home, here = Look(), Look()
    at_home([home], tmp_path, max_epochs=2, batches=4, accumulate_grad_batches=accumulate)
    native([here], max_epochs=2, batches=4, accumulate=accumulate)
    for when, values in home.seen.items():
        own = here.seen[when]
        assert {name: value for name, value in own.items() if value != values[name]} == {}, when
    assert here.seen.keys() == home.seen.keys()


def inside(use: Any, *callbacks: Any, model: Any = None, **arguments: Any) -> Any:
    """Return what `use(trainer, pl_module)` returns in ``on_train_end``."""
    found: list[Any] = []

    class Use(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(use(trainer, pl_module))

    native([Use(), *callbacks], max_epochs=1, **arguments)
    return found[0]


def test_results_and_logged_values_have_lightnings_names_and_their_own() -> None:
    log = LogTraining(every=1, throughput=False)
    shown = inside(lambda trainer, module: dict(trainer.callback_metrics), log)
    assert {"eval/loss", "val_loss", "train/loss", "train_loss", "train/lr", "train_lr"} <= shown.keys()
    assert shown["eval/loss"] is shown["val_loss"]
    assert all(isinstance(value, torch.Tensor) for value in shown.values())
    assert set(inside(lambda trainer, module: trainer.logged_metrics, log)) >= {"train/loss"}
    assert "train_loss" in inside(lambda trainer, module: trainer.progress_bar_metrics, log)


def test_the_module_logs_to_the_record_and_to_callback_metrics() -> None:
    class Log(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            pl_module.log("mine", outputs["loss"] * 0 + index, prog_bar=True)
            pl_module.log_dict({"other": float(index), "hidden": 1.0}, logger=index < 1)
            assert trainer.callback_metrics["mine"] == index
            assert trainer.progress_bar_metrics["mine"] == index

    run = native([Log()], max_epochs=1)
    assert run.history["mine"] == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert run.history["other"] == [(1, 0.0)]


class Scores(pl.Callback):
    """Logs through itself, in hooks of evaluation batches and at the end of an epoch."""

    def __init__(self, metric: Any = None) -> None:
        self.metric, self.seen = metric, list[dict[str, float]]()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        log: Any = self.log  # type: ignore[attr-defined]  # Lightning sets it
        log("size", float(len(batch[0])))
        log("weighted", float(batch_idx), batch_size=batch_idx + 1)
        log("highest", batch[1].max(), reduce_fx="max")
        if self.metric is not None:
            self.metric.update(batch[1])

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        log: Any = self.log_dict  # type: ignore[attr-defined]
        log({"epochs": float(trainer.current_epoch), **({} if self.metric is None else {"target": self.metric})})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        names = ("size", "weighted", "highest", "epochs")
        self.seen.append({name: round(float(trainer.callback_metrics[name]), 5) for name in names})


def test_a_callback_logs_through_itself_with_the_means_of_lightning(tmp_path: Path) -> None:
    home, here = Scores(), Scores()
    at_home([home], tmp_path, max_epochs=2, valid=3)
    run = native([here], max_epochs=2, valid=3)
    assert here.seen == home.seen
    assert len(here.seen) == 2
    assert [step for step, _ in run.history["weighted"]] == [3, 6]
    assert [value for _, value in run.history["weighted"]] == pytest.approx([8 / 6, 8 / 6])
    assert "log" not in vars(here)


def test_a_metric_is_computed_and_reset_at_the_end_of_an_epoch() -> None:
    metric: Any = MeanMetric()
    run = native([Scores(metric)], max_epochs=2, valid=3)
    first, second = run.history["target"]
    assert first[1] == second[1] == pytest.approx(float(torch.cat([one for _, one in batches_of(3, 2)]).mean()))
    with pytest.raises(AdapterError, match="MeanMetric in a hook of a batch"):
        inside(lambda trainer, module: None, LogsMetric())


class LogsMetric(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("target", MeanMetric())


def test_the_module_is_the_model_of_the_user() -> None:
    def use(trainer: Any, module: Any) -> list[Any]:
        model, kind = trainer._run.model, pl.LightningModule
        assert isinstance(module, kind) is True
        assert [*module.parameters()] == [*model.parameters()]
        assert module.state_dict().keys() == model.state_dict().keys()
        assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)
        assert (module.current_epoch, module.global_step) == (1, 3)
        assert module.trainer is trainer
        assert module.logger is trainer.logger
        assert module.optimizers() is trainer.optimizers[0]
        module.eval()
        assert not model.training
        module.train()
        assert model.training
        module.freeze()
        assert not any(one.requires_grad for one in model.parameters())
        module.unfreeze()
        module.note = 3
        assert model.note == module.note == 3
        return [module(torch.ones(1, 3)) == model(torch.ones(1, 3))]

    assert all(inside(use))


def test_a_lightning_module_is_its_own_pl_module() -> None:
    found = []
    keep = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, module: found.append((trainer.lightning_module, module)))
    model = Lit()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model.model(batch[0]), batch[1])

    Trainer(model, optimizer_of, batches_of(1), loss, max_epochs=1, callbacks=[keep], progress=False).fit()
    assert found == [(model, model)]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda trainer, module: trainer.fit(), r"Use reads trainer\.fit.*Call trainer\.fit\(\) of the native trainer"),
        (lambda trainer, module: trainer.globl_step, r"Use reads trainer\.globl_step.*Did you mean 'global_step'\?"),
        (lambda trainer, module: setattr(trainer, "anything", 1), r"Use sets trainer\.anything"),
        (lambda trainer, module: setattr(trainer, "optimizers", []), r"Use sets trainer\.optimizers.*Ema"),
        (lambda trainer, module: setattr(trainer, "num_val_batches", []), r"sets trainer\.num_val_batches.*only lets be read"),
        (lambda trainer, module: module.training_step(1, 2), r"Use reads pl_module\.training_step.*compute_loss"),
        (lambda trainer, module: trainer.strategy.optimizer_step(), r"Use reads trainer\.strategy\.optimizer_step.*step_fn"),
        (lambda trainer, module: trainer.logger.experiment.config, r"Use reads trainer\.logger\.experiment\.config.*sinks"),
    ],
)
def test_what_is_not_mapped_is_an_error_with_advice(use: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        inside(use)


@pytest.mark.parametrize("value", ["text", {"a": 1.0}, None, torch.ones(3)])
def test_what_is_no_number_is_not_dropped(value: Any) -> None:
    def inside_a_batch(use: Callable[[Any, Any], None]) -> Any:
        return native([pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, module, *_: use(trainer, module))])

    with pytest.raises(AdapterError, match=r"pl_module\.log\('a', \.\.\.\) takes a number, a tensor with one element"):
        inside_a_batch(lambda trainer, module: module.log("a", value))
    metrics = {"a": value, "b": numpy.float32(2.0)}
    if value is None or isinstance(value, torch.Tensor):
        with pytest.raises(AdapterError, match=r"log_metrics takes numbers, texts and mappings of them; 'a' is "):
            inside_a_batch(lambda trainer, module: trainer.logger.log_metrics(metrics))
    else:
        run = inside_a_batch(lambda trainer, module: trainer.logger.log_metrics(metrics))
        assert run.history.latest["b"] == 2.0
        assert isinstance(value, str) or run.history.latest["a/a"] == 1.0


def test_a_stop_has_the_callback_as_its_author() -> None:
    class Enough(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 2
            if trainer.global_step == 2:
                assert trainer.should_stop

    run = native([Enough()], max_epochs=1)
    assert run.progress.step == 2
    [stop] = [one for one in run.decisions if one.what == "stopped"]
    assert (stop.who, stop.why) == ("Enough", "Enough set trainer.should_stop")


def test_the_plan_shows_the_hooks_of_lightning() -> None:
    ends = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: None)
    assert "on_train_epoch_end" in str(native_trainer([ends]).plan())
