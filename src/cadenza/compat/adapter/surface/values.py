"""The values that a reader of source follows, and the uses of them that it finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["reads", "sets", "calls"]


@dataclass(frozen=True, slots=True)
class Thing:
    """An object that a callback receives, such as ``trainer``, or a part of it, such as ``trainer.strategy``."""

    text: str
    view: type[Any] | None = None
    """The class of the view; None for an object that is not checked."""

    followed: bool = True
    """Whether uses of it are noted: not those of the parts of an object that is not checked."""


@dataclass(frozen=True, slots=True)
class Keywords:
    """The arguments that a method takes as ``**kwargs``."""


@dataclass(frozen=True, slots=True)
class Self:
    """The callback. ``after`` is the class behind which ``super()`` looks; None for ``self``."""

    after: type[Any] | None = None


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple or a list that the source writes out, or the arguments that a method takes as ``*args``."""

    parts: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Many:
    """A list of which all elements are views of one class, such as ``trainer.loggers``."""

    element: Thing


@dataclass(frozen=True, slots=True)
class Function:
    """A function of which the calls are followed: a method of the callback, or one that its module or a method defines."""

    function: Any
    """The function, or the syntax tree of one that is defined inside a method."""

    owner: type[Any]
    """The class of the method."""

    bound: bool = False
    """Whether the callback is its first argument."""

    names: dict[str, Value] = field(default_factory=dict, repr=False, compare=False)
    """The names around a function that is defined inside a method."""

    scope: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The names of the module of such a function."""


Value = Thing | Keywords | Self | Several | Many | Function | None


@dataclass(frozen=True, slots=True)
class Use:
    """A use of an attribute of an object that a callback receives."""

    event: str
    """The event in which it happens."""

    thing: str
    """The object as the other system calls it, such as ``trainer.strategy``."""

    name: str
    """The attribute; of a mapping, the key in brackets."""

    kind: Kind
    """What the callback does with it."""

    line: int
    """The line in its file."""

    provided: bool | None
    """Whether a native run provides it; None for an object of the user's own."""

    advice: str = ""
    """What to use instead, if it is not provided."""

    guarded: bool = False
    """Whether the callback is prepared for its absence: ``hasattr``, ``getattr`` with a default, ``except AttributeError``."""

    certain: bool = False
    """Whether each call of the event comes here: there is no condition before it."""

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
