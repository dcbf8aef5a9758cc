"""``self.log`` in a native run: the names and values are those of Lightning's own trainer, on one process and on two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Run, Trainer, load_weights
from cadenza.callbacks import Best, Checkpoint, EarlyStopping, Evaluate
from cadenza.compat.lightning import validate
from cadenza.errors import AdapterError, MonitorError
from cadenza.testing import launch
from tests.compat.lightning.home import CPU, by_lightning

lightning = pytest.importorskip("lightning", reason="compares with Lightning's own trainer")
torchmetrics = pytest.importorskip("torchmetrics", reason="logs metrics of torchmetrics")
from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402

SIZES = (4, 4, 2, 4)  # of the batches: unequal, so that a mean of means is another number


def batches(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(size, 2, generator=draw) for size in sizes]
    return [(one, (one[:, 0] > 0.1).long()) for one in inputs]


def loader(rank: int | None = None, ranks: int = 2) -> Any:
    """Return the batches; with `rank` those that this rank gets of them in a native run."""
    own = batches() if rank is None else batches()[rank::ranks]
    return DataLoader(own, batch_size=None)  # type: ignore[arg-type]  # a list is a data set


class Logs(lightning.LightningModule):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
    """Logs with all kinds of arguments."""

    def __init__(self, *, sync: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.sync = sync
        self.train_acc = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.val_acc = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.collected: list[Tensor] = []

    def loss(self, batch: tuple[Tensor, Tensor], metric: Any) -> Tensor:
        outputs = self.layer(batch[0])
        metric(outputs, batch[1])
        return nn.functional.cross_entropy(outputs, batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, sync = self.loss(batch, self.train_acc), {"sync_dist": self.sync}
        self.log("loss", loss, **sync)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, **sync)
        self.log("epoch_only", loss, on_step=False, on_epoch=True, **sync)
        self.log("hidden", loss, on_step=True, on_epoch=True, logger=False, **sync)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=batch_idx + 1, **sync)
        for name, reduce_fx in {"sum": "sum", "lowest": "min", "highest": torch.max, "mean": torch.mean}.items():
            self.log(name, loss, on_step=True, on_epoch=True, reduce_fx=reduce_fx, **sync)
        self.log("graph", loss, on_step=False, on_epoch=True, enable_graph=True, **sync)
        self.log("number", batch_idx, on_step=True, on_epoch=True, **sync)
        self.log("acc", self.train_acc, on_step=True, on_epoch=True)
        self.log_dict({"first": loss, "second": 2 * loss}, on_step=False, on_epoch=True, prog_bar=True, **sync)
        if batch_idx == 1:
            self.log("once", loss, on_step=False, on_epoch=True, **sync)
        self.log("main", loss, on_step=False, on_epoch=True, rank_zero_only=True)
        return loss

    def on_train_epoch_start(self) -> None:
        self.log("started", 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after_step", self.layer.weight.detach().sum())

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, sync = self.loss(batch, self.val_acc), {"sync_dist": self.sync}
        self.log("val_loss", loss, prog_bar=True, **sync)
        self.log("val_both", loss, on_step=True, on_epoch=True, **sync)
        self.log("val_hidden", loss, logger=False, **sync)
        self.log("val_highest", loss, reduce_fx="max", **sync)
        self.log("val_acc", self.val_acc)
        self.collected.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_collected", torch.stack(self.collected).sum(), sync_dist=self.sync)
        self.collected.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def seen(trainer: Any) -> list[dict[str, float]]:
    return [numbers(one) for one in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)]


class Watch(lightning.Callback):  # type: ignore[misc,name-defined]
    """Keeps what callbacks see after each batch, after each validation and after each epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, *seen(trainer)))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("validation", *seen(trainer)))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("epoch", *seen(trainer)))


def at_home(module: Any, train: Any, val: Any, epochs: int = 2, **options: Any) -> Any:
    return by_lightning(module, train, val, max_epochs=epochs, **options)


def both_loaders() -> Any:
    return loader(), loader()


def native(module: Any, data: Any = None, epochs: int = 2, resume: Any = False, **options: Any) -> Run:
    data = both_loaders() if data is None else data
    return Trainer.from_lightning(module, data, max_epochs=epochs, **CPU, **options).fit(resume=resume)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_names_and_values_are_those_of_lightning(accumulate: int) -> None:
    watches = Watch(), Watch()
    home = at_home(Logs(), loader(), loader(), accumulate_grad_batches=accumulate, callbacks=[watches[0]])
    module = Logs()
    native(module, accumulate=accumulate, callbacks=[watches[1]])
    assert watches[1].seen == watches[0].seen
    assert seen(module.trainer) == seen(home)


class Hooked(Logs):
    """Logs in other hooks, and collections of metrics."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"accuracy": torchmetrics.Accuracy, "precision": torchmetrics.Precision, "recall": torchmetrics.Recall}
        several = torchmetrics.MetricCollection({name: kind("multiclass", num_classes=2) for name, kind in kinds.items()})
        self.several, self.val_several = several.clone(prefix="train_"), several.clone(prefix="val_")
        self.values = torchmetrics.CatMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self.layer(batch[0])
        self.log_dict(self.several(outputs, batch[1]))
        self.values.update(outputs.mean())
        return nn.functional.cross_entropy(outputs, batch[1])

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("zero_grad", 1.0)

    def on_after_backward(self) -> None:
        self.log("backward", 2.0, on_step=True, on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradient", sum(one.grad.norm() for one in self.parameters() if one.grad is not None))

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"{name}_epoch": value for name, value in self.several.compute().items()})
        self.log("values", self.values.compute().sum())
        self.several.reset()
        self.values.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.val_several.update(self.layer(batch[0]), batch[1])
        self.log_dict(self.val_several)
        return batch[0]

    def on_validation_epoch_end(self) -> None: ...


class LogsToo(lightning.Callback):  # type: ignore[misc,name-defined]  # lightning is imported dynamically
    """A callback that logs through the module."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("callback_step", batch_idx)
        pl_module.log("callback_both", batch_idx, on_step=True, on_epoch=True)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log("callback_val_batch", batch_idx)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("callback_val", 2.0)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("callback_epoch", 3.0)


def test_other_hooks_collections_and_callbacks_log_what_they_log_in_lightning(tmp_path: Path) -> None:
    home = at_home(Hooked(), loader(), loader(), callbacks=[LogsToo()])
    module, again = Hooked(), Hooked()
    keep = Checkpoint("1 step", keep_last=9)
    run = native(module, callbacks=[LogsToo(), keep], directory=tmp_path)
    assert seen(module.trainer) == seen(home)
    assert run.evaluations["val"].results["callback_val"] == 2.0
    native(again, callbacks=[LogsToo()], resume=tmp_path / "checkpoints" / "step-00000007")
    assert seen(again.trainer) == seen(home)


def test_an_evaluate_beside_it_adds_nothing_to_the_values_of_the_training() -> None:
    alone, beside = Logs(), Logs()
    native(alone)
    run = native(beside, callbacks=[Evaluate(loader(), "2 steps", name="train_set")])
    assert len(run.history["train_set/loss"]) == 4
    assert seen(beside.trainer) == seen(alone.trainer)  # also the metric, which training_step updates in each evaluation


def test_records_have_the_users_names() -> None:
    run = native(Logs())
    history = {name: [step for step, _ in run.history[name]] for name in run.history}
    assert history["loss"] == history["train_loss_step"] == history["after_step"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert history["train_loss_epoch"] == history["val_loss"] == history["val_both_epoch"] == history["epochs"] == [4, 8]
    assert not {"hidden", "hidden_step", "val_hidden", "train_loss", "val/loss"} & set(history)


def test_logged_names_are_monitors(tmp_path: Path) -> None:
    class Slow(Logs):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    stop, keep = EarlyStopping("val_hidden", "max", patience=1), Checkpoint(keep=Best("val_acc", mode="max"))
    run = native(Slow(), epochs=9, callbacks=[stop, keep], directory=tmp_path)
    assert run.why("stopped").startswith("stopped by EarlyStopping at epoch 2")
    assert run.optimizers[0].param_groups[0]["lr"] == 0.025
    assert load_weights(tmp_path, Slow(), which="best:val_acc") == []
    with pytest.raises(MonitorError, match=r"the evaluation 'val' reported only .*Did you mean 'val_loss'\?"):
        native(Logs(), callbacks=[EarlyStopping("val_los", "min")])


@pytest.mark.parametrize(
    ("hook", "calls", "error"),
    [
        ("training_step", [{"on_step": False, "on_epoch": False}], "is not useful"),
        (
            "training_step",
            [{"reduce_fx": torch.median}],
            r"Only `self.log\(..., reduce_fx=\{min,max,mean,sum\}\)` are supported",
        ),
        ("training_step", [{"name": "x/dataloader_idx_0"}], "should not contain information about `dataloader_idx`"),
        ("training_step", [{}, {"prog_bar": True}], "twice in `training_step`"),
        ("on_train_epoch_end", [{"on_step": True}], r"You can't `self.log\(on_step=True\)` inside"),
    ],
)
def test_wrong_arguments_raise_the_errors_of_lightning(hook: str, calls: list[dict[str, Any]], error: str) -> None:
    def log(self: Any, batch: Any = None, batch_idx: int = 0) -> None:
        for arguments in calls:
            self.log(**({"name": "x", "value": 1.0} | arguments))

    wrong = type("Wrong", (Logs,), {hook: log})
    for train in (lambda: at_home(wrong(), loader(), None), lambda: native(wrong(), loader())):
        with pytest.raises(MisconfigurationException, match=error):
            train()


def test_a_method_that_the_experiment_of_the_logger_lacks_is_named(tmp_path: Path) -> None:
    graph = type("Graph", (Logs,), {"training_step": lambda self, batch, batch_idx: self.logger.experiment.add_graph(self)})
    with pytest.raises(AdapterError, match=r"trainer\.logger\.experiment\.add_graph.*SummaryWriter of torch"):
        native(graph(), loader(), directory=tmp_path)


def test_epoch_means_are_the_same_after_a_resume_inside_an_epoch(tmp_path: Path) -> None:
    whole_module, module = Logs(), Logs()
    whole = native(whole_module, callbacks=[Checkpoint("2 steps", keep_last=9)], directory=tmp_path)
    resumed = native(module, resume=tmp_path / "checkpoints" / "step-00000006")
    assert resumed.progress.step == 8
    assert {name: resumed.history[name][-1] for name in whole.history} == {
        name: whole.history[name][-1] for name in whole.history
    }
    assert seen(module.trainer) == seen(whole_module.trainer)


class Constant(Logs):
    """Its weights do not change, so the values of an epoch do not depend on the order of the batches."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def two_ranks(folder: Path) -> Any:
    """Compare with Lightning's DDP; return the differences, and the results that all ranks must share."""
    torch.set_num_threads(1)
    differences, shared = list[Any](), list[Any]()
    for sync in (True, False):
        module = Logs(sync=sync)
        run = native(module)
        environment = lightning.fabric.plugins.environments.TorchElasticEnvironment()
        options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "plugins": [environment]}
        home = at_home(Logs(sync=sync), loader(run.driver.rank), loader(run.driver.rank), **options)
        for ours, theirs in zip(seen(module.trainer), seen(home), strict=True):
            pairs = {name: (ours.get(name), theirs.get(name)) for name in sorted(ours.keys() | theirs.keys())}
            differences += [(sync, name, pair) for name, pair in pairs.items() if pair[0] != pytest.approx(pair[1], rel=1e-6)]
        shared.append({name: run.history[name] for name in run.history})
        shared.append(run.evaluations["val"].results)
    whole = native(Logs(), directory=folder, callbacks=[Checkpoint("1 steps", keep_last=9)])
    native(Constant(), loader(), epochs=1, directory=folder / "constant", callbacks=[Checkpoint("1 step", keep_last=9)])
    again = Trainer.from_lightning(Logs(), both_loaders(), max_epochs=2, **CPU)
    resumed = again.fit(resume=folder / "checkpoints" / "step-00000003")
    means = [run.history["train_loss_epoch"][-1] for run in (whole, resumed)]
    return differences, shared, means, validate(again)


def test_two_processes_log_the_values_of_lightning(tmp_path: Path) -> None:
    first, second = launch(lambda: two_ranks(tmp_path), timeout_s=120)
    assert first[0] == second[0] == []
    assert first[1] == second[1]
    assert first[2][0] == first[2][1]
    assert first[3] == second[3]
    results = first[1][3]  # of the run without sync_dist: the results that monitors see are exact all the same
    assert results["val_loss"] == pytest.approx(first[1][1]["val_loss"])
    module, whole = Constant(), Constant()
    checkpoint = tmp_path / "constant" / "checkpoints" / "step-00000001"  # of two ranks
    run = native(module, loader(), epochs=1, resume=checkpoint)
    expected = native(whole, loader(), epochs=1).history
    assert run.history["train_loss_epoch"][-1][1] == pytest.approx(expected["train_loss_epoch"][-1][1])
    assert run.history["acc_epoch"][-1][1] == pytest.approx(expected["acc_epoch"][-1][1])
