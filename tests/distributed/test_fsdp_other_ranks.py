"""A run in shards continues on another number of ranks, inside an epoch, with FSDP, DDP or one process, again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Ema, LogTraining
from cadenza.drivers import DdpDriver, Driver, SingleDriver
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, momentum, samples
from tests.distributed.test_fsdp import network, sharded, weights_of, whole
from tests.distributed.test_other_ranks import weighted

Seen = dict[int, list[int]]
Leg = tuple[str, int, int | None]
"""A driver, a number of ranks, and the step at which to leave off."""

GROUPS = {4: 3, 2: 6, 1: 12, 3: 4}
"""By the number of ranks, the accumulation with which a step takes 12 batches."""

DRIVERS: dict[str, Callable[[], Driver]] = {
    "fsdp": sharded,
    "hsdp": lambda: sharded(replicas=2),
    "ddp": lambda: DdpDriver("cpu", timeout_s=100),
    "single": lambda: SingleDriver("cpu"),
}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def shuffled() -> Iterable[Any]:
    """Return 40 batches, of which the last is short: three steps of 12, and one of 4."""
    return loader(159, generator=torch.Generator().manual_seed(7))


def in_memory() -> Iterable[Any]:
    return TensorBatches(*samples(159).tensors, batch_size=4, shuffle=True)


def part(
    directory: Path, driver: str, steps: int | None, make: Callable[[], Iterable[Any]] = shuffled, **arguments: Any
) -> tuple[Seen, Tensor, Tensor, tuple[int, bool]]:
    """Continue the run in `directory` until a step; return what this rank saw, weights, average, and two facts."""
    seen: Seen = {}

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Batch) -> None:
        if session_of(run).cursor.source.replicated_at != run.progress.batch_in_epoch or run.driver.rank == 0:
            seen.setdefault(run.progress.epoch, []).extend(batch[2].tolist())

    one = Trainer(
        network(dropout=arguments.pop("dropout", 0.0)), arguments.pop("optimizer", adamw), make(), weighted,
        max_epochs=2, max_steps=steps, seed=5, directory=directory, driver=DRIVERS[driver](), progress=False,
        callbacks=[see, Ema(0.5), LogTraining("1 step"), Checkpoint("100 steps")], **arguments,
    )  # fmt: skip
    run = one.fit(resume="auto")
    average = hooks_of(run).callbacks["Ema"].state_dict()["average"]
    averaged = torch.cat([whole(value).detach().flatten() for value in average.values()])
    fused = all(group["fused"] is True for group in run.optimizers[0].param_groups)
    return seen, weights_of(one), averaged, (run.progress.samples, fused)


def continued(
    directory: Path, chain: list[Leg], make: Callable[[], Iterable[Any]] = shuffled, **arguments: Any
) -> tuple[Seen, Tensor, Tensor, list[tuple[int, bool]]]:
    """Do a run in parts; return what all saw, the weights, their average, and the facts by part."""
    seen: Seen = {}
    facts: list[tuple[int, bool]] = []
    for driver, ranks, steps in chain:

        def work(driver: str = driver, ranks: int = ranks, steps: int | None = steps) -> Any:
            return part(directory, driver, steps, make, accumulate=GROUPS[ranks], **arguments)

        everyone = [work()] if driver == "single" else launch(work, ranks)
        for saw, weights, average, _ in everyone:
            assert torch.equal(weights, everyone[0][1])
            assert torch.equal(average, everyone[0][2])
            for epoch, numbers in saw.items():
                seen.setdefault(epoch, []).extend(numbers)
        facts.append(everyone[0][3])
    return seen, everyone[0][1], everyone[0][2], facts


CHAINS: dict[str, list[Leg]] = {
    "fsdp": [("fsdp", 4, 1), ("fsdp", 2, 2), ("fsdp", 1, 3), ("fsdp", 3, 5), ("fsdp", 4, None)],
    "over one process": [("fsdp", 4, 1), ("fsdp", 2, 2), ("single", 1, 3), ("fsdp", 3, None)],
    "groups of shards": [("hsdp", 4, 1), ("fsdp", 2, 2), ("hsdp", 4, 4), ("ddp", 2, 5), ("hsdp", 2, None)],
    "ddp, fsdp, ddp": [("ddp", 2, 1), ("fsdp", 2, 2), ("ddp", 3, 3), ("fsdp", 2, None)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_with_as_many_batches_in_a_step_the_weights_are_those_of_the_run_that_went_on(name: str, tmp_path: Path) -> None:
    seen, weights, average, facts = continued(tmp_path / "cut", CHAINS[name])
    assert [Counter(seen[epoch]) for epoch in range(2)] == [dict.fromkeys(range(159), 1)] * 2
    assert facts[-1][0] == 2 * 159
    _, expected, averaged, _ = part(tmp_path / "whole", "single", None, accumulate=12)
    assert torch.allclose(weights, expected, atol=1e-6)
    assert torch.allclose(average, averaged, atol=1e-6)


def test_tensors_in_memory_are_shared_out_anew_inside_an_epoch(tmp_path: Path) -> None:
    chain: list[Leg] = [("fsdp", 4, 1), ("ddp", 2, 2), ("single", 1, 3), ("ddp", 3, 5), ("fsdp", 2, None)]
    seen, weights, _, facts = continued(tmp_path / "cut", chain, in_memory)
    assert [Counter(seen[epoch]) for epoch in range(2)] == [dict.fromkeys(range(159), 1)] * 2
    assert facts[-1][0] == 2 * 159
    _, expected, _, _ = part(tmp_path / "whole", "single", None, in_memory, accumulate=12)
    assert torch.allclose(weights, expected, atol=1e-6)


@pytest.mark.parametrize(("driver", "ranks"), [("fsdp", 2), ("fsdp", 1), ("ddp", 2), ("hsdp", 4)])
def test_on_as_many_ranks_it_continues_to_the_same_bits_inside_an_epoch(driver: str, ranks: int, tmp_path: Path) -> None:
    def cut_and_whole() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"accumulate": GROUPS[ranks], "dropout": 0.3}
        part(tmp_path / "cut", driver, 2, **options)
        _, weights, average, _ = part(tmp_path / "cut", driver, None, **options)
        _, expected, averaged, _ = part(tmp_path / "whole", driver, None, **options)
        return weights, expected, average, averaged

    for weights, expected, average, averaged in launch(cut_and_whole, ranks):
        assert torch.equal(weights, expected)
        assert torch.equal(average, averaged)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": momentum,
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_fused_over_whole_weights_goes_on_in_shards_not_fused(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[name]}
    assert continued(tmp_path / "cut", [("single", 1, 2)], **options)[3][0][1]
    _, weights, _, facts = continued(tmp_path / "cut", [("fsdp", 3, 5), ("ddp", 2, None)], **options)
    assert not facts[0][1]
    _, expected, _, _ = part(tmp_path / "whole", "single", None, accumulate=12, **options)
    assert torch.allclose(weights, expected, atol=1e-6)


def test_an_optimizer_of_shards_is_not_fused_and_one_of_whole_weights_is(tmp_path: Path) -> None:
    for driver, expected in (("fsdp", False), ("ddp", True)):
        for _, _, _, (_, fused) in launch(partial(part, tmp_path / driver, driver, 1)):
            assert fused is expected
