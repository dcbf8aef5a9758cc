"""A run that continues inside an epoch fires its start again, and says so."""

from __future__ import annotations

from pathlib import Path

from cadenza import Callback, Run
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer

Seen = list[tuple[str, int, bool]]


class Epochs(Callback):
    """Keeps, for each start and end of an epoch, the completed epochs, and whether the run continues inside this one."""

    def __init__(self) -> None:
        self.seen: Seen = []
        self.steps: list[bool] = []

    def on_epoch_start(self, run: Run) -> None:
        self.seen.append(("start", run.progress.epoch, run.progress.resumed_in_epoch))

    def on_step_start(self, run: Run) -> None:
        self.steps.append(run.progress.resumed_in_epoch)

    def on_epoch_end(self, run: Run) -> None:
        self.seen.append(("end", run.progress.epoch, run.progress.resumed_in_epoch))


def epochs_until(steps: int, directory: Path) -> Epochs:
    """Train to a step of epochs of 5 batches; go on from where the last run in `directory` ended."""
    epochs = Epochs()
    tiny_trainer(callbacks=[epochs, Checkpoint()], directory=directory, steps=steps, batches=5).fit(resume="auto")
    return epochs


def test_the_start_of_an_epoch_fires_again_and_progress_tells_it_from_a_first_one(tmp_path: Path) -> None:
    first = epochs_until(7, tmp_path)
    assert first.seen == [("start", 0, False), ("end", 1, False), ("start", 1, False), ("end", 1, False)]
    assert not any(first.steps)

    cut_again = epochs_until(8, tmp_path)
    assert cut_again.seen == [("start", 1, True), ("end", 1, True)]

    last = epochs_until(15, tmp_path)
    assert last.seen == [("start", 1, True), ("end", 2, False), ("start", 2, False), ("end", 3, False)]
    assert last.steps == [True] * 2 + [False] * 5


def test_a_run_that_continues_between_two_epochs_resumes_inside_of_none(tmp_path: Path) -> None:
    epochs_until(5, tmp_path)
    assert epochs_until(10, tmp_path).seen[-2:] == [("start", 1, False), ("end", 2, False)]
