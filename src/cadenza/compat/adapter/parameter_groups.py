"""Changes by callbacks to parameter groups and ``requires_grad``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from cadenza.compat.adapter.attributes import plain_attributes
from cadenza.compat.adapter.packing import unpacked

if TYPE_CHECKING:
    from cadenza.run import Run

Signature = list[list[list[int]]]


def signature(optimizers: Sequence[Optimizer]) -> Signature:
    """Return the identities of the parameters, by optimizer and group."""
    return [[[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]


def groups_of(run: Run) -> list[list[dict[str, Any]]]:
    """Return, for each optimizer, its groups: the names of the parameters, and the plain options."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    return [[_described(group, names) for group in optimizer.param_groups] for optimizer in run.optimizers]


def regroup(run: Run, saved: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Add the groups returned by `groups_of` to the optimizers, so that saved states fit. Existing groups are kept."""
    named = dict(run.model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    for optimizer, groups in zip(run.optimizers, saved, strict=False):
        if any(name not in named for group in groups for name in group["params"]):
            continue  # belongs to another model; the checkpoint is rejected later with a message
        present = optimizer.param_groups[:]
        pairs = zip(present, groups, strict=False)
        same = [[names.get(id(parameter)) for parameter in own["params"]] == group["params"] for own, group in pairs]
        kept = next((index for index, fits in enumerate(same) if not fits), len(same))
        if kept < len(present) or kept < len(groups):
            del optimizer.param_groups[kept:]
            for group in groups[kept:]:
                optimizer.add_param_group({**group, "params": [named[name] for name in group["params"]]})


class Trainable:
    """Which parameters require a gradient. With DDP, a change needs a new wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self._flags = _flags(model)

    def renew(self, run: Run) -> None:
        """Adapt the wrapper of the driver if flags have changed. Every rank must call this, between two steps."""
        before, self._flags = self._flags, _flags(run.model)
        if before != self._flags:
            run.driver.renew(run.model)


def _flags(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


class _Options:
    def __init__(self, group: Mapping[str, Any]) -> None:
        vars(self).update({name: value for name, value in group.items() if name != "params"})


def _described(group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    options = {name: unpacked(attribute) for name, attribute in plain_attributes(_Options(group)).items()}
    return {**options, "params": [names.get(id(parameter), "") for parameter in group["params"]]}
