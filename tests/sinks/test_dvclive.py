"""Dvclive: its files are read back, as DVC reads them; nothing else in the process, the repository or the network changes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types, and comes with dvclive

from cadenza import Callback, Run, on
from cadenza.commands.main import main
from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.sinks import Dvclive
from cadenza.status.run_info import RunInfo
from cadenza.testing import check_sink, tiny_run
from tests.sinks.samples import EMPTY, MEDIA, check_bright, check_whole, logging, metrics_of
from tests.sinks.trackers import check_left_as_it_was


def values(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what stands in the files of metrics."""
    found = {}
    folder = directory / "dvclive" / "plots" / "metrics"
    for file in folder.rglob("*.tsv"):
        with file.open(newline="") as lines:
            _, *rows = csv.reader(lines, delimiter="\t")
        found[file.relative_to(folder).with_suffix("").as_posix()] = [(int(step), float(value)) for step, value in rows]
    return found


def summary(directory: Path) -> Any:
    return json.loads((directory / "dvclive" / "metrics.json").read_text())


def read(info: RunInfo) -> dict[str, list[tuple[int, float]]]:
    assert info.directory is not None
    return values(info.directory)


def test_it_keeps_the_contract_of_sinks() -> None:
    check_sink(Dvclive, read)


def test_the_last_values_the_arguments_and_the_outcome_are_where_dvc_looks_for_them(tmp_path: Path) -> None:
    run = tiny_run(
        callbacks=[logging({"a/b": 0.5, "nan": float("nan")}), Dvclive(config={"seed": "mine"})], steps=3, directory=tmp_path
    )
    assert summary(tmp_path) == {"a": {"b": 0.5}, "nan": "nan", "step": 3, "outcome": "finished"}
    params = yaml.safe_load((tmp_path / "dvclive" / "params.yaml").read_text())
    assert params == {**run.info.arguments, "seed": "mine"}
    assert yaml.safe_load((tmp_path / "dvclive" / "dvc.yaml").read_text()) == {
        "metrics": ["metrics.json"],
        "params": ["params.yaml"],
        "plots": [{"plots/metrics": {"x": "step"}}],
    }


def test_pictures_come_back_and_other_media_are_left_out_with_one_remark(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging({**MEDIA, **EMPTY}), Dvclive()], steps=2, directory=tmp_path)
    pictures = tmp_path / "dvclive" / "plots" / "images"
    check_whole((pictures / "whole" / "2.png").read_bytes())
    check_bright((pictures / "bright" / "1.png").read_bytes())
    assert (tmp_path / "console.log").read_text().splitlines() == [
        f"Dvclive: '{name}' of step 1 is {kind}, which DVCLive does not have, and is left out"
        for name, kind in (("tone", "Audio"), ("w", "Histogram"), ("note", "Text"))
    ]


def test_the_outcome_of_a_failed_run_is_written(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        tiny_run(callbacks=[logging({"a": 1}), Dvclive(), fail], directory=tmp_path)
    assert summary(tmp_path)["outcome"] == "failed"
    assert values(tmp_path) == {"a": [(1, 1), (2, 1)]}


def test_names_that_cannot_be_files_are_changed_with_one_remark(tmp_path: Path) -> None:
    names = ("loss", "loss/aux", "a/step", "../x", "what?")
    tiny_run(callbacks=[logging(dict.fromkeys(names, 1.0)), Dvclive()], steps=2, directory=tmp_path)
    assert sorted(values(tmp_path)) == ["a/step_", "loss", "loss_aux", "what_", "x"]
    assert all(rows == [(1, 1.0), (2, 1.0)] for rows in values(tmp_path).values())
    assert len((tmp_path / "console.log").read_text().splitlines()) == 4


def test_files_of_another_run_are_not_replaced(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging({"a": 1}), Dvclive(tmp_path / "own")], steps=2, directory=tmp_path / "one")
    with pytest.raises(DirectoryError, match=r"Dvclive would replace the files of another run in .*Give another directory"):
        tiny_run(callbacks=[Dvclive(tmp_path / "own")], steps=1, directory=tmp_path / "two")
    with pytest.raises(DirectoryError, match="Dvclive has no directory to write to"):
        tiny_run(callbacks=[Dvclive()])


def test_an_error_in_the_middle_disables_it_and_the_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_step_end, at=3)
    def spoil(run: Run) -> None:
        folder = tmp_path / "dvclive" / "plots" / "metrics"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "late").write_text("a file, and DVCLive needs a folder")
        run.log("late/value", 1)

    run = tiny_run(callbacks=[logging({"a": 1}), spoil, Dvclive()], steps=9, directory=tmp_path)
    assert [fault.callback for fault in run.faults] == ["Dvclive"]
    assert caplog.text.count("Dvclive failed in") == 1
    assert len(metrics_of(tmp_path)) == 9


def test_a_missing_package_is_an_error_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dvclive", None)
    with pytest.raises(MissingExtraError, match=r"Dvclive needs .*pip install 'cadenza\[dvclive\]'"):
        Dvclive()


def test_the_process_the_home_the_network_and_the_git_repository_are_left_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GIT_DIR")
    subprocess.run(["git", "init", "-q", str(tmp_path / "work")], check=True)
    check_left_as_it_was("Dvclive()", tmp_path)
    assert sorted(os.listdir(tmp_path / "work")) == [".git"]


def test_replay_writes_the_records_of_a_run_in_the_files(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging({"a": 0.5})], steps=3, directory=tmp_path)
    main(["replay", str(tmp_path), "--to", "dvclive"])
    assert values(tmp_path) == {"a": [(1, 0.5), (2, 0.5), (3, 0.5)]}
    assert summary(tmp_path)["outcome"] == "finished"
