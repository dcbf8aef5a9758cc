"""``cadenza compare``: runs side by side."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from cadenza import Callback, Run, on
from cadenza.callbacks import FindBatchSize
from cadenza.commands.main import main
from cadenza.testing import tiny_loader, tiny_run
from tests.commands.test_runs import trained


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("two")
    return [str(trained(folder / "slow", lr=0.01)), str(trained(folder / "fast", lr=0.1, seed=2))]


def section(text: str, title: str) -> dict[str, list[str]]:
    """Return a part of the output: the cells of each row by its first cell."""
    [part] = [part for part in text.split("\n\n") if part.startswith(title)]
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows}


def values(directory: str, name: str) -> list[float]:
    rows = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def test_only_the_arguments_that_differ_are_shown(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two]) == 0
    assert section(capsys.readouterr().out, "arguments") == {
        "arguments": ["slow", "fast"],
        "optimizer.lr": ["0.01", "0.1"],
        "seed": ["1", "2"],
    }
    assert main(["compare", *two, "--all"]) == 0
    told = section(capsys.readouterr().out, "arguments")
    assert told["optimizer"] == ["SGD", "SGD"]
    assert told["max_epochs"] == ["3", "3"]


def test_batch_sizes_are_arguments_also_one_that_a_callback_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data: Any = [*zip(torch.rand(64, 1), torch.rand(64, 1), strict=True)]
    given: list[Mapping[str, Any]] = []

    @on(Callback.on_fit_start)
    def read(run: Run) -> None:  # as a tracker does
        given.append(run.info.arguments["loader"])

    def loader(size: int) -> DataLoader[Any]:
        return DataLoader(data, size, shuffle=True)

    for name, data_loader, callbacks in (
        ("small", loader(4), []),
        ("found", loader(4), [FindBatchSize(loader, start=8, max_size=16)]),
        ("all", tiny_loader(), []),
    ):
        tiny_run(loader=data_loader, directory=tmp_path / name, callbacks=[read, *callbacks])
    assert [one.get("batch_size") for one in given] == [4, 16, None]
    assert main(["compare", str(tmp_path / "small"), str(tmp_path / "found"), str(tmp_path / "all")]) == 0
    told = section(capsys.readouterr().out, "arguments")
    assert told["loader.batch_size"] == ["4", "16", "-"]
    assert told["loader"] == ["DataLoader", "DataLoader", "list"]
    assert told["loader.sampler.kind"] == ["random", "random", "-"]


def test_values_come_with_their_step_and_difference(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", *two, "--metric", "eval/loss"])
    out = capsys.readouterr().out
    slow, fast = (min(values(one, "eval/loss")) for one in two)
    best = section(out, "values")["eval/loss, best"]
    assert best == [f"{slow:.5g} (step 15)", f"{fast:.5g} (step 15)", f"{fast - slow:.5g}"]
    assert "train/loss" not in out
    assert "  slow  █▄▁" in out
    assert section(out, "decisions")["evaluated"] == ["3", "3"]


def test_a_terminal_without_these_characters_gets_ascii(
    two: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["compare", *two]) == 0
    text = stream.buffer.getvalue().decode("ascii")
    assert "  slow  @=_" in text


def test_what_differs_in_the_environment_is_named(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = json.loads(Path(two[0], "run.json").read_text())
    info["versions"]["torch"] = "2.7.0"
    (tmp_path / "run.json").write_text(json.dumps(info))
    assert main(["compare", two[0], str(tmp_path)]) == 0
    told = section(capsys.readouterr().out, "environment")
    assert told.keys() == {"environment", "torch"}
    assert told["torch"][1] == "2.7.0"


def test_json_holds_the_curves_and_the_differences(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differ"]["arguments"] == ["optimizer.lr", "seed"]
    slow, fast = found["runs"]
    assert (slow["arguments"], fast["arguments"]) == ({"optimizer.lr": 0.01, "seed": 1}, {"optimizer.lr": 0.1, "seed": 2})
    assert [value for _, value in fast["curves"]["eval/loss"]] == values(two[1], "eval/loss")
    assert fast["best"]["eval/loss"] == {"value": min(values(two[1], "eval/loss")), "step": 15, "mode": "min"}
    assert fast["decisions"]["evaluated"] == 3


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("count", [2, 8])
def test_no_line_is_wider_than_the_terminal(
    two: list[str], columns: int, count: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["compare", *(two * count)[:count]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert any("finished" in line for line in lines)


def test_a_path_without_a_run_is_an_error(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", two[0], str(tmp_path)]) == 1
    assert "is not a run directory" in capsys.readouterr().err
