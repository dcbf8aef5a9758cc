"""Code that runs on one rank alone: a collective in it is an error, and not a wait for ranks that never come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza.errors import DistributedError

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The libraries of operators that wait for other ranks, however torch calls them: also in SyncBatchNorm and autograd."""


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Raise `DistributedError` at each collective inside, if there are multiple ranks.

    Args:
        what: The description of the code inside, for the message.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with _Alone(what):
            yield
    else:
        yield


class _Alone(TorchDispatchMode):
    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], values: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if operator.namespace in _COLLECTIVES:
            name = operator._schema.name.rpartition("::")[2].rstrip("_")
            raise DistributedError(
                f"one rank alone does {self._what}, which calls the collective {name}: a collective needs all ranks"
            )
        return operator(*values, **(named or {}))
