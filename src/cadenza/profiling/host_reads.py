"""Find hooks that read a tensor on the host in every step. On a GPU, each such read waits for all work launched before."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.profiling.spans import HostRead, Profiler, Span

if TYPE_CHECKING:
    from cadenza.status.progress import Progress

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that give its numbers to the host."""

AFTER, SAMPLED = 5, 3  # steps that are skipped, because the first ones differ from the others; steps that are observed
OFTEN = 2  # sampled steps: a read in only one of them is on a schedule

ASIDE = ("on_eval_", "on_sanity_", "on_save", "on_load")
"""How the names of moments start at which the training waits for the device anyway."""

_TORCH = os.path.dirname(torch.__file__) + os.sep


class HostReads:
    """Records reads of tensors in hooks from `begin` to `end`. The profiler knows which hook is running.

    Reads in an evaluation, or for a checkpoint, do not count, because these wait for the device anyway. ``run.log`` may read a
    number that is on the host. In a run on a GPU, a read of a tensor on the host does not count.

    The methods of `Tensor` are observed when they are looked up, and are then called unchanged. A torch dispatch mode would see
    more reads, but it prevents a model that a hook calls from being compiled, for the rest of the process, and it appears in
    tracebacks.
    """

    def __init__(self, profiler: Profiler, progress: Progress, device: torch.device) -> None:
        self._profiler, self._progress, self._device = profiler, progress, device
        self._thread = threading.get_ident()
        self._seen: dict[tuple[Span, str, str], list[int]] = {}
        self._observing = ExitStack()
        self._from = 0

    def begin(self) -> None:
        """Start to record."""
        self._from = self._progress.step
        self._observing.enter_context(observed_reads(self._add))

    def end(self) -> tuple[HostRead, ...]:
        """Stop, and return the hooks that read in more than one step, each with its most frequent location."""
        self._observing.close()
        found: dict[Span, HostRead] = {}
        sampled = min(self._progress.step - self._from, SAMPLED)
        for (span, how, location), steps in self._seen.items():
            count = len(set(steps))
            if count >= OFTEN and (span not in found or count > found[span].steps):
                found[span] = HostRead(span.owner, span.name, how, location, len(steps), count, max(count, sampled))
        return tuple(found.values())

    def _add(self, method: str, tensor: Tensor) -> None:
        span = self._profiler.current
        if span.listener is None or span.name.startswith(ASIDE) or threading.get_ident() != self._thread:
            return
        if tensor.device.type == "cpu" != self._device.type:
            return
        location = location_of(sys._getframe(2))
        if location is not None:
            self._seen.setdefault((span, _written(method), location), []).append(self._progress.step)


@contextmanager
def observed_reads(report: Callable[[str, Tensor], object]) -> Iterator[None]:
    """In the block, call ``report(method, tensor)`` before each read of a tensor on the host, in any thread.

    `method` is one of `READS`.
    """
    originals = {name: vars(Tensor)[name] for name in READS if name in vars(Tensor)}
    observed = {name: _Observed(name, report, originals.get(name)) for name in READS}
    for name, method in observed.items():
        setattr(Tensor, name, method)
    try:
        yield
    finally:
        for name, method in observed.items():
            if vars(Tensor).get(name) is not method:  # a later observer replaced it, and puts back the method that it found
                continue
            if name in originals:
                setattr(Tensor, name, originals[name])
            else:
                delattr(Tensor, name)


class _Observed:
    """A descriptor that reports each look-up of a method of tensors. It does not call the method, so no traceback shows it."""

    __slots__ = ("_name", "_original", "_report")

    def __init__(self, name: str, report: Callable[[str, Tensor], object], original: Any) -> None:
        self._name, self._report, self._original = name, report, original

    def __get__(self, tensor: Tensor | None, kind: type[Tensor]) -> Any:
        if tensor is not None:
            self._report(self._name, tensor)
        if self._original is not None:
            return self._original.__get__(tensor, kind)
        return getattr(super(Tensor, kind if tensor is None else tensor), self._name)


def location_of(frame: FrameType | None) -> str | None:
    """Return the file and line of the innermost frame outside of torch; None if ``run.log`` reads the tensor."""
    location = None
    while frame is not None and frame.f_globals.get("__name__") != "cadenza.hooks.fan_out":  # it called the hook
        if frame.f_globals.get("__name__", "").startswith("cadenza.records."):
            return None
        file = frame.f_code.co_filename
        if location is None and not file.startswith(_TORCH):
            location = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return location


def _written(method: str) -> str:
    """Return how a method is called.

    >>> _written("item"), _written("__float__")
    ('tensor.item()', 'float(tensor)')
    """
    return f"{method.strip('_')}(tensor)" if method.startswith("__") else f"tensor.{method}()"
