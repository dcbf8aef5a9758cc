"""Play the records of a run through other callbacks: `what_if`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from os import PathLike
from typing import Any, overload

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.early_stopping import EarlyStopping
from cadenza.errors import CallbackError, MonitorError, add_note
from cadenza.files.paths import local_path
from cadenza.hooks.moments import BaseCallback
from cadenza.loops.foreign_callbacks import AnyCallback, adapted
from cadenza.status.decisions import Decision
from cadenza.status.formats import counted
from cadenza.timetravel.dry_checkpoint import DryCheckpoint, DryWriter
from cadenza.timetravel.simulation import Played, Recording, check_playable, play


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """What callbacks would have decided in a recorded run. `what_if` returns it; print it."""

    stopped: Decision | None
    """The stop that they would have requested; None if the records end before."""
    step: int
    """The last step that would have been done, or the last recorded one."""
    kept: Mapping[str, Sequence[str]]
    """The checkpoints that would be kept, oldest first, and the rules that keep each. With several folders, their paths."""
    best: Sequence[Mapping[str, Any]]
    """Of the checkpoints that are kept as the best: monitor, mode, value, step, checkpoint."""
    decisions: Sequence[Decision]
    """All decisions, in order."""

    def __repr__(self) -> str:
        end = "not stopped" if self.stopped is None else f"stopped by {self.stopped.who}"
        return f"<Answer: {end}, step {self.step}, {counted(len(self.kept), 'checkpoint')} kept>"

    def __str__(self) -> str:
        lines = [str(self.stopped) if self.stopped else f"not stopped in the {counted(self.step, 'recorded step')}"]
        lines += [f"{name}: {', '.join(rules)}" for name, rules in self.kept.items()]
        lines += [f"best {saved['monitor']}: {saved['value']:g} at step {saved['step']}" for saved in self.best]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, repr=False)
class Answers:
    """The answers for each combination of settings. `what_if` returns it for a grid; print it as a table."""

    rows: Sequence[tuple[Mapping[str, Any], Answer]]
    """The settings, and the answer for each."""

    def __iter__(self) -> Iterator[tuple[Mapping[str, Any], Answer]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Mapping[str, Any], Answer]:
        return self.rows[index]

    def __repr__(self) -> str:
        return f"<Answers: {counted(len(self.rows), 'row')}>"

    def __str__(self) -> str:
        names = list(self.rows[0][0])
        table = [[*names, "stopped at step", "checkpoints kept", "best"]]
        for settings, answer in self.rows:
            stopped = "-" if answer.stopped is None else str(answer.step)
            kept = ", ".join(re.sub(r"(^|/)step-0*", r"\1", name) for name in answer.kept) or "-"
            best = ", ".join(f"{saved['monitor']} {saved['value']:g} at {saved['step']}" for saved in answer.best) or "-"
            table.append([*map(str, settings.values()), stopped, kept, best])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


@overload
def what_if(run: str | PathLike[str], callbacks: Iterable[AnyCallback]) -> Answer: ...
@overload
def what_if(run: str | PathLike[str], callbacks: Callable[..., Iterable[AnyCallback]], **grid: Iterable[Any]) -> Answers: ...
def what_if(
    run: str | PathLike[str], callbacks: Iterable[AnyCallback] | Callable[..., Iterable[AnyCallback]], **grid: Iterable[Any]
) -> Answer | Answers:
    """Play a recorded run through other callbacks, without its model and its data: where would it have stopped?

    The hooks of the callbacks are called as in the run: ``on_setup``, ``on_fit_start``, ``on_epoch_start``, ``on_step_end``,
    ``on_eval_start`` and ``on_eval_end`` with the recorded results, ``on_log``, ``on_stop``, ``on_epoch_end``, ``on_fit_end``.
    `Checkpoint` writes nothing, and decides what it would write and keep. The run directory is only read.

    A run can only be asked about its recorded part: a stop after its last step is not known.

    Args:
        run: The run directory. It must have the evaluations that the callbacks watch.
        callbacks: The callbacks; or, with a grid, a function that makes them from settings.
        grid: The values of each setting, such as ``patience=[1, 2, 3]``. All combinations are played.

    Returns:
        `Answer`; with a grid, `Answers`.

    Raises:
        DirectoryError: `run` holds no run.
        CallbackError: A callback needs the model, batches or gradients, or depends on the clock. The message names it.
        MonitorError: No recorded evaluation reports what a callback watches.
        TypeError: There is a grid, and `callbacks` is no function; or the other way round.

    >>> import tempfile
    >>> from cadenza.callbacks import Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorded = tiny_run(epochs=6, directory=folder, callbacks=[Evaluate(tiny_loader())])
    ...     print(what_if(folder, [EarlyStopping("eval/loss", "max", patience=2), Checkpoint(keep_last=1)]))
    ...     table = what_if(folder, lambda patience: [EarlyStopping("eval/loss", "max", patience=patience)], patience=[1, 9])
    stopped by EarlyStopping at epoch 3, step 15, batch 15: 'eval/loss' did not get better than 0.460937 in 2 evaluations
    step-00000015: Last(1)
    >>> print(table)
    patience  stopped at step  checkpoints kept  best
    1         10               -                 -
    9         -                -                 -
    """
    recording = Recording.read(local_path(run))
    if not grid:
        if callable(callbacks) and not isinstance(callbacks, Iterable):
            raise TypeError(
                "what_if(run, function) needs the settings of the function: what_if(run, function, patience=[1, 2])"
            )
        return _answer(recording, callbacks)
    if not callable(callbacks):
        raise TypeError(
            f"what_if(run, callbacks, {next(iter(grid))}=...) needs a function that makes the callbacks from the settings; got "
            f"a {type(callbacks).__name__}. Write lambda {', '.join(grid)}: [...]."
        )
    for name, given in grid.items():
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"each setting needs the values to play, such as {name}=[1, 2]; got {name}={given!r}")
    values = {name: list(given) for name, given in grid.items()}
    rows = []
    for chosen in product(*values.values()):
        settings = dict(zip(values, chosen, strict=True))
        rows.append((settings, _answer(recording, callbacks(**settings))))
    if not rows:
        raise ValueError(f"each setting needs at least one value; got {values}")
    return Answers(rows)


def _answer(recording: Recording, callbacks: Any) -> Answer:
    if isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        raise CallbackError(f"what_if(run, callbacks) takes a list of callbacks; got {callbacks!r}. Write what_if(run, [...]).")
    given = [_dry(listed, recording) for listed in adapted(callbacks)]
    check_playable(given)
    try:
        played = play(recording, given)
    except MonitorError as error:
        names = sorted({name for some in recording.evaluations.values() for saved in some for name in saved.results})
        reported = f"they reported {', '.join(names)}" if names else "there are none"
        add_note(error, f"what_if plays the evaluations that {str(recording.path)!r} recorded: {reported}")
        raise
    stops = [decision for decision in played.decisions if decision.what == "stopped"]
    kept, best = _kept(played)
    return Answer(stops[0] if stops else None, played.step, kept, best, played.decisions)


def _dry(callback: BaseCallback, recording: Recording) -> BaseCallback:
    if isinstance(callback, Checkpoint):
        return DryCheckpoint(callback, recording.time_at if _needs_time(callback) else lambda step: 0.0)
    if isinstance(callback, EarlyStopping) and callback.best is not None:
        callback = copy(callback)
        callback.best = None  # the weights of the best evaluation are not there; no decision depends on them
    return callback


def _needs_time(callback: Checkpoint) -> bool:
    return any(getattr(item, "unit", "") == "s" for item in callback.keep.given)


def _kept(played: Played) -> tuple[dict[str, list[str]], list[Mapping[str, Any]]]:
    kept: dict[str, list[str]] = {}
    best: list[Mapping[str, Any]] = []
    several = len({str(writer.store.files) for writer in played.savers if isinstance(writer, DryWriter)}) > 1
    for writer in played.savers:
        assert isinstance(writer, DryWriter)
        rules = writer.dry.kept_by_rules()
        for item in sorted(writer.dry.known, key=lambda saved: saved.rank):
            name = f"{writer.store.files}/{item.name}" if several else item.name
            kept.setdefault(name, []).extend(by["rule"] for by in rules.get(item.name, ()))
        best += writer.dry.bests()
    return kept, best
