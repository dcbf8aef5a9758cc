"""``cadenza step``: the samples of a step, from the run's directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cadenza.commands.main import main
from cadenza.loading import TensorBatches
from cadenza.testing import tiny_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "one"
    values = torch.zeros(10, 1)
    tiny_run(loader=TensorBatches(values, values, batch_size=4), epochs=2, accumulate=2, directory=path)
    return path


def test_the_samples_are_printed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", str(directory), "3"]) == 0
    lines = ["step 3, in epoch 2:", "  rank 0, batch 1: samples 0, 1, 2, 3", "  rank 0, batch 2: samples 4, 5, 6, 7"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_large_batch_is_folded_in_a_terminal_and_is_one_line_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run(loader=TensorBatches(torch.zeros(200, 1), torch.zeros(200, 1), batch_size=200), epochs=1, directory=tmp_path)
    main(["step", str(tmp_path), "1"])
    whole = capsys.readouterr().out.splitlines()
    assert len(whole) == 2
    monkeypatch.setenv("COLUMNS", "80")
    main(["step", str(tmp_path), "1"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines[1:]) == whole[1].strip()


def test_json_holds_each_batch(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", str(directory), "2", "--rank", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["epoch"], found["ranks"]) == (2, 0, 1)
    assert [(one["number"], one["indices"]) for one in found["batches"]] == [(2, [8, 9])]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["5"], "has no step 5: expected a step from 1 to 4."),
        (["0"], "has no step 0: expected a step from 1 to 4."),
        (["1", "--rank", "1"], "step 1 has no rank 1: expected a rank from 0 to 0."),
    ],
)
def test_mistakes_are_named(directory: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", str(directory), *arguments]) == 1
    assert told in capsys.readouterr().err


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", str(tmp_path), "1"]) == 1
    assert "is not the directory of a run: expected a run.json in it" in capsys.readouterr().err
