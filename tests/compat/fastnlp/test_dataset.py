"""fastNLP's data sets, their fields and rows, the table that they are printed as; vocabularies, and bundles of both."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from cadenza.compat.fastnlp import DataSet, Vocabulary, prepare_dataloader
from cadenza.compat.fastnlp.core.dataset import ApplyResultException, FieldArray, Instance
from cadenza.compat.fastnlp.io import DataBundle


def texts(count: int = 4) -> DataSet:
    return DataSet({"words": [["w"] * (row + 1) for row in range(count)], "target": [row % 2 for row in range(count)]})


def doubled(row: Instance) -> dict[str, Any]:
    return {"double": row["target"] * 2}


def numbers() -> DataSet:
    return DataSet({"x": [[1, 2], [3]], "y": [0, 1]})


def test_a_number_gives_a_row_a_name_a_field_and_a_slice_or_a_list_a_data_set() -> None:
    dataset = texts()
    assert isinstance(dataset[1], Instance)
    assert dataset[-1].to_dict() == {"words": ["w"] * 4, "target": 1}
    assert isinstance(dataset["target"], FieldArray)
    assert list(dataset["target"]) == [0, 1, 0, 1]
    assert [len(row["words"]) for row in dataset[1:3]] == [2, 3]
    assert [len(row["words"]) for row in dataset[[3, 0]]] == [4, 1]
    assert (len(dataset[:2]), len(dataset[1:1]), len(DataSet())) == (2, 0, 0)
    assert DataSet([Instance(a=1), {"a": 2}])["a"][:] == [1, 2]


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda rows: DataSet({"a": [1, 2], "b": [1]}), AssertionError, r"the same length; got {'a': 2, 'b': 1}"),
        (lambda rows: DataSet([[1], [2]]), AssertionError, "must be of type Instance or dict; got a list"),  # type: ignore[list-item]
        (lambda rows: DataSet().add_field("a", []), RuntimeError, "'a' of a new DataSet must have at least one value"),
        (lambda rows: rows[4:], RuntimeError, "there are 4 rows; got a slice from 4"),
        (lambda rows: DataSet({"a": [1, 2]}).add_field("b", [1]), RuntimeError, r"'b' must have 2 values"),
        (lambda rows: DataSet([{"a": 1}, {"b": 1}]), ValueError, r"row 1 must have the fields \['a'\]; got \['b'\]"),
        (lambda rows: DataSet(3), ValueError, r"a dict of lists"),  # type: ignore[arg-type]
        (lambda rows: rows["target_"], KeyError, r"no field 'target_'.*Did you mean 'target'"),
        (lambda rows: rows.delete_field("never"), KeyError, "no field 'never'"),
        (lambda rows: rows.rename_field("never", "x"), KeyError, "no field 'never'"),
        (lambda rows: rows[4], IndexError, "4 rows"),
        (lambda rows: rows[0]["x"], KeyError, "no field 'x'"),
        (lambda rows: rows.delete_instance(4), IndexError, "there are 4 rows; got the index 4"),
        (lambda rows: rows.__setitem__(0, {"words": 1}), KeyError, r"have the fields \['words', 'target'\]; got \['words'\]"),
        (lambda rows: rows.concat(numbers()), RuntimeError, r"has no fields \['target', 'words'\]"),
        (lambda rows: rows.add_fieldarray("w", [5, 6]), TypeError, "fieldarray must be a FieldArray; got a list"),
        (lambda rows: DataSet().apply_more(doubled), AssertionError, "empty"),
        (lambda rows: rows.apply_more(lambda row: 3, progress_bar=None), ApplyResultException, "for row 0 it returned 3"),
        (
            lambda rows: rows.apply_more(lambda row: {"y" if row["target"] else "x": 1}, progress_bar=None),
            ApplyResultException,
            r"for row 1 the function returned the fields \['y'\], before \['x'\]",
        ),
        (lambda rows: rows.apply_more(3), TypeError, "expected a function of a row; got 3"),
        (lambda rows: rows.apply_more(lambda row: {}, num_proc=2), TypeError, "lambda"),
        (lambda rows: rows.apply_more(doubled, num_proc=-1), ValueError, "num_proc"),
        *((lambda rows, ratio=ratio: rows.split(ratio), AssertionError, "between 0 and 1") for ratio in (0, 1, 0.0, 1.0, 1.5)),
    ],
)
def test_wrong_data_and_wrong_uses_of_it_are_errors(use: Callable[[Any], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use(texts())


def test_a_hugging_face_data_set_is_copied_with_all_its_columns() -> None:
    datasets = pytest.importorskip("datasets")
    given = datasets.Dataset.from_dict({"sentence": ["a b", "c"], "label": [0, 1]})
    dataset = DataSet.from_datasets(given)
    assert dataset.get_field_names() == ["sentence", "label"]
    assert dataset[1].to_dict() == {"sentence": "c", "label": 1}
    with pytest.raises(ValueError, match=r"datasets.Dataset; got DatasetDict.*loaded\['train'\]"):
        DataSet.from_datasets(datasets.DatasetDict({"train": given}))


@pytest.mark.parametrize("bar", ["rich", "tqdm", None])
def test_apply_more_adds_fields_and_returns_them_and_shows_a_bar(bar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = texts()
    made = dataset.apply_more(lambda row: {"target": -row["target"], "first": row["words"][0]}, progress_bar=bar)
    assert made == {"target": [0, -1, 0, -1], "first": ["w"] * 4}
    assert dataset.get_field_names() == ["words", "target", "first"]
    assert list(dataset["target"]) == [0, -1, 0, -1]
    assert bool(re.search(r"Processing: +0%\|.*\| 0/4 \[", capsys.readouterr().err)) == (bar == "tqdm")


def test_functions_of_rows_or_of_values_return_their_results_or_make_fields() -> None:
    rows = numbers()
    assert rows.apply(lambda row: len(row["x"]), progress_bar=None) == [2, 1]
    assert rows.apply_field(len, "x", progress_bar="Densify") == [2, 1]  # an unknown name shows no bar
    assert rows.apply(lambda row: -row["y"], "y", progress_bar="tqdm") == rows["y"].content == [0, -1]
    assert rows.apply_field(sum, "x", new_field_name="sum", progress_bar=None) == rows["sum"].content == [3, 3]
    more = rows.apply_field_more(lambda value: {"first": value[0]}, "x", modify_fields=False, progress_bar=None)
    assert (more, "first" in rows) == ({"first": [1, 3]}, False)
    assert rows.apply_field(len, "x", num_proc=2, progress_bar=None) == [2, 1]
    many = texts(9)  # several processes return the results of one
    many.apply_more(doubled, num_proc=2, progress_bar=None)
    assert list(many["double"]) == [row["target"] * 2 for row in texts(9)]
    dataset = texts()
    assert dataset.apply_more(doubled, modify_fields=False, progress_bar=None) == {"double": [0, 2, 0, 2]}
    assert not dataset.has_field("double")


def test_fields_are_added_deleted_copied_and_renamed_and_rows_replaced_removed_and_joined() -> None:
    dataset = texts().add_seq_len("words").delete_field("words")
    assert dataset.get_field_names() == ["target", "seq_len"]
    assert list(dataset["seq_len"]) == list(texts().add_seq_len("words", "length")["length"]) == [1, 2, 3, 4]
    rows = numbers().copy_field("x", "z").rename_field("y", "target")
    rows["z"][0].append(9)
    assert (rows["x"][0], rows.get_field_names(), rows["target"].name) == ([1, 2], ["x", "z", "target"], "target")
    rows.add_fieldarray("w", FieldArray("w", [5, 6]))
    assert (rows.get_all_fields()["w"].content, rows.get_length()) == ([5, 6], 2)
    rows = numbers()
    rows[0] = rows[1]
    assert rows["y"].content == [1, 1]
    rows = numbers()
    assert len(rows.drop(lambda row: row["y"] == 1, inplace=False)) == 1
    assert (len(rows), len(rows.drop(lambda row: True))) == (2, 0)
    rows, other = numbers(), DataSet({"X": [[7]], "y": [5], "more": [0]})
    joined = rows.concat(other, inplace=False, field_mapping={"X": "x"})
    other["X"][0].append(8)
    assert (joined["x"].content, len(rows), joined.get_field_names()) == ([[1, 2], [3], [7]], 2, ["x", "y"])
    assert len(numbers().delete_instance(0)) == 1


def test_a_split_is_shuffled_by_numpys_generator_or_not_at_all() -> None:
    first, rest = texts(100).split(ratio=0.8)
    assert (len(first), len(rest)) == (80, 20)
    assert sorted(len(row["words"]) for row in [*first, *rest]) == list(range(1, 101))
    numpy.random.seed(3)
    expected = list(range(10))
    numpy.random.shuffle(expected)
    numpy.random.seed(3)
    first, rest = texts(10).split(0.5)
    assert [len(row["words"]) - 1 for row in [*first, *rest]] == expected
    first, _ = texts(10).split(0.55, shuffle=False)
    assert [len(row["words"]) for row in first] == [1, 2, 3, 4, 5]


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


def test_a_table_has_twelve_rows_cuts_long_cells_and_has_two_columns_for_a_wide_character() -> None:
    lines = str(DataSet({"words": [list(range(100))] * 13, "target": [1] * 13, "seq_len": [5] * 13})).splitlines()
    assert len(lines) == 1 + 1 + 1 + 12 + 1 + 1
    assert lines[3] == "| [0, 1, 2, 3, 4, 5, 6, 7, ... | 1      | 5       |"
    assert lines[-2] == "| ...                          | ...    | ...     |"
    assert len(str(DataSet({"a": [1] * 12})).splitlines()) == 16  # all of them: no dots
    assert repr(Instance(words=["a"], target=1)).splitlines()[-2] == "| ['a'] | 1      |"
    line = "+------+---+"
    shown = str(DataSet({"字": ["你好"], "b": ["x"]})).splitlines()
    assert shown == [line, "| 字   | b |", line, "| 你好 | x |", line]


# -- vocabularies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words", "expected"),
    [
        ({}, "to be or not to be that", ["<pad>", "<unk>", "to", "be", "or", "not", "that"]),  # of equals the first
        ({"max_size": 2}, "a b b c c c", ["<pad>", "<unk>", "c", "b"]),  # padding and unknown do not count
        ({"min_freq": 2}, "a b b c c c", ["<pad>", "<unk>", "c", "b"]),
    ],
)
def test_padding_is_0_unknown_1_then_the_most_frequent(options: Any, words: str, expected: list[str]) -> None:
    vocabulary = Vocabulary(**options).add_word_lst(words.split())
    assert dict(vocabulary) == {word: index for index, word in enumerate(expected)}
    assert (vocabulary.padding_idx, vocabulary.unknown_idx, len(vocabulary)) == (0, 1, len(expected))
    assert (vocabulary.to_word(2), vocabulary.idx2word[3]) == (expected[2], expected[3])
    assert [word for word in words.split() if vocabulary.has_word(word) != (word in expected)] == []
    assert ("a" in vocabulary) == ("a" in expected)


def test_an_unknown_word_has_the_unknown_index_or_is_an_error_and_indices_can_be_given() -> None:
    assert Vocabulary().add_word("a")["b"] == 1
    bare = Vocabulary(padding=None, unknown=None).add_word("a")
    assert (bare["a"], bare.padding_idx, bare.unknown_idx) == (0, None, None)
    with pytest.raises(ValueError, match="'b' is not in the vocabulary"):
        bare.to_index("b")
    bare.update(["b", "b"])  # words that are added later are counted
    assert (bare["b"], bare["a"]) == (0, 1)
    vocabulary = Vocabulary(padding=None, unknown=None)
    vocabulary.word2idx = {"x": 0, "y": 5}
    assert (vocabulary["y"], vocabulary.to_word(5)) == (5, "y")
    vocabulary.idx2word = {1: "z"}
    vocabulary.build_reverse_vocab()
    assert vocabulary.word2idx == {"z": 1}
    assert len(vocabulary.add_word("a").clear()) == 0


@pytest.mark.parametrize("words", [["a", "b"], [["a"], ["b", "a"]], [[["a"], ["b"]], [["a"]]]])
def test_a_field_may_hold_words_lists_or_lists_of_lists(words: list[object]) -> None:
    dataset = DataSet({"words": words})
    vocabulary = Vocabulary()
    assert vocabulary.from_dataset(dataset, field_name="words") is vocabulary
    assert vocabulary.index_dataset(dataset, field_name="words") is vocabulary
    assert str(dataset["words"][:]) == str(words).replace("'a'", "2").replace("'b'", "3")


def test_indices_may_be_written_to_a_new_field_words_without_entry_are_marked_and_wrong_fields_are_errors() -> None:
    dataset = DataSet({"words": [["a"]], "tags": [["x"]]})
    vocabulary = Vocabulary().from_dataset(dataset, field_name=["words", "tags"])
    vocabulary.index_dataset(dataset, field_name=["words", "tags"], new_field_name=["w", "t"])
    assert dataset[0].to_dict() == {"words": ["a"], "tags": ["x"], "w": [2], "t": [3]}
    train, test = DataSet({"words": [["a"]]}), DataSet({"words": [["a", "b"]]})
    vocabulary = Vocabulary().from_dataset(train, field_name="words", no_create_entry_dataset=test)
    assert vocabulary["b"] == 3
    assert vocabulary.is_word_no_create_entry("b")
    assert not vocabulary.is_word_no_create_entry("a")
    assert not vocabulary.add_word("b").is_word_no_create_entry("b")  # now it was seen in training
    with pytest.raises(TypeError, match="expected a DataSet; got dict"):
        Vocabulary().from_dataset({"words": []}, field_name="words")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'words' must hold words"):
        Vocabulary().from_dataset(DataSet({"words": [[1]]}), field_name="words")
    with pytest.raises(ValueError, match="a new name for each of the 1 fields"):
        Vocabulary().index_dataset(DataSet({"words": [["a"]]}), field_name="words", new_field_name=["a", "b"])


def test_a_vocabulary_is_written_and_read(tmp_path: Path) -> None:
    vocabulary = Vocabulary(max_size=3, min_freq=1).add_word_lst(["b", "a", "b", "c"]).add("d", no_create_entry=True)
    vocabulary.save(tmp_path / "unbuilt")
    assert Vocabulary.load(tmp_path / "unbuilt").word2idx == vocabulary.word2idx
    file = io.StringIO()
    vocabulary.save(file)
    assert file.getvalue() == (
        "max_size\t3\nmin_freq\t1\nunknown\t<unk>\npadding\t<pad>\nrebuild\tFalse\n\nb\t2\t2\t0\na\t1\t3\t0\nc\t1\t4\t0\nd\t1\t-1\t1\n"
    )
    file.seek(0)
    other = Vocabulary.load(file)
    assert (other.word2idx, other.max_size, other.min_freq) == (vocabulary.word2idx, 3, 1)
    assert other.is_word_no_create_entry("d")
    assert other.to_word(2) == "b"
    assert other["d"] == other.unknown_idx


# -- bundles ---------------------------------------------------------------------------------------------


def bundle() -> DataBundle:
    train, dev = DataSet({"words": [["a"], ["b", "a"]], "y": [0, 1]}), DataSet({"words": [["c"]]})
    return DataBundle(datasets={"train": train, "dev": dev})


def test_data_sets_and_vocabularies_have_names() -> None:
    given = bundle()
    vocabulary = Vocabulary().from_dataset(given.get_dataset("train"), field_name="words")
    given.set_vocab(vocabulary, "words").set_dataset(DataSet({"x": [1]}), "test").delete_dataset("dev").delete_dataset("never")
    assert (given.num_dataset, given.num_vocab) == (2, 1)
    assert (given.get_dataset_names(), given.get_vocab_names()) == (["train", "test"], ["words"])
    assert dict(given.iter_datasets()) == given.datasets
    assert dict(given.iter_vocabs()) == {"words": given.get_vocab("words")}
    assert repr(given) == "DataBundle(train: 2 rows, test: 1 rows, words: 4 words)"
    with pytest.raises(KeyError, match=r"no data set 'trian'; there are \['train', 'test'\]. Did you mean 'train'"):
        given.get_dataset("trian")
    with pytest.raises(KeyError, match="no vocabulary 'y'"):
        given.get_vocab("y")
    with pytest.raises(AssertionError, match="dataset must be a DataSet; got a list"):
        given.set_dataset([], "x")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="vocab must be a Vocabulary; got a dict"):
        given.set_vocab({}, "x")  # type: ignore[arg-type]


def test_fields_of_all_data_sets_change_together_also_by_functions() -> None:
    given = bundle().copy_field("words", "chars").add_seq_len("words")
    assert [dataset["seq_len"].content for dataset in given.datasets.values()] == [[1, 2], [1]]
    given.set_vocab(Vocabulary(), "chars").rename_field("chars", "letters").delete_field("words")
    assert given.get_vocab_names() == ["letters"]
    assert given.get_dataset("train").get_field_names() == ["y", "seq_len", "letters"]
    assert given.delete_field("letters").num_vocab == 0
    with pytest.raises(KeyError, match="the data set 'dev' has no field 'y'"):
        given.delete_field("y", ignore_miss_dataset=False)
    given = bundle().apply(lambda row: len(row["words"]), "length", progress_bar=None)
    given.apply_field(lambda words: words[0], "words", "first", progress_bar=None)
    assert [dataset["first"].content for dataset in given.datasets.values()] == [["a", "b"], ["c"]]
    more = given.apply_more(lambda row: {"n": row["length"]}, modify_fields=False, progress_bar=None)
    assert more == {"train": {"n": [1, 2]}, "dev": {"n": [1]}}
    assert given.apply_field_more(lambda y: {"z": -y}, "y", progress_bar=None) == {"train": {"z": [0, -1]}}
    smaller = given.drop(lambda row: row["length"] == 1, inplace=False)
    assert [len(dataset) for dataset in smaller.datasets.values()] == [1, 0]
    assert given.drop(lambda row: row["length"] == 2) is given
    assert [len(dataset) for dataset in given.datasets.values()] == [1, 1]


def test_a_bundle_gives_a_loader_for_each_data_set() -> None:
    given = bundle().set_ignore("words").apply(lambda row: [len(word) for word in row["words"]], "ids", progress_bar=None)
    loaders = prepare_dataloader(given.set_pad("ids", pad_val=9), shuffle=False)
    batches = {name: [batch["ids"].tolist() for batch in loader] for name, loader in loaders.items()}
    assert batches == {"train": [[[1, 9], [1, 1]]], "dev": [[[1]]]}
