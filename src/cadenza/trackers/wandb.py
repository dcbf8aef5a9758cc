"""Send records to Weights & Biases."""

from __future__ import annotations

import html
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from cadenza.files.paths import local_path
from cadenza.records.record import Audio, Histogram, Image, Media, Text
from cadenza.sinks.media import EMPTY, MediaBox, counts_of, picture_of, wave_of
from cadenza.sinks.own_file import own_folder
from cadenza.sinks.sink import Sink, checked_mode
from cadenza.text.hints import renamed

if TYPE_CHECKING:
    import wandb

    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_MODES = ("online", "offline", "disabled")
_START_S = 30  # wandb waits three times as long for a server by default
_FINISH_S = 100  # less than `Sink.patience_s`, so that wandb can still report what it did not send


class Wandb(Sink):
    """Send numbers, media and the run's arguments to Weights & Biases, or to a file with ``mode="offline"``.

    Each record has its step and time. The arguments of the trainer are the configuration. A resumed run keeps its id;
    the server keeps the first values that it received for a step.

    The wandb run is the current one, so that ``wandb.log(...)`` in a callback adds to it, unless a wandb run of the script is
    active, which is not affected. ``wandb.log`` has its own step counter. If that is ahead, a record is written at wandb's next
    step with its step as the value ``step``, because wandb ignores earlier steps.

    The sink never asks for a login. Without an account or a server there is one warning, the training continues, and the sink
    retries; see `Sink`.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        project: The name of the project. None takes the default of wandb.
        run_name: The name of the run in wandb. None takes the name of the directory of the run.
        entity: The account or team.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``. None takes ``WANDB_MODE`` or the setting of ``wandb offline``.
        config: More entries of the configuration. They replace arguments of the trainer with the same names.
        tags: The tags of the run.
        group: The group of the run.
        directory: The directory of local files. A relative path starts at the directory of the run, if it has one. None: the
            directory of the run.
        settings: More settings for ``wandb.init(settings=...)``, such as ``{"silent": True}``. By default, wandb does not
            record the console, the script and git, because Cadenza does.

    Raises:
        MissingExtraError: wandb is not installed.
        ValueError: `mode` is not one of the three.
        DirectoryError: At the start of a run: `directory` cannot be written.
    """

    _package = "wandb"

    @renamed(name="run_name")
    def __init__(
        self,
        project: str | None = None,
        *,
        run_name: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        group: str | None = None,
        directory: str | PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.project: str | None = project
        self.run_name: str | None = run_name
        self.entity: str | None = entity
        self.mode: Literal["online", "offline", "disabled"] | None = checked_mode(mode, _MODES)
        self.group: str | None = group
        self.config: dict[str, Any] = dict(config or {})
        self.tags: list[str] = list(tags)
        self.settings: dict[str, Any] = dict(settings or {})
        self.directory: Path | None = None if directory is None else local_path(directory)
        self._run: wandb.Run | None = None
        self._id = ""
        self._media = MediaBox(self.remarks.append)

    def open(self, info: RunInfo) -> None:
        import wandb  # 1.5 s, so only when a run starts

        self._media, self._id = MediaBox(self.remarks.append), _free(info.id)
        defaults = {"console": "off", "disable_code": True, "disable_git": True, "disable_job_creation": True}
        waiting = {"init_timeout": _START_S, "finish_timeout": _FINISH_S, "finish_timeout_raises": True}
        self._ahead = False
        with _no_questions():
            active = wandb.run or getattr(wandb.setup(), "most_recent_active_run", None)
            self._run = wandb.init(
                project=self.project,
                name=self.run_name or info.name or None,
                entity=self.entity,
                mode=self.mode,
                config={**info.arguments, **self.config},
                allow_val_change=True,  # a resumed run may have other limits
                tags=self.tags or None,
                group=self.group,
                dir=_made(self.directory, info),
                id=self._id or None,
                resume="allow" if self._id else None,
                reinit="return_previous" if active is None else "create_new",
                settings={**defaults, **waiting, **self.settings},
            )
        _ids.add(self._id)

    def write(self, records: Sequence[Record]) -> None:
        assert self._run is not None, "open comes first"
        for record in records:
            row = {**record.values, "_timestamp": record.time}
            if record.media:
                with tempfile.TemporaryDirectory() as folder:  # wandb copies a file when it is logged
                    media = self._media.of(record, partial(_as_wandb_has_it, folder=folder))
                    self._log({**row, **media}, record.step)
            else:
                self._log(row, record.step)

    def _log(self, row: dict[str, Any], step: int) -> None:
        """Write a row at its step or, once other code has logged past it with ``wandb.log``, at wandb's next step."""
        assert self._run is not None, "open comes first"
        if not self._ahead and self._run.step > step:
            self._ahead = True
            self.remarks.append(
                f"wandb.log of other code is at step {self._run.step} of wandb, and a record at step {step} of the run: from "
                "here on, records have their step as the value 'step'. Log with run.log(...), or to a wandb run of your own"
            )
        if self._ahead:
            self._run.log({**row, "step": step})
        else:
            self._run.log(row, step=step)

    def close(self, outcome: Outcome | None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        _ids.discard(self._id)
        kind = "finished" if outcome is None else outcome.kind
        if kind in ("left", "preempted", "rolled back"):
            run.mark_preempting()
        run.finish(exit_code=0 if kind in ("finished", "stopped") else 1)


def _as_wandb_has_it(medium: Media, folder: str) -> Any:
    import wandb

    match medium:
        case Text(text):
            # wandb has no type for plain text.
            return wandb.Html(f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>', data_is_not_path=True)
        case Image():
            return wandb.Image(picture_of(medium))
        case Audio(samples) if len(samples):
            file = Path(folder, f"{uuid4().hex}.wav")
            file.write_bytes(wave_of(medium))  # for an array, wandb needs another package
            return wandb.Audio(file)
        case Histogram():
            counts = counts_of(medium)
            return EMPTY if counts is None else wandb.Histogram(np_histogram=counts)
    return EMPTY


_ids: set[str] = set()
"""The ids of active runs in this process. wandb accepts each id once at a time, even across projects."""


def _free(run_id: str) -> str:
    """Return the id for a sink: the run's id for the first sink, with a number appended for each further one."""
    others = (f"{run_id}-{number}" for number in count(2))
    return next(candidate for candidate in chain([run_id], others) if not candidate or candidate not in _ids)


def _made(own: Path | None, info: RunInfo) -> str | None:
    """Create and return the directory of files; wandb would silently choose another if it cannot write. None: its default."""
    if own is None and info.directory is None:
        return None
    return str(own_folder(info.base / (own or ""), sink="Wandb"))


@contextmanager
def _no_questions() -> Iterator[None]:
    """Replace stdin, so that wandb raises an error instead of asking for a login."""
    keyboard = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = keyboard
