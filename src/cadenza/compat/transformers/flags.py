"""The flags of ``control``: detection of those that a callback may set, and their synchronization between ranks."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import torch

from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.drivers.base import Driver

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
IDLE = dict.fromkeys(FLAGS, False)
"""The flags of a control that carry no request."""

COLLECTIVE = ("should_save", "should_evaluate", "should_log")
"""The flags with a collective effect. For the others, `run.stop` and `run.end_epoch`, one rank is enough."""


def flags_of(adapter: ForeignCallback) -> frozenset[str]:
    """Return the flags that a callback may set: those that it mentions, or all if it passes ``control`` to other code."""
    kind: Any = type(adapter.callback)
    above = kind.__mro__[: kind.__mro__.index(adapter.base)]
    hooks = [getattr(getattr(adapter.callback, name), "__func__", None) for name in adapter.overridden()]
    methods = [getattr(attribute, "__func__", attribute) for base in above for attribute in vars(base).values()]
    functions = [inspect.unwrap(hook) for hook in (*hooks, *methods) if isinstance(hook, FunctionType)]
    if not all(isinstance(hook, FunctionType) for hook in hooks) or any(map(_passes_on, functions)):
        return frozenset(FLAGS)
    return frozenset(name for function in functions for name in _names(function.__code__) if name in FLAGS)


def of_other_ranks(driver: Driver, own: Collection[str], authors: Mapping[str, str]) -> dict[str, str]:
    """Return the author of each collective flag set on other ranks but not on this one. Every rank must call this.

    Args:
        driver: The driver of the run.
        own: The collective flags that are set on this rank.
        authors: The names of the callbacks that have set them, by flag.
    """
    marks = torch.tensor([[flag in own, flag not in own] for flag in COLLECTIVE], dtype=torch.uint8)
    if not any(has and lacks for has, lacks in driver.reduce(marks, "max").tolist()):
        return {}
    everyone = driver.gather({flag: authors.get(flag, "") for flag in own})
    found: dict[str, str] = {}
    for rank, given in enumerate(everyone):
        for flag, name in given.items():
            if flag not in own:
                found.setdefault(flag, f"{name} on rank {rank}")
    return found


def _passes_on(function: FunctionType) -> bool:
    """Return whether a hook passes ``control``, its fourth argument, or all arguments to other code."""
    if str(function.__module__).startswith("transformers."):  # passed only to its own methods
        return False
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    names = {"control", *code.co_varnames[3 : min(4, code.co_argcount)]}
    if code.co_flags & inspect.CO_VARARGS:
        names.add(code.co_varnames[count])
    for step, following in pairwise(dis.get_instructions(code)):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        loads = step.opname.startswith("LOAD_") and not names.isdisjoint(map(str, loaded))
        if loads and not following.opname.startswith(("LOAD_ATTR", "STORE_ATTR", "RETURN_VALUE")):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
