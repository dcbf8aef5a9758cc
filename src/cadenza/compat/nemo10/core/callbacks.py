"""``nemo.core.callbacks`` of NeMo 0.10: six events without arguments."""

from __future__ import annotations

from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.evaluator import EvaluatorCallback
from cadenza.compat.neural.keeper import Keeper
from cadenza.compat.neural.loss_logger import SimpleLossLoggerCallback, WandbCallback

__all__ = ["ActionCallback", "CheckpointCallback", "EvaluatorCallback", "SimpleLossLoggerCallback", "WandbCallback"]


class CheckpointCallback(ActionCallback):
    """Write ``<Module>-STEP-<n>.pt`` and ``trainer-STEP-<n>.pt``, and restore the newest before a training begins.

    Args:
        folder: Where to write.
        load_from_folder: Where to restore from; None takes `folder`.
        step_freq: Steps between files; -1 for none.
        epoch_freq: Epochs between files; -1 for none. With both, steps win.
        checkpoints_to_keep: How many of this training are kept; 0 keeps all.
        force_load: Whether it is an error if there is nothing to restore.

    Raises:
        ValueError: When the training begins, with `force_load`: there is nothing to restore.
    """

    def __init__(
        self,
        folder: str,
        load_from_folder: str | None = None,
        step_freq: int = -1,
        epoch_freq: int = -1,
        checkpoints_to_keep: int = 4,
        force_load: bool = False,
    ) -> None:
        super().__init__()
        self._keeper = Keeper(
            folder,
            load_from_folder,
            step_freq,
            epoch_freq,
            checkpoints_to_keep,
            force_load,
            epoch_key="epoch_num",
            strict=False,
        )

    def on_action_start(self) -> None:
        self._keeper.restore(self.action.run)

    def on_iteration_end(self) -> None:
        step, every = self.step, self._keeper.step_freq
        if every > 0 and step > 0 and step % every == 0:
            self._keeper.save(self.action.run, "STEP", step, step, self.epoch_num)

    def on_epoch_end(self) -> None:
        epoch, every = self.epoch_num, self._keeper.epoch_freq
        if every > 0 and (epoch + 1) % every == 0:
            self._keeper.save(self.action.run, "EPOCH", epoch, self.step, epoch)

    def on_action_end(self) -> None:
        self._keeper.save_last(self.action.run, self.step, self.epoch_num)
