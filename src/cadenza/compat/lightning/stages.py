"""``validation_step``, ``test_step`` and ``predict_step`` of a trained LightningModule, outside of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cadenza.checkpoint.catalogue import Which
from cadenza.compat.lightning.module import passes
from cadenza.compat.lightning.module.attached import Attached
from cadenza.compat.lightning.module.data import loaders_of
from cadenza.compat.lightning.module.logging import LogStart
from cadenza.compat.lightning.module.module_evaluation import HOOK_NAMES, ModuleEvaluation
from cadenza.compat.lightning.module.run_trainer import attach
from cadenza.engine.session import Session
from cadenza.errors import DataError
from cadenza.loading.evaluation import Evaluation
from cadenza.trainer import Trainer


def validate(
    trainer: Trainer,
    loaders: Any = None,
    *,
    limit: int | None = None,
    which: Which | None = None,
    weights: str | None = None,
) -> list[dict[str, float]]:
    """Run ``validation_step``; return for each loader the values that were logged. Every rank must call this.

    Args:
        trainer: A trainer of ``Trainer.from_lightning``.
        loaders: A loader, or several. None: those of the data, or of the module.
        limit: The largest number of batches of each loader.
        which: Take the weights of a checkpoint, as in `Trainer.evaluate`. None: the weights in memory.
        weights: ``"model"``, or the name of averaged weights such as ``"ema"``.

    Raises:
        DataError: There is no loader.
        TypeError: The trainer was not made by ``Trainer.from_lightning``, or the module has no such step.

    >>> import torch
    >>> from lightning import LightningModule
    >>> from torch.utils.data import DataLoader
    >>> class Squares(LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = torch.nn.Parameter(torch.ones(()))
    ...
    ...     def training_step(self, batch, batch_idx):
    ...         return (self.weight * batch).square().mean()
    ...
    ...     def validation_step(self, batch, batch_idx):
    ...         self.log("val_loss", self.training_step(batch, batch_idx))
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), 0.1)
    >>> loader = DataLoader(torch.ones(5), batch_size=2)
    >>> trainer = Trainer.from_lightning(Squares(), (loader, loader), max_epochs=1, progress=False)
    >>> validate(trainer)
    [{'val_loss': 1.0}]
    """
    return _run(trainer, "validate", loaders, limit, which, weights, passes.evaluate)


def test(
    trainer: Trainer,
    loaders: Any = None,  # noqa: PT028  # it is no test
    *,
    limit: int | None = None,  # noqa: PT028
    which: Which | None = None,  # noqa: PT028
    weights: str | None = None,  # noqa: PT028
) -> list[dict[str, float]]:
    """Run ``test_step``; return for each loader the values that were logged. Every rank must call this.

    The arguments and errors are those of `validate`.
    """
    return _run(trainer, "test", loaders, limit, which, weights, passes.evaluate)


def predict(
    trainer: Trainer,
    loaders: Any = None,
    *,
    limit: int | None = None,
    which: Which | None = None,
    weights: str | None = None,
) -> list[Any]:
    """Run ``predict_step`` and return its result for each batch, on the host. Every rank must call this.

    The batches of all ranks are in the order of the loader. Several loaders give a list each. The arguments and errors are
    those of `validate`.
    """
    return _run(trainer, "predict", loaders, limit, which, weights, passes.predict)


test.__test__ = False  # type: ignore[attr-defined]  # pytest does not collect it


def _run(
    trainer: Trainer,
    stage: str,
    given: Any,
    limit: int | None,
    which: Which | None,
    weights: str | None,
    act: Callable[[Session, ModuleEvaluation], list[Any]],
) -> list[Any]:
    attached = _attached(trainer, stage)
    loaders = loaders_of(attached)

    def run(session: Session, evaluation: Evaluation) -> list[Any]:
        assert isinstance(evaluation, ModuleEvaluation), "made below"
        attach(attached, session.run)
        attached.log.begin()
        return act(session, evaluation)

    loaders.setup(stage)
    loader = loaders.of(stage, given)
    if loader is None:
        raise DataError(
            f"{type(attached.module).__name__} has no loader for {stage}. Pass loaders=, or give the module or its data a "
            f"{loaders.method(stage)} method."
        )
    evaluation = ModuleEvaluation(attached, stage, loader, limit=limit)
    run.__name__ = stage
    return trainer._alone(run, evaluation, which, weights)


def _attached(trainer: Trainer, stage: str) -> Attached:
    attached = next((callback.attached for callback in trainer.callbacks if isinstance(callback, LogStart)), None)
    if attached is None:
        raise TypeError(
            f"{stage} needs a trainer of Trainer.from_lightning; got one of a {type(trainer.model).__name__}. Use "
            "trainer.evaluate(loader) or trainer.predict(loader)."
        )
    if stage != "predict" and not attached.overrides(f"{HOOK_NAMES[stage]}_step"):
        raise TypeError(
            f"{type(attached.module).__name__} has no {HOOK_NAMES[stage]}_step. Write one, or use trainer.evaluate."
        )
    return attached
