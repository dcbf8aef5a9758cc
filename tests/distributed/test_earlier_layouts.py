"""Checkpoints that an earlier version wrote on two ranks are continued: with DDP, and with FSDP, also on another number.

Commit 6ed4a36 wrote ``tests/checkpoint/data/6ed4a36.tar.xz`` with ``fitted(directory / name, name, 4)`` on two ranks. There,
the states of all ranks are in ``state.json``, and ``shards.json`` lists each part.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Trainer
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.store import Store
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.testing import launch
from tests.distributed.parts import loader, network, squared_error
from tests.distributed.test_fsdp import whole

WRITTEN = Path(__file__).parents[1] / "checkpoint" / "data" / "6ed4a36.tar.xz"
DRIVERS: dict[str, Any] = {"ddp": DdpDriver, "fsdp": FsdpDriver}


def fitted(directory: Path, driver: str, steps: int, *, resume: bool = False, dropout: float = 0.3) -> Tensor:
    """Return the weights of a run; dropout and batches are random, so each rank needs its own state."""
    trainer = Trainer(
        network(dropout),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        loader(48),
        squared_error,
        max_steps=steps,
        seed=5,
        directory=directory,
        driver=DRIVERS[driver]("cpu", timeout_s=100),
        callbacks=[Checkpoint("2 steps", keep_last=None)],
        progress=False,
    )
    trainer.fit(resume="auto" if resume else False)
    parameters: list[nn.Parameter] = list(trainer.model.parameters())
    return torch.cat([whole(one).detach().flatten() for one in parameters])


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_continues_at_a_checkpoint_of_two_ranks_that_an_earlier_version_wrote(
    tmp_path: Path, driver: str, ranks: int
) -> None:
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(tmp_path, filter="data")
    store = Store(tmp_path / driver / "checkpoints")
    assert store.verify(store.saved()[-1])["format"] == {"ddp": 1, "fsdp": 2}[driver]
    got = launch(lambda: fitted(tmp_path / driver, driver, 7, resume=True), ranks)
    assert store.verify(store.saved()[-1])["format"] == 3
    if ranks == 2:
        expected, *_ = launch(lambda: fitted(tmp_path / "whole", driver, 7))
        torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=1e-6)  # another CPU may round differently
