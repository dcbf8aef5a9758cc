"""The trainer: what it refuses, and what it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cadenza import Callback, Evaluation, Run, SingleDriver, Trainer, on, supervised
from cadenza.callbacks import EarlyStopping, Evaluate, LogTraining
from cadenza.engine.session import session_of
from cadenza.errors import DataError, LossError, MonitorError, ScheduleError, StateError
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer


class Stream:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from tiny_loader(3)


# -- bad input: lengths -------------------------------------------------------------------------------


def trainer_with(**arguments: Any) -> Trainer:
    model = tiny_model()
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.1), tiny_loader(), lambda model, batch: 0, **arguments)


def test_a_run_without_a_limit_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"a run needs an end: expected max_epochs=, max_steps= or max_tokens=; got none of them"
    ):
        trainer_with()


@pytest.mark.parametrize("name", ["max_epochs", "max_steps", "accumulate"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_length_below_one_is_an_error(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be at least 1; got {value}"):
        trainer_with(**{"max_epochs": 1, name: value})


@pytest.mark.parametrize("name", ["max_epochs", "max_steps", "accumulate"])
@pytest.mark.parametrize("value", [1.5, "3", True])
def test_a_length_that_is_no_whole_number_is_an_error(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a whole number; got {value!r}"):
        trainer_with(**{"max_epochs": 1, name: value})


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"precision must be one of fp32, bf16, fp16; got 'half'"):
        tiny_trainer(precision="half")


def test_a_seed_that_is_no_whole_number_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"seed must be a whole number or None; got 1\.5"):
        tiny_trainer(seed=1.5)


# -- bad input: parts ---------------------------------------------------------------------------------


def test_an_optimizer_without_any_of_the_models_parameters_is_an_error() -> None:
    strange = torch.optim.SGD(tiny_model().parameters(), 0.1)
    message = r"SGD holds none of the model's parameters, so the model would not be trained\. Build"
    with pytest.raises(ValueError, match=message):
        tiny_trainer(optimizer=strange)
    with pytest.raises(ValueError, match=message):
        tiny_run(optimizer=lambda parameters: strange)


def test_no_optimizer_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected at least one optimizer; got an empty list"):
        tiny_trainer(optimizer=[])
    with pytest.raises(TypeError, match=r"optimizer must be an optimizer, .*; got 'adam'. Give one of torch, such as"):
        tiny_trainer(optimizer="adam")
    with pytest.raises(TypeError, match="expected torch optimizers; got 3"):
        tiny_run(optimizer=lambda parameters: 3)


def test_a_model_that_is_none_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module; got "):
        Trainer(cast("Any", print), cast("Any", None), tiny_loader(), max_steps=1)


def test_a_loss_module_instead_of_a_function_is_an_error_that_shows_supervised() -> None:
    with pytest.raises(TypeError, match=r"takes predictions and targets\. Wrap it: supervised\(CrossEntropyLoss\(\)\)"):
        tiny_trainer(compute_loss=nn.CrossEntropyLoss())


def test_the_class_of_a_loss_is_an_error_before_the_first_batch() -> None:
    for kind in (nn.MSELoss, supervised):
        with pytest.raises(TypeError, match=rf"got the class {kind.__name__}\. Make it; .*supervised\(CrossEntropyLoss\(\)\)"):
            tiny_trainer(compute_loss=kind)
    with pytest.raises(TypeError, match=r"got the class MSELoss\. Make it: MSELoss\(\)"):
        supervised(cast("Any", nn.MSELoss))


def test_a_loss_that_cannot_be_called_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"compute_loss must be a function \(model, batch\) -> loss, or None; got 'mse'"):
        tiny_trainer(compute_loss="mse")
    with pytest.raises(TypeError, match=r"step_fn must be a function \(run, batch\) -> loss; got 3"):
        tiny_trainer(step_fn=3)


def test_a_step_function_beside_a_loss_or_accumulation_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected compute_loss or step_fn; got both"):
        tiny_trainer(step_fn=lambda run, batch: None, compute_loss=lambda model, batch: None)
    with pytest.raises(ValueError, match=r"a step_fn does its own accumulation: expected accumulate=1; got 2"):
        tiny_trainer(step_fn=lambda run, batch: None, accumulate=2)


def test_a_device_that_is_not_there_is_an_error() -> None:
    absent = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(ValueError, match=rf"device '{absent}' does not exist; this machine has \['cpu'"):
        tiny_trainer(device=absent)


def test_one_process_of_several_that_does_not_know_its_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2, and RANK is not set: start all processes with torchrun"):
        tiny_trainer(driver="auto")


# -- bad input: loaders and batches -------------------------------------------------------------------


def test_a_loader_that_is_no_iterable_is_an_error() -> None:
    with pytest.raises(TypeError, match="loader must be an iterable of batches; got 3"):
        tiny_trainer(loader=cast("Any", 3))


def test_an_empty_loader_is_an_error_before_anything_happens() -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match=r"the training loader is empty: expected at least one batch; got a list of length 0"):
        tiny_run(loader=[], callbacks=[recorder])
    assert recorder.names == []


def test_an_empty_data_loader_tells_its_sizes() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=8, drop_last=True)
    with pytest.raises(DataError, match=r"3 samples, batch_size=8 and drop_last=True\. Lower the batch size"):
        tiny_run(loader=loader)


def test_a_loader_that_turns_out_to_be_empty_is_an_error() -> None:
    class Nothing:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(DataError, match=r"the training loader gave no batch in epoch 1\. Give one that has at least one batch"):
        tiny_run(loader=Nothing())


def test_a_loader_that_is_emptied_in_on_setup_is_an_error_too() -> None:
    def empty(run: Run) -> None:
        run.replace_loader([])

    with pytest.raises(DataError, match="gave no batch in epoch 1"):
        tiny_run(callbacks=[on(Callback.on_setup)(empty), LogTraining()])


def test_an_iterator_that_is_used_up_after_one_epoch_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match=r"no batch in epoch 2.*an iterator is used up after one pass, a loader is not"):
        tiny_run(loader=iter(tiny_loader()), epochs=2)


def test_the_plan_of_an_empty_loader_can_be_printed() -> None:
    assert "on_step_end" in str(tiny_trainer(loader=[], callbacks=[LogTraining()]).plan())


def test_fractions_of_an_epoch_of_unknown_length_are_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"LogTraining: 'every 0\.5 epoch' needs a loader that knows its length") as caught:
        tiny_run(loader=Stream(), callbacks=[LogTraining(every="0.5 epoch")])
    assert 'Use a schedule in "steps", "batches", "samples" or "min" instead' in str(caught.value)


def test_whole_epochs_of_unknown_length_are_fine() -> None:
    run = tiny_run(loader=Stream(), epochs=2, callbacks=[LogTraining(every="1 epoch")])
    assert [step for step, _ in run.history["train/loss"]] == [3, 6]


def test_a_data_loader_over_a_stream_has_no_length() -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from [(torch.ones(1), torch.ones(1))] * 4

    assert tiny_run(loader=DataLoader(Numbers(), batch_size=2)).progress.batch == 2


def test_a_batch_that_supervised_cannot_take_apart_is_an_error() -> None:
    with pytest.raises(
        DataError, match=r"supervised\(\.\.\.\) expects batches \(inputs, targets\); got a mapping with \['x'\]\."
    ):
        tiny_run(loader=[{"x": torch.ones(1, 1)}], compute_loss=supervised(nn.functional.mse_loss))


# -- bad input: losses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "came"),
    [
        (lambda out: out.sum().item(), r"got 'float'"),
        (lambda out: None, r"got 'NoneType'"),
        (lambda out: {"los": out.sum()}, r"got a mapping with \['los'\]"),
        (lambda out: {"loss": out.sum().item()}, r"got 'float': return the tensor itself, not loss\.item\(\)"),
        (lambda out: out, r"got a tensor of shape \(2, 1\): reduce it, for example with loss\.mean\(\)"),
        (lambda out: out.sum().detach(), r"got a tensor without gradient: compute it from the model's outputs"),
    ],
)
def test_a_loss_that_cannot_be_used_is_an_error(result: Any, came: str) -> None:
    with pytest.raises(LossError, match=came):
        tiny_run(compute_loss=lambda model, batch: result(model(batch[0])))


# -- bad input: the rest ------------------------------------------------------------------------------


def test_an_unknown_monitor_name_is_an_error_that_shows_the_nearest() -> None:
    evaluate = Evaluate(tiny_loader(1), metrics={}, sanity_batches=1)
    with pytest.raises(
        MonitorError, match=r"watches 'eval/lss', but .* 'eval' will report only \['eval/loss'\]\. Did you mean"
    ):
        tiny_trainer(
            compute_loss=supervised(nn.functional.mse_loss), callbacks=[EarlyStopping("eval/lss", mode="min"), evaluate]
        )


def test_a_monitor_of_results_that_may_still_grow_is_checked_at_the_first_evaluation() -> None:
    class Adds(Callback):
        def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
            evaluation.results["eval/added"] = 1.0

    adds, stop = Adds(), EarlyStopping("eval/added", mode="min")
    assert tiny_run(callbacks=[adds, Evaluate(tiny_loader(1)), stop]).outcome is not None
    with pytest.raises(MonitorError, match=r"watches 'eval/lss', but the evaluation 'eval' reported only \['eval/.*'\]\. Did"):
        tiny_run(callbacks=[EarlyStopping("eval/lss", mode="min"), Evaluate(tiny_loader(1)), adds])


def test_a_monitor_of_an_evaluation_that_is_not_there_is_an_error() -> None:
    with pytest.raises(
        MonitorError, match=r"no evaluation will report it: there is none\. Add Evaluate\(loader, name=\.\.\.\)"
    ):
        tiny_run(callbacks=[EarlyStopping("eval/loss", mode="min")])


def test_a_state_value_that_cannot_be_saved_is_an_error_when_it_is_set() -> None:
    def keep(run: Run) -> None:
        run.state["model"] = run.model

    with pytest.raises(StateError, match=r"run\.state\['model'\] cannot be saved: expected None, bool, int.*got Linear"):
        tiny_run(callbacks=[on(Callback.on_fit_start)(keep)])


# -- what it does -------------------------------------------------------------------------------------


def test_a_trainer_can_start_several_runs_each_with_its_own_counters_and_records() -> None:
    trainer = tiny_trainer(callbacks=[LogTraining(every="1 step")], batches=2)
    first, second = trainer.fit(), trainer.fit()
    assert first.progress.step == second.progress.step == 2
    assert len(first.history["train/loss"]) == len(second.history["train/loss"]) == 2


def test_early_stopping_starts_anew_in_each_run() -> None:
    callbacks = [Evaluate(tiny_loader(1)), EarlyStopping("eval/loss", mode="min", patience=2, min_delta=100.0)]
    trainer = tiny_trainer(callbacks=callbacks, epochs=9)
    assert trainer.fit().progress.epoch == trainer.fit().progress.epoch == 3


def test_the_optimizer_may_be_one_a_list_or_a_function_of_the_parameters() -> None:
    model = tiny_model()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    assert tiny_run(model=model, optimizer=sgd).optimizers == [sgd]
    assert tiny_run(model=model, optimizer=[sgd]).optimizers == [sgd]
    made = tiny_run(optimizer=lambda parameters: [torch.optim.SGD(parameters[:1], 0.1), torch.optim.Adam(parameters[1:])])
    assert [type(one).__name__ for one in made.optimizers] == ["SGD", "Adam"]


class OwnLoss(nn.Module):
    """A model that returns its loss, in the form that is asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = tiny_model(), form

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        loss = nn.functional.mse_loss(self.linear(inputs), targets)
        forms = {"tensor": loss, "mapping": {"loss": loss}, "object": SimpleNamespace(loss=loss, logits=1)}
        return forms[self.form]


@pytest.mark.parametrize("form", ["tensor", "mapping", "object"])
@pytest.mark.parametrize("by_name", [True, False], ids=["mapping", "tuple"])
def test_without_compute_loss_the_model_returns_its_loss(form: str, by_name: bool) -> None:
    plain = tiny_loader(3)
    loader: list[Any] = [{"inputs": x, "targets": y, "ignored": "text"} for x, y in plain] if by_name else plain
    run = tiny_run(model=OwnLoss(form), compute_loss=None, loader=loader)
    reference = tiny_run(loader=plain)
    assert torch.equal(
        nn.utils.parameters_to_vector(run.model.parameters()), nn.utils.parameters_to_vector(reference.model.parameters())
    )


def test_a_model_that_takes_any_name_gets_the_whole_mapping() -> None:
    seen: list[set[str]] = []

    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = tiny_model()

        def forward(self, **batch: Tensor) -> Tensor:
            seen.append(set(batch))
            loss: Tensor = self.linear(batch["x"]).mean()
            return loss

    tiny_run(model=Open(), compute_loss=None, loader=[{"x": torch.ones(2, 1), "y": torch.ones(2, 1)}])
    assert seen == [{"x", "y"}]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(1, 1), nn.Linear(1, 1)


def test_a_step_of_ones_own_with_two_optimizers_fires_its_moments() -> None:
    model = Gan()
    maker, judge = torch.optim.SGD(model.maker.parameters(), 0.1), torch.optim.SGD(model.judge.parameters(), 0.1)
    updating: list[list[torch.optim.Optimizer]] = []

    def step(run: Run, batch: Any) -> dict[str, Tensor]:
        inputs, _ = batch
        judged: Tensor = model.judge(inputs).mean() - model.judge(model.maker(inputs).detach()).mean()
        run.backward(judged)
        run.update(judge)
        made: Tensor = model.judge(model.maker(inputs)).mean()
        run.backward(made)
        run.update(maker)
        return {"loss": judged + made, "made": made}

    recorder = Recorder()
    look = on(Callback.on_before_optimizer_step)(lambda run: updating.append(list(session_of(run).step.updating)))
    run = tiny_run(model=model, optimizer=[maker, judge], step_fn=step, batches=1, callbacks=[recorder, look])
    once = [
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
        "on_before_zero_grad",
        "on_after_zero_grad",
    ]
    start = recorder.names.index("on_batch_start")
    assert recorder.names[start + 1 : start + 15] == [*once, *once, "on_batch_end", "on_step_end"]
    assert updating == [[judge], [maker]]
    assert run.loss is not None
    assert set(run.outputs) == {"loss", "made"}


def test_a_driver_may_be_given_as_an_instance() -> None:
    driver = SingleDriver("cpu")
    assert tiny_run(driver=driver).driver is driver


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(callbacks=[LogTraining(every="1 step"), Evaluate(tiny_loader(1))])
    assert list(tmp_path.iterdir()) == []


def test_what_is_seldom_meant_is_said_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(tiny_model(), nn.Linear(1, 1))
    tiny_run(model=model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1), batches=2, accumulate=3)
    assert [record.message for record in caplog.records] == [
        "accumulate=3 is more than the 2 batches of an epoch: each step is one short accumulation window",
        "no optimizer holds 2 parameters that require a gradient, so they are not trained: 1.weight, 1.bias. Give them to an "
        "optimizer, or set requires_grad_(False).",
    ]
