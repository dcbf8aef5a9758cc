"""The values of tensors over all data, for ``nf.infer``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cadenza.compat.neural.checkpoints import named
from cadenza.compat.neural.graph import Graph, GraphModel
from cadenza.compat.neural.helpers import newest
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.modules import loader_of
from cadenza.compat.neural.tensors import NeuralModule, NmTensor
from cadenza.drivers import Driver
from cadenza.loading.batches import moved
from cadenza.trainer import Trainer


class Inference:
    """Computes tensors in evaluation mode, and keeps the values of a pass for the next one if asked to."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []

    def clear(self) -> None:
        """Delete the kept values."""
        self._kept = []

    def __call__(
        self, tensors: Sequence[NmTensor], driver: Driver, precision: str, *, cache: bool, use_cache: bool, offload: bool
    ) -> list[list[Any]] | None:
        """Return the values of each tensor, one per batch; on several processes, only the main one gets them.

        Every rank must call this.

        Args:
            tensors: They must depend on one data layer.
            driver: The driver of the evaluation.
            precision: The precision of a native trainer.
            cache: Whether to keep all computed values.
            use_cache: Whether to start from kept values. The tensors themselves are computed again.
            offload: Whether to copy the values to the host.

        Raises:
            ValueError: `cache` and `use_cache`, or `cache` twice, or `use_cache` without kept values.
            NotImplementedError: One of them on several processes.
        """
        self._check(cache, use_cache, driver)
        graph = Graph(tensors)
        names = [tensor.unique_name for tensor in tensors]
        batches: list[list[Any]] = []

        def compute(_: nn.Module, batch: Any) -> dict[str, Any]:
            values = {name: value for name, value in batch.items() if name not in names} if use_cache else graph.read(batch)
            graph.compute(values, tensors)
            if cache:
                self._kept.append(moved(values, torch.device("cpu")) if offload else values)
            wanted = [values[name] for name in names]
            batches.append(moved(wanted, torch.device("cpu")) if offload or driver.world_size > 1 else wanted)
            return {"values": values}

        loader = list(self._kept) if use_cache else loader_of(graph.data_layer)
        model = GraphModel(graph)
        trainer = Trainer(model, _no_optimizer, loader, max_steps=1, driver=driver, precision=precision, progress=False)
        trainer.evaluate(loader, name="infer", compute=compute)
        if driver.world_size > 1:
            ranks = driver.gather_data(batches)
            batches = [rank[index] for index in range(max(map(len, ranks))) for rank in ranks if index < len(rank)]
        return [[batch[index] for batch in batches] for index in range(len(tensors))] if driver.is_main else None

    def _check(self, cache: bool, use_cache: bool, driver: Driver) -> None:
        if (cache or use_cache) and driver.world_size > 1:
            raise NotImplementedError("cache and use_cache work on one process only; call infer without them")
        if cache and use_cache:
            raise ValueError("expected cache or use_cache; got both. A cache must be filled before it is used.")
        if cache and self._kept:
            raise ValueError("cache=True needs an empty cache. Call clear_cache() first.")
        if use_cache and not self._kept:
            raise ValueError("use_cache=True needs values of an earlier call with cache=True; there are none")


def restore(
    tensors: Sequence[NmTensor],
    folder: str,
    pattern: str,
    only: NeuralModule | Sequence[NeuralModule] | None,
) -> None:
    """Read the weights of the modules on which tensors depend from the newest files of a folder.

    Args:
        tensors: The tensors.
        folder: The folder of a ``CheckpointCallback``, or of NeMo.
        pattern: A part of the names of the files.
        only: The modules to restore; None for all with trainable weights.

    Raises:
        ValueError: There is no file for a module, or one of `only` has no weights.
    """
    files: dict[str, object] = {**named(Graph(tensors).modules())}
    wanted = [only] if isinstance(only, NeuralModule) else only
    for module in wanted or ():
        if not isinstance(module, NeuralModule) or module.num_weights == 0:
            raise ValueError(f"modules_to_restore must hold neural modules with trainable weights; got {module}")
    if wanted is None:
        wanted = [module for module in Graph(tensors).modules() if module.num_weights > 0]
    for module in wanted:
        name = next((name for name, file in files.items() if file is module), str(module))
        _, file = newest(name, folder, pattern)
        logging.info("Restoring %s from %s", name, Path(file).name)
        module.restore_from(file)


def _no_optimizer(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    return []
