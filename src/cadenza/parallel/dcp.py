"""Weights and states of optimizers in folders of torch's distributed checkpoint (DCP), as torchtitan and Lightning write."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from cadenza.checkpoint.catalogue import Reader, Which, find
from cadenza.checkpoint.store import Loaded, Stored
from cadenza.checkpoint.store.reading import check_moments
from cadenza.checkpoint.weights import MODEL, Chosen, chosen_of
from cadenza.drivers.meta_tensors import aliases_in
from cadenza.drivers.sharding import optimizer_laid_out
from cadenza.errors import CheckpointError, CheckpointMismatchError
from cadenza.files.paths import local_path, local_text
from cadenza.optim.model_state import plain_name, state_of
from cadenza.optim.optimizers import is_of_torch, load_state
from cadenza.optim.parameters import parameters_of
from cadenza.parallel.dcp_folder import DcpFolder, DcpTensor
from cadenza.status.formats import counted, few


def load_optimizer(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    key: str | None = None,
    names: Callable[[str], str] | None = None,
) -> None:
    """Load the state of an optimizer, such as moments and counts of steps, from a DCP folder.

    Learning rates and other settings stay those of `optimizer`. Call it in ``on_fit_start``: the run has made its optimizers
    and has sharded the model by then.

    Args:
        path: The folder.
        model: The model, which may be sharded. Each rank reads its shards.
        optimizer: An optimizer of parameters of `model`.
        key: The key of the optimizer, such as ``"optimizer_1"``, if the folder has states of these parameters under several.
        names: Called with the name of each entry of the folder; returns that of this model, as in `load_weights`.

    Raises:
        CheckpointError: The folder is damaged, or could run code.
        CheckpointMismatchError: It has no state of a parameter, or one of another shape; nothing is changed then.

    With multiple ranks: each must call it.

    >>> import tempfile, torch
    >>> from cadenza.callbacks import Checkpoint
    >>> from cadenza.testing import tiny_model, tiny_run
    >>> folder, make = tempfile.mkdtemp(), lambda parameters: torch.optim.AdamW(parameters)
    >>> run = tiny_run(directory=folder, optimizer=make, callbacks=[Checkpoint(every="1 epoch")])
    >>> export_dcp(folder, f"{folder}/dcp", optimizer=True)
    >>> optimizer = make((model := tiny_model()).parameters())
    >>> load_optimizer(f"{folder}/dcp", model, optimizer)
    >>> optimizer.state[model.weight]["step"]
    tensor(5.)
    """
    folder, parameters = DcpFolder(path), list(parameters_of([optimizer]))
    states = _states_in(folder, _names_of(model, parameters), key, names)
    own = optimizer.state_dict()
    numbers = [number for group in own["param_groups"] for number in group["params"]]
    saved = optimizer_laid_out({**own, "state": dict(zip(numbers, states, strict=True))}, parameters)
    try:
        check_moments(optimizer, saved, [tuple(parameter.shape) for parameter in parameters])
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{folder.path} does not fit this optimizer, which is unchanged: {error}. Give the model and the class "
            "of optimizer that wrote it."
        ) from None
    load_state(optimizer, saved)


def export_dcp(
    path: str | PathLike[str],
    target: str | PathLike[str],
    *,
    which: Which | None = None,
    weights: str | None = None,
    optimizer: bool = False,
    key: str = "",
) -> None:
    """Write the weights in a checkpoint of Cadenza to a DCP folder, which ``torch.distributed.checkpoint.load`` reads.

    Call it on one process alone. It holds what it writes in memory.

    Args:
        path: A checkpoint, a run directory or a folder of checkpoints, as in `cadenza.load_weights`.
        target: The folder, which must be new or empty.
        which: The checkpoint of a run, as in `cadenza.load_weights`.
        weights: Which weights of it, as in `cadenza.load_weights`.
        optimizer: Also write the state and the settings of the optimizers, as
            ``get_optimizer_state_dict(..., options=StateDictOptions(flatten_optimizer_state_dict=True))`` returns them, under
            the key ``optimizer``. Parameters outside of the model are left out.
        key: The key of the weights. torchtitan has none; Lightning has ``"state_dict"`` and, if the model is the attribute
            ``model`` of the LightningModule, ``"state_dict.model"``.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it does not name the parameters of its optimizers.
        FileExistsError: `target` holds files.

    >>> import tempfile
    >>> from cadenza import load_weights
    >>> from cadenza.callbacks import Checkpoint
    >>> from cadenza.testing import tiny_model, tiny_run
    >>> folder = tempfile.mkdtemp()
    >>> run = tiny_run(directory=folder, callbacks=[Checkpoint(every="1 epoch")])
    >>> export_dcp(folder, f"{folder}/dcp", optimizer=True)
    >>> load_weights(f"{folder}/dcp", tiny_model())
    []
    """
    folder, reader = local_path(target), Reader()
    found = find(path, which, reader.problem)
    loaded = reader.read(found)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds files, and old parts would mix with new ones. Give a new folder.")
    chosen = chosen_of(loaded, found.path, found.best, weights).tensors
    tensors = {plain_name(name): _read(value) for name, value in chosen.items()}
    state: dict[str, Any] = {key: tensors} if key else dict(tensors)
    if optimizer:
        state["optimizer"] = _flat_optimizers(loaded)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process writes
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def _flat_optimizers(loaded: Loaded) -> dict[str, Any]:
    """Return the states of all optimizers by name of the parameter, in torch's flat form."""
    names = loaded.state.get("parameter names")
    if names is None or not all(map(is_of_torch, loaded.state["optimizers"])):
        raise CheckpointError(
            f"{loaded.name} does not name the parameters of its optimizers: an earlier version or an optimizer of another form "
            "than torch's wrote it. Resume the run and save again, or export with optimizer=False."
        )
    flat: dict[str, Any] = {}
    for optimizer, named in zip(loaded.state["optimizers"], names, strict=True):
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        name_of = dict(zip(numbers, named, strict=True))
        for group in optimizer["param_groups"]:
            settings = {option: value for option, value in group.items() if option not in ("params", "param_names")}
            for name in (name_of[number] for number in group["params"] if name_of[number] is not None):
                flat |= {f"param_groups.{name}.{option}": value for option, value in settings.items()}
        for number, slots in optimizer["state"].items():
            if (name := name_of[number]) is not None:
                flat |= {f"state.{name}.{slot}": _read(value) for slot, value in slots.items()}
    return flat


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, Stored | DcpTensor) else value


# -- weights: found under the key that precedes the names of the model -------------------------------


@dataclass(frozen=True, slots=True)
class DcpWeights(Chosen):
    """The tensors of a DCP folder. The names of the model tell which of them are its weights."""

    key: str | None = None
    """The key that the user gave."""

    def load_into(self, model: nn.Module, *, strict: bool = True) -> list[str]:
        """Load what fits into a model; see `Chosen.load_into`."""
        return self._of(model).load_into(model, strict=strict)

    def fitting(self, model: nn.Module, *, strict: bool = True) -> tuple[dict[str, Any], list[str]]:
        """Return the tensors that fit a model; see `Chosen.fitting`."""
        return self._of(model).fitting(model, strict=strict)

    def _of(self, model: nn.Module) -> Chosen:
        own = {name: [name] for name, value in state_of(model).items() if isinstance(value, Tensor)}
        return Chosen(self.where, _tensors_of(self.tensors, own | _aliases(model), self.where, self.key))


def weights_in(path: str, key: str | None) -> DcpWeights:
    """Return the tensors of a DCP folder, without those of optimizers. `key` precedes their names; None: any key."""
    folder = DcpFolder(path)
    tensors = {name: tensor for name, tensor in folder.tensors.items() if not name.startswith("optim")}
    return DcpWeights(path, tensors, key=key)


def tensors_in(path: str | PathLike[str], aliases: Mapping[str, list[str]]) -> dict[str, DcpTensor]:
    """Return the tensors of a DCP folder that are the weights of a model, by its names. `aliases` are all names of each."""
    text = local_text(path)
    return _tensors_of(weights_in(text, None).tensors, aliases, text, None)


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    return {plain_name(name): [*map(plain_name, others)] for name, others in aliases_in(model).items()}


def _tensors_of(
    tensors: Mapping[str, DcpTensor], aliases: Mapping[str, list[str]], where: str, key: str | None
) -> dict[str, DcpTensor]:
    """Return the tensors under the key of the model by their names below it: also those that the model does not have.

    A tensor that the model ties, and that the folder has under one of its names, has all of them.
    """
    plain = {plain_name(name): tensor for name, tensor in tensors.items()}
    prefix = _prefix_of(plain, aliases.keys(), where, key, "weights")
    below = {name.removeprefix(prefix): tensor for name, tensor in plain.items() if name.startswith(prefix)}
    depths = {tensor.folder.depth_of(tensor.name) for name, tensor in below.items() if name in aliases}
    found = {name: tensor for name, tensor in below.items() if tensor.folder.depth_of(tensor.name) in depths}
    for name, others in aliases.items():
        tied = next((found[other] for other in others if other in found), None)
        if name not in found and tied is not None:
            found[name] = tied
    return found


def _prefix_of(names: Iterable[str], expected: Collection[str], where: str, key: str | None, argument: str) -> str:
    """Return what precedes the most of the expected names, such as ``"model."``, or nothing.

    Raises:
        CheckpointMismatchError: Nothing does, or several prefixes do equally, and `key` does not choose one. The user gives it
            as `argument`.
    """
    listed = list(names)
    counts = Counter(prefix for name in listed for prefix in _prefixes(name, expected))
    if key is not None:
        chosen = (f"{key}.", "") if key == MODEL else (f"{key}.",)
        counts = Counter({prefix: n for prefix, n in counts.items() if prefix in chosen or prefix.startswith(chosen[0])})
    most = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(most) == 1:
        return most[0]
    if most:
        raise CheckpointMismatchError(
            f"{where} has the names of the model under {counted(len(most), 'key')}: {few([repr(key[:-1]) for key in most])}. "
            f"Choose one with {argument}=KEY."
        )
    under = f" under the key {key!r}" if key is not None else ""
    raise CheckpointMismatchError(
        f"{where} has no tensor{under} with a name of the model, such as {few(sorted(expected), 3)}. It has "
        f"{counted(len(listed), 'tensor')}: {few(sorted(listed), 10)}. Give the model it was made of, or "
        "names=FUNCTION, which gets each name in the folder and returns that in the model."
    )


def _prefixes(name: str, expected: Collection[str]) -> list[str]:
    starts = [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]
    return [name[:start] for start in starts if name[start:] in expected]


# -- the states of an optimizer ------------------------------------------------------------------------


def _states_in(
    folder: DcpFolder, wanted: Sequence[Sequence[str]], key: str | None, names: Callable[[str], str] | None
) -> list[dict[str, Any]]:
    """Return for each parameter its state, with tensors that are not read yet. `wanted` are the names of each parameter."""
    slots: dict[str, dict[str, str]] = {}
    for entry in [*folder.tensors, *folder.objects]:
        name = plain_name(entry if names is None else names(entry))
        owner, _, slot = name.rpartition(".")
        if "state" in owner.split("."):
            slots.setdefault(owner, {})[slot] = entry
    expected = {name for some in wanted for name in some}
    prefix = _prefix_of(slots, expected, f"{folder.path}, in its states of optimizers,", key, "key")
    found = [next((slots[prefix + name] for name in some if prefix + name in slots), None) for some in wanted]
    missing = [few(some) or "one outside of the model" for some, slots in zip(wanted, found, strict=True) if slots is None]
    if missing:
        raise CheckpointMismatchError(
            f"{folder.path} has no state of {counted(len(missing), 'parameter')} of the optimizer: {few(missing, 5)}. Give the "
            "parameters that it was written with, or begin with a new optimizer."
        )
    return [{slot: _slot(folder, entry) for slot, entry in (entries or {}).items()} for entries in found]


def _names_of(model: nn.Module, parameters: Iterable[Tensor]) -> list[list[str]]:
    """Return all names of each parameter in a model; none of a parameter outside of it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    return [names.get(id(parameter), []) for parameter in parameters]


def _slot(folder: DcpFolder, entry: str) -> Any:
    return folder.tensors[entry] if entry in folder.tensors else folder.object_of(entry)
