"""What hooks see of a batch and its step: the outputs, and ``run.window``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from cadenza.errors import LossError, OutputError, nearest

if TYPE_CHECKING:
    from cadenza.run import Run


class Outputs(dict[str, Any]):
    """The outputs of one batch. A derived value is computed when it is first read, and kept with the batch.

    >>> import torch
    >>> outputs = Outputs()
    >>> outputs.take({"loss": torch.tensor(0.5), "predictions": torch.ones(2)})
    >>> outputs["loss"], list(outputs)
    (tensor(0.5000), ['loss', 'predictions'])
    """

    run: Callable[[], Run | None] | None = None
    """Returns the run of the batch, where it has derived values; None once it is deleted."""
    derived: Mapping[str, Callable[[Run], Any]] = {}
    """Functions of the run by the name of the output that they compute."""

    def take(self, result: object, by: str = "compute_loss (or step_fn, or the model) must return") -> None:
        """Add what ``compute_loss`` or a model returned, or what a loop gave to its backward pass.

        A tensor is the loss. A mapping is taken unchanged. An object with a ``loss`` gives its fields. `by` begins the message
        of an error.

        Raises:
            LossError: `result` is none of these, or has no loss.
        """
        if isinstance(result, Tensor):
            self["loss"] = scalar(result) if result.ndim else result
            return
        self.update(parts_of(result))
        if not super().__contains__("loss"):
            came = f"a mapping with {list(self)}" if isinstance(result, Mapping) else repr(type(result).__name__)
            hint = {float: ". Return the tensor itself, not loss.item()", type(None): ". End the function with `return loss`"}
            raise LossError(
                f"{by} the loss as a tensor of shape (), a mapping with the key 'loss', or an object with a .loss; got {came}"
                f"{hint.get(type(result), '')}"
            )
        self["loss"] = scalar(self["loss"])

    def __missing__(self, name: str) -> Any:
        if name not in self.derived:
            known = [*self, *self.derived]
            raise OutputError(f"the batch has no output {name!r}; it has {known}.{nearest(name, known)}")
        run = None if self.run is None else self.run()
        if run is None or run.outputs is not self:
            raise OutputError(f"{name!r} was not read while its batch was there, and the batch is gone. Read it in a hook.")
        with torch.no_grad():
            self[name] = value = self.derived[name](run)
        return value

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.derived

    def get(self, name: str, default: Any = None) -> Any:
        """Return an output, a derived one too, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get


def scalar(loss: Any) -> Any:
    """Return a tensor of one element with shape (); all else unchanged. ``Tensor.backward`` takes any tensor of one element."""
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.ndim and loss.numel() == 1 else loss


def parts_of(result: object) -> Mapping[str, Any]:
    """Return the named parts of a mapping, a dataclass or an object with a ``loss``."""
    if isinstance(result, Mapping):
        return result
    if is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in fields(result)}
    loss = {"loss": result.loss} if hasattr(result, "loss") else {}
    return {**getattr(result, "__dict__", {}), **loss}


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The batches of the current step, or of the last one, and what its update changes. Read-only.

    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> @on(Callback.on_batch_end)
    ... def show(run, batch, outputs):
    ...     print(run.window.seen, run.window.size, run.window.loss_scale, len(run.window.parameters))
    >>> run = tiny_run(steps=1, accumulate=2, callbacks=[show])
    1 2 0.5 2
    2 2 0.5 2
    """

    seen: int
    """The batches of the step so far."""
    size: int
    """The batches of a whole step."""
    weights: Sequence[float | Tensor]
    """The weights of the batches so far; empty if they have none."""
    loss_scale: float | Tensor
    """The factor on the loss of the last batch in its backward pass, without that of fp16."""
    optimizers: Sequence[Optimizer]
    """The optimizers that the step updates: one update of a ``step_fn`` or of an attached loop may have some of them."""

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters that the step updates."""
        return [parameter for optimizer in self.optimizers for group in optimizer.param_groups for parameter in group["params"]]
