"""A slow rank is named, with the part of its time in which it is slow: in the report, and in answers about a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable as Function
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from cadenza import Callback, Run, on, read_run
from cadenza.commands.main import main
from cadenza.drivers import first_error
from cadenza.report import page, story_at
from cadenza.status import stragglers
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, own_rank, squared_error, trainer
from tests.waiting import until

SLOW_S = 0.05


class SlowOnRank1:
    """Batches for each of which one rank waits."""

    def __init__(self) -> None:
        self.batches = [*loader(24)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if own_rank() == 1:
                time.sleep(SLOW_S)
            yield batch


def slow_loss(model: nn.Module, batch: Batch) -> Tensor:
    if own_rank() == 1:
        time.sleep(SLOW_S)
    return squared_error(model, batch)


CASES: dict[str, Function[[], dict[str, Any]]] = {
    "data": lambda: {"data": SlowOnRank1()},
    "compute": lambda: {"data": [*loader(24)], "compute_loss": slow_loss},
}


@pytest.fixture(autouse=True)
def frequent_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_error, "EVERY_S", 0.1)


@pytest.mark.parametrize("part", CASES)
def test_the_slow_rank_is_named_with_what_it_is_slow_in(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> dict[str, Any]:
        written = tmp_path / stragglers.FILE
        found: list[dict[str, Any]] = []

        @on(Callback.on_step_end, at=40)
        def read(run: Run) -> None:
            until(written.exists)
            found.append(json.loads(written.read_text()))

        trainer(max_epochs=20, callbacks=[read], directory=tmp_path, **CASES[part]()).fit()
        return found[0]

    during = launch(train)[0]
    after = read_run(tmp_path).health()["ranks"]
    for ranks in (during, after):
        first, other = ranks["slowest"]
        assert (first["rank"], first["slow_in"], ranks["ranks"]) == (1, part, 2)
        assert other["slow_in"] is None
    assert after["slowest"][0][part] > 0.5
    assert after["slowest"][1]["wait"] > 0.5
    assert after == read_run(tmp_path).status()["ranks"]

    row = f"slow in {part}"
    assert main(["ask", str(tmp_path), "health"]) == 0
    assert row in capsys.readouterr().out
    main(["watch", str(tmp_path), "--once"])
    assert row in capsys.readouterr().out
    shown = page([story_at(tmp_path)])
    assert 'id="ranks"' in shown
    assert shown.index("rank 1") < shown.index("rank 0")
