"""Callbacks in the style of published ones that write files or change the run: each has the effect that it has in Lightning."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.utilities import rank_zero_only

from cadenza import Callback
from cadenza.callbacks import Checkpoint
from tests.adapters.lightning.at_home import BreaksAt, Net, at_home, natively, same, trainer_of


class PeriodicCheckpoint(pl_callbacks.ModelCheckpoint):
    """Saves every n steps, and removes the file before."""

    def __init__(self, dirpath: Path, n: int = 4) -> None:
        super().__init__(dirpath)
        self.every = n

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if pl_module.global_step % self.every == 0:
            folder = Path(str(self.dirpath))
            trainer.save_checkpoint(folder / f"latest-{pl_module.global_step}.ckpt")
            (folder / f"latest-{pl_module.global_step - self.every}.ckpt").unlink(missing_ok=True)


class Shadow(pl_callbacks.Callback):
    """An average of the weights that a validation sees, with its state in checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.backup: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.shadow:
            self.shadow = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in pl_module.state_dict().items():
            self.shadow[name].mul_(0.9).add_(value, alpha=0.1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.backup = deepcopy(dict(pl_module.state_dict()))
        pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.backup)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.shadow)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.shadow = checkpoint["shadow"]


class GradualUnfreezing(pl_callbacks.Callback):
    """Freezes in ``on_fit_start``, and unfreezes one layer after each epoch."""

    def __init__(self, folder: Path) -> None:
        self.unfrozen = 0

    def apply(self, pl_module: Any) -> None:
        layers = [one for one in pl_module.backbone if list(one.parameters())]
        for number, layer in enumerate(reversed(layers)):
            layer.requires_grad_(number < self.unfrozen)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.apply(pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.unfrozen += 1
        self.apply(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"unfrozen": self.unfrozen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.unfrozen = state_dict["unfrozen"]


class WeightsByEpoch(pl_callbacks.Callback):
    """Writes the plain weights of each epoch, on the main process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @rank_zero_only
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(pl_module.state_dict(), self.folder / f"weights-{pl_module.current_epoch}.ckpt")


class CutWeights(pl_callbacks.Callback):
    """Changes the weights and the rates inside the training."""

    def __init__(self, folder: Path) -> None:
        self.cut = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-0.8, 0.8)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.cut += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + trainer.current_epoch)


class LargerSteps(pl_callbacks.Callback):
    """Accumulates from the second epoch on."""

    def __init__(self, folder: Path) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = 1 if trainer.current_epoch == 0 else 5


KINDS: list[Any] = [PeriodicCheckpoint, Shadow, GradualUnfreezing, WeightsByEpoch, CutWeights, LargerSteps]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_callback_has_its_effect_and_resumes(kind: Any, tmp_path: Path) -> None:
    for folder in ("home", "here", "parts"):
        (tmp_path / folder).mkdir()
    expected, module = Net(), Net()
    at_home(expected, [kind(tmp_path / "home")], tmp_path)
    natively(module, [kind(tmp_path / "here")])
    assert same(module, expected)
    written = sorted(one.name for one in (tmp_path / "here").glob("*.ckpt"))
    assert written == sorted(one.name for one in (tmp_path / "home").glob("*.ckpt"))

    def train(*others: Callback) -> Net:
        net, saves = Net(), Checkpoint("4 steps", on_exception=True)
        directory = tmp_path / "run"
        trainer_of(net, [*others, kind(tmp_path / "parts"), saves], directory=directory).fit(resume="auto")
        return net

    with pytest.raises(RuntimeError, match="broken"):
        train(BreaksAt(10 if kind is LargerSteps else 12))
    assert same(train(), module)
    assert sorted(one.name for one in (tmp_path / "parts").glob("*.ckpt")) == written
