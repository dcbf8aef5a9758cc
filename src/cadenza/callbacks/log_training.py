"""Log the loss, the learning rate and the speed of the training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cadenza.engine.session import session_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic

if TYPE_CHECKING:
    from cadenza.run import Run


class LogTraining(Callback):
    """Log the loss, other outputs, the learning rate and the speed at an interval.

    Args:
        every: The interval: ``50`` (steps), ``"1 epoch"``, ``"30 s"``.
        outputs: Names of outputs of the last batch: numbers, or tensors of shape (). ``"loss"`` is the (weighted) mean over the
            step and all ranks; the others are means over the ranks. An output that a skipped batch does not have is left out.
        lr: Log ``train/lr``, the rate of the next update, with the factor of `Warmup`. Several parameter groups, over all
            optimizers, are logged as ``train/lr/0``, ``train/lr/1``, ...
        throughput: Log ``train/samples_per_s`` and ``train/steps_per_s`` since the last time, evaluations included.
        prefix: The prefix of the names.

    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(callbacks=[LogTraining(every="2 steps", throughput=False)], steps=4)
    >>> run.history.names, [step for step, _ in run.history["train/loss"]]
    (['train/loss', 'train/lr'], [2, 4])
    """

    def __init__(
        self,
        every: Interval = "50 steps",
        *,
        outputs: Sequence[str] = ("loss",),
        lr: bool = True,
        throughput: bool = True,
        prefix: str = "train",
    ) -> None:
        if isinstance(outputs, str):
            raise TypeError(f'outputs must be a sequence of names, such as ("loss",); got the text {outputs!r}')
        self.every: Schedule = Schedule.parse(every)
        self.outputs: tuple[str, ...] = tuple(outputs)
        self.lr: bool = lr
        self.throughput: bool = throughput
        self.prefix: str = prefix
        self._mark = (0.0, 0, 0)

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), periodic(self.every, self.log)]

    def on_fit_start(self, run: Run) -> None:
        self._mark = (time.perf_counter(), run.progress.samples, run.progress.step)

    def log(self, run: Run) -> None:
        """Log now. Every rank must call this, because the loss is a mean over all ranks."""
        prefix = self.prefix
        values: dict[str, Any] = {}
        for name in self.outputs:
            value = session_of(run).sync.mean_loss() if name == "loss" else self._output(run, name)
            if value is not None:
                values[f"{prefix}/{name}"] = value
        if self.lr:
            rates = session_of(run).rates.of(run)
            if len(rates) == 1:
                values[f"{prefix}/lr"] = rates[0]
            else:
                values |= {f"{prefix}/lr/{index}": rate for index, rate in enumerate(rates)}
        if self.throughput:
            before, samples, steps = self._mark
            self.on_fit_start(run)
            now, samples_now, steps_now = self._mark
            passed_s = max(now - before, 1e-9)
            values[f"{prefix}/samples_per_s"] = (samples_now - samples) / passed_s
            values[f"{prefix}/steps_per_s"] = (steps_now - steps) / passed_s
        run.log(values)

    def _output(self, run: Run, name: str) -> Any:
        return run.outputs.get(name) if session_of(run).step.skipping else run.outputs[name]
