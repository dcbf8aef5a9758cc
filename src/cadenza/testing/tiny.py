"""Complete runs of a model with two weights, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.engine.training_log import EpochMeans
from cadenza.loops.foreign import AnyCallback
from cadenza.run import Run
from cadenza.trainer import Trainer

Batch = tuple[Tensor, Tensor]


def tiny_model() -> nn.Linear:
    """Return a model of two weights, which always have the same values."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    return model


def tiny_loader(batches: int = 5, batch_size: int = 2) -> list[Batch]:
    """Return batches ``(inputs, targets)`` of ``y = 2x + 1``: shapes (batch_size, 1), float32.

    Args:
        batches: The number of batches.
        batch_size: The number of samples in each.

    >>> [(inputs.tolist(), targets.tolist()) for inputs, targets in tiny_loader(batches=2, batch_size=1)]
    [([[-1.0]], [[-1.0]]), ([[1.0]], [[3.0]])]
    """
    inputs = torch.linspace(-1, 1, batches * batch_size).unsqueeze(1)
    return list(zip(inputs.split(batch_size), (2 * inputs + 1).split(batch_size), strict=True))


def tiny_trainer(
    *,
    callbacks: Iterable[AnyCallback] = (),
    epochs: int | None = None,
    steps: int | None = None,
    batches: int = 5,
    losses: Sequence[float] | None = None,
    loader: Iterable[Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """Return a trainer of a two-weight model on the CPU.

    Args:
        callbacks: The callbacks to test.
        epochs: ``max_epochs``; 1 if neither `steps` nor ``max_tokens`` is given.
        steps: ``max_steps``.
        batches: Batches in an epoch.
        losses: The loss of each batch, instead of a computed one; their number replaces `batches`.
        loader: A loader to use instead of `tiny_loader`.
        arguments: Further arguments of `Trainer`. Nothing is shown unless you pass ``progress=True``, and no mean of each epoch
            is logged, so that records have what the callbacks log.

    >>> trainer = tiny_trainer(losses=[3.0, 2.0, 1.0])
    >>> trainer.fit().progress.step
    3
    """
    script = iter(losses or ())

    def scripted(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch[0]).sum() * 0.0 + next(script)
        return loss

    def squared_error(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    if "step_fn" not in arguments:
        arguments.setdefault("compute_loss", scripted if losses else squared_error)
    trainer = Trainer(
        tiny_model() if (model := arguments.pop("model", None)) is None else model,  # a module may be false: it has a length
        arguments.pop("optimizer", _sgd),
        tiny_loader(len(losses) if losses else batches) if loader is None else loader,
        max_epochs=1 if epochs is None and steps is None and "max_tokens" not in arguments else epochs,
        max_steps=steps,
        callbacks=callbacks,
        **{"progress": False, **({} if "driver" in arguments else {"driver": "single", "device": "cpu"}), **arguments},
    )
    trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, EpochMeans)]
    return trainer


def tiny_run(**arguments: Any) -> Run:
    """Do a complete run of a two-weight model in milliseconds; the arguments are those of `tiny_trainer`.

    >>> run = tiny_run(epochs=2, accumulate=2)
    >>> run.progress.now()
    Counters(epoch=2, step=6, batch=10, batch_in_epoch=0, samples=20, tokens=0)
    """
    return tiny_trainer(**arguments).fit()


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
