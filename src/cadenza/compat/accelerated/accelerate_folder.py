"""Training states that pytorch-accelerated wrote with the package ``accelerate``: folders of safetensors and torch files.

Nothing in them is executed: torch files are read with ``weights_only=True``.
"""

from __future__ import annotations

import json
import os
import re
from codecs import encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from cadenza.compat.accelerated.schedulers.wsd_scheduler import WSDLrScheduler
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError, CheckpointMismatchError
from cadenza.loading.rng import RNGState
from cadenza.optim.optimizers import load_state

GUIDE = "docs/guides/from-pytorch-accelerated.md, 'Training states of the original'"

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The files that may hold the weights, in search order."""

SHARDED = ("pytorch_model_fsdp*", "pytorch_model", "optimizer_0", "zero_to_fp32.py")
"""Files written by FSDP and DeepSpeed instead. Their formats are not supported."""

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The beginning of a torch file that is not a zip archive, as torch wrote it before 1.6."""

_NUMPY: list[Any] = [  # constructors of NumPy arrays and scalars: data, not code
    encode,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(name)) for name in ("uint32", "int64", "float32", "float64")),
    *((np.empty(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
]


@dataclass(frozen=True, slots=True)
class AccelerateState:
    """The content of a folder, on the host."""

    folder: str
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    schedulers: list[dict[str, Any]]
    """Every state that may belong to the scheduler. The original writes the same state several times."""
    scaler: dict[str, Any] | None
    rng_state: RNGState | None
    """None if the folder has no file for this rank."""
    metadata: dict[str, Any]

    @property
    def epoch(self) -> int:
        """The number of the epoch in which the state was saved, from 1."""
        return int(self.metadata.get("current_epoch", 1))

    def updates(self, updates_per_epoch: int | None) -> int | None:
        """Return the number of updates of the training; None if it is unknown.

        The scheduler, `WSDCheckpointCallback` and some optimizers count updates. A count outside the epoch is ignored, because
        it includes an earlier training.
        """
        counts: list[int] = []
        for state in self.schedulers:
            counts += [state["num_updates"] + 1] if "num_updates" in state else []
            counts += [state["last_epoch"]] if "last_epoch" in state else []
        counts += [self.metadata["step"]] if "checkpoint_type" in self.metadata else []
        counts += [int(state["step"]) for state in self.optimizer["state"].values() if "step" in state]
        each = updates_per_epoch or 0
        return next((count for count in counts if (self.epoch - 1) * each <= count <= self.epoch * each), None)

    def finished_epochs(self, updates_per_epoch: int | None, batches_per_epoch: int | None) -> int:
        """Return the number of complete epochs. An epoch in which the state was saved does not count."""
        updates = self.updates(updates_per_epoch)
        if updates is not None and updates_per_epoch:
            is_complete = updates == self.epoch * updates_per_epoch
        else:
            is_complete = self.metadata.get("global_step") == self.epoch * (batches_per_epoch or 0)
        return self.epoch if is_complete else self.epoch - 1

    def load(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """Restore the weights, the optimizer and the scheduler.

        Raises:
            CheckpointMismatchError: The state has other weights, or no state of the scheduler; nothing is changed then.
        """
        self._load(model, optimizer, scheduler, lambda state: scheduler.load_state_dict(state))

    def resume(self, model: nn.Module, optimizer: Optimizer, scheduler: Any, updates: int | None) -> None:
        """Restore the same state to continue the training. `updates` is its number of updates; None if it is unknown.

        Raises:
            CheckpointMismatchError: As in `load`.
            ScheduleError: A `WSDLrScheduler` cannot continue, because the number of updates is unknown.
        """
        if not isinstance(scheduler, WSDLrScheduler):
            self.load(model, optimizer, scheduler)
            return
        counter = {} if updates is None else {"num_updates": updates - 1}
        self._load(model, optimizer, scheduler, lambda state: scheduler.resume({**counter, **state}))

    def _load(
        self, model: nn.Module, optimizer: Optimizer, scheduler: Any, load_scheduler: Callable[[dict[str, Any]], None]
    ) -> None:
        weights = _fitting(self.model, model.state_dict(keep_vars=True), self.folder)
        state = self._state_of(scheduler)
        model.load_state_dict(weights)
        load_state(optimizer, self.optimizer)
        if state is not None:
            load_scheduler(state)

    def _state_of(self, scheduler: Any) -> dict[str, Any] | None:
        """Return the saved state of the scheduler: the last of those with the most keys in common."""
        if scheduler is None:
            if self.schedulers:
                raise CheckpointMismatchError(
                    f"{self.folder!r} holds the state of a scheduler, but the trainer has none. Pass create_scheduler_fn."
                )
            return None
        own = set(scheduler.state_dict())
        found = max(self.schedulers[::-1], key=lambda state: len(own & set(state)), default={})
        if 2 * len(own & set(found)) < len(own):
            raise CheckpointMismatchError(
                f"{self.folder!r} holds no state of a {type(scheduler).__name__}: expected the keys {sorted(own)}; got "
                f"{sorted(found)}. Use the scheduler of the saved training."
            )
        return found


def is_accelerate_folder(folder: str | os.PathLike[str]) -> bool:
    """Return whether ``accelerate`` wrote a folder."""
    names = ("optimizer.bin", "random_states_0.pkl", "trainer_metadata.pt", *WEIGHTS, *SHARDED)
    return any(_files(folder, name) for name in names)


def read(folder: str | os.PathLike[str], rank: int) -> AccelerateState:
    """Read a folder that ``accelerate`` wrote. Nothing in it is executed.

    Args:
        folder: The folder.
        rank: Read the RNG state of this rank.

    Raises:
        CheckpointFormatError: A file cannot be read without executing code, or has a format that is not supported.
        CheckpointDamagedError: A file is damaged.
        FileNotFoundError: A file is missing.
    """
    path = Path(folder)
    if several := _files(path, "model_1.*", "optimizer_1.bin"):
        raise CheckpointFormatError(
            f"{os.fspath(folder)!r} holds the states of several models or optimizers; expected one of each, got also "
            f"{[path.name for path in several]}. Load them in a script of your own; see {GUIDE}."
        )
    saved = _files(path, "scheduler*.bin", "custom_checkpoint_*.pkl")
    random_states, scaler, metadata = (
        path / name for name in (f"random_states_{rank}.pkl", "scaler.pt", "trainer_metadata.pt")
    )
    return AccelerateState(
        folder=os.fspath(folder),
        model=_weights(path),
        optimizer=torch_file(path / "optimizer.bin"),
        schedulers=[torch_file(path) for path in sorted(saved, key=lambda path: (len(path.name), path.name))],
        scaler=torch_file(scaler) if scaler.exists() else None,
        rng_state=_rng_state(random_states) if random_states.exists() else None,
        metadata=torch_file(metadata) if metadata.exists() else {},
    )


def _files(folder: str | os.PathLike[str], *patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in Path(folder).glob(pattern)]


def _weights(folder: Path) -> dict[str, Tensor]:
    found = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if found is None:
        names = sorted(file.name for file in _files(folder, *SHARDED))
        raise CheckpointFormatError(
            f"{str(folder)!r} holds no weights that can be read; expected one of {', '.join(WEIGHTS)}; got {names or 'none'}. "
            f"Convert what FSDP or DeepSpeed wrote; see {GUIDE}."
        )
    reads: Callable[[Path], dict[str, Tensor]] = _safetensors if "safetensors" in found.name else torch_file
    if found.suffix != ".json":
        return reads(found)
    try:
        names = sorted(set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(f"{str(found)!r} is not an index of weights: {error!r}") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointFormatError(f"{str(found)!r} names files outside of its folder, which are not read: {outside}")
    return {name: tensor for file_name in names for name, tensor in reads(folder / file_name).items()}


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointDamagedError(f"{str(path)!r} cannot be read: {error}") from None


def torch_file(path: Path) -> Any:
    """Read a torch file that consists of plain values, tensors, and NumPy's arrays and numbers. Nothing in it is executed.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointFormatError: It holds other objects and can only be read by executing code.
        CheckpointDamagedError: It is damaged.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_LEGACY))
        if start[:1] == b"\x80" and start != _LEGACY:
            raise _not_plain(path, "a pickle that torch.save did not write")
        with safe_globals([*_NUMPY]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise _not_plain(path, _unsafe(path, error)) from None
    except (RuntimeError, EOFError, ValueError, LookupError) as error:
        raise CheckpointDamagedError(f"{str(path)!r} cannot be read: {error}") from None


def _not_plain(path: Path, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{str(path)!r} cannot be read without executing code in it: it holds {what}. Nothing was loaded. If you trust the "
        "file, convert it: load it with torch.load(path, weights_only=False) or pickle.load, replace all but plain values "
        f"and tensors, and save it with torch.save. See {GUIDE}."
    )


def _unsafe(path: Path, error: UnpicklingError) -> str:
    """Return the names of what a file would execute."""
    try:
        names = get_unsafe_globals_in_checkpoint(path)
    except (ValueError, RuntimeError):  # a file of an old torch
        names = re.findall(r"GLOBAL (\S+)", str(error))
    return ", ".join(sorted(names)) or "more than plain values and tensors, or is damaged"


def _rng_state(path: Path) -> RNGState:
    state = torch_file(path)
    try:
        cuda = dict(enumerate(state.get("torch_cuda_manual_seed", ())))
        return RNGState(state["random_state"], state["torch_manual_seed"], cuda, state["numpy_random_seed"])
    except (LookupError, TypeError, AttributeError):
        raise CheckpointDamagedError(f"{str(path)!r} holds no RNG state. Remove it to continue without one") from None


def _fitting(saved: Mapping[str, Any], own: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the weights with the names of the model, without the prefixes of wrappers and with tied ones."""
    weights, own = dict(saved), {name: weight for name, weight in own.items() if isinstance(weight, Tensor)}
    for prefix in ("module.", "_orig_mod.") * 2:
        if all(name.startswith(prefix) for name in weights) and not any(name.startswith(prefix) for name in own):
            weights = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    by_storage = {own[name].data_ptr(): weight for name, weight in weights.items() if name in own}
    for name, weight in own.items():
        if name not in weights and weight.numel() and weight.data_ptr() in by_storage:
            weights[name] = by_storage[weight.data_ptr()]  # safetensors files hold one of several tied weights
    tensors = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
    shapes, others = ({name: tuple(tensor.shape) for name, tensor in part.items()} for part in (tensors, own))
    if shapes != others:
        names = [name for name in {**others, **shapes} if shapes.get(name) != others.get(name)]
        raise CheckpointMismatchError(
            f"{folder!r} belongs to another model; nothing was loaded. It differs in {len(names)} weights: "
            + "; ".join(f"{name}: saved {shapes.get(name, 'nothing')}, now {others.get(name, 'nothing')}" for name in names[:5])
        )
    return weights
