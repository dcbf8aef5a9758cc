"""In a step in which nothing is evaluated or saved, the host does not wait for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable as Function
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import ClipGradients, Derive, Ema, LearningRate, LogTraining, ScheduleValue, TimeLimit, Warmup
from cadenza.loading import TensorBatches
from cadenza.profiling.host_reads import observed_reads
from cadenza.sinks import Console, ProgressBar

WAITS = {
    "aten::_local_scalar_dense": "a number is read from the device",
    "aten::lift_fresh": "a tensor is made of a number on the host, and copied to the device",
    "aten::nonzero": "a result has as many rows as the values say",
    "aten::masked_select": "a result has as many rows as the values say",
    "aten::equal": "a truth is read from the device",
}
"""Operators for which the host would wait on a GPU."""


class Waits(TorchDispatchMode):
    """Counts operators that would wait, but for what ``run.log`` does: it reads at once what is on the host already."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in WAITS:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str, tensor: Tensor | None = None) -> None:
        frame, lines = sys._getframe(1), list[str]()
        while frame.f_back is not None:
            module = str(frame.f_globals.get("__name__"))
            if module in ("cadenza.records.metric_buffer", "cadenza.records.scalars"):  # a number that is on the host is read
                return
            if module.startswith(("cadenza", "tests")):
                lines.append(f"{module}:{frame.f_lineno}")
            frame = frame.f_back
        self.seen.append(f"{name} at {' < '.join(lines[1:4])}")


def squared(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": nn.functional.mse_loss(model(batch[0]), batch[1])}


def weighted(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {**squared(model, batch), "weight": batch[0].shape[0]}


def usual() -> list[Callback]:
    return [
        ClipGradients(max_norm=1.0, log="train/norm", log_every="1 step"),
        Warmup("5 steps"),
        LearningRate(lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)),
        ScheduleValue(lambda run: run.model[1], "p", {0: 0.1, 12: 0.3}),
        Derive(spread=lambda run: run.outputs["loss"] * 2),
        Ema(0.9, rampup=True),
        LogTraining("1 step", outputs=("loss", "spread")),
        TimeLimit("1 h"),
        Console("1 h"),
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, fused=True)


def trainer(*callbacks: Callback, device: str, compute: Function[..., Any] = squared, **arguments: Any) -> Trainer:
    loader = TensorBatches(torch.randn(88, 4), torch.randn(88, 1), batch_size=4, shuffle=True, device=device)  # 22 batches
    given = {"max_epochs": 1, "seed": 0, **arguments}

    optimizer = given.pop("optimizer", adamw)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return Trainer(network, optimizer, loader, compute, callbacks=callbacks, device=device, progress=False, **given)


SETTINGS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "accumulated, with a short group": {"accumulate": 4},
    "weighted": {"accumulate": 4, "compute": weighted},
    "weighted by a tensor": {
        "accumulate": 4,
        "compute": lambda *given: {**squared(*given), "weight": given[1][1].abs().sum().detach()},
    },
    "bf16": {"precision": "bf16", "accumulate": 2},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("callbacks", [list, usual], ids=["alone", "usual callbacks"])
def test_no_step_reads_a_tensor_on_the_host(setting: str, callbacks: Function[[], list[Callback]]) -> None:
    waits, so_far = Waits(), list[int]()
    count = on(Callback.on_step_end)(lambda run: so_far.append(len(waits.seen)))
    one = trainer(*callbacks(), count, device="cpu", **SETTINGS[setting])
    with observed_reads(waits.note), waits:
        one.fit()
    assert len(so_far) >= 5
    seen = waits.seen[so_far[0] : so_far[-1]]
    if setting == "weighted by a tensor":  # one on the host is read; that one on a device is not, is tested on a GPU
        seen = [one for one in seen if " at cadenza.engine.step_state:" not in one]
    assert seen == []


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_step_in_fp16_reads_one_number(optimizer: Function[..., torch.optim.Optimizer]) -> None:
    waits, so_far = Waits(), list[int]()
    count = on(Callback.on_step_end)(lambda run: so_far.append(len(waits.seen)))
    one = trainer(count, device="cpu", precision="fp16", optimizer=optimizer)
    with observed_reads(waits.note), waits:
        one.fit()
    late = waits.seen[so_far[11] : so_far[21]]  # the scale of the loss has found its size
    assert len(late) == 20, late  # ten steps; each read is seen by both
    assert all(" at cadenza.optim.precision:" in one for one in late)


def test_a_step_that_reads_is_noticed() -> None:
    waits = Waits()
    read = on(Callback.on_batch_end)(lambda run, batch, outputs: outputs["loss"].item())
    with waits:
        trainer(read, device="cpu").fit()
    assert len(waits.seen) >= 22


@pytest.fixture
def _waiting_is_an_error() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.set_sync_debug_mode says when the host waits for one")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("_waiting_is_an_error")
def test_on_a_gpu_no_step_waits(setting: str) -> None:
    done: list[int] = []
    steps = -(-22 // SETTINGS[setting].get("accumulate", 1))

    @on(Callback.on_step_end)
    def strict(run: Run) -> None:
        # It is the last to hear a step's end: from the end of the second step to the end of the last but one.
        torch.cuda.set_sync_debug_mode("error" if 2 <= run.progress.step < steps - 1 else "default")
        done.append(run.progress.step)

    trainer(*usual(), ProgressBar(), strict, device="cuda", **SETTINGS[setting]).fit()
    assert len(done) == steps >= 5
