"""Log how the training goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cadenza.engine.session import session_of
from cadenza.hooks.cadence import Cadence, Interval
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.subscription import periodic

if TYPE_CHECKING:
    from cadenza.run import Run


class LogTraining(Callback):
    """Log the loss, other outputs, the learning rate and the speed at a cadence.

    Args:
        every: A cadence such as ``"50 steps"``.
        outputs: Names in the last batch's outputs, of numbers or tensors of shape (). ``"loss"`` is the (weighted) mean over
            the step and all ranks; others are means over the ranks. Of a batch that was skipped, those that it does not
            have are left out.
        lr: Log ``train/lr``, the rate that the next update will use, warm-up included; with several parameter groups, over
            all optimizers, ``train/lr/0``, ``train/lr/1``, ...
        throughput: Log ``train/samples_per_s`` and ``train/steps_per_s`` since the last time, evaluations included.
        prefix: What the names start with.

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
        self.every = Cadence.parse(every)
        self.outputs, self.lr, self.throughput, self.prefix = tuple(outputs), lr, throughput, prefix
        self._mark = (0.0, 0, 0)

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), periodic(self.every, self.log)]

    def on_fit_start(self, run: Run) -> None:
        self._mark = (time.perf_counter(), run.progress.samples, run.progress.step)

    def log(self, run: Run) -> None:
        """Log now. Every rank must call this, as the loss is that of all."""
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
