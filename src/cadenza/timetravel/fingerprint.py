"""Write checksums of weights and gradients, so that two runs can be compared bit by bit without their weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.drivers.sharding import checksum, checksum_of_all
from cadenza.engine.session import Session, session_of
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import in_steps
from cadenza.loading.batches import tensors_in
from cadenza.optim.non_finite import tensors_at

if TYPE_CHECKING:
    from cadenza.run import Run


class Fingerprint(Callback):
    """Write checksums of each weight, gradient and buffer at an interval, and of the last batch of the step and its outputs.

    ``cadenza compare RUN RUN`` then names the first step and tensor at which two runs part: runs on two machines, of two
    versions of the code, or a run and its repetition.

    The run directory gets a line of ``fingerprints.jsonl`` for each such step, and one for step 0 with the weights at the
    start. A checksum is the CRC-32 of the values, as in the manifest of a checkpoint. Gradients are those before clipping,
    reduced over ranks and unscaled. Without shards, the checksums of the main process are written; with FSDP, those of the
    shards of all ranks together, which differ with another number of ranks. A continued run removes the lines after its
    checkpoint.

    All values are copied to the host: a fingerprint waits for the device, and takes as long as a copy of the model.

    With multiple ranks: the main process writes checksums of its own tensors, which are equal on all ranks; with FSDP, every
    rank sends those of its shards.

    Args:
        every: The interval in steps.

    Raises:
        ScheduleError: `every` cannot be parsed, or does not count steps.
        ValueError: When a run starts: it has no directory.

    >>> import tempfile, torch
    >>> from cadenza.report.fingerprints import first_difference, read_fingerprints
    >>> from cadenza.testing import tiny_run
    >>> rows = []
    >>> for lr in (0.1, 0.2):
    ...     sgd = lambda parameters: torch.optim.SGD(parameters, lr)
    ...     run = tiny_run(optimizer=sgd, callbacks=[Fingerprint("1 step")], directory=tempfile.mkdtemp())
    ...     rows.append(read_fingerprints(run.info.directory / "fingerprints.jsonl"))
    >>> print(first_difference(*rows))
    the runs part at step 1: the weight 'weight'; 1 step before it equal
    """

    before: Relation = (Phase.CLIP,)

    def __init__(self, every: Interval = "100 steps") -> None:
        self.every: Schedule = in_steps(every, "Fingerprint(every=...)", "gradients exist only before the update")
        self._gradients: tuple[int, dict[str, str]] = -1, {}

    def listeners(self) -> list[Listener]:
        own = [
            Listener(Callback.on_before_optimizer_step, self._take_gradients, self.every, "of gradients"),
            Listener(Callback.on_step_end, self._write, self.every),
        ]
        return silent([*super().listeners(), *own])

    def on_setup(self, run: Run) -> None:
        self._gradients = -1, {}
        if run.info.directory is None:
            raise ValueError(
                "Fingerprint writes fingerprints.jsonl to the directory of the run, and there is none. Give directory=."
            )

    def on_fit_start(self, run: Run) -> None:
        if run.progress.step == 0:
            self._write(run)

    def _take_gradients(self, run: Run) -> None:
        session = session_of(run)
        named = [(name, tensor.grad) for name, tensor in _parameters(session) if tensor.grad is not None]
        self._gradients = run.progress.step + 1, _sums(run, named)

    def _write(self, run: Run) -> None:
        session, (step, gradients) = session_of(run), self._gradients
        if not run.is_main and not run.driver.shards:
            return
        outputs = tensors_at(dict(run.outputs), "outputs") if run.progress.step else ()
        sums = {  # what `cadenza compare` reads
            "batch": {"": f"{checksum_of_all(tensors_in(run.batch)):08x}"} if run.progress.step else {},
            "outputs": {path: f"{checksum(tensor):08x}" for path, tensor in outputs},
            "gradients": gradients if step == run.progress.step else {},
            "buffers": _sums(run, session.module.named_buffers()),
            "weights": _sums(run, _parameters(session)),
        }
        if run.is_main and session.files is not None:
            facts = {"step": run.progress.step, "ranks": run.driver.world_size, "shards": run.driver.shards}
            session.files.add_fingerprint({**facts, **sums})


def _parameters(session: Session) -> list[tuple[str, Tensor]]:
    extra = session.extra_parameters.parameters
    return [*session.module.named_parameters(), *((f"outside of the model {i}", tensor) for i, tensor in enumerate(extra))]


def _sums(run: Run, named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return checksums by name, on the main process; with shards, of those of all ranks, and every rank must call this."""
    if not run.is_main and not run.driver.shards:
        return {}
    own = {name: checksum(tensor) for name, tensor in named}
    if not run.driver.shards:
        return {name: f"{value:08x}" for name, value in own.items()}
    everyone: list[dict[str, int]] = run.driver.gather_on_main(own)
    return (
        {name: f"{zlib.crc32(repr([rank_value[name] for rank_value in everyone]).encode()):08x}" for name in own}
        if everyone
        else {}
    )
