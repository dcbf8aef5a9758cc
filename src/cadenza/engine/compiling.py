"""The model compiled by ``torch.compile``; the moments, the loss and the optimizers stay outside of its graph."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.optim.precision import BackwardPass

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

Compile = bool | str | Mapping[str, Any]


def options_of(compile: Compile) -> dict[str, Any] | None:
    """Return the arguments of ``torch.compile`` that ``Trainer(compile=...)`` asks for; None if nothing is compiled.

    Raises:
        ValueError, TypeError: It is no mode, or names an argument that ``torch.compile`` does not have.
    """
    if isinstance(compile, bool):
        return {} if compile else None
    if isinstance(compile, str):
        if compile not in MODES:
            raise ValueError(f"compile must be True, one of the modes {', '.join(MODES)}, or a dict; got {compile!r}")
        return {"mode": compile}
    if not isinstance(compile, Mapping):
        raise TypeError(f"compile must be True, a mode, or a dict of the arguments of torch.compile; got {compile!r}")
    known = set(inspect.signature(torch.compile).parameters) - {"model"}
    if unknown := compile.keys() - known:
        raise ValueError(f"torch.compile has no argument {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    return dict(compile)


def compile_model(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile `model` in place: it stays the same object, with the same names in its ``state_dict``.

    A model that was compiled in place before does not change.
    """
    if model._compiled_call_impl is None:
        model.compile(**options)


def has_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether a model compiled with these options runs in CUDA graphs, which use their memory again in each pass."""
    named = options.get("options") or {}
    return options.get("mode") in ("reduce-overhead", "max-autotune") or bool(named.get("triton.cudagraphs"))


class BackwardOfGraphs(BackwardPass):
    """A backward pass with gradients in memory of their own. A CUDA graph writes those of the next batch over its own.

    Args:
        model: The model that runs in CUDA graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = list(model.parameters())

    def __call__(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        new = [one for one in self._parameters if one.grad is None]
        super().__call__(loss, scale)
        for one in new:
            if one.grad is not None:
                one.grad = one.grad.clone()


def breaks_so_far() -> int:
    """Return how often a graph broke in this process."""
    return len(_reasons())


def breaks_since(count: int) -> list[str]:
    """Return the lines at which graphs broke after the first `count` breaks, with the reason; each line once."""
    found: dict[str, None] = {}
    for one in _reasons()[count:]:
        if not one.user_stack:
            continue
        line, why = one.user_stack[-1], one.reason.strip().splitlines()[0]
        found[f"{Path(line.filename).name}:{line.lineno} in {line.name} ({why})"] = None
    return list(found)


def _reasons() -> list[Any]:
    # torch has no public function for this: torch.compiler has none, and torch._dynamo.explain runs the model once more.
    from torch._dynamo.utils import graph_break_reasons  # here, as it takes seconds

    return graph_break_reasons
