"""Dicts and lists inside each other: parts of ``fastNLP.core.utils.utils``, which imports these names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any


class Option(dict[str, Any]):
    """A dict with its keys as attributes.

    >>> Option(rate=0.1).rate
    0.1
    """

    def __getattr__(self, item: str) -> Any:
        try:
            return self[item]
        except KeyError:
            raise AttributeError(item) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __delattr__(self, item: str) -> None:
        try:
            del self[item]
        except KeyError:
            raise AttributeError(item) from None


def dataclass_to_dict(data: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name. The values are not copied.

    Raises:
        TypeError: `data` is not a dataclass.
    """
    if not is_dataclass(data) or isinstance(data, type):
        raise TypeError(f"data must be an object of a dataclass; got a {type(data).__name__}")
    return {field.name: getattr(data, field.name) for field in fields(data)}


def apply_to_collection(
    data: Any,
    dtype: Any,
    function: Callable[..., Any],
    *args: Any,
    wrong_dtype: Any = None,
    include_none: bool = True,
    **kwargs: Any,
) -> Any:
    """Return `data` with each object of a type in it replaced by the result of a function.

    Mappings, sequences, named tuples and dataclasses are copied; other objects are kept.

    Args:
        data: An object, or objects inside of collections.
        dtype: The type, or a tuple of types.
        function: Called with each object of the type.
        args: Further arguments of `function`.
        wrong_dtype: Objects of this type are kept, also if they are of type `dtype`.
        include_none: Whether to keep entries that are None afterwards. Dataclasses then keep the old value.
        kwargs: Further arguments of `function`.

    >>> apply_to_collection({"a": [1, "b"]}, int, lambda number: number + 1)
    {'a': [2, 'b']}
    """
    if isinstance(data, dtype) and (wrong_dtype is None or not isinstance(data, wrong_dtype)):
        return function(data, *args, **kwargs)

    def inner(part: Any) -> Any:
        return apply_to_collection(part, dtype, function, *args, wrong_dtype=wrong_dtype, include_none=include_none, **kwargs)

    def kept(value: Any) -> bool:
        return include_none or value is not None

    if isinstance(data, Mapping):
        entries = {name: value for name, part in data.items() if kept(value := inner(part))}
        if isinstance(data, defaultdict):
            return type(data)(data.default_factory, entries)
        return type(data)(entries)  # type: ignore[call-arg]  # mappings are made of mappings
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        values = [value for part in data if kept(value := inner(part))]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)  # type: ignore[call-arg]  # likewise
    if is_dataclass(data) and not isinstance(data, type):
        changed = copy(data)
        for field in fields(data):
            if field.init and kept(value := inner(getattr(data, field.name))):
                object.__setattr__(changed, field.name, value)  # also in a frozen one
        return changed
    return data


def flat_nest_dict(
    d: Mapping[Any, Any], separator: str = "#", compress_none_key: bool = True, top_down: bool = False
) -> dict[str, Any]:
    """Return a dict of dicts as one dict, with the names of all levels in its keys.

    Args:
        d: The dict.
        separator: The text between two names.
        compress_none_key: Ignored, as in fastNLP: a key None adds no name.
        top_down: The outermost name first; False: the innermost.

    >>> flat_nest_dict({"test": {"f1": {"f": 0.2, "rec": 0.1}}})
    {'f#f1#test': 0.2, 'rec#f1#test': 0.1}
    """
    return {
        separator.join(str(name) for name in (names if top_down else reversed(names)) if name is not None): value
        for names, value in _leaves(d)
    }


def _leaves(tree: Mapping[Any, Any]) -> Iterator[tuple[list[Any], Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            for names, leaf in _leaves(value):
                yield [name, *names], leaf
        else:
            yield [name], value
