"""The speed of the training between two records: steps, samples and tokens per second, and the fraction of the peak."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cadenza.engine.session import Session, session_of
from cadenza.errors import nearest
from cadenza.status.outputs import Outputs

if TYPE_CHECKING:
    from cadenza.run import Run


# -- floating point operations ---------------------------------------------------------------------


class FlopCount:
    """Counts the forward and the backward pass of one batch while the run trains on it. Results do not change.

    A multiplication and an addition count as two. Recomputed activations count too. Every operation of the batch passes through
    Python, which takes some microseconds more for each. `torch.compile` gives up a function for good that it meets in such a
    mode, so nothing is compiled in this batch; a compiled model is counted by `traced` instead.
    """

    def __init__(self) -> None:
        self._counting, self._counter = ExitStack(), None

    def begin(self) -> None:
        """Count from now on."""
        self._counter = self._counting.enter_context(_counting())

    def end(self) -> int:
        """Count no more, and return the operations."""
        self._counting.close()
        return 0 if self._counter is None else int(self._counter.get_total_flops())


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` was asked to compile a module, or a part of it."""
    return any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules())


def traced(session: Session, batch: Any) -> int:
    """Return the operations of a batch from the shapes of its tensors alone: nothing is computed, and nothing changes.

    For a compiled model, in which operations are fused and cannot be counted.

    Raises:
        Exception: The loss depends on values of tensors, which are not there.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # here, as it takes time to import

    model, fake = session.module, FakeTensorMode(allow_non_fake_inputs=True)
    held = {name: fake.from_tensor(one) for name, one in model.named_buffers(remove_duplicate=False)}
    weights = {name: fake.from_tensor(one) for name, one in model.named_parameters(remove_duplicate=False)}
    with fake, _counting() as counter, nn.utils.stateless._reparametrize_module(model, {**held, **weights}):
        outputs = Outputs()
        outputs.take(session.compute(model, pytree.tree_map_only(Tensor, fake.from_tensor, batch)))
        trained = [one for one in weights.values() if one.requires_grad]
        torch.autograd.grad(outputs["loss"], trained, allow_unused=True)
    return int(counter.get_total_flops())


@contextmanager
def _counting() -> Iterator[Any]:
    from torch.utils.flop_counter import FlopCounterMode

    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eager, FlopCounterMode(display=False) as counter:
        yield counter


PARTS = {"steps": "step", "samples": "samples", "tokens": "tokens", "mfu": "batch"}
"""The numbers that can be logged, with the counter of each."""

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
        self._flops, self._count = flops, FlopCount()
        self._peak = peak_of(run, peak_flops, flops) if "mfu" in self._parts else 0.0
        self.begin(run)

    def begin(self, run: Run) -> None:
        """Measure from now on."""
        self._mark = run.progress.now(), run.progress.training_s

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
        before, before_s = self._mark
        self.begin(run)
        now, now_s = self._mark
        passed_s, tokens = max(now_s - before_s, 1e-9), now.tokens
        if not tokens and "tokens" in self._parts and run.progress.step - run.progress.origin.step > 1:
            raise ValueError(
                "LogTraining(throughput=...) has 'tokens', but nothing counts them: return 'tokens' from compute_loss, or give "
                "Trainer(tokens=...), a function (batch) -> int."
            )
        values = {}
        for part in (*self._parts, "tokens") if self._automatic and tokens else self._parts:
            count = getattr(now, PARTS[part])
            if count or part in ("steps", "tokens"):  # 0 samples and batches in a loop of cadenza.attach without loop.batch()
                done = count - getattr(before, PARTS[part])
                if part == "mfu":
                    values["mfu"] = done * (self._flops or 0) / (self._peak or 1) / passed_s
                else:
                    values[f"{part}_per_s"] = done / passed_s
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
