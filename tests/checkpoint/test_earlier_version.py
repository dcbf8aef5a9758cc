"""A checkpoint that an earlier version wrote: a run continues there and ends with the same weights.

Commit 38fc567 wrote ``data/38fc567.tar.xz`` with ``fitted(directory, dies_at=7)``. The expected numbers are those of its
uninterrupted run.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate, LearningRate
from cadenza.checkpoint.store import Store

WRITTEN = Path(__file__).parent / "data" / "38fc567.tar.xz"
WEIGHTS = [
    *(0.0090938220, 0.2469393462, -0.4426863492, -0.4075742662, -0.1872124076, 0.0831488594, -0.0626861677, 0.3637227714),
    *(-0.0217484105, 0.0849711150, -0.2135132551, -0.1275242418, -0.4175318778, -0.2714030147, -0.1519232392, 0.0118799368),
    *(0.1777724028, 0.2921202183, -0.3351433277),
]
LOSSES = [0.7296677590, 0.7179398537, 0.7055526733, 0.6953522682, 0.6879054069]
"""The losses of the averaged weights, at every third step."""


def fitted(directory: Path, *, dies_at: int = 0, resume: bool = False) -> Run:
    """Return a run of 15 steps. At step `dies_at` the process ends without a cleanup."""
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 1, generator=generator))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1))

    @on(Callback.on_step_end)
    def total(run: Run) -> None:
        run.state["total"] = run.state.get("total", 0.0) + float(run.outputs["loss"].detach())
        run.log("train/total", run.state["total"])
        if run.progress.step == dies_at:
            os._exit(9)

    callbacks = [
        LearningRate(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)),
        Ema(decay=0.9),
        Evaluate(DataLoader(data, batch_size=4), every="3 steps", weights="ema"),
        Checkpoint(every="2 steps", keep_last=1, keep_best=("eval/loss", "min"), background=False),
        total,
    ]
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), 1e-2),
        DataLoader(data, batch_size=4, shuffle=True),
        supervised(nn.MSELoss()),
        max_epochs=3,
        seed=3,
        directory=directory,
        driver="single",
        progress=False,
        callbacks=callbacks,
        tokens=lambda batch: len(batch[0]),  # that version did not count them
    )
    return trainer.fit(resume="auto") if resume else trainer.fit()


def test_a_run_continues_at_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(tmp_path, filter="data")
    run = fitted(tmp_path, resume=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    torch.testing.assert_close(weights, torch.tensor(WEIGHTS), rtol=1e-5, atol=1e-6)  # another CPU may round differently
    assert [step for step, _ in run.history["eval/loss"]] == [3, 6, 9, 12, 15]
    assert [value for _, value in run.history["eval/loss"]] == pytest.approx(LOSSES, rel=1e-5)
    assert run.progress.tokens == 4 * (15 - 6), "those before the checkpoint read as 0"
    assert run.state == {"total": pytest.approx(10.67909936606884, rel=1e-5)}
    assert [one.why for one in run.decisions if one.what == "resumed"] == ["at step-00000006"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 16))
    kept = Store(tmp_path / "checkpoints")
    assert [(one.step, kept.manifest(one).get("weights")) for one in kept.saved()][-1] == (15, "ema")
