"""Folders of torch's distributed checkpoint: a run starts from one, and a checkpoint of Cadenza becomes one."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from cadenza import Callback, Run, export_weights, load_weights, on
from cadenza.callbacks import Checkpoint, Ema
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, CheckpointMismatchError
from cadenza.parallel import export_dcp, load_optimizer
from cadenza.testing import launch, tiny_loader, tiny_model, tiny_trainer
from tests.distributed.drivers import Block, blocks, sharded
from tests.distributed.parts import adamw, loader, network, squared_error, trainer

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def write(folder: Path, state: dict[str, Any]) -> Path:
    with in_one_process():
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


@contextmanager
def in_one_process() -> Iterator[None]:
    """Return a context in which torch does not warn that it reads or writes in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def trained(model: nn.Module, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a model by hand, as another program would."""
    optimizer = adamw(model.parameters())
    for batch in [*loader(shuffle=False)][:steps]:
        squared_error(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def of_torchtitan(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state as torchtitan saves it: the weights without a key, the optimizer flat, the position of the run."""
    state = {"step": torch.tensor(3), "ntokens_seen": torch.tensor(96)}
    return {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT), "train_state": state}


def of_lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state as Lightning's ModelParallelStrategy saves it: the model is the attribute ``model`` of its module."""
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"state_dict": weights, "optimizer_0": get_optimizer_state_dict(model, optimizer)}


def with_a_key(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(whole_state(model).items(), whole_state(other).items(), strict=True)
    return all(name == its and torch.equal(value, others) for (name, value), (its, others) in pairs)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()}


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [value for state in optimizer.state_dict()["state"].values() for _, value in sorted(state.items())]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def same_moments(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    found, others = moments(optimizer), moments(other)
    return len(found) == len(others) > 0 and all(map(torch.equal, found, others))


def fully_sharded(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, Block):
            fully_shard(part)
    fully_shard(model)
    return model


# -- in ----------------------------------------------------------------------------------------------


FORMS = [of_torchtitan, of_lightning, with_a_key]


@pytest.mark.parametrize("form", FORMS)
def test_weights_and_the_state_of_the_optimizer_are_found_in_the_forms_of_other_trainers(
    form: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model, optimizer = trained(blocks())
    folder = write(tmp_path / "theirs", form(model, optimizer))
    other = network_like(model)
    its = torch.optim.AdamW(other.parameters(), lr=0.5)
    assert load_weights(folder, other) == []
    load_optimizer(folder, other, its)
    assert same(other, model)
    assert same_moments(its, optimizer)
    assert its.param_groups[0]["lr"] == 0.5  # settings are those of the code


def network_like(model: nn.Module) -> nn.Module:
    made = blocks()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(7.0)
    assert not same(made, model)
    return made


def test_a_run_goes_on_with_weights_and_optimizer_as_the_loop_that_wrote_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", of_torchtitan(*trained(network(), steps=3)))
    whole, _ = trained(network(), steps=5)

    @on(Callback.on_fit_start)
    def start(run: Run) -> None:
        load_weights(folder, run.model)
        load_optimizer(folder, run.model, run.optimizers[0])

    batches = [*loader(shuffle=False)][3:5]
    run = trainer(batches, optimizer=adamw, callbacks=[start], max_epochs=1).fit()
    for own, hand in zip(run.model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own, hand, rtol=0, atol=1e-6)


def save_sharded(folder: Path) -> bool:
    """Save a sharded model from each rank, as torchtitan does."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model, optimizer = trained(fully_sharded(blocks()))
    save(of_torchtitan(model, optimizer), checkpoint_id=folder)
    fully_shard(other := network_like(model))  # other shards
    its = adamw(other.parameters())
    load_weights(folder, other)
    load_optimizer(folder, other, its)
    return same(other, model) and same_moments(its, optimizer)


def test_each_rank_reads_its_shards_of_what_the_ranks_of_a_sharded_model_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    assert launch(partial(save_sharded, folder)) == [True, True]
    assert len([*folder.glob("*.distcp")]) == 2
    model, optimizer = trained(blocks())
    other = network_like(model)
    its = adamw(other.parameters())
    load_weights(folder, other)
    load_optimizer(folder, other, its)
    for (name, value), hand in zip(other.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(value, hand, rtol=0, atol=1e-6, msg=name)
    assert len(moments(its)) == len(moments(optimizer))


def fit_by_lightning(folder: Path) -> dict[str, Tensor]:
    """Train and save a sharded model with Lightning."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def configure_model(self) -> None:
            assert self.device_mesh is not None
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            return squared_error(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model.parameters())

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    shown: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    theirs = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=2, enable_checkpointing=False, **shown
    )
    theirs.fit(module := Module(), loader())
    theirs.save_checkpoint(folder)
    return whole_state(module.model)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_lightning_wrote_is_read(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    state, _ = launch(partial(fit_by_lightning, tmp_path / "theirs.ckpt"))
    load_weights(tmp_path / "theirs.ckpt", model := network_of_zeros())
    load_optimizer(tmp_path / "theirs.ckpt", model, optimizer := adamw(model.parameters()))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [state["step"].item() for state in optimizer.state.values()] == [2, 2, 2, 2]


def network_of_zeros() -> nn.Module:
    model = network()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def materialized(folder: Path) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Block(0.0), Block(0.0), nn.Linear(8, 1))
    at_the_start: dict[str, Tensor] = {}

    @on(Callback.on_fit_start)
    def look(run: Run) -> None:
        at_the_start.update({name: value.clone() for name, value in whole_state(run.model).items()})

    trainer(model=model, driver=sharded(weights=folder), optimizer=adamw, callbacks=[look], max_epochs=1).fit()
    return at_the_start


def test_a_driver_gives_a_model_on_meta_the_weights_of_a_folder(tmp_path: Path) -> None:
    model, optimizer = trained(blocks())
    folder = write(tmp_path / "theirs", of_lightning(model, optimizer))
    for state in launch(partial(materialized, folder)):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_an_evaluation_uses_the_weights_of_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", {"model": {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])}})
    made = tiny_trainer()
    assert made.evaluate(tiny_loader(), which=folder)["eval/loss"] == 0
    with pytest.raises(CheckpointError, match=r"a file or a folder of weights, which holds no run to continue.*load_weights"):
        made.fit(resume=folder)


def test_tied_weights_are_found_under_each_of_their_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    weight = torch.arange(15.0).view(5, 3)
    for name in ("embedding.weight", "head.weight"):
        load_weights(write(tmp_path / name, {"model": {name: weight}}), model := Tied())
        assert torch.equal(model.head.weight, weight)
    other = {"embedding.weight": weight, "head.weight": -weight}
    with pytest.raises(CheckpointMismatchError, match="have other values, and the model ties them"):
        load_weights(write(tmp_path / "both", {"model": other}), Tied())


def test_one_key_precedes_the_names_of_the_model_and_else_the_error_lists_what_was_found(tmp_path: Path) -> None:
    states = {
        key: {"weight": torch.full((1, 1), value), "bias": torch.zeros(1)} for key, value in (("model", 1.0), ("ema", 2.0))
    }
    folder, model = write(tmp_path / "two", states), tiny_model()
    with pytest.raises(CheckpointMismatchError, match=r"under 2 keys: 'model', 'ema'. Choose one with weights=KEY"):
        load_weights(folder, model)
    assert model.weight.item() == 0.5
    assert [load_weights(folder, model, weights="ema"), model.weight.item()] == [[], 2]
    assert [load_weights(folder, model, weights="model"), model.weight.item()] == [[], 1]
    with pytest.raises(
        CheckpointMismatchError, match="no tensor under the key 'teacher' with a name of the model, such as bias"
    ):
        load_weights(folder, model, weights="teacher")
    with pytest.raises(CheckpointError, match=r"without which='best'"):
        load_weights(folder, model, which="best")


def test_names_are_mapped_and_what_is_missing_or_too_much_is_named(tmp_path: Path) -> None:
    theirs = {"kernel": torch.ones(1, 1), "offset": torch.ones(1), "scale": torch.ones(1)}
    folder, model = write(tmp_path / "theirs", {"params": theirs}), tiny_model()
    with pytest.raises(
        CheckpointMismatchError, match=r"It has 3 tensors: params.kernel, params.offset, params.scale. .*names=FUNC"
    ):
        load_weights(folder, model)

    def names(name: str) -> str:
        return name.replace("kernel", "weight").replace("offset", "bias")

    with pytest.raises(CheckpointMismatchError, match="It differs in 1: scale is not in the model"):
        load_weights(folder, model, names=names)
    assert load_weights(folder, model, names=names, strict=False) == ["scale is not in the model"]
    assert model.weight.item() == 1
    with pytest.raises(CheckpointMismatchError, match="It differs in 1: bias is missing"):
        load_weights(write(tmp_path / "half", {"weight": torch.ones(1, 1)}), model)
    with pytest.raises(ValueError, match="names= returns 1 names for 3 tensors"):
        load_weights(folder, model, names=lambda name: "weight")


def test_a_state_that_does_not_fit_the_optimizer_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = trained(network())
    folder = write(tmp_path / "theirs", of_torchtitan(model, optimizer))
    half = torch.optim.AdamW(model.parameters())
    half.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(CheckpointMismatchError, match="no state of 1 parameter of the optimizer: one outside of the model"):
        load_optimizer(folder, model, half)
    other = torch.optim.Adagrad(model.parameters())
    before = moments(other)
    with pytest.raises(CheckpointMismatchError, match=r"the field 'state.0.sum'.*Give the model and the class of optimizer"):
        load_optimizer(folder, model, other)
    assert all(map(torch.equal, before, moments(other)))
    wider = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Dropout(), nn.Linear(9, 1))
    with pytest.raises(CheckpointMismatchError, match=r"the field 'state.0.exp_avg' must be of \(9, 3\)"):
        load_optimizer(folder, wider, adamw(wider.parameters()))


def test_one_of_several_optimizers_of_the_same_parameters_is_chosen_by_its_key(tmp_path: Path) -> None:
    first, optimizer = trained(network(), steps=1)
    second, other = trained(network(), steps=2)
    states = {"optimizer_0": get_optimizer_state_dict(second, other), "optimizer_1": get_optimizer_state_dict(first, optimizer)}
    folder, model = write(tmp_path / "theirs", states), network()
    with pytest.raises(CheckpointMismatchError, match=r"'optimizer_0.state', 'optimizer_1.state'. Choose one with key=KEY"):
        load_optimizer(folder, model, adamw(model.parameters()))
    load_optimizer(folder, model, mine := adamw(model.parameters()), key="optimizer_1")
    assert same_moments(mine, optimizer)


# -- files of others ---------------------------------------------------------------------------------


class Hostile:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.victim),)


def rewritten(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the metadata of a folder, which this test trusts."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "theirs", {"model": tiny_model().state_dict(), "note": Path("x")})


@pytest.mark.parametrize("where", ["whole", "planner_data", "storage_data", "storage_meta"])
def test_nothing_in_hostile_metadata_is_executed(where: str, folder: Path, tmp_path: Path) -> None:
    hostile = Hostile(tmp_path / "made")
    rewritten(folder, lambda metadata: hostile if where == "whole" else setattr(metadata, where, {"x": hostile}))
    with pytest.raises(
        CheckpointFormatError, match=r"names posix.mkdir, which torch.distributed.checkpoint does not write there"
    ):
        load_weights(folder, tiny_model())
    assert not (tmp_path / "made").exists()


def test_a_name_that_a_terminal_would_obey_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", {"weight\x1b[2J": torch.ones(1, 1)})
    with pytest.raises(CheckpointFormatError) as caught:
        load_weights(folder, tiny_model())
    assert str(caught.value).isprintable()


NAMES = [
    b"cbuiltins\neval\n.",
    b"ctorch\nload\n.",
    b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.",
    b"cos\nsystem\n(S'x'\ntR.",
]


@pytest.mark.parametrize("content", NAMES)
def test_only_the_names_that_torch_writes_are_looked_up(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match=r"names \S+, which torch.distributed.checkpoint does not write"):
        load_weights(folder, tiny_model())


@pytest.mark.parametrize("content", [b"", b"text", b"N.", b"}.", b"\x80\x04K\x01."])
def test_other_content_is_an_error_that_says_so(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="does not have the format that torch"):
        load_weights(folder, tiny_model())


def test_a_pickled_object_of_an_optimizer_is_read_as_plain_values_only(tmp_path: Path) -> None:
    model = tiny_model()
    states = {f"state.{name}.step": Hostile(tmp_path / "made") for name in ("weight", "bias")}
    folder = write(tmp_path / "theirs", {"optimizer": states})
    (tmp_path / "made").rmdir() if (tmp_path / "made").exists() else None
    with pytest.raises(CheckpointDamagedError, match=r"must load with torch.load\(weights_only=True\)"):
        load_optimizer(folder, model, adamw(model.parameters()))
    assert not (tmp_path / "made").exists()


def first_storage(metadata: Any, **fields: Any) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == "model.weight")
    vars(metadata.storage_data[index]).update(fields)


def no_part(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].chunks.clear()


def two_parts(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].chunks *= 2


def outside(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size([9, 9])


def large(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 20, 1 << 20])


FALSE = {
    "parts of 'model.weight' hold 0 of 1": no_part,
    "parts of 'model.weight' hold 2 of 1": two_parts,
    "a part of 'model.weight' is outside of its shape": outside,
    "a part of 'model.weight' is larger than its bytes": large,
    "the file '../outside' is not in the folder": partial(first_storage, relative_path="../outside"),
    "the file '/etc/hostname' is not in the folder": partial(first_storage, relative_path="/etc/hostname"),
    "gone is missing. Copy the whole folder": partial(first_storage, relative_path="gone"),
    "bytes, and 'model.weight' ends at": partial(first_storage, length=1 << 40),
    "are no sizes": partial(first_storage, offset=-1),
    "cannot be read at 'model.weight'": partial(first_storage, offset=3),
}


@pytest.mark.parametrize(("said", "change"), FALSE.items(), ids=FALSE.keys())
def test_metadata_that_is_not_true_is_an_error_before_anything_changes(
    said: str, change: Callable[[Any], None], folder: Path
) -> None:
    rewritten(folder, change)
    model = tiny_model()
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, model)
    assert said in str(caught.value)
    assert model.weight.item() == 0.5


# -- out ---------------------------------------------------------------------------------------------


def checkpointed(directory: Path, **arguments: Any) -> Any:
    made = trainer(optimizer=adamw, directory=directory, callbacks=[Ema(0.5), Checkpoint("1 epoch")], max_epochs=1, **arguments)
    return made.fit()


def read_by_torch(folder: Path, model: nn.Module) -> torch.optim.Optimizer:
    """Load a folder with torch alone, as torchtitan does."""
    optimizer = adamw(model.parameters())
    state: dict[str, Any] = {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}
    with in_one_process():
        load(state, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())
    set_optimizer_state_dict(model, optimizer, state.pop("optimizer"), options=FLAT)
    model.load_state_dict(state)
    return optimizer


def read_on_ranks(folder: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    torch.distributed.init_process_group("gloo")
    optimizer = read_by_torch(folder, model := fully_sharded(blocks()))
    return whole_state(model), moments(optimizer)


def test_torch_reads_an_exported_checkpoint_into_a_plain_and_into_a_sharded_model(tmp_path: Path) -> None:
    run = checkpointed(tmp_path / "run", model=blocks())
    export_dcp(tmp_path / "run", folder := tmp_path / "dcp", optimizer=True)
    optimizer = read_by_torch(folder, model := network_like(run.model))
    assert same(model, run.model)
    assert same_moments(optimizer, run.optimizers[0])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for state, found in launch(partial(read_on_ranks, folder)):
        assert all(torch.equal(value, state[name]) for name, value in run.model.state_dict().items())
        assert all(map(torch.equal, found, moments(run.optimizers[0])))


def fit_sharded(directory: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    run = checkpointed(directory, model=blocks(), driver=sharded())
    return whole_state(run.model), moments(run.optimizers[0])


def test_a_checkpoint_of_sharded_ranks_is_exported_whole(tmp_path: Path) -> None:
    (state, found), _ = launch(partial(fit_sharded, tmp_path / "run"))
    export_dcp(tmp_path / "run", folder := tmp_path / "dcp", optimizer=True)
    optimizer = read_by_torch(folder, model := blocks())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, moments(optimizer), found))


def test_an_export_has_the_chosen_weights_and_key_and_no_other_files(tmp_path: Path) -> None:
    run = checkpointed(tmp_path / "run", model=network())
    export_dcp(tmp_path / "run", tmp_path / "dcp", weights="ema", key="state_dict")
    load_weights(tmp_path / "dcp", averaged := network())
    load_weights(tmp_path / "run", expected := network(), weights="ema")
    assert same(averaged, expected)
    assert not same(averaged, run.model)
    export_weights(tmp_path / "dcp", tmp_path / "file.safetensors")
    with pytest.raises(FileExistsError, match="holds files, and old parts would mix with new ones"):
        export_dcp(tmp_path / "run", tmp_path / "dcp")
