"""A21 on two real processes: gather, process decorators, one print, one loss of an evaluation.

The driver is one of this test's own, with as much as an evaluation needs: it does not wrap the model, and which samples a
process gets is said by the trainer below. How a driver for training on several processes shares out the samples is not
tested here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cadenza.compat.accelerated.callbacks import LogMetricsCallback, PrintProgressCallback, TrainerCallback
from cadenza.compat.accelerated.face import Accelerator
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.compat.accelerated.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only
from cadenza.drivers.base import Reduction
from cadenza.drivers.single import SingleDriver

ROOT = Path(__file__).resolve().parents[3]


class Gloo(SingleDriver):
    """Two processes that only talk to each other."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__("cpu")
        self.rank = self.local_rank = dist.get_rank()

    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor:
        assert how == "sum"
        dist.all_reduce(value)
        return value

    def any_rank(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def gather(self, value: Any) -> list[Any]:
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, value)
        return parts

    def barrier(self) -> None:
        dist.barrier()


class Halves(Trainer):
    """The batches of an evaluation go to the processes in turn."""

    def _create_accelerator(self) -> Accelerator:
        return Accelerator(Gloo())

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Any = None) -> Any:
        samples = torch.arange(1.0, 8.0).split(batch_size)
        return [(part.unsqueeze(1), part.unsqueeze(1)) for part in samples[dist.get_rank() :: 2]]

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        return {"loss": batch[0].mean(), "model_outputs": batch[0], "batch_size": len(batch[0])}


class Gathering(TrainerCallback):
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gathered: list[float] = []
        self.written: list[str] = []

    def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.sizes.append(len(batch[0]))
        self.gathered += trainer.gather(batch_output["model_outputs"], padding_value=0).flatten().tolist()

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer._accelerator.wait_for_everyone()
        if trainer.run_config.is_world_process_zero:
            self.written.append("csv")


def one_process(folder: Path) -> None:
    """Evaluate in one of the two processes, and write down what it saw."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(sys.argv[2]), world_size=2)
    model = torch.nn.Linear(1, 1)
    gathering = Gathering()
    callbacks = (PrintProgressCallback, gathering, LogMetricsCallback)
    trainer = Halves(model, None, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=callbacks)
    trainer.evaluate(range(7), per_device_batch_size=2)
    order = folder / "order"

    @local_process_zero_first
    def first() -> str:
        with order.open("a") as file:
            file.write(str(dist.get_rank()))
        return order.read_text()

    seen = {
        "sizes": gathering.sizes,
        "gathered": gathering.gathered,
        "written": gathering.written,
        "loss": trainer.run_history.get_latest_metric("evaluation_loss"),
        "world only": world_process_zero_only(lambda: "here")(),
        "local only": local_process_zero_only(lambda: "here")(),
        "first": first(),
        "total": trainer.run_config.eval_total_batch_size if trainer.run_config else None,
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def test_a21_two_processes_share_an_evaluation_of_seven_samples(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.compat.accelerated.test_two_processes", str(tmp_path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], env=environment, cwd=ROOT, **pipes) for rank in range(2)]
    shown = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], shown
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert (zero["sizes"], one["sizes"]) == ([2, 2], [2, 1])
    assert zero["gathered"] == one["gathered"] == [1, 2, 3, 4, 5, 6, 7]
    assert zero["loss"] == one["loss"] == 4.0
    assert (zero["written"], one["written"]) == (["csv"], [])
    assert "evaluation_loss: 4.0" in shown[0][0]
    assert shown[1][0] == ""
    assert (zero["world only"], zero["local only"]) == ("here", "here")
    assert (one["world only"], one["local only"]) == (None, None)
    assert (zero["first"], one["first"]) == ("0", "01")
    assert zero["total"] == 4


if __name__ == "__main__":
    one_process(Path(sys.argv[1]))
