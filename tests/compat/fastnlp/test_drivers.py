"""``driver=`` and ``device=`` in all combinations, and the methods of the driver that users' code calls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from cadenza import drivers
from cadenza.compat.fastnlp import Evaluator, torch_seed_everything
from cadenza.compat.fastnlp.core.drivers import TorchDriver, TorchFSDPDriver, TorchSingleDriver, optimizer_state_to_device
from cadenza.compat.fastnlp.core.drivers.driver import REFUSED, Driver
from cadenza.testing import tiny_run
from tests.compat.fastnlp.toy import Error, Hooks, Toy, loader, toy_trainer, trained

CPU = torch.device("cpu")


@pytest.mark.parametrize("driver", ["auto", "torch", "single"])
@pytest.mark.parametrize("device", ["cpu", CPU, None])
def test_one_process_on_one_device(driver: str, device: Any) -> None:
    trainer = toy_trainer(driver=driver, device=device, n_epochs=1)
    trainer.run()
    assert isinstance(trainer.driver, TorchSingleDriver)
    assert trainer.model_device == trainer.data_device == trainer.driver.device == CPU
    assert (trainer.driver.is_global_zero(), trainer.driver.is_distributed()) == (True, False)


def test_without_a_device_the_model_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # a GPU is no reason to move it
    assert toy_trainer(driver="torch", device=None).model_device == CPU
    split = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match=r"it is on several: \['cpu', 'meta'\]. Pass device="):
        toy_trainer(model=split, optimizers=torch.optim.SGD(split.parameters(), 0.1), device=None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device=-1 means all GPUs, but there is none"):
        toy_trainer(device=-1)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"driver": "paddle"}, ValueError, "driver='paddle' is not provided. Cadenza trains with PyTorch"),
        ({"driver": "jittor"}, ValueError, "Write the model as a torch.nn.Module"),
        ({"driver": "oneflow"}, ValueError, "Cadenza trains with PyTorch"),
        ({"driver": "fairscale"}, ValueError, "Use driver=cadenza.drivers.FsdpDriver"),
        ({"driver": "deepspeed"}, ValueError, "which shards the weights over the ranks"),
        ({"driver": "tensorflow"}, ValueError, "driver must be one of 'auto', 'torch', 'single', 'torch_ddp', 'torch_fsdp'"),
        ({"driver": 3}, ValueError, "driver must be one of"),
        ({"driver": "torch_ddp"}, RuntimeError, "torchrun --nproc-per-node 2"),
        ({"driver": "torch_fsdp", "device": [0, 1]}, RuntimeError, "processes that a launcher started"),
        ({"device": [0, 1]}, RuntimeError, r"device=\[0, 1\] needs 2 processes. Start them with torchrun"),
        ({"device": ["cuda:0"]}, ValueError, "a list of devices must hold the indices of GPUs; got 'cuda:0'"),
        ({"device": [-1]}, ValueError, "got -1 in"),
        ({"device": 99}, ValueError, "the index of a GPU, of which there are"),
        ({"device": -2}, ValueError, "device must be -1 or the index of a GPU"),
        ({"device": 1.5}, TypeError, "device must be a name such as"),
        ({"device": True}, TypeError, "device must be a name such as"),
        ({"device": "gpux"}, ValueError, "device must be a name such as"),
    ],
)
def test_a_driver_or_device_that_does_not_exist_is_an_error(arguments: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        toy_trainer(**arguments)


def test_a_driver_object_may_be_passed_on() -> None:
    model = Toy()
    mine = TorchSingleDriver(model, CPU, torch_kwargs={"non_blocking": False})
    trainer = toy_trainer(model=model, driver=mine, n_epochs=1)
    assert trainer.driver is mine
    assert mine.optimizers == [trainer.optimizers]
    evaluator = Evaluator(model, loader(8), {"e": Error()}, driver=trainer.driver, verbose=0)
    assert evaluator.driver is mine
    assert evaluator.run().keys() == {"e"}
    native = drivers.SingleDriver("cpu")
    assert toy_trainer(driver=native).driver.native is native
    assert issubclass(TorchFSDPDriver, TorchDriver)


def test_the_arguments_of_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"non_blocking": False, "set_grad_to_none": True}
    driver = toy_trainer(torch_kwargs=settings, model_wo_auto_param_call=True, output_from_new_proc="all").driver
    assert (driver.non_blocking, driver.set_grad_to_none, driver.wo_auto_param_call) == (False, True, True)
    assert driver.output_from_new_proc == "all"
    assert (toy_trainer().driver.non_blocking, toy_trainer().driver.wo_auto_param_call) == (True, False)
    assert "torch_kwargs" not in caplog.text
    toy_trainer(torch_kwargs={"ddp_kwargs": {"find_unused_parameters": True}})
    assert "torch_kwargs['ddp_kwargs'] has no effect: pass driver=cadenza.drivers.DdpDriver(" in caplog.text


# -- its methods -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


def test_tensors_become_plain_numbers() -> None:
    numeric = toy_trainer().driver.tensor_to_numeric
    nested = {"a": torch.tensor([2.5]), "b": [torch.tensor([1, 2]), "text"], "c": Pair(torch.tensor(True), None)}
    assert numeric(nested) == {"a": 2.5, "b": [[1, 2], "text"], "c": Pair(True, None)}
    values = torch.tensor([1.0, 4.0, 4.0])
    assert [numeric(values, reduce=how) for how in ("max", "min", "sum", "mean")] == [4.0, 1.0, 9.0, 3.0]
    with pytest.raises(ValueError, match="reduce must be one of 'max', 'min', 'sum', 'mean'"):
        numeric(values, reduce="median")


def test_the_model_of_the_driver() -> None:
    trainer = toy_trainer()
    driver, model = trainer.driver, trainer.model
    assert driver.unwrap_model() is driver.model is model
    driver.model = nn.DataParallel(model)
    assert driver.unwrap_model() is model
    driver.model = model
    driver.set_model_mode("eval")
    assert not model.training
    with pytest.raises(ValueError, match="'train' or 'eval'"):
        driver.set_model_mode("test")
    batch = {"x": torch.ones(1, 5), "y": torch.ones(1, 1), "unused": 3}
    assert driver.get_model_call_fn("predict_step" if hasattr(model, "predict_step") else "evaluate_step")[1] is None
    assert driver.model_call(batch, *driver.get_model_call_fn("train_step"))["loss"].shape == ()
    plain = TorchSingleDriver(nn.Linear(5, 1))
    assert plain.model_call({"input": torch.ones(1, 5)}, *plain.get_model_call_fn("train_step")).shape == (1, 1)
    with pytest.raises(RuntimeError, match="the model, a Linear, has no method 'judge'"):
        plain.get_model_call_fn("judge")


def test_a_model_file_and_objects_of_other_processes(tmp_path: Path) -> None:
    driver, other = toy_trainer().driver, toy_trainer().driver
    nn.init.constant_(driver.model.linear.bias, 3)  # type: ignore[union-attr, arg-type]
    for whole in (False, True):
        driver.save_model(tmp_path / "model.pt", only_state_dict=not whole)
        other.load_model(tmp_path / "model.pt", only_state_dict=not whole)
        assert other.model.linear.bias.item() == 3  # type: ignore[union-attr, operator]
    with pytest.raises(FileNotFoundError, match="there is no file"):
        driver.load_model(tmp_path / "none.pt")
    assert (driver.all_gather({"a": 1}), driver.broadcast_object("text", src=0)) == ([{"a": 1}], "text")
    assert (driver.global_rank, driver.local_rank, driver.get_local_rank(), driver.world_size) == (0, 0, 0, 1)
    driver.barrier()
    with pytest.raises(ValueError, match="group must be None"):
        driver.all_gather(1, group=3)  # type: ignore[arg-type]


def test_a_step_of_the_drivers_parts_equals_that_of_torch() -> None:
    trainer, plain = toy_trainer(), Toy()
    driver = trainer.driver
    batch = next(iter(loader(4)))
    for _ in range(2):
        with driver.auto_cast(), driver.get_model_no_sync_context()():
            driver.backward(trainer.train_step(batch)["loss"])
        driver.grad_scaler.unscale_(driver.optimizers[0])
        driver.step()
        driver.zero_grad()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        plain.train_step(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(plain.linear.weight, trainer.model.linear.weight)  # type: ignore[union-attr, arg-type]
    assert not driver.grad_scaler.is_enabled()
    assert driver.get_evaluate_context() is torch.no_grad


@pytest.mark.parametrize("fp16", [False, True])
def test_a_callback_may_unscale_gradients_as_fastnlps_own_clipping_does(fp16: bool) -> None:
    norms: list[float] = []

    def clip(trainer: Any, optimizers: Any) -> None:
        for optimizer in trainer.driver.optimizers:
            trainer.driver.grad_scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)))

    trainer = trained(4, Hooks(on_before_optimizers_step=clip), n_epochs=20, fp16=fp16)
    assert trainer.driver.grad_scaler.is_enabled() == fp16
    finite = [norm for norm in norms if norm < float("inf")]  # the first loss scales of fp16 are too large
    assert finite[0] == pytest.approx(6.80, abs=0.02)  # that of the loss itself, and not of the scaled one


def test_loaders_and_workers() -> None:
    driver = toy_trainer().driver
    batches: Any = loader(4)
    driver.check_dataloader_legality(batches)
    with pytest.raises(TypeError, match="expected a torch DataLoader; got list"):
        driver.check_dataloader_legality([])
    driver.set_deterministic_dataloader(batches)  # type: ignore[attr-defined]  # of TorchDriver
    drawn = []
    for worker in (0, 1, 0):
        torch.manual_seed(7 + worker)  # the loader gives worker i the seed of worker 0 plus i
        batches.worker_init_fn(worker)
        drawn.append((random.random(), float(np.random.rand()), torch.rand(()).item()))
    assert drawn[0] == drawn[2]
    assert len({value for one in drawn[:2] for value in one}) == 6


def test_seeds_and_the_device_of_an_optimizers_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTNLP_GLOBAL_SEED", raising=False)
    assert torch_seed_everything(3) == 3
    drawn = random.random(), float(np.random.rand()), torch.rand(()).item()
    assert torch_seed_everything() == 3  # the seed of the process
    assert (random.random(), float(np.random.rand()), torch.rand(()).item()) == drawn
    state = {"state": {0: {"momentum": torch.ones(2), "step": 3}}, "name": "SGD"}
    moved = optimizer_state_to_device(state, "meta")
    assert (moved["state"][0]["momentum"].device.type, moved["state"][0]["step"]) == ("meta", 3)


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_without_a_native_equivalent_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no driver.{name}. Instead: "):
        getattr(toy_trainer().driver, name)


def test_an_unknown_method_names_the_closest_one_and_in_a_native_run_the_driver_has_the_same_methods() -> None:
    driver = toy_trainer().driver
    assert not hasattr(driver, "anything_else")
    with pytest.raises(AttributeError, match=r"no attribute 'is_global_rank_zero'. Did you mean 'is_global_zero'"):
        _ = driver.is_global_rank_zero  # type: ignore[attr-defined]
    seen: list[Driver] = []
    tiny_run(callbacks=[Hooks(on_train_begin=lambda trainer: seen.append(trainer.driver))], steps=1)
    assert isinstance(seen[0], TorchSingleDriver)
    assert seen[0].tensor_to_numeric(torch.tensor(1.0)) == 1.0
