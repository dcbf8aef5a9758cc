"""Rejects callbacks and trainers written for the API of fastNLP 0.5, with the replacement of each part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import ParamSpec

from torch import nn

from cadenza.compat.absent import facts_of
from cadenza.compat.fastnlp.core.callbacks.managed import ManagedCallback
from cadenza.status.reprs import signature_of

P = ParamSpec("P")

_FACTS = facts_of("fastnlp", "api_of_0_5.toml")

HOOKS: Mapping[str, str] = _FACTS["hooks"]
"""Replacements of the hooks of 0.5; the last two are from alpha versions of 1.0."""

_ALPHA = "on_validate_"

NAMES = tuple(hook.partition("(")[0] for hook in HOOKS)

PROPERTIES: Mapping[str, str] = _FACTS["properties"]
"""Replacements of the properties of a callback."""

ARGUMENTS: Mapping[str, str] = _FACTS["arguments"]
"""Replacements of the trainer's arguments. The others kept their names; ``metrics`` is now a dict by name."""

_POSITIONS = ("train_data", "model", "optimizer", "loss", "batch_size", "sampler", "drop_last", "update_every", "num_workers")

_SHARED = {"on_train_begin": 0, "on_train_end": 0, "on_exception": 1}
"""Hooks that exist in both versions, with their number of arguments in 0.5."""


def refuse(callbacks: object, arguments: Iterable[str] = ()) -> None:
    """Raise a `TypeError` that lists the replacements of all hooks and trainer arguments of 0.5 in use."""
    listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    kinds = dict.fromkeys(type(callback) for callback in listed if isinstance(callback, ManagedCallback))
    hooks = [(kind.__name__, hook) for kind in kinds for hook in _hooks_of(kind)]
    rows = [(f"{kind}.{hook}", HOOKS[hook]) for kind, hook in hooks]
    rows += [(f"Trainer({name}=)", ARGUMENTS[name]) for name in arguments if name in ARGUMENTS]
    if not rows:
        return
    alpha = len(rows) == len(hooks) and all(hook.startswith(_ALPHA) for _, hook in hooks)
    version = "an alpha version of fastNLP 1.0; expected 1.0.1" if alpha else "fastNLP 0.5; expected that of 1.0"
    table = "\n".join(f"  {old}  ->  {new.replace('`', '')}" for old, new in rows)
    raise TypeError(
        f"this is code for {version}, which has other hooks and arguments. Write instead:\n{table}\n"
        "See docs/guides/from-fastnlp.md."
    )


def missing(owner: object, name: str) -> AttributeError:
    """Return the error for a missing attribute of a callback, with the replacement if it is one of 0.5."""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if (now := PROPERTIES.get(f"self.{name}")) is not None:
        text += f", which callbacks of fastNLP 0.5 had. Use {now.replace('`', '')}"
    return AttributeError(text, name=name, obj=owner)


def refusing(constructor: Callable[P, None]) -> Callable[P, None]:
    """Make the trainer's constructor raise the error of `refuse` for ``Trainer(train_data, model, loss=..., ...)``."""

    @wraps(constructor)
    def checked(*given: P.args, **named: P.kwargs) -> None:
        positional = given[1:]  # after the trainer itself
        # 0.5 has the data first, then the model.
        swapped = "model" in named if len(positional) == 1 else len(positional) > 1 and isinstance(positional[1], nn.Module)
        if swapped or not {"train_data", "optimizer"}.isdisjoint(named):
            refuse(named.get("callbacks"), [*(_POSITIONS[: len(positional)] if swapped else ()), *map(str, named)])
        constructor(*given, **named)

    return checked


def is_hook(name: str, found: object) -> bool:
    """Return whether an attribute of a callback is a hook of 0.5. A method of this name with an argument `trainer` is not."""
    if name in _SHARED:
        return _takes_no_trainer(found, _SHARED[name])
    if name not in NAMES or found is None:
        return False
    function = getattr(found, "__func__", found)  # of a static method
    takes_trainer = inspect.isfunction(function) and "trainer" in signature_of(function).parameters
    return name.startswith(_ALPHA) or not takes_trainer


def _hooks_of(kind: type) -> Iterator[str]:
    return (hook for name, hook in zip(NAMES, HOOKS, strict=True) if is_hook(name, inspect.getattr_static(kind, name, None)))


def _takes_no_trainer(hook: object, count: int) -> bool:
    """Return whether a function takes only `self` and this many arguments, none of them named ``trainer``."""
    if not inspect.isfunction(hook):
        return False
    names = [*signature_of(hook).parameters.values()]
    plain = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in names)
    return plain and len(names) == 1 + count and all(parameter.name != "trainer" for parameter in names[1:])
