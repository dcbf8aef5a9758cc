"""Which part of the data a rank reads: whole batches in turn. W ranks do in a step what one process does in W batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

from cadenza.errors import DataError

Past = tuple[tuple[int, int], ...]
"""What was done of an epoch, in order: pairs of a number of ranks and of their turns; a turn is a batch of each rank."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one rank among all.

    >>> [list(Share(rank, 2).of_indices(iter([[0, 1, 2], [3, 4, 5], [6]]))) for rank in range(2)]
    [[[0], [3, 4]], [[1, 2], [5, 6]]]
    """

    rank: int = 0
    ranks: int = 1
    any_rank: Callable[[bool], bool] = bool
    """Whether something is true on any rank."""
    deals: bool = True
    """Whether every loader is to be shared out; else each rank's loader gives that rank's part already."""
    even: bool = True
    """Whether all ranks must get the same number of batches, as in training."""
    past: Past = ()
    """What other numbers of ranks did of the epoch before; a run may continue on another number."""

    def uneven(self) -> Share:
        """Return the share for an evaluation: every batch as it is, though some ranks have one more than others."""
        return replace(self, even=False)

    def after(self, past: Past) -> Share:
        """Return the share of an epoch of which others did something before."""
        return replace(self, past=past)

    def of(self, loader: Any) -> Share:
        """Return the share to take of a loader: all that it gives, if it gives each rank a part of its own already.

        Raises:
            DataError: It is made for another number of ranks.
        """
        return replace(self, deals=False) if self.deals and self.ranks > 1 and _is_shared(loader, self.ranks) else self

    def place(self, number: int) -> int:
        """Return the place in the epoch, over all ranks, of this rank's batch `number`: what is random depends on it."""
        return self.batches_before + number * self.ranks + self.rank

    @property
    def turns_before(self) -> int:
        """How many turns others did of the epoch."""
        return sum(turns for _, turns in self.past)

    @property
    def batches_before(self) -> int:
        """How many batches others did of the epoch."""
        return sum(ranks * turns for ranks, turns in self.past)

    def at(self, done: int) -> tuple[Share, int]:
        """Return the share of an epoch of which `done` turns are done, and how many of them were done by as many ranks.

        Nobody did anything of an epoch that begins.
        """
        return (self, done - self.turns_before) if done else (replace(self, past=()), 0)

    def own(self, limit: int) -> int:
        """Return how many batches this rank does if `limit` are allowed: as many in training, its part in an evaluation."""
        return limit if self.even or not self.deals else len(range(self.rank, limit, self.ranks))

    def length(self, batches: int | None, batch_size: int | None) -> int | None:
        """Return how many batches of a loader with `batches` this rank gets; None if not known."""
        if batches is None or not self.deals:
            return batches
        if not self.even:
            return self.own(batches)
        full, rest = divmod(batches, self.ranks)
        return full + (rest > 0 and batch_size is not None and batch_size > 1)

    def of_indices(
        self, batches: Iterator[Sequence[Any]], alike: Callable[[int], object] = lambda number: None
    ) -> Iterator[Any]:
        """Yield this rank's batches of indices, each rank as many; all of a sampler that gives this rank's part already.

        If the last batches of an epoch do not suffice for all ranks, their samples and those of the batches before are dealt
        out anew, so that none is left out, and none comes twice. What others did of the epoch before is left out. `alike` is
        called with the number in the epoch of a batch that is the same on all ranks, before that is yielded.
        """
        if not self.deals:
            yield from batches
        elif not self.even:
            yield from self.of_batches(batches)
        else:
            for number, turn in enumerate(self.turns(batches), self.turns_before):
                if isinstance(turn, Alike):
                    alike(number)
                yield turn[self.rank]

    def turns(self, batches: Iterator[Sequence[Any]]) -> Iterator[list[Any]]:
        """Yield the turns that are left after what others did of an epoch: of each, the batches of indices of all ranks."""
        for ranks, done in self.past:
            batches = _left(batches, ranks, done)
        return _turns(batches, self.ranks)

    def of_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's batches; in training, those at the end that do not suffice for all ranks are left out."""
        if self.ranks == 1 or not self.deals:
            yield from self.together(batches)
        else:
            while turn := list(islice(batches, self.ranks)):
                if len(turn) == self.ranks or (not self.even and self.rank < len(turn)):
                    yield turn[self.rank]

    def together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield all batches; of loaders that give each rank its own part, in training, until any rank has no more.

        The others would wait for it for ever.
        """
        if self.ranks == 1 or self.deals or not self.even:
            yield from batches
            return
        none: Any = object()
        while not self.any_rank((batch := next(batches, none)) is none):
            yield batch


class Alike(list[Any]):
    """A turn in which all ranks do the same batch, as fewer samples are left than there are ranks.

    The mean of their gradients is that of one process: so each sample counts once in it.
    """


def _turns(batches: Iterator[Sequence[Any]], ranks: int) -> Iterator[list[Any]]:
    """Yield the turns of so many ranks, until no sample is left."""
    held: list[Sequence[Any]] = []
    while turn := list(islice(batches, ranks)):
        if len(turn) < ranks:
            yield from _dealt([index for batch in (*held, *turn) for index in batch], ranks, 2 if held else 1)
            return
        if held:
            yield held
        held = turn
    if held:
        yield held


def _dealt(samples: list[Any], ranks: int, turns: int) -> Iterator[list[Any]]:
    if len(samples) < ranks:
        yield Alike([samples] * ranks)
        return
    places = ranks * turns if len(samples) >= ranks * turns else ranks
    cuts = [place * len(samples) // places for place in range(places + 1)]
    parts = [samples[start:end] for start, end in pairwise(cuts)]
    for first in range(0, places, ranks):
        yield parts[first : first + ranks]


def _left(batches: Iterator[Sequence[Any]], ranks: int, done: int) -> Iterator[Sequence[Any]]:
    """Return the batches that so many ranks left when they had done so many turns, those of the first rank first."""
    around = list(islice(batches, (done - 1) * ranks, (done + 1) * ranks))  # the last turn that was done, and the next
    if ranks < len(around) < 2 * ranks:  # both were dealt out anew, and that was begun
        return chain.from_iterable(islice(_turns(iter(around), ranks), 1, None))
    return chain(around[ranks:], batches)


def check_enough(loader: Any, batches: int | None, share: Share, what: str) -> None:
    """Raise `DataError` if a loader that is to be shared out has fewer batches than there are ranks."""
    if batches is not None and batches < share.ranks and share.of(loader).deals:
        raise DataError(
            f"{what} has {batches} batches for {share.ranks} ranks, and each must get one. Use fewer ranks or a smaller batch "
            "size; or give each rank a loader of its own part, with a DistributedSampler or DdpDriver(share_data=False)."
        )


def _is_shared(loader: Any, ranks: int) -> bool:
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    parts: Iterable[Any] = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    for part in parts:
        made_for = getattr(part, "num_replicas", None)
        if isinstance(made_for, int):
            if made_for != ranks:
                raise DataError(f"{type(part).__name__} is made for {made_for} ranks, and there are {ranks}; make it for these")
            return True
    # A streamed data set of Hugging Face after split_dataset_by_node.
    return getattr(getattr(loader, "dataset", loader), "_distributed", None) is not None
