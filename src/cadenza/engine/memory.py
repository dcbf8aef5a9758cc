"""What holds memory when it runs out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.drivers.sharding import local
from cadenza.status.formats import size

# cuDNN says that an input is not contiguous where it finds no algorithm for the memory that is left.
_TEXTS = re.compile("(?i)out of memory|can't allocate memory|ALLOC(ATION)?_FAILED|CUDNN_STATUS_NOT_SUPPORTED.*non-contiguous")
_DEPTH = 6  # of containers and objects in a callback


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device or the host ran out of memory.

    >>> is_out_of_memory(RuntimeError("CUDNN_STATUS_ALLOC_FAILED")), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


def memory_held(model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], callbacks: Mapping[str, object]) -> str:
    """Return what holds memory on the device of a model, the largest first. Memory of several owners counts for the first.

    Args:
        model: Its weights, buffers and gradients count.
        optimizers: The optimizers by name: their states count.
        callbacks: The callbacks by name: the tensors that they hold count, such as averaged weights and kept batches.

    >>> from types import SimpleNamespace
    >>> model, keeps = nn.Linear(1024, 1024), SimpleNamespace(batches=[torch.ones(2**18)])
    >>> memory_held(model, {"SGD": torch.optim.SGD(model.parameters())}, {"Keeps": keeps})
    'weights 4.2 MB, Keeps 1.05 MB'
    """
    weights = [*model.parameters(), *model.buffers()]
    device = weights[0].device if weights else torch.device("cpu")
    owners: dict[str, Iterable[Any]] = {
        "weights": weights,
        "gradients": [parameter.grad for parameter in model.parameters()],
        **{f"state of {name}": [*optimizer.state.values()] for name, optimizer in optimizers.items()},
        **{name: [callback] for name, callback in callbacks.items()},
    }
    seen, sizes = set[int](), dict[str, int]()
    for name, owned in owners.items():
        for tensor in _tensors([*owned], set()):
            if (own := local(tensor)).device != device or own.layout is not torch.strided:
                continue
            storage = own.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[name] = sizes.get(name, 0) + storage.nbytes()
    if device.type == "cuda":
        sizes["activations and others"] = torch.cuda.memory_allocated(device) - sum(sizes.values())
    largest = sorted(((number, name) for name, number in sizes.items() if number > 0), reverse=True)
    return ", ".join(f"{name} {size(number)}" for number, name in largest)


def _tensors(value: Any, seen: set[int], depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a container or an object; not those of modules and runs, which others own."""
    if isinstance(value, Tensor):
        yield value
    elif depth and id(value) not in seen and not isinstance(value, str | bytes | type | nn.Module):
        seen.add(id(value))
        parts: Iterable[Any] = vars(value).values() if hasattr(value, "__dict__") else ()
        if isinstance(value, Mapping):
            parts = [*value.values()]
        elif isinstance(value, Set | list | tuple) or type(value).__name__ == "deque":
            parts = [*value]
        elif type(value).__module__.startswith(("torch", "cadenza.engine", "cadenza.run")):
            parts = ()
        for part in parts:
            yield from _tensors(part, seen, depth - 1)
