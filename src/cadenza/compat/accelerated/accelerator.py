"""The part of ``accelerate.Accelerator`` that trainers and callbacks of pytorch-accelerated use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from cadenza.drivers import Driver, driver_of
from cadenza.optim.precision import Autocast, Precision

_INSTEAD = {
    "save_state load_state register_for_checkpointing": "use save_training_state of the trainer and train(resume_from=...)",
    "save_model": "use save_checkpoint of the trainer",
    "log init_trackers end_training trackers get_tracker": "add a sink such as cadenza.sinks.TensorBoard to callbacks",
    "accumulate gradient_accumulation_steps sync_gradients": "pass gradient_accumulation_steps to train",
    "join_uneven_inputs even_batches": "an evaluation may have another number of batches on each process",
    "prepare_data_loader prepare_model prepare_optimizer prepare_scheduler": "the native trainer prepares them in train",
    "main_process_first local_main_process_first": "use cadenza.compat.accelerated.utils.local_process_zero_first",
    "on_main_process on_local_main_process": "use cadenza.compat.accelerated.utils.world_process_zero_only",
    "scaler unscale_gradients": "gradients are unscaled in _clip_gradients and optimizer_step",
    "state": "use num_processes, process_index and device",
    "set_trigger check_trigger": "raise StopTrainingError: it stops all processes",
}
"""Unsupported names of ``accelerate.Accelerator`` and their replacements."""

_PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


class Accelerator:
    """The object behind ``trainer._accelerator``. An override of ``Trainer._create_accelerator`` returns one.

    Args:
        driver: Runs tensors and processes; None chooses one, as the native trainer does.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``; None reads ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        cpu: Train on the CPU even if there is a GPU.

    Raises:
        ValueError: `mixed_precision` is invalid.
    """

    def __init__(self, driver: Driver | None = None, *, mixed_precision: str | None = None, cpu: bool = False) -> None:
        self.mixed_precision: str = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if self.mixed_precision not in _PRECISIONS:
            raise ValueError(f"mixed_precision must be one of {', '.join(_PRECISIONS)}; got {self.mixed_precision!r}")
        self.driver: Driver = driver_of("auto", "cpu" if cpu else None) if driver is None else driver
        self.precision: Precision = Precision()
        """The precision of the run in progress."""
        self.optimizer_step_was_skipped = False
        """Whether the last update was skipped, because gradients overflowed in fp16."""

    @property
    def native_precision(self) -> str:
        """The name of the precision in the native trainer."""
        return _PRECISIONS[self.mixed_precision]

    if not TYPE_CHECKING:  # type checkers keep reporting unknown names

        def __getattr__(self, name: str) -> NoReturn:
            advice = next((advice for names, advice in _INSTEAD.items() if name in names.split()), None)
            hint = "" if advice is None else f": {advice}"
            raise AttributeError(f"the Accelerator of this adapter has no attribute {name!r}{hint}", name=name)

    # -- the processes ----------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> str:
        """The value of ``accelerate.DistributedType``: ``"NO"``, ``"MULTI_CPU"``, ``"MULTI_GPU"`` or ``"FSDP"``."""
        if self.driver.world_size == 1:
            return "NO"
        if self.driver.shards:
            return "FSDP"
        return "MULTI_GPU" if self.device.type == "cuda" else "MULTI_CPU"

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.driver.device

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.driver.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        return self.driver.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine, from 0."""
        return self.driver.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self.driver.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on this machine."""
        return self.driver.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self.driver.rank == self.driver.world_size - 1

    def wait_for_everyone(self) -> None:
        """Wait for all processes. Every process must call this."""
        self.driver.barrier()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print once on each machine."""
        if self.is_local_main_process:
            print(*values, **kwargs)  # noqa: T201  # this is print

    def gather(self, value: Any) -> Any:
        """Return the tensors of all processes, joined along the first dimension. Every process must call this."""
        if self.driver.world_size == 1:
            return value
        if isinstance(value, Mapping):
            return {key: self.gather(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.gather(part) for part in value)
        parts = self.driver.gather(value)
        return torch.cat([part.to(self.device) if part.ndim else part.to(self.device).reshape(1) for part in parts])

    def gather_for_metrics(self, value: Any) -> Any:
        """Same as `gather`: no sample is evaluated twice, so none needs to be dropped."""
        return self.gather(value)

    def reduce(self, tensor: Tensor, reduction: Literal["sum", "mean"] = "sum") -> Tensor:
        """Return the sum or the mean of a tensor over all processes. Every process must call this."""
        return self.driver.reduce(tensor, reduction)

    def pad_across_processes(self, tensor: Tensor, dim: int = 0, pad_index: float = 0) -> Tensor:
        """Return `tensor` with `pad_index` appended along `dim`, so that all processes have the same size there."""
        size = max(self.driver.gather(tensor.shape[dim]))
        shape = [size - tensor.shape[dim] if axis == dim % tensor.ndim else length for axis, length in enumerate(tensor.shape)]
        return torch.cat([tensor, tensor.new_full(shape, pad_index)], dim)

    # -- the model and its update ------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Return the objects, with each module moved to the device. The native trainer wraps the model when a run starts."""
        placed = [item.to(self.device) if isinstance(item, nn.Module) else item for item in objects]
        return placed[0] if len(placed) == 1 else tuple(placed)

    def unwrap_model(self, model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
        """Return the user's own module inside a prepared one; on request, also without the wrapper of ``torch.compile``."""
        inner = self.driver.unwrap(model)
        original = getattr(inner, "_orig_mod", inner)
        return inner if keep_torch_compile or not isinstance(original, nn.Module) else original

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context in the precision of the run. The trainer's loss hooks run inside it."""
        precision = self.precision
        if not isinstance(precision, Autocast):
            return nullcontext()
        return torch.autocast(precision.device_type, dtype=precision.dtype)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the gradients of `model` are not reduced over processes."""
        return self.driver.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        with self.precision.disabled():
            self.precision.backward(loss)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total norm of gradients and return it. Call it in ``_clip_gradients`` or ``optimizer_step``."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of gradients. Call it in ``_clip_gradients`` or ``optimizer_step``."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    # -- memory and files ------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[None]:
        """Free the memory that is not in use; return None for each object."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None for _ in objects]

    def save(self, obj: Any, f: str | os.PathLike[str]) -> None:
        """Write an object with ``torch.save``, on the main process."""
        if self.is_main_process:
            torch.save(obj, f)
