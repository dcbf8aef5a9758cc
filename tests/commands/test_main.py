"""The command ``cadenza`` as a whole: help, errors, exit codes, completion and the examples of its page; ``cadenza compat``."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from cadenza.commands.completion import SHELLS
from cadenza.commands.main import COMMANDS, main
from cadenza.version import __version__
from tests.commands.parts import Command

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_command_the_help_is_printed(cadenza: Command) -> None:
    out = cadenza().out
    assert all(f"    {name}" in out for name in COMMANDS)
    assert "exit codes: 0 success; 1 an error" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_that_says_what_it_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: cadenza {command}")
    assert command in ("demo", "checkpoint") or f"\n  cadenza {command}" in out or f"(cadenza {command}" in out  # an example


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rusn"], "Did you mean 'runs'?"),
        (["compare", "one"], ""),
        (["runs", "--srot", "x"], ""),
        (["watch"], ""),
        (["completion", "fish"], "cadenza: argument shell: invalid choice: 'fish' (choose from "),
    ],
)
def test_wrong_arguments_are_one_line_on_stderr_with_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("cadenza: ")
    assert err.endswith("--help\n")
    assert told in err
    assert ("Did you mean" in err) == ("Did you mean" in told)


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cadenza {__version__}\n"


def test_the_help_imports_neither_torch_nor_the_commands() -> None:
    code = (
        "import sys; from cadenza.commands.main import main; main([])\n"
        "assert not {'torch', 'rich', 'cadenza.commands.plan', 'cadenza.report.commands.runs'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def put_on_path(folder: Path) -> str:
    """Write the command to a folder; return the PATH with it."""
    command = folder / "bin" / "cadenza"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cadenza "$@"\n')
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


# -- completion ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_are_those_of_the_present_commands(shell: str, cadenza: Command) -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "completions.py"))["generated"]
    assert cadenza("completion", shell).out == generated(shell), "python docs/completions.py makes them anew"


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[pexpect.spawn]:
    """An interactive shell that has read the script, in a folder with a run."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    (tmp_path / "experiments" / "first").mkdir(parents=True)
    (tmp_path / "my run" / "best of all").mkdir(parents=True)
    (tmp_path / "my train.py").touch()
    environment = {**os.environ, "PATH": put_on_path(tmp_path), "TERM": "dumb", "HOME": str(tmp_path)}
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


COMPLETED = [
    ("cadenza comp\t", "completion"),  # compare and completion are listed
    ("cadenza wat", "watch"),
    ("cadenza watch --on", "--once"),
    ("cadenza checkpoint ver", "verify"),
    ("cadenza replay --to tensor", "tensorboard"),
    ("cadenza watch exper", "experiments/"),
    ("cadenza compare experiments/first exp", "experiments/"),
    ("cadenza watch my", "cadenza watch my\\ run/"),
    ("cadenza watch my\\ r", "un/"),
    ("cadenza watch my\\ run/be", "st\\ of\\ all/"),
    ("cadenza watch 'my r", "un"),
    ("cadenza plan my\\ t", "rain.py"),
    ("cadenza report my\\ run/best\\ of\\ all my\\ ru", "n/"),
    ("cadenza report --output my\\ t", "rain.py"),
]


def test_tab_completes_commands_options_and_paths_with_spaces_too(shell: pexpect.spawn) -> None:
    for typed, expected in COMPLETED:
        shell.send(f"{typed}\t")
        shell.expect_exact(expected)
        shell.send("\x15")  # erase the line


# -- docs/command-line.md ------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
EXAMPLES = [
    (command, output)
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]


@pytest.mark.skipif(sys.platform == "win32", reason="the examples are for a POSIX shell")
def test_the_examples_of_the_page_print_what_it_shows(
    tmp_path: Path, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of a person who has followed the page: its script has trained two runs."""
    monkeypatch.chdir(tmp_path)
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(block, {})
    environment = {**os.environ, "PATH": put_on_path(tmp_path), "PYTHONIOENCODING": "utf-8"}
    for command, output in EXAMPLES:
        if command.startswith("cadenza compat"):  # below
            continue
        if "|" in command:
            done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, encoding="utf-8", check=True)
            shown = done.stdout, done.stderr
        else:
            shown = cadenza(*shlex.split(command)[1:])
        assert (shown[0] if output else "", shown[1]) == (output, ""), command
        assert output or shown[0].startswith("fit: 4 epochs, 5 batches an epoch, 20 steps"), command


def test_the_page_has_examples_and_names_each_command() -> None:
    assert len(EXAMPLES) == 11
    assert [name for name in COMMANDS if f"`{name}`" not in PAGE] == []


# -- compat: what of a callback class works in a native run --------------------------------------------


CLASSES = """
import lightning
print("imported")

class Fine(lightning.Callback):
    def on_train_start(self, trainer, pl_module):
        self.step = trainer.global_step

class Wrong(lightning.Callback):
    def on_train_start(self, trainer, pl_module):
        self.loops = trainer.no_such_thing

class Outer:
    class Inner(Fine):
        pass

fine = Fine()
number = 3

if __name__ == "__main__":
    class Hidden(Fine):
        pass
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    pytest.importorskip("lightning", reason="the classes that the command reads are those of Lightning: pip install lightning")
    path = tmp_path / "own.py"
    path.write_text(CLASSES)
    return str(path)


def test_a_class_is_mapped_or_not_and_a_module_is_a_table_of_its_classes(script: str, cadenza: Command) -> None:
    for target in ("Fine", "fine"):
        lines = cadenza("compat", f"{script}:{target}").out.splitlines()
        assert lines[0] in ("Fine of own (lightning)", "Fine of script_own (lightning)")
        assert any("on_train_start  on_train_start" in line for line in lines)
        assert lines[-1] == "all that it uses is mapped"
        assert not any("imported" in line for line in lines)
    cadenza("compat", f"{script}:Outer.Inner")

    lines = cadenza("compat", f"{script}:Wrong", code=1).out.splitlines()
    assert lines[-3].startswith("! reads trainer.no_such_thing in on_train_start. ")
    assert lines[-3].endswith("(line 11)")
    assert lines[-1] == "not all is mapped: 1 attribute is not provided"
    found = json.loads(cadenza("compat", f"{script}:Wrong", "--json", code=1).out)
    assert (found["callback"], found["system"], found["mapped"]) == ("Wrong", "lightning", False)
    assert found["events"] == [{"event": "on_train_start", "moment": "on_train_start", "note": None}]
    assert [one["what"] for one in found["uses"]] == ["trainer.no_such_thing"]

    lines = cadenza("compat", script, code=1).out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["callback", "mapped"], ["Fine", "yes"], ["Wrong", "no"]]
    assert lines[-1] == "1 of 2 callbacks mapped"
    assert [one["callback"] for one in json.loads(cadenza("compat", script, "--json", code=1).out)] == ["Fine", "Wrong"]


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize(
    ("target", "code"), [("lightning.pytorch.callbacks.EarlyStopping", 0), ("lightning.pytorch.callbacks", 1)]
)
def test_it_fits_the_terminal(target: str, code: int, columns: int, cadenza: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = cadenza("compat", target, code=code).out.splitlines()
    assert len(lines) > 5
    assert not [line for line in lines if len(line) > columns and " " in line.strip()]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("{script}:Fin", "has no 'Fin'. Did you mean 'Fine'?"),
        ("{script}:Hidden", "has no 'Hidden'. It is defined in a function or below `if __name__ == "),
        ("{script}:number", "number of '{script}' is a int, which has none of the base classes transformers.TrainerCallback, "),
        ("{script}:Outer", "Outer of '{script}' has none of the base classes "),
        ("no_such_module.Stop", "there is no module 'no_such_module'"),
        ("json", "'json' has no callback class with one of the base classes"),
        ("cadenza.callbacks.EarlyStopping", "EarlyStopping of 'cadenza.callbacks' is a native callback: it needs no adapter"),
    ],
)
def test_other_names_and_modules_are_refused(target: str, told: str, script: str, cadenza: Command) -> None:
    assert told.format(script=script) in cadenza("compat", target.format(script=script), code=1).err
