"""The samples of a step, as `RunInfo.samples` names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class BatchSamples:
    """The samples of one batch on one rank; with `Mixture` in the mode zip, those of one of its loaders.

    Epoch and number are indices, from 0. Its text counts from 1, as capsules and other messages do.
    """

    rank: int
    """The rank that read the batch."""
    epoch: int
    """The epoch, from 0; of a loader in a `Mixture` too."""
    number: int
    """The number of the batch in the epoch on this rank, from 0; in a `Mixture`, in the present pass over its loader."""
    indices: Sequence[Any] | None = None
    """The indices in the data set, or the index in a list of batches. None: they cannot be computed; `why` says why."""
    unit: Literal["samples", "batches"] = "samples"
    """Whether `indices` are those of samples, or of whole batches in a list."""
    source: str = ""
    """The name of the loader in a `Mixture`; empty without one."""
    passes: int = 0
    """The number of passes over the loader that were complete before, in this epoch of a `Mixture`."""
    why: str = ""
    """Why there are no indices; for a stream with shards, which shards this rank reads."""

    def __str__(self) -> str:
        source = f" of {self.source!r}" if self.source else ""
        again = f" in pass {self.passes + 1}" if self.passes else ""
        where = f"rank {self.rank}, batch {self.number + 1}{source}{again}"
        if self.indices is None:
            return f"{where}: {self.why}"
        unit = "index in the list" if self.unit == "batches" else "samples"
        return f"{where}: {unit} {', '.join(map(str, self.indices))}"


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples that each rank read in one step. `RunInfo.samples` returns it; print it."""

    step: int
    """The number of the step, from 1."""
    epoch: int
    """The epoch, from 0."""
    ranks: int
    """The number of ranks."""
    batches: tuple[BatchSamples, ...]
    """The batches of all ranks, in the order in which each rank read them."""

    def of_rank(self, rank: int) -> list[Any] | None:
        """Return the indices that a rank read, in order; None if those of one of its batches cannot be computed."""
        own = [one.indices for one in self.batches if one.rank == rank]
        return None if None in own else [index for indices in own for index in indices or ()]

    def __str__(self) -> str:
        return "\n".join([f"step {self.step}, in epoch {self.epoch + 1}:", *(f"  {one}" for one in self.batches)])
