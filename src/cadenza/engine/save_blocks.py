"""Who saves a run, and blocks of saves: while a callback changes what a checkpoint holds, no checkpoint is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class Saver(Protocol):
    """Writes checkpoints of a run."""

    def request(self, reason: str) -> None:
        """Save the run, at a step boundary."""


class SaveBlock(NamedTuple):
    """A block that is open."""

    owner: str
    """The callback that opened it."""
    reason: str
    step: int
    """The number of complete steps when it was opened."""

    def __str__(self) -> str:
        return f"{self.owner}, since step {self.step}{f' ({self.reason})' if self.reason else ''}"


class SaveBlocks:
    """The blocks of a run on this rank. They may be nested, and may stay open from one moment to another."""

    def __init__(self) -> None:
        self.open: list[SaveBlock] = []
        """The blocks that are open, oldest first."""
        self._left: tuple[SaveBlock, BaseException] | None = None

    @contextmanager
    def block(self, owner: str, reason: str, step: int) -> Iterator[None]:
        """Block saves in a context."""
        block = SaveBlock(owner, reason, step)
        self.open.append(block)
        try:
            yield
        except BaseException as error:
            self._left = block, error
            raise
        finally:
            self.open.remove(block)

    def left_by(self, error: BaseException) -> SaveBlock | None:
        """Return the block that this error, or its cause, left in the middle; None if there is none."""
        if self._left is not None and self._left[1] in (error, error.__cause__):
            return self._left[0]
        return None
