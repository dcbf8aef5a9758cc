"""Drivers' options: layers that multiple ranks compute together end as in one process, and the options of DDP reach it."""

from __future__ import annotations  # annotations are strings, which torch accepts in no hook of its own

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
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
from cadenza.callbacks import (
    BestWeights,
    Checkpoint,
    ClipGradients,
    ConvertSyncBatchNorm,
    Ema,
    Evaluate,
    Freeze,
    LearningRate,
    StopOnNonFinite,
)
from cadenza.drivers import DdpDriver, Driver, FsdpDriver, TensorParallel
from cadenza.engine.session import session_of
from cadenza.errors import DistributedError
from cadenza.hooks.dispatch import hooks_of
from tests.distributed.drivers import ddp, fsdp, single
from tests.distributed.parts import Batch, InOrder, adamw, judged, loader, squared_error, trainer, weighted, weights_of, whole
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
    see = on(Callback.on_batch_start)(lambda run, batch: seen.update(batch[2].tolist()))

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
    predicted = one.predict(loader(37, shuffle=False), compute=lambda model, batch: model(batch[0]), everywhere=True)
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
    loaded = on(Callback.on_load)(lambda run, _: begun.update(all_of(run)))

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


# -- options of torch's DDP, which stay when it is made again; and layers that cannot be trained -------


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def weights_with(model: nn.Module | None = None, **options: Any) -> Tensor:
    one = trainer(model=model, accumulate=2, driver=ddp(**options))
    one.fit()
    return weights_of(one)


class Calls:
    """The state of a communication hook that counts its calls."""

    count = 0


def counting(state: Calls, bucket: Any) -> torch.futures.Future[Tensor]:
    state.count += 1
    return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


OF_DDP: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "find_unused_parameters": (lambda: True, lambda wrapper: wrapper.find_unused_parameters),
    "static_graph": (lambda: True, lambda wrapper: wrapper.static_graph),
    "gradient_as_bucket_view": (lambda: True, lambda wrapper: wrapper.gradient_as_bucket_view),
    "bucket_cap_mb": (lambda: 0.5, lambda wrapper: wrapper.bucket_bytes_cap / 2**20),
    "broadcast_buffers": (lambda: False, lambda wrapper: wrapper.will_sync_module_buffers()),
    "process_group": (dist.new_group, lambda wrapper: wrapper.process_group),
}
"""By option of `DdpDriver`, what returns a value that is not the default, and what reads it from the wrapper of torch."""


class Wrapped(Callback):
    """Keeps the model as the driver has wrapped it."""

    def on_before_backward(self, run: Run, outputs: Any) -> None:
        self.model = session_of(run).model


def test_each_option_of_ddp_reaches_its_wrapper() -> None:
    assert {*OF_DDP} == {*signature(DdpDriver).parameters} - {"device", "share_data", "timeout_s", "comm_hook"}

    def reached() -> dict[str, bool]:
        found: dict[str, bool] = {}
        for name, (value_of, read) in OF_DDP.items():
            value, wrapped = value_of(), Wrapped()
            trainer(model=normed(), driver=ddp(**{name: value}), callbacks=[wrapped], max_steps=1).fit()
            found[name] = read(wrapped.model) == value
        return found

    assert on_ranks(reached) == [dict.fromkeys(OF_DDP, True)] * 2


def test_the_weights_do_not_depend_on_how_gradients_are_reduced() -> None:
    def compared() -> tuple[dict[str, bool], int, bool]:
        plain, calls = weights_with(), Calls()
        same = {
            "static_graph": weights_with(static_graph=True),
            "gradient_as_bucket_view": weights_with(gradient_as_bucket_view=True),
            "bucket_cap_mb": weights_with(bucket_cap_mb=1e-4),
            "broadcast_buffers": weights_with(broadcast_buffers=False),
            "comm_hook": weights_with(comm_hook=(calls, counting)),
            "process_group": weights_with(process_group=dist.new_group()),
        }
        added_in_another_order = torch.allclose(same.pop("static_graph"), plain, atol=1e-6)
        halved = weights_with(comm_hook=lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
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

    for uncut, resumed in on_ranks(both, 3):
        assert torch.equal(uncut, resumed)


def of_this_rank(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    reduced: torch.futures.Future[Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def test_a_hook_after_which_the_ranks_have_different_weights_is_an_error() -> None:
    def message() -> str:
        with pytest.raises(DistributedError, match=r"weights of the ranks differ in 4 of 4 parameters at call 2 of comm_hook"):
            weights_with(comm_hook=of_this_rank)
        return "raised"

    assert on_ranks(message) == ["raised", "raised"]


def test_an_optimizer_that_averages_the_weights_of_the_ranks_trains() -> None:
    def averaged() -> tuple[Tensor, Tensor]:
        def local(parameters: Any) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the module of torch uses torch.jit.script, which is deprecated
                from torch.distributed.optim import PostLocalSGDOptimizer
            return PostLocalSGDOptimizer(torch.optim.SGD(parameters, 0.1), PeriodicModelAverager(period=2))

        one = trainer(driver=ddp(), optimizer=local)
        one.fit()
        plain = trainer(driver=ddp(), optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
        plain.fit()
        return weights_of(one), weights_of(plain)

    for weights, plain in on_ranks(averaged):
        assert torch.allclose(weights, plain)


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
            weights_with(model, broadcast_buffers=broadcast)
            found.append(model[1].running_mean.tolist())  # type: ignore[operator]
        return found[0], found[1]

    (_, own), (shared, other) = on_ranks(statistics)
    assert own != other
    assert shared != other


WRONG_OPTIONS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "comm_hook must be a function hook(state, bucket), or a pair (state, hook); got 'bf16'": (DdpDriver, {"comm_hook": "bf16"}),
    "comm_hook=post_localSGD_hook does not reduce": (DdpDriver, {"comm_hook": (None, post_localSGD_hook)}),
    "comm_hook=noop_hook does not reduce": (DdpDriver, {"comm_hook": debugging_hooks.noop_hook}),
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
        for make, options in [*WRONG_OPTIONS.values(), (DdpDriver, {"process_group": dist.new_group([0])})]:
            with pytest.raises((TypeError, ValueError)) as caught:
                make("cpu", **options)
            found.append(str(caught.value))
        return found

    of_some_ranks = "process_group must have all ranks (2), since all train one model; got a group of "
    for texts in on_ranks(told):
        for expected, text in zip([*WRONG_OPTIONS, of_some_ranks], texts, strict=True):
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

    for uncut, continued in on_ranks(both):
        assert torch.equal(uncut, continued[-1])
