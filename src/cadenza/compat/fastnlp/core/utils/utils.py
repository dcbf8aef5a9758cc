"""``fastNLP.core.utils.utils``: arguments by name, and mappings of the inputs and outputs of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.compat.fastnlp.core.utils.nested import (
    Option,
    apply_to_collection,
    dataclass_to_dict,
    flat_nest_dict,
)
from cadenza.status.reprs import signature_of

__all__ = [  # of fastNLP; the adapter imports the others by name
    "Option",
    "apply_to_collection",
    "auto_param_call",
    "check_user_specific_params",
    "dataclass_to_dict",
    "flat_nest_dict",
    "get_fn_arg_names",
    "match_and_substitute_params",
    "nullcontext",
]

Mapped = Callable[[Any], Any] | Mapping[str, str]

Watched = str | Callable[[dict[str, Any]], Any]
"""A monitor: the name of a result, or a function of the results."""


def auto_param_call(
    fn: Callable[..., Any],
    *args: Mapping[str, Any],
    signature_fn: Callable[..., Any] | None = None,
    mapping: Mapping[str, str] | None = None,
) -> Any:
    """Call `fn` with the entries of one or more dicts that match its arguments.

    Args:
        fn: The function.
        args: Dicts of arguments. All of them are passed if `fn` takes ``**kwargs``.
        signature_fn: The function with the names of arguments; None: `fn`.
        mapping: New names of entries, by their names in the dicts.

    Raises:
        TypeError: An element of `args` is not a dict.
        ValueError: A required argument is missing, two dicts have different values for one, or the function takes ``*args``.

    >>> auto_param_call(lambda a, b=2: (a, b), {"a": 1, "c": 3})
    (1, 2)
    >>> auto_param_call(lambda a: a, {"x": 1}, mapping={"x": "a"})
    1
    """
    if wrong := [type(argument).__name__ for argument in args if not isinstance(argument, Mapping)]:
        raise TypeError(f"the arguments of {plain_name(fn)} must be given as dicts; got {wrong}")
    named = args if mapping is None else [apply_mapping(mapping, argument) for argument in args]
    return fn(**Wanted(signature_fn or fn).of(*named))


def match_and_substitute_params(mapping: Mapped | None = None, data: Any = None) -> Any:
    """Return `data` with new names, as ``input_mapping`` and ``output_mapping`` do; see `apply_mapping`.

    Raises:
        ValueError: `mapping` is neither a function nor a dict, or `data` has no names.

    >>> match_and_substitute_params({"a": "x", "_1": "y"}, [1, 2])
    {'_0': 1, 'y': 2}
    """
    check_mapping(mapping, "mapping")
    return apply_mapping(mapping, data)


def get_fn_arg_names(fn: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function.

    >>> get_fn_arg_names(lambda a, b=1: a)
    ['a', 'b']
    """
    return list(signature_of(fn).parameters)


def check_user_specific_params(
    user_params: dict[str, Any], fn: Callable[..., Any], fn_name: str | None = None
) -> dict[str, Any]:
    """Return `user_params`, and warn of each that `fn` does not have as an argument.

    Args:
        user_params: Values by the name of the argument.
        fn: The function.
        fn_name: Its name in the warning.
    """
    for name in user_params.keys() - set(get_fn_arg_names(fn)):
        logger.rank_zero_warning(f"{fn_name or plain_name(fn)} has no argument {name!r}, so the value is probably not used")
    return user_params


class Wanted:
    """The names of a function's arguments, read once because that costs more than a call.

    Args:
        function: It must not take ``*args``.

    Raises:
        ValueError: It takes ``*args``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = signature_of(function).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        self._name, self._file = plain_name(function), _file_of(function)
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            raise ValueError(f"{self._name} takes *args, but arguments are passed by name. Name them in the signature.")
        named = {key: parameter for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
        self._names = None if inspect.Parameter.VAR_KEYWORD in kinds else named.keys()
        self._needed = [key for key, parameter in named.items() if parameter.default is parameter.empty]

    def of(self, *given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given arguments that match the names of the function.

        Raises:
            ValueError: A required argument is missing, or two dicts have different values for one.
        """
        names = self._names
        taken: dict[str, Any] = {}
        for mapping in given:
            for key, value in mapping.items():
                if names is not None and key not in names:
                    continue
                if key in taken and taken[key] is not value:
                    raise ValueError(
                        f"{self._name} takes {key!r}, but there are two different values for it. Rename one of them."
                    )
                taken[key] = value
        if missing := [key for key in self._needed if key not in taken]:
            there = sorted({key for mapping in given for key in mapping})
            raise ValueError(
                f"{self._name} needs {missing}; got {there}. Rename entries with input_mapping or output_mapping.{self._file}"
            )
        return taken


def apply_mapping(mapping: Mapped | None, data: Any) -> Any:
    """Return the result of a function for `data`; or, for a dict of old and new names, `data` with new names.

    A sequence becomes a dict with the names ``_0``, ``_1`` and so on.

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
        named = {f"_{index}": value for index, value in enumerate(data)}
    else:
        raise ValueError(f"a mapping of names needs a dict, a dataclass or a sequence; got {type(data).__name__}")
    return {mapping.get(name, name): value for name, value in named.items()}


def check_mapping(mapping: object, name: str) -> None:
    """Raise `ValueError` unless this can be an ``input_mapping`` or ``output_mapping``."""
    if mapping is not None and not callable(mapping) and not isinstance(mapping, Mapping):
        raise ValueError(f"{name} must be a function, or a dict of old and new names; got {mapping!r}")


class ModelFunction:
    """A method of a model, and the way to pass a batch to it.

    Args:
        call: The callable.
        signature: The function with the names of arguments.
        by_name: Whether the entries of a dict are passed by name.
    """

    def __init__(self, call: Callable[..., Any], signature: Callable[..., Any], *, by_name: bool = True) -> None:
        self.call: Callable[..., Any] = call
        self._signature = signature
        self._by_name = by_name
        self._wanted: Wanted | None = None

    def __call__(self, batch: Any) -> Any:
        if not self._by_name or not isinstance(batch, Mapping):
            return self.call(batch)
        if self._wanted is None:
            self._wanted = Wanted(self._signature)
        return self.call(**self._wanted.of(batch))


def model_function(model: nn.Module, name: str | None, default: str, *, by_name: bool) -> ModelFunction:
    """Return the method `name` of a model; for None the method `default` if the model has it, else the forward pass.

    Raises:
        TypeError: `name` is not a string.
        RuntimeError: The model has no method of this name.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"expected the name of a method of the model, or None; got {name!r}")
    if name is not None and not callable(getattr(model, name, None)):
        raise RuntimeError(f"the model, a {type(model).__name__}, has no method {name!r}")
    chosen = name or (default if callable(getattr(model, default, None)) else "forward")
    if chosen == "forward":  # through the model itself, so that its module hooks are called
        return ModelFunction(model, model.forward, by_name=by_name)
    method = getattr(model, chosen)
    return ModelFunction(method, method, by_name=by_name)


def loss_in(outputs: Any) -> Any:
    """Return the loss in the outputs of a model.

    Raises:
        KeyError, AttributeError: A dict or a dataclass has no loss.
        ValueError: The outputs are neither.
    """
    if isinstance(outputs, Mapping):
        if "loss" not in outputs:
            raise KeyError(f"the model must return a 'loss' in training; got {list(outputs)}")
        return outputs["loss"]
    if is_dataclass(outputs) and not isinstance(outputs, type):
        if not hasattr(outputs, "loss"):
            raise AttributeError(f"the model must return a .loss in training; {type(outputs).__name__} has none")
        return outputs.loss
    raise ValueError(f"the model must return a dict with 'loss', or a dataclass with .loss; got {type(outputs).__name__}")


def plain_name(function: Any) -> str:
    """Return the name of a function; for a partial, of its inner function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", repr(function))


def _file_of(function: Any) -> str:
    """Return where a function is defined, as a sentence; an empty text if it is not in a file."""
    try:
        return f" It is defined in {inspect.getfile(inspect.unwrap(function))}."
    except TypeError:  # a partial function, a callable object, or not written in Python
        return ""


def as_number(value: Any) -> Any:
    """Return a tensor or numpy value of one element as a plain number; other values unchanged."""
    count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", None)
    return value.item() if count == 1 and hasattr(value, "item") else value


def indices_of(batch: object, loader: object) -> list[int] | None:
    """Return the indices of a batch in the data set, from the batch or its loader; None if neither provides them."""
    own: list[int] | None = getattr(batch, "indices", None)
    if isinstance(own, list):
        return own
    ask = getattr(loader, "get_batch_indices", None)
    known: list[int] | None = ask() if callable(ask) else None
    return known
