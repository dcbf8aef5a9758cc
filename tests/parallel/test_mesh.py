"""A mesh of named dimensions, its ranks, and layers and losses that ranks compute in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from cadenza import Trainer
from cadenza.drivers import Driver, FsdpDriver
from cadenza.parallel import Mesh, Parallel, Pipeline
from tests.distributed.drivers import Block as Layer
from tests.distributed.drivers import blocks, ddp, fsdp, single
from tests.distributed.parts import refusal, trainer, weights_of
from tests.distributed.standing import on_ranks
from tests.distributed.standing import standing_ranks as standing_ranks
from tests.parallel.words import Block, next_words, trained

PLAN: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "*.norm": SequenceParallel(),
    "*.up": ColwiseParallel(input_layouts=Shard(1)),
    "*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
"""Tensor and sequence parallel: between the layers, each rank has some positions; the scores are split by words."""


def in_parts(**sizes: int) -> Parallel:
    return Parallel(Mesh(**sizes), "cpu", tensor=PLAN, loss_parallel=True, shard=Block, timeout_s=100)


# -- sizes -------------------------------------------------------------------------------------------


def test_ranks_with_the_same_batches_follow_from_the_mesh() -> None:
    def places() -> tuple[int, int, bool, int, int, dict[str, int]]:
        mesh = Mesh(data=2, tensor=-1)
        driver = Parallel(mesh, "cpu", tensor=PLAN)
        return (
            driver.data_rank,
            driver.data_world_size,
            driver.counts,
            mesh["data"].get_local_rank(),
            mesh["tensor"].size(),
            mesh.sizes,
        )

    sizes = {"data": 2, "shard": 1, "expert": 1, "context": 1, "pipeline": 1, "tensor": 2}
    assert on_ranks(places, 4) == [
        (0, 2, True, 0, 2, sizes), (0, 2, False, 0, 2, sizes), (1, 2, True, 1, 2, sizes), (1, 2, False, 1, 2, sizes),
    ]  # fmt: skip


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "ranks": (lambda: Mesh(data=2, tensor=3), r"Mesh\(data=2, tensor=3\) has 6 ranks, and this run has 2 ranks. Set one"),
    "one": (Mesh, r"Mesh\(\) has 1 rank, and this run has 2 ranks"),
    "rest": (lambda: Mesh(data=-1, tensor=4), "the other sizes have 4 ranks, which do not divide the 2 ranks"),
    "two rests": (lambda: Mesh(data=-1, shard=-1), "one dimension may be -1, .*; got data and shard"),
    "zero": (lambda: Mesh(data=0), "data must be at least 1, or -1 for the rest; got 0"),
    "text": (lambda: Mesh(data=cast("Any", "2")), "data must be a number of ranks, or -1 for the rest; got '2'"),
    "no mesh": (lambda: Parallel(cast("Any", 2)), r"mesh must be a Mesh\(data=..., shard=..., ...\); got 2"),
    "unused": (lambda: Parallel(Mesh(tensor=2)), "has tensor=2, and nothing uses it. Give Parallel"),
    "no ranks": (lambda: Parallel(Mesh(shard=2), tensor=PLAN), "tensor= needs multiple ranks along 'tensor'"),
    "no layers": (lambda: Parallel(Mesh(shard=2), loss_parallel=True), "needs layers that are split over 'tensor'"),
    "twice": (lambda: Parallel(Mesh(shard=2), replicas=2), "Parallel takes replicas from the mesh"),
    "no such option": (lambda: Parallel(Mesh(shard=2), shards=Block), "unexpected keyword argument 'shards'"),
    "no such module": (lambda: split({"heads": ColwiseParallel()}), "no module of the model matches 'heads'"),
    "no dimension": (lambda: Mesh(shard=2)["tensor"], "with multiple ranks, shard; got 'tensor'"),
    "not connected": (lambda: Mesh(shard=2)["shard"], "has no process groups yet. Make Parallel"),
}  # fmt: skip


REST: dict[str, dict[str, Any]] = {
    "data": {},
    "pipeline": {"pipeline": Pipeline(["0", "1"], nn.functional.mse_loss, microbatches=2)},
    "tensor": {"tensor": {"0": ColwiseParallel()}, "loss_parallel": True},
    "context": {"sequence": 1},
    "expert": {"experts": "0"},
}
"""By the dimension with the rest of the ranks, what uses it."""


def test_a_script_for_the_rest_of_the_ranks_runs_in_one_process() -> None:
    def losses(dimension: str, uses: dict[str, Any]) -> list[float]:
        torch.manual_seed(0)
        model, driver = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Parallel(Mesh(**{dimension: -1}), "cpu", **uses)
        compute = uses.get("pipeline", lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        batches, sgd = [(torch.ones(4, 2), torch.zeros(4, 2))] * 2, partial(torch.optim.SGD, lr=0.1)
        run = Trainer(model, sgd, batches, compute, max_epochs=1, driver=driver, progress=False).fit()
        return [loss for _, loss in run.history["train/loss"]]

    [(alone, *others)] = on_ranks(lambda: [losses(*some) for some in REST.items()], 1)
    assert others == [alone] * 4


def split(plan: dict[str, ParallelStyle]) -> nn.Module:
    return Parallel(Mesh(tensor=2), "cpu", tensor=plan).prepare(blocks())


def test_mistakes_are_reported_at_once() -> None:
    def report() -> None:
        for wrong, message in WRONG.values():
            with pytest.raises((TypeError, ValueError, KeyError, RuntimeError), match=message):
                wrong()

    on_ranks(report)


def test_dimensions_that_are_not_supported_together_are_reported() -> None:
    def report() -> list[str]:
        compute = Pipeline(["embedding", "head"], nn.functional.mse_loss, microbatches=2)
        return [
            refusal(lambda: Parallel(Mesh(context=2, expert=2), "cpu", sequence=1, experts="*")),
            refusal(lambda: Parallel(Mesh(pipeline=2, expert=2), "cpu", pipeline=compute, experts="*")),
            refusal(lambda: Parallel(Mesh(pipeline=2, tensor=2), "cpu", pipeline=compute, tensor=PLAN)),
        ]

    for texts in on_ranks(report, 4):
        for text, names in zip(texts, ("context and expert", "pipeline and expert", "pipeline and tensor"), strict=True):
            assert text.startswith(f"{names} are not supported together; got Mesh(")


# -- layers and losses in parts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{"shard": 2, "tensor": 2}, {"data": 2, "tensor": 2}, pytest.param({"tensor": 4}, marks=pytest.mark.long)], ids=str
)
def test_layers_sequences_and_losses_in_parts_train_as_one_process(sizes: dict[str, int]) -> None:
    data = 4 // sizes["tensor"]
    expected = trained(single, accumulate=2)
    for got in on_ranks(lambda: trained(lambda: in_parts(**sizes), accumulate=2 // data), 4):
        got.check_equals(expected)


LAYOUTS: dict[str, tuple[int, int, Callable[[], Driver]]] = {
    "2x2": (4, 1, lambda: in_parts(shard=2, tensor=2)),
    "replicated": (4, 1, lambda: in_parts(data=2, tensor=2)),
    "tensor": (2, 2, lambda: in_parts(tensor=2)),
    "fsdp": (2, 1, fsdp),
    "ddp": (2, 1, ddp),
    "single": (1, 2, single),
}
"""By name, a number of ranks, the batches of a rank in a step, and the driver."""


def leg(layout: str, directory: Path, max_steps: int) -> Tensor:
    ranks, accumulate, make = LAYOUTS[layout]

    def work() -> Tensor:
        return trained(make, accumulate=accumulate, directory=directory, max_steps=max_steps).weights

    return work() if ranks == 1 else on_ranks(work, ranks)[0]


def test_a_run_goes_on_in_the_same_layout_to_the_same_bits_and_in_other_layouts(tmp_path: Path) -> None:
    whole = leg("2x2", tmp_path / "whole", 8)
    leg("2x2", tmp_path / "cut", 3)
    assert torch.equal(leg("2x2", tmp_path / "cut", 8), whole)
    for steps, layout in enumerate(LAYOUTS, 2):
        got = leg(layout, tmp_path / "moved", steps)
    assert torch.allclose(got, leg("single", tmp_path / "alone", 7), atol=1e-6)


def fails(model: nn.Module, batch: Tensor) -> Tensor:
    raise ArithmeticError("of a layer")


def test_the_loss_is_computed_in_parts_during_runs_only() -> None:
    """Also after an error, and after the evaluations inside of a run."""

    def outside() -> str:
        driver = in_parts(tensor=2)
        scores = distribute_tensor(torch.randn(3, 4), driver.mesh["tensor"], [Shard(1)])
        for compute in (next_words, fails):
            try:
                trained(lambda: driver, compute=compute, accumulate=2)
            except ArithmeticError:
                assert compute is fails
        return type(nn.functional.log_softmax(scores, 1).placements[0]).__name__  # type: ignore[attr-defined]

    assert on_ranks(outside) == ["Replicate", "Replicate"]


# -- options of FSDP2 ----------------------------------------------------------------------------------


def test_weights_may_stay_gathered_in_groups_and_a_function_sets_the_other_options_of_torch() -> None:
    def with_options() -> tuple[Tensor, Tensor, list[str]]:
        configured: list[str] = []

        def configure(model: nn.Module) -> None:
            layers: list[Any] = [module for module in model.modules() if isinstance(module, Layer)]
            assert all(isinstance(layer, FSDPModule) for layer in layers)
            layers[0].set_modules_to_forward_prefetch(layers[1:])
            layers[1].set_modules_to_backward_prefetch(layers[:1])
            configured.append(type(model).__name__)

        plain = trainer(model=blocks(), driver=fsdp(shard=Layer))
        plain.fit()
        grouped = trainer(model=blocks(), driver=fsdp(shard=Layer, reshard_after_forward=2, configure=configure))
        grouped.fit()
        grouped.evaluate(grouped.loader)
        return weights_of(plain), weights_of(grouped), configured

    for plain, grouped, configured in on_ranks(with_options, 4):
        assert torch.allclose(grouped, plain, atol=1e-6)
        assert configured == ["FSDPSequential"]


def test_wrong_options_of_torch_are_reported_at_once() -> None:
    def told() -> list[str]:
        return [refusal(lambda value=value: FsdpDriver("cpu", reshard_after_forward=value)) for value in (3, -2, "no")]  # type: ignore[misc]

    for texts in on_ranks(told):
        for text, value in zip(texts, ("3", "-2", "'no'"), strict=True):
            assert text.endswith(f"a number that divides the ranks which shard a weight, 2; got {value}")
