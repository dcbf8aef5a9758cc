"""Measure the time of each phase and each callback."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from cadenza.drivers.base import Driver
from cadenza.engine.session import session_of
from cadenza.files.paths import local_text
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.loading.settings import fetching_hint
from cadenza.profiling.host_reads import AFTER, SAMPLED, HostReads
from cadenza.profiling.spans import MOST_EVENTS, Profiler, RankTime, Timings
from cadenza.status.decisions import decide

if TYPE_CHECKING:
    from cadenza.run import Run


# -- the ranks -------------------------------------------------------------------------------------

WAITING = "waiting for ranks"
"""The phase of a profile with the time in which this rank waited for others in methods of its driver."""
_PHASES = {"data": ("fetch", "transfer"), "forward": ("forward",), "backward": ("backward",), "waiting": (WAITING,)}


def measure_waits(driver: Driver, profiler: Profiler) -> Callable[[], object]:
    """Measure as a phase how long the training thread waits in the driver; return a function that ends this."""
    thread = threading.get_ident()

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wait(*values: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*values, **named)
            with profiler.timed(WAITING):
                return function(*values, **named)

        return wait

    own = {name: timed(getattr(driver, name)) for name in ("reduce", "gather", "gather_on_main", "broadcast")}
    later = driver.reduce_later
    own["reduce_later"] = lambda value: timed(later(value))
    vars(driver).update(own)

    def end() -> None:
        for name, function in own.items():
            if vars(driver).get(name) is function:
                del vars(driver)[name]

    return end


def rank_times(driver: Driver, timings: Timings) -> tuple[RankTime, ...]:
    """Return the slowest rank of each part of a step, on the main process; nothing on the others. Every rank must call this.

    Each rank sends five numbers, for any number of ranks and phases.
    """
    seconds = {phase.name: phase.seconds for phase in timings.phases}
    own = {part: sum(seconds.get(name, 0.0) for name in names) for part, names in _PHASES.items()}
    own["callbacks"] = sum(callback.seconds for callback in timings.callbacks)
    everyone = driver.gather_on_main([*own.values()])
    times = []
    for part, values in zip(own, zip(*everyone, strict=True), strict=False):
        slowest = max(range(len(values)), key=values.__getitem__)
        times.append(RankTime(part, slowest, values[slowest], sum(values) / len(values), min(values)))
    return tuple(times)


SCHEDULE = {"wait": 5, "warmup": 1, "active": 3, "repeat": 1}  # of torch.profiler, in steps, by default

KINDS = ("phase", "moment", "callback")  # of spans; of two spans with the same times, the first kind is drawn outside


class Profile(Callback):
    """Measure the time of each phase of the training, and of each callback at each moment.

    A phase is the work of the trainer between two moments: ``setup`` (its remainder, and the restore), ``fetch``,
    ``transfer``, ``forward``, ``backward``, ``optimizer``, ``zero_grad``, ``evaluation NAME`` and ``sanity NAME`` (loader,
    model and metrics), ``saving`` (the time that the training waits for a save), ``step_fn``, and ``loop``, the rest. A row
    has its own time, without that of rows inside it. The rows sum to the time from the start of this callback to the end of
    the run. Put this callback first in the list, so that it measures all others.

    At the end it prints a table, and warns about a loader that kept the training waiting. ``run.profile`` and ``profile.json``
    in the directory of the run hold the numbers. In 3 steps after the first 5, it records the hooks that read a tensor on the
    host, as ``run.loss.item()`` does. A hook that does so in more than one of these steps is named in a warning, a decision and
    ``run.profile.host_reads``. On CUDA and MPS the times are those of the host: the launch of the work, and the wait in the
    call that needs a result. Measuring costs 0.16 us at the end of each phase and 0.3 us at each call of a callback:
    about 14 us a step (a ratio of 1.09 for a step of 162 us). See ``benchmarks/overhead.py``.

    With multiple ranks: each rank measures itself, in its own ``run.profile``; the main process prints and writes its own. It
    does not communicate.

    Args:
        trace: The path of a timeline of the steps of `window`, for https://ui.perfetto.dev or chrome://tracing. A relative path
            starts at the directory of the run, if it has one. True writes ``trace.json`` in the directory of the run, if it
            has one. None writes no timeline.
        window: The steps of the trace, as a pair: the number of steps of this fit before it, and the number of steps in it.
        synchronize: Wait for the device at each moment, so that each row has its own work on the device. The run is slower:
            compare the rows with each other, not with a run without `synchronize`.
        torch_profiler: Arguments of ``torch.profiler.schedule`` and ``torch.profiler.profile`` in one dict. The trace is
            written to ``torch-trace.json`` in the directory of the run. An empty dict records 3 steps after the first 6.

    Raises:
        ValueError: An argument is wrong; or, when the run is set up, `torch_profiler` has no directory to write to, or two in
            one list have it.

    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(callbacks=[Profile()], steps=3)  # doctest: +ELLIPSIS
    profile: ... s, 3 steps
    ...
    >>> [phase.name for phase in run.profile.phases]
    ['setup', 'fetch', 'transfer', 'forward', 'backward', 'optimizer', 'zero_grad', 'loop']
    >>> abs(sum(row.seconds for row in run.profile.rows) - run.profile.wall_s) < 1e-6
    True
    """

    def __init__(
        self,
        *,
        trace: str | os.PathLike[str] | bool | None = True,
        window: tuple[int, int] = (5, 20),
        synchronize: bool = False,
        torch_profiler: Mapping[str, Any] | None = None,
    ) -> None:
        if not (isinstance(window, Sequence) and len(window) == 2 and all(type(n) is int for n in window)) or (
            window[0] < 0 or window[1] < 1
        ):
            raise ValueError(f"window must be (steps before it, steps in it), such as (5, 20); got {window!r}")
        if trace is not None and not isinstance(trace, bool | str | os.PathLike):
            raise ValueError(f"trace must be a path, True or None; got {trace!r}")
        self.trace: str | os.PathLike[str] | bool | None = trace
        self.window: tuple[int, int] = window
        self.synchronize: bool = synchronize
        self.torch_profiler: tuple[dict[str, Any], dict[str, Any]] | None = (
            None if torch_profiler is None else _parted(torch_profiler)
        )
        self._timings: Timings | None = None
        self._read: Callable[[], Timings] | None = None
        self._spans: _Window | None = None
        self._torch: Any = None
        self._reads: HostReads | None = None
        self._began = 0

    @property
    def table(self) -> Timings:
        """The times of the current run so far, or of the last run. ``str`` of it is the table.

        Raises:
            RuntimeError: No run has been set up yet.
        """
        timings = self._timings if self._read is None else self._read()
        if timings is None:
            raise RuntimeError("Profile has no table before its run is set up. Call fit first.")
        return timings

    def listeners(self) -> list[Listener]:
        return silent([*super().listeners(), Listener(Callback.on_step_end, self._step)])

    def on_setup(self, run: Run) -> None:
        if self.torch_profiler is not None:
            self._check_torch_profiler(run)
        profiler = hooks_of(run).profiler
        if profiler is None:
            profiler = Profiler(step_fn=session_of(run).step_fn is not None)
            hooks_of(run).start_profile(profiler)
        self._reads = None if profiler.users else HostReads(profiler, run.progress, run.device)  # one for all Profiles
        profiler.users += 1
        if run.driver.world_size > 1 and profiler.users == 1:
            run.at_end(measure_waits(run.driver, profiler))
        if self.synchronize and run.device.type != "cpu":
            profiler.clock = _waiting(run)
        self._spans = _Window(profiler) if self.trace else None
        self._torch = None
        self._read = partial(_timings, run, profiler)
        run.at_end(partial(self._finish, run, profiler))

    def on_fit_start(self, run: Run) -> None:
        self._began = run.progress.step
        if self._spans is not None and self.window[0] == 0:
            self._spans.begin()
        if self.torch_profiler is not None and run.is_main:
            self._torch = _started(self.torch_profiler, lambda number: self._path(run, _numbered("torch-trace.json", number)))
            run.at_end(self._torch.stop)

    def _step(self, run: Run) -> None:
        steps = run.progress.step - self._began
        if self._spans is not None:
            if steps == self.window[0]:
                self._spans.begin()
            elif steps == self.window[0] + self.window[1]:
                self._spans.end()
        if self._torch is not None:
            self._torch.step()
        if self._reads is not None and steps >= AFTER:
            if steps == AFTER:
                self._reads.begin()
            elif steps >= AFTER + SAMPLED:
                self._tell_of_reads(run)

    def _tell_of_reads(self, run: Run) -> None:
        reads, self._reads = self._reads, None
        if reads is None or (profiler := hooks_of(run).profiler) is None:
            return
        profiler.host_reads = found = reads.end()
        for read in found:
            decide(run, "read on the host", f"{read.moment} did {read.often}", who=read.callback)
        if found and run.is_main:
            lines = "\n".join(map(str, found))
            run.warn(
                f"{lines}\non a GPU each of these reads waits for the device. Log the tensor itself with run.log, or read it "
                "every 50 steps, unless its value is needed at once."
            )

    # -- the end -----------------------------------------------------------------------------------

    def _finish(self, run: Run, profiler: Profiler) -> None:
        self._tell_of_reads(run)  # if the run ended before
        self._timings = _timings(run, profiler)
        if run.driver.world_size > 1 and not session_of(run).sync.broken:
            self._timings = replace(self._timings, ranks=rank_times(run.driver, self._timings))
        hooks_of(run).timings = self._timings
        spans, self._read, self._spans, self._torch = self._spans, None, None, None
        if spans is not None:
            spans.end()
        profiler.users -= 1
        if not profiler.users:
            hooks_of(run).end_profile()
        if run.is_main:
            run.print(str(self._timings))
            fetching = sum(phase.seconds for phase in self._timings.phases if phase.name == "fetch")
            if advice := fetching_hint(run.loader, fetching / (self._timings.wall_s or 1.0)):
                run.warn(advice)
            if run.info.directory is not None:
                _write(run, self._path(run, "profile.json"), self._timings.to_dict())
            if spans is not None and (run.info.directory is not None or self.trace is not True):
                self._write_trace(run, spans)

    def _write_trace(self, run: Run, spans: _Window) -> None:
        path = self._path(run, "trace.json") if self.trace is True else self._path(run, local_text(self.trace or ""), own=False)
        if not spans.opened:
            run.warn(f"{path.name} was not written: the run ended before step {self.window[0]}. Give Profile(window=(0, 20)).")
            return
        if spans.cut:
            run.warn(f"{path.name} ends early: it holds the first {MOST_EVENTS} spans. Give a smaller Profile(window=...)")
        _write(run, path, chrome_trace(spans))

    def _path(self, run: Run, name: str, *, own: bool = True) -> Path:
        """Return the path of a file. With `own`, each further `Profile` in the list adds its number to the name."""
        _, _, number = hooks_of(run).name_of(self).partition("#")
        return run.info.base / (_numbered(name, int(number)) if own and number.isdecimal() else name)

    def _check_torch_profiler(self, run: Run) -> None:
        if run.info.directory is None:
            raise ValueError("Profile(torch_profiler=...) needs a directory; the run has none. Give Trainer(directory=...).")
        others = [
            callback
            for callback in hooks_of(run).callbacks.values()
            if isinstance(callback, Profile) and callback.torch_profiler is not None
        ]
        if len(others) > 1:
            raise ValueError(f"torch has one profiler at a time; {len(others)} Profiles have torch_profiler=. Keep one.")


class _Window:
    """The spans of a profiler that one trace shows."""

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = profiler
        self._from, self._until = 0, 0
        self.opened: bool = False

    def begin(self) -> None:
        self._profiler.tracing += 1
        self._from, self.opened = perf_counter_ns(), True

    def end(self) -> None:
        if self.opened and not self._until:
            self._profiler.tracing -= 1
            self._until = perf_counter_ns()

    @property
    def cut(self) -> bool:
        """Whether the profiler dropped spans, because there were too many."""
        return len(self._profiler.events) >= MOST_EVENTS

    def spans(self) -> list[tuple[str, str, float, float]]:
        """Return kind, name, start and duration in us since the start of the profile, in order; the outer first."""
        inside = [span for span in self._profiler.events if span[2] >= self._from and span[3] <= self._until]
        inside.sort(key=lambda span: (span[2], -span[3], KINDS.index(span[0])))
        return [(kind, name, (begin - self._profiler.began) / 1e3, (end - begin) / 1e3) for kind, name, begin, end in inside]


def chrome_trace(window: _Window) -> dict[str, Any]:
    """Return a trace in the JSON object form of the Trace Event Format, with complete events ("ph": "X"), times in us.

    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; Perfetto reads it, too.
    """
    thread = {"pid": os.getpid(), "tid": threading.get_native_id()}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": "cadenza"}, **thread},
        {"ph": "M", "name": "thread_name", "args": {"name": "training"}, **thread},
    ]
    for kind, name, begin_us, duration_us in window.spans():
        events.append({"ph": "X", "name": name, "cat": kind, "ts": begin_us, "dur": duration_us, **thread})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _timings(run: Run, profiler: Profiler) -> Timings:
    return Timings.of(profiler, run.progress.step - run.progress.origin.step, _note(run, profiler))


def _waiting(run: Run) -> Callable[[], int]:
    """Return a clock that waits for the device before it is read."""
    wait = torch.mps.synchronize if run.device.type == "mps" else partial(torch.cuda.synchronize, run.device)
    broken = False

    def clock() -> int:
        nonlocal broken
        if not broken:
            try:
                wait()
            except RuntimeError as error:  # an error of earlier work, which the training will raise as well
                broken = True
                run.warn(f"Profile no longer waits for {run.device}, because the wait failed: {error!r}")
        return perf_counter_ns()

    return clock


def _note(run: Run, profiler: Profiler) -> str:
    """Return what the times mean on this device."""
    if run.device.type == "cpu":
        return ""
    if profiler.clock is not perf_counter_ns:
        return f"waited for {run.device} at each moment, so the run was slower than without"
    return f"times of the host: work on {run.device} is launched, not waited for (synchronize=True waits)"


def _parted(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of torch.profiler.schedule, and those of torch.profiler.profile."""
    of_schedule = set(inspect.signature(torch.profiler.schedule).parameters)
    of_profile = set(inspect.signature(torch.profiler.profile.__init__).parameters) - {"self", "schedule", "on_trace_ready"}
    if unknown := given.keys() - of_schedule - of_profile:
        raise ValueError(
            f"torch_profiler takes the arguments of torch.profiler.schedule and torch.profiler.profile; got {sorted(unknown)}. "
            f"Use some of: {', '.join(sorted(of_schedule | of_profile))}"
        )
    schedule = {name: value for name, value in given.items() if name in of_schedule}
    return {**SCHEDULE, **schedule}, {name: value for name, value in given.items() if name in of_profile}


def _started(arguments: tuple[dict[str, Any], dict[str, Any]], path: Callable[[int], Path]) -> Any:
    """Return a torch profiler that is started. It writes each recorded window to the `path` of its number."""
    count = 0

    def export(profiler: torch.profiler.profile) -> None:
        nonlocal count
        count += 1
        profiler.export_chrome_trace(str(path(count)))

    schedule, others = arguments
    profiler = torch.profiler.profile(schedule=torch.profiler.schedule(**schedule), on_trace_ready=export, **others)
    profiler.start()
    return profiler


def _numbered(name: str, number: int) -> str:
    """Return a file's name: unchanged for the first, ``trace-2.json`` for the second.

    >>> _numbered("trace.json", 1), _numbered("trace.json", 2)
    ('trace.json', 'trace-2.json')
    """
    stem, dot, ending = name.rpartition(".")
    return name if number < 2 else f"{stem}-{number}{dot}{ending}"


def _write(run: Run, path: Path, data: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")
    except OSError as error:  # a lost profile must not fail the training
        run.warn(f"{path} could not be written: {error!r}")
