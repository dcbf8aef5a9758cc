"""What the training logs over intervals: means of the loss and of other outputs, and the speed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cadenza.drivers.sharding import is_sharded
from cadenza.engine.metric_log import EVERY, KeptLosses, LossBuffer, StepLoss, weighted_total
from cadenza.engine.monitor import judge_training
from cadenza.engine.session import Session, session_of
from cadenza.engine.step_state import is_discarded
from cadenza.engine.tally import NOT_AVERAGED
from cadenza.errors import nearest
from cadenza.hooks.dispatch import checked, hooks_of
from cadenza.hooks.listener import Listener, inner, silent
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.optim.model_state import is_compiled
from cadenza.records.scalars import as_numbers, exact_zero, host_number, weighted_sum
from cadenza.status.encoding import is_array
from cadenza.status.outputs import Outputs
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from cadenza.run import Run


_NO_MEANS = NOT_AVERAGED | {"loss"}  # the loss is that of the steps

Sums = tuple[float | Tensor, float | Tensor]
"""A weighted sum and the sum of the weights: numbers, or tensors of shape () on the device."""


class IntervalMeans:
    """The means of outputs over the batches of an interval, by name. The loss is that of the steps, which is trained.

    Batches count by the output ``weight``, or as one. Skipped batches and those of weight 0 do not count.

    Args:
        run: The run.
        names: The outputs.
    """

    def __init__(self, run: Run, names: Iterable[str] = ()) -> None:
        session = session_of(run)
        self._losses = ref(session.metrics.losses.buffer)  # a callback keeps no part of a run that is over
        self._records = session.metrics.buffer
        self.since: int = session.progress.step
        """The step after which the interval begins: the same on all ranks."""
        self._is_first = session.driver.rank == 0
        self._means: dict[str, _Mean] = {}
        for name in names:
            self._mean(name)

    def add(self, outputs: Outputs, names: Iterable[str], step: int) -> None:
        """Add these outputs of a batch that belongs to `step`.

        Raises:
            OutputError: The batch does not have one of them.
            TypeError: One of them is no real number.
        """
        for name in names:
            if name == "loss":
                continue
            if (number := real_number(value := outputs[name])) is None:
                raise TypeError(
                    f"LogTraining(outputs=...) takes real numbers and tensors of shape (); got outputs[{name!r}], "
                    f"{brief(value)}. Return its mean from compute_loss."
                )
            self._mean(name).add(step, number, dict.get(outputs, "weight"))

    def add_all(self, run: Run, outputs: Outputs, step: int) -> None:
        """Add all numbers that ``compute_loss`` returned for a batch that belongs to `step`, but those with another meaning."""
        if is_discarded(run):
            return
        weight, means = dict.get(outputs, "weight"), self._means
        for name, value in outputs.items():
            if name in _NO_MEANS or (type(value) is Tensor and value.ndim):
                continue
            number = host_number(value)
            if name in means and type(number) is float and weight is None:  # most numbers
                means[name].add_sums(number, 1)
            elif self._is_mean(name, outputs) and (known := real_number(number)) is not None:
                self._mean(name).add(step, known, weight)

    def logged_by_hooks(self, prefix: str) -> list[str]:
        """Return the names in records under which a hook of this rank has logged numbers."""
        return self._records.logged_by_hooks(f"{prefix}/{name}" for name in self._means)

    def log(self, run: Run, prefix: str, left_out: Collection[str] = ()) -> dict[str, Sums]:
        """Add the means to the record of this step; none where no batch counts. Return their sums on this rank.

        Every rank must call this.
        """
        found: dict[str, Sums] = {}
        for name, mean in self._means.items():
            is_step = name == "loss" and run.progress.step == self.since + 1
            total, weight = found[f"{prefix}/{name}"] = _of_step(run) if is_step else mean.sums()
            if (isinstance(weight, Tensor) or weight) and f"{prefix}/{name}" not in left_out:
                self._records.add_mean(f"{prefix}/{name}", total, weight)
        return found

    def begin(self, step: int) -> None:
        """Begin another interval after this step."""
        self.since = step
        for mean in self._means.values():
            mean.start(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of this rank. Waits for the device."""
        sums = {name: mean.on_host() for name, mean in self._means.items()}
        weighted = {name: [*value] for name, value in sums.items() if value[1]}
        return {"since": self.since, "sums": weighted} if weighted or (self.since and self._is_first) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the sums of a checkpoint."""
        self.since = state.get("since", self.since)
        for name, sums in state.get("sums", {}).items():
            self._mean(name).add_sums(*sums)

    def take_over(self, run: Run, callback: str, checkpoint: Any) -> None:
        """Continue the interval of a checkpoint; if another number of ranks wrote it, with the sums of all on the first rank.

        Args:
            run: The run.
            callback: The name of the callback that has the means.
            checkpoint: What ``on_load`` receives.
        """
        by_rank = checkpoint.by_rank
        self.since = by_rank[0].get("callbacks of the rank", {}).get(callback, {}).get("since", 0)
        if len(by_rank) == run.driver.world_size:
            return
        self.begin(self.since)
        states = [state.get("callbacks of the rank", {}).get(callback, {}) for state in by_rank]
        together = max(1, len(states) // checkpoint.state["config"].get("ranks", 1))
        for state in states[::together] if run.driver.data_rank == 0 else ():
            self.load_state_dict(state)

    def _is_mean(self, name: object, outputs: Outputs) -> bool:
        """Return whether an output of any name can be one that ``compute_loss`` returned to be reported."""
        return isinstance(name, str) and name[:1] != "_" and name not in outputs.derived

    def _mean(self, name: str) -> _Mean:
        if name not in self._means:
            own = LossBuffer()
            self._means[name] = _Mean(self._losses if name == "loss" else lambda: own, self.since)
        return self._means[name]


class _Mean:
    """The sums of one mean, on this rank.

    Numbers on the host are added in the order of the steps, so a run that resumes inside of an interval has the same bits.
    Those on a device stay there, and are added at the record: nothing waits for them.

    Args:
        buffer: Returns what receives the numbers, of which those of later steps than `since` are added.
        since: The step after which the interval begins.
    """

    def __init__(self, buffer: Callable[[], LossBuffer | None], since: int) -> None:
        self._buffer = buffer
        self._kept = 0
        self.start(since)
        if (held := buffer()) is not None:
            held.readers.append(self._add_step)

    def start(self, since: int) -> None:
        self._since, self._total, self._weight = since, 0.0, 0.0

    def add(self, step: int, value: float | Tensor, weight: float | Tensor | None) -> None:
        value = host_number(value)
        weights: list[Any] = [] if weight is None else [host_number(weight)]
        if not isinstance(value, Tensor) and not any(isinstance(weight, Tensor) for weight in weights):
            self.add_sums(*weighted_total([value], weights))
        elif (buffer := self._buffer()) is not None:
            buffer.keep(step, [torch.as_tensor(value).detach()], weights)
            self._kept += 1
            if not self._kept % EVERY:
                buffer.send()
            buffer.deliver(wait=False)

    def add_sums(self, total: float, weight: float) -> None:
        self._total, self._weight = self._total + total, self._weight + weight

    def sums(self) -> Sums:
        """Return the sums without a wait."""
        total, weight = self._total, self._weight
        away: list[KeptLosses] = []
        buffer = self._buffer()
        for loss in [] if buffer is None else buffer.kept_since(self._since):
            _, tensors, given, _ = loss
            losses, weights = [*map(host_number, tensors)], [*map(host_number, given)]
            if any(isinstance(number, Tensor) for number in (*losses, *weights)):
                away.append(loss)
            else:
                own, counted = weighted_total(losses, weights)
                total, weight = total + own, weight + counted
        if not away:
            return total, weight
        own_total, own_weight = _sums_on_device(away)
        return own_total + total, own_weight + weight

    def on_host(self) -> tuple[float, float]:
        """Return the sums on the host."""
        if (buffer := self._buffer()) is not None:
            buffer.deliver(wait=True)
        return self._total, self._weight

    def _add_step(self, loss: StepLoss) -> None:
        if loss.step > self._since:
            self.add_sums(loss.total, loss.weight)


def _of_step(run: Run) -> Sums:
    """Return the loss of the last step, equal to ``run.loss`` to the bit, with the weight 1. Every rank must call this."""
    session = session_of(run)
    loss, weight = session.sync.loss_to_log(), session.step.last_window.total
    if loss is None or not (isinstance(weight, Tensor) or weight):
        return 0.0, 0.0
    return host_number(loss if loss.is_cpu else loss.clone()), 1.0  # a graph may write the next loss into its memory


def real_number(value: object) -> float | Tensor | None:
    """Return a value if it is a real number or a tensor of shape (); None for all else."""
    if isinstance(value, Tensor):
        whole = type(value) is Tensor or not is_sharded(value)
        return value if not value.ndim and whole and not value.is_complex() else None
    if is_array(value) and not cast("Any", value).ndim:
        value = cast("Any", value).item()
    return value if isinstance(value, int | float) else None


def _sums_on_device(kept: Sequence[KeptLosses]) -> Sums:
    losses = [loss for _, losses, *_ in kept for loss in losses]
    like = next((loss for loss in losses if not loss.is_cpu), losses[0])
    like = exact_zero(like.device)  # a sum of float32 in float64 is exact, in any order, unless they differ widely
    numbers = as_numbers(like, losses)
    factors = as_numbers(like, [weight for _, own, weights, _ in kept for weight in weights or [1.0] * len(own)])
    return weighted_sum(numbers, factors), factors.sum()


# -- the means of each epoch, in a run without a `LogTraining` -------------------------------------


class EpochMeans(Callback):
    """Log the means of the loss and of all other numbers in the outputs, at the end of each epoch and of the run.

    A name under which a hook logs numbers is left out. If the run ends inside of an epoch and continues later, the next means
    are those of the whole epoch.
    """

    each_rank: bool = True
    name: str | None = "LogTraining"

    logs_training = True
    prefix = "train"
    outputs: tuple[str, ...] | None = None  # all numbers
    metrics: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self._means: IntervalMeans | None = None
        self._replaced: set[str] = set()

    def __repr__(self) -> str:
        return "LogTraining('1 epoch')"

    def listeners(self) -> list[Listener]:
        own = [Listener(Callback.on_setup, self._begin), Listener(Callback.on_load, self._take_over)]
        own += [Listener(Callback.on_batch_end, self._add_batch, splits=False)]
        # All ranks are there, and a save at the last step can wait for this record.
        end = Listener(Callback.on_epoch_end, self._end_epoch, note="every epoch, added")
        return silent([*inner(own), end])

    def _begin(self, run: Run) -> None:
        self._means, self._replaced = IntervalMeans(run, ["loss"]), set()

    def _add_batch(self, run: Run, batch: Any, outputs: Outputs) -> None:
        if len(outputs) > 1 and self._means is not None:  # else it is the loss
            self._means.add_all(run, outputs, run.progress.step + 1)

    def _end_epoch(self, run: Run) -> None:
        session, means = session_of(run), self._means
        if means is None or session.hooks.unwinding is not None or session.sync.requests.back is not None:
            return
        self._replaced.update(means.logged_by_hooks("train"))
        if session.sync.together:
            self._replaced.update(chain(*session.driver.gather_unequal(sorted(self._replaced))))
        sums, progress = means.log(run, self.prefix, self._replaced), run.progress
        if not progress.batch_in_epoch:  # else the run ends here, and may continue in this epoch
            means.begin(progress.step)
        if not progress.batch_in_epoch or progress.finished:
            judge_training(run, self.prefix, sums, whole=True)

    def _take_over(self, run: Run, checkpoint: Any) -> None:
        if self._means is not None:
            self._means.take_over(run, hooks_of(run).name_of(self), checkpoint)

    def state_dict(self) -> dict[str, Any]:
        if self._means is None:
            return {}
        replaced = self._replaced.union(self._means.logged_by_hooks("train"))
        state = self._means.state_dict()
        return state | ({"replaced": sorted(replaced)} if replaced else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replaced = {*state.get("replaced", ())}
        if self._means is not None:
            self._means.load_state_dict(state)


def with_epoch_means(callbacks: Sequence[BaseCallback], loader: object) -> list[BaseCallback]:
    """Return the callbacks, with the means of each epoch before them unless one of them logs the training.

    A loop of ``cadenza.attach`` has no epochs.
    """
    given = checked(callbacks)  # before their positions change
    logged = any(getattr(item, "logs_training", False) for item in given)
    return given if logged or not getattr(loader, "has_epochs", True) else [EpochMeans(), *given]


# -- the speed: steps, samples and tokens per second, and the fraction of the peak -----------------


def traced(session: Session, batch: Any) -> int:
    """Return the operations of a batch from the shapes of its tensors alone: nothing is computed, and nothing changes.

    For a compiled model, in which operations are fused and cannot be counted.

    Raises:
        Exception: The loss depends on values of tensors, which are not there.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # here, as it takes time to import

    model, fake = session.module, FakeTensorMode(allow_non_fake_inputs=True)
    held = {name: fake.from_tensor(tensor) for name, tensor in model.named_buffers(remove_duplicate=False)}
    weights = {name: fake.from_tensor(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    with fake, _counting() as counter, nn.utils.stateless._reparametrize_module(model, {**held, **weights}):
        outputs = Outputs()
        outputs.take(session.compute(model, pytree.tree_map_only(Tensor, fake.from_tensor, batch)))
        trained = [weight for weight in weights.values() if weight.requires_grad]
        torch.autograd.grad(outputs["loss"], trained, allow_unused=True)
    return int(counter.get_total_flops())


@contextmanager
def _counting() -> Iterator[Any]:
    """Count the operations of a batch while the run trains on it. Results do not change.

    A multiplication and an addition count as two. Recomputed activations count too. Every operation of the batch passes through
    Python, which takes some microseconds more for each. `torch.compile` gives up a function for good that it meets in such a
    mode, so nothing is compiled in this batch; a compiled model is counted by `traced` instead.
    """
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
        self._flops, self._counting = flops, ExitStack()
        self._counter: Any = None
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
        if session.step_fn is not None or not any(map(is_compiled, session.module.modules())):
            self._counter = self._counting.enter_context(_counting())
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
        self._counting.close()
        if self._flops is None and self._counter is not None:
            self._flops = int(self._counter.get_total_flops()) or None

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
