"""What a batch gave: ``loss`` and whatever else ``compute_loss`` returned, and values that are computed when asked for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cadenza.errors import LossError, OutputError, nearest
from cadenza.hooks.moments import Callback

if TYPE_CHECKING:
    from cadenza.run import Run


class Outputs(dict[str, Any]):
    """The outputs of one batch. A derived value is computed the first time it is asked for, and kept with the batch."""

    run: Run | None = None  # set where the run has derived values

    def take(self, result: object) -> None:
        """Add what ``compute_loss`` or a model returned.

        A tensor is the loss; a mapping is taken as it is; an object with a ``loss`` gives its fields.

        Raises:
            LossError: `result` is none of these, or has no loss.
        """
        if isinstance(result, Tensor):
            self["loss"] = result
            return
        self.update(parts_of(result))
        if not super().__contains__("loss"):
            came = f"a mapping with {list(self)}" if isinstance(result, Mapping) else repr(type(result).__name__)
            raise LossError(
                "compute_loss (or step_fn, or the model) must return the loss as a tensor of shape (), a mapping with the "
                f"key 'loss', or an object with a .loss; got {came}"
            )

    def __missing__(self, name: str) -> Any:
        derived = self.run.derived if self.run is not None else {}
        if name not in derived:
            known = [*self, *derived]
            raise OutputError(f"the batch has no output {name!r}; it has {known}.{nearest(name, known)}")
        if self.run is None or self.run.outputs is not self:
            raise OutputError(f"{name!r} was never asked for while its batch was there, and now the batch is gone")
        with torch.no_grad():
            self[name] = value = derived[name](self.run)
        return value

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self.run is not None and name in self.run.derived)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an output, a derived one too, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get


class Derive(Callback):
    """Name values that are computed from a batch when, and only when, somebody asks for them.

    Args:
        values: For each name a function of the run. It is called without gradient, at most once a batch.

    >>> import torch
    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> @on(Callback.on_step_end, every=2)
    ... def show(run):
    ...     print(run.progress.step, run.outputs["rounded"])
    >>> run = tiny_run(callbacks=[Derive(rounded=lambda run: round(float(run.loss), 1)), show], steps=2)
    2 0.2
    """

    def __init__(self, **values: Callable[[Run], Any]) -> None:
        for name, function in values.items():
            if not callable(function):
                raise TypeError(f"Derive({name}=...) must be a function of the run; got {function!r}")
        self.values = values

    def on_setup(self, run: Run) -> None:
        for name, function in self.values.items():
            if name in run.derived:
                raise OutputError(f"{name!r} is derived twice; give one of the two another name")
            run.derived[name] = function


def samples_in(outputs: Outputs) -> int | None:
    """Return ``outputs["samples"]``, by which a batch says how many samples it has; None if it does not say.

    Raises:
        LossError: It is no whole number on the host, or below 0.
    """
    value = dict.get(outputs, "samples")
    if value is None or (type(value) is int and value >= 0):
        return value
    on_host = not isinstance(value, Tensor) or value.is_cpu  # else it would be waited for
    try:
        if on_host and (number := operator.index(value)) >= 0:
            return number
    except TypeError:
        pass
    raise LossError(
        f"outputs['samples'] must be a whole number of at least 0, on the host; got {value!r}. Return len(...) or a shape, or "
        "leave it out: the loader or the batch is asked then."
    )


def checked_loss(loss: object, model: nn.Module | None = None) -> Tensor:
    """Return `loss`, a tensor of shape () through which gradients can flow to the weights of `model`.

    Raises:
        LossError: It is none; the message says what to do.
    """
    if not isinstance(loss, Tensor):
        came, remedy = repr(type(loss).__name__), "return the tensor itself, not loss.item()"
    elif loss.ndim:
        came, remedy = f"a tensor of shape {tuple(loss.shape)}", "reduce it, for example with loss.mean()"
    elif loss.dtype.is_complex:
        came, remedy = f"a complex tensor ({loss.dtype})", "return a real number, for example loss.abs() or loss.real"
    elif not loss.requires_grad and model is not None and not any(weight.requires_grad for weight in model.parameters()):
        came = "a loss of a model in which all parameters are frozen"
        remedy = "call requires_grad_(True) on those to train; Freeze(...) can do so at a step of its own"
    elif not loss.requires_grad:
        came = "a tensor without gradient"
        remedy = "compute it from the model's outputs, without detach(), no_grad() or .item()"
    else:
        return loss
    raise LossError(f"the loss must be a tensor of shape () that has a gradient; got {came}: {remedy}.")


def parts_of(result: object) -> Mapping[str, Any]:
    """Return the named parts of a mapping, a dataclass or an object with a ``loss``."""
    if isinstance(result, Mapping):
        return result
    if is_dataclass(result):
        return {field.name: getattr(result, field.name) for field in fields(result)}
    loss = {"loss": result.loss} if hasattr(result, "loss") else {}
    return {**getattr(result, "__dict__", {}), **loss}


def on_host(value: Any) -> Any:
    """Return a tensor, or the tensors of a mapping, detached and on the host. Other values are returned unchanged."""
    if isinstance(value, Mapping):
        return {key: on_host(part) for key, part in value.items()}
    return value.detach().cpu() if isinstance(value, Tensor) else value


def joined(parts: list[Any]) -> Any:
    """Return parts joined along the first dimension; a list of them where they do not fit together."""
    first = parts[0] if parts else None
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    alike = all(isinstance(part, Tensor) and part.ndim and part.shape[1:] == parts[0].shape[1:] for part in parts)
    return torch.cat(parts) if parts and alike else parts
