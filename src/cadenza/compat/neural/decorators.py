"""Decorators of NeMo's modules (``nemo.utils.decorators``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from cadenza.compat.neural.logs import logging

__all__ = ["add_port_docs", "deprecated"]


def add_port_docs(wrapped: Callable[..., Any] | None = None, instance: object = None, value: str = "") -> Any:
    """Append the ports that a method returns to its docstring. Use it below ``@property``, with or without brackets.

    The method is called with `instance` as ``self`` when its class is defined. If the ports depend on the instance, that call
    fails, and the docstring stays without them. `value` has no effect, as in NeMo.
    """
    if wrapped is None:
        return partial(add_port_docs, instance=instance, value=value)
    try:
        ports = wrapped(instance)
    except Exception:  # it reads `self`, which does not exist yet
        ports = None
    listed = [f"* *{name}* : {kind}" for name, kind in (ports or {}).items()]
    wrapped.__doc__ = "\n\n".join(filter(None, [inspect.cleandoc(wrapped.__doc__ or ""), *listed]))
    return wrapped


def deprecated(wrapped: Callable[..., Any] | None = None, version: object = None, explanation: str | None = None) -> Any:
    """Warn at the first call of a function that it is deprecated. Use it with or without brackets.

    Args:
        wrapped: The function.
        version: The version that removes it.
        explanation: What to use instead.
    """
    if wrapped is None:
        return partial(deprecated, version=version, explanation=explanation)
    removal = f" Version {version} removes it." if version is not None else ""
    text = f"{wrapped.__name__} is deprecated.{removal}{f' {explanation}' if explanation else ''}"
    pending = [text]

    @wraps(wrapped)
    def warning(*args: Any, **kwargs: Any) -> Any:
        if pending:
            logging.warning(pending.pop())
        return wrapped(*args, **kwargs)

    return warning
