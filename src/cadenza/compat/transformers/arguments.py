"""The ``args`` of events: the ``TrainingArguments`` of a run, or a view of a native run with the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.transformers.arguments_view import ArgumentsView
from cadenza.compat.transformers.fixed_arguments import FixedArguments, fixed_arguments_of
from cadenza.errors import AdapterError, nearest
from cadenza.hooks.dispatch import hooks_of
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from cadenza.run import Run


class Arguments(FixedArguments):
    """The ``args`` that callbacks of transformers receive. Add one to the list of callbacks.

    Args:
        arguments: A ``TrainingArguments``, which callbacks receive unchanged. None: a view of the native run.
        processing_class: The tokenizer or processor that callbacks receive.
        values: Without `arguments`: values of fields of ``TrainingArguments`` that replace those derived from the run, such as
            ``logging_steps=10`` or ``metric_for_best_model="eval_loss"``; and of fields that other trainers add.

    Raises:
        TypeError: Both `arguments` and `values` are given, or `arguments` is a dict.

    >>> Arguments(logging_steps=10, metric_for_best_model="loss").values
    {'logging_steps': 10, 'metric_for_best_model': 'loss'}
    """

    name: str | None = "Arguments"

    def __init__(self, arguments: Any = None, /, processing_class: Any = None, **values: Any) -> None:
        if arguments is not None and values:
            raise TypeError(
                f"expected a TrainingArguments, or values of its fields; got both: {', '.join(values)}. Set these in the "
                "TrainingArguments."
            )
        if isinstance(arguments, Mapping):
            raise TypeError(f"expected a TrainingArguments; got {brief(arguments)}. Give values by name: Arguments(**values).")
        super().__init__(arguments, processing_class)
        self.values: Mapping[str, Any] = values


def arguments_of(run: Run) -> Any:
    """Return the ``args`` of events in a run.

    Raises:
        AdapterError: The list has two `Arguments`, a field does not exist, or a callback needs a field that is missing.
    """
    several = [name for name, callback in hooks_of(run).callbacks.items() if isinstance(callback, FixedArguments)]
    if len(several) > 1:
        raise AdapterError(f"callbacks has several Arguments(...): {', '.join(several)}. Keep one.")
    given = fixed_arguments_of(run)
    if given is not None and given.arguments is not None:
        return given.arguments
    values = given.values if isinstance(given, Arguments) else {}
    view = ArgumentsView(run, values)
    _check_fields(values)
    _check_best(run, view)
    return view


def _check_fields(values: Mapping[str, Any]) -> None:
    from dataclasses import fields

    from transformers import TrainingArguments

    known = [field.name for field in fields(TrainingArguments)]
    for name in values:
        if name not in known and (meant := nearest(name, known)):  # otherwise a field of another trainer's arguments
            raise AdapterError(f"Arguments({name}=...): TrainingArguments has no field {name!r}.{meant}")


def _check_best(run: Run, view: ArgumentsView) -> None:
    callbacks = [getattr(callback, "callback", None) for callback in hooks_of(run).callbacks.values()]
    classes = {base.__name__ for callback in callbacks for base in type(callback).__mro__}
    if view.metric_for_best_model is None and "EarlyStoppingCallback" in classes:
        raise AdapterError(
            "EarlyStoppingCallback needs args.metric_for_best_model, but no callback of the list watches a result. Add "
            'Arguments(metric_for_best_model="loss") of cadenza.compat.transformers, or '
            'Checkpoint(keep_best=("eval/loss", "min")).'
        )
