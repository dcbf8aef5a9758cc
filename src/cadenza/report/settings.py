"""The trainer's arguments in ``run.json`` as one level of names and values, to compare runs by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def settings_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return each argument of a run by its name; an optimizer's settings have its name in lower case before them.

    >>> settings_of({"arguments": {"optimizer": [{"name": "SGD", "lr": 0.1}], "seed": 1, "callbacks": ["Ema", "Limit"]}})
    {'optimizer': 'SGD', 'optimizer.lr': 0.1, 'seed': 1, 'callbacks': 'Ema, Limit'}
    """
    arguments = info.get("arguments")
    return _flat(arguments, "") if isinstance(arguments, Mapping) else {}


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names that have different values, or that only some have, in the order of the first that has them."""
    names = dict.fromkeys(name for one in settings for name in one)
    missing = object()
    return [name for name in names if any(one.get(name, missing) != settings[0].get(name, missing) for one in settings[1:])]


def text_of(value: Any) -> str:
    """Return a value of `settings_of` as text; None as ``-``. Floats keep all digits: two that differ look different."""
    return "-" if value is None else str(value)


def _flat(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, one in value.items():
        if isinstance(one, Mapping):
            flat |= _named(one, prefix + str(name))
        elif isinstance(one, list) and one and all(isinstance(part, Mapping) for part in one):
            for number, part in enumerate(one, 1):
                flat |= _named(part, f"{prefix}{name}" + (f"#{number}" if number > 1 else ""))
        elif isinstance(one, list):
            flat[prefix + str(name)] = ", ".join(map(str, one))
        else:
            flat[prefix + str(name)] = one
    return flat


def _named(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping with a ``name``, such as an optimizer, under its own name, and its other entries below that."""
    head = {name: value["name"]} if "name" in value else {}
    return head | _flat({key: one for key, one in value.items() if key != "name"}, f"{name}.")
