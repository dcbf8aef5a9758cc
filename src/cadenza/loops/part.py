"""A run from its first file to its last, for ``with``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from cadenza.engine.loop import OVER, Training
from cadenza.status.preemption import exit_after_signal


class Part:
    """A run, or the part of one up to where it goes back to a checkpoint. It gives the training, with nothing open if over.

    Args:
        begin: Begins the run, and pushes what ends it.
    """

    def __init__(self, begin: Callable[[ExitStack], Training]) -> None:
        self._begin = begin

    def __enter__(self) -> Training:
        with ExitStack() as ending:
            self._training = self._begin(ending)
            self._ending = ending.pop_all()
        return self._training

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """End the run, as its block does.

        Raises:
            BaseException: Another error than `error` is the cause, or has come first.
            SystemExit: A signal has ended the run.
        """
        if error is not None:
            self._ending.__exit__(type(error), error, error.__traceback__)
            return
        with self._ending:
            if self._training.open != OVER:
                self._training.finish()
        exit_after_signal(self._training.session.sync.requests.signal)
