"""fastNLP's callbacks in a native trainer, beside native callbacks and those of another system, in one list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.compat.fastnlp import (
    Callback,
    CheckpointCallback,
    EarlyStopCallback,
    HasMonitorCallback,
    LoadBestModelCallback,
    LRSchedCallback,
    MoreEvaluateCallback,
    RawTextCallback,
    RichCallback,
    TimerCallback,
    TorchGradClipCallback,
    TorchWarmupCallback,
    TqdmCallback,
)
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.hooks.moments import BaseCallback
from cadenza.run import Run
from cadenza.testing import check_callback, simulate, tiny_loader, tiny_model, tiny_run
from tests.compat.fastnlp.toy import Scripted, loader, toy_trainer


@pytest.fixture(autouse=True)
def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTNLP_LAUNCH_TIME", "launch")


BUILT_IN: dict[str, Callable[[Path], BaseCallback]] = {
    "CheckpointCallback": lambda target_: CheckpointCallback(
        target_, every_n_epochs=1, topk=1, monitor="eval/loss", larger_better=False
    ),
    "EarlyStopCallback": lambda target_: EarlyStopCallback("eval/loss", larger_better=False, patience=99),
    "LoadBestModelCallback": lambda target_: LoadBestModelCallback("eval/loss", larger_better=False),
    "LRSchedCallback": lambda target_: LRSchedCallback(Stepped()),
    "RawTextCallback": lambda target_: RawTextCallback(monitor="eval/loss", larger_better=False),
    "RichCallback": lambda target_: RichCallback(),
    "TqdmCallback": lambda target_: TqdmCallback(),
    "TimerCallback": lambda target_: TimerCallback(),
    "TorchGradClipCallback": lambda target_: TorchGradClipCallback(0.1),
    "TorchWarmupCallback": lambda target_: TorchWarmupCallback(0.5),
}


class Stepped:
    """A schedule of one's own."""

    def step(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_callback_keeps_the_contract_of_all_callbacks(name: str, tmp_path: Path) -> None:
    check_callback(lambda: BUILT_IN[name](tmp_path), reads=True)  # some read the loss in each step, as the originals do


def test_an_early_stop_is_a_stop_of_the_run() -> None:
    run = simulate(
        [EarlyStopCallback("eval/loss", larger_better=False, patience=2)], metrics={"eval/loss": [3, 2, 2.1, 2.2, 1]}
    )
    assert run.outcome is not None
    assert run.outcome.kind == "stopped"
    assert run.progress.epoch == 4
    assert "did not improve on 2" in run.why("stopped")


def test_the_best_model_is_loaded_at_the_end_and_the_message_says_which() -> None:
    best = LoadBestModelCallback("eval/loss", larger_better=False)
    weights: list[float] = []

    class Noting(Callback):
        def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
            weights.append(trainer.model.weight.item())

    run = simulate([best, Noting()], metrics={"eval/loss": [3.0, 1.0, 2.0]})
    assert len(set(weights)) == 3
    assert run.model.weight.item() == weights[1]  # type: ignore[operator]  # a Linear's is a tensor
    assert best.meta["epoch"] == 2  # natively an evaluation at the end of an epoch comes when the epoch is counted


def test_warm_up_scheduler_and_clipping_work_in_a_native_run() -> None:
    seen: list[float] = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer: Any) -> None:
            seen.append(round(trainer.optimizers.param_groups[0]["lr"], 6))

    tiny_run(callbacks=[TorchWarmupCallback(0.2), Rates()], epochs=2)
    assert seen == [0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125, 0.0]
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    halve = LRSchedCallback(LambdaLR(optimizer, lambda step: 0.5**step), "epoch")
    native = Trainer(
        model,
        optimizer,
        tiny_loader(),
        mean_square,
        max_epochs=3,
        callbacks=[halve, TorchGradClipCallback(1e-3)],
        progress=False,
    )
    native.fit()
    assert optimizer.param_groups[0]["lr"] == 0.0125
    assert abs(model.weight.item() - 0.5) < 0.003  # it moved by no more than the clipped gradients allow


def mean_square(model: torch.nn.Module, batch: Any) -> Any:
    inputs, targets = batch
    return ((model(inputs) - targets) ** 2).mean()


def test_more_evaluate_callback_works_in_a_native_run(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [{"input": torch.zeros(2, 1)}]
    more = MoreEvaluateCallback(
        batches, {"f": Scripted(*[0.5] * 9)}, evaluate_every=2, output_mapping=lambda pred: {"pred": pred}
    )
    tiny_run(callbacks=[more], steps=4)
    assert capsys.readouterr().out.count('{"acc#f": 0.5}') == 2


def test_a_native_run_writes_checkpoints_of_fastnlp(tmp_path: Path) -> None:
    tiny_run(callbacks=[CheckpointCallback(tmp_path, every_n_epochs=1, last=True)], epochs=2)
    assert {path.name for path in (tmp_path / "launch").iterdir()} == {"model-epoch_1", "model-epoch_2", "model-last"}
    (file,) = (tmp_path / "launch" / "model-last").iterdir()
    assert set(torch.load(file, weights_only=True)) == {"weight", "bias"}


def test_callbacks_of_three_systems_work_in_one_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls_seen: list[str] = []

    class OfNeMo(NeMoCallback):
        def on_epoch_end(self, state: Any) -> None:
            calls_seen.append(f"NeMo: epoch {state['epoch']}")

    class OfFastNLP(Callback):
        def on_train_epoch_end(self, trainer: Any) -> None:
            calls_seen.append(f"fastNLP: epoch {trainer.cur_epoch_idx}")

        def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
            calls_seen.append(f"fastNLP: {sorted(results)}")

    def callbacks() -> list[BaseCallback]:
        return [
            OfNeMo(),
            OfFastNLP(),
            RawTextCallback(print_every=5),
            TorchWarmupCallback(0.5),
            EarlyStopCallback("eval/loss", larger_better=False, patience=9),
            Evaluate(tiny_loader(2)),
            LogTraining(every="1 epoch", throughput=False),
            Checkpoint("1 epoch"),
        ]

    def trained(name: str, epochs: int, **resume: Any) -> Run:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        directory = tmp_path / name
        return Trainer(
            model, optimizer, tiny_loader(), mean_square, max_epochs=epochs, directory=directory, callbacks=callbacks(), seed=0
        ).fit(**resume)

    whole = trained("whole", 2)
    assert calls_seen == [
        line for epoch in (0, 1) for line in (f"NeMo: epoch {epoch}", f"fastNLP: epoch {epoch + 1}", "fastNLP: ['loss']")
    ]
    assert "finished 100.0%." in capsys.readouterr().out
    assert {"train/loss", "eval/loss"} <= set(whole.history.names)


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

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Trainer(model, optimizer, tiny_loader(1), compute, max_epochs=1, callbacks=list(callbacks), progress=False).fit()


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
    metrics = [{"acc": Fixed({"acc": number})} for number in (0.1, 0.2, 0.3)]
    evaluations = [Evaluate(tiny_loader(1), metrics=one, name=name) for one, name in zip(metrics, NAMES, strict=True)]
    watches = [Watch(monitor) for monitor in ("acc#acc", "acc#acc#dev", "test/acc/acc", "acc")]
    evaluated(*watches, *evaluations)
    keys = [sorted(["acc#acc" + suffix, "loss" + suffix]) for suffix in ("", "#dev", "#test")]
    assert [[found for found, _ in watch.seen] for watch in watches] == [keys] * 4
    # A result of one evaluation does not replace the monitored one of another.
    assert [[value for _, value in watch.seen] for watch in watches] == [
        [0.1, None, None],
        [None, 0.2, None],
        [None, None, 0.3],
        [0.1, None, None],
    ]


NAMES = ("eval", "dev", "test")


def test_a_monitor_of_fastnlp_stops_a_native_run_and_saves_its_best(tmp_path: Path) -> None:
    stop = EarlyStopCallback("acc#acc", patience=1)
    save = CheckpointCallback(tmp_path, topk=1, monitor="acc#acc")
    metrics = {"acc": Fixed({"acc": 0.5})}
    evaluated(stop, save, Evaluate(tiny_loader(1), metrics=metrics, every="1 step"))
    (folder,) = (tmp_path / "launch").iterdir()
    assert folder.name == "model-epoch_0-batch_1-acc#acc_0.5"
    assert sorted(json.loads((folder / "fastnlp_evaluate_results.json").read_text())) == ["acc#acc", "loss"]


def test_a_native_evaluation_in_fastnlps_trainer_reaches_its_monitors() -> None:
    def compute(model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        return {"predictions": model(batch["x"])["pred"], "targets": batch["y"]}

    metrics = {"acc": Fixed({"acc": 0.5}, {"acc": 0.4}, {"acc": 0.3})}
    watch, stop = Watch("acc#acc"), EarlyStopCallback("acc#acc", patience=2)
    native = Evaluate(loader(4), metrics=metrics, compute=compute)
    trainer = toy_trainer(8, [watch, stop, native], n_epochs=9)
    trainer.run()
    assert [value for _, value in watch.seen] == [0.5, 0.4, 0.3]
    assert trainer.cur_epoch_idx == 3
    assert toy_trainer(8, metrics={"acc": Scripted(0.5)}).evaluates
