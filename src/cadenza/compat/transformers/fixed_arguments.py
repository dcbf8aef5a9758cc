"""Objects that transformers callbacks receive unchanged instead of a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.compat.adapter.foreign import callbacks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback

if TYPE_CHECKING:
    from cadenza.run import Run


class FixedArguments(BaseCallback):
    """The ``TrainingArguments`` and the tokenizer of a run. It has no hooks.

    Args:
        arguments: The ``TrainingArguments``: callbacks of transformers receive them as ``args``.
        processing_class: The tokenizer or processor: they receive it as ``processing_class``.
    """

    name: str | None = "TrainingArguments"
    logs_training = True

    def __init__(self, arguments: Any, processing_class: Any = None) -> None:
        self.arguments: Any = arguments
        self.processing_class: Any = processing_class

    def listeners(self) -> list[Listener]:
        return []


def fixed_arguments_of(run: Run) -> FixedArguments | None:
    """Return the `FixedArguments` of a run; None for a run without ``TrainingArguments``."""
    return next(iter(callbacks_of(run, FixedArguments)), None)
