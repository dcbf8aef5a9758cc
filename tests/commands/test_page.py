"""The page docs/command-line.md: its shell examples print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
EXAMPLES = [
    (command, output)
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
OF_RUNS = [one for one in EXAMPLES if not one[0].startswith("cadenza compat")]  # those are in test_compat.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a person who has followed the page: its script has trained two runs."""
    folder, before = tmp_path_factory.mktemp("page"), Path.cwd()
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    os.chdir(folder)
    try:
        exec(block, {})
    finally:
        os.chdir(before)
    command = folder / "bin" / "cadenza"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cadenza "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="the examples are for a POSIX shell")
@pytest.mark.parametrize(("command", "output"), OF_RUNS, ids=[command for command, _ in OF_RUNS])
def test_an_example_prints_what_the_page_shows(folder: Path, command: str, output: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {"PATH": f"{folder / 'bin'}:{environment['PATH']}", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stderr == ""
    if output:
        assert done.stdout == output
    else:
        assert done.stdout.startswith("fit: 4 epochs, 5 batches an epoch, 20 steps")


def test_the_page_has_examples_and_names_each_command() -> None:
    from cadenza.commands.main import COMMANDS

    assert len(EXAMPLES) == 11
    assert [name for name in COMMANDS if f"`{name}`" not in PAGE] == []
