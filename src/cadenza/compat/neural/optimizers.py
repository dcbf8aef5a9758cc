"""Optimizers by name, for ``nf.train(optimizer="sgd")``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from cadenza.compat.neural.arguments import limit
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.updates import AdamW, Novograd
from cadenza.errors import nearest

ADAM = ("betas", "eps", "weight_decay", "amsgrad")

KINDS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, ("momentum", "weight_decay", "nesterov")),
    "adam": (torch.optim.Adam, ADAM),
    "adam_w": (AdamW, ADAM),
    "novograd": (Novograd, ("betas", "weight_decay", "luc", "luc_eta")),
    "fused_adam": (torch.optim.AdamW, ("betas", "eps", "weight_decay")),  # Apex's FusedAdam decays like torch's AdamW
    "adamw": (torch.optim.AdamW, ADAM),
    "rmsprop": (torch.optim.RMSprop, ("alpha", "eps", "weight_decay", "momentum", "centered")),
    "adagrad": (torch.optim.Adagrad, ("lr_decay", "weight_decay", "eps")),
}
"""By name: the optimizer, and the keys of ``optimization_params`` that it accepts besides ``lr``. NeMo lacks the last three."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "novograd": {"betas": (0.95, 0.25)},
    "fused_adam": {"weight_decay": 0.0},
}
"""NeMo's settings that differ from the defaults of the optimizers."""

ABSENT = {
    "fused_novograd": "Use 'novograd'. Apex's FusedNovoGrad also corrects the bias and decays the weights inside the moment.",
    "fused_lamb": "Pass a LAMB optimizer as an object.",
}
"""NeMo's names that need Apex, and their replacements."""

_WITH_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)

LENGTHS = ("num_epochs", "max_steps", "grad_norm_clip")  # keys that are not arguments of the optimizer

WITHOUT_EFFECT = ("momentum", *ADAM, "luc", "luc_eta", "larc", "larc_eta", "amp_min_loss_scale")
"""Keys that NeMo reads for some optimizers, and ignores for the others."""


def check(optimizer: str | Optimizer, params: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if `built` cannot build an optimizer from these arguments."""
    if isinstance(optimizer, Optimizer):
        return
    if not isinstance(optimizer, str):
        raise TypeError(f"optimizer must be a name such as 'sgd', or an optimizer; got {optimizer!r}")
    name = optimizer.lower()
    if name in ABSENT:
        raise ValueError(f"optimizer {optimizer!r} is not available, because it needs NVIDIA Apex. {ABSENT[name]}")
    if name not in KINDS:
        raise ValueError(f"there is no optimizer {optimizer!r}.{nearest(name, KINDS)} The known names are {list(KINDS)}")
    if params.get("lr") is None:
        raise ValueError(f"optimization_params needs 'lr'; got {list(params)}")
    if params.get("larc"):
        raise ValueError("larc=True is not available, because it needs NVIDIA Apex. Pass an optimizer with LARC as an object.")
    known = KINDS[name][1]
    for key in _settings(params):
        if key not in known and key not in WITHOUT_EFFECT:
            raise ValueError(f"{optimizer!r} has no argument {key!r}.{nearest(key, known)} It has lr, {', '.join(known)}")


def params_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return ``optimization_params`` with whole numbers as ``num_epochs`` and ``max_steps``.

    Raises:
        TypeError: It is not a dict, or a number in it is not a number.
    """
    if not isinstance(given, Mapping | None):
        raise TypeError(f"optimization_params must be a dict such as {{'lr': 0.1, 'num_epochs': 2}}; got {given!r}")
    params = dict(given or {})
    rate = params.get("lr", 0.0)
    if not isinstance(rate, float | int | Tensor | None):
        raise TypeError(f"'lr' in optimization_params must be a number; got {rate!r}")
    return {**params, **{name: limit(name, params[name]) for name in ("num_epochs", "max_steps") if name in params}}


def built(optimizer: str | Optimizer, parameters: Iterable[Parameter], params: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer of these parameters; return an optimizer instance unchanged. SGD has momentum 0.9 by default.

    A warning names the settings that the optimizer does not have and NeMo ignores, too.

    Raises:
        TypeError: It is neither a name nor an optimizer.
        ValueError: The name or an argument is unknown, or no weight is trainable.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    check(optimizer, params)
    kind, known = KINDS[optimizer.lower()]
    given = _settings(params)
    if ignored := [key for key in given if key not in known]:
        logging.warning("optimization_params: these settings have no effect on %s: %s", optimizer, ", ".join(ignored))
    settings = {**DEFAULTS.get(optimizer.lower(), {}), **{key: given[key] for key in given if key in known}}
    if "luc_eta" in settings:
        settings["luc_trust"] = settings.pop("luc_eta")
    weights = list(parameters)  # frozen ones too, as in NeMo: UnfreezeCallback may unfreeze them during the training
    if not any(weight.requires_grad for weight in weights):
        raise ValueError("no module has a trainable weight; call unfreeze() on one of them")
    if kind in _WITH_FUSED:
        settings["fused"] = (
            False  # NeMo's rounding; without this, a hint about a fused one appears, which nf.train cannot follow
        )
    return kind(weights, lr=params["lr"], **settings)


def _settings(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name not in LENGTHS and name != "lr"}
