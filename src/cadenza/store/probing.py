"""Whether checkpoints can be written, found out before the first step."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from cadenza.errors import DirectoryError, DistributedError, MissingExtraError
from cadenza.store.checkpoints import Store

if TYPE_CHECKING:
    from cadenza.drivers.base import Driver


def probe_on_all_ranks(store: Store, driver: Driver) -> None:
    """Write a small checkpoint file as a save does, and remove it, on each rank that writes. Every rank must call this.

    Raises:
        DirectoryError: It cannot be written by this rank.
        MissingExtraError: A package is missing.
        DistributedError: It cannot be written by another rank.
    """
    error: Exception | None = None
    if driver.is_main or driver.shards:
        try:
            probe(store)
        except Exception as raised:
            error = raised
    several = driver.world_size > 1
    everyone = driver.gather(None if error is None else f"{type(error).__name__}: {error}") if several else []
    if error is not None:
        raise error
    for rank, problem in enumerate(everyone):
        if problem is not None:
            raise DistributedError(f"rank {rank} cannot write checkpoints, so that the run cannot start: {problem}")


def probe(store: Store) -> None:
    """Write a small file of tensors in a hidden folder, flush and rename it where a save does so, and remove it.

    Raises:
        DirectoryError: One of it fails.
        MissingExtraError: A package is missing.
    """
    files, folder = store.files, store.hidden("tmp", "step-00000000")
    names = [folder]
    try:
        files.write_tensors(f"{folder}/{uuid.uuid4().hex}.safetensors", {"probe": torch.zeros(1)})
        if files.atomic:
            names.append(store.hidden("trash", "step-00000000"))
            files.rename(*names)
    except ImportError as error:
        raise MissingExtraError(error.name or str(error), needed_by="Checkpoint") from error
    except Exception as error:  # each kind of storage has errors of its own
        raise DirectoryError(
            f"checkpoints cannot be written to {str(files)!r}: {getattr(error, 'strerror', None) or repr(error)}. Give "
            "Checkpoint(directory=) a place in which files can be made, renamed and removed, or free this one."
        ) from error
    finally:
        for name in names:
            with suppress(Exception):  # what is left is swept when the run is continued
                files.remove(name)
