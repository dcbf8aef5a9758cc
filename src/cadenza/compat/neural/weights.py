"""The weights of a module by name: reading, copying, sharing, saving and freezing them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from cadenza.compat.neural.kinds import WeightShareTransform
from cadenza.errors import nearest

Weights = Mapping[str, tuple[Tensor, bool]]
"""By name: the weight, and whether it is trainable."""

Renames = Mapping[str, tuple[str, WeightShareTransform]]
"""By the name of a module's weight: the name of the other weight, and how it is changed."""


def weights_of(module: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Return the weights themselves, not copies."""
    return {name: (parameter, parameter.requires_grad) for name, parameter in module.named_parameters()}


def copy_weights(module: nn.Module, given: Weights, renames: Renames | None = None) -> None:
    """Copy values into a module. The weights stay separate.

    Raises:
        KeyError: The module has no such weight.
        ValueError: A shape does not fit.
    """
    for name, (weight, _) in given.items() if renames is None else ():
        _copy(module, name, weight)
    for name, (source, transform) in (renames or {}).items():
        if source not in given:
            raise KeyError(f"there is no weight {source!r} to copy to {name!r}.{nearest(source, given)} Given: {list(given)}")
        weight = given[source][0]
        _copy(module, name, weight.T if transform is WeightShareTransform.TRANSPOSE else weight)


def _copy(module: nn.Module, name: str, weight: Tensor) -> None:
    own = _named(module, name)
    if own.shape != weight.shape:
        raise ValueError(f"weight {name!r} of {module} has shape {tuple(own.shape)}; got {tuple(weight.shape)}")
    with torch.no_grad():
        own.copy_(weight)


def tie_weights(module: nn.Module, other: nn.Module, names: Iterable[str], renames: Renames | None = None) -> None:
    """Make a module use weights of another module. Each then becomes a single parameter that both train.

    Raises:
        KeyError: One of the modules has no such weight.
        ValueError: There are no names, or a shape does not fit.
        NotImplementedError: A weight would have to be transposed, which one parameter cannot be.
    """
    names = list(names or ())
    if not isinstance(other, nn.Module) or not names:
        raise ValueError(f"tie_weights_with needs a module with weights and their names; got {other!r} and {names}")
    for name in names:
        source, transform = (renames or {}).get(name, (name, WeightShareTransform.SAME))
        if transform is WeightShareTransform.TRANSPOSE:
            raise NotImplementedError(
                f"{name!r} cannot be tied to the transpose of {source!r}: a parameter has one shape. Transpose it in forward."
            )
        own, shared = _named(module, name), _named(other, source)
        if own.shape != shared.shape:
            raise ValueError(f"{name!r} has shape {tuple(own.shape)}, and {source!r} has {tuple(shared.shape)}")
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, shared)


def save_weights(module: nn.Module, path: str) -> None:
    """Write the state dict of a module to a file, in the format of NeMo."""
    torch.save(module.state_dict(), Path(path).expanduser())


def load_weights(module: nn.Module, path: str) -> None:
    """Read a file of `save_weights`, or of NeMo. Pickled code is never executed.

    Raises:
        RuntimeError: The weights do not fit.
        pickle.UnpicklingError: The file holds pickled code.
    """
    module.load_state_dict(torch.load(Path(path).expanduser(), map_location="cpu", weights_only=True))


def set_trainable(module: nn.Module, trainable: bool, weights: Iterable[str] | None) -> None:
    """Freeze or unfreeze weights; None for all.

    Raises:
        KeyError: The module has no such weight.
    """
    known = dict(module.named_parameters())
    found = [_named(module, name) for name in (known if weights is None else weights)]
    for parameter in found:
        parameter.requires_grad_(trainable)


def _named(module: nn.Module, name: str) -> nn.Parameter:
    known = dict(module.named_parameters(remove_duplicate=False))
    if name not in known:
        raise KeyError(f"{module} has no weight {name!r}.{nearest(name, known)} It has {list(known)}")
    return known[name]
