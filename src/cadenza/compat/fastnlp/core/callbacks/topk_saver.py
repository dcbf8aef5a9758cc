"""Save models or training states in separate folders, and keep the best of them."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.has_monitor_callback import ResultsMonitor
from cadenza.compat.fastnlp.core.utils.utils import Watched
from cadenza.compat.fastnlp.envs.utils import launch_time
from cadenza.errors import nearest

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver


RESULTS_FILE = "fastnlp_evaluate_results.json"

_KNOWN = (
    *("use_timestamp_folder", "folder", "save_object", "only_state_dict", "model_save_fn", "save_evaluate_results"),
    *("topk", "monitor", "larger_better", "every_n_epochs", "every_n_batches", "last", "on_exceptions"),
)

logger: logging.Logger = logging.getLogger("cadenza")


class Saver:
    """Saves to ``<folder>/<launch time>/<folder name>``.

    Args:
        folder: The folder, which is created; None: the current directory.
        save_object: ``"trainer"`` saves a training state; anything else only the model. Folder names start with it.
        only_state_dict: Save only the weights; False saves the whole model.
        model_save_fn: ``model_save_fn(folder)`` writes the model instead.
        **kwargs: ``use_timestamp_folder=False`` omits the folder of the launch time. The others are passed to the trainer's
            method that saves.

    Raises:
        ValueError: `folder` is a file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        save_object: str = "model",
        only_state_dict: bool = True,
        model_save_fn: Callable[[str], object] | None = None,
        **kwargs: Any,
    ) -> None:
        path = Path.cwd() if folder is None else Path(folder).absolute()
        if path.exists() and not path.is_dir():
            raise ValueError(f"folder must be a folder, or not exist; got the file {str(path)!r}")
        stamped = kwargs.pop("use_timestamp_folder", True)
        path.mkdir(parents=True, exist_ok=True)
        self.folder = path
        self.timestamp_path: Path = path / launch_time() if stamped else path
        self.save_object: str = save_object
        self.only_state_dict: bool = only_state_dict
        self.model_save_fn: Callable[[str], object] | None = model_save_fn
        self.kwargs = kwargs
        for name in kwargs:
            if meant := nearest(name, _KNOWN):
                logger.warning("%s= is passed to the trainer's method that saves, which ignores it.%s", name, meant)

    def save(self, trainer: TrainerView, folder_name: str) -> str:
        """Save to the folder of this name; return its path. Every rank must call this."""
        folder = str(self.timestamp_path / folder_name)
        if trainer.driver.is_global_zero():
            os.makedirs(folder, exist_ok=True)
        save: Callable[..., object] = trainer.save_checkpoint if self.save_object == "trainer" else trainer.save_model
        save(folder, only_state_dict=self.only_state_dict, model_save_fn=self.model_save_fn, **self.kwargs)
        return folder

    def agree(self, driver: Driver) -> None:
        """Use the folder of the main process, as launch times differ between processes. Every rank must call this."""
        self.timestamp_path = Path(driver.native.broadcast(str(self.timestamp_path)))

    def rm(self, folder_name: str) -> None:
        """Delete the folder of this name, if it exists."""
        shutil.rmtree(self.timestamp_path / folder_name, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"timestamp_path": str(self.timestamp_path)}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue in the folder of the resumed training, if it still exists."""
        earlier = Path(states["timestamp_path"])
        if earlier.is_dir():
            self.timestamp_path = earlier

    def __str__(self) -> str:
        return f"saver#{self.save_object}#{self.folder}"


class TopkSaver(ResultsMonitor, Saver):
    """Saves after an evaluation if it is among the best so far, and deletes the folders of evaluations that no longer rank.

    Args:
        topk: The number of evaluations to keep; -1 all, 0 none.
        monitor: The result; None: the trainer's monitor, see `HasMonitorCallback`.
        larger_better: Whether a larger value is better.
        folder: As in `Saver`.
        save_object: As in `Saver`.
        only_state_dict: As in `Saver`.
        model_save_fn: As in `Saver`.
        save_evaluate_results: Write the results of the evaluation to a JSON file in the folder.
        **kwargs: As in `Saver`.

    Raises:
        RuntimeError: `monitor` is given, and `topk` is 0.
        ValueError: `topk` is not an integer of at least -1.
    """

    def __init__(
        self,
        topk: int | None = 0,
        monitor: Watched | None = None,
        larger_better: bool = True,
        folder: str | os.PathLike[str] | None = None,
        save_object: str = "model",
        only_state_dict: bool = True,
        model_save_fn: Callable[[str], object] | None = None,
        save_evaluate_results: bool = True,
        **kwargs: Any,
    ) -> None:
        topk = 0 if topk is None else topk
        if not isinstance(topk, int) or topk < -1:
            raise ValueError(f"topk must be a whole number of at least -1; got {topk!r}")
        if monitor is not None and not topk:
            raise RuntimeError(f"monitor={monitor!r} needs topk; got topk=0. Set topk, such as topk=1")
        ResultsMonitor.__init__(self, monitor, larger_better)
        Saver.__init__(self, folder, save_object, only_state_dict, model_save_fn, **kwargs)
        self.topk: int = topk
        self.queue: TopkQueue = TopkQueue(topk)
        self.save_evaluate_results: bool = save_evaluate_results

    def forget(self) -> None:
        """Reset the best evaluations at the start of a new training."""
        self.set_monitor(self.monitor, self.larger_better)
        self.queue = TopkQueue(self.topk)

    def require_monitor(self, trainer: TrainerView) -> None:
        """Use the trainer's monitor if one is needed and there is none.

        Raises:
            RuntimeError: The trainer has none either.
        """
        if self.topk and self.monitor is None:
            if trainer.monitor is None:
                raise RuntimeError(f"topk={self.topk} needs a monitor; got None. Pass monitor= here or to the trainer.")
            self.set_monitor(trainer.monitor, trainer.larger_better)

    def save_topk(self, trainer: TrainerView, results: dict[str, Any]) -> str | None:
        """Save if the results are among the best; return the folder, or None. Every rank must call this."""
        value = self.get_monitor_value(results) if self.topk else None
        if value is None:
            return None
        name = (
            f"{self.save_object}-epoch_{trainer.cur_epoch_idx}-batch_{trainer.global_forward_batches}-"
            f"{_safe(self.monitor_name)}_{value}"
        )
        gone = self.queue.push(name, value if self.larger_better else -value)
        if gone == name:
            return None
        folder = self.save(trainer, name)
        if self.save_evaluate_results and trainer.driver.is_global_zero():
            text = json.dumps(self.itemize_results(results), indent=2, default=str)
            Path(folder, RESULTS_FILE).write_text(text, encoding="utf-8")
        if gone is not None and trainer.driver.is_global_zero():
            self.rm(gone)
        return folder

    def state_dict(self) -> dict[str, Any]:
        real = self._real_monitor if isinstance(self._real_monitor, str) else None
        return {**Saver.state_dict(self), "queue": dict(self.queue.values), "real_monitor": real}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        Saver.load_state_dict(self, states)
        if self.folder in Path(states["timestamp_path"]).parents or self.timestamp_path == Path(states["timestamp_path"]):
            self.queue.values = dict(states["queue"])
        self._real_monitor = states["real_monitor"] or self._real_monitor

    def __str__(self) -> str:
        return f"topk-{self.topk}#{Saver.__str__(self)}"


class TopkQueue:
    """The highest values by name. Of two equal values it keeps the later one.

    >>> queue = TopkQueue(2)
    >>> [queue.push(name, value) for name, value in zip("abcdef", [1, 2, 1, 1, 0.5, 3])]
    [None, None, 'a', 'c', 'e', 'd']
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.values: dict[str, float] = {}

    def push(self, name: str, value: float) -> str | None:
        """Add a value; return the name that is dropped: the lowest or the new one; None if no name is dropped."""
        if self.topk < 0 or name in self.values or len(self.values) < self.topk:
            self.values[name] = value
            return None
        lowest = min(self.values, key=self.values.__getitem__, default=None)
        if lowest is None or not value >= self.values[lowest]:
            return name
        del self.values[lowest]
        self.values[name] = value
        return lowest


def _safe(name: str) -> str:
    """Return the name of a monitor without characters that some systems do not allow in folder names."""
    return re.sub(r'[<>:"/\\|?*]', "_", name)
