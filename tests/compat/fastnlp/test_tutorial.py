"""The tutorial's code cells, run in order as a script on real sentences: only import lines and the data's path are changed."""

from __future__ import annotations

import os
import re
import runpy
import sys
import warnings
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch

from tests import forked

LISTING = Path(__file__).parent / "listings" / "t7.py"
SHARED = Path(__file__).resolve().parents[4] / "shared"
DATA = SHARED / "data" / "sst2"
TUTORIAL = SHARED / "seeds" / "002_8dfaeb90ea727427.txt"

INDICES = [50, 5, 19, 66, 53, 9, 64, 36, 20, 11, 13, 52, 8, 65, 16, 74]  # of the first batch, as the tutorial recorded them


def run_seeded(folder: Path) -> None:
    """Run the cells in a folder. The tutorial has no seed of its own: it splits the data at random."""
    os.environ["HF_HOME"] = str(folder / "huggingface")
    os.chdir(folder)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    numpy.random.seed(0)
    torch.manual_seed(0)
    sys.argv = [str(LISTING), str(folder)]
    runpy.run_path(str(LISTING), run_name="__main__")


def test_all_fourteen_cells_are_the_tutorials_but_for_imports_and_the_datas_path() -> None:
    if not TUTORIAL.exists():
        pytest.skip(f"the tutorial is not in {TUTORIAL}")
    tutorial = TUTORIAL.read_text()
    starts = list(re.finditer(r"^In \[(\d+)\]:?\n+", tutorial, re.MULTILINE))
    assert [int(start[1]) for start in starts] == list(range(1, 15))
    cells = re.split(r"^# In \[\d+\]\n", LISTING.read_text(), flags=re.MULTILINE)[1:]
    for start, cell in zip(starts, cells, strict=True):
        wanted = cell.rstrip().replace("cadenza.compat.fastnlp", "fastNLP")
        if start[1] == "1":  # it loads the data
            assert tutorial[start.end() :].startswith("from datasets import load_dataset\n\n# sst-2 数据集\nsst2data = ")
            assert "from datasets import load_dataset\n\n# sst-2 数据集\nsst2data = " in wanted
        else:
            assert tutorial[start.end() :].startswith(f"{wanted}\n"), f"cell {start[1]} is another one"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not DATA.exists():
        pytest.skip(f"the data are not in {DATA}")
    folder = tmp_path_factory.mktemp("tutorial")
    with (DATA / "train.tsv").open(encoding="utf-8") as rows:  # the tutorial takes the first hundred
        (folder / "train.tsv").write_text("".join(islice(rows, 201)), encoding="utf-8")
    process = forked.start(run_seeded, folder, output=folder / "said")
    assert process.ended() == 0, process.said()
    return process.said()


def lines(shown: str, start: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith(start)]


def test_the_data_set_is_printed_as_in_the_tutorial(shown: str) -> None:
    table = [*lines(shown, "+"), *lines(shown, "|")]
    assert table[:3] == ["+------------------------------+--------+---------+"] * 3
    assert table[3] == "| words                        | target | seq_len |"
    assert len(table) == 3 + 1 + 12 + 1
    assert table[-1] == "| ...                          | ...    | ...     |"
    row = re.compile(r"\| \[[\d, ]+(\]|\.\.\.|\]\.\.\.) * \| [01] {6}\| \d+ +\|")
    assert all(row.fullmatch(line) for line in table[4:-1])


def test_the_first_callback_prints_five_batches(shown: str) -> None:
    told = shown[shown.index("Now start training...") : shown.index("Quit training process.")]
    assert "Epoch 1/1\n" in told
    assert lines(told, "Training Batch") == [f"Training Batch {number}/5..." for number in range(1, 6)]
    first, *_ = lines(told, "Batch Words: ")
    assert first.endswith(f"Indices: {INDICES}")
    losses = [float(line.removeprefix("Loss: ")) for line in lines(told, "Loss: ")]
    ending = re.search(r"End Epoch 1, Average Loss ([\d.]+)\n", told)
    assert ending is not None
    assert float(ending[1]) == pytest.approx(sum(losses) / 5)


def test_the_monitored_accuracy_is_printed_after_10_20_30_and_40_epochs(shown: str) -> None:
    told = [re.fullmatch(r"Epoch: (\d+/40), 'acc' is (not )?better: ([\d.]+)", line) for line in lines(shown, "Epoch: ")]
    assert [match[1] for match in told if match] == ["10/40", "20/40", "30/40", "40/40"]
    assert all("acc#acc" in line for line in lines(shown, "{"))
    assert "Eval. results on Epoch:9, Batch:5" in shown  # as the tutorial recorded it
    values = [(match[2] is None, float(match[3])) for match in told if match]
    best = 0.0
    for better, value in values:
        assert better == (value > best)
        best = max(best, value)


def test_functions_at_events_print_all_batches_each_second_one_and_the_second(shown: str) -> None:
    batches = [int(match[1]) for match in re.finditer(r"^Total Batches (\d+)/10 Loss [\d.]+$", shown, re.MULTILINE)]
    assert batches == [*range(1, 11), *range(2, 11, 2), 2, *range(2, 11, 2)]
