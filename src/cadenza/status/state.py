"""``run.state``: the user's own values, saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cadenza.errors import StateError


class State(dict[str, Any]):
    """A dict with entries that are attributes too. A checkpoint can save every entry.

    >>> state = State(best=0.5)
    >>> state.rounds = [1, 2]
    >>> state
    {'best': 0.5, 'rounds': [1, 2]}
    >>> state.model = print
    Traceback (most recent call last):
        ...
    cadenza.errors.StateError: run.state['model'] cannot be saved: expected None, bool, int, float, str, a tensor, or lists \
and dicts of them; got builtin_function_or_method
    """

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__()
        self.update(*arguments, **values)

    def __setitem__(self, key: str, value: Any) -> None:
        check_savable(value, f"run.state[{key!r}]")
        super().__setitem__(key, value)

    def update(self, *arguments: Any, **values: Any) -> None:
        for key, value in dict(*arguments, **values).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> State:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"run.state has no {name!r}; it has {list(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"run.state has no {name!r}; it has {list(self)}") from None


def check_savable(value: object, path: str) -> None:
    """Raise `StateError`, which names the path to the value, unless a checkpoint can hold `value`."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            check_savable(part, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise StateError(f"{path} cannot be saved: expected keys of type str; got {key!r}")
            check_savable(part, f"{path}[{key!r}]")
    else:
        raise StateError(
            f"{path} cannot be saved: expected None, bool, int, float, str, a tensor, or lists and dicts of them; got "
            f"{type(value).__name__}"
        )
