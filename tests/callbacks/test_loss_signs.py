"""The signs in a loss, and the cost of watching it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback
from cadenza.callbacks import Capsule, Checkpoint, Recover
from cadenza.callbacks.loss_signs import NonFinite, Sign, Spike, Watch
from cadenza.testing import launch, tiny_trainer


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


def given(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).sum() * 0 + batch[1].mean()
    return loss


def seen_after_a_resume(path: Path, before: Callback, after: Callback) -> list[tuple[str, int]]:
    """Return what is decided after a resume at step 12, five steps before a spike."""
    loader = [(torch.ones(2, 1), torch.full((2, 1), 1 + number % 3 / 10 + 50 * (number == 16))) for number in range(20)]
    for steps, callback in ((12, before), (20, after)):
        callbacks = [callback, Checkpoint("4 steps")]
        run = tiny_trainer(
            epochs=None, steps=steps, loader=loader, directory=path, compute_loss=given, callbacks=callbacks
        ).fit(resume="auto")
    return [(one.what, one.when.step) for one in run.decisions if one.what in ("capsule written", "rolled back")]


@pytest.mark.parametrize("after", [Spike(), NonFinite() | Spike(), Spike(window=12), Spike(ratio=2) | Spike(window=90)])
@pytest.mark.parametrize("callback", [Capsule, Recover])
def test_a_continued_run_goes_on_with_the_losses_of_its_checkpoint(callback: Any, after: Sign, tmp_path: Path) -> None:
    what = "capsule written" if callback is Capsule else "rolled back"
    for before in (Spike(), NonFinite() | Spike(window=30)):
        assert seen_after_a_resume(tmp_path / repr(before), callback(when=before), callback(when=after)) == [(what, 16)]


def test_a_sign_that_the_checkpoint_does_not_have_begins_without_losses(tmp_path: Path) -> None:
    assert seen_after_a_resume(tmp_path, Recover(when=NonFinite()), Recover(when=Spike())) == []


def test_on_two_ranks_each_goes_on_with_its_own_losses(tmp_path: Path) -> None:
    def losses(steps: int) -> list[float]:
        capsule = Capsule(when=Spike())
        loader = [(torch.ones(2, 1), torch.full((2, 1), float(number))) for number in range(1, 25)]
        tiny_trainer(
            epochs=None, steps=steps, loader=loader, directory=tmp_path, compute_loss=given, driver="auto",
            callbacks=[capsule, Checkpoint("2 steps")],
        ).fit(resume="auto")  # fmt: skip
        kept: list[float] = capsule.state_dict()["Spike 1"]["losses"]
        return kept

    assert launch(lambda: losses(6)) == [[1, 3, 5, 7, 9, 11], [2, 4, 6, 8, 10, 12]]
    assert launch(lambda: losses(9)) == [[1, 3, 5, 7, 9, 11, 13, 15, 17], [2, 4, 6, 8, 10, 12, 14, 16, 18]]
    assert launch(lambda: losses(9)) == [[1, 3, 5, 7, 9, 11, 13, 15, 17], [2, 4, 6, 8, 10, 12, 14, 16, 18]]


def test_callbacks_with_the_same_sign_do_not_see_the_losses_of_each_other() -> None:
    sign = NonFinite() | Spike(window=4)
    capsule, recover = Capsule(when=sign), Recover(when=sign)
    for _ in range(4):
        capsule.when.add(1.0)
    assert capsule.when.seen_in(9.0) is not None
    assert recover.when.seen_in(9.0) is None
    assert sign.seen_in(9.0) is None
