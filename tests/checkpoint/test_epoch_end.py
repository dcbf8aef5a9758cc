"""A checkpoint between the last batch of an epoch and its end continues with the same totals and bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, LearningRate
from cadenza.checkpoint.store import Store
from cadenza.hooks.moments import Moment
from cadenza.loading import TensorBatches
from cadenza.status.encoding import first_difference
from cadenza.testing import tiny_trainer
from tests.checkpoint.store.contents import latest

PLANS: list[Any] = [3, {0: 1, "4 steps": 2, "1 epoch": 5}, {"0.5 epoch": 3, "30 batches": 2, "50%": 4}]


def trainer(directory: Path, accumulate: Any, *callbacks: Callback) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    loader = TensorBatches(inputs, (inputs.sum(1) > 0).long(), batch_size=6, shuffle=True)
    rates = LearningRate(lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total))
    return Trainer(
        nn.Linear(4, 2),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        loader,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=4,
        accumulate=accumulate,
        seed=1,
        directory=directory,
        callbacks=[rates, Checkpoint("1 step", on_exception=False), *callbacks],
    )


@pytest.mark.parametrize("accumulate", PLANS, ids=str)
@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_cut_before_the_end_of_an_epoch_keeps_the_total_of_steps(tmp_path: Path, accumulate: Any, epoch: int) -> None:
    whole = trainer(tmp_path / "whole", accumulate)
    steps = whole.fit().progress.step

    @on(Callback.on_epoch_end, at=epoch)
    def cut(run: Run) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", accumulate, cut).fit()
    totals = []
    look = on(Callback.on_fit_start)(lambda run: totals.append(run.progress.total("step")))
    again = trainer(tmp_path / "cut", accumulate, look)
    assert again.fit(resume="auto").progress.step == steps
    assert totals == [steps]
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


# -- runs that a limit ends inside an epoch --------------------------------------------------------


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Ten samples; a loader of them does not know how many."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(torch.arange(20.0).reshape(10, 2, 1).unbind())  # type: ignore[arg-type]


class Epochs(Callback):
    """Counts in its state how often an epoch ended, and logs it."""

    def __init__(self) -> None:
        self.ended = 0

    def on_epoch_end(self, run: Run) -> None:
        self.ended += 1
        run.log("ended", self.ended)

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ended = state["ended"]


def limited(directory: Path, *callbacks: Callback, every: str = "100 steps", stream: bool = False, **arguments: Any) -> Trainer:
    loader = DataLoader(Stream(), 2) if stream else None
    due = on(Callback.on_epoch_end, every="3 steps")(lambda run: run.log("due", run.progress.step))
    saves = Checkpoint(every, background=False)
    return tiny_trainer(loader=loader, directory=directory, seed=1, callbacks=[Epochs(), due, saves, *callbacks], **arguments)


def preempting(moment: Moment, time: int) -> Callback:
    """Send the signal at the n-th time of the moment."""
    times = count(1)

    @on(moment)
    def preempt(run: Run) -> None:
        if next(times) == time:
            signal.raise_signal(signal.SIGTERM)

    return preempt


def tokens(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[0])


def last_state(directory: Path) -> dict[str, Any]:
    """Return all that the last checkpoint of a run holds, but times and the state of the saves."""
    store = Store(directory / "checkpoints")
    newest, _ = latest(store)
    assert newest is not None
    loaded = store.read(newest)
    state = {name: part for name, part in loaded.state.items() if name not in ("offsets", "environment", "given")}
    state["callbacks"].pop("Checkpoint", None)
    state["rows"].pop("times")
    return {"step": newest.step, "model": loaded.model, "state": state, "exact": loaded.manifest["exact"]}


RUNS: dict[str, dict[str, Any]] = {
    "inside an epoch": {"steps": 7},
    "with a save in the last step": {"steps": 7, "every": "1 step"},
    "after the last batch of a stream": {"steps": 5, "stream": True},
    "after a short step of a stream": {"steps": 5, "stream": True, "accumulate": 2},
    "at the end of an epoch": {"epochs": 2},
}
MOMENTS = [Callback.on_epoch_start, Callback.on_step_end, Callback.on_epoch_end]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize("name", RUNS)
def test_a_signal_at_the_end_of_an_epoch_leaves_the_last_checkpoint_of_a_run_that_went_on(
    tmp_path: Path, name: str, moment: Moment
) -> None:
    case = RUNS[name]
    limited(tmp_path / "whole", **case).fit()
    whole, again = last_state(tmp_path / "whole"), case.get("stream", False)
    for time in (1, 2, 3, 5, 7):
        directory = tmp_path / f"killed {time}"
        with suppress(SystemExit):
            limited(directory, preempting(moment, time), **case).fit()
        limited(directory, **case).fit(resume="auto", replay=again)
        assert first_difference(last_state(directory), whole) is None, time


@pytest.mark.parametrize(
    "end", [{"steps": 7}, {"max_tokens": 14, "tokens": tokens}, {"epochs": 1}], ids=lambda end: next(iter(end))
)
@pytest.mark.parametrize("every", ["1 step", "100 steps"])
def test_a_longer_run_ends_the_epoch_that_a_limit_cut_once(tmp_path: Path, end: dict[str, Any], every: str) -> None:
    longer = {name: None for name in end if name != "tokens"} | {"epochs": 3}
    limited(tmp_path / "whole", **{**end, **longer}, every=every).fit()
    limited(tmp_path / "cut", **end, every=every).fit()
    run = limited(tmp_path / "cut", **{**end, **longer}, every=every).fit(resume="auto")
    assert run.history["ended"] == [(5, 1), (10, 2), (15, 3)]
    assert first_difference(last_state(tmp_path / "cut"), last_state(tmp_path / "whole")) is None


def test_an_error_at_the_end_of_a_cut_epoch_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    @on(Callback.on_epoch_end, at="7 steps")
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    limited(tmp_path / "whole", steps=7).fit()
    with pytest.raises(ZeroDivisionError):
        limited(tmp_path / "failed", fail, steps=7).fit()
    limited(tmp_path / "failed", steps=7).fit(resume="auto")
    assert first_difference(last_state(tmp_path / "failed"), last_state(tmp_path / "whole")) is None


@pytest.mark.parametrize("every", ["1 step", "100 steps"])
def test_a_run_that_is_over_has_the_record_of_the_end_of_its_cut_epoch(tmp_path: Path, every: str) -> None:
    ended = limited(tmp_path, steps=7, every=every).fit().history["ended"]
    assert limited(tmp_path, steps=7, every=every).fit(resume="auto").history["ended"] == ended == [(5, 1), (7, 2)]
