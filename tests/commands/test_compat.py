"""``cadenza compat``: what of a callback class works in a native run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cadenza.commands.main import main

pytest.importorskip("lightning", reason="the classes that the command reads are those of Lightning: pip install lightning")

SCRIPT = """
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
    path = tmp_path / "own.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_class_that_is_mapped(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for target in ("Fine", "fine"):
        assert main(["compat", f"{script}:{target}"]) == 0
        shown = capsys.readouterr()
        assert shown.out.splitlines()[0] in ("Fine of own (lightning)", "Fine of script_own (lightning)")
        assert "on_train_start  on_train_start" in shown.out
        assert shown.out.splitlines()[-1] == "all that it uses is mapped"
        assert "imported" not in shown.out
    assert main(["compat", f"{script}:Outer.Inner"]) == 0


def test_a_class_that_is_not(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", f"{script}:Wrong"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("! reads trainer.no_such_thing in on_train_start. ")
    assert lines[-3].endswith("(line 11)")
    assert lines[-1] == "not all is mapped: 1 attribute is not provided"


def test_a_module_is_a_table_of_its_classes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", script]) == 1
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:3]] == [["callback", "mapped"], ["Fine", "yes"], ["Wrong", "no"]]
    assert out.splitlines()[-1] == "1 of 2 callbacks mapped"


@pytest.mark.parametrize("columns", [80, 40])
def test_it_fits_the_terminal(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for target in ("lightning.pytorch.callbacks.EarlyStopping", "lightning.pytorch.callbacks"):
        main(["compat", target])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 5
        too_wide = [line for line in lines if len(line) > columns and " " in line.strip()]
        assert not too_wide


def test_json_has_all_of_it(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", f"{script}:Wrong", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["callback"], found["system"], found["mapped"]) == ("Wrong", "lightning", False)
    assert found["events"] == [{"event": "on_train_start", "moment": "on_train_start", "note": None}]
    assert [one["what"] for one in found["uses"]] == ["trainer.no_such_thing"]
    assert main(["compat", script, "--json"]) == 1
    assert [one["callback"] for one in json.loads(capsys.readouterr().out)] == ["Fine", "Wrong"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Fin", "has no 'Fin'. Did you mean 'Fine'?"),
        ("Hidden", "has no 'Hidden'. It is defined in a function or below `if __name__ == "),
        ("number", "number of '{script}' is a int, which has none of the base classes transformers.TrainerCallback, "),
        ("Outer", "Outer of '{script}' has none of the base classes "),
    ],
)
def test_other_names_are_refused(name: str, told: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", f"{script}:{name}"]) == 1
    assert told.format(script=script) in capsys.readouterr().err


def test_other_modules_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compat", "no_such_module.Stop"]) == 1
    assert "there is no module 'no_such_module'" in capsys.readouterr().err
    assert main(["compat", "json"]) == 1
    assert "'json' has no callback class with one of the base classes" in capsys.readouterr().err
    assert main(["compat", "cadenza.callbacks.EarlyStopping"]) == 1
    assert "EarlyStopping of 'cadenza.callbacks' is a native callback: it needs no adapter" in capsys.readouterr().err
