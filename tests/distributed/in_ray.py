"""Train with two workers of Ray Train, one of which fails once: ``python in_ray.py FOLDER``, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.loading.evaluation import Evaluation
from tests.distributed.parts import loader, network, trainer, weights_of


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
    """Start a local Ray, train, and end it."""
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


if __name__ == "__main__":
    main()
