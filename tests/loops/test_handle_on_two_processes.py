"""`Trainer.start` on two processes."""

from __future__ import annotations

from pathlib import Path

from cadenza.testing import launch, tiny_trainer
from tests import forked


def steer() -> tuple[str, str]:
    """Return the error about the pause, and how the run ended."""
    handle = tiny_trainer(steps=1_000_000, driver="ddp").start()
    try:
        handle.pause()
    except RuntimeError as error:
        refused = str(error)
    handle.stop("enough")
    outcome = handle.join(60).outcome
    assert outcome is not None
    return refused, outcome.kind


def steer_on_two() -> None:
    for refused, kind in launch(steer, 2):
        assert "works in one process only" in refused, refused
        assert kind == "stopped", kind


def test_on_several_ranks_a_run_is_stopped_but_not_paused(tmp_path: Path) -> None:
    process = forked.start(steer_on_two, output=tmp_path / "said.txt")  # `launch` forks: not from a process with threads
    assert process.ended() == 0, process.said()
