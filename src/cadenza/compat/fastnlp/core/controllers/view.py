"""The ``trainer`` argument of hooks: counters and parts of a training with fastNLP's names."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cadenza.compat.fastnlp import saving
from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.compat.fastnlp.core.controllers.utils.state import TrainerState
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.compat.fastnlp.core.utils.utils import Watched, loss_in

if TYPE_CHECKING:
    from cadenza.run import Run


class _Fired:
    """A method that calls the event of its name on all callbacks; for a ``batch_step_fn`` or a custom loop."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._event = name

    def __get__(self, trainer: TrainerView, owner: type | None = None) -> Callable[..., None]:
        return partial(trainer.callback_manager.fire, self._event, trainer)


class _Counter:
    """A counter of ``trainer_state`` as an attribute of the trainer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: TrainerView, owner: type | None = None) -> Any:
        return getattr(trainer.trainer_state, self._name)

    def __set__(self, trainer: TrainerView, value: Any) -> None:
        setattr(trainer.trainer_state, self._name, value)


class TrainerView(ABC):
    """The interface of a training for callbacks, in fastNLP's trainer and in a native one."""

    trainer_state: TrainerState
    """The counters."""
    state: dict[str, Any]
    """User values, saved in checkpoints and restored."""
    model: nn.Module
    """The user's own module."""
    optimizers: Any
    """The argument of the trainer: an optimizer or a list."""
    driver: Driver
    callback_manager: CallbackManager
    train_dataloader: Any
    """The argument of the trainer."""
    dataloader: Any
    """The loader in use; it may have only the first batches of `train_dataloader`."""
    evaluate_dataloaders: Any = None
    evaluator: Evaluator | None = None
    metrics: Mapping[str, Any] | None = None
    monitor: Watched | None = None
    larger_better: bool = True
    marker: str | None = None
    accumulation_steps: int = 1
    evaluator_arguments: Mapping[str, Any]
    """Default arguments of an `Evaluator` in this training."""
    evaluates: bool = False
    """Whether this training has an evaluation."""
    kwargs: dict[str, Any]
    _driver_name: str = ""
    live: Run | None = None
    """The current native run, or the last one."""

    n_epochs: _Counter = _Counter()
    cur_epoch_idx: _Counter = _Counter()
    global_forward_batches: _Counter = _Counter()
    batch_idx_in_epoch: _Counter = _Counter()
    num_batches_per_epoch: _Counter = _Counter()
    n_batches: _Counter = _Counter()

    on_after_trainer_initialized: _Fired = _Fired()
    on_sanity_check_begin: _Fired = _Fired()
    on_sanity_check_end: _Fired = _Fired()
    on_train_begin: _Fired = _Fired()
    on_train_end: _Fired = _Fired()
    on_train_epoch_begin: _Fired = _Fired()
    on_train_epoch_end: _Fired = _Fired()
    on_fetch_data_begin: _Fired = _Fired()
    on_fetch_data_end: _Fired = _Fired()
    on_train_batch_begin: _Fired = _Fired()
    on_train_batch_end: _Fired = _Fired()
    on_exception: _Fired = _Fired()
    on_save_model: _Fired = _Fired()
    on_load_model: _Fired = _Fired()
    on_before_backward: _Fired = _Fired()
    on_after_backward: _Fired = _Fired()
    on_before_optimizers_step: _Fired = _Fired()
    on_after_optimizers_step: _Fired = _Fired()
    on_before_zero_grad: _Fired = _Fired()
    on_after_zero_grad: _Fired = _Fired()
    on_evaluate_begin: _Fired = _Fired()
    on_evaluate_end: _Fired = _Fired()

    def on_save_checkpoint(self) -> dict[str, dict[str, Any]]:
        """Return the entries of the callbacks in a checkpoint, by their names."""
        return self.callback_manager.on_save_checkpoint(self)

    def on_load_checkpoint(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the callbacks from the entries with their names."""
        self.callback_manager.on_load_checkpoint(self, states)

    @property
    def driver_name(self) -> str:
        """The argument `driver` of the trainer if it was a name; otherwise the name of the driver's class."""
        return self._driver_name or type(self.driver).__name__

    @property
    def model_device(self) -> torch.device:
        """The device of the model."""
        return self.driver.model_device

    @property
    def data_device(self) -> torch.device:
        """The device of batches."""
        return self.driver.data_device

    def move_data_to_device(self, batch: Any) -> Any:
        """Return a batch with every tensor in it on the device."""
        return self.driver.move_data_to_device(batch)

    @staticmethod
    def extract_loss_from_outputs(outputs: Any) -> Any:
        """Return the loss in the outputs of a model; see `loss_in`."""
        return loss_in(outputs)

    # -- files -----------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        folder: str | PathLike[str],
        only_state_dict: bool = True,
        model_save_fn: Callable[[str], object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model and the training state to a folder.

        The state is in fastNLP's ``fastnlp_checkpoint.pkl.tar``, with ``state`` and the RNG state.

        Args:
            folder: The folder, which is created.
            only_state_dict: As in `save_model`.
            model_save_fn: As in `save_model`.
            kwargs: Ignored.

        Raises:
            StateError: A value in ``state``, or in the states of a callback, cannot be saved.
        """
        states = self.on_save_checkpoint()
        if self.driver.is_global_zero():
            saving.write_model(self.model, folder, only_state_dict=only_state_dict, save_fn=model_save_fn)
            saving.write_checkpoint(folder, {"callback_states": states, **self._kept()})
        self.driver.barrier()

    def _kept(self) -> dict[str, Any]:
        """Return the content of a checkpoint except the states of callbacks."""
        carried = self.carrying()
        size = getattr(self.train_dataloader, "batch_size", None)
        return {
            "trainer_state": self.trainer_state.state_dict(),
            "sampler_states": {"batch_size": size},
            "optimizers_state_dict": {f"optimizer{i}": each.state_dict() for i, each in enumerate(self.driver.optimizers)},
            "grad_scaler_state_dict": carried.scaler,
            "cadenza": {"state": dict(self.state), **vars(carried)},
        }

    @abstractmethod
    def carrying(self) -> Carried:
        """Return the values from which a training continues, in addition to fastNLP's counters."""

    def save_model(
        self,
        folder: saving.PathOrStream,
        only_state_dict: bool = False,
        model_save_fn: Callable[[str], object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model to a folder, as ``fastnlp_model.pkl.tar``, or to a stream.

        Args:
            folder: The folder, which is created, or a stream such as ``io.BytesIO``.
            only_state_dict: Write only the weights; False writes the whole model.
            model_save_fn: Called with the folder instead.
            kwargs: Ignored.

        Raises:
            RuntimeError: `model_save_fn` with a stream.
        """
        self.callback_manager.fire("on_save_model", self)
        if self.driver.is_global_zero() or hasattr(folder, "write"):  # each process has a separate stream
            saving.write_model(self.model, folder, only_state_dict=only_state_dict, save_fn=model_save_fn)
        self.driver.barrier()

    def load_model(
        self,
        folder: saving.PathOrStream,
        only_state_dict: bool = True,
        model_load_fn: Callable[[str], object] | None = None,
        strict: bool = True,
        **kwargs: Any,
    ) -> None:
        """Load the weights that `save_model` wrote. The arguments correspond to those of `save_model`.

        The file itself says whether it holds a model or weights. With `only_state_dict` no code in it is executed.

        Raises:
            FileNotFoundError: The folder holds no model.
            RuntimeError: `model_load_fn` with a stream; or the weights do not fit and `strict` is true.
        """
        self.callback_manager.fire("on_load_model", self)
        saving.read_model(self.model, folder, only_state_dict=only_state_dict, load_fn=model_load_fn, strict=strict)


def epochs_for(n_batches: int, per_epoch: int | None) -> int | None:
    """Return the number of epochs that hold this many batches. The last one may be shorter."""
    return math.ceil(n_batches / per_epoch) if per_epoch else None
