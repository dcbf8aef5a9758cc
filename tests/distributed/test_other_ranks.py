"""A run continues on another number of ranks, with DDP, in shards or on one process, and sees every sample once an epoch.

Its loss is like that of the run that went on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza import Callback, Counters, Run, on
from cadenza.callbacks import Checkpoint, Ema, LogTraining
from cadenza.checkpoint.parts import Written
from cadenza.drivers import Driver
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.hooks.dispatch import hooks_of
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.distributed.drivers import blocks, ddp, sharded, single
from tests.distributed.parts import (
    Batch,
    adamw,
    loader,
    momentum,
    network,
    rank,
    samples,
    trainer,
    vector,
    weighted,
    weights_of,
)
from tests.distributed.standing import on_ranks

Seen = dict[int, list[int]]
"""By epoch, the numbers of the samples that were seen."""
Leg = tuple[str, int, int | None]
"""A driver, a number of ranks, and the step at which to leave off."""

DRIVERS: dict[str, Callable[[], Driver]] = {"ddp": ddp, "fsdp": sharded, "hsdp": partial(sharded, replicas=2), "single": single}
GROUPS = {4: 3, 2: 6, 1: 12, 3: 4}
"""By the number of ranks, the accumulation with which a step takes 12 batches."""


class Part(NamedTuple):
    seen: Seen
    weights: Tensor
    average: Tensor
    facts: dict[str, Any]


def part(
    directory: Path, make: Callable[[], Iterable[Any]] = loader, steps: int | None = None, driver: str = "", **arguments: Any
) -> Part:
    """Continue the run in `directory` until a step; return what this rank saw, weights, their average and some facts."""
    seen: Seen = {}
    facts: dict[str, Any] = {"lengths": {}, "samples": []}

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Batch) -> None:
        if session_of(run).cursor.source.replicated_at != run.progress.batch_in_epoch or run.driver.rank == 0:
            seen.setdefault(run.progress.epoch, []).extend(batch[2].tolist())

    @on(Callback.on_step_end)
    def measure(run: Run) -> None:
        facts["lengths"][run.progress.epoch] = run.progress.batches_per_epoch

    note = on(Callback.on_epoch_end)(lambda run: facts["samples"].append(run.progress.samples))
    callbacks = [see, measure, note, Ema(0.5), LogTraining("1 step", throughput=False), Checkpoint("100 steps")]
    made = DRIVERS[driver]() if driver else None
    one = trainer(make(), directory=directory, max_steps=steps, driver=made, callbacks=callbacks, **arguments)
    run = one.fit(resume="auto")
    facts["now"] = run.progress.now()
    facts["total"] = run.progress.total("step", run.info.accumulate)
    facts["fused"] = all(group.get("fused") is True for group in run.optimizers[0].param_groups)
    average = hooks_of(run).callbacks["Ema"].state_dict()["average"]
    return Part(seen, weights_of(one), vector(average.values()), facts)


def continued(
    directory: Path, make: Callable[[], Iterable[Any]], chain: list[Leg], *, grouped: bool = False, **arguments: Any
) -> tuple[Part, list[dict[str, Any]]]:
    """Do a run in parts; return what all saw and the end, and the facts by part."""
    seen: Seen = {}
    facts: list[dict[str, Any]] = []
    for driver, ranks, steps in chain:
        own = {**arguments, "accumulate": GROUPS[ranks]} if grouped else arguments
        work = partial(part, directory, make, steps, driver, **own)
        everyone = [work()] if driver == "single" else on_ranks(work, ranks)
        for one in everyone:
            assert torch.equal(one.weights, everyone[0].weights)
            assert torch.equal(one.average, everyone[0].average)
            for epoch, numbers in one.seen.items():
                seen.setdefault(epoch, []).extend(numbers)
        facts.append(everyone[0].facts)
    return everyone[0]._replace(seen=seen), facts


def once(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), 1)


def counted(seen: Seen) -> list[Counter[int]]:
    return [Counter(numbers) for _, numbers in sorted(seen.items())]


def shuffled(count: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: loader(count, generator=torch.Generator().manual_seed(7), **options)


# -- every sample once -----------------------------------------------------------------------------


def test_four_two_one_three_ranks_do_an_epoch_and_see_every_sample_once(tmp_path: Path) -> None:
    chain: list[Leg] = [("ddp", 4, 2), ("ddp", 2, 4), ("single", 1, 7), ("ddp", 3, None)]
    end, facts = continued(tmp_path / "run", shuffled(103), chain)  # 26 batches
    assert counted(end.seen) == [once(103)] * 2
    assert facts[-1]["samples"] == [103, 206]
    assert facts[-1]["lengths"] == {0: 7 + 4, 1: 9}, "11 batches of 26 are left for 3 ranks, and then 26"
    assert facts[-1]["now"].step == facts[-1]["total"] == 7 + 4 + 9


def test_workers_read_on_another_number_of_ranks_too(tmp_path: Path) -> None:
    make = shuffled(61, num_workers=2, persistent_workers=True)
    end, _ = continued(tmp_path / "run", make, [("ddp", 2, 3), ("single", 1, 5), ("ddp", 2, None)])
    assert counted(end.seen) == [once(61)] * 2


def test_a_run_goes_from_one_number_of_ranks_to_another_in_each_epoch(tmp_path: Path) -> None:
    make = shuffled(37)  # 10 batches: 5 turns of 2 ranks, 3 of 4
    chain: list[Leg] = [("ddp", 2, 3), ("single", 1, 7), ("ddp", 4, 12), ("ddp", 3, None)]  # the third ends with an epoch
    end, facts = continued(tmp_path / "run", make, chain, max_epochs=4)
    assert counted(end.seen) == [once(37)] * 4
    assert facts[2]["now"].batch_in_epoch == 2
    assert facts[-1]["now"].step == facts[-1]["total"]
    assert facts[-1]["now"].samples == 4 * 37


def test_where_fewer_samples_are_left_than_ranks_all_do_them_and_they_count_once(tmp_path: Path) -> None:
    make = shuffled(14, shuffle=False)  # batches of 4, 4, 4 and 2
    arguments: dict[str, Any] = {"max_epochs": 1, "compute_loss": weighted}
    end, facts = continued(tmp_path / "cut", make, [("single", 1, 3), ("ddp", 3, None)], **arguments)
    assert counted(end.seen) == [once(14)]
    assert facts[-1]["now"].samples == 14
    alone = part(tmp_path / "whole", make, **arguments)
    assert torch.allclose(end.weights, alone.weights, atol=1e-6)


# -- the same training, as far as it can be ----------------------------------------------------------


def in_memory() -> Iterable[Any]:
    return TensorBatches(*samples(159).tensors, batch_size=4, shuffle=True)


CHAINS: dict[str, list[Leg]] = {
    "ddp": [("ddp", 4, 1), ("ddp", 2, 2), ("single", 1, 3), ("ddp", 3, 5), ("ddp", 4, None)],
    "fsdp": [("fsdp", 4, 1), ("fsdp", 2, 2), ("fsdp", 1, 3), ("fsdp", 3, 5), ("fsdp", 4, None)],
    "over one process": [("fsdp", 4, 1), ("fsdp", 2, 2), ("single", 1, 3), ("fsdp", 3, None)],
    "groups of shards": [("hsdp", 4, 1), ("fsdp", 2, 2), ("hsdp", 4, 4), ("ddp", 2, 5), ("hsdp", 2, None)],
    "ddp, fsdp, ddp": [("ddp", 2, 1), ("fsdp", 2, 2), ("ddp", 3, 3), ("fsdp", 2, None)],
    "tensors in memory": [("fsdp", 4, 1), ("ddp", 2, 2), ("single", 1, 3), ("ddp", 3, 5), ("fsdp", 2, None)],
}
LONG = ("fsdp", "ddp, fsdp, ddp")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CHAINS])
def test_with_as_many_batches_in_a_step_the_weights_are_those_of_the_run_that_went_on(name: str, tmp_path: Path) -> None:
    make = in_memory if name == "tensors in memory" else shuffled(159)  # 40 batches: 3 steps of 12, and one of 4
    arguments: dict[str, Any] = {"compute_loss": weighted, "optimizer": adamw}
    end, facts = continued(tmp_path / "cut", make, CHAINS[name], grouped=True, model=blocks(), **arguments)
    assert counted(end.seen) == [once(159)] * 2
    assert facts[-1]["now"].samples == 2 * 159
    whole = part(tmp_path / "whole", make, accumulate=12, model=blocks(), **arguments)
    assert torch.allclose(end.weights, whole.weights, atol=1e-6)
    assert torch.allclose(end.average, whole.average, atol=1e-6)


@pytest.mark.parametrize(("driver", "ranks"), [("fsdp", 2), ("fsdp", 1), ("ddp", 2), ("hsdp", 4)])
def test_on_as_many_ranks_it_continues_to_the_same_bits_inside_an_epoch(driver: str, ranks: int, tmp_path: Path) -> None:
    def until(folder: str, steps: int | None) -> Part:
        arguments: dict[str, Any] = {"accumulate": GROUPS[ranks], "compute_loss": weighted, "optimizer": adamw}
        return part(tmp_path / folder, shuffled(159), steps, driver, model=blocks(0.3), **arguments)

    def cut_and_whole() -> tuple[Part, Part]:
        until("cut", 2)
        return until("cut", None), until("whole", None)

    for cut, whole in on_ranks(cut_and_whole, ranks):
        assert torch.equal(cut.weights, whole.weights)
        assert torch.equal(cut.average, whole.average)
        assert whole.facts["fused"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": momentum,
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
}


@pytest.mark.parametrize("name", ["Adam", *(pytest.param(name, marks=pytest.mark.long) for name in ("SGD", "Adagrad"))])
def test_what_was_fused_over_whole_weights_goes_on_in_shards(name: str, tmp_path: Path) -> None:
    make = shuffled(159)
    arguments: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "compute_loss": weighted}
    chain: list[Leg] = [("single", 1, 2), ("fsdp", 3, 5), ("ddp", 2, None)]
    end, facts = continued(tmp_path / "cut", make, chain, grouped=True, model=blocks(), **arguments)
    assert [one["fused"] for one in facts[:2]] == [True, name == "Adam"]  # torch fuses others in whole weights alone
    whole = part(tmp_path / "whole", make, accumulate=12, model=blocks(), **arguments)
    assert torch.allclose(end.weights, whole.weights, atol=1e-6)


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that can be learned down to that of noise, 1 / 12."""
    targets = batch[0].sum(1).sin() + (batch[2] * 7919 % 101) / 101 - 0.5
    return nn.functional.mse_loss(model(batch[0])[:, 0], targets)


def test_with_dropout_and_an_uneven_end_the_loss_ends_within_the_tolerance(tmp_path: Path) -> None:
    def loss(weights: Tensor) -> float:
        model = network()
        nn.utils.vector_to_parameters(weights, model.parameters())
        return noisy(model, samples(403).tensors).item()

    make = shuffled(403)  # 101 batches: 8 steps of 12, and one of 5
    arguments: dict[str, Any] = {"max_epochs": 4, "compute_loss": noisy}
    chain: list[Leg] = [("ddp", 4, 3), ("ddp", 2, 7), ("single", 1, 11), ("ddp", 3, None)]
    end, _ = continued(tmp_path / "cut", make, chain, grouped=True, model=network(0.1), **arguments)
    whole = part(tmp_path / "whole", make, accumulate=12, model=network(0.1), **arguments)
    assert loss(whole.weights) < 0.3 < 0.5 < loss(weights_of(trainer()))
    # Other seeds of the dropout give losses in 0.24..0.26.
    assert loss(end.weights) == pytest.approx(loss(whole.weights), rel=0.1)


# -- other loaders -----------------------------------------------------------------------------------


def listed() -> list[Batch]:
    rows: Any = samples(96).tensors
    return list(zip(*(tensor.split(4) for tensor in rows), strict=True))


class Streamed(IterableDataset[Batch]):
    """A stream of 96 samples that knows its place."""

    def __init__(self) -> None:
        self.place, self._restored = 0, False

    def __iter__(self) -> Iterator[Batch]:
        self.place = self.place if self._restored else 0
        self._restored = False
        rows = samples(96)
        while self.place < 96:
            self.place += 1
            yield rows[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self._restored = state["place"], True


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "a list": listed,
    "a stream that knows its place": lambda: DataLoader(Streamed(), 4),
    "a loader with a state": lambda: StatefulDataLoader(samples(96), 4),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata, when it makes a loader
@pytest.mark.parametrize("name", LOADERS)
def test_other_loaders_are_continued_on_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    chain: list[Leg] = [("ddp", 4, 2), ("ddp", 2, 4), ("single", 1, 7), ("ddp", 3, None)]  # 15 batches, and 3 turns are left
    end, _ = continued(tmp_path / "run", LOADERS[name], chain, max_epochs=1)
    assert counted(end.seen) == [once(96)]


# -- what is not possible, and what is told -----------------------------------------------------------


def parted(ranks: int) -> DataLoader[Any]:
    """Return each rank's loader of its own part."""
    sampler: DistributedSampler[Any] = DistributedSampler(samples(24), ranks, rank() or 0, shuffle=False)
    return loader(24, shuffle=False, sampler=sampler)


def test_inside_an_epoch_of_parts_it_is_an_error_and_between_two_it_goes_on(tmp_path: Path) -> None:
    of_two = partial(parted, 2)
    on_ranks(lambda: [part(tmp_path / "inside", of_two, 2), part(tmp_path / "between", of_two, 3)])
    with pytest.raises(DataError, match=r"an epoch that 2 ranks began.*split over 1 rank\. Continue on 2 ranks, or"):
        part(tmp_path / "inside")
    end = part(tmp_path / "between")
    assert Counter(end.seen[1]) == once(24)
    assert end.facts["now"].step == 3 + 6

    part(tmp_path / "one", loader, 2)
    with pytest.raises(BaseExceptionGroup) as caught:
        launch(lambda: part(tmp_path / "one", of_two))
    assert caught.group_contains(DataError, match=r"an epoch that 1 rank began.*without a distributed sampler")


def test_another_loader_is_still_refused_and_another_accumulation_is_not(tmp_path: Path) -> None:
    on_ranks(lambda: part(tmp_path / "run", loader, 2))
    with pytest.raises(CheckpointMismatchError, match="It differs in 2: batches: saved 6, now 12; samples: saved 24, now 48"):
        part(tmp_path / "run", lambda: loader(48), accumulate=2)
    with pytest.raises(BaseExceptionGroup) as caught:
        launch(lambda: part(tmp_path / "run", accumulate=2))
    assert caught.group_contains(CheckpointMismatchError, match="accumulate: saved 1, now 2")
    assert part(tmp_path / "run", accumulate=2).facts["now"].epoch == 2


def test_it_is_said_what_is_not_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on_ranks(lambda: part(tmp_path / "run", loader, 2))
    path = next((tmp_path / "run" / "checkpoints").glob("step-*"))
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = trainer(loader(), callbacks=[LogTraining()], directory=tmp_path / "other").fit(resume=path)
    assert run.progress.origin.samples == 16
    assert "was written on 2 ranks, and the run continues on 1 rank: each sample is still seen once an epoch" in caplog.text
    assert "a step took 2 batches, and now 1 (accumulate=2 keeps it)" in caplog.text
    assert "ranks: saved" not in caplog.text


def test_a_rank_that_was_not_there_draws_numbers_of_its_own(tmp_path: Path) -> None:
    part(tmp_path / "run", loader, 2, model=network(0.3))

    def drawn() -> float:
        numbers: list[float] = []
        draw = on(Callback.on_batch_start)(lambda run, batch: numbers.append(torch.rand(()).item()))
        path = next((tmp_path / "run" / "checkpoints").glob("step-*"))
        trainer(callbacks=[draw], max_epochs=1).fit(resume=path)
        return numbers[0]

    first, second = on_ranks(drawn), on_ranks(drawn)
    assert first == second
    assert len(set(first)) == 2


def test_checkpoints_from_before_can_be_read() -> None:
    config = {"accumulate": 1, "batches an epoch": 6, "ranks": 2}
    state = {"config": config, "exhausted": False, "progress": asdict(Counters(epoch=0, batch_in_epoch=3))}
    written = Written.read("step-00000003", state)
    assert (written.ranks, written.dealt, written.batches, written.past) == (2, True, None, ())
