"""``fastNLP.core.utils.tqdm_progress``: bars of tqdm that several parts of a program share."""

from __future__ import annotations

from typing import Any

from cadenza.compat.fastnlp.core.utils.rich_progress import is_shown
from cadenza.errors import MissingExtraError

__all__ = ["f_tqdm_progress"]


class TqdmProgress:
    """Bars of tqdm. Without a terminal, and on other processes than the main one, nothing is shown."""

    def __init__(self) -> None:
        self.bars: dict[int, Any] = {}
        self._count = 0

    @property
    def dummy(self) -> bool:
        """Whether bars are not shown."""
        return not is_shown()

    def add_task(
        self,
        description: str | None = None,
        total: float | None = None,
        leave: bool = False,
        visible: bool = True,
        **options: Any,
    ) -> int | None:
        """Show a bar, and return its number; None if bars are not shown. Further options are those of tqdm."""
        if self.dummy:
            return None
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise MissingExtraError("tqdm", needed_by="f_tqdm_progress", extra="progress") from None
        self._count += 1
        options.setdefault("position", len(self.bars))
        self.bars[self._count] = tqdm(desc=description, total=total, leave=leave, disable=not visible, **options)
        return self._count

    def update(self, task_id: int | None, advance: float = 1, refresh: bool = True) -> None:
        """Move a bar."""
        if task_id in self.bars:
            self.bars[task_id].update(advance)

    def set_postfix_str(self, task_id: int | None, s: str, refresh: bool = True) -> None:
        """Set the text after a bar."""
        if task_id in self.bars:
            self.bars[task_id].set_postfix_str(s, refresh=refresh)

    def set_description_str(self, task_id: int | None, desc: str, refresh: bool = True) -> None:
        """Set the text before a bar."""
        if task_id in self.bars:
            self.bars[task_id].set_description_str(desc, refresh=refresh)

    def reset(self, task_id: int | None) -> None:
        """Set a bar back to its begin."""
        if task_id in self.bars:
            self.bars[task_id].reset()

    def destroy_task(self, task_id: int | None) -> None:
        """Remove a bar."""
        if task_id in self.bars:
            self.bars.pop(task_id).close()

    def not_empty(self) -> bool:
        """Return whether there are bars."""
        return bool(self.bars)


f_tqdm_progress: TqdmProgress = TqdmProgress()
