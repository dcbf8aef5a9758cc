"""Views: objects that foreign callbacks receive. A missing attribute raises an error with advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeVar, overload
from weakref import ref

from cadenza.engine.session import Session, session_of
from cadenza.errors import AdapterError, nearest
from cadenza.hooks.dispatch import hooks_of

if TYPE_CHECKING:
    from cadenza.run import Run

T = TypeVar("T")


class Weak(Generic[T]):
    """An attribute that holds a weak reference. Reading it raises `ReferenceError` if the object no longer exists."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __set__(self, instance: object, value: T) -> None:
        vars(instance)[self._name] = ref(value)

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any]) -> T: ...

    def __get__(self, instance: object, owner: type[Any]) -> Self | T:
        if instance is None:
            return self
        value: T | None = vars(instance)[self._name]()
        return existing(value)


def existing(value: T | None) -> T:
    """Return the referent of a weak reference.

    Raises:
        ReferenceError: It no longer exists.
    """
    if value is None:
        raise ReferenceError("the run of this object is over, and nothing refers to it. Keep the run or the trainer.")
    return value


class OfRun:
    """A part of a run that does not keep the run alive, since callbacks and users may outlive it."""

    def __init__(self, run: Run) -> None:
        self.held: Callable[[], Session | None] = ref(session_of(run))
        """Returns the session; None once the run no longer exists."""

    @property
    def session(self) -> Session:
        """The session of the run."""
        return existing(self.held())

    @property
    def run(self) -> Run:
        """The run."""
        return self.session.run

    def is_of(self, run: Run) -> bool:
        """Return whether it is a part of this run."""
        return self.held() is session_of(run)


class View:
    """An object of another system, backed by a run.

    A subclass has a property for each attribute that a run provides, with a setter if the other system allows setting it.
    Internal attributes start with an underscore.
    """

    title: ClassVar[str]
    """The name of the object in the code of the other system, such as ``trainer``."""

    absent: ClassVar[Mapping[str, str]] = {}
    """Attributes of the original that a run does not provide, each with a sentence that names the replacement."""

    def __init__(self, run: Run) -> None:
        self._of_run = OfRun(run)

    @property
    def _run(self) -> Run:
        return self._of_run.run

    def _reader(self) -> str:
        """Return the name of the callback that is currently using an attribute."""
        session = self._of_run.held()
        return (None if session is None else session.hooks.current_owner()) or "the script"

    def __getattr__(self, name: str) -> Any:
        refuse(None, self, name, "reads")

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(type(self), name, None)
        if not (name.startswith("_") or hasattr(type(self), name)) or (isinstance(found, property) and found.fset is None):
            refuse(None, self, name, "sets")
        object.__setattr__(self, name, value)


def refuse(run: Run | None, view: Any, name: str, does: str, title: str = "", *, advice: str = "") -> NoReturn:
    """Raise the error for an attribute that a view does not provide.

    Args:
        run: The run with the hook that uses the attribute; None for a `View`, which knows its run.
        view: An object with ``title`` and ``absent`` in its class.
        name: The attribute.
        does: ``"reads"`` or ``"sets"``.
        title: The object's name in the other system; by default ``view.title``.
        advice: The replacement, if neither ``absent`` nor a similar name provides it.
    """
    kind, title = type(view), title or type(view).title
    if name.startswith("__"):  # of a protocol, such as copying
        raise AttributeError(name)
    similar = "" if hasattr(kind, name) else nearest(name, [name for name in dir(kind) if not name.startswith("_")]).strip()
    advice = kind.absent.get(name) or similar or advice
    who = view._reader() if isinstance(view, View) else (run and hooks_of(run).current_owner()) or "the script"
    what = "only lets be read" if does == "sets" and hasattr(kind, name) else "does not provide"
    raise AdapterError(
        f"{who} {does} {title}.{name}, which a native run {what}.{f' {advice}' if advice else ''}",
        name=name,
        obj=view,
    )
