"""``model.optimizer`` of Keras's callbacks: a view of the optimizers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from cadenza.compat.adapter.view import View, refuse
from cadenza.compat.keras.variables import Number, Variable, value_of
from cadenza.errors import AdapterError
from cadenza.hooks.dispatch import hooks_of
from cadenza.optim.averaging import Averaging
from cadenza.optim.rates import SetsRates
from cadenza.optim.settings import set_option
from cadenza.status.decisions import decide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cadenza.run import Run


_OPTIONS = {
    "momentum": "momentum",
    "nesterov": "nesterov",
    "amsgrad": "amsgrad",
    "rho": "alpha",
    "epsilon": "eps",
    "beta_1": "betas",
    "beta_2": "betas",
}
"""Options of Keras's optimizers and their names in torch's parameter groups."""


class OptimizerView(View):
    """``model.optimizer``: one optimizer of the run."""

    title: ClassVar[str] = "model.optimizer"
    absent: ClassVar[Mapping[str, str]] = {
        "apply_gradients": "The run updates the weights. Give Trainer(step_fn=...) for steps of your own.",
        "apply": "The run updates the weights. Give Trainer(step_fn=...) for steps of your own.",
        "minimize": "The run updates the weights. Give Trainer(step_fn=...) for steps of your own.",
        "variables": "The state of the optimizer is run.optimizers[0].state of a native callback.",
        "learning_rate": "trainer.evaluate and trainer.predict have no optimizer.",
        "clipnorm": "Add ClipGradients(...) to callbacks.",
        "clipvalue": "Add ClipGradients(...) to callbacks.",
        "global_clipnorm": "Add ClipGradients(max_norm=...) to callbacks.",
        "loss_scale_factor": "Give Trainer(precision='fp16').",
        "gradient_accumulation_steps": "Give Trainer(accumulate=...).",
        "_model_variables_moving_average": "Add Ema(...) to callbacks: it keeps the average of the weights.",
    }

    def __init__(self, run: Run, optimizer: Optimizer | None, name: str, may_set: Any) -> None:
        super().__init__(run)
        self._given: Optimizer | None = optimizer
        self._name: str = name
        self._may_set: Any = may_set

    @property
    def _optimizer(self) -> Optimizer:
        if self._given is None:
            refuse(self._run, self, "learning_rate", "reads")
        return self._given

    @property
    def name(self) -> str:
        """The lower-case class name, with a number appended from the second optimizer on."""
        return self._name

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the first parameter group, without the factor of a `Warmup`, as a number with ``assign``.

        A callback may set it. The rates of the other groups keep their ratio to the first.
        """
        optimizer = self._optimizer
        return Number("learning_rate", lambda: float(optimizer.param_groups[0]["lr"]), self._set_learning_rate)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._set_learning_rate(value)

    _learning_rate = learning_rate

    def _set_learning_rate(self, value: Any) -> None:
        if callable(value):
            raise AdapterError(
                f"{hooks_of(self._run).current_owner() or 'the script'} sets {self.title}.learning_rate to a schedule, "
                f"{type(value).__name__}; expected a number. Add LearningRateScheduler(...) to callbacks."
            )
        if self._may_set():
            _set_rate(self._run, self._optimizer, self._name, float(value))

    @property
    def lr(self) -> Any:
        """The same as `learning_rate`."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The number of updates: ``run.progress.step``."""
        return Number("iterations", lambda: self._run.progress.step, self._refuse_count, "int64")

    def _refuse_count(self, value: Any) -> None:
        refuse(self._run, self, "iterations", "sets", advice="The run counts its steps itself, also after a resume.")

    @property
    def weight_decay(self) -> Any:
        """The weight decay of the first parameter group. Setting it applies to all groups."""
        return self._optimizer.param_groups[0].get("weight_decay")

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        for group in self._optimizer.param_groups if self._may_set() else ():
            set_option(group, "weight_decay", float(value))

    @property
    def built(self) -> bool:
        """Always true."""
        return True

    @property
    def use_ema(self) -> bool:
        """Whether an `Ema` of the run averages the weights."""
        return _averaging(self._run) is not None

    @property
    def _trainable_variables(self) -> list[Variable]:
        """For Keras's SwapEMAWeights: the averaged weights of the model."""
        return [current for current, _ in _pairs(self._run, self._may_set)]

    def __getattr__(self, name: str) -> Any:
        if name == "_model_variables_moving_average" and self.use_ema:
            return [average for _, average in _pairs(self._run, self._may_set)]
        if (key := self._option(name)) is None:
            return super().__getattr__(name)
        option = self._optimizer.param_groups[0][key]
        return option[name == "beta_2"] if key == "betas" else option

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OPTIONS or (key := self._option(name)) is None:
            super().__setattr__(name, value)
            return
        for group in self._optimizer.param_groups if self._may_set() else ():
            betas = list(group.get("betas", ()))
            if key == "betas":
                betas[name == "beta_2"] = float(value)
            group[key] = tuple(betas) if key == "betas" else value_of(value)

    def _option(self, name: str) -> str | None:
        """Return the name of an option in the parameter groups; None if they have none."""
        key = _OPTIONS.get(name, "")
        return key if key and self._given is not None and key in self._given.param_groups[0] else None

    @classmethod
    def _provides(cls, name: str) -> bool:
        return hasattr(cls, name)

    def get_config(self) -> dict[str, Any]:
        """Return the name and the options of the first parameter group."""
        options = {key: value for key, value in self._optimizer.param_groups[0].items() if key != "params"}
        options |= {key: float(value) for key, value in options.items() if isinstance(value, Tensor) and not value.ndim}
        return {"name": self._name, "learning_rate": float(options.pop("lr")), **options}


class OptimizersView(OptimizerView):
    """``model.optimizer`` of a run with several optimizers, like Keras's ``MultiOptimizer``.

    It reads and sets the first optimizer.
    """

    @property
    def optimizers(self) -> list[OptimizerView]:
        """A view of each optimizer."""
        return named_views(self._run, self._may_set)


def optimizer_view(run: Run, may_set: Any) -> OptimizerView:
    """Return the view of the optimizers of a run."""
    if not run.optimizers:  # a run of trainer.evaluate or trainer.predict
        return OptimizerView(run, None, "none", may_set)
    first = named_views(run, may_set)[0]
    several = len(run.optimizers) > 1
    return OptimizersView(run, first._optimizer, first._name, may_set) if several else first


def named_views(run: Run, may_set: Any) -> list[OptimizerView]:
    """Return a view of each optimizer, with distinct names."""
    counts: dict[str, int] = {}
    views = []
    for optimizer in run.optimizers:
        kind = type(optimizer).__name__.lower()
        counts[kind] = counts.get(kind, 0) + 1
        views.append(OptimizerView(run, optimizer, kind if counts[kind] == 1 else f"{kind}_{counts[kind] - 1}", may_set))
    return views


@contextmanager
def rates_kept(run: Run) -> Iterator[None]:
    """Return a context that restores the learning rates of the groups."""
    before = [(group, float(group["lr"])) for optimizer in run.optimizers for group in optimizer.param_groups]
    yield
    for group, rate in before:
        if float(group["lr"]) != rate:
            set_option(group, "lr", rate)


def _set_rate(run: Run, optimizer: Optimizer, name: str, rate: float) -> None:
    who = hooks_of(run).current_owner() or "the script"
    if (other := rate_setter(run, optimizer)) is not None:
        raise AdapterError(
            f"{who} sets model.optimizer.learning_rate, but {other} sets the rate of the same optimizer in each step. Keep one "
            "of the two. A Warmup(...) may be combined with either."
        )
    groups = optimizer.param_groups
    old = float(groups[0]["lr"])
    if all(float(group["lr"]) == rate for group in groups):
        return
    for group in groups:
        own = float(group["lr"])
        set_option(group, "lr", rate if own == old or not old else own * (rate / old))
    if not run.progress.batch_in_epoch:  # otherwise a schedule that sets the rate in each batch would fill the list
        data = {"optimizer": name, "old": old, "new": rate}
        decide(run, "learning rate set", f"{name}: from {old:g} to {rate:g}", data=data)


def rate_setter(run: Run, optimizer: Optimizer) -> str | None:
    """Return the name of the native callback that steps a schedule of this optimizer; None if there is none."""
    found = hooks_of(run).callbacks.items()
    return next((name for name, callback in found if isinstance(callback, SetsRates) and callback.drives(optimizer)), None)


def _averaging(run: Run) -> Averaging | None:
    return next((callback for callback in hooks_of(run).callbacks.values() if isinstance(callback, Averaging)), None)


def _pairs(run: Run, may_set: Any) -> list[tuple[Variable, Variable]]:
    """Return the averaged weights, each with its average; empty before the first average."""
    averaging = _averaging(run)
    average = None if averaging is None else averaging.average
    if average is None or not average.updates:
        return []
    return [
        (Variable(name, own, may_set), Variable(name, other, may_set))
        for (name, own), other in zip(run.model.named_parameters(), average.module.parameters(), strict=True)
        if own.requires_grad
    ]
