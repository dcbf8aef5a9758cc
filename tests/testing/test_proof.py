"""`prove_resume` finds mistakes, and names the first thing that differs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run, Trainer, on
from cadenza.testing import prove_resume, tiny_loader, tiny_trainer
from cadenza.testing.launcher import FreshProcesses


def trainer_with(*callbacks: Callback, **arguments: Any) -> Callable[[Path], Trainer]:
    return lambda directory: tiny_trainer(callbacks=callbacks, directory=directory, epochs=2, seed=1, **arguments)


class Forgetful(Callback):
    """Halves the learning rate at every second call, and saves nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def on_step_end(self, run: Run) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            run.optimizers[0].param_groups[0]["lr"] /= 2


class Remembering(Forgetful):
    """Saves it."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]


class OwnGenerator(Dataset[tuple[Tensor, Tensor]]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.generator.random()]), torch.tensor([1.0])


class Counting(Callback):
    """Logs how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def on_step_end(self, run: Run) -> None:
        self.calls += 1
        run.log("calls", self.calls)


class Writing(Counting):
    """Keeps the count in ``run.state``, under a key that it sets anew in each process."""

    def on_fit_start(self, run: Run) -> None:
        run.state["calls"] = 0

    def on_step_end(self, run: Run) -> None:
        run.state["calls"] += 1


class Late(Callback):
    """Loses its count at the second resume only: it saves what it counted since the last one."""

    def __init__(self) -> None:
        self.calls = self.earlier = 0

    def on_step_end(self, run: Run) -> None:
        self.calls += 1
        run.optimizers[0].param_groups[0]["lr"] = 0.1 / (self.earlier + self.calls)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.earlier = state["calls"]


class CountingEpochs(Callback):
    """Counts the starts of epochs, in an attribute that is saved."""

    starts = 0

    def on_epoch_start(self, run: Run) -> None:
        self.starts += 1

    def state_dict(self) -> dict[str, Any]:
        return {"starts": self.starts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.starts = state["starts"]


class Clock(Callback):
    """Logs values that depend on a clock."""

    def on_step_end(self, run: Run) -> None:
        run.log({"time/step_s": random.SystemRandom().random(), "my/clock": random.SystemRandom().random()})


@on(Callback.on_step_end)
def ends_an_epoch_of_a_first_part(run: Run) -> None:
    if run.progress.origin.step == 0 and run.progress.step == 8:
        run.end_epoch("only in a run that was not continued")


@on(Callback.on_step_start)
def breaks_after_step_7(run: Run) -> None:
    if run.progress.origin.step == 7:
        run.optimizers[0].param_groups[0]["lr"] = 0.0


@on(Callback.on_fit_start)
def draws(run: Run) -> None:
    run.print(f"{torch.rand(())} {random.random()}")


AGAIN = r"cut after step 3 differs.*It was cut again after step 7.*The first value that moved is"
STARTS = (
    r"The first value that moved is callbacks\.CountingEpochs\.starts, at step 4 \(1 in the whole run, 2 in the other\)"
    r".*Hooks that ran again.*on_epoch_start of CountingEpochs"
)


@pytest.mark.parametrize(
    ("callback", "at", "difference"),
    [
        (Forgetful, [3], r"cut after step 3 differs from the whole one in model\.weight"),
        (Counting, [4], r"differs from the whole one in history\.calls\[4\]\[1\]: 5\.?0? and 1"),
        (Writing, [4], r"states\.run\.state\.calls: 10 and 3"),
        (lambda: ends_an_epoch_of_a_first_part, [6], "cut after step 6 differs from the whole one in"),
        (lambda: breaks_after_step_7, [2, 7, 8], "cut after step 7 "),
        (Clock, [3], "my/clock"),
        (Late, [3], AGAIN),
        (CountingEpochs, [3], STARTS),
    ],
    ids=[
        "state",
        "record",
        "run.state",
        "request",
        "the first cut that fails",
        "clock",
        "second resume",
        "hooks that ran again",
    ],
)
def test_hidden_state_is_found_and_named(callback: Callable[[], Any], at: list[int], difference: str) -> None:
    with pytest.raises(AssertionError, match=difference):
        prove_resume(lambda directory: trainer_with(callback())(directory), at=at, in_process=True)


def test_a_data_set_with_a_generator_of_its_own_is_found() -> None:
    with pytest.raises(AssertionError, match=r"cut after step 2 differs from the whole one in batches\.2"):
        prove_resume(lambda directory: trainer_with(loader=DataLoader(OwnGenerator(), 2))(directory), at=[2], in_process=True)


def dropping(directory: Path) -> Trainer:
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    return trainer_with(draws, model=model)(directory)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda directory: trainer_with(Remembering())(directory), {"at": [1, 2, 3, 5, 9]}),
        (lambda directory: trainer_with(Clock())(directory), {"at": [3], "ignore": ["time/*", "my/*"]}),
        (dropping, {"at": [3]}),
    ],
    ids=["state that is saved", "clocks that are named", "draws when a run starts"],
)
def test_what_is_no_hidden_state_passes(make: Callable[[Path], Trainer], options: dict[str, Any]) -> None:
    prove_resume(make, in_process=True, **options)


@pytest.mark.parametrize(
    ("make", "at", "message"),
    [
        (lambda directory: tiny_trainer(directory=directory), 1, r"Trainer\(seed=\.\.\.\)"),
        (trainer_with(loader=tiny_loader()), 99, "step 99"),
    ],
    ids=["no seed", "a step that the run does not reach"],
)
def test_what_cannot_be_proven_is_an_error(make: Callable[[Path], Trainer], at: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prove_resume(make, at=[at], in_process=True)


# -- what only a fresh process shows -------------------------------------------------------------------

CLASSES = {"bird", "cat", "dog", "fish", "horse", "newt", "owl", "whale"}
COUNT = [0]


@cache
def offsets() -> Tensor:
    return torch.rand(8)


class Labelled(Dataset[tuple[Tensor, Tensor]]):
    """Its targets depend on the order of a set of strings, or on an array that is drawn once in a process."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.labels = [list(CLASSES).index(name) for name in sorted(CLASSES)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        offset = offsets()[index].item() if self.kind == "cached" else float(self.labels[index])
        return torch.tensor([index / 8]), torch.tensor([offset])


def made(kind: str, directory: Path) -> Trainer:
    """Make a trainer of which the data depend on something hidden in this module, or on nothing."""
    data: Any = DataLoader(Labelled(kind), 2) if kind in ("set", "cached") else tiny_loader(4)
    return tiny_trainer(loader=data, directory=directory, epochs=2, seed=1)


def test_labels_that_follow_the_order_of_a_set_differ_in_a_fresh_process() -> None:
    with pytest.raises(AssertionError, match=r"batches\.\d+.*The first value that moved is the last batch, at step 4"):
        prove_resume(partial(made, "set"), at=[3])


def test_each_call_in_a_fresh_process_begins_anew_and_its_errors_are_raised_here(tmp_path: Path) -> None:
    with FreshProcesses(partial(made, "cached"), tmp_path) as fresh:
        first, again, other = (fresh.call(number, drawn) for number in (0, 0, 1))
        assert first[:2] == again[:2] == (1, True)
        assert first[2] == again[2] != other[2]
        with pytest.raises(RuntimeError, match="broken on purpose") as caught:
            fresh.call(0, broken)
    assert "in broken" in "".join(caught.value.__notes__)
    assert offsets.cache_info().currsize == 0


def drawn(make: Callable[[Path], Trainer]) -> tuple[int, bool, list[str]]:
    COUNT[0] += 1
    offsets()
    return COUNT[0], offsets.cache_info().misses == 1, list(CLASSES)


def broken(make: Callable[[Path], Trainer]) -> None:
    raise RuntimeError("broken on purpose")


@pytest.mark.long  # in the usual run, one of tests/loops/test_attach.py passes so
def test_a_trainer_that_continues_exactly_passes_in_fresh_processes() -> None:
    prove_resume(partial(made, "nothing"), at=[3])


def test_a_function_that_no_fresh_process_can_import_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"must import the function.*top level of a module.*in_process=True"):
        prove_resume(trainer_with(), at=[1])
