"""Layers that several ranks compute together: training, data, results and checkpoints are those of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchmetrics import MeanSquaredError, SumMetric

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import BestWeights, Checkpoint, ClipGradients, Ema, Evaluate, Freeze, LearningRate, StopOnNonFinite
from cadenza.drivers import Driver, FsdpDriver, TensorParallel
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from tests.distributed.drivers import ddp, fsdp, single
from tests.distributed.parts import Batch, InOrder, adamw, judged, loader, squared_error, weighted, weights_of, whole
from tests.distributed.standing import on_ranks

PLAN: dict[str, ParallelStyle] = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Block(nn.Module):
    """A layer of which the plan splits two weights; ranks hold 5 of 10 rows, of which a shard has 3 or 2."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6), nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = hidden + self.drop(self.down(self.up(self.norm(hidden)).tanh()))
        return added


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), Block(dropout), Block(dropout), nn.Linear(6, 1))


def tensor_parallel(**options: Any) -> FsdpDriver:
    return fsdp(shard=Block, tensor_parallel=TensorParallel(PLAN, ranks=2), **options)


def usual(model: nn.Module, batch: Batch) -> dict[str, Any]:
    return {**judged(model, batch), "rows": batch[2], "ones": torch.ones(len(batch[0]))}


def trained(driver: Driver, accumulate: int) -> tuple[Tensor, dict[str, dict[int, float]], Any, Counter[int], int]:
    """Train with the callbacks that touch weights; return weights, history, predictions, what this rank saw, and samples."""
    seen: Counter[int] = Counter()

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Batch) -> None:
        seen.update(batch[2].tolist())

    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log("counted", 1.0, reduce="sum")
        run.log("plain", float(run.progress.step))
        if run.is_main:
            run.log("of the main process", 2.0)

    metrics = {"error": MeanSquaredError(), "sum": (SumMetric(), "ones"), "order": InOrder()}
    best = BestWeights("eval/loss", "min")
    one = Trainer(
        network(), adamw, loader(48), squared_error,
        max_epochs=2, seed=5, driver=driver, progress=False, accumulate=accumulate, debug_ranks=True,
        callbacks=[
            see, log, ClipGradients(0.5, log="norm", log_every="1 step"), StopOnNonFinite(), Ema(0.5), best,
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)), Freeze("3.*", until="3 steps"),
            Evaluate(loader(37, shuffle=False), metrics=metrics, every="4 steps", weights="ema", compute=usual),
        ],
    )  # fmt: skip
    run = one.fit()
    steps = [session_of(run).cursor.course.samples(step) for step in range(1, run.progress.step + 1)]
    own = [batch.indices for step in steps for batch in step.batches if batch.rank == driver.data_rank]
    assert seen == Counter(number for indices in own for number in indices or ())
    history = {name: dict(run.history[name]) for name in run.history.names}
    predicted = one.predict(loader(37, shuffle=False), compute=lambda model, batch: model(batch[0]))
    return weights_of(one), history, predicted, seen, run.progress.samples


def test_training_on_ranks_that_compute_together_and_on_others_equals_one_process() -> None:
    weights, history, predicted, _, samples = trained(single(), 2)
    ranks = on_ranks(lambda: trained(tensor_parallel(), 1), 4)
    for got, logged, predictions, _, counted in ranks:
        assert torch.allclose(got, weights, atol=1e-6)
        assert torch.allclose(predictions, predicted, atol=1e-6)
        assert counted == samples == 96
        for name in history:
            expected = {step: 2 * value for step, value in history[name].items()} if name == "counted" else history[name]
            assert logged[name] == pytest.approx(expected, rel=1e-5), name
    assert ranks[0][3] == ranks[1][3] != ranks[2][3] == ranks[3][3]  # what they saw
    assert ranks[0][3] + ranks[2][3] == dict.fromkeys(range(48), 2)


DRIVERS: dict[str, tuple[int, Callable[[], Driver]]] = {
    "tensor": (2, tensor_parallel),
    "both": (4, tensor_parallel),
    "replicas": (4, partial(tensor_parallel, replicas=2)),
    "fsdp": (2, partial(fsdp, shard=Block)),
    "ddp": (2, ddp),
    "single": (1, single),
}
"""By name, a number of ranks and the driver."""
State = dict[str, Tensor]


def all_of(run: Run) -> State:
    """Return the weights, their average and the states of the optimizer, whole. Every rank must call this."""
    average = hooks_of(run).callbacks["Ema"].state_dict()["average"]
    states = {name: run.optimizers[0].state[parameter] for name, parameter in run.model.named_parameters()}
    moments = {f"{name} {key}": value for name, state in states.items() for key, value in state.items()}
    return {name: whole(value).clone() for name, value in {**run.model.state_dict(), **average, **moments}.items()}


def leg(directory: Path, driver: str, steps: int | None, dropout: float = 0.0) -> tuple[State, State, Counter[int]]:
    """Continue the run in `directory` until a step; return its state at the start and at the end, and what this rank saw."""
    begun: State = {}
    seen: Counter[int] = Counter()

    @on(Callback.on_load)
    def loaded(run: Run, _: Any) -> None:
        begun.update(all_of(run))

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Batch) -> None:
        if session_of(run).cursor.source.replicated_at != run.progress.batch_in_epoch or run.driver.data_rank == 0:
            seen.update(batch[2].tolist() if run.driver.counts else ())

    made = DRIVERS[driver][1]()
    run = Trainer(
        network(dropout), adamw, loader(79), weighted,
        max_epochs=2, max_steps=steps, seed=5, driver=made, accumulate=4 // made.data_world_size, directory=directory,
        callbacks=[loaded, see, Ema(0.5), Checkpoint("100 steps")], progress=False,
    ).fit(resume="auto")  # fmt: skip
    return begun, all_of(run), seen


def legs(directory: Path, chain: list[tuple[str, int | None]], **arguments: Any) -> tuple[State, Counter[int]]:
    """Do a run in parts, each of which begins with the bits with which the one before ended."""
    state, seen = dict[str, Tensor](), Counter[int]()
    for driver, steps in chain:
        ranks, _ = DRIVERS[driver]
        work = partial(leg, directory, driver, steps, **arguments)
        everyone = [work()] if ranks == 1 else on_ranks(work, ranks)
        for begun, ended, saw in everyone:
            assert begun.keys() == state.keys()
            assert all(torch.equal(begun[name], state[name]) for name in state)
            assert all(torch.equal(ended[name], everyone[0][1][name]) for name in ended)
            seen += saw
        state = everyone[0][1]
    return state, seen


def test_checkpoints_go_between_all_layouts_bit_exactly(tmp_path: Path) -> None:
    state, seen = legs(tmp_path / "cut", [("tensor", 1), ("single", 3), ("fsdp", 4), ("both", 7), ("ddp", None)])
    _, expected, _ = leg(tmp_path / "whole", "single", None)
    assert seen == dict.fromkeys(range(79), 2)
    for name in expected:
        assert torch.allclose(state[name], expected[name], atol=1e-6), name


@pytest.mark.parametrize("driver", ["both", pytest.param("replicas", marks=pytest.mark.long)])
def test_a_run_resumes_with_the_same_layout_to_the_same_bits_and_dropout_is_that_of_the_data(
    driver: str, tmp_path: Path
) -> None:
    def cut_and_through() -> list[State]:
        leg(tmp_path / "cut", driver, 3, dropout=0.3)
        return [leg(tmp_path / folder, driver, 6, dropout=0.3)[1] for folder in ("cut", "through")]

    _, data, _ = on_ranks(lambda: leg(tmp_path / "data", "fsdp", 6, dropout=0.3))[0]
    for cut, through in on_ranks(cut_and_through, 4):
        for name in cut:
            assert torch.equal(cut[name], through[name]), name
            assert torch.allclose(cut[name], data[name], atol=1e-6), name


class Words(nn.Module):
    """Embeddings that are also the last layer: (B, T) words -> (B, T, 12) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.embedding(words)))
        return scores.clone()  # FSDP warns of views


def plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split weights over words, and the norm over positions."""
    styles = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, styles)


def learned(make: Callable[[], Driver]) -> Tensor:
    torch.manual_seed(0)
    words = torch.randint(0, 12, (24, 5))
    one = Trainer(
        Words(), adamw, list(words.split(6)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()),
        max_epochs=2, seed=1, driver=make(), progress=False,
    )  # fmt: skip
    one.fit()
    assert len(list(one.model.parameters())) == 3  # the weight with two names is one weight
    return weights_of(one)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "ranks": (lambda: FsdpDriver("cpu", tensor_parallel=TensorParallel(PLAN, ranks=3)), "must divide the number of ranks, 2"),
    "both": (lambda: TensorParallel(PLAN, ranks=2, mesh=world()), "needs one of ranks= and mesh="),
    "mesh": (lambda: TensorParallel(PLAN, mesh=init_device_mesh("cpu", (2,))), "two or three dimensions"),
    "replicas": (
        lambda: FsdpDriver("cpu", replicas=2, tensor_parallel=TensorParallel(PLAN, mesh=world())),
        "replicas must divide the number of ranks that do not compute together, which is 1",
    ),
    "no plan": (lambda: TensorParallel(cast("Any", ColwiseParallel()), ranks=2), "plan must be a mapping"),
    "no style": (
        lambda: TensorParallel({"head": cast("Any", "colwise")}, ranks=2),
        r"must be a style such as ColwiseParallel\(\)",
    ),
    "no such module": (lambda: split({"heads": ColwiseParallel()}), "Did you mean 'head'"),
    "two styles": (lambda: split({"head": ColwiseParallel(), "h*": RowwiseParallel()}), "both match 'head'"),
    "tied": (lambda: split({"head": ColwiseParallel()}), "are one weight, and the plan would split it in two ways"),
}


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "parts"))


def split(styles: dict[str, ParallelStyle]) -> nn.Module:
    return FsdpDriver("cpu", tensor_parallel=TensorParallel(styles, ranks=2)).prepare(Words())


def train_uneven_parts() -> None:
    """Train layers of which the ranks that compute together would hold 3 and 2 of 5 features, which torch cannot do."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    parts = TensorParallel({"0": ColwiseParallel(), "1": RowwiseParallel()}, ranks=2)
    Trainer(
        model, lambda parameters: torch.optim.SGD(parameters, lr=0.01), loader(8), squared_error,
        max_steps=1, driver=FsdpDriver("cpu", tensor_parallel=parts), progress=False,
    ).fit()  # fmt: skip


def test_the_plan_may_be_a_function_and_the_mesh_of_the_user_and_mistakes_are_reported() -> None:
    def work() -> Tensor:
        for wrong, message in WRONG.values():
            with pytest.raises((TypeError, ValueError), match=message):
                wrong()
        with pytest.raises(RuntimeError) as caught:
            train_uneven_parts()
        assert "Numbers that are split, such as features and heads, must be divisible by 2" in "".join(caught.value.__notes__)
        return learned(lambda: FsdpDriver("cpu", tensor_parallel=TensorParallel(plan, mesh=world())))

    expected = learned(single)
    for weights in on_ranks(work):
        assert torch.allclose(weights, expected, atol=1e-6)
