"""The Dockerfile, as far as it can be checked without an engine."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from tests.recipes.pages import FOLDER

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


ENTRYPOINT: list[str] = json.loads(dict(instructions())["ENTRYPOINT"])
"""The command of a container. tests/alone/test_commands.py starts it, ends it with SIGTERM and starts it again."""


def test_the_page_shows_the_file() -> None:
    assert f"```dockerfile\n{FILE.read_text(encoding='utf-8')}```" in (FOLDER / "docker.md").read_text(encoding="utf-8")


def test_every_copied_path_exists() -> None:
    copied = [path for name, rest in instructions() if name == "COPY" for path in rest.split()[:-1]]
    assert "src" in copied
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_what_the_build_of_the_package_reads_is_copied() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    copied = {path for name, rest in instructions() if name == "COPY" for path in rest.split()[:-1]}
    readme = [part["path"] for part in whole["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]]
    assert {"pyproject.toml", *readme, *whole["project"]["license-files"], "src"} <= copied


def test_pip_installs_as_the_readme_does_with_extras_that_exist() -> None:
    (command,) = (rest for name, rest in instructions() if name == "RUN" and "pip" in rest)
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    extras = re.findall(r"\w+", command.partition("[")[2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras
    assert set(extras) <= project["optional-dependencies"].keys()


def test_the_user_is_not_root_and_the_command_has_the_exec_form() -> None:
    found = dict(instructions())
    assert found["USER"] == "trainer"
    assert found["VOLUME"] == "/runs"
    assert ENTRYPOINT[-1].startswith("/runs/")
