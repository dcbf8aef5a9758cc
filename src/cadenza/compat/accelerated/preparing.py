"""Setup steps before a run: methods that are private in the original but that users override."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.callbacks import LimitBatchesCallback
from cadenza.compat.accelerated.checks import check_enough, check_padding, check_parts, report_uneven
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.overridable import Overridable
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.utils import batches_limit
from cadenza.drivers import driver_of
from cadenza.hooks.moments import BaseCallback
from cadenza.loading.loaders import length_of

if TYPE_CHECKING:
    from cadenza.drivers import Driver

Callbacks = Iterable[BaseCallback | type[BaseCallback]]


class Preparing(Overridable):
    """The steps before a run as small methods."""

    _callbacks: Callbacks
    _pad_uneven_eval_batches = False
    _driver: str | Driver = "auto"

    def _create_accelerator(self) -> Accelerator:
        """Return the accelerator, which chooses the device, the processes and the precision."""
        return Accelerator(driver_of(self._driver))

    def _create_callback_handler(self) -> CallbackHandler:
        """Return the handler of the callbacks that were passed to the constructor, which are in `_callbacks`."""
        limit = batches_limit()
        handler = CallbackHandler([] if limit is None else [LimitBatchesCallback(limit)])
        handler.add_callbacks(self._callbacks)
        return handler

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Move the user's own module to the device. The driver wraps it later, at the start of the run.

        An override may replace `model`, `optimizer`, `_train_dataloader` and `_eval_dataloader`.
        """
        check_parts(self.model, self.optimizer, training=self._train_dataloader is not None)
        check_padding(self._pad_uneven_eval_batches, self._accelerator.num_processes)
        self.model: nn.Module = self.get_model().to(self.device)
        if self._eval_dataloader is None and self.eval_dataset is not None:
            raise TypeError("create_eval_dataloader must return a loader; got None. Add the return statement")
        for loader in (self._train_dataloader, self._eval_dataloader):
            if isinstance(loader, DataLoader) and not hasattr(loader, "device"):
                loader.device = self.device  # as loaders of accelerate provide it

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        """Return the settings of a run, which the training uses. All arguments are passed by name.

        Args:
            per_device_batch_size: The batch size of a loader that does not provide it.
            num_epochs: The number of epochs.
            gradient_accumulation_steps: The number of batches in an update.
            max_num_train_steps: The largest number of updates; None is no limit.
            gradient_clip_value: The largest absolute value in a gradient; None is no limit.
        """
        accumulate, accelerator = gradient_accumulation_steps, self._accelerator
        train, evaluation = self._train_dl_kwargs, self._eval_dl_kwargs
        train_size = _batch_size(self._train_dataloader, train, per_device_batch_size)
        eval_size = _batch_size(self._eval_dataloader, evaluation, train_size)
        batches = 0 if self._train_dataloader is None else self._batches_of_each(self._train_dataloader)
        updates = None if batches is None else -(-batches // accumulate)
        if max_num_train_steps is not None and updates:
            num_epochs = min(num_epochs, -(-max_num_train_steps // updates))
        return TrainerRunConfig(
            num_epochs=num_epochs,
            train_per_device_batch_size=train_size,
            train_dl_kwargs=train,
            eval_per_device_batch_size=eval_size,
            eval_dl_kwargs=evaluation,
            gradient_accumulation_steps=accumulate,
            gradient_clip_value=gradient_clip_value,
            train_total_batch_size=train_size * accelerator.num_processes * accumulate,
            eval_total_batch_size=eval_size * accelerator.num_processes,
            num_update_steps_per_epoch=updates,
            num_local_update_steps_per_epoch=updates,
            max_num_train_steps=max_num_train_steps or (None if updates is None else num_epochs * updates),
            is_local_process_zero=accelerator.is_local_main_process,
            is_world_process_zero=accelerator.is_main_process,
            is_distributed=accelerator.num_processes > 1,
            mixed_precision=accelerator.mixed_precision,
            num_processes=accelerator.num_processes,
        )

    def _check_eval_batch_size(self) -> None:
        """Check how many samples each process gets in the last batch of an evaluation.

        Raises:
            ValueError: One batch on each process needs more samples than ``eval_dataset`` has.
        """
        config = self.run_config
        if config is None or not config.is_distributed or self.eval_dataset is None:
            return
        samples, total = length_of(self.eval_dataset), config.eval_total_batch_size
        check_enough(samples, total)
        report_uneven(samples, total, config.num_processes, partial(warnings.warn, stacklevel=4))


def _batch_size(loader: Any, kwargs: Mapping[str, Any] | None, default: int) -> int:
    """Return the number of samples in a batch of a loader."""
    size: int = getattr(loader, "batch_size", None) or (kwargs or {}).get("batch_size", default)
    return size
