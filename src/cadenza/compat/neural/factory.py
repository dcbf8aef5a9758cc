"""``NeuralModuleFactory``: folders, the TensorBoard writer, and the default factory of a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from cadenza.compat.neural.actions import Actions
from cadenza.compat.neural.arguments import names_of, warn_without_effect
from cadenza.compat.neural.defaults import default_factory, set_default_factory
from cadenza.compat.neural.kinds import Backend, DeviceType, Optimization
from cadenza.compat.neural.logs import Logger, logging
from cadenza.compat.neural.work import WorkDirectory
from cadenza.loading.rng import seed_all


class NeuralModuleFactory(Actions):
    """The entry point of NeMo scripts.

    Args:
        local_rank: Not needed: a script under torchrun knows its ranks.
        optimization_level: The precision: an `Optimization`, or its name, such as ``"O1"``.
        placement: The device; None takes the best one.
        cudnn_benchmark: Let cuDNN search for the fastest kernels. Not with `random_seed`.
        random_seed: Seeds all generators now, on every rank alike, as in NeMo.
        set_default: Use this factory's device for new modules.
        log_dir: The work directory; None writes nothing.
        checkpoint_dir: The folder of checkpoints; None: ``checkpoints`` in the work directory.
        tensorboard_dir: The folder of event files; None: ``tensorboard`` in the work directory.
        create_tb_writer: Create a SummaryWriter, as `tb_writer`.
        files_to_copy: Files to copy into the work directory.
        add_time_to_log_dir: Use a subfolder of `log_dir` with the time as its name.
        backend: PyTorch; an argument of NeMo 0.10.

    Raises:
        ValueError: `create_tb_writer` without `log_dir` and `tensorboard_dir`, or `cudnn_benchmark` with `random_seed`.
    """

    def __init__(
        self,
        local_rank: int | None = None,
        optimization_level: Optimization | str = Optimization.mxprO0,
        placement: DeviceType | None = None,
        cudnn_benchmark: bool = False,
        random_seed: int | None = None,
        set_default: bool = True,
        log_dir: str | None = None,
        checkpoint_dir: str | None = None,
        tensorboard_dir: str | None = None,
        create_tb_writer: bool = False,
        files_to_copy: Sequence[str] | None = None,
        add_time_to_log_dir: bool = False,
        backend: Backend = Backend.PyTorch,
        **unknown: Any,
    ) -> None:
        logging.add_stream_handlers()
        warn_without_effect("NeuralModuleFactory", unknown, (), names_of(NeuralModuleFactory.__init__))
        if backend is not Backend.PyTorch:
            raise NotImplementedError(f"backend must be Backend.PyTorch; got {backend}")
        if create_tb_writer and log_dir is None and tensorboard_dir is None:
            raise ValueError("create_tb_writer=True needs log_dir= or tensorboard_dir=; got neither")
        if cudnn_benchmark and random_seed is not None:
            raise ValueError("cudnn_benchmark=True selects kernels by speed, which random_seed= forbids; got both")
        torch.backends.cudnn.benchmark = cudnn_benchmark
        super().__init__(placement, optimization_level, random_seed)
        self.work: WorkDirectory = WorkDirectory(
            log_dir, checkpoint_dir, tensorboard_dir, add_time_to_log_dir, files_to_copy or (), self._driver
        )
        if random_seed is not None:
            seed_all(random_seed)
        self.writes = create_tb_writer
        self.tb_writer: Any = _writer(self.work.tensorboard) if create_tb_writer and not self.global_rank else None
        """The SummaryWriter of the main process; None without `create_tb_writer`, and on the other processes."""
        if set_default:
            set_default_factory(self)

    @staticmethod
    def get_default_factory() -> Any:
        """Return the newest factory, or the one of `set_default_factory`; None without one."""
        return default_factory()

    @staticmethod
    def set_default_factory(factory: NeuralModuleFactory) -> None:
        """Use this factory's device for new modules."""
        set_default_factory(factory)

    @staticmethod
    def reset_default_factory() -> None:
        """Use the best device for new modules."""
        set_default_factory(None)

    @property
    def work_dir(self) -> str | None:
        """The work directory; None without `log_dir`."""
        return None if self.work.path is None else str(self.work.path)

    @property
    def checkpoint_dir(self) -> str | None:
        """The folder of checkpoints; None without one."""
        return None if self.work.checkpoints is None else str(self.work.checkpoints)

    @property
    def logger(self) -> Logger:
        """NeMo's logger."""
        return logging

    def deployment_export(self, module: Any, output: str, *arguments: Any, **options: Any) -> NoReturn:
        """Raise an error, since PyTorch exports trained modules."""
        raise NotImplementedError(
            f"deployment_export is not available. Call module.save_to({output!r}) for the weights, or torch.onnx.export or "
            "torch.export.export for another format; force_pt=True calls the module with tensors."
        )


def _writer(folder: Path | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
