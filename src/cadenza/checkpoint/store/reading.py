"""Read a checkpoint and verify it in the same pass: each byte is read once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from cadenza.checkpoint.store.files import FORMAT_ERRORS, Facts, Files, Sum, SummedFile, checked_shape, read_tensors
from cadenza.checkpoint.store.manifest import FILES, INDEX, PARTS, files_in
from cadenza.checkpoint.store.shards import MODEL, RANK, STATE, Stored, dtype_of, files_by_rank, part_file, splits_of
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError
from cadenza.optim.optimizers import is_of_torch
from cadenza.status.branches import Branch
from cadenza.status.encoding import Unbuilt, decode
from cadenza.status.formats import counted

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


Table = dict[str, list[Facts | None]]
"""By kind, the size and the checksum of the file of each rank."""


class Folder:
    """The files of a checkpoint, read and verified in the same pass. Nothing in them is ever executed.

    Its methods raise:
        CheckpointDamagedError: A file is missing, cut or changed; the message names it.
        CheckpointFormatError: A file has the right checksum, but not the expected format.

    Args:
        files: The files of the store.
        name: The name of the checkpoint.
        manifest: Its manifest.
        rank: This rank. Of the files that not all ranks read, it verifies every `ranks`-th.
        ranks: The number of ranks that read.
    """

    def __init__(self, files: Files, name: str, manifest: dict[str, Any], rank: int = 0, ranks: int = 1) -> None:
        self._files, self._name, self._rank, self._ranks = files, name, rank, ranks
        self._manifest, self._said = manifest, files_in(manifest)

    def verify(self) -> None:
        """Check that all files are unchanged."""
        of_ranks = {self._file(kind, rank): file for kind, some in self._table.items() for rank, file in enumerate(some)}
        for file, facts in {**self._said, **of_ranks}.items():
            if facts is not None:
                self._check(file, facts)

    def load(self, *, lazily: bool = False, keep: bool = True) -> Loaded:
        """Return the content.

        Args:
            lazily: Return a `Stored` for each tensor that is stored in shards. Any part of it can be read later.
            keep: If as many ranks read as wrote, keep the shards of this rank in memory, so that they are read once.
        """
        others = sorted(self._said.keys() - {*FILES, INDEX, PARTS})
        for file in others[self._rank :: self._ranks]:
            self._check(file, self._said[file])
        tensors: dict[str, Any] = self._tensors(FILES[1], self._said[FILES[1]])
        model: dict[str, Any] = self._tensors(FILES[0], self._said[FILES[0]])
        if INDEX in self._said:
            held = self._shards(keep=not lazily or (keep and self._ranks == self._manifest.get("ranks", 1) > 1))
            index = self._json(INDEX, lambda index: index)
            for kind, target in ((MODEL, model), (STATE, tensors)):
                target |= parsed(self._name, INDEX, partial(self._stored, kind, held, lazily=lazily), index)
        state = self._json(FILES[2], lambda plain: checked_state(decode(plain, tensors)))
        states = self._states(state) if any(self._table.get(RANK, ())) else None
        return Loaded(self._name, self._manifest, model, state, states)

    @cached_property
    def _table(self) -> Table:
        """What ``parts.json`` lists; empty without it."""
        return self._json(PARTS, lambda parts: files_by_rank(parts, self._manifest["ranks"])) if PARTS in self._said else {}

    def _shards(self, *, keep: bool) -> dict[str, dict[str, Tensor]]:
        """Verify the shards of every `ranks`-th rank; with `keep`, return their tensors by path, so that they are read once."""
        held = {}
        for kind in (MODEL, STATE):
            for rank, facts in [*enumerate(self._table[kind])][self._rank :: self._ranks]:
                file = self._file(kind, rank)
                if facts is not None and keep:
                    held[f"{self._name}/{file}"] = self._tensors(file, facts)
                elif facts is not None:
                    self._check(file, facts)
        return held

    def _stored(self, kind: str, held: dict[str, dict[str, Tensor]], index: Any, *, lazily: bool) -> dict[str, Any]:
        of_ranks, found = self._table[kind], {}
        for name, entry in index[kind].items():
            shape, (splits, first) = checked_shape(entry["shape"]), splits_of(entry, len(of_ranks))
            stored = Stored(self._files, self._name, kind, name, shape, dtype_of(entry), splits, first, of_ranks, held)
            found[name] = stored
        return dict(found) if lazily else {name: stored.read() for name, stored in found.items()}

    def _states(self, first: Any) -> RankStates:
        """Verify the states of every `ranks`-th rank and read that of this one; return the states of all, to be read."""
        table = self._table[RANK]
        states = RankStates(first, len(table), self._state_of)
        own = min(self._rank, len(table) - 1)
        for rank in {*range(self._rank, len(table), self._ranks), own} - {0}:
            if rank == own:
                states[rank]
            elif (facts := table[rank]) is not None:
                self._check(self._file(RANK, rank), facts)
        return states

    def _state_of(self, rank: int) -> Any:
        """Read the state that only one rank has."""
        facts, file = self._table[RANK][rank], self._file(RANK, rank)
        if facts is None:
            raise CheckpointFormatError(f"{self._name}: {PARTS} names no file with the state of rank {rank}")
        header: dict[str, str] = {}
        tensors = self._tensors(file, facts, header)
        return parsed(self._name, file, lambda text: checked_rank(decode(json.loads(text["state"]), tensors)), header)

    def _file(self, kind: str, rank: int) -> str:
        return part_file(kind, rank, len(self._table[kind]))

    def _tensors(self, file: str, facts: Facts, header: dict[str, str] | None = None) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file. `header` gets the texts of its header."""
        return self._read(file, facts, lambda opened: read_tensors(opened, facts["size"], header))

    def _json(self, file: str, parse: Callable[[Any], T]) -> T:
        """Return what `parse` makes of the JSON in a file."""
        return self._read(file, self._said[file], lambda opened: parse(json.loads(opened.read())))

    def _check(self, file: str, facts: Facts) -> None:
        """Verify a file of which the content is not needed."""
        self._read(file, facts, SummedFile.rest)

    def _read(self, file: str, facts: Facts, read: Callable[[SummedFile], T]) -> T:
        """Return what `read` makes of a file. Its error counts only if the file is unchanged."""
        problem: Exception | None = None
        try:
            with self._files.open(f"{self._name}/{file}") as opened, closing(Sum.of_size(facts["size"])) as total:
                summed = SummedFile(opened, total)
                try:
                    content = read(summed)
                except _WRONG as error:
                    problem = error
                found = summed.rest()
        except FileNotFoundError:
            raise CheckpointDamagedError(f"{self._name}: {file} is missing") from None
        except OSError as error:
            raise CheckpointDamagedError(f"{self._name}: {file} cannot be read: {error}") from None
        if found["size"] != facts["size"]:
            raise CheckpointDamagedError(f"{self._name}: {file} has {found['size']} bytes instead of {facts['size']}")
        if found["crc32"] != facts["crc32"]:
            raise CheckpointDamagedError(f"{self._name}: {file} has changed since it was written (crc32 {found['crc32']})")
        if problem is not None:
            raise _format_error(self._name, file, problem)
        return content


def parsed(checkpoint: str, name: str, parse: Callable[[Any], T], content: Any) -> T:
    """Return the result of `parse`. Its error means that the file does not have the format.

    Raises:
        CheckpointFormatError: It has another one.
    """
    try:
        return parse(content)
    except _WRONG as error:
        raise _format_error(checkpoint, name, error) from None


_WRONG = (CheckpointFormatError, *FORMAT_ERRORS)


def _format_error(checkpoint: str, name: str, error: Exception) -> CheckpointFormatError:
    return CheckpointFormatError(
        f"{checkpoint}: {name} does not have the format that cadenza writes ({error}). Another program wrote it, and nothing "
        "of it is used."
    )


# -- the fields of the state and their kinds, which a resume relies on: another program may have written it


Kind = Any
"""A class or a union; a function that raises; ``[kind]`` for a list of any length, ``(kind, kind)`` for one of this length.

``{int: kind}`` is a mapping with such keys, and ``{"name": kind, "name?": kind}`` one with these fields, among others.
"""


def checked_state(state: Any) -> Any:
    """Return the state of a checkpoint. Raise ValueError, naming the field, if it is not of the kinds that a save writes."""
    check(state, {}, "the whole state")
    whole = "config" in state  # else it holds weights only
    check(state, _WHOLE if whole else _WEIGHTS, "")
    if not whole:
        return state
    if not state.get("ranks"):
        checked_rank(state)
    optimizers, names, counts = state["optimizers"], state["config"]["optimizers"], state["config"]["parameter groups"]
    made_with = state.get("given", {}).get("optimizers", [[]] * len(optimizers))
    _require(len(made_with) == len(optimizers), "given.optimizers", "the options of each optimizer", made_with)
    _require(len(optimizers) == len(counts) == len(names), "optimizers", counted(len(counts), "state"), optimizers)
    for index, (optimizer, options) in enumerate(zip(optimizers, made_with, strict=True)):
        if names[index] in _MOMENTS or is_of_torch(optimizer):
            check(optimizer, _OF_TORCH, f"optimizers[{index}]")
            numbers, expected = [group["params"] for group in optimizer["param_groups"]], counts[index]
            fits, said = [*map(len, numbers)] == expected, f"groups with {expected} as their numbers of parameters"
            _require(fits, f"optimizers[{index}].param_groups", said, numbers)
            if names[index] in _MOMENTS:
                _check_update(optimizer, options, f"optimizers[{index}]")
    for name, value in state["callbacks"].items():
        if name.partition("#")[0] == "LearningRate" and "scheduler" in value:
            check(value, {"scheduler": _schedule, "total?": _above_0, "planned?": _above_0}, f"callbacks.{name}")
    return state


def check_moments(optimizer: object, saved: Mapping[str, Any], shapes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if an optimizer of torch lacks a moment, or has one of another shape than its parameter.

    The fused updates of torch do not check the shapes.

    Args:
        optimizer: The optimizer. One of another package, even of the same name, has moments of its own.
        saved: Its saved state, in the form of torch's.
        shapes: The shapes of its parameters.
    """
    needed = _MOMENTS.get(type(optimizer).__name__)
    if needed is None or not type(optimizer).__module__.startswith("torch.optim."):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    shape_of = dict(zip(numbers, shapes, strict=True))
    for number, item in saved["state"].items():
        _require(number in shape_of, "state", "a state of parameters of its groups", number)
        for name in needed if item else ():
            _require(name in item, f"state.{number}.{name}", "this field", "nothing")
        for name, value in item.items():
            shape = shape_of[number] if isinstance(value, Tensor | Stored) and name not in _NUMBERS else None
            _require(shape is None or tuple(value.shape) == tuple(shape), f"state.{number}.{name}", f"of {shape}", value)


def checked_rank(state: Any) -> Any:
    """Return the state that only one rank has. Raises ValueError as `checked_state`."""
    check(state, _RANK, "")
    return state


def check(value: Any, kind: Kind, path: str) -> None:
    """Raise ValueError, naming the path of the field, if a value is not of a kind."""
    if isinstance(kind, dict):
        _require(isinstance(value, Mapping), path, "a mapping", value)
        for key, of_value in kind.items():
            if isinstance(key, type):
                for name, item in value.items():
                    _require(isinstance(name, key), path, f"keys that are {key.__name__}", name)
                    check(item, of_value, f"{path}.{name}")
                continue
            name = key.removesuffix("?")
            at = f"{path}.{name}" if path else name
            _require(key != name or name in value, at, "this field", "nothing")
            if name in value:
                check(value[name], of_value, at)
    elif isinstance(kind, list | tuple):
        fits = isinstance(value, list | tuple) and (isinstance(kind, list) or len(value) == len(kind))
        _require(fits, path, "a list" if isinstance(kind, list) else f"a list of {len(kind)}", value)
        for index, element in enumerate(value):
            check(element, kind[0] if isinstance(kind, list) else kind[index], f"{path}[{index}]")
    elif isinstance(kind, type) or not callable(kind):
        _require(isinstance(value, kind), path, getattr(kind, "__name__", str(kind)), value)
    else:
        kind(value, path)


def _require(holds: bool, path: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"the field {path!r} must be {expected}; got {repr(got)[:80]}")


def count(value: Any, path: str) -> None:
    """Check a count: a whole number of at most 63 bits."""
    _require(type(value) is int and 0 <= value < 1 << 63, path, "a number from 0 below 2**63", value)


def or_none(kind: Kind) -> Callable[[Any, str], None]:
    """Return the kind of values that may also be None."""
    return lambda value, path: None if value is None else check(value, kind, path)


def _accumulate(value: Any, path: str) -> None:
    check(value, {str: count} if isinstance(value, Mapping) else count, path)
    _require(bool(value) and (isinstance(value, int) or min(value.values()) > 0), path, "above 0", value)


def _check_update(optimizer: Mapping[str, Any], options: Sequence[Mapping[str, Any]], path: str) -> None:
    """Check what an update reads: the state by parameter, and the options, of which `options` are those it was made with."""
    for number, group in enumerate(optimizer["param_groups"]):
        made_with = options[number] if number < len(options) else {}
        kinds = {name: _like(value) for name, value in made_with.items()}
        check(group, {**kinds, **_OPTIONS}, f"{path}.param_groups[{number}]")
    for number, item in optimizer["state"].items():
        check(item, _OF_PARAMETER, f"{path}.state.{number}")


def _like(value: Any) -> Kind:
    """Return the kind of an option."""
    if isinstance(value, list | tuple):
        return tuple(map(_like, value))
    return type(value) if isinstance(value, bool | str) else _number


def _number(value: Any, path: str) -> None:
    fits = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    _require(fits, path, "a number", value)


def _above_0(value: Any, path: str) -> None:
    count(value, path)
    _require(value > 0, path, "above 0", value)


def _rates(value: Any, path: str) -> None:
    check(value, [_number], path)
    _require(len(value) > 0, path, "the rate of each parameter group", value)


def _schedule(value: Any, path: str) -> None:
    """Check the state of a scheduler of torch, of which others may hold several."""
    rates = {"base_lrs?": _rates, "_last_lr?": _rates}
    check(value, {"last_epoch?": int, "_step_count?": int, **rates, "_schedulers?": [_schedule]}, path)


def _loader(value: Any, path: str) -> None:
    """Check the position in a stream or a mixture, of which the loaders have positions of their own."""
    check(value, {"stream?": _STREAM, "loaders?": {str: {**_IN_MIXTURE, "state": or_none(_loader)}}}, path)
    if "loaders" in value:
        check(value, {"ranks": _above_0, "source": str | None}, path)


def _history(value: Any, path: str) -> None:
    check(value, {str: (Tensor, Tensor, count, count)}, path)
    for name, (steps, values, _, every) in value.items():
        fits = steps.dim() == values.dim() == 1 and len(steps) == len(values) and every > 0
        _require(fits, f"{path}.{name}", "as many steps as values", (steps.shape, values.shape, every))


def _rows(value: Any, path: str) -> None:
    check(value, {"counters": Tensor, "times": Tensor, "names": Tensor, "sets": [[str]]}, path)
    counters, times, names = (value[name] for name in ("counters", "times", "names"))
    fits = counters.dim() == 2 and times.dim() == names.dim() == 1 and len(counters) == len(times) == len(names)
    _require(fits, path, "columns of one length", (counters.shape, times.shape, names.shape))
    if len(names):
        inside = not names.is_floating_point() and 0 <= int(names.min()) <= int(names.max()) < len(value["sets"])
        _require(inside, f"{path}.names", "indices of sets", names)


def _schedules(value: Any, path: str) -> None:
    """Check the reading of each moment: a state of an earlier version has other entries, which a resume does not read."""
    check(value, Mapping, path)
    check({name: item for name, item in value.items() if name.startswith("on_")}, {str: _READING}, path)


def _streams(value: Any, path: str) -> None:
    """Check the states of the random generators, by giving them to generators that are used for nothing else."""
    import random

    import torch

    check(value, {"python": (count, [count], object), "torch": Tensor, "cuda": [Tensor], "numpy": object}, path)
    try:
        random.Random(0).setstate((value["python"][0], tuple(value["python"][1]), value["python"][2]))
        torch.Generator().set_state(value["torch"])
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the field {path!r} must hold states of random generators ({error})") from None
    if isinstance(value["numpy"], Mapping):  # no Mersenne twister
        check(value["numpy"], {"bit_generator": str}, f"{path}.numpy")
    elif value["numpy"] is not None:
        check(value["numpy"], (str, Tensor, count, count, int | float), f"{path}.numpy")
        shape = tuple(value["numpy"][1].shape)
        _require(shape == (624,), f"{path}.numpy[1]", "624 numbers", shape)


_COUNTERS = {"epoch": count, "step": count, "batch": count, "batch_in_epoch": count, "samples": count, "tokens?": count}
_DECISION = {"what": str, "who": str, "why": str, "when?": _COUNTERS, "at?": _COUNTERS, "data?": Mapping}
_READING = {"counts": {str: int | float}, "in_epoch": count, "batches": count, "begun": bool, "due": [str], "owed": [str]}
_DUE = {"names": [str], "numbers": Mapping, "losses": [Tensor | Stored], "weights": list}
_TURNS = [(count, count)]
_CONFIG = {
    "model": {str: [count]},
    "optimizers": [str],
    "parameter groups": [[count]],
    "accumulate": _accumulate,
    "precision": str,
    "batches an epoch": or_none(count),
    "ranks?": count,
}
_GIVEN = {"optimizers?": [[Mapping]], "loader?": {str: object}, "callbacks?": {str: Mapping}, "limits?": Mapping}
_SEGMENT = {
    "seed": int,
    "permuted": count,
    "ranks": count,
    "dealt": bool,
    "consumed": _TURNS,
    "loader": Mapping,
    "points": [(*[count] * 5, or_none(count), or_none(count))],
}
_STREAM = {"workers": _above_0, "turn": count, "reached": [(count, count, count, count)]}
_IN_MIXTURE = {"passes": count, "read": count, "ended": bool, "consumed": _TURNS}
_RANK = {
    "streams": _streams,
    "loader": _loader,
    "losses?": {"lasting": {str: (count, float, count)}, "first": or_none((count, str))},
    "gradients?": {int: Tensor | Stored},
    "callbacks of the rank?": {str: Mapping},
    "evaluations due?": or_none(_DUE),
}
_MOMENT = Tensor | Stored | Unbuilt
_NUMBERS = ("step", "mu_product")
_MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "RMSprop": ("step", "square_avg"),
    "SGD": (),
}
"""By class of torch, the state of a parameter after its first update."""
_OF_PARAMETER = {
    **{f"{name}?": _MOMENT for names in _MOMENTS.values() for name in names},
    **{f"{name}?": _number for name in _NUMBERS},
    "max_exp_avg_sq?": _MOMENT,
    "grad_avg?": _MOMENT,
    "momentum_buffer?": _MOMENT | None,
}
_OF_TORCH = {"state": Mapping, "param_groups": [{"params": [int | str]}]}
_OPTIONS = {"fused?": bool | None, "foreach?": bool | None, "initial_lr?": _number}
_WEIGHTS = {
    "callbacks?": {str: Mapping},
    "weight_sets?": {str: str | list | tuple},
    "left_out?": {str: {"shape": [count], "sha256": str}},
    "outside?": Mapping,
}
_WHOLE = _WEIGHTS | {
    "progress": _COUNTERS,
    "in_epoch": bool,
    "exhausted": bool,
    "requests": {str: _DECISION},
    "schedules?": _schedules,
    "config": _CONFIG,
    "given?": _GIVEN,
    "parameter names?": [[or_none(str)]],
    "environment": {str: object},
    "model_extra": {str: object},
    "optimizers": [Mapping],
    "precision": Mapping,
    "compiled?": {"shape": str | None, "variants": [count], "unused": [count], "off": str | None},
    "gradients": {int: Tensor | Stored},
    "weight_unit?": int | float | None,
    "switched?": {str: {str: bool}},
    "data_seed": int | None,
    "data?": {"dealt": bool, "batches": or_none(count), "past": _TURNS},
    "course?": [_SEGMENT],
    "permuted?": count,
    "state": Mapping,
    "history": _history,
    "rows?": _rows,
    "offsets": {str: count},
    "batches_found?": or_none(count),
    "callbacks": {str: Mapping},
    "ranks?": [_RANK],
}
