"""Callbacks of fastNLP and of your own in a native trainer: contract, state, checkpoints, names of results, mixed lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import CheckpointCallback, EarlyStopCallback, HasMonitorCallback, LRSchedCallback
from cadenza.compat.fastnlp.core.callbacks.callback import _CallbackWrapper
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import BaseCallback
from cadenza.testing import check_callback, simulate, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.compat.fastnlp.toy import Hooks, Scribe, Scripted, loader, toy_trainer, trained, weights_of

pytestmark = pytest.mark.usefixtures("launch")


class Thorough(HasMonitorCallback):
    """Has a monitor, a filter, a state of its own and one of the user's."""

    def __init__(self) -> None:
        super().__init__("eval/loss", larger_better=False)
        self.sums: list[float] = []
        self.better: list[bool] = []
        self.thirds: list[int] = []

    def on_train_begin(self, trainer: Any) -> None:
        if trainer.global_forward_batches == 0:
            self.sums, self.better, self.thirds = [], [], []
            trainer.state["count"] = 0

    def on_before_backward(self, trainer: Any, outputs: Any) -> None:
        self.sums.append(outputs["loss"].item())
        trainer.state["count"] += 1

    @fastnlp.Filter(every=3)
    def on_train_batch_end(self, trainer: Any) -> None:
        self.thirds.append(trainer.global_forward_batches)

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.better.append(self.is_better_results(results))

    def on_save_checkpoint(self, trainer: Any) -> dict[str, Any]:
        return {"sums": self.sums, "better": self.better, "thirds": self.thirds, "best": self.monitor_value}

    def on_load_checkpoint(self, trainer: Any, states: dict[str, Any] | None) -> None:
        assert states is not None
        self.sums, self.better, self.thirds = states["sums"], states["better"], states["thirds"]
        self.monitor_value = states["best"]


LOSS: dict[str, Any] = {"monitor": "eval/loss", "larger_better": False}

CALLBACKS: dict[str, Callable[[Path], BaseCallback]] = {
    "CheckpointCallback": lambda folder: CheckpointCallback(folder, every_n_epochs=1, topk=1, **LOSS),
    "EarlyStopCallback": lambda folder: EarlyStopCallback(**LOSS, patience=99),
    "LoadBestModelCallback": lambda folder: fastnlp.LoadBestModelCallback(**LOSS),
    "LRSchedCallback": lambda folder: LRSchedCallback(SimpleNamespace(step=lambda: None)),
    "RawTextCallback": lambda folder: fastnlp.RawTextCallback(**LOSS),
    "RichCallback": lambda folder: fastnlp.RichCallback(),
    "TqdmCallback": lambda folder: fastnlp.TqdmCallback(),
    "TimerCallback": lambda folder: fastnlp.TimerCallback(),
    "TorchGradClipCallback": lambda folder: fastnlp.TorchGradClipCallback(0.1),
    "TorchWarmupCallback": lambda folder: fastnlp.TorchWarmupCallback(0.5),
    "with all hooks": lambda folder: Scribe(),
    "with a state": lambda folder: Thorough(),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_each_callback_keeps_the_contract_of_all_callbacks(name: str, tmp_path: Path) -> None:
    check_callback(lambda: CALLBACKS[name](tmp_path), reads=True)  # some read the loss in each step, as the originals do


@pytest.mark.parametrize("step", [4, 5, 7])
def test_a_native_checkpoint_holds_its_state_its_filters_and_the_users_state(tmp_path: Path, step: int) -> None:
    def parts() -> tuple[Thorough, list[Any]]:
        one = Thorough()
        return one, [Evaluate(tiny_loader()), one, Checkpoint(every=f"{step} steps", keep_last=9, directory=tmp_path)]

    (whole, callbacks), (rest, others) = parts(), parts()
    run = tiny_run(callbacks=callbacks, epochs=3, batches=5)
    name = next(path for path in tmp_path.iterdir() if path.name.endswith(f"{step:08d}"))
    resumed = tiny_trainer(callbacks=others, epochs=3, batches=5).fit(resume=name)
    assert (rest.sums, rest.better, rest.thirds) == (whole.sums, whole.better, whole.thirds)
    assert whole.thirds == [3, 6, 9, 12, 15]
    assert run.state == resumed.state == {"count": 15}
    assert torch.equal(weights_of(run.model), weights_of(resumed.model))


def test_the_trainer_argument_in_a_native_run(tmp_path: Path) -> None:
    expected = {"n_epochs": 4, "n_batches": 20, "num_batches_per_epoch": 5, "cur_epoch_idx": 0, "accumulation_steps": 2}
    expected |= {"monitor": None, "evaluator": None}  # type: ignore[dict-item]  # any values
    seen: dict[str, Any] = {}

    def look(trainer: Any) -> None:
        seen.update({name: getattr(trainer, name) for name in expected})
        assert trainer.optimizers is trainer.live.optimizers[0]
        assert str(trainer.model_device) == "cpu"
        trainer.save_model(tmp_path / "model")
        trainer.save_checkpoint(tmp_path / "all")

    scribe = Scribe("on_save_model", "on_save_checkpoint")
    tiny_run(callbacks=[Hooks(on_train_begin=look), scribe], steps=12, batches=5, accumulate=2)
    assert seen == expected
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["fastnlp_checkpoint.pkl.tar", "fastnlp_model.pkl.tar"]
    assert scribe.names == ["on_save_model", "on_save_checkpoint"]


def test_an_error_names_the_callback_like_any_other_and_a_function_has_its_name() -> None:
    def fail(trainer: Any) -> None:
        raise RuntimeError("oh")

    breaks, scribe = Hooks(on_train_batch_end=fail), Scribe("on_train_batch_end")
    with pytest.raises(RuntimeError) as caught:
        tiny_run(callbacks=[breaks])
    assert "raised in Hooks.on_step_end (callback 1 of 1)" in caught.value.__notes__[0]
    breaks.on_fault = "disable"
    run = tiny_run(callbacks=[breaks, scribe])
    assert [fault.callback for fault in run.faults] == ["Hooks"]
    assert len(scribe.seen) == 5

    def note(trainer: Any) -> None:
        """Do nothing."""

    wrapper = _CallbackWrapper(fastnlp.Event.on_train_begin(), note)
    assert (wrapper.callback_name, wrapper.name) == ("note", "note")
    assert list(hooks_of(tiny_run(callbacks=[wrapper], steps=1)).callbacks) == ["note"]


def test_an_early_stop_is_a_stop_of_the_run_and_the_best_model_is_loaded_at_its_end() -> None:
    best, weights = fastnlp.LoadBestModelCallback(**LOSS), []
    note = Hooks(on_evaluate_end=lambda trainer, results: weights.append(trainer.model.weight.item()))
    stop = EarlyStopCallback(**LOSS, patience=2)
    run = simulate([best, note, stop], metrics={"eval/loss": [3, 2, 2.1, 2.2, 1]})
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert run.progress.epoch == 4
    assert "did not improve on 2" in run.why("stopped")
    assert len(set(weights)) == 4
    assert run.model.weight.item() == weights[1]  # type: ignore[operator]  # a Linear's is a tensor
    assert best.meta["epoch"] == 2  # natively an evaluation at the end of an epoch comes when the epoch is counted


def test_warm_up_scheduler_and_clipping_work_in_a_native_run() -> None:
    seen: list[float] = []
    rates = Hooks(on_train_batch_end=lambda trainer: seen.append(round(trainer.optimizers.param_groups[0]["lr"], 6)))
    tiny_run(callbacks=[fastnlp.TorchWarmupCallback(0.2), rates], epochs=2)
    assert seen == [0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125, 0.0]
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    halve = LRSchedCallback(LambdaLR(optimizer, lambda step: 0.5**step), "epoch")
    tiny_run(model=model, optimizer=optimizer, epochs=3, callbacks=[halve, fastnlp.TorchGradClipCallback(1e-3)])
    assert optimizer.param_groups[0]["lr"] == 0.0125
    assert abs(model.weight.item() - 0.5) < 0.003  # it moved by no more than the clipped gradients allow


def test_more_evaluations_run_and_fastnlps_checkpoints_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mapping: dict[str, Any] = {"output_mapping": lambda pred: {"pred": pred}}
    batches = [{"input": torch.zeros(2, 1)}]
    more = fastnlp.MoreEvaluateCallback(batches, {"f": Scripted(*[0.5] * 9)}, evaluate_every=2, **mapping)
    tiny_run(callbacks=[more, CheckpointCallback(tmp_path, every_n_epochs=1, last=True)], epochs=2, batches=2)
    assert capsys.readouterr().out.count('{"acc#f": 0.5}') == 2
    assert {path.name for path in (tmp_path / "launch").iterdir()} == {"model-epoch_1", "model-epoch_2", "model-last"}
    (file,) = (tmp_path / "launch" / "model-last").iterdir()
    assert set(torch.load(file, weights_only=True)) == {"weight", "bias"}


def test_callbacks_of_three_systems_work_in_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls_seen: list[str] = []

    class OfNeMo(NeMoCallback):
        def on_epoch_end(self, state: Any) -> None:
            calls_seen.append(f"NeMo: epoch {state['epoch']}")

    of_fastnlp = Hooks(
        on_train_epoch_end=lambda trainer: calls_seen.append(f"fastNLP: epoch {trainer.cur_epoch_idx}"),
        on_evaluate_end=lambda trainer, results: calls_seen.append(f"fastNLP: {sorted(results)}"),
    )
    warmup, lines = fastnlp.TorchWarmupCallback(0.5), fastnlp.RawTextCallback(print_every=5)
    fastnlps = [of_fastnlp, lines, warmup, EarlyStopCallback(**LOSS, patience=9)]
    native = [Evaluate(tiny_loader(2)), LogTraining(every="1 epoch", throughput=False), Checkpoint("1 epoch")]
    run = tiny_run(callbacks=[OfNeMo(), *fastnlps, *native], epochs=2, directory=tmp_path, seed=0)
    assert calls_seen == [
        line for epoch in (0, 1) for line in (f"NeMo: epoch {epoch}", f"fastNLP: epoch {epoch + 1}", "fastNLP: ['loss']")
    ]
    assert "finished 100.0%." in capsys.readouterr().out
    assert {"train/loss", "eval/loss"} <= set(run.history.names)


# -- mixed lists: the names of results ---------------------------------------------------------------------


class Fixed:
    """A metric with given results."""

    def __init__(self, *values: Any) -> None:
        self.values = [*values]

    def update(self, predictions: Any, targets: Any) -> None:
        """Take a batch."""

    def compute(self) -> Any:
        return self.values.pop(0) if len(self.values) > 1 else self.values[0]

    def reset(self) -> None:
        """Start anew."""


class Watch(HasMonitorCallback):
    """Notes the results, and the monitored value."""

    def __init__(self, monitor: Any) -> None:
        super().__init__(monitor, larger_better=True)
        self.seen: list[Any] = []

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.seen.append((sorted(results), self.get_monitor_value(results)))


def evaluated(*callbacks: BaseCallback) -> None:
    def compute(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        predictions = model(batch[0])
        return {"loss": predictions.mean() * 0, "predictions": predictions, "targets": batch[1]}

    tiny_run(callbacks=callbacks, batches=1, compute_loss=compute)


@pytest.mark.parametrize(
    ("monitor", "value"), [("acc#acc", 0.5), ("f1#acc", 0.25), ("eval/acc/f1", 0.25), ("score", 0.75), ("loss", 0.0)]
)
def test_results_of_a_native_evaluation_have_fastnlps_names(monitor: str, value: float) -> None:
    watch = Watch(monitor)
    by_function = Watch(lambda results: (results[monitor], results.get("none"), "eval/score" in results))
    metrics = {"acc": Fixed({"acc": 0.5, "f1": 0.25}), "score": Fixed(0.75)}
    evaluated(watch, by_function, Evaluate(tiny_loader(1), metrics=metrics))
    assert watch.seen == [(["acc#acc", "f1#acc", "loss", "score"], value)]
    assert by_function.seen[0][1] == (value, None, True)


def test_the_name_of_a_native_evaluation_is_that_of_a_loader() -> None:
    numbers = {"eval": 0.1, "dev": 0.2, "test": 0.3}
    evaluations = [Evaluate(tiny_loader(1), metrics={"acc": Fixed({"acc": one})}, name=name) for name, one in numbers.items()]
    watches = [Watch(monitor) for monitor in ("acc#acc", "acc#acc#dev", "test/acc/acc", "acc")]
    evaluated(*watches, *evaluations)
    keys = [["acc#acc" + suffix, "loss" + suffix] for suffix in ("", "#dev", "#test")]
    assert [[found for found, _ in watch.seen] for watch in watches] == [keys] * 4
    # A result of one evaluation does not replace the monitored one of another.
    taken = [[0.1, None, None], [None, 0.2, None], [None, None, 0.3], [0.1, None, None]]
    assert [[value for _, value in watch.seen] for watch in watches] == taken


def test_a_monitor_stops_a_native_run_saves_its_best_and_gets_native_evaluations_in_fastnlps_trainer(
    tmp_path: Path,
) -> None:
    callbacks = [EarlyStopCallback("acc#acc", patience=1), CheckpointCallback(tmp_path, topk=1, monitor="acc#acc")]
    evaluated(*callbacks, Evaluate(tiny_loader(1), metrics={"acc": Fixed({"acc": 0.5})}, every="1 step"))
    (folder,) = (tmp_path / "launch").iterdir()
    assert folder.name == "model-epoch_0-batch_1-acc#acc_0.5"
    assert sorted(json.loads((folder / "fastnlp_evaluate_results.json").read_text())) == ["acc#acc", "loss"]

    def compute(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"predictions": model(batch["x"])["pred"], "targets": batch["y"]}

    metrics = {"acc": Fixed({"acc": 0.5}, {"acc": 0.4}, {"acc": 0.3})}
    watch, stop = Watch("acc#acc"), EarlyStopCallback("acc#acc", patience=2)
    trainer = trained(8, [watch, stop, Evaluate(loader(4), metrics=metrics, compute=compute)], n_epochs=9)
    assert [value for _, value in watch.seen] == [0.5, 0.4, 0.3]
    assert trainer.cur_epoch_idx == 3
    assert toy_trainer(8, metrics={"acc": Scripted(0.5)}).evaluates
