"""``cadenza completion``: real shells complete commands, options and paths when a person presses Tab."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from cadenza.commands.completion import SHELLS
from cadenza.commands.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_those_of_the_present_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    generated = runpy.run_path(str(ROOT / "docs" / "completions.py"))["generated"]
    assert capsys.readouterr().out == generated(shell), "python docs/completions.py makes them anew"


def test_another_shell_is_refused_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "fish"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("cadenza: argument shell: invalid choice: 'fish' (choose from ")
    assert told.endswith("See: cadenza completion --help\n")


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[pexpect.spawn]:
    """An interactive shell that has read the script, in a folder with a run."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    (tmp_path / "experiments" / "first").mkdir(parents=True)
    (tmp_path / "my run" / "best of all").mkdir(parents=True)
    (tmp_path / "my train.py").touch()
    command = tmp_path / "bin" / "cadenza"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cadenza "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(tmp_path)}
    alone = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[request.param]
    process = pexpect.spawn(
        request.param, alone, env=environment, cwd=str(tmp_path), encoding="utf-8", dimensions=(40, 200), timeout=300
    )
    if request.param == "zsh":
        process.sendline("autoload -U compinit && compinit -u")
    process.sendline(f'eval "$(cadenza completion {request.param})"; echo ready$((40 + 2))')
    process.expect_exact("ready42")
    yield process
    process.close(force=True)


def completed(shell: pexpect.spawn, typed: str, expected: str) -> None:
    """Type a part of a line and Tab; the shell must write `expected` after it."""
    shell.send(f"{typed}\t")
    shell.expect_exact(expected)
    shell.send("\x15")  # erase the line


def test_commands_options_and_paths_are_completed(shell: pexpect.spawn) -> None:
    completed(shell, "cadenza comp\t", "completion")  # compare and completion are listed
    completed(shell, "cadenza wat", "watch")
    completed(shell, "cadenza watch --on", "--once")
    completed(shell, "cadenza checkpoint ver", "verify")
    completed(shell, "cadenza replay --to tensor", "tensorboard")
    completed(shell, "cadenza watch exper", "experiments/")
    completed(shell, "cadenza compare experiments/first exp", "experiments/")


def test_names_with_spaces_are_completed(shell: pexpect.spawn) -> None:
    completed(shell, "cadenza watch my", "cadenza watch my\\ run/")
    completed(shell, "cadenza watch my\\ r", "un/")
    completed(shell, "cadenza watch my\\ run/be", "st\\ of\\ all/")
    completed(shell, "cadenza watch 'my r", "un")
    completed(shell, "cadenza plan my\\ t", "rain.py")
    completed(shell, "cadenza report my\\ run/best\\ of\\ all my\\ ru", "n/")
    completed(shell, "cadenza report --output my\\ t", "rain.py")
