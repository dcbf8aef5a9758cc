"""Objects on one line, for ``repr``, and the signatures of functions that users write."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, range)


class _Brief(reprlib.Repr):
    """The standard library's short ``repr``, with short forms for what a training holds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 4

    def repr_instance(self, x: Any, level: int) -> str:
        torch = sys.modules.get("torch")  # commands that read directories work without it
        if torch is not None and isinstance(x, torch.Tensor):
            return f"Tensor{tuple(x.shape)}" if x.ndim else "Tensor of shape ()"
        if torch is not None and isinstance(x, torch.nn.Module):
            return type(x).__name__
        if isinstance(x, PurePath):
            return repr(str(x))
        if isinstance(x, partial):
            return self.repr1(x.func, level)
        name = getattr(x, "__qualname__", None) or type(x).__name__
        if callable(x) and hasattr(x, "__qualname__"):
            return str(name).rpartition("<locals>.")[2]
        try:
            text = repr(x)
        except Exception:  # the object of a user; a repr must not fail
            return f"<{name}>"
        return f"<{name}>" if "\n" in text or " at 0x" in text else reprlib.Repr.repr_str(self, text, level)[1:-1]


_BRIEF = _Brief()


def brief(value: object) -> str:
    """Return a value in at most some 60 characters, on one line, without an address.

    >>> import torch
    >>> brief(torch.zeros(2, 3)), brief(print), brief([*range(9)]), brief(object())
    ('Tensor(2, 3)', 'print', '[0, 1, 2, 3, ...]', '<object>')
    """
    return _BRIEF.repr(value)


def as_call(shown: object, read: Callable[[Any], str] = brief, **others: object) -> str:
    """Return an object as a call of its class, with the arguments that differ from the defaults.

    An argument is shown if the object holds it under the argument's name, or if it is in `others`; `read` returns its text. No
    property is read.

    >>> class Clip:
    ...     def __init__(self, max_norm, kind=2, *, log=False): self.max_norm, self.kind, self.log = max_norm, kind, log
    >>> as_call(Clip(1.0, log=True))
    'Clip(max_norm=1.0, log=True)'
    """
    held = {**getattr(shown, "__dict__", {}), **others}
    parts = []
    for name, parameter in _parameters(type(shown)).items():
        value = held.get(name)
        required = parameter.default is inspect.Parameter.empty
        if name not in held or (required and value is None) or (name == "name" and value == type(shown).__name__):
            continue
        text = read(value)
        if required or not _equal(value, text, parameter.default, read):
            parts.append(f"{name}={text}")
    return f"{type(shown).__name__}({', '.join(parts)})"


def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = signature_of(kind).parameters
    except (TypeError, ValueError):  # a class of C code
        return {}
    every = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in every}


def _equal(value: object, text: str, default: object, read: Callable[[Any], str]) -> bool:
    if value is default or text == read(default):
        return True
    if not isinstance(value, _PLAIN) or not isinstance(default, _PLAIN):
        return False
    return value == default or (not default and value in (None, (), [], {}))


if sys.version_info >= (3, 14):
    from annotationlib import Format

    _UNREAD = {"annotation_format": Format.STRING}
else:
    _UNREAD = dict[str, Any]()


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return ``inspect.signature(function)`` without evaluation of its annotations.

    From Python 3.14, annotations are evaluated when they are read (PEP 649), and a name that is imported below
    ``if TYPE_CHECKING:`` would be a NameError here.

    Raises:
        ValueError: A builtin has no signature.
        TypeError: `function` cannot be called.
    """
    return inspect.signature(function, follow_wrapped=follow_wrapped, **_UNREAD)
