"""Optimizers by the names that ``nf.train(optimizer="sgd")`` knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from cadenza.errors import nearest

KINDS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, ("momentum", "weight_decay", "nesterov")),
    "adam": (torch.optim.Adam, ("betas", "eps", "weight_decay", "amsgrad")),
    "adam_w": (torch.optim.AdamW, ("betas", "eps", "weight_decay", "amsgrad")),
    "adamw": (torch.optim.AdamW, ("betas", "eps", "weight_decay", "amsgrad")),
    "rmsprop": (torch.optim.RMSprop, ("alpha", "eps", "weight_decay", "momentum", "centered")),
    "adagrad": (torch.optim.Adagrad, ("lr_decay", "weight_decay", "eps")),
}
"""By name: the optimizer, and the settings of ``optimization_params`` that it takes besides ``lr``."""

LENGTHS = ("num_epochs", "max_steps", "grad_norm_clip")  # what says how long and how to train, and is no optimizer's


def check(optimizer: str | Optimizer, params: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError unless `built` can make of it an optimizer."""
    if isinstance(optimizer, Optimizer):
        return
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer must be a name such as 'sgd', or an optimizer that is made already; got {optimizer!r}")
    if optimizer not in KINDS:
        raise ValueError(f"no optimizer is called {optimizer!r}.{nearest(optimizer, KINDS)} There is {list(KINDS)}")
    if params.get("lr") is None:
        raise ValueError(f"optimization_params needs 'lr'; it has {list(params)}")
    known = KINDS[optimizer][1]
    for name in _settings(params):
        if name not in known:
            raise ValueError(f"{optimizer!r} has no setting {name!r}.{nearest(name, known)} It has lr, {', '.join(known)}")


def built(optimizer: str | Optimizer, parameters: Iterable[Parameter], params: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer of these parameters; one that is there already as it is. SGD has a momentum of 0.9 unless told.

    Raises:
        TypeError: It is neither a name nor an optimizer.
        ValueError: The name is not known, a setting is none of this optimizer's, or no weight is to be trained; the message
            says what there is.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    check(optimizer, params)
    settings = _settings(params)
    if optimizer == "sgd":
        settings.setdefault("momentum", 0.9)
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        raise ValueError("there is nothing to train: modules without weights, or all frozen; unfreeze() lets them be trained")
    return KINDS[optimizer][0](trained, lr=params["lr"], **settings)


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in LENGTHS and name != "lr"}
