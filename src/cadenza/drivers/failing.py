"""Which error ends a run of several ranks: that of the rank that caused it, on all ranks."""

from __future__ import annotations

import re
import time
from typing import Any

from torch import distributed as dist

from cadenza.drivers.posts import Posts, culprit, within
from cadenza.errors import DistributedError, add_note, notes_of

_ENTERED = "cadenza/entered/{}"  # the key of a rank
_TELLS_S = 1.0  # a rank that fails posts its error before it ends, and this is how long the others wait for it


class Failure:
    """The end of a run by an error, on one rank.

    Args:
        rank: The index of this process.
        timeout_s: The time limit of the driver for an exchange.
        hosted: Whether the launcher serves the store; False: rank 0 does; None: it is not known.
    """

    def __init__(self, rank: int, timeout_s: float, hosted: bool | None) -> None:
        self._rank, self._timeout_s, self._hosted = rank, timeout_s, hosted
        self.posts: Posts | None = None
        """What the ranks post of themselves, while a run goes on."""

    def first_error(self, error: BaseException, key: str) -> BaseException:
        """Send the error that ends this rank to the others. Return it, or the error of the rank that caused it.

        If a rank does not answer, one of the other ranks reads the posts of all ranks, and sends what they say to the others.

        Args:
            error: The error that was raised here.
            key: The key of the message, the same on all ranks.
        """
        if isinstance(error, DistributedError):
            return error
        if not _is_lost_contact(error):
            within(10, lambda: _store().compare_set(key, "", f"rank {self._rank}: {type(error).__name__}: {error}"))
            return error
        waited_s, posts = self._waited(error), self.posts
        if posts is not None:
            posts.hold()
        told: str | None = within(_TELLS_S + 5, lambda: _wait(key, _TELLS_S))
        if told is None and posts is not None:
            told = within(2.5 * posts.every_s + 30, lambda: _elected(posts, key, waited_s))
        if told is not None:
            began = "ends because another process ended" if waited_s is None else "waited too long for another process"
            return DistributedError(f"rank {self._rank} {began}. {told}")
        if (note := self._unknown(waited_s)) not in notes_of(error):
            add_note(error, note)
        return error

    def enter(self, more: int = 1) -> int:
        """Count that this rank enters a part of the script in which all ranks take part; return how many it has entered."""
        try:
            return int(_store().add(_ENTERED.format(self._rank), more))
        except (RuntimeError, ValueError):  # a backend without a store
            return 0

    def absent(self, error: RuntimeError, where: str, number: int, ranks: int) -> DistributedError | None:
        """Return an error that names the ranks that did not enter a part of the script; None if it is no loss of contact.

        Args:
            error: The error that was raised in this part.
            where: The part, such as ``"in evaluate"``.
            number: The result of `enter` for it.
            ranks: The number of ranks.
        """
        if isinstance(error, DistributedError) or not _is_lost_contact(error):
            return None
        waited_s, keys = self._waited(error), [_ENTERED.format(rank) for rank in range(ranks)]
        found = within(10, lambda: [int(one) for one in _store().multi_get(keys)]) or []
        missing = [rank for rank, entered in enumerate(found) if entered < number]
        if not missing:
            return DistributedError(self._unknown(waited_s))
        began = "lost contact" if waited_s is None else f"waited {waited_s:g} s"
        names = ", ".join(f"rank {rank}" for rank in missing[:4]) + (", ..." if len(missing) > 4 else "")
        return DistributedError(
            f"rank {self._rank} {began} {where}, and {names} did not come. Every rank must call Trainer, fit, evaluate and "
            "predict, in the same order: not inside of `if rank == 0`. If a rank is slow, set DdpDriver(timeout_s=...)."
        )

    def _waited(self, error: BaseException) -> float | None:
        """Return how long this rank waited; None if the contact was lost."""
        text = str(error).lower()
        if "timed out" not in text and "timeout" not in text:
            return None
        found = re.search(r"(\d+) ?ms", text)
        return int(found[1]) / 1000 if found else self._timeout_s

    def _unknown(self, waited_s: float | None) -> str:
        """Describe the loss of contact, if no rank says more."""
        if within(5, lambda: _store().check(["cadenza"])) is None and self._rank > 0 and self._hosted is not True:
            serves = "which serves the store of the process group" if self._hosted is False else "or the store"
            return (
                f"rank {self._rank} lost contact with rank 0, {serves}: it was paused or killed, it crashed, or its machine "
                "cannot be reached"
            )
        if waited_s is not None:
            return (
                f"rank {self._rank} waited too long for another rank, which is slow, or did not call what every rank must "
                "call, in the same order. DdpDriver(timeout_s=...) sets the longest wait of a process group."
            )
        return f"rank {self._rank} lost contact with another process, which ended without an error message: killed, or crashed"


def _elected(posts: Posts, key: str, waited_s: float | None) -> str | None:
    """Return what the posts of all ranks say. The first rank that asks reads them; the others wait for its text."""
    if _store().add(f"{key}/reader", 1) == 1:
        _store().compare_set(key, "", culprit(*posts.compared(), waited_s))
    return _wait(key, 2.5 * posts.every_s + 20)


def _wait(key: str, wait_s: float) -> str | None:
    """Return the text at `key`, once there is one; None if there is none in time."""
    store, deadline, pause_s = _store(), time.monotonic() + wait_s, 0.02
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(pause_s)
        pause_s = min(0.25, 2 * pause_s)
    text: str = store.get(key).decode()
    return text


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _is_lost_contact(error: BaseException) -> bool:
    """Return whether another process did not answer. The errors of gloo have no class of their own."""
    if isinstance(error, dist.DistError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        part in message for part in ("gloo", "nccl", "connection", "peer", "timed out")
    )
