"""The user's loader with ``input_mapping``, indices and a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from cadenza.compat.fastnlp.core.utils.utils import Mapped, apply_mapping, indices_of
from cadenza.loading import ResumableLoader
from cadenza.loading.shards import Shard


class Feed(ResumableLoader):
    """A training loader that applies ``input_mapping`` to its batches.

    Args:
        inner: The user's loader, with a position.
        loader: The user's loader, which may provide the indices of its batches.
        mapping: The ``input_mapping``.
        note: Called with the indices of each batch in the data set; with None if they are unknown.
        allowed: Returns the maximum number of batches of an epoch; None: no limit.
    """

    def __init__(
        self,
        inner: ResumableLoader,
        loader: object,
        mapping: Mapped | None,
        note: Callable[[list[int] | None], object],
        allowed: Callable[[int], int | None],
    ) -> None:
        self._inner, self._loader, self._mapping, self._note, self._allowed = inner, loader, mapping, note, allowed
        self.shard: Shard = inner.shard

    @property
    def replicated_at(self) -> int | None:
        return self._inner.replicated_at

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        allowed = self._allowed(epoch)
        source = self._inner.batches(epoch, skip)
        return self._mapped(source if allowed is None else islice(source, max(0, allowed - skip)))

    def size_of(self, batch: Any) -> int:
        return self._inner.size_of(batch)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def _mapped(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._note(indices_of(batch, self._loader))
            yield apply_mapping(self._mapping, batch)
