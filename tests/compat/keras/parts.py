"""One small problem, trained by Keras's ``model.fit`` and by a native trainer from the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Run, Trainer, supervised
from cadenza.callbacks import Evaluate
from cadenza.compat.keras.events import EVENTS
from cadenza.loading import TensorBatches

keras: Any = pytest.importorskip("keras", reason="keras is not installed: pip install -r with the group 'adapters'")
K: Any = keras.callbacks

INPUTS = torch.linspace(-1, 1, 20).reshape(10, 2)
TARGETS = INPUTS.sum(1, keepdim=True) * 2 + 0.3
KERNEL = torch.tensor([[0.5], [-0.25]])


def fit_at_home(
    callbacks: Iterable[Any],
    *,
    epochs: int = 3,
    rate: float = 0.1,
    validate: bool = True,
    samples: int = 10,
    batch_size: int = 3,
    **optimizer: Any,
) -> Any:
    """Train with ``model.fit`` of Keras: 4 batches an epoch, the last one with a single sample; return the model."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.set_weights([KERNEL.numpy(), torch.tensor([0.1]).numpy()])
    model.compile(keras.optimizers.SGD(rate, **optimizer), "mse")
    data = (INPUTS[:samples].numpy(), TARGETS[:samples].numpy())
    validation: dict[str, Any] = {"validation_data": data, "validation_batch_size": 4} if validate else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras hides an error of a conversion that warns, and leaves tensors in the logs
        model.fit(
            *data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **validation
        )
    return model


def native_model() -> nn.Linear:
    """Return the same model for torch."""
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(KERNEL.T)
        model.bias.fill_(0.1)
    return model


def native_trainer(callbacks: Iterable[Any], *, rate: float = 0.1, validate: bool = True, **arguments: Any) -> Trainer:
    """Return a native trainer for the same problem. The evaluation stands after the callbacks in the list."""
    model = arguments.pop("model", None) or native_model()
    evaluations = [Evaluate(TensorBatches(INPUTS, TARGETS, batch_size=4))] if validate else []
    return Trainer(
        model,
        arguments.pop("optimizer", None) or torch.optim.SGD(model.parameters(), rate),
        arguments.pop("loader", None) or TensorBatches(INPUTS, TARGETS, batch_size=3),
        arguments.pop("compute_loss", None) or supervised(nn.functional.mse_loss),
        progress=False,
        callbacks=[*callbacks, *evaluations],
        **({"max_epochs": 3} | arguments),
    )


def fit_natively(callbacks: Iterable[Any], *, resume: Any = False, **arguments: Any) -> Run:
    """Train with a native trainer."""
    return native_trainer(callbacks, **arguments).fit(resume=resume)


def acting(name: str, **events: Callable[..., Any]) -> Any:
    """Return a callback with these events, of a class with this name."""
    return type(name, (K.Callback,), events)()


class Recorder(K.Callback):  # type: ignore[misc]  # Keras has no types
    """Keeps each event with its number, its logs and the count of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any, Any, Any]] = []

    def see(self, name: str, number: int | None, logs: dict[str, Any]) -> None:
        self.seen.append((name, number, logs, int(self.model.optimizer.iterations)))


def _recording(name: str) -> Callable[..., None]:
    def event(self: Recorder, *arguments: Any, **keywords: Any) -> None:
        logs = dict(keywords.get("logs") or (arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}))
        self.see(name, arguments[0] if arguments and isinstance(arguments[0], int) else None, logs)
        getattr(K.Callback, name)(self, *arguments, **keywords)

    return event


for _name in [name for name in EVENTS if name.startswith("on_")]:
    setattr(Recorder, _name, _recording(_name))
