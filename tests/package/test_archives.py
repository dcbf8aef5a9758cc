"""The wheel and the source archive hold what they should, and their metadata say what the project is."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from cadenza.version import __version__

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "cadenza"


@pytest.fixture(scope="module")
def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"cadenza-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_holds_every_file_of_the_package_and_only_metadata_besides(in_wheel: set[str]) -> None:
    ours = {path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {".css", ".js", ".typed", ".bash", ".zsh"} <= {Path(name).suffix or Path(name).name for name in ours}
    facts = f"cadenza-{__version__}.dist-info/"
    assert in_wheel - ours == {facts + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert ours <= in_wheel


def test_the_source_archive_holds_the_tests_and_what_builds_and_runs_them(in_sdist: set[str]) -> None:
    command = ["git", "--git-dir", str(ROOT / ".git"), "ls-files"]  # runs are tested without a repository: tests/conftest.py
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    private = {name for name in listed if name.startswith(".")}
    files = {name for name in listed if name and (ROOT / name).exists()}
    assert files - private <= in_sdist
    assert {name for name in in_sdist if name.startswith(".")} <= {".gitignore"}
    assert not any(name.endswith((".pyc", ".new")) or "cache" in name.partition("/")[0] for name in in_sdist)


def test_the_metadata_name_licence_authors_and_what_is_supported(metadata: Message) -> None:
    classifiers = metadata.get_all("Classifier", [])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Author"] == "The Cadenza developers"
    assert metadata["Requires-Python"] == ">=3.11"
    assert [one.rpartition(" ")[2] for one in classifiers if "Python :: 3." in one] == ["3.11", "3.12", "3.13", "3.14"]
    assert sum(one.startswith("Operating System") for one in classifiers) == 3
    assert "Typing :: Typed" in classifiers
    assert "Project-URL" not in metadata  # the project has no address yet


def test_the_licence_is_the_apache_licence_without_a_change(in_wheel: set[str]) -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.split()[:5] == ["Apache", "License", "Version", "2.0,", "January"]
    assert text.rstrip().endswith("limitations under the License.")
    assert len(text) == 11358


def test_the_long_description_has_no_link_that_leads_nowhere_on_an_index(metadata: Message) -> None:
    page = str(metadata.get_payload())
    assert page.startswith("# Cadenza\n")
    assert "(docs/" in (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert re.findall(r"\]\((?!https?:)[^)]*\)", prose) == []
    assert "<!--" not in prose
    assert "Start turns a loop written by hand" in prose  # the text of a link stays


def test_a_wheel_is_built_from_the_source_archive(sdist: Path, in_wheel: set[str], tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(sdist)], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        assert set(archive.namelist()) == in_wheel
