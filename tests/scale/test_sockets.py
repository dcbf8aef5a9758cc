"""The connections and open files of a rank: one process group of Cadenza's own, whatever a run has in its list."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
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
    assert max(launch(most, ranks)) <= min(groups * (ranks - 1) + others, ranks + 30)
    assert len([*tmp_path.rglob("manifest.json")]) == 4 * len([*(tmp_path / "folder 0").rglob("manifest.json")]) > 0


def test_a_limit_of_open_files_that_is_too_small_is_said_before_the_group_is_made() -> None:
    def started() -> str:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, most))
        with pytest.raises(DistributedError) as raised:
            ddp()
        return str(raised.value)

    for said in launch(started, 4):
        assert "open files, and needs" in said
        assert "each of 2 groups of 4 ranks keeps a connection to each rank" in said
        assert "ulimit -n" in said
