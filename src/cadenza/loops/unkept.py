"""What a loop of the user's own needs for an exact resume and no checkpoint holds: it moved in the first steps.

Looked at are generators, iterators, and models, optimizers and schedulers other than those of the run.
"""

from __future__ import annotations

import functools
import gc
import inspect
import io
import operator
import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cadenza.drivers.sharding import is_sharded, local
from cadenza.engine.session import Session
from cadenza.optim.parameters import parameters_of

_DEPTH = 3  # attributes and items from a name in the loop
_MOST = 20_000  # objects that are looked at
_LOOKS = (1, 4, 16, 64, 256)  # steps after which states are compared
_GENERATORS_UNTIL = 16  # the last one for generators and iterators: they are not held longer
_NUMBERS = 8  # of each tensor, that are compared
_TRAINED = (nn.Module, Optimizer, LRScheduler)
_PLAIN = (str, bytes, int, float, complex, Tensor, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, io.IOBase)
_NOT_OF_THE_USER = ("cadenza", "IPython", "ipykernel")  # a notebook has names of its own, such as get_ipython


class Unkept:
    """Looks, during the first steps, for what moves in the loop and is in no checkpoint.

    Args:
        frame: The frame of the loop: its names and those of its module are searched.
        session: The session of the run. What its model, its optimizers and its callbacks hold is kept, and so is the order of
            its loader.
        kept: The objects that the user keeps.
        loop: What the loop iterates over, or None: iterators that read it are not looked at.
    """

    def __init__(self, frame: FrameType, session: Session, kept: Iterable[object], loop: object = None) -> None:
        self._session, self._first = session, session.progress.step
        self._advice = _IN_ATTACH if loop is None else _IN_STEPS
        self._covered = _covered(session, kept)
        names = {**frame.f_globals, **frame.f_locals} if frame.f_code.co_name != "<module>" else frame.f_locals
        named = ((name, one) for name, one in [*names.items()] if not name.startswith("__"))
        self._found: list[tuple[str, Any, object]] = []
        for path, one in _reached(named, depth=_DEPTH):
            if id(one) in self._covered or (state := self._state(one)) is None or _reads(one, loop):
                continue
            self._found.append((path, one, state))
            if isinstance(one, nn.Module):
                self._covered |= {id(part) for part in one.modules()}  # they are not named beside it
        self._steps = 0

    def after_step(self) -> Self | None:
        """Warn of what has moved. Return what looks after the next step; None if nothing does."""
        moved, again = self._look(self._session.progress.step - self._first)
        if moved:
            self._session.warn(_advice(moved, self._advice))
        return self if again else None

    def _look(self, step: int) -> tuple[list[str], bool]:
        """Return the paths of what has moved, and whether to look again later. `step` counts from the first look."""
        if step not in _LOOKS or step == self._steps:
            return [], step < _LOOKS[-1]
        self._steps = step
        moved = [path for path, one, state in self._found if self._state(one) != state]
        inside = tuple(f"{path}{sign}" for path in moved for sign in ".[")
        rest = [one for one in self._found if one[0] not in moved and not one[0].startswith(inside)]
        self._found = [one for one in rest if step < _GENERATORS_UNTIL or issubclass(type(one[1]), _TRAINED)]
        moved = [path for path in moved if not path.startswith(inside)]  # what holds them is named
        return moved, bool(self._found) and step < _LOOKS[-1]

    def _state(self, one: object) -> object | None:
        """Return what changes when an object moves; None if it cannot, or if checkpoints hold it."""
        if not issubclass(type(one), _TRAINED):
            return _position(one)
        if isinstance(one, nn.Module):
            return _numbers(part for part in chain(one.parameters(), one.buffers()) if id(part) not in self._covered)
        if isinstance(one, Optimizer):
            parts = (part for state in one.state.values() if isinstance(state, dict) for part in state.values())
            return [group.get("lr") for group in one.param_groups], _numbers(part for part in parts if isinstance(part, Tensor))
        return getattr(one, "last_epoch", None)


def _covered(session: Session, kept: Iterable[object]) -> set[int]:
    """Return the ids of what checkpoints hold: what the user keeps, what callbacks hold, and what the run trains."""
    callbacks = [getattr(one, "__dict__", {}) for one in session.hooks.callbacks.values()]
    held = [part for parts in callbacks for part in parts.values() if not isinstance(part, FunctionType)]
    reached = [one for _, one in _reached((("", one) for one in (*kept, *held)), depth=2 * _DEPTH)]
    modules = [session.module, *session.extra_parameters.modules, *(one for one in reached if isinstance(one, nn.Module))]
    tensors = chain(parameters_of(session.optimizers), *(chain(one.parameters(), one.buffers()) for one in modules))
    trained = chain(session.module.modules(), session.optimizers, tensors)
    known = chain(session.hooks.callbacks.values(), reached, trained)
    return {*map(id, known), *_global_generators(), *_order_of(session.loader)}


def _numbers(tensors: Iterable[Tensor]) -> list[object] | None:
    """Return the identity of tensors and some of their numbers; None if there are no tensors."""
    return [(id(one), one._version, _first_numbers(one)) for one in tensors] or None


def _first_numbers(tensor: Tensor) -> str:
    """Return the first numbers of a tensor: a change through ``.data`` shows only there."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not plain and not is_sharded(tensor):
        return ""
    row = local(tensor)
    while row.ndim > 1 and row.shape[0]:
        row = row[0]
    return str(row.flatten()[:_NUMBERS].tolist())


def loop_frame(frame: FrameType) -> FrameType:
    """Return the frame of a loop: `frame`, or the first one outside of ``contextlib`` and of a progress bar's generator."""
    while frame.f_back is not None and (frame.f_globals.get("__name__") == "contextlib" or _is_of_another_module(frame)):
        frame = frame.f_back
    return frame


def _is_of_another_module(frame: FrameType) -> bool:
    """Return whether a frame is a generator of another module than the code that reads it."""
    caller = frame.f_back
    if caller is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return False
    return frame.f_globals is not caller.f_globals


def _order_of(loader: object) -> set[int]:
    """Return the ids of what gives the order of a loader, which checkpoints hold; not those of its data set."""
    data = {id(one) for _, one in _reached([("", getattr(loader, "dataset", None))], depth=2 * _DEPTH)}
    return {id(one) for _, one in _reached([("", loader)], depth=2 * _DEPTH)} - data


def _reads(one: object, loop: object, depth: int = 3) -> bool:
    """Return whether an iterator reads the loop, as ``enumerate(steps)`` does."""
    if loop is None:
        return False
    if one is loop or not depth:
        return one is loop
    return any(_reads(part, loop, depth - 1) for part in gc.get_referents(one) if part is loop or isinstance(part, Iterator))


_IN_ATTACH = "Before the loop, call {}", "loop"
_IN_STEPS = "Write `with trainer.steps(...) as steps:` and, before the loop, {}", "steps"


def _advice(paths: list[str], form: tuple[str, str]) -> str:
    """Return a sentence that names them, and says what to do."""
    calls = ", ".join(f"{form[1]}.keep({path!r}, {path})" for path in paths)
    return (
        f"{', '.join(paths)} moved in the first steps, and checkpoints do not hold it: a run that continues may differ. "
        f"{form[0].format(calls)}; an iterator needs state_dict and load_state_dict, or two functions (save, restore)"
    )


def _reached(named: Iterable[tuple[str, Any]], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield objects with the path that the user would write: those of `named`, then what they hold, nearest first."""
    seen, level, left = set[int](), [*named], _MOST
    for _ in range(depth + 1):
        further: list[tuple[str, Any]] = []
        for path, one in level:
            if id(one) in seen or left <= 0:
                continue
            seen.add(id(one))
            left -= 1
            yield path, one
            further += _parts(path, one)
        level = further


def _parts(path: str, one: Any) -> Iterable[tuple[str, Any]]:
    """Return what an object holds, with its path."""
    if isinstance(one, MethodType):
        return [(path, one.__self__)]
    if isinstance(one, FunctionType):  # one of a pair (save, restore): what it names
        cells = [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
        named = [one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__]
        return [(path, value) for value in (*cells, *named, *(one.__defaults__ or ()))]
    if isinstance(one, functools.partial):
        return [(path, value) for value in (one.func, *one.args, *one.keywords.values())]
    if _is_plain(type(one)):  # type: ignore[arg-type]  # classes are hashable
        return ()
    if isinstance(one, Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in [*one.items()][:99] if isinstance(key, str | int)]
    if isinstance(one, list | tuple):
        return [(f"{path}[{index}]", value) for index, value in enumerate(one[:99])]
    held = getattr(one, "__dict__", None)
    return [(f"{path}.{name}", value) for name, value in [*held.items()]] if isinstance(held, dict) else ()


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _position(one: Any) -> object | None:
    """Return the position of a generator of random numbers, or of an iterator without a state; None for anything else."""
    if not _may_move(type(one)):  # type: ignore[arg-type]  # classes are hashable
        return None
    numpy = sys.modules.get("numpy")
    if isinstance(one, torch.Generator):
        return one.get_state().numpy().tobytes()
    if isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):
        return one.getstate()
    if numpy is not None and isinstance(one, numpy.random.Generator):
        return pickle.dumps(one.bit_generator.state)
    if numpy is not None and isinstance(one, numpy.random.RandomState):
        return pickle.dumps(one.get_state(legacy=False))
    if not isinstance(one, Iterator) or hasattr(one, "state_dict"):
        return None
    if isinstance(one, GeneratorType):
        frame = one.gi_frame
        return None if frame is None else (frame.f_lasti, [id(value) for value in frame.f_locals.values()])
    held = getattr(one, "__dict__", None)
    if isinstance(held, dict):
        return [value if isinstance(value, int) else id(value) for value in held.values()]
    return operator.length_hint(one, -1)


@functools.cache
def _is_plain(kind: type) -> bool:
    return issubclass(kind, _PLAIN) or kind.__module__.partition(".")[0] in _NOT_OF_THE_USER


@functools.cache
def _may_move(kind: type) -> bool:
    """Return whether objects of a class may be generators of random numbers, or iterators. Most are not: this is quick."""
    numpy = sys.modules.get("numpy")
    known = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return not _is_plain(kind) and issubclass(kind, (torch.Generator, random.Random, Iterator, *known))


def _global_generators() -> set[int]:
    """Return the ids of the generators that every checkpoint saves."""
    found: list[object] = [torch.default_generator, *torch.cuda.default_generators, getattr(random, "_inst", None)]
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append(getattr(numpy.random.mtrand, "_rand", None))
    return {id(one) for one in found}
