"""From a batch to a loss, and what the outputs of a batch say."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, cast

import torch
from torch import Tensor, nn

from cadenza.drivers.sharding import is_sharded
from cadenza.errors import DataError, LossError
from cadenza.status.outputs import Outputs, scalar
from cadenza.status.reprs import brief, signature_of
from cadenza.text.hints import hints


class supervised:  # noqa: N801  # used like a function
    """Compute the loss of ``(inputs, targets)`` batches.

    The outputs are ``loss``, ``predictions`` (what the model returned) and ``targets``.

    Args:
        loss_fn: Called as ``loss_fn(predictions, targets)``; returns a loss of shape ().

    >>> import torch
    >>> compute = supervised(nn.functional.mse_loss)
    >>> compute(nn.Identity(), (torch.ones(2), torch.zeros(2)))["loss"]
    tensor(1.)
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        if not callable(loss_fn):
            raise TypeError(f"supervised takes a function (predictions, targets) -> loss; got {loss_fn!r}")
        if inspect.isclass(given := cast("object", loss_fn)) and issubclass(given, nn.Module):
            name = given.__name__
            raise TypeError(
                f"supervised takes a function (predictions, targets) -> loss; got the class {name}. Make it: {name}()"
            )
        self.loss_fn = loss_fn
        self._is_checked = False

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        try:
            # Not whatever has two parts: a tensor of two rows and a dict of two names are no pairs.
            inputs, targets = batch if isinstance(batch, list | tuple) else ()
        except (TypeError, ValueError):
            raise DataError(
                f"supervised(...) expects batches (inputs, targets); got {_described(batch)}. For other batches give a "
                "function compute_loss(model, batch)."
            ) from None
        predictions = model(inputs)
        # A graph that is compiled here would be compiled once more when this is checked.
        loss_fn = self.loss_fn if torch.compiler.is_compiling() or self._is_checked else self._first_loss
        return {"loss": loss_fn(predictions, targets), "predictions": predictions, "targets": targets}

    def _first_loss(self, predictions: Any, targets: Any) -> Tensor:
        self._is_checked = True
        _check_shapes(predictions, targets)
        return self.loss_fn(predictions, targets)

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return what the model makes of ``(inputs, targets)``, or of inputs alone."""
        return model(batch[0] if isinstance(batch, list | tuple) else batch)

    def __repr__(self) -> str:
        return f"supervised({self.loss_fn!r})"


class ModelsOwnLoss:
    """Call a model that returns its loss: a tensor, a mapping, or an object with ``.loss``.

    A batch that is a mapping is handed over by name, and only what the model's ``forward`` has a name for.
    """

    def __init__(self, model: nn.Module) -> None:
        self._signature = signature_of(model.forward)
        parameters = self._signature.parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = None if takes_all else {parameter.name for parameter in parameters}

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.predict(model, batch)

    def takes(self, batch: Any) -> bool:
        """Return whether the model can be called with a batch."""
        arguments, named = self._arguments(batch)
        try:
            self._signature.bind(*arguments, **named)
        except TypeError:
            return False
        return True

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return what the model returns."""
        arguments, named = self._arguments(batch)
        return model(*arguments, **named)

    def _arguments(self, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if isinstance(batch, Mapping):
            return (), {name: part for name, part in batch.items() if self._names is None or name in self._names}
        return (batch if isinstance(batch, list | tuple) else (batch,)), {}

    def __repr__(self) -> str:
        return "the model's own loss"


def no_loss(model: nn.Module, batch: Any) -> Any:
    """Stand where a run that is trained by a ``step_fn`` has no ``compute_loss``."""
    raise DataError(
        "this run is trained by a step_fn, which does not say how to judge a batch: give Evaluate or Trainer.evaluate a "
        "compute=, a function (model, batch) -> {'loss': ..., 'predictions': ..., 'targets': ...}"
    )


def _check_shapes(predictions: object, targets: object) -> None:
    """Warn of numbers that a loss such as `nn.MSELoss` would pair wrongly: (B, 1) and (B,) broadcast to (B, B)."""
    if not isinstance(predictions, Tensor) or not isinstance(targets, Tensor) or not targets.is_floating_point():
        return
    if predictions.shape != targets.shape and predictions.numel() == targets.numel() > 1:
        shape = tuple(predictions.shape)
        warnings.warn(
            f"predictions have the shape {shape} and targets {tuple(targets.shape)}: many losses compare each prediction with "
            f"all targets then. Give both one shape, such as targets.reshape{shape}.",
            stacklevel=3,
        )


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with {list(batch)}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a tensor of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"


# -- outputs ---------------------------------------------------------------------------------------


def count_in(outputs: Outputs, name: Literal["samples", "tokens"]) -> int | None:
    """Return ``outputs["samples"]`` or ``outputs["tokens"]``, by which a batch says how many it has; None if it does not say.

    Raises:
        LossError: It is no whole number on the host, or below 0.
    """
    value = dict.get(outputs, name)
    if value is None:
        return None
    if (number := whole_count(value)) is not None:
        return number
    raise LossError(
        f"outputs[{name!r}] must be a whole number of at least 0, on the host; got {brief(value)}. {hints('counts')[name]}"
    )


def whole_count(value: object) -> int | None:
    """Return a whole number of at least 0 as ``int``; None for all else, and for a tensor that the host would wait for."""
    if type(value) is not int:
        if isinstance(value, Tensor) and not (value.is_cpu and value.ndim == 0):
            return None
        try:
            value = operator.index(cast("SupportsIndex", value))
        except TypeError:
            return None
    return value if value >= 0 else None


def counted_tokens(count: Callable[[Any], int], batch: Any) -> int:
    """Return the tokens of a batch by a function, before the transfer to the device: a count of its values needs no wait.

    Raises:
        DataError: The function returns no whole number of at least 0 that is on the host.
    """
    number = whole_count(counted := count(batch))
    if number is None:
        raise DataError(
            f"tokens={brief(count)} must return a whole number of at least 0, on the host; got {brief(counted)}. It is "
            "called with the batch as the loader yields it. Return a shape, such as batch['input_ids'].numel(), or "
            "int((labels != -100).sum())."
        )
    return number


def reported_tokens(outputs: Outputs, *, count: Callable[[Any], int] | None, limit: int | None) -> int:
    """Return the tokens that the outputs of a batch report.

    Args:
        outputs: The outputs.
        count: The function that counts tokens; None: the outputs may report them.
        limit: The tokens after which the run ends; None: it does not need them.

    Raises:
        LossError: They are no whole number; they are counted by the function, too; or there are none, and the run needs them.
    """
    reported = count_in(outputs, "tokens")
    if count is not None and reported is not None:
        raise LossError(
            f"tokens are counted twice: by Trainer(tokens={count!r}), and by outputs['tokens'], which is {reported}. Leave out "
            "one of the two."
        )
    if count is None and reported is None and limit is not None:
        raise LossError(
            f"max_tokens={limit} needs the number of tokens in each batch: expected outputs['tokens']; got outputs "
            f"{list(outputs)}. Return it from compute_loss (or step_fn), as in {{'loss': loss, 'tokens': "
            "batch['input_ids'].numel()}, or give Trainer(tokens=...), a function (batch) -> int."
        )
    return reported or 0


def checked_loss(loss: object, model: nn.Module | None = None) -> Tensor:
    """Return `loss` with shape (), a tensor of one element through which gradients can flow to the weights of `model`.

    Raises:
        LossError: It is none; the message says what to do.
    """
    if isinstance(loss, Tensor) and loss.ndim:
        loss = scalar(loss)
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
    elif type(loss) is not Tensor and is_sharded(loss):
        came, remedy = "a DTensor", "return loss.full_tensor(), or give the last layer the style output_layouts=Replicate()"
    else:
        return loss
    raise LossError(f"the loss must be a tensor of shape () that has a gradient; got {came}: {remedy}.")


def on_host(value: Any) -> Any:
    """Return a tensor, or the tensors of a mapping, list or tuple, detached and on the host. Others are returned unchanged."""
    if isinstance(value, Mapping):
        return {key: on_host(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_host(part) for part in value)
    return value.detach().cpu() if isinstance(value, Tensor) else value


def joined(parts: list[Any]) -> Any:
    """Return parts joined along the first dimension; a list of them where they do not fit together."""
    first = parts[0] if parts else None
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    alike = all(isinstance(part, Tensor) and part.ndim and part.shape[1:] == parts[0].shape[1:] for part in parts)
    return torch.cat(parts) if parts and alike else parts


def predictions_in(outputs: Mapping[str, Any]) -> Any:
    """Return what the model predicted, by our name or by that of Hugging Face models; None if it is not there."""
    return outputs["predictions"] if "predictions" in outputs else outputs.get("logits")


def targets_in(batch: Any, outputs: Mapping[str, Any]) -> Any:
    """Return what should have been predicted, by our name or by that of Hugging Face's batches; None if it is not there."""
    if "targets" in outputs:
        return outputs["targets"]
    return batch.get("labels") if isinstance(batch, Mapping) else None
