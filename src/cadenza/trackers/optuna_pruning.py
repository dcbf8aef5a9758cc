"""Stop a run when Optuna's pruner prunes its trial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from cadenza.engine.monitor import Mode, Monitor, Pair, Watched, is_pair, watched_and_mode
from cadenza.errors import MissingExtraError
from cadenza.hooks.moments import Callback
from cadenza.records.reading import read_decisions
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run
    from cadenza.status.decisions import Outcome

PRUNED = "pruned by Optuna"  # user attribute of the trial that holds the reason


class OptunaPruning(Callback):
    """Report each evaluation to a trial of Optuna, and stop the run if the study's pruner prunes the trial.

    A pruned run ends like any stopped run: hooks are called, files are closed, and the decision is recorded. End your
    objective with `result`, which then raises ``optuna.TrialPruned``. ``fit`` does not raise it. If the objective returns a
    number instead, Optuna records the trial as complete, and the next run of the study warns. The user attribute
    ``"pruned by Optuna"`` of a pruned trial has the reason.

    With multiple ranks: communicates during setup. Only the main process reports to the trial; its request stops all ranks.

    Args:
        trial: The trial that your objective gets. On multiple ranks, only the main process needs it: pass None on the others,
            or a ``TorchDistributedTrial`` on all.
        monitor: The result to report, such as ``"eval/acc"``, a function of the results, or a tuple of result and mode.
        mode: ``"max"`` or ``"min"``: which direction is better. None takes the direction of the study.
        per: The counter to report as Optuna's step: completed ``"step"`` or ``"epoch"``. Choose ``"epoch"`` if trials have
            different numbers of steps in an epoch. Only the first evaluation at each number is reported.
        name: The name of this callback in the plan, errors and saved state.

    Raises:
        MissingExtraError: optuna is not installed.
        TypeError: `trial` is not a trial.
        ValueError: `mode` contradicts the study, is missing for a trial without a study such as ``FixedTrial``, or the study
            has several objectives.
        MonitorError: No evaluation of the run reports `monitor`.

    >>> import optuna
    >>> from cadenza.testing import simulate
    >>> optuna.logging.set_verbosity(optuna.logging.ERROR)
    >>> study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=2.0))
    >>> pruning = OptunaPruning(study.ask(), "eval/loss")
    >>> run = simulate([pruning], metrics={"eval/loss": [1.5, 3.0, 1.0]})
    >>> run.outcome
    Outcome(kind='stopped', reason="pruned by Optuna: 'eval/loss' of trial 0 is 3 at step 4")
    >>> pruning.result(run)
    Traceback (most recent call last):
        ...
    optuna.exceptions.TrialPruned: pruned by Optuna: 'eval/loss' of trial 0 is 3 at step 4
    """

    decides: tuple[str, ...] = ("stopped",)

    def __init__(
        self,
        trial: Any,
        monitor: Watched | Pair,
        mode: Mode | None = None,
        *,
        per: Literal["step", "epoch"] = "step",
        name: str | None = None,
    ) -> None:
        if find_spec("optuna") is None:
            raise MissingExtraError("optuna", needed_by="OptunaPruning", extra="optuna")
        if per not in ("step", "epoch"):
            raise ValueError(f"per must be 'step' or 'epoch', the counter to report; got {per!r}")
        self.trial: Any = _checked(trial)
        self.per = per
        self.name: str | None = name
        wanted = _mode_of(self.trial)
        if mode is None and not is_pair(monitor):
            mode = "max" if self.trial is None else wanted  # without a trial, the main process sends the mode
        watched, mode = watched_and_mode(monitor, mode, owner="OptunaPruning")
        if wanted not in (None, mode):
            raise ValueError(
                f"OptunaPruning: mode={mode!r} contradicts the study, which wants the {wanted}imum. Leave mode= out, or create "
                f"the study with direction='{mode}imize'."
            )
        self.monitor: Monitor = Monitor(watched, mode, owner=name or "OptunaPruning")
        self._reported = set[int]()

    def on_setup(self, run: Run) -> None:
        mode = run.driver.broadcast(None if self.trial is None else self.monitor.mode)
        if mode is None:
            raise ValueError(
                "OptunaPruning needs a trial on the main process; got None. Pass the trial of the objective, or "
                "optuna.trial.FixedTrial(parameters) to run the objective without a study."
            )
        self.monitor.mode = mode
        self.monitor.reset()
        trials = _trials_of(self.trial)
        self._reported = set(trials[self.trial.number].intermediate_values) if trials else set()
        complete = [str(trial.number) for trial in trials if trial.state.name == "COMPLETE" and PRUNED in trial.user_attrs]
        if complete:
            run.warn(
                f"Optuna records {counted(len(complete), 'trial')} as complete that the pruner stopped: "
                f"{', '.join(complete[-5:])}. End the objective with return pruning.result(run)."
            )

    def on_fit_start(self, run: Run) -> None:
        self.monitor.check(run)

    def on_sanity_end(self, run: Run, evaluation: Evaluation) -> None:
        self.monitor.value_reported(run, evaluation)  # an unknown name is an error before the first epoch

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        value = self.monitor.value_of(run, evaluation)
        if value is None:
            return
        self.monitor.update(run, value)
        if run.is_main and self._prunes(value, at := getattr(run.progress, self.per)):
            data = {"trial": self.trial.number, "value": value, self.per: at, "pruned": True}
            name = f"{self.monitor.name!r} of trial {self.trial.number}"
            run.stop(f"{PRUNED}: {name} is {value:g} at {self.per} {at}", data=data)  # a stop on any rank stops all

    def on_fit_end(self, run: Run) -> None:
        if run.is_main and run.outcome is not None and _is_pruned(run, run.outcome):
            self.trial.set_user_attr(PRUNED, run.outcome.reason)

    def _prunes(self, value: float, at: int) -> bool:
        """Report a value to Optuna unless the trial has one for this step. Return the pruner's decision."""
        if at not in self._reported:
            self._reported.add(at)
            self.trial.report(value, at)
        return bool(self.trial.should_prune())

    def result(self, run: Run) -> float:
        """Return the best value of a run for the objective: NaN, which fails the trial, if no value was finite.

        Call it after ``fit``, with the run that ``fit`` returned. It does not communicate between ranks.

        Raises:
            optuna.TrialPruned: The pruner stopped the run, on every rank.
        """
        import optuna

        outcome = run.outcome
        if outcome is not None and _is_pruned(run, outcome):
            raise optuna.TrialPruned(outcome.reason)
        # the run was already complete when fit was called
        if not math.isfinite(self.monitor.best) and self.monitor.name in run.history:
            for _, value in run.history[self.monitor.name]:
                self.monitor.gets_better(value)
        return self.monitor.best if math.isfinite(self.monitor.best) else math.nan

    def state_dict(self) -> dict[str, Any]:
        return self.monitor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.monitor.load_state_dict(state)


def _checked(trial: Any) -> Any:
    """Return the trial to report to; None on the other ranks."""
    from optuna.trial import BaseTrial

    if type(trial).__name__ == "TorchDistributedTrial":  # it communicates in each call; only the wrapped trial is needed
        trial = trial._delegate
    if trial is not None and not isinstance(trial, BaseTrial):
        raise TypeError(f"trial must be the trial that Optuna passes to the objective; got {trial!r}")
    objectives = len(getattr(getattr(trial, "study", None), "directions", ()))
    if objectives > 1:
        raise ValueError(
            "OptunaPruning needs a study with one objective, because Optuna does not prune studies with several; got "
            f"{objectives}. Leave OptunaPruning out."
        )
    return trial


def _mode_of(trial: Any) -> Mode | None:
    """Return the mode that fits the direction of the study; None if the trial has no study."""
    if (study := getattr(trial, "study", None)) is None:
        return None
    return "max" if study.direction.name == "MAXIMIZE" else "min"


def _trials_of(trial: Any) -> list[Any]:
    """Return the trials of the study. `trial` may be resumed, or may have inherited values."""
    study = getattr(trial, "study", None)
    return [] if study is None else list(study.get_trials(deepcopy=False))


def _is_pruned(run: Run, outcome: Outcome) -> bool:
    """Return whether OptunaPruning stopped a run, possibly before this process started."""
    decisions = list(run.decisions)
    if run.info.directory is not None and not any(decision.what == "stopped" for decision in decisions):
        decisions = list(read_decisions(run.info.directory / "decisions.jsonl"))
    stops = [decision for decision in decisions if decision.what == outcome.kind == "stopped"]
    return any(stop.why == outcome.reason and "pruned" in stop.data for stop in stops)
