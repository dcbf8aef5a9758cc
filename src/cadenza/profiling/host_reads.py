"""Who reads a tensor on the host, step after step: on a GPU each such read waits for all work before it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cadenza.profiling.spans import Account, Watch
    from cadenza.status.progress import Progress

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that give its numbers to the host."""

AFTER, SAMPLED = 5, 3  # steps that are let pass, as the first seldom are like the others; steps that are looked at
OFTEN = 2  # sampled steps: what is read in one alone is read at a cadence

ASIDE = ("on_eval_", "on_sanity_", "on_save", "on_load")
"""How moments begin at which the training waits for the device in any case."""

_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class HostRead:
    """A hook that read a tensor on the host in several of the sampled steps."""

    callback: str
    moment: str
    how: str
    """Such as ``tensor.item()``."""
    place: str
    """The file and line that did it most often: the innermost outside of torch."""
    reads: int
    """How often it did it there."""
    steps: int
    """In how many of the `sampled` steps."""
    sampled: int

    @property
    def often(self) -> str:
        """In which steps, how, and where."""
        steps = f"each of {self.sampled}" if self.steps >= self.sampled else f"{self.steps} of {self.sampled}"
        return f"in {steps} sampled steps ({self.how} at {self.place})"

    def __str__(self) -> str:
        return f"{self.callback}.{self.moment} read a tensor on the host {self.often}"


class HostReads:
    """Notes what is read in hooks from `begin` to `end`; whose hook is running, the watch knows.

    What is read in an evaluation, or for a checkpoint, does not count, as they wait for the device in any case; and
    ``run.log`` may read a number that is on the host already. In a run on a GPU, reading what is on the host is no read.

    Tensor's methods are looked at as they are taken from the class, and then called as ever. A mode of torch would see more,
    but keeps a model that a hook calls from being compiled, also for the rest of the process, and shows up in tracebacks.
    """

    def __init__(self, watch: Watch, progress: Progress, device: torch.device) -> None:
        self._watch, self._progress, self._device = watch, progress, device
        self._thread = threading.get_ident()
        self._seen: dict[tuple[Account, str, str], list[int]] = {}
        self._noting = ExitStack()
        self._from = 0

    def begin(self) -> None:
        """Note from now on."""
        self._from = self._progress.step
        self._noting.enter_context(noted(self._note))

    def end(self) -> tuple[HostRead, ...]:
        """Note no more; return who read in more than one step: of each callback at each moment the most frequent place."""
        self._noting.close()
        found: dict[Account, HostRead] = {}
        sampled = min(self._progress.step - self._from, SAMPLED)
        for (account, how, place), steps in self._seen.items():
            count = len(set(steps))
            if count >= OFTEN and (account not in found or count > found[account].steps):
                found[account] = HostRead(account.owner, account.name, how, place, len(steps), count, max(count, sampled))
        return tuple(found.values())

    def _note(self, method: str, tensor: Tensor) -> None:
        account = self._watch.current
        if account.listener is None or account.name.startswith(ASIDE) or threading.get_ident() != self._thread:
            return
        if tensor.device.type == "cpu" != self._device.type:
            return
        place = place_of(sys._getframe(2))
        if place is not None:
            self._seen.setdefault((account, _written(method), place), []).append(self._progress.step)


@contextmanager
def noted(note: Callable[[str, Tensor], object]) -> Iterator[None]:
    """Inside, call ``note(method, tensor)`` at each read of a tensor on the host, in any thread: one of `READS`."""
    former = {name: vars(Tensor)[name] for name in READS if name in vars(Tensor)}
    looking = {name: _Looked(name, note, former.get(name)) for name in READS}
    for name, look in looking.items():
        setattr(Tensor, name, look)
    try:
        yield
    finally:
        for name, look in looking.items():
            if vars(Tensor).get(name) is not look:  # another one looks now, and will put back what it found
                continue
            if name in former:
                setattr(Tensor, name, former[name])
            else:
                delattr(Tensor, name)


class _Looked:
    """A method of tensors, of which is noted who takes it. It is called without us, so no traceback shows us."""

    __slots__ = ("_former", "_name", "_note")

    def __init__(self, name: str, note: Callable[[str, Tensor], object], former: Any) -> None:
        self._name, self._note, self._former = name, note, former

    def __get__(self, tensor: Tensor | None, kind: type[Tensor]) -> Any:
        if tensor is not None:
            self._note(self._name, tensor)
        if self._former is not None:
            return self._former.__get__(tensor, kind)
        return getattr(super(Tensor, kind if tensor is None else tensor), self._name)


def place_of(frame: FrameType | None) -> str | None:
    """Return file and line of the innermost frame outside of torch; None if the read is that of ``run.log``."""
    place = None
    while frame is not None and frame.f_globals.get("__name__") != "cadenza.hooks.fan_out":  # it called the hook
        if frame.f_globals.get("__name__", "").startswith("cadenza.records."):
            return None
        file = frame.f_code.co_filename
        if place is None and not file.startswith(_TORCH):
            place = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return place


def _written(method: str) -> str:
    """Return how a method is called.

    >>> _written("item"), _written("__float__")
    ('tensor.item()', 'float(tensor)')
    """
    return f"{method.strip('_')}(tensor)" if method.startswith("__") else f"tensor.{method}()"
