"""Find a learning rate with the range test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from cadenza.engine.session import session_of
from cadenza.errors import MissingExtraError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.hooks.order import Phase, Relation
from cadenza.optim.rates import SetsRates, optimizer_of
from cadenza.optim.settings import set_option
from cadenza.records.record import Figure
from cadenza.status.decisions import decide
from cadenza.timetravel.trial import try_steps

if TYPE_CHECKING:
    from cadenza.run import Run

SMOOTHING = 0.9  # fastai's 0.98 lags by half of the test, which then continues long after the loss has diverged
SOME = 10  # the fewest losses in an average that can end the test
FAR = 3  # times the magnitude of the best loss above it: four times the best, as in fastai; works for negative losses too


class FindLearningRate(Callback):
    """Before the first step, try updates with growing rates, and suggest a rate: the range test (Smith 2015, arXiv:1506.01186).

    The test trains on the batches of the run, without the other callbacks. It is undone before the training starts. It ends
    early if, after a tenth of the steps, the smoothed loss is four times its best. The suggestion is the smaller of two
    rates: the rate where the smoothed loss falls most steeply over the logarithm of the rate, and a tenth of the rate where it
    is lowest. The result is printed, and stored in ``suggestion``, ``rates`` and ``losses``. ``plot()`` draws it, and sinks
    that take pictures receive it as ``learning_rate/range_test``. A run that continues is not tested again. To run only the
    test, stop the run in ``on_fit_start``. Each step of the test waits for the device.

    The test restores the weights, buffers and attributes of the model; the optimizers, with inner optimizers and slow weights;
    the random generators; and the attributes, containers and indices of the loader and its data set. It does not restore
    files, threads, data that are changed in place, and other state.

    With multiple ranks: communicates in each step of its test: all ranks find the same rate.

    Args:
        start: The first rate.
        end: The last rate.
        steps: The number of updates; at least 10.
        optimizer: The index of the optimizer in the run. Its first parameter group has the rates of the test; the other groups
            keep their proportion to it.
        apply: Train with the suggestion. A `LearningRate` then makes its scheduler again, from this rate. A scheduler with a
            rate of its own, such as the ``max_lr`` of OneCycleLR, should read it from the optimizer.

    Raises:
        ValueError: An argument is wrong, or `apply` is True and `LearningRate` has a scheduler instance, which cannot be made
            again.
        DataError: The loader of the run can be read only once.

    >>> from cadenza.testing import tiny_run
    >>> find = FindLearningRate(start=1e-3, steps=50, apply=True)
    >>> run = tiny_run(callbacks=[find])
    FindLearningRate: ... rates from 0.001 to ... were tried; the run starts with it
    >>> figure = find.plot()
    >>> run.optimizers[0].param_groups[0]["lr"] == find.suggestion
    True
    """

    before: Relation = (Phase.SCHEDULE,)

    def __init__(
        self, *, start: float = 1e-7, end: float = 10.0, steps: int = 100, optimizer: int = 0, apply: bool = False
    ) -> None:
        if not 0 < start < end:
            raise ValueError(f"start must be greater than 0 and less than end; got start={start!r}, end={end!r}")
        self.steps: int = at_least(10, "steps", steps)  # fewer show no slope
        self.start: float = start
        self.end: float = end
        self.optimizer: int = optimizer
        self.apply: bool = apply
        self._forget()

    def _forget(self) -> None:
        self.rates: list[float] = []
        """The tried rates."""
        self.losses: list[float] = []
        """The loss of each tried rate."""
        self.suggestion: float | None = None
        """The suggested rate; None before the test, or if the loss did not fall."""

    def on_setup(self, run: Run) -> None:
        self._forget()
        optimizer = optimizer_of(run, self.optimizer, needed_by="FindLearningRate")
        for callback in hooks_of(run).callbacks.values():
            given = callback.given if isinstance(callback, SetsRates) else None
            if self.apply and isinstance(given, LRScheduler) and given.optimizer is optimizer:
                raise ValueError(
                    f"FindLearningRate(apply=True) sets the rate from which a schedule starts, but this {type(given).__name__} "
                    "has already started. Give LearningRate a function (optimizer) -> scheduler."
                )

    def on_fit_start(self, run: Run) -> None:
        if run.progress.step or self.rates:
            return
        self._test(run)
        self.suggestion = suggested(self.rates, self.smoothed)
        if self.apply and self.suggestion is not None:
            self._put(run, self.suggestion)
        what = "learning rate found" if self.suggestion else "learning rate not found"
        decide(run, what, self._summary(), data={"learning_rate": self.suggestion})
        run.print(f"{hooks_of(run).name_of(self)}: {self._summary()}")
        if run.is_main and hooks_of(run).by_moment.get(Callback.on_log):
            self._log_figure(run)

    def _test(self, run: Run) -> None:
        base = [float(group.get("initial_lr", group["lr"])) for group in run.optimizers[self.optimizer].param_groups]
        self._scales = [rate / base[0] if base[0] else 1.0 for rate in base]
        growth = (self.end / self.start) ** (1 / (self.steps - 1))
        planned = [self.start * growth**number for number in range(self.steps)]
        trial = _RangeTest(run, self.optimizer, planned, self._scales)
        try_steps(session_of(run), self.steps, [trial])
        self.rates, self.losses = planned[: len(trial.losses)], trial.losses

    def _put(self, run: Run, rate: float) -> None:
        optimizer = run.optimizers[self.optimizer]
        for group, scale in zip(optimizer.param_groups, self._scales, strict=True):
            group.pop("initial_lr", None)
            set_option(group, "lr", rate * scale)
        for callback in hooks_of(run).callbacks.values():
            if isinstance(callback, SetsRates) and callback.drives(optimizer):
                callback.renew(run)

    def _summary(self) -> str:
        tried = f"{len(self.rates)} rates from {self.rates[0]:.3g} to {self.rates[-1]:.3g} were tried"
        if self.suggestion is None:
            return f"{tried}, and the loss fell with none of them; the run keeps its rate"
        kept = "the run starts with it" if self.apply else "the run keeps its rate"
        return f"{self.suggestion:.3g}: {tried}; {kept}"

    @property
    def smoothed(self) -> list[float]:
        """The running average of the losses, with bias correction."""
        return smoothed(self.losses)

    def plot(self) -> Any:
        """Return a matplotlib figure of the losses over the rates.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        try:
            from matplotlib import figure
        except ImportError:
            raise MissingExtraError("matplotlib", needed_by="FindLearningRate.plot()", extra="figures") from None
        picture = figure.Figure(figsize=(6, 4), layout="constrained")  # pyplot would keep the figure in memory
        axes = picture.subplots()
        axes.plot(self.rates, self.losses, color="0.75", linewidth=1, label="loss")
        axes.plot(self.rates, self.smoothed, color="C0", label="smoothed")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C3", linestyle=":", label=f"suggestion {self.suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        finite = [loss for loss in self.smoothed if math.isfinite(loss)]
        if finite and max(finite) > min(finite):  # a diverged last loss would flatten the curve
            lowest, highest = min(one for one in (*self.losses, *finite) if math.isfinite(one)), max(finite)
            margin = 0.1 * (highest - lowest)
            axes.set_ylim(lowest - margin, highest + margin)
        axes.legend()
        return picture

    def _log_figure(self, run: Run) -> None:
        try:
            run.log("learning_rate/range_test", Figure(self.plot()))
        except MissingExtraError:
            return  # the numbers are in .rates and .losses

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "losses": self.losses, "suggestion": self.suggestion} if self.rates else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.rates, self.losses = list(state["rates"]), list(state["losses"])
            self.suggestion = state["suggestion"]


class _RangeTest(Callback):
    """Set the rate of each step of the trial, and keep its loss."""

    def __init__(self, run: Run, optimizer: int, rates: list[float], scales: list[float]) -> None:
        self.rates, self.scales, self.losses = rates, scales, list[float]()
        self._run, self._optimizer = run, optimizer

    def on_step_start(self, run: Run) -> None:
        rate = self.rates[run.progress.step]
        for group, scale in zip(run.optimizers[self._optimizer].param_groups, self.scales, strict=True):
            set_option(group, "lr", rate * scale)

    def on_step_end(self, run: Run) -> None:
        session = session_of(run)
        mean = session.sync.mean_loss()
        if mean is None or len(self.losses) == run.progress.step:
            return  # the step failed
        loss = float(mean)
        if math.isnan(loss) and self.losses and session.step.last_window.is_weightless:
            loss = self.losses[-1]  # no batch of the step counts
        self.losses.append(loss)
        averages = smoothed(self.losses)[max(SOME, len(self.rates) // 10) :]
        best = min(averages, default=math.inf)
        if not math.isfinite(self.losses[-1]) or (averages and averages[-1] > best + FAR * abs(best)):
            run.stop("the loss has grown far beyond its best")
        elif session_of(self._run).sync.requests.ends_run:
            run.stop("the run was asked to stop")


def smoothed(losses: list[float]) -> list[float]:
    """Return the exponential average of losses, with bias correction as in Adam."""
    averages, average = [], 0.0
    for count, loss in enumerate(losses, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        averages.append(average / (1 - SMOOTHING**count))
    return averages


def suggested(rates: list[float], losses: list[float]) -> float | None:
    """Return the suggested rate; None if the losses do not fall.

    It is the smaller of two suggestions of fastai: ``steep``, where the losses fall most steeply over the logarithm of the
    rates, which is often too high with momentum; and ``minimum``, a tenth of the rate of the lowest loss. The first tenth of
    the losses is left out, because the average is still noisy there.

    >>> suggested([0.001, 0.01, 0.1, 1.0, 10.0], [3.0, 2.9, 2.0, 1.5, 9.0])
    0.01
    """
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    first = len(finite) // 10
    lowest = min(range(first, len(finite)), key=finite.__getitem__, default=first)
    slopes = {i: (finite[i + 1] - finite[i]) / math.log(rates[i + 1] / rates[i]) for i in range(first, lowest)}
    steep = min(slopes, key=slopes.__getitem__, default=None)
    return None if steep is None or slopes[steep] >= 0 else min(rates[steep], rates[lowest] / 10)
