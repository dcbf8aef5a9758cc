"""A log of many steps is played in a second of processor time, so that other load on the machine does not count."""

from __future__ import annotations

import json
import time
from pathlib import Path

from cadenza.callbacks import Checkpoint, EarlyStopping
from cadenza.timetravel import what_if
from tests.timetravel.test_what_if import STEP, trainer


def test_a_log_of_100_000_steps(tmp_path: Path) -> None:
    STEP["now"] = 0
    trainer(tmp_path, [], epochs=1).fit()
    facts = json.loads((tmp_path / "run.json").read_text())
    facts["arguments"] |= {"max_epochs": 200, "accumulate": 1}
    facts["progress"] |= {"step": 100_000, "epoch": 200, "batch": 100_000, "batch_in_epoch": 0}
    facts["data"][0] |= {"points": [[0, 0, 0, 0, 1, 500, 500]]}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    rows = []
    for epoch in range(1, 201):
        results = {"eval/loss": 1 / epoch + (0.5 if epoch > 150 else 0)}
        counters = {"epoch": epoch, "step": 500 * epoch, "batch": 500 * epoch, "batch_in_epoch": 0, "samples": 0, "tokens": 0}
        data = {"evaluation": "eval", "batches": 1, "results": results}
        rows.append(json.dumps({"what": "evaluated", "who": "Evaluate", "why": "", **counters, "data": data}))
    (tmp_path / "decisions.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "metrics.jsonl").write_text("not needed\n" * 100_000)
    began = time.process_time()
    answer = what_if(tmp_path, [EarlyStopping("eval/loss", "min", patience=20), Checkpoint("1000 steps", keep_last=2)])
    took_s = time.process_time() - began
    assert answer.stopped is not None
    assert answer.step == 170 * 500
    assert [*answer.kept] == ["step-00084000", "step-00085000-2"]  # the stop is one of the epoch's end
    assert took_s < 1, took_s
