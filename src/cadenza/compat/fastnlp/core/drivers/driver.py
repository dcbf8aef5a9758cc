"""``fastNLP.core.drivers.driver``: the device of the model, and the processes, with fastNLP's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cadenza import drivers
from cadenza.compat.fastnlp import saving
from cadenza.compat.fastnlp.core.drivers.scaling import LossScaler, reduced
from cadenza.compat.fastnlp.core.utils.utils import auto_param_call
from cadenza.compat.fastnlp.envs.distributed import is_alone
from cadenza.errors import nearest
from cadenza.loading.batches import moved
from cadenza.loading.loaders import set_loader_epoch
from cadenza.optim.precision import Precision, precision_of

REFUSED: Mapping[str, str] = {
    "set_dist_repro_dataloader": "Cadenza reads each rank's shard of any loader and can resume in it; no sampler is replaced",
    "get_dataloader_args": "read the attributes of the DataLoader itself",
    "save_checkpoint": "call trainer.save_checkpoint(folder)",
    "load_checkpoint": "call trainer.load_checkpoint(folder)",
    "get_sampler_state": "trainer.save_checkpoint saves the position of the loader",
    "load_sampler_state": "trainer.load_checkpoint restores the position of the loader",
    "get_optimizer_state": "call state_dict() of each of driver.optimizers",
    "load_optimizer_state": "call load_state_dict(...) of each of driver.optimizers",
    "on_exception": "raise the error: the launcher ends the other processes",
    "open_subprocess": "start the processes with torchrun",
    "init_process_group": "start the processes with torchrun",
}
"""Methods of fastNLP's drivers that are not provided, and their replacements."""


class Driver:
    """A native driver with fastNLP's names, and the model that it runs.

    Args:
        native: The driver.
        model: The user's own module.
        optimizers: An optimizer or a list of them.
        fp16: Whether the training uses float16 autocast.
        torch_kwargs: ``non_blocking`` (default True) and ``set_grad_to_none`` are used.
        model_wo_auto_param_call: Whether batches are passed to the model unchanged.
        output_from_new_proc: Kept as an attribute only; torchrun decides what the other processes print.
    """

    model: nn.Module
    """The user's own module."""
    precision: Precision
    """The number format of the current training."""

    def __init__(
        self,
        native: drivers.Driver,
        model: nn.Module,
        optimizers: Any = None,
        *,
        fp16: bool = False,
        torch_kwargs: Mapping[str, Any] | None = None,
        model_wo_auto_param_call: bool = False,
        output_from_new_proc: str = "only_error",
    ) -> None:
        self.native: drivers.Driver = native
        self.model = model
        self.fp16: bool = fp16
        self.wo_auto_param_call: bool = model_wo_auto_param_call
        self.output_from_new_proc: str = output_from_new_proc
        settings = torch_kwargs or {}
        self.non_blocking: bool = settings.get("non_blocking", True)
        self.set_grad_to_none: bool | None = settings.get("set_grad_to_none")
        if not self.non_blocking and isinstance(native, drivers.SingleDriver):
            native.to_device = lambda batch: moved(batch, native.device)
        self.precision = precision_of("fp16" if fp16 else "fp32", native.device.type)
        self.set_optimizers(optimizers)

    # -- devices and processes -------------------------------------------------------------------------

    @property
    def model_device(self) -> torch.device:
        """The device of the model."""
        return self.native.device

    @property
    def data_device(self) -> torch.device:
        """The device of the batches."""
        return self.model_device

    @property
    def device(self) -> torch.device:
        """The device of the model and of the batches."""
        return self.model_device

    @property
    def global_rank(self) -> int:
        """The rank of this process, from 0."""
        return self.native.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its machine, from 0."""
        return self.native.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.native.world_size

    def get_local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return self.native.local_rank

    def is_distributed(self) -> bool:
        """Return whether there are several processes."""
        return self.native.world_size > 1

    def is_global_zero(self) -> bool:
        """Return whether this process prints and writes."""
        return self.native.is_main

    def barrier(self) -> None:
        """Wait for all processes. Every rank must call this. Inside of `rank_zero_call` it does nothing."""
        if not is_alone(1):
            self.native.barrier()

    def broadcast_object(self, obj: Any, src: int = 0, group: None = None, **kwargs: Any) -> Any:
        """Return the object of rank `src`. Every rank must call this. Inside of `rank_zero_call` it returns `obj`.

        Raises:
            ValueError: `group` is given: only all processes together can be reached.
        """
        _check_group(group)
        if is_alone(2):
            return obj
        return self.native.broadcast(obj) if src == 0 else self.native.gather(obj)[src]

    def all_gather(self, obj: Any, group: None = None) -> list[Any]:
        """Return the objects of all ranks in their order. Every rank must call this. Inside of `rank_zero_call`: ``[obj]``.

        Raises:
            ValueError: `group` is given: only all processes together can be reached.
        """
        _check_group(group)
        return [obj] if is_alone(2) else self.native.gather(obj)

    # -- the model -------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Move the model to the device. The trainer and the evaluator have done this."""
        self.move_model_to_device(self.model, self.model_device)

    def unwrap_model(self) -> nn.Module:
        """Return the user's own module, without a wrapper for several devices."""
        inner: nn.Module = self.model.module if isinstance(self.model, DataParallel | DistributedDataParallel) else self.model
        return inner

    def set_model_mode(self, mode: str) -> None:
        """Put the model in mode ``"train"`` or ``"eval"``."""
        if mode not in ("train", "eval"):
            raise ValueError(f"mode must be 'train' or 'eval'; got {mode!r}")
        self.model.train(mode == "train")

    def get_model_call_fn(self, fn: str) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Return a method of the model, and the function with the names of its arguments; None if they are the same.

        ``"train_step"`` and ``"evaluate_step"`` stand for the forward pass if the model does not have them.

        Raises:
            RuntimeError: The model has no such method.
        """
        found = getattr(self.model, fn, None)
        if callable(found):
            return found, None
        if fn not in ("train_step", "evaluate_step"):
            raise RuntimeError(f"the model, a {type(self.model).__name__}, has no method {fn!r}")
        return self.model, self.model.forward

    def model_call(self, batch: Any, fn: Callable[..., Any], signature_fn: Callable[..., Any] | None) -> Any:
        """Call a function of `get_model_call_fn` with a batch: with the entries of a dict by name, unless that is off."""
        if isinstance(batch, Mapping) and not self.wo_auto_param_call:
            return auto_param_call(fn, batch, signature_fn=signature_fn)
        return fn(batch)

    @staticmethod
    def move_model_to_device(model: nn.Module, device: torch.device | str | None) -> None:
        """Move a model to a device; None leaves it."""
        if device is not None:
            model.to(device)

    def move_data_to_device(self, batch: Any) -> Any:
        """Return a batch with every tensor in it on the device."""
        return self.native.to_device(batch)

    def save_model(self, filepath: str | PathLike[str], only_state_dict: bool = True, **kwargs: Any) -> None:
        """Write the model to a file; the main process writes it.

        Args:
            filepath: The file itself, not a folder as in ``trainer.save_model``.
            only_state_dict: Write only the weights.
            kwargs: Ignored.
        """
        if self.is_global_zero():
            saving.write_model_file(self.unwrap_model(), Path(filepath), only_state_dict=only_state_dict)

    def load_model(
        self, filepath: str | PathLike[str], only_state_dict: bool = True, strict: bool = True, **kwargs: Any
    ) -> None:
        """Load the weights from a file of `save_model`.

        Raises:
            FileNotFoundError: There is no such file.
            RuntimeError: The weights do not fit, and `strict` is true.
        """
        saving.read_model_file(self.unwrap_model(), Path(filepath), only_state_dict=only_state_dict, strict=strict)

    # -- steps -----------------------------------------------------------------------------------------

    def set_optimizers(self, optimizers: Any = None) -> None:
        """Set the optimizers: one, or a list of them."""
        given = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers] if optimizers else []
        self.optimizers: list[Optimizer] = given

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a loss, with fp16 those of the scaled loss. No event fires."""
        self.precision.backward(loss)

    def step(self) -> None:
        """Step all optimizers. No event fires."""
        scaler = self.grad_scaler
        for optimizer in self.optimizers:
            scaler.step(optimizer)
        scaler.update()

    def zero_grad(self) -> None:
        """Drop the gradients of all optimizers. No event fires."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.set_grad_to_none is not False)

    @property
    def grad_scaler(self) -> LossScaler:
        """The scaling of the loss, with the methods of ``torch.amp.GradScaler``; without fp16 they change nothing."""
        return LossScaler(self.precision)

    @property
    def auto_cast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Returns a context with autocast; it is off without fp16."""
        return lambda: torch.autocast(self.model_device.type, dtype=torch.float16, enabled=self.fp16)

    def get_model_no_sync_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns a context in which gradients are added in this process only."""
        return lambda: self.native.no_sync(self.model)

    def get_evaluate_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return ``torch.no_grad``."""
        return torch.no_grad

    @staticmethod
    def tensor_to_numeric(tensor: Any, reduce: str | None = None) -> Any:
        """Return tensors, also in nested lists, tuples and dicts, as plain numbers. This waits for the device.

        Args:
            tensor: One element becomes a number, several a nested list.
            reduce: ``"max"``, ``"min"``, ``"sum"`` or ``"mean"`` makes one number of several elements.

        Raises:
            ValueError: `reduce` is something else.
        """
        return reduced(tensor, reduce)

    # -- loaders ---------------------------------------------------------------------------------------

    def check_dataloader_legality(self, dataloader: object) -> None:
        """Raise `TypeError` unless this is a torch ``DataLoader``."""
        if not isinstance(dataloader, DataLoader):
            raise TypeError(f"expected a torch DataLoader; got {type(dataloader).__name__}")

    def set_sampler_epoch(self, dataloader: Any, cur_epoch_idx: int) -> None:
        """Set the epoch that a sampler draws its order from."""
        set_loader_epoch(dataloader, cur_epoch_idx)

    if not TYPE_CHECKING:  # type checkers must report unknown names

        def __getattr__(self, name: str) -> NoReturn:
            if name in REFUSED:
                raise AttributeError(f"the adapter of fastNLP has no driver.{name}. Instead: {REFUSED[name]}.")
            hint = nearest(name, [*dir(type(self)), *vars(self)])
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.native!r})"


def _check_group(group: object) -> None:
    if group is not None:
        raise ValueError(f"group must be None, for all processes; got {group!r}. Use torch.distributed for a group.")
