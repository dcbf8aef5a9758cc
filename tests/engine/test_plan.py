"""The plan: who is called when, in which order, with cadence and limits; before any run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from cadenza import Callback, Run, on
from cadenza.callbacks import ClipGradients, Evaluate, LogTraining
from cadenza.testing import tiny_loader, tiny_trainer

MOMENTS = """
on_setup
on_fit_start
  on_epoch_start
    on_fetch_start
    on_fetch_end
    on_step_start
      on_batch_start
        on_before_backward
        on_after_backward
      on_batch_end
      on_before_optimizer_step
      on_after_optimizer_step
      on_before_zero_grad
      on_after_zero_grad
    on_step_end
  on_epoch_end
on_fit_end
on_stop
on_exception
on_sanity_start
on_sanity_end
on_eval_start
  on_eval_batch_start
  on_eval_batch_end
on_eval_end
on_log
on_save
on_load
"""


class Sink(Callback):
    on_fault = "disable"

    def on_log(self, run: Run, record: object) -> None: ...


class PlanMoments(Callback, declares=True):
    def on_prune(self, run: Run) -> None: ...


def test_it_is_the_tree_of_all_moments() -> None:
    headline, *tree = str(tiny_trainer().plan()).splitlines()
    assert headline == "fit: 1 epoch, 5 batches an epoch, 5 steps, on cpu, in fp32"
    assert tree == MOMENTS.strip("\n").splitlines()


def test_it_names_the_listeners_in_order_with_cadence_and_limit() -> None:
    callbacks = [
        ClipGradients(1.0),
        Evaluate(tiny_loader(), every="2 steps", limit=3),
        LogTraining(every="3 steps"),
        Sink(),
        on(PlanMoments.on_prune)(lambda run: None),
        on(Callback.on_step_end, every=99)(print),
    ]
    trainer = tiny_trainer(callbacks=callbacks, epochs=2, accumulate=2, seed=4, directory="runs/never-made")
    lines = [line.split(maxsplit=1) for line in str(trainer.plan()).splitlines()]
    heard = {line[0]: line[1] for line in lines if len(line) == 2}
    assert (
        heard["fit:"]
        == "2 epochs, 5 batches an epoch, 6 steps of 2 batches, on cpu, in fp32, seed 4, "
        + f"into {Path('runs/never-made').absolute()}"
    )
    assert heard["on_before_optimizer_step"] == "ClipGradients"
    assert heard["on_step_end"] == "Evaluate (every 2 steps, 3 batches) > LogTraining (every 3 steps) > print (every 99 steps)"
    assert heard["run.fire(PlanMoments.on_prune)"] == "<lambda>"
    assert heard["!"] == "print (every 99 steps) never fires: the run ends after 6 steps"
    assert heard["a"] == "fault only disables: Sink"
    assert not trainer.directory or not trainer.directory.exists()


def test_it_starts_nothing_and_changes_nothing() -> None:
    happened: list[int] = []
    trainer = tiny_trainer(callbacks=[on(Callback.on_setup)(lambda run: happened.append(1))])
    assert str(trainer.plan()) == str(trainer.plan())
    assert happened == []


def test_it_doubts_a_loader_that_takes_samples_one_by_one_from_tensors_in_memory() -> None:
    tensors = TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1))

    def doubts(loader: Any) -> list[str]:
        return [line for line in str(tiny_trainer(loader=loader).plan()).splitlines() if line.startswith("!")]

    for data in (tensors, Subset(tensors, range(4))):
        (doubt,) = doubts(DataLoader(data, batch_size=2))
        assert (
            "samples one by one from tensors that are in memory: cadenza.loading.TensorBatches takes a batch at once" in doubt
        )
    assert doubts(tiny_loader()) == doubts(DataLoader(ConcatDataset([tensors]))) == []


def test_a_run_says_at_its_start_what_its_plan_doubts_each_once(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.zeros(8, 1), torch.zeros(8, 1)), batch_size=2)
    said: list[list[str]] = []
    look = on(Callback.on_fit_start)(lambda run: said.append(list(caplog.messages)))
    trainer = tiny_trainer(model=model, optimizer=torch.optim.AdamW(model.parameters()), loader=loader, callbacks=[look])
    doubts = [line[2:] for line in str(trainer.plan()).splitlines() if line.startswith("! ")]
    assert [doubt.split()[:3] for doubt in doubts] == [["AdamW", "could", "be"], ["the", "loader", "takes"]]
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        trainer.fit()
    assert said == [doubts]
    assert caplog.messages == doubts
