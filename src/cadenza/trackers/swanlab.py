"""Send records to SwanLab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cadenza.records.record import Audio, Histogram, Image, Media, Text
from cadenza.sinks.media import EMPTY, MediaBox, picture_of, samples_of
from cadenza.sinks.own_file import own_folder
from cadenza.sinks.sink import Sink, checked_mode
from cadenza.text.hints import renamed

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_MODES = ("online", "offline", "local", "disabled")


class Swanlab(Sink):
    """Send numbers, `Image`, `Figure`, `Audio`, `Text` and the run's arguments to SwanLab, or a local file.

    Each record has its step. Its timestamp is the time at which SwanLab received it. SwanLab has one run per process: if
    another run is active, or the list has a second `Swanlab`, there is one warning, the training continues, and this sink
    retries; see `Sink`. The same happens without an account or a server, because the sink never asks for a login. Records that
    SwanLab cannot write to its disk are lost; SwanLab prints a message about them.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        project: The name of the project. None takes the name of the working directory.
        run_name: The name of the run in SwanLab. None takes the name of the directory of the run.
        workspace: The account or team.
        mode: ``"online"``, ``"offline"`` (a local file), ``"local"`` or ``"disabled"``. None: ``SWANLAB_MODE``, else online.
        config: More entries of the configuration. They replace arguments of the trainer with the same names.
        tags: The tags of the run.
        group: The group of the run.
        directory: The directory of local files. A relative path starts at the directory of the run, if it has one. None:
            ``swanlog``.

    Raises:
        MissingExtraError: swanlab is not installed.
        ValueError: `mode` is not one of the four.
        DirectoryError: At the start of a run: `directory` cannot be written.
    """

    _package = "swanlab"

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
        self.project: str | None = project
        self.run_name: str | None = run_name
        self.workspace: str | None = workspace
        self.mode: Literal["online", "offline", "local", "disabled"] | None = checked_mode(mode, _MODES)
        self.group: str | None = group
        self.config: dict[str, Any] = dict(config or {})
        self.tags: list[str] = list(tags)
        self.directory: Path = Path("swanlog" if directory is None else directory)
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
            "config": {name: value for name, value in config.items() if value is not None},  # SwanLab turns None into {}
            "tags": self.tags or None,
            "group": self.group,
            "log_dir": str(folder),
            "id": info.id or None,
            "resume": "allow" if info.id else None,
            "settings": settings,
        }
        # In another thread: in the main thread SwanLab installs a SIGINT handler and must also be finished there.
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
            case "left" | "preempted" | "interrupted":
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
