"""Callbacks of all seven systems in one native run with Evaluate, Checkpoint, Ema and EarlyStopping resume bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate
from cadenza.compat import accelerated, fastnlp
from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.compat.nemo10.core import ActionCallback
from cadenza.hooks.dispatch import hooks_of
from cadenza.testing import launch, prove_resume, tiny_loader
from cadenza.testing.results import CLOCKS, results_of, without_clocks

lightning = pytest.importorskip("lightning", reason="one of the seven systems is Lightning: pip install lightning")
transformers = pytest.importorskip("transformers", reason="one of the seven systems is transformers: pip install transformers")
keras = pytest.importorskip("keras", reason="one of the seven systems is Keras: pip install keras")

SYSTEMS = ("OfNemo10", "OfNemo", "OfFastnlp", "OfAccelerated", "OfTransformers", "OfLightning", "OfKeras")
SEEN = "seen"
IGNORED = (*CLOCKS, "time_elapsed")  # of Lightning's Timer


class Seen:
    """Notes events with the numbers that they see; the notes of a run that continues go on after those of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[float]]] = []

    def note(self, event: str, *numbers: Any) -> None:
        self.seen.append((event, [float(torch.as_tensor(number).detach()) for number in numbers]))


class Kept(Seen):
    """Has the methods of native callbacks for its state."""

    def state_dict(self) -> dict[str, Any]:
        return {SEEN: self.seen}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.seen = list(state[SEEN])


class OfNemo10(Kept, ActionCallback):
    def on_iteration_end(self) -> None:
        self.note("iteration", self.step)

    def on_epoch_end(self) -> None:
        self.note("epoch", self.epoch_num)


class OfNemo(Kept, NeMoCallback):
    def on_step_end(self, state: State) -> None:
        self.note("step", state["step"], state["tensors"].get_tensor("loss"))

    def on_epoch_end(self, state: State) -> None:
        self.note("epoch", state["epoch"])


class OfFastnlp(Seen, fastnlp.Callback):
    def on_train_batch_end(self, trainer: Any) -> None:
        self.note("batch", trainer.global_forward_batches)

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.note("evaluate", *results.values())

    def on_save_checkpoint(self, trainer: Any) -> dict[str, Any]:
        return {SEEN: self.seen}

    def on_load_checkpoint(self, trainer: Any, states: dict[str, Any] | None) -> None:
        assert states is not None
        self.seen = states[SEEN]


class OfAccelerated(Kept, TrainerCallback):
    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.note("train epoch", trainer.run_history.get_latest_metric("train_loss_epoch"))

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.note("epoch", trainer.run_history.current_epoch)


class OfTransformers(Seen, transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("step", state.global_step, state.epoch)
        control.should_log = state.global_step % 4 == 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.note(
            "log", *(logs[name] for name in ("loss", "train_loss", "grad_norm", "learning_rate", "eval_loss") if name in logs)
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.note("evaluate", *(value for name, value in metrics.items() if name.endswith("_loss")))


class OfLightning(Seen, lightning.Callback):  # type: ignore[name-defined, misc]
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch", trainer.global_step, batch_idx, outputs["loss"], pl_module.weight.sum())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = trainer.callback_metrics
        self.note(
            f"validation {' '.join(sorted(metrics))}", *(metrics[name] for name in sorted(metrics)), trainer.current_epoch
        )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("epoch", trainer.current_epoch)


class OfKeras(Seen, keras.callbacks.Callback):  # type: ignore[name-defined, misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("batch", batch, logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch", epoch, logs["loss"], logs.get("val_loss", -1.0), float(self.model.optimizer.learning_rate))


class ChangesTheRate(Callback):
    def on_epoch_end(self, run: Run) -> None:
        for group in run.optimizers[0].param_groups:
            group["lr"] *= 0.9


def make(directory: Path, **arguments: Any) -> Trainer:
    """Return a trainer with callbacks of all systems, those that the other systems bring along among them."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    callbacks = [
        OfTransformers(),
        OfNemo10(),
        Ema(0.9),
        OfLightning(),
        Evaluate(tiny_loader(4)),
        Evaluate(tiny_loader(3), every="4 steps", name="often"),
        lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=20),
        OfKeras(),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping("val_loss", patience=20),
        OfFastnlp(),
        EarlyStopping("eval/loss", mode="min", patience=20),
        OfNemo(),
        ClipGradients(max_norm=1.0),
        OfAccelerated(),
        accelerated.callbacks.EarlyStoppingCallback(early_stopping_patience=20),
        transformers.PrinterCallback(),
        lightning.pytorch.callbacks.Timer(),
        Checkpoint(every="1 epoch"),
    ]
    defaults: dict[str, Any] = {"max_epochs": 3, "accumulate": 2, "seed": 7, "driver": "single", "device": "cpu"}
    return Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        tiny_loader(9),
        supervised(nn.functional.mse_loss),
        directory=directory,
        callbacks=callbacks,
        progress=False,
        **{**defaults, **arguments},
    )


def test_each_system_gets_its_events(tmp_path: Path) -> None:
    run = make(tmp_path).fit()
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert run.progress.step == 15
    by_name: dict[str, Any] = dict(hooks_of(run).callbacks)
    kinds = {
        name: {event.partition(" ")[0] for event, _ in getattr(by_name[name], "callback", by_name[name]).seen}
        for name in SYSTEMS
    }
    assert kinds == {
        "OfNemo10": {"iteration", "epoch"},
        "OfNemo": {"step", "epoch"},
        "OfFastnlp": {"batch", "evaluate"},
        "OfAccelerated": {"train", "epoch"},
        "OfTransformers": {"step", "log", "evaluate"},
        "OfLightning": {"batch", "validation", "epoch"},
        "OfKeras": {"batch", "epoch"},
    }


def test_it_resumes_bit_for_bit_on_one_process() -> None:
    prove_resume(make, at=[1, 4, 5, 7, 10], ignore=IGNORED, in_process=True)


class _Stop(Callback):
    """Saves and ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.step:
            run.save("the run is cut here")
            run.after_step(self.cut)

    def cut(self) -> None:
        raise KeyboardInterrupt


def _on_two(folder: Path, steps: list[int]) -> list[Any]:
    """Return the results of a whole run, and those of runs that were cut and continued."""
    results = []
    for step in (0, *steps):
        directory = folder / f"cut-{step}"
        if step:
            trainer = make(directory, driver="ddp", device=None)
            trainer.callbacks.append(_Stop(step))
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
        trainer = make(directory, driver="ddp", device=None)
        run = trainer.fit(resume="auto")
        found = without_clocks(results_of(trainer, run, (Checkpoint,)), IGNORED)
        del found["records"]
        if (
            not run.is_main
        ):  # callbacks may see the values of their rank; the state of the main process is the one that is saved
            del found["states"]["callbacks"]
        results.append(found)
    return results


def test_it_resumes_bit_for_bit_on_two_processes(tmp_path: Path) -> None:
    from cadenza.status.plain import first_difference

    for found in launch(lambda: _on_two(tmp_path, [1, 3, 5])):
        whole, *others = found
        for other in others:
            assert first_difference(whole, other, "") is None
