"""The optimizers of a run: built, checked, and fused where this is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from cadenza.drivers.sharding import is_sharded, local
from cadenza.optim.fast_step import made_fit
from cadenza.optim.parameters import ModelParameters, parameters_of
from cadenza.optim.settings import settings_of
from cadenza.status.reprs import signature_of

Optimizers = Optimizer | Sequence[Optimizer] | Callable[[Any], Optimizer | Sequence[Optimizer]]

# torch's own classes with a fused update, and the device types that have it in every supported torch.
_FUSED_ON = {Adam: ("cpu", "cuda", "mps"), AdamW: ("cpu", "cuda", "mps"), SGD: ("cpu", "cuda", "mps"), Adagrad: ("cpu",)}
_FUSED_IN_SHARDS = (Adam, AdamW)
_CHOSEN = (
    "optimizer: {name}, built fused, which is faster and rounds differently. To change that, pass {name}(..., fused=False) or "
    "an optimizer instance."
)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def made(given: Optimizers, model: nn.Module, parameters: ModelParameters, *, own_step: bool = False) -> list[Optimizer]:
    """Return the optimizers that train `model`. Optimizers that a function builds are fused if possible.

    Args:
        given: The optimizers, or the function that builds them.
        model: The model.
        parameters: Its parameters.
        own_step: Whether a ``step_fn`` calls them.

    Raises:
        TypeError, ValueError: They are not optimizers, or hold no parameter of the model.
    """
    if not callable(given):
        return checked(given, model, own_step=own_step)
    if is_kept(given):
        return checked(given([*parameters]), model, own_step=True)
    optimizers = checked(given(parameters), model, own_step=own_step)
    for optimizer in optimizers:
        if not fused(optimizer) and why_not_fused(optimizer, model) is None:
            fuse(optimizer)
    return optimizers


def is_kept(given: object) -> bool:
    """Return whether an adapter builds and calls the optimizers: they keep their settings, and get closures.

    The adapter marks its function with ``as_given = True``.
    """
    return getattr(given, "as_given", False) is True


def checked(given: object, model: nn.Module, *, own_step: bool = False) -> list[Optimizer]:
    """Return the given optimizers as a list. Raise `TypeError` or `ValueError` if they cannot train `model`."""
    optimizers: list[Optimizer] = []
    for optimizer in given if isinstance(given, Sequence) else [given]:
        if not isinstance(optimizer, Optimizer):
            several = ". Pass one function of the parameters, which returns a list of optimizers" if callable(optimizer) else ""
            raise TypeError(f"expected torch optimizers; got {optimizer!r}{several}")
        optimizers.append(optimizer)
        settings_of(optimizer)  # before a schedule or a checkpoint changes them
        if not own_step and needs_closure(optimizer):
            raise ValueError(_CLOSURE.format(name=type(optimizer).__name__, index=len(optimizers) - 1))
    if not optimizers:
        raise ValueError("expected at least one optimizer; got an empty list")
    held = {id(parameter) for parameter in parameters_of(optimizers)}
    if not any(id(parameter) in held for parameter in model.parameters()):  # some may hold parameters of the loss alone
        named = f"{type(optimizers[0]).__name__} holds" if len(optimizers) == 1 else "the optimizers hold"
        raise ValueError(
            f"{named} none of the model's parameters, so the model would not be trained. "
            "Build an optimizer of model.parameters(), or pass a function of the parameters."
        )
    return optimizers


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer requires a closure, as that of LBFGS."""
    return _requires_closure(type(optimizer).step)


@lru_cache(maxsize=64)
def _requires_closure(step: Callable[..., Any]) -> bool:
    given = signature_of(step).parameters.get("closure")
    return given is not None and given.default is Parameter.empty


_CLOSURE = """\
{name}.step needs a closure, because it computes the loss several times in one step. The loop computes the loss once. \
Use an optimizer without a closure, or pass step_fn= instead of compute_loss=:

def step(run, batch):
    optimizer = run.optimizers[{index}]

    def closure():
        optimizer.zero_grad()
        loss = compute_loss(run.model, batch)
        loss.backward()
        return loss

    return run.update(optimizer, closure)"""


def described(optimizer: Optimizer) -> dict[str, Any]:
    """Return the name of an optimizer and its plain settings."""
    defaults = getattr(optimizer, "defaults", {})  # a wrapper may have none, such as torch's PostLocalSGDOptimizer
    plain = {name: value for name, value in defaults.items() if isinstance(value, bool | int | float | str | tuple)}
    return {"name": type(optimizer).__name__, **plain}


# -- fused: one pass over weights, gradients and moments instead of one for each operation -------------


def fused(optimizer: Optimizer) -> bool:
    """Return whether the update of an optimizer is fused."""
    return all(group.get("fused") is True for group in optimizer.param_groups)


def why_not_fused(optimizer: Optimizer, model: nn.Module, device_type: str | None = None) -> str | None:
    """Return why an optimizer is not fused; empty if no reason is worth showing, None if it can be fused.

    An explicit choice of the user is kept. SGD without momentum and weight decay gains nothing and is not fused.

    Args:
        optimizer: An optimizer that is not fused.
        model: The model that it trains.
        device_type: The device type of the parameters in the run; None: their present one.
    """
    where = _FUSED_ON.get(type(optimizer))  # a subclass may override step
    if where is None:
        return ""
    for group in optimizer.param_groups:
        if chosen := _chosen(group):
            return f"{chosen}={group[chosen]} was given"
    if type(optimizer) is SGD and not any(group["momentum"] or group["weight_decay"] for group in optimizer.param_groups):
        return ""
    if type(optimizer) is SGD and any(group["dampening"] for group in optimizer.param_groups):
        return "dampening is not 0"  # see `made_fit`
    if type(optimizer) in (SGD, Adagrad) and any(getattr(module, "sparse", False) is True for module in model.modules()):
        return "the model has sparse gradients"
    return _unfit(optimizer, where, device_type)


def fuse(optimizer: Optimizer) -> None:
    """Fuse an optimizer that has not stepped yet, as if it had been built with ``fused=True``.

    The CPU kernels read weights and gradients in memory order and do not check that both have the same order. Autograd
    guarantees it; a callback that sets gradients may not. A hook therefore checks it before each step. Gradients that no fused
    kernel supports, such as sparse ones, turn fusing off instead of ending the run.
    """
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings["fused"] = True
    if optimizer.state:  # Adagrad has state from the start: loading converts it for the fused update
        load_state(optimizer, optimizer.state_dict())
    optimizer.register_step_pre_hook(made_fit)


def notes(optimizers: Iterable[Optimizer], model: nn.Module, *, own: bool, device_type: str | None = None) -> list[str]:
    """Return the lines of a plan about the updates: which optimizers are fused, and why others are not.

    Args:
        optimizers: The optimizers of a run, or those that the user passed.
        model: The model that they train.
        own: Whether the user passed optimizers, and not a function that builds them.
        device_type: The device type of the parameters in the run; None: their present one.
    """
    lines = []
    for optimizer in optimizers:
        name, reason = type(optimizer).__name__, why_not_fused(optimizer, model, device_type)
        if fused(optimizer):
            lines.append(_CHOSEN.format(name=name) if _is_chosen(optimizer) else f"optimizer: {name}, fused")
        elif reason is None and own:
            lines.append(
                f"! {name} could be fused, which is faster: pass a function of the parameters "
                f"(lambda parameters: {name}(parameters, ...)), or build it with fused=True"
            )
        elif reason is None:
            lines.append(_CHOSEN.format(name=name))  # `made` fuses it
        elif reason and not own:
            lines.append(f"optimizer: {name}, not fused: {reason}")
    return list(dict.fromkeys(lines))  # two optimizers of one class have one line


def _is_chosen(optimizer: Optimizer) -> bool:
    return made_fit in optimizer._optimizer_step_pre_hooks.values()


def loadable(optimizer: Optimizer, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state, without fusing if torch cannot fuse the present parameters, such as shards."""
    where = _FUSED_ON.get(type(optimizer))
    groups = saved["param_groups"] if is_of_torch(saved) else []
    if where is None or fused(optimizer) or not any(group.get("fused") is True for group in groups):
        return saved
    if _unfit(optimizer, where) is None:
        return saved
    return {**saved, "param_groups": [{**group, "fused": None} if group.get("fused") is True else group for group in groups]}


def load_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a ``state_dict``. Tensors keep the number format in which they were saved: torch casts them to that of the weights.

    A state of another form than torch's, such as that of a wrapper, is left to the optimizer.
    """
    optimizer.load_state_dict(dict(saved))
    if not is_of_torch(saved):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of([optimizer]), strict=True):
        of_parameter, loaded = saved["state"].get(number), optimizer.state.get(parameter)
        if isinstance(of_parameter, Mapping) and isinstance(loaded, dict):
            loaded.update({key: _in_format(value, loaded[key]) for key, value in of_parameter.items() if key in loaded})


def is_of_torch(state: Mapping[str, Any]) -> bool:
    """Return whether the state of an optimizer has the form of torch's. A wrapper may give the same names to other things."""
    groups = state.get("param_groups")
    if not isinstance(state.get("state"), Mapping) or not isinstance(groups, list | tuple):
        return False
    return all(isinstance(group, Mapping) and "params" in group for group in groups)


def _in_format(saved: Any, loaded: Any) -> Any:
    """Return the loaded value, with each tensor of another number format replaced with the saved one, on the same device."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        plain = type(saved) is Tensor or is_sharded(saved)  # a quantized tensor says the format of what it stands for
        return saved.to(loaded.device) if plain and saved.dtype is not loaded.dtype else loaded
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        return {key: _in_format(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if isinstance(saved, list | tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(saved)(map(_in_format, saved, loaded))
    return loaded


def changed_by_loading(optimizer: Optimizer, saved: Mapping[str, Any]) -> str | None:
    """Return a message if a saved state was fused and the optimizer is not, or the reverse. The saved choice is kept."""
    if not is_of_torch(saved):
        return None
    was = all(group.get("fused") is True for group in saved["param_groups"])
    if was == fused(optimizer):
        return None
    return f"{type(optimizer).__name__} continues {'fused' if was else 'not fused'}, as in the checkpoint, for the same bits"


def _unfit(optimizer: Optimizer, where: tuple[str, ...], device_type: str | None = None) -> str | None:
    """Return why torch cannot fuse the update of these parameters; None if it can."""
    parameters = [*parameters_of([optimizer])]
    kinds = {type(parameter): parameter for parameter in parameters}
    sharded = any(map(is_sharded, kinds.values()))
    if sharded and not isinstance(optimizer, _FUSED_IN_SHARDS):
        return "a parameter is a DTensor, of which torch fuses Adam and AdamW alone"
    if any(len({getattr(held, "device_mesh", None) for held in group["params"]}) > 1 for group in optimizer.param_groups):
        return "its parameters are sharded over different ranks"
    if sharded:
        parameters = [local(parameter) if is_sharded(parameter) else parameter for parameter in parameters]
        kinds = {type(parameter): parameter for parameter in parameters}
    for kind in kinds.keys() - {Tensor, nn.Parameter}:
        return f"a parameter is a {kind.__name__}"
    for dtype in {parameter.dtype for parameter in parameters}.difference(_DTYPES):
        return f"a parameter is of {dtype}"
    devices = {device.type for device in {parameter.device for parameter in parameters}}
    for name in ({device_type} if device_type else devices).difference(where):
        return f"a parameter is on {name}, and torch fuses on {', '.join(where)}"
    if not all(held.layout is torch.strided and (held.is_contiguous() or _dense(held)) for held in parameters):
        return "a parameter is not contiguous in memory"
    return None


def _dense(parameter: Tensor) -> bool:
    """Return whether a tensor fills a range of memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(parameter.stride(), parameter.shape, strict=True) if n != 1):
        if stride != expected:
            return parameter.numel() == 0
        expected *= size
    return True


def _chosen(group: Mapping[str, Any]) -> str | None:
    """Return the setting with which the user chose how the optimizer updates; None if the choice is left to torch."""
    given = [name for name in ("fused", "foreach") if group.get(name) is not None]
    given += [name for name in ("differentiable", "capturable") if group.get(name)]
    given += [name for name in ("betas", "weight_decay") if _has_tensor(group.get(name))]
    return next(iter(given), None)


def _has_tensor(setting: object) -> bool:
    return any(isinstance(number, Tensor) for number in (setting if isinstance(setting, tuple) else (setting,)))
