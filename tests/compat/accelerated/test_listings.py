"""The document's listings, run as scripts on real images: only their import lines and paths are changed."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import sqlite3
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked

HERE = Path(__file__).parent / "listings"
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "fashion-mnist"

pytestmark = pytest.mark.skipif(not DATA.exists(), reason=f"the data are not in {DATA}")


def listing(name: str, *arguments: object, folder: Path, warning: str = "error", status: int = 0, **environment: str) -> str:
    """Run a listing in a folder; return what it wrote."""
    script = [str(HERE / f"{name}.py"), str(DATA), *map(str, arguments)]
    process = forked.start(_as_main, script, folder, warning, environment, output=folder / "said")
    assert process.ended() == status, process.said()
    return process.said()


def _as_main(script: list[str], folder: Path, warning: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    warnings.simplefilter(warning)
    torch.set_num_threads(1)
    sys.argv, sys.path[0] = script, str(HERE)
    runpy.run_path(script[0], run_name="__main__")


def test_case_1_metrics_are_in_the_run_history_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which torchmetrics takes seconds to import; its loaders have workers."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(sys, "argv", ["", str(DATA), str(tmp_path)])
    runpy.run_path(str(HERE / "metrics_in_the_history.py"), run_name="__main__")
    shown = capsys.readouterr().out
    seen = json.loads((tmp_path / "metrics.json").read_text())
    assert seen["accuracy"][1] == pytest.approx(seen["counted"])
    assert seen["accuracy"][1] > 0.6  # a tenth, if it had learned nothing
    assert all(len(seen[name]) == 2 for name in ("precision", "recall", "train_loss_epoch", "eval_loss_epoch"))
    assert [float(one) for one in re.findall(r"accuracy: ([\d.]+)", shown)] == pytest.approx(seen["accuracy"])
    assert shown.count("Starting epoch") == 2


def test_case_2_a_custom_logger_writes_to_mlflow(tmp_path: Path) -> None:
    shown = listing("mlflow_logger", folder=tmp_path, warning="default", MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/store.db")
    with closing(sqlite3.connect(tmp_path / "store.db")) as store:
        tags = dict(store.execute("select key, value from tags"))
        rows = store.execute("select key, value from metrics order by timestamp, rowid").fetchall()
    assert (tags["num_epochs"], tags["train_per_device_batch_size"], tags["is_distributed"]) == ("2", "50", "False")
    metrics = {name: [value for key, value in rows if key == name] for name in ("train_loss_epoch", "eval_loss_epoch")}
    for name, values in metrics.items():
        printed = [float(one) for one in re.search(rf"^{name} (.*)$", shown, re.MULTILINE)[1].split()]  # type: ignore[index]  # it is there
        assert values == printed
        assert len(values) == 2


def test_case_3_predictions_are_saved_as_csv(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    shown = listing("save_predictions", folder=tmp_path).splitlines()
    with (tmp_path / "outputs" / "valid_predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["prediction"] for row in rows] == shown[-2].split()
    assert [row["targets"] for row in rows] == shown[-1].split()
    assert len(rows) == 120


def test_a_custom_event_is_called_for_each_batch(tmp_path: Path) -> None:
    said = listing("event_of_your_own", folder=tmp_path, status=1)
    assert "all batches are as they should be" in said
    assert "AssertionError" in said  # in the second training the last batch is too small
    assert "in verify_train_batch" in said
