"""The signs in a loss, and the cost of watching it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from cadenza.callbacks import Capsule, Recover
from cadenza.callbacks.loss_signs import NonFinite, Sign, Spike, Watch


@pytest.mark.parametrize("make", [NonFinite, Spike, lambda: NonFinite() | Spike(window=7), lambda: Spike(ratio=1.1, window=4)])
def test_a_watched_sign_sees_what_it_sees_in_each_loss_alone(make: type[Sign]) -> None:
    draw = random.Random(1)
    sign, watch, seen = make(), Watch(make()), 0
    for _ in range(3000):
        loss = draw.choice([draw.gauss(1, 0.1)] * 40 + [draw.gauss(0, 3), 9.0, math.nan, math.inf, -math.inf, 1e308])
        expected = sign.seen_in(loss)
        if expected is None:
            sign.add(loss)
        assert watch.look(loss) == expected
        seen += expected is not None
    assert seen > 50


def test_a_sign_of_a_user_gets_each_loss() -> None:
    class Rising(NonFinite):
        last = math.inf

        def seen_in(self, loss: float) -> str | None:
            return "it rose" if loss > self.last else None

        def add(self, loss: float) -> None:
            self.last = loss

    watch = Watch(Rising() | Spike())
    assert [watch.look(loss) for loss in (3.0, 2.0, 2.5, 2.0)] == [None, None, "it rose", None]


def squared(draw: random.Random, count: int) -> float:
    return sum(draw.gauss(0, 1) ** 2 for _ in range(count)) / count


def entropy(draw: random.Random, count: int) -> float:
    """Return the mean cross entropy of samples that a model knows well, of which 3 % have a wrong label."""
    margins = [draw.gauss(4, 2) * (-1 if draw.random() < 0.03 else 1) for _ in range(count)]
    return sum(math.log1p(math.exp(-margin)) for margin in margins) / count


@pytest.mark.parametrize(
    ("loss", "count"), [(squared, 1), (squared, 2), (squared, 16), (entropy, 16)], ids=["one", "two", "many", "labels"]
)
def test_losses_of_small_batches_and_wrong_labels_are_no_spikes_and_a_broken_batch_is_one(loss: Any, count: int) -> None:
    draw, spike = random.Random(3), Spike()
    for number in range(3000):
        if number % 500 == 499:
            assert spike.seen_in(400 * max(1.0, *(loss(draw, count) for _ in range(50)))) is not None
        value = loss(draw, count)
        assert spike.seen_in(value) is None, (number, value)
        spike.add(value)
    for tiny in (5e-324, 1e308, 5e-324, 1e308) * 20:
        spike.add(tiny)
    assert spike.seen_in(1.0) is None


def test_callbacks_with_the_same_sign_do_not_see_the_losses_of_each_other() -> None:
    sign = NonFinite() | Spike(window=4)
    capsule, recover = Capsule(when=sign), Recover(when=sign)
    for _ in range(4):
        capsule.when.add(1.0)
    assert capsule.when.seen_in(9.0) is not None
    assert recover.when.seen_in(9.0) is None
    assert sign.seen_in(9.0) is None
