"""The attributes and methods of ``trainer`` that callbacks may use: of the adapter's trainer, and of a view on a native run."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.store import Store
from cadenza.compat.accelerated.accelerate_folder import AccelerateState, is_accelerate_folder, read, torch_file
from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.events import KEY, EvalEpoch, EvaluationStopped, StopTrainingError
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.schedulers.wsd_scheduler import WSDLrScheduler
from cadenza.compat.accelerated.tracking import (
    LossTracker,
    RunHistory,
    as_python_number,
    loss_of_rank,
    plain_history,
    restore_history,
)
from cadenza.compat.accelerated.utils import remove_padding
from cadenza.drivers.consensus import agreed
from cadenza.drivers.sharding import refuse_shards
from cadenza.engine.evaluation import evaluate
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointError, CheckpointFormatError, StateError
from cadenza.loading.resumable_loader import num_batches
from cadenza.optim.optimizers import load_state

if TYPE_CHECKING:
    from cadenza.drivers import Driver
    from cadenza.run import Run

STATE = "accelerated"
"""The key of this adapter's state in a checkpoint."""


class TrainerApi:
    """The part of a trainer that callbacks may use."""

    model: nn.Module
    """During a run the model as the driver runs it; see `get_model`."""
    loss_func: Any
    optimizer: Optimizer
    scheduler: Any
    run_history: RunHistory
    run_config: TrainerRunConfig | None
    callback_handler: CallbackHandler
    native_run: Run | None
    """The current native run, or the last one; None before the first."""
    _accelerator: Accelerator
    _loss_tracker: LossTracker
    _train_dataloader: Iterable[Any] | None
    _eval_dataloader: Iterable[Any] | None
    _eval_compute: Callable[[nn.Module, Any], Any] | None = None

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._accelerator.device

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once on each machine."""
        run = self.native_run
        if run is not None and run.is_main and not kwargs:
            run.print(" ".join(map(str, args)))  # also writes to console.log
        elif self._accelerator.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  # this is print

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Return the tensors of all processes, concatenated along the first dimension. Every process must call this.

        Args:
            tensor: A tensor, or a list, tuple or mapping of tensors. The first dimension may differ between processes.
            padding_value: Remove the rows of the result that consist of this value, such as a row that stands for no
                predictions. Nothing is padded.

        Raises:
            TypeError: There is a `padding_value`, and `tensor` is no tensor.
        """
        if padding_value is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                f"gather with a padding_value needs a tensor; got a {type(tensor).__name__}. Gather each tensor, or remove "
                "padding_value"
            )
        gathered = self._accelerator.gather(tensor)
        return gathered if padding_value is None else remove_padding(gathered, padding_value)

    def _batches_of_each(self, loader: Any) -> int | None:
        """Return the number of batches of the training loader per process and epoch; None if it is unknown."""
        return None if loader is None else num_batches(loader, self._accelerator.driver.data_shard())

    def get_model(self, keep_torch_compile: bool = True) -> nn.Module:
        """Return the user's own module. With ``keep_torch_compile=False``, return the module inside a compiled one."""
        return self._accelerator.unwrap_model(self.model, keep_torch_compile=keep_torch_compile)

    def _update_loss_tracker(self, batch_loss: float | Tensor, batch_size: int) -> None:
        """Add the loss of a batch, of any shape, to the mean over the epoch. Does not wait for the device."""
        self._loss_tracker.update(batch_loss.detach().mean() if isinstance(batch_loss, Tensor) else batch_loss, batch_size)

    def _add_epoch_loss_to_run_history(self, metric_name: str) -> None:
        """Record the mean loss over the samples of all processes, if there were any. Every process must call this."""
        tracker = self._loss_tracker
        sums = torch.tensor([tracker.total_loss, tracker.running_count], dtype=torch.float64)  # on the host
        total, count = (self._accelerator.driver.reduce(sums, "sum") if self._accelerator.num_processes > 1 else sums).tolist()
        if count:
            self.run_history.update_metric(metric_name, total / count)

    def _run_eval_epoch(self, valid_dl: Iterable[Any], is_training: bool = True, is_intermediate: bool = False) -> None:
        """Evaluate on a loader, with the events of an evaluation epoch. The loss is added to the run history.

        Module modes and RNG states are restored afterwards. Every process must call this.

        Raises:
            RuntimeError: No run is in progress.
            StopTrainingError: The training was stopped in it. The trainer expects it.
        """
        if (run := self.native_run) is None:
            raise RuntimeError(
                "_run_eval_epoch needs a run in progress; got a trainer without one. Call it in a callback or a hook"
            )
        intermediate, training = ("intermediate_eval", "intermediate_eval_loss"), ("eval", "eval_loss_epoch")
        kind, metric = intermediate if is_intermediate else training if is_training else ("evaluation", "evaluation_loss")
        name = self.run_history.metric_name_prefix + kind
        known = run.evaluations.get(name)
        if not isinstance(known, EvalEpoch) or known.loader is not valid_dl:
            native = next((evaluation for evaluation in run.evaluations.values() if evaluation.loader is valid_dl), None)
            metrics, compute = (None, None) if native is None else (native.given_metrics, native.compute)
            known = EvalEpoch(valid_dl, name=name, compute=self._eval_compute or compute, metric=metric, metrics=metrics)
        tracker, session = self._loss_tracker, session_of(run)
        if is_intermediate or session.cursor.in_epoch or self._eval_compute is None:
            self._loss_tracker = LossTracker()  # the other one holds the loss of the epoch so far
        try:
            evaluate(session, known)
        except EvaluationStopped:
            pass  # the training is marked as stopped
        finally:
            self._loss_tracker = tracker
            metric = self.run_history.metric_name_prefix + metric
            if is_intermediate and metric in self.run_history.get_metric_names():
                self.run_history.delete_metric(metric)
        adapted = session.adapters.get(KEY)
        if adapted is not None and adapted.facade and adapted.stopped:
            raise StopTrainingError(adapted.reason)  # the rest of an override or a callback does not run

    # -- checkpoints: a file for use elsewhere, a folder to resume from -----------------------------------

    def save_checkpoint(
        self,
        save_path: str | os.PathLike[str],
        checkpoint_kwargs: Mapping[str, Any] | None = None,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        save_per_node: bool = True,
    ) -> None:
        """Write one file with ``model_state_dict``, ``optimizer_state_dict``, ``scheduler_state_dict`` and `checkpoint_kwargs`.

        The file appears complete or not at all. Every process must call this.

        Args:
            save_path: The path of the file.
            checkpoint_kwargs: Further entries: numbers, strings, tensors, and lists and dicts of them.
            save_optimizer: Whether to save the optimizer's state.
            save_scheduler: Whether to save the scheduler's state, if there is a scheduler.
            save_per_node: Write on the first process of each machine; False writes only on rank 0.
        """
        self._accelerator.wait_for_everyone()
        content: dict[str, Any] = {"model_state_dict": self.get_model(keep_torch_compile=False).state_dict()}
        if save_optimizer:
            content["optimizer_state_dict"] = self.optimizer.state_dict()
        if save_scheduler and hasattr(self.scheduler, "state_dict"):
            content["scheduler_state_dict"] = self.scheduler.state_dict()
        elif save_scheduler and self.scheduler is not None:
            self.print(f"{type(self.scheduler).__name__} has no state_dict, so its state is not saved")
        refuse_shards(content, "save_checkpoint")
        content |= {name: as_python_number(value) for name, value in (checkpoint_kwargs or {}).items()}
        accelerator = self._accelerator
        if accelerator.is_local_main_process if save_per_node else accelerator.is_main_process:
            path = Path(save_path)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            torch.save(content, temporary)
            temporary.replace(path)
        accelerator.wait_for_everyone()  # so that every process can load it next

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Restore a file of `save_checkpoint`; return its content. No code in it is executed.

        Raises:
            ValueError: It holds the state of an optimizer or scheduler that the trainer does not have.
            CheckpointError: It is damaged, or can only be read by executing code in it.
        """
        content: dict[str, Any] = torch_file(Path(checkpoint_path))
        if not isinstance(content, dict) or "model_state_dict" not in content:
            got = sorted(map(str, content))[:5] if isinstance(content, dict) else type(content).__name__
            raise CheckpointFormatError(
                f"{os.fspath(checkpoint_path)!r} is not a file of save_checkpoint: expected the key 'model_state_dict'; got "
                f"{got}. Load other weights with trainer.get_model().load_state_dict(...)"
            )
        parts = (("optimizer", self.optimizer, load_optimizer), ("scheduler", self.scheduler, load_scheduler))
        for name, part, wanted in parts:
            if wanted and f"{name}_state_dict" in content and part is None:
                raise ValueError(
                    f"{os.fspath(checkpoint_path)!r} holds the state of a {name}, but the trainer has none. Load it during a "
                    f"run that has one, or with load_{name}=False."
                )
        self.get_model(keep_torch_compile=False).load_state_dict(content["model_state_dict"])
        for name, part, wanted in parts:
            if wanted and f"{name}_state_dict" in content:
                state = content[f"{name}_state_dict"]
                if isinstance(part, Optimizer):
                    load_state(part, state)
                else:
                    part.load_state_dict(state)
        return content

    def save_training_state(
        self, output_dir: str | os.PathLike[str], checkpoint_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Write a folder from which `Trainer.train(resume_from=...)` continues with bit-identical results.

        Inside a step, or at the end of an epoch, the write waits for the next step boundary. Every process must call this.

        Raises:
            RuntimeError: No training is in progress.
        """
        run = self.native_run
        if run is None or not hasattr(session_of(run).cursor, "source"):
            raise RuntimeError(
                "save_training_state needs a training in progress; got a trainer without one. Use save_checkpoint"
            )
        write = partial(_write_state, run, Path(output_dir), dict(checkpoint_kwargs or {}))
        if session_of(run).cursor.at_boundary:
            write()
        else:
            run.after_step(write)

    def load_training_state(self, input_dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore model, optimizer, scheduler and run history; return ``current_epoch`` and the ``checkpoint_kwargs``.

        A folder that pytorch-accelerated wrote is restored too, as far as it goes: it holds no run history. To resume the
        training, pass the folder to `Trainer.train(resume_from=...)` instead.

        Raises:
            FileNotFoundError: The folder holds no training state.
            CheckpointError: The training state is damaged, or cannot be read without executing code in it.
        """
        if isinstance(state_at := training_state(input_dir, self._accelerator.driver), AccelerateState):
            state_at.load(self.get_model(keep_torch_compile=False), self.optimizer, self.scheduler)
            return dict(state_at.metadata)
        store = Store(input_dir)
        loaded = store.read(store.named(Path(state_at).name))  # type: ignore[arg-type]  # training_state found it
        state: dict[str, Any] = loaded.state
        self.get_model().load_state_dict({**loaded.model, **state["model_extra"]})
        load_state(self.optimizer, state["optimizers"][0])
        restore_state(self, state["extra"][STATE], resume=False)
        return {"current_epoch": self.run_history.current_epoch, **state["extra"]["checkpoint_kwargs"]}


def training_state(folder: str | os.PathLike[str], driver: Driver) -> str | AccelerateState:
    """Return the path of the newest training state in a folder of `TrainerApi.save_training_state`.

    If the folder is pytorch-accelerated's, return its content, with the RNG state of this rank. Every rank must call this.

    Raises:
        FileNotFoundError: The folder holds no training state.
        CheckpointError: The folder is pytorch-accelerated's, and a file is damaged or cannot be read without executing code; or
            another rank cannot read its files.
    """
    found: list[str | AccelerateState] = []
    agreed(
        driver.gather,
        lambda: found.append(_training_state(folder, driver.rank)),
        lambda rank, problem: CheckpointError(f"rank {rank} cannot read {os.fspath(folder)!r}: {problem}"),
    )
    return found[0]


def _training_state(folder: str | os.PathLike[str], rank: int) -> str | AccelerateState:
    if saved := Store(folder).saved():
        return f"{os.fspath(folder)}/{saved[-1].name}"
    if is_accelerate_folder(folder):
        return read(folder, rank)
    raise FileNotFoundError(f"{os.fspath(folder)!r} holds no training state. Expected a folder of save_training_state.")


def state_of(trainer: TrainerApi) -> dict[str, Any]:
    """Return the state of a trainer for a checkpoint, besides the state of the native run.

    Raises:
        StateError: The scheduler has no state.
    """
    if trainer.scheduler is not None and not hasattr(trainer.scheduler, "state_dict"):
        raise StateError(
            f"{type(trainer.scheduler).__name__} has no state_dict, so a training cannot resume with it. Add state_dict and "
            "load_state_dict to it."
        )
    scheduler = {} if trainer.scheduler is None else {"scheduler": trainer.scheduler.state_dict()}
    return {"history": plain_history(trainer.run_history), "loss": trainer._loss_tracker.state_dict(), **scheduler}


def restore_state(trainer: TrainerApi, state: Mapping[str, Any], *, resume: bool) -> None:
    """Restore the state that `state_of` returned; `resume`: to continue the same training."""
    restore_history(trainer.run_history, state["history"])
    driver = trainer._accelerator.driver
    trainer._loss_tracker.load_state_dict(loss_of_rank(state.get("losses") or [state["loss"]], driver.rank, driver.world_size))
    if trainer.scheduler is not None and "scheduler" in state:
        now = trainer.scheduler.state_dict()
        # A checkpoint holds plain dicts only, and MultiStepLR counts its milestones with a Counter.
        saved = {key: Counter(v) if isinstance(now.get(key), Counter) else v for key, v in state["scheduler"].items()}
        if resume and isinstance(trainer.scheduler, WSDLrScheduler):
            trainer.scheduler.resume(saved)
        else:
            trainer.scheduler.load_state_dict(saved)


def _write_state(run: Run, folder: Path, own: dict[str, Any]) -> None:
    taken = snapshot.take(session_of(run), "a training state")
    taken.extra["checkpoint_kwargs"] = {name: as_python_number(value) for name, value in own.items()}
    store = Store(folder)
    earlier = store.saved()
    store.write_together(taken.content(), run.driver.meeting) if run.driver.world_size > 1 else store.write(taken.content())
    if run.is_main:
        for checkpoint in earlier:  # a folder holds one state
            shutil.rmtree(folder / checkpoint.name)
    run.driver.barrier()  # so that every process can read it next
