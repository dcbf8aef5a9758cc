"""MLflow without a server: its callback writes the values that it writes at home, on two processes once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import Arguments
from cadenza.testing import launch
from tests.adapters.transformers.scenario import at_home, evaluate, here, transformers

Values = dict[str, list[tuple[int, float]]]


def written(database: str, experiment: str) -> Values:
    import mlflow

    mlflow.flush_async_logging()
    client = mlflow.MlflowClient(database)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["per_device_train_batch_size"] == "2"
    names = ("loss", "eval_loss", "learning_rate")
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
    return {name: [(one.step, one.value) for one in history] for name, history in histories.items()}


def tracked(folder: Path, experiment: str) -> None:
    import mlflow

    os.environ["MLFLOW_EXPERIMENT_NAME"] = experiment
    parts = [evaluate("1 epoch"), Checkpoint("1 epoch"), Arguments(logging_steps=2)]
    here([*parts, transformers.integrations.MLflowCallback()], max_epochs=2, directory=folder / experiment)
    mlflow.flush_async_logging()


@pytest.mark.filterwarnings("ignore:The ``noload``:DeprecationWarning")  # mlflow's
def test_mlflow_gets_the_values_that_it_gets_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    database = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "")

    launch(lambda: tracked(tmp_path, "two"))
    tracked(tmp_path, "one")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    callback = transformers.integrations.MLflowCallback()
    at_home(tmp_path, callback, evaluation=True, num_train_epochs=2, logging_steps=2, eval_strategy="epoch")

    one = written(database, "one")
    for name, values in written(database, "theirs").items():
        assert [step for step, _ in one[name]] == [step for step, _ in values]
        assert [value for _, value in one[name]] == pytest.approx([value for _, value in values], abs=1e-5)
    two = {name: [step for step, _ in values] for name, values in written(database, "two").items()}
    assert two == {"loss": [2, 4, 6], "eval_loss": [3, 6], "learning_rate": [2, 4, 6]}  # of the main process alone
