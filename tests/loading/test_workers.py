"""Workers of a loader that die are replaced, and the batches do not change."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import active_children
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from cadenza import Trainer
from cadenza.testing import tiny_trainer
from tests.loading.data import Numbers, epochs_of, loader_of, rest_of


class Deadly(Numbers):
    """The worker that reads sample 9 is killed, as often as there are files named in `once`."""

    def __init__(self, once: list[str]) -> None:
        super().__init__("torch", "numpy")
        self.once = once

    def __getitem__(self, index: int) -> Tensor:
        if index == 9 and get_worker_info() is not None:
            for path in self.once:
                if os.path.exists(path):
                    os.unlink(path)
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(("persistent", "deaths"), [(False, 1), (True, 2)])
def test_a_killed_worker_is_replaced_and_the_batches_do_not_change(
    persistent: bool, deaths: int, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files = [str(tmp_path / str(i)) for i in range(deaths)]
    for file in files:
        open(file, "w").close()
    list(loader_of(Numbers(), num_workers=1))  # from here on, torch watches the workers of all loaders
    loader = loader_of(Deadly(files), shuffle=True, num_workers=2, persistent_workers=persistent)
    with caplog.at_level(logging.WARNING, "cadenza"):
        read = epochs_of(loader, epochs=2)
    assert read == epochs_of(loader_of(Deadly([]), shuffle=True), epochs=2)
    assert [record.message.count("a loader worker died") for record in caplog.records] == [1] * deaths
    assert not any(map(os.path.exists, files))


class Cut:
    """A batch that is cut off in transfer: its worker is killed while the batch is read."""

    def __init__(self, worker: int, once: str) -> None:
        self.worker, self.once = worker, once

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_a_part, (self.worker, self.once)


def _read_a_part(worker: int, once: str) -> str:
    if os.path.exists(once):
        os.unlink(once)
        os.kill(worker, signal.SIGKILL)
        raise EOFError
    return "whole"


@dataclass
class CutOff:
    """A collate function whose batches are cut off while a file exists."""

    once: str

    def __call__(self, samples: list[Tensor]) -> Any:
        return Cut(os.getpid(), self.once)


def test_a_batch_that_was_cut_off_is_read_again(tmp_path: Any) -> None:
    once = tmp_path / "once"
    once.touch()
    loader = loader_of(Numbers(), num_workers=1, collate_fn=CutOff(str(once)))
    assert rest_of(loader, 0, 0) == ["whole"] * len(loader)
    assert not once.exists()


class Suicidal(Numbers):
    """Kills each worker that reads it."""

    def __getitem__(self, index: int) -> Tensor:
        os._exit(3)


def test_repeated_deaths_of_workers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cadenza.loading.resumable_loader.MAX_DEATHS", 0)  # torch reports a death after up to 5 seconds
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        rest_of(loader_of(Suicidal(), num_workers=1), 0, 0)


class Raising(Numbers):
    """Reading sample 5 is an error; each attempt is recorded in a file, which workers and tests can read."""

    def __init__(self, tries: str) -> None:
        super().__init__()
        self.tries = tries

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            with open(self.tries, "a") as file:
                file.write("x")
            raise RuntimeError("sample 5 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_is_raised_without_another_attempt(workers: int, tmp_path: Any) -> None:
    tries = tmp_path / "tries"
    with pytest.raises(RuntimeError, match="sample 5 is broken"):
        rest_of(loader_of(Raising(str(tries)), num_workers=workers), 0, 0)
    assert tries.read_text() == "x"


class Stream(IterableDataset[Tensor]):
    """A stream of which sample 5 is broken."""

    def __init__(self, data: Dataset[Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return (self.data[index] for index in range(12))


def mean_of_squares(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch.float().reshape(-1, 1)).square().mean()
    return loss


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("broken", [False, True])
def test_no_worker_is_left_after_a_run(broken: bool, streams: bool, persistent: bool, tmp_path: Any) -> None:
    """Also while the error of the run, the traceback of which refers to the loader, is there."""
    data: Any = Raising(str(tmp_path / "tries")) if broken else Numbers()
    data = Stream(data) if streams else data
    loader = DataLoader(data, 2, num_workers=2, persistent_workers=persistent)
    one = Trainer(nn.Linear(1, 1), lambda weights: SGD(weights, 0.1), loader, mean_of_squares, max_epochs=2, progress=False)
    before = set(active_children())
    with pytest.raises(RuntimeError, match="sample 5 is broken") if broken else nullcontext() as raised:
        one.fit()
    assert set(active_children()) == before, raised


@pytest.mark.parametrize("streams", [False, True])
def test_no_worker_is_left_after_an_evaluation_that_failed(streams: bool, tmp_path: Any) -> None:
    data: Any = Raising(str(tmp_path / "tries"))
    loader = DataLoader(Stream(data) if streams else data, 2, num_workers=2)
    before = set(active_children())
    with pytest.raises(RuntimeError, match="sample 5 is broken") as raised:
        tiny_trainer().evaluate(loader, compute=mean_of_squares)
    assert set(active_children()) == before, raised
