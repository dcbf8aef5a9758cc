"""Average the weights of the last part of a run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cadenza.engine.session import Loops, session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least, at_least_or_none
from cadenza.hooks.schedule import At, Interval, Schedule
from cadenza.hooks.subscription import periodic, point
from cadenza.loading.rng import preserve_rng_state
from cadenza.optim.averaging import Averaging
from cadenza.optim.rates import why_unknown
from cadenza.optim.settings import Compared, set_rates

if TYPE_CHECKING:
    from cadenza.run import Run

logger: logging.Logger = logging.getLogger("cadenza")


class Swa(Averaging, Compared):
    """Stochastic weight averaging (Izmailov et al. 2018): end with the mean of the weights from `start` on.

    From `start` on, the weights are added to the average at an interval; the weights at `start` count if they are due. When the
    run ends, unless by an error or a signal, the model gets the average. Its BatchNorm layers get statistics for it, computed
    as in `torch.optim.swa_utils.update_bn` over the batches of the next epoch. This happens after the last save: the last
    checkpoint holds the weights with which the run can continue. During the run, ``Evaluate(weights="swa")`` evaluates the
    average with the statistics of the last weights; before `start`, it evaluates the model itself.

    With multiple ranks: communicates when the BatchNorm statistics are computed again: each rank reads its shard of the data,
    and all get the mean. Every rank must call ``put_in_place``.

    Args:
        start: A fraction of the run such as 0.75, of its steps or, if only ``max_tokens`` ends it, of its tokens; or a point
            such as ``"8 epochs"``.
        every: The interval between updates of the average: ``100`` (steps), ``"1 epoch"``.
        lr: The learning rate of every parameter group from `start` on, whatever other schedule is in the list. None does not
            change the rates.
        anneal_steps: The number of steps from the rates at `start` to `lr`, along the cosine of
            ``torch.optim.swa_utils.SWALR``.
        update_batch_norm: The number of batches for the new statistics. None: an epoch. 0: keep those of the last weights. Each
            batch costs a forward pass; a model without BatchNorm layers in training mode reads none.
        name: The name of the averaged weights. Several averages in one list need different names.
        use_at_end: Copy the averaged weights into the model at the end. False only keeps them, for ``in_place(run)``.

    Raises:
        ValueError, TypeError, ScheduleError: An argument is wrong, or does not match the run.

    >>> from cadenza.testing import tiny_run
    >>> swa = Swa(0.5)
    >>> run = tiny_run(callbacks=[swa], epochs=4)
    >>> run.why("averaged weights in place")
    "averaged weights in place by Swa at epoch 4, step 20, batch 20: 'swa', the average of 3 updates"
    """

    def __init__(
        self,
        start: float | str | At = 0.75,
        every: Interval = "1 epoch",
        *,
        lr: float | None = None,
        anneal_steps: int = 0,
        update_batch_norm: int | None = None,
        name: str = "swa",
        use_at_end: bool = True,
    ) -> None:
        super().__init__(name, use_at_end=use_at_end)
        self.start: float | At = _checked_start(start)
        self.every: Schedule = Schedule.parse(every)
        if lr is not None and not lr > 0:
            raise ValueError(f"lr must be greater than 0, or None to leave the rates alone; got {lr!r}")
        self.anneal_steps: int = at_least(0, "anneal_steps", anneal_steps)
        self.update_batch_norm: int | None = at_least_or_none(0, "update_batch_norm", update_batch_norm)
        if anneal_steps and lr is None:
            raise ValueError(f"anneal_steps={anneal_steps} needs a learning rate to anneal to; got lr=None. Give lr= as well.")
        self.lr = lr
        self._first: At | None = None
        self._rates: tuple[int, list[list[float]]] | None = None
        self._modes: list[tuple[nn.Module, bool]] = []

    def listeners(self) -> list[Listener]:
        given = self.start if isinstance(self.start, At) else f"after {self.start:g} of the run"
        rates = [] if self.lr is None else [
            # After the schedules: the first call sets the rate of a step, the second the rate that is logged after it.
            Listener(Callback.on_step_start, self._set_rates),
            Listener(Callback.on_after_zero_grad, self._set_next_rates),
        ]  # fmt: skip
        return silent([*super().listeners(), *rates, periodic(self.every, self._average, str(given))])

    def on_setup(self, run: Run) -> None:
        super().on_setup(run)
        self._rates, self._modes = None, []
        if isinstance(self.start, At):
            session_of(run).sync.depends_on({self.start.unit})

    def on_fit_start(self, run: Run) -> None:
        super().on_fit_start(run)
        self._first = self._milestone(run)
        self._first.check(run.progress)
        if (reason := self._first.never(run.progress, run.info.accumulate)) is not None:
            run.warn(f"{hooks_of(run).name_of(self)} never averages in this run: start is {self._first}, and {reason}")
        refreshes = self.use_at_end and self.update_batch_norm != 0 and session_of(run).step_fn is not None
        if refreshes and any(isinstance(module, _BatchNorm) for module in run.model.modules()):
            instead = "is a loop of cadenza.attach" if session_of(run).loop is not Loops.FIT else "has a step_fn instead"
            raise ValueError(
                f"Swa computes BatchNorm statistics with compute_loss, but this run {instead}. Give "
                "Swa(update_batch_norm=0), and call torch.optim.swa_utils.update_bn after the run."
            )

    def on_fit_end(self, run: Run) -> None:
        self._modes = [(module, module.training) for module in run.model.modules()]

    def put_in_place(self, run: Run) -> None:
        """Copy the averaged weights into the model, and update its BatchNorm statistics. Every rank must call this."""
        super().put_in_place(run)
        modules = [module for module, training in self._modes if training]
        norms = [module for module in modules if isinstance(module, _BatchNorm) and module.running_mean is not None]
        if norms and self.update_batch_norm != 0:
            refresh_statistics(run, norms, self._modes, self.update_batch_norm)
            average, model = self._of_run(), run.model
            for kept, buffer in zip(average.module.buffers(), model.buffers(), strict=True):
                kept.copy_(buffer)

    def put_in_place_again(self, run: Run, state: Mapping[str, Any]) -> None:
        super().put_in_place_again(run, state)
        if (
            self.use_at_end
            and self.update_batch_norm != 0
            and any(isinstance(module, _BatchNorm) for module in run.model.modules())
        ):
            logger.warning(  # not the log of the run, which is over
                "the BatchNorm statistics are those of the last weights, since no checkpoint has those of the average. Call "
                "torch.optim.swa_utils.update_bn(loader, model)."
            )

    def _milestone(self, run: Run) -> At:
        if isinstance(self.start, At):
            return self.start
        if (tokens := run.progress.total("token")) is not None:
            return At(f"{max(1, math.ceil(self.start * tokens))} tokens")
        total = run.progress.total("step", corrected=False)
        if total is None:
            raise ValueError(
                f"Swa(start={self.start}) needs the length of the run, which is not known: {why_unknown(run.progress, 'step')} "
                'Or give a point, such as start="8 epochs".'
            )
        return At(f"{max(1, math.ceil(self.start * total))} steps")

    def _begun(self, run: Run) -> bool:
        assert self._first is not None, "on_fit_start comes first"
        return self._first.reached(run.progress)

    def weight_of_new(self, updates: int) -> float:
        return 1 / (updates + 1)

    def _average(self, run: Run) -> None:
        if self._begun(run):
            self.update(run)

    # -- the learning rate -------------------------------------------------------------------------

    def _set_rates(self, run: Run) -> None:
        step = run.progress.step
        if self._rates is None and self._begun(run):
            self._rates = (step, [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in run.optimizers])
        self._set_rates_of(run, step + 1)

    def _set_next_rates(self, run: Run) -> None:
        self._set_rates_of(run, run.progress.step + 2)  # the current step is not counted yet

    def _set_rates_of(self, run: Run, step: int) -> None:
        if self._rates is None or self.lr is None:
            return
        start, before = self._rates
        way = min(1.0, (step - start) / max(1, self.anneal_steps))
        done = (1 - math.cos(math.pi * way)) / 2
        for optimizer, rates in zip(run.optimizers, before, strict=True):
            set_rates(optimizer, [self.lr * done + rate * (1 - done) for rate in rates])

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.lr is None or not state else {**state, "rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rates = state.get("rates")


def refresh_statistics(
    run: Run, norms: list[_BatchNorm], modes: list[tuple[nn.Module, bool]], batches: int | None = None
) -> None:
    """Take the running statistics of `norms` anew from training data: the mean over batches, as ``update_bn`` does.

    Random streams and modes are put back as they were. Every rank must call this: each reads its part of the data, and all get
    the mean over the batches of all.

    Args:
        run: The run. Its loader is read as in the next epoch.
        norms: The BatchNorm layers.
        modes: Each module, and whether it is in training mode during the forward passes.
        batches: The largest number of batches; None: a whole epoch.
    """
    before = [(module, module.training) for module, _ in modes]
    momenta = [norm.momentum for norm in norms]
    source = islice(session_of(run).cursor.source.batches(run.progress.epoch, 0), batches)
    with preserve_rng_state(), torch.no_grad():
        first = list(islice(source, 1))
        if not first:
            run.warn("the loader has no more batches for BatchNorm statistics, so the statistics are those of the last weights")
            return
        try:
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a mean over all batches
            for module, training in modes:
                module.training = training
            for batch in chain(first, source):
                # Not the DDP wrapper, which broadcasts the statistics of the main rank before each batch.
                session_of(run).compute(run.model, run.driver.to_device(batch))
            _average_statistics(run, norms)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for module, training in before:
                module.training = training


def _average_statistics(run: Run, norms: list[_BatchNorm]) -> None:
    """Average the statistics over all ranks, which read equally many batches. Every rank must call this."""
    if run.driver.world_size == 1:
        return
    for norm in norms:
        for buffer in norm.buffers(recurse=False):
            whole = not buffer.is_floating_point()  # the number of batches
            buffer.copy_(run.driver.reduce(buffer, "sum" if whole else "mean"))


def _checked_start(start: object) -> float | At:
    if isinstance(start, str | At):
        return point(start)
    if not isinstance(start, float):
        raise TypeError(f'start must be a fraction of the run such as 0.75, or a point such as "8 epochs"; got {start!r}')
    if not 0 <= start < 1:
        raise ValueError(f"start must be at least 0 and less than 1 as a fraction of the run; got {start!r}")
    return start
