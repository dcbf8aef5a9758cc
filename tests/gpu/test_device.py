"""What differs on a GPU: results to the bit, transfers, waits, CUDA graphs, saves beside the training.

These need a GPU and are skipped elsewhere; ``make test-gpu`` runs them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable as Function
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, LogTraining, Warmup
from cadenza.loading import TensorBatches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TensorFloat32.*")
"""torch.compile warns of old functions of torch that it imports, and of TF32, which these tests leave off."""

DRAW = torch.Generator().manual_seed(1)
INPUTS, LABELS = torch.randn(192, 16, generator=DRAW), torch.randint(0, 4, (192,), generator=DRAW)


def network(dropout: float = 0.1, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(16, width), nn.Linear(width, 4)
    return nn.Sequential(first, nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(width), last)


def trainer(*callbacks: Callback, model: nn.Module | None = None, loader: Any = None, **given: Any) -> Trainer:
    loader = loader or TensorBatches(INPUTS, LABELS, batch_size=16, shuffle=True)
    arguments = {"max_epochs": 2, "seed": 5, "device": "cuda", "progress": False, **given}
    optimizer = arguments.pop("optimizer", lambda parameters: torch.optim.AdamW(parameters, 1e-2))
    loss = supervised(nn.CrossEntropyLoss())
    return Trainer(model or network(), optimizer, loader, loss, callbacks=callbacks, **arguments)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().cpu().clone() for name, one in model.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@COMPILES
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compile", [None, True, "reduce-overhead"])
def test_a_run_that_a_signal_ended_continues_to_the_same_bits(tmp_path: Path, precision: str, compile: Any) -> None:
    given = {"precision": precision, **({} if compile is None else {"compile": compile})}

    def usual() -> list[Callback]:
        return [Ema(0.9), ClipGradients(0.1), Warmup("4 steps"), Checkpoint("3 steps")]

    @on(Callback.on_step_end)
    def kill(run: Run) -> None:
        if run.progress.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = trainer(*usual(), directory=tmp_path / "whole", **given)
    whole.fit()
    with pytest.raises(SystemExit):
        trainer(*usual(), kill, directory=tmp_path / "killed", **given).fit()
    again = trainer(*usual(), directory=tmp_path / "killed", **given)
    again.fit(resume="auto")
    assert_equal(weights(whole.model), weights(again.model))


def test_a_checkpoint_that_is_copied_beside_the_training_holds_the_weights_of_its_step(tmp_path: Path) -> None:
    true: dict[int, dict[str, Tensor]] = {}
    keep = on(Callback.on_step_end)(lambda run: true.__setitem__(run.progress.step, weights(run.model)))
    trainer(keep, Checkpoint("1 step", keep_last=None), model=network(width=2048), directory=tmp_path).fit()
    for step, expected in true.items():
        assert_equal(load_file(tmp_path / f"checkpoints/step-{step:08d}/model.safetensors"), expected)


@COMPILES
def test_accumulation_is_right_with_cuda_graphs_which_use_their_memory_again() -> None:
    def trained(**given: Any) -> Tensor:
        one = trainer(model=network(0.0), accumulate=3, optimizer=lambda those: torch.optim.SGD(those, 1e-2), **given)
        one.fit()
        return nn.utils.parameters_to_vector(one.model.parameters())

    torch.testing.assert_close(trained(compile="reduce-overhead"), trained(), rtol=0, atol=1e-5)


SPARSE: dict[str, Function[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", SPARSE)
def test_sparse_batches_are_moved(layout: str) -> None:
    rows = [torch.randn(3, 4) for _ in range(4)]
    seen = list[Tensor]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(dense := batch["rows"].to_dense())
        mean: Tensor = model(dense).mean()
        return mean

    loader = [{"rows": SPARSE[layout](one)} for one in rows]
    model = nn.Linear(4, 1)
    Trainer(model, lambda those: torch.optim.SGD(those, 0.1), loader, loss, max_epochs=1, device="cuda", progress=False).fit()
    assert all(torch.equal(one.cpu(), row) for one, row in zip(seen, rows, strict=True))


def waits_in(callbacks: list[Callback], **given: Any) -> int:
    """Return how often the host waited for the device in the steps 8 to 18."""
    import warnings

    @on(Callback.on_step_end)
    def mode(run: Run) -> None:
        torch.cuda.set_sync_debug_mode("warn" if 8 <= run.progress.step < 18 else "default")

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            trainer(*callbacks, mode, max_epochs=None, max_steps=20, **given).fit()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in found)


def test_a_step_in_fp16_waits_once() -> None:
    assert waits_in([], precision="fp16") <= 10


def test_a_large_data_set_on_the_device_is_shuffled_without_a_wait() -> None:
    count = 2**20 + 4096
    labels = torch.randint(0, 4, (count,))
    loader = TensorBatches(torch.randn(count, 16), labels, batch_size=2048, shuffle=True, device="cuda")
    assert waits_in([LogTraining("1 step")], loader=loader) == 0


def test_a_model_of_which_parts_are_on_several_devices_stays_there() -> None:
    model = nn.Sequential(nn.Linear(16, 8).cuda(), nn.Linear(8, 4))
    model[1].register_forward_pre_hook(lambda module, given: (given[0].cpu(),))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).cuda(), batch[1])

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = TensorBatches(INPUTS, LABELS, batch_size=16)
    Trainer(model, optimizer, loader, loss, max_epochs=1, device="cuda", progress=False).fit()
    assert [one.device.type for one in model.parameters()] == ["cuda", "cuda", "cpu", "cpu"]
