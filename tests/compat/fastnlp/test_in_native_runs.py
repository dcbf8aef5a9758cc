"""fastNLP's callbacks in a native trainer, beside native callbacks and those of another system, in one list."""

from __future__ import annotations

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
from tests.compat.fastnlp.toy import Scripted


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
    check_callback(lambda: BUILT_IN[name](tmp_path))


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
        line for epoch in (0, 1) for line in (f"NeMo: epoch {epoch}", f"fastNLP: epoch {epoch + 1}", "fastNLP: ['eval/loss']")
    ]
    assert "finished 100.0%." in capsys.readouterr().out
    assert {"train/loss", "eval/loss"} <= set(whole.history.names)
