"""Schedules of timm, quantized states of torchao and schedule-free optimizers: the same bits after a resume, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.plateau_lr import PlateauLRScheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.scheduler.step_lr import StepLRScheduler
from timm.scheduler.tanh_lr import TanhLRScheduler
from torch import nn
from torchao.optim import Adam8bit, AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.subclass_8bit import OptimState8bit

from cadenza import Callback, Run, Trainer, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, LogTraining
from cadenza.errors import CheckpointFormatError, CheckpointMismatchError, StateError
from cadenza.loading import TensorBatches
from cadenza.status.encoding import decode, encode, first_difference, same
from cadenza.testing import tiny_loader, tiny_model, tiny_trainer
from tests.recipes.pages import executed


def by_step(optimizer: Any, total: int) -> CosineLRScheduler:
    return CosineLRScheduler(optimizer, t_initial=total, warmup_t=2, t_in_epochs=False, noise_range_t=3, noise_seed=7)


def by_epoch(optimizer: Any) -> TanhLRScheduler:
    return TanhLRScheduler(optimizer, t_initial=4, warmup_t=1)


def rates_of_timm(schedule: Callable[[Any], Any], epochs: int, updates: int) -> list[float]:
    """Return the rate of each update in the loop that timm's documentation describes."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    one, rates, count = schedule(optimizer), [], 0
    for epoch in range(epochs):
        for _ in range(updates):
            rates.append(optimizer.param_groups[0]["lr"])
            count += 1
            one.step_update(num_updates=count)
        one.step(epoch + 1)
    return rates


def trainer(rate: LearningRate, epochs: int = 4, **arguments: Any) -> Trainer:
    return tiny_trainer(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loader=tiny_loader(3),
        epochs=epochs,
        callbacks=[rate, LogTraining("1 step", throughput=False), *arguments.pop("callbacks", ())],
        **arguments,
    )


@pytest.mark.parametrize(
    ("rate", "schedule"),
    [
        (LearningRate(by_step), lambda optimizer: by_step(optimizer, 12)),
        (LearningRate(by_epoch, every="1 epoch"), by_epoch),
        (
            LearningRate(lambda optimizer: create_scheduler_v2(optimizer, "cosine", num_epochs=4)[0], every="1 epoch"),
            lambda optimizer: create_scheduler_v2(optimizer, "cosine", num_epochs=4)[0],
        ),
    ],
)
def test_the_rates_are_those_of_the_loop_of_timm(rate: LearningRate, schedule: Callable[[Any], Any]) -> None:
    rates = []
    see = on(Callback.on_before_optimizer_step)(lambda run: rates.append(run.optimizers[0].param_groups[0]["lr"]))
    trainer(rate, callbacks=[see]).fit()
    assert rates == rates_of_timm(schedule, 4, 3)
    assert len(set(rates)) > 3


@pytest.mark.parametrize("per", ["step", "epoch"])
def test_a_run_that_continues_has_the_rates_and_weights_of_one_that_does_not_stop(per: str, tmp_path: Path) -> None:
    def make(name: str, **arguments: Any) -> Trainer:
        rate = LearningRate(by_step) if per == "step" else LearningRate(by_epoch, every="1 epoch")
        return trainer(rate, directory=tmp_path / name, callbacks=[Checkpoint("2 steps"), *arguments.pop("callbacks", ())])

    @on(Callback.on_batch_start, at=8)
    def cut(run: Run, batch: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make("resumed", callbacks=[cut]).fit(resume="auto")
    resumed, whole = make("resumed"), make("whole")
    run = resumed.fit(resume="auto")
    assert run.progress.origin.step == 6
    assert run.history["train/lr"] == whole.fit().history["train/lr"]
    assert torch.equal(resumed.model.state_dict()["weight"], whole.model.state_dict()["weight"])


def test_a_schedule_that_is_stretched_continues_with_the_rates_of_the_longer_run(tmp_path: Path) -> None:
    def stretched() -> LearningRate:
        return LearningRate(by_step, stretch=True)

    trainer(stretched(), 2, directory=tmp_path, callbacks=[Checkpoint()]).fit(resume="auto")
    longer = trainer(stretched(), 4, directory=tmp_path, callbacks=[Checkpoint()]).fit(resume="auto")
    assert longer.history["train/lr"][6:] == trainer(LearningRate(by_step)).fit().history["train/lr"][6:]


def test_an_instance_is_accepted_as_a_scheduler_of_torch_is() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = LearningRate(StepLRScheduler(optimizer, decay_t=1, decay_rate=0.5), every="1 epoch")
    tiny_trainer(model=model, optimizer=optimizer, epochs=2, callbacks=[rate]).fit()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")
def test_other_units_a_plateau_and_a_schedule_in_the_list_of_callbacks_are_errors_that_say_what_to_write() -> None:
    units = r"TanhLRScheduler counts epochs, but LearningRate steps it after each step\. Give LearningRate\(.*every='1 epoch'\)"
    with pytest.raises(ValueError, match=units):
        trainer(LearningRate(by_epoch)).fit()
    with pytest.raises(ValueError, match=r"Use LearningRate.*ReduceLROnPlateau"):
        trainer(LearningRate(lambda optimizer: PlateauLRScheduler(optimizer), every="1 epoch")).fit()
    schedule = StepLRScheduler(torch.optim.SGD(tiny_model().parameters(), lr=0.1), decay_t=1)
    with pytest.raises(TypeError, match=r"StepLRScheduler\. Write LearningRate"):
        tiny_trainer(callbacks=[schedule])  # type: ignore[list-item]


# -- torchao -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_compiling() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def quantized(kind: Any, directory: Path, *callbacks: Any, dtype: torch.dtype = torch.float32) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(96, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)
    return Trainer(
        model,
        lambda parameters: kind(parameters, lr=1e-3),
        TensorBatches(inputs.to(dtype), torch.arange(96) % 8, batch_size=16, shuffle=True),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=2,
        seed=3,
        directory=directory,
        progress=False,
        callbacks=[
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)),
            Checkpoint("2 steps"),
            *callbacks,
        ],
    )


@on(Callback.on_batch_start, at=8)
def cut(run: Run, batch: Any) -> None:
    raise KeyboardInterrupt


def interrupted(kind: Any, directory: Path, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantized(kind, directory, cut, **options).fit(resume="auto")


@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit, AdamW4bit, AdamWFp8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_continues_has_the_weights_and_states_of_one_that_does_not_stop(
    kind: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    interrupted(kind, tmp_path / "resumed", dtype=dtype)
    resumed, whole = quantized(kind, tmp_path / "resumed", dtype=dtype), quantized(kind, tmp_path / "whole", dtype=dtype)
    first, second = resumed.fit(resume="auto"), whole.fit()
    assert first.progress.origin.step == 6
    assert same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    states = [run.optimizers[0].state_dict() for run in (first, second)]
    assert first_difference(states[0], states[1]) is None
    assert isinstance(states[0]["param_groups"][0]["lr"], torch.Tensor)


def test_a_difference_of_one_bit_in_a_quantized_state_is_found() -> None:
    one, other = OptimState8bit.zeros((64, 64)), OptimState8bit.zeros((64, 64))
    assert same(one, other)
    other.codes[3, 5] += 1
    assert first_difference({"exp_avg": one}, {"exp_avg": other}, "state") is not None


def test_a_checkpoint_holds_the_parts_of_a_state_and_no_more(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    quantized(AdamW8bit, tmp_path).fit()
    tensors = load_file(sorted((tmp_path / "checkpoints").glob("step-*"))[-1] / "state.safetensors")
    state = {name.split("].state.0.")[1]: tensor for name, tensor in tensors.items() if "].state.0." in name}
    assert {name: tensor.dtype for name, tensor in state.items() if "exp_avg." in name} == {
        "exp_avg.tensors.codes": torch.uint8,
        "exp_avg.tensors.scale": torch.float32,
        "exp_avg.tensors.qmap": torch.float32,
    }


def test_without_the_class_weights_can_be_loaded_and_a_resume_names_it(tmp_path: Path) -> None:
    interrupted(AdamW8bit, tmp_path)
    allowed = torch.serialization.get_safe_globals()
    try:
        torch.serialization.clear_safe_globals()
        load_weights(tmp_path, quantized(AdamW8bit, tmp_path).model)
        with pytest.raises(
            CheckpointMismatchError, match=r"torchao\.optim\.subclass_8bit\.OptimState8bit, which torch may not"
        ):
            quantized(AdamW8bit, tmp_path).fit(resume=str(sorted((tmp_path / "checkpoints").glob("step-*"))[0]))
        with pytest.raises(StateError, match=r"torch\.serialization\.add_safe_globals\(\[OptimState8bit\]\)"):
            encode({"state": OptimState8bit.zeros((64, 64))})
    finally:
        torch.serialization.add_safe_globals(allowed)


def test_parts_that_do_not_fit_and_an_unknown_number_format_are_refused() -> None:
    plain, tensors = encode(OptimState8bit.zeros((64, 64)))
    plain["$built"]["tensors"]["codes"] = plain["$built"]["tensors"]["scale"]
    with pytest.raises(CheckpointFormatError, match="OptimState8bit in the checkpoint do not fit"):
        decode(plain, tensors)
    with pytest.raises(CheckpointFormatError, match="number format 'load', which torch does not have"):
        decode({"$dtype": "load"}, {})


def test_a_quantized_weight_is_an_error_at_the_start(tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    trainer = quantized(torch.optim.SGD, tmp_path)
    quantize_(trainer.model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    with pytest.raises(StateError, match=r"the weight '0\.weight' cannot be saved.*quantize the model after the training"):
        trainer.fit()


# -- schedule-free -------------------------------------------------------------------------------------


class ScheduleFreeSGD(torch.optim.Optimizer):
    """SGD of Defazio et al. 2024, with the methods and the error of the package ``schedulefree``."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "train_mode": False, "k": 0})

    def train(self) -> None:
        self._move(1 - 0.9, train=True)

    def eval(self) -> None:
        self._move(1 - 1 / 0.9, train=False)

    @torch.no_grad()
    def _move(self, weight: float, *, train: bool) -> None:
        for group in self.param_groups:
            for one in group["params"] if group["train_mode"] is not train else ():
                if "z" in self.state[one]:
                    one.lerp_(self.state[one]["z"], weight)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        if not group["train_mode"]:
            raise Exception("Optimizer was not in train mode when step is called. See documentation for details.")
        group["k"] += 1
        for one in group["params"]:
            z = self.state[one].setdefault("z", one.clone())
            one.lerp_(z, 1 / group["k"])
            one.add_(one.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1))
            z.sub_(one.grad, alpha=group["lr"])


@pytest.mark.parametrize("package", ["", "schedulefree"])
def test_the_page_about_schedule_free_optimizers(package: str, tmp_path: Path) -> None:
    kind: Any = pytest.importorskip(package).AdamWScheduleFree if package else ScheduleFreeSGD
    names = executed("schedule-free", 1)

    def made(folder: str, epochs: int = 5) -> Trainer:
        one: Trainer = names["make"](lambda parameters: kind(list(parameters), lr=0.05), tmp_path / folder, epochs)
        return one

    whole = made("whole")
    run = whole.fit()
    results = [value for _, value in run.history["eval/loss"]]
    assert whole.evaluate(names["valid"])["eval/loss"] == results[-1]
    best = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    load_weights(tmp_path / "whole", best, which="best")
    ((inputs, targets),) = names["valid"]
    assert nn.functional.mse_loss(best(inputs), targets).item() == pytest.approx(min(results))
    without = made("without")
    without.callbacks[:] = [one for one in without.callbacks if not isinstance(one, Evaluate | Checkpoint)]
    made("cut", 3).fit()
    for trainer, resume in ((without, False), (made("cut"), "auto"), (made("whole"), "auto")):
        trainer.fit(resume=resume)
        assert same(dict(trainer.model.state_dict()), dict(whole.model.state_dict()))


def test_a_schedule_free_optimizer_that_was_not_put_into_training_mode_names_the_page() -> None:
    with pytest.raises(Exception, match="not in train mode") as raised:
        tiny_trainer(optimizer=lambda parameters: ScheduleFreeSGD(parameters, 0.1)).fit()
    assert "docs/recipes/schedule-free.md" in raised.value.__notes__[0]
