"""Count the tokens of a batch: those its outputs say, or those that a function counts before it is on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cadenza.engine.outputs import count_in, whole_count
from cadenza.engine.step_state import StepState
from cadenza.errors import DataError, LossError


class TokenCount:
    """The tokens of the current batch on this rank.

    Args:
        function: ``function(batch)`` returns the tokens of a batch of the loader; None: the outputs of a batch say them.
        limit: The ``max_tokens`` of the run.
    """

    __slots__ = ("_limit", "asked", "function", "in_batch")

    def __init__(self, function: Callable[[Any], int] | None = None, limit: int | None = None) -> None:
        self.function: Callable[[Any], int] | None = function
        self._limit = limit
        self.asked: bool = function is not None or limit is not None
        """Whether tokens are counted in any case; else they are if the outputs of a batch say them."""
        self.in_batch: int = 0
        """The tokens that the function counted in the current batch."""

    def read(self, batch: Any) -> None:
        """Count a batch by the function, before the transfer to the device: a count of its values needs no wait.

        Raises:
            DataError: The function returns no whole number of at least 0 that is on the host.
        """
        assert self.function is not None, "only called with a function"
        counted = self.function(batch)
        number = whole_count(counted)
        if number is None:
            raise DataError(
                f"tokens={self.function!r} must return a whole number of at least 0, on the host; got {counted!r}. It is "
                "called with the batch as the loader yields it. Return a shape, such as batch['input_ids'].numel(), or "
                "int((labels != -100).sum())."
            )
        self.in_batch = number

    def of(self, step: StepState) -> int:
        """Return the tokens of the current batch, after its forward pass.

        Raises:
            LossError: The outputs give no whole number; give one beside the function; or give none, and the run needs it.
        """
        reported = count_in(step.outputs, "tokens")
        if self.function is not None:
            if reported is not None:
                raise LossError(
                    f"tokens are counted twice: by Trainer(tokens={self.function!r}), and by outputs['tokens'], which is "
                    f"{reported}. Leave out one of the two."
                )
            return self.in_batch
        if reported is None and self._limit is not None and not step.skipping:
            raise LossError(
                f"max_tokens={self._limit} needs the number of tokens in each batch: expected outputs['tokens']; got outputs "
                f"{list(step.outputs)}. Return it from compute_loss (or step_fn), as in {{'loss': loss, 'tokens': "
                "batch['input_ids'].numel()}, or give Trainer(tokens=...), a function (batch) -> int."
            )
        return reported or 0
