"""Callbacks that other packages ship for Lightning, transformers and Keras have their effect in a native run."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="callbacks for Lightning run here: pip install lightning")

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from cadenza import Run, Trainer
from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import Arguments
from tests.compat.keras import parts as with_keras
from tests.compat.lightning import home as with_lightning
from tests.compat.receiver import receiver
from tests.compat.transformers import scenario as with_transformers
from tests.compat.transformers.scenario import Samples, compute, evaluate, scalars, transformers

# -- pruning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prunes", [False, True])
@pytest.mark.parametrize("system", ["lightning", "keras"])
def test_optuna_prunes_the_trial_at_the_same_epoch(tmp_path: Path, system: str, prunes: bool) -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed")
    integration = pytest.importorskip("optuna_integration", reason="optuna-integration is not installed")
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def study(train: Callable[[list[Any]], Any]) -> list[Any]:
        found = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.1 if prunes else 100.0, n_warmup_steps=1))

        def objective(trial: Any) -> float:
            kinds = {"lightning": "PyTorchLightningPruningCallback", "keras": "KerasPruningCallback"}
            train([getattr(integration, kinds[system])(trial, "val_loss")])
            return 0.0

        found.optimize(objective, n_trials=1)
        [trial] = found.trials
        return [trial.state, {step: pytest.approx(value, rel=1e-4) for step, value in trial.intermediate_values.items()}]

    if system == "lightning":
        home = study(lambda callbacks: with_lightning.at_home(callbacks, tmp_path, max_epochs=3))
        here = study(lambda callbacks: with_lightning.native(callbacks, max_epochs=3))
    else:
        home = study(lambda callbacks: with_keras.fit_at_home(callbacks, rate=0.02))
        here = study(lambda callbacks: with_keras.fit_natively(callbacks, rate=0.02))
    assert here == home
    assert home[0] == (optuna.trial.TrialState.PRUNED if prunes else optuna.trial.TrialState.COMPLETE)
    assert len(home[1]) == (2 if prunes else 3)


# -- MLflow ------------------------------------------------------------------------------------------------

of_mlflow = pytest.mark.filterwarnings("ignore")  # its data base uses what sqlalchemy will remove


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of one data base for all: its tables are made once, in seconds."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def experiment(name: str, database: str, artifacts: Path) -> Any:
    mlflow: Any = import_module("mlflow")
    mlflow.set_tracking_uri(database)
    mlflow.create_experiment(name, artifact_location=str(artifacts))
    mlflow.set_experiment(name)
    return mlflow


@of_mlflow
def test_mlflow_logs_the_metrics_and_parameters_of_lightning(tmp_path: Path, database: str) -> None:
    pytest.importorskip("pytorch_lightning", reason="mlflow's callbacks need the package pytorch-lightning")
    mlflow = experiment("of lightning", database, tmp_path)
    autolog = import_module("mlflow.pytorch._lightning_autolog")
    kind = next(value for name, value in vars(autolog).items() if name.endswith("__MlflowPLCallback"))
    with mlflow.start_run() as run:
        client, metrics = autolog.MlflowAutologgingQueueingClient(), autolog.BatchMetricsLogger(run.info.run_id)
        intervals = {"log_every_n_epoch": 1, "log_every_n_step": None}
        logs = kind(client, metrics, run.info.run_id, log_models=False, log_model_signatures=False, **intervals)
        keeps = autolog.MlflowModelCheckpointCallback(monitor="val_loss", save_best_only=True)
        keeps.client, keeps.run_id, keeps.mlflow_tracking_uri = client, run.info.run_id, mlflow.get_tracking_uri()
        with_lightning.native([logs, keeps], max_epochs=2)
    data = mlflow.get_run(run.info.run_id).data
    assert {"val_loss", "eval/loss", "train_loss"} <= data.metrics.keys()
    assert (data.params["epochs"], data.params["optimizer_name"], data.params["momentum"]) == ("2", "SGD", "0.9")
    assert data.tags["Mode"] == "training"
    [file] = tmp_path.rglob("*.pth")
    assert torch.load(file, weights_only=True)["state_dict"]["weight"].shape == (1, 3)


@of_mlflow
def test_mlflow_gets_the_metrics_of_each_epoch_of_keras(tmp_path: Path, database: str) -> None:
    pytest.importorskip("mlflow.keras", reason="this mlflow has no callback for Keras 3")
    mlflow = experiment("of keras", database, tmp_path)
    with mlflow.start_run() as active:
        run = with_keras.fit_natively([mlflow.keras.MlflowCallback()], max_epochs=2)
    mlflow.flush_async_logging()
    client = mlflow.MlflowClient()
    logged = client.get_metric_history(active.info.run_id, "val_loss")
    assert [one.value for one in logged] == pytest.approx([value for _, value in run.history["eval/loss"]])
    stored = client.get_run(active.info.run_id).data
    assert (stored.params["optimizer_name"], stored.params["optimizer_learning_rate"]) == ("sgd", "0.1")
    assert "validation_loss" in stored.metrics
    (summary,) = tmp_path.rglob("model_summary.txt")
    assert "Total params: 3" in summary.read_text()


@of_mlflow
def test_mlflow_gets_the_values_of_transformers(tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = experiment("of transformers", database, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of transformers")
    run = natively(tmp_path / "run", transformers.integrations.MLflowCallback())
    mlflow.flush_async_logging()
    client = mlflow.MlflowClient(database)
    [stored] = client.search_runs([client.get_experiment_by_name("of transformers").experiment_id])
    assert stored.info.status == "FINISHED"
    assert stored.data.params["per_device_train_batch_size"] == "2"
    logged = {name: client.get_metric_history(stored.info.run_id, name) for name in ("loss", "eval_loss", "learning_rate")}
    steps = {name: [one.step for one in history] for name, history in logged.items()}
    assert steps == {"loss": [2, 4, 6, 8, 10, 12], "eval_loss": [6, 12], "learning_rate": [2, 4, 6, 8, 10, 12]}
    values = [value for _, value in run.history["eval/loss"]]
    assert [one.value for one in logged["eval_loss"]] == pytest.approx(values, abs=1e-5)


# -- trackers and printers of transformers ------------------------------------------------------------------------------


def natively(folder: Path, *callbacks: Any) -> Run:
    """Train two epochs with an evaluation and a checkpoint each, and a log every two steps."""
    parts = [evaluate("1 epoch"), Checkpoint("1 epoch"), Arguments(logging_steps=2)]
    return with_transformers.here([*parts, *callbacks], max_epochs=2, directory=folder)


def at_home(folder: Path, callback: Any) -> None:
    settings: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 2, "eval_strategy": "epoch"}
    with_transformers.at_home(folder, callback, evaluation=True, **settings)


def test_tensorboard_writes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    kind = transformers.integrations.TensorBoardCallback
    at_home(tmp_path, kind())
    natively(tmp_path / "run", kind())
    here, there = scalars(tmp_path / "run"), scalars(tmp_path / "home")
    assert here == there
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "eval/loss", "train/epoch"} <= here.keys()


@pytest.mark.long  # wandb starts a service; its own sink is tested in tests/sinks
def test_wandb_gets_the_config_and_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    settings = {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "LOG_MODEL": "checkpoint"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # a process reads the variables once
    try:
        natively(tmp_path / "run", transformers.integrations.WandbCallback())
        summary, config = dict(wandb.run.summary), dict(wandb.run.config)
    finally:
        wandb.finish()
    assert summary["train/global_step"] == 12
    assert {"train/loss", "eval/loss", "train/learning_rate", "train_loss"} <= summary.keys()
    assert config["per_device_train_batch_size"] == 2
    assert config["output_dir"] == str(tmp_path / "run")


def test_dvclive_and_trackio_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dvclive = pytest.importorskip("dvclive", reason="dvclive is not installed")
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    from dvclive.huggingface import DVCLiveCallback  # that of dvclive itself

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVCLIVE_LOG_MODEL", "false")
    trackers = [
        transformers.integrations.DVCLiveCallback(live=dvclive.Live("theirs", save_dvc_exp=False)),
        DVCLiveCallback(live=dvclive.Live("own", save_dvc_exp=False)),
        transformers.integrations.TrackioCallback(),
    ]
    natively(tmp_path / "run", *trackers)
    assert trackio.__version__
    for folder in ("theirs", "own"):
        found = json.loads((tmp_path / folder / "metrics.json").read_text())
        assert found["eval"]["loss"] > 0
        assert found["train"]["loss"] > 0
        assert found["learning_rate"] == pytest.approx(0.1 / 12)


def test_kubeflow_gets_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformers.integrations, "KubeflowCallback"):
        pytest.skip("this release of transformers has no KubeflowCallback")
    token = tmp_path / "token"
    token.write_text("secret of a test")
    with receiver() as (address, received):
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", address)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        natively(tmp_path / "run", transformers.integrations.KubeflowCallback())
    statuses = [content["trainerStatus"] for _, content in received]
    assert [one["progressPercentage"] for one in (statuses[0], statuses[-1])] == [0, 100]
    assert "eval_loss" in {one["name"] for one in statuses[-1]["metrics"]}


def test_printers_and_bars_show_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = pytest.importorskip("transformers.utils.notebook", reason="IPython is not installed").NotebookProgressCallback()
    natively(tmp_path / "run", transformers.PrinterCallback(), transformers.ProgressCallback(), notebook)
    shown = capsys.readouterr()
    assert shown.out.count("'eval_loss'") == 4  # of each callback, in each epoch
    assert "12/12" in shown.err
    assert "HTML object" in shown.out  # its table, where no notebook shows it


# -- trl and peft ------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A model with what trl needs of a model of transformers."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = config
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.linear(x), labels)}

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "weights.pt")

    def update_and_allocate(self, step: int) -> None:
        self.allocated = [*getattr(self, "allocated", []), step]

    @property
    def base_model(self) -> nn.Module:
        return self


def train_tiny(folder: Path, *callbacks: Any, resume: bool | str = False, dies_at: int = 0) -> Tiny:
    class Die(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            if state.global_step == dies_at and dies_at:
                raise KeyError("of a test")

    model = Tiny()
    arguments = Arguments(ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
    Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        DataLoader(Samples(12, 1), batch_size=2),
        compute,
        callbacks=[Checkpoint("2 steps", on_exception=False), arguments, Die(), *callbacks],
        max_epochs=1,
        device="cpu",
        progress=False,
        directory=folder,
    ).fit(resume=resume)
    return model


def test_callbacks_of_trl_and_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks", reason="trl is not installed")
    adamss = pytest.importorskip("peft.tuners.adamss.asa_callback", reason="peft has no AdamssAsaCallback")
    reference = Tiny()
    accelerate: Any = pytest.importorskip("accelerate")

    accelerate.state.AcceleratorState(cpu=True)  # which the trainers of trl make
    bema = callbacks.BEMACallback(update_freq=2)
    sync, progress = callbacks.SyncRefModelCallback(reference, None), callbacks.RichProgressCallback()
    model = train_tiny(tmp_path / "run", bema, sync, progress, adamss.AdamssAsaCallback())
    weights = torch.load(tmp_path / "run" / "bema" / "weights.pt")
    assert weights.keys() == model.state_dict().keys()
    assert not torch.equal(weights["linear.weight"], model.linear.weight)
    assert not torch.equal(reference.linear.weight, Tiny().linear.weight)  # it follows the model
    assert model.allocated == [1, 2, 3, 4, 5, 6] or model.allocated == [0, 1, 2, 3, 4, 5]
    assert "Training" in capsys.readouterr().out


def test_lists_that_on_train_begin_fills_are_not_filled_twice_after_a_resume(tmp_path: Path) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks", reason="trl is not installed")
    with pytest.raises(KeyError):
        train_tiny(tmp_path / "cut", callbacks.BEMACallback(update_freq=1), dies_at=3)
    again = callbacks.BEMACallback(update_freq=1)
    train_tiny(tmp_path / "cut", again, resume="auto")
    whole = callbacks.BEMACallback(update_freq=1)
    train_tiny(tmp_path / "whole", whole)
    assert len(again.ema_params) == len(whole.ema_params) == 2
    assert all(map(torch.equal, again.ema_params, whole.ema_params))


# -- callbacks of other packages for Keras -----------------------------------------------------------------


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
    with_keras.fit_natively([callback], max_epochs=2)
    if swanlab.has_run():
        swanlab.finish()
    assert [one["epoch/learning_rate"] for one in logged if "epoch/loss" in one] == pytest.approx([0.1, 0.1])
    assert [one["epoch/epoch"] for one in logged if "epoch/val_loss" in one] == [0, 1]


def test_tqdm_counts_epochs_and_batches(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    from tqdm.keras import TqdmCallback

    bars = TqdmCallback(verbose=1, mininterval=0)
    with_keras.fit_natively([bars], max_epochs=2)
    assert (bars.epoch_bar.n, bars.epoch_bar.total, bars.batch_bar.total) == (2, 2, 4)
    assert "val_loss" in capsys.readouterr().err


# -- and for pytorch_lightning -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Replacing existing data")
def test_torchs_own_sparsity_callbacks_run() -> None:
    pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
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
    batches, optimizer = with_lightning.batches_of(2), with_lightning.sgd
    Trainer(model, optimizer, batches, lambda model, batch: model(batch[0]).square().mean(), **settings_of_run).fit()
    assert after.sparsified is not None
    assert not any(one.any() for one in after.sparsified.parameters())
    assert all(one.any() for one in model.parameters())
    assert during.data_scheduler.last_epoch == 2
    assert during.data_sparsifier.data_groups["0_weight"]["sparsity_level"] == 0.5


def test_a_callback_of_pytorch_lightning_gets_its_own_classes() -> None:
    pl = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed")
    found = []

    def look(base: Any, module: Any) -> type:
        def on_train_start(self: Any, trainer: Any, pl_module: Any) -> None:
            found.append((isinstance(pl_module, module), trainer.state.fn == "fit", trainer.lightning_module is not None))

        return type("Look", (base,), {"on_train_start": on_train_start})

    stop = pl.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    own = [look(pl.Callback, pl.LightningModule)(), look(lightning.Callback, lightning.LightningModule)(), stop]
    run = with_lightning.native(own, max_epochs=5)
    assert found == [(True, True, True)] * 2
    assert run.progress.epoch == 2
