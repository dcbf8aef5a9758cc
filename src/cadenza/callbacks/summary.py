"""What the model is made of: layers, shapes, parameters, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cadenza.drivers.sharding import local
from cadenza.hooks.moments import Callback
from cadenza.loading.batches import tensors_in

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from cadenza.run import Run


@dataclass(frozen=True, slots=True)
class Layer:
    """One row of the table. Its parameters include those of the layers inside it; one that is shared counts once."""

    name: str
    """From the model down, such as ``encoder.0``; empty for the model itself."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that it returned when it was first called in training; empty if it was not, or returned none."""

    parameters: int
    trainable: int


class Summary(Callback):
    """Show the model as a table, layer by layer, and the memory that training takes, when the first step is over.

    The shapes are those of the first real batch, read in the forward pass. The memory of the optimizers is the memory that they
    hold after the step. Nothing is guessed, and no batch, random number or mode changes. If the first step fails, the part
    known by then is shown. The hooks on the layers are removed after the first step, so that later steps cost nothing. A
    compiled model is shown without shapes, because hooks would become part of its graph.

    Args:
        depth: How many levels of layers inside layers to show; None shows all. Deeper layers are still counted.

    >>> from torch import nn
    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(model=nn.Sequential(nn.Linear(1, 2000), nn.ReLU(), nn.Linear(2000, 1)), callbacks=[Summary()], steps=1)
    layer  kind        output     parameters  trainable
    model  Sequential  (2, 1)          6,001      6,001
      0    Linear      (2, 2000)       4,000      4,000
      1    ReLU        (2, 2000)           0          0
      2    Linear      (2, 1)          2,001      2,001
    MiB: parameters 0.02, gradients 0.02, optimizers 0.00, buffers 0.00, together 0.05
    """

    def __init__(self, depth: int | None = 3) -> None:
        if depth is not None and (not isinstance(depth, int) or depth < 0):
            raise ValueError(f"depth must be a whole number of at least 0, or None for all; got {depth!r}")
        self.depth = depth
        self.layers: list[Layer] = []
        """The rows, once they were shown."""

    def on_fit_start(self, run: Run) -> None:
        self.layers = []
        if not run.is_main:
            return
        shapes: dict[nn.Module, tuple[tuple[int, ...], ...]] = {}
        handles = _hooked(run, shapes)
        run.after_step(partial(self._show, run, shapes, handles))

    def _show(self, run: Run, shapes: dict[nn.Module, Any], handles: Iterable[RemovableHandle]) -> None:
        for handle in handles:
            handle.remove()
        model = run.model
        self.layers = [
            Layer(name, _kind(module), shapes.get(module, ()), *_counted(module))
            for name, module in model.named_modules()
            if self.depth is None or _level(name) <= self.depth
        ]
        run.print(f"{_table(self.layers)}\n{_memory(run, model)}")


def _hooked(run: Run, shapes: dict[nn.Module, Any]) -> list[RemovableHandle]:
    """Have the shapes of what each layer returns noted, the first time that it is called in training."""
    model = run.model
    modules = list(model.modules())
    # The names by which torch knows that a module is compiled: it has no public ones.
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return []

    def listen(module: nn.Module) -> RemovableHandle:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if run.model.training:  # a trial of an evaluation comes before the first step
                handle.remove()
                shapes[module] = tuple(tuple(tensor.shape) for tensor in tensors_in(output))

        handle = module.register_forward_hook(note)
        return handle

    return [listen(module) for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _kind(module: nn.Module) -> str:
    """Return the name of a module's class; of the user's one, where sharding put others before it."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return kinds[2] if kinds[1] == "FSDPModule" else kinds[0]


def _level(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _counted(module: nn.Module) -> tuple[int, int]:
    """Return how many numbers are parameters, and how many of them are trained."""
    sizes = [(0 if is_lazy(one) else one.numel(), one.requires_grad) for one in module.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _table(layers: Iterable[Layer]) -> str:
    head = ("layer", "kind", "output", "parameters", "trainable")
    rows = [
        (
            "  " * _level(layer.name) + (layer.name.rpartition(".")[2] or "model"),
            layer.kind,
            ", ".join(map(str, layer.shapes)) or "-",
            f"{layer.parameters:,}",
            f"{layer.trainable:,}",
        )
        for layer in layers
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    aligned: list[Callable[[str, int], str]] = [str.ljust, str.ljust, str.ljust, str.rjust, str.rjust]
    lines = (map(lambda put, cell, width: put(cell, width), aligned, row, widths) for row in (head, *rows))
    return "\n".join("  ".join(cells) for cells in lines)


def _memory(run: Run, model: nn.Module) -> str:
    """Return a line about what stays on the device from step to step; what a forward pass keeps comes on top."""
    sizes = {
        "parameters": _mebibytes(model.parameters()),
        "gradients": _mebibytes(one for one in model.parameters() if one.requires_grad),
        "optimizers": _mebibytes(tensors_in([list(optimizer.state.values()) for optimizer in run.optimizers])),
        "buffers": _mebibytes(model.buffers()),
    }
    told = {name: f"{size:,.2f}" for name, size in {**sizes, "together": sum(sizes.values())}.items()}
    if not run.progress.step:
        told |= {"optimizers": "not known before an update", "together": "not known"}
    return "MiB: " + ", ".join(f"{name} {size}" for name, size in told.items())


def _mebibytes(tensors: Iterable[Tensor]) -> float:
    return sum(0 if is_lazy(one) else local(one).numel() * one.element_size() for one in tensors) / 2**20
