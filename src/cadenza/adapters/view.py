"""Objects of another system that its callbacks receive. An attribute that a view does not have is an error with advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from cadenza.errors import AdapterError, nearest
from cadenza.hooks.dispatch import hooks_of

if TYPE_CHECKING:
    from cadenza.run import Run


class View:
    """An object of another system, made of a run.

    A subclass has a property for each attribute that a run provides, with a setter where the other system lets callbacks set
    it. Its own attributes start with an underscore.
    """

    title: ClassVar[str]
    """The name of the object in the code of the other system, such as ``trainer``."""

    absent: ClassVar[Mapping[str, str]] = {}
    """Attributes of the original that a run does not provide, and a sentence that says what to use instead."""

    def __init__(self, run: Run) -> None:
        self._run: Run = run

    def _reader(self) -> str:
        """Return the name of the callback that uses an attribute now."""
        return hooks_of(self._run).current_owner() or "the script"

    def __getattr__(self, name: str) -> Any:
        refuse(self._run, self, name, "reads")

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(type(self), name, None)
        if not (name.startswith("_") or hasattr(type(self), name)) or (isinstance(found, property) and found.fset is None):
            refuse(self._run, self, name, "sets")
        object.__setattr__(self, name, value)


def refuse(run: Run, view: Any, name: str, does: str, title: str = "", *, advice: str = "") -> NoReturn:
    """Raise the error for an attribute that a view does not provide.

    Args:
        run: The run; its current hook is that of the callback that uses the attribute.
        view: An object with ``title`` and ``absent`` in its class.
        name: The attribute.
        does: ``"reads"`` or ``"sets"``.
        title: What the other system calls the object; by default ``view.title``.
        advice: What to use instead, if neither ``absent`` nor a similar name says it.
    """
    kind, title = type(view), title or type(view).title
    if name.startswith("__"):  # of a protocol, such as copying
        raise AttributeError(name)
    similar = "" if hasattr(kind, name) else nearest(name, [one for one in dir(kind) if not one.startswith("_")]).strip()
    advice = kind.absent.get(name) or similar or advice
    who = view._reader() if isinstance(view, View) else hooks_of(run).current_owner() or "the script"
    what = "only lets be read" if does == "sets" and hasattr(kind, name) else "does not provide"
    raise AdapterError(
        f"{who} {does} {title}.{name}, which a native run {what}.{f' {advice}' if advice else ''}",
        name=name,
        obj=view,
    )
