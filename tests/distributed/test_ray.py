"""Inside of Ray Train, which starts the processes, their group, and all of them again after an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.testing import launch
from tests.distributed.parts import loader, network, trainer, weights_of

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_two_workers_of_ray_train_of_which_one_fails_once_end_with_the_bits_of_two_processes(tmp_path: Path) -> None:
    def undisturbed() -> torch.Tensor:
        one = trainer(model=network(dropout=0.3), directory=tmp_path / "alone", callbacks=[Evaluate(loader(8)), Checkpoint()])
        one.fit()
        return weights_of(one)

    expected = launch(undisturbed, 2)[0].tolist()
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # names of sockets have 107 characters at most
        environment = os.environ | {
            "RAY_FOLDER": short,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        }
        command = [sys.executable, str(ROOT / "tests" / "distributed" / "in_ray.py"), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "failed").exists()
    for rank in range(2):
        told = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert told["weights"] == expected
        assert told["driver"] == f"DdpDriver('cpu', rank {rank} of 2)"
        assert told["resumed"] == ["at step-00000003"]
        assert told["group is left alone"]
