"""``fastNLP.core.log.logger``: a logger that can write to files, warn once, and warn on the main process only."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from cadenza.compat.fastnlp.core.log.handler import StdoutStreamHandler, TqdmLoggingHandler
from cadenza.compat.fastnlp.envs import (
    FASTNLP_BACKEND_LAUNCH,
    FASTNLP_LOG_LEVEL,
    get_global_rank,
    is_cur_env_distributed,
)
from cadenza.compat.fastnlp.envs.utils import launch_time

__all__ = ["logger"]

ROOT_NAME = "fastNLP"
Stdout = Literal["rich", "tqdm", "naive", "raw", "none"]
Level = str | int


class FastNLPLogger(logging.Logger):
    """A logger with fastNLP's further methods. Use the one object `logger`.

    Until `set_stdout` is called, messages are shown by rich, or printed if it is not installed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, parse_level())
        self._warning_msgs: set[str] = set()
        self._has_stdout = False

    def add_file(
        self,
        path: str | Path | None = None,
        level: Level = "AUTO",
        remove_other_handlers: bool = False,
        mode: Literal["w", "a"] = "w",
    ) -> logging.FileHandler | None:
        """Also write messages to a file.

        Args:
            path: The file, if the name has a suffix; otherwise a folder, in which the file is named after the launch time.
                None: the current folder.
            level: Only messages of this level and above; ``"AUTO"`` is INFO on the main process and WARNING on the others.
            remove_other_handlers: Do not show messages elsewhere.
            mode: ``"w"`` replaces the content of the file, ``"a"`` appends. Several processes always append.

        Returns:
            The handler; None if the logger already writes to this file.
        """
        if mode not in ("w", "a"):
            raise ValueError(f"mode must be 'w' or 'a'; got {mode!r}")
        file = _log_file(path)
        known = (handler for handler in self.handlers if isinstance(handler, logging.FileHandler))
        if any(handler.baseFilename == os.path.abspath(file) for handler in known):
            return None
        if file.exists() and get_global_rank() == 0:
            warnings.warn(f"the log file {file} exists already", stacklevel=2)
        handler = logging.FileHandler(file, mode="a" if is_cur_env_distributed() else mode, encoding="utf-8")
        self.info("Messages are also written to %s", os.path.abspath(file))
        handler.setLevel(level_of(level))
        handler.setFormatter(_formatter("%(asctime)s - %(module)s - [%(levelname)s] - %(message)s"))
        self.addHandler(handler)
        if remove_other_handlers:
            self._has_stdout = True
            self.handlers: list[logging.Handler] = [each for each in self.handlers if isinstance(each, logging.FileHandler)]
        return handler

    def set_stdout(self, stdout: Stdout = "raw", level: Level = "AUTO") -> logging.Handler | None:
        """Choose how messages are shown, and from which level on.

        Args:
            stdout: ``"raw"`` and ``"naive"`` print the text only, ``"rich"`` adds time, level and file, ``"tqdm"`` prints above
                the bars of tqdm, ``"none"`` shows nothing.
            level: As in `add_file`. `setLevel` also changes the level of the logger.

        Returns:
            The handler; None for ``"none"``.
        """
        if stdout not in ("rich", "tqdm", "naive", "raw", "none"):
            raise ValueError(f"stdout must be 'rich', 'tqdm', 'naive', 'raw' or 'none'; got {stdout!r}")
        self.handlers = [handler for handler in self.handlers if not hasattr(handler, "_shows_messages")]
        self._has_stdout, handler = True, _shower(stdout)
        if handler is not None:
            vars(handler)["_shows_messages"] = True
            handler.setLevel(level_of(level))
            handler.setFormatter(_formatter("%(message)s"))
            self.addHandler(handler)
        return handler

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Warn unless the same text was already logged as a warning."""
        if msg not in self._warning_msgs:
            self._warning_msgs.add(msg)
            self.warning(msg, *args, **_one_deeper(kwargs))

    def rank_zero_warning(self, msg: str, *args: Any, once: bool = False, **kwargs: Any) -> None:
        """Warn on the main process only.

        Args:
            msg: The text.
            args: Values for the text.
            once: As `warning_once`.
            kwargs: Further arguments of `warning`.
        """
        if get_global_rank() == 0:
            (self.warning_once if once else self.warning)(msg, *args, **_one_deeper(kwargs))

    def warn(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Warn. `warning` is the same."""
        self.warning(msg, *args, **_one_deeper(kwargs))

    def setLevel(self, level: Level) -> None:  # noqa: N802  # logging's name
        """Set the level of the logger and of all its handlers."""
        super().setLevel(level_of(level))
        for handler in self.handlers:
            handler.setLevel(self.level)

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  # logging's name
        """Return whether messages of this level are shown. logging's own method keeps a stale answer after `setLevel`."""
        return level >= self.level and level > self.manager.disable

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not self._has_stdout:
            self.set_stdout("rich" if find_spec("rich") else "raw", self.level)
        record.rank = get_global_rank()
        if self.handlers:  # logging itself prints warnings for which there is no handler
            super().callHandlers(record)


def parse_level() -> Level:
    """Return the level of the environment; without one INFO on the main process, and WARNING on the others."""
    given = os.environ.get(FASTNLP_LOG_LEVEL, "AUTO")
    if given != "AUTO":
        return level_of(given)
    return logging.WARNING if get_global_rank() else logging.INFO


def level_of(level: Level) -> int:
    """Return the number of a level.

    Raises:
        ValueError: There is no level of this name.

    >>> level_of("warning")
    30
    """
    if level == "AUTO":
        level = parse_level()
    if isinstance(level, int):
        return level
    known = {**logging.getLevelNamesMapping(), "WARN": logging.WARNING}
    if level.upper() not in known:
        raise ValueError(f"level must be one of {sorted(known)}, or 'AUTO'; got {level!r}")
    return known[level.upper()]


def _one_deeper(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a logging call with the caller's caller as the source of the message."""
    return {**keywords, "stacklevel": keywords.get("stacklevel", 1) + 1}


def _formatter(text: str) -> logging.Formatter:
    rank = "Rank: %(rank)s - " if is_cur_env_distributed() else ""
    return logging.Formatter(rank + text, datefmt="%Y/%m/%d %H:%M:%S" if "asctime" in text else None)


def _shower(stdout: Stdout) -> logging.Handler | None:
    if stdout == "none":
        return None
    if stdout == "tqdm":
        return TqdmLoggingHandler()
    if stdout == "rich":
        from rich.logging import RichHandler

        return RichHandler(log_time_format="[%X]")
    return StdoutStreamHandler()


def _log_file(path: str | Path | None) -> Path:
    """Return the file of a path, in a folder that exists."""
    path = Path.cwd() if path is None else Path(path)
    if path.is_dir() or not path.suffix:
        rank = f"RANK-{get_global_rank()}-" if os.environ.get(FASTNLP_BACKEND_LAUNCH) == "1" else ""
        path = path / f"{rank}{launch_time()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


logger: FastNLPLogger = FastNLPLogger(ROOT_NAME)
