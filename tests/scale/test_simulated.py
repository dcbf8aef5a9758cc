"""Runs on thousands of ranks, of which two are real: what a rank exchanges is constant, or grows as the logarithm."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from tests.scale.simulated import GUIDE, HEAD, PARTS, SIZES, Counts, column, measured, rows

Both = tuple[dict[str, Counts], dict[str, Counts]]


@pytest.fixture(scope="module")
def runs() -> dict[int, Both]:
    return {size: measured(size) for size in SIZES}


def grows(runs: dict[int, Both], which: int, look: Callable[[Counts], int], part: str, by: Callable[[int], float]) -> None:
    """Assert that a number of a rank grows with the ranks no faster than a function."""
    least = min(SIZES)
    first = look(runs[least][which][part])
    for size in SIZES:
        assert look(runs[size][which][part]) <= max(first, 1) * by(size) / by(least) * 1.05, (part, size)


@pytest.mark.parametrize("part", PARTS)
def test_the_exchanges_of_a_rank_are_constant_and_those_of_the_main_process_grow_as_the_logarithm(
    runs: dict[int, Both], part: str
) -> None:
    for look in (lambda one: one.messages, lambda one: one.bytes):
        grows(runs, 1, look, part, lambda size: 1.0)
    grows(runs, 0, lambda one: one.messages, part, math.log2)
    if part not in ("start", "save"):  # in these, each rank sends it a few bytes
        grows(runs, 0, lambda one: one.bytes, part, math.log2)
    for size in SIZES:
        assert runs[size][0][part].bytes < 10_000 + 300 * size


def test_connections_grow_as_the_logarithm_and_a_rank_leaves_as_many_keys_whatever_there_are_of_them(
    runs: dict[int, Both],
) -> None:
    for which in (0, 1):
        connections = [sum(one.connections for one in runs[size][which].values()) for size in SIZES]
        assert all(count <= 2.5 * math.log2(size) for count, size in zip(connections, SIZES, strict=True))
    keys = {sum(one.keys for both in runs[size] for one in both.values()) for size in SIZES}
    assert len(keys) == 1
    assert keys.pop() < 8
    for size in SIZES:
        most = [max(one.memory for one in runs[size][which].values()) for which in (0, 1)]
        assert max(most) < 4e6 + 1500 * size


def test_the_table_of_the_guide_is_what_was_counted(runs: dict[int, Both]) -> None:
    """``python -m tests.scale.simulated`` writes it."""
    found = [*zip(rows(), *(column(*runs[size]) for size in SIZES), strict=True)]
    table = GUIDE.read_text(encoding="utf-8").split(HEAD)[1].split("\n\n")[0]
    written = [tuple(line.strip("| ").split(" | ")) for line in table.splitlines()]
    assert [line[0] for line in written] == [line[0] for line in found]
    for line, expected in zip(written, found, strict=True):
        for cell, other in zip(line[1:], expected[1:], strict=True):
            pairs = zip(map(int, re.findall(r"\d+", cell)), map(int, re.findall(r"\d+", other)), strict=True)
            assert all(abs(one - another) <= max(1, 0.1 * another) for one, another in pairs), (line[0], cell, other)
