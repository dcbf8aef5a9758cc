"""``cadenza plan``: the plan of a trainer in a script, and what a person reads who names it wrongly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza import Trainer
from cadenza.commands.main import main
from tests.commands.parts import Command

SCRIPT = """
import sys
from cadenza.callbacks import LogTraining
from cadenza.testing import tiny_trainer
from beside import DIRECTORY

print("a script may print", __name__)
trainer = tiny_trainer(epochs=2, seed=len(sys.argv), callbacks=[LogTraining("1000 steps")], directory=DIRECTORY)

def build():
    return tiny_trainer(steps=7)

def needs(lr):
    return tiny_trainer()

def wrong():
    return 3

def breaks():
    return {}["lr"]

if __name__ == "__main__":
    trainer.fit()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for module in ("inner", "train", "beside", "trains", "breaks", "two", "one", "ends", "package.inner", "package"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text("DIRECTORY = 'runs/first'\n")
    return tmp_path


Told = Callable[..., str]


@pytest.fixture
def error_of(cadenza: Command) -> Told:
    """A function that returns the error of a plan, which prints nothing else."""

    def told(*arguments: str) -> str:
        out, err = cadenza("plan", *arguments, code=1)
        assert out == ""
        return str(err)

    return told


def test_the_plan_of_a_script_is_printed_and_nothing_is_trained(folder: Path, cadenza: Command) -> None:
    before = sys.argv, [*sys.path]
    out, err = cadenza("plan", "scripts/train.py:trainer")
    assert out.startswith("fit: 2 epochs, 5 batches an epoch, 10 steps, on cpu, in fp32, seed 1, into ")
    assert "on_step_end" in out
    assert "! LogTraining (every 1000 steps) never fires" in out
    assert err == "a script may print train\n"
    assert not (folder / "runs").exists()
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["scripts/train.py:trainer", "--", "--lr", "0.1", "--json"], "seed 4"),  # the number of the script's arguments
        (["scripts/train.py:build"], "7 steps"),  # a function may return the trainer
        (["scripts/train.py"], "10 steps"),  # one trainer needs no name
        (["package.inner:trainer"], "3 steps"),  # a module of the current folder
    ],
)
def test_a_trainer_is_found(folder: Path, arguments: list[str], shown: str, cadenza: Command) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "inner.py").write_text("from cadenza.testing import tiny_trainer\ntrainer = tiny_trainer(steps=3)\n")
    assert shown in cadenza("plan", *arguments).out


def test_json_holds_the_plan_as_data(folder: Path, cadenza: Command) -> None:
    plan = json.loads(cadenza("plan", "scripts/train.py:trainer", "--json").out)
    assert (plan["max_epochs"], plan["steps"], plan["device"], plan["seed"]) == (2, 10, "cpu", 1)
    assert plan["directory"] == str(folder / "runs" / "first")
    assert plan["moments"]["on_step_end"] == [{"callback": "LogTraining", "schedule": "every 1000 steps", "note": None}]
    assert plan["moments"]["on_eval_start"] == []
    [never] = plan["never"]
    assert never["listener"] == "LogTraining (every 1000 steps)"


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("scripts/train.py:trainr", "has no 'trainr'. Did you mean 'trainer'? There is: trainer\n"),
        ("scripts/train.py:DIRECTORY", "must be a Trainer, or a function without arguments"),
        ("scripts/train.py:needs", "missing a required argument: 'lr'"),
        ("scripts/train.py:wrong", "must return a Trainer; it returned int"),
        ("scripts/trian.py:a", "there is no script 'scripts/trian.py'. Did you mean 'scripts/train.py'?"),
        ("two.py", "has 2 Trainers at its top level. Name one, as in two.py:a. There are: a, b"),
        (
            "one.py",
            "has no Trainers at its top level. Make one at its top level, or name a function that returns one. "
            "Its functions and classes: build.",
        ),
        ("package.outer:trainer", "there is no module 'package.outer'"),
        (".inner:trainer", "'.inner' is no script or module. Expected script.py:NAME or "),
    ],
)
def test_a_wrong_name_comes_with_the_nearest_and_the_trainers_that_are_there(
    folder: Path, target: str, told: str, error_of: Told
) -> None:
    (folder / "package").mkdir()
    (folder / "two.py").write_text("from cadenza.testing import tiny_trainer\na, b = tiny_trainer(), tiny_trainer()\n")
    (folder / "one.py").write_text("def build(): ...\n")
    assert told in error_of(target)


@pytest.mark.parametrize("call", ["trainer.fit()", "try:\n    trainer.fit()\nexcept Exception:\n    pass"])
def test_a_script_that_trains_when_it_is_imported_is_refused(folder: Path, call: str, error_of: Told) -> None:
    before = Trainer.fit
    (folder / "trains.py").write_text(
        f"from cadenza.testing import tiny_trainer\ntrainer = tiny_trainer(directory='runs/x')\n{call}\n"
    )
    told = error_of("trains.py:trainer")
    assert told.startswith("cadenza: 'trains.py' trains when it is imported: it calls fit(). Put the call below")
    assert Trainer.fit is before
    assert not (folder / "runs").exists()


def test_an_error_of_the_script_has_its_own_traceback_and_none_of_ours(folder: Path, error_of: Told) -> None:
    (folder / "breaks.py").write_text("def rate():\n    return 1 / 0\n\nlr = rate()\n")
    told = error_of("breaks.py:trainer")
    assert 'breaks.py", line 4, in <module>' in told
    assert "ZeroDivisionError: division by zero\ncadenza: 'breaks.py' failed; its error is above\n" in told
    assert "commands/plan.py" not in told
    assert "KeyError: 'lr'" in error_of("scripts/train.py:breaks")
    (folder / "breaks.py").write_text("lr = = 3\n")  # Python cannot read this
    told = error_of("breaks.py:trainer")
    assert "lr = = 3" in told
    assert "SyntaxError" in told
    assert "commands/plan.py" not in told


def test_a_script_of_a_package_is_named_as_a_module(
    folder: Path, error_of: Told, cadenza: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "parts.py").write_text("from cadenza.testing import tiny_trainer\n")
    (folder / "package" / "inner.py").write_text("from .parts import tiny_trainer\ntrainer = tiny_trainer(steps=3)\n")
    end = "Relative imports need the name of the module{}: cadenza plan package.inner:NAME\n"
    for init in (False, True):  # without __init__.py, it is a package of the current folder
        assert error_of("package/inner.py:trainer").endswith(end.format(""))
        (folder / "package" / "__init__.py").touch(exist_ok=init)
    assert "3 steps" in cadenza("plan", "package.inner:trainer").out
    monkeypatch.chdir(folder / "package")
    assert error_of("inner.py:trainer").endswith(end.format(f", in the folder {str(folder)!r}"))


def test_a_program_that_the_script_starts_prints_to_stderr(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "two.py").write_text(
        "import subprocess, sys\nfrom cadenza.testing import tiny_trainer\n"
        "subprocess.run([sys.executable, '-c', 'print(2.5)'], check=True)\ntrainer = tiny_trainer(steps=3)\n"
    )
    assert main(["plan", "two.py", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["steps"] == 3
    assert err == "2.5\n"


def test_a_script_that_needs_arguments_says_how_to_pass_them(folder: Path, error_of: Told) -> None:
    (folder / "ends.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', required=True)\nparser.parse_args()\n"
    )
    told = error_of("ends.py:trainer")
    assert "the following arguments are required: --lr" in told
    assert "ended with sys.exit(2) when it was imported. Pass its arguments after --" in told
