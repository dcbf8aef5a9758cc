"""Weights alone: out of a checkpoint, or any safetensors file, into a model, a file, or the model of an evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.checkpoint.catalogue import Reader, Which, check_which, find, is_path, on_all_ranks
from cadenza.checkpoint.store import Loaded
from cadenza.checkpoint.store.files import is_link_name
from cadenza.checkpoint.store.manifest import best_brief
from cadenza.drivers import Driver
from cadenza.drivers.consensus import agreed
from cadenza.drivers.sharding import is_sharded, whole
from cadenza.drivers.weight_files import dcp_reader, is_dcp_folder, tensors_in_file
from cadenza.engine.session import Session
from cadenza.errors import CheckpointError, CheckpointMismatchError, nearest
from cadenza.files.paths import local_path, local_text
from cadenza.hooks.moments import HeldWeights
from cadenza.loading.evaluation import Evaluation
from cadenza.optim.held_weights import holders_in, in_place, no_such_weights
from cadenza.optim.model_state import buffers_of, decides, load_by_model, load_into, plain_name, state_of, untied
from cadenza.status.encoding import host_copy
from cadenza.status.formats import few, in_json

T = TypeVar("T")

MODEL = "model"
"""The name of the model's own weights."""


def load_weights(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    which: Which | None = None,
    strict: bool = True,
    weights: str | None = None,
    names: Callable[[str], str] | None = None,
) -> list[str]:
    """Put weights into a model.

    Args:
        path: A run directory, a folder of checkpoints, an fsspec URL, a checkpoint, a safetensors file, or an index of several
            files, such as ``model.safetensors.index.json``, or a folder of torch's distributed checkpoint. Into a sharded
            model, each rank reads its shards of such files.
        model: Gets them, on the device where it is.
        which: The checkpoint of a run: ``"last"``, the newest that verifies, on the branch that the run is on; ``"best"``, or
            ``"best:eval/acc"`` if several results chose one, for which ``Checkpoint(keep_best=...)`` kept it; or a name such
            as ``"step-500"``. None: the last.
        strict: Names and shapes must be the model's.
        weights: Which: ``"model"`` for the model's own, or the name of averaged ones, such as ``"ema"``. None: the averaged
            ones if these had the best result for which the checkpoint was kept, else the model's own. Of a folder of torch's
            distributed checkpoint: the key that precedes the names, if several do.
        names: Called with each name in the file; returns that in the model.

    Returns:
        The names that did not fit; always empty if `strict`.

    Raises:
        CheckpointError: There is none, it is damaged, or is of a format that could run code; or `which` is ``"best"``, and
            none was kept as the best, or several results chose one. Nothing is changed then.
        CheckpointMismatchError: Names or shapes differ, and `strict`; nothing is changed then.
        ValueError: `which` is no name of a checkpoint.

    On multiple ranks, each rank reads the file itself, so each must call it.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint, Ema, Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_model, tiny_run
    >>> folder, best = tempfile.mkdtemp(), Checkpoint("5 steps", keep_best=("eval/loss", "min"))
    >>> run = tiny_run(directory=folder, callbacks=[Ema(0.9), Evaluate(tiny_loader(), "2 steps"), best], steps=5)
    >>> load_weights(folder, model := tiny_model(), which="best", weights="ema")
    []
    >>> load_weights(f"{folder}/checkpoints/step-00000004", nn.Linear(2, 1), strict=False)
    ["weight has shape (1, 1), the model's (1, 2)"]
    """
    chosen = chosen_at(path, which, weights)
    return (chosen if names is None else chosen.renamed(names)).load_into(model, strict=strict)


def save_weights(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write a model's weights to one safetensors file, which other tools read as well.

    Call it on the main process alone; if the model is sharded, on every rank, and the main process writes.

    Args:
        model: The module with the weights, on any device.
        path: The file. An existing one is replaced; its folder is made.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> save_weights(nn.Linear(3, 2), path := f"{tempfile.mkdtemp()}/model.safetensors")
    >>> {name: tuple(weight.shape) for name, weight in sorted(load_file(path).items())}
    {'bias': (2,), 'weight': (2, 3)}
    """
    weights = {name: value for name, value in state_of(model).items() if isinstance(value, Tensor)}
    sharded = any(map(is_sharded, weights.values()))
    main = not sharded or torch.distributed.get_rank() == 0
    copies = ((name, host_copy(whole(value)) if main else whole(value)) for name, value in weights.items())
    held = {name: value for name, value in copies if main}  # elsewhere one at a time
    if main:
        _write(held, path)


def export_weights(
    path: str | PathLike[str], target: str | PathLike[str], *, which: Which | None = None, weights: str | None = None
) -> None:
    """Write the model's weights in a checkpoint, also of one to which multiple ranks wrote, to one safetensors file.

    Args:
        path: A checkpoint, a run directory or a folder of checkpoints, as in `load_weights`.
        target: The file; its folder is made.
        which: The checkpoint of a run, as in `load_weights`.
        weights: Which weights of it, as in `load_weights`.

    Raises:
        CheckpointError: There is none, or it is damaged; nothing is written then.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint
    >>> from cadenza.testing import tiny_run
    >>> folder = tempfile.mkdtemp()
    >>> run = tiny_run(directory=folder, callbacks=[Checkpoint(every="1 epoch")])
    >>> export_weights(folder, f"{folder}/model.safetensors")
    >>> load_weights(f"{folder}/model.safetensors", nn.Linear(1, 1))
    []
    """
    write_chosen(chosen_at(path, which, weights), target)


def write_chosen(chosen: Chosen, target: str | PathLike[str]) -> None:
    """Write weights to one safetensors file; its folder is made."""
    _write({name: tensor if isinstance(tensor, Tensor) else tensor.read() for name, tensor in chosen.tensors.items()}, target)


def _write(weights: dict[str, Tensor], path: str | PathLike[str]) -> None:
    from safetensors.torch import save_file

    target = local_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, target)


# -- the weights that a user chooses, by checkpoint and by name -----------------------------------


@dataclass(frozen=True, slots=True)
class Chosen:
    """Weights of a checkpoint or a file."""

    where: str
    """The path of the checkpoint or the file."""
    tensors: dict[str, Any]
    """By the model's names, tensors, or a `Stored` or `FileTensor` for each that is not in memory."""
    weights: str = MODEL
    """``"model"``, or the name of averaged ones."""
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The description of the weights that the checkpoint leaves out."""
    changed: frozenset[str] = frozenset()
    """The names of the buffers that got their shape in training."""
    outside: dict[str, Any] = field(default_factory=dict)
    """The parameters outside of the model; see `ExtraParameters`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For a decision: checkpoint, step, weights and, if it was chosen as the best, by which result."""

    def load_into(self, model: nn.Module, *, strict: bool = True) -> list[str]:
        """Load what fits into a model, and return a text about each other tensor.

        Raises:
            CheckpointMismatchError: As `fitting`, and the model's own ``load_state_dict`` does not take the tensors either.
        """
        try:
            tensors, misfits = self.fitting(model, strict=strict)
        except CheckpointMismatchError:
            if load_by_model(model, self.tensors):
                return []
            raise
        load_into(model, tensors)
        return misfits

    def renamed(self, names: Callable[[str], str]) -> Chosen:
        """Return the weights under other names.

        Raises:
            ValueError: `names` returns one name twice.
        """
        tensors = {names(name): tensor for name, tensor in self.tensors.items()}
        if len(tensors) < len(self.tensors):
            raise ValueError(f"names= returns {len(tensors)} names for {len(self.tensors)} tensors. Return another for each.")
        return replace(self, tensors=tensors)

    def fitting(self, model: nn.Module, *, strict: bool = True) -> tuple[dict[str, Any], list[str]]:
        """Return the tensors that fit a model, and a text about each other one.

        Args:
            model: The model.
            strict: All must fit.

        Raises:
            CheckpointMismatchError: One does not, and `strict`; or frozen weights were left out that the model does not have.
        """
        given, own = {plain_name(name): tensor for name, tensor in self.tensors.items()}, state_of(model)
        free = self.changed & buffers_of(model).keys()
        if strict:
            missing = {name: value for name, value in self.left_out.items() if name not in given}
            given |= unchanged(missing, own, self.where)
        tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        wrong = {name: _misfit(name, given.get(name), tensors.get(name)) for name in {**tensors, **given} if name not in free}
        differing = [name for name, problem in wrong.items() if problem]
        if not (strict and differing):
            tied = untied(model, {name: value for name, value in given.items() if name not in differing})
            wrong |= {name: f"{name} and {other} have other values, and the model ties them" for name, other in tied.items()}
            differing += tied
        misfits = [str(wrong[name]) for name in differing]
        if misfits and strict:
            raise CheckpointMismatchError(
                f"{self.where} does not fit the model, which is as it was. It differs in {len(misfits)}: "
                f"{few(misfits, 10, '; ')}. Give the model it was made of, or strict=False to take what fits."
            )
        kept = {name: value for name, value in given.items() if name not in differing}
        return kept, misfits


def chosen_of(loaded: Loaded, path: str, best: Mapping[str, Any], wanted: str | None = None) -> Chosen:
    """Return weights of a checkpoint.

    Args:
        loaded: Its content, read lazily: the parts of the optimizers' states stay in their files.
        path: Its path or URL.
        best: If it was chosen as the best: see `Entry.best`.
        wanted: ``"model"``, or the name of averaged weights. None: the averaged ones if they had the best result for which the
            checkpoint was kept, else the model's own.

    Raises:
        CheckpointError: It does not hold weights of this name.
    """
    name = wanted or (best or loaded.manifest).get("weights") or MODEL
    if name == MODEL:
        tensors = loaded.model
    else:
        sets = loaded.state.get("weight_sets", {})
        if name not in sets:
            there = [MODEL, *sets]
            raise CheckpointError(
                f"{loaded.name} holds no weights {name!r}. It holds {', '.join(map(repr, there))}.{nearest(name, there)}"
            )
        callback, *held = [sets[name], "average", "module."] if isinstance(sets[name], str) else sets[name]  # 0.1 wrote a name
        tensors = HeldWeights(*held).tensors_in(loaded.state["callbacks"][callback])
    facts = {"checkpoint": loaded.name, "step": loaded.manifest["step"], "weights": name, "path": path}
    facts |= {"best": [best_brief(best)]} if best else {}
    outside = dict(loaded.state.get("outside", {}))
    return Chosen(path, tensors, name, left_out_of(loaded.state), changed_buffers(loaded.state), outside, facts)


def chosen_at(path: str | PathLike[str], which: Which | None = None, wanted: str | None = None) -> Chosen:
    """Read weights from a checkpoint, or from a safetensors file.

    Args:
        path: A run directory, a folder of checkpoints, an fsspec URL, a checkpoint, a safetensors file, or an index of several.
        which: See `find`.
        wanted: See `chosen_of`.

    Raises:
        CheckpointError: There are no such weights, or they are damaged.
    """
    text = local_text(path)
    if not is_weights_file(text):
        reader = Reader()
        found = find(text, which, reader.problem)
        return chosen_of(reader.read(found), found.path, found.best, wanted)
    in_folder = is_dcp_folder(text)
    if (wanted not in (None, MODEL) and not in_folder) or which is not None:
        meant = f"which={which!r}" if which is not None else f"any that are called {wanted!r}"
        raise CheckpointError(
            f"{text} is one file of weights, without {meant}. Give the checkpoint or the directory of the run"
        )
    if in_folder:
        chosen: Chosen = dcp_reader(text).weights_in(text, wanted)
        return chosen
    return Chosen(text, tensors_in_file(text))


def is_weights_file(path: str) -> bool:
    """Return whether a path is that of a file of weights or of a DCP folder, and no checkpoint or a link to one."""
    return (Path(path).is_file() and not is_link_name(Path(path).name)) or is_dcp_folder(path)


@dataclass(frozen=True, slots=True)
class Choice:
    """The weights that an evaluation outside of a fit asks for: of a checkpoint, or averaged ones that a callback holds.

    Raises:
        ValueError: `which` is no name of a checkpoint, or there is no directory in which it could be.
    """

    verb: str
    """``"evaluate"`` or ``"predict"``, for messages."""
    which: Which | None
    """The checkpoint; None: the weights in memory."""
    weights: str | None
    """``"model"``, or the name of averaged ones. None: those of the model, or as `load_weights` chooses."""
    directory: Path | None
    """The run directory of the trainer."""
    elsewhere: Sequence[str | PathLike[str]]
    """Further folders and URLs that it saves to."""

    def __post_init__(self) -> None:
        which, weights = self.which, self.weights
        check_which(which)
        if weights is not None and (not isinstance(weights, str) or not weights):
            raise TypeError(f"weights must be 'model' or the name of averaged weights, such as 'ema'; got {weights!r}")
        if which is not None and self.directory is None and not self.elsewhere and not is_path(which):
            raise ValueError(
                f"{self.verb}(which={which!r}) looks for checkpoints in the directory of the run, and the trainer has none. "
                "Give Trainer(directory=...), or the path of a checkpoint."
            )

    def during(
        self, act: Callable[[Session, Evaluation], T], optimizers: Callable[[], Sequence[Optimizer]]
    ) -> Callable[[Session, Evaluation], T]:
        """Return `act` with the model having these weights meanwhile. Every rank must call it.

        Args:
            act: Evaluates or predicts.
            optimizers: Makes the optimizers. Those of the run tell the order of the parameters outside of the model.

        Raises:
            CheckpointError: There is no such checkpoint, or it cannot be used. Nothing is changed.
            ValueError: No callback holds such weights.
        """

        def acting(session: Session, evaluation: Evaluation) -> T:
            with self._in_place(session, evaluation, optimizers):
                return act(session, evaluation)

        return acting

    @contextmanager
    def _in_place(
        self, session: Session, evaluation: Evaluation, optimizers: Callable[[], Sequence[Optimizer]]
    ) -> Iterator[None]:
        if self.which is not None:
            chosen = self._chosen(session.driver)
            evaluation.weights = None if chosen.weights == MODEL else chosen.weights
            session.optimizers[:] = optimizers() if chosen.outside else ()
            with of_checkpoint(session, chosen):
                yield
        elif self.weights not in (None, MODEL):
            evaluation.weights = self.weights
            holders = holders_in(session.hooks)
            holder = holders.get(str(self.weights))
            who = f"{self.verb}(weights={self.weights!r})"
            if holder is None:
                raise ValueError(no_such_weights(str(self.weights), holders, who))
            if holder.held is None:
                raise ValueError(
                    f"{who} needs averaged weights, and {holder.callback} has none yet: it averages during a run. Call fit "
                    "before, or give which='last' for those of a checkpoint."
                )
            session.decide("weights in place", f"{self.weights!r} of {holder.callback}", who="the trainer")
            with holder.lend(session.run):
                yield
        else:
            yield

    def _chosen(self, driver: Driver) -> Chosen:
        """Read the weights on each rank; the main process chooses the checkpoint."""
        found, loaded = on_all_ranks(driver, self._found, keep=False)
        if found is not None and loaded is not None:
            return chosen_of(loaded, *found, self.weights)
        read: list[Chosen] = []
        agreed(
            driver.gather,
            lambda: read.append(chosen_at(str(self.which), None, self.weights)),
            lambda rank, problem: CheckpointError(f"rank {rank} cannot read {self.which}: {problem}"),
        )
        return read[0]

    def _found(self, reader: Reader) -> tuple[tuple[str, dict[str, Any]] | None, bool]:
        """Find and read the checkpoint; return its path and `Entry.best`, and None for a file of weights."""
        assert self.which is not None, "only a checkpoint is read"
        if is_path(self.which) and is_weights_file(fspath(self.which)):
            return None, False
        found = find(self.directory, self.which, reader.problem, self.elsewhere)
        reader.read(found)
        return (found.path, dict(found.best)), True


@contextmanager
def of_checkpoint(session: Session, chosen: Chosen) -> Iterator[None]:
    """Return a context in which model and loss have the weights of a checkpoint. Then they get their own again, to the bit.

    Every rank must enter it.

    Raises:
        CheckpointMismatchError: They do not fit. Nothing is changed.
    """
    tensors, _ = chosen.fitting(session.module)
    with ExitStack() as stack:
        if chosen.outside:
            extra = session.extra_parameters
            extra.begin(session.run)
            own = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, extra.state_dict())
            stack.callback(extra.load_state_dict, own)
            extra.load_state_dict(chosen.outside)
        stack.enter_context(in_place(session.module, tensors))
        averaged = "" if chosen.weights == MODEL else f"{chosen.weights!r} of "
        session.decide("weights in place", f"{averaged}{chosen.where}", who="the trainer", data=in_json(chosen.facts))
        yield


def _misfit(name: str, given: Any, own: Tensor | None) -> str | None:
    if given is None:
        return f"{name} is missing"
    if own is None:
        return f"{name} is not in the model"
    if tuple(given.shape) != tuple(own.shape):
        return f"{name} has shape {tuple(given.shape)}, the model's {tuple(own.shape)}"
    return None


# -- what a checkpoint leaves out, and what training adds: shapes of buffers, parameter groups -----


LEFT_OUT = "left_out"
"""The name in the state of a checkpoint: by name of the weight, its shape and its checksum."""


def described(weight: Tensor) -> dict[str, Any]:
    """Return what a checkpoint holds instead of a weight: its shape, and the SHA-256 of its bytes in hexadecimal digits."""
    data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return {"shape": list(weight.shape), "sha256": hashlib.sha256(data.data).hexdigest()}


def left_out_of(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the weights that a checkpoint leaves out, by name."""
    return dict(state.get(LEFT_OUT, {}))


def unchanged(left_out: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Return the weights of a model that a checkpoint left out.

    Args:
        left_out: What the checkpoint holds instead of them.
        own: The ``state_dict`` of the model.
        where: The checkpoint, for the message.

    Raises:
        CheckpointMismatchError: A weight is missing, or has other values than at the save.
    """
    other = [name for name, value in left_out.items() if name not in own or described(own[name]) != dict(value)]
    if other:
        raise CheckpointMismatchError(
            f"{where} leaves out frozen weights, and {len(other)} of them differ in this model: {', '.join(other[:5])}. "
            "Nothing was loaded. Build the model from the same pretrained weights as in the run that wrote it."
        )
    return {name: own[name] for name in left_out}


CHANGED = "changed_shapes"
"""The name in the state of a checkpoint."""


def changed_buffers(state: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the buffers that had another shape at the start of the run that wrote a checkpoint."""
    return frozenset(state.get(CHANGED, {}).get("buffers", ()))


def changed_of(session: Session, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a checkpoint with what training made; warn, once, of what a resume cannot make again.

    Args:
        session: The session.
        config: Its configuration now. That of its start is kept in `Session.restored`.
    """
    start = session.restored.config
    return {} if _agree(config, start) else {CHANGED: _changes(session, start, config)}


def _agree(checkpoint: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(checkpoint[part] == other[part] for part in ("model", "parameter groups"))


def _changes(session: Session, start: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    before, now, slots = start["model"], config["model"], buffers_of(session.module)
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    named = {id(weight): plain_name(name) for name, weight in session.module.named_parameters()}
    groups = [
        [[named.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups[len(first) :]]
        for optimizer, first in zip(session.optimizers, start["parameter groups"], strict=True)
    ]
    lost = [name for name in differing if name not in slots and not decides(session.module, differing)]
    lost += ["a parameter group with parameters outside of the model" for new in groups for group in new if None in group]
    if lost and not any(decision.what == "not resumable" for decision in session.run.decisions):
        told = (
            f"a hook changed what the run trains: {few(lost)}. A run that continues does not have it, so its checkpoints will "
            "be refused. Make it before the run, or in on_setup"
        )
        session.decide("not resumable", told, data={"names": lost})
        session.warn(told)
    return {"buffers": [name for name in differing if name in slots], "groups": groups}


def as_at_start(session: Session, state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a checkpoint without what training made, as far as this run can make it again.

    Args:
        session: The session, before anything is restored.
        state: The state in the checkpoint.
        config: The configuration of the session.
    """
    same = CHANGED not in state and _agree(state["config"], config)
    return dict(state["config"]) if same else _without_changes(session, state, config)


def _without_changes(session: Session, state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    saved, changed = dict(state["config"]), changed_buffers(state) & buffers_of(session.module).keys()
    session.restored.config = {
        **config,
        "model": {name: value for name, value in config["model"].items() if name not in changed},
    }
    saved["model"] = {
        name: config["model"][name] if name in changed else shape
        for name, shape in ((plain_name(name), shape) for name, shape in saved["model"].items())
        if name not in changed or name in config["model"]
    }
    names = {plain_name(name) for name, _ in session.module.named_parameters()}
    groups = state.get(CHANGED, {}).get("groups", ())
    if groups and names.issuperset(name for new in groups for group in new for name in group):
        first = [old[: len(old) - len(new)] for old, new in zip(saved["parameter groups"], groups, strict=True)]
        session.restored.config["parameter groups"] = first
        saved["parameter groups"] = [
            old if now == old else begun
            for old, begun, now in zip(saved["parameter groups"], first, config["parameter groups"], strict=False)
        ]
    before, now = saved["model"], config["model"]
    if decides(session.module, [name for name in {**before, **now} if before.get(name) != now.get(name)]):
        saved["model"] = config["model"]  # its load_state_dict is asked later, when all else agrees
    return saved


def add_groups(session: Session, state: Mapping[str, Any]) -> None:
    """Add the parameter groups of a checkpoint that a hook had added to the optimizers."""
    parameters = {plain_name(name): weight for name, weight in session.module.named_parameters()}
    sizes, groups = state["config"]["parameter groups"], state[CHANGED]["groups"]
    for optimizer, saved, new, before in zip(session.optimizers, state["optimizers"], groups, sizes, strict=True):
        if len(optimizer.param_groups) < len(before):
            options = saved.get("param_groups") or [{} for _ in before]
            for names, group in zip(new, options[len(before) - len(new) :], strict=True):
                optimizer.add_param_group({**group, "params": [parameters[name] for name in names]})
