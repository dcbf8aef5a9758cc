"""``nemo.utils.helpers``: attributes by dotted names, devices, and the newest files of modules in a folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from cadenza.compat.neural.kinds import DeviceType, default_placement, device_of


def newest(name: str, folder: str, pattern: str = "") -> tuple[int, str]:
    """Return the newest file of a module: the one with the highest number at the end of its name, and this number.

    Args:
        name: The beginning of the file's name. A file ``<name>-...`` takes precedence over ``<name>...``, so that ``Encoder``
            does not find the file of ``EncoderDecoder``.
        folder: The folder.
        pattern: A part of the rest of the name.

    Raises:
        ValueError: The folder does not exist, or has no such file.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"the folder {folder} does not exist")
    if not isinstance(name, str) or not isinstance(pattern, str):
        raise ValueError(f"the name of a module and the pattern must be strings; got {name!r} and {pattern!r}")
    begun = [path for path in Path(folder).iterdir() if path.name.startswith(name) and pattern in path.name[len(name) :]]
    found = [(int(match[1]), str(path)) for path in begun if (match := re.search(r"-(\d+)\.[^-]*$", path.name))]
    if not found:
        raise ValueError(f"{folder} has no numbered file of module {name!r} with {pattern!r} in its name")
    exact = [(number, path) for number, path in found if Path(path).name[len(name) :].startswith("-")]
    return max(exact or found)


def get_checkpoint_from_dir(
    module_names: str | Iterable[str], cpkt_dir: str, ckpt_pattern: str = "", return_steps: bool = False
) -> list[str] | tuple[list[str], list[int]]:
    """Return the newest file of each module; with `return_steps`, also their numbers. See `newest`.

    Raises:
        ValueError: The folder does not exist, or has no such file.
    """
    names = [module_names] if isinstance(module_names, str) else module_names
    found = [newest(name, cpkt_dir, ckpt_pattern) for name in names]
    files, steps = [path for _, path in found], [step for step, _ in found]
    return (files, steps) if return_steps else files


def rgetattr(obj: Any, attr: str, *default: Any) -> Any:
    """Return the attribute of a dotted name, such as ``"layer.weight"``; or the default, if one part is missing."""
    return reduce(lambda owner, name: getattr(owner, name, *default), attr.split("."), obj)


def rsetattr(obj: Any, attr: str, val: Any) -> None:
    """Set the attribute of a dotted name, such as ``"layer.weight"``."""
    owner, _, name = attr.rpartition(".")
    setattr(rgetattr(obj, owner) if owner else obj, name, val)


def get_device(local_rank: int | None) -> DeviceType:
    """Return the placement of a script: AllGpu on several processes, or else the best device."""
    return default_placement() if local_rank is None else DeviceType.AllGpu


def get_cuda_device(placement: DeviceType) -> torch.device:
    """Return the device of a placement."""
    return device_of(placement)


def pad_to(x: int, k: int = 8) -> int:
    """Return the smallest multiple of k that is at least x.

    >>> pad_to(31, 8)
    32
    """
    return -(-x // k) * k
