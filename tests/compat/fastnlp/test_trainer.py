"""The trainer's arguments, steps and state, its evaluator, and callbacks of several systems in one list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from cadenza import Callback as NativeCallback
from cadenza import Run, on
from cadenza.callbacks import ClipGradients
from cadenza.compat.fastnlp import Callback, EarlyStopException, Event, State, Trainer, TrainerState
from cadenza.testing import tiny_run
from tests.compat.fastnlp.toy import (
    Error,
    Hooks,
    Raising,
    Scribe,
    Scripted,
    Toy,
    batches_seen,
    live,
    loader,
    rows,
    toy_trainer,
    trained,
    weights_of,
)

# -- arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"train_dataloader": [1]}, TypeError, "train_dataloader must be a torch DataLoader"),
        ({"optimizers": 3}, TypeError, "optimizers must be"),
        ({"callbacks": {Scribe}}, ValueError, "callbacks must be a callback, or a list"),
        ({"callbacks": [3]}, TypeError, r"callbacks\[0\] must be"),
        ({"metrics": {"e": Error()}, "evaluate_dataloaders": None}, ValueError, "metrics= needs"),
        ({"metrics": {"e": Error()}, "evaluate_every": 0}, ValueError, "evaluate_every must be"),
        ({"metrics": {"e": Error()}, "evaluate_every": 1.0}, ValueError, "evaluate_every must be"),
        ({"metrics": [Error()]}, TypeError, "metrics must be a dict"),
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be"),
        ({"n_batches": 0}, ValueError, "n_batches must be"),
        ({"n_epochs": -1}, ValueError, "n_epochs must be a whole number of at least 0; got -1"),
        ({"n_epochs": 1.5}, ValueError, "n_epochs must be"),
        ({"n_epochs": None}, ValueError, "n_epochs must be"),
        ({"n_epochs": "3"}, ValueError, "n_epochs must be"),
        ({"metrics": {"e": Error}}, TypeError, r"got the class Error: write Error\(\)"),
        ({"train_fn": "missing"}, RuntimeError, "no method 'missing'"),
        ({"train_fn": 3}, TypeError, "the name of a method"),
        ({"batch_step_fn": lambda trainer: None}, TypeError, "batch_step_fn"),
        ({"input_mapping": 3}, ValueError, "input_mapping must be"),
        ({"model": 3, "optimizers": torch.optim.SGD(Toy().parameters())}, TypeError, "model must be a torch.nn.Module; got 3"),
        ({"torch_kwargs": 3}, TypeError, "torch_kwargs must be a dict, such as {'non_blocking': False}; got 3"),
        ({"metrics": {"e": Error()}, "evaluate_dataloaders": 3}, TypeError, "dataloaders must be a loader, .* got 3"),
        ({"metrics": {"e": Error()}, "evaluate_dataloaders": [loader(4)]}, TypeError, "or a dict of loaders by name"),
        ({"input_mapping": {"a": "b"}, "train_input_mapping": {"a": "b"}}, ValueError, "got both"),
    ],
)
def test_a_wrong_argument_is_an_error_in_the_trainers_constructor(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        toy_trainer(**arguments)


def test_a_missing_loader_is_an_error_and_arguments_without_effect_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    model = Toy()
    with pytest.raises(ValueError, match="got None"):
        Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1))
    toy_trainer(progress_bars="rich")
    assert "ignores the unknown argument progress_bars=. Did you mean 'progress_bar'?" in caplog.text
    toy_trainer(evaluate_dataloader=loader(4))
    assert "ignores the unknown argument evaluate_dataloader=. Did you mean 'evaluate_dataloaders'?" in caplog.text
    toy_trainer(use_dist_sampler=True)
    assert "Trainer ignores the argument use_dist_sampler=: pass one of Cadenza's drivers" in caplog.text
    trainer = toy_trainer(evaluate_dataloaders=loader(4))
    assert (trainer.evaluator, trainer.evaluates) == (None, False)
    assert "nothing is evaluated" in caplog.text


def test_a_loader_without_length_is_an_error() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows(8))

    with pytest.raises(TypeError, match="must have a length"):
        trained(train_dataloader=DataLoader(Stream(), batch_size=4))
    listed = trained(train_dataloader=[{"x": torch.ones(1, 5), "y": torch.ones(1, 1)}], check_dataloader_legality=False)
    assert listed.global_forward_batches == 20  # fastNLP's default of epochs


def test_hooks_get_the_optimizers_argument_of_the_trainer() -> None:
    seen: list[Any] = []
    see = Hooks(on_before_optimizers_step=lambda trainer, optimizers: seen.append(optimizers))
    model = Toy()
    one = torch.optim.SGD(model.parameters(), 0.1)
    for optimizers in (one, [one]):
        trained(model=model, optimizers=optimizers, callbacks=see, n_batches=1)
    assert seen[0] is one
    assert seen[1] == [one]


# -- batches and outputs ---------------------------------------------------------------------------------


class Renamed(nn.Module):
    """A `Toy` with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Toy().linear

    def forward(self, features: Tensor, aim: Tensor) -> dict[str, Tensor]:
        return {"cost": nn.functional.mse_loss(self.linear(features), aim)}


@dataclass
class Output:
    loss: Tensor


class Typed(Toy):
    def train_step(self, x: Tensor, y: Tensor) -> Output:  # type: ignore[override]  # another kind of output
        return Output(super().train_step(x, y)["loss"])


def test_batches_and_outputs_go_through_the_mappings_and_outputs_may_be_of_a_dataclass() -> None:
    mappings: dict[str, Any] = {"input_mapping": {"x": "features", "y": "aim"}, "output_mapping": {"cost": "loss"}}
    plain = weights_of(trained(n_epochs=1))
    assert torch.equal(weights_of(trained(model=Renamed(), **mappings, n_epochs=1)), plain)
    assert torch.equal(weights_of(trained(model=Typed(), n_epochs=1)), plain)


def test_a_change_of_the_batch_or_of_the_loss_reaches_the_training() -> None:
    def free(trainer: Any, outputs: Any) -> None:
        if isinstance(outputs, Output):
            outputs.loss = outputs.loss * 0
        else:
            outputs["loss"] = outputs["loss"] * 0

    zero = Hooks(on_train_batch_begin=lambda trainer, batch, indices: batch.update(x=torch.zeros_like(batch["x"])))
    assert torch.equal(trained(callbacks=zero, n_epochs=1).model.linear.weight, Toy().linear.weight)  # type: ignore[union-attr,arg-type]
    for model in (Toy(), Typed()):
        assert torch.equal(
            weights_of(trained(model=model, callbacks=Hooks(on_before_backward=free), n_epochs=1)), weights_of(Toy())
        )


@pytest.mark.parametrize(
    ("output", "error", "says"),
    [({"lss": 1}, KeyError, "'loss'"), (3, ValueError, "a dict with 'loss'"), (TrainerState(), AttributeError, "has none")],
)
def test_outputs_without_a_loss_are_an_error(output: Any, error: type[Exception], says: str) -> None:
    trainer = toy_trainer(output_mapping=lambda outputs: output)
    with pytest.raises(error, match=says):
        trainer.run()
    with pytest.raises(error, match=says):
        trainer.extract_loss_from_outputs(output)


def test_a_batch_without_a_required_argument_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"train_step needs \['y'\]; got \['x'\]"):
        trained(input_mapping=lambda batch: {"x": batch["x"]})


class Knows(DataLoader[Any]):
    def get_batch_indices(self) -> list[int]:
        return [4, 2]


def test_hooks_and_errors_get_the_indices_of_a_batch_if_the_loader_provides_them() -> None:
    seen: list[Any] = []
    see = Hooks(on_train_batch_begin=lambda trainer, batch, indices: seen.append(indices))
    knowing: Any = Knows(rows(4), batch_size=4)  # type: ignore[arg-type]  # a list is a data set
    trained(callbacks=see, n_batches=1)
    trained(train_dataloader=knowing, callbacks=see, n_batches=1)
    assert seen == [None, [4, 2]]
    for event, notes in (("on_before_backward", 1), ("on_train_begin", 0)):
        with pytest.raises(RuntimeError) as caught:
            trained(train_dataloader=knowing, callbacks=Raising(event, 0, RuntimeError("oh")))
        assert caught.value.__notes__.count("while training on the samples [4, 2]") == notes


def test_the_order_of_a_shuffled_loader_depends_on_the_users_seed() -> None:
    def order(seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        seen: list[list[float]] = []
        trained(train_dataloader=loader(20, shuffle=True), callbacks=batches_seen(seen), n_epochs=2)
        return seen

    assert order(1) == order(1) != order(2)
    assert order(1)[:5] != order(1)[5:]


def test_overfitting_trains_and_evaluates_on_the_first_batches() -> None:
    seen: list[list[float]] = []
    trainer = toy_trainer(20, batches_seen(seen), {"e": Error()}, overfit_batches=2, n_epochs=3)
    trainer.run(num_eval_sanity_batch=0)
    assert len(seen) == 6
    assert seen[0] == seen[2]
    assert trainer.num_batches_per_epoch == 2
    assert trainer.evaluator is not None
    assert trainer.evaluator.dataloaders[""] is trainer.dataloader


# -- state -----------------------------------------------------------------------------------------------


def test_the_users_state_is_read_by_attribute_and_written_by_key_also_in_a_native_run() -> None:
    class Sum(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            trainer.state["loss"] = 0.0

        def on_before_backward(self, trainer: Any, outputs: Any) -> None:
            trainer.state["loss"] += outputs["loss"].item()

    state = State()
    state["loss"] = {"sum": 1}
    state.loss["sum"] = 2
    assert state["loss"] == {"sum": 2}  # deviation: in fastNLP a nested dict is a copy
    assert not hasattr(state, "missing")
    for error in (AttributeError, ValueError):
        with pytest.raises(error, match="no 'missing'; it has \\['loss'\\]"):
            _ = state.missing
    with pytest.raises(AttributeError, match=r"write state\['loss'\]"):
        state.loss = 1
    assert tiny_run(callbacks=[Sum()], losses=[1.0, 2.0]).state.loss == 3.0


def test_counters_can_be_set_and_an_unknown_one_is_an_error() -> None:
    trainer = toy_trainer()
    trainer.cur_epoch_idx = 3
    assert trainer.trainer_state.state_dict() == {"cur_epoch_idx": 3, "global_forward_batches": 0, "batch_idx_in_epoch": 0}
    with pytest.raises(AssertionError):
        trainer.trainer_state.load_state_dict({"n_epochs": 3})


# -- evaluation -------------------------------------------------------------------------------------------


def test_the_trainer_passes_its_arguments_to_the_evaluator() -> None:
    class Judges(Toy):
        def judge(self, batch: Any) -> dict[str, Tensor]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return {"pred": batch["x"]}

        def train_step(self, batch: Any) -> dict[str, Tensor]:  # type: ignore[override]  # it takes batches whole
            return {"loss": self.linear(batch["x"]).mean()}

    seen: list[Any] = []
    options: dict[str, Any] = {"evaluate_fn": "judge", "model_wo_auto_param_call": True, "fp16": True}
    trained(8, None, {"acc": Scripted(0.0, 0.5)}, model=Judges(), n_epochs=1, **options)
    assert seen == [True] * 4  # two batches of the trial, two of the epoch
    options = {"evaluate_batch_step_fn": lambda evaluator, batch: seen.append(batch)}
    trained(8, None, {"acc": Scripted(0.0, 0.5)}, n_epochs=1, **options)
    assert len(seen) == 4 + 4
    with pytest.raises(RuntimeError, match="has no method 'judge'"):
        toy_trainer(8, None, {"acc": Scripted()}, evaluate_fn="judge")


def test_results_of_the_evaluator_are_in_the_native_history_and_an_evaluation_can_be_requested() -> None:
    trainer = trained(8, metrics={"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=2)
    assert live(trainer).history["eval/acc#acc"] == [(2, 0.1), (4, 0.2)]
    seen: list[Any] = []
    trainer = toy_trainer(8, metrics={"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=1)
    trainer.add_callback_fn(Event.on_train_batch_end(once=1), lambda trainer: seen.append(trainer.run_evaluate()))
    trainer.run()
    assert seen == [{"acc#acc": 0.1}]


def test_a_stop_in_the_evaluation_ends_the_training_before_the_epoch_is_counted() -> None:
    scribe, stop = Scribe("on_train_epoch_end", "on_exception", "on_train_end"), EarlyStopException("good enough")
    trained(8, [Raising("on_evaluate_end", 2, stop), scribe], {"acc": Scripted(0.0, 0.1)}, n_epochs=3)
    assert scribe.seen == [("on_exception", 0, 2, 2), ("on_train_end", 0, 2, 2)]


# -- together with others --------------------------------------------------------------------------------


def test_fastnlps_and_native_callbacks_run_in_the_order_of_one_list() -> None:
    class Native(NativeCallback):
        def on_batch_start(self, run: Run, batch: Any) -> None:
            order.append("native")

    @on(NativeCallback.on_batch_start)
    def function(run: Run, batch: Any) -> None:
        order.append("function")

    order: list[str] = []
    adapted = Hooks(on_train_batch_begin=lambda trainer, batch, indices: order.append("adapted"))
    trained(callbacks=[Native(), adapted, function, ClipGradients(max_norm=1.0)], n_batches=1)
    tiny_run(callbacks=[function, adapted, Native()], steps=1)
    assert order == ["native", "adapted", "function", "function", "adapted", "native"]
