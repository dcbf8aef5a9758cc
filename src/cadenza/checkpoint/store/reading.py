"""Read a checkpoint and verify it in the same pass: each byte is read once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from cadenza.checkpoint.store.files import Files
from cadenza.checkpoint.store.manifest import FILES, INDEX, PARTS, check_file, files_in, read_whole
from cadenza.checkpoint.store.shards import MODEL, RANK, STATE, Stored, dtype_of, files_by_rank, part_file, split_of, stored_in
from cadenza.checkpoint.store.state_fields import checked_rank, checked_state
from cadenza.checkpoint.store.tensor_files import Facts, checked_shape, read_bytes, read_tensors
from cadenza.errors import CheckpointFormatError
from cadenza.status.branches import Branch
from cadenza.status.plain import decode

T = TypeVar("T")


class Loaded(NamedTuple):
    """A checkpoint's content, verified."""

    name: str
    manifest: dict[str, Any]
    model: dict[str, Any]
    """Tensors, or a `Stored` for each that was read lazily."""
    state: Any
    ranks: Sequence[Any] | None = None
    """By rank, the state that only this rank has; None if the checkpoint has no files of ranks."""

    @property
    def branch(self) -> Branch:
        """The branch that wrote the checkpoint."""
        return Branch.of(self.manifest, self.manifest["run"])

    @property
    def by_rank(self) -> Sequence[Any]:
        """By rank, the state that only this rank has. Each is read when it is asked for."""
        return self.ranks or self.state.get("ranks") or [self.state]


class RankStates(Sequence[Any]):
    """By rank, the state that only this rank has: that of the main process, and the others in files.

    Args:
        first: The state of the main process.
        count: The number of ranks.
        read: Reads and verifies the state of another rank; raises `CheckpointError`.
    """

    def __init__(self, first: Any, count: int, read: Callable[[int], Any]) -> None:
        self._first, self._count, self._read = first, count, read
        self._known: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self._count:
            raise IndexError(rank)
        if rank and rank not in self._known:
            self._known[rank] = self._read(rank)
        return self._known[rank] if rank else self._first


def loaded_from(
    files: Files,
    name: str,
    manifest: dict[str, Any],
    *,
    lazily: bool = False,
    rank: int = 0,
    ranks: int = 1,
    keep: bool = True,
) -> Loaded:
    """Return the content of a checkpoint, verified. Nothing in it is ever executed.

    Args:
        files: The files of the store.
        name: The name of the checkpoint.
        manifest: Its manifest.
        lazily: Return a `Stored` for each tensor that is stored in shards. Any part of it can be read later.
        rank: This rank. Of the files that not all ranks read, it verifies every `ranks`-th.
        ranks: The number of ranks that read.
        keep: If as many ranks read as wrote, keep the shards of this rank in memory, so that they are read once.

    Raises:
        CheckpointDamagedError: A file is missing, cut or changed; the message names it.
        CheckpointFormatError: A file has the right checksum, but not the expected format.
    """
    said = files_in(manifest)
    for number, other in enumerate(sorted(said.keys() - {*FILES, INDEX, PARTS})):
        if number % ranks == rank:
            check_file(files, f"{name}/{other}", said[other])
    tensors: dict[str, Any] = tensors_of(files, name, FILES[1], said[FILES[1]])
    model: dict[str, Any] = tensors_of(files, name, FILES[0], said[FILES[0]])
    table = _table(files, name, manifest) if PARTS in said else {}
    if INDEX in said:
        keep = not lazily or (keep and ranks == manifest.get("ranks", 1) > 1)
        held = _verified(files, name, table, rank, ranks, keep=keep) if table else {}
        index = json_of(files, name, INDEX, said[INDEX], lambda index: index)
        for kind, target in ((MODEL, model), (STATE, tensors)):
            target |= parsed(name, INDEX, partial(_stored, files, name, kind, said, table, held, lazily=lazily), index)
    state = json_of(files, name, FILES[2], said[FILES[2]], lambda plain: checked_state(decode(plain, tensors)))
    states = _states(files, name, table, state, rank, ranks) if table and any(table[RANK]) else None
    return Loaded(name, manifest, model, state, states)


def files_of_ranks(files: Files, name: str, manifest: Mapping[str, Any]) -> dict[str, Facts]:
    """Return the facts of the files of all ranks, by name, that ``parts.json`` lists; none without it.

    Raises:
        CheckpointDamagedError: It is missing, cut or changed.
        CheckpointFormatError: It has the right checksum, but not the format.
    """
    table = _table(files, name, manifest) if PARTS in manifest["files"] else {}
    entries = ((part_file(kind, rank, len(some)), one) for kind, some in table.items() for rank, one in enumerate(some))
    return {file: one for file, one in entries if one is not None}


Table = dict[str, list[Facts | None]]


def _table(files: Files, name: str, manifest: Mapping[str, Any]) -> Table:
    said = manifest["files"]
    return json_of(files, name, PARTS, said[PARTS], lambda content: files_by_rank(content, manifest["ranks"]))


def _verified(files: Files, name: str, table: Table, rank: int, ranks: int, *, keep: bool) -> dict[str, dict[str, Tensor]]:
    """Verify the shards of every `ranks`-th rank; with `keep`, return their tensors by path, so that they are read once."""
    held = {}
    for kind in (MODEL, STATE):
        for one in range(rank, len(table[kind]), ranks):
            file, facts = part_file(kind, one, len(table[kind])), table[kind][one]
            if facts is not None and keep:
                held[f"{name}/{file}"] = tensors_of(files, name, file, facts)
            elif facts is not None:
                check_file(files, f"{name}/{file}", facts)
    return held


def _stored(
    files: Files,
    name: str,
    kind: str,
    said: Mapping[str, Any],
    table: Table,
    held: dict[str, dict[str, Tensor]],
    index: Any,
    *,
    lazily: bool,
) -> dict[str, Any]:
    if table:
        found = {
            key: Stored(files, key, checked_shape(one["shape"]), dtype_of(one), split_of(name, kind, one, table[kind]), held)
            for key, one in index[kind].items()
        }
    else:
        found = stored_in(files, name, index[kind], said)
    return dict(found) if lazily else {key: one.read() for key, one in found.items()}


def _states(files: Files, name: str, table: Table, first: Any, rank: int, ranks: int) -> RankStates:
    """Verify the states of every `ranks`-th rank and read that of this one; return the states of all, to be read."""
    wrote = len(table[RANK])
    states = RankStates(first, wrote, lambda one: _state_of(files, name, table, one))
    own = min(rank, wrote - 1)
    for one in {*range(rank, wrote, ranks), own} - {0}:
        facts = table[RANK][one]
        if one == own:
            states[one]
        elif facts is not None:
            check_file(files, f"{name}/{part_file(RANK, one, wrote)}", facts)
    return states


def _state_of(files: Files, name: str, table: Table, rank: int) -> Any:
    """Read the state that only one rank has."""
    facts, file = table[RANK][rank], part_file(RANK, rank, len(table[RANK]))
    if facts is None:
        raise CheckpointFormatError(f"{name}: {PARTS} names no file with the state of rank {rank}")
    header: dict[str, str] = {}
    tensors = tensors_of(files, name, file, facts, header)
    return parsed(name, file, lambda text: checked_rank(decode(json.loads(text["state"]), tensors)), header)


def tensors_of(
    files: Files, checkpoint: str, name: str, said: Mapping[str, Any], header: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of a checkpoint, verified. `header` gets the texts of its header.

    Raises:
        CheckpointDamagedError: The file is missing, cut or changed.
        CheckpointFormatError: The file has the right checksum, but not the format.
    """
    found = read_whole(files, f"{checkpoint}/{name}", said, lambda file: read_tensors(file, said["size"], header))
    if isinstance(found, ValueError):
        raise _format_error(checkpoint, name, found)
    return found


def json_of(files: Files, checkpoint: str, name: str, said: Mapping[str, Any], parse: Callable[[Any], T]) -> T:
    """Return what `parse` makes of the JSON in a file of a checkpoint, verified. Raises as `tensors_of`."""
    text = read_whole(files, f"{checkpoint}/{name}", said, read_bytes)
    return parsed(checkpoint, name, lambda text: parse(json.loads(text)), text)


def parsed(checkpoint: str, name: str, parse: Callable[[Any], T], content: Any) -> T:
    """Return the result of `parse`. Its error means that the file does not have the format.

    Raises:
        CheckpointFormatError: It has another one.
    """
    try:
        return parse(content)
    except _WRONG as error:
        raise _format_error(checkpoint, name, error) from None


_WRONG = (CheckpointFormatError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)


def _format_error(checkpoint: str, name: str, error: Exception) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{checkpoint}: {name} does not have the format that cadenza writes ({error}). Another program wrote it, and nothing "
        "of it is used."
    )
