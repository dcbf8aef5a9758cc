"""Checkpoints to which each rank adds its part: whole or not there, exact, and read on any number of ranks."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cadenza import Callback, Run, Trainer, export_weights, load_weights, on
from cadenza.callbacks import Checkpoint, Ema
from cadenza.checkpoint import writer
from cadenza.checkpoint.store import Content, Store
from cadenza.checkpoint.store.files import Facts, LocalFiles
from cadenza.checkpoint.store.shards import Shard
from cadenza.commands.main import main as cadenza
from cadenza.drivers import Driver
from cadenza.drivers.consensus import ALONE
from cadenza.drivers.sharding import all_laid_out, optimizer_laid_out
from cadenza.errors import CheckpointFormatError, CheckpointLostError, DirectoryError, DistributedError
from cadenza.hooks.dispatch import hooks_of
from cadenza.testing import launch, tiny_trainer
from tests.checkpoint.blocked import Blocked
from tests.checkpoint.store.contents import latest
from tests.distributed.drivers import blocks, ddp, fsdp, sharded, single
from tests.distributed.parts import adamw, loader, network, trainer, vector, weights_of, whole
from tests.distributed.standing import on_ranks
from tests.waiting import until


def saving(directory: Path, steps: int, driver: Driver, **options: Any) -> Trainer:
    callbacks = [Checkpoint("3 steps", keep_last=None, **options), Ema(0.5)]
    arguments: dict[str, Any] = {"max_steps": steps, "max_epochs": None, "directory": directory, "callbacks": callbacks}
    return trainer(loader(48), model=blocks(0.3), optimizer=adamw, driver=driver, **arguments)


def fit(directory: Path, steps: int, *, resume: bool = False, **options: Any) -> tuple[Tensor, Run]:
    one = saving(directory, steps, sharded(), **options)
    run = one.fit(resume=resume)
    return weights_of(one), run


def store_in(directory: Path) -> Store:
    return Store(directory / "checkpoints")


@pytest.mark.parametrize("background", [True, False])
def test_a_run_continues_to_the_same_bits_on_as_many_ranks_with_dropout_and_adamw(tmp_path: Path, background: bool) -> None:
    def ema(directory: Path, steps: int, *, resume: bool = False) -> tuple[Tensor, Tensor]:
        weights, run = fit(directory, steps, resume=resume, background=background)
        average = hooks_of(run).callbacks["Ema"].state_dict()["average"]
        return weights, vector(average.values())

    expected = on_ranks(lambda: ema(tmp_path / "whole", 8))
    on_ranks(lambda: ema(tmp_path / "cut", 4))
    files = sorted(path.name for path in (tmp_path / "cut/checkpoints/step-00000004").iterdir())
    assert [name for name in files if "-of-" in name] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "rank-00002-of-00002.safetensors",
        "state-00001-of-00002.safetensors",
        "state-00002-of-00002.safetensors",
    ]
    for got, wanted in zip(on_ranks(lambda: ema(tmp_path / "cut", 8, resume=True)), expected, strict=True):
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])


def passed_on(make: Callable[[], Driver], source: Path, target: Path) -> tuple[dict[str, Tensor], int]:
    """Read model and optimizer state, write them anew; return all tensors whole, and how many numbers this rank held."""
    driver = make()
    prepared = driver.prepare(blocks())
    model, optimizer = driver.unwrap(prepared), adamw(prepared.parameters())
    store = Store(source)
    newest, _ = latest(store)
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


CHAIN: list[tuple[str, int, Callable[[], Driver]]] = [
    ("four", 4, sharded),
    ("two", 2, sharded),
    ("one", 1, single),
    ("three", 3, sharded),
    ("ddp", 2, ddp),
    ("again", 2, sharded),
]


def test_model_and_optimizer_state_are_read_on_any_number_of_ranks_sharded_or_not(tmp_path: Path) -> None:
    on_ranks(lambda: fit(tmp_path / "run", 4)[0], 2)
    source, expected = tmp_path / "run/checkpoints", None
    for name, ranks, driver in CHAIN:
        target = tmp_path / name
        pass_on = partial(passed_on, driver, source, target)
        results = [pass_on()] if name == "one" else on_ranks(pass_on, ranks)
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

    weights, *_ = on_ranks(lambda: fit(tmp_path, 3)[0], 4)
    model = blocks()
    load_weights(tmp_path, model)
    assert torch.equal(vector(model.state_dict().values()), weights)

    def by_torch() -> Tensor:
        driver = sharded()
        held = driver.prepare(blocks(0.5)).state_dict()
        load(held, storage_reader=HuggingFaceStorageReader(str(tmp_path / "checkpoints/step-00000003")))
        return vector(held.values())

    assert all(torch.equal(read, weights) for read in on_ranks(by_torch, 3))

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


def test_a_rank_that_cannot_write_is_named_and_nothing_is_committed_on_any_rank(tmp_path: Path) -> None:
    def full() -> tuple[list[str], list[str]]:
        driver, write = sharded(), LocalFiles.write_tensors

        def fail(self: LocalFiles, path: str, *arguments: Any, **named: Any) -> Facts:
            if driver.rank == 1 and "step-00000003" in path:
                raise OSError(28, "No space left on device")
            return write(self, path, *arguments, **named)

        setattr(LocalFiles, "write_tensors", fail)  # noqa: B010  # in this process only
        run = saving(tmp_path, 7, driver).fit()
        return [decision.why for decision in run.decisions if decision.what == "not saved"], sorted(
            path.name for path in (tmp_path / "checkpoints").glob("[.s]t*")
        )

    (main, names), (other, _) = launch(full)
    assert main == ["step 3: OSError('rank 1 could not write its shards: OSError: [Errno 28] No space left on device')"]
    assert other == ["step 3: OSError(28, 'No space left on device')"]
    assert names == ["step-00000006", "step-00000007"]


def test_after_an_error_on_one_rank_no_checkpoint_is_written_and_no_rank_waits_for_the_others(tmp_path: Path) -> None:
    def failing() -> None:
        @on(Callback.on_step_end, at=4)
        def fail(run: Run) -> None:
            if run.driver.rank == 1:
                raise ArithmeticError("on one rank")

        one = saving(tmp_path, 6, sharded())
        one.callbacks.append(fail)
        one.fit()

    with pytest.raises(BaseExceptionGroup, match="2 of 2") as raised:
        launch(failing)
    assert isinstance(raised.value.exceptions[0], ArithmeticError)
    assert [saved.name for saved in store_in(tmp_path).saved()] == ["step-00000003"]


@pytest.mark.parametrize("remote", [False, True])
def test_any_part_of_a_stored_tensor_is_read_and_one_that_is_larger_than_its_file_is_an_error(
    tmp_path: Path, remote: bool
) -> None:
    if remote:
        pytest.importorskip("fsspec")
    store = Store(f"memory://{tmp_path.name}" if remote else tmp_path)
    numbers = torch.arange(20.0).reshape(5, 4)
    facts = {"step": 1, "exact": True, "reason": "a test", "weights_only": False, "finite": True}
    content = Content({"a": Shard(numbers, (5, 4), (0, 0))}, {}, {}, facts)
    model = store.read(store.write_together(content, ALONE), lazily=True).model
    assert torch.equal(model["a"].read(), numbers)
    assert torch.equal(model["a"].read((slice(1, 4), slice(2, 3))), numbers[1:4, 2:3])
    larger = replace(model["a"], shape=(1000, 4))
    with pytest.raises(CheckpointFormatError, match=r"a part of the shape \(1000, 4\) is larger than its file"):
        larger.read()


def test_a_checkpoint_of_one_process_keeps_the_format_that_older_versions_read(tmp_path: Path) -> None:
    saving(tmp_path, 3, single()).fit()
    manifest = store_in(tmp_path).verify(store_in(tmp_path).saved()[-1])
    assert manifest["format"] == 1
    assert sorted(manifest["files"]) == ["model.safetensors", "state.json", "state.safetensors"]


# -- of an earlier version ------------------------------------------------------------------------------

WRITTEN = Path(__file__).parents[1] / "checkpoint" / "data" / "6ed4a36.tar.xz"
"""Commit 6ed4a36 wrote it with ``fitted(directory / name, DRIVERS[name], 4)`` on two ranks.

There, the states of all ranks are in ``state.json``, and ``shards.json`` lists each part.
"""
DRIVERS: dict[str, Callable[[], Driver]] = {"ddp": ddp, "fsdp": fsdp}


def fitted(directory: Path, make: Callable[[], Driver], steps: int) -> Tensor:
    """Return the weights of a run; dropout and batches are random, so each rank needs its own state."""
    arguments: dict[str, Any] = {"max_steps": steps, "max_epochs": None, "directory": directory}
    callbacks = [Checkpoint("2 steps", keep_last=None)]
    one = trainer(loader(48), model=network(0.3), optimizer=adamw, driver=make(), callbacks=callbacks, **arguments)
    one.fit(resume="auto")
    return weights_of(one)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_continues_at_a_checkpoint_of_two_ranks_that_an_earlier_version_wrote(written: Path, ranks: int) -> None:
    store = Store(written / "ddp" / "checkpoints")
    assert store.verify(store.saved()[-1])["format"] == 1
    got = on_ranks(partial(fitted, written / "ddp", ddp, 7), ranks)
    assert store.verify(store.saved()[-1])["format"] == 3
    if ranks == 2:
        expected, *_ = on_ranks(partial(fitted, written / "whole", ddp, 7))
        torch.testing.assert_close(got[0], expected, rtol=1e-5, atol=1e-6)  # another CPU may round differently


def test_shards_of_a_development_version_are_refused_by_name(written: Path) -> None:
    store = Store(written / "fsdp" / "checkpoints")
    with pytest.raises(CheckpointFormatError, match="it has format 2, and this version reads 1 and 3"):
        store.read(store.saved()[-1])


# -- what cannot be written -----------------------------------------------------------------------------


class Fault(Callback):
    """Puts a file in the place of the checkpoints after the steps in `begins`, and takes it away after those in `ends`."""

    def __init__(self, place: Path, begins: int, ends: int) -> None:
        self.place, self.begins, self.ends = place, begins, ends

    def on_step_end(self, run: Run) -> None:
        if run.is_main and run.progress.step == self.begins:
            self.blocked = Blocked(self.place)
        if run.progress.step == self.ends:
            if run.is_main:
                self.blocked.free()
            until(lambda: Store(self.place).saved())
        run.driver.barrier()


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path, driver: str) -> None:
    """Before the first step, while the training goes on, and at its end."""
    (tmp_path / "file").write_text("in the way")

    def fit(name: str, place: Path, begins: int, ends: int) -> tuple[str, list[str]]:
        saving = Checkpoint("2 steps", directory=place, background=False)
        fault = Fault(place, begins, ends)
        made, callbacks = DRIVERS[driver](), [fault, saving]
        one = tiny_trainer(driver=made, directory=tmp_path / name, callbacks=callbacks, steps=6, batches=20)
        try:
            return "finished", [decision.what for decision in one.fit().decisions]
        except (CheckpointLostError, DirectoryError, DistributedError) as error:
            return type(error).__name__, []

    def fits() -> list[tuple[str, list[str]]]:
        writer.PAUSES_S = writer.LAST_PAUSES_S = (0.05,)
        return [
            fit("never", tmp_path / "file" / "below", 0, 0),
            fit("later", tmp_path / "later", 1, 4),
            fit("at the end", tmp_path / "end", 5, 0),
        ]

    main, other = launch(fits)
    assert (main[0][0], other[0][0]) == ("DirectoryError", "DistributedError" if driver == "ddp" else "DirectoryError")
    assert [main[1][0], other[1][0]] == ["finished", "finished"]
    assert [what for what in main[1][1] if "saved" in what] == ["not saved", "saved", "saved", "saved"]
    assert [main[2][0], other[2][0]] == ["CheckpointLostError", "CheckpointLostError"]
    assert [saved.step for saved in Store(tmp_path / "later").saved()] == [4, 6]
