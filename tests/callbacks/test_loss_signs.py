"""The signs in a loss, and the cost of watching it."""

from __future__ import annotations

import math
import random

import pytest

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
