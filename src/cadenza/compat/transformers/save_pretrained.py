"""Write a model in the format of ``from_pretrained`` as part of each checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.checkpoint.store.manifest import is_other
from cadenza.checkpoint.writer import CheckpointWriter
from cadenza.drivers.sharding import whole
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.optim.held_weights import holders_in, no_such_weights
from cadenza.status.decisions import decide
from cadenza.status.encoding import host_copy

if TYPE_CHECKING:
    from cadenza.run import Run


class SavePretrained(Callback):
    """Write the model with its ``save_pretrained`` as part of each checkpoint, so that ``from_pretrained`` reads it.

    A checkpoint then has a folder ``pretrained`` with the weights, the configuration, the generation configuration, and the
    tokenizer. ``AutoModel.from_pretrained("runs/a/checkpoints/last/pretrained")`` reads the newest, and ``best`` instead of
    ``last`` the best. The folder is committed, verified and deleted with its checkpoint. For a PEFT model it holds only the
    adapter.

    The main process writes the files before the training continues. With FSDP, the weights are gathered. The list of
    callbacks needs a `Checkpoint`.

    Args:
        processing_class: A tokenizer or processor with a ``save_pretrained``, which is written to the same folder.
        weights: The name of averaged weights, such as ``"ema"``, to write instead of the weights of the model.
        folder: The name of the folder in the checkpoint.
        **options: Passed to the ``save_pretrained`` of the model, such as ``max_shard_size="2GB"``.

    Raises:
        ValueError: `folder` is not the name of a folder. At the start of a run: no callback writes checkpoints, or none holds
            `weights`.
        TypeError: At the start of a run: the model has no ``save_pretrained``.
    """

    def __init__(
        self, processing_class: Any = None, *, weights: str | None = None, folder: str = "pretrained", **options: Any
    ) -> None:
        if not is_other(f"{folder}/file"):
            raise ValueError(f"folder must be the name of a folder in a checkpoint, such as 'pretrained'; got {folder!r}")
        self.processing_class: Any = processing_class
        self.weights: str | None = weights
        self.folder: str = folder
        self.options: dict[str, Any] = options

    def on_setup(self, run: Run) -> None:
        if not callable(getattr(run.model, "save_pretrained", None)):
            raise TypeError(
                f"SavePretrained needs a model with a save_pretrained, as those of transformers and peft; got a "
                f"{type(run.model).__name__}. Remove it, and use load_weights or export_weights."
            )

    def on_fit_start(self, run: Run) -> None:
        if not session_of(run).savers:
            raise ValueError("SavePretrained adds files to checkpoints, but no callback writes any. Add Checkpoint(...).")
        held = holders_in(hooks_of(run))
        if self.weights is not None and self.weights not in held:
            raise ValueError(no_such_weights(self.weights, held, f"SavePretrained(weights={self.weights!r})"))

    def on_save(self, run: Run, checkpoint: Any) -> None:
        with self._weights_in_place(run):
            gathered = _whole_weights(run) if run.driver.shards else {}
            if run.is_main:
                self._save(run, checkpoint, gathered)

    def _save(self, run: Run, checkpoint: Any, gathered: dict[str, Any]) -> None:
        folder = _new_folder(run)
        try:
            model: Any = run.model
            model.save_pretrained(str(folder), **gathered, **self.options)  # a string, as passed by transformers' trainer
            if self.processing_class is not None:
                self.processing_class.save_pretrained(str(folder))
        except OSError as error:  # like a failed checkpoint write: the training continues
            step = run.progress.step
            decide(run, "not saved", f"{self.folder} of step {step}: {error!r}", data={"step": step, "error": repr(error)})
            run.warn(f"the checkpoint of step {step} has no {self.folder}, which could not be written: {error!r}")
            shutil.rmtree(folder, ignore_errors=True)
            return
        checkpoint.files.take_folder(self.folder, folder)

    def _weights_in_place(self, run: Run) -> AbstractContextManager[None]:
        return nullcontext() if self.weights is None else holders_in(hooks_of(run))[self.weights].lend(run)


def _whole_weights(run: Run) -> dict[str, Any]:
    """Return the weights of a sharded model, on the main process. Every rank must call this."""
    copies = ((name, whole(tensor)) for name, tensor in run.model.state_dict().items() if isinstance(tensor, Tensor))
    return {"state_dict": {name: host_copy(tensor) for name, tensor in copies if run.is_main}}


def _new_folder(run: Run) -> Path:
    """Return a new folder on the disk of the checkpoints. If the process is killed, the next process deletes it."""
    for saver in session_of(run).savers:
        if isinstance(saver, CheckpointWriter) and saver.store.files.atomic:
            name = saver.store.hidden("tmp", saver.store.next_name(run.progress.step).name)
            saver.store.files.make(name)
            return saver.store.files.root / name
    return Path(tempfile.mkdtemp(prefix="cadenza-"))
