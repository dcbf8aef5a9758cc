"""A run names what is trained wrongly without an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torchmetrics import MeanAbsoluteError, MetricCollection, R2Score

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import (
    BestWeights,
    Checkpoint,
    EarlyStopping,
    Evaluate,
    LearningRate,
    LogTraining,
    Warmup,
)
from cadenza.callbacks.freezing import Freeze
from cadenza.errors import LossError
from cadenza.testing import tiny_trainer
from tests.test_first_hour import DATA, squared, trainer


def of_another_model(model: nn.Module, batch: Any) -> Any:
    return squared(OTHER, batch)


OTHER = nn.Linear(4, 1)
to_none = on(Callback.on_before_optimizer_step)(lambda run: run.optimizers[0].zero_grad())
to_zero = on(Callback.on_before_optimizer_step)(lambda run: run.model.zero_grad(set_to_none=False))


@pytest.mark.parametrize(
    ("compute_loss", "hooks", "steps"), [(of_another_model, [], 1), (squared, [to_none], 1), (squared, [to_zero], 20)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_in_which_no_gradient_reaches_the_optimizer_is_warned_once(
    compute_loss: Any, hooks: list[Any], steps: int, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(*hooks, compute_loss=compute_loss, max_epochs=12, precision=precision).fit()
    said = f"after {steps} step{'s' * (steps > 1)} of this run, no update of run.optimizers[0] (SGD) has had a gradient"
    assert caplog.text.count(said) == 1
    assert caplog.text.count("has had a gradient") == 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)


def two_optimizers(model: Pair) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(part.parameters(), 0.01) for part in (model.first, model.second)]


@pytest.mark.parametrize("way", ["step_fn", "compute_loss"])
def test_one_of_several_optimizers_that_is_left_out_is_named(way: str, caplog: pytest.LogCaptureFixture) -> None:
    def step(run: Run, batch: Any) -> Any:
        loss = squared(run.model.first, batch)  # type: ignore[arg-type]
        run.backward(loss)
        run.update(run.optimizers[0])
        return loss

    model = Pair()
    compute_loss = None if way == "step_fn" else lambda pair, batch: squared(pair.first, batch)
    step_fn = step if way == "step_fn" else None
    options: Any = {"max_epochs": 2, "progress": False, "device": "cpu"}
    Trainer(model, two_optimizers(model), DATA, compute_loss, step_fn=step_fn, **options).fit()
    steps = 40 if way == "step_fn" else 20  # an optimizer that has not stepped may begin later
    assert f"after {steps} steps of this run, no update of run.optimizers[1] (SGD) has had a gradient" in caplog.text
    assert "run.optimizers[0]" not in caplog.text


def test_optimizers_that_take_turns_or_begin_later_and_parts_that_are_frozen_are_no_mistake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turn = [0]

    def by_turns(model: Any, batch: Any) -> Any:
        turn[0] += 1
        return squared(model.first if turn[0] % 3 else model.second, batch)

    for callbacks in ([], [Freeze("second", until="1 epoch")]):
        model, loss = Pair(), by_turns if not callbacks else lambda pair, batch: squared(pair.first, batch)
        options: Any = {"max_epochs": 2, "progress": False, "device": "cpu"}
        optimizers = [*two_optimizers(model)]
        Trainer(model, optimizers, DATA, loss, callbacks=callbacks, **options).fit()
    assert "has had a gradient" not in caplog.text


def test_a_loss_of_another_model_in_a_loop_is_not_only_blamed_on_zero_grad() -> None:
    for step in trainer(compute_loss=None).steps():
        for batch in step:
            step.backward(squared(OTHER, batch))
        with pytest.raises(LossError, match=r"the loss depends on no parameter of the run, such as that of another model"):
            step.update()
        break


def test_a_run_takes_the_watch_off_its_optimizer_after_the_first_step() -> None:
    counts: list[int] = []
    count = on(Callback.on_step_start)(lambda run: counts.append(len(run.optimizers[0]._optimizer_step_post_hooks)))
    trainer(count).fit()
    assert counts == [1] + [0] * 19


def test_a_warm_up_longer_than_the_run_is_a_warning_and_a_line_of_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    for length, steps in (("500 steps", 500), ("3 epochs", 60)):
        caplog.clear()
        made = trainer(Warmup(length), max_epochs=2)
        said = f"Warmup('{length}') never reaches the full rate: it takes {steps} steps, and the run ends after 40"
        assert f"! {said}" in str(made.plan())
        made.fit()
        assert caplog.text.count(said) == 1
    caplog.clear()
    for length in ("40 steps", "2 epochs", "100%"):
        trainer(Warmup(length), max_epochs=2).fit()
    assert "never reaches" not in caplog.text


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def dropping(*callbacks: Any, **limits: Any) -> Trainer:
    options: Any = {"max_epochs": 3, "progress": False, "device": "cpu", **limits}
    return Trainer(Dropping, lambda given: torch.optim.SGD(given, 0.01), DATA, squared, callbacks=callbacks, **options)


@pytest.mark.parametrize(
    ("moment", "options", "limits"),
    [
        (Callback.on_epoch_end, {"at": 1}, {}),
        (Callback.on_step_end, {"every": 3}, {}),
        (Callback.on_step_end, {"at": 5}, {"max_steps": 10}),
        (Callback.on_epoch_end, {"at": 3}, {"max_epochs": 5}),
    ],
)
def test_an_evaluation_mode_that_a_hook_leaves_is_a_warning_once(
    moment: Any, options: Any, limits: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @on(moment, **options)
    def evaluate(run: Run) -> None:
        run.model.eval()

    dropping(evaluate, **limits).fit()
    assert caplog.text.count("1 module with parameters that are trained, in evaluation mode: the model.") == 1
    assert caplog.text.count("after a model.eval() in it") == 1


@pytest.mark.parametrize("forgets", [True, False])
def test_an_evaluation_mode_that_a_loop_leaves_is_a_warning_once(forgets: bool, caplog: pytest.LogCaptureFixture) -> None:
    made = dropping()
    for step in made.steps():
        if not forgets:
            made.model.train()
        for batch in step:
            step.backward(squared(made.model, batch))
        if made.run.progress.step % 20 == 19:
            made.model.eval()
    assert caplog.text.count("in evaluation mode: the model.") == int(forgets)


def test_an_evaluation_mode_after_the_last_step_or_on_purpose_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    class Normed(Dropping):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[0].eval()
            return self

    @on(Callback.on_epoch_end)
    def evaluated(run: Run) -> None:
        run.model.eval()
        if not run.progress.finished:
            run.model.train()

    at_end = on(Callback.on_fit_end)(lambda run: run.model.eval())
    dropping(evaluated, at_end, Evaluate(DATA)).fit()
    tiny_trainer(model=Normed(), loader=DATA, compute_loss=squared, epochs=3).fit()
    dropping(Freeze("0", until="1 epoch"), at_end).fit()
    assert "in evaluation mode" not in caplog.text


def test_a_parameter_that_is_added_in_the_last_epoch_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_epoch_start)
    def add(run: Run) -> None:
        if run.progress.epoch == 2:
            run.model.register_parameter("added", nn.Parameter(torch.zeros(1)))

    tiny_trainer(model=nn.Sequential(nn.Linear(1, 1)), epochs=3, callbacks=[add]).fit()
    assert "no optimizer holds 1 parameter that require a gradient, so they are not trained: added" in caplog.text


@pytest.mark.parametrize("limits", [{}, {"max_steps": 30}, {"max_steps": 10}])
def test_a_layer_that_a_hook_replaces_is_a_warning_once(limits: Any, caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_step_end, at=5)
    def new_head(run: Run) -> None:
        run.model.add_module("2", nn.Linear(4, 1))

    dropping(new_head, **limits).fit()
    assert caplog.text.count("no optimizer holds 2 parameters that require a gradient, so they are not trained: 2.weight") == 1


@pytest.mark.parametrize(
    ("schedule", "arguments", "said"),
    [
        (lambda one: CosineAnnealingLR(one, 20 * 6), {"accumulate": 4}, "T_max=120 is the number of batches"),
        (lambda one: OneCycleLR(one, 0.1, total_steps=20 * 6), {"accumulate": 4}, "total_steps=120 is the number of batches"),
        (lambda one: CosineAnnealingLR(one, 60), {}, "its rate rises again after T_max=60"),
        (
            lambda one: SequentialLR(one, [LinearLR(one, total_iters=20), CosineAnnealingLR(one, 60)], [20]),
            {},
            "CosineAnnealingLR after each of 120 updates, and its rate rises again after T_max=60",
        ),
        (lambda one: CosineAnnealingLR(one, 120), {}, None),
        (lambda one: CosineAnnealingLR(one, 30), {"accumulate": 4}, None),
        (lambda one: SequentialLR(one, [LinearLR(one, total_iters=20), CosineAnnealingLR(one, 100)], [20]), {}, None),
        (lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 20), {}, None),
    ],
)
def test_a_schedule_that_does_not_end_with_the_run_is_questioned(
    schedule: Any, arguments: Any, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(LearningRate(schedule), max_epochs=6, **arguments).fit()
    assert caplog.text.count("LearningRate steps ") == (said is not None)
    assert (said or "") in caplog.text


def test_a_cosine_over_epochs_that_rises_again_is_questioned(caplog: pytest.LogCaptureFixture) -> None:
    trainer(LearningRate(lambda one: CosineAnnealingLR(one, 3), "1 epoch"), max_epochs=6).fit()
    assert "after each of 6 epochs, and its rate rises again after T_max=3" in caplog.text


@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_tokens": 160, "tokens": lambda batch: len(batch[0])}])
def test_the_logged_rate_is_that_of_the_next_update_with_each_schedule_and_unit(limits: Any) -> None:
    used: list[float] = []

    class See(Callback):
        after = (Warmup,)

        def on_before_optimizer_step(self, run: Run) -> None:
            used.append(run.optimizers[0].param_groups[0]["lr"])

    cosine = LearningRate(lambda one, total: CosineAnnealingLR(one, total))
    run = trainer(Warmup("50%"), cosine, See(), LogTraining("1 step"), **{"max_epochs": None, **limits}).fit()
    assert len(used) == 20
    assert [rate for _, rate in run.history["train/lr"]][:-1] == pytest.approx(used[1:])


def test_a_schedule_that_is_new_in_a_run_that_continues_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def cosine() -> LearningRate:
        return LearningRate(lambda one, total: CosineAnnealingLR(one, total))

    trainer(Checkpoint("5 steps"), max_steps=10, directory=tmp_path / "without").fit()
    trainer(Checkpoint("5 steps"), cosine(), max_steps=20, directory=tmp_path / "without").fit(resume="auto")
    said = "the checkpoint has no schedule of LearningRate, which begins at position 0 after 10 steps. "
    assert caplog.text.count(f"{said}Make it for the rest of the run, such as with total - 10 for total") == 1
    caplog.clear()
    stop = on(Callback.on_step_end, at=10)(lambda run: run.stop("enough"))
    trainer(Checkpoint("5 steps"), cosine(), stop, directory=tmp_path / "with").fit()
    trainer(Checkpoint("5 steps"), cosine(), directory=tmp_path / "with").fit(resume="auto")
    assert "has no schedule" not in caplog.text


def fitted(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": squared(model, batch), "predictions": model(batch[0]).detach(), "targets": batch[1]}


@pytest.mark.parametrize(
    ("watching", "said"),
    [
        (lambda: Checkpoint(keep_best=("eval/r2", "min")), "Checkpoint watches 'eval/r2' with mode='min', but a higher value"),
        (lambda: EarlyStopping("eval/r2", "min"), "EarlyStopping watches 'eval/r2' with mode='min'"),
        (lambda: BestWeights("eval/mae", "max"), "mode='max', but a lower value"),
        (lambda: EarlyStopping("train/mae", "max"), "EarlyStopping watches 'train/mae'"),
        (lambda: LearningRate(ReduceLROnPlateau, monitor="eval/r2"), "LearningRate watches 'eval/r2' with mode='min'"),
        (lambda: Checkpoint(keep_best=("eval/r2", "max")), None),
        (lambda: EarlyStopping("eval/mae", "min"), None),
        (lambda: EarlyStopping("eval/loss"), None),
        (lambda: LearningRate(lambda one: ReduceLROnPlateau(one, mode="max"), monitor="eval/r2"), None),
    ],
)
def test_a_monitor_in_the_other_direction_than_its_metric_is_a_warning(
    watching: Any, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate = Evaluate(DATA, metrics={"r2": R2Score(), "mae": MeanAbsoluteError()})
    log = LogTraining("1 epoch", metrics={"mae": MeanAbsoluteError()})
    trainer(watching(), evaluate, log, compute_loss=fitted, max_epochs=2, directory=tmp_path).fit()
    assert caplog.text.count("of this metric is better") == (said is not None)
    assert (said or "") in caplog.text


def test_one_metric_for_the_training_and_for_an_evaluation_is_an_error() -> None:
    metric = MeanAbsoluteError()
    each: list[Any] = [{"mae": metric}, MetricCollection({"mae": metric})]
    for given in each:
        log, evaluate = LogTraining("1 epoch", metrics=given), Evaluate(DATA, metrics=given)
        with pytest.raises(ValueError, match=r"the metric 'mae' of LogTraining and one of 'eval' are one object"):
            trainer(log, evaluate, compute_loss=fitted).fit()
    two = [LogTraining("1 epoch", metrics=[metric]), LogTraining("5 steps", metrics=[metric], prefix="often")]
    with pytest.raises(ValueError, match="Create a metric for each"):
        trainer(*two, compute_loss=fitted).fit()
    evaluations = [Evaluate(DATA, metrics=[metric], name=name) for name in ("eval", "test")]  # one after the other
    trainer(*evaluations, LogTraining("1 epoch", metrics={"mae": MeanAbsoluteError()}), compute_loss=fitted).fit()


def test_without_a_seed_a_list_of_batches_trains_as_the_loop_by_hand() -> None:
    def noisy(model: nn.Module, batch: Any) -> Any:
        return squared(model, (batch[0] + torch.randn(8, 4), batch[1]))

    by_hand, model = nn.Linear(4, 1), nn.Linear(4, 1)
    model.load_state_dict(by_hand.state_dict())
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(by_hand.parameters(), 0.01)
    for batch in DATA:
        noisy(by_hand, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    Trainer(model, optimizer, DATA, noisy, max_epochs=1, progress=False, device="cpu").fit()
    assert torch.equal(model.weight, by_hand.weight)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.ModuleList([model, nn.DataParallel(nn.Linear(4, 1))])])
def test_a_model_in_a_wrapper_for_several_devices_is_an_error(wrap: Any) -> None:
    model = wrap(nn.Linear(4, 1))
    with pytest.raises(TypeError, match=r"wrapped in DataParallel; .*DistributedSampler.*driver=\"ddp\""):
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1), DATA, squared, max_epochs=1)


@pytest.mark.parametrize("way", ["fit", "steps", "step_fn"])
def test_a_parameter_of_two_optimizers_is_a_warning_unless_a_step_fn_updates_them(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01), torch.optim.SGD([model.bias], 0.01)]
    made: dict[str, Any] = {"step_fn": stepped} if way == "step_fn" else {"compute_loss": squared}
    made |= {"max_epochs": 1, "progress": False, "device": "cpu"}
    given = Trainer(model, optimizers, DATA, **made)
    if way == "steps":
        for step in given.steps():
            for batch in step:
                step.backward(squared(model, batch))
    else:
        given.fit()
    said = "two optimizers hold 1 parameter, so each step updates it twice: bias. Give each parameter to one optimizer"
    assert caplog.text.count(said) == (way != "step_fn")


def stepped(run: Run, batch: Any) -> Any:
    loss = squared(run.model, batch)
    run.backward(loss)
    run.update()
    return loss


@pytest.mark.parametrize("every", ["1 step", "1 epoch"])
def test_a_schedule_that_a_hook_steps_too_is_an_error(every: Any, tmp_path: Path) -> None:
    rates = LearningRate(lambda one: CosineAnnealingLR(one, 60), every)
    twice = on(Callback.on_epoch_start, at=2)(lambda run: rates.scheduler.step())  # type: ignore[union-attr]
    trainer(rates, Checkpoint("5 steps"), max_epochs=1, directory=tmp_path).fit()
    trainer(rates, Checkpoint("5 steps"), max_epochs=2, directory=tmp_path).fit(resume="auto")
    with pytest.raises(RuntimeError, match=r"stepped by a hook or step_fn too. Remove scheduler.step\(\) from"):
        trainer(rates, twice, max_epochs=3).fit()


def test_another_loss_in_a_run_that_continues_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(Checkpoint(), directory=tmp_path).fit()
    trainer(Checkpoint(), directory=tmp_path, max_epochs=2).fit(resume="auto")
    assert "compute_loss" not in caplog.text
    mean = supervised(nn.L1Loss())
    trainer(Checkpoint(), compute_loss=mean, directory=tmp_path, max_epochs=3).fit(resume="auto")
    assert caplog.text.count("- compute_loss: squared; + compute_loss: supervised(L1Loss())") == 1
    caplog.clear()
    trainer(Checkpoint(), directory=tmp_path, max_epochs=3).fit(resume="auto")
    assert "other arguments, which changed nothing: compute_loss supervised(L1Loss()) -> squared" in caplog.text
