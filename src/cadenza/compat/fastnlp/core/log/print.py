"""``fastNLP.core.log.print``."""

from __future__ import annotations

from typing import Any

from cadenza.compat.fastnlp.core.log.logger import logger

__all__ = ["print"]


def print(*args: object, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
    """Log the values as one message of level INFO, so they are shown on the main process only.

    Args:
        args: The values.
        sep: The text between two values.
        end: Ignored, as are `file` and `flush`: the handlers of the logger end the line.
        file: Ignored.
        flush: Ignored.
    """
    logger.info("%s", sep.join(map(str, args)), stacklevel=2)
