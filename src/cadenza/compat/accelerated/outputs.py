"""The outputs of a batch with the names of pytorch-accelerated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from cadenza.engine.objective import predictions_in
from cadenza.loading.batches import size_of


class BatchOutput(MutableMapping[str, Any]):
    """A view on the outputs of a native run. A write changes those outputs.

    ``model_outputs`` is their entry ``predictions`` or ``logits``; ``batch_size`` is the first dimension of the batch.

    >>> output = BatchOutput({"loss": 1.0, "predictions": "cat"}, batch=None)
    >>> output["model_outputs"], output["batch_size"], len(output)
    ('cat', 1, 4)
    """

    def __init__(self, outputs: Any, batch: Any) -> None:
        self._outputs = outputs
        self._also: Mapping[str, Callable[[], Any]] = {
            name: value
            for name, value in (("model_outputs", lambda: predictions_in(outputs)), ("batch_size", lambda: size_of(batch)))
            if name not in outputs
        }

    def __getitem__(self, name: str) -> Any:
        return self._also[name]() if name in self._also and name not in self._outputs else self._outputs[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._outputs[name] = value

    def __delitem__(self, name: str) -> None:
        del self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._outputs, *self._also))

    def __len__(self) -> int:
        return len({*self._outputs, *self._also})

    def __contains__(self, name: object) -> bool:  # does not compute the entry
        return name in self._outputs or name in self._also
