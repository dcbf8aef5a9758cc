"""Records for SwanLab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cadenza.errors import MissingExtraError
from cadenza.hooks.habits import renamed
from cadenza.records.record import Audio, Histogram, Image, Media, Text
from cadenza.sinks.media import EMPTY, MediaBox, picture_of, samples_of
from cadenza.sinks.own_file import own_folder
from cadenza.sinks.sink import Sink

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_MODES = ("online", "offline", "local", "disabled")


class Swanlab(Sink):
    """Send numbers, `Image`, `Figure`, `Audio`, `Text` and the run's arguments to SwanLab; ``mode="offline"`` keeps them here.

    Each record stands at its step; its time is that at which SwanLab got it. SwanLab has one run in a process: if there is one
    already, or a second of these sinks, there is one report, and the training goes on without it; likewise without an account
    or a server, as it never asks for a login. What it cannot write to its disk it tells on the screen, and drops.

    Args:
        project: None: the name of the working directory.
        run_name: The name of the run there; None: that of its directory.
        workspace: The account or team.
        mode: ``"online"``, ``"offline"``, ``"local"`` or ``"disabled"``; None: what ``SWANLAB_MODE`` says, else online.
        config: Added to the arguments of the trainer; wins where both have a name.
        tags: For finding it.
        group: For comparing it.
        directory: Where files lie; a relative one lies in the run's directory, if there is one. None: ``swanlog`` there.

    Raises:
        MissingExtraError: swanlab is not installed.
        ValueError: `mode` is none of these.
        DirectoryError: When a run starts: `directory` cannot be written.
    """

    @renamed(name="run_name")
    def __init__(
        self,
        project: str | None = None,
        *,
        run_name: str | None = None,
        workspace: str | None = None,
        mode: Literal["online", "offline", "local", "disabled"] | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        group: str | None = None,
        directory: str | PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if find_spec("swanlab") is None:
            raise MissingExtraError("swanlab", needed_by="Swanlab", extra="swanlab")
        if mode not in (None, *_MODES):
            raise ValueError(f"mode must be 'online', 'offline', 'local', 'disabled' or None; got {mode!r}")
        self.project, self.run_name, self.workspace, self.mode, self.group = project, run_name, workspace, mode, group
        self.config, self.tags = dict(config or {}), list(tags)
        self.directory = Path("swanlog" if directory is None else directory)
        self._media = MediaBox(self.remarks.append)
        self._run: Any = None

    def open(self, info: RunInfo) -> None:
        import swanlab  # 0.5 s, so only when a run starts

        self._media = MediaBox(self.remarks.append)
        folder = info.base / self.directory
        if self.mode != "disabled":
            own_folder(folder, sink="Swanlab")
        settings = swanlab.Settings(
            interactive=False,
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            probe=swanlab.Settings.Probe(git=False),
        )
        config = {**info.arguments, **self.config}
        arguments: dict[str, Any] = {
            "project": self.project,
            "name": self.run_name or info.name or None,
            "workspace": self.workspace,
            "mode": self.mode,
            "config": {name: value for name, value in config.items() if value is not None},  # it makes {} of None
            "tags": self.tags or None,
            "group": self.group,
            "log_dir": str(folder),
            "id": info.id or None,
            "resume": "allow" if info.id else None,
            "settings": settings,
        }
        # From a thread of its own: started in the main one, it takes SIGINT, and can only be ended there.
        with ThreadPoolExecutor(1, "cadenza-swanlab") as aside:
            self._run = aside.submit(swanlab.init, **arguments).result()

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({**record.values, **self._media.of(record, _as_swanlab_has_it)}, step=record.step)

    def close(self, outcome: Outcome | None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        match None if outcome is None else outcome.kind:
            case "failed":
                run.finish("crashed", outcome.reason if outcome else None)
            case "preempted" | "interrupted":
                run.finish("aborted")
            case _:
                run.finish()


def _as_swanlab_has_it(medium: Media) -> Any:
    import swanlab

    match medium:
        case Text(text):
            return swanlab.Text(text)
        case Image():
            return swanlab.Image(picture_of(medium))
        case Histogram():
            return "is a Histogram, which SwanLab does not have"
        case Audio() if find_spec("soundfile") is None:
            return "is Audio, for which SwanLab needs the package 'soundfile'"
        case Audio(samples, rate) if len(samples):
            return swanlab.Audio(samples_of(medium), sample_rate=rate)
    return EMPTY
