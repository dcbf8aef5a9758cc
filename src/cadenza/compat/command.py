"""``cadenza compat``: report which parts of a foreign callback class work in a native run, from its source.

Nothing is trained.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cadenza.commands.importing import guarded, imported, is_script, nothing_on_stdout
from cadenza.commands.output import add_json, clean, complain, fitting, print_json, print_rows, say, say_folded
from cadenza.compat.adapter.surface.surface import Surface, distinct, sentence, surface_of
from cadenza.errors import CadenzaError, nearest
from cadenza.hooks.moments import BaseCallback
from cadenza.loops.foreign_callbacks import ADAPTERS, base_of
from cadenza.status.formats import counted

_LAZY = "Callback"  # lazily imported names with this suffix are callback classes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Read the source of a callback class of Hugging Face, Lightning or Keras, and list its events with the moments that "
        "call them, and the attributes of its arguments that a native run does not provide, with the replacement. The class "
        "is imported; nothing of it is called. Exit code 0: all that it uses is mapped; 1: something is not."
    )
    parser.epilog = (
        "examples:\n  cadenza compat lightning.pytorch.callbacks.EarlyStopping\n"
        "  cadenza compat transformers:ProgressCallback\n"
        "  cadenza compat train.py:MyCallback --json\n  cadenza compat keras.callbacks"
    )
    parser.add_argument(
        "callback",
        metavar="TARGET",
        help="module:NAME, module.NAME or script.py:NAME, a callback class or an instance; without NAME: a table of all "
        "callback classes of the module",
    )
    add_json(parser)
    parser.set_defaults(command=show)


def show(arguments: argparse.Namespace) -> int:
    """Print the mapping; return 0 if it is complete, otherwise 1.

    Raises:
        CadenzaError: There is no such module or class, or the class is not a callback.
    """
    target = arguments.callback
    with nothing_on_stdout():
        found = guarded("compat", target, (), lambda: _found(target))
    surfaces = found if isinstance(found, list) else [found]
    if arguments.json:
        print_json([surface.to_dict() for surface in surfaces] if isinstance(found, list) else surfaces[0].to_dict())
    elif isinstance(found, list):
        _print_table(found)
    else:
        for line in _lines(found):
            _say(line)
    return 0 if all(surface.mapped for surface in surfaces) else 1


# -- the target ------------------------------------------------------------------------------------------


def _found(target: str) -> Surface | list[Surface]:
    source, name = _parts(target)
    module = imported(source)
    if not name:
        return _callbacks_in(module, source)
    thing: Any = module
    for part in name.split("."):
        if not hasattr(thing, part):
            known = [key for key in dir(thing) if not key.startswith("_")]
            raise CadenzaError(f"{source!r} has no {name!r}.{_inside_a_block(source, part) or nearest(part, known)}")
        thing = getattr(thing, part)
    if isinstance(thing, ModuleType):
        return _callbacks_in(thing, target)
    if (surface := surface_of(thing)) is None:
        raise CadenzaError(f"{name} of {source!r} {_no_callback(thing)}")
    return surface


def _inside_a_block(source: str, name: str) -> str:
    """Return advice if a script defines a class where an import does not reach it."""
    if is_script(source) and re.search(rf"^[ \t]+class {re.escape(name)}\b", Path(source).read_text(), re.MULTILINE):
        return ' It is defined in a function or below `if __name__ == "__main__":`. Move it to the top level.'
    return ""


def _parts(target: str) -> tuple[str, str]:
    """Return the script or module, and the name in it, which may be empty."""
    source, colon, name = target.rpartition(":")
    if colon and not (name.endswith(".py") or "/" in name or "\\" in name):  # C:\train.py
        return source, name
    if is_script(target) or _is_module(target):
        return target, ""
    module, _, name = target.rpartition(".")
    while module and not _is_module(module):  # a nested class
        module, _, inner = module.rpartition(".")
        name = f"{inner}.{name}"
    return (module, name) if module else (target, "")


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _no_callback(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    if issubclass(kind, BaseCallback):
        return "is a native callback: it needs no adapter."
    what = "has" if isinstance(thing, type) else f"is a {kind.__name__}, which has"
    return f"{what} none of the base classes {', '.join(ADAPTERS)}"


def _callbacks_in(module: ModuleType, source: str) -> list[Surface]:
    classes = {class_: None for name in sorted(_names_in(module)) if (class_ := _class(module, name)) is not None}
    if not classes:
        raise CadenzaError(f"{source!r} has no callback class with one of the base classes {', '.join(ADAPTERS)}")
    return [surface for class_ in classes if (surface := surface_of(class_)) is not None]


def _names_in(module: ModuleType) -> list[str]:
    """Return the names that may be callbacks. Lazily imported names are included only if they look like callbacks."""
    there = vars(module)
    late = [name for name in (*getattr(module, "__all__", ()), *dir(module)) if name not in there and name.endswith(_LAZY)]
    return [*dict.fromkeys((*(name for name in there if not name.startswith("_")), *late))]


def _class(module: ModuleType, name: str) -> type[Any] | None:
    try:
        found = getattr(module, name)
    except Exception as error:  # a lazily imported module lacks a dependency
        complain(f"{name} cannot be imported: {clean(str(error))}")
        return None
    is_callback = isinstance(found, type) and base_of(found) not in (None, found)
    return found if is_callback else None


# -- one class -------------------------------------------------------------------------------------------


def _lines(surface: Surface) -> Iterator[str]:
    yield f"{surface.name} of {surface.module} ({surface.system})"
    if surface.refused:
        yield f"! a native run does not accept it: {surface.refused}"
    yield ""
    yield from _events(surface)
    yield from _uses(surface)
    calls = dict.fromkeys(f"{call.text} in {call.event}" for call in surface.passed_on)
    if calls:
        yield from ("", f"passed on to functions that are not read: {', '.join(calls)}")
    if surface.unreadable:
        yield from ("", f"! without source that can be read: {', '.join(surface.unreadable)}")
    missing = [f"! {sentence(use)} (line {use.line})" for use in distinct(surface.missing)]
    if missing:
        yield from ("", *missing)
    yield from ("", _verdict(surface))


def _events(surface: Surface) -> Iterator[str]:
    if not surface.events:
        yield "it overrides no event" + (" in its class; they depend on its arguments" if surface.dynamic else "")
    wide = max((len(event.name) for event in surface.events), default=0)
    for event in surface.events:
        called = event.moment or "never called"
        mark = "; " if event.called else ": "
        note = f"{mark}{event.event.note}" if event.event.note else ""
        yield f"{'' if event.called else '! '}{event.name:{wide if event.called else wide - 2}}  {called}{note}"
    if surface.state:
        yield f"{', '.join(surface.state)}: in checkpoints"


def _uses(surface: Surface) -> Iterator[str]:
    kinds = {
        "it uses, and a run provides": [use for use in surface.uses if use.provided],
        "it uses, of objects of your own": [use for use in surface.uses if use.provided is None],
        "it uses if it is there, and a run does not provide": [
            use for use in surface.uses if use.provided is False and use not in surface.missing
        ],
    }
    for title, uses in kinds.items():
        names = sorted({use.text for use in uses})
        if names:
            yield from ("", f"{title}: {', '.join(names)}")


def _verdict(surface: Surface) -> str:
    if surface.mapped:
        return "all that it uses is mapped"
    if surface.refused:
        return "it is refused"
    parts = [
        *([f"{_all(surface.never_called, 'event')} never called"] if surface.never_called else []),
        *([f"{_all(distinct(surface.missing), 'attribute')} not provided"] if surface.missing else []),
        *([f"{_all(surface.unreadable, 'method')} not read"] if surface.unreadable else []),
    ]
    return f"not all is mapped: {', '.join(parts)}"


def _all(things: Sequence[object], name: str) -> str:
    return f"{counted(len(things), name)} {'is' if len(things) == 1 else 'are'}"


# -- a table of classes ----------------------------------------------------------------------------------


def _print_table(surfaces: Sequence[Surface]) -> None:
    rows = [["callback", "mapped", "events", "attributes", "system"]]
    rows += [[each.name, _short(each), _mapped_events(each), _mapped_attributes(each), each.system] for each in surfaces]
    kept = fitting(rows, 2)
    print_rows([[row[i] for i in kept] for row in rows])
    for surface in surfaces:
        if not surface.mapped:
            say()
            _say(f"{surface.name}: {_verdict(surface)}")
            for line in _reasons(surface):
                _say(f"  {line}")
    done = sum(surface.mapped for surface in surfaces)
    say()
    _say(f"{done} of {counted(len(surfaces), 'callback')} mapped")


def _short(surface: Surface) -> str:
    return "refused" if surface.refused else "yes" if surface.mapped else "no"


def _mapped_events(surface: Surface) -> str:
    if surface.dynamic and not surface.events:
        return "by argument"
    return f"{len(surface.events) - len(surface.never_called)} of {len(surface.events)}"


def _mapped_attributes(surface: Surface) -> str:
    checked = distinct([use for use in surface.uses if use.provided is not None and not use.guarded])
    missing = {use.text for use in surface.missing}
    return f"{len(checked) - len(missing & {use.text for use in checked})} of {len(checked)}"


def _reasons(surface: Surface) -> Iterator[str]:
    if surface.refused:
        yield surface.refused
        return
    for line in surface.notes():
        yield line.removeprefix("! ").removeprefix(f"{surface.name} ")


def _say(line: str) -> None:
    lists = line.startswith(("it uses", "passed on", "! without"))
    say_folded(line, ", " if lists else " ")
