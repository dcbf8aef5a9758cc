"""The options of torch's DDP reach it, and stay when it is made again. Layers that cannot be trained are an error at once."""

from __future__ import annotations  # annotations are strings, which torch accepts in no hook of its own

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, ConvertSyncBatchNorm, Freeze
from cadenza.drivers import DdpDriver, Driver, FsdpDriver
from tests.distributed.drivers import ddp, fsdp
from tests.distributed.parts import loader, trainer, weights_of
from tests.distributed.standing import on_ranks


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def trained(model: nn.Module | None = None, **options: Any) -> Tensor:
    one = trainer(model=model, accumulate=2, driver=ddp(**options))
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

    for same, calls, rounded in on_ranks(compared):
        assert all(same.values()), same
        assert calls == 4  # one bucket in each step: 3 batches of each rank, two a step, are 2 steps an epoch
        assert rounded


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_three_ranks_resume_to_the_same_bits_with_layers_of_different_sizes(tmp_path: Path, options: dict[str, Any]) -> None:
    """From three ranks on, the position of a gradient in a bucket decides how its sum is rounded."""

    def fit(folder: str, steps: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        saving = {"callbacks": [Checkpoint()], "directory": tmp_path / folder}
        one = trainer(loader(96), model=model, driver=ddp(**options), max_steps=steps, **saving)
        one.fit(resume="auto")
        return weights_of(one)

    def both() -> tuple[Tensor, Tensor]:
        fit("cut", 3)
        return fit("whole", 6), fit("cut", 6)

    for whole, resumed in on_ranks(both, 3):
        assert torch.equal(whole, resumed)


def test_a_hook_stays_when_parameters_are_frozen_in_the_run() -> None:
    def calls_of() -> tuple[int, int]:
        calls = Calls()
        driver = ddp(comm_hook=(calls, counting))
        run = trainer(driver=driver, callbacks=[Freeze("0.*", until="1 epoch")]).fit()
        return calls.count, run.progress.step

    for calls, steps in on_ranks(calls_of):
        assert calls == steps == 6


def test_buffers_of_each_rank_are_its_own_in_training_if_they_are_not_broadcast() -> None:
    def statistics() -> tuple[list[float], list[float]]:
        found = []
        for broadcast in (True, False):
            model = normed()
            trained(model, broadcast_buffers=broadcast)
            found.append(model[1].running_mean.tolist())  # type: ignore[operator]
        return found[0], found[1]

    (_, own), (shared, other) = on_ranks(statistics)
    assert own != other
    assert shared != other


WRONG: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "comm_hook must be a function hook(state, bucket), or a pair (state, hook); got 'bf16'": (DdpDriver, {"comm_hook": "bf16"}),
    "process_group must be a group of torch.distributed, or None; got 'nccl'": (DdpDriver, {"process_group": "nccl"}),
    "bucket_cap_mb must be greater than 0 MiB; got -1": (DdpDriver, {"bucket_cap_mb": -1}),
    "bucket_cap_mb must be a number of MiB greater than 0; got '25'": (DdpDriver, {"bucket_cap_mb": "25"}),
    "static_graph must be True or False; got 'no'": (DdpDriver, {"static_graph": "no"}),
    "timeout_s must be a number of seconds greater than 0; got '10 min'": (DdpDriver, {"timeout_s": "10 min"}),
    "timeout_s must be greater than 0 seconds; got 0": (FsdpDriver, {"timeout_s": 0}),
    "cpu_offload must be True or False; got 'yes'": (FsdpDriver, {"cpu_offload": "yes"}),
    "tensor_parallel must be TensorParallel(plan, ranks=...), or None; got {'up': 1}": (
        FsdpDriver,
        {"tensor_parallel": {"up": 1}},
    ),
    "shard must be a pattern such as 'encoder.*', a class of modules, a sequence of these": (
        FsdpDriver,
        {"shard": nn.Linear(1, 1)},
    ),
}


def test_wrong_options_are_errors_at_once() -> None:
    def told() -> list[str]:
        ddp()
        found = []
        for make, options in [*WRONG.values(), (DdpDriver, {"process_group": dist.new_group([0])})]:
            with pytest.raises((TypeError, ValueError)) as caught:
                make("cpu", **options)
            found.append(str(caught.value))
        return found

    of_some_ranks = "process_group must have all ranks (2), since all train one model; got a group of "
    for texts in on_ranks(told):
        for expected, text in zip([*WRONG, of_some_ranks], texts, strict=True):
            assert text.startswith(expected)


def test_sync_batch_norm_on_the_cpu_is_an_error_before_the_first_step() -> None:
    def told() -> list[str]:
        found: list[str] = []
        converted: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        for make, model in ((ddp, normed()), (ddp, converted(normed())), (fsdp, converted(normed()))):
            callbacks = [ConvertSyncBatchNorm()] if len(found) == 0 else []
            one = trainer(model=model, driver=make(), callbacks=callbacks)
            with pytest.raises(ValueError, match="SyncBatchNorm trains on GPUs only, and the ranks are on the CPU") as caught:
                one.fit()
            found.append(str(caught.value))
        return found

    for one, other, third in on_ranks(told):
        assert one == other == third


@on(Callback.on_step_end, at=2)
def freeze(run: Run) -> None:
    run.driver.unwrap(run.model).get_submodule("0").requires_grad_(False)
    run.driver.renew(run.model)


@pytest.mark.parametrize("make", [ddp, fsdp])
def test_what_a_hook_froze_is_frozen_on_all_ranks_after_a_resume(tmp_path: Path, make: Callable[[], Driver]) -> None:
    """The gradients of the rest are reduced, and nothing is waited for."""

    def fit(folder: str, steps: int) -> Tensor:
        callbacks = [freeze, Checkpoint("2 steps")]
        one = trainer(driver=make(), directory=tmp_path / folder, max_steps=steps, callbacks=callbacks)
        run = one.fit(resume="auto")
        frozen = [name for name, parameter in one.model.named_parameters() if not parameter.requires_grad]
        assert frozen == ["0.weight", "0.bias"]
        assert run.progress.step == steps
        return weights_of(one)

    def both() -> tuple[Tensor, list[Tensor]]:
        return fit("whole", 6), [fit("cut", steps) for steps in (2, 4, 6)]

    for whole, continued in on_ranks(both):
        assert torch.equal(whole, continued[-1])
