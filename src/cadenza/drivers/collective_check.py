"""Compare the collectives of all ranks before they run: for ``Trainer(debug_ranks=True)``."""

from __future__ import annotations

import functools
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza.drivers.first_error import Post, Posts
from cadenza.drivers.thread_samples import Waits
from cadenza.errors import DistributedError

TENSORS: Mapping[str, str] = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter"), "tensor"),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor"), "output"),
    "all_gather_into_tensor": "input_tensor",
    **dict.fromkeys(("all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "new_group"), ""),
    **dict.fromkeys(("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"), ""),
}
"""The collectives of torch.distributed that are compared, each with its argument of equal shape on all ranks."""
_SETTINGS = ("src", "dst", "group_src", "group_dst", "ranks")
_LOOK = 0.75  # the part of the limit after which a rank looks for the others
_FAILURE_S = 0.5  # the time between two looks whether another rank has failed
_IDLE = 0.1  # a thread in a backward pass that uses less of its time than this waits for other ranks


_OPERATORS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The libraries of operators that wait for other ranks, however torch calls them: also in SyncBatchNorm and autograd."""


class BeforeCollectives(TorchDispatchMode):
    """Calls a function with the name of each collective that this thread calls inside, before it runs."""

    def __init__(self, act: Callable[[str], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._act = act

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions stay compiled inside."""
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Sequence[type], values: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if operator.namespace in _OPERATORS:
            self._act(operator._schema.name.rpartition("::")[2].rstrip("_"))
        return operator(*values, **(named or {}))


@contextmanager
def alone(what: str, cure: str = "") -> Iterator[None]:
    """Raise `DistributedError` at each collective inside, if there are multiple ranks.

    Args:
        what: The description of the code inside, for the message.
        cure: The end of the message.
    """

    def refuse(name: str) -> None:
        raise DistributedError(
            f"one rank alone does {what}, which calls the collective {name}: a collective needs all ranks{cure}"
        )

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with BeforeCollectives(refuse):
            yield
    else:
        yield


class Comparison:
    """Compares each collective of `torch.distributed` with those of the other ranks, before it runs.

    A rank sets one key in the store, or compares its call with the key that another rank has set, counts itself, and waits for
    the last one: at most ten messages for each rank and collective, plus those of the wait.

    Args:
        client: Returns a client of the store. Each thread has its own.
        name: The prefix of the keys, the same on all ranks and for this run only.
        failed: The key of the error with which a rank ended the run.
        posts: What the ranks post of themselves.
        caller: Returns the callback and moment that calls, or an empty string, and the position in the run with its line.
        limit_s: After this time, a rank that does not call is named.
        timeout_s: After this time, the wait for a slow rank ends.
        warn: Shows a warning.
    """

    def __init__(
        self,
        client: Callable[[], Any],
        name: str,
        failed: str,
        posts: Posts,
        caller: Callable[[], tuple[str, str]],
        *,
        rank: int,
        limit_s: float,
        timeout_s: float,
        warn: Callable[[str], object],
    ) -> None:
        self._client, self._name, self._failed, self._posts, self._caller = client, name, failed, posts, caller
        self._rank, self._limit_s, self._timeout_s, self._warn = rank, limit_s, timeout_s, warn
        self._numbers: dict[str, int] = {}
        self._own = threading.local()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Compare the collectives that are called inside, in any thread."""
        originals = {name: getattr(dist, name) for name in TENSORS}
        try:
            for name, original in originals.items():
                self._set(name, self._wrapper(name, original))
            yield
        finally:
            for name, original in originals.items():
                self._set(name, original)

    def _set(self, name: str, function: Callable[..., Any]) -> None:
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, function)

    def _wrapper(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def compared(*values: Any, **named: Any) -> Any:
            if getattr(self._own, "inside", False):  # a collective that is made of others
                return original(*values, **named)
            self._own.inside = True
            try:
                self._compare(name, signature.bind(*values, **named).arguments)
                return original(*values, **named)
            finally:
                self._own.inside = False

        return compared

    def _compare(self, name: str, given: Mapping[str, Any]) -> None:
        group: Any = (None if name == "new_group" else given.get("group")) or dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return
        ranks, label = dist.get_process_group_ranks(group), dist.distributed_c10d._get_process_group_name(group)
        number = self._numbers[label] = self._numbers.get(label, 0) + 1
        who, where = self._caller()
        call = {"rank": self._rank, "what": described(name, given), "who": who, "where": where}
        self._meet(f"{self._name}/{label}", number, ranks, call)

    def _meet(self, group: str, number: int, ranks: Sequence[int], call: dict[str, Any]) -> None:
        """Return when all ranks of the group are at this call.

        Raises:
            DistributedError: A rank calls something else, makes no call, or has failed.
        """
        store, key = self._store(), f"{group}/{number}"
        store.set(f"{group}/at/{self._rank}", str(number))
        store.set(f"{self._name}/call/{self._rank}", json.dumps(call | {"end": f"{key}/end"}))
        first = json.loads(store.compare_set(f"{key}/first", "", json.dumps(call)))
        if (first["what"], first["who"]) != (call["what"], call["who"]):
            calls = sorted((first, call), key=lambda call: int(call["rank"]))
            self._end(store, key, f"the ranks make different calls: {'; '.join(map(_told, calls))}")
        elif store.add(f"{key}/came", 1) == len(ranks):
            store.compare_set(f"{key}/end", "", "all came")
            for part in ("first", "came", "end"):  # all ranks have left the call before
                store.delete_key(f"{group}/{number - 1}/{part}")
        began = told = time.monotonic()
        pause_s, looks, later = 0.0005, 0, 0.0 if self._rank == ranks[0] else 0.05  # the first one prints
        while not store.check([f"{key}/end"]):
            time.sleep(pause_s)
            pause_s, now = min(0.05, 1.5 * pause_s), time.monotonic()
            if now - told > _FAILURE_S:
                told = now
                self._raise_failure(store)
            if now - began > self._limit_s * (looks + _LOOK + later):
                looks += 1
                if store.add(f"{key}/look {looks}", 1) == 1:  # one rank looks for all
                    self._look_for(store, group, number, ranks, call, waited_s=now - began)
        if (text := store.get(f"{key}/end").decode()) != "all came":
            raise DistributedError(text)

    def _end(self, store: Any, key: str, text: str) -> None:
        """End the run on all ranks: with `text`, or with an earlier error of another rank."""
        if store.compare_set(self._failed, "", text).decode() != text:
            self._raise_failure(store)
        store.compare_set(f"{key}/end", "", text)

    def _raise_failure(self, store: Any) -> None:
        if store.check([self._failed]):
            told = store.get(self._failed).decode()
            raise DistributedError(f"rank {self._rank} ends because another process ended. {told}")

    def _look_for(
        self, store: Any, group: str, number: int, ranks: Sequence[int], call: Mapping[str, Any], *, waited_s: float
    ) -> None:
        """Name the ranks that have not come: in an error if they will not come, and in a warning if they are slow."""
        before, after = self._posts.compared(all_of=True)
        keys = {rank: f"{group}/at/{rank}" for rank in ranks}
        missing = [rank for rank, key in keys.items() if not (store.check([key]) and int(store.get(key)) >= number)]
        states = {rank: _state(before[rank], after[rank], self._posts.every_s) for rank in missing}
        if not states:
            return
        lost = waited_s > self._timeout_s or any(over for over, _ in states.values())
        shown = [self._elsewhere(store, rank) or f"rank {rank} {text}" for rank, (_, text) in states.items()][:4]
        named = "; ".join([_told(call), *shown, *(["..."] if len(states) > 4 else [])])
        if lost:
            self._end(store, f"{group}/{number}", named)
        else:
            self._warn(f"{named}. Waiting")

    def _elsewhere(self, store: Any, rank: int) -> str:
        """Return the call at which another rank waits; an empty string if there is none."""
        if not store.check([key := f"{self._name}/call/{rank}"]):
            return ""
        call = json.loads(store.get(key))
        return "" if store.check([call["end"]]) else f"{_told(call)}, in another group"

    def _store(self) -> Any:
        if not hasattr(self._own, "store"):
            self._own.store = self._client()
        return self._own.store


def described(name: str, given: Mapping[str, Any]) -> str:
    """Describe a call of a collective: its tensor and what else must be equal on all ranks.

    >>> import torch
    >>> described("all_reduce", {"tensor": torch.zeros(3), "op": dist.ReduceOp.MAX})
    'all_reduce(float32 [3], max)'
    """
    tensor = given.get(TENSORS[name])
    parts = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"] if isinstance(tensor, Tensor) else []
    if (operation := given.get("op")) is not None:
        kinds = dist.ReduceOp.RedOpType.__members__
        parts.append(next((kind.lower() for kind, value in kinds.items() if operation == value), repr(operation)))
    elif "op" in inspect.signature(getattr(dist, name)).parameters:
        parts.append("sum")
    parts += [f"{key}={given[key]!r}" for key in _SETTINGS if given.get(key) is not None]
    return f"{name}({', '.join(parts)})"


def _told(call: Mapping[str, Any]) -> str:
    return f"rank {call['rank']} calls {call['what']} {call['where']}"


def _state(before: Post | None, after: Post | None, every_s: float) -> tuple[bool, str]:
    """Return whether a rank that has not come will not come, and what to say of it."""
    if after is None:
        return False, "has not begun the run"
    if after.ended:
        return True, f"has left the run {after}"
    if before is None or after.number <= before.number:
        return True, f"was last seen {after.with_age}, and posts no more: paused, or killed"
    idle = after.busy_s - before.busy_s < _IDLE * every_s * (after.number - before.number)
    waits = after.waits is Waits.YES or (after.waits is Waits.MAYBE and idle)
    if waits and (before.step, before.where, before.waits) == (after.step, after.where, after.waits):
        return True, f"is {after}, waits for the others there, and calls none"
    return False, f"is {after}, and has not called it yet"
