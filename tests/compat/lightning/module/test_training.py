"""`Trainer.from_lightning`: the training of a LightningModule is that of Lightning, to the bit; and what is refused."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from cadenza import Trainer
from cadenza.callbacks import ClipGradients, Ema
from cadenza.compat.lightning.module.advice import ADVICE
from cadenza.errors import AdapterError, CallbackError, DataError, LossError, MonitorError
from tests.compat.lightning.home import CPU
from tests.compat.lightning.module import home as pair
from tests.compat.lightning.module.home import Regression, batches, configured, lightning, sgd

# -- training ----------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Any], Any]] = {
    "an optimizer": sgd,
    "a list": lambda self: [sgd(self)],
    "a tuple of one optimizer": lambda self: (sgd(self),),
    "two lists": lambda self: ([(one := sgd(self))], [StepLR(one, 1, 0.5)]),
    "two lists, with a config": lambda self: (
        [(one := sgd(self))],
        [{"scheduler": StepLR(one, 1, 0.9), "interval": "step", "frequency": 3, "name": "rate"}],
    ),
    "a list and a scheduler": lambda self: ([(one := sgd(self))], StepLR(one, 1, 0.5)),
    "a dict": lambda self: {"optimizer": sgd(self)},
    "a dict with a scheduler": lambda self: {"optimizer": (one := sgd(self)), "lr_scheduler": StepLR(one, 1, 0.5)},
    "a dict with a config": lambda self: {
        "optimizer": (one := sgd(self)),
        "lr_scheduler": {"scheduler": CosineAnnealingLR(one, 20), "interval": "step"},
    },
    "a list of dicts": lambda self: [{"optimizer": (one := sgd(self)), "lr_scheduler": {"scheduler": StepLR(one, 2, 0.5)}}],
    "two schedules": lambda self: (
        [(one := sgd(self))],
        [StepLR(one, 1, 0.5), {"scheduler": LambdaLR(one, lambda step: 0.99**step), "interval": "step"}],
    ),
    "the length of the run": lambda self: {
        "optimizer": (one := sgd(self)),
        "lr_scheduler": {
            "scheduler": OneCycleLR(one, 0.2, total_steps=int(self.trainer.estimated_stepping_batches)),
            "interval": "step",
        },
    },
    "a plateau of a logged value": lambda self: {
        "optimizer": (one := sgd(self)),
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(one, patience=0, threshold=10.0), "monitor": "seen"},
    },
    "a plateau that may be missing": lambda self: {
        "optimizer": (one := sgd(self)),
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(one), "monitor": "missing", "strict": False},
    },
    "AdamW": lambda self: AdamW(self.parameters(), 1e-2),
    "none": lambda self: None,
}


class Logging(Regression):
    def on_train_epoch_end(self) -> None:
        self.log("seen", 1.0)


@pytest.mark.parametrize("form", FORMS)
def test_the_optimizers_of_every_form_train_as_in_lightning(form: str) -> None:
    make = configured(FORMS[form], Logging if "plateau" in form else Regression)
    theirs, ours, _ = pair.trained_alike(make, max_epochs=3)
    assert ours.rates == theirs.rates


@pytest.mark.parametrize("form", ["a plateau that may be missing", "a dict with a scheduler"])
def test_a_plan_shows_plateau_schedules_where_there_is_one(tmp_path: Path, form: str) -> None:
    make = configured(FORMS[form])
    options: dict[str, Any] = {**CPU, "max_epochs": 1, "directory": tmp_path}
    trainer = Trainer.from_lightning(make(), batches(), **options)
    fresh = Trainer.from_lightning(make(), batches(), **options).plan()
    trainer.fit()  # its plan is made before the optimizers
    assert ("plateau schedules" in str(fresh)) is ("plateau" in form)
    assert ("plateau schedules" in json.loads((tmp_path / "run.json").read_text())["plan"]) is ("plateau" in form)


class ClipsLate(Regression):
    """Clips from the second epoch on, by the bound of the trainer."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class OwnClipping(Regression):
    """Overrides the backward pass and the clipping."""

    def backward(self, loss: Any, *values: Any, **named: Any) -> None:
        (2 * loss).backward(*values, **named)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        assert gradient_clip_val is None
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")


BY_VALUE = {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}
SETTINGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # a module, and arguments of Lightning's trainer and of the native one
    "two batches a step": (configured(FORMS["a dict with a config"]), {"accumulate_grad_batches": 2}, {"accumulate": 2}),
    "five batches a step": (configured(FORMS["a dict with a config"]), {"accumulate_grad_batches": 5}, {"accumulate": 5}),
    "clipping": (Regression, {"gradient_clip_val": 0.1}, {"callbacks": [ClipGradients(max_norm=0.1)]}),
    "clipping by the module": (ClipsLate, {"gradient_clip_val": 0.01}, {"callbacks": [ClipGradients(max_norm=0.01)]}),
    "by value": (ClipsLate, BY_VALUE, {"callbacks": [ClipGradients(max_value=0.001)]}),
    "overrides": (OwnClipping, {}, {}),
    "overrides, five batches a step": (OwnClipping, {"accumulate_grad_batches": 5}, {"accumulate": 5}),
    "bf16": (Regression, {"precision": "bf16-mixed"}, {"precision": "bf16"}),
    "LBFGS": (configured(lambda self: LBFGS(self.parameters(), 0.1, max_iter=4)), {}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_and_clipping_and_precision_are_those_of_lightning(name: str) -> None:
    make, home, here = SETTINGS[name]
    _, ours, _ = pair.trained_alike(make, max_epochs=3, home=home, here=here)
    assert len(ours.losses) == 30 or (len(ours.losses) > 30 and name == "LBFGS")  # with a closure, which computes it again


def test_a_module_that_decides_about_clipping_allows_no_other_work_of_the_callback() -> None:
    with pytest.raises(CallbackError, match=r"ClipsLate\.configure_gradient_clipping decides about clipping"):
        pair.native(ClipsLate, batches(), max_epochs=2, callbacks=[ClipGradients(max_norm=1.0, log="train/norm")])


# -- the hooks -----------------------------------------------------------------------------------------

HOOKS = [
    *("configure_callbacks", "prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start"),
    *("on_train_start", "on_train_epoch_start", "on_before_batch_transfer", "transfer_batch_to_device"),
    *("on_after_batch_transfer", "on_train_batch_start", "training_step", "on_before_zero_grad", "optimizer_zero_grad"),
    *("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "lr_scheduler_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    "teardown",
]


def _plain(values: Any) -> list[Any]:
    scalars = [round(one.item(), 6) for one in values if isinstance(one, torch.Tensor) and one.ndim == 0]
    return [getattr(one, "value", one) for one in values if isinstance(one, int | str)] + scalars


def spied(base: type[Any]) -> type[Any]:
    """Return a class that records the calls of all hooks, with the counters at that time."""

    def spy(name: str) -> Callable[..., Any]:
        inner = getattr(base, name)

        def hook(self: Any, *values: Any, **named: Any) -> Any:
            given = [*values, *named.values()]
            outputs = next((one for one in given if isinstance(one, dict)), {})
            known = (self.trainer.current_epoch, self.trainer.global_step)
            self.calls.append(f"{name} {known} {_plain(given)} {_plain(outputs.values())}")
            return inner(self, *values, **named)

        return hook

    def init(self: Any) -> None:
        base.__init__(self)
        self.calls = []

    return type("Spied", (base,), {"__init__": init} | {name: spy(name) for name in HOOKS})


class Reporting(Regression):
    """Returns a dict, and has two schedules."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "rows": len(batch[0]), "weight": 3}

    def configure_optimizers(self) -> Any:
        one = sgd(self)
        return [one], [{"scheduler": StepLR(one, 1, 0.9), "interval": "step"}, StepLR(one, 1, 0.5)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": 2, "max_steps": 3}])
def test_the_hooks_of_the_module_are_called_as_in_lightning(accumulate: int, limits: dict[str, int]) -> None:
    make = spied(Reporting)
    theirs = pair.at_home(make, batches(24), accumulate_grad_batches=accumulate, **limits)
    ours = pair.native(make, batches(24), accumulate=accumulate, **limits)
    # optimizer_step is called after the backward pass here, and before the forward pass in Lightning.
    expected = [one for one in theirs.calls if not one.startswith("optimizer_step")]
    found = [one for one in ours.calls if not one.startswith("optimizer_step")]
    assert len(found) > 40
    assert "\n".join(difflib.unified_diff(expected, found, "lightning", "cadenza", lineterm="", n=2)) == ""
    steps = [[one for one in calls if one.startswith("optimizer_step")] for calls in (theirs.calls, ours.calls)]
    assert steps[1] == [one for one in steps[0] if one in steps[1]]
    assert len(steps[1]) == ours.trainer.global_step


class OneElement(Regression):
    """Returns losses of shape (1,)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).reshape(1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]).reshape(1))

    def val_dataloader(self) -> Any:
        return batches(8)


class OneElementByHand(OneElement):
    """Calls its optimizer itself, and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for shape in ((1,), ()):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx).reshape(shape))
            self.optimizers().step()


@pytest.mark.parametrize("kind", [OneElement, OneElementByHand])
def test_a_loss_of_one_element_trains_as_in_lightning(kind: type[Any]) -> None:
    _, _, run = pair.trained_alike(kind, max_epochs=2)
    assert len(run.history["val_loss"]) == 2


class PartlyInEvaluationMode(Regression):
    """Puts layers into evaluation mode before the training, as one with a pretrained backbone does."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(1)).append(nn.Dropout(0.5))
        (self if whole else self.net[2:].requires_grad_(False)).eval()


@pytest.mark.parametrize(("whole", "warning"), [(False, ""), (True, "1 module with parameters that are trained")])
def test_modules_keep_their_mode_as_in_lightning(whole: bool, warning: str, caplog: pytest.LogCaptureFixture) -> None:
    _, module, _ = pair.trained_alike(partial(PartlyInEvaluationMode, whole), max_epochs=2)
    assert not module.net[2].training
    assert module.training == (not whole)
    told = [one.message for one in caplog.records if one.name == "cadenza" and "evaluation mode" in one.message]
    assert [one[: len(warning)] for one in told] == [warning] * whole


def test_a_batch_for_which_training_step_returns_none_is_skipped() -> None:
    class Skipping(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)

    theirs, ours, run = pair.trained_alike(configured(FORMS["a dict with a config"], Skipping), max_epochs=2)
    assert ours.trainer.global_step == theirs.trainer.global_step == 20
    assert run.why("batch skipped").endswith("training_step returned None")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_on_train_batch_start_can_end_the_epoch(accumulate: int) -> None:
    class Leaving(Regression):
        ended = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

        def on_train_batch_end(self, *_: Any) -> None:
            self.ended += 1

    make = configured(FORMS["two schedules"], Leaving)
    steps = {"home": {"accumulate_grad_batches": accumulate}, "here": {"accumulate": accumulate}}
    theirs, ours, run = pair.trained_alike(make, max_epochs=2, **steps)  # of a step with 3 batches, the fourth is dropped
    assert len(ours.losses) == 8 == ours.ended == theirs.ended
    assert ours.rates == theirs.rates
    assert run.progress.epoch == 2


def test_an_override_of_optimizer_step_sets_the_rate_and_leaves_out_updates() -> None:
    class Warm(Regression):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 10)
            if batch_idx % 3 == 2:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    pair.trained_alike(Warm, max_epochs=2)


class KeepsNorms(Regression):
    """Notes the norm of a gradient in hooks after the update; Lightning keeps gradients until the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def note(self, *_: Any) -> None:
        layer: Any = self.net[0]
        self.norms.append(float(layer.weight.grad.norm()))

    on_train_batch_end = on_train_epoch_end = note


def noting(norms: list[float]) -> Any:
    """Return a callback that notes them too."""

    def note(trainer: Any, module: Any, *_: Any) -> None:
        norms.append(float(module.net[0].weight.grad.norm()))

    return lightning.pytorch.callbacks.LambdaCallback(on_train_batch_end=note, on_train_epoch_end=note)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_callbacks_and_modules_read_the_gradients_of_the_last_update(accumulate: int) -> None:
    home, here = list[float](), list[float]()
    theirs, ours, _ = pair.trained_alike(
        KeepsNorms,
        max_epochs=2,
        home={"callbacks": [noting(home)], "accumulate_grad_batches": accumulate},
        here={"callbacks": [noting(here)], "accumulate": accumulate},
    )
    assert here == home
    assert ours.norms == theirs.norms
    assert len(here) == 22
    assert ours.net[0].weight.grad is None


def test_a_module_can_build_its_layers_in_configure_model_and_its_data_in_setup() -> None:
    class Late(Regression):
        def __init__(self) -> None:
            super().__init__()
            del self.net

        def setup(self, stage: str) -> None:
            self.data = batches()

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = nn.Sequential(nn.Linear(4, 1))

        def training_step(self, batch: Any) -> Any:  # type: ignore[override]  # the index may be left out
            return super().training_step(batch, 0)

        def train_dataloader(self) -> Any:
            return self.data

    assert pair.native(Late, None, max_epochs=1).losses == pair.at_home(Late, None, max_epochs=1).losses


def test_each_fit_sets_the_module_up_and_configures_its_optimizers_for_its_length() -> None:
    class Counting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def setup(self, stage: str) -> None:
            self.calls.append(("setup", stage))

        def teardown(self, stage: str) -> None:
            self.calls.append(("teardown", stage))

        def configure_optimizers(self) -> Any:
            self.calls.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    module = Counting()
    trainer = Trainer.from_lightning(module, batches(), max_epochs=3, accumulate={0: 1, "5 steps": 5}, **CPU)
    for _ in range(2):
        assert trainer.fit().progress.step == 10
    assert module.calls == [("setup", "fit"), 10, ("teardown", "fit")] * 2


# -- callbacks, arguments and checkpoints --------------------------------------------------------------


def test_callbacks_of_the_module_join_the_list_and_replace_others_of_their_class() -> None:
    own = Ema(decay=0.5)

    class WithCallbacks(Regression):
        def configure_callbacks(self) -> Any:
            return [own]

    clip = ClipGradients(max_norm=1.0)
    trainer = Trainer.from_lightning(WithCallbacks(), batches(), max_steps=1, callbacks=[Ema(decay=0.9), clip], **CPU)
    assert [one for one in trainer.callbacks if isinstance(one, Ema | ClipGradients)] == [clip, own]


def test_hyperparameters_reach_the_arguments_of_the_run(tmp_path: Path) -> None:
    class Sized(Regression):
        def __init__(self, width: int = 8, kind: str = "tanh", extra: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    _, run = pair.native_run(lambda: Sized(width=16, extra=object), batches(), max_steps=1, directory=tmp_path / "run")
    assert run.info.arguments["hparams"] == {"width": 16, "kind": "tanh", "extra": repr(object)}
    assert '"kind": "tanh"' in (tmp_path / "run" / "run.json").read_text()


# -- what is refused ---------------------------------------------------------------------------------------

TABLE = (Path(__file__).parents[4] / "docs" / "tables" / "lightning.md").read_text(encoding="utf-8")
TAKEN = ("self", "callbacks", "max_epochs", "max_steps", "precision")
"""The arguments that both trainers have."""


@pytest.mark.parametrize("name", [one for one in signature(lightning.Trainer.__init__).parameters if one not in TAKEN])
def test_each_argument_of_the_trainer_of_lightning_is_answered(name: str) -> None:
    with pytest.raises(TypeError, match=f"no argument '{name}'") as raised:
        Trainer.from_lightning(Regression(), batches(), max_epochs=1, **{name: 1})
    assert str(raised.value).endswith(ADVICE[name])
    assert f"| `{name}" in TABLE or f", `{name}" in TABLE


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


def test_a_class_instead_of_an_instance_and_loaders_in_a_form_of_their_own_are_named() -> None:
    module, a = Regression(), batches()
    given: list[tuple[Any, Any, type[Exception], str]] = [
        (Regression, a, TypeError, r"got the class Regression\. Give an instance: Regression\(\.\.\.\)"),
        (module, lightning.LightningDataModule, TypeError, r"got the class LightningDataModule\. Give an instance"),
        (torch.compile(module, backend="eager"), a, TypeError, r"made by torch\.compile\. Give the Regression itself"),
        (module, (a, a, a), DataError, r"a tuple of loaders is \(train, val\); got 3 elements"),
        (module, {"train": a, "valid": a}, DataError, r"got \['train', 'valid'\]: 'valid' is no stage"),
        (module, {"val": a}, DataError, r"got \['val'\]: 'train' is missing"),
    ]
    for one, data, error, message in given:
        with pytest.raises(error, match=message):
            Trainer.from_lightning(one, data, max_epochs=1)


def test_what_nothing_calls_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("training_epoch_end", "validation_epoch_end", "test_epoch_end"):
        old = type("Old", (Regression,), {name: lambda self, outputs: None})
        with pytest.raises(AdapterError, match=f"Old has {name}, which Lightning 2 removed.*Write on_"):
            Trainer.from_lightning(old(), batches(), max_epochs=1)
    validated = type("Validated", (Regression,), {"validation_step": lambda self, batch, batch_idx: None})
    pair.native(validated, batches(), max_epochs=1)
    assert "Validated has a validation_step, but there is no validation loader: nothing is validated" in caplog.text
    pair.native(Regression, (batches(), batches()), max_epochs=1)
    assert "there is a validation loader, but Regression has no validation_step: nothing is validated" in caplog.text


def test_several_optimizers_need_manual_optimization() -> None:
    make = configured(lambda self: [sgd(self), SGD(self.net[0].parameters(), 0.1)])
    for fit in (pair.at_home, pair.native):
        with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
            fit(make, batches(), max_epochs=1)


def test_what_a_native_loop_cannot_give_is_named() -> None:
    def curious(**methods: Callable[..., Any]) -> type[Any]:
        return type("Curious", (Regression,), methods)

    for make, error, message in [
        (curious(training_step=lambda self, dataloader_iter: None), AdapterError, "takes dataloader_iter"),
        (
            curious(training_step=lambda self, batch, batch_idx: {"predictions": batch}),
            LossError,
            r"a dict with the key 'loss'.*got a mapping with \['predictions'\]",
        ),
        (
            curious(configure_optimizers=lambda self: SGD(self.parameters(), self.trainer.tuner.rate)),
            AdapterError,
            r"reads trainer\.tuner before the run",
        ),
        (
            curious(training_step=lambda self, batch, batch_idx: self.trainer.fit_loop.tuner),
            AdapterError,
            r"Curious reads trainer\.fit_loop\.tuner, which a native run does not provide",
        ),
        (
            curious(on_train_start=lambda self: self.trainer.tuner),
            AdapterError,
            r"Curious reads trainer\.tuner.*FindLearningRate",
        ),
    ]:
        with pytest.raises(error, match=message):
            pair.native(make, batches(), max_epochs=1)
    with pytest.raises(Exception, match=r"training loader|`train_dataloader` must be implemented"):
        pair.native(Regression, None, max_epochs=1)


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
            pair.native(configured(make), batches(), max_epochs=1)
    missing = configured(lambda self: {"optimizer": (one := sgd(self)), "lr_scheduler": ReduceLROnPlateau(one), "monitor": "x"})
    with pytest.raises(MonitorError, match="conditioned on metric x which is not available"):
        pair.native(missing, batches(), max_epochs=1)


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
