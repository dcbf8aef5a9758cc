"""Choose parameters and modules of a model by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from cadenza.errors import nearest
from cadenza.status.formats import few

T = TypeVar("T")
Pattern = str | type[nn.Module]
Choice = Pattern | Sequence[Pattern] | Callable[[str, T], bool]
"""A pattern for names such as ``"blocks.*"`` (``*`` also matches dots), a class of modules, several of these, or a function
of name and value."""


def check_choice(choice: object, argument: str) -> None:
    """Raise `TypeError` if `choice` is no `Choice`. `argument` is its name in the message."""
    several = choice if isinstance(choice, Sequence) and not isinstance(choice, str) and choice else (choice,)
    if isinstance(choice, nn.Module):
        raise TypeError(
            f"{argument} must be a pattern such as 'encoder.*', a class of modules, a sequence of these, or a function (name, "
            f"value) -> bool; got a module of the class {type(choice).__name__}. Give its name or its class."
        )
    if not callable(choice) and not all(isinstance(item, str | type) for item in several):
        raise TypeError(
            f"{argument} must be a pattern such as 'encoder.*', a sequence of patterns, or a function (name, value) -> bool; "
            f"got {choice!r}"
        )


def matches(choice: Choice[T], name: str, value: T) -> bool:
    """Return whether a parameter or module is chosen."""
    if callable(choice) and not isinstance(choice, type):
        return choice(name, value)
    return any(_fits(pattern, name, value) for pattern in _patterns(choice))


def named_matches(choice: Choice[T], named: Mapping[str, T], *, argument: str, kind: str) -> dict[str, T]:
    """Return the chosen ones of the named parameters or modules of a model.

    Args:
        choice: See `Choice`.
        named: By name, the parameters or modules to choose from.
        argument: The name of the argument, for messages.
        kind: ``"parameter"`` or ``"module"``, for messages.

    Raises:
        ValueError: A pattern matches none of them, or the function chooses none. The message has the closest name.

    >>> named = dict(nn.Sequential(nn.Linear(1, 1), nn.ReLU()).named_modules())
    >>> named_matches(["0", nn.ReLU], named, argument="shard", kind="module")
    {'0': Linear(in_features=1, out_features=1, bias=True), '1': ReLU()}
    >>> named_matches("block*", dict(nn.Linear(1, 1).named_modules()), argument="shard", kind="module")
    Traceback (most recent call last):
    ValueError: shard: no module of the model matches 'block*'. It has none
    """
    found = {name: value for name, value in named.items() if matches(choice, name, value)}
    if callable(choice) and not isinstance(choice, type):
        if not found:
            raise ValueError(f"{argument}: the function chose no {kind} of the model. It has {_few(named)}")
        return found
    for pattern in _patterns(choice):
        if not any(_fits(pattern, name, value) for name, value in named.items()):
            closest = nearest(pattern, named) if isinstance(pattern, str) else ""
            raise ValueError(f"{argument}: no {kind} of the model matches {pattern!r}.{closest} It has {_few(named)}")
    return found


def _patterns(choice: Pattern | Sequence[Pattern]) -> Sequence[Pattern]:
    return (choice,) if isinstance(choice, str | type) else choice


def _fits(pattern: Pattern, name: str, value: object) -> bool:
    return fnmatchcase(name, pattern) if isinstance(pattern, str) else isinstance(value, pattern)


def _few(named: Mapping[str, object]) -> str:
    shown = [
        f"{name} ({type(value).__name__})" if isinstance(value, nn.Module) else name for name, value in named.items() if name
    ]
    return few(shown, 8) or "none"
