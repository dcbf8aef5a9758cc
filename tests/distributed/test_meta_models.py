"""Models that are built on the device ``meta``: no rank holds the whole, and the values are those of any number of ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from cadenza import Callback, Run, Trainer, load_weights, on, save_weights
from cadenza.callbacks import Checkpoint, ClipGradients, Ema
from cadenza.drivers import Driver, FsdpDriver, TensorParallel
from cadenza.errors import CheckpointFormatError
from cadenza.hooks.dispatch import hooks_of
from cadenza.testing import tiny_trainer
from tests.distributed.drivers import ddp, fsdp, single
from tests.distributed.parts import adamw, loader, momentum, refusal, trainer, whole
from tests.distributed.standing import on_ranks


class Rotary(nn.Module):
    """Adds numbers that it computes when it is made, and that are in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", self._computed(), persistent=False)

    def _computed(self) -> Tensor:
        return torch.linspace(0, 1, 6)

    def reset_parameters(self) -> None:
        self.cache = self._computed()  # replaced, as models of Hugging Face do

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.cache


class Scale(nn.Module):
    """Has weights, and no method that sets them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


class Tall(nn.Module):
    """Draws the weights of a module inside of it once more, as ``nn.Transformer`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 7)

    def _reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.inner.weight)
        nn.init.trunc_normal_(self.inner.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rotary, self.norm = nn.Linear(3, 6), Rotary(), nn.LayerNorm(6)
        self.statistics = nn.BatchNorm1d(6, affine=False)  # not called: ranks would have statistics of their own
        self.tall, self.tied, self.table = Tall(), nn.Linear(6, 7), nn.Embedding(5, 6, padding_idx=1)
        self.tied.weight = self.tall.inner.weight
        self.last = nn.Linear(7, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.rotary(self.first(inputs))) + self.table.weight.sum(0)
        result: Tensor = self.last((self.tall(hidden) + self.tied(hidden)).tanh())
        return result


def on_meta(make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return make()


def sharded(**options: Any) -> FsdpDriver:
    return fsdp(**{"shard": ["norm", "first"], **options})


DRIVERS: dict[str, Callable[[], Driver]] = {
    "fsdp": sharded,
    "hsdp": partial(sharded, replicas=2),
    "offloaded": partial(sharded, cpu_offload=True),
    "tensor": lambda: sharded(tensor_parallel=TensorParallel({"first": ColwiseParallel(), "last": RowwiseParallel()}, ranks=2)),
    "ddp": ddp,
    "single": single,
}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, whole. Every rank must call this."""
    return {name: whole(one.detach()).clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def prepared(driver: Driver, model: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed + driver.rank)  # the ranks take the numbers of the main process
    return tensors_of(driver.unwrap(driver.prepare(model)))


@pytest.mark.parametrize(("driver", "ranks"), [("fsdp", 3), ("hsdp", 4), ("tensor", 4), ("offloaded", 2), ("ddp", 2)])
def test_the_initial_values_are_the_same_to_the_bit_with_every_driver_and_number_of_ranks(driver: str, ranks: int) -> None:
    alone = prepared(single(), on_meta())
    assert torch.equal(alone["rotary.cache"], torch.linspace(0, 1, 6))
    assert alone["table.weight"][1].tolist() == [0.0] * 6
    assert alone["table.weight"].std() > 0.5
    assert 0.3 < alone["tall.inner.weight"].std() < 0.5  # of xavier_uniform_, and not of nn.Linear, which is 0.24
    for values in on_ranks(lambda: prepared(DRIVERS[driver](), on_meta()), ranks):
        assert same(values, alone)
    assert not same(prepared(single(), on_meta(), seed=4), alone)


def test_one_process_keeps_the_parameters_that_an_optimizer_holds_their_ties_and_attributes() -> None:
    model = on_meta()
    model.last.weight.decays = False  # type: ignore[union-attr]
    one = trainer(model=model, optimizer=momentum(model.parameters()), driver=single())
    one.fit()
    assert model.tied.weight is model.tall.inner.weight  # type: ignore[union-attr]
    assert model.last.weight.decays is False  # type: ignore[union-attr]
    start = prepared(single(), on_meta(), seed=5)
    assert all(
        not torch.equal(start[name], now)
        for name, now in tensors_of(model).items()
        if "rotary" not in name and "stat" not in name
    )


class Peak:
    """The most bytes on the host that torch had allocated inside, more than before."""

    def __enter__(self) -> Peak:
        gc.collect()  # a model of before that is freed inside would hide as many bytes
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        self._first = torch.empty(1)
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        todo, totals = [*self._profile.profiler.kineto_results.experimental_event_tree()], []  # type: ignore[union-attr]
        while todo:
            event = todo.pop()
            todo += event.children
            if event.name == "[memory]":
                totals.append((event.start_time_ns, event.typed[1].total_allocated))
        self.nbytes = max(total for _, total in totals) - min(totals)[1]


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))


def test_no_rank_holds_more_than_its_shards_and_one_layer(tmp_path: Path) -> None:
    layer = 256 * 256 * 4
    torch.manual_seed(0)
    save_weights(layers(), tmp_path / "weights.safetensors")

    def peaks() -> tuple[int, int, int, bool]:
        found = []
        for weights in (None, tmp_path / "weights.safetensors"):
            driver, model = sharded(shard=nn.Linear, weights=weights), on_meta(layers)
            with Peak() as peak:
                driver.prepare(model)
            found.append(peak.nbytes)
        with Peak() as peak:
            load_weights(tmp_path / "weights.safetensors", model)
        torch.manual_seed(0)
        right = all(
            torch.equal(whole(one), other) for one, other in zip(model.parameters(), layers().parameters(), strict=True)
        )
        return found[0], found[1], peak.nbytes, right

    for drawn, read, again, right in on_ranks(peaks, 4):
        assert 4 * layer <= drawn <= 5.5 * layer  # its quarter of 16 layers, and one layer that is drawn
        assert 4 * layer <= read <= 4.5 * layer  # and a shard that is read
        assert again <= 4.5 * layer  # the shards that it puts into the model
        assert right


def test_weights_come_from_an_index_of_files_and_what_they_lack_is_initialized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {name: one.clone() for name, one in Net().state_dict().items() if name not in ("last.bias", "tied.weight")}
    values["other"] = torch.ones(1)
    names = [*values]
    index = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in {*index.values()}:
        save_file({name: values[name] for name in names if index[name] == file}, tmp_path / file)
    (path := tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))

    def read() -> dict[str, Tensor]:
        driver = sharded(weights=path)
        if not driver.is_main:
            return prepared(driver, on_meta())
        with pytest.warns(UserWarning, match=r"1 tensor (of the model|are not in the model)") as told:
            found = prepared(driver, on_meta())
        assert [str(one.message).split(": ")[-1] for one in told] == ["other", "last.bias"]
        return found

    for found in on_ranks(read):
        assert all(torch.equal(found[name], values[name]) for name in found.keys() & values.keys())
        assert 0 < found["last.bias"].abs() < 1
        assert torch.equal(found["rotary.cache"], torch.linspace(0, 1, 6))
    model = Net()
    lacking = ["tied.weight is missing", "last.bias is missing", "other is not in the model"]
    assert load_weights(path, model, strict=False) == lacking
    path.write_text("{}")
    with pytest.raises(CheckpointFormatError, match=r"no index of safetensors files \(KeyError"):
        load_weights(path, model)


def test_a_function_of_each_module_sets_what_its_method_does_not() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)  # needs the whole weight
        elif isinstance(module, Scale):
            module.weight.data.normal_()

    def made() -> dict[str, Tensor]:
        return prepared(sharded(shard=None, init=init), on_meta(lambda: nn.Sequential(nn.Linear(6, 6), Scale(), Rotary())))

    first, second = on_ranks(made)
    assert same(first, second)
    assert torch.allclose(first["0.weight"] @ first["0.weight"].T, torch.eye(6), atol=1e-5)
    assert first["1.weight"].std() > 0.3


def test_what_nothing_sets_is_refused_before_the_run_with_what_to_do(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "other.safetensors")

    def refusals() -> list[str]:
        def with_optimizer() -> Trainer:
            model = on_meta()
            return tiny_trainer(model=model, optimizer=momentum(model.parameters()), driver=sharded())

        def replacing(module: nn.Module) -> None:
            module.weight = nn.Parameter(torch.ones(3))

        def on_one_rank(module: nn.Module) -> None:
            if torch.distributed.get_rank() == 1:
                raise ValueError("no numbers here")
            init(module)

        def init(module: nn.Module) -> None:
            if isinstance(module, Scale):
                nn.init.constant_(module.weight, 2.0)

        model, other = on_meta(lambda: nn.Sequential(Scale(), Scale())), tmp_path / "other.safetensors"
        whole_model = partial(sharded, shard=None)
        wrong: list[tuple[str, Callable[[], object]]] = [
            (
                "nothing sets the values of 2 tensors: 0.weight of Scale, 1.weight of Scale. "
                "Give Scale a method reset_parameters()",
                lambda: tiny_trainer(model=model, driver=sharded()),
            ),
            ("nothing sets the values of 2 tensors", lambda: tiny_trainer(model=model, driver=ddp())),
            ("nothing sets the values of 2 tensors", lambda: whole_model(init=lambda module: None).prepare(model)),
            (
                "the initialization of Scale replaced 'weight' by torch.float32 [3] on cpu; expected torch.float32 [6] on cpu",
                lambda: whole_model(init=replacing).prepare(model),
            ),
            (
                "other.safetensors does not fit the model: 1 tensor differ in shape, such as 'weight', which has (2, 3) there",
                lambda: whole_model(weights=other).prepare(on_meta(lambda: nn.Linear(6, 2))),
            ),
            ("finds no file", lambda: whole_model(weights=tmp_path / "none.safetensors")),
            (
                "FsdpDriver(weights=) sets the tensors of a model on the device 'meta', and this model has none there",
                lambda: tiny_trainer(driver=whole_model(weights=other)),
            ),
            ("give a function of the parameters", with_optimizer),
        ]
        with pytest.raises(TypeError, match="init must be a function of a module"):
            whole_model(init="normal")
        with pytest.raises(Exception, match="no numbers here"):  # on the other rank as a DistributedError
            whole_model(init=on_one_rank).prepare(model)
        untold = [said for text, make in wrong if text not in (said := refusal(make))]
        assert all(one.is_meta for one in model.parameters())
        whole_model(init=init).prepare(model)
        assert [whole(one).tolist() for one in model.parameters()] == [[2.0] * 6] * 2
        return untold

    assert on_ranks(refusals) == [[], []]


def part(directory: Path, driver: str, steps: int, *, resume: Any = "auto", callbacks: Iterable[Any] = ()) -> Run:
    """Train a model that is built on meta until a step; continue if the directory holds a run."""
    return trainer(
        loader(96, generator=torch.Generator().manual_seed(7)), model=on_meta(), optimizer=adamw, driver=DRIVERS[driver](),
        directory=directory, max_steps=steps, callbacks=[ClipGradients(0.5), Ema(0.5), *callbacks, Checkpoint("100 steps")],
    ).fit(resume=resume)  # fmt: skip


State = list[dict[str, Tensor]]


def state_of(run: Run) -> State:
    """Return weights and buffers, the optimizer's state, and the average, all whole. Every rank must call this."""
    states = run.optimizers[0].state.values()
    optimizer = {f"{number}.{key}": whole(one).clone() for number, state in enumerate(states) for key, one in state.items()}
    average = hooks_of(run).callbacks["Ema"].state_dict()["average"]
    return [tensors_of(run.model), optimizer, {name: whole(one).clone() for name, one in average.items()}]


def test_offloaded_shards_train_and_resume_to_the_bits_of_those_that_are_not(tmp_path: Path) -> None:
    def trained(driver: str) -> list[State]:
        part(tmp_path / driver, driver, 2)
        return [state_of(part(tmp_path / driver, driver, 4)), state_of(part(tmp_path / f"{driver}-whole", driver, 4))]

    ranks = on_ranks(lambda: [*trained("fsdp"), *trained("offloaded")])
    for state in [state for rank in ranks for state in rank]:
        assert all(map(same, state, ranks[0][0]))


def test_a_run_goes_to_the_bit_from_one_layout_to_the_next_with_models_that_are_built_on_meta(tmp_path: Path) -> None:
    def leg(driver: str, steps: int) -> tuple[State, State]:
        """Continue the run; return its state when it was restored, and at the end."""
        restored: State = []
        see = on(Callback.on_load)(lambda run, _: restored.extend(state_of(run)))
        run = part(tmp_path, driver, steps, callbacks=[see])
        return restored, state_of(run)

    before: State = []
    for steps, (driver, ranks) in enumerate([("offloaded", 2), ("hsdp", 4), ("single", 1), ("offloaded", 3)], 1):
        everyone = [leg(driver, steps)] if driver == "single" else on_ranks(partial(leg, driver, steps), ranks)
        assert all(len(restored) == len(before) and all(map(same, restored, before)) for restored, _ in everyone), driver
        before = everyone[0][1]


def test_the_policy_sets_the_formats_of_inputs_and_outputs_and_the_weights_keep_theirs() -> None:
    half, single = torch.bfloat16, torch.float32

    def formats(given: torch.dtype, **options: Any) -> list[torch.dtype]:
        driver, model = sharded(shard=None, param_dtype="bf16", **options), on_meta(lambda: nn.Linear(3, 2))
        seen: list[torch.dtype] = []
        model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        output = driver.prepare(model)(torch.ones(4, 3, dtype=given))
        return [*seen, output.dtype, *{one.dtype for one in model.parameters()}]

    def all_formats() -> list[list[torch.dtype]]:
        with pytest.raises(RuntimeError, match="dtype"):  # of the inputs, which are not converted, and the weights
            formats(single, cast_forward_inputs=False)
        return [formats(single), formats(half, output_dtype="fp32", cast_forward_inputs=False)]

    assert on_ranks(all_formats) == [[[half, half, single], [half, single, single]]] * 2
