"""Layers in stages on different ranks: they train as one process does, and checkpoints go between all layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cadenza import export_weights, save_weights
from cadenza.drivers import Driver
from cadenza.errors import DataError, LossError, StateError
from cadenza.parallel import Mesh, Parallel, Pipeline
from tests.distributed.drivers import fsdp, single
from tests.distributed.parts import refusal
from tests.distributed.standing import on_ranks
from tests.distributed.standing import standing_ranks as standing_ranks
from tests.parallel.words import WIDTH, WORDS, Block, sentences, trained


class Chain(nn.Module):
    """Words (B, T) -> scores (B, T, words), in a chain of four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).clone()  # type: ignore[no-any-return]  # FSDP warns of views


class Counting(nn.Linear):
    """A layer with a buffer that checkpoints hold."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(()))


STAGES = {
    2: [["embedding", "blocks.0"], ["blocks.[123]", "head"]],
    4: [["embedding", "blocks.0"], "blocks.1", "blocks.2", ["blocks.3", "head"]],
}


def of_words(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.mT, targets)


def pairs(size: int) -> list[tuple[Tensor, Tensor]]:
    return [(words[:, :-1], words[:, 1:]) for words in sentences(size)]


def pipeline(stages: int = 2, microbatches: int = 4, schedule: Any = "1F1B") -> Pipeline:
    return Pipeline(cast("Any", STAGES[stages]), of_words, microbatches=microbatches, schedule=schedule)


def run(sizes: dict[str, int] | Callable[[], Driver], *, schedule: Any = "1F1B", **options: Any) -> Any:
    compute = pipeline(2 if callable(sizes) else sizes["pipeline"], schedule=schedule)
    make = sizes if callable(sizes) else lambda: Parallel(Mesh(**sizes), "cpu", pipeline=compute, shard=Block, timeout_s=100)
    return trained(make, Chain, compute=compute, batches=pairs, size=4, predict=compute.predict, **options)


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({"pipeline": 4}, "1F1B"),
        ({"pipeline": 2, "shard": 2}, "GPipe"),
        pytest.param({"pipeline": 2, "shard": 2}, "1F1B", marks=pytest.mark.long),
        pytest.param({"pipeline": 2, "data": 2}, "1F1B", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stages_train_as_one_process(sizes: dict[str, int], schedule: str) -> None:
    data = 4 // sizes["pipeline"]
    expected = run(single, accumulate=2)
    for got in on_ranks(lambda: run(sizes, schedule=schedule, accumulate=2 // data), 4):
        got.check_equals(expected)


LAYOUTS: dict[str, tuple[int, int, dict[str, int] | Callable[[], Driver]]] = {
    "2x2": (4, 1, {"pipeline": 2, "shard": 2}),
    "single": (1, 2, single),
    "two": (2, 2, {"pipeline": 2}),
    "fsdp": (2, 1, fsdp),
    "four": (4, 2, {"pipeline": 4}),
}
"""By name, a number of ranks, the batches of a rank in a step, and the dimensions or the driver."""


def leg(layout: str, directory: Path, max_steps: int) -> Tensor:
    ranks, accumulate, sizes = LAYOUTS[layout]

    def work() -> Tensor:
        weights: Tensor = run(sizes, accumulate=accumulate, directory=directory, max_steps=max_steps).weights
        return weights

    return work() if ranks == 1 else on_ranks(work, ranks)[0]


def test_a_run_goes_on_in_the_same_layout_to_the_same_bits(tmp_path: Path) -> None:
    whole = leg("2x2", tmp_path / "whole", 4)
    leg("2x2", tmp_path / "cut", 2)
    assert torch.equal(leg("2x2", tmp_path / "cut", 4), whole)


def test_checkpoints_of_stages_go_to_all_other_layouts(tmp_path: Path) -> None:
    for steps, layout in enumerate(LAYOUTS, 1):
        got = leg(layout, tmp_path / "moved", steps)
    assert torch.allclose(got, leg("single", tmp_path / "alone", 5), atol=1e-6)
    export_weights(tmp_path / "moved", tmp_path / "weights.safetensors")
    names = load_file(tmp_path / "weights.safetensors")
    assert torch.equal(torch.cat([names[name].flatten() for name, _ in Chain().named_parameters()]), got)


def test_mistakes_are_reported_before_the_first_step() -> None:
    def report() -> list[str]:
        def placed(stages: Any, model: nn.Module | None = None, **options: Any) -> str:
            compute = Pipeline(stages, of_words, **{"microbatches": 2, **options})
            return refusal(lambda: Parallel(Mesh(pipeline=2), "cpu", pipeline=compute).prepare(model or Chain()))

        short = pipeline()
        model = Parallel(Mesh(pipeline=2), "cpu", pipeline=short).prepare(Chain())
        words = torch.zeros(6, 4, dtype=torch.long)
        with pytest.raises(DataError) as caught:
            short(model, (words, words))
        with pytest.raises(LossError, match="Give the Pipeline to Trainer as compute_loss"):
            model(words)
        with pytest.raises(StateError, match="this rank has no part of a tensor of another stage"):
            save_weights(model, "weights.safetensors")
        assert not placed(["0", "1"], nn.Sequential(Counting(), nn.Linear(2, 2)))
        return [
            str(caught.value),
            refusal(lambda: Pipeline(["head"], of_words, microbatches=2)),
            refusal(lambda: pipeline(schedule="2F2B")),
            refusal(lambda: Parallel(Mesh(pipeline=2), "cpu")),
            refusal(lambda: Parallel(Mesh(shard=2), "cpu", pipeline=pipeline())),
            placed(["embedding", "blocks.*", "head"]),
            placed(["embedding", "head"]),
            placed([["embedding", "blocks.*"], ["blocks.3", "head"]]),
            placed([["embedding", "block.*"], "head"]),
            placed([["embedding", "blocks.*"], "head"], microbatches=1),
            placed(["0", "1"], nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
            placed(["0", "1"], nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))),
            placed(["0", "2"], nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))),
            placed([["0", "1"], ["1", "2"]], nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))),
            placed([["0", "1"], ["1.0", "2"]], nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()), nn.Linear(2, 2))),
            placed(["0", "1"], nn.Sequential(nn.Linear(2, 2), nn.Sequential(Counting()))),
        ]

    expected = [
        "a batch has 6 samples, which 4 microbatches do not divide. Use another batch_size with drop_last=True",
        "stages must be a sequence of at least two choices of modules; got ['head']",
        "schedule must be one of 1F1B, GPipe, or a class of torch; got '2F2B'",
        "Mesh(pipeline=2) has pipeline=2, and nothing uses it. Give Parallel(pipeline=...)",
        "pipeline= needs multiple ranks along 'pipeline'; got Mesh(shard=2).",
        "Pipeline has 3 stages, and the mesh has pipeline=2",
        "no stage of the pipeline has blocks.0.norm.weight, blocks.0.norm.bias",
        "blocks.3.norm.weight belongs to stages 0 and 1. A weight must be in one stage.",
        "stages[0]: no module of the model matches 'block.*'.",
        "schedule='1F1B' needs at least as many microbatches as stages, 2; got 1.",
        "1 keeps running statistics, and a stage sees microbatches.",
        "1.1 keeps running statistics, and a stage sees microbatches.",
        "no stage of the pipeline has 1: each rank would compute it.",
        "1 belongs to stages 0 and 1. A module must be in one stage.",
        "1.0 belongs to stages 0 and 1. A module must be in one stage.",
        "stage 1 has 1.0.seen, and checkpoints have the buffers of stage 0 alone.",
    ]
    for texts in on_ranks(report):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start)
