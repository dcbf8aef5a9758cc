"""Hooks, the views that they get, and states that are loaded before them: as in Lightning's own trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the tests of Lightning's callbacks need the package lightning")

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from torchmetrics import MeanMetric

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.compat.lightning.events import EVENTS
from cadenza.errors import AdapterError
from tests.compat.lightning.home import HOOKS, Call, Lit, Recorder, at_home, batches_of, native, native_trainer, sgd

# -- the order of the hooks --------------------------------------------------------------------------------

BY_STEPS = {"val_check_interval": 2, "check_val_every_n_epoch": None}


class Stop(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class Fail(pl.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise KeyError("a test")


def calls(train: Callable[..., Any], *callbacks: Any, **arguments: Any) -> list[Call]:
    recorder = Recorder()
    with suppress(KeyError):  # of `Fail`
        train([*callbacks, recorder], **arguments)
    # The gradients are set to None after the update; Lightning does it before the next backward pass.
    return [call for call in recorder.calls if call[0] != "on_before_zero_grad"]


SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "epochs": ({"max_epochs": 2}, {"max_epochs": 2}),
    "accumulation": (
        {"max_epochs": 2, "accumulate_grad_batches": 2, "batches": 4},
        {"max_epochs": 2, "accumulate": 2, "batches": 4},
    ),
    "max_steps inside an epoch": ({"max_steps": 5, "batches": 4}, {"max_steps": 5, "batches": 4}),
    "evaluation by steps": ({"max_epochs": 2, **BY_STEPS}, {"max_epochs": 2, "every": "2 steps"}),
    "evaluation every second epoch": ({"max_epochs": 3, "check_val_every_n_epoch": 2}, {"max_epochs": 3, "every": "2 epochs"}),
    "no evaluation": ({"max_epochs": 1, "valid": 0}, {"max_epochs": 1, "valid": 0}),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_hooks_of_a_run_are_those_of_lightning(tmp_path: Path, scenario: str) -> None:
    home, here = SCENARIOS[scenario]
    assert calls(native, **here) == calls(partial(at_home, root=tmp_path), **home)


HOOKS_THAT_FAIL = [
    *("on_train_batch_end", "on_before_backward", "on_validation_batch_end", "on_validation_end", "on_train_epoch_end"),
    "on_train_end",
]


@pytest.mark.parametrize(
    "other",
    [*map(Stop, (2, 4, 6)), *map(Fail, HOOKS_THAT_FAIL)],
    ids=lambda one: f"{type(one).__name__}{[*vars(one).values()][:1] if isinstance(one, Stop) else [*vars(one)]}",
)
def test_a_stop_and_an_error_end_a_run_as_in_lightning(tmp_path: Path, other: Any) -> None:
    # A stop inside an epoch: Lightning evaluates once more, and calls the end of the epoch. After an error it calls no end.
    home = calls(partial(at_home, root=tmp_path), other, max_epochs=3, batches=4)
    assert calls(native, other, max_epochs=3, batches=4) == home


def test_a_short_window_has_the_same_hooks(tmp_path: Path) -> None:
    # Its gradient differs: Lightning divides it by the full number of batches.
    def names(found: list[Call]) -> list[Call]:
        return [tuple(one for one in call if not isinstance(one, float)) for call in found]

    home = calls(partial(at_home, root=tmp_path), max_epochs=2, accumulate_grad_batches=2)
    assert names(calls(native, max_epochs=2, accumulate=2)) == names(home)


def test_windows_that_change_their_size_have_the_same_hooks(tmp_path: Path) -> None:
    windows = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    here = calls(native, windows, max_epochs=2, batches=4)
    assert here == calls(partial(at_home, root=tmp_path), windows, max_epochs=2, batches=4)


class Optional(Fail):
    on_fault = "disable"


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"])
def test_a_callback_that_is_disabled_for_an_error_leaves_the_others_all_their_hooks(hook: str) -> None:
    assert calls(native, Optional(hook), max_epochs=2) == calls(native, max_epochs=2)


def test_only_the_errors_of_a_callback_itself_disable_it() -> None:
    with pytest.raises(KeyError) as raised:  # the first callback calls the hooks of all
        native([Optional("on_fit_start"), Fail("on_train_epoch_end")])
    assert any("raised in Fail.on_train_epoch_end" in note for note in raised.value.__notes__)


def test_a_sanity_check_has_its_two_hooks(tmp_path: Path) -> None:
    home = calls(partial(at_home, root=tmp_path), max_epochs=1, num_sanity_val_steps=1)
    without = [call for call in home if not (call[0].startswith("on_validation") and call[4] == "sanity_check")]
    assert len(without) < len(home)
    assert calls(native, max_epochs=1, sanity=1) == without


def test_several_callbacks_get_one_hook_after_the_other(tmp_path: Path) -> None:
    def order(train: Callable[..., Any], **arguments: Any) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []

        class Named(pl.Callback):
            def __init__(self, name: str) -> None:
                for hook in HOOKS:
                    if hook != "on_before_zero_grad":
                        setattr(self, hook, lambda *_, _hook=hook, **__: found.append((name, _hook)))

        train([Named("first"), Named("second")], max_epochs=1, batches=2, **arguments)
        return found

    home = order(partial(at_home, root=tmp_path), num_sanity_val_steps=1)
    inside = home.index(("second", "on_sanity_check_start")) + 1, home.index(("first", "on_sanity_check_end"))
    assert order(native, sanity=1) == home[: inside[0]] + home[inside[1] :]


def test_evaluate_and_predict_are_stages_of_their_own() -> None:
    recorder = Recorder()
    trainer = native_trainer([recorder], valid=0)
    trainer.evaluate(batches_of(1))
    trainer.evaluate(batches_of(1), name="test")
    trainer.predict(batches_of(1))
    found = [(call[0], call[3].value if hasattr(call[3], "value") else call[3], call[4]) for call in recorder.calls]
    wanted = []
    for stage, name in (("validate", "validation"), ("test", "test"), ("predict", "predict")):
        hooks = ["start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"]
        wanted += [(hook, stage, stage) for hook in ["setup", *(f"on_{name}_{hook}" for hook in hooks), "teardown"]]
    assert found == wanted


def test_the_table_has_every_hook_of_lightning() -> None:
    assert set(EVENTS) == set(HOOKS)


# -- states ------------------------------------------------------------------------------------------------


def pickled(count: int) -> dict[str, Any]:
    """Return values that Lightning pickles in its checkpoints."""
    return {"kinds": {1, 2}, "mean": numpy.full(2, count), "last": deque([count], maxlen=2), "path": Path("a")}


class Entries(pl.Callback):
    """Has a state and an entry of its own in the checkpoint."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "tensor": torch.full((2,), float(self.count)), "pickled": pickled(self.count)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert repr(state_dict["pickled"]) == repr(pickled(state_dict["count"]))
        self.found.append(("load_state_dict", state_dict["count"], state_dict["tensor"].tolist()))
        self.count = state_dict["count"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["global_step"] == trainer.global_step
        assert checkpoint["state_dict"].keys() == pl_module.state_dict().keys()
        assert checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["completed"] == trainer.global_step
        checkpoint["mine"] = {"at": trainer.global_step, "pickled": pickled(3)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        assert repr(checkpoint["mine"]["pickled"]) == repr(pickled(3))
        self.found.append(("on_load_checkpoint", checkpoint["mine"]["at"], checkpoint["global_step"]))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(("on_fit_start", trainer.global_step))


class Attributes(pl.Callback):
    """Has no ``state_dict``."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def cut(tmp_path: Path, make: Any, steps: int = 4, **arguments: Any) -> tuple[Any, Any]:
    """Stop after `steps` steps, and continue with new callbacks. Return those, and the run."""
    settings: dict[str, Any] = {"directory": tmp_path / "run", **arguments}
    native_trainer([*make(), Checkpoint(every=1)], max_steps=steps, **settings).fit()
    callbacks = make()
    run = native_trainer([*callbacks, Checkpoint(every=1)], max_steps=8, **settings).fit(resume="auto")
    return callbacks, run


def test_states_are_loaded_before_the_fit_starts(tmp_path: Path) -> None:
    (entries, attributes), run = cut(tmp_path, lambda: [Entries(), Attributes()])
    order = [("on_load_checkpoint", 4, 4), ("load_state_dict", 4, [4.0, 4.0]), ("on_fit_start", 4)]
    assert entries.found == order
    assert entries.count == 8
    assert attributes.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.progress.step == 8


@pytest.mark.parametrize("every", ["1 epoch", "2 steps"])
def test_early_stopping_continues_to_the_same_step(tmp_path: Path, every: str) -> None:
    def fit(steps: int, **settings: Any) -> tuple[int, dict[str, Any]]:
        stop = EarlyStopping("val_loss", patience=2, min_delta=1.0, strict=False)
        callbacks = [stop, Checkpoint(every=1)] if settings else [stop]
        run = native_trainer(callbacks, max_steps=steps, every=every, **settings).fit(resume="auto" if settings else False)
        return run.progress.step, {**stop.state_dict(), "best_score": 0}

    whole = fit(12)
    for steps in (1, 2, 3, 4):
        directory = tmp_path / f"cut at {steps}"
        fit(steps, directory=directory)
        assert fit(12, directory=directory) == whole


def test_a_timer_counts_the_time_before(tmp_path: Path) -> None:
    [timer], _ = cut(tmp_path, lambda: [Timer(duration={"days": 1})])
    assert timer._offset > 0
    assert timer.time_elapsed() > timer._offset


def test_a_state_of_other_arguments_is_not_loaded(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"directory": tmp_path / "run"}
    native_trainer([EarlyStopping("val_loss", min_delta=9.0), Checkpoint(every=1)], max_steps=6, **settings).fit()
    other = EarlyStopping("val_loss", mode="max")
    with pytest.warns(UserWarning, match="starts without state"):
        native_trainer([other, Checkpoint(every=1)], max_steps=7, **settings).fit(resume="auto")
    assert other.wait_count == 0


def test_a_continued_epoch_has_no_second_start(tmp_path: Path) -> None:
    [recorder], _ = cut(tmp_path, lambda: [Recorder()])
    names = recorder.names()
    again = len(names) - names[::-1].index("on_train_start")
    assert names[again] == "on_train_batch_start"
    assert [call[1] for call in recorder.calls if call[0] == "on_train_epoch_start"][-1] == 2


# -- views: what they do not have is an error --------------------------------------------------------------

PLAIN = [
    *("current_epoch", "global_step", "max_epochs", "min_epochs", "max_steps", "min_steps", "is_last_batch", "should_stop"),
    *("training", "validating", "testing", "predicting", "sanity_checking", "evaluating", "enable_validation"),
    *("is_global_zero", "global_rank", "local_rank", "node_rank", "world_size", "num_devices", "num_nodes"),
    *("num_training_batches", "num_val_batches", "limit_train_batches", "limit_val_batches", "estimated_stepping_batches"),
    *("accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "fast_dev_run", "barebones", "precision"),
    *("datamodule", "received_sigterm", "interrupted"),
    *("early_stopping_callback", "early_stopping_callbacks", "progress_bar_callback"),
]
"""Attributes that must be equal in both trainers, at each of the hooks below."""

LOOPS: dict[str, Callable[[Any], Any]] = {
    "batch_idx": lambda trainer: trainer.fit_loop.batch_idx,
    "total_batch_idx": lambda trainer: trainer.fit_loop.total_batch_idx,
    "max_batches": lambda trainer: trainer.fit_loop.max_batches,
    "should_accumulate": lambda trainer: trainer.fit_loop._should_accumulate(),
    "root_device": lambda trainer: trainer.strategy.root_device,
    "decision": lambda trainer: trainer.strategy.reduce_boolean_decision(True, all=False),
    "broadcast": lambda trainer: trainer.strategy.broadcast("mine"),
    "optimizer": lambda trainer: trainer.optimizers[0].param_groups[0]["lr"],
    "fn": lambda trainer: trainer.state.fn.value,
    "metrics": lambda trainer: sorted(set(trainer.callback_metrics) & {"val_loss"}),
}


class Look(pl.Callback):
    """Reads the attributes at three hooks."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], dict[str, Any]] = {}

    def look(self, hook: str, trainer: Any) -> None:
        values = {name: getattr(trainer, name) for name in PLAIN}
        self.seen[hook, trainer.global_step] = values | {name: read(trainer) for name, read in LOOPS.items()}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.look("start", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look("end", trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.look("validation", trainer)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_has_the_values_of_lightning(tmp_path: Path, accumulate: int) -> None:
    home, here = Look(), Look()
    at_home([home], tmp_path, max_epochs=2, batches=4, accumulate_grad_batches=accumulate)
    native([here], max_epochs=2, batches=4, accumulate=accumulate)
    for when, values in home.seen.items():
        own = here.seen[when]
        assert {name: value for name, value in own.items() if value != values[name]} == {}, when
    assert here.seen.keys() == home.seen.keys()


def inside(use: Any, *callbacks: Any, model: Any = None, **arguments: Any) -> Any:
    """Return what `use(trainer, pl_module)` returns in ``on_train_end``."""
    found: list[Any] = []

    class Use(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(use(trainer, pl_module))

    native([Use(), *callbacks], max_epochs=1, **arguments)
    return found[0]


def test_results_and_logged_values_have_lightnings_names_and_their_own() -> None:
    log = LogTraining(every=1, throughput=False)
    shown = inside(lambda trainer, module: dict(trainer.callback_metrics), log)
    assert {"eval/loss", "val_loss", "train/loss", "train_loss", "train/lr", "train_lr"} <= shown.keys()
    assert shown["eval/loss"] is shown["val_loss"]
    assert all(isinstance(value, torch.Tensor) for value in shown.values())
    assert set(inside(lambda trainer, module: trainer.logged_metrics, log)) >= {"train/loss"}
    assert "train_loss" in inside(lambda trainer, module: trainer.progress_bar_metrics, log)


def test_the_module_logs_to_the_record_and_to_callback_metrics() -> None:
    class Log(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
            pl_module.log("mine", outputs["loss"] * 0 + index, prog_bar=True)
            pl_module.log_dict({"other": float(index), "hidden": 1.0}, logger=index < 1)
            assert trainer.callback_metrics["mine"] == index
            assert trainer.progress_bar_metrics["mine"] == index

    run = native([Log()], max_epochs=1)
    assert run.history["mine"] == [(1, 0.0), (2, 1.0), (3, 2.0)]
    assert run.history["other"] == [(1, 0.0)]


class Scores(pl.Callback):
    """Logs through itself, in hooks of evaluation batches and at the end of an epoch."""

    def __init__(self, metric: Any = None) -> None:
        self.metric, self.seen = metric, list[dict[str, float]]()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        log: Any = self.log  # type: ignore[attr-defined]  # Lightning sets it
        log("size", float(len(batch[0])))
        log("weighted", float(batch_idx), batch_size=batch_idx + 1)
        log("highest", batch[1].max(), reduce_fx="max")
        if self.metric is not None:
            self.metric.update(batch[1])

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        log: Any = self.log_dict  # type: ignore[attr-defined]
        log({"epochs": float(trainer.current_epoch), **({} if self.metric is None else {"target": self.metric})})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        names = ("size", "weighted", "highest", "epochs")
        self.seen.append({name: round(float(trainer.callback_metrics[name]), 5) for name in names})


def test_a_callback_logs_through_itself_with_the_means_of_lightning(tmp_path: Path) -> None:
    home, here = Scores(), Scores()
    at_home([home], tmp_path, max_epochs=2, valid=3)
    run = native([here], max_epochs=2, valid=3)
    assert here.seen == home.seen
    assert len(here.seen) == 2
    assert [step for step, _ in run.history["weighted"]] == [3, 6]
    assert [value for _, value in run.history["weighted"]] == pytest.approx([8 / 6, 8 / 6])
    assert "log" not in vars(here)


def test_a_metric_is_computed_and_reset_at_the_end_of_an_epoch() -> None:
    metric: Any = MeanMetric()
    run = native([Scores(metric)], max_epochs=2, valid=3)
    first, second = run.history["target"]
    assert first[1] == second[1] == pytest.approx(float(torch.cat([one for _, one in batches_of(3, 2)]).mean()))
    with pytest.raises(AdapterError, match="MeanMetric in a hook of a batch"):
        inside(lambda trainer, module: None, LogsMetric())


class LogsMetric(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log("target", MeanMetric())


def test_the_module_is_the_model_of_the_user() -> None:
    def use(trainer: Any, module: Any) -> list[Any]:
        model, kind = trainer._run.model, pl.LightningModule
        assert isinstance(module, kind) is True
        assert [*module.parameters()] == [*model.parameters()]
        assert module.state_dict().keys() == model.state_dict().keys()
        assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)
        assert (module.current_epoch, module.global_step) == (1, 3)
        assert module.trainer is trainer
        assert module.logger is trainer.logger is None  # without a directory
        assert module.optimizers() is trainer.optimizers[0]
        module.eval()
        assert not model.training
        module.train()
        assert model.training
        module.freeze()
        assert not any(one.requires_grad for one in model.parameters())
        module.unfreeze()
        module.note = 3
        assert model.note == module.note == 3
        return [module(torch.ones(1, 3)) == model(torch.ones(1, 3))]

    assert all(inside(use))


def test_a_lightning_module_is_its_own_pl_module() -> None:
    found = []
    keep = pl.callbacks.LambdaCallback(on_train_start=lambda trainer, module: found.append((trainer.lightning_module, module)))
    model = Lit()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model.model(batch[0]), batch[1])

    Trainer(model, sgd, batches_of(1), loss, max_epochs=1, callbacks=[keep], progress=False).fit()
    assert found == [(model, model)]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda trainer, module: trainer.fit(), r"Use reads trainer\.fit.*Call trainer\.fit\(\) of the native trainer"),
        (lambda trainer, module: trainer.globl_step, r"Use reads trainer\.globl_step.*Did you mean 'global_step'\?"),
        (lambda trainer, module: setattr(trainer, "anything", 1), r"Use sets trainer\.anything"),
        (lambda trainer, module: setattr(trainer, "optimizers", []), r"Use sets trainer\.optimizers.*Ema"),
        (lambda trainer, module: setattr(trainer, "num_val_batches", []), r"sets trainer\.num_val_batches.*only lets be read"),
        (lambda trainer, module: module.training_step(1, 2), r"Use reads pl_module\.training_step.*compute_loss"),
        (lambda trainer, module: trainer.strategy.optimizer_step(), r"Use reads trainer\.strategy\.optimizer_step.*step_fn"),
        (lambda trainer, module: trainer.loggers[0].experiment.config, r"Use reads trainer\.logger\.experiment\.config.*sinks"),
    ],
)
def test_what_is_not_mapped_is_an_error_with_advice(use: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        inside(use)


@pytest.mark.parametrize("value", ["text", {"a": 1.0}, None, torch.ones(3)])
def test_what_is_no_number_is_not_dropped(value: Any) -> None:
    def inside_a_batch(use: Callable[[Any, Any], None]) -> Any:
        return native([pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, module, *_: use(trainer, module))])

    with pytest.raises(AdapterError, match=r"pl_module\.log\('a', \.\.\.\) takes a number, a tensor with one element"):
        inside_a_batch(lambda trainer, module: module.log("a", value))
    metrics = {"a": value, "b": numpy.float32(2.0)}
    if value is None or isinstance(value, torch.Tensor):
        with pytest.raises(AdapterError, match=r"log_metrics takes numbers, texts and mappings of them; 'a' is "):
            inside_a_batch(lambda trainer, module: trainer.loggers[0].log_metrics(metrics))
    else:
        run = inside_a_batch(lambda trainer, module: trainer.loggers[0].log_metrics(metrics))
        assert run.history.latest["b"] == 2.0
        assert isinstance(value, str) or run.history.latest["a/a"] == 1.0


def test_a_stop_has_the_callback_as_its_author() -> None:
    class Enough(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 2
            if trainer.global_step == 2:
                assert trainer.should_stop

    run = native([Enough()], max_epochs=1)
    assert run.progress.step == 2
    [stop] = [one for one in run.decisions if one.what == "stopped"]
    assert (stop.who, stop.why) == ("Enough", "Enough set trainer.should_stop")


def test_the_plan_shows_the_hooks_of_lightning() -> None:
    ends = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: None)
    assert "on_train_epoch_end" in str(native_trainer([ends]).plan())
