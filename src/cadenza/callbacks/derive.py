"""Define outputs that are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cadenza.engine.step_state import derived_of
from cadenza.errors import OutputError
from cadenza.hooks.moments import Callback
from cadenza.run import Run


class Derive(Callback):
    """Add outputs that are computed from a batch only when a callback reads them.

    With multiple ranks: each rank computes from its own batch; your function may communicate if every rank reads the value.

    Args:
        values: By name, functions of the run. Each is called without gradient, at most once a batch.

    >>> import torch
    >>> from cadenza import Callback, on
    >>> from cadenza.testing import tiny_run
    >>> @on(Callback.on_step_end, every=2)
    ... def show(run):
    ...     print(run.progress.step, run.outputs["rounded"])
    >>> run = tiny_run(callbacks=[Derive(rounded=lambda run: round(float(run.loss), 1)), show], steps=2)
    2 0.2
    """

    def __init__(self, **values: Callable[[Run], Any]) -> None:
        for name, function in values.items():
            if not callable(function):
                raise TypeError(f"Derive({name}=...) must be a function of the run; got {function!r}")
        self.values = values

    def on_setup(self, run: Run) -> None:
        for name, function in self.values.items():
            if name in derived_of(run):
                raise OutputError(f"two Derive callbacks define {name!r}. Give one of the two another name.")
            derived_of(run)[name] = function
