"""Write a checkpoint, in a background thread or in the calling one, and repeat a failed write."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import NamedTuple

from torch import Tensor

from cadenza.checkpoint.model_parts import LEFT_OUT
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.checkpoint.store.content import JoinedFiles
from cadenza.drivers.agreeing import ALONE, Meeting
from cadenza.status.plain import host_copy
from cadenza.status.progress import Counters

PAUSES_S: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Pauses between attempts during the training. The last one repeats."""
LAST_PAUSES_S: tuple[float, ...] = (0.1, 0.4, 1.0)
"""Pauses between attempts at the end of a run."""
_SLICE_S = 0.25
_BYTES_PER_S = 50e6  # the assumed rate before the first write


@dataclass(slots=True)
class Save:
    """A checkpoint to write."""

    content: Content
    at: Counters
    together: bool = False
    """Whether all ranks write."""
    signalled_at: float | None = None
    """The time by `time.monotonic` of the signal that ends the process; None without a signal."""
    attempts: int = 0
    error: Exception | None = None
    """The error of the last failed attempt; None if none has failed."""


class Result(NamedTuple):
    """A checkpoint that is written, or the error of the first attempt."""

    save: Save
    saved: Saved | Exception
    pruned: list[str] | Exception
    """The names of the deleted checkpoints, or the error of the deletion."""


class Attempts:
    """Writes one checkpoint at a time, until it is written.

    Args:
        store: The store to write to.
        sync: Called before each attempt, to flush the files that the checkpoint refers to. An OSError is ignored: lost rows are
            written again from the history when the run continues.
        prune: Called after a write, to delete the checkpoints that are no longer kept; returns their names.
        notify: Called after each addition to `results`, on the thread that writes.
        background: Make the first attempt in a thread. Further attempts are always made in a thread.
        repeats: Make further attempts, with growing pauses, until `stop`.
        grace_s: The seconds between a signal and the end of the process; None if unknown. If the time may be too short for the
            whole checkpoint, its weights are written first.
        meeting: The ranks that write a `Save` together. Then each rank must start and stop, and all ranks make the same number
            of attempts.
        fetched: Returns the content of a checkpoint on the host; called on the thread that writes.
        written: Called with the tensors of a checkpoint when it is written, on the thread that writes. Nothing here reads
            them any more.
    """

    def __init__(
        self,
        store: Store,
        sync: Callable[[], object],
        prune: Callable[[Saved], list[str]],
        notify: Callable[[], object],
        *,
        background: bool = True,
        repeats: bool = True,
        grace_s: float | None = None,
        meeting: Meeting = ALONE,
        fetched: Callable[[Content], Content] = lambda content: content,
        written: Callable[[list[Tensor]], object] = list,
    ) -> None:
        self.store: Store = store
        self._sync = sync
        self._prune = prune
        self._notify = notify
        self._background, self._repeats, self._grace_s = background, repeats, grace_s
        self._meeting, self._fetched, self._written = meeting, fetched, written
        self.results: deque[Result] = deque()
        self._unsaved: Save | None = None  # the newest checkpoint while it is not written
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._bytes_per_s = _BYTES_PER_S

    @property
    def busy(self) -> bool:
        """Whether a first attempt is under way."""
        return self._unsaved is not None and self._unsaved.error is None

    @property
    def failed(self) -> Save | None:
        """The newest checkpoint if its write has failed, and no later attempt was successful."""
        return self._unsaved if self._unsaved is not None and self._unsaved.error is not None else None

    def start(self, save: Save) -> None:
        """Make the first attempt. Call `stop` before."""
        self._stopped.clear()
        self._unsaved = save
        if not self._background:
            if self._attempt(save):
                return
            if self._repeats:
                save.content = save.content.mapped(host_copy)  # the training goes on and changes the tensors
        first = [0.0] if self._background else []
        pauses_s = chain(first, PAUSES_S, repeat(PAUSES_S[-1])) if self._repeats else first
        # No daemon: the process must not end while a checkpoint is half written.
        self._thread = threading.Thread(target=self._repeat, args=(save, pauses_s), name="cadenza-checkpoint", daemon=False)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the first attempt, or for a later one that has begun; make no further attempt."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> None:
        """Make the last attempts, in the calling thread. Call `stop` before."""
        if self.failed is not None and self._repeats:
            self._stopped.clear()
            self._repeat(self.failed, LAST_PAUSES_S)

    def _repeat(self, save: Save, pauses_s: Iterable[float]) -> None:
        for pause_s in pauses_s:
            if (pause_s and self._stopped_within(pause_s, together=save.together)) or self._attempt(save):
                return

    def _attempt(self, save: Save) -> bool:
        """Write a checkpoint, then prune; return whether it is written."""
        save.attempts += 1
        with suppress(OSError):
            self._sync()
        try:
            save.content = content = self._fetched(save.content)
            if save.signalled_at is not None and self._grace_s is not None:
                self._write_weights_first(content, self._grace_s - (time.monotonic() - save.signalled_at))
            began = time.monotonic()
            saved = self.store.write_together(content, self._meeting) if save.together else self.store.write(content)
            self._bytes_per_s = content.nbytes / max(time.monotonic() - began, 1e-6)
        except Exception as error:
            save.error = error
            if save.attempts == 1:
                self.results.append(Result(save, error, []))
                self._notify()
            return False
        self._written(content.emptied())
        pruned = self._pruned(saved)
        self._unsaved = None
        self.results.append(Result(save, saved, pruned))
        self._notify()
        return True

    def _pruned(self, saved: Saved) -> list[str] | Exception:
        try:
            return self._prune(saved)
        except Exception as error:  # the checkpoint is written, and that counts
            return error

    def _write_weights_first(self, content: Content, left_s: float) -> None:
        """Write the weights alone if the time may be too short for the whole checkpoint. Shards are not written alone."""
        sharded = content.model_shards or content.shards
        if self._meeting.rank or sharded or content.facts.get("weights_only") or content.nbytes / self._bytes_per_s <= left_s:
            return
        facts = {**content.facts, "weights_only": True, "reason": f"{content.facts['reason']}, weights first"}
        left_out = {LEFT_OUT: content.plain[LEFT_OUT]} if LEFT_OUT in content.plain else {}
        self.store.write(replace(content, plain=left_out, tensors={}, facts=facts, files=JoinedFiles()))

    def _stopped_within(self, pause_s: float, *, together: bool) -> bool:
        """Wait; return whether this rank or another one was stopped in the meantime."""
        if not together:
            return self._stopped.wait(pause_s)
        deadline = time.monotonic() + pause_s
        while True:
            stopped = self._stopped.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
            try:
                everyone = self._meeting.gather_on_main((stopped, time.monotonic() >= deadline))
                stops = any(stopped for stopped, _ in everyone)
                stops, over = self._meeting.broadcast((stops, all(over for _, over in everyone)))
            except RuntimeError:  # another rank is gone, and nothing can be written together
                return True
            if stops or over:
                return bool(stops)
