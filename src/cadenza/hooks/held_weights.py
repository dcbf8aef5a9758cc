"""How a callback declares that it holds other weights of the model, such as an average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from cadenza.run import Run


class HeldWeights(NamedTuple):
    """Where the state of a callback holds weights of the model.

    >>> HeldWeights("average").tensors_in({"average": {"weight": 1.0}, "updates": 3})
    {'weight': 1.0}
    """

    entry: str
    """The name in ``state_dict()``. Its value maps the names of the model's tensors to tensors."""
    prefix: str = ""
    """The beginning of these names that the model's names do not have; entries without it are left out."""

    def tensors_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors in a state of the callback, by the model's names."""
        found = state[self.entry].items()
        return {name.removeprefix(self.prefix): one for name, one in found if name.startswith(self.prefix)}


@runtime_checkable
class HoldsWeights(Protocol):
    """A callback that holds other weights of the model. They have a name, for ``weights=`` wherever a checkpoint is read.

    ``Evaluate(weights=...)`` and `Trainer.evaluate` take them as well. If the callback has a method ``in_place(run)``, which
    returns a context in which the model has these weights, that one is used in a run.

    >>> from cadenza import Callback
    >>> class First(Callback):
    ...     \"\"\"Holds the weights after the first step.\"\"\"
    ...     first = {}
    ...     def on_step_end(self, run):
    ...         self.first = self.first or {name: one.clone() for name, one in run.model.state_dict().items()}
    ...     def state_dict(self):
    ...         return {"first": self.first}
    ...     def held_weights(self):
    ...         return {"first": HeldWeights("first") if self.first else None}
    >>> from cadenza.callbacks import Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> run = tiny_run(callbacks=[First(), Evaluate(tiny_loader(), "1 step", weights="first")])
    >>> len({value for _, value in run.history["eval/loss"]})
    1
    """

    def held_weights(self) -> Mapping[str, HeldWeights | None]:
        """Return, by the name of the weights, where ``state_dict()`` has them; None if there are none yet."""


@runtime_checkable
class ReplacesWeights(Protocol):
    """A callback that puts other weights into the model when a run ends, after the last save, such as the best ones."""

    def put_in_place_again(self, run: Run, state: Mapping[str, Any]) -> None:
        """Put them into the model of a run that is over, from the state in its checkpoint. Every rank must call this."""
