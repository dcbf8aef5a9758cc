"""The parts of a checkpoint: for each entry, how to save and how to load it, also on other ranks. Nothing else lists them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.checkpoint.store import Loaded, Stored
from cadenza.checkpoint.store.reading import check_moments
from cadenza.drivers.sharding import laid_out, optimizer_laid_out
from cadenza.engine import boundary
from cadenza.engine.session import Loops, Session
from cadenza.errors import CadenzaError, CheckpointMismatchError, DataError
from cadenza.loading import Consumed, num_batches
from cadenza.loading.batch_log import BatchLog
from cadenza.loading.loaders import length_of
from cadenza.loading.resumable_base import ResumableLoader
from cadenza.loading.rng import RNGState, derive_seed
from cadenza.loading.settings import loader_settings, ordered_by_sample
from cadenza.loading.shards import Shard
from cadenza.optim.held_weights import holders_in
from cadenza.optim.model_state import Walk, plain_name
from cadenza.optim.optimizers import changed_by_loading, is_of_torch, load_state, loadable
from cadenza.optim.parameters import parameters_of
from cadenza.records.history import History
from cadenza.status.formats import counted
from cadenza.status.progress import Counters, Progress


class Target(NamedTuple):
    """A run that is set up, and the checkpoint that is loaded into it."""

    session: Session
    loaded: Loaded
    own: Mapping[str, Any]
    """The entries of this rank."""
    written: Written
    strict: bool
    """Whether a state without a callback is an error."""


class Part(NamedTuple):
    """An entry in the state of a checkpoint."""

    name: str
    save: Callable[[Session], Any]
    """Returns plain values and tensors."""
    load: Callable[[Target, Any], object] | None = None
    """None: another part loads it, or it is only compared."""
    each_rank: bool = False
    """Whether each rank has its own."""
    optional: bool = False
    """Whether it is left out if it is None."""
    fixed: bool = False
    """Whether it does not change during a run."""


Owner = Callable[[Session], Any]
"""Returns the object in a run that has the state."""


def _state(name: str, owner: Owner, **options: bool) -> Part:
    """Return the part of an object that has ``state_dict`` and ``load_state_dict``."""
    return Part(name, lambda run: owner(run).state_dict(), lambda to, item: owner(to.session).load_state_dict(item), **options)


def _attribute(name: str, owner: Owner) -> Part:
    """Return the part of a plain attribute of this name."""
    return Part(name, lambda run: getattr(owner(run), name), lambda to, item: setattr(owner(to.session), name, item))


def _streams(to: Target, plain: Mapping[str, Any]) -> None:
    to.session.restored.rng_state = RNGState.from_plain(plain, to.session.driver.device.index)  # set with the first step


def _course(to: Target, plain: Sequence[Mapping[str, Any]]) -> None:
    to.session.cursor.course = BatchLog.from_plain(plain)


def _switched(to: Target, flags: Mapping[str, Any]) -> None:
    to.session.module_flags.saved = flags


def _history(to: Target, series: Mapping[str, Any]) -> None:
    metrics = to.session.metrics
    metrics.history = History.from_state(series, metrics.history.limit, to.loaded.state.get("rows"))


def _states_of(session: Session, *, each_rank: bool) -> dict[str, Any]:
    callbacks = {name: callback for name, callback in session.hooks.callbacks.items() if callback.each_rank is each_rank}
    return {name: state for name, callback in callbacks.items() if (state := callback.state_dict())}


def _callbacks(to: Target, states: Mapping[str, Any]) -> None:
    callbacks = to.session.hooks.callbacks
    states = {**states, **to.own.get("callbacks of the rank", {})}
    gone = [state for state in states if state not in callbacks]
    fresh = [name for name, callback in callbacks.items() if name not in states and callback.state_dict()]
    if gone or fresh:
        parts = [f"saved but not in the list {gone}"] * bool(gone) + [f"in the list but not saved {fresh}"] * bool(fresh)
        text = f"state of callbacks does not fit: {'; '.join(parts)}"
        if to.strict:
            raise CheckpointMismatchError(f"{text}. Give the same callbacks under the same names, or strict=False.")
        to.session.warn(text)
    load_callbacks(to.session, to.loaded.name, states)


def load_callbacks(session: Session, checkpoint: str, states: Mapping[str, Any]) -> None:
    """Restore the callbacks of the list that have a state, by name."""
    for name, saved in states.items():
        if name in session.hooks.callbacks:
            with naming(checkpoint, f"callbacks.{name}"):
                session.hooks.callbacks[name].load_state_dict(placed(session, saved))


def _optimizers(to: Target, states: Sequence[Mapping[str, Any]]) -> None:
    session = to.session
    for index, (optimizer, stored) in enumerate(zip(session.optimizers, states, strict=True)):
        saved = loadable(optimizer, stored)
        if change := changed_by_loading(optimizer, saved):
            session.warn(change)
        fits = is_of_torch(saved)
        with naming(to.loaded.name, f"optimizers[{index}]"):
            parameters = list(parameters_of([optimizer]))
            if fits:
                check_moments(optimizer, saved, [parameter.shape for parameter in parameters])
            load_state(optimizer, optimizer_laid_out(saved, parameters) if fits else placed(session, saved))
    session.given.take_over(session.run, to.loaded.state.get("given", {}))


def _parameter_names(session: Session) -> list[list[str | None]]:
    """Return the names of the parameters of each optimizer, for exports; None for a parameter outside of the model."""
    names = {id(parameter): plain_name(name) for name, parameter in Walk(session.module).parameters.items()}
    return [[names.get(id(parameter)) for parameter in parameters_of([optimizer])] for optimizer in session.optimizers]


def _data_of(session: Session) -> dict[str, Any] | None:
    """Return what a run on another number of ranks needs; None if one rank did all."""
    progress, shard = session.progress, session.cursor.source.shard
    inherited = shard.consumed if progress.batch_in_epoch and progress.epoch == progress.origin.epoch else ()
    if shard.world_size == 1 and not inherited:
        return None
    return {"dealt": shard.share_data, "batches": length_of(session.loader), "past": [list(turns) for turns in inherited]}


def _unused_gradients(session: Session) -> dict[int, Tensor]:
    """Return the gradients of this rank that no update has used yet, by the index of their parameter."""
    return {i: p.grad for i, p in enumerate(parameters_of(session.optimizers)) if p.grad is not None}


def _gradients_of_the_rank(session: Session) -> dict[int, Tensor] | None:
    """Return the gradients of this rank if each rank has its own: in an attached loop.

    The update of the loop averages them. Those of a ``step_fn`` are averaged with each batch.
    """
    apart = session.loop is Loops.ATTACHED and session.driver.reduces and not session.driver.shards
    return _unused_gradients(session) if apart else None


def _gradients(to: Target, gradients: Mapping[int, Tensor]) -> None:
    """Take the gradients for later. On another number of ranks, each rank gets the mean of the ranks that wrote them."""
    by_rank, ranks = to.loaded.by_rank, len(to.loaded.by_rank)
    gradients = to.own.get("gradients", gradients)
    if to.session.loop is Loops.ATTACHED and ranks not in (1, to.session.driver.world_size) and "gradients" in by_rank[1]:
        everyone = [state["gradients"] for state in by_rank]
        indices = sorted({i for own in everyone for i in own})  # a rank without a gradient counts as zeros
        gradients = {i: torch.stack([own[i] for own in everyone if i in own]).sum(0) / ranks for i in indices}
    parameters = list(parameters_of(to.session.optimizers))
    pairs = [(parameters[i], laid_out(gradient, parameters[i]).to(parameters[i].device)) for i, gradient in gradients.items()]
    to.session.restored.gradients = pairs


_TRAINING = (
    Part("streams", lambda session: RNGState.capture().to_plain(session.driver.device.index), _streams, each_rank=True),
    Part("optimizers", lambda session: [optimizer.state_dict() for optimizer in session.optimizers], _optimizers),
    Part("parameter names", _parameter_names),
    Part(
        "outside",
        lambda session: session.extra_parameters.state_dict() or None,
        lambda to, value: to.session.extra_parameters.load_state_dict(value),
        optional=True,
    ),
    _state("precision", lambda session: session.precision),
    _state("compiled", lambda session: session.precision.backward_pass, optional=True),
    _attribute("weight_unit", lambda session: session.step),
    Part("switched", lambda session: session.module_flags.changed(), _switched),
    Part("given", lambda session: session.given.table(session.run), fixed=True),
    Part("environment", lambda session: environment_of(session), fixed=True),
)
_RECORDS = (
    Part(
        "state",
        lambda session: dict(session.run.state),
        lambda to, value: to.session.run.state.update(placed(to.session, value)),
    ),
    Part("history", lambda session: session.metrics.history.state_dict(), _history),
    Part("rows", lambda session: session.metrics.history.rows_state()),
)
_POSITION = (
    _attribute("data_seed", lambda session: session),
    _attribute("permuted", lambda session: session.cursor),
    Part("course", lambda session: session.cursor.course.to_plain(), _course),
    _attribute("in_epoch", lambda session: session.cursor),
    Part("exhausted", lambda session: session.cursor.exhausted),
    Part("data", _data_of, optional=True),
    Part("batches_found", lambda session: session.progress.corrected),
    Part("progress", lambda session: asdict(session.progress.now()), lambda to, _: to.written.go_on(to.session)),
    _state("loader", lambda session: session.cursor.source, each_rank=True),
)
_HOOKS = (
    _state("requests", lambda session: session.sync.requests),
    Part(
        "evaluations due",
        lambda session: session.due.state,
        lambda to, value: to.session.due.restore(placed(to.session, value)),
        each_rank=True,
    ),
    _state("losses", lambda session: session.metrics.losses, each_rank=True),
    Part("callbacks", lambda session: _states_of(session, each_rank=False), _callbacks),
    Part("callbacks of the rank", lambda session: _states_of(session, each_rank=True) or None, each_rank=True, optional=True),
    Part(
        "weight_sets",
        lambda session: {
            name: [value.callback, *value.held] for name, value in holders_in(session.hooks).items() if value.held
        },
    ),
    Part(
        "schedules",
        lambda session: session.hooks.schedules_at(session.progress),
        lambda to, value: to.session.hooks.restore_schedules(value, to.session.progress),
    ),
)
PARTS: tuple[Part, ...] = (
    *_TRAINING,
    *_RECORDS,
    *_POSITION,
    *_HOOKS,
    Part("gradients", _unused_gradients, _gradients),
    Part("gradients", _gradients_of_the_rank, each_rank=True, optional=True),
    # The last one: saving another part may write a row.
    Part("offsets", lambda session: {} if session.files is None else session.files.offsets()),
)
"""In the order in which they are saved and loaded, after the weights of the model."""


def placed(session: Session, tree: Any) -> Any:
    """Return a checkpoint's state with each tensor that is stored in shards read, in the layout of the driver."""
    if isinstance(tree, Stored):
        return session.driver.placed(tree)
    if isinstance(tree, dict):
        return {key: placed(session, part) for key, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(placed(session, part) for part in tree)
    return tree


@contextmanager
def naming(checkpoint: str, field: str) -> Iterator[None]:
    """Name the file and the field in an error of what restores it."""
    try:
        yield
    except CadenzaError:
        raise
    except Exception as error:
        raise CheckpointMismatchError(
            f"{checkpoint}: the field {field!r} of state.json cannot be restored: {type(error).__name__}: {error}. Give "
            "the callbacks and optimizers that wrote it, or another checkpoint with fit(resume=PATH)."
        ) from error


def environment_of(session: Session) -> dict[str, Any]:
    """Return the environment. It must be the same for a bit-identical result."""
    kind, cudnn = session.driver.device.type, torch.backends.cudnn
    facts = {
        "torch": torch.__version__,
        "device": kind,
        "threads": torch.get_num_threads(),
        "ranks": session.driver.world_size,
        "machine": platform.machine(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 products": _float32_products(kind),
    }
    if kind == "cuda":
        facts |= {"GPU": torch.cuda.get_device_name(session.driver.device), "CUDA": torch.version.cuda}
        facts |= {"cuDNN": cudnn.version(), "cuDNN benchmark": cudnn.benchmark}
    return facts


def _float32_products(kind: str) -> str:
    """Return the precision in which a device multiplies float32, such as ``ieee`` or ``tf32``: matrices, then cuDNN."""
    cudnn: Any = torch.backends.cudnn
    if not hasattr(torch.backends, "fp32_precision"):  # before torch 2.9
        return f"{torch.get_float32_matmul_precision()}, {'tf32' if cudnn.allow_tf32 else 'ieee'}"
    of_matrices = (torch.backends.cuda if kind == "cuda" else torch.backends.mkldnn).matmul.fp32_precision
    return f"{of_matrices}, {cudnn.conv.fp32_precision}" if kind == "cuda" else str(of_matrices)


# -- a run that continues on another number of ranks: its settings, its position in the data, its state by rank


_OF_RANKS = ("ranks", "batches an epoch", "accumulate")  # what follows from their number, or makes up for it


class Written(NamedTuple):
    """The ranks that wrote a checkpoint, and their position in the data."""

    name: str
    ranks: int
    accumulate: int
    batches: int | None
    """Batches of the whole loader; None if unknown."""
    dealt: bool
    """Whether one loader was split over the ranks; else each rank had a loader of its own shard."""
    past: Consumed
    """The batches of the epoch that other numbers of ranks had done before."""
    at: Counters
    over: bool
    """Whether no batch of the epoch was left."""
    per_epoch: int | None = None
    """Batches of each rank in an epoch; None if unknown."""
    found: int | None = None
    """Batches of each rank in an epoch, where the length of the loader turned out wrong."""
    exhausted: bool = False
    """Whether the loader gives no more batches in the epoch."""

    @staticmethod
    def read(name: str, state: Mapping[str, Any]) -> Written:
        """Return it from the state of a checkpoint."""
        config, at = state["config"], Counters(**state["progress"])
        ranks, per_epoch = config.get("ranks", 1), config["batches an epoch"]
        data = state.get("data") or {"dealt": True, "batches": per_epoch if ranks == 1 else None, "past": []}
        over = state["exhausted"] or (not data["dealt"] and at.batch_in_epoch == per_epoch)
        past = tuple((others, turns) for others, turns in data["past"])
        accumulate = config["accumulate"]
        each = max(accumulate.values()) if isinstance(accumulate, Mapping) else accumulate
        found, exhausted = state.get("batches_found"), state["exhausted"]
        return Written(name, ranks, each, data["batches"], data["dealt"], past, at, over, per_epoch, found, exhausted)

    def must_agree(
        self, session: Session, saved: Mapping[str, Any], current: Mapping[str, Any], declared: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the entries of the saved and the current configuration that must agree; those `declared` may differ."""
        others = session.driver.data_world_size != self.ranks
        free = {*declared, *(_OF_RANKS if others else ()), *(["batches an epoch"] if "batch_size" in declared else [])}
        before, now = ({key: value for key, value in facts.items() if key not in free} for facts in (saved, current))
        whole = self.dealt and session.cursor.source.shard.share_data and self.batches is not None
        if others and whole and "batch_size" not in declared:
            before["batches"], now["batches"] = self.batches, length_of(session.loader)
        return before, now

    @property
    def inside(self) -> bool:
        """Whether batches of an epoch are left."""
        return self.at.batch_in_epoch > 0 and not self.over

    def check_length(self, loader: object, shard: Shard, batches: int | None) -> None:
        """Raise `CheckpointMismatchError` if the loader has another number of batches; `batches` are those of each rank."""
        before, now = self.per_epoch, batches
        if shard.world_size != self.ranks:
            whole = self.dealt and shard.share_data and self.batches is not None
            before, now = (self.batches, length_of(loader)) if whole else (None, None)
        if before != now:
            raise CheckpointMismatchError(
                f"{self.name} does not fit this trainer: its loader had {_batches(before)}, and this one has {_batches(now)}. "
                "Give the loader that it was written with, or another directory."
            )

    def check_source(self, source: ResumableLoader) -> None:
        """Raise `DataError` if a loader cannot continue at this batch of the epoch."""
        self.check_position(source.shard)
        source.check_inside(self.at.batch_in_epoch if self.inside else 0)

    def check_position(self, shard: Shard) -> None:
        """Raise `DataError` if a rank that reads `shard` cannot continue at this batch of the epoch."""
        same = shard.world_size == self.ranks and not self.past
        if same or not self.at.batch_in_epoch or self.over or (self.dealt and shard.share_data):
            return
        raise DataError(
            f"{self.name} lies inside an epoch that {_counted(self.ranks)} began, and each rank's loader gives its own "
            f"shard, now or then: the rest of the epoch cannot be split over {_counted(shard.world_size)}. Continue "
            f"on {_counted(self.ranks)}, or at a checkpoint from the end of an epoch. Or use one loader of all the data, "
            "without a distributed sampler, and DdpDriver(share_data=True)."
        )

    def go_on(self, session: Session) -> None:
        """Restore the counters, and open the loader at the position of the checkpoint."""
        past = self.restore_counters(session.progress, session.loader, session.driver.data_shard())
        session.cursor.exhausted = self.exhausted or (self.over and session.driver.data_world_size != self.ranks)
        boundary.open_loader(session, past)

    def restore_counters(self, progress: Progress, loader: object, shard: Shard) -> Consumed:
        """Restore the counters. Return the batches of the epoch that other numbers of ranks had done."""
        past: Consumed = ()
        if self.at.batch_in_epoch and self.dealt:
            own = self.at.batch_in_epoch - sum(turns for _, turns in self.past)
            done = (*self.past, (self.ranks, own)) if own else self.past
            past = done[:-1] if done and done[-1][0] == shard.world_size else done
        progress.begin(self.at, progress.batches_per_whole_epoch)
        if past:
            progress.take_over(self.at.batch_in_epoch if self.over else num_batches(loader, shard.resumed(past)))
        if self.found and self.ranks == shard.world_size:
            progress.correct(self.found)
        return past

    def taken_over(self, session: Session, loaded: Loaded) -> dict[str, Any]:
        """Return the entries of this rank, from those of the ranks that wrote the checkpoint."""
        driver, everyone = session.driver, loaded.by_rank
        together = max(1, len(everyone) // self.ranks)
        rank, ranks = driver.data_rank, len(everyone) // together
        if rank < ranks and driver.tensor_parallel == together:
            return dict(everyone[driver.rank])
        own = dict(everyone[min(rank, ranks - 1) * together])  # a loader with shared data has the same position on all ranks
        if rank >= ranks:  # no rank had this number: its RNG state begins anew
            own["streams"] = RNGState.seeded(derive_seed(loaded.state["data_seed"], rank, self.at.step)).to_plain()
        return own

    def warn(self, session: Session) -> None:
        """Warn of another number of ranks."""
        ranks, before = session.driver.data_world_size, self.ranks * self.accumulate
        now, keeps = ranks * session.accumulate, before // ranks
        size = (
            f"a step takes {counted(now, 'batch')}, as before"
            if now == before
            else f"a step took {counted(before, 'batch')}, and now {now}"
        )
        hint = (
            f" (accumulate={keeps} keeps it)" if now != before and keeps * ranks == before and session.step_fn is None else ""
        )
        session.warn(
            f"{self.name} was written on {_counted(self.ranks)}, and the run continues on {_counted(ranks)}: each sample is "
            f"still seen once an epoch, but not to the same bits; {size}{hint}"
        )

    def rebatched(self, session: Session, before: Any) -> Written:
        """Return where a run with another batch size continues: at the same sample. `before` is that of the checkpoint.

        Raises:
            DataError: No batch of the new size begins at this sample, or the position of the loader is not one in its samples.
        """
        now, at = loader_settings(session.loader).get("batch_size"), self.at.batch_in_epoch
        anew = self._replace(found=None, exhausted=self.exhausted or self.over)  # `found` counts batches of another size
        if not at or not isinstance(before, int) or not isinstance(now, int):
            return anew
        if self.over or at == self.per_epoch:
            batches = num_batches(session.loader, session.driver.data_shard())
            return anew._replace(at=replace(self.at, batch_in_epoch=batches or at), over=True, exhausted=True)
        _check_batch_size(session, self, before, now)
        return anew._replace(at=replace(self.at, batch_in_epoch=at * before // now))


def _batches(count: int | None) -> str:
    return "no length" if count is None else counted(count, "batch")


def _counted(ranks: int) -> str:
    return counted(ranks, "rank")


def _check_batch_size(session: Session, written: Written, before: int, now: int) -> None:
    at, each = written.at.batch_in_epoch, lcm(before, now) // before
    reason = ""
    if not ordered_by_sample(session.loader) or "limit" in loader_settings(session.loader):
        reason = "its loader is not a DataLoader(dataset, batch_size=...) or TensorBatches, so it has no position by sample"
    elif written.ranks != session.driver.data_world_size or written.past:
        reason = "another number of ranks began this epoch: change one of the two, and the other at a later checkpoint"
    elif at * before % now:
        reason = (
            f"{counted(at * before, 'sample')} of each rank are no whole number of batches of {now}. Positions that work: "
            f"any multiple of {counted(each, 'batch')}"
        )
    elif written.ranks > 1 and written.dealt:
        positions = ((before, at), (now, at * before // now))
        if not all(_in_whole_rounds(session, size, rounds) for size, rounds in positions):
            reason = "the last batches of an epoch are split over the ranks by their number"
    if reason:
        raise DataError(
            f"{written.name} lies after {counted(at, 'batch')} of {counted(before, 'sample')} of an epoch, and the run cannot "
            f"continue there with batch_size={now}: {reason}. Continue at a checkpoint from the end of an epoch, or keep "
            f"batch_size={before}. Nothing was restored."
        )


def _in_whole_rounds(session: Session, batch_size: int, rounds: int) -> bool:
    """Return whether each of the first rounds is one batch of each rank. The last two may be split anew."""
    loader, ranks = session.loader, session.driver.data_world_size
    samples = length_of(getattr(loader, "sampler", None)) or int(getattr(loader, "samples", 0))
    batches = samples // batch_size if getattr(loader, "drop_last", False) else -(-samples // batch_size)
    return rounds < batches // ranks or (rounds == batches // ranks and batches % ranks == 0)
