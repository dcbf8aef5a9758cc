"""Which rank ended a run, or keeps the others waiting: what ranks post of themselves, and the error that all of them raise."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch import distributed as dist

from cadenza.drivers.thread_samples import ThreadSamples, Waits, no_collection
from cadenza.errors import DistributedError, add_note, notes_of
from cadenza.status import stragglers
from cadenza.status.formats import few

EVERY_S = 1.0
"""The time between two posts of a rank, for up to `_RANKS` ranks. For more it is longer in proportion."""
_RANKS = 256
_SUMMED = 5  # posts between two summaries of the times of all ranks
_MISSED, _MISSED_AFTER_LOSS = 20, 3  # posts of a rank that others wait for in a save
_STACKS, _FRAMES = 2, 16  # that a note shows
_SAMPLES = 4  # ranks that a message lists


@dataclass(frozen=True, slots=True)
class Post:
    """Where a rank is."""

    step: int
    """The number of complete steps."""
    where: str
    """The callback and the moment, or the phase, and the line of the user's code."""
    waits: Waits = Waits.NO
    busy_s: float = 0.0
    """The time that the processor worked for the training thread. It does not grow while a thread waits."""
    number: int = 0
    """Posts are numbered from 1."""
    times: Sequence[float] = field(default=(0.0, 0.0, 0.0), compare=False)
    """The seconds in each of `stragglers.PARTS`, since the run began."""
    ended: bool = False
    """Whether the rank has left the run."""
    sent_s: float = field(default=0.0, compare=False)
    """When it was sent, in seconds since the run began. All ranks begin it together, and their clocks may differ."""
    age_s: float = field(default=0.0, compare=False)
    """How old it was when it was read."""

    def __str__(self) -> str:
        return f"at step {self.step} in {self.where}"

    @property
    def with_age(self) -> str:
        """The text, with the age, for a rank that posts no more: it may have gone on for almost a second."""
        return f"{self}, {self.age_s:.{1 if self.age_s < 10 else 0}f} s ago"


class Posts:
    """Posts where this rank is, from a thread of its own, while the block runs. The training thread does nothing for it.

    A rank sends one message a second. With more than 256 ranks the interval is longer in proportion, so all ranks together send
    at most 256 messages a second, each of some 160 bytes, to the store of the process group. Between two posts, the thread
    samples what the training thread does.

    Args:
        store: A client of the process group's store, for this object alone.
        name: The prefix of the keys, the same on all ranks and for this run only.
        look: Returns where the training thread is. It is called in the other thread.
        also: Called in the other thread after each post.
        most_s: The longest time between two posts, for a run that is debugged.
        waits_seen: That of `ThreadSamples`.
        summary: Where the main process writes which ranks are slow, at every fifth post and at the end; None: nowhere.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        ranks: int,
        look: Callable[[], Post],
        also: Callable[[], object] = lambda: None,
        *,
        most_s: float = math.inf,
        waits_seen: bool = True,
        summary: Path | None = None,
    ) -> None:
        self.every_s: float = min(interval(ranks), most_s)
        self._store, self._name, self._rank, self._ranks, self._look, self._also = store, name, rank, ranks, look, also
        self._number, self._over, self._began = 0, threading.Event(), time.monotonic()
        self._last, self._held = Post(0, "the start of the run"), False
        self._training, self._unchanged = threading.get_ident(), 0
        self._samples, self._summary = ThreadSamples(waits_seen=waits_seen), summary if rank == 0 else None
        self._thread = threading.Thread(target=self._work, name="cadenza posts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2.0)  # the store may not answer

    def _work(self) -> None:
        try:
            while not self._over.is_set():
                self._send(self._last if self._held else self._look())
                self._also()
                if self._number % _SUMMED == 0:
                    self._summarize()
                self._sample()
            self._send(replace(self._last if self._held else self._look(), ended=True))
            self._summarize()
        except Exception:  # the store is gone: the training thread sees that the contact is lost, and says so
            return

    def _sample(self) -> None:
        """Wait for the next post, and take samples on the way."""
        due_s = time.monotonic() + self.every_s
        while (left_s := due_s - time.monotonic()) > 0 and not self._over.wait(min(left_s, self._samples.pause_s())):
            self._samples.take()

    def _summarize(self) -> None:
        if self._summary is None:
            return
        posts = [(0.0, 0.0, 0.0) if post is None else post.times for post in self.read()]
        content = json.dumps(stragglers.summary(posts, waits_seen=self._samples.waits_seen))
        new = self._summary.with_name(f"{self._summary.name}.new")
        with suppress(OSError):  # a full disk, of which the records warn
            new.write_text(content + "\n", encoding="utf-8")
            new.replace(self._summary)

    def hold(self) -> None:
        """Post from now on where this rank was last: it waited for another one, and has received an error instead."""
        self._held, self._last = True, replace(self._last, waits=Waits.YES)

    def _send(self, post: Post) -> None:
        self._number += 1
        moved = (post.step, post.where) != (self._last.step, self._last.where)
        self._unchanged = 0 if moved else self._unchanged + 1
        if not self._held:
            self._last = post
            if self._unchanged > 1 and self._unchanged.bit_count() == 1:  # the 2nd time, the 4th, ...: few for a long step
                self._store.set(f"{self._name}/{self._rank}/stack", stack_of(self._training))
        self._store.set(f"{self._name}/{self._rank}", json.dumps(self._dated(post)))

    def _dated(self, post: Post) -> dict[str, Any]:
        times = [round(seconds, 1) for seconds in self._samples.seconds]
        fields = asdict(replace(post, number=self._number, times=times, sent_s=round(time.monotonic() - self._began, 1)))
        del fields["age_s"]
        return fields

    def watch(self) -> tuple[float, Callable[[Sequence[int]], list[int]]]:
        """Return the time between two looks at the posts of others, and a function that looks and returns who posts no more.

        A rank may hold the interpreter for a while, so many posts must be missing; few, if the contact is known to be lost.
        """
        last: dict[int, tuple[int, int]] = {}

        def silent(ranks: Sequence[int]) -> list[int]:
            posts = self.read()
            for rank in ranks:
                number = 0 if (post := posts[rank]) is None else post.number
                before, missed = last.get(rank, (-1, 0))
                last[rank] = number, missed + 1 if number == before else 0
            return [rank for rank in ranks if last[rank][1] >= (_MISSED_AFTER_LOSS if self._held else _MISSED)]

        return self.every_s, silent

    # -- for the rank that writes the message ------------------------------------------------------

    def read(self) -> list[Post | None]:
        """Return the last post of each rank, by rank, in one exchange; None for a rank that has sent none."""
        keys = [f"{self._name}/{rank}" for rank in range(self._ranks)]
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        found = dict(zip(there, self._store.multi_get(there), strict=True))
        now_s = time.monotonic() - self._began
        return [None if key not in found else _post(found[key], now_s) for key in keys]

    def stacks(self, ranks: Sequence[int]) -> str:
        """Return the stacks of those ranks that have sent theirs, as they have stayed at one position."""
        keys = {rank: f"{self._name}/{rank}/stack" for rank in ranks[:_STACKS]}
        texts = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        return "\n".join(f"rank {rank} was here (most recent call last):\n{text}" for rank, text in texts.items())

    def compared(self, *, all_of: bool = False) -> tuple[list[Post | None], list[Post | None]]:
        """Return the posts now, and again when each rank has posted anew, or could have.

        With `all_of`, wait for the whole time in any case.
        """
        before = after = self.read()
        deadline = time.monotonic() + 2.5 * self.every_s
        while (all_of or _silent(before, after)) and time.monotonic() < deadline:
            time.sleep(self.every_s / 2)
            after = self.read()
        return before, after


def interval(ranks: int) -> float:
    """Return the seconds between two posts of a rank.

    >>> interval(2), interval(1024)
    (1.0, 4.0)
    """
    return EVERY_S * max(1.0, ranks / _RANKS)


def culprit(before: Sequence[Post | None], after: Sequence[Post | None], waited_s: float | None) -> str:
    """Name the ranks that keep the others waiting. See `verdict`."""
    return verdict(before, after, waited_s)[0]


def verdict(before: Sequence[Post | None], after: Sequence[Post | None], waited_s: float | None) -> tuple[str, Sequence[int]]:
    """Name the ranks that keep the others waiting; return the text, and the ranks with a stack that tells more.

    Args:
        before: The last post of each rank.
        after: The same, later: a rank that sent none in between has stopped, unless it left the run.
        waited_s: How long a rank waited for another; None if the contact was lost.
    """
    silent = _silent(before, after)
    first = [old or new for old, new in zip(before, after, strict=True)]
    known = {rank: post for rank, post in enumerate(after) if post is not None and not post.ended}
    if silent and waited_s is None:
        return _listed(first, silent, "ended without an error message (killed, or crashed); last seen {0.with_age}"), ()
    further = max((post.step for post in after if post is not None), default=0) + 1
    late = f"did not reach step {further}" + ("" if waited_s is None else f" within {waited_s:g} s")
    if silent:
        return _listed(first, silent, late + "; last seen {0.with_age}, and it posts no more: paused, or killed"), silent
    if gone := [rank for rank, post in enumerate(after) if post is not None and post.ended]:
        return _listed(after, gone, "left the run {}, and the other ranks did not"), ()
    if not known:
        return "no rank has posted where it is", ()
    least = min((post.step, post.waits) for post in known.values())
    if least[1] is Waits.YES and len({post.where for post in known.values()}) > 1:
        positions = _positions(known)
        first_at = {post.where: rank for rank, post in reversed(known.items())}
        text = f"the ranks wait for each other at different calls: {positions}. Trainer(debug_ranks=True) compares the calls"
        return text, sorted(first_at.values())
    behind = [rank for rank, post in known.items() if (post.step, post.waits) == least]
    return _listed(after, behind, late + "; last seen {}"), behind


def _silent(before: Sequence[Post | None], after: Sequence[Post | None]) -> list[int]:
    pairs = enumerate(zip(before, after, strict=True))
    return [
        rank for rank, (old, new) in pairs if new is None or (old is not None and not new.ended and new.number <= old.number)
    ]


def _listed(posts: Sequence[Post | None], ranks: Sequence[int], text: str) -> str:
    parts = []
    for rank in ranks[:_SAMPLES]:
        post = posts[rank]
        if post is None:
            parts.append(f"rank {rank} has not begun the run")
        else:
            parts.append(f"rank {rank} {text.format(post)}")
    return "; ".join(parts) + (f"; and {len(ranks) - _SAMPLES} more ranks" if len(ranks) > _SAMPLES else "")


def _positions(posts: dict[int, Post]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, post in posts.items():
        ranks.setdefault(str(post), []).append(rank)
    parts = []
    for position, own in [*ranks.items()][:_SAMPLES]:
        several = f"ranks {few(map(str, own), _SAMPLES)}"
        parts.append(f"{several if len(own) > 1 else f'rank {own[0]}'} {position}")
    return "; ".join(parts) + ("; ..." if len(ranks) > _SAMPLES else "")


def _post(content: bytes, now_s: float) -> Post:
    fields: dict[str, Any] = json.loads(content)
    return Post(**fields | {"waits": Waits(fields["waits"]), "age_s": max(0.0, now_s - fields["sent_s"])})


def stack_of(thread: int) -> str:
    """Return the innermost frames of a thread, as tracebacks show them."""
    with no_collection():
        frame = sys._current_frames().get(thread)
        return "" if frame is None else "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:])).rstrip()


def own_client(store: Any, timeout_s: float) -> Any:
    """Return another client of a store, so that a call that waits blocks no other thread."""
    try:
        client = store.clone()
    except (AttributeError, RuntimeError):  # older torch, or a store inside of this process
        return store
    client.set_timeout(timedelta(seconds=timeout_s))
    return client


def within(timeout_s: float, act: Callable[[], Any]) -> Any:
    """Return the result of `act`; None if it takes longer or fails. A paused store neither answers nor raises."""
    result: list[Any] = []

    def work() -> None:
        try:
            result.append(act())
        except (RuntimeError, ValueError):  # torch's errors of a store
            return

    thread = threading.Thread(target=work, name="cadenza store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return result[0] if result else None


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
            lost = DistributedError(f"rank {self._rank} {began}. {told}")
            if stacks := within(5, lambda: _wait(f"{key}/stacks", 0)):
                add_note(lost, stacks)
            return lost
        if (note := self._unknown(waited_s)) not in notes_of(error):
            add_note(error, note)
        return error

    def told(self, key: str) -> DistributedError:
        """Return the error that another rank has sent."""
        return DistributedError(f"rank {self._rank} ends because another process ended. {_wait(key, _TELLS_S) or ''}".rstrip())

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
        found = within(10, lambda: [int(count) for count in _store().multi_get(keys)]) or []
        missing = [rank for rank, entered in enumerate(found) if entered < number]
        if not missing:
            return DistributedError(self._unknown(waited_s))
        began = "lost contact" if waited_s is None else f"waited {waited_s:g} s"
        names = few([f"rank {rank}" for rank in missing], 4)
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
        text, ranks = verdict(*posts.compared(), waited_s)
        _store().set(f"{key}/stacks", posts.stacks(ranks))
        _store().compare_set(key, "", text)
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
        part in message for part in ("gloo", "nccl", "connection", "peer", "timed out", "pair closure")
    )
