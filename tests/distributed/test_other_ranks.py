"""A run continues on another number of ranks: every sample once an epoch, and a loss like that of the run that went on."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza import Callback, Counters, Run, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.checkpoint.other_ranks import Written
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, network, samples, squared_error, trainer, weights_of

Seen = dict[int, list[int]]
"""By epoch, the numbers of the samples that were seen."""


def weighted(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the loss, and how much a batch counts: so a step is that of one process on all its samples."""
    return {"loss": squared_error(model, batch), "weight": len(batch[0])}


def part(
    directory: Path, make: Callable[[], Iterable[Any]], steps: int | None, **arguments: Any
) -> tuple[Seen, Tensor, dict[str, Any]]:
    """Continue the run in `directory` until a step; return what this rank saw, its weights and some facts."""
    seen: Seen = {}
    facts: dict[str, Any] = {"lengths": {}, "samples": []}

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Batch) -> None:
        if session_of(run).cursor.source.replicated_at != run.progress.batch_in_epoch or run.driver.rank == 0:
            seen.setdefault(run.progress.epoch, []).extend(batch[2].tolist())

    @on(Callback.on_step_end)
    def measure(run: Run) -> None:
        facts["lengths"][run.progress.epoch] = run.progress.batches_per_epoch

    @on(Callback.on_epoch_end)
    def note(run: Run) -> None:
        facts["samples"].append(run.progress.samples)

    callbacks = [
        see,
        measure,
        note,
        LogTraining("1 step", throughput=False),
        Checkpoint("100 steps"),
        *arguments.pop("callbacks", ()),
    ]
    arguments.setdefault("max_epochs", 2)
    one = trainer(make(), directory=directory, max_steps=steps, callbacks=callbacks, **arguments)
    run = one.fit(resume="auto")
    facts["losses"] = run.history["train/loss"]
    facts["now"] = run.progress.now()
    facts["total"] = run.progress.total("step", run.info.accumulate)
    return seen, weights_of(one), facts


def continued(
    directory: Path, make: Callable[[], Iterable[Any]], chain: list[tuple[int, int | None]], **arguments: Any
) -> tuple[Seen, Tensor, list[dict[str, Any]]]:
    """Do a run in parts, each on its number of ranks until a step; return what all saw, the weights, and the facts by part."""
    seen: Seen = {}
    facts: list[dict[str, Any]] = []
    for ranks, steps in chain:
        own = {name: value(ranks) if name == "accumulate" else value for name, value in arguments.items()}

        def work(steps: int | None = steps, own: dict[str, Any] = own) -> tuple[Seen, Tensor, dict[str, Any]]:
            return part(directory, make, steps, **own)

        everyone = [work()] if ranks == 1 else launch(work, ranks)
        for saw, weights, _ in everyone:
            assert torch.equal(weights, everyone[0][1])
            for epoch, numbers in saw.items():
                seen.setdefault(epoch, []).extend(numbers)
        facts.append(everyone[0][2])
    return seen, everyone[0][1], facts


def once(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), 1)


def counted(seen: Seen) -> list[Counter[int]]:
    return [Counter(numbers) for _, numbers in sorted(seen.items())]


def shuffled(count: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: loader(count, generator=torch.Generator().manual_seed(7), **options)


# -- every sample once -----------------------------------------------------------------------------


def test_four_two_one_three_ranks_do_an_epoch_and_see_every_sample_once(tmp_path: Path) -> None:
    seen, _, facts = continued(tmp_path / "run", shuffled(103), [(4, 2), (2, 4), (1, 7), (3, None)])  # 26 batches
    assert counted(seen) == [once(103)] * 2
    assert facts[-1]["samples"] == [103, 206]
    assert facts[-1]["lengths"] == {0: 7 + 4, 1: 9}, "11 batches of 26 are left for 3 ranks, and then 26"
    assert facts[-1]["now"].step == facts[-1]["total"] == 7 + 4 + 9


def test_workers_read_on_another_number_of_ranks_too(tmp_path: Path) -> None:
    make = shuffled(61, num_workers=2, persistent_workers=True)
    seen, _, _ = continued(tmp_path / "run", make, [(2, 3), (1, 5), (2, None)])
    assert counted(seen) == [once(61)] * 2


def test_a_run_goes_from_one_number_of_ranks_to_another_in_each_epoch(tmp_path: Path) -> None:
    make = shuffled(37)  # 10 batches: 5 turns of 2 ranks, 3 of 4
    chain: list[tuple[int, int | None]] = [(2, 3), (1, 7), (4, 12), (3, None)]  # the third ends with an epoch
    seen, _, facts = continued(tmp_path / "run", make, chain, max_epochs=4)
    assert counted(seen) == [once(37)] * 4
    assert facts[2]["now"].batch_in_epoch == 2
    assert facts[-1]["now"].step == facts[-1]["total"]
    assert facts[-1]["now"].samples == 4 * 37


def test_where_fewer_samples_are_left_than_ranks_all_do_them_and_they_count_once(tmp_path: Path) -> None:
    make = shuffled(14, shuffle=False)  # batches of 4, 4, 4 and 2
    seen, weights, facts = continued(tmp_path / "cut", make, [(1, 3), (3, None)], max_epochs=1, compute_loss=weighted)
    assert counted(seen) == [once(14)]
    assert facts[-1]["now"].samples == 14
    _, alone, _ = part(tmp_path / "whole", make, None, max_epochs=1, compute_loss=weighted)
    assert torch.allclose(weights, alone, atol=1e-6)


# -- the same training, as far as it can be ----------------------------------------------------------

GROUPS = {4: 3, 2: 6, 1: 12, 3: 4}
"""By the number of ranks, the accumulation with which a step takes 12 batches."""


def test_with_as_many_batches_in_a_step_the_weights_are_those_of_the_run_that_went_on(tmp_path: Path) -> None:
    make = shuffled(159)  # 40 batches, of which the last is short: 3 steps of 12 and one of 4
    arguments: dict[str, Any] = {"accumulate": GROUPS.__getitem__, "compute_loss": weighted}
    chain: list[tuple[int, int | None]] = [(4, 1), (2, 2), (1, 3), (3, 5), (4, None)]
    seen, weights, _ = continued(tmp_path / "cut", make, chain, **arguments)
    assert counted(seen) == [once(159)] * 2
    _, whole, _ = part(tmp_path / "whole", make, None, accumulate=12, compute_loss=weighted)
    assert torch.allclose(weights, whole, atol=1e-6)


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
    arguments: dict[str, Any] = {"max_epochs": 4, "model": network(0.1), "compute_loss": noisy}
    chain: list[tuple[int, int | None]] = [(4, 3), (2, 7), (1, 11), (3, None)]
    _, weights, _ = continued(tmp_path / "cut", make, chain, accumulate=GROUPS.__getitem__, **arguments)
    _, whole, _ = part(tmp_path / "whole", make, None, accumulate=12, **arguments)
    assert loss(whole) < 0.3 < 0.5 < loss(weights_of(trainer(model=network())))
    # Other seeds of the dropout give losses in 0.24..0.26.
    assert loss(weights) == pytest.approx(loss(whole), rel=0.1)


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
    chain: list[tuple[int, int | None]] = [(4, 2), (2, 4), (1, 7), (3, None)]  # 15 batches, and 3 turns are left
    seen, _, _ = continued(tmp_path / "run", LOADERS[name], chain, max_epochs=1)
    assert counted(seen) == [once(96)]


# -- what is not possible, and what is told -----------------------------------------------------------


def parted(ranks: int) -> Callable[[], DataLoader[Any]]:
    """Return what makes each rank's loader of its own part."""

    def make() -> DataLoader[Any]:
        rank = int(os.environ.get("RANK", 0))
        sampler: DistributedSampler[Any] = DistributedSampler(samples(24), ranks, rank, shuffle=False)
        return loader(24, shuffle=False, sampler=sampler)

    return make


def test_inside_an_epoch_of_parts_it_is_an_error_and_between_two_it_goes_on(tmp_path: Path) -> None:
    launch(lambda: part(tmp_path / "inside", parted(2), 2))
    with pytest.raises(DataError, match=r"an epoch that 2 ranks began.*split over 1 rank\. Continue on 2 ranks, or"):
        part(tmp_path / "inside", loader, None)
    launch(lambda: part(tmp_path / "border", parted(2), 3))
    seen, _, facts = part(tmp_path / "border", loader, None)
    assert Counter(seen[1]) == once(24)
    assert facts["now"].step == 3 + 6

    part(tmp_path / "one", loader, 2)
    with pytest.raises(BaseExceptionGroup) as caught:
        launch(lambda: part(tmp_path / "one", parted(2), None))
    assert caught.group_contains(DataError, match=r"an epoch that 1 rank began.*without a distributed sampler")


def test_another_loader_is_still_refused_and_another_accumulation_is_not(tmp_path: Path) -> None:
    launch(lambda: part(tmp_path / "run", loader, 2))
    with pytest.raises(CheckpointMismatchError, match="It differs in 2: batches: saved 6, now 12; samples: saved 24, now 48"):
        part(tmp_path / "run", lambda: loader(48), None, accumulate=2)
    with pytest.raises(BaseExceptionGroup) as caught:
        launch(lambda: part(tmp_path / "run", loader, None, accumulate=2))
    assert caught.group_contains(CheckpointMismatchError, match="accumulate: saved 1, now 2")
    assert part(tmp_path / "run", loader, None, accumulate=2)[2]["now"].epoch == 2


def test_it_is_said_what_is_not_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch(lambda: part(tmp_path / "run", loader, 2))
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

        @on(Callback.on_batch_start)
        def draw(run: Run, batch: Batch) -> None:
            numbers.append(torch.rand(()).item())

        make = trainer(loader(), callbacks=[draw], directory=None, max_epochs=1)
        path = next((tmp_path / "run" / "checkpoints").glob("step-*"))
        make.fit(resume=path)
        return numbers[0]

    first, second = launch(drawn), launch(drawn)
    assert first == second
    assert len(set(first)) == 2


def test_checkpoints_from_before_can_be_read() -> None:
    config = {"accumulate": 1, "batches an epoch": 6, "ranks": 2}
    state = {"config": config, "exhausted": False, "progress": asdict(Counters(epoch=0, batch_in_epoch=3))}
    written = Written.read("step-00000003", state)
    assert (written.ranks, written.dealt, written.batches, written.past) == (2, True, None, ())
