"""``cadenza compat``: what of a callback class works in a native run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.parts import Command

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


def test_a_class_that_is_mapped(script: str, cadenza: Command) -> None:
    for target in ("Fine", "fine"):
        lines = cadenza("compat", f"{script}:{target}").out.splitlines()
        assert lines[0] in ("Fine of own (lightning)", "Fine of script_own (lightning)")
        assert any("on_train_start  on_train_start" in line for line in lines)
        assert lines[-1] == "all that it uses is mapped"
        assert not any("imported" in line for line in lines)
    cadenza("compat", f"{script}:Outer.Inner")


def test_a_class_that_is_not_mapped(script: str, cadenza: Command) -> None:
    lines = cadenza("compat", f"{script}:Wrong", code=1).out.splitlines()
    assert lines[-3].startswith("! reads trainer.no_such_thing in on_train_start. ")
    assert lines[-3].endswith("(line 11)")
    assert lines[-1] == "not all is mapped: 1 attribute is not provided"
    found = json.loads(cadenza("compat", f"{script}:Wrong", "--json", code=1).out)
    assert (found["callback"], found["system"], found["mapped"]) == ("Wrong", "lightning", False)
    assert found["events"] == [{"event": "on_train_start", "moment": "on_train_start", "note": None}]
    assert [one["what"] for one in found["uses"]] == ["trainer.no_such_thing"]


def test_a_module_is_a_table_of_its_classes(script: str, cadenza: Command) -> None:
    lines = cadenza("compat", script, code=1).out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["callback", "mapped"], ["Fine", "yes"], ["Wrong", "no"]]
    assert lines[-1] == "1 of 2 callbacks mapped"
    found = json.loads(cadenza("compat", script, "--json", code=1).out)
    assert [one["callback"] for one in found] == ["Fine", "Wrong"]


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
        (
            "cadenza.callbacks.EarlyStopping",
            "EarlyStopping of 'cadenza.callbacks' is a native callback: it needs no adapter",
        ),
    ],
)
def test_other_names_and_modules_are_refused(target: str, told: str, script: str, cadenza: Command) -> None:
    assert told.format(script=script) in cadenza("compat", target.format(script=script), code=1).err
