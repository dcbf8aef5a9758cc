"""The speed of the training between two records: steps, samples and tokens per second, and the fraction of the peak."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from cadenza.engine.flop_count import FlopCount, is_compiled, traced
from cadenza.engine.session import session_of
from cadenza.errors import nearest

if TYPE_CHECKING:
    from cadenza.run import Run

PARTS = ("steps", "samples", "tokens", "mfu")
_READ = attrgetter("training_s", "step", "samples", "tokens", "batch")
_AT = {"steps": 1, "samples": 2, "tokens": 3, "mfu": 4}  # where `_READ` has what a part counts
_NAMES = {"steps": "steps_per_s", "samples": "samples_per_s", "tokens": "tokens_per_s", "mfu": "mfu"}

PEAKS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""FLOP/s of dense matrices in 16 bits by a part of the device's name, from NVIDIA's data sheet of each product.

The sheets of newer products give the number with sparsity, which is twice that of dense matrices. The first entry that fits is
taken. A part of a device (MIG) has no entry.
"""


def checked_parts(throughput: object) -> tuple[str, ...] | bool:
    """Return the names of the numbers to log, or whether the default ones are logged.

    Raises:
        TypeError: It is neither a bool nor a sequence of names.
        ValueError: A name is unknown.
    """
    if isinstance(throughput, bool):
        return throughput
    if isinstance(throughput, str) or not isinstance(throughput, Iterable):
        raise TypeError(f"throughput must be True, False or a sequence of {', '.join(map(repr, PARTS))}; got {throughput!r}")
    names = tuple(throughput)
    for name in names:
        if name not in PARTS:
            raise ValueError(f"throughput has no {name!r}; expected {', '.join(map(repr, PARTS))}.{nearest(str(name), PARTS)}")
    return names


class Throughput:
    """Measures one run.

    Args:
        parts: Some of `PARTS`; True for steps, samples and, if they are counted, tokens.
        flops: The operations of a training batch on one rank; None counts those of the first.
        peak_flops: The peak of the device in FLOP/s; None looks it up.
    """

    def __init__(self, run: Run, parts: tuple[str, ...] | bool, flops: float | None, peak_flops: float | None) -> None:
        self._parts = parts if isinstance(parts, tuple) else ("samples", "steps")
        self._automatic = parts is True
        self._flops, self._count = flops, FlopCount(session_of(run))
        self._peak = peak_of(run, peak_flops, flops) if "mfu" in self._parts else 0.0
        self.begin(run)

    def begin(self, run: Run) -> None:
        """Measure from now on."""
        self._mark: tuple[float, int, int, int, int] = _READ(run.progress)

    @property
    def counts(self) -> bool:
        """Whether the operations of a batch are still to be counted."""
        return "mfu" in self._parts and self._flops is None

    def before_batch(self, run: Run, batch: Any) -> None:
        """Count the operations of this batch."""
        session = session_of(run)
        if session.step_fn is not None or not is_compiled(session.module):
            self._count.begin()
            return
        try:
            with run.progress.aside():
                self._flops = traced(session, batch)
        except Exception as error:
            raise ValueError(
                f"the operations of a compiled model are counted from shapes, but this loss needs values: {error!r}. Give "
                "LogTraining(flops=...), the floating point operations of a training batch on one rank."
            ) from error

    def after_batch(self) -> None:
        """End the count. A batch that was skipped had nothing to count, so the next one is counted."""
        if self._flops is None:
            self._flops = self._count.end() or None

    def values(self, run: Run) -> dict[str, float]:
        """Return the speed since the last call, or since the fit began."""
        before, self._mark = self._mark, _READ(run.progress)
        now = self._mark
        passed_s = max(now[0] - before[0], 1e-9)
        tokens = now[_AT["tokens"]]
        if not tokens and "tokens" in self._parts and run.progress.step - run.progress.origin.step > 1:
            raise ValueError(
                "LogTraining(throughput=...) has 'tokens', but nothing counts them: return 'tokens' from compute_loss, or give "
                "Trainer(tokens=...), a function (batch) -> int."
            )
        values = {}
        for part in (*self._parts, "tokens") if self._automatic and tokens else self._parts:
            at = _AT[part]
            if now[at] or part in ("steps", "tokens"):  # 0 samples and batches in a loop of cadenza.attach without loop.batch()
                done = now[at] - before[at]
                values[_NAMES[part]] = (done if part != "mfu" else done * (self._flops or 0) / (self._peak or 1)) / passed_s
        return values


def peak_of(run: Run, given: float | None, flops: float | None) -> float:
    """Return the peak of the run's device in FLOP/s.

    Raises:
        ValueError: It is not known; or the operations of a sharded model cannot be counted.
    """
    if run.driver.shards and flops is None:
        raise ValueError(
            "'mfu' counts operations on one rank, which a sharded model spreads over all of them. Give "
            "LogTraining(flops=...), the floating point operations of a training batch on one rank."
        )
    if given is not None:
        return given
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else str(run.device)
    precision, known = session_of(run).precision.name, known_peak(name)
    if known is None:
        raise ValueError(
            f"'mfu' needs the peak of the device, and that of {name!r} is not known. Give LogTraining(peak_flops=...), in "
            "FLOP/s for the number format of the run."
        )
    if precision == "fp32":
        raise ValueError(
            f"'mfu' needs the peak of the device in the number format of the run: known is that of {name!r} in 16 bits, "
            f"{known:g} FLOP/s, and this run is in {precision}. Give LogTraining(peak_flops=...)."
        )
    return known


def known_peak(device: str) -> float | None:
    """Return the peak of a device by its name; None if it is not known."""
    return next((peak for part, peak in PEAKS.items() if "MIG" not in device and re.search(rf"\b{part}\b", device)), None)
