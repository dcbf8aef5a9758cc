"""Hooks, and states that are loaded before them: those of Lightning's own trainer, in the same order with the same counters."""

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

from cadenza.adapters.lightning.events import EVENTS
from cadenza.callbacks import Checkpoint
from tests.adapters.lightning.home import HOOKS, Call, Recorder, at_home, batches_of, native, native_trainer

# -- the order ---------------------------------------------------------------------------------------------


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
