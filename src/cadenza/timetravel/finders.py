"""Before the training, find a batch size and a learning rate with steps that are undone."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from cadenza.engine import boundary
from cadenza.engine.loop import Training, fit
from cadenza.engine.memory import is_out_of_memory
from cadenza.engine.session import Loops, Session, session_of
from cadenza.errors import DataError, MissingExtraError
from cadenza.hooks.dispatch import Hooks, hooks_of
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least, at_least_or_none
from cadenza.hooks.order import Phase, Relation
from cadenza.loading import num_batches
from cadenza.loading.loaders import Limited, check_loader, is_read_once, length_of
from cadenza.loading.rng import preserve_rng_state
from cadenza.optim.rates import SetsRates, optimizer_of
from cadenza.optim.settings import first_rates, set_rates
from cadenza.records.record import Figure
from cadenza.run import Run
from cadenza.status.decisions import decide
from cadenza.status.formats import counted
from cadenza.status.progress import Counters, Progress
from cadenza.text.hints import renamed
from cadenza.timetravel.snapshot import Snapshot, undone

STEPS = 2  # from the second step on, the state of the optimizer takes memory as well


class FindBatchSize(Callback):
    """Double the batch size until memory runs out, then train with the largest size that fits.

    Before the training, each size is tried with two whole updates, which are then undone. A run that continues takes the size
    of its first start, and tries nothing. The learning rate does not change, although a larger batch often needs a larger
    rate. The result is printed, and ``size`` holds it. This works in one process only.

    With multiple ranks: raises `ValueError`, because it needs a single process.

    Args:
        make_loader: A function of the batch size that returns a loader. The trainer's own loader is not used.
        start: The first size to try.
        max_size: The largest size to try. Optional on an accelerator. On the CPU it is required, because the system often kills
            a process that runs out of memory, without a message.

    Raises:
        ValueError: An argument is wrong, `max_size` is needed, or there are several processes.
        DataError: The loader that `make_loader` returns is empty.
        torch.OutOfMemoryError: Not even `start` fits.

    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> find = FindBatchSize(lambda size: tiny_loader(batches=64 // size, batch_size=size), start=2, max_size=16)
    >>> run = tiny_run(callbacks=[find])
    FindBatchSize: 16: max_size fits
    >>> find.size, run.progress.batch
    (16, 4)
    """

    before: Relation = (Phase.LENGTH, Phase.SCHEDULE)  # it changes the number of steps

    @renamed(limit="max_size")
    def __init__(self, make_loader: Callable[[int], Iterable[Any]], *, start: int = 1, max_size: int | None = None) -> None:
        if not callable(make_loader):
            raise TypeError(f"make_loader must be a function (batch_size) -> loader; got {make_loader!r}")
        start, max_size = at_least(1, "start", start), at_least_or_none(1, "max_size", max_size)
        if max_size is not None and max_size < start:
            raise ValueError(f"max_size must be at least start, {start}; got {max_size}")
        self.make_loader: Callable[[int], Iterable[Any]] = make_loader
        self.start: int = start
        self.max_size: int | None = max_size
        self.size: int | None = None
        """The size that was found; None before the first run."""

    def on_setup(self, run: Run) -> None:
        restored = session_of(run).restored.callback_states.get(hooks_of(run).name_of(self))
        if restored is not None:
            size, why = int(restored["size"]), "as in the run that is continued"
        else:
            self._check(run)
            size, why = self._search(run)
        self.size = size
        run.replace_loader(self._made(size))
        decide(run, "batch size found", f"{size}: {why}", data={"batch_size": size})
        run.print(f"{hooks_of(run).name_of(self)}: {size}: {why}")

    def _check(self, run: Run) -> None:
        if run.driver.world_size > 1:
            raise ValueError(
                f"FindBatchSize works in one process; got {run.driver.world_size}. If one ran out of memory, the others would "
                "wait for it. Find the size with one process, and give it to the loader."
            )
        if self.max_size is None and run.device.type == "cpu":
            raise ValueError(
                "FindBatchSize needs max_size= on the CPU, because the system often kills a process that runs out of memory, "
                "without an error that could be caught. Give a size that fits surely."
            )

    def _search(self, run: Run) -> tuple[int, str]:
        """Return the largest size that fits, and why no larger size does."""
        fitted, size = 0, self.start
        while True:
            failed = self._failure(run, size)
            if failed is not None:
                return fitted, f"{size} is too large: {failed}"
            fitted = size
            if size == self.max_size:
                return size, "max_size fits"
            size = 2 * size if self.max_size is None else min(2 * size, self.max_size)

    def _failure(self, run: Run, size: int) -> str | None:
        """Try a size; return why it is too large, or None."""
        first = size == self.start
        loader, seen = self._made(size), _Sizes()
        if length_of(loader) == 0:
            if first:
                raise DataError(f"make_loader({size}) returned an empty loader. Lower start=, or set drop_last=False.")
            return "the loader has no such batch"
        short = None
        try:
            try_steps(session_of(run), STEPS, [seen], loader=loader)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if first:
                error.add_note(f"raised while FindBatchSize tried start={size}, which does not fit. Lower it.")
                raise
            short = f"out of memory ({type(error).__name__})"
            session_of(run).driver.renew(session_of(run).model)  # DDP refuses another batch after half a backward pass
        # The error held references to the tensors computed so far.
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        return short if short or first or seen.largest >= size else f"the largest batch has {counted(seen.largest, 'sample')}"

    def _made(self, size: int) -> Iterable[Any]:
        with preserve_rng_state():  # a run that continues makes one loader, this run several
            loader = self.make_loader(size)
        check_loader(loader, f"make_loader({size})")
        return loader

    def state_dict(self) -> dict[str, Any]:
        return {} if self.size is None else {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.size = state.get("size", self.size)


class _Sizes(Callback):
    """Record the size of the largest batch."""

    largest = 0

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self.largest = max(self.largest, session_of(run).cursor.source.size_of(batch))


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
        base = first_rates(run.optimizers[self.optimizer])
        self._scales = [rate / base[0] if base[0] else 1.0 for rate in base]
        growth = (self.end / self.start) ** (1 / (self.steps - 1))
        planned = [self.start * growth**number for number in range(self.steps)]
        trial = _RangeTest(run, self.optimizer, planned, self._scales)
        try_steps(session_of(run), self.steps, [trial])
        self.rates, self.losses = planned[: len(trial.losses)], trial.losses

    def _put(self, run: Run, rate: float) -> None:
        optimizer = run.optimizers[self.optimizer]
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
        set_rates(optimizer, [rate * scale for scale in self._scales])
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
            lowest, highest = min(loss for loss in (*self.losses, *finite) if math.isfinite(loss)), max(finite)
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
        set_rates(run.optimizers[self._optimizer], [rate * scale for scale in self.scales])

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


def try_steps(session: Session, steps: int, callbacks: Sequence[Callback], *, loader: Iterable[Any] | None = None) -> Session:
    """Try the first updates of a run with other callbacks, then restore the state before. Return the session of the trial.

    The trial is a run of its own, with the model, the optimizers and the batches of `session`. A callback may stop it. Changes
    outside of these, such as a counter of your own in ``compute_loss``, are not restored. Every rank must call this.

    Args:
        session: The run. No callback of it is called, and its counters and the position in its loader do not change.
        steps: The maximum number of updates.
        callbacks: The callbacks of the trial.
        loader: The loader of the trial; None: that of the run.

    Raises:
        DataError: The loader of the run can be read only once.
        ValueError: The run is a loop of ``cadenza.attach``, which brings its own data.
    """
    if session.loop is Loops.ATTACHED:
        raise ValueError(
            "a loop of cadenza.attach(...) cannot be tried before the training: it brings its own data. Use a Trainer with a "
            "loader and compute_loss, and give what it finds to the loop."
        )
    read = apart(session.loader) if loader is None else loader
    held = Snapshot(objects=[read], on_host=True, data=False)  # before it is opened: a sampler may draw then
    try:
        trial = _twin(session, steps, callbacks, read)
        with undone(session), Training(trial) as training:
            training.begin()
            fit(training)
            training.finish()
    finally:
        held.restore()
    return trial


def apart(loader: Any) -> Any:
    """Return a loader that reads the same batches, and does not change the position of the given one.

    Raises:
        DataError: The loader is an iterator, which gives each batch once.
    """
    if isinstance(loader, Limited):
        return Limited(apart(loader.loader), loader.count)
    held = [value for value in getattr(loader, "__dict__", {}).values() if is_read_once(value)]
    for once in [loader] if isinstance(loader, Iterator) else held:
        raise DataError(
            f"trying steps before the training needs a loader that can be read again; a {type(once).__name__} gives each "
            "batch once, and the training would miss those. Give a list, a DataLoader, or any iterable that starts anew."
        )
    dataset = getattr(loader, "dataset", None)
    if hasattr(dataset, "state_dict") or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        # The loader keeps its own position. The data set may be large: without a position of its own, it is not copied.
        return deepcopy(loader, {} if dataset is None or hasattr(dataset, "state_dict") else {id(dataset): dataset})
    return loader


def _twin(session: Session, steps: int, callbacks: Sequence[Callback], loader: Iterable[Any]) -> Session:
    """Return a session with the same model, optimizers and driver, and with counters, records and requests of its own."""
    twin = Session(
        model=session.model,
        optimizers=session.optimizers,
        loader=loader,
        compute=session.compute,  # it is in the run's precision already, and may be so twice
        driver=session.driver,
        precision=session.precision,
        accumulate=session.step.window.size,
        step_fn=session.step_fn,
        data_seed=session.data_seed,
        hooks=Hooks(callbacks),
        progress=Progress(max_steps=steps, accumulate=session.step.window.size),
        make_run=Run,
    )
    twin.step.derived, twin.cursor.permuted = session.step.derived, session.cursor.permuted
    twin.extra_parameters = session.extra_parameters
    twin.module_flags.keeps_modes = session.module_flags.keeps_modes
    twin.state.update(deepcopy(dict(session.run.state)))
    twin.progress.begin(Counters(), num_batches(loader, session.driver.data_shard()))
    boundary.open_loader(twin)
    twin.metrics.losses.quiet = True
    return twin
