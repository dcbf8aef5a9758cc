"""What README and the page about installation claim, compared with the project. Examples and links are tests elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = " ".join(README.split())
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
CHECKED_BY = {
    "A misspelled hook is an error": "hooks/test_moments.py::test_a_misspelled_hook_is_an_error_when_the_class_is_written",
    "mypy and pyright report the same mistake": "contracts/test_typing.py::test_mypy_refuses_every_wrong_line_and_no_other",
    "`trainer.plan()` prints which callback runs": (
        "engine/test_plan.py::test_it_names_the_listeners_in_order_with_cadence_and_limit"
    ),
    "names callbacks that can never run": "hooks/test_faults.py::test_a_listener_that_can_never_fire_is_named_before_and_after",
    "measures what each phase": "callbacks/test_profile.py::test_time_goes_to_the_phase_in_which_it_passes",
    "and each callback cost": "callbacks/test_profile.py::test_each_callback_at_each_moment_has_its_own_time",
    "the final weights are bit-identical": "checkpoint/test_resume.py::test_exact_at_every_single_step",
    "loader workers, dropout, gradient accumulation and bf16": "checkpoint/test_resume.py::test_exact_with_workers",
    "Kill the process at any instant": (
        "checkpoint/test_kill.py::test_trainings_that_are_killed_at_random_instants_end_in_the_same_bits"
    ),
    "An error in a callback says which callback raised it": (
        "hooks/test_faults.py::test_an_error_gains_exactly_one_line_that_says_who_where_and_when"
    ),
    "If an experiment tracker fails": ("hooks/test_faults.py::test_a_fault_that_disables_is_reported_once_and_the_run_goes_on"),
    "They need no wrapper": ("compat/accelerated/test_in_native_trainers.py::test_built_in_callbacks_watch_native_evaluations"),
    "run with other import lines": "compat/nemo/test_listings.py::test_the_scripts_are_the_document_s_listings",
    "The numbers were recorded in a run": "test_docs.py::test_what_is_generated_from_the_code_is_up_to_date",
    "trains a small network on handwritten digits": (
        "commands/test_demo.py::test_the_demo_ends_well_and_its_test_accuracy_is_at_least_97_percent"
    ),
}


@pytest.mark.parametrize("claim", CHECKED_BY)
def test_each_claim_about_behaviour_stands_in_the_page_and_has_a_test(claim: str) -> None:
    assert claim in PROSE
    file, _, test = CHECKED_BY[claim].partition("::")
    assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_make_says_how_long_the_tests_take_before_and_after() -> None:
    for target, words in (("test", r"about \d+ minutes"), ("test-quick", r"under \d+ seconds")):
        recipe = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        said, done = re.search(rf"echo .*{words}", recipe), recipe.find(f'echo "make {target} took ')
        assert said is not None
        assert said.start() < recipe.index("ruff check") < recipe.index("-m pytest") < done


def test_the_core_depends_on_the_named_packages() -> None:
    named = re.search(r"The core depends on ([\w, ]+?) and (\w+)\.", PROSE)
    assert named is not None
    packages = {re.split(r"[<>=\[; ]", one)[0] for one in PROJECT["dependencies"]}
    assert {*named[1].split(", "), named[2]} == packages


def test_the_lowest_versions_are_those_of_the_metadata() -> None:
    found = re.search(r"needs Python ([\d.]+) or newer and PyTorch ([\d.]+) or newer", PROSE)
    assert found is not None
    assert PROJECT["requires-python"] == f">={found[1]}"
    assert f"torch>={found[2]}" in PROJECT["dependencies"]


def test_the_listed_extras_are_those_of_the_project() -> None:
    listed = re.search(r"Each extra adds the packages for one purpose: (.*?or `all`)\.", PROSE)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == PROJECT["optional-dependencies"].keys()
    table = INSTALL.partition("## What each extra adds")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_every_named_command_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)\b", text)) <= targets
    for extras in re.findall(r"\[([\w,]+)\]'", text):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_console_lines_are_those_that_the_script_prints() -> None:
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    shown = re.search(r"```text\n(epoch.*?)```", README, re.DOTALL)
    assert script is not None
    assert shown is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script[1], "README.md", "exec"), {"__name__": "readme"})
    lines = {_without_numbers(line) for line in printed.getvalue().splitlines()}
    assert {_without_numbers(line) for line in shown[1].splitlines() if line != "..."} <= lines


def test_the_speed_and_the_kills_are_the_measured_ones() -> None:
    rows = json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))["rows"]
    assert f"({rows['Cadenza']['sgd']['ratio']:.2f} times, with SGD)" in PROSE
    assert "500 kills, no difference" in PROSE
    assert "reached 500 kills" in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_the_loop_is_a_file_of_fewer_lines_than_named() -> None:
    named = re.search(r"one file of fewer than (\d+) lines: \[`([\w/.]+)`\]", PROSE)
    assert named is not None
    assert len((ROOT / named[2]).read_text(encoding="utf-8").splitlines()) < int(named[1])


def test_a_failure_is_shown_when_it_happens(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a():\n    assert 1 == 2\n\ndef test_b():\n    print('x')\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-v", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert 0 < done.stdout.find("assert 1 == 2") < done.stdout.index("test_b PASSED"), done.stdout + done.stderr


def test_the_supported_pythons_are_those_of_the_classifiers() -> None:
    versions = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert f"| Python | {', '.join(versions)} |" in INSTALL


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", line)
