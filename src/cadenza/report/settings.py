"""The trainer's arguments in ``run.json``, flattened to names and values for comparisons of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def settings_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return each argument of a run by name; the settings of an optimizer are prefixed with its lower-case name.

    >>> settings_of({"arguments": {"optimizer": [{"name": "SGD", "lr": 0.1}], "seed": 1, "callbacks": ["Ema", "Limit"]}})
    {'optimizer': 'SGD', 'optimizer.lr': 0.1, 'seed': 1, 'callbacks': 'Ema, Limit'}
    """
    arguments = info.get("arguments")
    return _flat(arguments, "") if isinstance(arguments, Mapping) else {}


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names with values that differ or are missing in some runs, in order of first appearance.

    Of optimizers of several classes, settings that only one class has are left out: the class differs.

    >>> adam = {"optimizer": "Adam", "optimizer.lr": 0.1, "optimizer.betas": "0.9, 0.99"}
    >>> differing([adam, {"optimizer": "SGD", "optimizer.lr": 1}])
    ['optimizer', 'optimizer.lr']
    """
    names = dict.fromkeys(name for run in settings for name in run)
    found: list[str] = []
    for name in names:
        belongs_to_class = name.rpartition(".")[0] in found
        values = [run.get(name) for run in settings if name in run]
        if any(value != values[0] for value in values) or (len(values) < len(settings) and not belongs_to_class):
            found.append(name)
    return found


def text_of(value: Any) -> str:
    """Return a value of `settings_of` as text; None as ``-``.

    Floats keep all digits, so that different values look different.
    """
    return "-" if value is None else str(value)


def _flat(value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, setting in value.items():
        if isinstance(setting, Mapping):
            flat |= _named(setting, prefix + str(name))
        elif isinstance(setting, list) and setting and all(isinstance(part, Mapping) for part in setting):
            for number, part in enumerate(setting, 1):
                flat |= _named(part, f"{prefix}{name}" + (f"#{number}" if number > 1 else ""))
        elif isinstance(setting, list):
            flat[prefix + str(name)] = ", ".join(map(str, setting))
        else:
            flat[prefix + str(name)] = setting
    return flat


def _named(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Flatten a mapping with a ``name``, such as an optimizer: the name itself, and the other entries below it."""
    head = {name: value["name"]} if "name" in value else {}
    return head | _flat({key: item for key, item in value.items() if key != "name"}, f"{name}.")
