"""The fields of the state in a checkpoint and their kinds, which a resume relies on: another program may have written it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cadenza.checkpoint.store.shards import Stored
from cadenza.status.formats import counted
from cadenza.status.plain import Unbuilt

Kind = Any
"""A class or a union; a function that raises; ``[kind]`` for a list of any length, ``(kind, kind)`` for one of this length.

``{int: kind}`` is a mapping with such keys, and ``{"name": kind, "name?": kind}`` one with these fields, among others.
"""


def checked_state(state: Any) -> Any:
    """Return the state of a checkpoint. Raise ValueError, naming the field, if it is not of the kinds that a save writes."""
    _check(state, {}, "the whole state")
    whole = "config" in state  # else it holds weights only
    _check(state, _WHOLE if whole else _WEIGHTS, "")
    if not whole:
        return state
    if not state.get("ranks"):
        checked_rank(state)
    made_with = state.get("given", {}).get("optimizers", state["optimizers"])
    _require(len(made_with) == len(state["optimizers"]), "given.optimizers", "the options of each optimizer", made_with)
    kept, said = _numbers_of_groups(state["optimizers"]), state["config"]["parameter groups"]
    _require(len(kept) == len(said) == len(state["config"]["optimizers"]), "optimizers", counted(len(said), "state"), kept)
    for index, (numbers, counts) in enumerate(zip(kept, said, strict=True)):
        fits = numbers is None or list(map(len, numbers)) == counts
        _require(fits, f"optimizers[{index}].param_groups", f"groups with {counts} as their numbers of parameters", numbers)
        if numbers is not None and state["config"]["optimizers"][index] in _MOMENTS:
            _check_update(state, index)
    for name, one in state["callbacks"].items():
        if name.partition("#")[0] == "LearningRate" and "scheduler" in one:
            _check(one, {"scheduler": _schedule, "total?": _above_0, "planned?": _above_0}, f"callbacks.{name}")
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
    _check(state, _RANK, "")
    return state


def checked_capsule(content: Any) -> Any:
    """Return the content of a capsule. Raises ValueError as `checked_state`."""
    _check(content, {"facts": _CAPSULE, "state": {"batches": object, "rng": object, "model": object}}, "")
    return content


def _check(value: Any, kind: Kind, path: str) -> None:
    if isinstance(kind, dict):
        _require(isinstance(value, Mapping), path, "a mapping", value)
        _check_entries(value, kind, path)
    elif isinstance(kind, list | tuple):
        fits = isinstance(value, list | tuple) and (isinstance(kind, list) or len(value) == len(kind))
        _require(fits, path, "a list" if isinstance(kind, list) else f"a list of {len(kind)}", value)
        for index, one in enumerate(value):
            _check(one, kind[0] if isinstance(kind, list) else kind[index], f"{path}[{index}]")
    elif isinstance(kind, type) or not callable(kind):
        _require(isinstance(value, kind), path, getattr(kind, "__name__", str(kind)), value)
    else:
        kind(value, path)


def _check_entries(value: Mapping[Any, Any], kind: Mapping[Any, Kind], path: str) -> None:
    for key, of_value in kind.items():
        if isinstance(key, type):
            for name, one in value.items():
                _require(isinstance(name, key), path, f"keys that are {key.__name__}", name)
                _check(one, of_value, f"{path}.{name}")
            continue
        name = key.removesuffix("?")
        at = f"{path}.{name}" if path else name
        _require(key != name or name in value, at, "this field", "nothing")
        if name in value:
            _check(value[name], of_value, at)


def _require(holds: bool, path: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"the field {path!r} must be {expected}; got {repr(got)[:80]}")


def _count(value: Any, path: str) -> None:
    _require(type(value) is int and 0 <= value < 1 << 63, path, "a number from 0 below 2**63", value)


def _or_none(kind: Kind) -> Callable[[Any, str], None]:
    return lambda value, path: None if value is None else _check(value, kind, path)


def _accumulate(value: Any, path: str) -> None:
    _check(value, {str: _count} if isinstance(value, Mapping) else _count, path)
    _require(bool(value) and (isinstance(value, int) or min(value.values()) > 0), path, "above 0", value)


def _optimizer(value: Any, path: str) -> None:
    """Check the state of an optimizer, if it has the form of torch's."""
    _check(value, Mapping, path)
    if {"state", "param_groups"} <= value.keys():
        _check(value["param_groups"], [{"params": [int | str]}], f"{path}.param_groups")
        _check(value["state"], Mapping, f"{path}.state")


def _check_update(state: Mapping[str, Any], index: int) -> None:
    """Check what an update reads: the options that the optimizer was made with, and the state by parameter."""
    optimizer, given = state["optimizers"][index], state.get("given", {}).get("optimizers")
    options = given[index] if given else []
    for number, group in enumerate(optimizer["param_groups"]):
        made_with = options[number] if number < len(options) else {}
        kinds = {name: _like(value) for name, value in made_with.items()}
        _check(group, {**kinds, **_OPTIONS}, f"optimizers[{index}].param_groups[{number}]")
    for number, one in optimizer["state"].items():
        _check(one, _OF_PARAMETER, f"optimizers[{index}].state.{number}")


def _like(value: Any) -> Kind:
    """Return the kind of an option."""
    if isinstance(value, list | tuple):
        return tuple(map(_like, value))
    return type(value) if isinstance(value, bool | str) else _number


def _number(value: Any, path: str) -> None:
    fits = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    _require(fits, path, "a number", value)


def _above_0(value: Any, path: str) -> None:
    _count(value, path)
    _require(value > 0, path, "above 0", value)


def _rates(value: Any, path: str) -> None:
    _check(value, [_number], path)
    _require(len(value) > 0, path, "the rate of each parameter group", value)


def _schedule(value: Any, path: str) -> None:
    """Check the state of a scheduler of torch, of which others may hold several."""
    rates = {"base_lrs?": _rates, "_last_lr?": _rates}
    _check(value, {"last_epoch?": int, "_step_count?": int, **rates, "_schedulers?": [_schedule]}, path)


def _loader(value: Any, path: str) -> None:
    """Check the position in a stream or a mixture, of which the loaders have positions of their own."""
    _check(value, {"stream?": _STREAM, "loaders?": {str: {**_IN_MIXTURE, "state": _or_none(_loader)}}}, path)
    if "loaders" in value:
        _check(value, {"ranks": _above_0, "source": str | None}, path)


def _numbers_of_groups(optimizers: Sequence[Mapping[str, Any]]) -> list[list[list[Any]] | None]:
    """Return for each optimizer the parameters of its groups; None if its state has another form than torch's."""
    of_torch = [{"state", "param_groups"} <= one.keys() for one in optimizers]
    return [
        [g["params"] for g in one["param_groups"]] if fits else None for one, fits in zip(optimizers, of_torch, strict=True)
    ]


def _history(value: Any, path: str) -> None:
    _check(value, {str: (Tensor, Tensor, _count, _count)}, path)
    for name, (steps, values, _, every) in value.items():
        fits = steps.dim() == values.dim() == 1 and len(steps) == len(values) and every > 0
        _require(fits, f"{path}.{name}", "as many steps as values", (steps.shape, values.shape, every))


def _rows(value: Any, path: str) -> None:
    _check(value, {"counters": Tensor, "times": Tensor, "names": Tensor, "sets": [[str]]}, path)
    counters, times, names = (value[name] for name in ("counters", "times", "names"))
    fits = counters.dim() == 2 and times.dim() == names.dim() == 1 and len(counters) == len(times) == len(names)
    _require(fits, path, "columns of one length", (counters.shape, times.shape, names.shape))
    if len(names):
        inside = not names.is_floating_point() and 0 <= int(names.min()) <= int(names.max()) < len(value["sets"])
        _require(inside, f"{path}.names", "indices of sets", names)


def _schedules(value: Any, path: str) -> None:
    """Check the reading of each moment: a state of an earlier version has other entries, which a resume does not read."""
    reading = {"counts": {str: int | float}, "in_epoch": _count, "batches": _count, "begun": bool, "due": [str], "owed": [str]}
    _check(value, Mapping, path)
    _check({name: one for name, one in value.items() if name.startswith("on_")}, {str: reading}, path)


def _streams(value: Any, path: str) -> None:
    """Check the states of the random generators, by giving them to generators that are used for nothing else."""
    import random

    import torch

    _check(value, {"python": (_count, [_count], object), "torch": Tensor, "cuda": [Tensor], "numpy": object}, path)
    try:
        random.Random(0).setstate((value["python"][0], tuple(value["python"][1]), value["python"][2]))
        torch.Generator().set_state(value["torch"])
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the field {path!r} must hold states of random generators ({error})") from None
    if isinstance(value["numpy"], Mapping):  # no Mersenne twister
        _check(value["numpy"], {"bit_generator": str}, f"{path}.numpy")
    elif value["numpy"] is not None:
        _check(value["numpy"], (str, Tensor, _count, _count, int | float), f"{path}.numpy")
        shape = tuple(value["numpy"][1].shape)
        _require(shape == (624,), f"{path}.numpy[1]", "624 numbers", shape)


_COUNTERS = {"epoch": _count, "step": _count, "batch": _count, "batch_in_epoch": _count, "samples": _count, "tokens?": _count}
_DECISION = {"what": str, "who": str, "why": str, "when?": _COUNTERS, "at?": _COUNTERS, "data?": Mapping}
_DUE = {"names": [str], "numbers": Mapping, "losses": [Tensor | Stored], "weights": list}
_TURNS = [(_count, _count)]
_CONFIG = {
    "model": {str: [_count]},
    "optimizers": [str],
    "parameter groups": [[_count]],
    "accumulate": _accumulate,
    "precision": str,
    "batches an epoch": _or_none(_count),
    "ranks?": _count,
}
_GIVEN = {"optimizers?": [[Mapping]], "loader?": {str: object}, "callbacks?": {str: Mapping}, "limits?": Mapping}
_SEGMENT = {
    "seed": int,
    "permuted": _count,
    "ranks": _count,
    "dealt": bool,
    "consumed": _TURNS,
    "loader": Mapping,
    "points": [(*[_count] * 5, _or_none(_count), _or_none(_count))],
}
_STREAM = {"workers": _above_0, "turn": _count, "reached": [(_count, _count, _count, _count)]}
_IN_MIXTURE = {"passes": _count, "read": _count, "ended": bool, "consumed": _TURNS}
_RANK = {
    "streams": _streams,
    "loader": _loader,
    "losses?": {"lasting": {str: (_count, float, _count)}, "first": _or_none((_count, str))},
    "gradients?": {int: Tensor | Stored},
    "callbacks of the rank?": {str: Mapping},
    "evaluations due?": _or_none(_DUE),
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
_OPTIONS = {"fused?": bool | None, "foreach?": bool | None, "initial_lr?": _number}
_SAMPLES = _or_none([object])
_OF_BATCH = {"epoch": _count, "batch_in_epoch": _count, "samples": _SAMPLES}
_CAPSULE = {
    "why": str,
    "step": _count,
    "rank": _count,
    "ranks": _count,
    "batches": [_OF_BATCH],
    "not_loaded?": _or_none(_OF_BATCH),
    "losses": [float | int | str | None],
    "module": str | None,
    "parameter": str | None,
    "tensor": str | None,
    "guilty_samples": _SAMPLES,
    "weights_exact": bool,
    "batches_left_out?": str,
    "second_pass?": str,
}
_WEIGHTS = {
    "callbacks?": {str: Mapping},
    "weight_sets?": {str: str | list | tuple},
    "left_out?": {str: {"shape": [_count], "sha256": str}},
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
    "optimizers": [_optimizer],
    "precision": Mapping,
    "gradients": {int: Tensor | Stored},
    "weight_unit?": int | float | None,
    "switched?": {str: {str: bool}},
    "data_seed": int | None,
    "data?": {"dealt": bool, "batches": _or_none(_count), "past": _TURNS},
    "course?": [_SEGMENT],
    "permuted?": _count,
    "state": Mapping,
    "history": _history,
    "rows?": _rows,
    "offsets": {str: _count},
    "batches_found?": _or_none(_count),
    "callbacks": {str: Mapping},
    "ranks?": [_RANK],
}
