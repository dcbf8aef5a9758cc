"""Several ranks agree on what cannot be written: before the first step, while the training goes on, and at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza import Callback, Run
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint import attempts
from cadenza.checkpoint.store import Store
from cadenza.drivers import DdpDriver, Driver, FsdpDriver
from cadenza.errors import CheckpointLostError, DirectoryError, DistributedError
from cadenza.testing import launch, tiny_trainer
from tests.checkpoint.blocked import Blocked
from tests.waiting import until

DRIVERS: dict[str, Callable[[], Driver]] = {
    "ddp": lambda: DdpDriver("cpu", timeout_s=100),
    "fsdp": lambda: FsdpDriver("cpu", timeout_s=100),
}


class Fault(Callback):
    """Puts a file in the place of the checkpoints after the steps in `begins`, and takes it away after those in `ends`."""

    def __init__(self, place: Path, begins: int, ends: int) -> None:
        self.place, self.begins, self.ends = place, begins, ends

    def on_step_end(self, run: Run) -> None:
        if run.is_main and run.progress.step == self.begins:
            self.blocked = Blocked(self.place)
        if run.progress.step == self.ends:
            if run.is_main:
                self.blocked.free()
            until(lambda: Store(self.place).saved())
        run.driver.barrier()


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path, driver: str) -> None:
    (tmp_path / "file").write_text("in the way")

    def fit(name: str, place: Path, begins: int, ends: int) -> tuple[str, list[str]]:
        saving = Checkpoint("2 steps", directory=place, background=False)
        fault = Fault(place, begins, ends)
        trainer = tiny_trainer(
            driver=DRIVERS[driver](), directory=tmp_path / name, callbacks=[fault, saving], steps=6, batches=20
        )
        try:
            return "finished", [one.what for one in trainer.fit().decisions]
        except (CheckpointLostError, DirectoryError, DistributedError) as error:
            return type(error).__name__, []

    def fits() -> list[tuple[str, list[str]]]:
        attempts.PAUSES_S = attempts.LAST_PAUSES_S = (0.05,)
        return [
            fit("never", tmp_path / "file" / "below", 0, 0),
            fit("later", tmp_path / "later", 1, 4),
            fit("at the end", tmp_path / "end", 5, 0),
        ]

    main, other = launch(fits)
    assert (main[0][0], other[0][0]) == ("DirectoryError", "DistributedError" if driver == "ddp" else "DirectoryError")
    assert [main[1][0], other[1][0]] == ["finished", "finished"]
    assert [what for what in main[1][1] if "saved" in what] == ["not saved", "saved", "saved", "saved"]
    assert [main[2][0], other[2][0]] == ["CheckpointLostError", "CheckpointLostError"]
    assert [saved.step for saved in Store(tmp_path / "later").saved()] == [4, 6]
