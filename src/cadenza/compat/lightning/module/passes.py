"""One pass of ``validation_step``, ``test_step`` or ``predict_step`` over its loaders, with the hooks in Lightning's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

from cadenza.compat.lightning.module.module_evaluation import ModuleEvaluation
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.compat.lightning.trainer_view import STEP_OUTPUT
from cadenza.engine.evaluation import NONE, batches_of, record_evaluated, undisturbed
from cadenza.engine.objective import on_host
from cadenza.engine.session import Session
from cadenza.hooks.moments import Callback
from cadenza.status.outputs import Outputs


def evaluate(session: Session, evaluation: ModuleEvaluation) -> list[dict[str, float]]:
    """Evaluate; return for each loader the values that were logged with ``logger=True``. Every rank must call this.

    ``evaluation.results`` has all values of ``callback_metrics``.
    """
    run = session.run
    evaluation.results, evaluation.complete, evaluation.batch, evaluation.ended = {}, False, 0, False
    with (
        _modes(session, evaluation),
        evaluation.log.evaluating(silent=evaluation.stage == "predict"),
        session.hooks.ending(Callback.on_eval_end, run, evaluation),
    ):
        session.hooks.on_eval_start(run, evaluation)
        _each_batch(session, evaluation, moments=True)
        moment = getattr(LightningMoments, f"on_{evaluation.hook}_epoch_end")
        _end_epoch(evaluation, lambda: session.hooks.fire(moment, run))
        evaluation.ended = True
        if evaluation.stage == "validate":
            record_evaluated(session, evaluation)
        evaluation.complete = True
    return evaluation.outputs


def predict(session: Session, evaluation: ModuleEvaluation) -> list[Any]:
    """Return the result of ``predict_step`` for each batch in loader order; with multiple loaders, a list for each.

    Every rank must call this.
    """
    evaluate(session, evaluation)
    driver, own = session.driver, evaluation.predictions
    everyone = [own] if driver.world_size == 1 else driver.gather_data(own)
    parts = list[list[Any]]()
    names: list[str | None] = [*evaluation.sources] or [None]
    for index, name in enumerate(names):
        first = evaluation.first_ranks.get(name, 0)
        turns = zip_longest(*(rank[index] for rank in [*everyone[first:], *everyone[:first]]), fillvalue=NONE)
        parts.append([output for turn in turns for output in turn if output is not NONE])
    return parts if evaluation.several else parts[0]


def rehearse(session: Session, evaluation: ModuleEvaluation, batches: int) -> None:
    """Run a sanity check on a few batches. The module's hooks are called, and the results are discarded."""
    trial = evaluation.trial(batches * session.driver.data_world_size)
    attached = evaluation.attached
    with (
        _modes(session, trial),
        evaluation.log.evaluating(trial=True),
        session.hooks.ending(Callback.on_sanity_end, session.run, trial),
    ):
        session.hooks.on_sanity_start(session.run, trial)
        attached.call("on_validation_start")
        attached.call("on_validation_epoch_start")
        _each_batch(session, trial, moments=False)
        _end_epoch(trial, lambda: attached.call("on_validation_epoch_end"))
        attached.call("on_validation_end")


@contextmanager
def _modes(session: Session, evaluation: ModuleEvaluation) -> Iterator[None]:
    """Evaluation mode without gradients; replaced by the module's hooks that set modes."""
    attached, module = evaluation.attached, session.module
    before = [(submodule, submodule.training) for submodule in module.modules()]
    if evaluation.stage == "validate" and attached.overrides("on_validation_model_zero_grad"):
        attached.call("on_validation_model_zero_grad")
    with undisturbed(session):
        if attached.overrides(f"on_{evaluation.hook}_model_eval"):
            for submodule, training in before:
                submodule.training = training
            attached.call(f"on_{evaluation.hook}_model_eval")
        yield
    if attached.overrides(f"on_{evaluation.hook}_model_train"):
        attached.call(f"on_{evaluation.hook}_model_train")


def _each_batch(session: Session, evaluation: ModuleEvaluation, *, moments: bool) -> None:
    """Call the step with each batch, and end the pass of each loader."""
    names = list(evaluation.sources)
    step = session.precision.wrap(evaluation.step(session.model if session.driver.in_step else None))
    evaluation.outputs, evaluation.predictions = [], [[] for _ in names or [""]]
    evaluation.loader_index = evaluation.batch_index = 0
    for batch, own in batches_of(session, evaluation):
        index = names.index(evaluation.source) if evaluation.source in names else 0
        if index != evaluation.loader_index:
            _end_loader(evaluation)
            evaluation.loader_index, evaluation.batch_index = index, 0
        if own:
            _one_batch(session, evaluation, step, batch, moments=moments)
        else:  # its forward pass only serves the other ranks
            with evaluation.log.muted():
                step(batch)
    _end_loader(evaluation)


def _one_batch(
    session: Session, evaluation: ModuleEvaluation, step: Callable[[Any], Any], batch: Any, *, moments: bool
) -> None:
    attached, hooks, run, hook = evaluation.attached, session.hooks, session.run, evaluation.hook
    indices = [evaluation.batch_index, evaluation.loader_index][: 1 + evaluation.several]
    evaluation.log.begin_batch(batch, evaluation.loader_index if evaluation.several else None)
    outputs = Outputs()
    try:
        if moments:
            hooks.on_eval_batch_start(run, evaluation, batch)
        attached.call(f"on_{hook}_batch_start", batch, *indices)
        with evaluation.first_batch or nullcontext():
            result = step(batch)
        outputs = Outputs({STEP_OUTPUT: result})
        evaluation.batch += 1
    except BaseException as error:
        if moments:
            hooks.end(error, Callback.on_eval_batch_end, run, evaluation, batch, outputs)
        raise
    if moments:
        hooks.on_eval_batch_end(run, evaluation, batch, outputs)
    attached.call(f"on_{hook}_batch_end", result, batch, *indices)
    if evaluation.stage == "predict":
        evaluation.predictions[evaluation.loader_index].append(on_host(result))
    evaluation.log.end_batch()
    evaluation.batch_index += 1


def _end_loader(evaluation: ModuleEvaluation) -> None:
    """Add the values of a loader to the outputs and results. Every rank must call this."""
    log = evaluation.log
    evaluation.outputs.append(log.end_loader())
    evaluation.results |= log.results()


def _end_epoch(evaluation: ModuleEvaluation, end: Callable[[], object]) -> None:
    """Call the hook at the end of the pass, and add what it logged. Every rank must call this."""
    log = evaluation.log
    log.values.dataloader_idx = None
    end()
    more = log.end_epoch()
    evaluation.results |= log.results()
    for values in evaluation.outputs:
        values.update(more)
