"""The arguments of a trainer as texts and plain data: for ``repr``, for the plan, for ``run.json`` and for other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cadenza.engine.arguments import plain_accumulate
from cadenza.engine.module_state import in_evaluation_mode
from cadenza.engine.plan import LIMITS
from cadenza.optim import optimizers as updates
from cadenza.optim.model_state import Walk
from cadenza.optim.parameters import parameters_of
from cadenza.status.formats import counted, few
from cadenza.status.reprs import brief


def plain(trainer: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a trainer that must be equal on all ranks, as plain data. `names` are those of its callbacks."""
    given = {name: plain_accumulate(getattr(trainer, name)) for name in (*LIMITS, "accumulate", "precision", "seed")}
    return {"callbacks": [*names], **given}


def described(trainer: Any, elements: int, names: Iterable[str], optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return all arguments of a trainer as plain data: of the model its class and size, of the optimizers their settings."""
    model = f"{type(trainer.model).__name__}, {elements} parameters"
    optimizer = [*map(updates.described, optimizers)]
    loss = {} if trainer.step_fn is not None else {"compute_loss": brief(trainer.compute_loss)}
    return {"model": model, "optimizer": optimizer, **loss, **plain(trainer, names), **trainer._facts}


def frozen_modes(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Yield a line for the plan with the modules that stay in evaluation mode and train no parameters."""
    modules = in_evaluation_mode(Walk(model).modules, {*map(id, parameters_of(optimizers))}) if model.training else {}
    if names := [name for name, trains in modules.items() if not trains]:
        yield f"stay in evaluation mode: {few(names)}"


def arguments_of(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each argument of the trainer that is set."""
    yield "model", _model(trainer.model)
    yield "optimizer", _optimizers(trainer.optimizer)
    yield "loader", _loader(trainer.loader)
    plain = {name: getattr(trainer, name) for name in (*LIMITS, "seed", "directory")}
    yield from ((name, str(value)) for name, value in plain.items() if value is not None)
    if trainer.accumulate != 1:
        yield "accumulate", str(trainer.accumulate)
    yield "precision", trainer.precision
    yield "driver", brief(trainer.driver)
    yield "callbacks", f"[{', '.join(map(brief, trainer.callbacks))}]"


def _model(model: nn.Module) -> str:
    return f"{type(model).__name__} of {counted(sum(parameter.numel() for parameter in model.parameters()), 'parameter')}"


def _loader(loader: Any) -> str:
    return f"{type(loader).__name__} of {counted(len(loader), 'batch')}" if isinstance(loader, list | tuple) else brief(loader)


def _optimizers(optimizer: object) -> str:
    if isinstance(optimizer, Optimizer):
        rates = dict.fromkeys(f"{float(group['lr']):g}" for group in optimizer.param_groups if "lr" in group)
        return f"{type(optimizer).__name__}({', '.join(f'lr={rate}' for rate in rates)})"
    if isinstance(optimizer, Sequence):
        return f"[{', '.join(map(_optimizers, optimizer))}]"
    name = brief(optimizer)
    return "a function" if name == "<lambda>" else name
