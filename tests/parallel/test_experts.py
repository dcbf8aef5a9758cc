"""A mixture of experts, of which each rank has some: it trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

from cadenza.drivers import Driver
from cadenza.parallel import Mesh, Parallel
from tests.distributed.drivers import ddp, fsdp, single
from tests.distributed.parts import refusal
from tests.distributed.standing import on_ranks
from tests.distributed.standing import standing_ranks as standing_ranks
from tests.parallel.words import WIDTH, WORDS, trained

EXPERTS = 4


class Experts(nn.Module):
    """Computes rows (N, width), each with one of the experts, which are on the ranks of a group."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *size) / 4) for size in ((WIDTH, 16), (16, WIDTH)))

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        sorted_rows, counts = rows[order], torch.bincount(chosen, minlength=EXPERTS)
        if self.mesh is None or not isinstance(self.up, DTensor):
            return self.compute(sorted_rows, counts, self.up, self.down)[order.argsort()]
        group = self.mesh["expert"].get_group()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (some.view(group.size(), -1).sum(1).tolist() for some in (counts, arriving))
        there = all_to_all_single_autograd(sorted_rows, received, sent, group)
        back = self.compute(there, arriving, self.up.to_local(), self.down.to_local())  # type: ignore[attr-defined]
        return all_to_all_single_autograd(back, sent, received, group)[order.argsort()]

    @staticmethod
    def compute(rows: Tensor, counts: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Compute rows that are sorted by the ranks that sent them, and by experts."""
        expert = torch.arange(len(counts)).remainder(len(up)).repeat_interleave(counts)
        hidden = torch.einsum("nd,ndh->nh", rows, up[expert]).relu()
        return torch.einsum("nh,nhd->nd", hidden, down[expert])


class Mixture(nn.Module):
    """Words (B, T) -> scores (B, T, words), with a layer of experts."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.embedding, self.router, self.experts = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, EXPERTS), Experts(mesh)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        rows = hidden.flatten(0, 1)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        added = weight[:, None] * self.experts(rows, chosen)
        scores: Tensor = self.head(hidden + added.view_as(hidden))
        return scores.clone()  # FSDP warns of views


def on_mesh(**sizes: int) -> tuple[Mesh, Callable[[], Parallel]]:
    mesh = Mesh(**sizes)
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    options: Any = {"tensor": plan} if mesh.sizes["tensor"] > 1 else {}
    return mesh, lambda: Parallel(mesh, "cpu", experts="experts", timeout_s=100, **options)


LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "2x2": (4, {"shard": 2, "expert": 2}),
    "replicated": (4, {"data": 2, "expert": 2}),
    "expert": (2, {"expert": 2}),
    "tensor": (2, {"expert": 2, "tensor": 2}),
}
"""By name, a number of ranks with different batches, and the dimensions."""
OTHERS: dict[str, tuple[int, Callable[[], Driver]]] = {"fsdp": (2, fsdp), "ddp": (2, ddp), "single": (1, single)}


@pytest.mark.parametrize(
    "layout", ["2x2", "tensor", *(pytest.param(name, marks=pytest.mark.long) for name in ("replicated", "expert"))]
)
def test_experts_on_ranks_train_as_one_process(layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]

    def work() -> Any:
        mesh, make = on_mesh(**sizes)
        return trained(make, lambda: Mixture(mesh), accumulate=1)

    expected = trained(single, Mixture, accumulate=ranks)
    for got in on_ranks(work, ranks * sizes.get("tensor", 1)):
        got.check_equals(expected)


def leg(layout: str, directory: Path, max_steps: int) -> Tensor:
    sizes = LAYOUTS[layout][1] if layout in LAYOUTS else {}
    ranks = LAYOUTS[layout][0] if sizes else OTHERS[layout][0]

    def work() -> Tensor:
        mesh, make = on_mesh(**sizes) if sizes else (None, OTHERS[layout][1])
        model = lambda: Mixture(mesh)  # noqa: E731
        return trained(make, model, accumulate=4 // ranks, directory=directory, max_steps=max_steps).weights

    return work() if layout == "single" else on_ranks(work, ranks * sizes.get("tensor", 1))[0]


def test_a_run_goes_on_in_the_same_layout_to_the_same_bits_and_in_other_layouts(tmp_path: Path) -> None:
    whole = leg("2x2", tmp_path / "whole", 4)
    leg("2x2", tmp_path / "cut", 2)
    assert torch.equal(leg("2x2", tmp_path / "cut", 4), whole)
    for steps, layout in enumerate((*LAYOUTS, *OTHERS), 1):
        got = leg(layout, tmp_path / "moved", steps)
    assert torch.allclose(got, leg("single", tmp_path / "alone", 7), atol=1e-6)


def test_mistakes_are_reported_before_the_first_step() -> None:
    def report() -> list[str]:
        mesh = Mesh(expert=2)
        return [
            refusal(lambda: Parallel(mesh, "cpu")),
            refusal(lambda: Parallel(Mesh(shard=2), "cpu", experts="experts")),
            refusal(lambda: Parallel(mesh, "cpu", experts="expert").prepare(Mixture(mesh))),
            refusal(lambda: Parallel(mesh, "cpu", experts="*.0").prepare(nn.Sequential(nn.Sequential(nn.Linear(2, 3))))),
        ]

    for unused, no_ranks, no_module, uneven in on_ranks(report):
        assert unused.startswith("Mesh(expert=2) has expert=2, and nothing uses it. Give Parallel(experts=...)")
        assert no_ranks.startswith("experts= needs multiple ranks along 'expert'; got Mesh(shard=2).")
        assert no_module.startswith("experts: no module of the model matches 'expert'. Did you mean 'experts'")
        assert "that is divisible by expert=2; got the shape (3, 2)" in uneven
