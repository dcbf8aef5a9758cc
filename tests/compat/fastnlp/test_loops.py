"""Loops of the user's own over the batches of a loader, in trainings and in evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.fastnlp import Callback, EvaluateBatchLoop, Evaluator, Event, Loop, TrainBatchLoop, Trainer
from cadenza.compat.fastnlp.core.controllers.loops.train_batch_loop import TrainBatchLoop as Same
from tests.compat.fastnlp.toy import Error, Scribe, Scripted, Toy, loader, toy_trainer


def weights_of(trainer: Trainer) -> Tensor:
    return nn.utils.parameters_to_vector(trainer.model.parameters())


class Calls(TrainBatchLoop):
    """A loop that calls the trainer's own."""

    epochs = 0

    def run(self, trainer: Any, dataloader: Any) -> None:
        self.epochs += 1
        super().run(trainer, dataloader)


@pytest.mark.parametrize("every", [-1, -2, 2])
@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_a_subclass_that_calls_the_trainers_loop_changes_nothing(every: int, accumulate: int) -> None:
    scribes, trainers = [], []
    for loop in (None, Calls()):
        scribes.append(Scribe())
        metrics = {"acc": Scripted(*range(9))}
        options: Any = {"n_epochs": 2, "evaluate_every": every, "accumulation_steps": accumulate}
        trainers.append(toy_trainer(20, scribes[-1], metrics, **options))
        if loop is not None:
            trainers[-1].train_batch_loop = loop
        trainers[-1].run()
    assert loop is not None
    assert loop.epochs == 2
    assert scribes[0].seen == scribes[1].seen
    assert torch.allclose(weights_of(trainers[0]), weights_of(trainers[1]), atol=1e-7)


class OfRelease(Loop):
    """A loop as in fastNLP 1.0.1: it does not evaluate at the end of the epoch, but the trainer does."""

    def run(self, trainer: Any, dataloader: Any) -> None:
        for batch in dataloader:
            trainer.on_train_batch_begin(batch, None)
            self.batch_step_fn(trainer, batch)
            trainer.global_forward_batches += 1
            trainer.batch_idx_in_epoch += 1
            trainer.on_train_batch_end()
        trainer.batch_idx_in_epoch = 0

    batch_step_fn = staticmethod(TrainBatchLoop.batch_step_fn)


def test_the_trainer_evaluates_after_a_loop_that_does_not() -> None:
    scribe = Scribe("on_evaluate_end")
    trainer = toy_trainer(8, scribe, {"acc": Scripted(*range(9))}, n_epochs=2)
    trainer.train_batch_loop = OfRelease()
    trainer.run()
    assert scribe.seen == [("on_evaluate_end", 0, 0, 2), ("on_evaluate_end", 1, 0, 4)]


def test_an_evaluation_that_a_callback_requests_does_not_replace_that_of_the_epoch() -> None:
    scribe = Scribe("on_evaluate_end")
    trainer = toy_trainer(8, scribe, {"acc": Scripted(*range(9))}, n_epochs=2)
    trainer.add_callback_fn(Event.on_train_batch_end(once=1), lambda trainer: trainer.epoch_evaluate())
    trainer.run()
    assert [g for _, _, g in scribe.at("on_evaluate_end")] == [1, 2, 4]


def test_a_loop_with_a_batch_step_fn_is_the_trainers_loop_with_it() -> None:
    steps: list[Any] = []

    def step(trainer: Any, batch: Any) -> None:
        steps.append(batch)
        TrainBatchLoop.batch_step_fn(trainer, batch)

    class Overrides(TrainBatchLoop):
        batch_step_fn = staticmethod(step)

    trainers = [toy_trainer(8, n_epochs=1), toy_trainer(8, n_epochs=1, batch_step_fn=step)]
    for loop in (TrainBatchLoop(step), Overrides()):
        trainers.append(toy_trainer(8, n_epochs=1))
        assert type(trainers[-1].train_batch_loop) is TrainBatchLoop is Same
        trainers[-1].train_batch_loop = loop
    for trainer in trainers:
        trainer.run()
        assert torch.allclose(weights_of(trainer), weights_of(trainers[0]), atol=1e-7)
        assert trainer.runs_own_epochs is False
    assert len(steps) == 6


def test_two_optimizers_in_a_step_of_ones_own() -> None:
    class TwoParts(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(5, 1)

        def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.linear(x) - y).square().mean(), "other": (self.other(x) - y).square().mean()}

    def step(trainer: Any, batch: Any) -> None:
        first, second = trainer.driver.optimizers
        outputs = trainer.train_step(batch)
        for optimizer, loss in ((first, outputs["loss"]), (second, outputs["other"])):
            trainer.driver.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model, plain = TwoParts(), TwoParts()
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.linear, model.other)]
    toy_trainer(8, model=model, optimizers=optimizers, batch_step_fn=step, n_epochs=2).run()
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (plain.linear, plain.other)]
    for batch in [*loader(8)] * 2:
        for optimizer, loss in zip(optimizers, plain.train_step(**batch).values(), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_loop_of_ones_own_continues_inside_an_epoch(tmp_path: Path, accumulate: int) -> None:
    def made() -> Trainer:
        trainer = toy_trainer(20, n_epochs=2, accumulation_steps=accumulate)
        trainer.train_batch_loop = Calls()
        return trainer

    whole = made()
    for batch in range(1, 11):
        whole.add_callback_fn(
            Event.on_train_batch_end(once=batch), lambda trainer, at=batch: trainer.save_checkpoint(tmp_path / str(at))
        )
    whole.run()
    for batch in range(1, 11):
        resumed = made()
        resumed.run(resume_from=tmp_path / str(batch))
        assert resumed.global_forward_batches == 10
        assert torch.equal(weights_of(whole), weights_of(resumed))


def test_an_error_in_the_loop_names_the_samples() -> None:
    class Knows(list[Any]):
        def get_batch_indices(self) -> list[int]:
            return [4, 2]

    def fail(trainer: Any, batch: Any) -> None:
        raise RuntimeError("oh")

    trainer = toy_trainer(train_dataloader=Knows(loader(4)), check_dataloader_legality=False, n_epochs=1)
    trainer.train_batch_loop = Calls(fail)
    with pytest.raises(RuntimeError, match="oh") as caught:
        trainer.run()
    assert caught.value.__notes__.count("while training on the samples [4, 2]") == 1


def test_a_step_of_ones_own_without_backward_reports_the_loss_of_its_train_step(caplog: pytest.LogCaptureFixture) -> None:
    def step(trainer: Any, batch: Any) -> None:
        trainer.train_step(batch)["loss"].backward()
        trainer.optimizers.step()
        trainer.optimizers.zero_grad()

    trainer, same = toy_trainer(8, batch_step_fn=step, n_epochs=1), toy_trainer(8, n_epochs=1)
    trainer.run()
    same.run()
    assert torch.equal(weights_of(trainer), weights_of(same))
    assert trainer.live is not None
    assert trainer.live.loss is not None
    assert trainer.live.loss > 0
    assert "nan" not in caplog.text


def test_a_subclass_of_the_trainer_may_override_the_parts_of_a_step() -> None:
    class Mine(Trainer):
        calls: ClassVar[list[str]] = []

        def backward(self, outputs: Any) -> None:
            self.calls.append("backward")
            super().backward({**outputs, "loss": outputs["loss"] * 2})

        def step(self) -> None:
            self.calls.append("step")
            super().step()

    def trained(kind: type[Trainer], rate: float) -> Trainer:
        model = Toy()
        optimizer = torch.optim.SGD(model.parameters(), rate)
        made = kind(model, loader(8), optimizer, n_epochs=1, train_fn="train_step", progress_bar=None)
        made.run()
        return made

    mine, plain = trained(Mine, 0.05), trained(Trainer, 0.1)
    assert torch.allclose(weights_of(mine), weights_of(plain))
    assert Mine.calls == ["backward", "step"] * 2
    assert (mine.train_fn, mine.evaluate_fn, mine.overfit_batches, mine.device) == ("train_step", None, 0, "cpu")
    assert (mine.driver_name, mine.evaluate_batch_step_fn) == ("auto", None)
    assert toy_trainer(driver=mine.driver).driver_name == "TorchSingleDriver"


def test_a_last_epoch_that_n_batches_shortens_is_no_wrong_length_of_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    trainer = toy_trainer(20, n_batches=7)
    trainer.run()
    assert (trainer.global_forward_batches, trainer.n_epochs, trainer.n_batches) == (7, 2, 7)
    assert "the length of the training loader" not in caplog.text


# -- accumulation windows, and trainings without epochs ----------------------------------------------------


def test_an_accumulation_window_continues_over_the_end_of_an_epoch() -> None:
    def losses(model: Toy, batches: list[Any]) -> Tensor:
        return torch.stack([model.train_step(**batch)["loss"] for batch in batches]).mean()

    trainer, plain = toy_trainer(12, n_epochs=3, accumulation_steps=2), Toy()
    trainer.run()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    batches = [*loader(12)] * 3
    for window in (batches[:2], batches[2:4], batches[4:6], batches[6:8], batches[8:]):
        optimizer.zero_grad()
        losses(plain, window).backward()
        optimizer.step()
    assert torch.allclose(weights_of(trainer), nn.utils.parameters_to_vector(plain.parameters()), atol=1e-6)


def test_accumulation_steps_can_change_only_with_a_step_of_ones_own() -> None:
    class Grow(Callback):
        def on_train_epoch_begin(self, trainer: Any) -> None:
            trainer.accumulation_steps = trainer.cur_epoch_idx + 1

    def own(trainer: Any, batch: Any) -> None:
        TrainBatchLoop.batch_step_fn(trainer, batch)

    with pytest.raises(RuntimeError, match="accumulation_steps cannot change during a training with the trainer's own step"):
        toy_trainer(24, Grow(), n_epochs=3).run()
    toy_trainer(24, Grow(), n_epochs=1).run()  # the same number is no change
    scribe = Scribe("on_before_optimizers_step")
    trainer = toy_trainer(24, [Grow(), scribe], n_epochs=3, batch_step_fn=own)
    trainer.run()
    assert [g for _, _, g in scribe.at("on_before_optimizers_step")] == [*range(6), 7, 9, 11, 14, 17]
    trainer = toy_trainer(8, n_epochs=1)
    trainer.accumulation_steps = 2
    trainer.run()
    assert trainer.live is not None
    assert trainer.live.progress.step == 1


@pytest.mark.parametrize("options", [{"n_epochs": 0}, {"n_epochs": 0, "callbacks": []}])
def test_without_epochs_only_the_sanity_check_and_the_ends_run(options: Any) -> None:
    scribe = Scribe()
    trainer = toy_trainer(8, metrics={"acc": Scripted(0.5)}, **{**options, "callbacks": [scribe]})
    trainer.run()
    events = ["on_after_trainer_initialized", "on_sanity_check_begin", "on_sanity_check_end", "on_train_begin", "on_train_end"]
    assert scribe.seen == [(event, 0, 0, 0) for event in events]
    assert (trainer.n_epochs, trainer.n_batches, trainer.cur_epoch_idx) == (0, 0, 0)
    trainer.n_epochs = 1  # a later call trains
    assert trainer.evaluator is not None
    trainer.evaluator.metrics["acc"] = Scripted(0.5, 0.6)
    trainer.run()
    assert trainer.global_forward_batches == 2


# -- evaluations -------------------------------------------------------------------------------------------


class EvaluateCalls(EvaluateBatchLoop):
    """A loop that calls the evaluator's own."""

    def run(self, evaluator: Any, dataloader: Any) -> dict[str, Any]:
        names.append(evaluator.cur_dataloader_name)
        return super().run(evaluator, dataloader)


names: list[Any] = []


def test_a_loop_of_ones_own_evaluates_a_loader() -> None:
    class Constant(Loop):
        def run(self, evaluator: Any, dataloader: Any) -> Mapping[str, Any]:
            return {"batches": sum(1 for _ in dataloader)}

    names.clear()
    plain, calls = (Evaluator(Toy(), {"a": loader(8), "b": loader(4)}, {"e": Error()}, verbose=0) for _ in range(2))
    assert type(plain.evaluate_batch_loop) is EvaluateBatchLoop
    calls.evaluate_batch_loop = EvaluateCalls()
    assert plain.run() == calls.run()
    assert names == ["a", "b"]
    calls.evaluate_batch_loop = Constant()
    assert calls.run() == {"batches#a": 2, "batches#b": 1}
    assert calls.run(num_eval_batch_per_dl=1) == {"batches#a": 1, "batches#b": 1}

    class Fails(EvaluateBatchLoop):
        def run(self, evaluator: Any, dataloader: Any) -> dict[str, Any]:
            for number, batch in enumerate(dataloader):
                evaluator.update_progress_bar(number, evaluator.cur_dataloader_name)
                self.batch_step_fn(evaluator, {} if number else evaluator.move_data_to_device(batch))
            raise AssertionError

    calls.evaluate_batch_loop = Fails()
    with pytest.raises(ValueError, match="needs") as caught:
        calls.run()
    assert caught.value.__notes__ == ["raised in the evaluate_batch_loop, after 1 batches of the loader 'a'"]
    with pytest.raises(TypeError, match="evaluate_batch_loop must have a method run"):
        calls.evaluate_batch_loop = 3  # type: ignore[assignment]


def test_events_may_be_fired_from_a_loop_and_are_counted() -> None:
    class Saves(Callback):
        def on_save_checkpoint(self, trainer: Any) -> dict[str, int]:
            return {"at": trainer.global_forward_batches}

        def on_load_checkpoint(self, trainer: Any, states: Any) -> None:
            restored.append(states)

    restored: list[Any] = []
    scribe = Scribe("on_before_backward", "on_evaluate_end", "on_exception", "on_sanity_check_end")
    trainer = toy_trainer(8, [scribe, Saves()])
    trainer.on_before_backward({"loss": torch.ones(())})
    trainer.on_evaluate_end({"acc": 1})
    trainer.on_sanity_check_end({})
    trainer.on_exception(ValueError())
    assert scribe.names == ["on_before_backward", "on_evaluate_end", "on_sanity_check_end", "on_exception"]
    assert trainer.callback_manager.callback_counter["on_before_backward"] == 1
    states = trainer.on_save_checkpoint()
    assert states == {"Saves": {"states": {"at": 0}}}
    trainer.on_load_checkpoint(states)
    assert restored == [{"at": 0}]
