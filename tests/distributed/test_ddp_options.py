"""The options of torch's DDP reach it, and stay when it is made again. Layers that cannot be trained are an error at once."""

from __future__ import annotations  # annotations are strings, which torch accepts in no hook of its own

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from cadenza.callbacks import Checkpoint, ConvertSyncBatchNorm, Freeze
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.testing import launch
from tests.distributed.parts import loader, network, trainer, weights_of


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def trained(model: nn.Module | None = None, **options: Any) -> Tensor:
    driver = DdpDriver("cpu", timeout_s=100, **options)
    one = trainer(model=model or network(), accumulate=2, max_epochs=2, driver=driver)
    one.fit()
    return weights_of(one)


class Calls:
    """The state of a communication hook that counts its calls."""

    count = 0


def counting(state: Calls, bucket: Any) -> torch.futures.Future[Tensor]:
    state.count += 1
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


def test_the_weights_do_not_depend_on_how_gradients_are_reduced() -> None:
    def compared() -> tuple[dict[str, bool], int, bool]:
        plain, calls = trained(), Calls()
        same = {
            "static_graph": trained(static_graph=True),
            "gradient_as_bucket_view": trained(gradient_as_bucket_view=True),
            "bucket_cap_mb": trained(bucket_cap_mb=1e-4),
            "broadcast_buffers": trained(broadcast_buffers=False),
            "comm_hook": trained(comm_hook=(calls, counting)),
            "process_group": trained(process_group=dist.new_group()),
        }
        added_in_another_order = torch.allclose(same.pop("static_graph"), plain, atol=1e-6)
        halved = trained(comm_hook=lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
        rounded = added_in_another_order and not torch.equal(halved, plain) and torch.allclose(halved, plain, atol=1e-2)
        return {name: torch.equal(one, plain) for name, one in same.items()}, calls.count, rounded

    for same, calls, rounded in launch(compared):
        assert all(same.values()), same
        assert calls == 4  # one bucket in each step: 3 batches of each rank, two a step, are 2 steps an epoch
        assert rounded


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_three_ranks_resume_to_the_same_bits_with_layers_of_different_sizes(tmp_path: Path, options: dict[str, Any]) -> None:
    """From three ranks on, the position of a gradient in a bucket decides how its sum is rounded."""

    def fit(folder: str, steps: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        driver = DdpDriver("cpu", timeout_s=100, **options)
        saving = {"callbacks": [Checkpoint()], "directory": tmp_path / folder}
        one = trainer(loader(96), model=model, driver=driver, max_steps=steps, **saving)
        one.fit(resume="auto")
        return weights_of(one)

    def both() -> tuple[Tensor, Tensor]:
        fit("cut", 3)
        return fit("whole", 6), fit("cut", 6)

    for whole, resumed in launch(both, 3):
        assert torch.equal(whole, resumed)


def test_a_hook_stays_when_parameters_are_frozen_in_the_run() -> None:
    def calls_of() -> tuple[int, int]:
        calls = Calls()
        driver = DdpDriver("cpu", timeout_s=100, comm_hook=(calls, counting))
        run = trainer(model=network(), max_epochs=2, driver=driver, callbacks=[Freeze("0.*", until="1 epoch")]).fit()
        return calls.count, run.progress.step

    for calls, steps in launch(calls_of):
        assert calls == steps == 6


def test_buffers_of_each_rank_are_its_own_in_training_if_they_are_not_broadcast() -> None:
    def statistics() -> tuple[list[float], list[float]]:
        found = []
        for broadcast in (True, False):
            model = normed()
            trained(model, broadcast_buffers=broadcast)
            found.append(model[1].running_mean.tolist())  # type: ignore[operator]
        return found[0], found[1]

    (_, own), (shared, other) = launch(statistics)
    assert own != other
    assert shared != other


WRONG: dict[str, Callable[[], object]] = {
    "comm_hook must be a function hook(state, bucket), or a pair (state, hook); got 'bf16'": lambda: DdpDriver(
        "cpu", comm_hook=cast("Any", "bf16")
    ),
    "process_group must have all ranks (2), since all train one model; got a group of ": lambda: DdpDriver(
        "cpu", process_group=dist.new_group([0])
    ),
    "process_group must be a group of torch.distributed, or None; got 'nccl'": lambda: DdpDriver(
        "cpu", process_group=cast("Any", "nccl")
    ),
    "bucket_cap_mb must be greater than 0 MiB; got -1": lambda: DdpDriver("cpu", bucket_cap_mb=-1),
    "bucket_cap_mb must be a number of MiB greater than 0; got '25'": lambda: DdpDriver("cpu", bucket_cap_mb=cast("Any", "25")),
    "static_graph must be True or False; got 'no'": lambda: DdpDriver("cpu", static_graph=cast("Any", "no")),
    "timeout_s must be a number of seconds greater than 0; got '10 min'": lambda: DdpDriver(
        "cpu", timeout_s=cast("Any", "10 min")
    ),
    "timeout_s must be greater than 0 seconds; got 0": lambda: FsdpDriver("cpu", timeout_s=0),
    "cpu_offload must be True or False; got 'yes'": lambda: FsdpDriver("cpu", cpu_offload=cast("Any", "yes")),
    "tensor_parallel must be TensorParallel(plan, ranks=...), or None; got {'up': 1}": lambda: FsdpDriver(
        "cpu", tensor_parallel=cast("Any", {"up": 1})
    ),
    "shard must be a pattern such as 'encoder.*', a class of modules, a sequence of these": lambda: FsdpDriver(
        "cpu", shard=cast("Any", nn.Linear(1, 1))
    ),
}


def test_wrong_options_are_errors_at_once() -> None:
    def told() -> list[str]:
        DdpDriver("cpu")
        found = []
        for wrong in WRONG.values():
            with pytest.raises((TypeError, ValueError)) as caught:
                wrong()
            found.append(str(caught.value))
        return found

    for texts in launch(told):
        for expected, text in zip(WRONG, texts, strict=True):
            assert text.startswith(expected)


def test_sync_batch_norm_on_the_cpu_is_an_error_before_the_first_step() -> None:
    def told() -> list[str]:
        found: list[str] = []
        for driver, model in (
            (DdpDriver("cpu", timeout_s=100), normed()),
            (DdpDriver("cpu", timeout_s=100), nn.SyncBatchNorm.convert_sync_batchnorm(normed())),
            (FsdpDriver("cpu", timeout_s=100), nn.SyncBatchNorm.convert_sync_batchnorm(normed())),
        ):
            callbacks = [ConvertSyncBatchNorm()] if len(found) == 0 else []
            one = trainer(loader(), model=model, driver=driver, callbacks=callbacks)
            with pytest.raises(ValueError, match="SyncBatchNorm trains on GPUs only, and the ranks are on the CPU") as caught:
                one.fit()
            found.append(str(caught.value))
        return found

    for one, other, third in launch(told):
        assert one == other == third
