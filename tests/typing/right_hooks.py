"""All of this must pass a strict type checker as it is written."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from cadenza import Callback, Evaluation, Hooks, Record, Run, Trainer, on, supervised
from cadenza.callbacks import EarlyStopping, Evaluate, LearningRate


class PruneMoments(Callback, declares=True):
    def on_prune(self, run: Run, ratio: float) -> None:
        """Called after the smallest weights were set to zero."""


class Everything(PruneMoments):
    after = (Evaluate,)
    on_fault = "disable"

    def on_batch_start(self, run: Run, batch: tuple[Tensor, Tensor]) -> None: ...

    def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
        outputs["loss"] = outputs["loss"] * 2

    def on_eval_batch_end(self, run: Run, evaluation: Evaluation, batch: Any, outputs: Mapping[str, Any]) -> None: ...

    def on_stop(self, running: Run, why: str) -> None: ...

    def on_exception(self, run: Run, error: BaseException) -> None: ...

    def on_log(self, run: Run, record: Record) -> None: ...

    def on_prune(self, run: Run, ratio: float) -> None: ...


@on(Callback.on_step_end, every=150)
def confusion(run: Run) -> None:
    run.log("train/lr", 0.1)
    run.log({"train/loss": torch.zeros(())})


@on(Callback.on_batch_end, when=lambda run: run.progress.step > 3)
def look(run: Run, batch: Any, outputs: MutableMapping[str, Any]) -> None: ...


@on(PruneMoments.on_prune)
def pruned(run: Run, ratio: float) -> None: ...


def fired(hooks: Hooks, run: Run) -> None:
    hooks.on_step_end(run)
    hooks.on_stop(run, "enough")
    run.fire(PruneMoments.on_prune, 0.3)
    run.fire(PruneMoments.on_prune, ratio=0.3)


def trained(model: nn.Module, loader: list[tuple[Tensor, Tensor]]) -> float:
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        loader,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=1,
        callbacks=[
            Everything(),
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)),
            EarlyStopping("eval/acc", mode="max"),
            confusion,
            look,
            pruned,
        ],
    )
    return trainer.fit().history["train/loss"][-1][1]
