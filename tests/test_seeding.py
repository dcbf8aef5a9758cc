"""Random numbers: seeded together, and put back as they were."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from cadenza import Callback, on
from cadenza.seeding import seed_all, streams_kept
from cadenza.testing import tiny_run


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(()).item()


def test_one_seed_sets_all_generators() -> None:
    seed_all(2**40 + 3)
    first = draw()
    seed_all(2**40 + 3)
    assert draw() == first


def test_streams_are_kept_also_when_an_error_comes_out() -> None:
    seed_all(1)
    expected = draw()
    seed_all(1)

    def fail() -> None:
        with streams_kept():
            draw()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert draw() == expected


def test_a_run_with_a_seed_starts_from_it_each_time_and_one_without_leaves_the_generators_alone() -> None:
    drawn: list[float] = []
    look = on(Callback.on_fit_start)(lambda run: drawn.append(torch.rand(()).item()))
    for seed in (5, 5, None, None):
        tiny_run(seed=seed, steps=1, callbacks=[look])
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
