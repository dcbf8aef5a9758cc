"""Capsules: what one step needs to be repeated, as safetensors and JSON in a folder of the run directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from cadenza.checkpoint.store.files import FORMAT_ERRORS, LocalFiles, Sum, SummedFile, read_tensors
from cadenza.checkpoint.store.reading import check, count, or_none, parsed
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, StateError
from cadenza.files.disk import open_regular, read_object
from cadenza.files.paths import local_path
from cadenza.status.encoding import decode, encode
from cadenza.status.formats import in_json

FOLDER = "capsules"
"""The folder of the capsules in a run directory."""
_FACTS, _TENSORS = "capsule.json", "tensors.safetensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class CapsuleContent:
    """A capsule that was read."""

    path: Path
    facts: dict[str, Any]
    """The values that ``cadenza capsule`` shows: step, reason, samples, module, parameter."""
    state: dict[str, Any]
    """``batches``, ``rng`` (the RNG state before each batch), ``model`` (the weights) and ``last`` (the steps before)."""


def write_capsule(folder: Path, name: str, facts: dict[str, Any], state: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Write a capsule, which appears whole or not at all; return its path and its facts. One of this name is replaced.

    Batches of a type that cannot be saved are left out, since the loader has them. The fact ``batches_left_out`` says so.

    Args:
        folder: The folder of the capsules. It is made if it is not there.
        name: The name of the capsule.
        facts: Plain values.
        state: Values that a checkpoint can hold, and ``batches``.

    Raises:
        StateError: Another value in `state` cannot be saved; the message names its path.
        OSError: The disk rejects it.
    """
    try:
        plain, tensors = encode(state)
    except StateError as error:
        facts = {**facts, "batches_left_out": str(error)}
        plain, tensors = encode({**state, "batches": None})
    files, beside, path = LocalFiles(folder), f".{name}.new", folder / name
    shutil.rmtree(folder / beside, ignore_errors=True)
    files.make(beside, lasting=False)
    try:
        written = files.write_tensors(f"{beside}/{_TENSORS}", tensors)
        content = {"format": _FORMAT, "facts": in_json(dict(facts)), "state": plain, "tensors": written}
        files.write(f"{beside}/{_FACTS}", f"{json.dumps(content, indent=1)}\n".encode())
        shutil.rmtree(path, ignore_errors=True)
        files.rename(beside, name)
    except BaseException:
        shutil.rmtree(folder / beside, ignore_errors=True)
        raise
    return path, facts


def capsules_in(run: Path) -> list[Path]:
    """Return the capsules in a run directory, by step and rank."""
    return sorted(path.parent for path in (run / FOLDER).glob(f"step-*/{_FACTS}"))


def capsule_at(path: str | PathLike[str]) -> Path:
    """Return the folder of a capsule. Of a run directory, it is the last capsule.

    Raises:
        CheckpointError: There is none.
    """
    given = local_path(path)
    if (given / _FACTS).is_file():
        return given
    found = capsules_in(given)
    if not found:
        raise CheckpointError(
            f"there is no capsule at {str(given)!r}: expected the path of one, such as runs/first/capsules/step-00000120, or a "
            "run directory in which Capsule() has written one."
        )
    return found[-1]


def facts_of_capsule(path: Path) -> dict[str, Any]:
    """Return the facts of a capsule without its tensors.

    Raises:
        CheckpointDamagedError, CheckpointFormatError: It cannot be read.
    """
    facts: dict[str, Any] = _content(path)["facts"]
    return facts


def read_capsule(path: str | PathLike[str]) -> CapsuleContent:
    """Read a capsule. Nothing in it is executed.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    folder = capsule_at(path)
    content = _content(folder)
    try:
        size = (folder / _TENSORS).stat().st_size
        with open_regular(folder / _TENSORS, follow=False) as file, closing(Sum.of_size(size)) as total:
            summed = SummedFile(file, total)
            tensors = read_tensors(summed, size)
            found = summed.rest()
    except OSError as error:
        raise CheckpointDamagedError(f"the capsule {str(folder)!r} cannot be read: {error}") from None
    except FORMAT_ERRORS as error:
        raise CheckpointDamagedError(f"the capsule {str(folder)!r} is damaged: {error}") from None
    if (expected := content.get("tensors", found)) != found:
        raise CheckpointDamagedError(
            f"the capsule {str(folder)!r} is damaged: {_TENSORS} has {found}, and was written with {expected}"
        )
    return CapsuleContent(
        folder, content["facts"], parsed(str(folder), _FACTS, lambda text: decode(text, tensors), content["state"])
    )


def _content(path: Path) -> dict[str, Any]:
    try:
        content = read_object(path / _FACTS)
    except ValueError as error:
        raise CheckpointDamagedError(f"the capsule {str(path)!r} is damaged: {error}") from None
    if content is None:
        raise CheckpointError(f"there is no capsule at {str(path)!r}")
    if content.get("format") != _FORMAT:
        raise CheckpointFormatError(
            f"the capsule {str(path)!r} has format {content.get('format')!r}; this version reads format {_FORMAT}."
        )
    parsed(str(path), _FACTS, lambda content: check(content, _KINDS, ""), content)
    return content


_SAMPLES = or_none([object])
_OF_BATCH = {"epoch": count, "batch_in_epoch": count, "samples": _SAMPLES}
_CAPSULE = {
    "why": str,
    "step": count,
    "rank": count,
    "ranks": count,
    "batches": [_OF_BATCH],
    "not_loaded?": or_none(_OF_BATCH),
    "losses": [float | int | str | None],
    "module": str | None,
    "parameter": str | None,
    "tensor": str | None,
    "guilty_samples": _SAMPLES,
    "weights_exact": bool,
    "batches_left_out?": str,
    "second_pass?": str,
}
_KINDS = {"facts": _CAPSULE, "state": {"batches": object, "rng": object, "model": object}}
