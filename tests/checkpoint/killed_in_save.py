"""A training that is killed while it writes its third checkpoint: ``python -m tests.checkpoint.killed_in_save FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.tensor_files import Facts
from cadenza.files.disk import Unflushed


class KilledFiles(LocalFiles):
    """Files that kill their process when half of the third checkpoint is written."""

    saves = 0

    def write_tensors(
        self, path: str, tensors: dict[str, Tensor], header: dict[str, str] | None = None, later: Unflushed | None = None
    ) -> Facts:
        self.saves += "model" in path
        if self.saves == 3 and "state" in path:
            (self.root / path).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_tensors(path, tensors, header, later)


def trainer(folder: Path, *callbacks: Callback) -> Trainer:
    """Return a training of 8 steps that saves 6 MiB after each step, in memory that it uses again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 700), nn.Linear(700, 700), nn.Linear(700, 2))
    batches = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(8)]
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batches,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=1,
        seed=1,
        directory=folder,
        device="cpu",
        progress=False,
        callbacks=[*callbacks, Checkpoint("1 step", keep_last=None)],
    )


if __name__ == "__main__":

    @on(Callback.on_fit_start)
    def dangerous(run: Run) -> None:
        for one in made.callbacks:
            if isinstance(one, Checkpoint):
                one.store.files = KilledFiles(Path(str(one.store.files)))

    made = trainer(Path(sys.argv[1]), dangerous)
    made.fit()
