"""``nemo.logging``: the logger of the callbacks and of users."""

from __future__ import annotations

import logging as _logging
import sys
from pathlib import Path

from torch import distributed as dist

from cadenza.drivers.joining import launched, rendezvous_of

logging = _logging.getLogger("nemo")
"""The logger of both versions."""

_FORMAT = _logging.Formatter("[NeMo %(levelname).1s %(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S")


class _Screen(_logging.StreamHandler):  # type: ignore[type-arg]  # `emit` sets the stream
    """Shows messages on the main process: up to INFO on the current stdout, warnings on the current stderr."""

    def emit(self, record: _logging.LogRecord) -> None:
        if not is_main_here():
            return
        self.stream = sys.stderr if record.levelno >= _logging.WARNING else sys.stdout
        super().emit(record)


class _File(_logging.FileHandler):
    """Writes messages to the work directory of the newest factory."""


def is_main_here() -> bool:
    """Return whether this is the main process; also works before a training."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    own = rendezvous_of() if launched() else None
    return own is None or own.rank == 0


def show_on_screen() -> None:
    """Show messages on the terminal of this process. Further calls have no effect."""
    if not any(isinstance(handler, _Screen) for handler in logging.handlers):
        handler = _Screen()
        handler.setFormatter(_FORMAT)
        logging.addHandler(handler)
    if logging.level == _logging.NOTSET:
        logging.setLevel(_logging.INFO)


def keep_in(file: Path) -> None:
    """Write messages to a file from now on, and no longer to the file of an earlier factory."""
    for earlier in [one for one in logging.handlers if isinstance(one, _File)]:
        logging.removeHandler(earlier)
        earlier.close()
    handler = _File(file, delay=True, encoding="utf-8")
    handler.setFormatter(_FORMAT)
    logging.addHandler(handler)
