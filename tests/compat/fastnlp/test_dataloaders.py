"""fastNLP's loaders: padding, batches, the order of the samples (case 28); its collator; its samplers and their positions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import BucketedBatchSampler, DataSet, RandomBatchSampler, RandomSampler, ReproduceBatchSampler
from cadenza.compat.fastnlp.core import collators
from cadenza.compat.fastnlp.core.collators import Collator
from cadenza.compat.fastnlp.core.collators.padding import padded
from cadenza.compat.fastnlp.core.dataloaders import prepare_dataloader
from cadenza.compat.fastnlp.io import DataBundle
from cadenza.loading import Shard, resumable
from cadenza.testing import tiny_run, tiny_trainer

FIRST_16_OF_T7 = [50, 5, 19, 66, 53, 9, 64, 36, 20, 11, 13, 52, 8, 65, 16, 74]


def numbered(count: int = 80) -> DataSet:
    return DataSet({"words": [[row] * (row % 3 + 1) for row in range(count)], "target": list(range(count))})


def epochs(loader: Any, *numbers: int) -> list[list[list[int]]]:
    source = resumable(loader, seed=123)
    return [[batch["target"].tolist() for batch in source.batches(number, 0)] for number in numbers]


def test_case_28_the_first_batch_of_the_first_epoch_is_that_of_the_tutorial() -> None:
    first, second = epochs(prepare_dataloader(numbered(), batch_size=16, shuffle=True), 0, 1)
    assert first[0] == FIRST_16_OF_T7
    assert second[0][:8] == [47, 55, 17, 34, 14, 31, 16, 63]
    assert [len(batch) for batch in first] == [16] * 5
    assert sorted(chain(*first)) == list(range(80))
    assert [*chain(*epochs(prepare_dataloader(numbered(), batch_size=7), 3)[0])] == list(range(80))  # without shuffling


def test_without_a_trainer_each_pass_has_another_order_which_can_be_read_from_any_batch_on() -> None:
    loader = prepare_dataloader(numbered(), shuffle=True)
    first, second = ([batch["target"].tolist() for batch in loader] for _ in range(2))
    assert first != second
    assert sorted(chain(*second)) == list(range(80))
    loader = prepare_dataloader(numbered(), shuffle=True)
    rest = [batch["target"].tolist() for batch in resumable(loader, seed=9).batches(2, 3)]
    assert rest == epochs(loader, 2)[0][3:]


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

    @on(Callback.on_batch_start)
    def look(run: Run, batch: Any) -> None:
        seen.append((batch.indices, run.loader.get_batch_indices()))  # type: ignore[attr-defined]  # it is ours

    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        return model.get_parameter("weight").sum()

    tiny_run(loader=prepare_dataloader(numbered(), shuffle=True), compute_loss=loss, steps=1, callbacks=[look])
    assert seen == [(FIRST_16_OF_T7, FIRST_16_OF_T7)]


def test_a_mapping_gives_one_loader_each_and_training_data_is_shuffled() -> None:
    loaders = prepare_dataloader({"train": numbered(), "dev": numbered(20)}, batch_size=8)
    assert epochs(loaders["train"], 0)[0][0] == FIRST_16_OF_T7[:8]
    assert epochs(loaders["dev"], 0)[0][0] == list(range(8))
    assert epochs(prepare_dataloader({"train": numbered()}, shuffle=False)["train"], 0)[0][0] == list(range(16))
    short = prepare_dataloader(numbered(10), batch_size=4, drop_last=True)
    assert [len(batch) for batch in epochs(short, 0)[0]] == [4, 4]


def test_other_data_sets_samplers_and_collate_functions_are_accepted() -> None:
    pairs = TensorDataset(torch.arange(6), torch.arange(6) * 2)
    loader = fastnlp.TorchDataLoader(pairs, batch_size=4, sampler=RandomSampler(pairs, seed=5), collate_fn=None)
    inputs, doubled = next(iter(loader))
    assert doubled.tolist() == (inputs * 2).tolist()
    assert loader.get_batch_indices() == inputs.tolist()
    batches: Any = BatchSampler(range(6), 3, drop_last=False)
    assert list(fastnlp.TorchDataLoader(pairs, batch_sampler=batches, collate_fn=len)) == [3, 3]
    assert loader.dataset.tensors is pairs.tensors  # type: ignore[attr-defined]  # it shows the data set


def test_a_run_continues_inside_an_epoch_with_the_batches_that_are_left(tmp_path: Any) -> None:
    def trained(name: str, steps: int, **resume: Any) -> tuple[Tensor, list[list[int]]]:
        read: list[list[int]] = []

        def loss(model: torch.nn.Module, batch: Any) -> Any:
            read.append(batch.indices)
            return (model.get_parameter("weight") * batch["target"].float().mean()).sum()

        parts: dict[str, Any] = {"loader": prepare_dataloader(numbered(), shuffle=True), "compute_loss": loss}
        callbacks = [Checkpoint("2 steps")]
        trainer = tiny_trainer(**parts, steps=steps, seed=0, directory=tmp_path / name, callbacks=callbacks)
        trainer.fit(**resume)
        return trainer.model.get_parameter("weight").detach(), read

    whole, all_read = trained("whole", 8)
    trained("parts", 2)
    again, rest_read = trained("parts", 8, resume="auto")
    assert rest_read == all_read[2:]
    assert torch.equal(again, whole)


# -- padding ---------------------------------------------------------------------------------------------


def test_a_field_that_cannot_be_padded_stays_a_list_and_is_an_error_only_if_it_has_a_value() -> None:
    mixed: list[list[Any]] = [[1, 2.5], [[1], 2], [[[1]], [2]], ["a", "b"], [[], []], [{}], [1, True]]
    for values in mixed:
        assert Collator()([{"x": value} for value in values]) == {"x": [*values]} or values == [{}]
        with pytest.raises(ValueError, match=r"can be padded|of the same depth"):
            padded(values)
    assert Collator().set_pad("text")(ROWS)["text"] == ["a", "b"]
    with pytest.raises(ValueError, match=r"can be padded; got \['str'\]") as caught:
        Collator().set_pad("text", pad_val=1)(ROWS)
    assert caught.value.__notes__ == [
        "in the field ('text',), which has a setting of set_pad. Pass pad_val=None to keep a list."
    ]


ROWS = [
    {"text": "a", "ids": [1], "deep": [[1]], "part": 1.5, "array": np.ones(1), "inner": {"x": 1, "y": [1, 2]}},
    {"text": "b", "ids": [2, 3], "deep": [[1], [1, 2]], "part": 2.5, "array": np.zeros(2), "inner": {"x": 2, "y": [3]}},
]
LISTS = [[1, [1], "a", {"x": 1}], [2, [1, 2], "b", {"x": 2}]]


def plain(value: Any) -> Any:
    """Return tensors and arrays as lists."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


@pytest.mark.parametrize(("backend", "kind"), [("torch", Tensor), ("auto", Tensor), ("numpy", np.ndarray), ("raw", list)])
def test_the_backend_is_the_type_of_padded_fields(backend: str, kind: type) -> None:
    batch = Collator(backend)(ROWS)
    assert plain(batch) == {
        "text": ["a", "b"],
        "ids": [[1, 0], [2, 3]],
        "deep": [[[1, 0], [0, 0]], [[1, 0], [1, 2]]],
        "part": [1.5, 2.5],
        "array": [[1, 0], [0, 0]],
        "inner": {"x": [1, 2], "y": [[1, 2], [3, 0]]},
    }
    assert all(type(batch[name]) is kind for name in ("ids", "deep", "part", "array"))
    assert type(batch["inner"]["y"]) is kind
    assert plain(Collator(backend)(LISTS)) == [[1, 2], [[1, 0], [1, 2]], ["a", "b"], [{"x": 1}, {"x": 2}]]


def test_shorter_lists_tensors_and_arrays_are_padded_with_0_of_their_type() -> None:
    fields: Any = {"ids": [[1], [2, 3]], "part": [0.5, 1.5], "flags": [[True], []], "raw": ["a", "b"], "mixed": [1, None]}
    batch = next(iter(prepare_dataloader(DataSet(fields))))
    assert batch["ids"].tolist() == [[1, 0], [2, 3]]
    assert [batch[name].dtype for name in ("ids", "part", "flags")] == [torch.int64, torch.float32, torch.bool]
    assert batch["flags"].tolist() == [[True], [False]]
    assert (batch["raw"], batch["mixed"]) == (["a", "b"], [1, None])
    assert Collator(None)([{"ids": [1]}, {"ids": [2, 3]}]) == {"ids": [[1], [2, 3]]}  # without a backend
    tensors = [torch.ones(1, 2), torch.ones(2, 1)]
    assert padded(tensors).tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
    with pytest.raises(ValueError, match="the same number of dimensions"):
        padded([tensors[0], torch.ones(3)])
    assert padded([numpy.array([1, 2]), [3]]).tolist() == [[1, 2], [3, 0]]
    assert padded([numpy.float64(0.5), 1.5]).dtype == torch.float32


def ids() -> DataSet:
    return DataSet({"ids": [[1], [2, 3]], "target": [0, 1]})


def test_loaders_copy_the_settings_of_their_data_set() -> None:
    rows = ids()
    rows.set_pad("ids", pad_val=-1)
    loader, other = fastnlp.TorchDataLoader(rows), prepare_dataloader(rows[:])
    loader.set_ignore("target")
    loader.set_pad("ids", 5)
    batch = next(iter(loader))
    assert (batch.keys(), batch["ids"].tolist()) == ({"ids"}, [[1, 5], [2, 3]])
    batch = next(iter(other))
    assert (batch.keys(), batch["ids"].tolist()) == ({"ids", "target"}, [[1, -1], [2, 3]])
    assert loader.get_batch_indices() == loader.cur_batch_indices == [0, 1]


@pytest.mark.parametrize("given", [DataBundle(datasets={"train": ids(), "dev": ids()}), {"train": ids(), "dev": ids()}])
def test_several_data_sets_get_loaders_for_training_and_for_evaluation(given: Any) -> None:
    options: dict[str, Any] = {"non_train_batch_size": 2, "non_train_sampler": [1], "drop_last": False}
    loaders = fastnlp.prepare_torch_dataloader(given, batch_size=1, **options)
    assert [len(list(loader)) for loader in loaders.values()] == [2, 1]
    assert isinstance(loaders["train"].sampler, RandomSampler)
    assert loaders["train"].sampler.shuffle
    assert next(iter(loaders["dev"]))["target"].tolist() == [1]


@pytest.mark.usefixtures("fresh_logger")
def test_the_arguments_are_those_of_fastnlp(capsys: pytest.CaptureFixture[str]) -> None:
    fastnlp.logger.set_stdout("raw")
    loader = fastnlp.TorchDataLoader(
        ids(), 2, False, None, None, 0, "auto", False, True, 0, None, None, None, 2, False, as_numpy=True
    )
    assert (loader.drop_last, loader.pin_memory, loader.prefetch_factor) == (True, False, None)
    assert capsys.readouterr().out == "TorchDataLoader has no arguments ['as_numpy'], so they have no effect\n"


def test_a_field_has_its_own_value_type_and_function_and_elements_of_sequences_have_numbers() -> None:
    collator = Collator().set_pad("ids", pad_val=-100).set_pad("part", dtype=int, backend="numpy").set_pad("deep", pad_val=None)
    collator.set_pad(("inner", "y"), pad_fn=lambda values: [len(value) for value in values]).set_ignore("text", ("inner", "x"))
    batch = collator(ROWS)
    assert batch.keys() == {"ids", "deep", "part", "array", "inner"}
    assert batch["ids"].tolist() == [[1, -100], [2, 3]]
    assert (batch["part"].tolist(), batch["part"].dtype) == ([1, 2], np.int64)
    assert (batch["deep"], batch["inner"]) == ([[[1]], [[1], [1, 2]]], {"y": [2, 1]})
    assert Collator().set_pad("part", dtype=torch.float64)(ROWS)["part"].dtype is torch.float64
    assert Collator().set_pad("ids", dtype=np.int32)(ROWS)["ids"].dtype is torch.int32
    collator = Collator("raw").set_ignore("_0", "_3").set_pad("_1", pad_val=7)
    assert collator(LISTS) == [[[1, 7], [1, 2]], ["a", "b"]]
    assert Collator("raw").set_pad("_single")([[1], [2, 3]]) == [[1, 0], [2, 3]]


@pytest.mark.usefixtures("fresh_logger")
def test_the_last_setting_of_a_field_counts(capsys: pytest.CaptureFixture[str]) -> None:
    fastnlp.logger.set_stdout("raw")
    collator = Collator().set_pad("ids").set_ignore("ids")
    assert "ids" not in collator(ROWS)
    assert "ids" in collator.set_pad("ids")(ROWS)
    Collator().set_pad(("inner", "x")).set_pad(("inner", "y")).set_ignore("inner")
    assert capsys.readouterr().out.splitlines() == [
        "the field 'ids' was padded; now it is ignored",
        "the field 'ids' was ignored; now it is padded",
        "the field ('inner', 'x') was padded; now it is ignored",
        "the field ('inner', 'y') was padded; now it is ignored",
    ]


@pytest.mark.parametrize("backend", ["Torch", "Numpy", "Raw"])
def test_padders_make_a_field_of_a_batch(backend: str) -> None:
    number, sequence, tensor = (getattr(collators, f"{backend}{kind}Padder") for kind in ("Number", "Sequence", "Tensor"))
    assert type(number()([1, 2])) is {"Torch": torch.Tensor, "Numpy": np.ndarray, "Raw": list}[backend]
    assert plain(sequence(pad_val=-1, dtype=float)([[1], [2, 3]])) == [[1.0, -1.0], [2.0, 3.0]]
    assert plain(sequence.pad([[[1]], [[2], [3, 4]]])) == [[[1, 0], [0, 0]], [[2, 0], [3, 4]]]
    assert plain(tensor(ele_dtype=float)([np.ones(1), np.ones(2)])) == [[1.0, 0.0], [1.0, 1.0]]
    for options in ({"ele_dtype": str}, {"dtype": "text"}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} of {backend}NumberPadder must be a type of numbers"):
            number(**options)


def test_custom_padders_are_functions_of_fields() -> None:
    class Lengths(collators.Padder):
        @staticmethod
        def pad(batch_field: list[Any], pad_val: Any = 0, dtype: Any = None) -> Any:
            return [len(value) + pad_val for value in batch_field]

    assert Collator().set_pad("ids", pad_fn=Lengths(10))(ROWS)["ids"] == [11, 12]
    assert collators.NullPadder()([1, "a"]) == [1, "a"]
    assert collators.get_padded_numpy_array([[1], [2, 3]], pad_val=7).tolist() == [[1, 7], [2, 3]]


# -- samplers ----------------------------------------------------------------------------------------------

TEN = range(10)
LENGTHS = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
Sampler = Any


def at_epoch(sampler: Sampler, epoch: int = 0) -> Sampler:
    sampler.set_epoch(epoch)
    return sampler


def test_an_order_depends_on_the_seed_and_the_epoch_or_begins_with_the_longest_sample() -> None:
    assert list(at_epoch(RandomSampler(TEN))) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert list(at_epoch(RandomSampler(TEN, seed=2), 1)) == list(at_epoch(RandomSampler(TEN), 3))
    without_trainer = RandomSampler(TEN)
    assert list(without_trainer) != list(without_trainer)
    assert without_trainer.epoch == -3
    dataset = DataSet({"words": [["a"] * length for length in LENGTHS], "seq_len": LENGTHS})
    order = [5, 8, 9, 7, 4, 2, 0, 6, 1, 3]
    for length in (LENGTHS, "words", "seq_len"):
        assert list(fastnlp.SortedSampler(dataset, length)) == list(fastnlp.UnrepeatedSortedSampler(dataset, length)) == order
    with pytest.raises(TypeError, match="dataset must be a DataSet; got a range"):
        fastnlp.SortedSampler(TEN, "words")
    with pytest.raises(AssertionError, match="a number for each of the 10 samples; got 1"):
        fastnlp.SortedSampler(TEN, [1])


@pytest.mark.parametrize(
    ("pad", "shards"), [(True, [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]), (False, [[0, 3, 6], [1, 4, 7], [2, 5, 8]])]
)
def test_shards_have_one_size(pad: bool, shards: list[list[int]]) -> None:
    samplers = [fastnlp.SequentialSampler(TEN).set_distributed(3, rank, pad=pad) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == shards
    assert {len(sampler) for sampler in samplers} == {len(shards[0])}


def test_unrepeated_shards_have_each_sample_once() -> None:
    shards = [list(fastnlp.UnrepeatedRandomSampler(TEN).set_distributed(3, rank)) for rank in range(3)]
    assert shards == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    chunks = [fastnlp.UnrepeatedSequentialSampler(TEN, chunk_dist=True).set_distributed(3, rank) for rank in range(3)]
    assert [list(sampler) for sampler in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [len(sampler) for sampler in chunks] == [3, 3, 4]
    with pytest.raises(AssertionError, match="there are 11 ranks, but only 10 samples"):
        fastnlp.UnrepeatedRandomSampler(TEN).set_distributed(11, 0)


def test_a_loaded_position_continues_the_epoch_also_on_other_ranks() -> None:
    sampler = at_epoch(RandomSampler(TEN))
    first = list(islice(sampler, 4))
    states = sampler.state_dict()
    position = {"seed": 0, "epoch": 0, "shuffle": True, "num_consumed_samples": 4}
    assert states == {**position, "sampler_type": "RandomSampler", "length": 10}
    other = RandomSampler(TEN, shuffle=False, seed=7)
    other.load_state_dict(states)
    assert [*first, *other] == list(at_epoch(RandomSampler(TEN)))
    assert len(list(other)) == 10, "the next epoch is complete"
    rest = []
    for rank in range(3):
        shard = RandomSampler(TEN)
        shard.load_state_dict(states)
        rest += list(shard.set_distributed(3, rank, pad=False))
    assert sorted([*first, *rest]) == list(TEN)


def begun(sampler: Sampler) -> Sampler:
    next(iter(sampler))
    return sampler


STATES = begun(RandomSampler(TEN)).state_dict()
WHOLE = "must be a whole number of at least 1; got 0"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: Collator().set_ignore(("inner", "x")).set_pad("inner"), KeyError, "is ignored, and one contains the other"),
        (lambda: Collator().set_pad("inner").set_pad(("inner", "x")), KeyError, "is padded, and one contains the other"),
        (lambda: Collator().set_pad("inner").set_ignore(("inner", "x")), KeyError, "which contains it, is padded"),
        (lambda: Collator().set_pad("ids").set_pad("_0"), AssertionError, "samples cannot have both"),
        (lambda: Collator("paddle"), ValueError, "backend must be one of"),
        (lambda: prepare_dataloader(ids(), backend="paddle"), ValueError, "backend must be 'auto' or 'torch'"),  # type: ignore[arg-type]
        (lambda: prepare_dataloader(ids(), collate_fn="pad"), ValueError, "collate_fn"),  # type: ignore[arg-type]
        (
            lambda: fastnlp.TorchDataLoader(ids(), collate_fn=len).set_pad("ids"),
            ValueError,
            "set_pad needs collate_fn='auto' or a Collator",
        ),
        (lambda: fastnlp.TorchDataLoader(ids(), collate_fn=None), ValueError, "cannot collate the rows of a DataSet"),
        (
            lambda: fastnlp.prepare_torch_dataloader({"dev": ids()}, sampler=[0]),
            AssertionError,
            "sampler and batch_sampler are for one data set",
        ),
        (lambda: fastnlp.prepare_torch_dataloader(3), ValueError, "needs __getitem__ and __len__; got a int"),
        (lambda: collators.Padder()([1]), NotImplementedError, "needs a static method pad"),
        (lambda: RandomBatchSampler(TEN, batch_size=0), ValueError, f"batch_size {WHOLE}"),
        (lambda: BucketedBatchSampler(TEN, LENGTHS, num_batch_per_bucket=0), ValueError, f"num_batch_per_bucket {WHOLE}"),
        (lambda: begun(RandomSampler(TEN)).set_distributed(2, 0), AssertionError, "set_distributed must not be called while"),
        (
            lambda: RandomSampler(TEN).set_distributed(2, 2),
            AssertionError,
            "rank must be at least 0, and less than num_replicas; got 2 and 2",
        ),
        (lambda: begun(ReproduceBatchSampler(TEN, 2, False)).set_distributed(2, 0), RuntimeError, "has no shards"),
        (lambda: RandomSampler(range(11)).load_state_dict(STATES), AssertionError, "length=10, but this sampler has 11"),
        (
            lambda: fastnlp.SequentialSampler(TEN).load_state_dict(STATES),
            AssertionError,
            "sampler_type='RandomSampler', but this sampler has 'SequentialSampler'",
        ),
        (
            lambda: ReproduceBatchSampler([0], 1, False).load_state_dict(ReproduceBatchSampler(TEN, 2, False).state_dict()),
            AssertionError,
            "the checkpoint has the sampler and the length",
        ),
        (lambda: iter(fastnlp.ReproducibleSampler()), NotImplementedError, "ReproducibleSampler needs a method __iter__"),
        (
            lambda: iter(fastnlp.ReproducibleBatchSampler()),
            NotImplementedError,
            "ReproducibleBatchSampler needs a method __iter__",
        ),
    ],
)
def test_wrong_uses_and_contradictory_settings_are_errors(
    use: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        use()


def test_another_sampler_gets_a_position() -> None:
    given = [[3, 1], [2, 0], [4]]
    sampler = ReproduceBatchSampler(given, batch_size=2, drop_last=False)
    assert next(iter(sampler)) == [3, 1]
    assert (sampler.batch_idx_in_epoch, len(sampler)) == (1, 3)
    other = ReproduceBatchSampler([0, 1, 2, 3, 4], batch_size=2, drop_last=False)
    other.load_state_dict(sampler.state_dict())
    assert (list(other), list(other)) == ([[2, 0], [4]], [[0, 1], [2, 3], [4]])
    assert list(ReproduceBatchSampler(range(5), 2, True)) == [[0, 1], [2, 3]]


def test_a_trainer_sets_the_epoch_of_a_batch_sampler_and_continues_inside_of_one(tmp_path: Path) -> None:
    class Sum(torch.nn.Module):
        """Notes the samples of each batch."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.seen: list[list[int]] = []

        def train_step(self, number: Tensor) -> dict[str, Tensor]:
            self.seen.append(number.tolist())
            return {"loss": self.weight.sum()}

    def trained(**resume: Any) -> list[list[int]]:
        """Return the batches of two epochs with buckets; save a checkpoint after three."""
        model, dataset = Sum(), DataSet({"number": list(TEN)})
        loader = fastnlp.TorchDataLoader(dataset, batch_sampler=BucketedBatchSampler(dataset, LENGTHS, 2, 2))
        trainer = fastnlp.Trainer(model, loader, torch.optim.SGD(model.parameters(), 0.1), n_epochs=2, progress_bar=None)
        trainer.add_callback_fn(fastnlp.Event.on_train_batch_end(once=3), lambda trainer: trainer.save_checkpoint(tmp_path))
        trainer.run(**resume)
        return model.seen

    expected = BucketedBatchSampler(TEN, LENGTHS, 2, 2)
    whole = trained()
    assert whole == [*at_epoch(expected, 0), *at_epoch(expected, 1)]
    assert trained(resume_from=tmp_path) == whole[3:]


def test_batches_are_random_or_of_similar_lengths_and_the_last_one_may_be_dropped() -> None:
    sampler = at_epoch(RandomBatchSampler(TEN, batch_size=4))
    assert (len(sampler), list(sampler)) == (3, [[4, 6, 2, 7], [3, 5, 9, 0], [8, 1]])
    assert [len(batch) for batch in RandomBatchSampler(TEN, 4, drop_last=True)] == [4, 4]
    assert list(RandomBatchSampler(TEN, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    sampler = at_epoch(BucketedBatchSampler(TEN, LENGTHS, batch_size=2, num_batch_per_bucket=2))
    batches = list(sampler)
    assert batches == [[6, 0], [9, 5], [8, 7], [2, 4], [3, 1]]
    buckets = [{5, 8, 9, 7}, {4, 2, 0, 6}, {1, 3}]
    assert all(any(set(batch) <= bucket for bucket in buckets) for batch in batches)
    assert list(BucketedBatchSampler(TEN, LENGTHS, 4, shuffle=False)) == [[5, 8, 9, 7], [4, 2, 0, 6], [1, 3]]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("pad", [True, False])
def test_batches_of_shards_have_one_size(pad: bool, drop_last: bool) -> None:
    samplers = [BucketedBatchSampler(range(11), [*LENGTHS, 2], 2, 2, drop_last=drop_last) for _ in range(2)]
    shards = [list(at_epoch(sampler.set_distributed(2, rank, pad=pad))) for rank, sampler in enumerate(samplers)]
    assert [len(batch) for batch in shards[0]] == [len(batch) for batch in shards[1]]
    seen = sorted(index for shard in shards for batch in shard for index in batch)
    assert len(set(seen)) >= len(seen) - 1
    assert {len(sampler) for sampler in samplers} == {len(shards[0])}


@pytest.mark.parametrize("kind", ["random", "buckets"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_rest_of_an_epoch_may_have_another_batch_size(kind: str, shuffle: bool) -> None:
    def sampler(size: int) -> Sampler:
        if kind == "random":
            return RandomBatchSampler(TEN, size, shuffle=shuffle)
        return BucketedBatchSampler(TEN, LENGTHS, size, 2, shuffle=shuffle)

    one = at_epoch(sampler(2))
    first = list(islice(one, 2))
    states = one.state_dict()
    assert (states["num_consumed_samples"], one.batch_idx_in_epoch) == (4, 2)
    other = sampler(3)
    other.load_state_dict(states)
    with pytest.raises(RuntimeError, match="continues a checkpoint with batch_size=2"):
        other.state_dict()
    rest = list(other)
    assert [len(batch) for batch in rest] == [3, 3]
    assert sorted(index for batch in (*first, *rest) for index in batch) == list(TEN)
    assert other.state_dict()["batch_size"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": RandomSampler(range(40)), "batch_size": 4},
        {"batch_sampler": RandomBatchSampler(range(40), batch_size=4)},
        {"batch_sampler": BucketedBatchSampler(range(40), length=[*range(40)], batch_size=4, num_batch_per_bucket=2)},
    ],
    ids=["RandomSampler", "RandomBatchSampler", "BucketedBatchSampler"],
)
def test_each_of_two_ranks_gets_half_of_the_batches(options: dict[str, Any]) -> None:
    loader: DataLoader[int] = DataLoader(range(40), **options)  # type: ignore[arg-type]  # a range is a data set
    whole = [batch.tolist() for batch in resumable(loader, 0).batches(0, 0)]
    halves = [[batch.tolist() for batch in resumable(loader, 0, shard=Shard(rank, 2)).batches(0, 0)] for rank in range(2)]
    assert halves == [whole[0::2], whole[1::2]]
