"""Print the layers, shapes, parameters and memory of the model."""

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
from cadenza.hooks.numbers import at_least_or_none
from cadenza.loading.batches import tensors_in
from cadenza.optim.model_state import is_compiled

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from cadenza.run import Run


@dataclass(frozen=True, slots=True)
class Layer:
    """One row of the table. The parameters include those of inner layers; a shared parameter counts once."""

    name: str
    """The name within the model, such as ``encoder.0``; empty for the model itself."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the tensors of its first output in training; empty if there was none."""

    parameters: int
    trainable: int


class Summary(Callback):
    """Print a table of the layers, and the memory that training needs, after the first step.

    The shapes come from the forward pass of the first batch. The memory of the optimizers is what they hold after the step. No
    extra batch is read, and no random number or mode changes. If the first step fails, the table shows what is known by then.
    The hooks on the layers are removed after the first step. The table of a compiled model has no shapes, because hooks would
    become part of its graph.

    With multiple ranks: runs on the main process only and does not communicate.

    Args:
        depth: The number of levels of inner layers in the table; None shows all. Rows include the parameters of deeper layers.

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
        self.depth: int | None = at_least_or_none(0, "depth", depth)
        self.layers: list[Layer] = []
        """The rows, after they are printed."""

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
    """Register hooks that record the output shapes of the first call of each layer in training."""
    model = run.model
    modules = list(model.modules())
    if any(map(is_compiled, modules)):
        return []

    def listen(module: nn.Module) -> RemovableHandle:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if run.model.training:  # a sanity evaluation comes before the first step
                handle.remove()
                shapes[module] = tuple(tuple(tensor.shape) for tensor in tensors_in(output))

        handle = module.register_forward_hook(note)
        return handle

    return [listen(module) for module in modules if not isinstance(module, torch.jit.ScriptModule)]


def _kind(module: nn.Module) -> str:
    """Return the class name of a module; for a sharded module, the name before sharding."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return kinds[2] if kinds[1] == "FSDPModule" else kinds[0]


def _level(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _counted(module: nn.Module) -> tuple[int, int]:
    """Return the number of parameters, and the number of trained parameters."""
    sizes = [(0 if is_lazy(parameter) else parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
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
    """Return a line about the memory that lasts from step to step, without that of the forward pass."""
    sizes = {
        "parameters": _mebibytes(model.parameters()),
        "gradients": _mebibytes(parameter for parameter in model.parameters() if parameter.requires_grad),
        "optimizers": _mebibytes(tensors_in([list(optimizer.state.values()) for optimizer in run.optimizers])),
        "buffers": _mebibytes(model.buffers()),
    }
    texts = {name: f"{size:,.2f}" for name, size in {**sizes, "together": sum(sizes.values())}.items()}
    if not run.progress.step:
        texts |= {"optimizers": "not known before an update", "together": "not known"}
    return "MiB: " + ", ".join(f"{name} {size}" for name, size in texts.items())


def _mebibytes(tensors: Iterable[Tensor]) -> float:
    return sum(0 if is_lazy(tensor) else local(tensor).numel() * tensor.element_size() for tensor in tensors) / 2**20
