"""A run's optimizers: made, checked, and fused where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from cadenza.optim.parameters import parameters_of
from cadenza.optim.settings import settings_of

Optimizers = Optimizer | Sequence[Optimizer] | Callable[[Any], Optimizer | Sequence[Optimizer]]

# torch's own classes with a fused update, and the types of device that have it in every torch that we stand on.
_FUSED_ON = {Adam: ("cpu", "cuda", "mps"), AdamW: ("cpu", "cuda", "mps"), SGD: ("cpu", "cuda", "mps"), Adagrad: ("cpu",)}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def made(given: Optimizers, model: nn.Module, *, own_step: bool = False) -> list[Optimizer]:
    """Return the optimizers that train `model`; those that a function makes are fused where they can be.

    Args:
        given: What the trainer was given.
        model: What they train.
        own_step: Whether a ``step_fn`` calls them.

    Raises:
        TypeError, ValueError: They are no optimizers, or hold nothing of the model.
    """
    if not callable(given):
        return checked(given, model, own_step=own_step)
    optimizers = checked(given(list(model.parameters())), model, own_step=own_step)
    for optimizer in optimizers:
        if not fused(optimizer) and why_not_fused(optimizer, model) is None:
            fuse(optimizer)
    return optimizers


def checked(given: object, model: nn.Module, *, own_step: bool = False) -> list[Optimizer]:
    """Return what was given as a list of optimizers; raise `TypeError` or `ValueError` if they cannot train `model`."""
    optimizers: list[Optimizer] = []
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in given if isinstance(given, Sequence) else [given]:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected torch optimizers; got {optimizer!r}")
        optimizers.append(optimizer)
        settings_of(optimizer)  # before a schedule or a checkpoint changes them
        if not own_step and _needs_closure(optimizer):
            raise ValueError(_CLOSURE.format(name=type(optimizer).__name__, place=len(optimizers) - 1))
    if not optimizers:
        raise ValueError("expected at least one optimizer; got an empty list")
    if not any(id(parameter) in known for parameter in parameters_of(optimizers)):  # others may hold parameters of the loss
        named = f"{type(optimizers[0]).__name__} holds" if len(optimizers) == 1 else "the optimizers hold"
        raise ValueError(
            f"{named} none of the model's parameters, so the model would not be trained. "
            "Make an optimizer of model.parameters(), or give a function of the parameters instead."
        )
    return optimizers


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step cannot be called without a closure, as that of LBFGS."""
    given = signature(type(optimizer).step).parameters.get("closure")
    return given is not None and given.default is Parameter.empty


_CLOSURE = """\
{name}.step needs a closure, as it computes the loss several times in one step, and the loop computes it once. \
Expected an optimizer whose step takes no closure, or a step_fn, instead of compute_loss, that gives the closure:

def step(run, batch):
    optimizer = run.optimizers[{place}]

    def closure():
        optimizer.zero_grad()
        loss = compute_loss(run.model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure)"""


def described(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's name and those of its settings that are plain."""
    plain = {name: value for name, value in optimizer.defaults.items() if isinstance(value, bool | int | float | str | tuple)}
    return {"name": type(optimizer).__name__, **plain}


# -- fused: one pass over weights, gradients and moments instead of one for each operation -------------


def fused(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update is fused."""
    return all(group.get("fused") is True for group in optimizer.param_groups)


def why_not_fused(optimizer: Optimizer, model: nn.Module, device_type: str | None = None) -> str | None:
    """Return why an optimizer cannot be fused, or had better not be; empty if nobody would ask, None if it can be.

    What its maker chose is left alone, and so is SGD without momentum and weight decay, which gains nothing by it.

    Args:
        optimizer: One that has not been fused.
        model: What it trains.
        device_type: Where the parameters will be; None: where they are.
    """
    where = _FUSED_ON.get(type(optimizer))  # a subclass may have a step of its own
    if where is None:
        return ""
    for group in optimizer.param_groups:
        if chosen := _chosen(group):
            return f"{chosen}={group[chosen]} was given"
    if type(optimizer) is SGD and not any(group["momentum"] or group["weight_decay"] for group in optimizer.param_groups):
        return ""
    if type(optimizer) is SGD and any(group["dampening"] for group in optimizer.param_groups):
        return "dampening is not 0"  # see `_with_momentum`
    if type(optimizer) in (SGD, Adagrad) and any(getattr(module, "sparse", False) is True for module in model.modules()):
        return "the model gives sparse gradients"
    return next((reason for one in _held(optimizer) if (reason := _unfit(one, where, device_type or one.device.type))), None)


def fuse(optimizer: Optimizer) -> None:
    """Have an optimizer that has not stepped yet update in one pass, as if it had been made with ``fused=True``.

    The kernels for CPU read weights and gradients in the order in which they lie in memory, and do not look whether that is
    the same: torch's autograd sees to it, a callback that puts in gradients of its own may not. So it is looked at before
    each step; and gradients that no fused kernel takes, such as sparse ones, end the fusing instead of the run.
    """
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings["fused"] = True
    if optimizer.state:  # Adagrad has some from the start: torch puts it where the fused update wants it
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_pre_hook(_made_fit)


def notes(optimizers: Iterable[Optimizer], model: nn.Module, *, own: bool, device_type: str | None = None) -> list[str]:
    """Return what a plan says of the updates: which are fused, and which are not, for what reason.

    Args:
        optimizers: Those of a run, or what the user gave.
        model: What they train.
        own: Whether the user gave them as they are, and not a function that makes them.
        device_type: Where the parameters will be; None: where they are.
    """
    lines = []
    for optimizer in optimizers:
        name, reason = type(optimizer).__name__, why_not_fused(optimizer, model, device_type)
        if fused(optimizer):
            lines.append(f"optimizer: {name}, fused")
        elif reason is None and own:
            lines.append(
                f"! {name} could be fused, which is faster: give it as a function of the parameters "
                f"(lambda parameters: {name}(parameters, ...)), or make it with fused=True"
            )
        elif reason is None:
            lines.append(f"optimizer: {name}, fused")  # it will be
        elif reason and not own:
            lines.append(f"optimizer: {name}, not fused: {reason}")
    return lines


def loadable(optimizer: Optimizer, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state, not fused if the parameters are now of a kind that torch does not fuse, such as shards."""
    where = _FUSED_ON.get(type(optimizer))
    if where is None or fused(optimizer) or not any(_unfit(one, where, one.device.type) for one in _held(optimizer)):
        return saved
    groups = [{**group, "fused": None} if group.get("fused") is True else group for group in saved["param_groups"]]
    return {**saved, "param_groups": groups}


def changed_by_loading(optimizer: Optimizer, saved: Mapping[str, Any]) -> str | None:
    """Return how a saved state differs in whether it was fused: it will be as it was saved, for the same bits; None if not."""
    was = all(group.get("fused") is True for group in saved["param_groups"])
    if was == fused(optimizer):
        return None
    return f"{type(optimizer).__name__} goes on as it was saved, {'fused' if was else 'not fused'}, for the same bits"


def _made_fit(optimizer: Optimizer, *_: object) -> None:
    """Bring gradients into the order of their weights; stop fusing if one is of another kind."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse or gradient.dtype is not parameter.dtype:
                for each in optimizer.param_groups:
                    each["fused"] = None
                return
            if gradient.stride() != parameter.stride() and not _alike(gradient, parameter):
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
    if type(optimizer) is SGD:
        for group in optimizer.param_groups:
            if group["momentum"]:
                _with_momentum(optimizer, group["params"])


def _with_momentum(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give weights that are trained for the first time, when others were before, a momentum of 0.

    torch's fused SGD takes either none or all. Without dampening it is the same: the first momentum is the gradient.
    """
    fresh = [one for one in parameters if one.grad is not None and optimizer.state[one].get("momentum_buffer") is None]
    if fresh and any(state.get("momentum_buffer") is not None for state in optimizer.state.values()):
        for parameter in fresh:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape lie alike in memory: the stride of a dimension of size 1 does not matter."""
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape, strict=True) if size > 1)


def _unfit(parameter: Tensor, where: tuple[str, ...], device_type: str) -> str | None:
    if type(parameter) not in (Tensor, nn.Parameter):
        return f"a parameter is a {type(parameter).__name__}"
    if parameter.dtype not in _DTYPES:
        return f"a parameter is of {parameter.dtype}"
    if device_type not in where:
        return f"a parameter is on {device_type}, and torch has it on {', '.join(where)}"
    if parameter.layout is not torch.strided or not _dense(parameter):
        return "a parameter does not lie in one piece"
    return None


def _dense(parameter: Tensor) -> bool:
    """Return whether a tensor fills its stretch of memory, each place once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(parameter.stride(), parameter.shape, strict=True) if n != 1):
        if stride != expected:
            return parameter.numel() == 0
        expected *= size
    return True


def _chosen(group: Mapping[str, Any]) -> str | None:
    """Return the setting by which the maker of an optimizer chose how it updates; None if that is left to torch."""
    given = [name for name in ("fused", "foreach") if group.get(name) is not None]
    given += [name for name in ("differentiable", "capturable") if group.get(name)]
    given += [name for name in ("betas", "weight_decay") if _has_tensor(group.get(name))]
    return next(iter(given), None)


def _has_tensor(setting: object) -> bool:
    return any(isinstance(one, Tensor) for one in (setting if isinstance(setting, tuple) else (setting,)))


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
