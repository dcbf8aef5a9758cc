"""What `Trainer.from_lightning` refuses, and what it says instead."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from cadenza import Trainer
from cadenza.adapters.lightning.module.advice import ADVICE
from cadenza.errors import AdapterError, CallbackError, DataError, LossError, MonitorError
from tests.adapters.lightning.module.home import Regression, at_home, batches, configured, lightning, native, sgd

GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "from-lightning.md").read_text(encoding="utf-8")
TAKEN = ("self", "callbacks", "max_epochs", "max_steps", "precision")
"""The arguments that both trainers have."""


@pytest.mark.parametrize("name", [one for one in signature(lightning.Trainer.__init__).parameters if one not in TAKEN])
def test_each_argument_of_the_trainer_of_lightning_is_answered(name: str) -> None:
    with pytest.raises(TypeError, match=f"no argument '{name}'") as raised:
        Trainer.from_lightning(Regression(), batches(), max_epochs=1, **{name: 1})
    assert str(raised.value).endswith(ADVICE[name])
    assert f"| `{name}" in GUIDE or f", `{name}" in GUIDE


def test_all_wrong_arguments_are_named_before_the_data_is_prepared() -> None:
    def too_early(self: Any) -> None:
        raise AssertionError

    prepared = type("Prepared", (Regression,), {"prepare_data": too_early})
    with pytest.raises(TypeError, match=r"accelerator: Use device=.*\n  limit_val_batches: Add Limit"):
        Trainer.from_lightning(prepared(), batches(), max_epochs=1, accelerator="gpu", limit_val_batches=2)
    with pytest.raises(ValueError, match=r"got 'bf16-mixed'\. Use precision=\"bf16\""):
        Trainer.from_lightning(prepared(), batches(), max_epochs=1, precision="bf16-mixed")
    with pytest.raises(ValueError, match="compile"):
        Trainer.from_lightning(prepared(), batches(), max_epochs=1, compile=True)
    with pytest.raises(TypeError, match=r"takes a LightningModule.*got Linear"):
        Trainer.from_lightning(nn.Linear(1, 1), batches(), max_epochs=1)


@pytest.mark.parametrize("name", ["model", "optimizer", "loader", "compute_loss", "step_fn"])
def test_native_arguments_that_the_module_replaces_are_not_dropped(name: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"no argument '{name}'. {ADVICE[name]}")):
        Trainer.from_lightning(Regression(), batches(), max_epochs=1, **{name: object()})


def test_a_class_instead_of_an_instance_is_named() -> None:
    with pytest.raises(TypeError, match=r"got the class Regression\. Give an instance: Regression\(\.\.\.\)"):
        Trainer.from_lightning(Regression, batches(), max_epochs=1)
    with pytest.raises(TypeError, match=r"got the class LightningDataModule\. Give an instance"):
        Trainer.from_lightning(Regression(), lightning.LightningDataModule, max_epochs=1)
    with pytest.raises(TypeError, match=r"made by torch\.compile\. Give the Regression itself"):
        Trainer.from_lightning(torch.compile(Regression(), backend="eager"), batches(), max_epochs=1)


def test_loaders_in_a_form_of_their_own_are_not_trained_on() -> None:
    a = batches()
    for data, message in [
        ((a, a, a), "a tuple of loaders is \\(train, val\\); got 3 elements"),
        ({"train": a, "valid": a}, "got \\['train', 'valid'\\]: 'valid' is no stage"),
        ({"val": a}, "got \\['val'\\]: 'train' is missing"),
    ]:
        with pytest.raises(DataError, match=message):
            Trainer.from_lightning(Regression(), data, max_epochs=1)


def test_what_nothing_calls_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("training_epoch_end", "validation_epoch_end", "test_epoch_end"):
        old = type("Old", (Regression,), {name: lambda self, outputs: None})
        with pytest.raises(AdapterError, match=f"Old has {name}, which Lightning 2 removed.*Write on_"):
            Trainer.from_lightning(old(), batches(), max_epochs=1)
    validated = type("Validated", (Regression,), {"validation_step": lambda self, batch, batch_idx: None})
    native(validated, batches(), max_epochs=1)
    assert "Validated has a validation_step, but there is no validation loader: nothing is validated" in caplog.text
    native(Regression, (batches(), batches()), max_epochs=1)
    assert "there is a validation loader, but Regression has no validation_step: nothing is validated" in caplog.text


def test_several_optimizers_need_manual_optimization() -> None:
    make = configured(lambda self: [sgd(self), SGD(self.net[0].parameters(), 0.1)])
    for fit in (at_home, native):
        with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
            fit(make, batches(), max_epochs=1)


def test_what_a_native_loop_cannot_give_is_named() -> None:
    class Iterating(Regression):
        def training_step(self, dataloader_iter: Any) -> Any: ...  # type: ignore[override]

    with pytest.raises(AdapterError, match="takes dataloader_iter"):
        native(Iterating, batches(), max_epochs=1)

    class Curious(Regression):
        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), self.trainer.tuner.rate)

    with pytest.raises(AdapterError, match=r"reads trainer\.tuner before the run"):
        native(Curious, batches(), max_epochs=1)

    class Textual(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"predictions": batch}

    with pytest.raises(LossError, match=r"a dict with the key 'loss'.*got a mapping with \['predictions'\]"):
        native(Textual, batches(), max_epochs=1)


def test_a_fit_needs_a_step_and_optimizers_and_a_list_of_callbacks() -> None:
    class Empty(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

    class Steps(Empty):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).sum()

    for kind, name in ((Empty, "training_step"), (Steps, "configure_optimizers")):
        with pytest.raises(AdapterError, match=f"{kind.__name__} has no {name}, which a fit needs"):
            Trainer.from_lightning(kind(), batches(), max_epochs=1, progress=False).fit()
    with pytest.raises(CallbackError, match=r"got Timer\(\.\.\.\)\. Write callbacks=\[\.\.\.\]"):
        Trainer.from_lightning(Regression(), batches(), max_epochs=1, callbacks=lightning.pytorch.callbacks.Timer())


def test_wrong_optimizers_are_named() -> None:
    stray = SGD(nn.Linear(1, 1).parameters(), 0.1)
    for make, message in [
        (lambda self: "sgd", "must return one of"),
        (lambda self: {"optimizer": sgd(self), "lr_scheduler": {"interval": "step"}}, 'must have the key "scheduler"'),
        (
            lambda self: {"optimizer": (one := sgd(self)), "lr_scheduler": {"scheduler": StepLR(one, 1), "interval": "day"}},
            'must be "step" or "epoch"; got \'day\'',
        ),
        (lambda self: {"optimizer": (one := sgd(self)), "lr_scheduler": ReduceLROnPlateau(one)}, "must include a monitor"),
        (lambda self: ([sgd(self)], [StepLR(stray, 1)]), "belongs to an optimizer that configure_optimizers does not return"),
        (lambda self: ([sgd(self)], [object()]), "expected a scheduler with state_dict"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            native(configured(make), batches(), max_epochs=1)
    missing = configured(lambda self: {"optimizer": (one := sgd(self)), "lr_scheduler": ReduceLROnPlateau(one), "monitor": "x"})
    with pytest.raises(MonitorError, match="conditioned on metric x which is not available"):
        native(missing, batches(), max_epochs=1)


def test_a_module_without_data_is_an_error() -> None:
    with pytest.raises(Exception, match=r"training loader|`train_dataloader` must be implemented"):
        native(Regression, None, max_epochs=1)


def test_an_attribute_that_is_not_mapped_names_the_module() -> None:
    class Curious(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.trainer.fit_loop.tuner

    with pytest.raises(AdapterError, match=r"Curious reads trainer\.fit_loop\.tuner, which a native run does not provide"):
        native(Curious, batches(), max_epochs=1)
    curious = type("Curious", (Regression,), {"on_train_start": lambda self: self.trainer.tuner})
    with pytest.raises(AdapterError, match=r"Curious reads trainer\.tuner.*FindLearningRate"):
        native(curious, batches(), max_epochs=1)


def test_habits_of_lightning_are_answered() -> None:
    trainer = Trainer.from_lightning(Regression(), batches(), max_epochs=1)
    with pytest.raises(AttributeError, match=r"validate and test of cadenza\.compat\.lightning"):
        trainer.validate()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"read run\.progress and run\.history"):
        trainer.callback_metrics  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(TypeError, match=r"Trainer lacks model, optimizer, loader\. .*Trainer\.from_lightning\(module, data"):
        Trainer(max_epochs=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"at most 2 positional arguments; got 3\. .*\(train, val\)"):
        Trainer.from_lightning(Regression(), batches(), batches(), max_epochs=1)
