"""fastNLP's loaders: padding, the order of the samples (case 28), and which samples are in a batch."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, TensorDataset

from cadenza.callbacks import Checkpoint
from cadenza.compat.fastnlp.core.collators import Collator
from cadenza.compat.fastnlp.core.collators.padding import padded
from cadenza.compat.fastnlp.core.dataloaders import TorchDataLoader, prepare_dataloader
from cadenza.compat.fastnlp.core.dataset import DataSet
from cadenza.compat.fastnlp.core.samplers import RandomSampler
from cadenza.hooks.moments import Callback
from cadenza.loading import resumable
from cadenza.run import Run
from cadenza.testing import tiny_model
from cadenza.trainer import Trainer

FIRST_16_OF_T7 = [50, 5, 19, 66, 53, 9, 64, 36, 20, 11, 13, 52, 8, 65, 16, 74]


def numbered(count: int = 80) -> DataSet:
    return DataSet({"words": [[row] * (row % 3 + 1) for row in range(count)], "target": list(range(count))})


def epochs(loader: Any, *numbers: int) -> list[list[list[int]]]:
    source = resumable(loader, seed=123)
    return [[batch["target"].tolist() for batch in source.batches(number, 0)] for number in numbers]


def joined(batches: list[list[int]]) -> list[int]:
    return [one for batch in batches for one in batch]


def test_case_28_the_first_batch_of_the_first_epoch_is_that_of_the_tutorial() -> None:
    loader = prepare_dataloader(numbered(), batch_size=16, shuffle=True)
    first, second = epochs(loader, 0, 1)
    assert first[0] == FIRST_16_OF_T7
    assert second[0][:8] == [47, 55, 17, 34, 14, 31, 16, 63]
    assert [len(batch) for batch in first] == [16] * 5
    assert sorted(joined(first)) == list(range(80))


def test_without_a_trainer_each_pass_has_another_order() -> None:
    loader = prepare_dataloader(numbered(), shuffle=True)
    first, second = ([batch["target"].tolist() for batch in loader] for _ in range(2))
    assert first != second
    assert sorted(joined(second)) == list(range(80))


def test_without_shuffling_the_samples_are_in_order() -> None:
    assert joined(epochs(prepare_dataloader(numbered(), batch_size=7), 3)[0]) == list(range(80))


def test_the_order_can_be_read_from_any_batch_on() -> None:
    loader = prepare_dataloader(numbered(), shuffle=True)
    whole = epochs(loader, 2)[0]
    rest = [batch["target"].tolist() for batch in resumable(loader, seed=9).batches(2, 3)]
    assert rest == whole[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_the_indices_of_its_samples(workers: int) -> None:
    loader = prepare_dataloader(numbered(40), shuffle=True, num_workers=workers)
    assert loader.get_batch_indices() is None
    for source in (loader, resumable(loader, seed=1).batches(0, 0)):
        for batch in source:
            assert batch.indices == batch["target"].tolist()
            assert loader.get_batch_indices() == (None if workers else batch.indices)


def test_a_batch_has_the_indices_of_its_samples_in_a_native_run() -> None:
    seen: list[tuple[Any, Any]] = []

    class Look(Callback):
        def on_batch_start(self, run: Run, batch: Any) -> None:
            seen.append((batch.indices, run.loader.get_batch_indices()))  # type: ignore[attr-defined]  # it is ours

    model = tiny_model()
    loader = prepare_dataloader(numbered(), shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Trainer(
        model, optimizer, loader, lambda model, batch: model.get_parameter("weight").sum(), max_steps=1, callbacks=[Look()]
    ).fit()
    assert seen == [(FIRST_16_OF_T7, FIRST_16_OF_T7)]


def test_shorter_samples_are_padded_with_0_of_their_type() -> None:
    loader = prepare_dataloader(
        DataSet({"ids": [[1], [2, 3]], "part": [0.5, 1.5], "flags": [[True], []], "raw": ["a", "b"], "mixed": [1, None]}),
    )
    batch = next(iter(loader))
    assert batch["ids"].tolist() == [[1, 0], [2, 3]]
    assert [batch[name].dtype for name in ("ids", "part", "flags")] == [torch.int64, torch.float32, torch.bool]
    assert batch["flags"].tolist() == [[True], [False]]
    assert (batch["raw"], batch["mixed"]) == (["a", "b"], [1, None])


def test_a_field_that_cannot_be_padded_stays_a_list() -> None:
    mixed: list[list[Any]] = [[1, 2.5], [[1], 2], [[[1]], [2]], ["a", "b"], [[], []], [{}], [1, True]]
    for values in mixed:
        assert Collator()([{"x": value} for value in values]) == {"x": [*values]} or values == [{}]
        with pytest.raises(ValueError, match=r"can be padded|of the same depth"):
            padded(values)


def test_tensors_and_arrays_are_padded_like_lists() -> None:
    tensors = [torch.ones(1, 2), torch.ones(2, 1)]
    assert padded(tensors).tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
    with pytest.raises(ValueError, match="the same number of dimensions"):
        padded([tensors[0], torch.ones(3)])
    assert padded([numpy.array([1, 2]), [3]]).tolist() == [[1, 2], [3, 0]]
    assert padded([numpy.float64(0.5), 1.5]).dtype == torch.float32


def test_a_mapping_gives_one_loader_each_and_training_data_is_shuffled() -> None:
    loaders = prepare_dataloader({"train": numbered(), "dev": numbered(20)}, batch_size=8)
    assert epochs(loaders["train"], 0)[0][0] == FIRST_16_OF_T7[:8]
    assert epochs(loaders["dev"], 0)[0][0] == list(range(8))
    assert epochs(prepare_dataloader({"train": numbered()}, shuffle=False)["train"], 0)[0][0] == list(range(16))


def test_drop_last_drops_a_short_last_batch() -> None:
    assert [len(batch) for batch in epochs(prepare_dataloader(numbered(10), batch_size=4, drop_last=True), 0)[0]] == [4, 4]


def test_other_data_sets_samplers_and_collate_functions_are_accepted() -> None:
    pairs = TensorDataset(torch.arange(6), torch.arange(6) * 2)
    loader = TorchDataLoader(pairs, batch_size=4, sampler=RandomSampler(pairs, seed=5), collate_fn=None)
    inputs, doubled = next(iter(loader))
    assert doubled.tolist() == (inputs * 2).tolist()
    assert loader.get_batch_indices() == inputs.tolist()
    batched = TorchDataLoader(
        pairs, batch_sampler=BatchSampler(range(6), 3, drop_last=False), collate_fn=lambda rows: len(rows)
    )
    assert list(batched) == [3, 3]
    assert loader.dataset.tensors is pairs.tensors  # type: ignore[attr-defined]  # it shows the data set


def test_unknown_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="backend must be 'auto' or 'torch'"):
        prepare_dataloader(numbered(), backend="paddle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="collate_fn"):
        prepare_dataloader(numbered(), collate_fn="pad")  # type: ignore[arg-type]


def test_a_run_continues_inside_an_epoch_with_the_batches_that_are_left(tmp_path: Any) -> None:
    def trained(name: str, steps: int, **resume: Any) -> tuple[Tensor, list[list[int]]]:
        model, read = tiny_model(), []

        def loss(model: torch.nn.Module, batch: Any) -> Any:
            read.append(batch.indices)
            return (model.get_parameter("weight") * batch["target"].float().mean()).sum()

        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), 1e-3),
            prepare_dataloader(numbered(), shuffle=True),
            loss,
            max_steps=steps,
            seed=0,
            directory=tmp_path / name,
            callbacks=[Checkpoint("2 steps")],
        )
        trainer.fit(**resume)
        return model.get_parameter("weight").detach(), read

    whole, all_read = trained("whole", 8)
    trained("parts", 2)
    again, rest_read = trained("parts", 8, resume="auto")
    assert rest_read == all_read[2:]
    assert torch.equal(again, whole)
