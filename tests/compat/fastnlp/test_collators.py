"""The collator of fastNLP: which fields are padded, with which value and type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cadenza.compat.fastnlp import Collator, DataSet, TorchDataLoader, logger, prepare_dataloader, prepare_torch_dataloader
from cadenza.compat.fastnlp.core import collators
from cadenza.compat.fastnlp.core.samplers import RandomSampler

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


@pytest.mark.parametrize(
    ("backend", "kind"), [("torch", torch.Tensor), ("auto", torch.Tensor), ("numpy", np.ndarray), ("raw", list)]
)
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


def test_without_a_backend_nothing_is_padded() -> None:
    assert Collator(None)([{"ids": [1]}, {"ids": [2, 3]}]) == {"ids": [[1], [2, 3]]}


def test_a_field_has_its_own_value_type_and_function() -> None:
    collator = Collator().set_pad("ids", pad_val=-100).set_pad("part", dtype=int, backend="numpy").set_pad("deep", pad_val=None)
    collator.set_pad(("inner", "y"), pad_fn=lambda values: [len(value) for value in values]).set_ignore("text", ("inner", "x"))
    batch = collator(ROWS)
    assert batch.keys() == {"ids", "deep", "part", "array", "inner"}
    assert batch["ids"].tolist() == [[1, -100], [2, 3]]
    assert (batch["part"].tolist(), batch["part"].dtype) == ([1, 2], np.int64)
    assert (batch["deep"], batch["inner"]) == ([[[1]], [[1], [1, 2]]], {"y": [2, 1]})
    assert Collator().set_pad("part", dtype=torch.float64)(ROWS)["part"].dtype is torch.float64
    assert Collator().set_pad("ids", dtype=np.int32)(ROWS)["ids"].dtype is torch.int32


def test_elements_of_sequences_have_numbers() -> None:
    collator = Collator("raw").set_ignore("_0", "_3").set_pad("_1", pad_val=7)
    assert collator(LISTS) == [[[1, 7], [1, 2]], ["a", "b"]]
    assert Collator("raw").set_pad("_single")([[1], [2, 3]]) == [[1, 0], [2, 3]]


def test_a_field_that_cannot_be_padded_is_an_error_only_if_it_has_a_value() -> None:
    assert Collator().set_pad("text")(ROWS)["text"] == ["a", "b"]
    with pytest.raises(ValueError, match=r"can be padded; got \['str'\]") as caught:
        Collator().set_pad("text", pad_val=1)(ROWS)
    assert caught.value.__notes__ == [
        "in the field ('text',), which has a setting of set_pad. Pass pad_val=None to keep a list."
    ]


@pytest.mark.usefixtures("fresh_logger")
def test_the_last_setting_of_a_field_counts(capsys: pytest.CaptureFixture[str]) -> None:
    logger.set_stdout("raw")
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


def test_settings_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(KeyError, match="is ignored, and one contains the other"):
        Collator().set_ignore(("inner", "x")).set_pad("inner")
    with pytest.raises(KeyError, match="is padded, and one contains the other"):
        Collator().set_pad("inner").set_pad(("inner", "x"))
    with pytest.raises(KeyError, match="which contains it, is padded"):
        Collator().set_pad("inner").set_ignore(("inner", "x"))
    with pytest.raises(AssertionError, match="samples cannot have both"):
        Collator().set_pad("ids").set_pad("_0")
    with pytest.raises(ValueError, match="backend must be one of"):
        Collator("paddle")


def dataset() -> DataSet:
    return DataSet({"ids": [[1], [2, 3]], "target": [0, 1]})


def test_loaders_copy_the_settings_of_their_data_set() -> None:
    rows = dataset()
    rows.set_pad("ids", pad_val=-1)
    loader, other = TorchDataLoader(rows), prepare_dataloader(rows[:])
    loader.set_ignore("target")
    loader.set_pad("ids", 5)
    batch = next(iter(loader))
    assert (batch.keys(), batch["ids"].tolist()) == ({"ids"}, [[1, 5], [2, 3]])
    batch = next(iter(other))
    assert (batch.keys(), batch["ids"].tolist()) == ({"ids", "target"}, [[1, -1], [2, 3]])
    assert loader.get_batch_indices() == loader.cur_batch_indices == [0, 1]
    with pytest.raises(ValueError, match="set_pad needs collate_fn='auto' or a Collator"):
        TorchDataLoader(rows, collate_fn=len).set_pad("ids")
    with pytest.raises(ValueError, match="cannot collate the rows of a DataSet"):
        TorchDataLoader(rows, collate_fn=None)


def test_several_data_sets_get_loaders_for_training_and_for_evaluation() -> None:
    class Bundle:
        """As fastNLP's DataBundle."""

        def __init__(self) -> None:
            self.datasets = {"train": dataset(), "dev": dataset()}

    for given in (Bundle(), Bundle().datasets):
        loaders = prepare_torch_dataloader(given, batch_size=1, non_train_batch_size=2, non_train_sampler=[1], drop_last=False)
        assert [len(list(loader)) for loader in loaders.values()] == [2, 1]
        assert isinstance(loaders["train"].sampler, RandomSampler)
        assert loaders["train"].sampler.shuffle
        assert next(iter(loaders["dev"]))["target"].tolist() == [1]
    with pytest.raises(AssertionError, match="sampler and batch_sampler are for one data set"):
        prepare_torch_dataloader(Bundle(), sampler=[0])
    with pytest.raises(ValueError, match="needs __getitem__ and __len__; got a int"):
        prepare_torch_dataloader(3)


@pytest.mark.usefixtures("fresh_logger")
def test_the_arguments_are_those_of_fastnlp(capsys: pytest.CaptureFixture[str]) -> None:
    logger.set_stdout("raw")
    loader = TorchDataLoader(
        dataset(), 2, False, None, None, 0, "auto", False, True, 0, None, None, None, 2, False, as_numpy=True
    )
    assert (loader.drop_last, loader.pin_memory, loader.prefetch_factor) == (True, False, None)
    assert capsys.readouterr().out == "TorchDataLoader has no arguments ['as_numpy'], so they have no effect\n"


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
    with pytest.raises(NotImplementedError, match="needs a static method pad"):
        collators.Padder()([1])
