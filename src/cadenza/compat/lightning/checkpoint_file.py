"""Reads weights and metadata of Lightning checkpoints without executing pickled code."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cadenza.checkpoint.weights import Chosen
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError

FACTS = ("epoch", "global_step", "pytorch-lightning_version", "hyper_parameters", "datamodule_hyper_parameters")


def load_weights(module: nn.Module, path: str | PathLike[str], strict: bool = True) -> list[str]:
    """Load the weights of a Lightning checkpoint into a module. Optimizers, counters and pickled objects are not read.

    ``module.on_load_checkpoint`` is called first with the content of the checkpoint, as in Lightning.

    Args:
        module: The ``LightningModule``, or any module with the same names.
        path: The file, such as ``"epoch=3-step=400.ckpt"``.
        strict: Names and shapes must be the module's.

    Returns:
        The names that did not fit; always empty if `strict`.

    Raises:
        CheckpointError: There is no such file, it is damaged, it is a folder of shards, or it cannot be read without pickled
            code. Nothing is changed then.
        CheckpointMismatchError: Names or shapes differ, and `strict`; nothing is changed then.

    On multiple ranks, each rank reads the file itself, so each must call it.

    >>> import tempfile
    >>> torch.save({"state_dict": nn.Linear(2, 1).state_dict()}, path := f"{tempfile.mkdtemp()}/last.ckpt")
    >>> load_weights(nn.Linear(2, 1), path)
    []
    """
    content = _read(path)
    if callable(on_load := getattr(module, "on_load_checkpoint", None)):
        on_load(content)
    weights = {name: value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    return Chosen(str(path), weights).load_into(module, strict=strict)


def checkpoint_facts(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the metadata of a Lightning checkpoint: epoch, global_step, version and saved hyperparameters.

    Hyperparameters other than plain values are replaced with the name of their class.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file cannot be used, as in `load_weights`.

    >>> import tempfile
    >>> torch.save({"epoch": 3, "global_step": 400, "state_dict": {}}, path := f"{tempfile.mkdtemp()}/last.ckpt")
    >>> checkpoint_facts(path)
    {'epoch': 3, 'global_step': 400}
    """
    content = _read(path)
    return {name: _shown(content[name]) for name in FACTS if name in content}


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    where = Path(path)
    if where.is_dir():
        raise CheckpointFormatError(_sharded(where))
    if not where.is_file():
        raise CheckpointError(f"there is no checkpoint file {str(where)!r}. Give the path of a .ckpt file of Lightning.")
    try:
        content = _loaded(where)
    except pickle.UnpicklingError as error:
        raise CheckpointFormatError(_pickled(where, error)) from None
    except Exception as error:  # any error: the file may hold anything
        raise CheckpointDamagedError(f"{str(where)!r} cannot be read, it is damaged or no checkpoint: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise CheckpointFormatError(
            f"{str(where)!r} is no checkpoint of Lightning: expected a dict with 'state_dict', got "
            f"{sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__}. Read a plain state_dict "
            "with torch.load(path, weights_only=True) and module.load_state_dict(...)."
        )
    return dict(content)


def _loaded(where: Path) -> Any:
    """Return the content. Objects other than tensors and plain values become `NotLoaded`, and their code is not called."""
    try:
        return torch.load(where, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not (names := _names_in(where)):
            raise
        inert: list[Any] = [(type(name, (NotLoaded,), {"name": name}), name) for name in names]
        try:
            with torch.serialization.safe_globals(inert):
                return torch.load(where, map_location="cpu", weights_only=True)
        except Exception:  # any error, such as for a subclass of dict; the first error is more useful
            pass
        raise


class NotLoaded:
    """A placeholder for a pickled class or function that was not loaded."""

    name: ClassVar[str]
    """The name of the class or function."""

    def __new__(cls, *arguments: object, **keywords: object) -> NotLoaded:
        return super().__new__(cls)

    def __init__(self, *arguments: object, **keywords: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _shown(value: Any) -> Any:
    """Return a metadata value with names in place of objects that were not loaded."""
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, NotLoaded):
        return f"<{kind.name}, not loaded>"
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return type(value)(map(_shown, value)) if type(value) in (list, tuple) else value


def _names_in(where: Path) -> list[str]:
    """Return the names of non-plain classes and functions in a pickle; empty if unknown."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(where)))
    except Exception:  # any error: the file may be malicious
        return []


def _pickled(where: Path, error: Exception) -> str:
    names = _names_in(where)
    first = re.search(r"GLOBAL ([\w.]+)", str(error))  # a file in the old format is not scanned
    what = ", ".join(names or [first[1] if first else "objects without a known class"])
    return (
        f"{str(where)!r} holds pickled objects besides tensors and plain values: {what}. They were not loaded, because loading "
        "them can run code. If you trust the file and these classes, allow them with "
        f"torch.serialization.add_safe_globals([...]), or write the weights alone: torch.save({{'state_dict': "
        "torch.load(path, weights_only=False)['state_dict']}, new_path). They are often arguments that "
        "save_hyperparameters() stored; save_hyperparameters(ignore=[...]) leaves one out."
    )


def _sharded(where: Path) -> str:
    return (
        f"{str(where)!r} is a folder: a sharded checkpoint of Lightning (FSDP, ModelParallel or DeepSpeed), which cannot be "
        "read here. Make one file of it with python -m lightning.pytorch.utilities.consolidate_checkpoint (for DeepSpeed: "
        "convert_zero_checkpoint_to_fp32_state_dict), and give that file."
    )
