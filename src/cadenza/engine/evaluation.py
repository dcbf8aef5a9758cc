"""Evaluation and prediction, without gradient. The state of the training does not change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from cadenza.engine.due_evaluations import EvaluationInterrupted
from cadenza.engine.error_context import described, explained
from cadenza.engine.monitor_checks import check_reported, reports_nothing
from cadenza.engine.session import Session
from cadenza.engine.tally import tally_of
from cadenza.engine.whereabouts import whereabouts
from cadenza.errors import DataError
from cadenza.hooks.moments import Callback
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.rng import preserve_rng_state
from cadenza.status.decisions import Requests
from cadenza.status.formats import counted
from cadenza.status.outputs import Outputs, parts_of

if TYPE_CHECKING:
    from cadenza.drivers import Driver


# -- the batches -----------------------------------------------------------------------------------

NONE: Any = object()
_AGREE_S = 0.25  # the interval at which several ranks exchange whether a signal came
_MOST_ROUNDS = 64  # and the maximum number of batches between two exchanges


def batches_of(session: Session, evaluation: Evaluation) -> Iterator[tuple[Any, bool]]:
    """Yield each batch of this rank, on the device, with True.

    If a forward pass needs all ranks, a rank without further batches gets its last batch again, with False: its forward pass
    only serves the other ranks.

    Raises:
        EvaluationInterrupted: A signal ends the run. All ranks raise it before the same batch.
    """
    driver, requests = session.driver, session.due.interrupts(session.sync.requests)
    if driver.in_step:
        yield from _in_step(session, evaluation, requests)
        return
    source = iter(evaluation.read(session.run, session.data_seed))
    if requests is not None:
        source = _agreed(driver, evaluation, source, requests) if driver.reduces else _until(requests, evaluation, source)
    for loaded in source:
        yield driver.to_device(loaded), True


def check_some(evaluation: Evaluation, driver: Driver) -> None:
    """Raise `DataError` if an evaluation had no batch on any rank. Every rank must call this."""
    if not driver.any_rank(evaluation.batch > 0):
        raise _no_batch(evaluation)


def _no_batch(evaluation: Evaluation) -> DataError:
    return DataError(f"the loader of {evaluation.name!r} gave no batch. Give one that has at least one, and can be read again.")


def _until(requests: Requests, evaluation: Evaluation, source: Iterator[Any]) -> Iterator[Any]:
    while requests.signal is None:
        if (loaded := next(source, NONE)) is NONE:
            return
        yield loaded
    raise EvaluationInterrupted(evaluation.name, evaluation.batch)


def _agreed(driver: Driver, evaluation: Evaluation, source: Iterator[Any], requests: Requests) -> Iterator[Any]:
    """Do the same on multiple ranks with different numbers of batches. They agree while they compute."""
    arrived, due, round_, sent_at = None, 0, 0, 0
    began = time.monotonic_ns()
    while True:
        loaded = next(source, NONE)
        if arrived is not None:
            signals, have_more, passed_ns = arrived().tolist()
            if signals:
                raise EvaluationInterrupted(evaluation.name, evaluation.batch)
            if not have_more:
                return
            round_s = passed_ns / driver.world_size / max(1, sent_at) / 1e9
            due = round_ + (max(1, min(_MOST_ROUNDS, int(_AGREE_S / max(round_s, 1e-9)))) if sent_at else 1)
            arrived = None
        elif round_ >= due:
            sent = [requests.signal is not None, loaded is not NONE, time.monotonic_ns() - began]
            arrived, sent_at = driver.reduce_later(torch.tensor(sent)), round_
        round_ += 1
        if loaded is not NONE:
            yield loaded


def _in_step(session: Session, evaluation: Evaluation, requests: Requests | None) -> Iterator[tuple[Any, bool]]:
    driver, source = session.driver, iter(evaluation.read(session.run, session.data_seed))
    batch = None
    while True:
        loaded = next(source, NONE)
        signalled = requests is not None and requests.signal is not None
        sent = torch.tensor([loaded is not NONE, signalled], dtype=torch.uint8)
        have_more, signals = driver.reduce(sent, "max").tolist()
        if signals:
            raise EvaluationInterrupted(evaluation.name, evaluation.batch)
        if not have_more:
            return
        if loaded is NONE:
            if batch is None:  # a forward pass needs a batch on each rank
                raise _no_batch(evaluation)
            yield batch, False
        else:
            batch = driver.to_device(loaded)
            yield batch, True


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
