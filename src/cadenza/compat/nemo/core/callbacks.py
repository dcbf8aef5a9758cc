"""``nemo.core.callbacks`` of NeMo 0.11: eight events, each with the ``state``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.compat.nemo.core.actions import State, TrainingState, state_of
from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.adapted import AdaptedRun, Entry, entries, labelled
from cadenza.compat.neural.arguments import frequency
from cadenza.compat.neural.checkpointing import CheckpointFiles
from cadenza.compat.neural.evaluator import EvaluatorCallback
from cadenza.compat.neural.events import EVENTS, listeners
from cadenza.compat.neural.logs import is_main_here, logging
from cadenza.compat.neural.loss_logger import SimpleLossLoggerCallback, WandbCallback
from cadenza.compat.neural.module_callbacks import ModuleSaverCallback, UnfreezeCallback, ValueSetterCallback
from cadenza.compat.neural.tracking import Tracker
from cadenza.hooks.moments import BaseCallback

if TYPE_CHECKING:
    from cadenza.hooks.listener import Listener
    from cadenza.run import Run

__all__ = [
    "ActionCallback",
    "CheckpointCallback",
    "EvaluatorCallback",
    "ModuleSaverCallback",
    "NeMoCallback",
    "SimpleLogger",
    "SimpleLossLoggerCallback",
    "TensorboardLogger",
    "TrainingState",
    "UnfreezeCallback",
    "ValueSetterCallback",
    "WandBLogger",
    "WandbCallback",
    "on_action_end",
    "on_action_start",
    "on_batch_end",
    "on_batch_start",
    "on_epoch_end",
    "on_epoch_start",
    "on_step_end",
    "on_step_start",
]


class NeMoCallback(BaseCallback):
    """Base class with NeMo's eight events; override those you need. It works in ``nf.train`` and in a native trainer."""

    def on_action_start(self, state: State) -> None:
        """Called before the first epoch."""

    def on_epoch_start(self, state: State) -> None:
        """Called before the first batch of an epoch."""

    def on_step_start(self, state: State) -> None:
        """Called before the first batch of a step."""

    def on_batch_start(self, state: State) -> None:
        """Called before the forward pass; no tensor is computed yet."""

    def on_batch_end(self, state: State) -> None:
        """Called after the backward pass and before the update; the gradients of the batch are complete."""

    def on_step_end(self, state: State) -> None:
        """Called after the update, with the tensors of the step's last batch."""

    def on_epoch_end(self, state: State) -> None:
        """Called after the last step of an epoch."""

    def on_action_end(self, state: State) -> None:
        """Called at the end of the training, unless an error ended it."""

    def listeners(self) -> list[Listener]:
        overridden = [
            name for name in EVENTS if getattr(getattr(self, name), "__func__", None) is not getattr(NeMoCallback, name)
        ]
        return list(listeners({name: partial(self._call, name) for name in overridden}))

    def _call(self, name: str, run: Run, adapted: AdaptedRun, event: str) -> None:
        getattr(self, name)(state_of(adapted, event))


Function = Callable[[State], object]
Decorator = Callable[[Function], NeMoCallback]


class _Decorated(NeMoCallback):
    """A function at one event, created by a decorator."""

    def __init__(self, event: str, function: Function) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self._event, self._function = event, function

    def listeners(self) -> list[Listener]:
        return list(listeners({self._event: lambda run, adapted, event: self._function(state_of(adapted, event))}))


def _decorator(event: str) -> Decorator:
    def decorate(function: Function) -> NeMoCallback:
        if isinstance(function, BaseCallback) or not callable(function):
            raise TypeError(f"@{event} must decorate a function of the state; got {function!r}. Do not stack decorators.")
        return _Decorated(event, function)

    decorate.__name__, decorate.__doc__ = (
        event,
        f"Return a callback that calls a function at {event} with the state.",
    )
    return decorate


on_action_start: Decorator = _decorator("on_action_start")
on_epoch_start: Decorator = _decorator("on_epoch_start")
on_step_start: Decorator = _decorator("on_step_start")
on_batch_start: Decorator = _decorator("on_batch_start")
on_batch_end: Decorator = _decorator("on_batch_end")
on_step_end: Decorator = _decorator("on_step_end")
on_epoch_end: Decorator = _decorator("on_epoch_end")
on_action_end: Decorator = _decorator("on_action_end")


class SimpleLogger(NeMoCallback):
    """Print tensors every `step_freq` steps, from step 0 on.

    Args:
        step_freq: The number of steps between two logs; -1 for never.
        tensors_to_log: NmTensors, their unique names, their names from ``rename``, or ``"loss"``.
    """

    shows_progress = True

    def __init__(self, step_freq: int = 100, tensors_to_log: Entry | Sequence[Entry] = ("loss",)) -> None:
        self.step_freq: int = frequency("step_freq", step_freq)
        self.tensors_to_log: list[Entry] = entries(tensors_to_log)

    def on_step_end(self, state: State) -> None:
        if _due(state, self.step_freq):
            for name, value in _values(state, self.tensors_to_log):
                logging.info("%s: %s", name, value.detach().cpu().numpy() if isinstance(value, Tensor) else value)


class TensorboardLogger(NeMoCallback):
    """Write tensors, the learning rate and the epoch to TensorBoard, on the main process.

    Args:
        tb_writer: A SummaryWriter. It stays open.
        step_freq: The number of steps between two logs; -1 for never.
        tensors_to_log: NmTensors, their unique names, their names from ``rename``, or ``"loss"``.
        custom_tb_log_func: Called with the list of values, the writer and the step instead of writing scalars; for example,
            to write images or audio.
        log_epoch: Write ``misc/epoch`` and ``misc/epoch_time`` at the end of each epoch.
        log_lr: Write ``param/lr``.
    """

    def __init__(
        self,
        tb_writer: Any,
        step_freq: int = 100,
        tensors_to_log: Entry | Sequence[Entry] = ("loss",),
        custom_tb_log_func: Callable[[list[Any], Any, int], object] | None = None,
        log_epoch: bool = True,
        log_lr: bool = True,
    ) -> None:
        if not hasattr(tb_writer, "add_scalar") and is_main_here():  # a factory has a writer on the main process only
            raise TypeError(
                f"tb_writer must be a SummaryWriter, such as nf.tb_writer of a factory with create_tb_writer=True; got "
                f"{tb_writer!r}"
            )
        self.tb_writer: Any = tb_writer
        self.step_freq: int = frequency("step_freq", step_freq)
        self.tensors_to_log: list[Entry] = entries(tensors_to_log)
        self.custom_tb_log_func: Callable[[list[Any], Any, int], object] | None = custom_tb_log_func
        self.log_epoch: bool = log_epoch
        self.log_lr: bool = log_lr
        self._epoch_began = 0.0

    def on_epoch_start(self, state: State) -> None:
        self._epoch_began = time.time()

    def on_step_end(self, state: State) -> None:
        if not _due(state, self.step_freq) or state["global_rank"] not in (None, 0):
            return
        values = _values(state, self.tensors_to_log)
        if self.custom_tb_log_func is not None:
            self.custom_tb_log_func([value for _, value in values], self.tb_writer, state["step"])
        else:
            for name, value in values:
                self.tb_writer.add_scalar(name, value, state["step"])
        if self.log_lr:
            self.tb_writer.add_scalar("param/lr", _rate(state), state["step"])

    def on_epoch_end(self, state: State) -> None:
        if self.log_epoch and state["global_rank"] in (None, 0):
            self.tb_writer.add_scalar("misc/epoch", state["epoch"], state["step"])
            self.tb_writer.add_scalar("misc/epoch_time", time.time() - self._epoch_began, state["step"])

    def on_action_end(self, state: State) -> None:
        if state["global_rank"] in (None, 0) and hasattr(self.tb_writer, "flush"):
            self.tb_writer.flush()  # the script may read the file, or end, right after the training


class WandBLogger(NeMoCallback):
    """Send tensors, the learning rate and the epoch to Weights & Biases, on the main process.

    Args:
        step_freq: The number of steps between two logs; -1 for never.
        tensors_to_log: NmTensors, their unique names, their names from ``rename``, or ``"loss"``.
        wandb_name: The name of the wandb run.
        wandb_project: The wandb project.
        args: Hyper-parameters to record, unless a wandb run is already active.
        log_epoch: Send ``epoch`` and ``epoch_time`` at the end of each epoch.
        log_lr: Send ``LR``.
    """

    def __init__(
        self,
        step_freq: int = 100,
        tensors_to_log: Entry | Sequence[Entry] = ("loss",),
        wandb_name: str | None = None,
        wandb_project: str | None = None,
        args: Any = None,
        log_epoch: bool = True,
        log_lr: bool = True,
    ) -> None:
        self.step_freq: int = frequency("step_freq", step_freq)
        self.tensors_to_log: list[Entry] = entries(tensors_to_log)
        self.wandb_name: str | None = wandb_name
        self.wandb_project: str | None = wandb_project
        self.args: Any = args
        self.log_epoch: bool = log_epoch
        self.log_lr: bool = log_lr
        self._tracker = Tracker()
        self._epoch_began = 0.0

    def on_action_start(self, state: State) -> None:
        if state["global_rank"] in (None, 0):
            self._tracker.start(self.wandb_name, self.wandb_project, self.args)

    def on_epoch_start(self, state: State) -> None:
        self._epoch_began = time.time()

    def on_step_end(self, state: State) -> None:
        if self._tracker.started and _due(state, self.step_freq):
            rate = {"LR": _rate(state)} if self.log_lr else {}
            self._tracker.send({**dict(_values(state, self.tensors_to_log)), **rate}, state["step"])

    def on_epoch_end(self, state: State) -> None:
        if self._tracker.started and self.log_epoch:
            self._tracker.send({"epoch": state["epoch"], "epoch_time": time.time() - self._epoch_began}, state["step"])


class CheckpointCallback(CheckpointFiles, NeMoCallback):
    """Write NeMo 0.11's checkpoint files, and restore the newest at the start; for the arguments see `CheckpointFiles`."""

    def on_action_start(self, state: State) -> None:
        self._files.restore(state.run)

    def on_step_end(self, state: State) -> None:
        self._files.save_step(state.run, state["step"], state["epoch"])

    def on_epoch_end(self, state: State) -> None:
        epoch, every = state["epoch"], self._files.epoch_freq
        if every > 0 and epoch > 0 and epoch % every == 0:
            self._files.save(state.run, "EPOCH", epoch, state["step"], epoch)

    def on_action_end(self, state: State) -> None:
        self._files.save_last(state.run, state["step"], state["epoch"])


def _due(state: State, step_freq: int) -> bool:
    return step_freq > 0 and state["step"] % step_freq == 0


def _values(state: State, wanted: Sequence[Entry]) -> list[tuple[str, Any]]:
    """Return tensors with their names."""
    return [(name, state["tensors"].get_tensor(entry)) for name, entry in labelled(wanted)]


def _rate(state: State) -> float:
    return float(state["optimizers"][0].param_groups[0]["lr"])
