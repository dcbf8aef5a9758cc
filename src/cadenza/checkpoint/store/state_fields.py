"""The fields of the state in a checkpoint and their kinds, which a resume relies on: another program may have written it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cadenza.checkpoint.store.shards import Stored
from cadenza.optim.optimizers import is_of_torch
from cadenza.status.formats import counted
from cadenza.status.plain import Unbuilt

Kind = Any
"""A class or a union; a function that raises; ``[kind]`` for a list of any length, ``(kind, kind)`` for one of this length.

``{int: kind}`` is a mapping with such keys, and ``{"name": kind, "name?": kind}`` one with these fields, among others.
"""


def checked_state(state: Any) -> Any:
    """Return the state of a checkpoint. Raise ValueError, naming the field, if it is not of the kinds that a save writes."""
    check(state, {}, "the whole state")
    whole = "config" in state  # else it holds weights only
    check(state, _WHOLE if whole else _WEIGHTS, "")
    if not whole:
        return state
    if not state.get("ranks"):
        checked_rank(state)
    optimizers, names, counts = state["optimizers"], state["config"]["optimizers"], state["config"]["parameter groups"]
    made_with = state.get("given", {}).get("optimizers", [[]] * len(optimizers))
    _require(len(made_with) == len(optimizers), "given.optimizers", "the options of each optimizer", made_with)
    _require(len(optimizers) == len(counts) == len(names), "optimizers", counted(len(counts), "state"), optimizers)
    for index, (optimizer, options) in enumerate(zip(optimizers, made_with, strict=True)):
        if names[index] in _MOMENTS or is_of_torch(optimizer):
            check(optimizer, _OF_TORCH, f"optimizers[{index}]")
            numbers, expected = [group["params"] for group in optimizer["param_groups"]], counts[index]
            fits, said = [*map(len, numbers)] == expected, f"groups with {expected} as their numbers of parameters"
            _require(fits, f"optimizers[{index}].param_groups", said, numbers)
            if names[index] in _MOMENTS:
                _check_update(optimizer, options, f"optimizers[{index}]")
    for name, one in state["callbacks"].items():
        if name.partition("#")[0] == "LearningRate" and "scheduler" in one:
            check(one, {"scheduler": _schedule, "total?": _above_0, "planned?": _above_0}, f"callbacks.{name}")
    return state


def check_moments(optimizer: object, saved: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if an optimizer of torch lacks a moment, or has one of another shape than its parameter.

    The fused updates of torch do not check the shapes.

    Args:
        optimizer: The optimizer. One of another package, even of the same name, has moments of its own.
        saved: Its saved state, in the form of torch's.
        shapes: The shapes of its parameters.
    """
    needed = _MOMENTS.get(type(optimizer).__name__)
    if needed is None or not type(optimizer).__module__.startswith("torch.optim."):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    shape_of = dict(zip(numbers, shapes, strict=True))
    for number, one in saved["state"].items():
        _require(number in shape_of, "state", "a state of parameters of its groups", number)
        for name in needed if one else ():
            _require(name in one, f"state.{number}.{name}", "this field", "nothing")
        for name, value in one.items():
            shape = shape_of[number] if isinstance(value, Tensor | Stored) and name not in _NUMBERS else None
            _require(shape is None or tuple(value.shape) == tuple(shape), f"state.{number}.{name}", f"of {shape}", value)


def checked_rank(state: Any) -> Any:
    """Return the state that only one rank has. Raises ValueError as `checked_state`."""
    check(state, _RANK, "")
    return state


def check(value: Any, kind: Kind, path: str) -> None:
    """Raise ValueError, naming the path of the field, if a value is not of a kind."""
    if isinstance(kind, dict):
        _require(isinstance(value, Mapping), path, "a mapping", value)
        for key, of_value in kind.items():
            if isinstance(key, type):
                for name, one in value.items():
                    _require(isinstance(name, key), path, f"keys that are {key.__name__}", name)
                    check(one, of_value, f"{path}.{name}")
                continue
            name = key.removesuffix("?")
            at = f"{path}.{name}" if path else name
            _require(key != name or name in value, at, "this field", "nothing")
            if name in value:
                check(value[name], of_value, at)
    elif isinstance(kind, list | tuple):
        fits = isinstance(value, list | tuple) and (isinstance(kind, list) or len(value) == len(kind))
        _require(fits, path, "a list" if isinstance(kind, list) else f"a list of {len(kind)}", value)
        for index, one in enumerate(value):
            check(one, kind[0] if isinstance(kind, list) else kind[index], f"{path}[{index}]")
    elif isinstance(kind, type) or not callable(kind):
        _require(isinstance(value, kind), path, getattr(kind, "__name__", str(kind)), value)
    else:
        kind(value, path)


def _require(holds: bool, path: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"the field {path!r} must be {expected}; got {repr(got)[:80]}")


def count(value: Any, path: str) -> None:
    """Check a count: a whole number of at most 63 bits."""
    _require(type(value) is int and 0 <= value < 1 << 63, path, "a number from 0 below 2**63", value)


def or_none(kind: Kind) -> Callable[[Any, str], None]:
    """Return the kind of values that may also be None."""
    return lambda value, path: None if value is None else check(value, kind, path)


def _accumulate(value: Any, path: str) -> None:
    check(value, {str: count} if isinstance(value, Mapping) else count, path)
    _require(bool(value) and (isinstance(value, int) or min(value.values()) > 0), path, "above 0", value)


def _check_update(optimizer: Mapping[str, Any], options: Sequence[Mapping[str, Any]], path: str) -> None:
    """Check what an update reads: the state by parameter, and the options, of which `options` are those it was made with."""
    for number, group in enumerate(optimizer["param_groups"]):
        made_with = options[number] if number < len(options) else {}
        kinds = {name: _like(value) for name, value in made_with.items()}
        check(group, {**kinds, **_OPTIONS}, f"{path}.param_groups[{number}]")
    for number, one in optimizer["state"].items():
        check(one, _OF_PARAMETER, f"{path}.state.{number}")


def _like(value: Any) -> Kind:
    """Return the kind of an option."""
    if isinstance(value, list | tuple):
        return tuple(map(_like, value))
    return type(value) if isinstance(value, bool | str) else _number


def _number(value: Any, path: str) -> None:
    fits = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    _require(fits, path, "a number", value)


def _above_0(value: Any, path: str) -> None:
    count(value, path)
    _require(value > 0, path, "above 0", value)


def _rates(value: Any, path: str) -> None:
    check(value, [_number], path)
    _require(len(value) > 0, path, "the rate of each parameter group", value)


def _schedule(value: Any, path: str) -> None:
    """Check the state of a scheduler of torch, of which others may hold several."""
    rates = {"base_lrs?": _rates, "_last_lr?": _rates}
    check(value, {"last_epoch?": int, "_step_count?": int, **rates, "_schedulers?": [_schedule]}, path)


def _loader(value: Any, path: str) -> None:
    """Check the position in a stream or a mixture, of which the loaders have positions of their own."""
    check(value, {"stream?": _STREAM, "loaders?": {str: {**_IN_MIXTURE, "state": or_none(_loader)}}}, path)
    if "loaders" in value:
        check(value, {"ranks": _above_0, "source": str | None}, path)


def _history(value: Any, path: str) -> None:
    check(value, {str: (Tensor, Tensor, count, count)}, path)
    for name, (steps, values, _, every) in value.items():
        fits = steps.dim() == values.dim() == 1 and len(steps) == len(values) and every > 0
        _require(fits, f"{path}.{name}", "as many steps as values", (steps.shape, values.shape, every))


def _rows(value: Any, path: str) -> None:
    check(value, {"counters": Tensor, "times": Tensor, "names": Tensor, "sets": [[str]]}, path)
    counters, times, names = (value[name] for name in ("counters", "times", "names"))
    fits = counters.dim() == 2 and times.dim() == names.dim() == 1 and len(counters) == len(times) == len(names)
    _require(fits, path, "columns of one length", (counters.shape, times.shape, names.shape))
    if len(names):
        inside = not names.is_floating_point() and 0 <= int(names.min()) <= int(names.max()) < len(value["sets"])
        _require(inside, f"{path}.names", "indices of sets", names)


def _schedules(value: Any, path: str) -> None:
    """Check the reading of each moment: a state of an earlier version has other entries, which a resume does not read."""
    check(value, Mapping, path)
    check({name: one for name, one in value.items() if name.startswith("on_")}, {str: _READING}, path)


def _streams(value: Any, path: str) -> None:
    """Check the states of the random generators, by giving them to generators that are used for nothing else."""
    import random

    import torch

    check(value, {"python": (count, [count], object), "torch": Tensor, "cuda": [Tensor], "numpy": object}, path)
    try:
        random.Random(0).setstate((value["python"][0], tuple(value["python"][1]), value["python"][2]))
        torch.Generator().set_state(value["torch"])
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the field {path!r} must hold states of random generators ({error})") from None
    if isinstance(value["numpy"], Mapping):  # no Mersenne twister
        check(value["numpy"], {"bit_generator": str}, f"{path}.numpy")
    elif value["numpy"] is not None:
        check(value["numpy"], (str, Tensor, count, count, int | float), f"{path}.numpy")
        shape = tuple(value["numpy"][1].shape)
        _require(shape == (624,), f"{path}.numpy[1]", "624 numbers", shape)


_COUNTERS = {"epoch": count, "step": count, "batch": count, "batch_in_epoch": count, "samples": count, "tokens?": count}
_DECISION = {"what": str, "who": str, "why": str, "when?": _COUNTERS, "at?": _COUNTERS, "data?": Mapping}
_READING = {"counts": {str: int | float}, "in_epoch": count, "batches": count, "begun": bool, "due": [str], "owed": [str]}
_DUE = {"names": [str], "numbers": Mapping, "losses": [Tensor | Stored], "weights": list}
_TURNS = [(count, count)]
_CONFIG = {
    "model": {str: [count]},
    "optimizers": [str],
    "parameter groups": [[count]],
    "accumulate": _accumulate,
    "precision": str,
    "batches an epoch": or_none(count),
    "ranks?": count,
}
_GIVEN = {"optimizers?": [[Mapping]], "loader?": {str: object}, "callbacks?": {str: Mapping}, "limits?": Mapping}
_SEGMENT = {
    "seed": int,
    "permuted": count,
    "ranks": count,
    "dealt": bool,
    "consumed": _TURNS,
    "loader": Mapping,
    "points": [(*[count] * 5, or_none(count), or_none(count))],
}
_STREAM = {"workers": _above_0, "turn": count, "reached": [(count, count, count, count)]}
_IN_MIXTURE = {"passes": count, "read": count, "ended": bool, "consumed": _TURNS}
_RANK = {
    "streams": _streams,
    "loader": _loader,
    "losses?": {"lasting": {str: (count, float, count)}, "first": or_none((count, str))},
    "gradients?": {int: Tensor | Stored},
    "callbacks of the rank?": {str: Mapping},
    "evaluations due?": or_none(_DUE),
}
_MOMENT = Tensor | Stored | Unbuilt
_NUMBERS = ("step", "mu_product")
_MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "RMSprop": ("step", "square_avg"),
    "SGD": (),
}
"""By class of torch, the state of a parameter after its first update."""
_OF_PARAMETER = {
    **{f"{name}?": _MOMENT for names in _MOMENTS.values() for name in names},
    **{f"{name}?": _number for name in _NUMBERS},
    "max_exp_avg_sq?": _MOMENT,
    "grad_avg?": _MOMENT,
    "momentum_buffer?": _MOMENT | None,
}
_OF_TORCH = {"state": Mapping, "param_groups": [{"params": [int | str]}]}
_OPTIONS = {"fused?": bool | None, "foreach?": bool | None, "initial_lr?": _number}
_WEIGHTS = {
    "callbacks?": {str: Mapping},
    "weight_sets?": {str: str | list | tuple},
    "left_out?": {str: {"shape": [count], "sha256": str}},
    "outside?": Mapping,
}
_WHOLE = _WEIGHTS | {
    "progress": _COUNTERS,
    "in_epoch": bool,
    "exhausted": bool,
    "requests": {str: _DECISION},
    "schedules?": _schedules,
    "config": _CONFIG,
    "given?": _GIVEN,
    "environment": {str: object},
    "model_extra": {str: object},
    "optimizers": [Mapping],
    "precision": Mapping,
    "gradients": {int: Tensor | Stored},
    "weight_unit?": int | float | None,
    "switched?": {str: {str: bool}},
    "data_seed": int | None,
    "data?": {"dealt": bool, "batches": or_none(count), "past": _TURNS},
    "course?": [_SEGMENT],
    "permuted?": count,
    "state": Mapping,
    "history": _history,
    "rows?": _rows,
    "offsets": {str: count},
    "batches_found?": or_none(count),
    "callbacks": {str: Mapping},
    "ranks?": [_RANK],
}
