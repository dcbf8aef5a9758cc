"""Placeholders for values of a run that are unknown when its scheduler is specified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

from cadenza.loading.loaders import length_of


class Expression:
    """A number that depends on a run: a placeholder, or an arithmetic expression of placeholders."""

    def __init__(self, value: Callable[[Mapping[str, Any]], Any], text: str) -> None:
        self._value, self._text = value, text

    def resolved(self, values: Mapping[str, Any]) -> Any:
        """Return the value of the expression."""
        return self._value(values)

    def __mul__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return self._with(other, lambda a, b: a * b, "*")

    def __add__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return self._with(other, lambda a, b: a + b, "+")

    def __sub__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return self._with(other, lambda a, b: a - b, "-")

    def __rmul__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return self * other

    def __radd__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return self + other

    def __repr__(self) -> str:
        return self._text

    def _with(self, other: Any, operation: Callable[[Any, Any], Any], sign: str) -> Expression:
        if isinstance(other, TrainerPlaceholderValues):
            other = _of(other.value)

        def value(values: Mapping[str, Any]) -> Any:
            return operation(self.resolved(values), other.resolved(values) if isinstance(other, Expression) else other)

        return Expression(value, f"({self!r} {sign} {other!r})")


def _of(name: str) -> Expression:
    def value(values: Mapping[str, Any]) -> Any:
        if values.get(name) is None:
            raise ValueError(
                f"create_scheduler_fn uses {name}, but this run does not have it: a loader is missing or has no length"
            )
        return values[name]

    return Expression(value, name)


class TrainerPlaceholderValues(Enum):
    """Values of a run, for keywords of ``functools.partial(Scheduler, ...)`` in ``train(create_scheduler_fn=...)``.

    They support ``*``, ``+`` and ``-``.

    >>> resolve(partial(dict, total=TrainerPlaceholderValues.NUM_EPOCHS * 2 + 1), {"NUM_EPOCHS": 5})()
    {'total': 11}
    """

    NUM_EPOCHS = "NUM_EPOCHS"
    NUM_UPDATE_STEPS_PER_EPOCH = "NUM_UPDATE_STEPS_PER_EPOCH"
    PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH = "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH"
    TRAIN_DATALOADER_LEN = "TRAIN_DATALOADER_LEN"
    EVAL_DATALOADER_LEN = "EVAL_DATALOADER_LEN"

    def __mul__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return _of(self.value) * other

    def __add__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return _of(self.value) + other

    def __sub__(self, other: float | Expression | TrainerPlaceholderValues) -> Expression:
        return _of(self.value) - other

    __rmul__, __radd__ = __mul__, __add__

    @classmethod
    def placeholder_set(cls) -> set[str]:
        """Return the names of all placeholders."""
        return {member.name for member in cls}


def replace_trainer_placeholder_values(trainer: Any, instance: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``functools.partial`` with the placeholders in it replaced by the values of a run; anything else unchanged.

    Args:
        trainer: Has ``run_config``, ``_train_dataloader`` and ``_eval_dataloader``.
        instance: A function such as ``create_scheduler_fn``.

    Raises:
        ValueError: The run does not have one of the values.
    """
    if not isinstance(instance, partial):
        return instance
    config = trainer.run_config
    each = getattr(trainer, "_batches_of_each", length_of)  # a trainer has a loader with the batches of all processes
    eval_length = length_of(trainer._eval_dataloader)
    values = {
        "NUM_EPOCHS": config.num_epochs,
        "NUM_UPDATE_STEPS_PER_EPOCH": config.num_update_steps_per_epoch,
        "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH": config.num_local_update_steps_per_epoch,
        "TRAIN_DATALOADER_LEN": each(trainer._train_dataloader),
        "EVAL_DATALOADER_LEN": None if eval_length is None else -(-eval_length // config.num_processes),
    }
    return resolve(instance, values)


def resolve(create: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a partial with its placeholders replaced by numbers; any other function unchanged.

    Raises:
        ValueError: This run does not have one of the values.
    """
    if not isinstance(create, partial):
        return create
    numbers = {name: _resolved(value, values) for name, value in create.keywords.items()}
    return partial(create.func, *(_resolved(value, values) for value in create.args), **numbers)


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, TrainerPlaceholderValues):
        value = _of(value.value)
    return value.resolved(values) if isinstance(value, Expression) else value
