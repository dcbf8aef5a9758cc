"""No command prints a control character that stands in a file of a run or in the name of its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.checkpoint.store.manifest import canonical
from cadenza.commands.main import main
from cadenza.testing import tiny_run

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e"
COMMANDS = [
    "checkpoint list",
    "checkpoint show",
    "checkpoint verify",
    "runs",
    "why",
    "step",
    "compare",
    "watch --once",
    "report",
]


def poisoned(tree: Any) -> Any:
    """Return nested JSON with the sequence at the end of each text that is not a name of a file or a kind."""
    if isinstance(tree, dict):
        return {key: value if key in ("kind", "name", "run", "branch") else poisoned(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [poisoned(value) for value in tree]
    return tree + HOSTILE if isinstance(tree, str) and " " in tree else tree


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / f"run{HOSTILE}"

    @on(Callback.on_step_end, at=2)
    def stop(run: Run) -> None:
        run.log(f"name{HOSTILE}", 1.0)
        run.stop(f"enough of it{HOSTILE}")

    tiny_run(directory=directory, callbacks=[LogTraining("1 step"), Checkpoint("1 step"), stop])
    for path in directory.glob("checkpoints/step-*/manifest.json"):
        manifest = json.loads(path.read_text(encoding="utf-8"))
        del manifest["crc32"]
        path.write_bytes(canonical({**manifest, "reason": manifest["reason"] + HOSTILE}))
    info = directory / "run.json"
    info.write_text(json.dumps(poisoned(json.loads(info.read_text(encoding="utf-8")))), encoding="utf-8")
    return directory


def controls(text: str) -> Iterator[str]:
    return (char for char in text if not char.isprintable() and char not in "\n\t")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_prints_moves_no_cursor(
    command: str, hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"step": ["2"], "compare": [str(hostile)], "report": ["--output", str(tmp_path / "page.html")]}.get(command, [])
    main([*command.split(), str(hostile), *more])
    said = capsys.readouterr()
    assert said.out + said.err
    assert [*controls(said.out + said.err)] == []


@pytest.mark.parametrize("command", ["checkpoint list", "why", "step", "compare", "report"])
def test_an_error_about_a_directory_with_such_a_name_moves_none_either(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / f"gone{HOSTILE}")
    assert main([*command.split(), missing, *(["2"] if command == "step" else [missing] if command == "compare" else [])]) == 1
    assert [*controls(capsys.readouterr().err)] == []
