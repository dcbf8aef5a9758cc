"""The handling of each field of ``TrainingArguments``: the table used by `trainer` and shown in the guide."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cadenza.compat.absent import facts_of
from cadenza.errors import AdapterError


class Field(NamedTuple):
    """The handling of a field."""

    how: Literal["used", "no effect", "warning", "error"]
    """``used``; ``no effect``; or a warning or an error for values other than the default."""
    says: str


def _table(name: str) -> Mapping[str, Field]:
    return {field: Field(how, says) for field, (how, says) in facts_of("transformers", "fields.toml")[name].items()}


VERSION = "5.23"
"""The transformers version of the table."""

FIELDS: Mapping[str, Field] = _table("fields")
"""By field name, in the order of ``TrainingArguments``."""

OF_SUBCLASSES: Mapping[str, Field] = _table("of_subclasses")
"""Fields of ``TrainingArguments`` subclasses that would change results. Other such fields only warn."""


def check_fields(arguments: Any) -> None:
    """Warn about each unused field that is set, or raise an error if results would differ.

    Raises:
        AdapterError: A field that this trainer cannot use is not the default; the message has a line for each. Or the installed
            transformers version lacks fields that are used.
    """
    present = {field.name for field in dataclasses.fields(arguments)}
    if missing := [name for name, known in FIELDS.items() if known.how == "used" and name not in present]:
        raise AdapterError(
            f"trainer(...) needs the TrainingArguments of transformers {VERSION}; those of the installed version have no "
            f"{', '.join(missing)}. Install transformers {VERSION} or newer."
        )
    wrong = []
    for field in dataclasses.fields(arguments):
        known = FIELDS.get(field.name) or OF_SUBCLASSES.get(field.name)
        if known is None and not _is_default(arguments, field):
            _warn(arguments, field.name, f"{type(arguments).__name__} has this field, and `trainer` does not read it")
        elif known is not None and known.how == "warning" and not _is_default(arguments, field):
            _warn(arguments, field.name, known.says)
        elif known is not None and known.how == "error" and not _is_default(arguments, field):
            wrong.append(_sentence(arguments, field.name, known.says))
    if wrong:
        raise AdapterError("trainer(...) cannot use these TrainingArguments:\n" + "\n".join(wrong))


def _is_default(arguments: Any, field: dataclasses.Field[Any]) -> bool:
    value, default = getattr(arguments, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if field.name == "accelerator_config":  # TrainingArguments creates one by default
        return value is None or value == type(value)()
    return value == default or (not value and not default)


def _warn(arguments: Any, name: str, says: str) -> None:
    warnings.warn(_sentence(arguments, name, says), stacklevel=4)


def _sentence(arguments: Any, name: str, says: str) -> str:
    value = "..." if name.endswith("token") else repr(getattr(arguments, name))
    return f"TrainingArguments({name}={value[:80]}) has no effect. {says.replace('`', '')}."
