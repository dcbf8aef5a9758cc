"""fastNLP's bundle of data sets and vocabularies."""

from __future__ import annotations

import pytest

from cadenza.compat.fastnlp import DataSet, Vocabulary, prepare_dataloader
from cadenza.compat.fastnlp.io import DataBundle


def bundle() -> DataBundle:
    train, dev = DataSet({"words": [["a"], ["b", "a"]], "y": [0, 1]}), DataSet({"words": [["c"]]})
    return DataBundle(datasets={"train": train, "dev": dev})


def test_data_sets_and_vocabularies_have_names() -> None:
    given = bundle()
    vocabulary = Vocabulary().from_dataset(given.get_dataset("train"), field_name="words")
    given.set_vocab(vocabulary, "words").set_dataset(DataSet({"x": [1]}), "test").delete_dataset("dev").delete_dataset("never")
    assert (given.num_dataset, given.num_vocab, given.get_dataset_names(), given.get_vocab_names()) == (
        *(2, 1),
        *(["train", "test"], ["words"]),
    )
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


def test_fields_of_all_data_sets_change_together() -> None:
    given = bundle().copy_field("words", "chars").add_seq_len("words")
    assert [dataset["seq_len"].content for dataset in given.datasets.values()] == [[1, 2], [1]]
    given.set_vocab(Vocabulary(), "chars").rename_field("chars", "letters").delete_field("words")
    assert given.get_vocab_names() == ["letters"]
    assert given.get_dataset("train").get_field_names() == ["y", "letters", "seq_len"] or "words" not in given.get_dataset(
        "train"
    )
    assert given.delete_field("letters").num_vocab == 0
    with pytest.raises(KeyError, match="the data set 'dev' has no field 'y'"):
        given.delete_field("y", ignore_miss_dataset=False)


def test_functions_are_applied_to_all_data_sets() -> None:
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
    given = (
        bundle().set_ignore("words").apply_field(lambda words: [len(word) for word in words], "words", "ids", progress_bar=None)
    )
    loaders = prepare_dataloader(given.set_pad("ids", pad_val=9), shuffle=False)
    assert {name: [batch["ids"].tolist() for batch in loader] for name, loader in loaders.items()} == {
        "train": [[[1, 9], [1, 1]]],
        "dev": [[[1]]],
    }
