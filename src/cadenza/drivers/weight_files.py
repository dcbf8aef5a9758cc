"""Files of weights, of which parts of tensors are read: safetensors, and folders of torch's distributed checkpoint (DCP)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from cadenza.drivers.sharding import Region
from cadenza.errors import CheckpointFormatError
from cadenza.files.paths import local_path
from cadenza.lazy import imported


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a safetensors file. It is not in memory."""

    file: Any
    name: str
    shape: tuple[int, ...]

    def read(self, region: Region | None = None) -> Tensor:
        """Read the whole tensor, or a part, to the host."""
        tensor: Tensor = self.file.get_tensor(self.name) if region is None else self.file.get_slice(self.name)[region]
        return tensor


def tensors_in_file(path: str | PathLike[str], aliases: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    """Return the tensors of a safetensors file, or of the files that an index names, by name. Only headers are read.

    Args:
        path: The file, or a ``model.safetensors.index.json`` beside the files, as Hugging Face writes large models. With
            `aliases`, also a folder of torch's distributed checkpoint.
        aliases: See `aliases_in`.

    Raises:
        CheckpointFormatError: It is neither.
    """
    target = local_path(path)
    if aliases is not None and is_dcp_folder(target):
        return dict(dcp_reader(target).tensors_in(target, aliases))
    if target.suffix != ".json":
        return _in_one_file(target)
    try:
        names = json.loads(target.read_text(encoding="utf-8"))["weight_map"]
        files = {file: _in_one_file(target.parent / file) for file in dict.fromkeys(names.values())}
        return {name: files[file][name] for name, file in names.items()}
    except (ValueError, LookupError, TypeError, AttributeError, FileNotFoundError) as error:
        raise CheckpointFormatError(
            f"{target} is no index of safetensors files ({type(error).__name__}: {error}). Expected a JSON file with a "
            "'weight_map' that names, for each tensor, a file in the same folder that holds it."
        ) from None


def is_dcp_folder(path: str | PathLike[str]) -> bool:
    """Return whether a path is that of a folder of torch's distributed checkpoint."""
    return Path(path, ".metadata").is_file()


def dcp_reader(path: str | PathLike[str]) -> Any:
    """Return the module that reads folders of torch's distributed checkpoint. It is in a wing."""
    return imported("cadenza.parallel.dcp", needed_by=f"the folder {local_path(path)}")


def _in_one_file(path: Path) -> dict[str, FileTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, "pt")
    except SafetensorError as error:
        raise CheckpointFormatError(
            f"{path} is no safetensors file ({error}). A pickle (.pt, .pth, .bin, .ckpt) could run code and is not read here: "
            "load it with torch.load(..., weights_only=True) and model.load_state_dict, if you trust it."
        ) from None
    return {name: FileTensor(file, name, tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
