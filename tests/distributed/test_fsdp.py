"""Weights in shards: each rank holds a part; training, evaluation and callbacks do what they do with DDP and in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from cadenza import Callback, Run, Trainer, load_weights, on, save_weights
from cadenza.callbacks import (
    BestWeights,
    ClipGradients,
    ConvertSyncBatchNorm,
    EarlyStopping,
    Ema,
    Evaluate,
    FindLearningRate,
    Freeze,
    Histograms,
    StopOnNonFinite,
    Summary,
    Swa,
)
from cadenza.drivers import Driver, FsdpDriver
from cadenza.errors import DistributedError
from cadenza.optim.optimizers import fused, notes
from cadenza.records.record import Histogram
from cadenza.testing import launch, tiny_trainer
from tests.distributed.drivers import Block, blocks, ddp, sharded, single
from tests.distributed.parts import loader, momentum, refusal, trainer, vector, weights_of, whole
from tests.distributed.standing import on_ranks


def trained(driver: Callable[[], Any], data: Any = None, **arguments: Any) -> Tensor:
    model = blocks(arguments.pop("dropout", 0.0))
    one = trainer(loader(48) if data is None else data, model=model, driver=driver(), **arguments)
    one.fit()
    return weights_of(one)


def local_numbers(tensors: Iterable[Tensor | None]) -> int:
    """Return how many numbers of these this rank holds; each must be in shards."""
    parts = [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]
    assert len(parts) == 8
    return sum(part.numel() for part in parts)


@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, {}), (4, {"replicas": 2})])
def test_fsdp_trains_to_the_weights_of_one_process_and_clips_by_the_same_norm(ranks: int, options: dict[str, Any]) -> None:
    clip = [ClipGradients(0.1)]
    alone = trained(single, accumulate=ranks, callbacks=clip)
    for weights in on_ranks(lambda: trained(partial(sharded, **options), callbacks=clip), ranks):
        assert torch.allclose(weights, alone, atol=1e-6)


def test_fsdp_trains_as_ddp_with_dropout_and_accumulation_and_a_short_last_group() -> None:
    both = {"dropout": 0.3, "accumulate": 3}
    (expected, got), (_, again) = on_ranks(lambda: (trained(ddp, **both), trained(sharded, **both)))
    assert torch.equal(got, again)
    assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(("options", "groups"), [({}, [range(4)]), ({"replicas": 2}, [range(2), range(2, 4)])])
def test_each_rank_of_a_group_holds_a_part_of_weights_gradients_and_optimizer_state(
    options: dict[str, int], groups: list[range]
) -> None:
    def parts() -> dict[str, int]:
        sizes: dict[str, int] = {}

        @on(Callback.on_before_optimizer_step, at=1)
        def measure(run: Run) -> None:
            sizes["gradients"] = local_numbers(parameter.grad for parameter in run.model.parameters())

        one = trainer(model=blocks(), driver=sharded(**options), callbacks=[measure], max_epochs=1)
        run = one.fit()
        assert [name for name, module in one.model.named_modules() if isinstance(module, FSDPModule)] == ["", "2", "3"]
        meshes = {parameter.device_mesh.shape for parameter in one.model.parameters() if isinstance(parameter, DTensor)}
        assert meshes == {(2, 2) if options else (4,)}
        sizes["weights"] = local_numbers(one.model.parameters())
        sizes["state"] = local_numbers(state["momentum_buffer"] for state in run.optimizers[0].state.values())
        return sizes

    total = sum(parameter.numel() for parameter in blocks().parameters())
    ranks = on_ranks(parts, 4)
    for what in ("weights", "gradients", "state"):
        for group in groups:
            assert sum(ranks[rank][what] for rank in group) == total  # nothing is held twice
            assert max(ranks[rank][what] for rank in group) < 2 * total / len(group)


def test_gradients_are_reduced_once_a_step_where_the_last_batch_is_sure_and_with_each_batch_where_it_may_be_skipped() -> None:
    class Noting(FsdpDriver):
        held = 0

        def no_sync(self, model: nn.Module) -> Any:
            self.held += 1
            return super().no_sync(model)

    def steps(*, skipping: bool, moment: Any = Callback.on_batch_start) -> tuple[int, Tensor]:
        @on(moment)
        def skip(run: Run, _: Any) -> None:
            if run.progress.batch == 3 and run.driver.rank == 1:
                run.skip_batch("on one rank alone, and the last of its group")

        driver = Noting("cpu", shard=Block)
        one = trainer(
            loader(32), model=blocks(), driver=driver, accumulate=2, callbacks=[skip] if skipping else [], max_epochs=1
        )
        one.fit()
        return driver.held, weights_of(one)

    assert [held for held, _ in on_ranks(partial(steps, skipping=False))] == [2, 2]
    for moment in (Callback.on_batch_start, Callback.on_before_backward):
        (held, first), (_, second) = on_ranks(partial(steps, skipping=True, moment=moment))
        assert held == 0
        assert torch.equal(first, second)


def test_a_loader_that_ends_before_its_length_is_an_error_on_all_ranks() -> None:
    class Boasting:
        """Says that it has more batches than it gives."""

        def __iter__(self) -> Any:
            return iter(list(loader(24, shuffle=False)))

        def __len__(self) -> int:
            return 8

    with pytest.raises(BaseExceptionGroup) as raised:
        launch(lambda: trained(sharded, Boasting(), accumulate=2, max_epochs=1))
    assert "fewer batches than its len" in str(raised.value.exceptions)


class Routed(nn.Module):
    """Takes the one way on one rank, the other way on the other, and a third never."""

    def __init__(self, ways: Iterator[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways, self.layers = ways, nn.ModuleList(nn.Linear(3, 1) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers[next(self.ways)](inputs)
        return result


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_that_use_different_weights_learn_as_one_process_that_uses_all(accumulate: int) -> None:
    def learned(driver: Callable[[], Any], ways: Iterable[int], accumulate: int) -> Tensor:
        one = trainer(loader(48), model=Routed(cycle(ways)), driver=driver(), accumulate=accumulate)
        one.fit()
        return weights_of(one)

    expected = learned(single, (0, 1), 2 * accumulate)
    for weights in on_ranks(lambda: learned(partial(sharded, shard=None), (int(os.environ["RANK"]),), accumulate)):
        assert torch.allclose(weights, expected, atol=1e-6)


def test_an_evaluation_has_the_statistics_of_the_main_process_and_weights_are_sharded_again_after_it() -> None:
    """Though the options leave them gathered after a forward pass."""

    def after() -> tuple[bool, dict[str, float]]:
        model = nn.Sequential(nn.BatchNorm1d(3), blocks())
        one = trainer(loader(48), model=model, driver=sharded(reshard_after_forward=False))
        one.fit()
        results = one.evaluate(loader(37, shuffle=False))
        return all(isinstance(parameter, DTensor) for parameter in one.model.parameters()), results

    first, second = on_ranks(after)
    assert first == second
    assert first[0]


def test_activation_checkpointing_gives_the_same_weights_and_keeps_the_names_of_the_model() -> None:
    def names_and_weights(**options: Any) -> tuple[list[str], Tensor, list[bool]]:
        passes: list[bool] = []
        model = blocks(0.3)
        model[2].register_forward_pre_hook(lambda *_: passes.append(True))
        one = trainer(loader(48), model=model, driver=sharded(**options))
        one.fit()
        return list(one.model.state_dict()), weights_of(one), passes

    (kept, again), _ = on_ranks(lambda: (names_and_weights(), names_and_weights(checkpoint_activations="[23]")))
    assert again[0] == kept[0] == list(blocks().state_dict())
    assert torch.equal(again[1], kept[1])
    assert len(again[2]) > len(kept[2])  # computed once more in each backward pass


def test_a_bf16_policy_computes_in_bf16_and_keeps_the_weights_in_fp32() -> None:
    def half() -> tuple[Tensor, set[torch.dtype]]:
        seen: set[torch.dtype] = set()
        model = blocks()
        model[2].register_forward_hook(lambda _, __, output: seen.add(output.dtype))
        one = trainer(loader(48), model=model, driver=sharded(param_dtype="bf16", reduce_dtype="fp32"))
        one.fit()
        return weights_of(one), seen

    expected = trained(single, accumulate=2)
    (weights, dtypes), _ = on_ranks(half)
    assert (dtypes, weights.dtype) == ({torch.bfloat16}, torch.float32)
    start = vector(blocks().parameters())
    assert (weights - expected).norm() < 0.05 * (start - expected).norm()
    assert not torch.allclose(weights, expected, atol=1e-6)


def test_the_main_process_gives_its_weights_to_all_though_each_made_others() -> None:
    def made() -> Tensor:
        driver = sharded(shard=None)
        torch.manual_seed(driver.rank)
        model = nn.Linear(3, 3)
        driver.prepare(model)
        return whole(model.weight.detach())

    torch.manual_seed(0)
    expected = nn.Linear(3, 3).weight.detach()
    assert all(torch.equal(weight, expected) for weight in on_ranks(made, 4))


def test_what_cannot_be_sharded_is_refused_with_what_to_do() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.last.weight = self.first.weight

    def refusals() -> list[str]:
        another = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))

        def optimizer_of_whole_weights() -> Trainer:
            model = blocks()
            return tiny_trainer(model=model, optimizer=momentum(model.parameters()), driver=sharded())

        wrong: dict[str, Callable[[], object]] = {
            "give a function of the parameters": optimizer_of_whole_weights,
            "expected 'bf16' or 'fp32' with FSDP": lambda: tiny_trainer(driver=sharded(), precision="fp16"),
            "param_dtype must be one of bf16, fp32, or None; got 'int8'": lambda: sharded(param_dtype="int8"),
            "no module of the model matches 'blok.*'": lambda: sharded(shard="blok.*").prepare(blocks()),
            "no module of the model matches <class 'torch.nn.modules.conv.Conv2d'>": (
                lambda: sharded(shard=nn.Conv2d).prepare(blocks())
            ),
            "the function chose no module of the model": lambda: sharded(shard=lambda *_: False).prepare(blocks()),
            "first.weight and last.weight are one weight": lambda: sharded(shard="first").prepare(Tied()),
            "the model is already sharded over ['(2, 1)'] ranks; expected (2,)": (
                lambda: sharded().prepare(cast("Any", fully_shard(blocks(), mesh=another)))
            ),
            "replicas must divide the number of ranks, which is 2; got 3": lambda: sharded(replicas=3),
        }
        return [said for text, make in wrong.items() if text not in (said := refusal(make))]

    assert on_ranks(refusals) == [[], []]


def test_fsdp_by_name_takes_the_model_in_one_piece_and_needs_a_launcher() -> None:
    def by_name() -> tuple[list[str], str]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        one = trainer(loader(48), model=blocks(), driver="fsdp", max_epochs=1)
        run = one.fit()
        return [name for name, module in one.model.named_modules() if isinstance(module, FSDPModule)], repr(run.driver)

    assert on_ranks(by_name) == [([""], f"FsdpDriver('cpu', rank {rank} of 2)") for rank in range(2)]
    with pytest.raises(DistributedError, match="FsdpDriver needs several processes, and this process was started alone"):
        tiny_trainer(driver="fsdp")


def test_a_model_without_weights_and_one_that_is_sharded_already_are_taken_as_they_are() -> None:
    def twice() -> tuple[bool, Tensor, Tensor]:
        driver = sharded()
        bare = nn.Tanh()
        same = driver.prepare(bare) is bare and not isinstance(bare, FSDPModule)
        one = trainer(loader(48), model=blocks(), driver=driver, max_epochs=1)
        one.fit()
        first = weights_of(one)
        another = trainer(loader(48), model=one.model, driver=sharded(), max_epochs=1)  # of the same model, with a new driver
        another.fit()
        return same, first, weights_of(another)

    model = blocks()
    trainer(loader(48), model=model, accumulate=2, max_epochs=1).fit()
    alone = trainer(loader(48), model=model, accumulate=2, max_epochs=1)
    alone.fit()
    for same, first, second in on_ranks(twice):
        assert same
        assert not torch.equal(first, second)
        assert torch.allclose(second, weights_of(alone), atol=1e-6)


# -- callbacks that touch weights and gradients, or say that they cannot

Seen = tuple[Tensor, dict[str, list[tuple[int, float]]], dict[str, Tensor]]


def run_with(callbacks: Sequence[Any], driver: Callable[[], Any] = single, **arguments: Any) -> Seen:
    """Return the weights at the end, the history, and the histograms that were logged, by name."""
    media: dict[str, Tensor] = {}

    @on(Callback.on_log)
    def keep(run: Run, record: Any) -> None:
        media.update({name: one.values for name, one in record.media.items() if isinstance(one, Histogram)})

    one = trainer(loader(48), model=blocks(), driver=driver(), callbacks=[*callbacks, keep], **arguments)
    run = one.fit()
    return weights_of(one), {name: run.history[name] for name in run.history.names}, media


def check_as_one_process(make: Callable[[], Sequence[Any]], **arguments: Any) -> list[Seen]:
    """Check that two ranks with shards end with the weights and results of one process; return what the ranks saw."""
    weights, history, _ = run_with(make(), accumulate=2, **arguments)
    ranks = on_ranks(lambda: run_with(make(), sharded, **arguments))
    for got, logged, _ in ranks:
        assert torch.allclose(got, weights, atol=1e-6)
        for name in history:
            assert dict(logged[name]) == pytest.approx(dict(history[name]), rel=1e-4), name
    return ranks


def averaged() -> list[Any]:
    judge = Evaluate(loader(37, shuffle=False), every="4 steps", weights="ema")
    return [Ema(0.6, use_at_end=True), Swa(0.5, "2 steps", use_at_end=False), judge]


@on(Callback.on_step_start)
def spoil_rate(run: Run) -> None:
    if run.progress.step == 7:
        for group in run.optimizers[0].param_groups:
            group["lr"] = 1.0


def best() -> list[Any]:
    stop = EarlyStopping("eval/loss", mode="min", patience=9, restore_best=True)
    return [Evaluate(loader(37, shuffle=False), every="3 steps"), BestWeights("eval/loss", "min"), stop, spoil_rate]


def clipped(**bound: Any) -> list[Any]:
    return [ClipGradients(**bound, log="norm", log_every="1 step")]


SOME = {"parameters": ["2.*", "4.*"]}
CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "values clipped": lambda: clipped(max_value=0.02, **SOME),
    "largest value clipped": lambda: clipped(max_norm=0.3, norm_type=float("inf"), **SOME),
    "norm of some clipped": lambda: clipped(max_norm=0.3, **SOME),
    "norm of all clipped": lambda: clipped(max_norm=0.5),
    "averages that judge and stay at the end": averaged,
    "the best weights come back at the end": best,
    "frozen layers": lambda: [Freeze(["0", "2"], until="4 steps")],
    "a learning rate is found": lambda: [FindLearningRate(start=1e-4, end=1.0, steps=12, apply=True)],
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_do_what_they_do_in_one_process(name: str) -> None:
    check_as_one_process(CALLBACKS[name])


def test_histograms_show_whole_weights_and_gradients_on_the_main_process_alone() -> None:
    (_, _, main), (_, _, other) = check_as_one_process(lambda: [Histograms("2 steps", gradients=True)])
    _, _, expected = run_with([Histograms("2 steps", gradients=True)], accumulate=2)
    assert not other
    assert main.keys() == expected.keys()
    assert all(torch.allclose(main[name].flatten(), values.flatten(), atol=1e-6) for name, values in expected.items())


def test_a_gradient_that_is_not_finite_in_one_shard_is_dropped_on_all_ranks_and_named_with_its_index() -> None:
    @on(Callback.on_before_optimizer_step, at=3)
    def spoil(run: Run) -> None:
        gradient = dict(run.model.named_parameters())["2.inner.weight"].grad
        if isinstance(gradient, DTensor):
            if run.driver.rank == 1:  # which holds rows 4 to 7
                gradient.to_local()[2, 1] = float("nan")
        elif gradient is not None:
            gradient[6, 1] = float("nan")

    why: list[str] = []
    note = on(Callback.on_fit_end)(lambda run: why.append(run.why("step skipped")))

    def told(driver: Callable[[], Any] = sharded, accumulate: int = 1) -> tuple[Tensor, str]:
        callbacks = [spoil, StopOnNonFinite(action="skip", gradients=True), note]
        weights, *_ = run_with(callbacks, driver, accumulate=accumulate)
        return weights, why[-1]

    expected, of_one = told(single, accumulate=2)
    (first, of_main), (_, of_other) = launch(told)
    assert torch.allclose(first, expected, atol=1e-6)
    assert "a gradient of another rank is not finite" in of_main
    assert "the gradient of '2.inner.weight' is nan, first at index (6, 1)" in of_other
    assert "first at index (6, 1)" in of_one


def test_a_summary_shows_the_users_classes(capfd: pytest.CaptureFixture[str]) -> None:
    launch(lambda: run_with([Summary()], sharded, max_epochs=1))
    told = capfd.readouterr().out
    assert "Sequential" in told
    assert "FSDP" not in told


def test_layers_cannot_be_replaced_when_they_are_sharded() -> None:
    def replacing() -> str:
        one = trainer(model=nn.Sequential(blocks(), nn.BatchNorm1d(1)), driver=sharded(), callbacks=[ConvertSyncBatchNorm()])
        return refusal(one.fit)

    assert all("convert_sync_batchnorm(model) before" in told for told in on_ranks(replacing))


def test_weights_of_a_sharded_model_are_saved_whole_and_loaded_in_parts(tmp_path: Path) -> None:
    def there_and_back() -> tuple[Tensor, Tensor]:
        one = trainer(loader(48), model=blocks(), driver=sharded(), max_epochs=1)
        one.fit()
        save_weights(one.model, tmp_path / "weights.safetensors")
        one.driver.barrier()
        another = sharded().prepare(blocks(0.1))
        load_weights(tmp_path / "weights.safetensors", another)
        return weights_of(one), vector(another.parameters())

    for saved, loaded in on_ranks(there_and_back, 3):
        assert torch.equal(saved, loaded)


def test_guests_that_write_whole_weights_from_one_process_say_that_they_cannot(tmp_path: Path) -> None:
    from cadenza.compat.fastnlp.saving import write_model
    from cadenza.compat.nemo.core import CheckpointCallback

    def refusals() -> list[str]:
        one = trainer(loader(48), model=blocks(), driver=sharded(), callbacks=[CheckpointCallback(str(tmp_path), step_freq=2)])
        told = []
        for act in (one.fit, lambda: write_model(one.model, tmp_path / "model", only_state_dict=True, save_fn=None)):
            try:
                act()
            except Exception as error:
                told.append(str(error))
        return told

    for told in launch(refusals):
        assert len(told) == 2
        assert "writes whole weights from one process" in told[0]
        assert "writes whole weights from one process" in told[1]


def test_a_hook_between_the_passes_sees_shards() -> None:
    def seen() -> set[bool]:
        kinds: set[bool] = set()

        def look(run: Run, _: Any) -> None:
            kinds.update(isinstance(parameter, DTensor) for parameter in run.model.parameters())

        run_with([on(moment)(look) for moment in (Callback.on_before_backward, Callback.on_batch_start)], sharded, max_epochs=1)
        return kinds

    assert on_ranks(seen) == [{True}, {True}]


@pytest.mark.parametrize("act", ["fit", "evaluate"])
def test_ddp_refuses_a_sharded_model_with_what_to_do(act: str) -> None:
    def told() -> str:
        model = blocks()
        trainer(model=model, driver=sharded(), max_steps=1).fit()
        other = trainer(model=model, driver=ddp())
        return refusal(other.fit if act == "fit" else partial(other.evaluate, loader(8)))

    for message in on_ranks(told):
        assert "DdpDriver needs the whole weights on each rank, and those of this model are shards" in message
        assert message.endswith("Use driver='fsdp', or build the model again and load its weights.")


# -- fused updates


def updated(kind: Any, driver: Callable[[], Driver], **given: Any) -> tuple[bool, str, Tensor]:
    """Train; return whether the update was fused, the line of the plan, and the weights."""
    one = trainer(loader(48), model=blocks(), optimizer=lambda held: kind(held, lr=0.01, **given), driver=driver())
    run = one.fit()
    return fused(run.optimizers[0]), notes(run.optimizers, one.model, own=False)[0], weights_of(one)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (3, {}), (4, {"replicas": 2}), (2, {"cpu_offload": True})], ids=str)
def test_updates_of_shards_are_fused_and_equal_those_of_each_weight(kind: Any, ranks: int, options: dict[str, Any]) -> None:
    def both() -> Any:
        return [updated(kind, partial(sharded, **options), **given) for given in ({}, {"foreach": False})]

    for (is_fused, told, weights), (plain, _, expected) in on_ranks(both, ranks):
        assert (is_fused, plain) == (True, False)
        assert told.startswith(f"optimizer: {kind.__name__}, built fused")
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)


def test_updates_that_torch_cannot_fuse_in_shards_say_why() -> None:
    def results() -> Any:
        sgd = updated(torch.optim.SGD, sharded, momentum=0.9)
        adagrad = updated(torch.optim.Adagrad, sharded)
        return [one[:2] for one in (sgd, adagrad)]

    why = "not fused: a parameter is a DTensor, of which torch fuses Adam and AdamW alone"
    assert on_ranks(results) == [[(False, f"optimizer: SGD, {why}"), (False, f"optimizer: Adagrad, {why}")]] * 2
