"""Docstrings as the site shows them: an extension of griffe, which reads the source for the reference.

The docstrings of Cadenza show examples as bare ``>>>`` lines. The site needs them under a heading of their own.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from crossrefs import linked
from griffe import Alias, Attribute, Class, Docstring, Extension, GriffeLoader, Module, Object
from guides import GUIDES
from reference import class_of

from cadenza.testing import tiny_trainer

SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:", "Attributes:")


class Docstrings(Extension):
    """Prepare every docstring when the package is read."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        """Visit every object of the package."""
        _visit(pkg)


def _visit(one: Object | Alias) -> None:
    if isinstance(one, Alias):
        return
    if isinstance(one, Class):
        if one.path == "cadenza.run.Run":
            del one.members["__init__"]  # the engine makes it, never a user
        _document_slots(one)
        _add_arguments(one)
    if one.docstring is not None:
        one.docstring.value = prepared(one.docstring.value, one.path)
        if one.name in GUIDES and isinstance(one, Class) and _is_public(one):
            one.docstring.value += f"\n\nSee also {in_reference(GUIDES[one.name])}."
    for member in one.members.values():
        _visit(member)


def _is_public(one: Class) -> bool:
    """Return whether this is the class of the name in ``cadenza.callbacks`` or ``cadenza.sinks``."""
    return class_of(one.name).__module__ == one.module.path


def in_reference(links: str) -> str:
    """Return links from a page in docs for a page of the reference, two folders below."""
    return links.replace("](", "](../../")


def prepared(text: str, path: str) -> str:
    """Return a docstring with its examples in sections, and with links to the reference."""
    parts, last = path.split("."), path.rpartition(".")[2]
    own = f"{parts[0]}.{last}" if len(parts) < 3 else path
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = line.startswith(">>> ")
        if starts and not inside:
            lines += ["Examples:"]
            inside = True
        elif inside and (not line.strip() or line in SECTIONS):
            inside = False
            lines += [""]
        lines.append(f"    {line}" if inside else line)
    return "\n".join(_linked_prose(lines, own))


def _linked_prose(lines: list[str], own: str) -> list[str]:
    """Link the lines that are not an example."""
    shown, inside = [], False
    for line in lines:
        inside = line == "Examples:" or (inside and bool(line.strip()))
        shown.append(line if inside or re.match(r" *>>> ", line) else linked(line, own))
    return shown


def _document_slots(one: Class) -> None:
    """A class may document its attributes in ``__slots__``, for `help`."""
    slots = one.members.get("__slots__")
    if not isinstance(slots, Attribute) or not str(slots.value).startswith("{"):
        return
    for name, text in ast.literal_eval(str(slots.value)).items():
        member = one.members.get(name)
        if text and isinstance(member, Attribute) and member.docstring is None:
            member.docstring = Docstring(text, parent=member)


def _add_arguments(one: Class) -> None:
    """A trainer keeps its arguments as attributes, which griffe does not find because they are set as tuples."""
    if one.path != "cadenza.trainer.Trainer":
        return
    for name in sorted(vars(tiny_trainer())):
        if name.startswith("_"):
            continue
        attribute = one.members[name] = Attribute(name, parent=one)
        attribute.labels.add("instance-attribute")
        attribute.annotation = next((given.annotation for given in one.parameters if given.name == name), None)
        attribute.docstring = Docstring("The argument of this name.", parent=attribute)
