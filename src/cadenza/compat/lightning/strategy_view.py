"""``trainer.strategy``: the driver of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from cadenza.compat.lightning.counters import RanksView
from cadenza.compat.lightning.library import imported
from cadenza.compat.lightning.part_view import PartView
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import unwinding


class StrategyView(PartView, RanksView):
    """The driver of a run as a ``Strategy`` of Lightning. Its methods that communicate must be called on every rank."""

    title: ClassVar[str] = "trainer.strategy"
    absent: ClassVar[Mapping[str, str]] = {
        "setup_environment": "The processes are there before the run starts.",
        "optimizer_step": "Use Trainer(step_fn=...) for a step of your own.",
        "backward": "Use run.backward(loss) in a step_fn.",
        "cluster_environment": "Read trainer.global_rank, trainer.local_rank and trainer.world_size.",
        "model_sharded_context": "Give the sharded modules to cadenza.drivers.FsdpDriver.",
    }

    # -- attributes ------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._run.device

    @property
    def model(self) -> nn.Module:
        """The prepared model: wrapped, on multiple ranks."""
        return session_of(self._run).model

    @property
    def lightning_module(self) -> Any:
        """The ``pl_module``."""
        trainer: Any = self._trainer
        return trainer.lightning_module

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return self._ranks_here

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the run."""
        return list(self._run.optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers of the run."""
        return self._trainer.lr_scheduler_configs

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin for the dtype of the run."""
        return self._trainer.precision_plugin

    @property
    def accelerator(self) -> Any:
        """The accelerator of Lightning for the device."""
        return self._trainer.accelerator

    @property
    def launcher(self) -> None:
        """None: the processes are there before the run starts."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: the loop accumulates gradients."""
        return False

    @property
    def _lightning_optimizers(self) -> list[Optimizer]:
        return list(self._run.optimizers)

    # -- communication ------------------------------------------------------------------------------

    @property
    def _alone(self) -> bool:
        """Whether communication is off: on a single rank, and after an error, when other ranks may be gone."""
        return self.world_size == 1 or unwinding(self._run) is not None

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        if not self._alone:
            self._run.driver.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`."""
        driver = self._run.driver
        return obj if self._alone else driver.broadcast(obj) if src == 0 else driver.gather(obj)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Return `tensor` reduced over the ranks: its mean (``"mean"``, ``"avg"``), ``"sum"``, ``"min"`` or ``"max"``.

        Args:
            tensor: The value of this rank. Anything but a tensor is returned as given.
            group: The process group of the ranks. None: all ranks.
            reduce_op: The operation, as a name or a torch constant. None is the mean.
        """
        way = str(reduce_op or "mean").rpartition(".")[2].lower()
        if not isinstance(tensor, Tensor) or self._alone:
            return tensor
        how: Any = "mean" if way == "avg" else way
        value = tensor.to(self.root_device)
        return self._run.driver.reduce(value, how) if group is None else reduced_in(group, value, how)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of the ranks, stacked on dim 0; on one rank the tensor itself.

        Args:
            tensor: The tensor of this rank. It has the same shape on all ranks.
            group: The process group of the ranks. None: all ranks.
            sync_grads: Let gradients flow back: each rank gets those of its own tensor, summed over the ranks.
        """
        if self._alone:
            return tensor
        return gathered(group, tensor, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether the decision is true on all ranks; with ``all=False``, on any rank."""
        driver = self._run.driver
        if self._alone:
            return bool(decision)
        return not driver.any_rank(not decision) if all else driver.any_rank(bool(decision))

    # -- checkpoints --------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> Any:
        """A ``TorchCheckpointIO`` of Lightning."""
        return imported("plugins.io", "TorchCheckpointIO")()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of the model."""
        return self._run.model.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint file of Lightning, on the main process."""
        if self._run.is_main:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint file, on the main process."""
        if self._run.is_main:
            self.checkpoint_io.remove_checkpoint(filepath)


_OPERATIONS = {"mean": "SUM", "sum": "SUM", "min": "MIN", "max": "MAX"}


def reduced_in(group: Any, value: Tensor, how: str) -> Tensor:
    """Return `value` reduced over the ranks of a process group: its ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``."""
    result = value.detach().clone()
    if how == "mean" and not result.is_floating_point():
        result = result.float()
    dist.all_reduce(result, getattr(dist.ReduceOp, _OPERATIONS[how]), group=group)
    return result / dist.get_world_size(group) if how == "mean" else result


def gathered(group: Any, value: Tensor, *, sync_grads: bool) -> Tensor:
    """Return the tensors of the ranks of a process group, stacked on dim 0.

    Args:
        group: The process group. None: all ranks.
        value: The tensor of this rank. It has the same shape on all ranks.
        sync_grads: Let gradients flow back: each rank gets those of its own tensor, summed over the ranks.
    """
    stacked: Tensor = Gathered.apply(value, group)  # type: ignore[no-untyped-call]
    return stacked if sync_grads else stacked.detach()


class Gathered(torch.autograd.Function):
    """Stack the tensors of the ranks, with the gradients of Lightning's ``all_gather``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # the gradient may be used elsewhere as well
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
