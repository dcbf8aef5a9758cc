"""What hooks get as ``trainer``: counters and parts of a training under fastNLP's names."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.compat.fastnlp.core.controllers import saving
from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.compat.fastnlp.core.controllers.utils.state import TrainerState
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.compat.fastnlp.core.utils.utils import Watched, loss_in

if TYPE_CHECKING:
    from cadenza.run import Run


class _Fired:
    """A method that calls an event of its own name on all callbacks; for a ``batch_step_fn`` or a loop of your own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._event = name

    def __get__(self, trainer: TrainerView, owner: type | None = None) -> Callable[..., None]:
        return partial(trainer.callback_manager.fire, self._event, trainer)


class _Counter:
    """A counter of ``trainer_state`` that can be read and set on the trainer itself."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: TrainerView, owner: type | None = None) -> Any:
        return getattr(trainer.trainer_state, self._name)

    def __set__(self, trainer: TrainerView, value: Any) -> None:
        setattr(trainer.trainer_state, self._name, value)


class TrainerView(ABC):
    """A training as callbacks see it, whoever runs it."""

    trainer_state: TrainerState
    """How far it has come."""
    state: dict[str, Any]
    """The user's own values: saved in checkpoints and restored."""
    model: nn.Module
    """The user's own module."""
    optimizers: Any
    """As the trainer was given them: one, or a list."""
    driver: Driver
    callback_manager: CallbackManager
    train_dataloader: Any
    """As the trainer was given it."""
    dataloader: Any
    """What is read, such as the first batches of it only."""
    evaluate_dataloaders: Any = None
    evaluator: Evaluator | None = None
    metrics: Mapping[str, Any] | None = None
    monitor: Watched | None = None
    larger_better: bool = True
    marker: str | None = None
    accumulation_steps: int = 1
    judging: Mapping[str, Any]
    """How an `Evaluator` in this training does its work, whatever it evaluates."""
    evaluates: bool = False
    """Whether something is evaluated in this training."""
    kwargs: dict[str, Any]
    live: Run | None = None
    """The native run under way, or the last one."""

    n_epochs = _Counter()
    cur_epoch_idx = _Counter()
    global_forward_batches = _Counter()
    batch_idx_in_epoch = _Counter()
    num_batches_per_epoch = _Counter()
    n_batches = _Counter()

    on_after_trainer_initialized = _Fired()
    on_sanity_check_begin = _Fired()
    on_sanity_check_end = _Fired()
    on_train_begin = _Fired()
    on_train_end = _Fired()
    on_train_epoch_begin = _Fired()
    on_train_epoch_end = _Fired()
    on_fetch_data_begin = _Fired()
    on_fetch_data_end = _Fired()
    on_train_batch_begin = _Fired()
    on_train_batch_end = _Fired()
    on_exception = _Fired()
    on_save_model = _Fired()
    on_load_model = _Fired()
    on_before_backward = _Fired()
    on_after_backward = _Fired()
    on_before_optimizers_step = _Fired()
    on_after_optimizers_step = _Fired()
    on_before_zero_grad = _Fired()
    on_after_zero_grad = _Fired()
    on_evaluate_begin = _Fired()
    on_evaluate_end = _Fired()

    def on_save_checkpoint(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint must hold of the callbacks, by their names."""
        return self.callback_manager.on_save_checkpoint(self)

    def on_load_checkpoint(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give the callbacks what was saved under their names."""
        self.callback_manager.on_load_checkpoint(self, states)

    @property
    def model_device(self) -> torch.device:
        """Where the model is."""
        return self.driver.model_device

    @property
    def data_device(self) -> torch.device:
        """Where batches are brought."""
        return self.driver.data_device

    def move_data_to_device(self, batch: Any) -> Any:
        """Return a batch with every tensor in it on the device."""
        return self.driver.move_data_to_device(batch)

    @staticmethod
    def extract_loss_from_outputs(outputs: Any) -> Any:
        """Return the loss in what a model returned; see `loss_in`."""
        return loss_in(outputs)

    # -- files -----------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        folder: str | PathLike[str],
        only_state_dict: bool = True,
        model_save_fn: Callable[[str], object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model, and all else that a training needs to go on, into a folder.

        That is fastNLP's ``fastnlp_checkpoint.pkl.tar``, which holds ``state`` and random streams as well.

        Args:
            folder: Is made.
            only_state_dict: As in `save_model`.
            model_save_fn: As in `save_model`.
            kwargs: Are not looked at.

        Raises:
            StateError: A value in ``state``, or in what a callback returned, cannot be saved.
        """
        states = self.on_save_checkpoint()
        if self.driver.is_global_zero():
            saving.write_model(self.model, folder, only_state_dict=only_state_dict, save_fn=model_save_fn)
            saving.write_checkpoint(folder, {"callback_states": states, **self._kept()})
        self.driver.barrier()

    def _kept(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the callbacks' states."""
        carried = self.carrying()
        size = getattr(self.train_dataloader, "batch_size", None)
        return {
            "trainer_state": self.trainer_state.state_dict(),
            "sampler_states": {"batch_size": size},
            "optimizers_state_dict": {f"optimizer{i}": one.state_dict() for i, one in enumerate(self.driver.optimizers)},
            "grad_scaler_state_dict": carried.scaler,
            "cadenza": {"state": dict(self.state), **vars(carried)},
        }

    @abstractmethod
    def carrying(self) -> Carried:
        """Return the values with which a training continues, besides fastNLP's own counters."""

    def save_model(
        self,
        folder: saving.Place,
        only_state_dict: bool = False,
        model_save_fn: Callable[[str], object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model into a folder, as ``fastnlp_model.pkl.tar``, or to a stream.

        Args:
            folder: The folder, which is made, or a stream such as ``io.BytesIO``.
            only_state_dict: Write the weights alone, and not the whole model.
            model_save_fn: Called with the folder instead.
            kwargs: Are not looked at.

        Raises:
            RuntimeError: `model_save_fn` with a stream.
        """
        self.callback_manager.fire("on_save_model", self)
        if self.driver.is_global_zero() or hasattr(folder, "write"):  # a stream is this process's own
            saving.write_model(self.model, folder, only_state_dict=only_state_dict, save_fn=model_save_fn)
        self.driver.barrier()

    def load_model(
        self,
        folder: saving.Place,
        only_state_dict: bool = True,
        model_load_fn: Callable[[str], object] | None = None,
        strict: bool = True,
        **kwargs: Any,
    ) -> None:
        """Give the model the weights that `save_model` wrote. The arguments are those of `save_model`, for reading.

        Whether a file holds a model or weights is seen from the file; with `only_state_dict` nothing in it is executed.

        Raises:
            FileNotFoundError: There is no such file.
            RuntimeError: `model_load_fn` with a stream; or the weights do not fit, and `strict`.
        """
        self.callback_manager.fire("on_load_model", self)
        saving.read_model(self.model, folder, only_state_dict=only_state_dict, load_fn=model_load_fn, strict=strict)


def epochs_for(n_batches: int, per_epoch: int | None) -> int | None:
    """Return how many epochs hold this many batches; the last may be shorter."""
    return math.ceil(n_batches / per_epoch) if per_epoch else None
