"""A run that continues on another number of ranks: its settings, its position in the data, its state by rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

from cadenza.checkpoint.store import Loaded
from cadenza.engine.session import Session
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading import Consumed, num_batches
from cadenza.loading.loaders import length_of
from cadenza.loading.resumable_base import ResumableLoader
from cadenza.loading.rng import RNGState, derive_seed
from cadenza.loading.settings import loader_settings, ordered_by_sample
from cadenza.loading.shards import Shard
from cadenza.status.formats import counted
from cadenza.status.progress import Counters, Progress

_OF_RANKS = ("ranks", "batches an epoch", "accumulate")  # what follows from their number, or makes up for it


def data_of(session: Session) -> dict[str, Any] | None:
    """Return what a run on another number of ranks needs; None if one rank did all."""
    progress, shard = session.progress, session.cursor.source.shard
    inherited = shard.consumed if progress.batch_in_epoch and progress.epoch == progress.origin.epoch else ()
    if shard.world_size == 1 and not inherited:
        return None
    return {"dealt": shard.share_data, "batches": length_of(session.loader), "past": [list(turns) for turns in inherited]}


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
        before, now = ({key: value for key, value in one.items() if key not in free} for one in (saved, current))
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
        session.open_loader(past)

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
