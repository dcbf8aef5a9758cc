"""Groups of batches train as the joined batch would, also if their size changes at points of the run, and no graph is kept."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate, LearningRate, StopOnNonFinite, Warmup
from cadenza.engine.arguments import checked_accumulate
from cadenza.errors import CheckpointMismatchError
from cadenza.records import read_decisions
from cadenza.status.progress import Accumulation, Counters, Progress
from cadenza.testing import launch, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.engine.parts import Stream
from tests.long import LONG


def regression(samples: int, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator)
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def weights_after(loader: list[Any], **arguments: Any) -> Tensor:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    run = tiny_run(model=model, optimizer=partial(torch.optim.Adam, lr=0.05), loader=loader, epochs=3, **arguments)
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


@pytest.mark.parametrize(
    ("samples", "sizes", "joined"),
    [
        pytest.param(24, [2] * 12, [6] * 4, id="three batches of two train as one of six"),
        pytest.param(10, [2] * 5, [6, 4], id="a short last group is normalised by its own length"),
    ],
)
def test_a_group_of_batches_trains_as_the_joined_batch(samples: int, sizes: list[int], joined: list[int]) -> None:
    grouped = weights_after(regression(samples, sizes), accumulate=3)
    torch.testing.assert_close(grouped, weights_after(regression(samples, joined)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "float"])
def test_batches_of_unequal_weight_train_as_the_joined_batch(as_tensor: bool) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        size = torch.tensor(float(len(inputs))) if as_tensor else len(inputs)
        return {"loss": nn.functional.mse_loss(model(inputs), targets), "weight": size}

    grouped = weights_after(regression(12, [1, 3, 2, 4, 2]), accumulate=3, compute_loss=compute_loss)
    torch.testing.assert_close(grouped, weights_after(regression(12, [6, 6])), rtol=1e-5, atol=1e-6)


def test_batches_of_a_step_that_disagree_on_weights_are_an_error() -> None:
    weights: Iterator[dict[str, float]] = iter([{"weight": 2.0}, {}])
    with pytest.raises(TypeError, match=r"either all batches of a step report outputs\['weight'\], or none"):
        tiny_run(accumulate=2, compute_loss=lambda model, batch: {"loss": model(batch[0]).mean(), **next(weights)})


def gradients_of(callbacks: Sequence[Callback] = (), **arguments: Any) -> list[float]:
    """Return the gradients of all parameters before each update."""
    seen: list[float] = []

    @on(Callback.on_before_optimizer_step)
    def look(run: Run) -> None:
        seen.extend(float(one.grad) for one in run.model.parameters() if one.grad is not None)

    tiny_run(callbacks=[*callbacks, look], **arguments)
    return seen


def test_a_parameter_that_two_optimizers_hold_is_normalised_once() -> None:
    held_twice = gradients_of(batches=1, accumulate=2, optimizer=lambda weights: [SGD(weights, 0.1), SGD(weights, 0.1)])
    assert len(held_twice) == 2
    assert held_twice == gradients_of(batches=1, accumulate=2)


@pytest.mark.parametrize(
    ("moment", "given", "expected"),
    [
        (Callback.on_step_end, [1.0, 3.0, 5.0], [2.0, 5.0]),
        (Callback.on_batch_end, [1.0, 3.0, 5.0, 7.0], [None, None, 2.0, 2.0]),
    ],
)
def test_the_loss_of_a_run_is_the_undivided_mean_of_its_last_step_until_the_next_one_is_done(
    moment: Any, given: list[float], expected: list[float | None]
) -> None:
    losses: list[float | None] = []
    look = on(moment)(lambda run, *_: losses.append(None if run.loss is None else float(run.loss)))
    tiny_run(losses=given, accumulate=2, callbacks=[look])
    assert losses == expected


def test_a_loss_that_a_callback_puts_in_its_place_and_a_batch_that_it_changes_are_the_ones_that_train() -> None:
    ten_times = on(Callback.on_before_backward)(lambda run, outputs: outputs.update(loss=outputs["loss"] * 10))
    replaced = tiny_run(callbacks=[ten_times], optimizer=partial(SGD, lr=0.01), batches=1)
    torch.testing.assert_close(replaced.model.weight, tiny_run(batches=1).model.weight)
    run = tiny_run(callbacks=[on(Callback.on_batch_start)(lambda run, batch: batch[0].zero_())], batches=1)
    assert torch.equal(run.model.weight, tiny_model().weight)  # type: ignore[arg-type]  # the tiny model is a Linear


def test_gradients_left_from_before_the_fit_are_dropped_by_the_zero_grad_of_the_optimizer() -> None:
    model = tiny_model()
    model(torch.ones(1, 1)).sum().backward()
    torch.testing.assert_close(tiny_run(model=model, batches=1).model.weight, tiny_run(batches=1).model.weight)

    class Own(SGD):
        zeroed = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            Own.zeroed += 1
            super().zero_grad(set_to_none)

    tiny_run(optimizer=partial(Own, lr=0.1), steps=2)
    assert Own.zeroed == 3  # once before the first step


@pytest.mark.parametrize("through_a_view", [False, True])
def test_two_parameters_that_share_one_gradient_are_normalised_once(through_a_view: bool) -> None:
    model = nn.ParameterList([torch.ones(1), torch.ones(1)])

    @on(Callback.on_after_backward)
    def share(run: Run, outputs: Any) -> None:
        gradient = model[0].grad
        assert gradient is not None
        model[1].grad = gradient.detach() if through_a_view else gradient

    one_of_four: dict[str, Any] = {"loader": [torch.ones(2, 1)], "accumulate": 4, "callbacks": [share]}
    assert gradients_of(model=model, compute_loss=lambda model, batch: model[0].sum(), **one_of_four) == [1.0, 1.0]


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "float"])
@pytest.mark.parametrize(("accumulate", "whole"), [(1, 0), (2, 0), (2, 1)])
def test_batches_of_no_weight_count_for_nothing_though_their_loss_is_nan(accumulate: int, whole: int, as_tensor: bool) -> None:
    losses: list[float] = []
    look = on(Callback.on_step_end)(lambda run: losses.append(float(run.loss)))  # type: ignore[arg-type]
    weights = iter([2.0 if index == whole else 0.0 for index in range(4)])

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        # What cross_entropy gives for targets that are all ignored: NaN, and gradients of 0.
        weight = next(weights, 2.0)
        targets = torch.tensor([0, 1] if weight else [-100, -100])
        loss = nn.functional.cross_entropy(model(batch[0]).repeat(1, 2), targets)
        return {"loss": loss, "weight": torch.tensor(weight) if as_tensor else weight}

    loader = tiny_loader(4)
    run = tiny_run(loader=loader, accumulate=accumulate, compute_loss=compute, callbacks=[look, StopOnNonFinite()])
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    none = [math.nan] * (3 if accumulate == 1 else 1)
    assert losses == pytest.approx([math.log(2), *none], nan_ok=True)
    torch.testing.assert_close(run.model.weight, tiny_run(loader=loader[whole : whole + 1], compute_loss=compute).model.weight)


@pytest.mark.parametrize("kind", [float, int, np.float32, np.float64, torch.tensor])
def test_a_batch_of_weight_0_on_the_host_adds_no_gradient_though_that_is_nan(kind: Callable[[float], Any]) -> None:
    weights = iter([kind(1.0), kind(0.0)])

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        weight = next(weights)
        return {"loss": (model(batch[0]) * weight).sum() / weight if weight else model(batch[0]).sum() / 0.0, "weight": weight}

    run = tiny_run(batches=2, accumulate=2, compute_loss=compute)
    assert run.model.weight.isfinite().all()  # type: ignore[operator]


def test_the_loss_of_a_float64_model_keeps_its_digits() -> None:
    model, losses = tiny_model().double(), list[Tensor]()

    def compute(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0].double()).sum() * 0 + 1 + 1e-12
        return loss

    look = on(Callback.on_step_end)(lambda run: losses.append(run.loss))  # type: ignore[arg-type]
    tiny_run(model=model, batches=4, accumulate=2, compute_loss=compute, callbacks=[look])
    assert {loss.dtype for loss in losses} == {torch.float64}
    assert losses[0].item() - 1 == pytest.approx(1e-12, rel=1e-3)


class Token:
    """Lives as long as the graph of one loss."""


class Marked(torch.autograd.Function):
    """The identity, with a token in its graph."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Token) -> Tensor:
        ctx.token = token
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def marking(tokens: list[weakref.ref[Token]]) -> Callable[[nn.Module, Any], dict[str, Any]]:
    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        token = Token()
        tokens.append(weakref.ref(token))
        loss: Any = Marked.apply(model(batch).square().mean(), token)  # type: ignore[no-untyped-call]  # torch has no types there
        return {"loss": loss}

    return compute


@pytest.mark.parametrize("by", ["compute_loss", "weighted compute_loss", "step_fn"])
def test_when_a_batch_starts_no_graph_of_an_earlier_one_is_alive(by: str) -> None:
    tokens: list[weakref.ref[Token]] = []
    alive: list[int] = []
    compute = marking(tokens)

    def step(run: Run, batch: Tensor) -> Tensor:
        run.backward(loss := compute(run.model, batch)["loss"])
        run.update()
        return loss  # type: ignore[no-any-return]

    ways: dict[str, dict[str, Any]] = {
        "compute_loss": {"compute_loss": compute, "accumulate": 3},
        "weighted compute_loss": {"compute_loss": lambda *given: {**compute(*given), "weight": 2}, "accumulate": 3},
        "step_fn": {"step_fn": step},
    }
    count = on(Callback.on_batch_start)(lambda run, batch: alive.append(sum(token() is not None for token in tokens)))
    run = tiny_run(loader=[torch.ones(2, 1)] * 9, callbacks=[count], **ways[by])
    assert alive == [0] * 9
    assert run.loss is not None
    assert run.loss.grad_fn is None


def test_an_evaluation_with_gradients_of_its_own_keeps_no_graph() -> None:
    tokens: list[weakref.ref[Token]] = []
    alive: list[int] = []
    count = on(Callback.on_eval_batch_start)(lambda run, *_: alive.append(sum(token() is not None for token in tokens)))
    judged = torch.enable_grad()(marking(tokens))
    tiny_run(batches=1, callbacks=[Evaluate([torch.ones(2, 1)] * 4, compute=judged), count])
    assert max(alive) <= 1  # the outputs of a batch are there until the next one is computed


def test_no_batch_but_the_one_under_way_is_kept_while_a_group_is_filled() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Fresh:
        def __iter__(self) -> Iterator[Tensor]:
            return (torch.ones(2, 1) for _ in range(6))

    @on(Callback.on_batch_start)
    def count(run: Run, batch: Tensor) -> None:
        seen.append(weakref.ref(batch))
        assert [one() is not None for one in seen] == [False] * (len(seen) - 1) + [True]

    tiny_run(loader=Fresh(), accumulate=3, compute_loss=lambda model, batch: model(batch).mean(), callbacks=[count])
    assert len(seen) == 6


# -- the batches in a step change at points of the run -----------------------------------------------


class Sizes(Callback):
    """Keeps the number of batches of each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._before = 0

    def on_step_start(self, run: Run) -> None:
        self._before = run.progress.batch

    def on_step_end(self, run: Run) -> None:
        self.steps.append(run.progress.batch - self._before)


STREAM: DataLoader[Any] = DataLoader(Stream(TensorDataset(torch.arange(20.0).unsqueeze(1) / 20, torch.ones(20, 1))), 2)


def sizes(accumulate: Any, **arguments: Any) -> list[int]:
    seen = Sizes()
    tiny_run(callbacks=[seen], accumulate=accumulate, **arguments)
    return seen.steps


@pytest.mark.parametrize(
    ("accumulate", "arguments", "expected"),
    [
        ({0: 1, "2 steps": 3}, {}, [1, 1, 3, 3, 2, 3, 3, 3, 1]),
        ({0: 1, 2: 3}, {}, [1, 1, 3, 3, 2, 3, 3, 3, 1]),
        ({"1 epoch": 4}, {}, [1] * 10 + [4, 4, 2]),
        ({0: 4, "1 epoch": 1}, {}, [4, 4, 2] + [1] * 10),
        ({0: 2, "0.5 epoch": 5}, {}, [2, 2, 2, 4, 5, 5]),
        ({0: 2, "3 batches": 3}, {}, [2, 2, 3, 3, 3, 3, 3, 1]),
        ({"50%": 5}, {}, [1] * 10 + [5, 5]),
        ({"25%": 5, "1 epoch": 2}, {}, [1] * 5 + [5] + [2] * 5),
        ({0: 1, "6 samples": 2, "3 steps": 7}, {}, [1, 1, 1, 7, 7, 3]),
        ({0: 3, "99 steps": 1}, {}, [3, 3, 3, 1, 3, 3, 3, 1]),
        ({"50%": 2}, {"epochs": 5, "steps": 6}, [1, 1, 1, 2, 2, 2]),  # of the limit that is nearest
        ({"6 tokens": 3}, {"epochs": 1, "batches": 6, "tokens": lambda batch: 3}, [1, 1, 3, 1]),
        ({"2 steps": 4, "1 epoch": 5}, {"loader": STREAM}, [1, 1, 4, 4, 5, 5]),  # without a length
    ],
)
def test_a_change_takes_effect_at_the_next_step(accumulate: Any, arguments: dict[str, Any], expected: list[int]) -> None:
    assert sizes(accumulate, **{"batches": 10, "epochs": 2, **arguments}) == expected


def test_a_part_of_an_epoch_needs_a_loader_that_knows_its_length() -> None:
    with pytest.raises(ValueError, match=r"changes at '0\.5 epoch'.*knows its length"):
        sizes({"0.5 epoch": 4}, loader=STREAM, epochs=2)


def test_gradients_are_means_over_the_batches_of_each_step() -> None:
    first, *three, last = tiny_loader(5)
    inputs, targets = (torch.cat(parts) for parts in zip(*three, strict=True))
    joined = tiny_run(loader=[first, (inputs, targets), last])
    grouped = tiny_run(loader=[first, *three, last], accumulate={0: 1, "1 step": 3})
    torch.testing.assert_close(grouped.model.state_dict(), joined.model.state_dict(), rtol=1e-6, atol=0)


def test_each_change_is_a_decision_and_a_line_of_the_plan() -> None:
    trainer = tiny_trainer(batches=10, accumulate={0: 1, "2 steps": 3, "500 steps": 9})
    plan = trainer.plan()
    assert "5 steps of 1 batch, 3 from 2 steps on, 9 from 500 steps on" in str(plan)
    assert "! accumulate=9 from 500 steps on never takes effect: the run ends after 5 steps" in str(plan)
    assert plan.to_dict()["accumulate"] == {"0": 1, "2 steps": 3, "500 steps": 9}
    (decision,) = [one for one in trainer.fit().decisions if one.what == "accumulation changed"]
    assert (decision.when.step, dict(decision.data)) == (2, {"before": 1, "batches": 3})


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unit": ({"2 stps": 3}, ValueError, "Did you mean 'steps'"),
    "time": ({"2 min": 3}, ValueError, "no point of a run that is the same after a resume"),
    "share": ({"120%": 3}, ValueError, "a run has 100%"),
    "kind": ({2.5: 3}, ValueError, "2.5 is no schedule: a number must be whole"),
    "batches": ({"2 steps": 0}, ValueError, r"accumulate\['2 steps'\] must be at least 1; got 0"),
    "order": ({"5 steps": 2, "2 steps": 3}, ValueError, "in order; got '5 steps' before '2 steps'"),
    "zero": ({"5 steps": 2, 0: 3}, ValueError, "0 first"),
    "step_fn": ({"5 steps": 2}, ValueError, "step_fn does its own accumulation"),
}


@pytest.mark.parametrize(("given", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_schedules_are_errors_when_the_trainer_is_made(given: Any, kind: type[Exception], message: str) -> None:
    own: dict[str, Any] = {"step_fn": lambda run, batch: None} if "step_fn" in message else {}
    with pytest.raises(kind, match=message):
        tiny_trainer(accumulate=given, **own)


# -- what is computed from it -----------------------------------------------------------------------


def simulated(accumulation: Accumulation, limits: Progress) -> tuple[int, int, int]:
    """Return the steps, batches and epochs of a run, counted one by one."""
    per_epoch = limits.batches_per_epoch
    assert per_epoch is not None
    at = Progress(max_epochs=limits.max_epochs, max_steps=limits.max_steps, batches_per_epoch=per_epoch)
    at.begin(limits.origin, per_epoch)
    while not at.finished:
        size = accumulation.batches(at, limits)
        for _ in range(min(size, per_epoch - at.batch_in_epoch)):
            at.finish_batch(1)
        at.finish_step()
        if at.batch_in_epoch == per_epoch:
            at.finish_epoch()
    return at.step, at.batch, at.epoch


def test_totals_equal_those_that_are_counted_one_by_one_also_inside_of_an_epoch() -> None:
    draw = random.Random(18)
    units: list[Callable[[], str]] = [
        lambda: f"{draw.choice([1, 2, 3, 4, 0.25, 0.5, 1.5, 2.3])} epochs",
        lambda: f"{draw.randint(1, 40)} steps",
        lambda: f"{draw.randint(1, 60)} batches",
        lambda: f"{draw.randint(1, 99)}%",
    ]
    for _ in range(200):
        points = {unit(): draw.randint(1, 6) for unit in draw.sample(units, draw.randint(1, 3))}
        given: dict[int | str, int] = {0: draw.randint(1, 4)}
        given.update(points)
        accumulation = checked_accumulate(given, None)
        assert isinstance(accumulation, Accumulation)
        per_epoch = draw.randint(1, 15)
        steps = draw.choice([None, draw.randint(1, 50)])
        limits = Progress(
            max_epochs=draw.randint(1, 5) if steps is None else draw.choice([None, draw.randint(1, 5)]),
            max_steps=steps,
            batches_per_epoch=per_epoch,
        )
        if draw.random() < 0.5:
            inside = draw.randrange(min(per_epoch, steps or per_epoch))
            limits.begin(Counters(0, inside, inside, inside), per_epoch)
        expected = simulated(accumulation, limits)
        found = tuple(limits.total(unit, accumulation) for unit in ("step", "batch", "epoch"))
        assert found == expected, (accumulation, limits, limits.origin)
    by_samples = checked_accumulate({"50 samples": 2}, None)
    assert Progress(max_epochs=3, batches_per_epoch=10).total("step", by_samples) is None, "it depends on samples"
    assert Progress(max_steps=9, batches_per_epoch=10).total("step", by_samples) == 9


def test_a_schedule_of_the_total_ends_with_the_run_and_a_warm_up_with_its_epoch() -> None:
    rates: list[float] = []
    note = on(Callback.on_before_optimizer_step)(lambda run: rates.append(float(run.optimizers[0].param_groups[0]["lr"])))
    fall = LearningRate(lambda optimizer, total: LinearLR(optimizer, 1.0, 0.0, total_iters=total))
    run = tiny_run(callbacks=[fall, note], batches=10, epochs=2, accumulate={0: 1, "0.5 epoch": 5})
    assert run.progress.step == 5 + 1 + 2
    assert rates == pytest.approx([0.1 * (1 - step / 8) for step in range(8)])
    warm = Warmup("1 epoch")
    tiny_run(callbacks=[warm], batches=10, epochs=2, accumulate={0: 1, "0.5 epoch": 5})
    assert warm.count == 6


def test_callbacks_by_batches_are_called_in_time_when_steps_become_longer() -> None:
    evaluate = Evaluate(tiny_loader(1), every="20 batches")
    run = tiny_run(callbacks=[evaluate], batches=100, epochs=1, accumulate={0: 1, "11 steps": 8})
    assert [one.when.batch for one in run.decisions if one.what == "evaluated"] == [27, 43, 67, 83, 100]


# -- after a resume, and on multiple ranks -----------------------------------------------------------

DATA = TensorDataset(torch.arange(40.0).unsqueeze(1) / 40, torch.ones(40, 1))
SCHEDULE = {0: 1, "3 steps": 3, "1 epoch": 2, "60%": 4}


def trainer(directory: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    options: dict[str, Any] = {"accumulate": SCHEDULE, "epochs": 3, "steps": 22, "seed": 3, **arguments}
    loader, optimizer = DataLoader(DATA, 4, shuffle=True), partial(torch.optim.Adam, lr=0.01)
    return tiny_trainer(callbacks=callbacks, loader=loader, optimizer=optimizer, directory=directory, **options)


def train(directory: Path, steps: int | None, **arguments: Any) -> tuple[Run, Sizes]:
    """Train to a step, which a callback ends, and save there; None: to the end."""
    seen = Sizes()

    @on(Callback.on_step_end)
    def stop(run: Run) -> None:
        if run.progress.step == steps:
            raise KeyboardInterrupt

    try:
        return trainer(directory, seen, Checkpoint("1 step", keep_last=None), stop, **arguments).fit(resume="auto"), seen
    except KeyboardInterrupt:
        return None, seen  # type: ignore[return-value]


def weights(directory: Path) -> bytes:
    return (max((directory / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()


def test_a_run_that_is_killed_at_any_step_ends_with_the_same_bits_and_steps(tmp_path: Path) -> None:
    run, whole = train(tmp_path / "whole", None)
    assert whole.steps == [1, 1, 1, 3, 3, 1, 2, 2, 2, 2, 2, 4, 4, 2]
    for kill in range(1, len(whole.steps)) if LONG else (3, 6, 11):
        directory = tmp_path / f"killed-{kill}"
        _, first = train(directory, kill)
        again, second = train(directory, None)
        done = again.progress.origin.step
        assert first.steps[:done] + second.steps == whole.steps
        assert again.progress.now() == run.progress.now()
        assert weights(directory) == weights(tmp_path / "whole")
        told = [one for one in read_decisions(directory / "decisions.jsonl") if one.what == "accumulation changed"]
        assert [(one.when.step, one.data["batches"]) for one in told] == [(3, 3), (6, 2), (10, 4)]


def test_another_schedule_at_a_resume_is_refused_unless_it_is_declared(tmp_path: Path) -> None:
    train(tmp_path, 4)
    with pytest.raises(CheckpointMismatchError, match=r"accumulate: saved .*'3 steps': 3.*override=\('accumulate',\)"):
        train(tmp_path, None, accumulate=2)
    run = trainer(tmp_path, seen := Sizes()).fit(resume="auto", override={"accumulate": {0: 1, "1 epoch": 5}})
    done = run.progress.origin.step
    assert seen.steps == [1] * (10 - [0, 1, 2, 3, 6][done]) + [5, 5, 5, 5]
    assert run.why("override").endswith("the run uses the present value")


def test_two_ranks_change_at_the_same_step(tmp_path: Path) -> None:
    def rank() -> Any:
        seen = Sizes()
        run = tiny_run(
            callbacks=[seen, Checkpoint("2 steps")],
            loader=DataLoader(DATA, 2, shuffle=True),
            epochs=2,
            seed=3,
            driver="ddp",
            device="cpu",
            accumulate={0: 1, "16 samples": 2, "1 epoch": 3, "75%": 4},
            directory=tmp_path,
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )
        return seen.steps, run.progress.now(), [dict(one.data) for one in run.decisions if "changed" in one.what]

    first, second = launch(rank, 2)
    assert first == second
    assert first[0] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 4]
    assert [one["batches"] for one in first[2]] == [2, 3, 4]
