"""Fixtures of the tests of fastNLP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import rich

from cadenza.compat.fastnlp import Trainer, logger

collect_ignore = ["listings"]  # scripts, which a test runs


@pytest.fixture(autouse=True)
def _no_pending_functions() -> Iterator[None]:
    """Functions of ``Trainer.on`` are stored in the class: remove those of other tests."""
    Trainer._custom_callbacks.clear()
    yield
    Trainer._custom_callbacks.clear()


@pytest.fixture
def fresh_logger() -> Iterator[None]:
    """The logger as it is after the import, with a new console of rich. Other tests do not see changes."""
    rich.reconfigure()  # the global console keeps what it found when it was created: a terminal, a notebook
    kept = vars(logger).copy()
    logger.handlers, logger._warning_msgs, logger._has_stdout = [], set(), False
    yield
    for handler in logger.handlers:
        handler.close()
    vars(logger).update(kept)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of this launch have the name ``launch``."""
    monkeypatch.setenv("FASTNLP_LAUNCH_TIME", "launch")
