"""Sums over many ranks along a tree: how many messages there are, and that they are the sums."""

from __future__ import annotations

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

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, Recover
from cadenza.drivers import group
from cadenza.drivers.tree import Tree
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
