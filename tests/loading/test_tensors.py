"""Tensors in memory are read in batches from any position, on one rank and on several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Trainer
from cadenza.callbacks import Evaluate
from cadenza.errors import DataError
from cadenza.loading import Shard, TensorBatches, num_batches, resumable
from cadenza.testing import prove_resume, tiny_run, tiny_trainer

N = 22


def tensors() -> tuple[Tensor, Tensor]:
    """Return inputs and targets of ``y = 2x + 1``: shapes (22, 1)."""
    inputs = torch.arange(float(N)).unsqueeze(1) / N
    return inputs, 2 * inputs + 1


def numbers(**options: Any) -> TensorBatches[tuple[Tensor, ...]]:
    options.setdefault("batch_size", 4)
    return TensorBatches(torch.arange(N), **options)


def plain(batches: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in batches]


def test_shuffled_every_sample_is_used_once_with_its_target() -> None:
    inputs, targets = tensors()
    batches = list(TensorBatches(inputs, targets, batch_size=4, shuffle=True))
    read, paired = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(read.sort(0).values, inputs)
    assert not torch.equal(read, inputs)
    assert torch.equal(2 * read + 1, paired)


def test_a_mapping_yields_batches_with_its_names() -> None:
    ids, labels = torch.arange(6).reshape(3, 2), torch.tensor([7, 8, 9])
    batches = list(TensorBatches({"ids": ids, "label": labels}, batch_size=2))
    assert [{name: part.tolist() for name, part in batch.items()} for batch in batches] == [
        {"ids": [[0, 1], [2, 3]], "label": [7, 8]},
        {"ids": [[4, 5]], "label": [9]},
    ]


def test_shuffled_batches_are_copies_and_unshuffled_batches_are_views() -> None:
    inputs = torch.zeros(4)
    for (batch,) in TensorBatches(inputs, batch_size=2, shuffle=True):
        batch += 1
    assert inputs.tolist() == [0, 0, 0, 0]
    for (batch,) in TensorBatches(inputs, batch_size=2):
        batch += 1
    assert inputs.tolist() == [1, 1, 1, 1]


def test_device_moves_all_tensors_to_the_device_and_no_gradient_flows_into_them() -> None:
    batches = TensorBatches(torch.ones(4), torch.ones(4, 2), batch_size=2, shuffle=True, device="meta")
    assert batches.device == torch.device("meta")
    assert [(x.device.type, y.device.type, y.shape) for x, y in batches] == [("meta", "meta", (2, 2))] * 2
    given = torch.ones(4, 2, requires_grad=True)
    assert not any(batch.requires_grad for (batch,) in TensorBatches(given, batch_size=2, shuffle=True))


# -- order --------------------------------------------------------------------------------------------


def test_any_epoch_can_be_read_from_any_batch_on_also_if_the_loader_is_sharded_already() -> None:
    for options in ({}, {"shuffle": True}, {"shuffle": True, "drop_last": True}, {"shuffle": True, "seed": 3}):
        for epoch in range(3):
            whole = plain(resumable(numbers(**options), 1).batches(epoch, 0))
            for skip in range(len(whole) + 1):
                assert plain(resumable(numbers(**options), 1).batches(epoch, skip)) == whole[skip:]
    shard = Shard(1, 2, share_data=False)
    assert plain(resumable(numbers(), 1, shard=shard).batches(0, 2)) == plain(numbers())[2:]


def test_the_order_depends_only_on_seed_and_epoch_and_leaves_the_rng_state() -> None:
    before = torch.get_rng_state()
    orders = {
        (seed, epoch): plain(resumable(numbers(shuffle=True), seed).batches(epoch, 0)) for seed in (1, 2) for epoch in (0, 1)
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert len({str(order) for order in orders.values()}) == 4
    torch.manual_seed(99)
    assert plain(resumable(numbers(shuffle=True), 1).batches(1, 0)) == orders[1, 1]


def test_the_seed_of_the_loader_replaces_that_of_the_run_and_in_a_plain_loop_passes_are_counted_or_set() -> None:
    own = [plain(resumable(numbers(shuffle=True, seed=7), seed).batches(0, 0)) for seed in (1, 2)]
    assert own[0] == own[1] == plain(numbers(shuffle=True, seed=7))
    batches = numbers(shuffle=True, seed=7)
    first, second = plain(batches), plain(batches)
    assert first != second
    batches.set_epoch(0)
    assert plain(batches) == first
    assert plain(batches.batches(1, skip=3)) == second[3:]


def test_in_a_plain_loop_without_a_seed_torchs_generator_determines_the_order() -> None:
    torch.manual_seed(1)
    first, second = plain(numbers(shuffle=True)), plain(numbers(shuffle=True))
    torch.manual_seed(1)
    assert plain(numbers(shuffle=True)) == first != second


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"batch_size": 5, "drop_last": True}], ids=str)
def test_the_shards_are_those_of_a_data_loader(ranks: int, options: dict[str, Any]) -> None:
    batch_size, drop_last = options.get("batch_size", 4), options.get("drop_last", False)
    for even in (True, False):
        seen: Counter[int] = Counter()
        for rank in range(ranks):
            shard = Shard(rank, ranks) if even else Shard(rank, ranks).uneven()
            theirs = DataLoader(TensorDataset(torch.arange(N)), batch_size, drop_last=drop_last)
            expected = plain(resumable(theirs, 1, shard=shard).batches(0, 0))
            source = resumable(numbers(**options), 1, shard=shard)
            assert plain(source.batches(0, 0)) == expected
            assert num_batches(numbers(**options), shard) == len(expected)
            assert all(plain(source.batches(0, skip)) == expected[skip:] for skip in range(len(expected)))
            shuffled = resumable(numbers(shuffle=True, **options), 1, shard=shard)
            seen.update(number for batch in plain(shuffled.batches(0, 0)) for number in batch)
        assert set(seen.values()) == {1}, "a sample is in two shards"
        complete = not drop_last and (not even or batch_size > 1)
        assert len(seen) == N or not complete, "a sample is in no shard"


# -- in runs ------------------------------------------------------------------------------------------


def train(**options: Any) -> Callable[[Path], Trainer]:
    def make(directory: Path) -> Trainer:
        loader = TensorBatches(*tensors(), batch_size=4, shuffle=True)
        evaluated = TensorBatches(*tensors(), batch_size=5, shuffle=True, seed=2)
        callbacks = [Evaluate(evaluated, every="2 steps", limit=3)]
        return tiny_trainer(loader=loader, callbacks=callbacks, epochs=3, seed=1, directory=directory, **options)

    return make


def test_a_resumed_run_is_bit_identical() -> None:
    prove_resume(train(), at=[1, 6, 17], in_process=True)
    prove_resume(train(accumulate=4), at=[3], in_process=True)
    prove_resume(train(), at=[4], replay=True, in_process=True)


def test_results_do_not_depend_on_the_number_of_evaluations() -> None:
    loader = TensorBatches(*tensors(), batch_size=4, shuffle=True, seed=2)
    often, seldom = ([Evaluate(loader, every=every, limit=2)] for every in ("1 step", "3 steps"))
    first = tiny_run(callbacks=often, steps=3, seed=1).history["eval/loss"]
    assert tiny_run(callbacks=seldom, steps=3, seed=1).history["eval/loss"] == first[-1:]


def test_a_model_with_named_arguments_gets_batches_of_a_mapping() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]  # this is what the test is about
            return nn.functional.mse_loss(super().forward(x), y)

    inputs, targets = tensors()
    loader = TensorBatches({"x": inputs, "y": targets}, batch_size=4, shuffle=True)
    assert tiny_run(model=Own(1, 1), compute_loss=None, loader=loader, epochs=2).progress.now().samples == 2 * N


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(3), torch.ones(4)), {}, ValueError, r"same number of rows.*got 0: 3, 1: 4"),
        (({"ids": torch.ones(3), "label": torch.ones(2)},), {}, ValueError, r"got ids: 3, label: 2"),
        ((torch.ones(3), torch.ones(3, device="meta")), {}, ValueError, r"same device; got 0: cpu, 1: meta\. Pass device="),
        ((torch.tensor(1.0),), {}, ValueError, r"tensor '0' must have shape \(samples, \.\.\.\)"),
        ((), {}, TypeError, "one or more tensors, or a mapping.*got none"),
        (({},), {}, TypeError, "got none"),
        ((torch.ones(3), numpy.ones(3)), {}, TypeError, r"got a ndarray as '1'\. Convert it with torch\.as_tensor"),
        ((TensorDataset(torch.ones(3)),), {}, TypeError, "takes tensors; got a TensorDataset as '0'$"),
        ((torch.ones(3),), {"batch_size": 0}, ValueError, "batch_size must be at least 1 sample; got 0"),
        ((torch.ones(3),), {"batch_size": 2.0}, TypeError, r"batch_size must be a whole number; got 2\.0"),
        ((torch.ones(3),), {"seed": "a"}, TypeError, "seed must be a whole number; got 'a'"),
    ],
)
def test_invalid_arguments_are_an_error(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TensorBatches(*arguments, **{"batch_size": 2, **options})


def test_a_run_without_a_complete_batch_and_with_drop_last_is_an_error() -> None:
    with pytest.raises(DataError, match="the training loader is empty"):
        tiny_run(loader=TensorBatches(*tensors(), batch_size=100, drop_last=True))
