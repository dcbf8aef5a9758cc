"""Checkpoints of Lightning are read for their weights, and nothing in them is executed."""

from __future__ import annotations

import argparse
import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.compat.lightning import checkpoint_facts, load_weights
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, CheckpointMismatchError
from tests.adapters.lightning.home import by_lightning

lightning = pytest.importorskip("lightning", reason="reads checkpoints that Lightning writes")


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
    def __init__(self, width: int = 2, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


def written(module: Module, folder: Path) -> Path:
    """Return a checkpoint that Lightning's trainer wrote after two steps."""
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    trainer = by_lightning(module, data, max_epochs=1, default_root_dir=folder)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def test_other_shapes_change_nothing(tmp_path: Path) -> None:
    path = written(Module(), tmp_path)
    module = Module(width=3)
    before = module.layer.weight.clone()
    with pytest.raises(CheckpointMismatchError, match=r"layer\.weight has shape"):
        load_weights(module, path)
    assert torch.equal(module.layer.weight, before)
    assert load_weights(module, path, strict=False) == ["layer.weight has shape (1, 2), the model's (1, 3)"]


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"names": ["a", None]}, {"names": ["a", None]}),
        (argparse.Namespace(rate=0.1), "<argparse.Namespace, not loaded>"),
        (
            {"optimizer": partial(torch.optim.Adam, lr=0.1), "at": [Path("x")]},
            {"optimizer": "<functools.partial, not loaded>", "at": ["<pathlib.PosixPath, not loaded>"]},
        ),
        (nn.functional.relu, "<torch.nn.functional.relu, not loaded>"),
    ],
)
def test_weights_and_facts_are_read_and_a_pickled_object_is_only_named(extra: Any, shown: Any, tmp_path: Path) -> None:
    path = written(trained := Module(extra=extra), tmp_path)
    assert load_weights(module := Module(), path) == []
    assert torch.equal(module.layer.weight, trained.layer.weight)
    facts = checkpoint_facts(path)
    assert (facts["epoch"], facts["global_step"]) == (1, 2)
    assert facts["hyper_parameters"] == {"width": 2, "extra": shown}


class Named(dict[str, Any]):
    """A class of which no object can be made without its code."""


def test_what_cannot_be_read_without_code_is_refused(tmp_path: Path) -> None:
    path = written(Module(extra=Named(rate=0.1)), tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"Named.*add_safe_globals.*save_hyperparameters"):
        load_weights(Module(), path)


def test_a_call_in_a_pickle_is_not_made(tmp_path: Path) -> None:
    torch.save({"state_dict": Module().state_dict(), "epoch": Hostile(tmp_path, eval)}, path := tmp_path / "hostile.ckpt")
    assert load_weights(Module(), path) == []
    assert checkpoint_facts(path)["epoch"] == "<builtins.eval, not loaded>"


class Hostile:
    def __init__(self, path: Path, call: Any = os.mkdir) -> None:
        self.path, self.call = path, call

    def __reduce__(self) -> Any:
        return self.call, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_hostile_code_is_not_executed(tmp_path: Path, zipped: bool) -> None:
    mark = tmp_path / "executed"
    content = {"state_dict": Module().state_dict(), "callbacks": Hostile(mark)}
    torch.save(content, path := tmp_path / "hostile.ckpt", _use_new_zipfile_serialization=zipped)
    for read in (checkpoint_facts, lambda one: load_weights(Module(), one)):
        with pytest.raises(CheckpointFormatError, match=r"posix\.mkdir"):
            read(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Hostile(mark)))  # the test would see it
    assert mark.exists()


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "sharded.ckpt").mkdir()
    torch.save(Module().state_dict(), tmp_path / "plain.pt")
    (tmp_path / "text.ckpt").write_text("epoch: 3")
    whole = written(Module(), tmp_path).read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    kinds: list[tuple[str, type[Exception], str]] = [
        ("none.ckpt", CheckpointError, "there is no checkpoint file"),
        ("sharded.ckpt", CheckpointFormatError, r"sharded checkpoint of Lightning.*consolidate_checkpoint"),
        ("plain.pt", CheckpointFormatError, r"expected a dict with 'state_dict'.*layer\.weight"),
        ("text.ckpt", CheckpointDamagedError, "no checkpoint"),
        ("cut.ckpt", CheckpointDamagedError, "damaged"),
    ]
    for name, kind, message in kinds:
        with pytest.raises(kind, match=message):
            checkpoint_facts(tmp_path / name)


def test_on_load_checkpoint_may_rename_weights(tmp_path: Path) -> None:
    class Renamed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = self.layer
            del self.layer

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name.replace("layer.", "head."): one for name, one in weights.items()}

    path = written(trained := Module(), tmp_path)
    assert load_weights(module := Renamed(), path) == []
    assert torch.equal(module.head.weight, trained.layer.weight)
