"""Optimizers by name, for ``nf.train(optimizer="sgd")``."""

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
"""By name: the optimizer, and the keys of ``optimization_params`` that it accepts besides ``lr``."""

LENGTHS = ("num_epochs", "max_steps", "grad_norm_clip")  # keys that are not arguments of the optimizer


def check(optimizer: str | Optimizer, params: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if `built` cannot build an optimizer from these arguments."""
    if isinstance(optimizer, Optimizer):
        return
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer must be a name such as 'sgd', or an optimizer; got {optimizer!r}")
    if optimizer not in KINDS:
        raise ValueError(f"there is no optimizer {optimizer!r}.{nearest(optimizer, KINDS)} The known names are {list(KINDS)}")
    if params.get("lr") is None:
        raise ValueError(f"optimization_params needs 'lr'; got {list(params)}")
    known = KINDS[optimizer][1]
    for name in _settings(params):
        if name not in known:
            raise ValueError(f"{optimizer!r} has no argument {name!r}.{nearest(name, known)} It has lr, {', '.join(known)}")


def built(optimizer: str | Optimizer, parameters: Iterable[Parameter], params: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer of these parameters; return an optimizer instance unchanged. SGD has momentum 0.9 by default.

    Raises:
        TypeError: It is neither a name nor an optimizer.
        ValueError: The name or an argument is unknown, or no weight is trainable.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    check(optimizer, params)
    settings = _settings(params)
    if optimizer == "sgd":
        settings.setdefault("momentum", 0.9)
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        raise ValueError("no module has a trainable weight; call unfreeze() on one of them")
    return KINDS[optimizer][0](trained, lr=params["lr"], **settings)


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in LENGTHS and name != "lr"}
