"""``fastNLP.core.utils.utils``: arguments by name, and the renaming of what a model takes and gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

Mapped = Callable[[Any], Any] | Mapping[str, str]

Watched = str | Callable[[dict[str, Any]], Any]
"""A monitor: the name of a result, or a function of the results."""


def auto_param_call(fn: Callable[..., Any], *args: Mapping[str, Any], signature_fn: Callable[..., Any] | None = None) -> Any:
    """Call `fn` with what it has names for in one or more dicts.

    Args:
        fn: What to call.
        args: Dicts of arguments. All of them are passed if `fn` takes ``**kwargs``.
        signature_fn: Whose names count; None: those of `fn`.

    Raises:
        ValueError: A required argument is missing, two dicts have different values for one, or the function takes ``*args``.

    >>> auto_param_call(lambda a, b=2: (a, b), {"a": 1, "c": 3})
    (1, 2)
    """
    return fn(**Wanted(signature_fn or fn).of(*args))


class Wanted:
    """What a function has names for; read once, as that costs more than a call.

    Args:
        function: It must not take ``*args``.

    Raises:
        ValueError: It does.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        self._name = plain_name(function)
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            raise ValueError(f"{self._name} takes *args, and arguments are handed over by name: write them out")
        named = {key: one for key, one in parameters.items() if one.kind is not one.VAR_KEYWORD}
        self._names = None if inspect.Parameter.VAR_KEYWORD in kinds else named.keys()
        self._needed = [key for key, one in named.items() if one.default is one.empty]

    def of(self, *given: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the given arguments that the function has names for.

        Raises:
            ValueError: A required one is missing, or two dicts have different values for one.
        """
        names = self._names
        taken: dict[str, Any] = {}
        for one in given:
            for key, value in one.items():
                if names is not None and key not in names:
                    continue
                if key in taken and taken[key] is not value:
                    raise ValueError(
                        f"{self._name} takes {key!r}, and there are two of them, with different values: rename one"
                    )
                taken[key] = value
        if missing := [key for key in self._needed if key not in taken]:
            there = sorted({key for one in given for key in one})
            raise ValueError(
                f"{self._name} needs {missing}, and there is only {there}: rename with input_mapping or output_mapping"
            )
        return taken


def apply_mapping(mapping: Mapped | None, data: Any) -> Any:
    """Return what a function makes of `data`; or `data` with its names replaced, for a dict of old and new names.

    A sequence becomes a dict: its places are called ``_0``, ``_1`` and so on.

    Raises:
        ValueError: `data` has no names.
    """
    if mapping is None:
        return data
    if callable(mapping):
        return mapping(data)
    if isinstance(data, Mapping):
        named = dict(data)
    elif is_dataclass(data) and not isinstance(data, type):
        named = {field.name: getattr(data, field.name) for field in fields(data)}
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        named = {f"_{place}": value for place, value in enumerate(data)}
    else:
        raise ValueError(f"a mapping of names takes a dict, a dataclass or a sequence; got {type(data).__name__}")
    return {mapping.get(name, name): value for name, value in named.items()}


def check_mapping(mapping: object, name: str) -> None:
    """Raise `ValueError` unless this can be an ``input_mapping`` or ``output_mapping``."""
    if mapping is not None and not callable(mapping) and not isinstance(mapping, Mapping):
        raise ValueError(f"{name} must be a function, or a dict of old and new names; got {mapping!r}")


class ModelFunction:
    """One method of a model, and how a batch is handed to it.

    Args:
        call: What is called.
        signature: Whose argument names count.
        by_name: Whether a batch that is a dict is handed over by names.
    """

    def __init__(self, call: Callable[..., Any], signature: Callable[..., Any], *, by_name: bool = True) -> None:
        self.call, self._signature, self._by_name = call, signature, by_name
        self._wanted: Wanted | None = None

    def __call__(self, batch: Any) -> Any:
        if not self._by_name or not isinstance(batch, Mapping):
            return self.call(batch)
        if self._wanted is None:
            self._wanted = Wanted(self._signature)
        return self.call(**self._wanted.of(batch))


def model_function(model: nn.Module, name: str | None, default: str, *, by_name: bool) -> ModelFunction:
    """Return the method of a model that makes a step: `name`; None: `default` if the model has it, else the forward pass.

    Raises:
        TypeError: `name` is no string.
        RuntimeError: The model has no method of this name.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"expected the name of a method of the model, or None; got {name!r}")
    if name is not None and not callable(getattr(model, name, None)):
        raise RuntimeError(f"the model, a {type(model).__name__}, has no method {name!r}")
    chosen = name or (default if callable(getattr(model, default, None)) else "forward")
    if chosen == "forward":  # by way of the model itself, so that its module hooks are called
        return ModelFunction(model, model.forward, by_name=by_name)
    method = getattr(model, chosen)
    return ModelFunction(method, method, by_name=by_name)


def loss_in(outputs: Any) -> Any:
    """Return the loss in what a model returned.

    Raises:
        KeyError, AttributeError: It is a dict, or a dataclass, without one.
        ValueError: It is neither.
    """
    if isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise KeyError(f"the model must return its 'loss' for training; it returned {list(outputs)}")
        return outputs["loss"]
    if is_dataclass(outputs) and not isinstance(outputs, type):
        if not hasattr(outputs, "loss"):
            raise AttributeError(f"the model must return its .loss for training; {type(outputs).__name__} has none")
        return outputs.loss
    raise ValueError(f"the model must return a dict with 'loss', or a dataclass with .loss; got {type(outputs).__name__}")


def plain_name(function: Any) -> str:
    """Return what a function is called; for a partial one that inside of it."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", repr(function))


def as_number(value: Any) -> Any:
    """Return a tensor, or a numpy value, of one element as a plain number; anything else as it is."""
    count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", None)
    return value.item() if count == 1 and hasattr(value, "item") else value


def indices_of(batch: object, loader: object) -> list[int] | None:
    """Return the places of a batch in the data set, which it knows, or its loader; None if neither does."""
    own: list[int] | None = getattr(batch, "indices", None)
    if isinstance(own, list):
        return own
    ask = getattr(loader, "get_batch_indices", None)
    known: list[int] | None = ask() if callable(ask) else None
    return known
