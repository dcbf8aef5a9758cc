"""The command ``cadenza`` as a whole: help, errors, exit codes, and how little it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.callbacks import Checkpoint
from cadenza.commands.main import COMMANDS, main
from cadenza.testing import tiny_run


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
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


@pytest.mark.parametrize("arguments", [["rusn"], ["compare", "one"], ["runs", "--srot", "x"], ["watch"]])
def test_wrong_arguments_are_one_line_on_stderr_with_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("cadenza: ")
    assert err.endswith("--help\n")
    assert ("Did you mean 'runs'?" in err) == (arguments == ["rusn"])


def test_the_help_imports_neither_torch_nor_the_commands() -> None:
    code = (
        "import sys; from cadenza.commands.main import main; main([])\n"
        "assert not {'torch', 'rich', 'cadenza.commands.plan', 'cadenza.commands.runs'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_checkpoints_are_listed_verified_and_shown_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(directory=tmp_path, callbacks=[Checkpoint("2 steps", keep_last=None)], seed=1)

    def found(command: str, code: int = 0) -> object:
        assert main(["checkpoint", command, str(tmp_path), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    listed = found("list")
    assert isinstance(listed, list)
    assert [(one["name"], one["step"], one["state"]) for one in listed] == [
        ("step-00000002", 2, "ok"),
        ("step-00000004", 4, "ok"),
        ("step-00000005", 5, "ok"),
    ]
    shown = found("show")
    assert isinstance(shown, dict)
    assert shown["model"] == {
        "weight": {"shape": [1, 1], "dtype": "torch.float32"},
        "bias": {"shape": [1], "dtype": "torch.float32"},
    }
    (tmp_path / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"damaged")
    verified = found("verify", code=1)
    assert isinstance(verified, list)
    assert [one["ok"] for one in verified] == [True, False, True]
