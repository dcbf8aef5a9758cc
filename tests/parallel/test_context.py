"""Sequences in parts: attention over all ranks that have them trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

from cadenza.errors import DataError
from cadenza.parallel import Mesh, Parallel
from tests.distributed.drivers import fsdp, single
from tests.distributed.parts import refusal
from tests.distributed.standing import on_ranks
from tests.distributed.standing import standing_ranks as standing_ranks
from tests.parallel.words import WIDTH, WORDS, sentences, trained

LENGTH = 8


class Attention(nn.Module):
    """Words and their positions (B, T) -> scores (B, T, words)."""

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mixed, self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, positions: Tensor) -> Tensor:
        hidden = self.words(words) + self.positions(positions)
        parts = self.mixed(hidden).unflatten(-1, (3, 2, -1)).movedim(2, 0).transpose(2, 3)  # (3, B, heads, T, width)
        query, key, value = parts
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.head(hidden + seen.transpose(1, 2).flatten(2)).clone()  # type: ignore[no-any-return]


def masked(size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return batches of words, positions and the words to find; -1 for none. Parts have different numbers of them."""
    found = []
    for words in sentences(size, LENGTH):
        targets = torch.where((words + torch.arange(LENGTH)) % 3 > 0, words.roll(1, 1), -1)
        targets[:, :2] = -1
        found.append((words, torch.arange(LENGTH).expand_as(words), targets))
    return found


def of_all_tokens(mesh: Mesh | None) -> Callable[[nn.Module, Any], Tensor]:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        words, positions, targets = batch
        losses: Tensor = nn.functional.cross_entropy(model(words, positions).mT, targets, ignore_index=-1, reduction="none")
        if mesh is None:
            mean: Tensor = losses.sum() / (targets >= 0).sum()
            return mean
        return mesh.mean(losses, where=targets >= 0)

    return compute


def scores_of(mesh: Mesh | None) -> Callable[[nn.Module, Any], Tensor]:
    def predict(model: nn.Module, batch: Any) -> Tensor:
        scores: Tensor = model(*batch[:2])
        return scores if mesh is None else context_parallel_unshard(mesh["context"], [scores], [1])[0]

    return predict


def run(mesh: Mesh | None, make: Any, **options: Any) -> Any:
    with sdpa_kernel(SDPBackend.MATH):  # gloo can run this one
        return trained(make, Attention, compute=of_all_tokens(mesh), batches=masked, predict=scores_of(mesh), **options)


def in_parts(**sizes: int) -> tuple[Mesh, Callable[[], Parallel]]:
    mesh = Mesh(**sizes)
    return mesh, lambda: Parallel(mesh, "cpu", sequence=1, timeout_s=100)


@pytest.mark.parametrize(
    "sizes",
    [{"shard": 2, "context": 2}, {"context": 2}, pytest.param({"data": 2, "context": 2}, marks=pytest.mark.long)],
    ids=str,
)
def test_sequences_in_parts_train_as_one_process(sizes: dict[str, int]) -> None:
    ranks = 2 if len(sizes) == 1 else 4

    def work() -> Any:
        return run(*in_parts(**sizes), accumulate=4 // ranks)

    expected = run(None, single, accumulate=2)
    for got in on_ranks(work, ranks):
        got.check_equals(expected)


def test_a_run_goes_on_in_the_same_layout_to_the_same_bits_and_in_other_layouts(tmp_path: Path) -> None:
    def leg(folder: str, max_steps: int, **sizes: int) -> Tensor:
        mesh, make = in_parts(**sizes) if sizes else (None, fsdp)
        weights: Tensor = run(mesh, make, directory=tmp_path / folder, max_steps=max_steps).weights
        return weights

    def on_four() -> tuple[Tensor, Tensor]:
        sizes = {"shard": 2, "context": 2}
        whole = leg("whole", 5, **sizes)
        leg("cut", 2, **sizes)
        return whole, leg("cut", 5, **sizes)

    whole, resumed = on_ranks(on_four, 4)[0]
    assert torch.equal(resumed, whole)
    expected: Tensor = run(None, single, accumulate=2, max_steps=7).weights
    on_ranks(lambda: leg("cut", 6), 2)
    assert torch.allclose(run(None, single, accumulate=2, max_steps=7, directory=tmp_path / "cut").weights, expected, atol=1e-6)


def test_the_attention_of_torch_is_split_during_runs_only_and_mistakes_are_reported() -> None:
    def report() -> tuple[list[str], bool]:
        before = nn.functional.scaled_dot_product_attention
        mesh, make = in_parts(context=2)
        run(mesh, make, accumulate=2, max_steps=1)
        driver = make()
        errors = [
            refusal(lambda: Parallel(mesh, "cpu")),
            refusal(lambda: Parallel(mesh, "cpu", sequence=-1)),
            refusal(lambda: Parallel(Mesh(shard=2), "cpu", sequence=1)),
        ]
        for batch in (torch.ones(2, 6), [torch.ones(2, 8), torch.ones(2, 4)], torch.ones(8)):
            with pytest.raises(DataError) as caught:
                driver.to_device(batch)
            errors.append(str(caught.value))
        return errors, nn.functional.scaled_dot_product_attention is before

    for errors, same in on_ranks(report):
        unused, negative, no_ranks, odd, uneven, nothing = errors
        assert same
        assert unused.startswith("Mesh(context=2) has context=2, and nothing uses it. Give Parallel(sequence=...)")
        assert negative.startswith("sequence must be a dimension of the tensors of a batch, such as 1; got -1")
        assert no_ranks.startswith("sequence= needs multiple ranks along 'context'; got Mesh(shard=2).")
        assert odd.endswith("divisible by 4, twice the ranks along 'context'; got [(2, 6)]. Pad them.")
        assert uneven.endswith("got [(2, 8), (2, 4)]. Pad them.")
        assert nothing.endswith("got []. Pad them.")


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="causal attention in parts has kernels of CUDA alone: it waits for NCCL"
)
def test_causal_attention_in_parts_trains_as_one_process() -> None:
    def work(mesh: Mesh | None, make: Any, accumulate: int) -> Any:
        model = lambda: Attention(causal=True)  # noqa: E731
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return trained(
                make, model, compute=of_all_tokens(mesh), batches=masked, predict=scores_of(mesh), accumulate=accumulate
            )

    def on_mesh() -> Any:
        mesh = Mesh(context=2)
        return work(mesh, lambda: Parallel(mesh, "cuda", sequence=1), 2)

    expected = on_ranks(lambda: work(None, lambda: fsdp(), 2), 1)[0]
    for got in on_ranks(on_mesh, 2):
        got.check_equals(expected)
