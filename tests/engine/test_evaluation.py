"""Evaluation: right numbers, nothing of the training is disturbed, and what it leaves behind can be trained with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError

from cadenza import Callback, Evaluation, Run, on, supervised
from cadenza.callbacks import Evaluate
from cadenza.engine import evaluation as evaluating
from cadenza.engine import prediction as predicting
from cadenza.engine.session import Session, session_of
from cadenza.errors import DataError, LossError
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.engine.parts import unequal

MSE = supervised(nn.functional.mse_loss)


# -- numbers ------------------------------------------------------------------------------------------


def test_results_equal_those_of_an_evaluation_written_by_hand_each_time_anew() -> None:
    loader, model, metrics = unequal(4, 4, 1), tiny_model(), {"mse": MeanSquaredError()}
    results = tiny_trainer(model=model, compute_loss=MSE).evaluate(loader, metrics=metrics)
    with torch.no_grad():
        inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
        by_hand = nn.functional.mse_loss(model(inputs), targets).item()
    assert results == {"eval/loss": pytest.approx(by_hand), "eval/mse": pytest.approx(by_hand)}
    run = tiny_run(compute_loss=MSE, epochs=2, callbacks=[Evaluate(tiny_loader(2), metrics=metrics)])
    losses = [value for _, value in run.history["eval/loss"]]
    assert [value for _, value in run.history["eval/mse"]] == pytest.approx(losses)


def test_logits_and_labels_serve_as_predictions_and_targets() -> None:
    class Wordy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = tiny_model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": self.linear(x).mean(), "logits": labels + 1}

    loader = [{"x": torch.ones(2, 1), "labels": torch.zeros(2, 1)}]
    trainer = tiny_trainer(model=Wordy(), compute_loss=None, loader=loader)
    assert trainer.evaluate(loader, metrics={"mse": MeanSquaredError()})["eval/mse"] == 1.0


@dataclass(slots=True)
class Slotted:
    loss: Tensor
    predictions: Tensor


@pytest.mark.parametrize("form", [Slotted, lambda **parts: SimpleNamespace(**parts), dict])
def test_whatever_trains_can_be_evaluated(form: Any) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Any:
        predictions = model(batch[0])
        return form(loss=nn.functional.mse_loss(predictions, batch[1]), predictions=predictions)

    trainer = tiny_trainer(compute_loss=compute_loss)
    trainer.fit()
    assert trainer.evaluate(tiny_loader(1)).keys() == {"eval/loss"}


# -- nothing is disturbed -----------------------------------------------------------------------------


def frozen_inside() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[1].eval()  # as people do who freeze a part
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


class RandomLoader:
    """A loader that draws random numbers of all kinds."""

    def __iter__(self) -> Any:
        for inputs, targets in tiny_loader(2):
            random.random()  # no secret
            numpy.random.rand()  # the global generator is what is looked at
            yield inputs + torch.rand_like(inputs), targets


def streams() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]  # numpy types it as any of two forms


@pytest.mark.parametrize("fails", [False, True], ids=["complete", "after an error"])
def test_the_mode_of_every_module_and_the_random_streams_are_put_back(fails: bool) -> None:
    trainer = tiny_trainer(model=frozen_inside(), compute_loss=MSE)
    trainer.model.train()
    trainer.model[1].eval()  # type: ignore[index]  # the model is a Sequential
    before, state, inside = modes(trainer.model), streams(), list[list[bool]]()

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inside.append(modes(model))
        if fails:
            raise RuntimeError("broken")
        return {"loss": torch.zeros(())}

    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        trainer.evaluate(RandomLoader(), compute=compute)
    assert modes(trainer.model) == before
    assert streams() == state
    assert not any(inside[0])


def test_no_gradient_is_kept_and_none_is_dropped() -> None:
    required: list[bool] = []
    gradients: list[bool] = []

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        required.append(model(batch[0]).requires_grad)
        return {"loss": torch.zeros(())}

    @on(Callback.on_eval_end)
    def look(run: Run, evaluation: Evaluation) -> None:
        gradients.append(all(one.grad is not None for one in run.model.parameters()))

    evaluate = Evaluate(tiny_loader(1), compute=compute, every="1000 steps")
    midway = on(Callback.on_before_optimizer_step)(evaluate.evaluate)
    tiny_run(callbacks=[evaluate, midway, look], steps=1, epochs=1000)
    assert required == [False]
    assert gradients == [True]


def dropout_run(*callbacks: Callback) -> Tensor:
    model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) * (index + 1) / 8)
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 24).unsqueeze(1), torch.linspace(1, 3, 24).unsqueeze(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    run = tiny_run(model=model, loader=loader, compute_loss=MSE, epochs=3, seed=7, callbacks=callbacks)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def test_a_run_with_a_seed_can_be_repeated_bit_by_bit_however_often_it_evaluates() -> None:
    first = dropout_run()
    torch.rand(5)
    for every in ("1 step", "2 steps", "1 epoch", "0.5 epoch"):
        assert torch.equal(dropout_run(Evaluate(RandomLoader(), every=every, sanity_batches=1)), first), every
    assert torch.equal(first, dropout_run())


# -- Evaluate -----------------------------------------------------------------------------------------


def test_several_evaluations_each_have_their_loader_cadence_and_name_and_count_from_the_start() -> None:
    """A progress bar that opens in ``on_eval_start`` would show the batches of the last pass, and their speed."""
    counts: list[int] = []
    look = on(Callback.on_eval_start)(lambda run, evaluation: counts.append(evaluation.batch))
    callbacks = [Evaluate(tiny_loader(1), every="2 steps"), Evaluate(tiny_loader(2), every="1 epoch", name="test"), look]
    run = tiny_run(callbacks=callbacks, epochs=2, batches=4)
    assert [step for step, _ in run.history["eval/loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in run.history["test/loss"]] == [4, 8]
    assert counts == [0] * 6
    assert run.evaluations["test"].batch == 2


def test_a_limit_takes_no_batch_more() -> None:
    taken: list[int] = []

    def reading() -> Iterator[Any]:
        for number, batch in enumerate(tiny_loader(5)):
            taken.append(number)
            yield batch

    tiny_trainer().evaluate(reading(), limit=2)
    assert taken == [0, 1]


def test_a_trial_comes_before_the_first_epoch_and_its_results_count_nowhere() -> None:
    recorder = Recorder()
    results: list[Mapping[str, float]] = []
    look = on(Callback.on_sanity_end)(lambda run, evaluation: results.append(evaluation.results))
    evaluate = Evaluate(tiny_loader(5), sanity_batches=2, every="1000 steps")
    run = tiny_run(callbacks=[recorder, evaluate, look], steps=1, epochs=1000)
    assert recorder.names[:5] == ["on_setup", "on_fit_start", "on_sanity_start", "on_sanity_end", "on_epoch_start"]
    assert not {name for name in recorder.names if "eval" in name}
    assert list(results[0]) == ["eval/loss"]
    assert run.history.names == []
    assert evaluate.evaluation.results == {}


def test_when_better_evaluates_only_after_a_gain_elsewhere_and_is_kept_over_a_save_and_a_load() -> None:
    losses = iter([3.0, 2.0, 2.5, 1.0])
    watched = Evaluate(tiny_loader(1), compute=lambda model, batch: {"loss": torch.tensor(next(losses))})
    after = Evaluate(tiny_loader(1), name="test", when_better=("eval/loss", "min"))
    run = tiny_run(callbacks=[watched, after], epochs=4, batches=1)
    assert [step for step, _ in run.history["test/loss"]] == [1, 2, 4]
    after.load_state_dict({"better": True, "best": 1.5})
    assert after.state_dict() == {"better": True, "best": 1.5}


BATCH = tiny_loader(1)
PAIR = r'when_better must be a pair such as \("eval/acc", "max"\); got'
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Evaluate(BATCH, when_better=cast("Any", "eval/acc")), TypeError, PAIR),
    (lambda: Evaluate(BATCH, when_better=cast("Any", ("eval/acc",))), TypeError, PAIR),
    (lambda: Evaluate(BATCH, when_better=cast("Any", 3)), TypeError, PAIR),
    (lambda: Evaluate(BATCH, limit=0), ValueError, "limit must be at least 1 batch, or None for all; got 0"),
    (lambda: Evaluate(BATCH, sanity_batches=-1), ValueError, "sanity_batches must be a whole number of at least 0; got -1"),
    (
        lambda: tiny_run(callbacks=[Evaluate(BATCH), Evaluate(BATCH)]),
        ValueError,
        r"two evaluations have the name 'eval'.*Give another Evaluate\(name=\.\.\.\)",
    ),
    (
        lambda: tiny_trainer().evaluate(BATCH, metrics={"m": MeanMetric()}),
        DataError,
        r"the metrics of 'eval' need 'predictions' and 'targets' from compute; it returned \['loss'\]",
    ),
    (lambda: tiny_trainer().evaluate([]), DataError, r"the loader of 'eval' gave no batch\. Give one that has at least one"),
    (
        lambda: tiny_trainer(compute_loss=lambda model, batch: model(batch[0])).evaluate(BATCH),
        LossError,
        r"the loss of 'eval' must have shape \(\); got \(2, 1\)",
    ),
]


@pytest.mark.parametrize(("evaluate", "error", "message"), WRONG)
def test_what_cannot_be_evaluated_is_an_error(evaluate: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate()


@pytest.mark.parametrize("do", [evaluating.evaluate, predicting.predict])
def test_an_evaluation_knows_at_its_end_whether_it_is_complete(do: Callable[[Session, Evaluation], Any]) -> None:
    def broken() -> Any:
        yield from tiny_loader(1)
        raise OSError("the disk is gone")

    seen: list[tuple[bool, bool]] = []
    look = on(Callback.on_eval_end)(lambda run, one: seen.append((one.complete, bool(one.results))))
    evaluation = Evaluation(tiny_loader(1), compute=lambda model, batch: {"predictions": batch[0], "loss": 1.0})
    run = tiny_run(callbacks=[look])
    do(session_of(run), evaluation)
    evaluation.loader = broken()
    with pytest.raises(OSError, match="the disk is gone"):
        do(session_of(run), evaluation)
    assert seen == [(True, do is evaluating.evaluate), (False, False)]


def test_what_an_evaluation_computes_may_be_kept_and_trained_with_and_inference_mode_is_there_for_who_asks_for_it() -> None:
    kept: list[Tensor] = []

    def compute(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        kept.append(model(batch[0]))
        return {"loss": nn.functional.mse_loss(kept[-1], batch[1])}

    trainer = tiny_trainer(callbacks=[Evaluate(tiny_loader(2), compute=compute, sanity_batches=1)])
    trainer.fit()
    assert [one.is_inference() for one in kept] == [False] * 3, "in the sanity evaluation, too"
    distilled = tiny_run(compute_loss=MSE, loader=list(zip((x for x, _ in tiny_loader(2)), kept[1:], strict=True)))
    assert distilled.progress.step == 2
    plain = trainer.evaluate(tiny_loader(2), compute=compute)
    assert plain == trainer.evaluate(tiny_loader(2), compute=torch.inference_mode()(compute))
    assert [one.is_inference() for one in kept[3:]] == [False] * 2 + [True] * 2
