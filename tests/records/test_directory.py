"""The run directory: never overwritten, readable while the run goes on, written in groups of lines, and read back as it was."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

import cadenza
from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import CheckpointError, DirectoryError
from cadenza.records import read_decisions, read_records, reading
from cadenza.records.directory import RunDirectory
from cadenza.records.logs import GATHER_S, LONGEST_S, GatheredLog
from cadenza.records.reading import NewRecords
from cadenza.records.record import Record
from cadenza.sinks import JsonLines
from cadenza.status.decisions import decide
from cadenza.status.progress import Counters
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


def facts_in(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    return facts


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_run_json_says_what_was_run_how_and_how_it_ended(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path / "run", seed=3, callbacks=[LogTraining()], epochs=2)
    facts = facts_in(tmp_path / "run")
    assert facts["command"] == [sys.executable, *sys.argv]
    assert facts["seed"] == 3
    assert facts["device"] == "cpu"
    assert facts["arguments"]["model"] == "Linear, 2 parameters"
    assert facts["arguments"]["max_epochs"] == 2
    assert facts["arguments"]["callbacks"] == ["LogTraining"]
    assert set(facts["versions"]) == {"cadenza", "torch", "python", "platform"}
    assert facts["outcome"] == {"kind": "finished", "reason": "the limit is reached"}
    assert facts["started"] <= facts["ended"]
    assert "git_commit" in facts


def git(folder: Path, *arguments: str) -> str:
    named = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
    return subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_run_json_names_the_commit_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.delenv("GIT_DIR")

    def commit_told(run: str) -> str | None:
        tiny_run(directory=tmp_path / run, steps=1)
        told: str | None = facts_in(tmp_path / run)["git_commit"]
        return told

    assert commit_told("outside of git") is None
    git(inner.parent, "init")
    assert commit_told("nothing committed yet") is None
    (inner / "train.py").write_text("first")
    git(inner.parent, "add", ".")
    git(inner.parent, "commit", "-m", "first")
    commit = git(inner.parent, "rev-parse", "HEAD")
    (inner / "untracked.py").write_text("not counted")
    assert commit_told("as committed") == commit
    (inner / "train.py").write_text("second")
    assert commit_told("changed") == f"{commit}+"


def test_while_the_run_goes_on_everything_can_be_read_with_a_line_for_each_record_at_once(tmp_path: Path) -> None:
    states: list[tuple[Any, int]] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        metrics = tmp_path / "metrics.jsonl"
        states.append((facts_in(tmp_path)["outcome"], len(lines_of(metrics)) if metrics.exists() else 0))

    log = LogTraining(every="1 step", throughput=False)
    run = tiny_run(directory=tmp_path, callbacks=[JsonLines(), log, look], steps=3)
    assert states == [(None, 0), (None, 1), (None, 2)]
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["train/loss"]) for line in lines] == run.history["train/loss"]


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("moment", [Callback.on_setup, Callback.on_fit_start, Callback.on_step_end, Callback.on_fit_end])
def test_a_run_that_failed_says_so_wherever_it_failed(tmp_path: Path, error: BaseException, moment: Any) -> None:
    def fail(run: Run) -> None:
        raise type(error)(*error.args)

    with pytest.raises(type(error)):
        tiny_run(directory=tmp_path, callbacks=[on(moment)(fail)])
    assert facts_in(tmp_path)["outcome"] == {"kind": "failed", "reason": repr(error)}
    assert facts_in(tmp_path)["ended"]


def test_a_run_that_was_stopped_says_so_and_its_decisions_are_written_with_who_why_and_when(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[on(Callback.on_step_end)(lambda run: run.stop("enough"))])
    assert facts_in(tmp_path)["outcome"] == {"kind": "stopped", "reason": "enough"}
    assert lines_of(tmp_path / "decisions.jsonl") == [decision.to_dict() for decision in run.decisions]
    stopped = lines_of(tmp_path / "decisions.jsonl")[0]
    assert (stopped["what"], stopped["who"], stopped["why"], stopped["step"]) == ("stopped", "<lambda>", "enough", 1)


def test_what_the_user_is_told_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speak = on(Callback.on_fit_start)(lambda run: [run.print("hello"), run.warn("careful")])  # type: ignore[func-returns-value]
    tiny_run(directory=tmp_path, callbacks=[speak])
    assert (tmp_path / "console.log").read_text(encoding="utf-8") == "hello\ncareful\n"
    assert capsys.readouterr().out == "hello\n"


def test_a_directory_that_holds_a_finished_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    trainer = tiny_trainer(directory=tmp_path, callbacks=[LogTraining(every="1 step")])
    trainer.fit()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        DirectoryError,
        match=r"already holds a run that finished at .*nothing is overwritten\. It has no checkpoint .* with fit",
    ):
        trainer.fit()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_directory_in_which_a_run_goes_on_is_refused_too_and_one_that_holds_other_things_is_fine(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    @on(Callback.on_step_end, at=1)
    def second(run: Run) -> None:
        with pytest.raises(DirectoryError, match="already holds a run started at"):
            tiny_run(directory=tmp_path)

    assert tiny_run(directory=tmp_path, callbacks=[second]).outcome is not None
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("inner", ["file", "file/below"])
def test_a_directory_that_cannot_be_written_is_an_error_before_anything_happens(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").write_text("in the way")
    happened: list[int] = []
    note = on(Callback.on_setup)(lambda run: happened.append(1))
    message = r"cannot be written: .*Give a directory= in which files can be made, or none"
    with pytest.raises(DirectoryError, match=message) as refused:
        tiny_run(directory=tmp_path / inner, callbacks=[note])
    assert happened == []
    assert isinstance(refused.value, OSError)


def _moved(path: Path) -> None:
    path.rename(path.with_name("moved"))


def _replaced(path: Path) -> None:
    _moved(path)
    shutil.copytree(path.with_name("moved"), path, symlinks=True)


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("leave", [_moved, _replaced, shutil.rmtree])
@pytest.mark.parametrize("step", [1, 4])  # before and after the first row is written
def test_a_directory_that_is_moved_or_deleted_during_the_run_is_made_again_with_all_rows(
    step: int,
    leave: Callable[[Path], Any],
    saves: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "runs" / "run"
    monkeypatch.setattr("cadenza.records.directory._LOOKS_S", 1e9 if saves else 0.0)  # the next save, or the next record
    there: list[bool] = []
    parts = [
        on(Callback.on_step_end, at=step)(lambda run: leave(path)),
        on(Callback.on_epoch_start, at=2)(lambda run: there.append((path / "MOVED.txt").exists())),
        LogTraining("1 step"),
        *([Checkpoint(every="5 steps", background=False)] if saves else []),
    ]
    run = tiny_run(epochs=3, directory=path, callbacks=parts)
    assert there == [True]
    assert [record.step for record in read_records(path / "metrics.jsonl")] == [*range(1, 16)]
    assert [one.what for one in read_decisions(path / "decisions.jsonl")] == [one.what for one in run.decisions]
    assert json.loads((path / "run.json").read_text())["outcome"]["kind"] == "finished"
    assert "was moved or deleted while its run was at" in (path / "MOVED.txt").read_text()
    assert sum("was moved or deleted" in one for one in caplog.messages) == 1
    if saves:
        again = tiny_trainer(epochs=4, directory=path, callbacks=parts[2:]).fit("auto")
        assert len(again.history["train/loss"]) == 20
    shutil.rmtree(path)
    run.print("after the end")
    assert not path.exists()


def test_a_run_that_is_over_stays_over_until_a_checkpoint_is_restored(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, steps=2)
    ended = facts_in(tmp_path)
    killed = RunDirectory(tmp_path, resume=True)
    killed.begin({})
    told = facts_in(tmp_path)
    assert all(told[name] == ended[name] for name in ("outcome", "ended", "progress"))
    killed.goes_on()
    told = facts_in(tmp_path)
    assert (told["outcome"], told["ended"], "progress" in told) == (None, None, False)
    killed.release()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", 7),
        ("branch", "main"),
        ("branch", {"branch": "x", "ancestors": []}),
        ("branch", {"branch": 0, "ancestors": [], "resumed_at": 3}),
        ("outcome", "finished"),
        ("outcome", {"kind": 1, "reason": ""}),
        ("outcome", {}),
        ("progress", [1]),
        ("progress", {"step": "many"}),
        ("progress", {"stride": 3}),
        ("continued", "often"),
        ("started", 17),
    ],
)
def test_a_run_json_with_a_field_of_another_kind_is_an_error_that_names_it(tmp_path: Path, field: str, value: Any) -> None:
    tiny_run(directory=tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({**facts_in(tmp_path), field: value}), encoding="utf-8")
    before = sorted(path.name for path in tmp_path.iterdir())
    for resume in (False, "auto", "best"):
        with pytest.raises(DirectoryError, match=r"holds a run.json that Cadenza cannot read \(.*\)\. Give another directory="):
            tiny_trainer(directory=tmp_path).fit(resume=resume)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# -- lines that are written many at once -------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_no_line_waits_longer_than_the_bound_if_the_thread_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    monkeypatch.setattr(GatheredLog, "_write_later", lambda self: None)  # a thread that gets no time
    path = tmp_path / "metrics.jsonl"
    log = GatheredLog(path)
    for number in range(300):
        log.add(f"{number}")
        written = path.read_text().splitlines()
        assert number - len(written) < LONGEST_S / 0.01 + 2
        now[0] += 0.01
    log.end()
    assert path.read_text().splitlines() == [str(number) for number in range(300)]


def test_lines_that_come_seldom_are_written_at_once(tmp_path: Path, now: list[float]) -> None:
    log = GatheredLog(tmp_path / "log")
    for number in range(3):
        log.add("line")
        assert len((tmp_path / "log").read_text().splitlines()) == number + 1
        now[0] += 1.01 * GATHER_S
    log.end()
    assert not threads()


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "cadenza-records"]


def test_lines_of_many_threads_are_all_written_once_and_in_order(tmp_path: Path) -> None:
    log = GatheredLog(tmp_path / "log")

    def add() -> None:
        for number in range(500):
            log.add(f"{number}")

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding = [threading.Thread(target=add) for _ in range(3)]
        for one in adding:
            one.start()
        while any(one.is_alive() for one in adding):
            log.flush()
        log.end()
    finally:
        sys.setswitchinterval(switch)
    lines = [int(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(lines) == sorted([*range(500)] * 3)


def test_lines_wait_in_memory_while_the_file_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log"
    path.mkdir()
    log = GatheredLog(path)
    for number in range(3):
        log.add(f"{number}")
    log.flush()
    path.rmdir()
    log.end()
    assert path.read_text().splitlines() == ["0", "1", "2"]
    assert caplog.text.count("wait in memory") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_an_error_loses_no_record(tmp_path: Path, error: type[BaseException]) -> None:
    @on(Callback.on_step_start, at=7)
    def fail(run: Run) -> None:
        raise error

    with pytest.raises(error):
        tiny_run(callbacks=[LogTraining("1 step"), fail], steps=10, directory=tmp_path)
    assert [row["step"] for row in lines_of(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_process_that_exits_without_an_end_loses_no_line(tmp_path: Path) -> None:
    lines = "from pathlib import Path\nfrom cadenza.records.logs import GatheredLog\nlog = GatheredLog(Path('log'))\n"
    code = f"{lines}for number in range(100):\n    log.add(f'{{number}}')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert len((tmp_path / "log").read_text().splitlines()) == 100


def test_the_thread_has_ended_when_the_run_has(tmp_path: Path) -> None:
    running: list[list[str]] = []
    look = on(Callback.on_step_end)(lambda run: running.append(threads()))
    for number in range(20):
        tiny_run(directory=tmp_path / str(number), steps=5, callbacks=[LogTraining("1 step"), look])
        assert threads() == []
    assert any(running)


# -- reading -----------------------------------------------------------------------------------------


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


def test_a_last_line_that_was_cut_is_passed_over_and_a_broken_one_is_counted_and_no_file_holds_nothing(
    tmp_path: Path,
) -> None:
    good = Record(Counters(step=7), 1.5, {"loss": 0.5}).to_json()
    texts = [good, "{half of a li", '{"epoch": 1}', "[1, 2]", good.replace("0.5", '"word"'), good, good[:-9]]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("\n".join(texts).encode() + b"\xff")
    broken: list[int] = []
    assert [record.step for record in read_records(path, broken=broken)] == [7, 7]
    assert broken == [2, 3, 4, 5]
    assert list(read_records(tmp_path / "none.jsonl")) == []
    assert list(read_decisions(tmp_path / "decisions.jsonl")) == []


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


def test_whole_numbers_stay_whole_and_what_is_too_large_or_not_finite_comes_back_as_a_number(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {str(10**30): 10**30, str(2**64): 2**64, str(-(2**63) - 1): -(2**63) - 1, "1e400": math.inf, "1e300": 1e300}
    record = Record(Counters(step=1), 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 3})
    path.write_text("".join(GOOD.replace("0.5", text) + "\n" for text in values) + record.to_json() + "\n")
    *found, last = read_records(path)
    assert [repr(record.values["loss"]) for record in found] == [*map(repr, values.values())]
    assert repr(last.values) == repr(record.values)


def test_the_functions_are_public_in_records_and_the_old_path_warns() -> None:
    assert cadenza.records.read_records is read_records
    assert cadenza.records.read_decisions is read_decisions
    sys.modules.pop("cadenza.reading", None)
    found: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match="^cadenza.reading is deprecated and is removed in 0.3. Import") as caught:
        exec("from cadenza.reading import read_records as found", found)
    assert found["found"] is read_records
    assert caught[0].filename == "<string>"  # the line of the user that imports it


def test_a_start_that_fails_leaves_an_empty_directory_empty_and_the_next_run_begins_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        tiny_trainer(directory=tmp_path, steps=1).fit(resume="step-5")
    assert [*tmp_path.iterdir()] == []
    tiny_trainer(directory=tmp_path, steps=1).fit()
    assert (tmp_path / "run.lock").exists()
