"""``pytorch_accelerated.finetuning``: freeze a model in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from cadenza.compat.absent import advise

advise(__name__)


BN_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The layers affected by ``freeze_batch_norms``."""


class Layer(NamedTuple):
    """A module without submodules."""

    layer_group_idx: tuple[int, int]
    """The index of its group, counted from the start and from the end."""
    module: nn.Module
    is_frozen: bool


class LayerGroup(NamedTuple):
    """A direct child of the model, with its submodules."""

    layer_group_idx: tuple[int, int]
    """Its index, counted from the start and from the end."""
    module: nn.Module
    is_frozen: bool
    """Whether any of its parameters is frozen."""


class ModelFreezer:
    """Freezes and unfreezes the layer groups of a model, for fine-tuning. At first all parameters are trainable.

    Args:
        model: Its direct children, in order, are the groups.
        freeze_batch_norms: Whether BatchNorm layers are frozen, too.

    Raises:
        TypeError: `model` is not a module.

    >>> freezer = ModelFreezer(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)))
    >>> freezer.freeze()
    >>> [group.is_frozen for group in freezer.get_layer_groups()]
    [True, True, False]
    >>> {group: len(unfrozen["params"]) for group, unfrozen in freezer.unfreeze(from_index=1).items()}
    {0: 2, 1: 2}
    """

    def __init__(self, model: nn.Module, freeze_batch_norms: bool = False) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module; got {model!r}")
        self.model: nn.Module = model
        self.freeze_bn: bool = freeze_batch_norms
        model.requires_grad_(True)
        self._groups = list(model.children())

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self._groups)

    def get_layer_groups(self) -> list[LayerGroup]:
        """Return all groups, in order."""
        return [
            LayerGroup(self._both_indices(index), group, any(not parameter.requires_grad for parameter in group.parameters()))
            for index, group in enumerate(self._groups)
        ]

    def get_layers(self) -> list[Layer]:
        """Return all layers, in order. A layer without parameters counts as frozen in evaluation mode."""
        return [Layer(self._both_indices(index), layer, _is_frozen(layer)) for index, layer in self._layers()]

    def get_trainable_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def freeze(self, from_index: int = 0, to_index: int = -2, set_modules_as_eval: bool = False) -> None:
        """Freeze groups; by default all but the last.

        Args:
            from_index: The first group.
            to_index: The last group, included; a negative index counts from the end.
            set_modules_as_eval: Put frozen layers in evaluation mode, too. ``train_epoch_start`` of a trainer reverts that.
        """
        self._switch(from_index, to_index, trainable=False, switch_mode=set_modules_as_eval)

    def unfreeze(
        self, from_index: int = -1, to_index: int = 0, set_modules_as_training: bool = True
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        """Make groups trainable; by default all.

        Args:
            from_index: One end of the range; a negative index counts from the end.
            to_index: The other end, included.
            set_modules_as_training: Put these layers in training mode, too.

        Returns:
            For each group that had frozen parameters ``{"params": [...]}`` with them, for ``optimizer.add_param_group``.
        """
        return self._switch(from_index, to_index, trainable=True, switch_mode=set_modules_as_training)

    def _switch(
        self, one_end: int, other_end: int, *, trainable: bool, switch_mode: bool
    ) -> dict[int, dict[str, list[nn.Parameter]]]:
        first, last = self._convert_idxs(one_end, other_end)
        changed: dict[int, dict[str, list[nn.Parameter]]] = {}
        for index, layer in self._layers():
            if not first <= index <= last or (_module_is_batch_norm(layer) and not self.freeze_bn):
                continue
            parameters = [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad != trainable]
            for parameter in parameters:
                parameter.requires_grad = trainable
            if parameters:
                changed.setdefault(index, {"params": []})["params"].extend(parameters)
            if switch_mode:
                layer.train(trainable)
        return changed

    def _layers(self) -> Iterator[tuple[int, nn.Module]]:
        for index, group in enumerate(self._groups):
            for module in group.modules():
                own = any(True for _ in module.parameters(recurse=False))
                if own or not any(True for _ in module.children()):
                    yield index, module

    def _both_indices(self, index: int) -> tuple[int, int]:
        return index, index - self.num_groups

    def _convert_idxs(self, from_idx: int, to_idx: int) -> tuple[int, int]:
        """Return both ends of a range as indices from the start, in order."""
        first, last = sorted((self._resolve(from_idx), self._resolve(to_idx)))
        return first, last

    def _resolve(self, index: int) -> int:
        resolved = index + self.num_groups if index < 0 else index
        if not 0 <= resolved < self.num_groups:
            raise IndexError(f"the model has {self.num_groups} groups; got the group index {index}")
        return resolved


def _module_is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm layer."""
    return isinstance(module, BN_MODULES)


def _is_frozen(layer: nn.Module) -> bool:
    parameters = list(layer.parameters(recurse=False))
    return not parameters[0].requires_grad if parameters else not layer.training
