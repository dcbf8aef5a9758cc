"""The trainer's arguments, steps and state, its evaluator; its driver and device; callbacks of several systems in one list."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from cadenza import Callback as NativeCallback
from cadenza import Run, drivers, on
from cadenza.callbacks import ClipGradients
from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import Callback, EarlyStopException, Evaluator, Event, State, Trainer, TrainerState
from cadenza.compat.fastnlp.core.drivers import TorchDriver, TorchFSDPDriver, TorchSingleDriver, optimizer_state_to_device
from cadenza.compat.fastnlp.core.drivers.driver import REFUSED, Driver
from cadenza.testing import tiny_run
from tests.compat.fastnlp import toy
from tests.compat.fastnlp.toy import Error, Hooks, Scripted, Toy, loader, toy_trainer, trained, weights_of


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
        *(({"device": device}, TypeError, "device must be a name such as") for device in (1.5, True)),
        ({"device": "gpux"}, ValueError, "device must be a name such as"),
        ({"train_dataloader": [1]}, TypeError, "train_dataloader must be a torch DataLoader"),
        ({"optimizers": 3}, TypeError, "optimizers must be"),
        ({"callbacks": {toy.Scribe}}, ValueError, "callbacks must be a callback, or a list"),
        ({"callbacks": [3]}, TypeError, r"callbacks\[0\] must be"),
        ({"metrics": {"e": Error()}, "evaluate_dataloaders": None}, ValueError, "metrics= needs"),
        *(({"metrics": {"e": Error()}, "evaluate_every": n}, ValueError, "evaluate_every must be") for n in (0, 1.0)),
        ({"metrics": [Error()]}, TypeError, "metrics must be a dict"),
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be"),
        ({"n_batches": 0}, ValueError, "n_batches must be"),
        ({"n_epochs": -1}, ValueError, "n_epochs must be a whole number of at least 0; got -1"),
        *(({"n_epochs": epochs}, ValueError, "n_epochs must be") for epochs in (1.5, None, "3")),
        ({"metrics": {"e": Error}}, TypeError, r"got the class Error: write Error\(\)"),
        ({"train_fn": "missing"}, RuntimeError, "no method 'missing'"),
        ({"train_fn": 3}, TypeError, "the name of a method"),
        ({"batch_step_fn": lambda trainer: None}, TypeError, "batch_step_fn"),
        ({"input_mapping": 3}, ValueError, "input_mapping must be"),
        ({"model": 3, "optimizers": torch.optim.SGD(Toy().parameters())}, TypeError, "model must be a torch.nn.Module; got 3"),
        ({"torch_kwargs": 3}, TypeError, "torch_kwargs must be a dict, such as {'non_blocking': False}; got 3"),
        ({"metrics": {"e": Error()}, "evaluate_dataloaders": 3}, TypeError, "dataloaders must be a loader, .* got 3"),
        ({"metrics": {"e": Error()}, "evaluate_dataloaders": [loader(4)]}, TypeError, "or a dict of loaders by name"),
        ({"input_mapping": {"a": "b"}, "train_input_mapping": {"a": "b"}}, ValueError, "got both"),
    ],
)
def test_a_wrong_argument_driver_or_device_is_an_error_in_the_constructor(
    arguments: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        toy_trainer(**arguments)


def test_a_missing_loader_or_length_is_an_error_and_arguments_without_effect_are_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Toy()
    with pytest.raises(ValueError, match="got None"):
        Trainer(model, None, torch.optim.SGD(model.parameters(), 0.1))
    toy_trainer(progress_bars="rich")
    assert "ignores the unknown argument progress_bars=. Did you mean 'progress_bar'?" in caplog.text
    toy_trainer(evaluate_dataloader=loader(4))
    assert "ignores the unknown argument evaluate_dataloader=. Did you mean 'evaluate_dataloaders'?" in caplog.text
    toy_trainer(use_dist_sampler=True)
    assert "Trainer ignores the argument use_dist_sampler=: pass one of Cadenza's drivers" in caplog.text
    trainer = toy_trainer(evaluate_dataloaders=loader(4))
    assert (trainer.evaluator, trainer.evaluates) == (None, False)
    assert "nothing is evaluated" in caplog.text

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(toy.rows(8))

    with pytest.raises(TypeError, match="must have a length"):
        trained(train_dataloader=DataLoader(Stream(), batch_size=4))
    listed = trained(train_dataloader=[{"x": torch.ones(1, 5), "y": torch.ones(1, 1)}], check_dataloader_legality=False)
    assert listed.global_forward_batches == 20  # fastNLP's default of epochs


def test_hooks_get_the_optimizers_argument_of_the_trainer() -> None:
    seen: list[Any] = []
    see = Hooks(on_before_optimizers_step=lambda trainer, optimizers: seen.append(optimizers))
    model = Toy()
    one = torch.optim.SGD(model.parameters(), 0.1)
    for optimizers in (one, [one]):
        trained(model=model, optimizers=optimizers, callbacks=see, n_batches=1)
    assert seen[0] is one
    assert seen[1] == [one]


# -- batches and outputs ---------------------------------------------------------------------------------


class Renamed(nn.Module):
    """A `Toy` with other names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Toy().linear

    def forward(self, features: Tensor, aim: Tensor) -> dict[str, Tensor]:
        return {"cost": nn.functional.mse_loss(self.linear(features), aim)}


@dataclass
class Output:
    loss: Tensor


class Typed(Toy):
    def train_step(self, x: Tensor, y: Tensor) -> Output:  # type: ignore[override]  # another kind of output
        return Output(super().train_step(x, y)["loss"])


def test_batches_and_outputs_go_through_the_mappings_and_outputs_may_be_of_a_dataclass() -> None:
    mappings: dict[str, Any] = {"input_mapping": {"x": "features", "y": "aim"}, "output_mapping": {"cost": "loss"}}
    plain = weights_of(trained(n_epochs=1))
    assert torch.equal(weights_of(trained(model=Renamed(), **mappings, n_epochs=1)), plain)
    assert torch.equal(weights_of(trained(model=Typed(), n_epochs=1)), plain)


def test_a_change_of_the_batch_or_of_the_loss_reaches_the_training() -> None:
    def free(trainer: Any, outputs: Any) -> None:
        if isinstance(outputs, Output):
            outputs.loss = outputs.loss * 0
        else:
            outputs["loss"] = outputs["loss"] * 0

    zero = Hooks(on_train_batch_begin=lambda trainer, batch, indices: batch.update(x=torch.zeros_like(batch["x"])))
    assert torch.equal(trained(callbacks=zero, n_epochs=1).model.linear.weight, Toy().linear.weight)  # type: ignore[union-attr,arg-type]
    for model in (Toy(), Typed()):
        freed = trained(model=model, callbacks=Hooks(on_before_backward=free), n_epochs=1)
        assert torch.equal(weights_of(freed), weights_of(Toy()))


@pytest.mark.parametrize(
    ("output", "error", "says"),
    [({"lss": 1}, KeyError, "'loss'"), (3, ValueError, "a dict with 'loss'"), (TrainerState(), AttributeError, "has none")],
)
def test_outputs_without_loss_and_batches_without_argument_are_errors(output: Any, error: type[Exception], says: str) -> None:
    trainer = toy_trainer(output_mapping=lambda outputs: output)
    with pytest.raises(error, match=says):
        trainer.run()
    with pytest.raises(error, match=says):
        trainer.extract_loss_from_outputs(output)
    with pytest.raises(ValueError, match=r"train_step needs \['y'\]; got \['x'\]"):
        trained(input_mapping=lambda batch: {"x": batch["x"]})


class Knows(DataLoader[Any]):
    def get_batch_indices(self) -> list[int]:
        return [4, 2]


def test_hooks_and_errors_get_the_indices_of_a_batch_if_the_loader_provides_them() -> None:
    seen: list[Any] = []
    see = Hooks(on_train_batch_begin=lambda trainer, batch, indices: seen.append(indices))
    knowing: Any = Knows(toy.rows(4), batch_size=4)  # type: ignore[arg-type]  # a list is a data set
    trained(callbacks=see, n_batches=1)
    trained(train_dataloader=knowing, callbacks=see, n_batches=1)
    assert seen == [None, [4, 2]]
    for event, notes in (("on_before_backward", 1), ("on_train_begin", 0)):
        with pytest.raises(RuntimeError) as caught:
            trained(train_dataloader=knowing, callbacks=toy.Raising(event, 0, RuntimeError("oh")))
        assert caught.value.__notes__.count("while training on the samples [4, 2]") == notes


def test_the_order_of_a_shuffled_loader_depends_on_the_users_seed_and_overfitting_uses_the_first_batches() -> None:
    def order(seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        seen: list[list[float]] = []
        trained(train_dataloader=loader(20, shuffle=True), callbacks=toy.batches_seen(seen), n_epochs=2)
        return seen

    assert order(1) == order(1) != order(2)
    assert order(1)[:5] != order(1)[5:]
    seen: list[list[float]] = []
    trainer = toy_trainer(20, toy.batches_seen(seen), {"e": Error()}, overfit_batches=2, n_epochs=3)
    trainer.run(num_eval_sanity_batch=0)
    assert len(seen) == 6
    assert seen[0] == seen[2]
    assert trainer.num_batches_per_epoch == 2
    assert trainer.evaluator is not None
    assert trainer.evaluator.dataloaders[""] is trainer.dataloader


def test_the_users_state_is_read_by_attribute_and_written_by_key_and_counters_can_be_set() -> None:
    class Sum(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            trainer.state["loss"] = 0.0

        def on_before_backward(self, trainer: Any, outputs: Any) -> None:
            trainer.state["loss"] += outputs["loss"].item()

    state = State()
    state["loss"] = {"sum": 1}
    state.loss["sum"] = 2
    assert state["loss"] == {"sum": 2}  # deviation: in fastNLP a nested dict is a copy
    assert not hasattr(state, "missing")
    for error in (AttributeError, ValueError):
        with pytest.raises(error, match="no 'missing'; it has \\['loss'\\]"):
            _ = state.missing
    with pytest.raises(AttributeError, match=r"write state\['loss'\]"):
        state.loss = 1
    assert tiny_run(callbacks=[Sum()], losses=[1.0, 2.0]).state.loss == 3.0
    trainer = toy_trainer()
    trainer.cur_epoch_idx = 3
    assert trainer.trainer_state.state_dict() == {"cur_epoch_idx": 3, "global_forward_batches": 0, "batch_idx_in_epoch": 0}
    with pytest.raises(AssertionError):
        trainer.trainer_state.load_state_dict({"n_epochs": 3})


def test_the_trainer_passes_its_arguments_to_the_evaluator() -> None:
    class Judges(Toy):
        def judge(self, batch: Any) -> dict[str, Tensor]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return {"pred": batch["x"]}

        def train_step(self, batch: Any) -> dict[str, Tensor]:  # type: ignore[override]  # it takes batches whole
            return {"loss": self.linear(batch["x"]).mean()}

    seen: list[Any] = []
    options: dict[str, Any] = {"evaluate_fn": "judge", "model_wo_auto_param_call": True, "fp16": True}
    trained(8, None, {"acc": Scripted(0.0, 0.5)}, model=Judges(), n_epochs=1, **options)
    assert seen == [True] * 4  # two batches of the trial, two of the epoch
    options = {"evaluate_batch_step_fn": lambda evaluator, batch: seen.append(batch)}
    trained(8, None, {"acc": Scripted(0.0, 0.5)}, n_epochs=1, **options)
    assert len(seen) == 4 + 4
    with pytest.raises(RuntimeError, match="has no method 'judge'"):
        toy_trainer(8, None, {"acc": Scripted()}, evaluate_fn="judge")


def test_results_are_in_the_native_history_and_an_evaluation_can_be_requested_or_stop_the_training() -> None:
    trainer = trained(8, metrics={"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=2)
    assert toy.live(trainer).history["eval/acc#acc"] == [(2, 0.1), (4, 0.2)]
    seen: list[Any] = []
    trainer = toy_trainer(8, metrics={"acc": Scripted(0.0, 0.1, 0.2)}, n_epochs=1)
    trainer.add_callback_fn(Event.on_train_batch_end(once=1), lambda trainer: seen.append(trainer.run_evaluate()))
    trainer.run()
    assert seen == [{"acc#acc": 0.1}]
    scribe, stop = toy.Scribe("on_train_epoch_end", "on_exception", "on_train_end"), EarlyStopException("good enough")
    trained(8, [toy.Raising("on_evaluate_end", 2, stop), scribe], {"acc": Scripted(0.0, 0.1)}, n_epochs=3)
    assert scribe.seen == [("on_exception", 0, 2, 2), ("on_train_end", 0, 2, 2)]


def test_fastnlps_and_native_callbacks_run_in_the_order_of_one_list() -> None:
    class Native(NativeCallback):
        def on_batch_start(self, run: Run, batch: Any) -> None:
            order.append("native")

    @on(NativeCallback.on_batch_start)
    def function(run: Run, batch: Any) -> None:
        order.append("function")

    order: list[str] = []
    adapted = Hooks(on_train_batch_begin=lambda trainer, batch, indices: order.append("adapted"))
    trained(callbacks=[Native(), adapted, function, ClipGradients(max_norm=1.0)], n_batches=1)
    tiny_run(callbacks=[function, adapted, Native()], steps=1)
    assert order == ["native", "adapted", "function", "function", "adapted", "native"]


# -- drivers and devices -----------------------------------------------------------------------------------

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


def test_a_driver_object_may_be_passed_on_and_has_the_arguments_of_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
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
    settings = {"non_blocking": False, "set_grad_to_none": True}
    driver = toy_trainer(torch_kwargs=settings, model_wo_auto_param_call=True, output_from_new_proc="all").driver
    assert (driver.non_blocking, driver.set_grad_to_none, driver.wo_auto_param_call) == (False, True, True)
    assert driver.output_from_new_proc == "all"
    assert (toy_trainer().driver.non_blocking, toy_trainer().driver.wo_auto_param_call) == (True, False)
    assert "torch_kwargs" not in caplog.text
    toy_trainer(torch_kwargs={"ddp_kwargs": {"find_unused_parameters": True}})
    assert "torch_kwargs['ddp_kwargs'] has no effect: pass driver=cadenza.drivers.DdpDriver(" in caplog.text


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


def test_seeds_of_the_process_and_of_workers_and_the_device_of_an_optimizers_state(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.delenv("FASTNLP_GLOBAL_SEED", raising=False)
    assert fastnlp.torch_seed_everything(3) == 3
    expected = random.random(), float(np.random.rand()), torch.rand(()).item()
    assert fastnlp.torch_seed_everything() == 3  # the seed of the process
    assert (random.random(), float(np.random.rand()), torch.rand(()).item()) == expected
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


def test_a_loss_of_one_element_trains_and_all_modules_are_in_training_mode() -> None:
    modes = list[bool]()

    class OneElement(Toy):
        def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            modes.append(self.linear.training)
            return {"loss": super().train_step(x, y)["loss"].reshape(1)}

    model = OneElement()
    model.linear.eval()  # fastNLP puts it into training mode in each epoch
    assert torch.equal(weights_of(trained(model=model)), weights_of(trained()))
    assert modes
    assert all(modes)
