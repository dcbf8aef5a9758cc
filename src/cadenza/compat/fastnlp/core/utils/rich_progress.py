"""``fastNLP.core.utils.rich_progress``: bars of rich that several parts of a program share."""

from __future__ import annotations

import sys
from typing import Any

from cadenza.compat.fastnlp.envs import get_global_rank
from cadenza.errors import MissingExtraError

__all__ = ["f_rich_progress"]


class FRichProgress:
    """Bars of rich. Without a terminal, and on other processes than the main one, nothing is shown.

    `add_task`, then `update` with ``advance=1``, and `destroy_task` at the end.
    """

    def __init__(self) -> None:
        self._progress: Any = None
        self._transient = self._enabled = True

    @property
    def dummy(self) -> bool:
        """Whether bars are not shown."""
        return not self._enabled or not is_shown()

    def add_task(
        self,
        description: str = "Progress",
        start: bool = True,
        total: float = 100.0,
        completed: int = 0,
        visible: bool = True,
        **fields: Any,
    ) -> int | None:
        """Show a bar, and return its number; None if bars are not shown. ``post_desc`` is the text after the bar."""
        if self.dummy:
            return None
        if self._progress is None:
            self._progress = _new(self._transient)
            self._progress.start()
        fields.setdefault("post_desc", "")
        number: int = self._progress.add_task(
            description, start=start, total=total, completed=completed, visible=visible, **fields
        )
        return number

    def update(self, task_id: int | None, *, refresh: bool = True, **changes: Any) -> None:
        """Change a bar: ``advance``, ``completed``, ``total``, ``description``, ``visible`` or ``post_desc``."""
        if self._has(task_id):
            self._progress.update(task_id, refresh=refresh, **changes)

    def reset(self, task_id: int | None, **changes: Any) -> None:
        """Set a bar back to its begin."""
        if self._has(task_id):
            self._progress.reset(task_id, **changes)

    def stop_task(self, task_id: int | None) -> None:
        """Stop the clock of a bar."""
        if self._has(task_id):
            self._progress.stop_task(task_id)

    def destroy_task(self, task_id: int | None) -> None:
        """Remove a bar."""
        if not self._has(task_id):
            return
        self._progress.stop_task(task_id)
        self._progress.refresh()  # shows the final state
        self._progress.remove_task(task_id)
        if not self.not_empty():
            self.stop()

    remove_task = destroy_task

    def stop(self) -> None:
        """Remove all bars."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def not_empty(self) -> bool:
        """Return whether there are bars."""
        return self._progress is not None and bool(self._progress.task_ids)

    def set_transient(self, transient: bool = True) -> None:
        """Choose whether bars disappear at their end, from the next one on."""
        self._transient = transient

    def set_disable(self, flag: bool = True) -> None:
        """Show no bars, or show them again."""
        self._enabled = not flag
        if flag:
            self.stop()

    def print(self, *values: Any) -> None:
        """Print above the bars."""
        if self._progress is None:
            print(*values)  # noqa: T201  # this is its purpose
        else:
            self._progress.console.print(*values)

    def _has(self, task_id: int | None) -> bool:
        return self._progress is not None and task_id in self._progress.task_ids


def is_shown() -> bool:
    """Return whether this process has a terminal and is the main one."""
    return sys.stdout is not None and sys.stdout.isatty() and get_global_rank() == 0


def _new(transient: bool) -> Any:
    try:
        from rich import progress
    except ImportError:
        raise MissingExtraError("rich", needed_by="f_rich_progress", extra="progress") from None
    return progress.Progress(
        *("[progress.description]{task.description}", "[progress.percentage]{task.percentage:>3.0f}%", progress.BarColumn()),
        *(progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), "/", progress.TimeRemainingColumn()),
        progress.TextColumn("{task.fields[post_desc]}", justify="right"),
        transient=transient,
        auto_refresh=False,
    )


f_rich_progress: FRichProgress = FRichProgress()
