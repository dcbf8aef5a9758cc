"""The implementation of ``CheckpointCallback`` in both versions: saving, retention and restoring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from cadenza.compat.neural import checkpoints
from cadenza.compat.neural.arguments import frequency
from cadenza.compat.neural.checkpoints import TRAINER, Folder, Kind, Mark
from cadenza.compat.neural.logs import logging
from cadenza.engine.start_checks import main_only

if TYPE_CHECKING:
    from torch import nn

    from cadenza.run import Run


class CheckpointWriter:
    """Writes and restores the files of one training.

    Args:
        folder: The folder to write to.
        load_from_folder: The folder to restore from; None takes `folder`.
        step_freq: The number of steps between two saves; -1 for never.
        epoch_freq: The number of epochs between two saves; -1 for never. `step_freq` takes precedence.
        checkpoints_to_keep: Keep the files of this many marks of this training; 0 keeps all.
        force_load: Whether a missing checkpoint is an error.
        epoch_key: The key of the epoch in the trainer's file.
        strict: Whether weights that do not fit are an error; False warns.
    """

    def __init__(
        self,
        folder: str,
        load_from_folder: str | None,
        step_freq: int,
        epoch_freq: int,
        checkpoints_to_keep: int,
        force_load: bool,
        *,
        epoch_key: str,
        strict: bool,
    ) -> None:
        if folder is None:
            raise TypeError("folder must be a path; got None. nf.checkpoint_dir is a path if the factory has a log_dir.")
        frequency("step_freq", step_freq)
        frequency("epoch_freq", epoch_freq)
        if checkpoints_to_keep < 0:
            raise ValueError(f"checkpoints_to_keep must be at least 1, or 0 to keep all; got {checkpoints_to_keep!r}")
        if step_freq == -1 and epoch_freq == -1:
            logging.warning("No checkpoints will be saved: step_freq and epoch_freq are both -1.")
        elif step_freq > -1 and epoch_freq > -1:
            logging.warning("Both step_freq and epoch_freq were given; epoch_freq is ignored.")
            epoch_freq = -1
        self.folder: Folder = Folder(folder)
        self.source: Folder = Folder(load_from_folder or folder)
        self.step_freq: int = step_freq
        self.epoch_freq: int = epoch_freq
        self.keep: int = checkpoints_to_keep
        self.force_load: bool = force_load
        self.epoch_key: str = epoch_key
        self.strict: bool = strict
        self._marks: list[Mark] = []

    # -- saving: requested in a hook, performed at the next step boundary --------------------

    def save(self, run: Run, kind: Kind, number: int, step: int, epoch: int) -> None:
        """Write the files of a mark at the next step boundary. They get `step` and `epoch`."""
        mark = Mark(number, kind)
        act = partial(self._save, run, mark, {"step": step, self.epoch_key: epoch})
        if run.outcome is None:
            run.after_step(act)
        else:
            act()  # after the end of the training there is no step boundary

    def save_step(self, run: Run, step: int, epoch: int) -> None:
        """Write the files of a step, if it is due."""
        if self.step_freq > 0 and step > 0 and step % self.step_freq == 0:
            self.save(run, "STEP", step, step, epoch)

    def save_last(self, run: Run, step: int, epoch: int) -> None:
        """Write the files of the end of the training."""
        if self.step_freq > 0:
            self.save(run, "STEP", step, step, epoch)
        elif self.epoch_freq > 0:
            self.save(run, "EPOCH", epoch, step, epoch)

    def _save(self, run: Run, mark: Mark, counted: Mapping[str, int]) -> None:
        checkpoints.save(run, self.folder, mark, counted, f"{mark.kind.lower()} {mark.number}")
        logging.info("Saved checkpoint: %s/%s", self.folder.path, mark.file(TRAINER))
        self._marks.append(mark)
        if self.keep > 0 and run.is_main:
            gone, self._marks = self._marks[: -self.keep], self._marks[-self.keep :]
            for checkpoint in gone:
                self.folder.remove(checkpoint, checkpoints.modules_of(run))

    # -- restoring ------------------------------------------------------------------------------------

    def restore(self, run: Run) -> None:
        """Restore the newest files, if there are any.

        Raises:
            ValueError: There is nothing to restore, and ``force_load``; or a file cannot be read safely.
            RuntimeError: Weights do not fit, and `strict`.
        """
        self._marks = []
        weights = {name: module for name, module in checkpoints.modules_of(run).items() if checkpoints.needed(module)}
        logging.info("Found %d modules with weights: %s", len(weights), ", ".join(sorted(weights)))
        logging.info("Total model parameters: %d", sum(map(_size, weights.values())))
        # The main process completes an interrupted mark, while the others wait.
        if run.driver.world_size > 1:
            main_only(run.driver, lambda: self.source.whole(self._in_use(run)))
        if not self.source.path.is_dir():
            self._nothing(f"the folder {self.source.path} does not exist")
            return
        names = self._in_use(run)
        whole = self.source.whole(names)
        marks = {name: whole or self._newest_without_trainer(name) for name in names}
        found = {name: mark for name, mark in marks.items() if mark is not None}
        if not names or len(found) < len(marks):
            missing = [name for name in names if name not in found] or ["any module"]
            self._nothing(f"{self.source.path} has no consistent files of {', '.join(missing)}")
            return
        try:
            checkpoints.restore_modules(run, self.source, found)
        except RuntimeError as error:  # weights that do not fit
            if self.strict:
                raise
            logging.warning("Weights were not restored; the training starts with the current ones: %s", error)
            return
        if whole is None:
            logging.warning(
                "%s has no trainer file that matches its modules; step and optimizers are not restored", self.source.path
            )
            return
        checkpoints.restore_trainer(run, self.source, whole, self.epoch_key)
        logging.info("Restored checkpoint: %s/%s", self.source.path, whole.file(TRAINER))

    def _newest_without_trainer(self, name: str) -> Mark | None:
        """Return the newest mark of a module's file, if the folder has no file of a trainer."""
        return None if self.source.marks(TRAINER) else max(self.source.marks(name), default=None)

    def _in_use(self, run: Run) -> list[str]:
        """Return the names of modules that must have a file: NeMo writes none for a module without trainable weights."""
        modules = checkpoints.modules_of(run)
        return [name for name, module in modules.items() if checkpoints.needed(module) or self.source.marks(name)]

    def _nothing(self, why: str) -> None:
        if self.force_load:
            raise ValueError(f"force_load=True needs a checkpoint, but nothing could be restored: {why}")
        logging.warning("Nothing was restored: %s", why)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


class CheckpointFiles:
    """Write ``<Module>-STEP-<n>.pt`` and ``trainer-STEP-<n>.pt``, and restore the newest at the start of a training.

    Args:
        folder: The folder to write to.
        load_from_folder: The folder to restore from; None takes `folder`.
        step_freq: The number of steps between two saves; -1 for never.
        epoch_freq: The number of epochs between two saves; -1 for never. `step_freq` takes precedence.
        checkpoints_to_keep: Keep this many checkpoints of this training; 0 keeps all.
        force_load: Whether a missing checkpoint is an error.

    Raises:
        ValueError: At the start of the training there is nothing to restore, and `force_load`.
    """

    _epoch_key, _strict = "epoch", True

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
        self._files = CheckpointWriter(
            folder,
            load_from_folder,
            step_freq,
            epoch_freq,
            checkpoints_to_keep,
            force_load,
            epoch_key=self._epoch_key,
            strict=self._strict,
        )
