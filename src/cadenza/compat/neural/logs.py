"""``nemo.logging``: the logger of the callbacks and of users."""

from __future__ import annotations

import logging as _logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, TextIO, TypeVar

from torch import distributed as dist

from cadenza.drivers.rendezvous import launched, rendezvous_of

_FORMAT = _logging.Formatter("[NeMo %(levelname).1s %(asctime)s %(module)s:%(lineno)d] %(message)s", "%Y-%m-%d %H:%M:%S")


Stream = TypeVar("Stream", bound=TextIO)


class LogMode(IntEnum):
    """How often an equal message is logged."""

    EACH = 0
    ONCE = 1


logging_mode = LogMode  # the name of NeMo's packages for it


class _Screen(_logging.StreamHandler):  # type: ignore[type-arg]  # `emit` sets the stream
    """Shows messages on the main process: up to INFO on the current stdout, warnings on the current stderr."""

    patched: dict[str, TextIO]

    def __init__(self) -> None:
        super().__init__()
        self.patched = {}

    def emit(self, record: _logging.LogRecord) -> None:
        if not is_main_here():
            return
        name = "stderr" if record.levelno >= _logging.WARNING else "stdout"
        self.stream = self.patched.get(name) or getattr(sys, name)
        super().emit(record)


class _File(_logging.FileHandler):
    """Writes messages to the work directory of the newest factory."""


class Logger(_logging.LoggerAdapter[_logging.Logger]):
    """NeMo's logger: the logger ``"nemo"`` of Python, and NeMo's own methods."""

    NOTSET, DEBUG, INFO = _logging.NOTSET, _logging.DEBUG, _logging.INFO
    WARNING, ERROR, CRITICAL = _logging.WARNING, _logging.ERROR, _logging.CRITICAL

    def __init__(self) -> None:
        super().__init__(_logging.getLogger("nemo"))
        self._once: set[object] = set()
        self._screen = _Screen()
        self._screen.setFormatter(_FORMAT)
        self._show_warning: Any = None

    def log(self, level: int, msg: object, *args: object, **keywords: Any) -> None:
        """Log a message. With ``mode=LogMode.ONCE``, an equal message is logged only once."""
        if keywords.pop("mode", LogMode.EACH) is LogMode.ONCE:
            if msg in self._once:
                return
            self._once.add(msg)
        keywords["stacklevel"] = keywords.get("stacklevel", 1) + 1  # the line of the caller, not this one
        super().log(level, msg, *args, **keywords)

    # -- levels -----------------------------------------------------------------------------------------

    def get_verbosity(self) -> int:
        """Return the lowest level that is logged."""
        return self.getEffectiveLevel()

    def set_verbosity(self, verbosity_level: int | str) -> None:
        """Set the lowest level that is logged."""
        self.setLevel(verbosity_level)

    @contextmanager
    def temp_verbosity(self, verbosity_level: int | str) -> Iterator[None]:
        """Set the lowest level for a block."""
        before = self.logger.level
        self.setLevel(verbosity_level)
        try:
            yield
        finally:
            self.setLevel(before)

    # -- where messages go ------------------------------------------------------------------------------

    @contextmanager
    def patch_stdout_handler(self, stream: Stream) -> Iterator[Stream]:
        """Send messages up to INFO to a stream instead of stdout."""
        with self._patched("stdout", stream):
            yield stream

    @contextmanager
    def patch_stderr_handler(self, stream: Stream) -> Iterator[Stream]:
        """Send warnings and errors to a stream instead of stderr."""
        with self._patched("stderr", stream):
            yield stream

    @contextmanager
    def _patched(self, name: str, stream: TextIO) -> Iterator[None]:
        self.add_stream_handlers()
        before = dict(self._screen.patched)
        self._screen.patched[name] = stream
        try:
            yield
        finally:
            self._screen.patched = before

    def add_stream_handlers(self) -> None:
        """Show messages on the terminal of the main process. Further calls have no effect."""
        if self._screen not in self.logger.handlers:
            self.logger.addHandler(self._screen)
        if self.logger.level == _logging.NOTSET:
            self.setLevel(_logging.INFO)

    def remove_stream_handlers(self) -> None:
        """Show no messages on the terminal, until `add_stream_handlers` or a new factory."""
        self.logger.removeHandler(self._screen)

    def reset_stream_handler(self) -> None:
        """Show messages on the terminal again."""
        self.add_stream_handlers()

    def add_file_handler(self, log_file: str | Path) -> None:
        """Write messages to a file as well."""
        handler = _logging.FileHandler(log_file, delay=True, encoding="utf-8")
        self._add_file(handler)

    def keep_in(self, file: Path) -> None:
        """Write messages to a file from now on, and no longer to the file of an earlier factory."""
        for earlier in [handler for handler in self.logger.handlers if isinstance(handler, _File)]:
            self.logger.removeHandler(earlier)
            earlier.close()
        self._add_file(_File(file, delay=True, encoding="utf-8"))

    def _add_file(self, handler: _logging.FileHandler) -> None:
        handler.setFormatter(_FORMAT)
        self.logger.addHandler(handler)

    def captureWarnings(self, capture: bool) -> None:  # noqa: N802  # NeMo's name
        """Log warnings of the module ``warnings``; False shows them as before."""
        if capture and self._show_warning is None:
            self._show_warning, warnings.showwarning = warnings.showwarning, self._log_warning
        elif not capture and self._show_warning is not None:
            self._show_warning, warnings.showwarning = None, self._show_warning

    def _log_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self.warning("%s", warnings.formatwarning(message, category, filename, lineno, line))


logging: Logger = Logger()
"""The logger of both versions."""


def get_logger(name: str = "") -> Logger:
    """Return NeMo's logger; the name has no effect, as in NeMo."""
    return logging


def is_main_here() -> bool:
    """Return whether this is the main process; also works before a training."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    own = rendezvous_of() if launched() else None
    return own is None or own.rank == 0
