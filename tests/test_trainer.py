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
from cadenza.errors import DataError, LossError, MonitorError, ScheduleError
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer


class Stream:
    """A loader without a length, and here without batches if there are none."""

    def __init__(self, batches: int = 3) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from tiny_loader(3)[: self.batches]


def trainer_with(**arguments: Any) -> Trainer:
    model = tiny_model()
    return Trainer(model, torch.optim.SGD(model.parameters(), 0.1), tiny_loader(), lambda model, batch: 0, **arguments)


# -- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_epochs", "max_steps", "accumulate"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "3", True])
def test_a_length_that_is_below_one_or_no_whole_number_is_an_error(name: str, value: object) -> None:
    error, rule = (ValueError, "at least 1") if type(value) is int else (TypeError, "a whole number")
    with pytest.raises(error, match=rf"{name} must be {rule}; got {value!r}"):
        trainer_with(**{"max_epochs": 1, name: value})


def another() -> torch.optim.Optimizer:
    """Return an optimizer of another model."""
    return torch.optim.SGD(tiny_model().parameters(), 0.1)


def name_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def emptied(run: Run) -> None:
    run.replace_loader([])


def step(run: Run, batch: Any) -> None: ...


MSE = supervised(nn.functional.mse_loss)
UNTRAINED = r"SGD holds none of the model's parameters, so the model would not be trained\. Build"
WRAPPED = r"supervised\(CrossEntropyLoss\(\)\)"
NO_BATCH = "the training loader gave no batch in epoch"
ABSENT = "mps" if not torch.backends.mps.is_available() else "cuda"
FEW = DataLoader(TensorDataset(torch.zeros(3, 1)), batch_size=8, drop_last=True)
MISSPELLED = EarlyStopping("eval/lss", mode="min")

Refused = list[tuple[type[Exception], str, dict[str, Any]]]
BY_THE_TRAINER: Refused = [
    (TypeError, r"seed must be a whole number or None; got 1\.5", {"seed": 1.5}),
    (ValueError, UNTRAINED, {"optimizer": another()}),
    (ValueError, "expected at least one optimizer; got an empty list", {"optimizer": []}),
    (TypeError, "optimizer must be an optimizer, .*; got 'adam'. Give one of torch, such as", {"optimizer": "adam"}),
    (TypeError, rf"takes predictions and targets\. Wrap it: {WRAPPED}", {"compute_loss": nn.CrossEntropyLoss()}),
    (TypeError, rf"got the class MSELoss\. Make it; .*{WRAPPED}", {"compute_loss": nn.MSELoss}),
    (TypeError, rf"got the class supervised\. Make it; .*{WRAPPED}", {"compute_loss": supervised}),
    (TypeError, r"compute_loss must be a function \(model, batch\) -> loss, or None; got 'mse'", {"compute_loss": "mse"}),
    (TypeError, r"step_fn must be a function \(run, batch\) -> loss; got 3", {"step_fn": 3}),
    (ValueError, "expected compute_loss or step_fn; got both", {"step_fn": step, "compute_loss": MSE}),
    (ValueError, "a step_fn does its own accumulation: expected accumulate=1; got 2", {"step_fn": step, "accumulate": 2}),
    (ValueError, rf"device '{ABSENT}' does not exist; this machine has \['cpu'", {"device": ABSENT}),
    (TypeError, "loader must be an iterable of batches; got 3", {"loader": 3}),
    (
        MonitorError,
        r"watches 'eval/lss', but .* 'eval' will report only \['eval/loss'\]\. Did you mean",
        {"compute_loss": MSE, "callbacks": [MISSPELLED, Evaluate(tiny_loader(1), metrics={}, sanity_batches=1)]},
    ),
]
IN_THE_RUN: Refused = [
    (ValueError, UNTRAINED, {"optimizer": lambda _: another()}),
    (TypeError, "expected torch optimizers; got 3$", {"optimizer": lambda _: 3}),
    (TypeError, "Pass one function of the parameters, which returns a list of optimizers", {"optimizer": [torch.optim.Adam]}),
    (DataError, r"3 samples, batch_size=8 and drop_last=True\. Lower the batch size", {"loader": FEW}),
    (DataError, rf"{NO_BATCH} 1\. Give one that has at least one batch", {"loader": Stream(0)}),
    (DataError, f"{NO_BATCH} 1", {"callbacks": [on(Callback.on_setup)(emptied), LogTraining()]}),
    (
        DataError,
        f"{NO_BATCH} 2.*an iterator is used up after one pass, a loader is not",
        {"loader": iter(tiny_loader()), "epochs": 2},
    ),
    (
        ScheduleError,
        r"LogTraining: 'every 0\.5 epoch' needs a loader that knows its length"
        '(?s:.*)Use a schedule in "steps", "batches", "samples" or "min" instead',
        {"loader": Stream(), "callbacks": [LogTraining(every="0.5 epoch")]},
    ),
    (
        MonitorError,
        r"no evaluation will report it: there is none\. Add Evaluate\(loader, name=\.\.\.\)",
        {"callbacks": [EarlyStopping("eval/loss", mode="min")]},
    ),
]


@pytest.mark.parametrize(("error", "message", "given"), BY_THE_TRAINER, ids=name_of)
def test_the_trainer_says_what_it_expected_and_what_came(error: type[Exception], message: str, given: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        tiny_trainer(**given)


@pytest.mark.parametrize(("error", "message", "given"), IN_THE_RUN, ids=name_of)
def test_the_run_says_what_it_expected_and_what_came(error: type[Exception], message: str, given: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        tiny_run(**given)


def test_a_run_without_a_limit_or_a_model_and_the_class_of_a_loss_are_errors() -> None:
    with pytest.raises(
        ValueError, match=r"a run needs an end: expected max_epochs=, max_steps= or max_tokens=; got none of them"
    ):
        trainer_with()
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, or a function .*; got None"):
        Trainer(cast("Any", print), cast("Any", None), tiny_loader(), max_steps=1)
    with pytest.raises(TypeError, match=r"got the class MSELoss\. Make it: MSELoss\(\)"):
        supervised(cast("Any", nn.MSELoss))


def test_one_process_of_several_that_does_not_know_its_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2, and RANK is not set: start all processes with torchrun"):
        tiny_trainer(driver="auto")


def test_an_empty_loader_is_an_error_before_anything_happens_and_its_plan_can_be_printed() -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match=r"the training loader is empty: expected at least one batch; got a list of length 0"):
        tiny_run(loader=[], callbacks=[recorder])
    assert recorder.names == []
    assert "on_step_end" in str(tiny_trainer(loader=[], callbacks=[LogTraining()]).plan())


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


def test_a_monitor_of_results_that_may_still_grow_is_checked_at_the_first_evaluation() -> None:
    class Adds(Callback):
        def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
            evaluation.results["eval/added"] = 1.0

    adds, stop = Adds(), EarlyStopping("eval/added", mode="min")
    assert tiny_run(callbacks=[adds, Evaluate(tiny_loader(1)), stop]).outcome is not None
    with pytest.raises(MonitorError, match=r"watches 'eval/lss', but the evaluation 'eval' reported only \['eval/.*'\]\. Did"):
        tiny_run(callbacks=[EarlyStopping("eval/lss", mode="min"), Evaluate(tiny_loader(1)), adds])


# -- what it does -------------------------------------------------------------------------------------


def test_loaders_may_have_an_unknown_length() -> None:
    class Numbers(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from [(torch.ones(1), torch.ones(1))] * 4

    run = tiny_run(loader=Stream(), epochs=2, callbacks=[LogTraining(every="1 epoch")])
    assert [step for step, _ in run.history["train/loss"]] == [3, 6]
    assert tiny_run(loader=DataLoader(Numbers(), batch_size=2)).progress.batch == 2


def test_each_run_of_a_trainer_has_its_own_counters_and_records_and_early_stopping_starts_anew() -> None:
    stopping = EarlyStopping("eval/loss", mode="min", patience=2, min_delta=100.0)
    trainer = tiny_trainer(callbacks=[LogTraining(every="1 step"), Evaluate(tiny_loader(1)), stopping], batches=2, epochs=9)
    first, second = trainer.fit(), trainer.fit()
    assert first.progress.epoch == second.progress.epoch == 3
    assert first.progress.step == second.progress.step == 6
    assert len(first.history["train/loss"]) == len(second.history["train/loss"]) == 6


def test_the_optimizer_may_be_one_a_list_or_a_function_and_a_driver_an_instance() -> None:
    model, driver = tiny_model(), SingleDriver("cpu")
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    assert tiny_run(model=model, optimizer=sgd).optimizers == [sgd]
    assert tiny_run(model=model, optimizer=[sgd]).optimizers == [sgd]
    made = tiny_run(optimizer=lambda parameters: [torch.optim.SGD(parameters[:1], 0.1), torch.optim.Adam(parameters[1:])])
    assert [type(one).__name__ for one in made.optimizers] == ["SGD", "Adam"]
    assert tiny_run(driver=driver).driver is driver


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
    assert all(map(torch.equal, run.model.parameters(), reference.model.parameters()))


def test_a_model_that_takes_any_name_gets_the_whole_mapping() -> None:
    seen: list[set[str]] = []

    class Open(nn.Linear):
        def forward(self, **batch: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(set(batch))
            return super().forward(batch["x"]).mean()

    tiny_run(model=Open(1, 1), compute_loss=None, loader=[{"x": torch.ones(2, 1), "y": torch.ones(2, 1)}])
    assert seen == [{"x", "y"}]


def test_a_step_of_ones_own_with_two_optimizers_fires_its_moments() -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    make, assess = model
    maker, judge = (torch.optim.SGD(part.parameters(), 0.1) for part in model)
    updating: list[list[torch.optim.Optimizer]] = []

    def step(run: Run, batch: Any) -> dict[str, Tensor]:
        inputs, _ = batch
        judged: Tensor = assess(inputs).mean() - assess(make(inputs).detach()).mean()
        run.backward(judged)
        run.update(judge)
        made: Tensor = assess(make(inputs)).mean()
        run.backward(made)
        run.update(maker)
        return {"loss": judged + made, "made": made}

    recorder = Recorder()
    look = on(Callback.on_before_optimizer_step)(lambda run: updating.append(list(session_of(run).step.updating)))
    run = tiny_run(model=model, optimizer=[maker, judge], step_fn=step, batches=1, callbacks=[recorder, look])
    once = [f"on_{side}_{part}" for part in ("backward", "optimizer_step", "zero_grad") for side in ("before", "after")]
    start = recorder.names.index("on_batch_start")
    assert recorder.names[start + 1 : start + 15] == [*once, *once, "on_batch_end", "on_step_end"]
    assert updating == [[judge], [maker]]
    assert run.loss is not None
    assert set(run.outputs) == {"loss", "made"}


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
