"""One small problem, trained by Keras's ``model.fit`` and by a native trainer from the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Run, Trainer, supervised
from cadenza.callbacks import Evaluate
from cadenza.loading import TensorBatches

INPUTS = torch.linspace(-1, 1, 20).reshape(10, 2)
TARGETS = INPUTS.sum(1, keepdim=True) * 2 + 0.3
KERNEL = torch.tensor([[0.5], [-0.25]])


def keras_package() -> Any:
    """Return the package, or skip the tests of the file."""
    return pytest.importorskip("keras", reason="keras is not installed: pip install -r with the group 'adapters'")


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
    keras = keras_package()
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
        torch.optim.SGD(model.parameters(), rate),
        arguments.pop("loader", None) or TensorBatches(INPUTS, TARGETS, batch_size=3),
        arguments.pop("compute_loss", None) or supervised(nn.functional.mse_loss),
        progress=False,
        callbacks=[*callbacks, *evaluations],
        **({"max_epochs": 3} | arguments),
    )


def fit_natively(callbacks: Iterable[Any], *, resume: Any = False, **arguments: Any) -> Run:
    """Train with a native trainer."""
    return native_trainer(callbacks, **arguments).fit(resume=resume)
