"""Evaluation and prediction, without gradient. The state of the training does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from cadenza.engine.error_context import explained
from cadenza.engine.evaluation_batches import NONE, batches_of, check_some
from cadenza.engine.outputs import count_in, joined, on_host
from cadenza.engine.session import Session
from cadenza.errors import DataError, LossError, nearest
from cadenza.hooks.fan_out import Left
from cadenza.hooks.moments import Callback
from cadenza.loading.batches import moved
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.metrics import reduces_itself, share_states, updated_together
from cadenza.loading.rng import preserve_rng_state
from cadenza.records.scalars import as_numbers, weighted_sum, widened
from cadenza.status.counting import counted
from cadenza.status.outputs import Outputs, parts_of


def evaluate(session: Session, evaluation: Evaluation) -> dict[str, float]:
    """Evaluate the model; return the results, which are also in ``evaluation.results``.

    Model mode and RNG state are restored. Every rank must call this.

    Raises:
        DataError: The loader gave no batch, or the metrics find no predictions and targets in the result of `compute`.
    """
    evaluation.results, evaluation.complete = {}, False
    with undisturbed(session), session.hooks.ending(Callback.on_eval_end, session.run, evaluation):
        session.hooks.on_eval_start(session.run, evaluation)
        tally = _Tally(session, evaluation)
        _each(session, evaluation, tally.add)
        evaluation.results = tally.results()
        record_evaluated(session, evaluation)
        evaluation.complete = True
    return evaluation.results


def record_evaluated(session: Session, evaluation: Evaluation, *, who: str | None = None) -> None:
    """Record that an evaluation is complete, with its results. Equal runs record the same, so no time is part of it."""
    data = {"evaluation": evaluation.name, "batches": evaluation.batch, "results": dict(evaluation.results)}
    session.decide("evaluated", f"{evaluation.name}: {counted(evaluation.batch, 'batch')}", who=who, data=data)


def rehearse(session: Session, evaluation: Evaluation, batches: int) -> None:
    """Try an evaluation on a few batches: an error in it shows now, and not after an hour of training."""
    trial = evaluation.trial(batches * session.driver.world_size)
    with undisturbed(session), session.hooks.ending(Callback.on_sanity_end, session.run, trial):
        session.hooks.on_sanity_start(session.run, trial)
        tally, computed = _Tally(session, trial), _computing(session, trial)
        for batch, own in batches_of(session, trial):
            outputs = computed(batch)
            if own:
                tally.add(batch, outputs)
                trial.batch += 1
        check_some(trial)
        trial.results = tally.results()


def predict(session: Session, evaluation: Evaluation) -> Any:
    """Return the predictions for every batch, on the host.

    Tensors that differ in the first dimension only are joined along it; mappings of such tensors by key; anything else comes
    as a list with an entry a batch. Every rank must call this.
    """
    parts: list[Any] = []
    evaluation.complete = False
    with undisturbed(session), session.hooks.ending(Callback.on_eval_end, session.run, evaluation):
        session.hooks.on_eval_start(session.run, evaluation)
        _each(session, evaluation, lambda batch, outputs: parts.append(on_host(outputs["predictions"])))
        evaluation.complete = True
    if evaluation.ranks > 1:  # each rank did every so many-th batch
        turns = zip_longest(*session.driver.gather(parts), fillvalue=NONE)
        parts = [part for turn in turns for part in turn if part is not NONE]
    return joined(parts)


T = TypeVar("T")


def alone(act: Callable[[Session, Evaluation], T], session: Session, evaluation: Evaluation) -> T:
    """Return what `evaluate` or `predict` does, where no fit is under way; of the errors of all ranks the first is shown."""
    try:
        return act(session, evaluation)
    except Left:
        raise  # inside a fit, which takes it
    except BaseException as raised:
        error = session.driver.first_error(raised)
        if error is raised:
            raise
        raise error from raised


@contextmanager
def undisturbed(session: Session) -> Iterator[None]:
    """Evaluation mode without gradient; then every module's mode and every random stream as before."""
    modes = [(module, module.training) for module in session.model.modules()]
    # Not inference_mode: what a module keeps of its first forward pass could not be trained with. See docs/decisions/0018.
    with explained(session), preserve_rng_state(), torch.no_grad():
        session.model.eval()
        try:
            yield
        finally:
            session.driver.settle(session.model)
            for module, training in modes:
                if module.training is not training:
                    module.training = training


def _each(session: Session, evaluation: Evaluation, act: Callable[[Any, Outputs], object]) -> None:
    """Hand each batch and its outputs to `act`, with the moments around the computation.

    Not a generator: in one, a StopIteration that a hook raises would become another error.
    """
    hooks, computed, none = session.hooks, _computing(session, evaluation), Outputs()
    evaluation.batch = 0
    for batch, own in batches_of(session, evaluation):
        if not own:
            computed(batch)
            continue
        outputs = none
        try:
            hooks.on_eval_batch_start(session.run, evaluation, batch)
            outputs = computed(batch)
            evaluation.batch += 1
        except BaseException as error:
            hooks.end(error, Callback.on_eval_batch_end, session.run, evaluation, batch, outputs)
            raise
        hooks.on_eval_batch_end(session.run, evaluation, batch, outputs)
        act(batch, outputs)
    check_some(evaluation)


def _computing(session: Session, evaluation: Evaluation) -> Callable[[Any], Outputs]:
    """Return the function from a batch to its outputs."""
    own = evaluation.compute is not None
    compute = session.compute if evaluation.compute is None else session.precision.wrap(evaluation.compute)
    # Not the wrapper of a driver: it would talk to the other ranks, which may have one batch less.
    model = session.module

    def computed(batch: Any) -> Outputs:
        result = compute(model, batch)
        if type(result) is dict:
            return Outputs(result)
        if isinstance(result, Tensor) and not own:
            return Outputs(loss=result)
        # As in training; what has no name and no loss is a prediction.
        named = isinstance(result, Mapping) or hasattr(result, "loss")
        return Outputs(parts_of(result)) if named else Outputs(predictions=result)

    return computed


class _Tally:
    """Adds up losses and metrics; numbers leave the device once, at the end."""

    def __init__(self, session: Session, evaluation: Evaluation) -> None:
        self._session, self._evaluation = session, evaluation
        self._losses: list[Tensor] = []
        self._sizes: list[Any] = []
        self._judged: list[tuple[Any, Any]] = []
        self._metrics = updated_together(evaluation.given_metrics)
        for metric in self._metrics:
            if hasattr(metric, "to"):
                metric.to(session.device)
            metric.reset()
        alone = session.driver.world_size == 1
        self._updates = [metric.update for metric in self._metrics if alone or reduces_itself(metric)]
        self._gathers = len(self._updates) < len(self._metrics)
        """Whether a metric must see what all ranks predicted, as it cannot be added up over ranks."""

    def add(self, batch: Any, outputs: Outputs) -> None:
        loss = dict.get(outputs, "loss")
        if loss is not None:
            if type(loss) is not Tensor:
                loss = torch.as_tensor(loss)
            if loss.ndim:
                raise LossError(f"the loss of {self._evaluation.name!r} must have shape (); got {tuple(loss.shape)}: reduce it")
            self._losses.append(loss.detach())
            weight = dict.get(outputs, "weight")
            if weight is None and (weight := count_in(outputs, "samples")) is None:
                weight = self._evaluation.size_of(batch)
            self._sizes.append(weight)
        if self._evaluation.metrics:
            predictions, targets = dict.get(outputs, "predictions"), dict.get(outputs, "targets")
            if predictions is None or targets is None:
                predictions, targets = _judged(self._evaluation, batch, outputs)
            for update in self._updates:
                update(predictions, targets)
            if self._gathers:
                self._judged.append((on_host(predictions), on_host(targets)))

    def results(self) -> dict[str, float]:
        """Return the mean loss over samples and each metric, reduced over ranks. Every rank must call this."""
        name, reduce, results = self._evaluation.name, self._session.driver.reduce, {}
        if self._losses:
            together = torch.stack(self._losses)
            if together.is_complex():
                raise LossError(f"the loss of {name!r} is complex: expected a real number of shape (); return loss.abs(), say")
            losses = widened(together)
            sizes = as_numbers(losses, self._sizes)
            total, count = reduce(torch.stack([weighted_sum(losses, sizes), sizes.sum()]), "sum").tolist()
            if not count:
                raise DataError(_weighs_nothing(name))
            results[f"{name}/loss"] = total / count
        if self._gathers:
            self._update_with_all_ranks()
        share_states(self._metrics)
        for key, metric in self._evaluation.metrics.items():
            results |= _numbers(f"{name}/{key}", metric.compute())
        for metric in self._metrics:
            metric.reset()
        return results

    def _update_with_all_ranks(self) -> None:
        for turn in zip_longest(*self._session.driver.gather(self._judged)):  # the order of one process
            for predictions, targets in filter(None, turn):
                for metric in self._metrics:
                    if not reduces_itself(metric):
                        metric.update(moved(predictions, self._session.device), moved(targets, self._session.device))


def _weighs_nothing(name: str) -> str:
    return (
        f"{name!r} has no mean loss: its batches have a total weight of 0. Expected at least one batch with samples or, where "
        "compute reports outputs['weight'], with a weight above 0. Give a loader with such a batch, or raise limit=."
    )


def predictions_in(outputs: Mapping[str, Any]) -> Any:
    """Return what the model predicted, by our name or by that of Hugging Face models; None if it is not there."""
    return outputs["predictions"] if "predictions" in outputs else outputs.get("logits")


def targets_in(batch: Any, outputs: Mapping[str, Any]) -> Any:
    """Return what should have been predicted, by our name or by that of Hugging Face's batches; None if it is not there."""
    if "targets" in outputs:
        return outputs["targets"]
    return batch.get("labels") if isinstance(batch, Mapping) else None


def _judged(evaluation: Evaluation, batch: Any, outputs: Outputs) -> tuple[Any, Any]:
    predictions, targets = predictions_in(outputs), targets_in(batch, outputs)
    if predictions is None or targets is None:
        raise DataError(
            f"the metrics of {evaluation.name!r} need 'predictions' and 'targets' from compute; it returned {list(outputs)}."
            f"{nearest('predictions', outputs)} Give Evaluate(compute=...) that returns a mapping with both, or train with "
            "supervised(loss_fn)."
        )
    return predictions, targets


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Return what a metric computed as plain numbers: one, or one for each entry."""
    if isinstance(value, Mapping):
        return {key: number for part, one in value.items() for key, number in _numbers(f"{name}/{part}", one).items()}
    if isinstance(value, Tensor) and value.ndim:
        return {f"{name}/{index}": number for index, number in enumerate(value.flatten().tolist())}
    return {name: float(value)}
