"""Names of other trainers and old names, and the names to use here instead. The data are read when an error is built."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cadenza.errors import nearest

P = ParamSpec("P")
T = TypeVar("T")


@cache
def data(file: str) -> dict[str, Any]:
    """Return the content of a TOML file of this folder."""
    import tomllib  # imported here: most runs build no error

    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


@cache
def hints(table: str) -> Mapping[str, str]:
    """Return the answers of a table of ``hints.toml``, by name.

    >>> hints("run")["global_step"], hints("step")["log"]
    ('read run.progress.step', 'it belongs to the run: step.run.log')
    """
    tables = data("hints.toml")
    shared, answers = tables["shared"], tables[table].items()
    return {name: shared.get(answer, answer).replace("{name}", name) for answer, names in answers for name in names.split()}


def moment_meant(name: str, known: Collection[str]) -> str:
    """Return ``" Did you mean 'on_step_end'?"`` for a hook that does not exist, by habit or by spelling; else an empty string.

    >>> moment_meant("on_train_batch_end", ["on_batch_end", "on_epoch_end"])
    " Did you mean 'on_batch_end'?"
    """
    habit = hints("moments").get(name)
    return f" Did you mean {habit!r}?" if habit in known else nearest(name, known)


def instead_of_name(name: str, packages: Sequence[str]) -> str:
    """Return where a name is that the first of `packages` does not have, or what to use for it; else an empty string.

    >>> instead_of_name("TensorBatches", ["cadenza", "loading"]), instead_of_name("seed_everything", ["cadenza"])
    ('. Write cadenza.loading.TensorBatches.', '. Give Trainer(seed=...).')
    """
    package, *rooms = packages
    for home in [f"{package}.{room}" for room in rooms] or ["cadenza", "cadenza.callbacks", "cadenza.sinks", "cadenza.loading"]:
        if name in getattr(import_module(home), "__all__", ()):
            return f". Write {home}.{name}."
    answer = hints("names").get(name)
    return f". {answer}" if answer else nearest(name, import_module(package).__all__).replace(" Did", ". Did")


def instead_of_setting(name: str, known: Collection[str]) -> str:
    """Return the message for an assignment to an attribute of a run, with the nearest verb.

    >>> instead_of_setting("should_stop", ["stop"])
    "a Run has no 'should_stop': call run.stop(reason)"
    >>> instead_of_setting("model", ["model"])
    'run.model is read-only: call run.replace_model(model) in on_setup'
    """
    if name in hints("run"):
        return f"a Run has no {name!r}: {hints('run')[name]}"
    if name in hints("run-settings"):
        return f"run.{name} is read-only: {hints('run-settings')[name]}"
    if name in known:
        return f"run.{name} is read-only: call it, and keep functions of your own on the callback"
    keep = f"Keep your own values in run.state[{name!r}], which checkpoints hold, or on the callback"
    return f"a Run has no {name!r} and takes no new attributes.{nearest(name, known)} {keep}"


def answered(table: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Answer a call that does not fit the function's parameters from a table, or with the nearest name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
            try:
                return function(*arguments, **keywords)
            except TypeError:
                if message := _wrong_call(function, table, arguments, keywords):
                    raise TypeError(message) from None
                raise

        return checked

    return decorate


def _wrong_call(function: Callable[..., Any], table: str, arguments: Collection[Any], keywords: Collection[str]) -> str:
    """Return what is wrong with the arguments of a call; an empty string if they fit, or if Python says it well enough."""
    parameters, answers = inspect.signature(function).parameters, hints(table)
    name = function.__qualname__.removesuffix(".__init__")
    for key in keywords:
        if key not in parameters:
            return f"{name} has no argument {key!r}.{f' {answers[key]}' if key in answers else nearest(key, parameters)}"
    by_position = sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters.values()
    )
    if len(arguments) > by_position and "too-many" in answers:
        return f"{name} takes at most {by_position - 1} positional arguments; got {len(arguments) - 1}. {answers['too-many']}"
    needed = [
        parameter.name for parameter in parameters.values() if parameter.default is parameter.empty and parameter.name != "self"
    ]
    lacks = [name for name in needed[len(arguments) - 1 :] if name not in keywords]
    return f"{name} lacks {', '.join(lacks)}. {answers['too-few']}" if lacks and "too-few" in answers else ""


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept the old names of arguments, each with its new one, for one release, with a DeprecationWarning.

    >>> @renamed(limit="duration")
    ... def wait(duration): ...
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     wait(limit="2 h")
    >>> print(caught[0].message)
    wait(limit=...) is deprecated: use duration=
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        owner = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def accepting(*arguments: P.args, **keywords: P.kwargs) -> T:
            for old in names.keys() & keywords.keys():
                new = names[old]
                if new in keywords:
                    raise TypeError(f"{owner} got {new}= and {old}=, its old name. Keep {new}=.")
                warnings.warn(f"{owner}({old}=...) is deprecated: use {new}=", DeprecationWarning, stacklevel=2)
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return accepting

    return decorate


def advised(table: str, *, refused: str = "") -> Callable[[type[T]], type[T]]:
    """Answer a missing attribute of a class from a table. Neither ``dir()`` nor a type checker sees the names.

    Args:
        table: The table, which is read when an attribute is missing.
        refused: Missing attributes that cannot be set either, with spaces between them.
    """

    def missing(owner: object, name: str) -> Any:
        if not name.startswith("_") and name in hints(table) and not hasattr(type(owner), name):
            raise AttributeError(f"a {type(owner).__name__} has no {name!r}: {hints(table)[name]}", name=name, obj=owner)
        return object.__getattribute__(owner, name)  # raises the error of Python, or of a property, again

    def put(owner: object, name: str, value: object) -> None:
        if name in refused.split() and not hasattr(owner, name):
            missing(owner, name)
        object.__setattr__(owner, name, value)

    def decorate(kind: type[T]) -> type[T]:
        setattr(kind, "__getattr__", missing)  # noqa: B010  # in the class, it would hide wrong names from type checkers
        if refused:
            setattr(kind, "__setattr__", put)  # noqa: B010
        return kind

    return decorate
