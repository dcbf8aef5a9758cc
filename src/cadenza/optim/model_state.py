"""The state of a model under plain names: for a checkpoint, and loaded from one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from cadenza.drivers.sharding import all_laid_out, is_sharded
from cadenza.status.encoding import first_difference

_COMPILED = "_orig_mod."  # in the names of a module that torch.compile(module) returned


def plain_name(name: str) -> str:
    """Return the name of a weight or a module without the parts that ``torch.compile`` adds.

    >>> plain_name("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return name.replace(_COMPILED, "")


class Walk:
    """The modules and the parameters of a model by name, found in one walk. Make a new one after a hook, which may change them.

    >>> walk = Walk(nn.Sequential(nn.Linear(1, 2)))
    >>> [*walk.modules], [*walk.parameters]
    (['', '0'], ['0.weight', '0.bias'])
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        held = [(f"{path}." if path else "", module._parameters) for path, module in self.modules.items()]
        named = {f"{path}{name}": value for path, values in held for name, value in values.items() if value is not None}
        is_plain = _is_torchs(model, "named_parameters") and len({*map(id, named.values())}) == len(named)
        self.parameters: dict[str, nn.Parameter] = named if is_plain else dict(model.named_parameters())


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the ``state_dict`` of a model under plain names."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` was asked to compile a module, in place or as another module around it."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def buffers_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return by plain name the module and the attribute of each buffer, also of a buffer that is None."""
    modules = model.named_modules(remove_duplicate=False)
    return {
        plain_name(f"{path}.{name}" if path else name): (module, name) for path, module in modules for name in module._buffers
    }


def set_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Replace a buffer of a module with a tensor, which may have another shape."""
    module.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)


def shape_of(value: Any) -> list[int] | None:
    """Return the shape of a tensor, or of a stored tensor; None for another value."""
    return list(value.shape) if isinstance(value, Tensor) or hasattr(value, "read") else None


def load_into(model: nn.Module, values: Mapping[str, Any]) -> Any:
    """Load values under plain names, and return what ``load_state_dict(strict=False)`` does. Others keep the model's values.

    A buffer of another shape is replaced: check first which buffers may have one.
    """
    return model.load_state_dict(fitted(model, values), strict=False)


def fitted(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under the names of a model, in its layout. Replace its buffers of other shapes."""
    own, buffers = state_of(model), buffers_of(model)
    device = next((value.device for value in own.values() if isinstance(value, Tensor)), None)
    for name, value in values.items():
        if name in buffers and shape_of(value) not in (None, shape_of(own.get(name))):
            read = value if isinstance(value, Tensor) else value.read()
            set_buffer(*buffers[name], read.to(own[name].device if name in own else device, copy=True))
    return _named(model.state_dict(), values)


def decides(model: nn.Module, names: Collection[str]) -> bool:
    """Return whether the model's own ``load_state_dict`` may take weights that differ in these names.

    It may if they are buffers, or if the model has code of its own that loads.
    """
    own = not _is_torchs(model, "load_state_dict")
    return own or buffers_of(model).keys() >= set(names) or any(module._load_state_dict_pre_hooks for module in model.modules())


def untied(model: nn.Module, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that a model cannot hold, as it ties them: by name, the name of the first value of the same tensor."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first, found = dict[int, str](), dict[str, str]()
    for name, tensor in ((plain_name(name), tensor) for name, tensor in tensors):
        other = first.setdefault(id(tensor), name) if name in values else name
        if other != name and values[other] is not values[name]:
            tied, alone = (value if isinstance(value, Tensor) else value.read() for value in (values[other], values[name]))
            if first_difference(tied, alone) is not None:
                found[name] = other
    return found


def load_by_model(model: nn.Module, values: Mapping[str, Any]) -> bool:
    """Load values of other names or shapes if the model's own ``load_state_dict`` takes them. Else nothing is changed."""
    values = {plain_name(name): value for name, value in values.items()}
    wanted, own = _shapes(values), _shapes(state_of(model))
    differing = [name for name in {**wanted, **own} if wanted.get(name) != own.get(name)]
    if not differing or not decides(model, differing):
        return False
    held = [(module, dict(module._buffers)) for module in model.modules()]
    before = [(parameter, parameter.detach().clone()) for parameter in (*model.parameters(), *model.buffers())]
    if any(is_sharded(tensor) for tensor, _ in before):
        return False
    fits = False
    try:
        model.load_state_dict(_named(model.state_dict(), values), strict=False)
        fits = _shapes(state_of(model)) == wanted
    except RuntimeError:
        pass  # the model does not take them
    finally:
        if not fits:
            for module, buffers in held:
                module._buffers.update(buffers)
            for tensor, value in before:
                tensor.data = value
    return fits


def _is_torchs(model: nn.Module, method: str) -> bool:
    """Return whether a method is that of torch: neither the class of the model nor the instance has its own."""
    return getattr(getattr(model, method), "__func__", None) is getattr(nn.Module, method)


def _shapes(values: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: shape for name, value in values.items() if (shape := shape_of(value)) is not None}


def _named(own: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {plain_name(name): name for name in own}
    return all_laid_out({names.get(name, name): value for name, value in values.items()}, own)
