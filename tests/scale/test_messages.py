"""What ranks say to each other, counted for thousands of ranks: no message grows with them, and sums go along a tree."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # where torch documents it

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, Recover
from cadenza.callbacks.profile import rank_times
from cadenza.drivers import SingleDriver, group
from cadenza.drivers.base import Reduction
from cadenza.drivers.collective_check import Comparison
from cadenza.drivers.consensus import Meeting, over_store
from cadenza.drivers.first_error import Post, Posts, culprit, interval
from cadenza.drivers.group import Tree
from cadenza.drivers.thread_samples import Waits
from cadenza.engine.start_checks import check_alike
from cadenza.errors import DistributedError
from cadenza.profiling.spans import CallbackTime, PhaseTime, Timings
from cadenza.testing import launch
from tests.distributed.drivers import ddp
from tests.distributed.parts import loader, own_rank, trainer, weights_of
from tests.waiting import until


def no_message(tensor: Tensor, rank: int) -> None:
    raise AssertionError("nothing is sent here")


@pytest.mark.parametrize(("ranks", "deep"), [(2, 1), (32, 5), (1024, 10), pytest.param(4096, 12, marks=pytest.mark.long)])
def test_the_messages_of_a_rank_do_not_grow_with_the_ranks_and_those_one_after_the_other_as_their_logarithm(
    ranks: int, deep: int
) -> None:
    trees = [Tree(rank, ranks, no_message, no_message) for rank in range(ranks)]
    sent = [len(tree.children) + (tree.parent is not None) for tree in trees]
    assert max(sent) <= 3
    assert sum(sent) == 2 * (ranks - 1)
    assert all(trees[child].parent == rank for rank, tree in enumerate(trees) for child in tree.children)
    depth, rank = 0, ranks - 1
    while (above := trees[rank].parent) is not None:
        depth, rank = depth + 1, above
    assert depth == deep  # up and down: 2 * depth messages one after the other


def test_all_ranks_get_the_sum_the_maximum_and_the_minimum() -> None:
    ranks = 37
    lines: dict[tuple[int, int], SimpleQueue[Tensor]] = {
        (one, other): SimpleQueue() for one in range(ranks) for other in range(ranks)
    }
    ways = (torch.add, torch.maximum, torch.minimum)

    def send(own: int, tensor: Tensor, to: int) -> None:
        lines[own, to].put(tensor.clone())

    def receive(own: int, tensor: Tensor, source: int) -> None:
        tensor.copy_(lines[source, own].get(timeout=60))

    sums: dict[int, list[list[int]]] = {}

    def add(rank: int) -> None:
        tree = Tree(rank, ranks, partial(send, rank), partial(receive, rank))
        started = [tree.start(torch.tensor([rank, number]), way) for number, way in enumerate(ways)]
        sums[rank] = [one.tolist() for one in (arrived() for arrived in started)]

    threads = [Thread(target=add, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(range(ranks))
    assert sums == {rank: [[total, 0], [ranks - 1, 1], [0, 2]] for rank in range(ranks)}
    until(lambda: "cadenza-tree" not in [one.name for one in enumerate_threads()])  # they end with their trees


def trained(tree_from: int, directory: Path) -> tuple[Tensor, int, list[tuple[int, float]], int]:
    """Return weights, samples and what was logged; and how many rings of gloo there were besides those of DDP."""
    group._TREE_FROM = tree_from  # in this process
    rings: list[Tensor] = []

    def counted(tensor: Tensor, *values: Any, **options: Any) -> Any:
        rings.append(tensor)
        return ring(tensor, *values, **options)

    ring, dist.all_reduce = dist.all_reduce, counted

    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        if own_rank() < 2:
            run.log("a", float(own_rank()))

    one = trainer(loader(96), callbacks=[log, Evaluate(loader(20)), Recover(), Checkpoint("3 steps")], directory=directory)
    run = one.fit()
    return weights_of(one), run.progress.samples, run.history["a"] + run.history["eval/loss"], len(rings)


def test_a_run_on_four_ranks_is_the_same_along_a_tree_and_has_no_ring_of_its_own(tmp_path: Path) -> None:
    along, around = (launch(partial(trained, limit, tmp_path / str(limit)), 4) for limit in (2, 99))
    for (weights, samples, logged, rings), (expected, _, others, more) in zip(along, around, strict=True):
        assert torch.equal(weights, expected)
        assert logged == others
        assert samples == 2 * 96
        assert (rings, more > 20) == (0, True)


def test_all_drivers_of_a_process_share_one_tree_and_its_thread() -> None:
    """A process may make many trainers."""

    def threads() -> int:
        group._TREE_FROM = 2
        for _ in range(3):
            ddp().barrier()
        return [one.name for one in enumerate_threads()].count("cadenza-tree")

    assert launch(threads) == [1, 1]


def test_an_error_of_one_rank_ends_the_others_along_a_tree() -> None:
    def failing() -> str:
        group._TREE_FROM = 2

        @on(Callback.on_step_end, at=3)
        def fail(run: Run) -> None:
            if own_rank() == 3:
                raise ValueError("fails on one rank")

        with pytest.raises(Exception, match="fails on one rank") as raised:
            trainer(loader(96), callbacks=[fail]).fit()
        return type(raised.value).__name__

    assert launch(failing, 4) == ["DistributedError"] * 3 + ["ValueError"]


# -- meetings for saves ----------------------------------------------------------------------------------


def meetings() -> tuple[HashStore, Meeting, Meeting]:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    return store, *(over_store(store, "save", rank, 2) for rank in range(2))  # type: ignore[return-value]


def test_a_meeting_exchanges_values_through_the_store_and_leaves_no_keys_but_the_last() -> None:
    store, main, other = meetings()
    for number in range(20):
        assert other.gather_on_main({"rank": 1}) == []
        assert main.gather_on_main({"rank": 0}) == [{"rank": 0}, {"rank": 1}]
        assert main.broadcast(number) == other.broadcast(None) == number
    assert store.num_keys() == 1


def test_each_rank_deletes_its_own_keys_of_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main process would delete those of thousands, one after the other."""
    store, ranks, deleted = HashStore(), 8, list[str]()

    def deleting(self: Any, key: str) -> bool:
        deleted.append(key)
        return bool(delete(self, key))

    delete = HashStore.delete_key
    monkeypatch.setattr(HashStore, "delete_key", deleting)
    main, *others = [over_store(store, "save", rank, ranks) for rank in range(ranks)]
    for number in range(2):
        for other in others:
            other.gather_on_main("done")
        main.gather_on_main("done")
        before = [*deleted]
        main.broadcast(number)
        assert deleted == before
        assert [other.broadcast(None) for other in others] == [number] * (ranks - 1)
    assert len(deleted) == 2 * (ranks - 1) + 1
    assert len({*deleted}) == len(deleted)


def test_a_rank_that_is_late_in_a_meeting_ends_it_on_all_ranks_and_no_one_waits_again() -> None:
    _, main, other = meetings()
    with pytest.raises(RuntimeError, match=r"time(d )?out"):
        main.gather_on_main("in time")
    other.gather_on_main("late")
    with pytest.raises(RuntimeError, match="the exchange failed on another rank"):
        other.broadcast(None)
    for meeting in (main, other):
        with pytest.raises(RuntimeError, match="an earlier exchange of the ranks failed"):
            meeting.gather_on_main("the next save")


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_leaves_a_meeting_ends_the_wait_of_the_other(leaving: int) -> None:
    store, *both = meetings()
    store.set_timeout(timedelta(minutes=10))
    left, waits = both[leaving], both[1 - leaving]
    left.leave()

    def save() -> None:
        waits.broadcast(None)
        waits.gather_on_main(None)

    with pytest.raises(RuntimeError, match="the exchange failed on another rank: its run failed"):
        save()
    with pytest.raises(RuntimeError, match="an earlier exchange of the ranks failed: its run failed"):
        left.broadcast(None)


# -- what ranks say of themselves ----------------------------------------------------------------------

WORLDS = (2, 1024, pytest.param(4096, marks=pytest.mark.long))


class Rank(SingleDriver):
    """Rank r of W, which counts what it sends. `others` says what comes back."""

    def __init__(self, rank: int, ranks: int, first: Any) -> None:
        super().__init__("cpu")
        self.rank, self.world_size, self._first = rank, ranks, first
        self.sent: list[tuple[str, int]] = []
        self.differing: Any = None

    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor:
        self.sent.append(("reduce", value.numel()))
        return value if self._first is None else value + torch.tensor([0, 1])  # the digest of another rank is larger

    def broadcast(self, value: Any, source: int = 0) -> Any:
        self.sent.append(("broadcast", len(pickle.dumps(value))))
        return value if self.is_main else self._first

    def gather_on_main(self, value: Any) -> list[Any]:
        self.sent.append(("gather_on_main", len(pickle.dumps(value))))
        self.differing = value
        return [value, *[(10_000, {f"fact {n}": f"'{rank}'" for n in range(20)}) for rank in range(1, self.world_size)]]


@pytest.mark.parametrize("ranks", WORLDS)
def test_equal_ranks_exchange_two_numbers_and_one_that_differs_its_first_differences(ranks: int) -> None:
    driver = Rank(ranks - 1, ranks, None)
    check_alike(driver, {f"the shape of {name}": (name, 3) for name in range(100_000)})
    assert driver.sent == [("reduce", 2)]

    driver = Rank(ranks - 1, ranks, {f"fact {number}": "x" * 1000 for number in range(10_000)})
    with pytest.raises(DistributedError):
        check_alike(driver, {f"fact {number}": "y" * 1000 for number in range(10_000)})
    assert dict(driver.sent)["gather_on_main"] < 8000
    assert driver.differing[0] == 10_000

    driver = Rank(0, ranks, {})
    with pytest.raises(DistributedError, match=r"10000 differ: fact 0 is '1' on rank 1.*and 9980 more") as caught:
        check_alike(driver, {f"fact {number}": 0 for number in range(10_000)})
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_message_about_posts_is_as_long_for_any_number_of_ranks(ranks: int) -> None:
    at = [Post(11, "`F.on_step_end` (train.py:31)", Waits.YES, number=rank) for rank in range(ranks)]
    late = [replace(post, step=10, waits=Waits.NO) for post in at]
    later = [replace(post, number=post.number + 1) for post in [*at[: ranks // 2], *late[ranks // 2 :]]]
    for before in (at, later):  # the second half is behind; no rank posts any more
        for waited_s in (600, None):
            assert len(culprit(before, later, waited_s)) < 650
    assert f"rank {ranks // 2} did not reach step 12 within 600 s; last seen at step 10" in culprit(at, later, 600)
    assert ranks / interval(ranks) <= 256, "all ranks together post at most 256 times a second"


def test_posts_are_sent_by_another_thread_and_read_in_one_exchange() -> None:
    sent: list[int] = []

    class Counting(HashStore):
        def set(self, key: str, value: str) -> None:
            sent.append(len(value))
            assert threading.current_thread() is not threading.main_thread()
            super().set(key, value)

    with Posts(Counting(), "posts", rank=0, ranks=1024, look=lambda: Post(1, "`F.on_step_end` (train.py:31)")) as posts:
        until(lambda: posts.read()[0] is not None)
        assert posts.read()[0] == Post(1, "`F.on_step_end` (train.py:31)", number=1)
    assert len(sent) == 2  # the interval is four seconds; the last one says that the rank has left
    assert max(sent) < 170


@pytest.mark.parametrize("ranks", WORLDS)
def test_each_rank_sends_five_numbers_for_the_slowest_ranks(ranks: int) -> None:
    class Gathering(Rank):
        def gather_on_main(self, value: Any) -> list[Any]:
            self.differing = value
            return [[*value[:-1], float(rank)] for rank in range(ranks)]

    driver = Gathering(0, ranks, None)
    phases = tuple(PhaseTime(f"phase {number}", 1, 1.0) for number in range(100))
    hooks = tuple(CallbackTime(f"callback {number}", "on_step_end", 1, 1.0) for number in range(100))
    times = rank_times(driver, Timings(1.0, 1, phases, hooks))
    assert len(driver.differing) == len(times) == 5
    assert (times[-1].slowest, times[-1].least_s) == (ranks - 1, 0.0)


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_compared_call_needs_as_many_messages_for_any_number_of_ranks(ranks: int) -> None:
    sent: list[str] = []

    class Client:
        def __init__(self) -> None:
            self._store = HashStore()

        def __getattr__(self, name: str) -> Any:
            sent.append(name)
            return getattr(self._store, name)

    client = Client()
    client.add("calls/group/1/came", ranks - 1)  # all others are there
    posts = Posts(client, "posts", rank=0, ranks=ranks, look=lambda: Post(1, "`F.on_step_end`"))
    limits = {"limit_s": 10.0, "timeout_s": 600.0}
    one = Comparison(lambda: client, "calls", "failed", posts, lambda: ("", ""), rank=0, warn=print, **limits)
    sent.clear()
    one._meet("calls/group", 1, range(ranks), {"rank": 0, "what": "all_reduce()", "who": "", "where": ""})
    assert len(sent) == 10, sent
