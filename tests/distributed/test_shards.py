"""Checkpoints to which each rank adds its part: whole or not there, exact, and read on any number of ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cadenza import Run, Trainer, export_weights, load_weights
from cadenza.callbacks import Checkpoint, Ema
from cadenza.checkpoint.store import Content, Store
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.layout import Listed
from cadenza.checkpoint.store.shards import Shard, Stored
from cadenza.checkpoint.store.tensor_files import Facts
from cadenza.commands.main import main as cadenza
from cadenza.drivers import DdpDriver, Driver, SingleDriver
from cadenza.drivers.agreeing import ALONE
from cadenza.drivers.sharding import all_laid_out, optimizer_laid_out
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError
from cadenza.hooks.dispatch import hooks_of
from cadenza.testing import launch
from tests.distributed.parts import loader, squared_error
from tests.distributed.test_fsdp import network, sharded, weights_of, whole


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trainer(directory: Path, steps: int, driver: Driver, **options: Any) -> Trainer:
    callbacks = [Checkpoint("3 steps", keep_last=None, **options), Ema(0.5)]
    return Trainer(
        network(dropout=0.3), adamw, loader(48), squared_error,
        max_steps=steps, seed=5, directory=directory, driver=driver, callbacks=callbacks, progress=False,
    )  # fmt: skip


def fit(directory: Path, steps: int, *, resume: bool = False, **options: Any) -> tuple[Tensor, Run]:
    one = trainer(directory, steps, sharded(), **options)
    run = one.fit(resume=resume)
    return weights_of(one), run


def store_in(directory: Path) -> Store:
    return Store(directory / "checkpoints")


@pytest.mark.parametrize("background", [True, False])
def test_a_run_continues_to_the_same_bits_on_as_many_ranks_with_dropout_and_adamw(tmp_path: Path, background: bool) -> None:
    def ema(directory: Path, steps: int, *, resume: bool = False) -> tuple[Tensor, Tensor]:
        weights, run = fit(directory, steps, resume=resume, background=background)
        average = hooks_of(run).callbacks["Ema"].state_dict()["average"]
        return weights, torch.cat([whole(value).flatten() for value in average.values()])

    expected = launch(lambda: ema(tmp_path / "whole", 8))
    launch(lambda: ema(tmp_path / "cut", 4))
    files = sorted(path.name for path in (tmp_path / "cut/checkpoints/step-00000004").iterdir())
    assert [name for name in files if "-of-" in name] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "rank-00002-of-00002.safetensors",
        "state-00001-of-00002.safetensors",
        "state-00002-of-00002.safetensors",
    ]
    for got, wanted in zip(launch(lambda: ema(tmp_path / "cut", 8, resume=True)), expected, strict=True):
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])


Tensors = dict[str, Tensor]


def passed_on(driver: Driver, source: Path, target: Path) -> tuple[Tensors, int]:
    """Read model and optimizer state, write them anew; return all tensors whole, and how many numbers this rank held."""
    prepared = driver.prepare(network())
    model, optimizer = driver.unwrap(prepared), adamw(prepared.parameters())
    store = Store(source)
    newest, _ = store.latest()
    assert newest is not None
    loaded = store.read(newest, lazily=True)
    model.load_state_dict(all_laid_out(loaded.model, model.state_dict()))
    optimizer.load_state_dict(optimizer_laid_out(loaded.state["optimizers"][0], list(prepared.parameters())))

    facts = {"step": 1, "exact": True, "reason": "passed on", "weights_only": False}
    content = Content.of(model.state_dict(), {"optimizers": [optimizer.state_dict()]}, facts)
    if driver.shards:
        Store(target).write_together(content, driver.aside())
    elif driver.is_main:
        Store(target).write(content)
    driver.barrier()
    states = {f"{i}.{key}": value for i, one in optimizer.state_dict()["state"].items() for key, value in one.items()}
    held = {**model.state_dict(), **states}
    own = sum(value.to_local().numel() if isinstance(value, DTensor) else value.numel() for value in held.values())
    return {name: whole(value).clone() for name, value in held.items()}, own


def ddp() -> Driver:
    return DdpDriver("cpu", timeout_s=100)


CHAIN: list[tuple[str, int, Callable[[], Driver]]] = [
    ("four", 4, sharded),
    ("two", 2, sharded),
    ("one", 1, lambda: SingleDriver("cpu")),
    ("three", 3, sharded),
    ("ddp", 2, ddp),
    ("again", 2, sharded),
]


def test_model_and_optimizer_state_are_read_on_any_number_of_ranks_sharded_or_not(tmp_path: Path) -> None:
    launch(lambda: fit(tmp_path / "run", 4)[0], 2)
    source, expected = tmp_path / "run/checkpoints", None
    for name, ranks, driver in CHAIN:
        place, target = source, tmp_path / name

        def pass_on(driver: Callable[[], Driver] = driver, place: Path = place, target: Path = target) -> tuple[Tensors, int]:
            return passed_on(driver(), place, target)

        results = [pass_on()] if name == "one" else launch(pass_on, ranks)
        for tensors, own in results:
            expected = expected or tensors
            assert {key: value.shape for key, value in tensors.items()} == {key: value.shape for key, value in expected.items()}
            assert all(torch.equal(value, expected[key]) for key, value in tensors.items())
            total = sum(value.numel() for value in tensors.values())
            assert own == total if name in ("one", "ddp") else own < 0.8 * total
        source = target


def test_torch_reads_the_parts_and_one_file_holds_the_consolidated_model(tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    weights, *_ = launch(lambda: fit(tmp_path, 3)[0], 4)
    model = network()
    load_weights(tmp_path, model)
    assert torch.equal(torch.cat([value.flatten() for value in model.state_dict().values()]), weights)

    def by_torch() -> Tensor:
        driver = sharded()
        held = driver.prepare(network(dropout=0.5)).state_dict()
        load(held, storage_reader=HuggingFaceStorageReader(str(tmp_path / "checkpoints/step-00000003")))
        return torch.cat([whole(value).flatten() for value in held.values()])

    assert all(torch.equal(read, weights) for read in launch(by_torch, 3))

    export_weights(tmp_path, tmp_path / "one.safetensors")
    cadenza(["checkpoint", "export", str(tmp_path), str(tmp_path / "two.safetensors")])
    cadenza(["checkpoint", "list", str(tmp_path)])
    cadenza(["checkpoint", "verify", str(tmp_path)])
    cadenza(["checkpoint", "show", str(tmp_path)])
    told = capsys.readouterr().out
    assert "step-00000003  ok" in told
    assert "8 tensors, 185 numbers" in told
    for file in ("one.safetensors", "two.safetensors"):
        exported = load_file(tmp_path / file)
        assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())


def test_a_rank_that_is_killed_while_it_writes_leaves_no_checkpoint_and_the_older_one_is_continued(tmp_path: Path) -> None:
    expected, *_ = launch(lambda: fit(tmp_path / "whole", 7)[0])

    def killed() -> None:
        driver, write = sharded(), LocalFiles.write_tensors

        def die(self: LocalFiles, path: str, *arguments: Any) -> Facts:
            facts = write(self, path, *arguments)
            if driver.rank == 1 and "step-00000006" in path and "state" in path:
                os.kill(os.getpid(), signal.SIGKILL)
            return facts

        setattr(LocalFiles, "write_tensors", die)  # noqa: B010  # in this process only
        trainer(tmp_path / "cut", 7, driver).fit()

    with pytest.raises(BaseExceptionGroup):
        launch(killed)
    store = store_in(tmp_path / "cut")
    assert [saved.name for saved in store.saved()] == ["step-00000003"]
    assert store.latest()[0] is not None
    again, *_ = launch(lambda: fit(tmp_path / "cut", 7, resume=True)[0])
    assert torch.equal(again, expected)
    assert not [path for path in (tmp_path / "cut/checkpoints").iterdir() if path.name.startswith(".t")]


def test_a_rank_that_cannot_write_is_named_and_nothing_is_committed_on_any_rank(tmp_path: Path) -> None:
    def full() -> tuple[list[str], list[str]]:
        driver, write = sharded(), LocalFiles.write_tensors

        def fail(self: LocalFiles, path: str, *arguments: Any) -> Facts:
            if driver.rank == 1 and "step-00000003" in path:
                raise OSError(28, "No space left on device")
            return write(self, path, *arguments)

        setattr(LocalFiles, "write_tensors", fail)  # noqa: B010  # in this process only
        run = trainer(tmp_path, 7, driver).fit()
        return [decision.why for decision in run.decisions if decision.what == "not saved"], sorted(
            path.name for path in (tmp_path / "checkpoints").glob("[.s]t*")
        )

    (main, names), (other, _) = launch(full)
    assert main == ["step 3: OSError('rank 1 could not write its shards: OSError: [Errno 28] No space left on device')"]
    assert other == ["step 3: OSError(28, 'No space left on device')"]
    assert names == ["step-00000006", "step-00000007"]


def test_after_an_error_on_one_rank_no_checkpoint_is_written_and_no_rank_waits_for_the_others(tmp_path: Path) -> None:
    def failing() -> None:
        from cadenza import Callback, on

        @on(Callback.on_step_end, at=4)
        def fail(run: Run) -> None:
            if run.driver.rank == 1:
                raise ArithmeticError("on one rank")

        one = trainer(tmp_path, 6, sharded())
        one.callbacks.append(fail)
        one.fit()

    with pytest.raises(BaseExceptionGroup, match="2 of 2") as raised:
        launch(failing)
    assert isinstance(raised.value.exceptions[0], ArithmeticError)
    assert [saved.name for saved in store_in(tmp_path).saved()] == ["step-00000003"]


def test_a_part_that_was_changed_or_is_missing_is_named(tmp_path: Path) -> None:
    launch(lambda: fit(tmp_path, 3)[0])
    store = store_in(tmp_path)
    saved = store.saved()[-1]
    part = tmp_path / "checkpoints" / saved.name / "state-00002-of-00002.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=r"state-00002-of-00002\.safetensors has changed since it was written"):
        store.verify(saved)
    part.unlink()
    with pytest.raises(CheckpointDamagedError, match=r"state-00002-of-00002\.safetensors is missing"):
        store.verify(saved)


@pytest.mark.parametrize("remote", [False, True])
def test_any_part_of_a_stored_tensor_is_read_and_one_that_is_not_whole_is_an_error(tmp_path: Path, remote: bool) -> None:
    if remote:
        pytest.importorskip("fsspec")
    store = Store(f"memory://{tmp_path.name}" if remote else tmp_path)
    numbers = torch.arange(20.0).reshape(5, 4)
    facts = {"step": 1, "exact": True, "reason": "a test", "weights_only": False, "finite": True}
    content = Content({}, {}, {}, facts, {"a": Shard(numbers, (5, 4), (0, 0))})
    model = store.read(store.write_together(content, ALONE), lazily=True).model
    assert torch.equal(model["a"].read(), numbers)
    assert torch.equal(model["a"].read((slice(1, 4), slice(2, 3))), numbers[1:4, 2:3])
    half = Stored(
        store.files, "a", (10, 4), torch.float32, Listed((*model["a"].parts.overlapping((slice(0, 5), slice(0, 4))),))
    )
    assert torch.equal(half.read((slice(0, 5), slice(0, 4))), numbers)
    with pytest.raises(CheckpointFormatError, match="the parts of 'a' hold 20 of 40 numbers"):
        half.read()


def test_a_checkpoint_of_one_process_keeps_the_format_that_older_versions_read(tmp_path: Path) -> None:
    trainer(tmp_path, 3, SingleDriver("cpu")).fit()
    manifest = store_in(tmp_path).verify(store_in(tmp_path).saved()[-1])
    assert manifest["format"] == 1
    assert sorted(manifest["files"]) == ["model.safetensors", "state.json", "state.safetensors"]
