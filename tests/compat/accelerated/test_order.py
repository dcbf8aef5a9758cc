"""A1-A11, A14 and A19: the order, number and arguments of hooks and events; evaluations, accumulation, limits, stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from cadenza import Callback, Run, on
from cadenza.compat.accelerated import callbacks
from cadenza.compat.accelerated.callbacks import EarlyStoppingCallback, StopTrainingError, TrainerCallback
from cadenza.compat.accelerated.run_config import TrainerRunConfig
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.compat.accelerated.utils import worker_init_fn
from tests.compat.accelerated import parts
from tests.compat.accelerated.parts import HERE, Again, Noting, config_of, data, noting_trainer, train, trainer_of, weights_of

TRAIN_STEP = ["on_train_step_start", "[calculate_train_batch_loss]", "on_train_step_end", "[backward_step]"]
UPDATE = ["[optimizer_step]", "[optimizer_zero_grad]"]
EVAL_STEP = ["on_eval_step_start", "[calculate_eval_batch_loss]", "on_eval_step_end"]
EVAL = ["[eval_epoch_start]", "on_eval_epoch_start", *EVAL_STEP * 2, "[eval_epoch_end]", "on_eval_epoch_end"]

EPOCH = [
    *["[train_epoch_start]", "on_train_epoch_start", *(TRAIN_STEP + UPDATE) * 3],
    *["[train_epoch_end]", "on_train_epoch_end", *EVAL, "[training_run_epoch_end]", "on_training_run_epoch_end"],
]

RUN = ["[training_run_start]", "on_training_run_start", *EPOCH * 2, "[training_run_end]", "on_training_run_end"]


def test_a1_to_a4_two_epochs_give_these_hooks_and_events_in_this_order_with_these_arguments() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 2, data(3), data(2))
    assert noting.log == ["on_init_end", "[create_train_dataloader]", "[create_eval_dataloader]", *RUN]
    ends = noting.of("on_train_step_end")
    assert [end["step"] for end in ends] == [0, 1, 2, 0, 1, 2]
    assert all(set(end) == {"batch", "batch_output", "step"} for end in ends)
    assert set(ends[0]["batch_output"]) == {"loss", "model_outputs", "batch_size"}
    assert torch.equal(ends[1]["batch"][0], data(3).tensors[0][2:4])
    assert noting.of("on_eval_epoch_start") == noting.of("on_eval_epoch_end") == [{"is_intermediate": False}] * 2
    at = {name: [epoch for seen, _, epoch in noting.seen if seen == name] for name, _, _ in noting.seen}
    assert at["on_train_epoch_start"] == at["on_train_epoch_end"] == at["on_training_run_epoch_end"] == [1, 2]
    assert at["on_eval_epoch_start"] == at["on_eval_epoch_end"] == [1, 2]
    assert at["on_training_run_end"] == [3]


class Around(parts.NotingTrainer):
    """Records where each part that may be overridden begins and ends."""

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        self.log.append("prepare")
        super()._prepare_model_optimizer_and_dataloaders()

    def _create_run_config(self, *arguments: Any, **keywords: Any) -> TrainerRunConfig:
        self.log.append("config")
        return super()._create_run_config(*arguments, **keywords)

    def _run_training(self) -> None:
        self.log.append("training")
        super()._run_training()
        self.log.append("trained")

    def _run_train_epoch(self, train_dl: Any) -> bool:
        self.log.append("train epoch" if train_dl is self._train_dataloader else "another loader")
        reached = super()._run_train_epoch(train_dl)
        self.log.append(f"train epoch: {reached}")
        return reached

    def _run_eval_epoch(self, *arguments: Any, **keywords: Any) -> None:
        self.log.append("eval epoch")
        super()._run_eval_epoch(*arguments, **keywords)
        self.log.append("evaluated")

    def _run_evaluation(self) -> None:
        self.log.append("evaluation")
        super()._run_evaluation()
        self.log.append("over")


def around() -> Around:
    noting = Noting()
    parts.NotingTrainer.log = noting.log
    trainer = trainer_of(Around, [noting])
    noting.log.clear()
    assert isinstance(trainer, Around)
    return trainer


def test_the_parts_of_a_training_are_called_in_this_order() -> None:
    trainer = around()
    train(trainer, 1, data(1), data(1), create_scheduler_fn=partial(ExponentialLR, gamma=0.1))
    assert trainer.log == [
        *["[create_train_dataloader]", "[create_eval_dataloader]", "prepare", "config", "[create_scheduler]", "training"],
        *["[training_run_start]", "on_training_run_start", "train epoch", "[train_epoch_start]", "on_train_epoch_start"],
        *[*TRAIN_STEP, "[optimizer_step]", "[scheduler_step]", "[optimizer_zero_grad]"],
        *["[train_epoch_end]", "on_train_epoch_end", "train epoch: False"],
        *["eval epoch", "[eval_epoch_start]", "on_eval_epoch_start", *EVAL_STEP, "[eval_epoch_end]", "on_eval_epoch_end"],
        *["evaluated", "[training_run_epoch_end]", "on_training_run_epoch_end", "[training_run_end]", "on_training_run_end"],
        "trained",
    ]
    train(trainer, 2, data(2), max_num_train_steps=3)
    assert [line for line in trainer.log if line.startswith("train epoch: ")][1:] == ["train epoch: False", "train epoch: True"]


def test_a19_an_evaluation_run_has_its_own_order_resets_the_history_and_needs_no_training() -> None:
    trainer = around()
    trainer.evaluate(data(1), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert trainer.log == [
        *["[create_eval_dataloader]", "prepare", "config", "evaluation", "[evaluation_run_start]", "on_evaluation_run_start"],
        *["eval epoch", "[eval_epoch_start]", "on_eval_epoch_start", *EVAL_STEP, "[eval_epoch_end]", "on_eval_epoch_end"],
        *["evaluated", "[evaluation_run_end]", "on_evaluation_run_end", "over"],
    ]
    train(trainer, 2, data(3), data(2))
    trainer.evaluate(data(1), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert trainer.run_history.get_metric_names() == {"evaluation_loss"}
    assert trainer.run_history.current_epoch == 1
    config = config_of(trainer)
    assert (config.num_epochs, config.train_dl_kwargs, config.eval_per_device_batch_size) == (1, None, 2)
    scripted = trainer_of(parts.ScriptedTrainer)
    scripted.evaluate(parts.Scripted(1.0, 2.0, 6.0), per_device_batch_size=2, dataloader_kwargs=HERE)
    assert scripted.run_history.get_latest_metric("evaluation_loss") == 3.0  # over samples
    assert config_of(scripted).to_dict()["num_update_steps_per_epoch"] == 0
    with pytest.raises(ValueError, match="evaluate needs a dataset"):
        trainer_of().evaluate()


def test_a2_on_init_end_has_no_run_config_and_a3_on_train_step_end_may_replace_the_loss() -> None:
    seen: list[Any] = []
    look = parts.Hooks(
        on_init_end=lambda trainer, **_: seen.append(trainer.run_config),
        on_training_run_start=lambda trainer, **_: seen.append(config_of(trainer).num_epochs),
    )
    train(trainer_of(callbacks=[look]), 3, data(1))
    assert seen == [None, 3]
    nothing = parts.Hooks(
        on_train_step_end=lambda trainer, batch_output, **_: batch_output.update(loss=0 * batch_output["loss"])
    )
    trainer = train(trainer_of(callbacks=[nothing]), 1, data(3))
    assert weights_of(trainer).tolist() == [0.5, 0.0]


def test_a5_five_batches_by_two_are_three_updates_after_batches_2_4_and_5_and_a6_the_loss_is_the_true_one() -> None:
    trainer, noting = noting_trainer()
    train(trainer, 1, data(5), gradient_accumulation_steps=2)
    counts = Counter(noting.log)
    assert counts["on_train_step_start"] == counts["on_train_step_end"] == counts["[backward_step]"] == 5
    assert counts["[optimizer_step]"] == counts["[optimizer_zero_grad]"] == config_of(trainer).num_update_steps_per_epoch == 3
    steps = [name for name in noting.log if name in ("[backward_step]", "[optimizer_step]")]
    assert "".join(name[1] for name in steps) == "bbobbobo"
    plain, accumulated = (train(trainer_of(lr=0.0), 1, data(8), gradient_accumulation_steps=steps) for steps in (1, 4))
    assert parts.metrics_of(plain) == parts.metrics_of(accumulated)
    inputs, targets = data(8).tensors
    with torch.no_grad():
        whole = torch.nn.functional.mse_loss(plain.model(inputs), targets).item()
    assert parts.metrics_of(plain)["train_loss_epoch"] == [pytest.approx(whole, rel=1e-6)]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a6_accumulated_batches_give_the_update_of_one_large_batch(accumulate: int) -> None:
    large = train(trainer_of(), 2, data(5, batch_size=1), batch_size=accumulate)
    small = train(trainer_of(), 2, data(5, batch_size=1), batch_size=1, gradient_accumulation_steps=accumulate)
    assert torch.allclose(weights_of(large), weights_of(small), atol=1e-6)


def test_a7_the_limit_of_steps_ends_the_run_normally_and_a_kept_history_continues(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, noting = noting_trainer()
    train(trainer, 9, data(3), data(2), max_num_train_steps=4)
    counts = Counter(noting.log)
    assert counts["on_train_step_end"] == counts["[optimizer_step]"] == 4
    assert counts["on_train_epoch_end"] == counts["on_eval_epoch_end"] == counts["on_training_run_epoch_end"] == 2
    assert trainer.run_history.current_epoch == 3
    assert "on_stop_training_error" not in counts
    assert noting.log[-1] == "on_training_run_end"
    assert "limit of 4 training steps was reached in epoch 2" in capsys.readouterr().out
    assert config_of(trainer).num_epochs == 2
    noting.log.clear()
    train(trainer, 2, data(3), max_num_train_steps=10)  # a limit beyond the epochs does not extend the training
    assert Counter(noting.log)["on_train_step_end"] == 6
    train(trainer, 2, data(3))
    assert "limit" not in capsys.readouterr().out
    train(trainer, 2, data(3), reset_run_history=False)
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 4
    assert trainer.run_history.current_epoch == 5


def test_gradients_are_clipped_once_they_are_complete_and_overrides_may_clip_or_keep_them() -> None:
    class Zero(Trainer):
        def _clip_gradients(self) -> None:
            for parameter in self.model.parameters():
                parameter.grad = None

    class Norm(Trainer):
        def _clip_gradients(self) -> None:
            value = config_of(self).gradient_clip_value
            assert value is not None
            self._accelerator.clip_grad_norm_(self.model.parameters(), value)

    trainer = train(trainer_of(lr=1.0), 1, data(2), gradient_clip_value=0.25, gradient_accumulation_steps=2)
    assert weights_of(trainer).tolist() == [0.75, 0.25]
    assert weights_of(train(trainer_of(Zero), 1, data(2), gradient_clip_value=1.0)).tolist() == [0.5, 0.0]
    norm = train(trainer_of(Norm, lr=1.0), 1, data(1), gradient_clip_value=0.25)
    assert (weights_of(norm) - weights_of(trainer_of())).norm().item() == pytest.approx(0.25, rel=1e-4)

    class Keeping(Trainer):
        def optimizer_zero_grad(self) -> None:
            kept.append(next(self.model.parameters()).grad)

    kept: list[Any] = []
    trainer = train(trainer_of(Keeping), 1, data(2))
    assert kept[0] is kept[1] is next(trainer.model.parameters()).grad


def test_each_loader_argument_replaces_a_default() -> None:
    trainer, rows = trainer_of(), data(4)
    sampler = torch.utils.data.SequentialSampler(rows)
    kwargs = {**HERE, "sampler": sampler, "batch_size": 4}
    trainer.train(rows, 1, data(2), 2, train_dataloader_kwargs=kwargs, eval_dataloader_kwargs=HERE)
    config = config_of(trainer)
    assert config.to_dict()["train_dl_kwargs"] == {**kwargs, "pin_memory": False, "worker_init_fn": worker_init_fn}
    assert (config.train_per_device_batch_size, config["eval_per_device_batch_size"]) == (4, 2)
    assert trainer.get_default_train_dl_kwargs(8)["shuffle"] is True
    assert trainer.get_default_eval_dl_kwargs(8)["shuffle"] is False
    batches = {**HERE, "batch_sampler": torch.utils.data.BatchSampler(sampler, 3, drop_last=False)}  # for shuffle and size
    trainer.train(rows, 1, train_dataloader_kwargs=batches)
    assert parts.run_of(trainer).progress.batch == 3


# -- stops and errors --------------------------------------------------------------------------------------


class Raises(TrainerCallback):
    """Raises an error at the n-th time of an event."""

    def __init__(self, event: str, error: BaseException, at: int = 1) -> None:
        def hook(trainer: Trainer, *_: Any, **keywords: Any) -> None:
            self.calls += 1
            if self.calls == at:
                raise error

        self.calls = 0
        setattr(self, event, hook)


def stopped_in(event: str, at: int = 1) -> tuple[Trainer, Noting, Again]:
    """Return a trainer that was stopped in an event, and the callbacks before and after the one that stopped it."""
    before, after = Noting(), Again()
    trainer = trainer_of(callbacks=[before, Raises(event, StopTrainingError("enough"), at), after])
    train(trainer, 3, data(3), data(2))
    return trainer, before, after


IN_EPOCH_2 = [
    *((event, 2) for event in ("on_train_epoch_start", "on_train_epoch_end", "on_training_run_epoch_end")),
    *((event, 2) for event in ("on_eval_epoch_start", "on_eval_epoch_end")),
    *(("on_train_step_start", 5), ("on_train_step_end", 5)),
    *(("on_eval_step_start", 3), ("on_eval_step_end", 3), ("on_eval_step_end", 4)),  # the last batch
]


@pytest.mark.parametrize(("event", "at"), IN_EPOCH_2)
def test_a8_after_a_stop_on_stop_training_error_is_called_once_and_the_run_ends(
    event: str, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, before, after = stopped_in(event, at)
    assert before.log[-3:] == [event, "on_stop_training_error", "on_training_run_end"]
    assert after.log == before.log[:-3] + before.log[-2:]  # later callbacks do not get the event itself
    assert trainer.run_history.current_epoch == 2
    assert "enough" in capsys.readouterr().out
    outcome = parts.run_of(trainer).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.reason) == ("stopped", "enough")
    assert "Raises at epoch" in parts.run_of(trainer).why("stopped")


def stop(self: Trainer, *_: Any) -> None:
    raise StopTrainingError("enough")


@pytest.mark.parametrize(
    ("hook", "last"),
    [
        ("train_epoch_start", "on_training_run_start"),
        ("calculate_train_batch_loss", "on_train_step_start"),
        *(
            (hook, "on_train_step_end")
            for hook in ("backward_step", "optimizer_step", "optimizer_zero_grad", "train_epoch_end")
        ),
        ("eval_epoch_start", "on_train_epoch_end"),
        ("calculate_eval_batch_loss", "on_eval_step_start"),
        ("eval_epoch_end", "on_eval_step_end"),
        ("training_run_epoch_end", "on_eval_epoch_end"),
    ],
)
def test_a8_a_hook_may_stop_as_well(hook: str, last: str) -> None:
    noting = Noting()
    trainer = train(trainer_of(type("Stopping", (Trainer,), {hook: stop}), [noting]), 3, data(3), data(2))
    assert noting.log[-3:] == [last, "on_stop_training_error", "on_training_run_end"]
    assert trainer.run_history.current_epoch == 1


def test_a8_after_a_stop_at_the_end_of_a_step_there_is_no_backward_and_no_update() -> None:
    @on(Callback.on_after_backward)
    def count(run: Run, outputs: Any) -> None:
        backward.append(run.progress.batch_in_epoch)

    backward: list[int] = []
    trainer, noting = noting_trainer(Raises("on_train_step_end", StopTrainingError("enough"), at=2), count)
    train(trainer, 3, data(5), gradient_accumulation_steps=3)
    assert backward == [0]  # nor do native callbacks get the remaining batch of the window
    counts = Counter(noting.log)
    assert (counts["[calculate_train_batch_loss]"], counts["[backward_step]"], counts["[optimizer_step]"]) == (2, 1, 0)
    assert weights_of(trainer).tolist() == [0.5, 0.0]


ERRORS = (RuntimeError("broken"), KeyboardInterrupt())
RUNS = ("training", "evaluation")


@pytest.mark.parametrize(
    ("run", "event", "error"),
    [
        *((run, f"on_{run}_run_{end}", StopTrainingError("enough")) for run in RUNS for end in ("start", "end")),
        *(("training", event, error) for event in ("on_train_step_end", "on_train_epoch_end") for error in ERRORS),
        *((run, "on_eval_step_end", error) for run in RUNS for error in ERRORS),
    ],
)
def test_a9_and_a10_stops_outside_epochs_and_errors_are_raised_with_no_event(
    run: str, event: str, error: BaseException
) -> None:
    before, after = Noting(), Again()
    trainer = trainer_of(callbacks=[before, Raises(event, error), after])
    runs: dict[str, Callable[[], object]] = {
        "training": lambda: train(trainer, 2, data(3), data(2)),
        "evaluation": lambda: trainer.evaluate(data(1), dataloader_kwargs=HERE),
    }
    with pytest.raises(type(error)):
        runs[run]()
    assert before.log[-1] == event
    assert event not in after.log
    assert "on_training_run_end" not in [*before.log[:-1], *after.log]


@pytest.mark.parametrize("hook", ["evaluation_run_start", "evaluation_run_end"])
def test_a9_a_stop_in_a_hook_around_an_evaluation_run_or_in_the_constructor_is_an_error(hook: str) -> None:
    with pytest.raises(StopTrainingError, match="enough"):
        trainer_of(type("Stopping", (Trainer,), {hook: stop})).evaluate(data(1), dataloader_kwargs=HERE)
    with pytest.raises(StopTrainingError):
        trainer_of(callbacks=[Raises("on_init_end", StopTrainingError("enough"))])


def test_a10_an_attribute_error_in_a_callback_is_raised_and_a14_a_missing_metric_is_named() -> None:
    class Mistyped(TrainerCallback):
        def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
            self.conut += 1  # type: ignore[attr-defined]  # the mistake that is meant

    with pytest.raises(AttributeError, match="conut") as raised:
        train(trainer_of(callbacks=[Mistyped]), 1, data(1))
    assert "raised in Mistyped.on_epoch_start (callback 2 of 3)" in "".join(raised.value.__notes__)
    with pytest.raises(ValueError, match=r"'eval_loss_epoch'.*The run history has train_loss_epoch"):
        train(trainer_of(callbacks=[EarlyStoppingCallback]), 2, data(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a11_a_loss_that_is_not_finite_ends_a_training_and_the_process_but_only_stops_an_evaluation_run(bad: float) -> None:
    class Counting(parts.ScriptedTrainer):
        def backward_step(self, loss: torch.Tensor) -> None:
            backward.append(loss.item())
            super().backward_step(loss)

    backward: list[float] = []
    before, after = Noting(), Again()
    trainer = trainer_of(Counting, [before, callbacks.TerminateOnNaNCallback, after])
    with pytest.raises(SystemExit, match=str(bad)):
        train(trainer, 2, parts.Scripted(1.0, bad, 1.0), batch_size=1)
    assert backward == [1.0]
    assert before.log[-2:] == ["on_stop_training_error", "on_training_run_end"]
    assert after.log[-1] == "on_stop_training_error"
    before.log.clear()
    trainer.evaluate(parts.Scripted(1.0, bad, 1.0), per_device_batch_size=1, dataloader_kwargs=HERE)
    assert before.log.count("on_eval_step_end") == 2
    assert before.log[-3:] == ["on_eval_step_end", "on_stop_training_error", "on_evaluation_run_end"]


@pytest.mark.parametrize(
    ("metrics", "arguments", "epochs"),
    [
        ([1.0, 0.995, 0.1], {}, 2),
        ([1.0, 0.995, 0.98, 0.975, 0.974, 0.1], {"early_stopping_patience": 2}, 5),
        ([1.0, 0.1], {"early_stopping_patience": 0}, 1),
        ([0.5, 0.52, 0.525, 0.9], {"greater_is_better": True}, 3),
        ([1.0, 0.9, 0.8, 0.7], {}, 4),
        ([1.0, 0.5, 0.1], {"early_stopping_threshold": 0.5}, 2),  # the threshold is strict
        ([float("nan"), 1.0, 0.5, 0.6, 0.7], {"early_stopping_patience": 2, "early_stopping_threshold": 0.0}, 5),
        ([float("nan"), float("nan"), 0.1], {"early_stopping_patience": 2}, 2),  # NaN is no improvement
    ],
)
def test_a14_early_stopping_stops_after_the_originals_sequences(metrics: list[float], arguments: Any, epochs: int) -> None:
    def report(trainer: Trainer, **kwargs: Any) -> None:
        trainer.run_history.update_metric("result", metrics[trainer.run_history.current_epoch - 1])

    callbacks = [parts.Hooks(on_eval_epoch_end=report), EarlyStoppingCallback(watch_metric="result", **arguments)]
    trainer = train(trainer_of(callbacks=callbacks), len(metrics), data(1), data(1))
    assert len(trainer.run_history.get_metric_values("result")) == epochs


@pytest.mark.parametrize(("reset", "best"), [(True, 5.0), (False, 1.0)])
def test_another_training_resets_early_stopping_unless_reset_on_train_is_false(reset: bool, best: float) -> None:
    stop = EarlyStoppingCallback(early_stopping_patience=9, reset_on_train=reset, watch_metric="train_loss_epoch")
    trainer = trainer_of(parts.ScriptedTrainer, [stop])
    for loss in (1.0, 5.0):
        train(trainer, 1, parts.Scripted(loss), batch_size=1)
    assert stop.best_metric == best
