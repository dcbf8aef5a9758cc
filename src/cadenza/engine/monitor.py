"""Watch one value in the results of evaluations, and check beforehand that an evaluation reports it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, cast

import torch

from cadenza.engine.objective import supervised
from cadenza.errors import MonitorError, nearest
from cadenza.hooks.dispatch import Hooks, hooks_of
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.order import Phase
from cadenza.loading.evaluation import Evaluation
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from cadenza.run import Run

Mode = Literal["min", "max"]
Watched = str | Callable[[Mapping[str, float]], float]
Pair = tuple[Watched, Mode]


def watched_and_mode(monitor: Watched | Pair, mode: Mode | None, *, owner: str) -> tuple[Watched, Mode]:
    """Return the result to watch and its mode, from ``monitor, mode`` or from a pair such as ``("eval/acc", "max")``.

    A loss needs no mode: the training makes it smaller.

    Raises:
        ValueError: There is no mode, or the pair has another one.

    >>> watched_and_mode(("eval/acc", "max"), None, owner="EarlyStopping")
    ('eval/acc', 'max')
    >>> watched_and_mode("train/loss", None, owner="EarlyStopping")
    ('train/loss', 'min')
    """
    watched, own = monitor if is_pair(monitor) else (cast("Watched", monitor), mode)
    if mode is not None and own != mode:
        raise ValueError(f"{owner}: monitor={monitor!r} and mode={mode!r} contradict each other. Leave mode= out.")
    if own is None and isinstance(watched, str) and re.fullmatch(r"(.*[/_])?loss", watched):
        own = "min"
    if own is None:
        raise ValueError(
            f"{owner} needs mode='min' or mode='max', the direction in which {watched!r} is better; got none. Write "
            f"{owner}({watched!r}, 'min').{_misspelled_loss(watched)}"
        )
    return watched, own


def _misspelled_loss(watched: Watched) -> str:
    *source, result = re.split(r"[/_.-]", name_of(watched))
    meant = f"{source[0] if source else 'train'}/loss"
    return f" Did you mean {meant!r}, which needs no mode?" if nearest(result, ["loss"]) else ""


def is_pair(monitor: object) -> TypeGuard[Pair]:
    """Return whether `monitor` is a pair with a mode: a tuple, or a list from a configuration file."""
    return isinstance(monitor, Sequence) and not isinstance(monitor, str) and len(monitor) == 2


def name_of(watched: Watched) -> str:
    """Return the watched name, or the name of the function."""
    return watched if isinstance(watched, str) else getattr(watched, "__name__", repr(watched))


class Monitor:
    """A value to watch, and which way is better.

    Args:
        watched: A name such as ``"eval/acc"``, or a function of the results.
        mode: ``"max"`` for an accuracy, ``"min"`` for a loss.
        owner: The callback that uses the monitor; for messages.
        min_delta: Only a gain of more than this counts, in the unit of the value.

    >>> monitor = Monitor("eval/acc", "max", owner="EarlyStopping")
    >>> monitor.value_in("eval", {"eval/acc": 0.5, "eval/loss": 1.0})
    0.5
    >>> monitor.value_in("eval", {"eval/accuracy": 0.5})
    Traceback (most recent call last):
        ...
    cadenza.errors.MonitorError: EarlyStopping watches 'eval/acc', but the evaluation 'eval' reported only \
['eval/accuracy']. Did you mean 'eval/accuracy'?
    """

    def __init__(self, watched: Watched, mode: Mode, *, owner: str, min_delta: float = 0.0) -> None:
        if not isinstance(watched, str) and not callable(watched):
            raise TypeError(f"{owner}: a monitor is a name such as 'eval/acc' or a function of the results; got {watched!r}")
        if mode not in ("min", "max"):
            named = f". Give other arguments by name, such as patience={mode}" if isinstance(mode, int) else ""
            raise ValueError(f"{owner}: mode must be 'min' or 'max', the direction that is better; got {mode!r}{named}")
        self.watched: Watched = watched
        self.mode = mode
        self.owner: str = owner
        self.min_delta: float = min_delta
        self.reset()

    def __repr__(self) -> str:
        best = f", best={self.best:.6g}" if math.isfinite(self.best) else ""
        return f"Monitor({brief(self.watched)}, {self.mode!r}{best})"

    def reset(self) -> None:
        """Forget all values: another run begins."""
        self.best: float = -math.inf if self.mode == "max" else math.inf
        self._said_nan = False

    @property
    def name(self) -> str:
        """The watched name, or the name of the function."""
        return name_of(self.watched)

    def value_of(self, run: Run, evaluation: Evaluation) -> float | None:
        """Return the watched value; None if it belongs to another evaluation, or to one that is no part of the training.

        Raises:
            MonitorError: It belongs to this evaluation, which did not report it.
        """
        if isinstance(evaluation, OfTraining):
            return evaluation.results.get(self.name)
        if run.evaluations.get(evaluation.name) is not evaluation:
            return None  # asked for by Trainer.evaluate
        return self.value_reported(run, evaluation)

    def value_reported(self, run: Run, evaluation: Evaluation) -> float | None:
        """Return the watched value, also of a sanity check; None if it belongs to another evaluation.

        Raises:
            MonitorError: It belongs to this evaluation, which did not report it.
        """
        others = [other for other in run.evaluations.values() if other.name != evaluation.name]
        if not evaluation.results and not evaluation.complete:  # cut short by an error
            return None
        if isinstance(self.watched, str) and self.watched not in evaluation.results and _may_report(others, self.watched):
            return None
        return self.value_in(evaluation.name, evaluation.results, own_names=evaluation.own_names)

    def value_in(self, evaluation: str, results: Mapping[str, float], *, own_names: bool = False) -> float | None:
        """Return the watched value; None if it belongs to another evaluation than the one called `evaluation`.

        Args:
            evaluation: The name of the evaluation.
            results: Its results.
            own_names: Whether these do not start with the name of the evaluation.

        Raises:
            MonitorError: It belongs to this evaluation, which did not report it.
        """
        if not isinstance(self.watched, str):
            return self.watched(results)
        if self.watched in results:
            return results[self.watched]
        if "/" in self.watched and not own_names and not self.watched.startswith(f"{evaluation}/"):
            return None
        raise MonitorError(
            f"{self.owner} watches {self.watched!r}, but the evaluation {evaluation!r} reported only {sorted(results)}."
            f"{nearest(self.watched, results)}"
        )

    def check(self, run: Run) -> None:
        """Raise `MonitorError` unless an evaluation or the training of this run may report the watched name.

        Warn if it is a metric that is better in the other direction.
        """
        if not is_trained(self, hooks_of(run), run.evaluations):
            self.check_reported_by(run.evaluations)
        source, _, result = self.name.partition("/")
        logs = {log.prefix: log for log in _logs_in(hooks_of(run))}
        metrics = getattr(run.evaluations.get(source, logs.get(source)), "metrics", {})
        higher = getattr(metrics.get(result, metrics.get(result.rpartition("/")[2])), "higher_is_better", None)
        if isinstance(higher, bool) and higher == (self.mode == "min"):
            better = "max" if higher else "min"
            run.warn(
                f"{self.owner} watches {self.name!r} with mode={self.mode!r}, but a {'higher' if higher else 'lower'} value of "
                f"this metric is better (higher_is_better={higher}). Give mode={better!r}, unless this is on purpose"
            )

    def check_reported_by(self, evaluations: Iterable[str] | Mapping[str, Evaluation]) -> None:
        """Raise `MonitorError` unless one of the run's evaluations, or their names, may report the watched name."""
        known = list(evaluations)
        if isinstance(evaluations, Mapping) and any(evaluation.own_names for evaluation in evaluations.values()):
            return
        if isinstance(self.watched, str) and self.watched.partition("/")[0] not in known:
            raise MonitorError(
                f"{self.owner} watches {self.watched!r}, but no evaluation will report it: there is "
                f"{', '.join(repr(f'{item}/...') for item in known) or 'none'}. Add Evaluate(loader, name=...) to "
                f"callbacks, or watch a name of one that is there.{_meant(self.watched, known)}"
            )

    def update(self, run: Run, value: float) -> bool:
        """Return whether `value` is better than the best so far, and keep it if so. NaN never is; one warning says so."""
        if math.isnan(value) and not self._said_nan:
            run.warn(f"{self.owner}: {self.name!r} is NaN, which is never better")
            self._said_nan = True
        return self.gets_better(value)

    def gets_better(self, value: float) -> bool:
        """Return whether `value` is better than the best so far, and keep it if so."""
        gain = value - self.best if self.mode == "max" else self.best - value
        if not gain > self.min_delta:
            return False
        self.best = value
        return True

    def best_data(self, *, value: float | None = None, step: int | None = None) -> dict[str, Any]:
        """Return the best value so far for the data of a decision: monitor, mode, value, step.

        Args:
            value: The value, if it is not the best that this monitor knows.
            step: The step of the value; None if it is not known.
        """
        best = self.best if value is None else value
        return {"monitor": self.name, "mode": self.mode, "value": best, "step": step}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.best = float(state["best"])


# -- results of the training, such as "train/loss" --------------------------------------------------


class OfTraining(Evaluation):
    """Results of the training, which those callbacks that monitor one of them get as those of an evaluation."""


def is_trained(monitor: Monitor, hooks: Hooks, evaluations: Container[str], *, alone: bool = False) -> bool:
    """Return whether a callback logs the training under the first part of the watched name.

    Args:
        monitor: The monitor.
        hooks: The callbacks of the run.
        evaluations: The names of its evaluations, which come first.
        alone: Whether ``compute_loss`` returns the loss alone.

    Raises:
        MonitorError: None of these callbacks logs the name.
    """
    logs = [log for log in _logs_in(hooks) if monitor.name.startswith(f"{log.prefix}/")]
    if not isinstance(monitor.watched, str) or not logs or logs[0].prefix in evaluations:
        return False
    known = [f"{log.prefix}/{name}" for log in logs for name in (*(log.outputs or ()), *log.metrics)]
    known += [f"{log.prefix}/loss" for log in logs if log.outputs is None]
    named = any(monitor.name == name or monitor.name.startswith(f"{name}/") for name in known)  # a metric may be a mapping
    if not named and (alone or all(log.outputs is not None for log in logs)):
        prefix, _, result = monitor.name.partition("/")
        alike = nearest(result, [name.partition("/")[2] for name in known]).replace("'", f"'{prefix}/", 1)
        raise MonitorError(
            f"{monitor.owner} watches {monitor.name!r}, but the training will log only {known}.{alike} "
            "Add it to LogTraining(outputs=..., metrics=...), or watch a result of an evaluation."
        )
    return True


def _logs_in(hooks: Hooks) -> list[Any]:
    """Return the callbacks that log the training under a prefix."""
    logs = (callback for callback in hooks.callbacks.values() if getattr(callback, "logs_training", False))
    return [log for log in logs if hasattr(log, "prefix")]


def judge_training(run: Run, prefix: str, sums: Mapping[str, tuple[Any, Any]], *, whole: bool) -> None:
    """Call the callbacks that monitor results of the training. Every rank must call this.

    Args:
        run: The run.
        prefix: The first part of the names.
        sums: By name, the weighted sum of this rank and the sum of the weights.
        whole: Whether these are all results of the training.

    Raises:
        MonitorError: They are all results, and no rank has a monitored one.
    """
    hooks, driver = hooks_of(run), run.driver
    watching = {
        listener: [item for item in monitors_of(hooks.callbacks[listener.owner]) if item.name.startswith(f"{prefix}/")]
        for listener in hooks.by_moment.get(Callback.on_eval_end, ())
    }
    monitors = {monitor.name: monitor for some in watching.values() for monitor in some}
    if not monitors or prefix in run.evaluations:
        return
    own = [[*map(float, sums.get(name, (0, 0))), name in sums] for name in monitors]
    totals = driver.reduce(torch.tensor(own, dtype=torch.float64) * driver.counts, "sum").tolist()
    results: dict[str, float] = {}
    for monitor, (total, weight, known) in zip(monitors.values(), totals, strict=True):
        if whole and not known:
            raise MonitorError(
                f"{monitor.owner} watches {monitor.name!r}, but the training logged only {sorted(sums)}."
                f"{nearest(monitor.name, sums)} Return it from compute_loss, or watch a name of an evaluation."
            )
        results |= {monitor.name: total / weight} if weight else {}
    due = [name for name, some in watching.items() if some]
    if run.progress.batch_in_epoch and whole:  # a longer run continues in this epoch, and judges all of it
        due = [evaluation for evaluation in due if hooks.callbacks[evaluation.owner].phase is Phase.SAVE]
    hooks.fired.add(Callback.on_eval_end)
    reported = OfTraining([None])
    reported.name, reported.results, reported.complete = prefix, results, True
    hooks.call(due, run, reported)


def _meant(watched: str, evaluations: Sequence[str]) -> str:
    """Return ``" Did you mean 'eval/loss'?"`` for a name such as ``"loss"`` or ``"val_loss"``, or nothing."""
    of_evaluation, of_training = r"(?:val|valid|validation|eval|test|dev)", r"train(?:ing)?"
    parts = re.fullmatch(rf"({of_evaluation}|{of_training})[_.-](\w+)", watched)
    source, result = parts.groups() if parts else (watched.partition("/")[0::2] if "/" in watched else ("", watched))
    known = list(evaluations) or ["eval"]
    if re.fullmatch(of_training, source):
        source = "train"
    elif len(known) == 1 and re.fullmatch(of_evaluation, source):
        source = known[0]
    elif source:
        source = next(iter(get_close_matches(source, [*known, "train"], n=1, cutoff=0.5)), "")
    else:
        source = "train" if result == "loss" and not evaluations else known[0]
    return f" Did you mean {meant!r}?" if source and (meant := f"{source}/{result}") != watched else ""


def _may_report(evaluations: Iterable[Evaluation], watched: str) -> bool:
    return any(evaluation.own_names or evaluation.name == watched.partition("/")[0] for evaluation in evaluations)


# -- checks, when a trainer is made, if all results are known by then ------------------------------


_ADDS = {"on_setup", "on_fit_start", "on_eval_start", "on_eval_batch_start", "on_eval_batch_end", "on_eval_end"}
_OWN = ("callbacks", "sinks", "engine", "loops", "trackers", "timetravel")


def check_monitors(hooks: Hooks, compute_loss: object) -> None:
    """Raise `MonitorError` for a monitored result that no evaluation in the list reports.

    All names are known if only callbacks of Cadenza listen to moments at which a hook could add an evaluation or a result, and
    if the batches are computed by `supervised`. Another function may return numbers of any name. Else the run
    checks the names at its start and at the first evaluation.
    """
    if not _only_own(hooks):
        return
    parts = [_part(callback, "evaluation") for callback in hooks.callbacks.values()]
    evaluations = {part.name: part for part in parts if isinstance(part, Evaluation)}
    for callback in hooks.callbacks.values():
        others = {
            name: evaluation for name, evaluation in evaluations.items() if evaluation is not _part(callback, "evaluation")
        }
        for monitor in monitors_of(callback):
            if not is_trained(monitor, hooks, others, alone=type(compute_loss) is supervised):
                monitor.check_reported_by(others)
                _check_name(monitor, others, compute_loss)


def check_reported(hooks: Hooks, trial: Evaluation) -> None:
    """Raise `MonitorError` if the trial of an evaluation did not report a monitored result."""
    if _only_own(hooks):
        for callback in hooks.callbacks.values():
            for monitor in monitors_of(callback):
                if isinstance(monitor.watched, str):
                    monitor.value_in(trial.name, trial.results)


def reports_nothing(hooks: Hooks, results: Mapping[str, float]) -> bool:
    """Return whether an evaluation has no result, and no hook can have used its batches."""
    used = any(moment.__name__ == "on_eval_batch_end" and listeners for moment, listeners in hooks.by_moment.items())
    return not results and not used and _only_own(hooks)


def without_evaluation(hooks: Hooks) -> Iterator[tuple[str, str]]:
    """Yield each callback that waits for an evaluation which no callback carries out, with the reason."""
    parts = [_part(callback, "evaluation") for callback in hooks.callbacks.values()]
    known = [part.name for part in parts if isinstance(part, Evaluation)]
    for owner, part in zip(hooks.callbacks, parts if _only_own(hooks) else (), strict=False):
        meant = nearest(part, known) if isinstance(part, str) else ""
        if isinstance(part, str) and part not in (*known, "predict") and (meant or not known):  # else it may be of a later call
            there = ", ".join(map(repr, known)) or "none"
            add = meant or f" Add Evaluate(loader, name={part!r}), or call trainer.evaluate(loader, name={part!r}) later."
            yield owner, f"it waits for the evaluation {part!r}, and there is {there}.{add}"


def monitors_in(hooks: Hooks) -> list[dict[str, str]]:
    """Return the monitors of all callbacks as plain data: monitor, mode, and the name of the callback."""
    return [
        {"monitor": monitor.name, "mode": monitor.mode, "callback": name}
        for name, callback in hooks.callbacks.items()
        for monitor in monitors_of(callback)
    ]


def monitors_of(callback: BaseCallback) -> list[Monitor]:
    """Return the monitors of a callback of Cadenza: its ``monitor``, or all of its ``monitors``."""
    several = getattr(callback, "monitors", None)
    given = [getattr(callback, "monitor", None), *(several if isinstance(several, list) else ())]
    return [item for item in given if isinstance(item, Monitor)]


def _only_own(hooks: Hooks) -> bool:
    """Return whether only callbacks of Cadenza listen to moments at which a hook could add an evaluation or a result."""
    listening = (listeners for moment, listeners in hooks.by_moment.items() if moment.__name__ in _ADDS)
    return all(_is_own(hooks.callbacks[listener.owner]) for listeners in listening for listener in listeners)


def _part(callback: BaseCallback, name: str) -> Any:
    return getattr(callback, name, None) if _is_own(callback) else None


def _is_own(callback: BaseCallback) -> bool:
    package, room, *_ = *type(callback).__module__.split("."), ""
    return package == "cadenza" and room in _OWN and not type(callback).__name__.startswith("_")  # a player adds evaluations


def _check_name(monitor: Monitor, evaluations: Mapping[str, Evaluation], compute_loss: object) -> None:
    if not isinstance(monitor.watched, str):
        return
    name, _, rest = monitor.watched.partition("/")
    if type(evaluations[name].compute or compute_loss) is not supervised:
        return
    reported = ["loss", *evaluations[name].metrics]
    keys = [*(f"{source}/{key}" for source in evaluations[name].sources for key in reported), *reported]
    if any(rest == key or rest.startswith(f"{key}/") for key in keys):  # a metric may compute a mapping
        return
    known = [f"{name}/{key}" for key in keys]
    raise MonitorError(
        f"{monitor.owner} watches {monitor.watched!r}, but the evaluation {name!r} will report only {known}."
        f"{nearest(monitor.watched, known)} Add this metric to Evaluate(metrics=...), or watch a reported one."
    )
