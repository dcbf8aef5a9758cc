"""Where the training thread is, read from another thread; two ranks use it in tests/alone/test_lost_ranks.py."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from cadenza import Callback, Run, on
from cadenza.drivers.posts import Waits
from cadenza.drivers.tree import Tree
from cadenza.engine.session import Session, session_of
from cadenza.engine.whereabouts import whereabouts
from cadenza.testing import tiny_run
from tests import forked
from tests.waiting import until


def test_a_rank_waits_while_another_thread_communicates_for_it() -> None:
    """Else a healthy rank of many would be named as one that is behind."""
    seen: list[Waits] = []
    arrived = threading.Event()

    @on(Callback.on_step_end)
    def wait(run: Run) -> None:
        def look() -> None:
            try:
                until(lambda: whereabouts(session_of(run)).waits is Waits.YES)
                seen.append(Waits.YES)
            finally:
                arrived.set()

        thread = threading.Thread(target=look)
        thread.start()
        Tree(1, 2, lambda *_: None, lambda *_: arrived.wait()).start(torch.zeros(1))()
        thread.join()

    tiny_run(steps=1, callbacks=[wait])
    assert seen == [Waits.YES]


def test_a_collection_while_frames_are_read_does_not_let_them_go(tmp_path: Path) -> None:
    """Python 3.11 would crash: it collects inside `frame.f_back`, and a finalizer may let the training thread go on."""
    process = forked.start(train, output=tmp_path / "said")
    assert process.ended() == 0, process.said()


def train() -> None:
    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        for allocations in range(40):  # until the collection: the frames are reached after some twenty
            look_while_frames_end(session_of(run), allocations)

    gc.freeze()  # the process is this test's own, and the collections shall be quick
    tiny_run(steps=1, callbacks=[look])


def look_while_frames_end(session: Session, allocations: int) -> None:
    training, deep, over, gone = threading.get_ident(), threading.Event(), threading.Event(), threading.Event()

    class LetsGo:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            if threading.get_ident() != training:
                over.set()
                gone.wait()

    def look() -> None:
        deep.wait()
        gc.disable()
        gc.collect()
        LetsGo()
        kept = [[] for _ in range(gc.get_threshold()[0] - gc.get_count()[0] - allocations)]  # type: ignore[var-annotated]
        gc.enable()
        whereabouts(session)
        del kept
        over.set()

    def wait() -> None:
        deep.set()
        over.wait()

    thread = threading.Thread(target=look)
    thread.start()
    descend(30, wait)
    descend(60, threading.get_ident)  # other frames where the old ones were
    gone.set()
    thread.join()


def descend(calls: int, last: Callable[[], object]) -> None:
    if calls:
        descend(calls - 1, last)
    else:
        last()
