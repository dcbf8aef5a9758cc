"""The command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cadenza.commands.main import main


@pytest.fixture
def cadenza(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A function that runs ``cadenza`` with arguments, checks the exit code, and returns ``out`` and ``err``."""

    def run(*arguments: object, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([str(one) for one in arguments]) == code
        return capsys.readouterr()

    return run
