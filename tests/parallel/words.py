"""A small language model, and runs of it on the ranks of a mesh and on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, Evaluate
from cadenza.drivers import Driver
from cadenza.drivers.sharding import is_elsewhere, is_sharded
from tests.distributed.parts import adamw, vector, whole

WORDS, WIDTH = 12, 8
Make = Callable[[], Driver]
Compute = Callable[[nn.Module, Any], Any]


class Block(nn.Module):
    """A layer of two weights, which a plan can split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(self.norm(hidden)).relu())  # type: ignore[no-any-return]


class Words(nn.Module):
    """Words (B, T) -> scores (B, T, words)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(WORDS, WIDTH), Block(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(words)))  # type: ignore[no-any-return]


def next_words(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross entropy of each next word."""
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    return getattr(loss, "full_tensor", lambda: loss)()


def sentences(size: int, length: int = 5) -> list[Tensor]:
    """Return 24 sentences in batches of `size`."""
    words = torch.randint(0, WORDS, (24, length), generator=torch.Generator().manual_seed(1))
    return [*words.split(size)]


class Trained(NamedTuple):
    """What a run ends with, and what each rank knows then."""

    weights: Tensor
    history: dict[str, dict[int, float]]
    samples: int
    predicted: Tensor

    def check_equals(self, other: Trained) -> None:
        assert torch.allclose(self.weights, other.weights, atol=1e-6)
        assert torch.allclose(self.predicted, other.predicted, atol=1e-5)
        assert self.samples == other.samples
        assert self.history.keys() == other.history.keys()
        for name, values in other.history.items():
            assert self.history[name] == pytest.approx(values, rel=1e-5), name


def trained(
    make: Make,
    model: Callable[[], nn.Module] = Words,
    *,
    compute: Compute = next_words,
    batches: Callable[[int], Iterable[Any]] = sentences,
    size: int = 3,
    accumulate: int = 1,
    directory: Path | None = None,
    max_steps: int | None = None,
    predict: Compute | None = None,
) -> Trained:
    """Train 2 epochs, or until a step; a rank has batches of `size` samples. Every rank must call this."""
    torch.manual_seed(0)
    driver = make()
    trainer = Trainer(
        model(), adamw, batches(size), compute,
        max_epochs=2, max_steps=max_steps, seed=1, accumulate=accumulate, driver=driver, progress=False, directory=directory,
        callbacks=[
            ClipGradients(0.5, log="norm", log_every="1 step"), Evaluate(batches(5), every="2 steps"),
            *([] if directory is None else [Ema(0.5), Checkpoint("100 steps")]),
        ],
    )  # fmt: skip
    run = trainer.fit(resume="auto" if directory is not None else False)
    history = {name: dict(run.history[name]) for name in run.history.names}
    predicted = trainer.predict(
        batches(5), compute=predict or (lambda model, batch: _whole(model(batch[:, :-1]))), everywhere=True
    )
    return Trained(_weights(trainer), history, run.progress.samples, predicted)


def _weights(trainer: Trainer) -> Tensor:
    """Return all weights as one vector, also those of other stages. Every rank must call this."""
    parts = [None if is_sharded(weight) and is_elsewhere(weight) else whole(weight) for weight in trainer.model.parameters()]
    everyone = trainer.driver.gather(parts)
    return vector(next(part for part in same if part is not None) for same in zip(*everyone, strict=True))


def _whole(scores: Any) -> Tensor:
    return getattr(scores, "full_tensor", lambda: scores)()  # type: ignore[no-any-return]
