"""What a run wrote is read back as it was, whatever state the file is in."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

import cadenza
from cadenza import Callback, on
from cadenza.callbacks import Evaluate, LogTraining
from cadenza.records import read_decisions, read_records, reading
from cadenza.records.reading import NewRecords
from cadenza.records.record import Record
from cadenza.status.decisions import decide
from cadenza.status.progress import Counters
from cadenza.testing import tiny_loader, tiny_run


def test_records_and_decisions_of_a_run_come_back(tmp_path: Path) -> None:
    note = on(Callback.on_step_end, at=3)(lambda run: decide(run, "noticed", "for people", data={"for": ["code", 1]}))
    evaluate = Evaluate(tiny_loader(), every="2 steps")
    run = tiny_run(steps=4, directory=tmp_path, callbacks=[LogTraining("1 step"), evaluate, note])
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [(record.step, record.values["train/loss"]) for record in records] == run.history["train/loss"]
    assert records[-1].at.samples == run.progress.samples
    assert list(read_decisions(tmp_path / "decisions.jsonl")) == run.decisions
    assert [decision.data for decision in run.decisions if decision.what == "noticed"] == [{"for": ["code", 1]}]
    losses = [{"eval/loss": value} for _, value in run.history["eval/loss"]]
    assert [decision.data["results"] for decision in run.decisions if decision.what == "evaluated"] == losses


def test_the_data_of_a_decision_is_strict_json_whatever_its_numbers(tmp_path: Path) -> None:
    data = {"loss": math.nan, "several": (1, -math.inf, None), "inner": {"best": math.inf}}
    tiny_run(steps=1, directory=tmp_path, callbacks=[on(Callback.on_fit_end)(lambda run: decide(run, "odd", "why", data=data))])
    line = next(one for one in (tmp_path / "decisions.jsonl").read_text().splitlines() if '"odd"' in one)
    expected = {"loss": "NaN", "several": [1, "-Infinity", None], "inner": {"best": "Infinity"}}
    assert json.loads(line, parse_constant=pytest.fail)["data"] == expected


def test_what_is_not_finite_comes_back_as_a_number(tmp_path: Path) -> None:
    record = Record(Counters(step=1), 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 3})
    (tmp_path / "metrics.jsonl").write_text(record.to_json() + "\n", encoding="utf-8")
    (found,) = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(found.values["a"])
    assert (found.values["b"], found.values["c"], found.values["d"]) == (math.inf, -math.inf, 3)


def test_a_last_line_that_was_cut_is_passed_over_and_a_broken_one_before_it_is_counted(tmp_path: Path) -> None:
    good = Record(Counters(step=7), 1.5, {"loss": 0.5}).to_json()
    texts = [good, "{half of a li", '{"epoch": 1}', "[1, 2]", good.replace("0.5", '"word"'), good, good[:-9]]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("\n".join(texts).encode() + b"\xff")
    broken: list[int] = []
    assert [record.step for record in read_records(path, broken=broken)] == [7, 7]
    assert broken == [2, 3, 4, 5]


GOOD = Record(Counters(step=7), 1.5, {"loss": 0.5}).to_json()
ODD_VALUES = [
    "NaN", "-Infinity", '"NaN"', '"-Infinity"', '"0.25"', '"word"', "-0", "-0.0", "1E5", "1e400", "-1e400", "1e-400", "5e-324",
    "true", "null", "[1.5]", '{"a": 1}', "1e300", "0.1", "9007199254740993", str(2**63 - 1), str(2**63), str(2**64 - 1),
    str(2**64), str(-(2**63)), str(-(2**63) - 1), str(10**30), "1" * 400, "1" * 5000, "01", "1.", "+1", "0x10", "",
]  # fmt: skip
ODD_LINES = [
    GOOD.encode(), *(GOOD.replace("0.5", value).encode() for value in ODD_VALUES),
    *(GOOD.replace('"step": 7', f'"step": {value}').encode() for value in ODD_VALUES),
    *(GOOD.replace("1.5", value).encode() for value in ODD_VALUES),
    *(GOOD.replace("loss", name).encode() for name in ("träge", "\x00", "\\ud800", "\\u00e9")),
    GOOD.replace("loss", "träge").encode("latin-1"),
    GOOD.replace("loss", "\ud800").encode("utf-8", "surrogatepass"),
    *(GOOD.encode(name) for name in ("utf-16", "utf-8-sig")),
    b"  " + GOOD.encode() + b" \t\r",
    *(GOOD.replace("}", f", {more}}}").encode() for more in ('"loss": 2.5', '"tokens": 12', '"more": 1')),
    *(b"", b"null", b"[1, 2]", b"{half of a li", b"[" * 2000, b'{"a":' * 1500 + b"1" + b"}" * 1500),
    GOOD.replace('"step": 7, ', "").encode(),
]  # fmt: skip


def read(path: Path, *, only: list[str] | None = None) -> tuple[list[Any], list[int]]:
    """Return the records and the broken lines as texts, which tell 1 from 1.0, and NaN is itself."""
    broken: list[int] = []
    found = [
        (record.at, repr(record.time), [*map(repr, record.values.items())])
        for record in read_records(path, broken=broken, names=only)
    ]
    return found, broken


@pytest.mark.parametrize(
    "last", [b"", GOOD.encode()[:-9], GOOD.encode(), b'{"epoch": 1}'], ids=["whole", "cut", "uncut", "no record"]
)
def test_with_orjson_and_without_it_the_same_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([*ODD_LINES, last]))
    assert reading._parser() is orjson.loads
    fast, fast_named, fast_new = read(path), read(path, only=["loss"]), NewRecords(path)
    new = repr([*fast_new.read()]), fast_new.broken
    monkeypatch.setitem(sys.modules, "orjson", None)
    assert reading._parser() is json.loads
    slow_new = NewRecords(path)
    assert (read(path), read(path, only=["loss"])) == (fast, fast_named)
    assert (repr([*slow_new.read()]), slow_new.broken) == new
    assert len(fast[0]) > 30
    assert len(fast[1]) > 30


def test_whole_numbers_of_any_size_stay_whole_and_numbers_that_are_too_large_are_infinite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {str(10**30): 10**30, str(2**64): 2**64, str(-(2**63) - 1): -(2**63) - 1, "1e400": math.inf, "1e300": 1e300}
    path.write_text("".join(GOOD.replace("0.5", text) + "\n" for text in values))
    assert [repr(record.values["loss"]) for record in read_records(path)] == [*map(repr, values.values())]


def test_the_functions_are_public_in_records_and_the_old_path_warns() -> None:
    assert cadenza.records.read_records is read_records
    assert cadenza.records.read_decisions is read_decisions
    sys.modules.pop("cadenza.reading", None)
    found: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match="^cadenza.reading is deprecated and is removed in 0.3. Import") as caught:
        exec("from cadenza.reading import read_records as found", found)
    assert found["found"] is read_records
    assert caught[0].filename == "<string>"  # the line of the user that imports it


def test_a_file_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "metrics.jsonl")) == []
    assert list(read_decisions(tmp_path / "decisions.jsonl")) == []
