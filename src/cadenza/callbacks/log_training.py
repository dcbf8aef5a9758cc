"""Log how the training goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cadenza.cadence import Cadence, Filter
from cadenza.hooks import periodic
from cadenza.listener import Listener
from cadenza.moments import Callback

if TYPE_CHECKING:
    from cadenza.run import Run


class LogTraining(Callback):
    """Log the loss, other outputs, the learning rate and the speed at a cadence.

    Args:
        every: A cadence such as ``"50 steps"``.
        outputs: Names in the batch's outputs, of numbers or tensors of shape (). ``"loss"`` is the mean over the step.
        lr: Log ``train/lr``: of each parameter group by number if they differ in count from one.
        throughput: Log ``train/samples_per_s`` and ``train/steps_per_s`` since the last time, evaluations included.
        prefix: What the names start with.

    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(callbacks=[LogTraining(every="2 steps", throughput=False)], steps=4)
    >>> run.history.names, [step for step, _ in run.history["train/loss"]]
    (['train/loss', 'train/lr'], [2, 4])
    """

    def __init__(
        self,
        every: str | Filter | Callable[[Run], bool] = "50 steps",
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
        """Log now."""
        prefix = self.prefix
        for name in self.outputs:
            value = run.loss if name == "loss" else run.outputs[name]
            if value is not None:
                run.log(f"{prefix}/{name}", value)
        if self.lr:
            rates = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
            run.log({f"{prefix}/lr" + (f"/{i}" if len(rates) > 1 else ""): rate for i, rate in enumerate(rates)})
        if self.throughput:
            before, samples, steps = self._mark
            self.on_fit_start(run)
            passed_s = max(self._mark[0] - before, 1e-9)
            run.log(f"{prefix}/samples_per_s", (self._mark[1] - samples) / passed_s)
            run.log(f"{prefix}/steps_per_s", (self._mark[2] - steps) / passed_s)
