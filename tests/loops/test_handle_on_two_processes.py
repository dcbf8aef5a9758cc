"""`Trainer.start` on two processes."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from cadenza.testing import launch, tiny_trainer

def steer():
    handle = tiny_trainer(steps=1_000_000, driver="ddp").start()
    try:
        handle.pause()
    except RuntimeError as error:
        refused = str(error)
    handle.stop("enough")
    return refused, handle.join(60).outcome.kind

for refused, kind in launch(steer, 2):
    assert "works in one process only" in refused, refused
    assert kind == "stopped", kind
"""


def test_on_several_ranks_a_run_is_stopped_but_not_paused() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)  # fresh: `launch` forks
