"""The trial before the training, and buffers and flags: all is as it was after a trial, a batch left out, and a resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import cadenza
from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, FindBatchSize, FindLearningRate, Freeze, LearningRate, LogTraining, Warmup
from cadenza.engine.module_state import Statistics
from cadenza.engine.session import session_of
from cadenza.errors import DataError
from cadenza.loading.rng import RNGState
from cadenza.status.encoding import first_difference
from cadenza.testing import Recorder, prove_resume, tiny_loader, tiny_run, tiny_trainer
from cadenza.timetravel import replay_capsule

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

    place = 0

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


def trained(*finders: Callback, make_loader: Callable[[], Any] = shuffled, **arguments: Any) -> dict[str, Any]:
    """Train, and return all that a trial before the training might have changed."""
    torch.manual_seed(3)
    model, recorder, batches = Lively(), Recorder(), list[Tensor]()
    keep = on(Callback.on_batch_start)(lambda run, batch: batches.append(batch[0].clone()))
    schedule = LearningRate(lambda optimizer, total: OneCycleLR(optimizer, 0.1, total_steps=total))
    callbacks = [Evaluate(tiny_loader(2)), schedule, LogTraining(every="1 step", throughput=False), Warmup(0.2)]
    run = tiny_run(
        model=model,
        optimizer=partial(Adam, lr=0.01),
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


@pytest.mark.parametrize(
    ("loader", "arguments"),
    [
        *((name, {}) for name in LOADERS),
        *(("a DataLoader", arguments) for arguments in ({"accumulate": 4}, {"precision": "fp16"}, {"precision": "bf16"})),
    ],
)
def test_the_training_after_a_range_test_has_the_bits_of_one_without(loader: str, arguments: dict[str, Any]) -> None:
    find = FindLearningRate(start=1e-4, end=1e6 if arguments else 100, steps=15)
    plain = trained(make_loader=LOADERS[loader], **arguments)
    assert first_difference(plain, trained(find, make_loader=LOADERS[loader], **arguments)) is None
    assert len(find.rates) > 6, "the test went on in a second epoch"
    assert len(find.losses) >= 10


def test_a_search_for_the_batch_size_leaves_no_trace() -> None:
    find = FindBatchSize(lambda size: shuffled(), start=4, max_size=4)
    assert first_difference(trained(), trained(find)) is None
    assert find.size == 4


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
    look = on(Callback.on_epoch_start)(lambda run: seen.append((free.grad is given, given.sum().item())))

    def without_it(parameters: Any) -> torch.optim.Optimizer:
        return SGD([one for one in parameters if one is not free], 0.1)

    tiny_run(model=model, optimizer=without_it, callbacks=[FindLearningRate(steps=10), look])
    assert seen == [(True, 8.0)]


def tried(**arguments: Any) -> list[Tensor]:
    """Return the batches of a run, those of its trial first."""
    seen: list[Tensor] = []

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0].clone())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    tiny_run(compute_loss=compute_loss, **arguments)
    return seen


def test_the_batches_of_the_trial_are_the_first_ones_of_the_run_and_a_limit_holds_for_it_as_well() -> None:
    """Also where no seed is given, and the order is another one in each run."""
    seen = tried(loader=shuffled(), callbacks=[FindLearningRate(steps=12)], epochs=2)
    assert len(seen) == 24
    assert all(torch.equal(first, again) for first, again in zip(seen[:12], seen[12:], strict=True))
    seen = tried(callbacks=[FindLearningRate(steps=10), cadenza.callbacks.Limit(train=2)], batches=5)
    assert len({batch[0].item() for batch in seen}) == 2


Params = list[nn.Parameter]


class Sam(Optimizer):
    """Sharpness-aware minimization (arXiv:2010.01412): its groups are those of the optimizer inside."""

    def __init__(self, params: Params, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.1})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old"] = weight.clone()
            weight += 0.05 * weight.grad / (weight.grad.norm() + 1e-12)
            weight.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        for weight in self.param_groups[0]["params"]:
            weight.copy_(self.state[weight]["old"])
        self.base_optimizer.step()


class Lookahead(Optimizer):
    """Lookahead (arXiv:1907.08610): slow weights and a count, neither in a state_dict; its state is that of the one inside."""

    def __init__(self, params: Params) -> None:
        self.optimizer = Adam(params, lr=0.05)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.defaults = self.optimizer.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.slow_weights = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        self.optimizer.step()
        self.count += 1
        if self.count % 4 == 0:
            for group, slow in zip(self.param_groups, self.slow_weights, strict=True):
                for weight, kept in zip(group["params"], slow, strict=True):
                    kept.add_(weight - kept, alpha=0.5)
                    weight.copy_(kept)


def trained_with(make: Callable[[Params], Optimizer], *finders: Callback, loader: Any = None) -> dict[str, Any]:
    """Train, and return the bits of weights, of what the optimizer holds, and of each batch."""
    torch.manual_seed(0)
    model, batches = nn.Linear(1, 1), list[Tensor]()
    optimizer = make(list(model.parameters()))
    keep = on(Callback.on_batch_start)(lambda run, batch: batches.append(batch[0].clone()))

    def step(run: Run, batch: Any) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        run.backward(loss)
        if isinstance(optimizer, Sam):
            optimizer.climb()
            run.backward(nn.functional.mse_loss(model(batch[0]), batch[1]))
        run.update()
        return loss.detach()

    loader = tiny_loader(6) if loader is None else loader
    Trainer(model, optimizer, loader, step_fn=step, max_epochs=2, seed=3, callbacks=[keep, *finders], progress=False).fit()
    inner = getattr(optimizer, "base_optimizer", optimizer)
    states = [dict(state) for state in inner.state.values()]
    held = [states, getattr(optimizer, "slow_weights", None), getattr(optimizer, "count", None)]
    return {"weights": [*model.parameters()], "held": held, "batches": batches, "rates": [g["lr"] for g in inner.param_groups]}


def finders() -> dict[str, Callback]:
    return {
        "rate": FindLearningRate(start=1e-3, end=10, steps=11),
        "size": FindBatchSize(lambda size: tiny_loader(12 // size, size), start=2, max_size=2),
    }


def worn(kind: Callable[[Params], Optimizer], params: Params) -> Optimizer:
    """Return an optimizer that has learned something before: its moments are there already."""
    optimizer = kind(params)
    for _ in range(3):
        for weight in params:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    return optimizer


MAKERS: dict[str, Callable[[Params], Optimizer]] = {
    "Sam": Sam,
    "Lookahead": Lookahead,
    "worn Lookahead": partial(worn, Lookahead),
    "worn Adam": partial(worn, Adam),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("finder", ["rate", "size"])
def test_an_optimizer_that_holds_another_or_has_learned_trains_to_the_same_bits_after_a_trial(make: str, finder: str) -> None:
    plain, found = trained_with(MAKERS[make]), trained_with(MAKERS[make], finders()[finder])
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


class Own:
    """A loader whose order comes from generators of its own, and from what it has counted."""

    def __init__(self, draw: Callable[[Own], int]) -> None:
        self.draw, self.passes, self.order = draw, 0, [*range(6)]
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(1)
        self.old, self.new = numpy.random.RandomState(1), numpy.random.default_rng(1)
        self.indices, self.inner = numpy.arange(6), {"deep": [torch.arange(6)]}

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        batches = tiny_loader(6)
        first = self.draw(self) % 6
        yield from batches[first:] + batches[:first]


def in_place(own: Own) -> int:
    own.python.shuffle(own.order)
    return int(own.order[0])


def shuffled_array(own: Own) -> int:
    own.old.shuffle(own.indices)
    own.inner["deep"][0].add_(1)
    return int(own.indices[0]) + int(own.inner["deep"][0][0])


DRAWS: dict[str, Callable[[Own], int]] = {
    "a count of passes": lambda own: own.passes,
    "a torch generator": lambda own: int(torch.randint(6, (), generator=own.torch)),
    "a numpy generator": lambda own: int(own.new.integers(6)),
    "a list that is shuffled in place": in_place,
    "arrays that are changed in place": shuffled_array,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_loader_with_state_of_its_own_gives_the_same_batches_after_a_trial(draw: str) -> None:
    plain = trained_with(partial(SGD, lr=0.1), loader=Own(DRAWS[draw]))
    found = trained_with(partial(SGD, lr=0.1), finders()["rate"], loader=Own(DRAWS[draw]))
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


class Endless:
    def __init__(self) -> None:
        self.batches = cycle(tiny_loader(6))

    def __iter__(self) -> Iterator[Any]:
        return (next(self.batches) for _ in range(6))


def test_a_loader_that_gives_each_batch_once_is_refused_before_it_is_read() -> None:
    with pytest.raises(DataError, match="a generator gives each batch once, and the training would miss those"):
        tiny_run(callbacks=[FindLearningRate()], loader=(batch for batch in tiny_loader()))
    loader = Endless()
    with pytest.raises(DataError, match=r"a cycle gives each batch once, and the training would miss those"):
        tiny_run(callbacks=[FindLearningRate()], loader=loader)
    assert torch.equal(next(loader.batches)[0], tiny_loader(6)[0][0])


# -- buffers that a forward pass changes, and flags that hooks set -----------------------------------


class Replacing(nn.Module):
    """A layer that puts a new tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.running_mean: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.running_mean


class Counting(nn.Module):
    """A layer with a buffer that is no statistic. The second writes past the version counter, as some quantizers do."""

    def __init__(self, past: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.count: Tensor
        self.past = past

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            count = self.count.data if self.past else self.count
            count.add_(inputs.detach().abs().mean(0))
        return inputs * (1 + self.count / 10)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "replaces": Replacing,
    "counts": Counting,
    "counts past versions": lambda: Counting(past=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    "batch norm": lambda: nn.BatchNorm1d(2),
}


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 2), CHANGING[kind](), nn.Linear(2, 1))


@pytest.mark.parametrize("kind", CHANGING)
def test_a_capsule_holds_all_buffers_of_before_the_step_and_repeats_it(kind: str, tmp_path: Path) -> None:
    losses: list[float] = []

    @on(Callback.on_before_backward, when=lambda run: run.progress.step == 4)
    def look(run: Run, outputs: MutableMapping[str, Any]) -> None:
        losses.append(outputs["loss"].item())
        raise ArithmeticError

    trainer = tiny_trainer(model=made(kind), directory=tmp_path, batches=6, callbacks=[look, cadenza.callbacks.Capsule()])
    with pytest.raises(ArithmeticError):
        trainer.fit()
    again = replay_capsule(tiny_trainer(model=made(kind)), tmp_path)
    assert again.exact
    assert again.losses == losses


@pytest.mark.parametrize("kind", CHANGING)
def test_a_batch_that_is_left_out_changes_no_buffer(kind: str, tmp_path: Path) -> None:
    loader = tiny_loader(8)
    loader[6][0][1] = float("nan")
    callbacks = [cadenza.callbacks.Recover(), Checkpoint("2 steps")]
    run = tiny_trainer(model=made(kind), loader=loader, directory=tmp_path, callbacks=callbacks).fit()
    assert all(one.isfinite().all() for one in run.model.state_dict().values())
    assert len([one for one in run.decisions if one.what == "batch left out"]) == 1


def test_a_buffer_that_changes_late_is_restored_and_one_that_cannot_be_set_is_left_alone() -> None:
    model = made("counts")
    model.register_buffer("expanded", torch.zeros(1).expand(3))
    statistics = Statistics(model)
    assert len(statistics.copies) == 1
    model(torch.rand(4, 1))
    statistics.keep()
    before = model.get_buffer("1.count").clone()
    model(torch.rand(4, 1))
    statistics.restore()
    assert torch.equal(model.get_buffer("1.count"), before)


def test_a_buffer_that_is_resized_in_place_or_replaced_is_restored_from_its_next_copy() -> None:
    layer = nn.Module()
    layer.register_buffer("low", torch.zeros(0))
    layer.register_buffer("high", torch.zeros(2))
    statistics = Statistics(layer)
    layer.get_buffer("low").resize_(3).fill_(1)
    layer.high = torch.ones(2)
    statistics.keep()
    layer.get_buffer("low").fill_(2)
    layer.high = torch.zeros(2)
    statistics.restore()
    assert layer.get_buffer("low").tolist() == [1, 1, 1]
    assert layer.get_buffer("high").tolist() == [1, 1]


class Network(nn.Module):
    """Two layers with batch norm between them; the first can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.norm(self.first(inputs)))
        return outputs


def switch(run: Run, *, on: bool) -> None:
    model = run.driver.unwrap(run.model)
    assert isinstance(model, Network)
    model.first.requires_grad_(on)
    model.norm.train(on)


freeze_the_first_layer = on(Callback.on_step_end, at=3)(lambda run: switch(run, on=False))


def trainer_of(*callbacks: Callback, freeze: tuple[str, ...] = ()) -> Callable[[Path], Trainer]:
    def make(directory: Path) -> Trainer:
        model = Network()
        for name in freeze:
            model.get_submodule(name).requires_grad_(False)
        return tiny_trainer(model=model, callbacks=callbacks, directory=directory, epochs=2, seed=1)

    return make


def flags(model: nn.Module) -> set[str]:
    """Return the names of all that is frozen or in evaluation mode."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozen | {name for name, module in model.named_modules() if not module.training}


FROZEN = {"first.weight", "first.bias", "norm"}


def test_what_a_hook_switched_off_or_on_stays_so_after_the_cut_until_a_hook_switches_it_back() -> None:
    again = on(Callback.on_step_end, at=7)(lambda run: switch(run, on=True))
    prove_resume(trainer_of(freeze_the_first_layer, again), at=[3, 5, 7], in_process=True)
    free = on(Callback.on_step_end, at=3)(lambda run: run.model.get_submodule("first").requires_grad_(True))
    prove_resume(trainer_of(free, freeze=("first",)), at=[4], in_process=True)


@pytest.mark.parametrize("one_model", [False, True], ids=["in each process anew", "one model that goes on"])
def test_it_is_there_after_the_second_resume_and_each_resume_tells(one_model: bool, tmp_path: Path) -> None:
    make = trainer_of(freeze_the_first_layer, Checkpoint("1 step"))
    trainer = make(tmp_path)
    for steps in (4, 6):
        trainer.max_steps = steps
        trainer.fit(resume="auto")
        trainer = trainer if one_model else make(tmp_path)
    last = trainer_of(Checkpoint("1 step"))(tmp_path)
    run = last.fit(resume="auto")
    assert flags(last.model) == FROZEN
    assert "requires_grad of first.weight is False; requires_grad of first.bias is False; training of norm is False" in run.why(
        "flags restored"
    )


@pytest.mark.parametrize(("until", "frozen"), [(None, set()), ("1 step", set()), ("8 steps", FROZEN)])
def test_what_freeze_holds_is_its_own_and_follows_from_its_present_arguments(
    until: str | None, frozen: set[str], tmp_path: Path
) -> None:
    run = trainer_of(Freeze(["first", "norm"], until="6 steps"), Checkpoint("4 steps"))(tmp_path)
    run.max_steps = 4
    run.fit()
    seen: list[set[str]] = []
    look = on(Callback.on_step_start)(lambda run: seen.append(flags(run.model)))
    freeze = [] if until is None else [Freeze(["first", "norm"], until=until)]
    trainer_of(*freeze, Checkpoint("4 steps"), look)(tmp_path).fit(resume="auto")
    assert seen[0] - {"norm.weight", "norm.bias"} == frozen


def test_a_run_in_which_no_hook_switches_anything_saves_and_tells_nothing(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[Checkpoint("1 step")], steps=2)
    assert session_of(run).module_flags.changed() == {}
    run = tiny_trainer(directory=tmp_path, callbacks=[Checkpoint("1 step")], steps=3).fit(resume="auto")
    assert not [decision for decision in run.decisions if decision.what == "flags restored"]
