"""``pytorch_accelerated.finetuning``: freeze a model in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Layer(NamedTuple):
    """A module without modules inside."""

    layer_group_idx: tuple[int, int]
    """The number of its group, from 0 and from the end."""
    module: nn.Module
    is_frozen: bool


class LayerGroup(NamedTuple):
    """A module that is an attribute of the model, with all that is inside."""

    layer_group_idx: tuple[int, int]
    """Its number, from 0 and from the end."""
    module: nn.Module
    is_frozen: bool
    """Whether some of it is."""


class ModelFreezer:
    """Freezes and unfreezes the groups of a model, for fine-tuning. All of it learns to begin with.

    Args:
        model: Its children, in order, are the groups.
        freeze_batch_norms: Whether BatchNorm layers are frozen with the rest.

    >>> freezer = ModelFreezer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)))
    >>> freezer.freeze()
    >>> [group.is_frozen for group in freezer.get_layer_groups()]
    [True, True, False]
    >>> {group: len(unfrozen["params"]) for group, unfrozen in freezer.unfreeze(from_index=1).items()}
    {0: 2, 1: 2}
    """

    def __init__(self, model: nn.Module, freeze_batch_norms: bool = False) -> None:
        self.model, self.freeze_bn = model, freeze_batch_norms
        model.requires_grad_(True)
        self._groups = list(model.children())

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return len(self._groups)

    def get_layer_groups(self) -> list[LayerGroup]:
        """Return all groups, in order."""
        return [
            LayerGroup(self._index(place), group, any(not parameter.requires_grad for parameter in group.parameters()))
            for place, group in enumerate(self._groups)
        ]

    def get_layers(self) -> list[Layer]:
        """Return all layers, in order. One without parameters is frozen when it is in evaluation mode."""
        return [Layer(self._index(place), layer, _is_frozen(layer)) for place, layer in self._layers()]

    def get_trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that learn."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze groups; all but the last if nothing else is said.

        Args:
            from_index: The first.
            to_index: The last, which is frozen as well; below 0 it counts from the end.
            set_modules_as_eval: Put what is frozen in evaluation mode, too. A trainer's ``train_epoch_start`` undoes that.
        """
        self._switch(from_index, to_index, learn=False, switch_mode=set_modules_as_eval)

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        """Let groups learn; all if nothing else is said.

        Args:
            from_index: The one end; below 0 it counts from the end.
            to_index: The other end, which is part of it.
            set_modules_as_training: Put what is unfrozen in training mode, too.

        Returns:
            For each group with something that was frozen until now ``{"params": [...]}``, for ``optimizer.add_param_group``.
        """
        return self._switch(from_index, to_index, learn=True, switch_mode=set_modules_as_training)

    def _switch(
        self, one_end: int, other_end: int, *, learn: bool, switch_mode: bool
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        first, last = sorted((self._place(one_end), self._place(other_end)))
        changed: dict[int, dict[str, list[nn.Parameter]]] = {}
        for place, layer in self._layers():
            if not first <= place <= last or (isinstance(layer, _BatchNorm) and not self.freeze_bn):
                continue
            parameters = [one for one in layer.parameters(recurse=False) if one.requires_grad != learn]
            for parameter in parameters:
                parameter.requires_grad = learn
            if parameters:
                changed.setdefault(place, {"params": []})["params"].extend(parameters)
            if switch_mode:
                layer.train(learn)
        return changed

    def _layers(self) -> Iterator[tuple[int, nn.Module]]:
        for place, group in enumerate(self._groups):
            for module in group.modules():
                own = any(True for _ in module.parameters(recurse=False))
                if own or not any(True for _ in module.children()):
                    yield place, module

    def _index(self, place: int) -> tuple[int, int]:
        return place, place - self.num_groups

    def _place(self, index: int) -> int:
        place = index + self.num_groups if index < 0 else index
        if not 0 <= place < self.num_groups:
            raise IndexError(f"the model has {self.num_groups} groups; got the index {index}")
        return place


def _is_frozen(layer: nn.Module) -> bool:
    parameters = list(layer.parameters(recurse=False))
    return not parameters[0].requires_grad if parameters else not layer.training
