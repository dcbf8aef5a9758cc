"""Check, before the first step, that checkpoints can be written."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from cadenza.checkpoint.store.checkpoints import Store
from cadenza.drivers.agreeing import agreed
from cadenza.errors import DirectoryError, DistributedError, MissingExtraError

if TYPE_CHECKING:
    from cadenza.drivers.base import Driver


def probe_on_all_ranks(store: Store, driver: Driver) -> None:
    """Write and remove a small checkpoint file on each rank that writes. Every rank must call this.

    Raises:
        DirectoryError: This rank cannot write it.
        MissingExtraError: A package is missing.
        DistributedError: Another rank cannot write it.
    """
    agreed(
        driver.gather if driver.world_size > 1 else lambda told: [told],
        lambda: probe(store) if driver.is_main or driver.shards else None,
        lambda rank, problem: DistributedError(f"rank {rank} cannot write checkpoints, so the run cannot start: {problem}"),
    )


def probe(store: Store) -> None:
    """Write a small file of tensors in a hidden folder, flush, rename and remove it, as a save does.

    Raises:
        DirectoryError: One of these operations fails.
        MissingExtraError: A package is missing.
    """
    files, folder = store.files, store.hidden("tmp", "step-00000000")
    names = [folder]
    try:
        files.make(folder)
        files.write_tensors(f"{folder}/{uuid.uuid4().hex}.safetensors", {"probe": torch.zeros(1)})
        if files.atomic:
            names.append(store.hidden("trash", "step-00000000"))
            files.rename(*names)
    except ImportError as error:
        raise MissingExtraError(error.name or str(error), needed_by="Checkpoint") from error
    except Exception as error:  # each storage raises its own kinds of errors
        raise DirectoryError(
            f"checkpoints cannot be written to {str(files)!r}: {getattr(error, 'strerror', None) or repr(error)}. Give "
            "Checkpoint(directory=) a folder or URL in which files can be created, renamed and removed, or free space there."
        ) from error
    finally:
        for name in names:
            with suppress(Exception):  # leftovers are removed when the run continues
                files.remove(name)
