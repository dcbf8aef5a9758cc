"""A training that is asked to end by a signal: a program for the tests, and the same training for them to compare with.

python -m tests.checkpoint.preempted DIRECTORY WHERE SIGNAL
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.tensor_files import Facts
from cadenza.engine.session import session_of
from cadenza.files.disk import Unflushed
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Moment


def _in_the_eighth_step(run: Run) -> bool:
    return run.progress.step == 7


def _after_the_first_epoch(run: Run) -> bool:
    return run.progress.step == 12


WHERE: dict[str, tuple[Moment, Callable[[Run], bool] | None]] = {
    "training": (Callback.on_after_backward, _in_the_eighth_step),
    "a fetch": (Callback.on_fetch_start, _in_the_eighth_step),
    "evaluation": (Callback.on_eval_batch_start, _after_the_first_epoch),
    "the end of an epoch": (Callback.on_epoch_end, _after_the_first_epoch),
    "the warm-up": (Callback.on_fit_start, None),
    "a trial": (Callback.on_sanity_start, None),
    "the last moment": (Callback.on_fit_end, None),
}


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are random anew at every reading."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4) + index / 24, torch.tensor(index % 2)


class KillingFiles(LocalFiles):
    """Files that send a signal to their process while the third checkpoint is being written."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number, self.manifests = number, 0

    def write(self, path: str, content: bytes, later: Unflushed | None = None) -> Facts:
        self.manifests += path.endswith("manifest.json")
        if self.manifests == 3 and threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), self.number)
            self.manifests += 1
        return super().write(path, content, later)


def trainer(directory: Path, *more: Callback, workers: int = 0, every: str = "4 steps", **options: Any) -> Trainer:
    """Return a training of 36 steps with dropout, batch norm, AdamW, an average, shuffling, augmentation and evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=workers),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=3,
        seed=3,
        directory=directory,
        device="cpu",
        progress=False,
        callbacks=[
            Checkpoint(every, **options),
            Ema(0.9),
            Evaluate(DataLoader(Noise(), batch_size=8), sanity_batches=1),
            *more,
        ],
    )


def with_workers(directory: Path, method: str, wait: Callable[[Run], None]) -> Trainer:
    """Return a training: its fifth step waits for a signal, then reads three more batches."""
    training = trainer(directory, on(Callback.on_step_start, every=5)(wait), workers=1)
    training.loader = DataLoader(Noise(), batch_size=2, num_workers=1, prefetch_factor=1, multiprocessing_context=method)
    training.accumulate = 4
    return training


def main(directory: Path, where: str, number: int) -> None:
    """Train, and send the signal to this process at `where`; ``twice`` sends it again at once, ``outside`` waits for it."""
    torch.set_num_threads(1)

    def send(run: Run, *_: Any) -> None:
        if session_of(run).sync.requests.signal is None:
            os.kill(os.getpid(), number)

    def send_twice(run: Run, *_: Any) -> None:
        os.kill(os.getpid(), number)
        (directory / "after the first").touch()
        os.kill(os.getpid(), number)
        (directory / "after the second").touch()

    def wait(run: Run) -> None:
        sys.stdout.write("ready\n")  # the test waits for it
        sys.stdout.flush()
        while session_of(run).sync.requests.signal is None:
            time.sleep(0.01)  # not signal.pause(): a signal that came just before it would be waited for in vain

    class SignalInASave(Callback):
        def on_fit_start(self, run: Run) -> None:
            checkpoint = next(one for one in hooks_of(run).callbacks.values() if isinstance(one, Checkpoint))
            checkpoint.store.files = KillingFiles(directory / "checkpoints", number)

    if where == "a save":
        training = trainer(directory, SignalInASave())
    elif where == "the last save":
        training = trainer(directory, SignalInASave(), every="18 steps")  # two, and the third is that of the end
    elif where == "twice":
        training = trainer(directory, on(Callback.on_after_backward, when=_in_the_eighth_step)(send_twice))
    elif where == "outside":
        training = trainer(directory, on(Callback.on_step_end, at=5)(wait), workers=2)
    elif where.endswith("workers"):
        training = with_workers(directory, where.removesuffix("ed workers"), wait)
    elif where == "unhandled":
        training = trainer(directory, on(Callback.on_after_backward, when=_in_the_eighth_step)(send), on_signal=False)
    else:
        moment, when = WHERE[where]
        training = trainer(directory, on(moment, when=when)(send))
    training.fit(resume="auto")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
