"""Loaders, validation, test and predict of a LightningModule: hooks, values and batches are those of Lightning's trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, Ema
from cadenza.compat.lightning import predict, test, validate
from cadenza.errors import DataError
from cadenza.testing import launch
from tests.compat.lightning.home import CPU, by_lightning

lightning = pytest.importorskip("lightning", reason="compares with Lightning's own trainer")
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

STAGES = ("validation", "test", "predict")
POINTS = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")


def loader(*values: float, size: int = 2) -> Any:
    """Return a loader of batches of shape (size, 1)."""
    return DataLoader([torch.tensor([float(value)]) for value in values], batch_size=size)  # type: ignore[arg-type]


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
    """Keeps what is called, with the indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)
        self.events: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.events.append(("training_step", batch_idx))
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.events.append("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.events.append("on_train_epoch_end")

    def step(self, name: str, batch: Tensor, batch_idx: int, dataloader_idx: int) -> Tensor:
        self.events.append((name, batch_idx, dataloader_idx, self.training, torch.is_grad_enabled()))
        value: Tensor = self.layer(batch).mean()
        return value

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        value = self.step("validation_step", batch, batch_idx, dataloader_idx)
        self.log("val_loss", value)
        self.log(f"own_{dataloader_idx}", value, add_dataloader_idx=False)
        return value

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.step("test_step", batch, batch_idx, dataloader_idx), on_step=True, on_epoch=True)

    def on_test_epoch_end(self) -> None:
        self.events.append("on_test_epoch_end")
        self.log("test_end", 1.0)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.step("predict_step", batch, batch_idx, dataloader_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Watch(lightning.Callback):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
    """Keeps its hooks in the list of the module."""


def keeping(prefix: str, name: str) -> Callable[..., None]:
    def hook(self: Any, *arguments: Any) -> None:
        module = self if prefix == "module" else arguments[1]
        given = arguments if prefix == "module" else arguments[2:]
        module.events.append((prefix, name, [one.tolist() if isinstance(one, Tensor) else one for one in given]))

    return hook


for stage in STAGES:
    for point in POINTS:
        setattr(Watch, f"on_{stage}_{point}", keeping("callback", f"on_{stage}_{point}"))
        if f"on_{stage}_{point}" not in vars(Module):
            setattr(Module, f"on_{stage}_{point}", keeping("module", f"on_{stage}_{point}"))


class Data(lightning.LightningDataModule):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
    def __init__(self, several: bool = True) -> None:
        super().__init__()
        self.several, self.calls, self.position = several, list[str](), 0

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: Any) -> None:
        self.calls.append(f"setup {getattr(stage, 'value', stage)}")

    def teardown(self, stage: Any) -> None:
        self.calls.append(f"teardown {getattr(stage, 'value', stage)}")

    def train_dataloader(self) -> Any:
        return loader(*range(6))

    def val_dataloader(self) -> Any:
        return [loader(1, 2, 3), loader(4, 5, 6, 7)] if self.several else loader(1, 2, 3)

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def predict_dataloader(self) -> Any:
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def plain(results: list[Any]) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in one.items()} for one in results]


def flat(predictions: Any) -> list[Any]:
    return [one.tolist() if isinstance(one, Tensor) else flat(one) for one in predictions]


@pytest.mark.parametrize("several", [True, False])
def test_stages_call_and_return_what_lightning_does(several: bool) -> None:
    theirs, data = Module(), Data(several)
    home = by_lightning(theirs, data, max_epochs=1, callbacks=[Watch()])
    expected = [plain(home.validate(theirs, data, verbose=False)), plain(home.test(theirs, data, verbose=False))]
    expected.append(flat(home.predict(theirs, data)))

    ours, own = Module(), Data(several)
    trainer = Trainer.from_lightning(ours, own, max_epochs=1, callbacks=[Watch()], **CPU)
    trainer.fit()
    assert [validate(trainer), test(trainer), flat(predict(trainer))] == expected
    assert ours.events == theirs.events
    assert own.calls == [call for index, call in enumerate(data.calls) if call != "prepare_data" or index == 0]
    assert ours.training


def test_validation_inside_an_epoch_comes_after_the_hooks_of_the_batch() -> None:
    theirs, ours = Module(), Module()
    pair = loader(*range(10)), loader(1, 2, 3)
    by_lightning(theirs, *pair, max_epochs=1, val_check_interval=2, callbacks=[Watch()])
    Trainer.from_lightning(ours, pair, max_epochs=1, evaluate_every="2 steps", callbacks=[Watch()], **CPU).fit()
    assert ours.events == theirs.events


def test_a_sanity_check_calls_the_hooks_of_the_module_and_keeps_nothing() -> None:
    theirs, ours = Module(), Module()
    train, val = loader(*range(6)), [loader(1, 2, 3), loader(4, 5)]
    by_lightning(theirs, train, val, max_epochs=1, num_sanity_val_steps=1)
    data = {"train": train, "val": val}
    run = Trainer.from_lightning(ours, data, max_epochs=1, sanity_batches=1, **CPU).fit()
    assert ours.events == theirs.events
    assert [step for step, _ in run.history["val_loss/dataloader_idx_1"]] == [3]


def test_averaged_weights_and_checkpoints_can_be_evaluated(tmp_path: Path) -> None:
    module = Module()
    callbacks = [Ema(0.5), Checkpoint("1 epoch", keep_last=2)]
    trainer = Trainer.from_lightning(
        module, (loader(*range(6)), loader(1)), max_epochs=2, callbacks=callbacks, directory=tmp_path, **CPU
    )
    trainer.fit()
    now = validate(trainer)
    assert validate(trainer, weights="ema") != now == validate(trainer)
    assert validate(trainer, which="step-00000003") != now
    assert validate(trainer, loader(7)) != now


def test_a_stage_without_loader_or_step_says_what_to_write() -> None:
    class Bare(lightning.LightningModule):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

    trainer = Trainer.from_lightning(Module(), loader(1), max_epochs=1, **CPU)
    with pytest.raises(DataError, match=r"Module has no loader for test.*test_dataloader"):
        test(trainer)
    with pytest.raises(TypeError, match=r"Bare has no validation_step"):
        validate(Trainer.from_lightning(Bare(), loader(1), max_epochs=1, **CPU))
    with pytest.raises(DataError, match=r"Module needs a training loader"):
        Trainer.from_lightning(Module(), max_epochs=1, **CPU)
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"needs a trainer of Trainer\.from_lightning"):
        predict(
            Trainer(model, torch.optim.SGD(model.parameters(), 0.1), [torch.ones(1)], lambda model, batch: batch, max_steps=1)
        )


def listed(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda one: one.tolist() if isinstance(one, Tensor) else one, batch)


class Combined(Module):
    """Keeps the batches that it trains on."""

    def __init__(self, data: Callable[[], Any]) -> None:
        super().__init__()
        self.data = data

    def train_dataloader(self) -> Any:
        return self.data()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.events.append(listed(batch))
        parts = [one for one in torch.utils._pytree.tree_leaves(batch) if isinstance(one, Tensor)]
        loss: Tensor = self.layer(torch.cat(parts)).mean()
        return loss

    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_train_epoch_end(self) -> None: ...


def three() -> list[Any]:
    return [loader(1, 2, 3, 4, 5), loader(6, 7, 8), loader(9)]


COMBINED: dict[str, Callable[[], Any]] = {
    "list": three,
    "dict": lambda: dict(zip(("a", "b", "c/d"), three(), strict=True)),
    "nested": lambda: {"a": three()[0], "more": three()[1:]},
    "min_size": lambda: CombinedLoader(three()[:2], "min_size"),
    "max_size_cycle": lambda: CombinedLoader({"a": three()[0], "b": three()[1]}, "max_size_cycle"),
    "max_size": lambda: CombinedLoader(three(), "max_size"),
    "sequential": lambda: CombinedLoader(three(), "sequential"),
}


@pytest.mark.parametrize("kind", COMBINED)
def test_several_loaders_give_the_batches_of_lightning(kind: str, tmp_path: Path) -> None:
    theirs, ours, again = (Combined(COMBINED[kind]) for _ in range(3))
    if kind == "sequential":  # Lightning reads loaders in this mode in evaluations only
        theirs.events = [batch.tolist() for _ in range(2) for one in three() for batch in one]
    else:
        by_lightning(theirs, max_epochs=2)
    keep = Checkpoint("1 step", keep_last=99)
    Trainer.from_lightning(ours, max_epochs=2, callbacks=[keep], directory=tmp_path, **CPU).fit()
    assert ours.events == theirs.events
    resumed = Trainer.from_lightning(again, max_epochs=2, **CPU)
    checkpoint = tmp_path / "checkpoints" / "step-00000001"
    if kind == "max_size":
        with pytest.raises(DataError, match=r"replay"):
            resumed.fit(resume=checkpoint)
    resumed.fit(resume=checkpoint, replay=kind == "max_size")
    assert again.events == theirs.events[1:]
    assert torch.equal(again.layer.weight, ours.layer.weight)


class Validated(Combined):
    """Keeps the batches of its validation, and logs in the hooks around it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # one loader has no index
        self.events.append(listed(batch))
        self.log("index", batch_idx, batch_size=1)

    def on_validation_start(self) -> None:
        self.log("start", 1.0)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_end", batch_idx, on_step=True, on_epoch=True)

    def on_validation_end(self) -> None: ...


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_combined_validation_loaders_are_one_loader(mode: Any) -> None:
    def pair() -> Any:
        return CombinedLoader({"a": loader(1, 2, 3, 4, 5), "b": loader(6, 7, size=1)}, mode)

    theirs, ours = Validated(lambda: loader(1, 2)), Validated(lambda: loader(1, 2))
    home = by_lightning(theirs, None, pair(), max_epochs=1)
    Trainer.from_lightning(ours, {"train": loader(1, 2), "val": pair()}, max_epochs=1, **CPU).fit()
    ours_read, theirs_read = ([one for one in module.events if isinstance(one, dict)] for module in (ours, theirs))
    assert ours_read == theirs_read
    assert len(ours_read) >= 2
    assert plain([ours.trainer.callback_metrics]) == plain([home.callback_metrics])


def test_a_list_of_batches_is_one_loader() -> None:
    module = Combined(lambda: [torch.ones(2, 1), torch.zeros(2, 1)])
    Trainer.from_lightning(module, max_epochs=1, **CPU).fit()
    assert module.events == [[[1.0], [1.0]], [[0.0], [0.0]]]


def test_the_state_of_a_datamodule_is_in_the_checkpoints(tmp_path: Path) -> None:
    first, second = Data(), Data()
    trainer = Trainer.from_lightning(Module(), first, max_epochs=1, callbacks=[Checkpoint()], directory=tmp_path, **CPU)
    first.position = 7
    trainer.fit()
    assert first.trainer.is_global_zero
    Trainer.from_lightning(Module(), second, max_epochs=2, directory=tmp_path, **CPU).fit(resume="auto")
    assert second.position == 7


class Counts(Module):
    """Counts the samples of its validation in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = SumMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.samples(float(len(self.layer(batch))))
        self.log("samples", self.samples)


def on_two_ranks() -> Any:
    torch.set_num_threads(1)
    data, module = Data(), Module()
    trainer = Trainer.from_lightning(module, data, max_epochs=1, **CPU)
    trainer.fit()
    results = [validate(trainer), test(trainer), flat(predict(trainer)), flat(predict(trainer, loader(1, 2, 3, 4, 5)))]
    own = data.calls.count("prepare_data"), results, module.layer.weight.tolist(), module.layer.bias.tolist()
    sharded = Trainer.from_lightning(Counts(), (loader(1, 2, 3, 4), loader(1, 2, 3, 4, 5)), driver="fsdp", max_epochs=1, **CPU)
    assert sharded.fit().evaluations["val"].results["samples"] == 5  # the last batch is that of one rank
    return own


def test_two_processes_share_the_batches_and_return_the_same() -> None:
    first, second = launch(on_two_ranks, timeout_s=120)
    assert (first[0], second[0]) == (1, 0)
    assert first[1:] == second[1:]
    module = Module()
    with torch.no_grad():
        module.layer.weight.copy_(torch.tensor(first[2]))
        module.layer.bias.copy_(torch.tensor(first[3]))
    alone = Trainer.from_lightning(module, Data(), max_epochs=1, **CPU)
    expected = [validate(alone), test(alone)]
    for ours, theirs in zip(first[1][:2], expected, strict=True):
        assert [pytest.approx(one) for one in theirs] == ours
    assert first[1][2] == flat(predict(alone))
    assert first[1][3] == flat(predict(alone, loader(1, 2, 3, 4, 5)))
