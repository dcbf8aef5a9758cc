"""The connections and open files of a rank: one process group of Cadenza's own, whatever a run has in its list."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.drivers.rendezvous import check_open_files
from cadenza.errors import DistributedError
from cadenza.testing import launch
from tests.distributed.drivers import ddp, fsdp
from tests.distributed.parts import loader, trainer


def sockets() -> int:
    """Return how many sockets this process has."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # that of the listing itself
            continue
    return count


@pytest.mark.parametrize("driver", [ddp, fsdp])
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.long), pytest.param(16, marks=pytest.mark.long)])
def test_a_rank_has_two_connections_to_each_other_one_whatever_folders_there_are(
    driver: Callable[[], object], ranks: int, tmp_path: Path
) -> None:
    def most() -> int:
        before, seen = sockets(), list[int]()

        @on(Callback.on_step_end)
        def count(run: Run) -> None:
            seen.append(sockets() - before)

        saves = [Checkpoint("2 steps", directory=tmp_path / f"folder {number}") for number in range(4)]
        trainer(loader(24 * ranks), driver=driver(), callbacks=[count, Evaluate(loader(8 * ranks)), *saves]).fit()
        return max(seen)

    groups, others = 2, 6 + 4  # DDP's and Cadenza's; what listens, and clients of the store: one for each folder
    assert max(launch(most, ranks)) <= (groups * (ranks - 1) + others if ranks < 16 else 20)  # from there on, as they are used
    assert len([*tmp_path.rglob("manifest.json")]) == 4 * len([*(tmp_path / "folder 0").rglob("manifest.json")]) > 0


def test_as_many_open_files_as_machines_allow_suffice_for_thousands_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of many connects with few. The main process may have to bring together the predictions of all."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (len(os.listdir("/dev/fd")) + 200, -1))
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    check_open_files(4096, 2, serves_store=False, gathers=False)
    with pytest.raises(DistributedError, match="2 groups of 4,096 ranks keep 4148 connections"):
        check_open_files(4096, 2, serves_store=False, gathers=True)
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    with pytest.raises(DistributedError, match="2 groups of 4,096 ranks keep 8192 connections"):
        check_open_files(4096, 2, serves_store=False, gathers=False)


def test_a_limit_of_open_files_that_is_too_small_is_said_before_the_group_is_made() -> None:
    def started() -> str:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, most))
        with pytest.raises(DistributedError) as raised:
            ddp()
        return str(raised.value)

    for said in launch(started, 4):
        assert "open files, and needs" in said
        assert "2 groups of 4 ranks keep 8 connections to other ranks" in said
        assert "ulimit -n" in said
