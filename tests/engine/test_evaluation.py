"""Evaluation and prediction: right numbers, and nothing of the training is disturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

from cadenza import Callback, Evaluation, Run, on, supervised
from cadenza.callbacks import Evaluate
from cadenza.engine import evaluation as evaluating
from cadenza.engine import prediction as predicting
from cadenza.engine.session import Session, session_of
from cadenza.errors import DataError, LossError
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer

MSE = supervised(nn.functional.mse_loss)


def unequal(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    inputs = torch.linspace(-1, 1, sum(sizes)).unsqueeze(1)
    return list(zip(inputs.split(list(sizes)), (2 * inputs + 1).split(list(sizes)), strict=True))


# -- numbers ------------------------------------------------------------------------------------------


def test_results_equal_those_of_an_evaluation_written_by_hand() -> None:
    loader, model = unequal(4, 4, 1), tiny_model()
    results = tiny_trainer(model=model, compute_loss=MSE).evaluate(loader, metrics={"mse": MeanSquaredError()})
    with torch.no_grad():
        inputs, targets = (torch.cat(parts) for parts in zip(*loader, strict=True))
        by_hand = nn.functional.mse_loss(model(inputs), targets).item()
    assert results == {"eval/loss": pytest.approx(by_hand), "eval/mse": pytest.approx(by_hand)}


def test_the_mean_loss_is_weighted_by_what_the_batches_report() -> None:
    values = iter([(1.0, 3.0), (5.0, 1.0)])

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        loss, weight = next(values)
        return {"loss": torch.tensor(loss), "weight": weight}

    assert tiny_trainer().evaluate(tiny_loader(2), compute=compute) == {"eval/loss": 2.0}


def test_metrics_that_give_several_numbers_report_each() -> None:
    class Several:
        def update(self, predictions: Tensor, targets: Tensor) -> None: ...
        def reset(self) -> None: ...
        def compute(self) -> Tensor:
            return torch.tensor([0.25, 0.5])

    metrics = {"each": Several(), "both": MetricCollection({"a": MeanSquaredError(), "b": MeanSquaredError(squared=False)})}
    results = tiny_trainer(compute_loss=MSE).evaluate(tiny_loader(1), metrics=metrics)
    assert set(results) == {"eval/loss", "eval/each/0", "eval/each/1", "eval/both/a", "eval/both/b"}
    assert results["eval/each/1"] == 0.5


def test_metrics_start_anew_each_time() -> None:
    metric = MeanSquaredError()
    run = tiny_run(compute_loss=MSE, epochs=2, callbacks=[Evaluate(tiny_loader(2), metrics={"mse": metric})])
    losses = [value for _, value in run.history["eval/loss"]]
    assert [value for _, value in run.history["eval/mse"]] == pytest.approx(losses)


def test_a_function_of_its_own_may_return_the_loss_alone() -> None:
    judge = Evaluate(tiny_loader(), compute=lambda model, batch: model(batch[0]).mean() * 0 + 2)
    assert tiny_run(callbacks=[judge], epochs=1).history.latest["eval/loss"] == 2


def test_compute_of_its_own_replaces_that_of_the_training() -> None:
    results = tiny_trainer().evaluate(
        tiny_loader(2),
        compute=lambda model, batch: {"predictions": torch.ones(2), "targets": torch.zeros(2)},
        metrics={"mse": MeanSquaredError()},
    )
    assert results == {"eval/mse": 1.0}


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


def test_a_loss_that_is_not_scalar_is_an_error_and_no_wrong_number() -> None:
    trainer = tiny_trainer(compute_loss=lambda model, batch: model(batch[0]))
    with pytest.raises(LossError, match=r"the loss of 'eval' must have shape \(\); got \(2, 1\)"):
        trainer.evaluate(tiny_loader(1))


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


def test_the_mode_of_every_module_is_put_back_as_it_was() -> None:
    trainer = tiny_trainer(model=frozen_inside(), compute_loss=MSE)
    trainer.model.train()
    trainer.model[1].eval()  # type: ignore[index]  # the model is a Sequential
    before, inside = modes(trainer.model), list[list[bool]]()

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inside.append(modes(model))
        return {"loss": torch.zeros(())}

    trainer.evaluate(tiny_loader(1), compute=compute)
    assert modes(trainer.model) == before
    assert not any(inside[0])


def test_random_streams_are_put_back_as_they_were() -> None:
    trainer = tiny_trainer(compute_loss=MSE)
    before = streams()
    trainer.evaluate(RandomLoader())
    assert streams() == before


def test_both_are_put_back_after_an_error_too() -> None:
    trainer = tiny_trainer(model=frozen_inside(), compute_loss=MSE)
    before, state = modes(trainer.model), streams()

    def fail(model: nn.Module, batch: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trainer.evaluate(RandomLoader(), compute=fail)
    assert modes(trainer.model) == before
    assert streams() == state


def test_no_gradient_is_kept_and_none_is_dropped() -> None:
    required: list[bool] = []

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        required.append(model(batch[0]).requires_grad)
        return {"loss": torch.zeros(())}

    gradients: list[bool] = []

    @on(Callback.on_eval_end)
    def look(run: Run, evaluation: Evaluation) -> None:
        gradients.append(all(one.grad is not None for one in run.model.parameters()))

    class Midway(Callback):
        def on_before_optimizer_step(self, run: Run) -> None:
            evaluate.evaluate(run)

    evaluate = Evaluate(tiny_loader(1), compute=compute, every="1000 steps")
    tiny_run(callbacks=[evaluate, Midway(), look], steps=1, epochs=1000)
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


def test_a_run_with_a_seed_can_be_repeated_bit_by_bit() -> None:
    first = dropout_run()
    torch.rand(5)
    assert torch.equal(first, dropout_run())


@pytest.mark.parametrize("every", ["1 step", "2 steps", "1 epoch", "0.5 epoch"])
def test_how_often_one_evaluates_changes_no_bit_of_the_training(every: str) -> None:
    often = dropout_run(Evaluate(RandomLoader(), every=every, sanity_batches=1))
    assert torch.equal(often, dropout_run())


# -- Evaluate -----------------------------------------------------------------------------------------


def test_several_evaluations_each_have_their_loader_cadence_and_name() -> None:
    callbacks = [Evaluate(tiny_loader(1), every="2 steps"), Evaluate(tiny_loader(2), every="1 epoch", name="test")]
    run = tiny_run(callbacks=callbacks, epochs=2, batches=4)
    assert [step for step, _ in run.history["eval/loss"]] == [2, 4, 6, 8]
    assert [step for step, _ in run.history["test/loss"]] == [4, 8]


def test_two_evaluations_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"two evaluations have the name 'eval'.*Give another Evaluate\(name=\.\.\.\)"):
        tiny_run(callbacks=[Evaluate(tiny_loader(1)), Evaluate(tiny_loader(1))])


def test_a_limit_takes_no_batch_more() -> None:
    taken: list[int] = []

    class Counting:
        def __iter__(self) -> Any:
            for number, batch in enumerate(tiny_loader(5)):
                taken.append(number)
                yield batch

    tiny_run(callbacks=[Evaluate(Counting(), limit=2)])
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


def test_when_better_evaluates_only_after_a_gain_elsewhere() -> None:
    losses = iter([3.0, 2.0, 2.5, 1.0])
    watched = Evaluate(tiny_loader(1), compute=lambda model, batch: {"loss": torch.tensor(next(losses))})
    after = Evaluate(tiny_loader(1), name="test", when_better=("eval/loss", "min"))
    run = tiny_run(callbacks=[watched, after], epochs=4, batches=1)
    assert [step for step, _ in run.history["test/loss"]] == [1, 2, 4]


def test_what_when_better_knew_is_kept_over_a_save_and_a_load() -> None:
    evaluate = Evaluate(tiny_loader(1), name="test", when_better=("eval/loss", "min"))
    evaluate.load_state_dict({"better": True, "best": 1.5})
    assert evaluate.state_dict() == {"better": True, "best": 1.5}


@pytest.mark.parametrize("wrong", ["eval/acc", ("eval/acc",), 3])
def test_a_when_better_that_is_no_pair_is_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r'when_better must be a pair such as \("eval/acc", "max"\); got'):
        Evaluate(tiny_loader(1), when_better=wrong)


def test_wrong_numbers_are_errors() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1 batch, or None for all; got 0"):
        Evaluate(tiny_loader(1), limit=0)
    with pytest.raises(ValueError, match="sanity_batches must be a whole number of at least 0; got -1"):
        Evaluate(tiny_loader(1), sanity_batches=-1)
    with pytest.raises(TypeError, match=r"metrics\['acc'\] must have update, compute and reset, as torchmetrics have; got"):
        Evaluate(tiny_loader(1), metrics={"acc": lambda predictions, targets: 1.0})


def test_metrics_without_predictions_are_an_error_that_says_what_there_is() -> None:
    with pytest.raises(
        DataError, match=r"the metrics of 'eval' need 'predictions' and 'targets' from compute; it returned \['loss'\]"
    ):
        tiny_trainer().evaluate(tiny_loader(1), metrics={"m": MeanMetric()})


def test_an_evaluation_of_an_empty_loader_is_an_error() -> None:
    with pytest.raises(DataError, match=r"the loader of 'eval' gave no batch\. Give one that has at least one"):
        tiny_trainer().evaluate([])


def test_an_error_in_an_evaluation_still_ends_it_with_no_results() -> None:
    ended: list[Mapping[str, float]] = []
    look = on(Callback.on_eval_end)(lambda run, evaluation: ended.append(evaluation.results))

    def fail(model: nn.Module, batch: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        tiny_run(callbacks=[Evaluate(tiny_loader(1), compute=fail), look])
    assert ended == [{}]


def test_an_evaluation_on_request_fires_only_its_own_moments() -> None:
    recorder = Recorder()
    tiny_trainer(callbacks=[recorder]).evaluate(tiny_loader(1))
    assert recorder.names == ["on_eval_start", "on_eval_batch_start", "on_eval_batch_end", "on_eval_end"]


def test_a_further_pass_counts_its_batches_from_the_start() -> None:
    """A progress bar that opens in ``on_eval_start`` would show the batches of the last pass, and their speed."""
    counts: list[int] = []
    look = on(Callback.on_eval_start)(lambda run, evaluation: counts.append(evaluation.batch))
    run = tiny_run(callbacks=[Evaluate(tiny_loader(3)), look], epochs=2)
    assert counts == [0, 0]
    assert run.evaluations["eval"].batch == 3


# -- predict ------------------------------------------------------------------------------------------


def test_predictions_are_joined_along_the_first_dimension() -> None:
    loader, model = unequal(4, 4, 1), tiny_model()
    predictions = tiny_trainer(model=model, compute_loss=MSE).predict(loader)
    with torch.no_grad():
        assert torch.equal(predictions, model(torch.cat([inputs for inputs, _ in loader])))


def test_predictions_in_mappings_are_joined_by_name() -> None:
    predictions = tiny_trainer().predict(
        tiny_loader(2, batch_size=3), compute=lambda model, batch: {"twice": batch[0] * 2, "note": "text"}
    )
    assert predictions["twice"].shape == (6, 1)
    assert predictions["note"] == ["text", "text"]


def test_predictions_of_unlike_shapes_come_as_a_list() -> None:
    predictions = tiny_trainer().predict(unequal(2, 3), compute=lambda model, batch: torch.zeros(1, len(batch[0])))
    assert [tuple(one.shape) for one in predictions] == [(1, 2), (1, 3)]


def test_inputs_alone_can_be_predicted() -> None:
    assert tiny_trainer(compute_loss=MSE).predict([torch.ones(3, 1)]).shape == (3, 1)


def test_predicting_with_a_loss_function_of_ones_own_needs_compute() -> None:
    with pytest.raises(TypeError, match=r"Pass compute=, a function \(model, batch\) -> predictions"):
        tiny_trainer(compute_loss=lambda model, batch: model(batch[0]).mean()).predict(tiny_loader(1))


@pytest.mark.parametrize("do", [evaluating.evaluate, predicting.predict])
def test_an_evaluation_knows_at_its_end_whether_it_is_complete(do: Callable[[Session, Evaluation], Any]) -> None:
    def broken() -> Any:
        yield from tiny_loader(1)
        raise OSError("the disk is gone")

    seen: list[bool] = []
    look = on(Callback.on_eval_end)(lambda run, evaluation: seen.append(evaluation.complete))
    evaluation = Evaluation(tiny_loader(1), compute=lambda model, batch: {"predictions": batch[0]})
    run = tiny_run(callbacks=[look])
    do(session_of(run), evaluation)
    evaluation.loader = broken()
    with pytest.raises(OSError, match="the disk is gone"):
        do(session_of(run), evaluation)
    assert seen == [True, False]
