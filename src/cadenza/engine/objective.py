"""From a batch to a loss: for ``(inputs, targets)``, and for models that compute their loss themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from cadenza.errors import DataError
from cadenza.status.shown import signature_of


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
        return {"loss": self.loss_fn(predictions, targets), "predictions": predictions, "targets": targets}

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


def _described(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a mapping with {list(batch)}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a tensor of shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
