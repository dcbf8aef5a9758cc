"""The trial before the training, on which the finders stand: everything is as it was afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate, FindBatchSize, FindLearningRate, LearningRate, Limit, LogTraining, Warmup
from cadenza.engine.session import session_of
from cadenza.errors import DataError
from cadenza.loading.rng import RNGState
from cadenza.status.plain import first_difference
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata, when it makes a loader


class Lively(nn.Module):
    """Has all that a forward pass may change: buffers, saved or not, a metric, counters, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.unsaved: Tensor
        self.late: Tensor | None
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.register_buffer("late", None)
        self.calls, self.seen, self.total = 0, list[int](), torch.zeros(())

    def forward(self, inputs: Tensor) -> Tensor:
        self.unsaved += 1
        self.late = torch.ones(()) if self.late is None else self.late + 1
        if not hasattr(self, "scale"):
            self.scale = torch.rand(())  # drawn in the first pass, as some models do
        self.calls += 1
        self.seen.append(len(inputs))
        self.total = self.total + inputs.sum().detach() + random.random() + numpy.random.random()
        outputs: Tensor = self.layers(inputs) * self.scale + 0 * self.total
        return outputs

    def changed(self) -> dict[str, Any]:
        own = {"calls": self.calls, "seen": self.seen, "total": self.total, "unsaved": self.unsaved, "late": self.late}
        return {**self.state_dict(), **own, "modes": [module.training for module in self.modules()]}


def shuffled(kind: Callable[..., Any] = DataLoader, **arguments: Any) -> Any:
    inputs = torch.linspace(-1, 1, 24).unsqueeze(1)
    return kind(TensorDataset(inputs, 2 * inputs + 1), batch_size=4, shuffle=True, **arguments)


class Moving:
    """A loader that knows its own position, and goes on from there."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in tiny_loader(6)[self.place % 6 :]:
            self.place += 1
            yield batch

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def trained(*finders: Callback, make_loader: Callable[[], Any] = shuffled, **arguments: Any) -> dict[str, Any]:
    """Train, and return all that a trial before the training might have changed."""
    torch.manual_seed(3)
    model, recorder, batches = Lively(), Recorder(), list[Tensor]()
    keep = on(Callback.on_batch_start)(lambda run, batch: batches.append(batch[0].clone()))
    schedule = LearningRate(lambda optimizer, total: OneCycleLR(optimizer, 0.1, total_steps=total))
    callbacks = [Evaluate(tiny_loader(2)), schedule, LogTraining(every="1 step", throughput=False), Warmup(0.2)]
    run = tiny_run(
        model=model,
        optimizer=adam,
        loader=make_loader(),
        callbacks=[recorder, *callbacks, keep, *finders],
        **{"epochs": 2, "seed": 7, **arguments},
    )
    return {
        "model": model.changed(),
        "optimizer": run.optimizers[0].state_dict(),
        "precision": session_of(run).precision.state_dict(),
        "schedule": schedule.state_dict(),
        "streams": RNGState.capture().to_plain(),
        "batches": batches,
        "moments": recorder.names,
        "history": run.history.state_dict(),
        "progress": str(run.progress.now()),
    }


LOADERS: dict[str, Callable[[], Any]] = {
    "a list": lambda: tiny_loader(6),
    "a DataLoader": shuffled,
    "one with a generator": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "one with workers": lambda: shuffled(num_workers=1),
    "a StatefulDataLoader": lambda: shuffled(StatefulDataLoader),
    "one that knows its position": Moving,
    "any iterable": lambda: type("Plain", (), {"__iter__": lambda self: iter(tiny_loader(6)), "__len__": lambda self: 6})(),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_the_training_after_a_range_test_has_the_bits_of_one_without(loader: str) -> None:
    find = FindLearningRate(start=1e-4, end=100, steps=15)
    plain, after = trained(make_loader=LOADERS[loader]), trained(find, make_loader=LOADERS[loader])
    assert len(find.rates) > 6, "the test went on in a second epoch"
    assert first_difference(plain, after) is None


@pytest.mark.parametrize("arguments", [{"accumulate": 4}, {"precision": "fp16"}, {"precision": "bf16"}])
def test_nor_does_it_matter_with_accumulation_or_less_precision(arguments: dict[str, Any]) -> None:
    find = FindLearningRate(start=1e-4, end=1e6, steps=15)
    assert first_difference(trained(**arguments), trained(find, **arguments)) is None
    assert len(find.losses) >= 10


def test_a_search_for_the_batch_size_leaves_no_trace() -> None:
    find = FindBatchSize(lambda size: shuffled(), start=4, max_size=4)
    assert first_difference(trained(), trained(find)) is None
    assert find.size == 4


def test_what_an_optimizer_has_learned_before_is_put_back() -> None:
    """The second run of one optimizer: its moments are there already."""
    results = []
    for finders in ([], [FindLearningRate(start=1e-3, steps=12)]):
        torch.manual_seed(1)
        model = Lively()
        optimizer = adam(model.parameters())
        for callbacks in ([], finders):
            trainer = tiny_trainer(model=model, optimizer=optimizer, loader=shuffled(), callbacks=callbacks, seed=2)
            trainer.fit()
        results.append({"model": model.changed(), "optimizer": optimizer.state_dict()})
    assert first_difference(results[0], results[1]) is None


def test_a_step_fn_is_tried_as_it_is() -> None:
    def step(run: Run, batch: Any) -> Tensor:
        run.state.count += run.state.by[0]
        run.state.by.append(1)
        loss = nn.functional.mse_loss(run.model(batch[0]), batch[1])
        run.backward(loss)
        run.update()
        return loss

    begin = on(Callback.on_setup)(lambda run: run.state.update(count=0, by=[1]))
    find = FindLearningRate(start=1e-3, steps=12)
    plain, after = (tiny_run(step_fn=step, callbacks=[begin, *callbacks]) for callbacks in ([], [find]))
    assert first_difference(dict(plain.model.state_dict()), dict(after.model.state_dict())) is None
    assert after.state == {"count": 5, "by": [1] * 6}
    assert len(find.losses) == 12


def test_a_test_that_fails_leaves_everything_as_it_was_too() -> None:
    def fails(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) == 7:
            raise RuntimeError("the data is broken")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    calls, model = iter(range(100)), Lively()
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in model.changed().items()}
    before["seen"] = []
    streams: list[Any] = []
    mark = on(Callback.on_fit_start)(lambda run: streams.append(RNGState.capture().to_plain()))
    with pytest.raises(RuntimeError, match="the data is broken"):
        tiny_run(model=model, compute_loss=fails, callbacks=[mark, FindLearningRate(), Callback()])
    assert first_difference(before, model.changed()) is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert first_difference(streams[0], RNGState.capture().to_plain()) is None


def test_a_loader_that_gives_each_batch_once_is_refused() -> None:
    with pytest.raises(DataError, match="a generator gives each batch once, and the training would miss those"):
        tiny_run(callbacks=[FindLearningRate()], loader=(batch for batch in tiny_loader()))


def test_a_limit_holds_for_the_test_as_well() -> None:
    seen: set[int] = set()

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        seen.add(int(batch[0][0].item() * 1000))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    tiny_run(callbacks=[FindLearningRate(steps=10), Limit(train=2)], batches=5, compute_loss=compute_loss)
    assert len(seen) == 2


def test_a_part_in_evaluation_mode_is_tested_so() -> None:
    model = Lively()
    frozen = model.layers[1]
    freeze = on(Callback.on_fit_start)(lambda run: frozen.eval())
    means: list[Tensor] = []
    hook = frozen.register_forward_hook(lambda module, *_: means.append(module.running_mean.clone()))
    tiny_run(model=model, callbacks=[freeze, FindLearningRate(steps=10)])
    hook.remove()
    assert len(means) == 15
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_a_gradient_that_is_there_before_is_there_afterwards() -> None:
    """Of a parameter that no optimizer holds, and which is therefore never dropped."""
    model = Lively()
    free = model.layers[3].get_parameter("weight")
    given = free.grad = torch.ones_like(free)
    seen: list[tuple[bool, float]] = []

    class Look(Callback):
        after = (FindLearningRate,)

        def on_fit_start(self, run: Run) -> None:
            seen.append((free.grad is given, given.sum().item()))

    def without_it(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in parameters if one is not free], 0.1)

    tiny_run(model=model, optimizer=without_it, callbacks=[FindLearningRate(steps=10), Look()])
    assert seen == [(True, 8.0)]


def test_the_batches_of_the_trial_are_the_first_ones_of_the_run() -> None:
    """Also where no seed is given, and the order is another one in each run."""
    seen: list[Tensor] = []

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0].clone())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    tiny_run(compute_loss=compute_loss, loader=shuffled(), callbacks=[FindLearningRate(steps=12)], epochs=2)
    assert len(seen) == 24
    assert all(torch.equal(tried, trained) for tried, trained in zip(seen[:12], seen[12:], strict=True))
