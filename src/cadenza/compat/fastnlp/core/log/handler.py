"""``fastNLP.core.log.handler``: where messages go."""

from __future__ import annotations

import logging
import sys


class StdoutStreamHandler(logging.Handler):
    """Writes messages to the current ``sys.stdout``, even if it was replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stdout.write(self.format(record) + "\n")
            sys.stdout.flush()
        except Exception:  # logging's own rule: a handler reports its errors, and the program continues
            self.handleError(record)


class TqdmLoggingHandler(logging.Handler):
    """Writes messages above the bars of tqdm."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm.auto import tqdm

        try:
            tqdm.write(self.format(record))
        except Exception:  # as above
            self.handleError(record)
