"""Steps and loops of the user's own, in trainings and in evaluations; accumulation windows; half precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import EvaluateBatchLoop, Evaluator, Event, Loop, TrainBatchLoop, Trainer
from cadenza.compat.fastnlp.core.controllers.loops.train_batch_loop import TrainBatchLoop as Same
from cadenza.engine.session import session_of
from tests.compat.fastnlp import toy
from tests.compat.fastnlp.toy import Error, Raising, Scribe, Scripted, Toy, live, loader, toy_trainer, trained, weights_of


def own_step(trainer: Trainer, batch: Any) -> None:
    outputs = trainer.train_step(batch)
    trainer.backward(outputs)
    trainer.step()
    trainer.zero_grad()


class OwnLoop:
    """What the trainer does in an epoch."""

    def run(self, trainer: Trainer, dataloader: Any) -> None:
        batches = iter(dataloader)
        while True:
            trainer.on_fetch_data_begin()
            batch = next(batches, None)
            trainer.on_fetch_data_end()
            if batch is None:
                break
            trainer.on_train_batch_begin(batch, None)
            own_step(trainer, batch)
            trainer.global_forward_batches += 1
            trainer.batch_idx_in_epoch += 1
            trainer.on_train_batch_end()
            trainer.step_evaluate()
        trainer.epoch_evaluate()


class Calls(TrainBatchLoop):
    """A loop that calls the trainer's own."""

    epochs = 0

    def run(self, trainer: Any, dataloader: Any) -> None:
        self.epochs += 1
        super().run(trainer, dataloader)


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        *(({"batch_step_fn": own_step}, {"accumulation_steps": accumulate}) for accumulate in (1, 2, 3, 5)),
        *(({"train_batch_loop": OwnLoop()}, {"accumulation_steps": 5, "evaluate_every": every}) for every in (-1, 2)),
        *(
            ({"train_batch_loop": Calls()}, {"accumulation_steps": accumulate, "evaluate_every": every})
            for accumulate in (1, 2, 5)
            for every in (-1, -2, 2)
        ),
    ],
)
def test_a_step_or_a_loop_of_the_trainers_parts_equals_the_trainers(parts: dict[str, Any], options: dict[str, Any]) -> None:
    scribes, trainers = [Scribe(), Scribe()], []
    for scribe, own in zip(scribes, (parts, {}), strict=True):
        metrics = {"acc": Scripted(*range(9))} if "evaluate_every" in options else None
        trainers.append(toy_trainer(20, scribe, metrics, n_epochs=2, batch_step_fn=own.get("batch_step_fn"), **options))
        if "train_batch_loop" in own:
            trainers[-1].train_batch_loop = own["train_batch_loop"]
        trainers[-1].run()
    assert scribes[0].seen == scribes[1].seen
    assert torch.allclose(weights_of(trainers[0]), weights_of(trainers[1]), atol=1e-7)


def test_events_that_a_batch_step_fn_omits_are_a_warning_and_its_parts_need_a_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scribe = Scribe("on_before_backward", "on_train_begin")
    trainer = trained(callbacks=scribe, batch_step_fn=lambda trainer, batch: None, n_batches=2)
    assert caplog.text.count("callbacks have hooks at on_before_backward, but batch_step_fn did not cause these events") == 1
    assert trainer.global_forward_batches == 2
    with pytest.raises(RuntimeError, match="no training is in progress"):
        toy_trainer().backward({"loss": torch.ones(())})
    with pytest.raises(RuntimeError, match="no training is in progress"):
        toy_trainer().run_evaluate()


@pytest.mark.parametrize(("per_epoch", "n_batches", "ends"), [(3, -1, [3, 6]), (-1, 7, [5, 7]), (4, 6, [4, 6])])
def test_a_custom_loop_gets_the_batches_of_the_run_only(per_epoch: int, n_batches: int, ends: list[int]) -> None:
    scribe = Scribe("on_train_epoch_end")
    trainer = toy_trainer(20, scribe, n_epochs=2, n_batches=n_batches)
    trainer.train_batch_loop = OwnLoop()  # type: ignore[assignment]  # any object with a method run works
    trainer.run(num_train_batch_per_epoch=per_epoch)
    assert [batch for _, _, batch in scribe.at("on_train_epoch_end")] == ends


def test_a_stop_in_a_custom_loop_ends_the_training(caplog: pytest.LogCaptureFixture) -> None:
    scribe = Scribe("on_exception", "on_train_end", "on_train_epoch_end")
    stop = Raising("on_train_batch_begin", 2, fastnlp.EarlyStopException())
    trainer = toy_trainer(20, [stop, scribe], n_epochs=2, batch_step_fn=own_step)
    with pytest.raises(TypeError, match="must have a method run"):
        trainer.train_batch_loop = 3  # type: ignore[assignment]  # wrong on purpose
    trainer.train_batch_loop = OwnLoop()  # type: ignore[assignment]  # as above
    assert "train_batch_loop must call it" in caplog.text
    trainer.run()
    assert scribe.seen == [("on_exception", 0, 2, 2), ("on_train_end", 0, 2, 2)]


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


def test_the_trainer_evaluates_after_a_loop_that_does_not_and_after_a_callback_that_did() -> None:
    scribe, requested = Scribe("on_evaluate_end"), Scribe("on_evaluate_end")
    trainer = toy_trainer(8, scribe, {"acc": Scripted(*range(9))}, n_epochs=2)
    trainer.train_batch_loop = OfRelease()
    trainer.run()
    assert scribe.seen == [("on_evaluate_end", 0, 0, 2), ("on_evaluate_end", 1, 0, 4)]
    trainer = toy_trainer(8, requested, {"acc": Scripted(*range(9))}, n_epochs=2)
    trainer.train_batch_loop = loop = Calls()
    trainer.add_callback_fn(Event.on_train_batch_end(once=1), lambda trainer: trainer.epoch_evaluate())
    trainer.run()
    assert [g for _, _, g in requested.at("on_evaluate_end")] == [1, 2, 4]
    assert loop.epochs == 2


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

    trainer = trained(8, batch_step_fn=step, n_epochs=1)
    assert torch.equal(weights_of(trainer), weights_of(trained(8, n_epochs=1)))
    assert live(trainer).loss is not None
    assert live(trainer).loss > 0  # type: ignore[operator]  # it is there
    assert "nan" not in caplog.text


def test_a_subclass_of_the_trainer_may_override_the_parts_of_a_step() -> None:
    calls: list[str] = []

    class Mine(Trainer):
        def backward(self, outputs: Any) -> None:
            calls.append("backward")
            super().backward({**outputs, "loss": outputs["loss"] * 2})

        def step(self) -> None:
            calls.append("step")
            super().step()

    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    mine = Mine(model, loader(8), optimizer, n_epochs=1, train_fn="train_step", progress_bar=None)
    mine.run()
    assert torch.allclose(weights_of(mine), weights_of(trained(8, n_epochs=1)))
    assert calls == ["backward", "step"] * 2
    assert (mine.train_fn, mine.evaluate_fn, mine.overfit_batches, mine.device) == ("train_step", None, 0, "cpu")
    assert (mine.driver_name, mine.evaluate_batch_step_fn) == ("auto", None)
    assert toy_trainer(driver=mine.driver).driver_name == "TorchSingleDriver"


def test_fp16_trains() -> None:
    trainer = trained(20, metrics={"e": Error()}, fp16=True, n_epochs=2)
    assert session_of(live(trainer)).precision.name == "fp16"
    assert not torch.equal(weights_of(trainer), weights_of(Toy()))


# -- accumulation windows, and trainings without epochs ----------------------------------------------------


def test_an_accumulation_window_continues_over_epochs_and_changes_only_with_a_step_of_ones_own() -> None:
    plain = Toy()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    batches = [*loader(12)] * 3
    for window in (batches[:2], batches[2:4], batches[4:6], batches[6:8], batches[8:]):
        optimizer.zero_grad()
        torch.stack([plain.train_step(**batch)["loss"] for batch in window]).mean().backward()
        optimizer.step()
    trainer = trained(12, n_epochs=3, accumulation_steps=2)
    assert torch.allclose(weights_of(trainer), weights_of(plain), atol=1e-6)

    def grow(trainer: Any) -> None:
        trainer.accumulation_steps = trainer.cur_epoch_idx + 1

    growing = toy.Hooks(on_train_epoch_begin=grow)
    with pytest.raises(RuntimeError, match="accumulation_steps cannot change during a training with the trainer's own step"):
        trained(24, growing, n_epochs=3)
    trained(24, growing, n_epochs=1)  # the same number is no change
    scribe = Scribe("on_before_optimizers_step")
    step = lambda trainer, batch: TrainBatchLoop.batch_step_fn(trainer, batch)  # noqa: E731  # a function of one's own
    trained(24, [growing, scribe], n_epochs=3, batch_step_fn=step)
    assert [g for _, _, g in scribe.at("on_before_optimizers_step")] == [*range(6), 7, 9, 11, 14, 17]
    trainer = toy_trainer(8, n_epochs=1)
    trainer.accumulation_steps = 2
    trainer.run()
    assert live(trainer).progress.step == 1


def test_without_epochs_only_the_trial_and_the_ends_run_and_n_batches_may_shorten_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scribe = Scribe()
    trainer = trained(8, scribe, {"acc": Scripted(0.5)}, n_epochs=0)
    events = ["on_after_trainer_initialized", "on_sanity_check_begin", "on_sanity_check_end", "on_train_begin", "on_train_end"]
    assert scribe.seen == [(event, 0, 0, 0) for event in events]
    assert (trainer.n_epochs, trainer.n_batches, trainer.cur_epoch_idx) == (0, 0, 0)
    trainer.n_epochs = 1  # a later call trains
    assert trainer.evaluator is not None
    trainer.evaluator.metrics["acc"] = Scripted(0.5, 0.6)
    trainer.run()
    assert trainer.global_forward_batches == 2
    trainer = trained(20, n_batches=7)
    assert (trainer.global_forward_batches, trainer.n_epochs, trainer.n_batches) == (7, 2, 7)
    assert "the length of the training loader" not in caplog.text


def test_a_loop_of_ones_own_evaluates_a_loader() -> None:
    class EvaluateCalls(EvaluateBatchLoop):
        def run(self, evaluator: Any, dataloader: Any) -> dict[str, Any]:
            names.append(evaluator.cur_dataloader_name)
            return super().run(evaluator, dataloader)

    class Constant(Loop):
        def run(self, evaluator: Any, dataloader: Any) -> Mapping[str, Any]:
            return {"batches": sum(1 for _ in dataloader)}

    class Fails(EvaluateBatchLoop):
        def run(self, evaluator: Any, dataloader: Any) -> dict[str, Any]:
            for number, batch in enumerate(dataloader):
                evaluator.update_progress_bar(number, evaluator.cur_dataloader_name)
                self.batch_step_fn(evaluator, {} if number else evaluator.move_data_to_device(batch))
            raise AssertionError

    names: list[Any] = []
    plain, calls = (Evaluator(Toy(), {"a": loader(8), "b": loader(4)}, {"e": Error()}, verbose=0) for _ in range(2))
    assert type(plain.evaluate_batch_loop) is EvaluateBatchLoop
    calls.evaluate_batch_loop = EvaluateCalls()
    assert plain.run() == calls.run()
    assert names == ["a", "b"]
    calls.evaluate_batch_loop = Constant()
    assert calls.run() == {"batches#a": 2, "batches#b": 1}
    assert calls.run(num_eval_batch_per_dl=1) == {"batches#a": 1, "batches#b": 1}
    calls.evaluate_batch_loop = Fails()
    with pytest.raises(ValueError, match="needs") as caught:
        calls.run()
    assert caught.value.__notes__ == ["raised in the evaluate_batch_loop, after 1 batches of the loader 'a'"]
    with pytest.raises(TypeError, match="evaluate_batch_loop must have a method run"):
        calls.evaluate_batch_loop = 3  # type: ignore[assignment]


def test_events_may_be_fired_from_a_loop_and_are_counted() -> None:
    restored: list[Any] = []

    class Saves(fastnlp.Callback):
        def on_save_checkpoint(self, trainer: Any) -> dict[str, int]:
            return {"at": trainer.global_forward_batches}

        def on_load_checkpoint(self, trainer: Any, states: Any) -> None:
            restored.append(states)

    events = ["on_before_backward", "on_evaluate_end", "on_sanity_check_end", "on_exception"]
    scribe = Scribe(*events)
    trainer = toy_trainer(8, [scribe, Saves()])
    for event, argument in zip(events, ({"loss": torch.ones(())}, {"acc": 1}, {}, ValueError()), strict=True):
        getattr(trainer, event)(argument)
    assert scribe.names == events
    assert trainer.callback_manager.callback_counter["on_before_backward"] == 1
    states = trainer.on_save_checkpoint()
    assert states == {"Saves": {"states": {"at": 0}}}
    trainer.on_load_checkpoint(states)
    assert restored == [{"at": 0}]
