"""Load the best weights at the end."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cadenza.compat.fastnlp.core.callbacks.has_monitor_callback import HasMonitorCallback
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.utils.utils import Watched
from cadenza.compat.fastnlp.envs.utils import launch_time
from cadenza.drivers.rendezvous import launched
from cadenza.hooks.order import Phase, Relation

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver


class LoadBestModelCallback(HasMonitorCallback):
    """Save the model whenever a result improves, and load the best one at the end of the training.

    After an error or Ctrl-C nothing is loaded, and `save_folder` is kept.

    Args:
        monitor: The result; None: the trainer's monitor, see `HasMonitorCallback`.
        larger_better: Whether a larger value is better.
        only_state_dict: Save only the weights; False saves the whole model.
        save_folder: Keep the best model in ``<save_folder>/<launch time>/best_so_far``; None: in memory.
        model_save_fn: ``model_save_fn(folder)`` writes the model instead.
        model_load_fn: ``model_load_fn(folder)`` loads it instead.
        delete_after_train: Delete the folder after the model was loaded.

    Raises:
        AssertionError: Only one of the two functions is given, or both without `save_folder`.
        RuntimeError: Neither this nor the trainer has a monitor.
    """

    # The last native checkpoint holds the weights of the last batch, from which the run could continue.
    after: Relation = (Phase.SAVE,)

    def __init__(
        self,
        monitor: Watched | None = None,
        larger_better: bool = True,
        only_state_dict: bool = True,
        save_folder: str | os.PathLike[str] | None = None,
        model_save_fn: Callable[[str], object] | None = None,
        model_load_fn: Callable[[str], object] | None = None,
        delete_after_train: bool = True,
    ) -> None:
        super().__init__(monitor, larger_better, must_have_monitor=True)
        if (model_save_fn is None) != (model_load_fn is None):
            raise AssertionError("model_save_fn and model_load_fn belong together; got only one. Pass both or none.")
        if model_save_fn is not None and save_folder is None:
            raise AssertionError("model_save_fn needs save_folder; got None")
        self.only_state_dict: bool = only_state_dict
        self.delete_after_train: bool = delete_after_train
        self.model_save_fn: Callable[[str], object] | None = model_save_fn
        self.model_load_fn: Callable[[str], object] | None = model_load_fn
        self.real_save_folder: Path | None = None
        if save_folder is not None:
            self.real_save_folder = Path(save_folder).absolute() / launch_time() / "best_so_far"
            if not launched():  # with several processes, the launch time of the main process is used
                self.real_save_folder.mkdir(parents=True, exist_ok=True)
        self.buffer: io.BytesIO | None = None
        self.meta: dict[str, int] = {}
        """``epoch`` and ``batch`` of the best evaluation so far, in the trainer's counters."""
        self._broken = False

    def forget(self) -> None:
        super().forget()
        self.buffer, self.meta = None, {}

    def on_after_trainer_initialized(self, trainer: TrainerView, driver: Driver) -> None:
        super().on_after_trainer_initialized(trainer, driver)
        if self.real_save_folder is not None:
            self.real_save_folder = Path(driver.native.broadcast(str(self.real_save_folder)))
            if driver.is_global_zero():
                self.real_save_folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, trainer: TrainerView) -> None:
        self._broken = False

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        if not self.is_better_results(results):
            return
        self.meta = {"epoch": trainer.cur_epoch_idx, "batch": trainer.global_forward_batches}
        if self.real_save_folder is not None:
            trainer.save_model(str(self.real_save_folder), self.only_state_dict, self.model_save_fn)
        else:
            self.buffer = io.BytesIO()
            trainer.save_model(self.buffer, self.only_state_dict)

    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        self._broken = not isinstance(exception, EarlyStopException)

    def on_train_end(self, trainer: TrainerView) -> None:
        if self._broken or not self.meta:
            return
        self._say(
            f"the best model is loaded: {self.monitor_name!r} was {self.monitor_value} in epoch {self.meta['epoch']}, after "
            f"{self.meta['batch']} batches"
        )
        if self.real_save_folder is not None:
            trainer.load_model(str(self.real_save_folder), self.only_state_dict, self.model_load_fn)
            trainer.driver.barrier()  # until all processes have read it
            if self.delete_after_train and trainer.driver.is_global_zero():
                self._delete(self.real_save_folder)
        elif self.buffer is not None:
            self.buffer.seek(0)
            trainer.load_model(self.buffer, self.only_state_dict)

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any]:
        states: dict[str, Any] = {"monitor_value": self.monitor_value, "meta": dict(self.meta)}
        if self.real_save_folder is not None:
            states["folder"] = str(self.real_save_folder)
        elif self.buffer is not None:
            states["model"] = torch.frombuffer(bytearray(self.buffer.getvalue()), dtype=torch.uint8)
        return states

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        if not states:
            return
        if self.real_save_folder is not None and Path(states.get("folder", "")).is_dir() and "folder" in states:
            self.real_save_folder = Path(states["folder"])
        elif self.real_save_folder is None and "model" in states:
            self.buffer = io.BytesIO(states["model"].numpy().tobytes())
        elif states["meta"]:
            return  # the earlier best model is lost, so the next evaluation counts as the best
        self.monitor_value: Any = states["monitor_value"]
        self.meta = dict(states["meta"])

    def _say(self, text: str) -> None:
        if self._adapted is not None:
            self._adapted.run.print(text)

    @staticmethod
    def _delete(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.is_dir() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()
