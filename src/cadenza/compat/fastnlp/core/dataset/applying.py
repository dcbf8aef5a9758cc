"""Call a function with each row, in this or in several processes, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Protocol

from cadenza.errors import MissingExtraError


class ApplyResultException(Exception):  # noqa: N818  # the name in fastNLP
    """A function returned an unexpected result for a row."""


class _Rows(Sized, Protocol):
    def __iter__(self) -> Iterator[Any]: ...


def results_of(function: Callable[[Any], Any], rows: _Rows, processes: int, text: str, bar: str | None) -> Iterator[Any]:
    """Yield what `function` returns for each row, in their order.

    Raises:
        ValueError: `processes` is invalid.
        TypeError: `function` is a lambda, which cannot be pickled for other processes.
    """
    if not callable(function):
        raise TypeError(f"expected a function of a row; got {function!r}")
    if not isinstance(processes, int) or processes < 0:
        raise ValueError(f"num_proc must be a whole number of at least 0; got {processes!r}")
    if processes <= 1:
        yield from _shown(map(function, rows), len(rows), text, bar)
        return
    if getattr(function, "__name__", "") == "<lambda>":
        raise TypeError(f"a lambda cannot be sent to other processes; got num_proc={processes}. Pass a named function.")
    with ProcessPoolExecutor(min(processes, len(rows))) as pool:
        yield from _shown(pool.map(function, rows, chunksize=-(-len(rows) // processes)), len(rows), text, bar)


def _shown(results: Iterable[Any], total: int, text: str, bar: str | None) -> Iterable[Any]:
    """Return the results with a progress bar. An unknown name of a bar shows none, as in fastNLP."""
    shown = {"rich": _shown_by_rich, "tqdm": _shown_by_tqdm}.get(bar or "")
    return results if shown is None else shown(results, total, text)


def _shown_by_rich(results: Iterable[Any], total: int, text: str) -> Iterable[Any]:
    try:
        from rich.progress import track
    except ImportError:
        raise MissingExtraError("rich", needed_by="apply_more(progress_bar='rich')", extra="progress") from None
    return track(results, text, total=total, transient=True)


def _shown_by_tqdm(results: Iterable[Any], total: int, text: str) -> Iterable[Any]:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise MissingExtraError("tqdm", needed_by="apply_more(progress_bar='tqdm')", extra="progress") from None
    shown: Iterable[Any] = tqdm(results, total=total, desc=text, dynamic_ncols=True)
    return shown
