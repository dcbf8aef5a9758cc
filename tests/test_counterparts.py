"""The table of other systems' built-ins: what it says to write here is written and run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cadenza.callbacks
import cadenza.sinks
from cadenza import Callback
from cadenza.testing import tiny_loader, tiny_run
from tests.compat.nemo.graphs import OFFLINE

DOCS = Path(__file__).resolve().parents[1] / "docs"
sys.path.insert(0, str(DOCS))
from counterparts import COUNTERPARTS  # noqa: E402  # the page and its test read the same table

ROWS = [(system, name, native) for system, table in COUNTERPARTS.items() for name, native in table.items()]


class Network(nn.Module):
    """A few weights, with the parts that the examples name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(1, 1)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.dropout(self.body(inputs)))
        return outputs


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    library = {name: getattr(module, name) for module in (cadenza.callbacks, cadenza.sinks) for name in module.__all__}
    return {**library, "torch": torch, "loader": tiny_loader(2), "loss_module": nn.CrossEntropyLoss()}


@pytest.mark.parametrize(("system", "name", "native"), ROWS, ids=[f"{system}-{name}" for system, name, _ in ROWS])
def test_what_the_table_says_runs(system: str, name: str, native: str, names: dict[str, Any], tmp_path: Path) -> None:
    callbacks: list[Callback] = eval(f"[{native}]", names)
    torch.manual_seed(0)  # the weights decide whether a callback of the table stops the run
    run = tiny_run(model=Network(), callbacks=callbacks, epochs=2, directory=tmp_path / "run")
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert run.faults == []
