"""``make test`` runs what failed once more, alone, and names what passes then."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import suite

AGAIN = """
from pathlib import Path

def test_that_needs_the_machine_for_itself():
    before = Path(__file__).with_suffix(".before")
    seen = before.exists()
    before.touch()
    assert seen, "it came too late"

def test_that_holds():
    pass
"""
PAGE = """
```python
value = 1
```
```python
from pathlib import Path
seen = Path({marker!r}).exists()
Path({marker!r}).touch()
assert seen and value == 1
```
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(suite.ROOT / "conftest.py", tmp_path)
    (tmp_path / "tests/alone").mkdir(parents=True)
    (tmp_path / "tests/alone/test_kill.py").write_text("def test_that_holds(): pass")
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests', 'docs']")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["suite.py"])
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("GIT_DIR", raising=False)
    return tmp_path


def test_of_tests_that_hold_none_is_run_again(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (checkout / "tests/test_some.py").write_text("def test_that_holds(): pass")
    assert suite.main() == 0
    out = capfd.readouterr().out
    assert out.count(" passed in ") == 2
    assert out.endswith("0 passed alone\n")


def test_what_passes_alone_is_named_with_its_error_and_the_suite_passes(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (checkout / "tests/test_first.py").write_text(AGAIN)
    (checkout / "docs").mkdir()
    (checkout / "docs/page.md").write_text(PAGE.format(marker=str(checkout / "marker")))
    assert suite.main() == 0
    *_, head, first, second = capfd.readouterr().out.splitlines()
    assert head == "2 passed alone:"
    assert {first, second} == {
        "  tests/test_first.py::test_that_needs_the_machine_for_itself: AssertionError: it came too late",
        "  docs/page.md::line:5,column:1: AssertionError",
    }


def test_what_fails_twice_fails_the_suite(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (checkout / "tests/test_first.py").write_text(AGAIN)
    (checkout / "tests/alone/test_kill.py").write_text("def test_that_fails(): assert 1 == 2")
    assert suite.main() == 1
    out = capfd.readouterr().out
    assert "1 passed alone:" in out
    assert out.endswith("1 failed twice:\n  tests/alone/test_kill.py::test_that_fails: assert 1 == 2\n")


def test_more_than_three_that_pass_only_alone_fail_the_suite(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        (checkout / f"tests/test_{number}.py").write_text(AGAIN)
    assert suite.main() == 1
    assert capfd.readouterr().out.endswith(
        "More than 3 tests passed only alone, with 4 errors. Find what each of them waits for.\n"
    )


def test_a_fixture_that_fails_once_for_all_tests_of_a_file_counts_as_one(
    checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fixture = AGAIN.replace("def test_that_needs_the_machine_for_itself", "@pytest.fixture(scope='module')\ndef shared").split(
        "def test_that_holds"
    )[0]
    tests = "".join(f"def test_{number}(shared): pass\n" for number in range(5))
    (checkout / "tests/test_first.py").write_text(f"import pytest\n{fixture}{tests}")
    assert suite.main() == 0
    assert "5 passed alone:" in capfd.readouterr().out


def test_a_file_that_a_test_leaves_in_the_checkout_fails_the_suite(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=checkout, check=True)
    shutil.copy(Path(__file__).parents[1] / ".gitignore", checkout)
    writing = "from pathlib import Path\n\ndef test_that_writes():\n    Path(__file__).parents[1].joinpath('left').touch()"
    (checkout / "tests/test_first.py").write_text(writing)
    assert suite.main() == 1
    assert capfd.readouterr().out.endswith("Tests left files in the checkout: left. They belong in tmp_path.\n")
    assert suite.main() == 0, "it was there before"


def test_a_suite_that_cannot_be_collected_ends_with_the_code_of_pytest(checkout: Path) -> None:
    (checkout / "tests/test_first.py").write_text("import nowhere_to_be_found")
    assert suite.main() == 2
