"""Files that Keras's callbacks write through ``model.save`` and ``model.save_weights``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.drivers.sharding import is_sharded, laid_out, whole
from cadenza.optim.optimizers import load_state

if TYPE_CHECKING:
    from cadenza.run import Run


def save(run: Run, path: Any, *, overwrite: bool = True) -> None:
    """Write the weights and the states of the optimizers, with ``torch.save``, under exactly this name. The write is atomic.

    ``torch.load(path, weights_only=True)`` returns ``{"model": state_dict, "optimizers": [state_dict, ...]}``. With a name that
    ends in ``.safetensors``, only the weights are written, in that format. For a sharded model every rank must call this; the
    main process writes.
    """
    target = Path(os.fspath(path))
    if target.is_dir():
        raise IsADirectoryError(f"expected the name of a file; {target} is a directory")
    weights = whole_weights(run)
    if not run.is_main:
        return
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists. Pass overwrite=True to replace it.")
    part = target.with_name(f".{target.name}.part")
    try:
        if target.suffix == ".safetensors":
            from safetensors.torch import save_file  # imported here because few runs need it

            save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, part)
        else:
            torch.save({"model": weights, "optimizers": _optimizer_states(run)}, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def make_folder(run: Run, callback: Any) -> None:
    """Create the folder of a ModelCheckpoint or BackupAndRestore that all ranks call, to avoid concurrent creation.

    Every rank must call this.
    """
    template = str(getattr(callback, "filepath", "")) or os.path.join(str(callback.backup_dir), "")
    if run.is_main and (folder := os.path.dirname(template.partition("{")[0])):
        os.makedirs(folder, exist_ok=True)
    run.driver.barrier()


def whole_weights(run: Run) -> dict[str, Tensor]:
    """Return the weights, gathered if the model is sharded. Every rank must call this."""
    return {name: whole(tensor) for name, tensor in run.model.state_dict().items() if isinstance(tensor, Tensor)}


def load(run: Run, path: Any) -> None:
    """Read a file written by `save`, or a state dict written by ``torch.save``. Every rank must call this."""
    target = Path(os.fspath(path))
    if target.suffix == ".safetensors":
        from safetensors.torch import load_file

        content: Mapping[str, Any] = load_file(target)
    else:
        content = torch.load(target, map_location="cpu", weights_only=True)
    weights = content["model"] if set(content) == {"model", "optimizers"} else content
    own = run.model.state_dict()
    placed = {name: laid_out(weight, own[name]) if is_sharded(own.get(name)) else weight for name, weight in weights.items()}
    run.model.load_state_dict(placed)
    states = content["optimizers"] if weights is not content else []
    if states and len(states) == len(run.optimizers):
        for optimizer, state in zip(run.optimizers, states, strict=True):
            load_state(optimizer, state)


def _optimizer_states(run: Run) -> list[dict[str, Any]]:
    """Return the states of the optimizers; empty if they are sharded."""
    sharded = any(is_sharded(parameter) for parameter in run.model.parameters())
    return [] if sharded else [optimizer.state_dict() for optimizer in run.optimizers]
