"""Call a function with each row, here or in several processes, and show how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal, Protocol

from cadenza.errors import MissingExtraError


class _Rows(Sized, Protocol):
    def __iter__(self) -> Iterator[Any]: ...


def results_of(
    function: Callable[[Any], Any], rows: _Rows, processes: int, words: str, bar: Literal["rich", "tqdm"] | None
) -> Iterator[Any]:
    """Yield what `function` returns for each row, in their order.

    Raises:
        ValueError: `bar` or `processes` is none.
        TypeError: `function` is a lambda, which no other process can be given.
    """
    if bar not in ("rich", "tqdm", None):
        raise ValueError(f"progress_bar must be 'rich', 'tqdm' or None; got {bar!r}")
    if not isinstance(processes, int) or processes < 0:
        raise ValueError(f"num_proc must be a whole number of at least 0; got {processes!r}")
    if processes <= 1:
        yield from _shown(map(function, rows), len(rows), words, bar)
        return
    if getattr(function, "__name__", "") == "<lambda>":
        raise TypeError(f"a lambda cannot be sent to other processes: with num_proc={processes} give a function with a name")
    with ProcessPoolExecutor(min(processes, len(rows))) as pool:
        yield from _shown(pool.map(function, rows, chunksize=-(-len(rows) // processes)), len(rows), words, bar)


def _shown(results: Iterable[Any], total: int, words: str, bar: str | None) -> Iterable[Any]:
    if bar is None:
        return results
    return _shown_by_rich(results, total, words) if bar == "rich" else _shown_by_tqdm(results, total, words)


def _shown_by_rich(results: Iterable[Any], total: int, words: str) -> Iterable[Any]:
    try:
        from rich.progress import track
    except ImportError:
        raise MissingExtraError("rich", needed_by="apply_more(progress_bar='rich')", extra="progress") from None
    return track(results, words, total=total, transient=True)


def _shown_by_tqdm(results: Iterable[Any], total: int, words: str) -> Iterable[Any]:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise MissingExtraError("tqdm", needed_by="apply_more(progress_bar='tqdm')", extra="progress") from None
    shown: Iterable[Any] = tqdm(results, total=total, desc=words, dynamic_ncols=True)
    return shown
