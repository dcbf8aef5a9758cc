"""``nemo.logging``: levels, streams, files and messages that appear once."""

from __future__ import annotations

import warnings
from io import StringIO
from pathlib import Path

import pytest

import cadenza.compat.nemo as nemo
import cadenza.compat.nemo10 as nemo10
from cadenza.compat.nemo.core import NeuralModuleFactory, SimpleLogger
from cadenza.compat.nemo.utils import get_logger, logging, logging_mode
from tests.compat.nemo.graphs import SGD, line


def test_it_is_the_same_logger_under_all_names() -> None:
    assert logging is nemo.logging is nemo.utils.logging is nemo10.logging is nemo10.core.callbacks.logging is get_logger("")
    assert NeuralModuleFactory().logger is logging


def test_messages_go_to_the_patched_streams() -> None:
    with logging.patch_stdout_handler(StringIO()) as out, logging.patch_stderr_handler(StringIO()) as err:
        logging.info("one %d", 1)
        logging.warning("two")
    assert out.getvalue().endswith("] one 1\n")
    assert "[NeMo W " in err.getvalue()
    assert " test_log:" in out.getvalue()  # the file of the caller


def test_after_a_patch_messages_go_to_the_terminal_again(capsys: pytest.CaptureFixture[str]) -> None:
    with logging.patch_stdout_handler(StringIO()):
        logging.info("hidden")
    logging.info("shown")
    assert [line.rpartition("] ")[2] for line in capsys.readouterr().out.splitlines()] == ["shown"]


def test_a_logger_of_a_training_prints_one_line_per_step() -> None:
    with logging.patch_stdout_handler(StringIO()) as out:
        NeuralModuleFactory().train([line().loss], "sgd", {**SGD, "max_steps": 4}, [SimpleLogger(step_freq=1)])
    assert ["loss: " in text for text in out.getvalue().splitlines()] == [True] * 4


def test_levels_are_set_and_restored() -> None:
    with logging.patch_stdout_handler(StringIO()) as out, logging.temp_verbosity(logging.WARNING):
        logging.info("hidden")
        assert logging.get_verbosity() == logging.WARNING
    assert logging.get_verbosity() == logging.INFO
    assert out.getvalue() == ""
    logging.set_verbosity(logging.DEBUG)
    assert logging.getEffectiveLevel() == logging.DEBUG == 10
    logging.setLevel(logging.INFO)


def test_a_message_appears_once_if_asked() -> None:
    with logging.patch_stderr_handler(StringIO()) as err:
        for _ in range(3):
            logging.warning("only once in these tests", mode=logging_mode.ONCE)
            logging.warning("each time", mode=logging_mode.EACH)
    assert (err.getvalue().count("only once"), err.getvalue().count("each time")) == (1, 3)


def test_files_and_removed_streams(tmp_path: Path) -> None:
    logging.add_file_handler(tmp_path / "own.txt")
    handler = logging.logger.handlers[-1]
    try:
        with logging.patch_stdout_handler(StringIO()) as out:
            logging.remove_stream_handlers()
            logging.info("to the file")
            logging.reset_stream_handler()
            logging.info("to both")
    finally:
        logging.logger.removeHandler(handler)
        handler.close()
    assert [text.rpartition("] ")[2] for text in (tmp_path / "own.txt").read_text().splitlines()] == ["to the file", "to both"]
    assert out.getvalue().count("\n") == 1


def test_warnings_of_python_are_logged_if_asked() -> None:
    with warnings.catch_warnings(), logging.patch_stderr_handler(StringIO()) as err:
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("careful", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "UserWarning: careful" in err.getvalue()
