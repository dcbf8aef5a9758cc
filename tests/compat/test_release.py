"""A model is free as soon as nothing refers to its trainer, its run and its callbacks, without a garbage collection.

The trainer of transformers frees its model as well. Those of Lightning and Keras keep it until a collection: `module.trainer`
and ``callback.model`` refer to it in a circle. The factory of NeMo keeps its last run.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.compat.accelerated import Trainer as AcceleratedTrainer
from cadenza.compat.fastnlp import Callback as FastNLPCallback
from cadenza.compat.lightning import validate
from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.transformers import trainer as transformers_trainer
from tests.compat.accelerated.parts import HERE, Noting, data, run_of
from tests.compat.fastnlp.toy import Error, live, toy_trainer
from tests.compat.lightning.home import Lit, Net, loader_of
from tests.compat.nemo.graphs import OldTrace, Trace, line, train, train_0_10, worst_of
from tests.compat.test_facades import OfKeras, OfLightning, OfTransformers, Regression
from tests.compat.transformers.parts import Texts, arguments, gpt2

lightning = pytest.importorskip("lightning", reason="a LightningModule is trained: pip install lightning")

Kept = tuple[nn.Module, Run]
Way = Callable[[Path], Kept]
CPU: dict[str, Any] = {"device": "cpu", "progress": False}


class Fails(Callback):
    """Raises an error in the fifth step."""

    def on_step_start(self, run: Run) -> None:
        if run.progress.step == 4:
            raise ArithmeticError


class Reads(FastNLPCallback):
    """A callback of fastNLP that reads the trainer."""

    def on_evaluate_end(self, trainer: Any, results: Any) -> None:
        self.seen = trainer.global_forward_batches, trainer.model_device


class Manual(Lit):
    """A LightningModule with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Transfers(Lit):
    """A LightningModule with hooks around its batches and its update, and a schedule by a logged value."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Data(lightning.LightningDataModule):  # type: ignore[name-defined, misc]
    def train_dataloader(self) -> Any:
        return loader_of(3)

    def val_dataloader(self) -> Any:
        return loader_of(2)


def natively(*callbacks: Any) -> Way:
    """Return a run of a native trainer with callbacks of other systems, and an evaluation after it."""

    def way(folder: Path) -> Kept:
        made = [one() for one in callbacks]
        trainer = Trainer(
            Regression(1, 1),
            lambda parameters: torch.optim.SGD(parameters, 0.1),
            DataLoader(data(5), 2),
            supervised(nn.functional.mse_loss),
            max_epochs=2,
            directory=folder,
            callbacks=[*made, Evaluate(DataLoader(data(3), 2)), Checkpoint()],
            **CPU,
        )
        with suppress(ArithmeticError):
            trainer.fit()
        run = trainer.run
        trainer.evaluate(DataLoader(data(3), 2))
        trainer.predict(DataLoader(data(3), 2))
        return trainer.model, run

    return way


def of_lightning(make: Callable[[], Any], data: Callable[[], Any] | None = None, *callbacks: Callable[[], Any]) -> Way:
    """Return a run of a LightningModule, a resume of it, and a validation."""

    def way(folder: Path) -> Kept:
        def trainer(epochs: int) -> Trainer:
            given = (loader_of(3), loader_of(2)) if data is None else data()
            own = [*(one() for one in callbacks), Checkpoint()]
            return Trainer.from_lightning(make(), given, max_epochs=epochs, directory=folder, callbacks=own, **CPU)

        trainer(1).fit()
        second = trainer(2)
        with suppress(ArithmeticError):
            second.fit(resume="auto")
        run = second.run
        validate(second)
        return second.model, run

    return way


def accelerated(*callbacks: Callable[[], Any]) -> Way:
    """Return a run of the trainer of pytorch-accelerated."""

    def way(folder: Path) -> Kept:
        model = Regression(1, 1)
        made = [one() for one in callbacks]
        trainer = AcceleratedTrainer(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), callbacks=made)
        loaders: dict[str, Any] = {"train_dataloader_kwargs": HERE, "eval_dataloader_kwargs": HERE}
        with suppress(ArithmeticError):
            trainer.train(data(5), 2, data(3), per_device_batch_size=2, **loaders)
        run = run_of(trainer)
        trainer.evaluate(data(3), dataloader_kwargs=HERE)
        return model, run

    return way


def fastnlp(*callbacks: Callable[[], Any], **given: Any) -> Way:
    """Return a run of the trainer of fastNLP."""

    def way(folder: Path) -> Kept:
        trainer = toy_trainer(callbacks=[one() for one in callbacks] or None, metrics={"error": Error()}, **given)
        with suppress(ArithmeticError):
            trainer.run()
        return trainer.model, live(trainer)

    return way


def nemo(folder: Path, *, old: bool) -> Kept:
    graph = line()
    worst, _ = worst_of(graph)
    worst.rename("worst")
    run = (train_0_10 if old else train)(graph, (OldTrace if old else Trace)(), num_epochs=2)
    NeuralModuleFactory.reset_default_factory()
    return graph.net, run


def of_transformers(*callbacks: Callable[[], Any]) -> Way:
    """Return a run of ``transformers.Trainer``'s arguments."""

    def way(folder: Path) -> Kept:
        args = arguments(folder, save_strategy="epoch", eval_strategy="epoch")
        trainer = transformers_trainer(gpt2(), args, Texts(), Texts(6), callbacks=[one() for one in callbacks])
        run = trainer.fit()
        return trainer.model, run

    return way


def own_step(trainer: Any, batch: Any) -> None:
    outputs = trainer.train_step(batch)
    trainer.backward(outputs)
    trainer.step()
    trainer.zero_grad()


WAYS: dict[str, Way] = {
    "Keras": natively(OfKeras),
    "Lightning": natively(OfLightning),
    "transformers": natively(OfTransformers),
    "the three together": natively(OfKeras, OfLightning, OfTransformers),
    "the three, with an error": natively(OfKeras, OfLightning, OfTransformers, Fails),
    "Keras's History": natively(lambda: pytest.importorskip("keras").callbacks.History()),
    "pytorch-accelerated in a native run": natively(Noting),
    "fastNLP in a native run": natively(Reads),
    "NeMo 0.11 in a native run": natively(Trace),
    "NeMo 0.10 in a native run": natively(OldTrace),
    "a LightningModule": of_lightning(Net),
    "a LightningModule with a callback": of_lightning(Lit, None, OfLightning),
    "a LightningModule with data": of_lightning(Transfers, Data),
    "manual optimization": of_lightning(Manual),
    "a LightningModule, with an error": of_lightning(Net, None, Fails),
    "the trainer of pytorch-accelerated": accelerated(),
    "the same with callbacks": accelerated(Noting, OfLightning, OfKeras, OfTransformers),
    "the same with an error": accelerated(Noting, Fails),
    "the trainer of fastNLP": fastnlp(),
    "the same with a callback": fastnlp(Reads),
    "fastNLP with an error": fastnlp(Reads, Fails),
    "a batch_step_fn": fastnlp(Reads, batch_step_fn=own_step),
    "NeMo 0.11": lambda folder: nemo(folder, old=False),
    "NeMo 0.10": lambda folder: nemo(folder, old=True),
    "the trainer of transformers": of_transformers(),
    "the trainer of transformers, with callbacks": of_transformers(OfTransformers, OfLightning),
}


@pytest.fixture
def _no_collection() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_model_and_run_are_free_without_a_garbage_collection(way: Way, tmp_path: Path) -> None:
    way(tmp_path / "first")  # modules that torch imports late hold the frames of their import
    gc.collect()
    gc.disable()
    held = [weakref.ref(one) for one in way(tmp_path / "second")]
    assert [one() for one in held] == [None, None]


def test_a_module_reads_its_trainer_when_nothing_else_refers_to_it() -> None:
    for make, steps in ((Lit, 6), (Manual, 6)):
        module = make()
        Trainer.from_lightning(module, (loader_of(3), loader_of(2)), max_epochs=2, **CPU).fit()
        gc.collect()
        trainer = module.trainer
        assert {"train_loss", "val_loss"} <= trainer.callback_metrics.keys()
        assert (trainer.global_step, trainer.current_epoch) == (steps, 2)
        with pytest.raises(ReferenceError, match="nothing refers to it"):
            trainer.model  # noqa: B018  # it is an error
        with pytest.raises(AttributeError, match="which a native run does not provide"):
            trainer.modell  # type: ignore[attr-defined]  # noqa: B018


def test_callbacks_of_keras_and_lightning_read_what_they_have_of_a_run_that_is_gone() -> None:
    keras = pytest.importorskip("keras")
    history, own, seen = keras.callbacks.History(), OfKeras(), Sees()
    model = Regression(1, 1)
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [history, own, seen], **CPU}
    loss = supervised(nn.functional.mse_loss)
    Trainer(model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data(5), 2), loss, **settings).fit()
    settings.clear()
    gc.collect()
    assert own.model.history is history
    assert len(history.history["loss"]) == 2
    assert float(own.model.optimizer.learning_rate) == pytest.approx(0.1)
    assert [weights.shape for weights in own.model.get_weights()] == [(1, 1), (1,)]
    assert own.model.stop_training is False
    assert float(seen.trainer.callback_metrics["train_loss"]) > 0


class Sees(lightning.Callback):  # type: ignore[name-defined, misc]
    """A callback of Lightning that keeps its trainer, and reads its metrics at the end."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.trainer = trainer
        assert trainer.callback_metrics
