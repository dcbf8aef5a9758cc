"""fastNLP's data sets: fields, rows, functions on rows, and the table that they are printed as."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from cadenza.compat.fastnlp.core.dataset import ApplyResultException, DataSet, FieldArray, Instance


def texts(count: int = 4) -> DataSet:
    return DataSet({"words": [["w"] * (row + 1) for row in range(count)], "target": [row % 2 for row in range(count)]})


def doubled(row: Instance) -> dict[str, Any]:
    return {"double": row["target"] * 2}


def test_a_number_gives_a_row_a_name_a_field_and_a_slice_or_a_list_a_data_set() -> None:
    dataset = texts()
    assert isinstance(dataset[1], Instance)
    assert dataset[-1].to_dict() == {"words": ["w"] * 4, "target": 1}
    assert isinstance(dataset["target"], FieldArray)
    assert list(dataset["target"]) == [0, 1, 0, 1]
    assert [len(row["words"]) for row in dataset[1:3]] == [2, 3]
    assert [len(row["words"]) for row in dataset[[3, 0]]] == [4, 1]
    assert len(dataset[:2]) == 2


def test_rows_make_a_data_set_as_fields_do() -> None:
    assert DataSet([Instance(a=1), {"a": 2}])["a"][:] == [1, 2]
    assert len(DataSet()) == 0


def test_data_that_is_not_a_table_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"the same length; got {'a': 2, 'b': 1}"):
        DataSet({"a": [1, 2], "b": [1]})
    with pytest.raises(AssertionError, match="must be of type Instance or dict; got a list"):
        DataSet([[1], [2]])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="'a' of a new DataSet must have at least one value"):
        DataSet().add_field("a", [])
    with pytest.raises(RuntimeError, match="there are 4 rows; got a slice from 4"):
        texts()[4:]
    assert len(texts()[1:1]) == 0
    with pytest.raises(RuntimeError, match=r"'b' must have 2 values"):
        DataSet({"a": [1, 2]}).add_field("b", [1])
    with pytest.raises(ValueError, match=r"row 1 must have the fields \['a'\]; got \['b'\]"):
        DataSet([{"a": 1}, {"b": 1}])
    with pytest.raises(ValueError, match=r"a dict of lists"):
        DataSet(3)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match=r"no field 'target_'.*Did you mean 'target'"):
        texts()["target_"]
    with pytest.raises(KeyError, match="no field 'never'"):
        texts().delete_field("never")
    with pytest.raises(IndexError, match="4 rows"):
        texts()[4]
    with pytest.raises(KeyError, match="no field 'x'"):
        texts()[0]["x"]


def test_a_hugging_face_data_set_is_copied_with_all_its_columns() -> None:
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_dict({"sentence": ["a b", "c"], "label": [0, 1]})
    dataset = DataSet.from_datasets(given)
    assert dataset.get_field_names() == ["sentence", "label"]
    assert dataset[1].to_dict() == {"sentence": "c", "label": 1}
    with pytest.raises(ValueError, match=r"datasets.Dataset; got DatasetDict.*loaded\['train'\]"):
        DataSet.from_datasets(datasets.DatasetDict({"train": given}))


@pytest.mark.parametrize("bar", ["rich", "tqdm", None])
def test_apply_more_adds_fields_and_returns_them(bar: Any) -> None:
    dataset = texts()
    made = dataset.apply_more(lambda row: {"target": -row["target"], "first": row["words"][0]}, progress_bar=bar)
    assert made == {"target": [0, -1, 0, -1], "first": ["w"] * 4}
    assert dataset.get_field_names() == ["words", "target", "first"]
    assert list(dataset["target"]) == [0, -1, 0, -1]


def test_apply_more_shows_the_bar_of_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    texts().apply_more(doubled, progress_bar="tqdm")
    assert re.search(r"Processing: +0%\|.*\| 0/4 \[", capsys.readouterr().err)


def test_apply_more_without_modify_fields_does_not_change_the_data_set() -> None:
    dataset = texts()
    assert dataset.apply_more(doubled, modify_fields=False, progress_bar=None) == {"double": [0, 2, 0, 2]}
    assert not dataset.has_field("double")


def test_several_processes_return_the_results_of_one() -> None:
    alone, together = texts(9), texts(9)
    alone.apply_more(abs_target, progress_bar=None)
    together.apply_more(abs_target, num_proc=2, progress_bar=None)
    assert list(together["abs"]) == list(alone["abs"])


def abs_target(row: Instance) -> dict[str, Any]:
    return {"abs": abs(row["target"] - 5)}


def test_apply_more_with_a_wrong_result_is_an_error() -> None:
    with pytest.raises(AssertionError, match="empty"):
        DataSet().apply_more(doubled)
    with pytest.raises(ApplyResultException, match="for row 0 it returned 3"):
        texts().apply_more(lambda row: 3, progress_bar=None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ApplyResultException, match=r"for row 1 the function returned the fields \['y'\], before \['x'\]"):
        texts().apply_more(lambda row: {"y" if row["target"] else "x": 1}, progress_bar=None)
    with pytest.raises(TypeError, match="expected a function of a row; got 3"):
        texts().apply_more(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lambda"):
        texts().apply_more(lambda row: {}, num_proc=2)
    with pytest.raises(ValueError, match="progress_bar"):
        texts().apply_more(doubled, progress_bar="raw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_proc"):
        texts().apply_more(doubled, num_proc=-1)


def test_lengths_are_added_and_fields_deleted_in_a_chain() -> None:
    dataset = texts().add_seq_len("words").delete_field("words")
    assert dataset.get_field_names() == ["target", "seq_len"]
    assert list(dataset["seq_len"]) == [1, 2, 3, 4]
    assert list(texts().add_seq_len("words", "length")["length"]) == [1, 2, 3, 4]


def test_a_split_of_100_rows_at_four_fifths_has_80_and_20() -> None:
    first, rest = texts(100).split(ratio=0.8)
    assert (len(first), len(rest)) == (80, 20)
    assert sorted(len(row["words"]) for row in [*first, *rest]) == list(range(1, 101))


def test_a_split_is_shuffled_by_numpys_generator_or_not_at_all() -> None:
    numpy.random.seed(3)
    expected = list(range(10))
    numpy.random.shuffle(expected)
    numpy.random.seed(3)
    first, rest = texts(10).split(0.5)
    assert [len(row["words"]) - 1 for row in [*first, *rest]] == expected
    first, _ = texts(10).split(0.55, shuffle=False)
    assert [len(row["words"]) for row in first] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("ratio", [0, 1, 0.0, 1.0, 1.5])
def test_a_split_needs_a_ratio_between_0_and_1(ratio: float) -> None:
    with pytest.raises(AssertionError, match="between 0 and 1"):
        texts().split(ratio)


def test_without_a_terminal_twelve_rows_are_shown_and_long_cells_are_cut() -> None:
    lines = str(DataSet({"words": [list(range(100))] * 13, "target": [1] * 13, "seq_len": [5] * 13})).splitlines()
    assert len(lines) == 1 + 1 + 1 + 12 + 1 + 1
    assert lines[3] == "| [0, 1, 2, 3, 4, 5, 6, 7, ... | 1      | 5       |"
    assert lines[-2] == "| ...                          | ...    | ...     |"
    assert len(str(DataSet({"a": [1] * 12})).splitlines()) == 16  # all of them: no dots


def test_wide_characters_take_two_columns() -> None:
    assert str(DataSet({"字": ["你好"], "b": ["x"]})).splitlines() == [
        "+------+---+",
        "| 字   | b |",
        "+------+---+",
        "| 你好 | x |",
        "+------+---+",
    ]


def test_a_row_is_shown_as_a_table_of_one() -> None:
    assert repr(Instance(words=["a"], target=1)).splitlines()[-2] == "| ['a'] | 1      |"


def numbers() -> DataSet:
    return DataSet({"x": [[1, 2], [3]], "y": [0, 1]})


def test_functions_of_rows_or_of_values_return_their_results_or_make_fields() -> None:
    rows = numbers()
    assert rows.apply(lambda row: len(row["x"]), progress_bar=None) == [2, 1]
    assert rows.apply(lambda row: -row["y"], "y", progress_bar="tqdm") == rows["y"].content == [0, -1]
    assert rows.apply_field(sum, "x", new_field_name="sum", progress_bar=None) == rows["sum"].content == [3, 3]
    more = rows.apply_field_more(lambda value: {"first": value[0]}, "x", modify_fields=False, progress_bar=None)
    assert (more, "first" in rows) == ({"first": [1, 3]}, False)
    assert rows.apply_field(len, "x", num_proc=2, progress_bar=None) == [2, 1]


def test_fields_are_copied_and_renamed() -> None:
    rows = numbers().copy_field("x", "z").rename_field("y", "target")
    rows["z"][0].append(9)
    assert (rows["x"][0], rows.get_field_names(), rows["target"].name) == ([1, 2], ["x", "z", "target"], "target")
    rows.add_fieldarray("w", FieldArray("w", [5, 6]))
    assert (rows.get_all_fields()["w"].content, rows.get_length()) == ([5, 6], 2)
    with pytest.raises(TypeError, match="fieldarray must be a FieldArray; got a list"):
        rows.add_fieldarray("w", [5, 6])  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no field 'never'"):
        rows.rename_field("never", "x")


def test_rows_are_replaced_removed_and_joined() -> None:
    rows = numbers()
    rows[0] = rows[1]
    assert rows["y"].content == [1, 1]
    with pytest.raises(KeyError, match=r"must have the fields \['x', 'y'\]; got \['x'\]"):
        rows[0] = {"x": 1}
    rows = numbers()
    assert len(rows.drop(lambda row: row["y"] == 1, inplace=False)) == 1
    assert (len(rows), len(rows.drop(lambda row: True))) == (2, 0)
    rows, other = numbers(), DataSet({"X": [[7]], "y": [5], "more": [0]})
    joined = rows.concat(other, inplace=False, field_mapping={"X": "x"})
    other["X"][0].append(8)
    assert (joined["x"].content, len(rows), joined.get_field_names()) == ([[1, 2], [3], [7]], 2, ["x", "y"])
    with pytest.raises(RuntimeError, match=r"has no fields \['x'\]"):
        rows.concat(other)
    assert len(numbers().delete_instance(0)) == 1
    with pytest.raises(IndexError, match="there are 2 rows; got the index 2"):
        numbers().delete_instance(2)


def test_a_data_set_is_written_and_read(tmp_path: Path) -> None:
    rows = numbers()
    rows.save(tmp_path / "rows")
    assert DataSet.load(tmp_path / "rows")["x"].content == rows["x"].content
    (tmp_path / "other").write_bytes(pickle.dumps([1]))
    with pytest.raises(TypeError, match="contains a list, not a DataSet"):
        DataSet.load(tmp_path / "other")
    rows.to_csv(tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text() == ',x,y\n0,"[1, 2]",0\n1,[3],1\n'
    assert DataSet.from_pandas(rows.to_pandas())["y"].content == [0, 1]


def test_a_field_converts_its_values() -> None:
    field = FieldArray("f", ["1", ["2", "0"]])
    assert (field.int(inplace=False), field.float(inplace=False)) == ([1, [2, 0]], [1.0, [2.0, 0.0]])
    assert field.int().bool().content == [True, [True, False]]
    texts = FieldArray("f", ["A b", "c"])
    assert (texts.lower(inplace=False), texts.upper().split(inplace=False)) == (["a b", "c"], [["A", "B"], ["C"]])
    assert FieldArray("f", ["a", "b", "a"]).value_count() == {"a": 2, "b": 1}
    assert (texts[0:1], type(texts[[0]]), texts.get([1, 0]).tolist()) == (["A B"], numpy.ndarray, ["C", "A B"])
    assert FieldArray("f", [[1], [2, 3]]).get([0, 1]).tolist() == [[1], [2, 3]]
