"""The arguments of a trainer as a line and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cadenza.optim import optimizers as updates
from cadenza.status.counting import counted
from cadenza.status.shown import brief


class Recipe:
    """Shows the arguments of a trainer: ``repr``, and a table in a notebook. Arguments that are not set are left out."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in _arguments(self))})"

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from cadenza.status.markup import notebook_table  # imported here: few runs are in a notebook

        return notebook_table(type(self).__name__, (), _arguments(self))


def plain(trainer: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a trainer that must be equal on all ranks, as plain data. `names` are those of its callbacks."""
    given = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps", "accumulate", "precision", "seed")}
    return {"callbacks": [*names], **given}


def described(trainer: Any, names: Iterable[str], optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return all arguments of a trainer as plain data: of the model its class and size, of the optimizers their settings."""
    model = f"{type(trainer.model).__name__}, {sum(one.numel() for one in trainer.model.parameters())} parameters"
    return {"model": model, "optimizer": [*map(updates.described, optimizers)], **plain(trainer, names)}


def _arguments(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each argument of the trainer that is set."""
    yield "model", _model(trainer.model)
    yield "optimizer", _optimizers(trainer.optimizer)
    yield "loader", _loader(trainer.loader)
    plain = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps", "seed", "directory")}
    yield from ((name, str(value)) for name, value in plain.items() if value is not None)
    if trainer.accumulate != 1:
        yield "accumulate", str(trainer.accumulate)
    yield "precision", trainer.precision
    yield "driver", brief(trainer.driver)
    yield "callbacks", f"[{', '.join(map(brief, trainer.callbacks))}]"


def _model(model: nn.Module) -> str:
    return f"{type(model).__name__} of {counted(sum(one.numel() for one in model.parameters()), 'parameter')}"


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
