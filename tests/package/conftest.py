"""The archives that `make package` has built, and an empty environment into which the wheel is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cadenza.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints.txt"


@dataclass(frozen=True)
class Environment:
    """An environment that holds the wheel, and a folder outside of the checkout in which its commands run."""

    root: Path
    folder: Path

    def run(self, *command: str, expected: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment with `command[0]` as its name, without the variables that Python reads."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        program = self.root / ("Scripts" if os.name == "nt" else "bin") / command[0]
        done = subprocess.run(
            [str(program), *command[1:]], cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == expected, done.stdout + done.stderr
        return done

    def install(self, *wanted: str) -> None:
        """Install with the pinned versions."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(PINS), *wanted)


@pytest.fixture(scope="session")
def wheel() -> Path:
    return _archive(f"cadenza-{__version__}-py3-none-any.whl")


@pytest.fixture(scope="session")
def sdist() -> Path:
    return _archive(f"cadenza-{__version__}.tar.gz")


@pytest.fixture(scope="session")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel and the dependencies of the core, and nothing else."""
    folder = tmp_path_factory.mktemp("outside")
    environment = Environment(folder / "environment", folder)
    subprocess.run([sys.executable, "-m", "venv", str(environment.root)], check=True)
    environment.install(next(line for line in PINS.read_text(encoding="utf-8").splitlines() if line.startswith("torch==")))
    environment.install(str(wheel))
    return environment


@pytest.fixture(scope="session")
def with_demo(core: Environment, wheel: Path) -> Environment:
    """Return the same environment after the extra ``demo`` is installed: tests that use it stand in a later file."""
    core.install(f"{wheel}[demo]")
    return core


def _archive(name: str) -> Path:
    path = ROOT / "dist" / name
    assert path.exists(), f"{path} is not built. Run: make package"
    return path
