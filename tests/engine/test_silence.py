"""Quiet windows: for how many steps ranks exchange nothing; and where the training thread of a rank is."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Sequence

import torch

from cadenza import Callback, Run, on
from cadenza.drivers.group import Tree
from cadenza.drivers.thread_samples import Waits
from cadenza.engine.error_context import whereabouts
from cadenza.engine.rank_sync import Silence
from cadenza.engine.session import Session, session_of
from cadenza.testing import launch, tiny_run
from tests.waiting import until


def quiet_steps(expected: Sequence[float], pace_s: float) -> list[int]:
    """Return the steps of a quiet window, of ranks that expect so many steps without a call, after step 1."""
    window = Silence()
    votes = [sum(each) for each in zip(*map(window.votes, expected), strict=True)]
    window.agree(votes, len(expected), 1, pace_s)
    return [step for step in range(2, 200) if window.covers(step)]


def test_a_quiet_window_ends_at_the_next_call_on_all_ranks() -> None:
    assert quiet_steps([47, 47], 0.001) == [*range(2, 49)]
    assert quiet_steps([1, 1], 0.001) == [2]
    assert quiet_steps([0, 0], 0.001) == quiet_steps([-1, -1], 0.001) == []
    assert quiet_steps([math.inf, math.inf], 0.01) == [*range(2, 27)]  # 25 steps take a quarter of a second
    assert quiet_steps([47, 9], 0.001) == quiet_steps([9, 8, math.inf], 0.001) == []


def test_a_slow_step_is_forgotten_at_the_next_exchange() -> None:
    """However long it took: ranks are quiet again two steps later."""
    window, votes = Silence(), [2 * one for one in Silence.votes(100)]
    for step, elapsed_s in enumerate((0.001, 60.001, 60.002), 1):  # the second one takes a minute
        window.agree(votes, 2, step, elapsed_s)
        assert window.covers(step + 1) is (step != 2)


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


def test_a_collection_while_frames_are_read_does_not_let_them_go() -> None:
    """Python 3.11 would crash: it collects inside `frame.f_back`, and a finalizer may let the training thread go on."""

    def train() -> None:
        @on(Callback.on_step_end)
        def look(run: Run) -> None:
            for allocations in range(40):  # until the collection: the frames are reached after some twenty
                look_while_frames_end(session_of(run), allocations)

        tiny_run(steps=1, callbacks=[look])

    launch(train, 1)  # the collections are quick there: what this process has is frozen


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
