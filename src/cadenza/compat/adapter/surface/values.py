"""Values tracked by the source analyser, and the uses it records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["reads", "sets", "calls"]


@dataclass(frozen=True, slots=True)
class Tracked:
    """An object that a callback receives, such as ``trainer``, or a part of it, such as ``trainer.strategy``."""

    text: str
    view: type[Any] | None = None
    """The class of the view; None for an object that is not checked."""

    followed: bool = True
    """Whether its uses are recorded. False for parts of unchecked objects."""


@dataclass(frozen=True, slots=True)
class Keywords:
    """The arguments that a method takes as ``**kwargs``."""


@dataclass(frozen=True, slots=True)
class Self:
    """The callback. ``after`` is the class after which ``super()`` searches; None for ``self``."""

    after: type[Any] | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple or list literal, or the ``*args`` of a method."""

    parts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Views:
    """A list of views of one class, such as ``trainer.loggers``."""

    element: Tracked


@dataclass(frozen=True, slots=True)
class Function:
    """A function with analysed calls: a method of the callback, or one defined in its module or in a method."""

    function: Any
    """The function, or the syntax tree of one defined inside a method."""

    owner: type[Any]
    """The class of the method."""

    bound: bool = False
    """Whether the callback is its first argument."""

    names: dict[str, Value] = field(default_factory=dict, repr=False, compare=False)
    """The enclosing names of a function defined inside a method."""

    scope: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The globals of such a function."""


Value = Tracked | Keywords | Self | Items | Views | Function | None


@dataclass(frozen=True, slots=True)
class Access:
    """A use of an attribute of an object that a callback receives."""

    event: str
    """The event in which it happens."""

    thing: str
    """The object's name in the other system, such as ``trainer.strategy``."""

    name: str
    """The attribute; of a mapping, the key in brackets."""

    kind: Kind
    """What the callback does with it."""

    line: int
    """The line in its file."""

    provided: bool | None
    """Whether a native run provides it; None for a user object."""

    advice: str = ""
    """The replacement, if it is not provided."""

    guarded: bool = False
    """Whether the callback handles its absence: ``hasattr``, ``getattr`` with a default, ``except AttributeError``."""

    certain: bool = False
    """Whether every call of the event reaches it unconditionally."""

    @property
    def text(self) -> str:
        """The attribute with its object: ``trainer.foo``, or ``logs['loss']``."""
        return f"{self.thing}{self.name}" if self.name.startswith("[") else f"{self.thing}.{self.name}"


@dataclass(frozen=True, slots=True)
class PassedOn:
    """An object that a callback passes to a function, which may use any of its attributes."""

    event: str
    thing: str
    function: str
    line: int

    @property
    def text(self) -> str:
        """The call, such as ``move_optimizer(trainer)``."""
        return f"{self.function}({self.thing})"
