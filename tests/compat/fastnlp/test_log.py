"""fastNLP's logger: to the screen, to files, once, and on the main process."""

from __future__ import annotations

import builtins
import logging
from pathlib import Path

import pytest

from cadenza.compat.fastnlp import logger, print
from cadenza.compat.fastnlp.core.log.logger import FastNLPLogger, parse_level
from cadenza.compat.fastnlp.envs import FASTNLP_GLOBAL_RANK, FASTNLP_LAUNCH_TIME, FASTNLP_LOG_LEVEL

Shown = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("fresh_logger")


def test_messages_are_shown_from_the_level_info_on(capsys: Shown) -> None:
    handler = logger.set_stdout("raw")
    logger.info("the %s", "message")
    logger.debug("a detail")
    assert capsys.readouterr().out == "the message\n"
    assert isinstance(handler, logging.Handler)


def test_without_a_choice_rich_shows_the_level_and_the_calling_file(capsys: Shown) -> None:
    logger.warning_once("one")
    logger.rank_zero_warning("two", once=True)
    print("three")
    shown = capsys.readouterr().out
    assert shown.count("WARNING") == 2
    assert shown.count("test_log.py") == 3


@pytest.mark.parametrize("stdout", ["raw", "naive", "tqdm"])
def test_each_way_prints_the_text(stdout: str, capsys: Shown) -> None:
    logger.set_stdout(stdout, level="warning")  # type: ignore[arg-type]  # one of its values
    logger.warn("seen")
    logger.info("below the level")
    assert capsys.readouterr().out == "seen\n"


def test_the_last_way_replaces_the_others(capsys: Shown) -> None:
    logger.info("by rich")
    own = logging.NullHandler()
    logger.addHandler(own)
    logger.set_stdout("tqdm")
    logger.set_stdout("raw")
    capsys.readouterr()
    logger.info("once")
    assert capsys.readouterr().out == "once\n"
    assert own in logger.handlers


def test_none_shows_nothing_and_any_other_value_is_an_error(capsys: Shown) -> None:
    assert logger.set_stdout("none") is None
    logger.error("silent")
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="stdout must be 'rich'"):
        logger.set_stdout("paper")  # type: ignore[arg-type]


def test_a_warning_once_is_shown_once(capsys: Shown) -> None:
    logger.set_stdout("raw")
    for text in ("a", "a", "b"):
        logger.warning_once(text)
        logger.rank_zero_warning(text, once=True)
    assert capsys.readouterr().out == "a\nb\n"


def test_other_processes_show_warnings_with_their_rank_only(monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> None:
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "2")
    other = FastNLPLogger("other")
    other.set_stdout("raw")
    other.info("the main process says this")
    other.rank_zero_warning("this too")
    other.warning("mine")
    assert capsys.readouterr().out == "Rank: 2 - mine\n"


def test_the_environment_chooses_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_level() == logging.INFO
    monkeypatch.setenv(FASTNLP_LOG_LEVEL, "ERROR")
    assert FastNLPLogger("other").level == logging.ERROR
    monkeypatch.setenv(FASTNLP_LOG_LEVEL, "loud")
    with pytest.raises(ValueError, match=r"level must be one of .* got 'loud'"):
        FastNLPLogger("other")


def test_set_level_changes_the_handlers_too(capsys: Shown) -> None:
    logger.set_stdout("raw")
    logger.setLevel("debug")
    logger.debug("now visible")
    logger.setLevel(logging.ERROR)
    logger.warning("now hidden")
    assert capsys.readouterr().out == "now visible\n"


def test_print_is_a_message_of_the_main_process(capsys: Shown) -> None:
    logger.set_stdout("raw")
    print([1, 2], "a", 3.5, sep=", ")
    logger.setLevel("warning")
    print("hidden")
    builtins.print("plain")  # noqa: T201  # Python's own one still prints
    assert capsys.readouterr().out == "[1, 2], a, 3.5\nplain\n"


@pytest.mark.parametrize("where", ["log.txt", "new/log.txt", "new", "", None])
def test_a_file_gets_the_messages(where: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> None:
    monkeypatch.setenv(FASTNLP_LAUNCH_TIME, "launch")
    monkeypatch.chdir(tmp_path)
    logger.set_stdout("raw")
    assert logger.add_file(where if where is None else tmp_path / where) is not None
    assert logger.add_file(where if where is None else tmp_path / where) is None, "it is written already"
    logger.warning("the message")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.relative_to(tmp_path) == Path(
        {"new": "new/launch.log", "": "launch.log", None: "launch.log"}.get(where, where or "")
    )
    assert file.read_text().endswith("- test_log - [WARNING] - the message\n")
    assert "the message" in capsys.readouterr().out


def test_an_existing_file_is_replaced_with_a_warning_or_continued(tmp_path: Path, capsys: Shown) -> None:
    file = tmp_path / "log.txt"
    file.write_text("before\n")
    logger.set_stdout("raw")
    with pytest.warns(UserWarning, match="exists already"):
        logger.add_file(file, mode="a", remove_other_handlers=True, level="WARNING")
    capsys.readouterr()
    logger.error("after")
    logger.info("below")
    assert (capsys.readouterr().out, file.read_text().count("\n")) == ("", 2)
    with pytest.raises(ValueError, match="mode must be 'w' or 'a'"):
        logger.add_file(file, mode="x")  # type: ignore[arg-type]
