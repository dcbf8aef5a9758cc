"""The facts about a run that sinks receive, also when it is replayed from its directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run, as trackers know it."""

    id: str = ""
    """A unique name; the same when the run is continued. Empty without a directory."""

    directory: Path | None = None
    """The directory in which the run writes."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's arguments as plain data: the configuration that trackers show.

    From ``on_fit_start`` on they include the batch size and the order of the loader.
    """

    step: int = 0
    """Completed steps; more than 0 if the run is continued at a checkpoint."""

    continued: bool = False
    """Whether another process began it in this directory, so that its files are there; also if it starts anew at step 0."""

    home: Path = field(default_factory=lambda: working_directory())
    """The working directory when the trainer was made."""

    accumulate: int = 1
    """The number of batches in one step."""

    name_samples: Callable[[int], StepSamples] | None = field(default=None, compare=False, repr=False)
    """Returns the samples of a step; see `samples`."""

    last_step: int | None = None
    """The last step that the run has begun, or that it can reach; None if that is not known."""

    def samples(self, step: int) -> StepSamples:
        """Return which samples each rank read in a step: their indices, computed from the facts in ``run.json``.

        Nothing is read from the data, and no record of the samples is kept: the order is a function of the seed, the epoch and
        the position. For loaders without indices, the position is named, and `BatchSamples.why` says why.

        Args:
            step: The number of the step, from 1.

        Raises:
            ValueError: The run has no such step; or it began with an earlier version, and ``run.json`` does not describe it.

        >>> from cadenza import Trainer
        >>> from cadenza.loading import TensorBatches
        >>> from cadenza.testing import tiny_run
        >>> import torch
        >>> loader = TensorBatches(torch.zeros(6, 1), torch.zeros(6, 1), batch_size=2, shuffle=True)
        >>> print(tiny_run(loader=loader, epochs=2, seed=1).info.samples(5))
        step 5, in epoch 2:
          rank 0, batch 2: samples 5, 2
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step must be a whole number, at least 1; got {step!r}")
        if step < 1 or (self.last_step is not None and step > self.last_step):
            most = "" if self.last_step is None else f" to {self.last_step}"
            steps = f"expected a step from 1{most}." if self.last_step != 0 else "it ended before its first step."
            raise ValueError(f"the run has no step {step}: {steps}")
        if self.name_samples is None:
            raise ValueError(
                "the samples are not known: run.json does not describe the data. An earlier version wrote it, or the loop of "
                "cadenza.attach(...) brings its own data."
            )
        return self.name_samples(step)

    @property
    def base(self) -> Path:
        """The directory of relative paths: that of the run, or `home` if the run has none."""
        return self.directory or self.home

    @property
    def name(self) -> str:
        """A name to show: that of the directory; empty without one."""
        return "" if self.directory is None else self.directory.resolve().name


def working_directory() -> Path:
    """Return the present working directory; ``.`` if it was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


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
        own = [batch.indices for batch in self.batches if batch.rank == rank]
        return None if None in own else [index for indices in own for index in indices or ()]

    def __str__(self) -> str:
        return "\n".join([f"step {self.step}, in epoch {self.epoch + 1}:", *(f"  {batch}" for batch in self.batches)])
