"""fastNLP's vocabulary: which word has which number."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cadenza.compat.fastnlp.core.dataset import DataSet
from cadenza.compat.fastnlp.core.vocabulary import Vocabulary


def numbers(vocabulary: Vocabulary) -> dict[str, int]:
    return dict(vocabulary)


def test_padding_is_0_unknown_1_then_the_most_frequent_and_of_equals_the_first() -> None:
    vocabulary = Vocabulary().add_word_lst(["to", "be", "or", "not", "to", "be", "that"])
    assert numbers(vocabulary) == {"<pad>": 0, "<unk>": 1, "to": 2, "be": 3, "or": 4, "not": 5, "that": 6}
    assert (vocabulary.padding_idx, vocabulary.unknown_idx, vocabulary.to_word(2), vocabulary.idx2word[6]) == (
        0,
        1,
        "to",
        "that",
    )


def test_an_unknown_word_has_the_unknown_index_or_is_an_error() -> None:
    assert Vocabulary().add_word("a")["b"] == 1
    bare = Vocabulary(padding=None, unknown=None).add_word("a")
    assert (bare["a"], bare.padding_idx, bare.unknown_idx) == (0, None, None)
    with pytest.raises(ValueError, match="'b' is not in the vocabulary"):
        bare.to_index("b")


def test_the_limit_does_not_count_padding_and_unknown() -> None:
    assert list(numbers(Vocabulary(max_size=2).add_word_lst(["a", "b", "b", "c", "c", "c"]))) == ["<pad>", "<unk>", "c", "b"]


def test_rare_words_can_be_omitted() -> None:
    vocabulary = Vocabulary(min_freq=2).add_word_lst(["a", "b", "b", "c", "c", "c"])
    assert "a" not in vocabulary
    assert vocabulary.has_word("b")
    assert len(vocabulary) == 4


def test_words_that_are_added_later_are_counted() -> None:
    vocabulary = Vocabulary().add_word_lst(["a"])
    assert vocabulary["a"] == 2
    vocabulary.update(["b", "b"])
    assert (vocabulary["b"], vocabulary["a"]) == (2, 3)


@pytest.mark.parametrize("words", [["a", "b"], [["a"], ["b", "a"]], [[["a"], ["b"]], [["a"]]]])
def test_a_field_may_hold_words_lists_or_lists_of_lists(words: list[object]) -> None:
    dataset = DataSet({"words": words})
    vocabulary = Vocabulary()
    assert vocabulary.from_dataset(dataset, field_name="words") is vocabulary
    assert vocabulary.index_dataset(dataset, field_name="words") is vocabulary
    assert str(dataset["words"][:]) == str(words).replace("'a'", "2").replace("'b'", "3")


def test_indices_may_be_written_to_a_new_field() -> None:
    dataset = DataSet({"words": [["a"]], "tags": [["x"]]})
    vocabulary = Vocabulary().from_dataset(dataset, field_name=["words", "tags"])
    vocabulary.index_dataset(dataset, field_name=["words", "tags"], new_field_name=["w", "t"])
    assert dataset[0].to_dict() == {"words": ["a"], "tags": ["x"], "w": [2], "t": [3]}


def test_words_without_entry_have_an_index_and_are_marked() -> None:
    train, test = DataSet({"words": [["a"]]}), DataSet({"words": [["a", "b"]]})
    vocabulary = Vocabulary().from_dataset(train, field_name="words", no_create_entry_dataset=test)
    assert vocabulary["b"] == 3
    assert vocabulary.is_word_no_create_entry("b")
    assert not vocabulary.is_word_no_create_entry("a")
    assert not vocabulary.add_word("b").is_word_no_create_entry("b")  # now it was seen in training


def test_wrong_arguments_of_a_vocabulary_are_errors() -> None:
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


def test_indices_can_be_given_and_words_forgotten() -> None:
    vocabulary = Vocabulary(padding=None, unknown=None)
    vocabulary.word2idx = {"x": 0, "y": 5}
    assert (vocabulary["y"], vocabulary.to_word(5)) == (5, "y")
    vocabulary.idx2word = {1: "z"}
    vocabulary.build_reverse_vocab()
    assert vocabulary.word2idx == {"z": 1}
    assert len(vocabulary.add_word("a").clear()) == 0
