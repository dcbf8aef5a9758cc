"""Send records to Comet."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cadenza.records.record import Audio, Histogram, Image, Media, Text
from cadenza.sinks.media import EMPTY, MediaBox, picture_of, wave_of
from cadenza.sinks.own_file import own_folder
from cadenza.sinks.sink import Sink, checked_mode
from cadenza.text.hints import renamed

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.status.decisions import Outcome
    from cadenza.status.run_info import RunInfo

_MODES = ("online", "offline")
_RECORDED_BY_CADENZA = (
    *("log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_details", "log_env_gpu"),
    *("log_env_host", "log_env_cpu", "log_env_network", "log_env_disk", "auto_output_logging", "auto_param_logging"),
    *("auto_metric_logging", "auto_log_co2"),
)


class Comet(Sink):
    """Send numbers, media and the run's arguments to Comet, or to an archive with ``mode="offline"``.

    Each record has its step. Its timestamp is the time at which the sink wrote it. The arguments of the trainer become the
    parameters. The outcome is logged as ``outcome``. Comet has one active experiment per process: if another one is
    active, this sink warns once, the training continues, and the sink retries; see `Sink`. The same happens without an API key
    or a server.

    A resumed run continues its experiment. Offline, it writes an additional archive without the values of earlier archives.
    Online, it sends the values after its checkpoint again.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        project: The name of the project. None takes ``COMET_PROJECT_NAME``, otherwise Comet's default.
        run_name: The name of the experiment. None takes the name of the directory of the run.
        workspace: The account or team.
        mode: ``"online"`` or ``"offline"``. None: ``COMET_START_ONLINE``, else online.
        config: More parameters. They replace arguments of the trainer with the same names.
        tags: The tags of the experiment.
        directory: The directory of archives. A relative path starts at the directory of the run, if it has one. None:
            ``comet``.

    Raises:
        MissingExtraError: comet_ml is not installed.
        ValueError: `mode` is not one of the two.
        DirectoryError: At the start of a run: `directory` cannot be written.
    """

    _package = "comet_ml"
    _extra = "comet"

    @renamed(name="run_name")
    def __init__(
        self,
        project: str | None = None,
        *,
        run_name: str | None = None,
        workspace: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        directory: str | PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.project: str | None = project
        self.run_name: str | None = run_name
        self.workspace: str | None = workspace
        self.mode: Literal["online", "offline"] | None = checked_mode(mode, _MODES)
        self.config: dict[str, Any] = dict(config or {})
        self.tags: list[str] = list(tags)
        self.directory: Path = Path("comet" if directory is None else directory)
        self._media = MediaBox(self.remarks.append)
        self._experiment: Any = None
        self._there: dict[str, int] = {}

    def open(self, info: RunInfo) -> None:
        self._media = MediaBox(self.remarks.append)
        folder = own_folder(info.base / self.directory, sink="Comet")
        comet_ml = _imported()
        active = comet_ml.get_running_experiment()  # including an experiment that has ended
        if active is not None and active.alive:
            raise RuntimeError("Comet has one active experiment per process, and another one is active. Call its end() first.")
        set_online = comet_ml.get_config("comet.start.online")
        online = self.mode != "offline" if self.mode or set_online is None else bool(set_online)
        if online and not comet_ml.get_config("comet.api_key"):
            raise RuntimeError("Comet has no API key. Set COMET_API_KEY, or write an archive with Comet(mode='offline').")
        self._there = {} if online or not (info.step or info.continued) else _there(folder, info.id)
        self._files = tempfile.TemporaryDirectory(prefix="cadenza-comet-")
        with _hook_kept():
            self._experiment = comet_ml.start(
                project_name=self.project,
                workspace=self.workspace,
                experiment_key=info.id or None,
                mode="get_or_create" if info.id else "create",
                online=online,
                experiment_config=comet_ml.ExperimentConfig(
                    name=self.run_name or info.name or None,
                    tags=self.tags,
                    offline_directory=str(folder),
                    display_summary_level=0,
                    **dict.fromkeys(_RECORDED_BY_CADENZA, False),
                ),
            )
        self._experiment.log_parameters({**info.arguments, **self.config})

    def write(self, records: Sequence[Record]) -> None:
        experiment = self._experiment
        if not experiment.alive:  # an ended experiment ignores all calls
            raise RuntimeError("the experiment was ended by other code")
        for record in records:
            for name, value in record.values.items():
                if record.step > self._there.get(name, 0):
                    experiment.log_metric(name, value, step=record.step)
            for name, medium in self._media.of(record, _empty_or_itself).items():
                self._show(name, medium, record.step)

    def close(self, outcome: Outcome | None) -> None:
        experiment, self._experiment = self._experiment, None
        if experiment is not None:
            try:
                experiment.log_other("outcome", "finished" if outcome is None else outcome.kind)
                experiment.log_other("reason", "" if outcome is None else outcome.reason)
                experiment.end()
            finally:
                self._files.cleanup()

    def _show(self, name: str, medium: Media, step: int) -> None:
        match medium:
            case Text(text):
                self._experiment.log_text(text, step=step, metadata={"name": name})
            case Image():
                self._experiment.log_image(picture_of(medium), name=name, step=step)
            case Histogram(values):
                numbers = values.double()
                self._experiment.log_histogram_3d(numbers[numbers.isfinite()].numpy(), name=name, step=step)
            case Audio():
                handle, path = tempfile.mkstemp(".wav", dir=self._files.name)  # Comet reads it later
                with open(handle, "wb") as file:
                    file.write(wave_of(medium))
                self._experiment.log_audio(path, file_name=f"{name}.wav", step=step)


def _empty_or_itself(medium: Media) -> Any:
    match medium:
        case Audio(samples) if not len(samples):
            return EMPTY
        case Histogram(values) if not values.double().isfinite().any():
            return EMPTY
    return medium


def _imported() -> Any:
    """Import comet_ml without its patches of other libraries, and without reports of its errors to its developers."""
    quiet = {"COMET_DISABLE_AUTO_LOGGING": "1", "COMET_ERROR_TRACKING_ENABLE": "false"}
    added = {name: value for name, value in quiet.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with _hook_kept():
            import comet_ml  # 2 s, so only when a run starts
    finally:
        for name in added:
            del os.environ[name]
    return comet_ml


@contextmanager
def _hook_kept() -> Iterator[None]:
    """Keep the hook of unhandled exceptions, which Comet replaces: the sink reports the outcome."""
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def _there(folder: Path, run_id: str) -> dict[str, int]:
    """Return the last step of each name in the archives of a run."""
    last: dict[str, int] = {}
    for path in folder.glob(f"{run_id}*.zip"):
        with zipfile.ZipFile(path) as archive, archive.open("messages.json") as lines:
            metrics = [json.loads(line)["payload"].get("metric", {}) for line in lines]
        for metric in metrics:
            if metric.get("step") is not None:
                last[metric["metricName"]] = max(metric["step"], last.get(metric["metricName"], 0))
    return last
