"""``model.predict`` and ``model.evaluate`` inside a callback: on this rank only, without events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cadenza.compat.keras.variables import to_numpy
from cadenza.drivers.single import SingleDriver
from cadenza.engine.evaluation import computing, undisturbed
from cadenza.engine.session import session_of
from cadenza.engine.tally import Tally
from cadenza.loading.evaluation import Evaluation

if TYPE_CHECKING:
    from cadenza.run import Run

_VALIDATION = ("val", "eval", "valid", "validation")
"""The names of evaluations with results prefixed by ``val_``. The first that the run has is used."""


def validation_of(run: Run) -> Evaluation | None:
    """Return the evaluation with results prefixed by ``val_``; None if the run has no evaluation."""
    found = run.evaluations
    return next((found[name] for name in _VALIDATION if name in found), next(iter(found.values()), None))


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Return a context in which a module is in evaluation mode."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def placed(run: Run, value: Any) -> Any:
    """Return arrays and tensors on the device of the run.

    Floating-point numbers are cast to the dtype of the weights, as in Keras.
    """
    dtype = next((parameter.dtype for parameter in run.model.parameters() if parameter.is_floating_point()), torch.float32)

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) and not hasattr(value, "__array__"):
            return value
        tensor = torch.as_tensor(value)
        return tensor.to(run.device, dtype if tensor.is_floating_point() else None)

    return pytree.tree_map(move, value)


def predict(run: Run, model: Callable[[Any], Any], x: Any, batch_size: int | None = None, steps: int | None = None) -> Any:
    """Return the outputs for arrays, tensors, lists or dicts of them, or a loader, as NumPy arrays."""
    session = session_of(run)
    with undisturbed(session):
        batches = islice(_batches(x, batch_size), steps)
        inputs = (batch[0] if _is_loader(x) and isinstance(batch, list | tuple) else batch for batch in batches)
        outputs = [pytree.tree_flatten(model(placed(run, tensor))) for tensor in inputs]
    leaves = [torch.cat([leaf.detach() for leaf in same]) for same in zip(*(leaves for leaves, _ in outputs), strict=True)]
    return pytree.tree_unflatten([to_numpy(leaf) for leaf in leaves], outputs[0][1])


def evaluate(run: Run, x: Any, y: Any = None, batch_size: int | None = None, steps: int | None = None) -> dict[str, Any]:
    """Return the results of the validation for other data, without the name of the evaluation."""
    session, like = session_of(run), validation_of(run)
    batches = [*islice(_batches(x if y is None else (x, y), batch_size), steps)]
    metrics, compute = (None, None) if like is None else (deepcopy(like.given_metrics), like.compute)
    evaluation = Evaluation(batches, metrics=metrics, compute=compute)
    with undisturbed(session):
        tally, computed = Tally(SingleDriver(session.driver.device), evaluation), computing(session, evaluation)
        for data in batches:
            batch = placed(run, data)
            outputs = computed(batch)
            evaluation.batch += 1
            tally.add(batch, outputs)
        found = tally.results()
    return {name.removeprefix(f"{evaluation.name}/"): value for name, value in found.items()}


def _is_loader(x: Any) -> bool:
    return isinstance(x, Iterable) and not isinstance(x, Tensor | Mapping | list | tuple) and not hasattr(x, "__array__")


def _batches(x: Any, batch_size: int | None) -> Iterator[Any]:
    """Yield the batches of a loader, or parts of arrays and tensors."""
    if _is_loader(x):
        yield from x
        return
    leaves, form = pytree.tree_flatten(x)
    if not all(getattr(leaf, "shape", ()) for leaf in leaves):  # lists of numbers are one array
        leaves, form = pytree.tree_flatten(torch.as_tensor(x))
    tensors = [torch.as_tensor(leaf) for leaf in leaves]
    for parts in zip(*(tensor.split(batch_size or 32) for tensor in tensors), strict=True):
        yield pytree.tree_unflatten(list(parts), form)
