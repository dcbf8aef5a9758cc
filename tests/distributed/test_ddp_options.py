"""The options of torch's DDP reach it, and stay when it is made again. Layers that cannot be trained are an error at once."""

from __future__ import annotations  # annotations are strings, which torch accepts in no hook of its own

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from cadenza.callbacks import ConvertSyncBatchNorm, Freeze
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


def test_wrong_options_are_errors_at_once() -> None:
    def told() -> list[str]:
        found = []
        with pytest.raises(TypeError) as caught:
            DdpDriver("cpu", comm_hook="bf16")  # type: ignore[arg-type]
        found.append(str(caught.value))
        with pytest.raises(ValueError, match=r"must have all ranks \(2\)") as wrong:
            DdpDriver("cpu", process_group=dist.new_group([0]))
        found.append(str(wrong.value))
        return found

    for hook, group in launch(told):
        assert hook == "comm_hook must be a function hook(state, bucket), or a pair (state, hook); got 'bf16'"
        assert "got a group of " in group


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
