"""Encodes values of callbacks for checkpoints. A type that checkpoints do not support becomes a dict with one marked key."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.errors import StateError
from cadenza.status.encoding import is_built_of_tensors

np: Any = sys.modules.get("numpy")  # torch imports numpy if it is installed
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype)
_FACTORIES = {factory.__name__: factory for factory in (list, dict, set, int, float, str, tuple, deque, Counter)}
_OF_RUNS = {"cadenza", "transformers", "lightning", "pytorch_lightning", "keras", "torch"}
"""Packages with excluded dataclasses: parts of the run such as its arguments, which every run creates."""
_MADE_OF_TEXT = "US"
_MADE_OF_TIME = "Mm"


def packed(value: Any) -> Any:
    """Return a copy of a value for a checkpoint. It shares no memory with the value.

    Raises:
        StateError: A checkpoint cannot hold it.

    >>> packed({"best": 0.5, "seen": {1, 2}})
    {'best': 0.5, 'seen': {'a set': [1, 2]}}
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided and not is_built_of_tensors(value):
            raise StateError(f"a tensor with the layout {value.layout} cannot be saved")
        return value.detach().clone()
    if kind in (list, tuple):
        return kind(map(packed, value))
    if kind is dict:
        if len(value) == 1 and next(iter(value)) in _BY_MARK:
            return {_DICT: _pairs(value)}
        return {_key(key): packed(item) for key, item in value.items()}
    for form in _FORMS:
        if form.has(value):
            return {form.mark: form.pack(value)}
    raise StateError(f"a {kind.__name__} cannot be saved")


def unpacked(value: Any, present: Any = None) -> Any:
    """Return the original value of `packed`.

    Args:
        value: The result of `packed`.
        present: The value that it replaces. A random generator is continued in place, and a ``defaultdict`` keeps its function.
    """
    if type(value) in (list, tuple):
        return type(value)(map(unpacked, value))
    if type(value) is not dict:
        return value
    if len(value) == 1:
        (mark, content), *_ = value.items()
        if mark in _BY_MARK:
            return _BY_MARK[mark].unpack(content, present)
    return {key: unpacked(item) for key, item in value.items()}


class _Form(NamedTuple):
    """How one type is saved."""

    mark: str
    has: Callable[[Any], bool]
    pack: Callable[[Any], Any]
    unpack: Callable[[Any, Any], Any]


def _key(key: Any) -> Any:
    if type(key) is tuple:
        return tuple(map(_key, key))
    if type(key) not in _PLAIN:
        raise StateError(f"a key that is a {type(key).__name__} cannot be saved")
    return key


def _pairs(value: Any) -> list[Any]:
    return [[packed(key), packed(item)] for key, item in value.items()]


def _from_pairs(pairs: Any) -> dict[Any, Any]:
    return {unpacked(key): unpacked(item) for key, item in pairs}


# -- NumPy -------------------------------------------------------------------------------------------------


def _is_array(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype.kind in "biufcUSMm" and value.dtype.str[1:] not in ("f16", "c32")


def _pack_array(value: Any) -> Any:
    if value.dtype.kind in _MADE_OF_TEXT:
        return value.dtype.str, value.shape, value.ravel().tolist()
    if value.dtype.kind in _MADE_OF_TIME:
        return value.dtype.str, value.shape, value.astype("i8").ravel().tolist()
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))  # a copy: torch refuses some layouts


def _unpack_array(content: Any, present: Any) -> Any:
    if isinstance(content, Tensor):
        return content.cpu().numpy().copy()
    kind, shape, values = content
    array = np.array(values, dtype="i8").astype(kind) if kind[1] in _MADE_OF_TIME else np.array(values, dtype=kind)
    return array.reshape(shape)


def _unpack_number(content: Any, present: Any) -> Any:
    return np.dtype(content[0]).type(content[1])


def _unpack_generator(state: Any, present: Any) -> Any:
    state = unpacked(state)
    name = state["bit_generator"]
    if not isinstance(present, np.random.Generator) or type(present.bit_generator).__name__ != name:
        present = np.random.Generator(getattr(np.random, name)())
    present.bit_generator.state = state
    return present


def _unpack_random_state(state: Any, present: Any) -> Any:
    found = present if isinstance(present, np.random.RandomState) else np.random.RandomState()
    found.set_state(unpacked(state))
    return found


# -- other generators --------------------------------------------------------------------------------------


def _unpack_random(state: Any, present: Any) -> Any:
    found = present if type(present) is random.Random else random.Random()
    found.setstate(state)
    return found


def _unpack_torch_generator(content: Any, present: Any) -> Any:
    device, state = content
    is_same = isinstance(present, torch.Generator) and str(present.device) == device
    found = present if is_same else torch.Generator(device)
    found.set_state(state.cpu())
    return found


# -- user-defined types -------------------------------------------------------------------------------------


def _path_of(kind: type[Any]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_at(path: str) -> Any:
    """Return a class by its path if its module is imported, else None."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _can_be_found(value: Any) -> bool:
    return _class_at(_path_of(type(value))) is type(value)


def _known(path: str, base: Callable[[Any], bool]) -> Any:
    found = _class_at(path)
    if found is None or not base(found):
        raise StateError(f"the checkpoint holds an object of the class {path}, which is not there. Import its module.")
    return found


def _is_dataclass(value: Any) -> bool:
    kind = type(value)
    if not isinstance(getattr(kind, "__dataclass_fields__", None), dict) or not _can_be_found(value):
        return False
    return _OF_RUNS.isdisjoint(base.__module__.partition(".")[0] for base in kind.__mro__)


def _unpack_dataclass(content: Any, present: Any) -> Any:
    path, values = content
    kind = _known(path, is_dataclass)
    found = present if type(present) is kind else object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(found, name, unpacked(value, getattr(found, name, None)))
    return found


def _unpack_default(content: Any, present: Any) -> Any:
    name, pairs = content
    own = present.default_factory if isinstance(present, defaultdict) else None
    return defaultdict(_FACTORIES.get(name, own), _from_pairs(pairs))


def _factory_of(value: Any) -> str | None:
    name = getattr(value.default_factory, "__name__", "")
    return name if _FACTORIES.get(name) is value.default_factory else None


_DICT = "a dict"
_OF_NUMPY: tuple[_Form, ...] = (
    ()
    if np is None
    else (
        _Form("an array of NumPy", _is_array, _pack_array, _unpack_array),
        _Form(
            "a number of NumPy",
            lambda value: isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8,
            lambda value: (value.dtype.str, value.item()),
            _unpack_number,
        ),
        _Form(
            "a generator of NumPy",
            lambda value: type(value) is np.random.Generator,
            lambda value: packed(value.bit_generator.state),
            _unpack_generator,
        ),
        _Form(
            "an old generator of NumPy",
            lambda value: type(value) is np.random.RandomState,
            lambda value: packed(value.get_state(legacy=False)),
            _unpack_random_state,
        ),
        _Form(
            "a type of NumPy",
            lambda value: isinstance(value, np.dtype),
            lambda value: value.str,
            lambda content, present: np.dtype(content),
        ),
    )
)
_FORMS = (
    _Form(_DICT, lambda value: False, _pairs, lambda content, present: _from_pairs(content)),
    *_OF_NUMPY,
    _Form("a random generator", lambda value: type(value) is random.Random, lambda value: value.getstate(), _unpack_random),
    _Form(
        "a generator of torch",
        lambda value: type(value) is torch.Generator,
        lambda value: (str(value.device), value.get_state()),
        _unpack_torch_generator,
    ),
    _Form(
        "a set",
        lambda value: type(value) is set,
        lambda value: list(map(packed, sorted(value, key=repr))),
        lambda content, present: set(map(unpacked, content)),
    ),
    _Form(
        "a frozenset",
        lambda value: type(value) is frozenset,
        lambda value: list(map(packed, sorted(value, key=repr))),
        lambda content, present: frozenset(map(unpacked, content)),
    ),
    _Form(
        "a deque",
        lambda value: type(value) is deque,
        lambda value: (value.maxlen, list(map(packed, value))),
        lambda content, present: deque(map(unpacked, content[1]), content[0]),
    ),
    _Form(
        "a defaultdict",
        lambda value: type(value) is defaultdict,
        lambda value: (_factory_of(value), _pairs(value)),
        _unpack_default,
    ),
    _Form("a Counter", lambda value: type(value) is Counter, _pairs, lambda content, present: Counter(_from_pairs(content))),
    _Form(
        "an OrderedDict",
        lambda value: type(value) is OrderedDict,
        _pairs,
        lambda content, present: OrderedDict(_from_pairs(content)),
    ),
    _Form(
        "a complex number",
        lambda value: type(value) is complex,
        lambda value: (value.real, value.imag),
        lambda content, present: complex(*content),
    ),
    _Form("a path", lambda value: isinstance(value, PurePath), str, lambda content, present: Path(content)),
    _Form("a device", lambda value: type(value) is torch.device, str, lambda content, present: torch.device(content)),
    _Form(
        "a size",
        lambda value: type(value) is torch.Size,
        lambda value: list(value),
        lambda content, present: torch.Size(content),
    ),
    _Form(
        "an enumeration",
        lambda value: isinstance(value, Enum) and _can_be_found(value) and value.name in type(value).__members__,
        lambda value: (_path_of(type(value)), value.name),
        lambda content, present: _known(content[0], lambda kind: issubclass(kind, Enum))[content[1]],
    ),
    _Form(
        "a named tuple",
        lambda value: isinstance(value, tuple) and hasattr(type(value), "_make") and _can_be_found(value),
        lambda value: (_path_of(type(value)), list(map(packed, value))),
        lambda content, present: _known(content[0], lambda kind: hasattr(kind, "_make"))._make(map(unpacked, content[1])),
    ),
    _Form(
        "a dataclass",
        _is_dataclass,
        lambda value: (
            _path_of(type(value)),
            {field.name: packed(getattr(value, field.name)) for field in fields(value) if hasattr(value, field.name)},
        ),
        _unpack_dataclass,
    ),
)
"""In the order in which they are tried."""

_BY_MARK = {form.mark: form for form in _FORMS}
