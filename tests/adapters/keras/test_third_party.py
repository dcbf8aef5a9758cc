"""Callbacks that other packages ship for Keras run in a native list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.keras.parts import fit_at_home, fit_natively, keras_package

keras_package()


def test_optuna_prunes_in_the_same_epoch() -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    integration = pytest.importorskip("optuna_integration.keras", reason="optuna-integration is not installed")
    ends = []
    for fit in (fit_at_home, fit_natively):
        trial = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.5, n_warmup_steps=1)).ask()
        with pytest.raises(optuna.TrialPruned) as pruned:
            fit([integration.KerasPruningCallback(trial, "val_loss")], rate=0.02)
        ends.append(
            (
                str(pruned.value),
                {step: round(value, 5) for step, value in trial._cached_frozen_trial.intermediate_values.items()},
            )
        )
    assert ends[0] == ends[1]
    assert ends[0][0] == "Trial was pruned at epoch 1."


@pytest.mark.filterwarnings("ignore")  # of the packages under mlflow
def test_mlflow_gets_the_metrics_of_each_epoch(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("mlflow.keras", reason="this mlflow has no callback for Keras 3")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("native", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("native")
    try:
        with mlflow.start_run() as active:
            run = fit_natively([mlflow.keras.MlflowCallback()], max_epochs=2)
        mlflow.flush_async_logging()
        client = mlflow.MlflowClient()
        logged = client.get_metric_history(active.info.run_id, "val_loss")
        assert [one.value for one in logged] == pytest.approx([value for _, value in run.history["eval/loss"]])
        stored = client.get_run(active.info.run_id).data
        assert (stored.params["optimizer_name"], stored.params["optimizer_learning_rate"]) == ("sgd", "0.1")
        assert "validation_loss" in stored.metrics
        (summary,) = (tmp_path / "artifacts").rglob("model_summary.txt")
        assert "Total params: 3" in summary.read_text()
    finally:
        mlflow.set_tracking_uri(None)


def test_swanlab_gets_the_logs_and_the_rate(tmp_path: Path) -> None:
    swanlab = pytest.importorskip("swanlab", reason="swanlab is not installed")
    integration: Any = pytest.importorskip("swanlab.integration.keras", reason="this swanlab has no callback for Keras")
    logged: list[Any] = []

    callback = integration.SwanLabCallback(mode="disabled", log_dir=str(tmp_path))
    log = callback._log

    def keep(payload: Any, *, step: int) -> None:
        logged.append(payload)
        log(payload, step=step)

    callback._log = keep
    fit_natively([callback], max_epochs=2)
    if swanlab.has_run():
        swanlab.finish()
    assert [one["epoch/learning_rate"] for one in logged if "epoch/loss" in one] == pytest.approx([0.1, 0.1])
    assert [one["epoch/epoch"] for one in logged if "epoch/val_loss" in one] == [0, 1]


def test_tqdm_counts_epochs_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    from tqdm.keras import TqdmCallback

    bars = TqdmCallback(verbose=1, mininterval=0)
    fit_natively([bars], max_epochs=2)
    assert (bars.epoch_bar.n, bars.epoch_bar.total, bars.batch_bar.total) == (2, 2, 4)
    shown = capsys.readouterr()
    assert "val_loss" in shown.err
