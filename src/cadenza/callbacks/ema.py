"""Keep a running average of the weights."""

from __future__ import annotations

from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.numbers import at_least, check_real
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic
from cadenza.optim.averaging import Averaging
from cadenza.optim.settings import Compared
from cadenza.text.hints import renamed


class Ema(Averaging, Compared):
    """Keep an exponential moving average of the weights; ``Evaluate(weights="ema")`` evaluates it.

    Each update computes ``average = decay * average + (1 - decay) * weights``; the first update copies the weights. Buffers,
    such as the statistics of BatchNorm, are copied from the model. Parameters of half precision are averaged in float32. An
    update does not wait for the device.

    With multiple ranks: each rank keeps the same average; an evaluation uses the BatchNorm statistics of the main process. It
    does not communicate.

    Args:
        decay: The weight of the old average in each update.
        every: The interval between updates: ``10`` (steps), ``"1 epoch"``.
        rampup: Begin with a smaller decay: after ``n`` updates the decay is ``min(decay, (1 + n) / (10 + n))``, as in
            TensorFlow's ``ExponentialMovingAverage(num_updates=...)``. A number replaces the 10: with 1000, the
            decay is 0.5 after about 1000 updates.
        name: The name of the averaged weights. Several averages in one list need different names.
        use_at_end: End with the averaged weights in the model, unless an error or a signal ended the run. This happens
            after the last save: the last checkpoint holds the weights with which the run can continue, and the average.

    Raises:
        ValueError: An argument is out of range, or another average of the run has this name.

    >>> from cadenza.testing import tiny_run
    >>> ema = Ema(0.5)
    >>> run = tiny_run(callbacks=[ema], steps=2)
    >>> with ema.in_place(run):
    ...     averaged = run.model.weight.item()
    >>> averaged != run.model.weight.item()
    True
    """

    @renamed(warmup="rampup")
    def __init__(
        self,
        decay: float = 0.999,
        every: Interval = "1 step",
        *,
        rampup: bool | int = False,
        name: str = "ema",
        use_at_end: bool = False,
    ) -> None:
        check_real("decay", decay)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1; got {decay!r}")
        super().__init__(name, use_at_end=use_at_end)
        self.decay: float = decay
        self.every: Schedule = Schedule.parse(every)
        self.rampup: int = (
            (10 if rampup else 0) if isinstance(rampup, bool) else at_least(2, "rampup", rampup, "True, False or ")
        )

    def listeners(self) -> list[Listener]:
        return silent([*super().listeners(), periodic(self.every, self.update)])

    def weight_of_new(self, updates: int) -> float:
        return 1 - (min(self.decay, (1 + updates) / (self.rampup + updates)) if self.rampup else self.decay)
