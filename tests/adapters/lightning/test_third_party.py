"""Callbacks of other packages, for ``lightning`` and for ``pytorch_lightning``, have their effect in a native run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the tests of Lightning's callbacks need the package lightning")

import torch

from cadenza import Trainer
from tests.adapters.lightning.home import at_home, batches_of, native, optimizer_of


@pytest.mark.parametrize("prunes", [False, True])
def test_optuna_prunes_the_trial_at_the_same_epoch(tmp_path: Path, prunes: bool) -> None:
    optuna = pytest.importorskip("optuna", reason="this test needs the package optuna")
    integration = pytest.importorskip("optuna_integration", reason="this test needs the package optuna-integration")
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def study(train: Any) -> list[Any]:
        pruner = optuna.pruners.ThresholdPruner(upper=0.1 if prunes else 100.0)
        found = optuna.create_study(pruner=pruner)

        def objective(trial: Any) -> float:
            train([integration.PyTorchLightningPruningCallback(trial, "val_loss")])
            return 0.0

        found.optimize(objective, n_trials=1)
        [trial] = found.trials
        return [trial.state, {step: pytest.approx(value, rel=1e-5) for step, value in trial.intermediate_values.items()}]

    home = study(lambda callbacks: at_home(callbacks, tmp_path, max_epochs=3))
    assert study(lambda callbacks: native(callbacks, max_epochs=3)) == home
    assert len(home[1]) == (1 if prunes else 3)


@pytest.mark.filterwarnings("ignore")  # its data base uses what sqlalchemy will remove
def test_mlflow_logs_the_same_metrics_and_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="this test needs the package mlflow")
    pytest.importorskip("pytorch_lightning", reason="this test needs the package pytorch-lightning")
    monkeypatch.chdir(tmp_path)
    mlflow = import_module("mlflow")
    autolog = import_module("mlflow.pytorch._lightning_autolog")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    kind = next(value for name, value in vars(autolog).items() if name.endswith("__MlflowPLCallback"))
    with mlflow.start_run() as run:
        client, metrics = autolog.MlflowAutologgingQueueingClient(), autolog.BatchMetricsLogger(run.info.run_id)
        intervals = {"log_every_n_epoch": 1, "log_every_n_step": None}
        logs = kind(client, metrics, run.info.run_id, log_models=False, log_model_signatures=False, **intervals)
        keeps = autolog.MlflowModelCheckpointCallback(monitor="val_loss", save_best_only=True)
        keeps.client, keeps.run_id, keeps.mlflow_tracking_uri = client, run.info.run_id, mlflow.get_tracking_uri()
        native([logs, keeps], max_epochs=2)
    data = mlflow.get_run(run.info.run_id).data
    assert {"val_loss", "eval/loss", "train_loss"} <= data.metrics.keys()
    assert (data.params["epochs"], data.params["optimizer_name"], data.params["momentum"]) == ("2", "SGD", "0.9")
    assert data.tags["Mode"] == "training"
    [file] = tmp_path.rglob("*.pth")
    assert torch.load(file, weights_only=True)["state_dict"]["weight"].shape == (1, 3)


@pytest.mark.filterwarnings("ignore:Replacing existing data")
def test_torchs_own_sparsity_callbacks_run() -> None:
    pytest.importorskip("pytorch_lightning", reason="this test needs the package pytorch-lightning")
    from torch.ao.pruning._experimental.data_scheduler.base_data_scheduler import BaseDataScheduler
    from torch.ao.pruning._experimental.data_sparsifier.data_norm_sparsifier import DataNormSparsifier
    from torch.ao.pruning._experimental.data_sparsifier.lightning.callbacks.data_sparsity import (
        PostTrainingDataSparsity,
        TrainingAwareDataSparsity,
    )

    class Halving(BaseDataScheduler):  # type: ignore[no-untyped-call, misc, unused-ignore]  # torch has no types here
        def get_schedule_param(self: Any) -> dict[str, float]:
            return {name: 0.5 * level for name, level in self.base_param.items()} if self.last_epoch else dict(self.base_param)

    settings = {"sparsity_level": 1.0, "sparse_block_shape": (1, 1), "norm": "L1", "zeros_per_block": 1}
    scheduler = {"schedule_param": "sparsity_level"}
    after = PostTrainingDataSparsity(DataNormSparsifier, settings)
    during = TrainingAwareDataSparsity(DataNormSparsifier, settings, Halving, scheduler)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    callbacks: list[Any] = [after, during]
    settings_of_run: dict[str, Any] = {"max_epochs": 2, "progress": False, "callbacks": callbacks}
    Trainer(model, optimizer_of, batches_of(2), lambda model, batch: model(batch[0]).square().mean(), **settings_of_run).fit()
    assert after.sparsified is not None
    assert not any(one.any() for one in after.sparsified.parameters())
    assert all(one.any() for one in model.parameters())
    assert during.data_scheduler.last_epoch == 2
    assert during.data_sparsifier.data_groups["0_weight"]["sparsity_level"] == 0.5


def test_a_callback_of_pytorch_lightning_gets_its_own_classes() -> None:
    pl = pytest.importorskip("pytorch_lightning", reason="this test needs the package pytorch-lightning")
    import lightning.pytorch as other

    found = []

    def look(base: Any, module: Any) -> type:
        def on_train_start(self: Any, trainer: Any, pl_module: Any) -> None:
            found.append((isinstance(pl_module, module), trainer.state.fn == "fit", trainer.lightning_module is not None))

        return type("Look", (base,), {"on_train_start": on_train_start})

    stop = pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    own = [look(pl.Callback, pl.LightningModule)(), look(other.Callback, other.LightningModule)(), stop]
    run = native(own, max_epochs=5)
    assert found == [(True, True, True)] * 2
    assert run.progress.epoch == 2
