"""Workers of a loader that are killed are replaced, and the batches do not change."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.loading.data import Numbers, epochs_of, loader_of, rest_of


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch look for dead workers each tenth of a second; its default is 5 seconds."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


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
    persistent: bool, deaths: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [tmp_path / str(i) for i in range(deaths)]
    for file in files:
        file.touch()
    list(loader_of(Numbers(), num_workers=1))  # from here on, torch watches the workers of all loaders
    loader = loader_of(Deadly([*map(str, files)]), shuffle=True, num_workers=2, persistent_workers=persistent)
    with caplog.at_level(logging.WARNING, "cadenza"):
        read = epochs_of(loader, epochs=2)
    assert read == epochs_of(loader_of(Deadly([]), shuffle=True), epochs=2)
    assert [record.message.count("a loader worker died") for record in caplog.records] == [1] * deaths
    assert not any(file.exists() for file in files)


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


def test_a_batch_that_was_cut_off_is_read_again(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    loader = loader_of(Numbers(), num_workers=1, collate_fn=CutOff(str(once)))
    assert rest_of(loader, 0, 0) == ["whole"] * len(loader)
    assert not once.exists()


class Suicidal(Numbers):
    """Ends each worker that reads it."""

    def __getitem__(self, index: int) -> Tensor:
        os._exit(3)


def test_repeated_deaths_of_workers_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        rest_of(loader_of(Suicidal(), num_workers=1), 0, 0)
