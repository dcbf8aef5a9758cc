"""Evaluation and prediction, without gradient. The state of the training does not change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from cadenza.drivers import Driver
from cadenza.drivers.collective_check import BeforeCollectives
from cadenza.drivers.consensus import by_main_from_all
from cadenza.engine.error_context import described, explained, whereabouts
from cadenza.engine.monitor import check_reported, reports_nothing
from cadenza.engine.objective import joined, on_host
from cadenza.engine.session import UNDER_WAY, Session
from cadenza.engine.step_state import EvaluationInterrupted
from cadenza.engine.tally import Tally
from cadenza.errors import DataError, DistributedError
from cadenza.hooks.moments import Callback
from cadenza.lazy import imported
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.rng import preserve_rng_state
from cadenza.status.decisions import Requests
from cadenza.status.formats import counted
from cadenza.status.outputs import Outputs, parts_of

if TYPE_CHECKING:
    from cadenza.drivers import Driver

# -- the batches -----------------------------------------------------------------------------------

NONE: Any = object()
_AGREE_S = 0.25  # the interval at which multiple ranks exchange whether a signal came
_MOST_ROUNDS = 64  # and the maximum number of batches between two exchanges


def batches_of(session: Session, evaluation: Evaluation) -> Iterator[tuple[Any, bool]]:
    """Yield each batch of this rank, on the device, with True. Compute with it in ``evaluation.first_batch``, if there is one.

    If the computation needs all ranks, a rank without further batches gets its last batch again, with False: its computation
    only serves the other ranks. If it has no batch at all, it gets that of another rank.

    Raises:
        DataError: The loader gave no batch on any rank.
        EvaluationInterrupted: A signal ends the run. All ranks raise it before the same batch.
    """
    driver, requests = session.driver, session.due.interrupts(session.sync.requests)
    source = iter(evaluation.read(session.run, session.data_seed))
    if not driver.reduces:
        for loaded in source if requests is None else _until(requests, evaluation, source):
            yield driver.to_device(loaded), True
        if not evaluation.batch:
            raise _no_batch(evaluation)
        return
    evaluation.first_batch = first = FirstBatch(driver, evaluation, next(source, NONE))
    try:
        own = first.batch is not NONE
        if driver.in_step:
            first.meet(communicates=True)
        batch = driver.to_device(first.batch) if own else NONE
        if own:
            yield batch, True
        first.meet(communicates=False)
    finally:
        evaluation.first_batch = None
    if driver.after_start is not None and session not in UNDER_WAY:  # in a fit, the start ends with its first step
        driver.after_start()
    if first.communicates:
        batch = batch if own else driver.to_device(first.batch)
        yield from () if own else [(batch, False)]
        yield from _in_step(driver, evaluation, source, requests, batch)
        return
    if requests is not None:
        source = _agreed(driver, evaluation, source, requests)
    for loaded in source:
        yield driver.to_device(loaded), True


class FirstBatch(BeforeCollectives):
    """The first batches of an evaluation on multiple ranks, for ``with``: finds whether computing with them communicates.

    If it does, all ranks compute equally often. Before the first collective, or after the batch if there is none, the ranks
    meet, and those without a batch get one.
    """

    def __init__(self, driver: Driver, evaluation: Evaluation, batch: Any) -> None:
        super().__init__(lambda name: self.meet(communicates=True))
        self._driver, self._evaluation, self._met = driver, evaluation, False
        self.batch: Any = batch
        """The batch of this rank or, if it has none, that of another rank; `NONE` without need for one."""
        self.communicates: bool = False
        """Whether the computation needs all ranks."""

    def meet(self, *, communicates: bool) -> None:
        """Exchange which ranks have a batch, and whether the computation communicates. Every rank must call this."""
        if self._met:
            return
        self._met = True
        driver = self._driver
        has = self.batch is not NONE
        flags = driver.reduce(torch.tensor([communicates, not has, driver.rank if has else -1]), "max")
        self.communicates = bool(flags[0])
        lacks = bool(flags[1])
        source = int(flags[2])
        if source < 0:
            raise _no_batch(self._evaluation)
        if self.communicates and lacks:
            batch = driver.broadcast(on_host(self.batch) if driver.rank == source else None, source)
            self.batch = self.batch if has else batch


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


def _in_step(
    driver: Driver, evaluation: Evaluation, source: Iterator[Any], requests: Requests | None, batch: Any
) -> Iterator[tuple[Any, bool]]:
    while True:
        loaded = next(source, NONE)
        signalled = requests is not None and requests.signal is not None
        sent = torch.tensor([loaded is not NONE, signalled], dtype=torch.uint8)
        have_more, signals = driver.reduce(sent, "max").tolist()
        if signals:
            raise EvaluationInterrupted(evaluation.name, evaluation.batch)
        if not have_more:
            return
        if loaded is not NONE:
            batch = driver.to_device(loaded)
        yield batch, loaded is not NONE


def evaluate(session: Session, evaluation: Evaluation) -> dict[str, float]:
    """Evaluate the model; return the results, which are also in ``evaluation.results``.

    Model mode and RNG state are restored. Every rank must call this.

    Raises:
        DataError: The loader gave no batch, or the metrics find no predictions and targets in the result of `compute`.
    """
    evaluation.results, evaluation.complete, evaluation.batch = {}, False, 0
    with undisturbed(session), session.hooks.ending(Callback.on_eval_end, session.run, evaluation):
        session.hooks.on_eval_start(session.run, evaluation)
        tally = Tally(session.driver, evaluation)
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
        tally, computed = Tally(session.driver, trial), computing(session, trial)
        for batch, own in batches_of(session, trial):
            outputs = computed(batch)
            if own:
                tally.add(batch, outputs)
                trial.batch += 1
        trial.results, trial.complete = tally.results(), True
        check_reported(session.hooks, trial)
        _warn_of_nothing(session, evaluation, trial.results, tally.unused)


T = TypeVar("T")


def alone(act: Callable[[Session, Evaluation], T], session: Session, evaluation: Evaluation) -> T:
    """Return what `evaluate` or `predict` does, where no fit is under way; of the errors of all ranks the first is shown."""
    with session.driver.watched(partial(whereabouts, session)):
        raised: BaseException | None = None
        try:
            result = act(session, evaluation)
        except BaseException as own:
            raised = own
        error = session.driver.error_at_end(raised) if evaluation.complete else raised
        try:
            if error is None:
                return result
            error = session.driver.first_error(error)
            if error is raised:
                raise error
            raise error from raised
        finally:
            del error, raised  # a traceback holds this frame, and the frame the session


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


def computing(session: Session, evaluation: Evaluation) -> Callable[[Any], Outputs]:
    """Return the function from a batch to its outputs."""
    own = evaluation.compute is not None
    compute = session.compute if evaluation.compute is None else session.precision.wrap(evaluation.compute)
    # Not the wrapper of a driver: it would talk to the other ranks, which may have one batch less.
    model = session.module

    def computed(batch: Any) -> Outputs:
        if (first := evaluation.first_batch) is None:
            result = compute(model, batch)
        else:
            with first:
                result = compute(model, batch)
        if type(result) is dict:
            return Outputs(result)
        if isinstance(result, Tensor) and (not own or result.ndim == 0):
            return Outputs(loss=result)
        # As in training; what has no name and no loss is a prediction.
        named = isinstance(result, Mapping) or hasattr(result, "loss")
        return Outputs(parts_of(result)) if named else Outputs(predictions=result)

    return computed


# -- prediction: joined in memory, or written to a file batch by batch, in the order of the loader -


class Prediction(Evaluation):
    """The evaluation that `Trainer.predict` does, named ``predict``.

    Args:
        loader: Any iterable of batches.
        compute: ``compute(model, batch)`` returns the predictions. None: the prediction of `compute_loss`.
        compute_loss: That of the trainer.
        limit: The maximal number of batches; None: all.
        to: The path of the file to write; None: no file.
        everywhere: Whether all ranks get the predictions, and not the main process alone.

    Raises:
        TypeError: `compute` is missing, and `compute_loss` is a function that only returns a loss; or `to` is no path.
        ValueError: `to` has an unknown suffix, or is a URL.
        MissingExtraError: `to` is a Parquet file, and pyarrow is not installed.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        compute: Callable[[nn.Module, Any], Any] | None,
        compute_loss: object,
        *,
        limit: int | None,
        to: str | os.PathLike[str] | None,
        everywhere: bool = False,
    ) -> None:
        predicted = compute or getattr(compute_loss, "predict", None)
        if predicted is None:
            raise TypeError(
                "predict needs predictions, but compute_loss only returns a loss: it is a function of your own, "
                f"{compute_loss!r}. Pass compute=, a function (model, batch) -> predictions."
            )

        def predictions(model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"predictions": predicted(model, batch)}

        super().__init__(loader, name="predict", compute=predictions, limit=limit)
        self.everywhere = everywhere
        self.file: Any = None
        """What opens the file to write; None without one."""
        if to is not None:
            self.file = imported("cadenza.trackers.prediction_file", needed_by="predict(to=...)").PredictionFile(to)


def predict(session: Session, evaluation: Evaluation) -> Any:
    """Return the predictions for every batch, on the host; or write them to the file of a `Prediction`, and return its path.

    Tensors that differ in the first dimension only are joined along it; mappings of such tensors by key; anything else comes
    as a list with an entry a batch. Every rank must call this; the main process gets them.
    """
    evaluation.complete, evaluation.batch = False, 0
    with ExitStack() as files:
        parts = _destination(session, evaluation, files)
        with undisturbed(session), session.hooks.ending(Callback.on_eval_end, session.run, evaluation):
            session.hooks.on_eval_start(session.run, evaluation)
            evaluation.check_order(session.driver.data_world_size)
            each_batch(session, evaluation, parts.add)
            result = parts.result()
            evaluation.complete = True
        return result


def _destination(session: Session, evaluation: Evaluation, files: ExitStack) -> Any:
    """Return what takes the predictions for a batch, and returns all of them, or the path. Every rank must call this."""
    if (file := getattr(evaluation, "file", None)) is not None:
        return file.opened(session, files)
    return _InMemory(session.driver, everywhere=getattr(evaluation, "everywhere", False))


class _InMemory:
    def __init__(self, driver: Driver, *, everywhere: bool) -> None:
        self._driver, self._everywhere, self._parts = driver, everywhere, list[Any]()

    def add(self, batch: Any, outputs: Outputs) -> None:
        self._parts.append(on_host(outputs["predictions"]))

    def result(self) -> Any:
        driver, parts = self._driver, self._parts
        arriving = driver.in_turns(iter(parts), len(parts))
        result = by_main_from_all(driver.meeting, arriving, lambda arriving: joined([*arriving]), _failed_on_main)
        return driver.broadcast(result) if self._everywhere else result


def _failed_on_main(rank: int, problem: str) -> DistributedError:
    return DistributedError(f"the main process could not join the predictions: {problem}")
