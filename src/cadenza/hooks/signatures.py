"""Check that a function can be a hook: its signature, the names of its parameters, and that it returns None."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dis import opmap
from types import CodeType
from typing import Any

from cadenza.errors import MomentError
from cadenza.status.shown import signature_of


def check_call(function: Callable[..., Any], wanted: list[str], problem: str) -> None:
    """Raise `MomentError` unless `function` accepts the arguments `wanted`, by position.

    A parameter may have any name except that of another argument of this moment, or one that only hooks of other trainers have.
    The engine ignores return values, so a function that returns a constant, a truth value or a new container is an error. The
    result of a call or the value of a variable is not checked.
    """
    expected = ", ".join(wanted)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise MomentError(f"{problem}: it is async or a generator, so it would never run. Write a plain function ({expected}).")
    signature = _signature(function)
    if signature is None:
        return
    try:
        bound = signature.bind(*wanted)
    except TypeError:
        advice = _habit(signature)
        if hasattr(function, "__wrapped__"):
            advice += f" If its decorator gives other arguments, write the parameters ({expected}) in the decorator's function."
        raise MomentError(f"{problem}: expected ({expected}), got {signature}.{advice}") from None
    for name, gets in bound.arguments.items():
        if not isinstance(gets, str) or name == gets:  # a tuple for *arguments
            continue
        if name in wanted or (name in PARAMETERS and gets in _OURS):
            raise MomentError(
                f"{problem}: {name!r} would get the {gets}. Expected ({expected}), got {signature}.{_habit(signature)}"
            )
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None and code.co_name != "<lambda>" and (value := _returned(code)):
        raise MomentError(
            f"{problem}: it returns {value}, but the return value of a hook is ignored. Return None; to control the run call "
            " run.stop(reason), run.end_epoch(reason) or run.skip_batch(reason)."
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return what a function takes; None if that is not known.

    A decorated function takes what its wrapper takes, which may add or leave out arguments. A wrapper with ``*args`` and at
    most one parameter besides passes them on.
    """
    for through_wrappers in (False, True):
        try:
            signature = signature_of(function, follow_wrapped=through_wrappers)
        except ValueError:  # some builtins have none
            continue
        kinds = [one.kind for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        if len(kinds) > 2 or inspect.Parameter.VAR_POSITIONAL not in kinds or through_wrappers:
            return signature
    return None


PARAMETERS = {
    *("epoch", "logs", "trainer", "pl_module", "state", "control", "batch_idx", "batch_index", "dataloader_idx"),
    *("learn", "learner", "engine", "runner"),
}
"""Names of parameters that only hooks of other trainers have."""
_OURS = {"run", "batch", "outputs", "evaluation", "record", "reason", "error"}
"""Arguments that no name of `PARAMETERS` fits; a checkpoint may be called a state, and moments of a project have their own."""


def _habit(signature: inspect.Signature) -> str:
    names = signature.parameters.keys()
    if "pl_module" in names or "batch_idx" in names:
        return " Counters are in run.progress, and the model is run.model."
    if "control" in names:
        return " Counters are in run.progress; in place of control call run.stop(reason) or run.save(reason)."
    if "logs" in names:
        return " The epoch is run.progress.epoch, and logged numbers are in run.history.latest."
    return " Counters are in run.progress." if names & PARAMETERS else ""


_CACHE, _EXTENDED = opmap["CACHE"], opmap["EXTENDED_ARG"]
_RETURN, _RETURN_CONST = opmap["RETURN_VALUE"], opmap.get("RETURN_CONST")  # the second one from Python 3.12 to 3.13
_CONSTANT = {opmap["LOAD_CONST"]}
_TRUTH = {opmap[name] for name in ("COMPARE_OP", "IS_OP", "CONTAINS_OP", "UNARY_NOT")}
_NEW = {number for name, number in opmap.items() if name.startswith("BUILD_") or name == "LOAD_SMALL_INT"}


def _returned(code: CodeType) -> str:
    """Describe a return value that is visible in the bytecode; empty if none is."""
    before, argument, high = _CACHE, 0, 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if operation == _EXTENDED:
            high = (high | low) << 8
        elif operation == _RETURN and before in _TRUTH:
            return "a truth value"
        elif operation == _RETURN and before in _NEW:
            return "a new value"
        elif operation == _RETURN_CONST or (operation == _RETURN and before in _CONSTANT):
            constant = code.co_consts[high | low if operation == _RETURN_CONST else argument]
            if constant is not None:
                return repr(constant)
        if operation not in (_EXTENDED, _CACHE):
            before, argument, high = operation, high | low, 0
    return ""
