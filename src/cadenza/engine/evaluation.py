"""Evaluation and prediction, without gradient. The state of the training does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from cadenza.engine.error_context import described, explained
from cadenza.engine.evaluation_batches import batches_of, check_some
from cadenza.engine.monitor_checks import check_reported, reports_nothing
from cadenza.engine.session import Session
from cadenza.engine.tally import tally_of
from cadenza.engine.whereabouts import whereabouts
from cadenza.hooks.moments import Callback
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.rng import preserve_rng_state
from cadenza.status.counting import counted
from cadenza.status.outputs import Outputs, parts_of


def evaluate(session: Session, evaluation: Evaluation) -> dict[str, float]:
    """Evaluate the model; return the results, which are also in ``evaluation.results``.

    Model mode and RNG state are restored. Every rank must call this.

    Raises:
        DataError: The loader gave no batch, or the metrics find no predictions and targets in the result of `compute`.
    """
    evaluation.results, evaluation.complete, evaluation.batch = {}, False, 0
    with undisturbed(session), session.hooks.ending(Callback.on_eval_end, session.run, evaluation):
        session.hooks.on_eval_start(session.run, evaluation)
        tally = tally_of(session, evaluation)
        each_batch(session, evaluation, tally.add)
        evaluation.results = tally.results()
        record_evaluated(session, evaluation)
        evaluation.complete = True
    _warn_of_nothing(session, evaluation, evaluation.results, tally.unused)
    return evaluation.results


def _warn_of_nothing(session: Session, evaluation: Evaluation, results: Mapping[str, float], unused: Outputs | None) -> None:
    """Warn once that an evaluation has no result. `unused` are outputs of a batch without a number."""
    if evaluation.has_warned or not reports_nothing(session.hooks, results):
        return
    evaluation.has_warned = True
    outputs: Any = unused["predictions"] if unused is not None and [*unused] == ["predictions"] else unused
    session.warn(
        f"the evaluation {evaluation.name!r} reports no result: expected metrics, a loss, or a mapping with numbers of shape "
        f"(); got {described(outputs)}. Return such a mapping from Evaluate(compute=...), or give Evaluate(metrics=...)."
    )


def record_evaluated(session: Session, evaluation: Evaluation, *, who: str | None = None) -> None:
    """Record that an evaluation is complete, with its results. Equal runs record the same, so no time is part of it."""
    data = {"evaluation": evaluation.name, "batches": evaluation.batch, "results": dict(evaluation.results)}
    session.decide("evaluated", f"{evaluation.name}: {counted(evaluation.batch, 'batch')}", who=who, data=data)


def rehearse(session: Session, evaluation: Evaluation, batches: int) -> None:
    """Try an evaluation on a few batches: an error in it shows now, and not after an hour of training."""
    trial = evaluation.trial(batches * session.driver.data_world_size)
    with undisturbed(session), session.hooks.ending(Callback.on_sanity_end, session.run, trial):
        session.hooks.on_sanity_start(session.run, trial)
        tally, computed = tally_of(session, trial), computing(session, trial)
        for batch, own in batches_of(session, trial):
            outputs = computed(batch)
            if own:
                tally.add(batch, outputs)
                trial.batch += 1
        check_some(trial, session.driver)
        trial.results, trial.complete = tally.results(), True
        check_reported(session.hooks, trial)
        _warn_of_nothing(session, evaluation, trial.results, tally.unused)


T = TypeVar("T")


def alone(act: Callable[[Session, Evaluation], T], session: Session, evaluation: Evaluation) -> T:
    """Return what `evaluate` or `predict` does, where no fit is under way; of the errors of all ranks the first is shown."""
    with session.driver.watched(partial(whereabouts, session)):
        try:
            return act(session, evaluation)
        except BaseException as raised:
            error = session.driver.first_error(raised)
            try:
                if error is raised:
                    raise
                raise error from raised
            finally:
                del error  # its traceback holds this frame, and the frame the session


@contextmanager
def undisturbed(session: Session) -> Iterator[None]:
    """Evaluation mode without gradient; then every module's mode and every random stream as before."""
    modes = [(module, module.training) for module in session.model.modules()]
    # Not inference_mode: what a module keeps of its first forward pass could not be trained with. See docs/decisions/0011.
    with session.progress.aside(), explained(session), preserve_rng_state(), torch.no_grad():
        session.model.eval()
        try:
            yield
        finally:
            session.driver.reshard(session.model)
            for module, training in modes:
                if module.training is not training:
                    module.training = training


def each_batch(session: Session, evaluation: Evaluation, act: Callable[[Any, Outputs], object]) -> None:
    """Hand each batch and its outputs to `act`, with the moments around the computation.

    Not a generator: in one, a StopIteration that a hook raises would become another error.
    """
    run, hooks, computed, none = session.run, session.hooks, computing(session, evaluation), Outputs()
    for batch, own in batches_of(session, evaluation):
        if not own:
            computed(batch)
            continue
        outputs = none
        try:
            hooks.on_eval_batch_start(run, evaluation, batch)
            outputs = computed(batch)
            evaluation.batch += 1
        except BaseException as error:
            hooks.end(error, Callback.on_eval_batch_end, run, evaluation, batch, outputs)
            raise
        hooks.on_eval_batch_end(run, evaluation, batch, outputs)
        act(batch, outputs)
    check_some(evaluation, session.driver)


def computing(session: Session, evaluation: Evaluation) -> Callable[[Any], Outputs]:
    """Return the function from a batch to its outputs."""
    own = evaluation.compute is not None
    compute = session.compute if evaluation.compute is None else session.precision.wrap(evaluation.compute)
    # Not the wrapper of a driver: it would talk to the other ranks, which may have one batch less.
    model = session.module

    def computed(batch: Any) -> Outputs:
        result = compute(model, batch)
        if type(result) is dict:
            return Outputs(result)
        if isinstance(result, Tensor) and (not own or result.ndim == 0):
            return Outputs(loss=result)
        # As in training; what has no name and no loss is a prediction.
        named = isinstance(result, Mapping) or hasattr(result, "loss")
        return Outputs(parts_of(result)) if named else Outputs(predictions=result)

    return computed
