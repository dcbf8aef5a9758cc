"""``pl_module`` for other models: a LightningModule with the parts of the model."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from cadenza.compat.adapter.view import refuse
from cadenza.compat.lightning.library import is_lightning
from cadenza.errors import AdapterError
from cadenza.hooks.dispatch import hooks_of


def module_of(trainer: Any, package: str) -> Any:
    """Return the ``pl_module`` of a run for callbacks of `package`: the model itself if it is a LightningModule."""
    model = trainer._run.model
    if not is_lightning(model, "LightningModule"):
        return _view_class(package)(trainer, model)
    if model._trainer is not trainer:  # from_lightning has set it
        _attach(trainer, model)
    return model


def _attach(trainer: Any, model: Any) -> None:
    """Set a LightningModule's trainer until the end of the run, for ``global_step``, ``current_epoch`` and ``log``."""
    before = model._trainer
    model.trainer = trainer
    own = vars(model)
    own["log"], own["log_dict"] = partial(ModuleFace.log, model), partial(ModuleFace.log_dict, model)

    def detach() -> None:
        model._trainer = before
        for name in ("log", "log_dict"):
            own.pop(name, None)

    if hooks_of(trainer._run).current_owner() is not None:
        trainer._run.at_end(detach)


_ABSENT = {
    "training_step": "The compute_loss of the trainer is what a step computes.",
    "validation_step": "The compute of Evaluate, or the compute_loss of the trainer, is what it computes.",
    "test_step": "See validation_step.",
    "configure_optimizers": "Give the optimizer to Trainer(...).",
    "manual_backward": "Use run.backward(loss) in a step_fn.",
    "toggle_optimizer": "Use requires_grad_(False) on the parameters in a step_fn.",
    "untoggle_optimizer": "Use requires_grad_(True) on the parameters in a step_fn.",
    "clip_gradients": "Put ClipGradients into callbacks.",
    "save_hyperparameters": "The run directory holds the arguments of the trainer.",
    "hparams": "Read run.info.arguments in a native callback.",
    "load_from_checkpoint": "Use cadenza.load_weights.",
    "freeze_all": "Use pl_module.freeze().",
}


@cache
def _view_class(package: str) -> Any:
    return type("ModuleView", (ModuleFace, import_module(package).LightningModule), {})


class ModuleFace:
    """The model of a run as a LightningModule. It shares parameters, buffers and submodules with the model."""

    title = "pl_module"
    absent = _ABSENT

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        super().__init__()
        own = self.__dict__
        for name in ("_parameters", "_modules", "_buffers", "_non_persistent_buffers_set"):
            own[name] = model.__dict__[name]
        own.pop("training", None)
        own["_cadenza"] = (trainer, model)
        own["_trainer"] = trainer

    def __getattribute__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(name)  # falls through to `__getattr__`, which reads the model
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("_cadenza")
        if known is None:
            raise AttributeError(name)
        trainer, model = known
        if name in _ABSENT and not hasattr(model, name):
            refuse(trainer._run, self, name, "reads")
        if name == "model" and not hasattr(model, name):
            return model  # third-party callbacks expect the network in this attribute
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dict__.get("_cadenza")
        if known is None or name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(known[1], name, value)

    def predict_step(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the model's ``predict_step``. A prediction writer only reads its signature."""
        own = getattr(self._cadenza[1], "predict_step", None)
        if own is None:
            raise AdapterError("the model has no predict_step: the compute of Trainer.predict(loader, compute=...) predicts.")
        return own(*arguments, **keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._cadenza[1], memo)  # without the run

    # -- the model ----------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        return self.__dict__["_cadenza"][1].training if "_cadenza" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_cadenza" in self.__dict__:
            self.__dict__["_cadenza"][1].training = mode

    def forward(self, *values: Any, **keywords: Any) -> Any:
        return self._cadenza[1](*values, **keywords)

    def state_dict(self, *values: Any, **keywords: Any) -> Any:
        return self._cadenza[1].state_dict(*values, **keywords)

    def load_state_dict(self, *values: Any, **keywords: Any) -> Any:
        return self._cadenza[1].load_state_dict(*values, **keywords)

    # -- the run ------------------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        return self.__dict__["_cadenza"][0]

    @property
    def device(self) -> Any:
        return self.trainer._run.device

    @property
    def dtype(self) -> Any:
        return next((parameter.dtype for parameter in self.parameters() if parameter.is_floating_point()), None)

    @property
    def logger(self) -> Any:
        return self.trainer.logger

    @property
    def loggers(self) -> Any:
        return self.trainer.loggers

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        own = self.trainer.optimizers
        return own[0] if len(own) == 1 else own

    def print(self, *values: Any, **keywords: Any) -> None:
        self.trainer.print(*values)

    def log(self, name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **keywords: Any) -> None:
        """Log a value: to ``callback_metrics``, and with `logger` to the record of the step.

        In hooks of evaluation batches, it is the mean over the batches so far, unless ``on_epoch=False``.
        """
        number = _number(self.trainer, name, value)
        if self.trainer._in_evaluation_batch and keywords.get("on_epoch") is not False:
            number = self.trainer._metrics.add(name, number, keywords.get("batch_size"), keywords.get("reduce_fx", "mean"))
        if prog_bar:
            self.trainer._metrics.shown[name] = number
        self.trainer._metrics.put(name, number)
        if logger is not False:
            self.trainer._logger.log_metrics({name: number})

    def log_dict(self, dictionary: Any, *values: Any, **keywords: Any) -> None:
        """Log several values; see `log`."""
        for name, value in dictionary.items():
            self.log(name, value, *values, **keywords)


def _number(trainer: Any, name: str, value: Any) -> Any:
    """Return the value to log. The result of a metric of torchmetrics is computed, and the metric is reset."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, int | float):
        return value
    if not hasattr(value, "compute"):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise AdapterError(
            f"pl_module.log({name!r}, ...) takes a number, a tensor with one element or a metric; got {what}. Log a number, "
            "such as value.mean(), or several with log_dict."
        )
    if trainer._in_batch:
        raise AdapterError(
            f"pl_module.log({name!r}, ...) got a {type(value).__name__} in a hook of a batch. Log it in a hook at the end of "
            "the epoch, such as on_validation_epoch_end, or log a number."
        )
    number = value.compute()
    value.reset()
    return number
