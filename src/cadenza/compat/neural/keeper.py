"""What ``CheckpointCallback`` does in both dialects: which files are written when, which are kept, and what is restored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from cadenza.compat.neural import checkpoints
from cadenza.compat.neural.arguments import frequency
from cadenza.compat.neural.checkpoints import TRAINER, Folder, Kind, Mark
from cadenza.compat.neural.logs import logging
from cadenza.engine import agreement

if TYPE_CHECKING:
    from cadenza.run import Run


class Keeper:
    """Writes and restores the files of one training.

    Args:
        folder: Where to write.
        load_from_folder: Where to restore from; None takes `folder`.
        step_freq: Steps between files; -1 for none.
        epoch_freq: Epochs between files; -1 for none. With both, steps win.
        checkpoints_to_keep: How many marks of this training are kept; 0 keeps all.
        force_load: Whether it is an error if there is nothing to restore.
        epoch_key: What the trainer's file calls the epoch.
        strict: Whether weights that do not fit are an error, or a warning.
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
            raise TypeError("folder must be a path; got None. nf.checkpoint_dir is one if the factory has a log_dir")
        frequency("step_freq", step_freq)
        frequency("epoch_freq", epoch_freq)
        if checkpoints_to_keep < 0:
            raise ValueError(f"checkpoints_to_keep must be at least 1, or 0 to keep all; got {checkpoints_to_keep!r}")
        if step_freq == -1 and epoch_freq == -1:
            logging.warning("No checkpoints will be saved: step_freq and epoch_freq are both -1.")
        elif step_freq > -1 and epoch_freq > -1:
            logging.warning("Both step_freq and epoch_freq were given; epoch_freq is left out.")
            epoch_freq = -1
        self.folder, self.source = Folder(folder), Folder(load_from_folder or folder)
        self.step_freq, self.epoch_freq, self.keep = step_freq, epoch_freq, checkpoints_to_keep
        self.force_load, self.epoch_key, self.strict = force_load, epoch_key, strict
        self._marks: list[Mark] = []

    # -- saving: asked for in a hook, done when all have heard the end of the step -------------------

    def save(self, run: Run, kind: Kind, number: int, step: int, epoch: int) -> None:
        """Have the files of a mark written; what they count are `step` and `epoch`."""
        mark = Mark(number, kind)
        act = partial(self._save, run, mark, {"step": step, self.epoch_key: epoch})
        if run.outcome is None:
            run.at_next_border(act)
        else:
            act()  # the training is over, and no border comes any more

    def save_step(self, run: Run, step: int, epoch: int) -> None:
        """Write the files of a step, if it is one of those at which to."""
        if self.step_freq > 0 and step > 0 and step % self.step_freq == 0:
            self.save(run, "STEP", step, step, epoch)

    def save_last(self, run: Run, step: int, epoch: int) -> None:
        """Write the files of the end."""
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
            for one in gone:
                self.folder.remove(one, checkpoints.modules_of(run))

    # -- restoring ------------------------------------------------------------------------------------

    def restore(self, run: Run) -> None:
        """Restore the newest files, as far as there are any.

        Raises:
            ValueError: With ``force_load``: there is nothing to restore; or a file cannot be read safely.
            RuntimeError: Weights do not fit, and `strict`.
        """
        self._marks = []
        # A mark that was cut short is put in order on the main process, while the others wait.
        if run.driver.world_size > 1:
            agreement.main_only(run.driver, lambda: self.source.whole(self._in_use(run)))
        if not self.source.path.is_dir():
            self._nothing(f"the folder {self.source.path} is not there")
            return
        names = self._in_use(run)
        whole = self.source.whole(names)
        marks = {name: whole or self._alone(name) for name in names}
        found = {name: mark for name, mark in marks.items() if mark is not None}
        if not names or len(found) < len(marks):
            missing = [name for name in names if name not in found] or ["any module"]
            self._nothing(f"{self.source.path} has no files that belong together for {', '.join(missing)}")
            return
        try:
            checkpoints.restore_modules(run, self.source, found)
        except RuntimeError as error:  # weights that do not fit
            if self.strict:
                raise
            logging.warning("Weights were not restored, and training starts with those it has: %s", error)
            return
        if whole is None:
            logging.warning(
                "%s has no trainer file that belongs to its modules; step and optimizers start anew", self.source.path
            )
            return
        checkpoints.restore_trainer(run, self.source, whole, self.epoch_key)
        logging.info("Restored checkpoint: %s/%s", self.source.path, whole.file(TRAINER))

    def _alone(self, name: str) -> Mark | None:
        """Return the newest mark of a module's file, where there are modules alone."""
        return None if self.source.marks(TRAINER) else max(self.source.marks(name), default=None)

    def _in_use(self, run: Run) -> list[str]:
        """Return the names of modules that must have a file: NeMo writes none of a module whose weights are not trained."""
        modules = checkpoints.modules_of(run)
        return [name for name, module in modules.items() if checkpoints.needed(module) or self.source.marks(name)]

    def _nothing(self, why: str) -> None:
        if self.force_load:
            raise ValueError(f"force_load=True, and nothing could be restored: {why}")
        logging.warning("Nothing was restored: %s", why)


class KeepsFiles:
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
        self._keeper = Keeper(
            folder,
            load_from_folder,
            step_freq,
            epoch_freq,
            checkpoints_to_keep,
            force_load,
            epoch_key=self._epoch_key,
            strict=self._strict,
        )
