"""Inside of Ray Train, which starts the processes, their group, and all of them again after an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.loading.evaluation import Evaluation
from cadenza.testing import launch
from tests.distributed.parts import loader, network, trainer, weights_of

ROOT = Path(__file__).parents[2]


def train(config: dict[str, Any]) -> None:
    """Train for 6 steps; the first time rank 1 fails after the third."""
    import ray.train

    folder, group = Path(config["folder"]), torch.distributed.group.WORLD

    @on(Callback.on_step_start)
    def fail(run: Run) -> None:
        if run.progress.step == 3 and run.driver.rank == 1 and not (folder / "failed").exists():
            (folder / "failed").touch()
            raise ZeroDivisionError("on purpose")

    @on(Callback.on_eval_end)
    def report(run: Run, evaluation: Evaluation) -> None:
        ray.train.report({"step": run.progress.step, **evaluation.results})

    callbacks = [fail, Evaluate(loader(8)), report, Checkpoint("1 step")]
    one = trainer(model=network(dropout=0.3), max_epochs=2, directory=folder / "run", driver="auto", callbacks=callbacks)
    run = one.fit(resume="auto")
    told = {
        "driver": repr(run.driver),
        "resumed": [decision.why for decision in run.decisions if decision.what == "resumed"],
        "weights": weights_of(one).tolist(),
        "group is left alone": torch.distributed.group.WORLD is group,
    }
    (folder / f"told-{run.driver.rank}.json").write_text(json.dumps(told))


def main() -> None:
    """Start a local Ray, train with two workers, and end it: ``python test_ray.py FOLDER``."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder = sys.argv[1]
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["RAY_FOLDER"])
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    ray.shutdown()


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_two_workers_of_ray_train_of_which_one_fails_once_end_with_the_bits_of_two_processes(tmp_path: Path) -> None:
    def undisturbed() -> torch.Tensor:
        one = trainer(model=network(dropout=0.3), directory=tmp_path / "alone", callbacks=[Evaluate(loader(8)), Checkpoint()])
        one.fit()
        return weights_of(one)

    expected = launch(undisturbed)[0].tolist()
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # names of sockets have 107 characters at most
        environment = os.environ | {
            "RAY_FOLDER": short,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        }
        command = [sys.executable, __file__, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "failed").exists()
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told["weights"] == expected
        assert told["driver"] == f"DdpDriver('cpu', rank {rank} of 2)"
        assert told["resumed"] == ["at step-00000003"]
        assert told["group is left alone"]


if __name__ == "__main__":
    main()
