"""Read a checkpoint and verify it in the same pass: each byte is read once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from cadenza.checkpoint.store.files import Files
from cadenza.checkpoint.store.manifest import FILES, INDEX, check_file, check_sums, files_in
from cadenza.checkpoint.store.shards import stored_in
from cadenza.checkpoint.store.tensor_files import facts_of, read_tensors
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError
from cadenza.status.plain import decode

T = TypeVar("T")


class Loaded(NamedTuple):
    """A checkpoint's content, verified."""

    name: str
    manifest: dict[str, Any]
    model: dict[str, Any]
    """Tensors, or a `Stored` for each that was read lazily."""
    state: Any


def loaded_from(files: Files, name: str, manifest: dict[str, Any], *, lazily: bool = False) -> Loaded:
    """Return the content of a checkpoint, verified. Nothing in it is ever executed.

    Args:
        files: The files of the store.
        name: The name of the checkpoint.
        manifest: Its manifest.
        lazily: Return a `Stored` for each tensor that is stored in shards. Any part of it can be read later.

    Raises:
        CheckpointDamagedError: A file is missing, cut or changed; the message names it.
        CheckpointFormatError: A file has the right checksum, but not the expected format.
    """
    said = files_in(manifest)
    for other in said.keys() - {*FILES, INDEX}:
        check_file(files, name, other, said[other])
    tensors: dict[str, Any] = tensors_of(files, name, FILES[1], said[FILES[1]])
    model: dict[str, Any] = tensors_of(files, name, FILES[0], said[FILES[0]])
    if INDEX in said:
        index = parsed(name, INDEX, json.loads, bytes_of(files, name, INDEX, said[INDEX]))
        parts = parsed(name, INDEX, lambda one: [stored_in(files, name, one[key], said) for key in ("model", "state")], index)
        for held, some in zip((model, tensors), parts, strict=True):
            held |= some if lazily else parsed(name, INDEX, lambda many: {key: one.read() for key, one in many.items()}, some)
    text = bytes_of(files, name, FILES[2], said[FILES[2]])
    state = parsed(name, FILES[2], lambda text: decode(json.loads(text), tensors), text)
    return Loaded(name, manifest, model, state)


def bytes_of(files: Files, checkpoint: str, name: str, said: Mapping[str, Any]) -> bytes:
    """Return the content of a file of a checkpoint, verified.

    Raises:
        CheckpointDamagedError: It is missing, cut or changed.
    """
    content = _opened(checkpoint, name, lambda: files.read(f"{checkpoint}/{name}"))
    check_sums(checkpoint, name, facts_of(content), said)
    return content


def tensors_of(files: Files, checkpoint: str, name: str, said: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of a checkpoint, verified.

    Raises:
        CheckpointDamagedError: The file is missing, cut or changed.
        CheckpointFormatError: The file has the right checksum, but not the format.
    """

    def read() -> Any:
        with files.open(f"{checkpoint}/{name}") as file:
            return read_tensors(file, said["size"])

    found, facts = _opened(checkpoint, name, read)
    check_sums(checkpoint, name, facts, said)
    if isinstance(found, ValueError):
        raise _format_error(checkpoint, name, found)
    tensors: dict[str, Tensor] = found
    return tensors


def parsed(checkpoint: str, name: str, parse: Callable[[Any], T], content: Any) -> T:
    """Return the result of `parse`. Its error means that the file does not have the format.

    Raises:
        CheckpointFormatError: It has another one.
    """
    try:
        return parse(content)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _format_error(checkpoint, name, error) from None


def _opened(checkpoint: str, name: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{checkpoint}: {name} is missing") from None
    except OSError as error:
        raise CheckpointDamagedError(f"{checkpoint}: {name} cannot be read: {error}") from None


def _format_error(checkpoint: str, name: str, error: Exception) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{checkpoint}: {name} does not have the format that cadenza writes ({error}). Another program wrote it, and nothing "
        "of it is used."
    )
