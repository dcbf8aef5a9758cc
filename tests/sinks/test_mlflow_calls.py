"""``mlflow.log_metric(...)`` in a callback, beside the sink."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.records import read_info
from cadenza.sinks import Mlflow
from cadenza.testing import tiny_run
from cadenza.trackers.mlflow import _import as import_quietly
from tests.sinks.readers import MLFLOW, services
from tests.sinks.samples import failing, logging


@pytest.fixture(scope="module", autouse=True)
def on_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with services(tmp_path_factory.mktemp("mlflow")):
        yield


@on(Callback.on_step_end)
def log_to_mlflow(run: Run) -> None:
    import mlflow

    mlflow.log_metric("mine", run.progress.step, step=run.progress.step)
    mlflow.log_param(f"of step {run.progress.step}", "x")


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> str:
    """An experiment that ``mlflow.set_experiment`` selected, at MLflow's own URI."""
    import mlflow

    import_quietly(MLFLOW.uri)
    monkeypatch.setattr("mlflow.tracking.fluent._active_experiment_id", None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "")  # so that the end of the test removes it
    monkeypatch.setenv("MLFLOW_TRACKING_URI", MLFLOW.uri)
    return str(mlflow.set_experiment("selected").name)


def test_mlflow_log_metric_of_a_callback_adds_to_the_run_of_the_sink_until_it_ends(experiment: str, tmp_path: Path) -> None:
    import mlflow

    with pytest.raises(KeyboardInterrupt):
        tiny_run(callbacks=[logging({"a": 1}), Mlflow(), log_to_mlflow, failing(3)], directory=tmp_path)
    stored = MLFLOW.run(read_info(tmp_path), experiment)
    assert stored.data.metrics == {"a": 1, "mine": 3}
    assert [stored.data.params[f"of step {step}"] for step in (1, 2, 3)] == ["x"] * 3
    assert (stored.info.status, mlflow.active_run()) == ("FAILED", None)


def test_an_active_run_of_mlflow_of_your_own_stays_active(experiment: str, tmp_path: Path) -> None:
    import mlflow

    with mlflow.start_run() as own:
        run = tiny_run(callbacks=[logging({"a": 1}), Mlflow(), log_to_mlflow], steps=2, directory=tmp_path)
        assert mlflow.active_run() == own
    assert mlflow.get_run(own.info.run_id).data.metrics == {"mine": 2}
    assert MLFLOW.run(run.info, experiment).data.metrics == {"a": 1}


def test_another_experiment_than_the_selected_one_is_a_remark(experiment: str, tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging({"a": 1}), MLFLOW.make()], steps=2, directory=tmp_path)
    assert MLFLOW.run(run.info).data.metrics == {"a": 1}
    assert "does not add to the MLflow run of this sink: Cannot start run" in (tmp_path / "console.log").read_text()


# -- without a URI of the script -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_uri_of_the_sink_is_that_of_mlflow_until_the_run_ends(error: type[BaseException] | None, tmp_path: Path) -> None:
    import mlflow

    callbacks = [logging({"a": 1}), MLFLOW.make(), log_to_mlflow, Mlflow()]
    try:
        tiny_run(callbacks=[*callbacks, *([] if error is None else [failing(2, error)])], steps=2, directory=tmp_path)
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    assert MLFLOW.run(read_info(tmp_path)).data.metrics == {"a": 1, "mine": 2}
    assert (_is_set(), mlflow.active_run(), "MLFLOW_TRACKING_URI" in os.environ) == (False, None, False)
    second = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")  # of the sink without arguments
    assert MLFLOW.run(read_info(tmp_path), "cadenza", second).data.metrics == {"a": 1}


def test_another_uri_of_the_script_stays(experiment: str, tmp_path: Path) -> None:
    import mlflow

    with mlflow.start_run() as own:
        tiny_run(callbacks=[Mlflow(f"sqlite:///{tmp_path}/other.db"), log_to_mlflow], steps=2, directory=tmp_path)
    assert mlflow.get_tracking_uri() == MLFLOW.uri
    assert mlflow.get_run(own.info.run_id).data.metrics == {"mine": 2}


def test_a_uri_that_a_callback_sets_stays(tmp_path: Path) -> None:
    import mlflow

    @on(Callback.on_step_end, at=1)
    def choose(run: Run) -> None:
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/chosen.db")

    tiny_run(callbacks=[MLFLOW.make(), choose], steps=2, directory=tmp_path)
    assert mlflow.get_tracking_uri() == f"sqlite:///{tmp_path}/chosen.db"
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # it removes the URI


def test_the_uri_of_a_server_that_is_away_is_taken_back(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[Mlflow("http://127.0.0.1:9")], steps=2, directory=tmp_path)
    assert run.outcome is not None
    assert (run.outcome.kind, len(run.faults), _is_set()) == ("finished", 1, False)


def test_an_experiment_that_was_selected_without_a_uri_is_not_looked_up_at_that_of_the_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")  # as mlflow.set_experiment sets it
    run = tiny_run(callbacks=[Mlflow(MLFLOW.uri), log_to_mlflow], steps=2, directory=tmp_path)
    assert (MLFLOW.run(run.info, "cadenza").data.metrics, run.faults) == ({"mine": 2}, [])


def _is_set() -> bool:
    import mlflow

    return bool(mlflow.is_tracking_uri_set())  # type: ignore[no-untyped-call]
