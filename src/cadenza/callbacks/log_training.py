"""Log the loss, the learning rate and the speed of the training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cadenza.engine.monitor import judge_training
from cadenza.engine.step_state import is_discarded
from cadenza.engine.tally import IntervalMetrics
from cadenza.engine.training_log import IntervalMeans, Throughput, checked_parts
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, inner, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Interval, Schedule, Until
from cadenza.hooks.subscription import periodic
from cadenza.loading.evaluation import Metrics, by_name, check_state
from cadenza.optim.rates import rates_of
from cadenza.status.outputs import Outputs

if TYPE_CHECKING:
    from cadenza.run import Run


class LogTraining(Callback):
    """Log the loss, other outputs, the learning rate and the speed at an interval.

    With multiple ranks: communicates when it logs the loss, which is the mean over all ranks; every rank must call ``log``.

    Args:
        every: The interval: ``50`` (steps), ``"1 epoch"``, ``"30 s"``.
        outputs: Names of outputs: numbers, or tensors of shape (). Each is the mean over the batches since the last time, on
            all ranks, weighted by the output ``weight`` if there is one. Skipped batches do not count; without a batch that
            counts, there is no value. A number that a hook logs under the same name replaces it.
        metrics: Metrics of the outputs, in the forms of `Evaluate`. Each is computed over the batches since the last time, on
            all ranks, and is exact after a resume on the same number of ranks. It needs ``state_dict`` and
            ``load_state_dict``. Skipped batches and those of weight 0 do not count.
        lr: Log ``train/lr``, the rate of the next update, with the factor of `Warmup`. Several parameter groups, over all
            optimizers, are logged as ``train/lr/0``, ``train/lr/1``, ...
        throughput: Log ``train/samples_per_s`` and ``train/steps_per_s`` since the last time, of all ranks and without the time
            of evaluations and saves; and ``train/tokens_per_s`` if tokens are counted. Samples are left out in a loop of
            ``cadenza.attach`` without ``loop.batch``, which counts none. Or a choice of ``"samples"``,
            ``"steps"``, ``"tokens"`` and ``"mfu"``. The last one logs ``train/mfu``, the model FLOP/s utilization: the floating
            point operations of the batches since the last time, by their time and by the peak of the device, 0 to 1.
        prefix: The prefix of the names.
        flops: The floating point operations of a training batch on one rank, forward and backward, for ``"mfu"``. None counts
            those of the first batch, with ``torch.utils.flop_counter``, and takes all batches to have as many: matrix products,
            convolutions and attention count, recomputed activations as well. This batch takes some microseconds more for
            each operation; results do not change. Of a compiled model, they are counted from the shapes of the first batch.
        peak_flops: The peak of the device in FLOP/s for ``"mfu"``, in the number format of the run. None looks it up, for
            16 bits and the usual data-centre GPUs: from NVIDIA's data sheets, 312e12 for an A100 and 989e12 for an H100.

    Raises:
        TypeError: `outputs` is a text, `metrics` has an object that is no such metric, or `throughput` is neither a bool nor a
            sequence of names.
        ValueError: `throughput` has an unknown name; `flops` or `peak_flops` is not above 0; at the start of a run, the peak of
            the device is not known; or nothing counts tokens.

    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(callbacks=[LogTraining(every="2 steps", throughput=False)], steps=4)
    >>> run.history.names, [step for step, _ in run.history["train/loss"]]
    (['train/loss', 'train/lr'], [2, 4])
    """

    each_rank: bool = True

    logs_training = True

    def __init__(
        self,
        every: Interval = "50 steps",
        *,
        outputs: Sequence[str] = ("loss",),
        metrics: Metrics | None = None,
        lr: bool = True,
        throughput: bool | Sequence[str] = True,
        prefix: str = "train",
        flops: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if isinstance(outputs, str) or not isinstance(outputs, Iterable):
            raise TypeError(f'outputs must be a sequence of names, such as ("loss",); got {outputs!r}')
        self.every: Schedule = Schedule.parse(every)
        self.outputs: tuple[str, ...] = tuple(outputs)
        self.metrics: dict[str, Any] = by_name(metrics)
        check_state(metrics)
        self._given_metrics = metrics
        self.lr: bool = lr
        self.throughput: bool | tuple[str, ...] = checked_parts(throughput)
        self.prefix: str = prefix
        for name, number in (("flops", flops), ("peak_flops", peak_flops)):
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} must be above 0; got {number!r}")
        self.flops: float | None = flops
        self.peak_flops: float | None = peak_flops
        self._speed: Throughput | None = None
        self._means: IntervalMeans | None = None
        self._tally: IntervalMetrics | None = None

    def listeners(self) -> list[Listener]:
        own = [*super().listeners(), *self._collecting(), periodic(self.every, self.log)]
        if isinstance(self.throughput, tuple) and "mfu" in self.throughput and self.flops is None:
            first = Until(lambda: math.inf if self._speed is not None and self._speed.counts else 0)
            own += [Listener(Callback.on_batch_start, self._before_batch, first, silent=True)]
            own += [Listener(Callback.on_batch_end, self._after_batch, first, silent=True)]
        return own

    def _collecting(self) -> list[Listener]:
        own = [Listener(Callback.on_load, self._take_over)]
        if {*self.outputs} - {"loss"} or self.metrics:
            own += [Listener(Callback.on_batch_end, self._add_batch, splits=False)]
            own += [Listener(Callback.on_step_end, self._add_step)]
        return inner(silent(own))

    def on_setup(self, run: Run) -> None:
        self._means = IntervalMeans(run, self.outputs)
        if self.metrics:
            self._tally = IntervalMetrics(run, self._given_metrics, self.prefix)
        if self.throughput:
            self._speed = Throughput(run, self.throughput, self.flops, self.peak_flops)

    def on_fit_start(self, run: Run) -> None:
        if self._speed is not None:
            self._speed.begin(run)

    def log(self, run: Run) -> None:
        """Log now. Every rank must call this, because the loss is a mean over all ranks."""
        prefix = self.prefix
        sums: dict[str, Any] = {}
        if self._means is not None:
            sums = self._means.log(run, prefix)
            self._means.begin(run.progress.step)
        values: dict[str, Any] = {} if self._tally is None else {**self._tally.take()}
        sums |= {name: (value, 1.0) for name, value in values.items()}
        if self.lr:
            rates = rates_of(run).of(run)
            for index, rate in enumerate(rates):
                values[f"{prefix}/lr/{index}" if len(rates) > 1 else f"{prefix}/lr"] = rate
        if self._speed is not None:
            for name, value in self._speed.values(run).items():
                values[f"{prefix}/{name}"] = value
        run.log(values)
        judge_training(run, prefix, sums, whole=False)

    def state_dict(self) -> dict[str, Any]:
        state = {} if self._means is None else self._means.state_dict()
        metrics = {} if self._tally is None else self._tally.state_dict()
        return state | ({"metrics": metrics} if metrics else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._means is not None:
            self._means.load_state_dict(state)
        if self._tally is not None:
            self._tally.load_state_dict(state.get("metrics", {}))

    def _take_over(self, run: Run, checkpoint: Any) -> None:
        if self._means is not None:
            self._means.take_over(run, hooks_of(run).name_of(self), checkpoint)
        if self._tally is not None and len(checkpoint.by_rank) != run.driver.world_size:
            self._tally.begin()

    def _add_batch(self, run: Run, batch: Any, outputs: Outputs) -> None:
        self._add(run, batch, outputs, run.progress.step + 1)

    def _add_step(self, run: Run) -> None:
        """Add the outputs of a step that has no batches: a loop of ``cadenza.attach`` may not say where they are."""
        if not run.window.seen:
            self._add(run, None, run.outputs, run.progress.step)

    def _add(self, run: Run, batch: Any, outputs: Outputs, step: int) -> None:
        if is_discarded(run) or self._means is None:
            return
        self._means.add(outputs, self.outputs, step)
        if self._tally is not None:
            self._tally.add(batch, outputs)

    def _before_batch(self, run: Run, batch: Any) -> None:
        if self._speed is not None:
            self._speed.before_batch(run, batch)

    def _after_batch(self, run: Run, batch: Any, outputs: Any) -> None:
        if self._speed is not None:
            self._speed.after_batch()
