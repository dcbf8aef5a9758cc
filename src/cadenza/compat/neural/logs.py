"""``nemo.logging``: what the callbacks say, and what users are advised to say it with."""

from __future__ import annotations

import logging as _logging
import sys
from pathlib import Path

from torch import distributed as dist

from cadenza.drivers.joining import launched, place_of

logging = _logging.getLogger("nemo")
"""The logger of both dialects."""

_FORMAT = _logging.Formatter("[NeMo %(levelname).1s %(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S")


class _Screen(_logging.StreamHandler):  # type: ignore[type-arg]  # its stream is looked up anew each time
    """Shows messages on the terminal as it is now: up to INFO on stdout, warnings on stderr. On the main process only."""

    def emit(self, record: _logging.LogRecord) -> None:
        if not is_main_here():
            return
        self.stream = sys.stderr if record.levelno >= _logging.WARNING else sys.stdout
        super().emit(record)


class _File(_logging.FileHandler):
    """Keeps messages in the work directory of the factory that was made last."""


def is_main_here() -> bool:
    """Return whether this process is the main one, or alone; also before there is a training."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    place = place_of() if launched() else None
    return place is None or place.rank == 0


def show_on_screen() -> None:
    """Have messages shown on this process's terminal; once is enough."""
    if not any(isinstance(handler, _Screen) for handler in logging.handlers):
        handler = _Screen()
        handler.setFormatter(_FORMAT)
        logging.addHandler(handler)
    if logging.level == _logging.NOTSET:
        logging.setLevel(_logging.INFO)


def keep_in(file: Path) -> None:
    """Have messages kept in a file from now on, and no longer in that of an earlier factory."""
    for earlier in [one for one in logging.handlers if isinstance(one, _File)]:
        logging.removeHandler(earlier)
        earlier.close()
    handler = _File(file, delay=True, encoding="utf-8")
    handler.setFormatter(_FORMAT)
    logging.addHandler(handler)
