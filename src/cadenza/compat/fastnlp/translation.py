"""The table that maps fastNLP's events to native moments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.utils.utils import indices_of
from cadenza.engine.session import session_of
from cadenza.engine.weight_update import drop_gradients
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, Moment

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


Arguments = Callable[[AdaptedRun, tuple[Any, ...]], tuple[Any, ...]]


def _none(adapted: AdaptedRun, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return ()


def _batch(adapted: AdaptedRun, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return given[0], adapted.indices if adapted.own else indices_of(given[0], adapted.run.loader)


def _outputs(adapted: AdaptedRun, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (given[0] if adapted.outputs is None else adapted.outputs,)


def _optimizers(adapted: AdaptedRun, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (adapted.trainer.optimizers,)


def _results(adapted: AdaptedRun, given: tuple[Any, ...]) -> tuple[Any, ...]:
    evaluation: Evaluation = given[0]
    plain = getattr(evaluation, "plain_results", None)
    return (NamedResults(evaluation, adapted.run.evaluations) if plain is None else plain,)


def _driver(adapted: AdaptedRun, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (adapted.trainer.driver,)


@dataclass(frozen=True, slots=True)
class Mapped:
    """The native moments of an event, and its arguments after the trainer."""

    moments: tuple[Moment, ...]
    arguments: Arguments = _none
    stops: bool = True
    """Whether an `EarlyStopException` in it ends the training."""


def _at(*moments: Moment, arguments: Arguments = _none, stops: bool = True) -> Mapped:
    return Mapped(moments, arguments, stops)


EVENTS: Mapping[str, Mapped] = {
    "on_after_trainer_initialized": _at(Callback.on_setup, arguments=_driver, stops=False),
    "on_sanity_check_begin": _at(Callback.on_sanity_start, stops=False),
    "on_sanity_check_end": _at(Callback.on_sanity_end, arguments=_results, stops=False),
    "on_train_begin": _at(Callback.on_fit_start),
    "on_train_epoch_begin": _at(Callback.on_epoch_start),
    "on_fetch_data_begin": _at(Callback.on_fetch_start),
    "on_fetch_data_end": _at(Callback.on_fetch_end),
    "on_train_batch_begin": _at(Callback.on_batch_start, arguments=_batch),
    "on_before_backward": _at(Callback.on_before_backward, arguments=_outputs),
    "on_after_backward": _at(Callback.on_after_backward),
    "on_before_optimizers_step": _at(Callback.on_before_optimizer_step, arguments=_optimizers),
    "on_after_optimizers_step": _at(Callback.on_after_optimizer_step, arguments=_optimizers),
    "on_before_zero_grad": _at(Callback.on_before_zero_grad, arguments=_optimizers),
    "on_after_zero_grad": _at(Callback.on_after_zero_grad, arguments=_optimizers),
    # The last batch of a window is complete after the update, the others before it.
    "on_train_batch_end": _at(Callback.on_batch_end, Callback.on_step_end),
    "on_evaluate_begin": _at(Callback.on_eval_start),
    "on_evaluate_end": _at(Callback.on_eval_end, arguments=_results),
    "on_train_epoch_end": _at(Callback.on_epoch_end),
    "on_exception": _at(Callback.on_exception, Callback.on_stop, stops=False),
    "on_train_end": _at(Callback.on_fit_end, stops=False),
    # Called by the methods that save or load.
    "on_save_model": _at(),
    "on_load_model": _at(),
    "on_save_checkpoint": _at(),
    "on_load_checkpoint": _at(),
}

_UPDATE = {
    Callback.on_before_optimizer_step,
    Callback.on_after_optimizer_step,
    Callback.on_before_zero_grad,
    Callback.on_after_zero_grad,
}
_AT_THE_END = {Callback.on_exception, Callback.on_stop, Callback.on_fit_end}
_IN_AN_EPOCH = list(EVENTS)[list(EVENTS).index("on_fetch_data_begin") : list(EVENTS).index("on_evaluate_begin")]


def listeners_of(owner: BaseCallback, event: str, hook: Callable[..., Any]) -> Iterator[Listener]:
    """Yield listeners that call a hook of `owner` at each native moment of its event."""
    mapped = EVENTS[event]
    for moment in mapped.moments:
        yield Listener(moment, _dispatcher(owner, moment, mapped, hook))


def entering(enter: Callable[[AdaptedRun], None]) -> Listener:
    """Return a listener that passes a new run to `enter`."""
    return Listener(Callback.on_setup, lambda run: enter(AdaptedRun.of(run)))


def agreement_listener() -> Listener:
    """Return a listener that exchanges the requests of all ranks when a stop is carried out."""

    def agree(run: Run, reason: str) -> None:
        adapted = AdaptedRun.of(run)
        if not adapted.agreed:
            adapted.agreed = True
            adapted.agree()

    return Listener(Callback.on_stop, agree)


def drop_listeners(hooks: Mapping[str, object]) -> list[Listener]:
    """Return a listener that drops batches after an `EarlyStopException`, if one of the hooks may raise it in an epoch."""
    return [Listener(Callback.on_batch_start, _drop_after_stop)] if hooks.keys() & _IN_AN_EPOCH else []


def _drop_after_stop(run: Run, batch: object) -> None:
    if AdaptedRun.of(run).early_stop is not None:
        _drop(run)


def _drop(run: Run) -> None:
    """Drop the gradients of the current batch and of its accumulation window."""
    step = session_of(run).step
    if step.may_skip and not step.skipping:
        run.skip_batch("a callback raised EarlyStopException")
    drop_gradients(run.optimizers)


def _dispatcher(owner: BaseCallback, moment: Moment, mapped: Mapped, hook: Callable[..., Any]) -> Callable[..., None]:
    may_fail = owner.on_fault == "disable"

    def call(run: Run, *given: Any) -> None:
        adapted = AdaptedRun.of(run)
        if not _is_event(adapted, moment, given):
            return
        adapted.updating = _is_updating(adapted, moment)
        adapted.count()
        if moment is Callback.on_epoch_end or moment is Callback.on_fit_end:
            adapted.close_epoch()
        if moment is Callback.on_stop:
            given = (adapted.early_stop or EarlyStopException(given[0]),)
        arguments = given if moment in (Callback.on_exception, Callback.on_stop) else mapped.arguments(adapted, given)
        adapted.call(moment, hook, arguments, may_stop=mapped.stops, may_fail=may_fail)
        if moment is Callback.on_before_backward and adapted.outputs is not None:
            given[0]["loss"] = adapted.outputs.loss
        if adapted.early_stop is not None and moment in _BEFORE_THE_WEIGHTS:
            _drop(run)

    return call


_BEFORE_THE_WEIGHTS = {
    Callback.on_batch_start,
    Callback.on_before_backward,
    Callback.on_after_backward,
    Callback.on_before_optimizer_step,
}


def _is_updating(adapted: AdaptedRun, moment: Moment) -> bool:
    """Return whether the run has counted a batch that waits for its update."""
    if moment in _AT_THE_END:
        return adapted.updating
    return moment in _UPDATE and adapted.window_is_full


def _is_event(adapted: AdaptedRun, moment: Moment, given: tuple[Any, ...]) -> bool:
    """Return whether this firing of a moment is an event of fastNLP."""
    if moment in _AT_THE_END:
        return True
    if moment in _ENDS and (adapted.broken is moment or unwinding(adapted.run) is not None):
        return False
    adapted.broken = None  # only ends follow an error, so the error was handled
    run = adapted.run
    if adapted.early_stop is not None:
        return False
    if adapted.own_loop and moment in _OF_THE_LOOP:
        return False
    if moment is Callback.on_setup:
        return not adapted.own  # the constructor of the trainer has called it
    if moment is Callback.on_batch_end or moment is Callback.on_step_end:
        return adapted.completes_batch(moment)
    if moment is Callback.on_epoch_end:
        return not run.progress.batch_in_epoch or run.progress.finished  # an epoch that ended early is not complete
    if moment in _EVALUATIONS:
        evaluation: Evaluation = given[0]
        if adapted.own and adapted.trainer.evaluator is not None:
            return evaluation is adapted.evaluation or evaluation is adapted.trial
        known = run.evaluations.get(evaluation.name)  # a sanity check has the same name
        return known is evaluation or (known is not None and moment not in (Callback.on_eval_start, Callback.on_eval_end))
    return True


_OF_THE_LOOP = {
    Callback.on_fetch_start,
    Callback.on_fetch_end,
    Callback.on_batch_start,
    Callback.on_batch_end,
    Callback.on_step_end,
}
_EVALUATIONS = {Callback.on_eval_start, Callback.on_eval_end, Callback.on_sanity_start, Callback.on_sanity_end}
_ENDS = {
    Callback.on_fetch_end,
    Callback.on_batch_end,
    Callback.on_step_end,
    Callback.on_epoch_end,
    Callback.on_eval_end,
    Callback.on_sanity_end,
}


DEFAULT = "eval"
"""The name of a native evaluation that has no name."""


class NamedResults(dict[str, Any]):
    """The results of an evaluation by fastNLP's names. Native names work as keys too.

    ``eval/acc/f1`` is ``f1#acc``, and ``dev/acc/f1`` is ``f1#acc#dev``.

    Args:
        evaluation: A native evaluation.
        names: The names of all evaluations of the run.
    """

    def __init__(self, evaluation: Evaluation, names: Collection[str] = ()) -> None:
        self._native, self._name = evaluation.results, evaluation.name
        self._others = set(names) - {evaluation.name}
        suffix = [] if self._name == DEFAULT else [self._name]
        super().__init__({"#".join([*_reversed_parts(name), *suffix]): value for name, value in self._native.items()})

    def __missing__(self, key: str) -> Any:
        return self._native[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._native

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, self._native.get(key, default))

    def lacks(self, monitor: str) -> bool:
        """Return whether a monitored name belongs to another evaluation of the run, so that no result here can replace it."""
        if monitor in self:
            return False
        names = {*self._others, self._name}
        owner = next((name for name in names if monitor.startswith(f"{name}/") or monitor.endswith(f"#{name}")), DEFAULT)
        return owner in self._others


def _reversed_parts(name: str) -> list[str]:
    """Return the parts of a native name after that of the evaluation, the innermost first."""
    return name.split("/")[:0:-1]
