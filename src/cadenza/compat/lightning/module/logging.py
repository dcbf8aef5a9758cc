"""``self.log`` in a native run: reduction, reset and destinations of its values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from cadenza.compat.adapter.view import Weak
from cadenza.compat.lightning.conductor import Conductor
from cadenza.compat.lightning.module.attached import Attached
from cadenza.compat.lightning.module.logged import Arguments, Logged, LoggedValues, reduced
from cadenza.compat.lightning.module.run_trainer import attach
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.order import Phase, Relation
from cadenza.loading.evaluation import Evaluation
from cadenza.records.record import RESERVED
from cadenza.run import Run


class ModuleLog:
    """The values of ``self.log`` in a run. ``LightningModule.log`` finds it through ``trainer._logger_connector``.

    Args:
        attached: The LightningModule.
    """

    _attached: Weak[Attached] = Weak()

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self.begin()

    def begin(self) -> None:
        """Reset for a new run."""
        self._kept: dict[str, dict[str, Any]] = {"callback": {}, "log": {}, "pbar": {}}
        self.training: LoggedValues = self._new(training=True)
        self.values: LoggedValues = self.training
        """The values of the current stage."""
        self.active: LoggedValues | None = self.training
        """The same for ``self.log``: ``trainer._results``. None while it is an error."""
        self.current_fx: str | None = None
        """The hook that logged last; ``LightningModule.log`` sets it."""
        self.warned: set[str] = set()
        """The names that were warned about."""
        self._first: bool | None = None  # None: outside of batches; True in the first batch of an epoch
        self._in_batch = False
        self._fresh = False
        self._metrics: list[tuple[str, Any]] | None = None
        self._put_aside: list[tuple[Any, dict[str, Any]]] = []  # the metrics of the module and their states

    def _new(self, *, training: bool) -> LoggedValues:
        home = self._attached.home
        return LoggedValues(
            training=training,
            driver=self._attached.driver,
            error=home("utilities.exceptions").MisconfigurationException,
            batch_size=home("utilities.data").extract_batch_size,
        )

    # -- what LightningModule.log and views read ------------------------------------------------------

    def should_reset_tensors(self, fx: str) -> bool:
        """Return whether the first value of a hook in an epoch resets those of the previous epoch."""
        return self.current_fx != fx and self._first in (None, True)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name, for callbacks to monitor."""
        return self._newest("callback")

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name with ``logger=True``."""
        return self._newest("log")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest value of each name with ``prog_bar=True``."""
        return self._newest("pbar")

    def _newest(self, kind: str) -> dict[str, Any]:
        kept = self._kept[kind]
        kept.update(self.values.metrics(on_step=self._first is not None)[kind])
        return kept

    def _keep(self) -> dict[str, dict[str, Any]]:
        newest = self.values.metrics(on_step=self._first is not None)
        for kind, values in newest.items():
            self._kept[kind].update(values)
        return newest

    # -- batches and epochs ---------------------------------------------------------------------------

    def begin_batch(self, batch: Any, dataloader_idx: int | None = None) -> None:
        """Set the batch from which batch sizes are inferred."""
        self._first = self._first is None
        self.values.batch, self.values.batch_size, self.values.dataloader_idx = batch, None, dataloader_idx
        self._in_batch = True

    def end_batch(self) -> dict[str, Tensor]:
        """Keep the values of the batch; return those for the record of the step."""
        newest = self._keep()
        self.values.batch = self.values.batch_size = None
        self._in_batch = False
        return newest["log"]

    def keep(self) -> None:
        """Keep the values from before a batch for `put_back`."""
        kept = {kind: dict(values) for kind, values in self._kept.items()}
        values = {key: copy(logged) for key, logged in self.training.items()}
        self._before = values, kept, self._metric_states()

    def put_back(self) -> None:
        """Continue with the values from before the batch, which is skipped and has no value."""
        values, self._kept, metrics = self._before
        self.training.clear()
        self.training.update(values)
        for logged in values.values():
            logged.last = None
        _put_states(metrics)

    @property
    def in_batch(self) -> bool:
        """Whether a batch has begun but not ended."""
        return self._in_batch

    def leave_batches(self) -> None:
        """Treat subsequent values as those of the epoch."""
        self._first = None

    def end_loader(self) -> dict[str, float]:
        """Keep the values of a loader; return those for the record, over all ranks. Every rank must call this."""
        self._first = None
        self._keep()
        return reduced(self._attached.driver, self.values.summaries(logger=True))

    def end_epoch(self) -> dict[str, float]:
        """Keep the values of the epoch; return those for the record, over all ranks. Every rank must call this."""
        values = self.end_loader()
        self.current_fx = None
        return values

    def results(self) -> dict[str, float]:
        """Return all values of the epoch by name, over all ranks. Every rank must call this."""
        return reduced(self._attached.driver, self.values.summaries(logger=False))

    def reset(self) -> None:
        """Reset all values of the stage."""
        self.values.reset()
        self._first = self.current_fx = None

    @contextmanager
    def evaluating(self, *, trial: bool = False, silent: bool = False) -> Iterator[LoggedValues]:
        """Collect the values of an evaluation; then continue with those of the training.

        Args:
            trial: Whether it is a sanity check. Its values are discarded.
            silent: Whether ``self.log`` is an error, as in ``predict_step``.
        """
        before, first, kept = self.values, self._first, {kind: dict(own) for kind, own in self._kept.items()}
        self.values, self._first, self.current_fx = self._new(training=False), None, None
        self._show(silent=silent)
        try:
            yield self.values
        finally:
            self.values.reset()
            self.values, self._first, self.current_fx = before, first, None
            self._show()
            if trial:
                self._kept = kept

    def _show(self, *, silent: bool = False) -> None:
        self.active = None if silent else self.values

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop the values of a batch that is counted by another rank."""
        self.mute()
        try:
            yield
        finally:
            self.unmute()

    def mute(self) -> None:
        """Drop all values until `unmute`, including those in the module's metrics."""
        self.values.muted = True
        self._put_aside = self._metric_states()

    def unmute(self) -> None:
        """Continue with the values from before `mute`."""
        self.values.muted = False
        _put_states(self._put_aside)
        self._put_aside = []

    # -- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the middle of an epoch. Every rank must call this."""
        own = {
            "values": {key: logged.plain() for key, logged in self.training.items()},
            "metrics": {name: state_of(metric) for name, metric in self._module_metrics()},
            "kept": {kind: {name: _plain(value) for name, value in values.items()} for kind, values in self._kept.items()},
        }
        run = self._attached.run
        together = run is not None and session_of(run).sync.together
        ranks = self._attached.driver.gather(own) if together else [own]
        return {"ranks": ranks, "fx": self.current_fx, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a state. If the number of ranks differs, the first rank takes the sums of all."""
        driver, ranks = self._attached.driver, state["ranks"]
        mine = [ranks[driver.rank]] if len(ranks) == driver.world_size else ranks if driver.is_main else []
        device = driver.device
        for kind, values in ranks[driver.rank if len(ranks) == driver.world_size else 0]["kept"].items():
            self._kept[kind] = {
                name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()
            }
        self.current_fx, self._first = state["fx"], state["first"]
        for own in mine:
            for key, plain in own["values"].items():
                logged = self.training.get(key)
                if logged is None:
                    logged = self.training[key] = self._restored(plain, device)
                logged.put(plain)
        metrics = dict(self._module_metrics())
        for index, own in enumerate(mine):
            for name, kept in own["metrics"].items():
                if name in metrics:
                    put_state(metrics[name], kept, merge=index > 0)

    def _restored(self, plain: Mapping[str, Any], device: torch.device) -> Logged:
        arguments = Arguments(**plain["arguments"])
        attribute = arguments.metric_attribute
        metric = attrgetter(attribute)(self._attached.module) if plain["is_metric"] and attribute else None
        return Logged(arguments, self._attached.driver, device, metric)

    def _metric_states(self) -> list[tuple[Any, dict[str, Any]]]:
        return [(metric, state_of(metric)) for _, metric in self._module_metrics()]

    def _module_metrics(self) -> list[tuple[str, Any]]:
        """Return the module's torchmetrics by name, since weights and buffers do not hold their state."""
        if self._metrics is None:
            modules = self._attached.module.named_modules()
            self._metrics = [
                (name, part) for name, part in modules if hasattr(part, "_defaults") and hasattr(part, "_update_count")
            ]
        return self._metrics


class _LogPart(BaseCallback):
    """A part of `ModuleLog` in the list of callbacks."""

    def __init__(self, attached: Attached) -> None:
        self.attached: Attached = attached
        self.log: ModuleLog = attached.log

    def __repr__(self) -> str:
        return f"self.log of {type(self.attached.module).__name__}"


class LogStart(_LogPart):
    """Prepare ``self.log`` before any callback is called."""

    logs_training = True
    name: str | None = "self.log"
    before: Relation = (Phase.LENGTH, Phase.CLIP, Phase.SCHEDULE, Phase.EVALUATE)

    def listeners(self) -> list[Listener]:
        listeners = [
            Listener(Callback.on_setup, self._begin),
            Listener(Callback.on_sanity_start, self._mute),
            Listener(Callback.on_sanity_end, self._unmute),
            Listener(Callback.on_batch_start, self._begin_batch, silent=True),
            Listener(Callback.on_batch_end, self._end_batch, silent=True),
            Listener(Callback.on_eval_start, self._mute),
            Listener(Callback.on_eval_end, self._unmute),
            Listener(Callback.on_epoch_end, self._end_batches, silent=True),
        ]
        return inner(listeners)

    def _mute(self, run: Run, evaluation: Evaluation) -> None:
        if self.attached.run is not run:  # outside of a fit
            attach(self.attached, run)
            self.log.begin()
        if not evaluation.own_names:  # it calls training_step
            self.log.mute()

    def _unmute(self, run: Run, evaluation: Evaluation) -> None:
        self.log.unmute()

    def _begin(self, run: Run) -> None:
        self.log.begin()

    def _begin_batch(self, run: Run, batch: Any) -> None:
        if self.log.in_batch:  # of the same step
            self.log.end_batch()
        if run.progress.step < session_of(run).step.guard:
            self.log.keep()
        self.log.begin_batch(batch)

    def _end_batch(self, run: Run, batch: Any, outputs: Any) -> None:
        if session_of(run).step.undone:
            self.log.put_back()

    def _end_batches(self, run: Run) -> None:
        if unwinding(run) is None:
            self.log.leave_batches()

    def state_dict(self) -> dict[str, Any]:
        return self.log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.log.load_state_dict(state)


class LogStep(_LogPart):
    """Add the values of a step to its record, after the hooks of its last batch."""

    name: str | None = "self.log of a step"
    after: Relation = (Conductor,)
    before: Relation = (Phase.SAVE,)

    def listeners(self) -> list[Listener]:
        return inner([Listener(Callback.on_step_end, self._end_step)])

    def _end_step(self, run: Run) -> None:
        log = self.log
        if not log.in_batch or unwinding(run) is not None:
            return
        if self.attached.leaves:
            log.end_batch()
            return
        only_here = {
            logged.arguments.shown(on_step=True)[1]
            for logged in log.training.values()
            if logged.arguments.rank_zero_only and not run.is_main
        }
        for name, value in log.end_batch().items():
            if name not in RESERVED and name not in only_here and value.numel() == 1:
                run.log(name, value.reshape(()))


class LogEpoch(_LogPart):
    """Add the values of an epoch to the record, after the hooks of its end and before a checkpoint."""

    name: str | None = "self.log of an epoch"
    after: Relation = (Conductor, Phase.EVALUATE, Phase.SCHEDULE)
    before: Relation = (Phase.SAVE,)

    def listeners(self) -> list[Listener]:
        return inner([Listener(Callback.on_epoch_end, self._end_epoch)])

    def _end_epoch(self, run: Run) -> None:
        continued = session_of(run).sync.requests.signal is not None and run.progress.batch_in_epoch
        if unwinding(run) is not None or continued:
            return
        values = self.log.end_epoch()
        for name in self._both(run, values):
            run.warn(
                f"training_step and validation_step log {name!r} for the same epoch: records keep the value of the training. "
                f"Log it as 'val_{name}' in validation_step."
            )
        for name, value in values.items():
            if name not in RESERVED:
                run.log(name, value)
        self.log.reset()

    def _both(self, run: Run, values: Mapping[str, Any]) -> list[str]:
        """Return the names also logged by this epoch's validation, each once per run."""
        validation = run.evaluations.get("val")
        known = validation.results if validation is not None and validation.own_names else {}
        warned = self.log.warned
        warned |= (both := {name for name in values if name in known} - warned)
        return sorted(both)


def _put_states(states: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
    for metric, state in states:
        put_state(metric, state, merge=False)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def state_of(metric: Any) -> dict[str, Any]:
    """Return a copy of the state of a metric."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    plain = {name: list(state) if isinstance(state, list) else state.detach().clone() for name, state in states.items()}
    return {"count": metric._update_count, "states": plain}


def put_state(metric: Any, kept: Mapping[str, Any], *, merge: bool) -> None:
    """Continue a metric with a state, or add it to those of other ranks."""
    states = {
        name: [part.to(metric.device) for part in value] if isinstance(value, list | tuple) else value.to(metric.device)
        for name, value in kept["states"].items()
    }
    if merge:
        metric.merge_state(states)
        metric._update_count += kept["count"] - 1
    else:
        for name, state in states.items():
            setattr(metric, name, state)
        metric._update_count = kept["count"]
    metric._computed = None
