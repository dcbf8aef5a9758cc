"""What a profile leaves in the run's directory: numbers, a timeline, and what torch recorded."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate
from cadenza.callbacks.profile import Profile
from cadenza.testing import tiny_loader, tiny_run

NAP_S = 0.02


@on(Callback.on_step_end)
def nap(run: Run) -> None:
    time.sleep(NAP_S)


def events_in(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a trace, checked against the Trace Event Format."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(trace["traceEvents"], list)
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"] in ("phase", "moment", "callback")
        else:
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_profile_json_has_the_form_that_reports_read(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[Profile(), nap], steps=3, directory=tmp_path)
    assert run.profile is not None
    data = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    assert data == run.profile.to_dict()
    assert list(data) == ["wall_s", "steps", "phases", "callbacks", "host_reads", "ranks"]
    assert data["steps"] == 3
    assert all(list(row) == ["name", "calls", "seconds"] for row in data["phases"])
    assert all(list(row) == ["callback", "moment", "calls", "seconds"] for row in data["callbacks"])
    assert "profile: " in (tmp_path / "console.log").read_text(encoding="utf-8")


def test_the_trace_shows_the_steps_of_its_window(tmp_path: Path) -> None:
    tiny_run(callbacks=[Profile(window=(2, 3)), nap], steps=8, directory=tmp_path)
    events = events_in(tmp_path / "trace.json")
    names = [event["name"] for event in events]
    for phase in ("fetch", "transfer", "forward", "backward", "zero_grad"):
        assert names.count(phase) == 3, phase
    assert names.count("optimizer") == 6  # gradients are unscaled in a span of their own
    assert names.count("nap.on_step_end") == 3  # of the step before: the window opens at on_step_end
    assert all(event["dur"] >= NAP_S * 1e6 for event in events if event["name"] == "nap.on_step_end")


def test_spans_are_nested_and_none_overlaps_another(tmp_path: Path) -> None:
    tiny_run(callbacks=[Profile(window=(0, 10)), nap, Evaluate(tiny_loader(2), every="1 step")], steps=4, directory=tmp_path)
    events = events_in(tmp_path / "trace.json")
    open_until: list[tuple[str, float]] = []
    parents = set()
    for event in events:  # in order of their start, the outer first
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1][1] <= begin + 1e-3:
            open_until.pop()
        if open_until:
            assert end <= open_until[-1][1] + 1e-3, (event, open_until)
            parents.add((open_until[-1][0], event["name"]))
        open_until.append((event["name"], end))
    assert ("on_step_end", "nap.on_step_end") in parents
    assert ("Evaluate.on_step_end", "evaluation eval") in parents


def test_a_window_that_the_run_does_not_reach_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_run(callbacks=[Profile(window=(50, 3))], steps=3, directory=tmp_path)
    assert caplog.messages == ["trace.json was not written: the run ended before step 50. Give Profile(window=(0, 20))."]
    assert not (tmp_path / "trace.json").exists()


def test_a_trace_that_is_too_long_is_cut_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadenza.profiling.spans.MOST_EVENTS", 10)
    monkeypatch.setattr("cadenza.callbacks.profile.MOST_EVENTS", 10)
    tiny_run(callbacks=[Profile(window=(0, 20))], steps=5, directory=tmp_path)
    assert 1 <= len(events_in(tmp_path / "trace.json")) <= 10
    assert caplog.messages == ["trace.json ends early: it holds the first 10 spans. Give a smaller Profile(window=...)"]


def test_without_a_directory_nothing_is_written_but_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(callbacks=[Profile(window=(0, 2))], steps=3)
    assert list(tmp_path.iterdir()) == []
    tiny_run(callbacks=[Profile(window=(0, 2), trace="mine.json")], steps=3)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    assert events_in(tmp_path / "mine.json")


def test_no_trace_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    tiny_run(callbacks=[Profile(trace=None)], steps=3, directory=tmp_path)
    assert (tmp_path / "profile.json").exists()
    assert not (tmp_path / "trace.json").exists()


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile.json").mkdir()
    run = tiny_run(callbacks=[Profile(trace=None)], steps=2, directory=tmp_path)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert "profile.json could not be written" in caplog.messages[0]


# -- torch.profiler -----------------------------------------------------------------------------------


def test_torch_profiler_records_its_window(tmp_path: Path) -> None:
    recorded = {"wait": 1, "warmup": 1, "active": 2, "record_shapes": True}
    tiny_run(callbacks=[Profile(torch_profiler=recorded)], steps=6, directory=tmp_path)
    trace = json.loads((tmp_path / "torch-trace.json").read_text(encoding="utf-8"))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert any("aten::" in name for name in names)
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2


def test_torch_profiler_is_stopped_after_an_error_so_that_the_next_run_can_record(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=3)
    def fail(run: Run) -> None:
        raise ValueError("broken")

    recorded = {"wait": 1, "warmup": 1, "active": 4}
    with pytest.raises(ValueError, match="broken"):
        tiny_run(callbacks=[Profile(torch_profiler=recorded), fail], steps=6, directory=tmp_path / "first")
    tiny_run(callbacks=[Profile(torch_profiler=recorded)], steps=6, directory=tmp_path / "second")
    assert (tmp_path / "second" / "torch-trace.json").exists()


def test_torch_profiler_needs_a_directory_and_is_for_one_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a directory"):
        tiny_run(callbacks=[Profile(torch_profiler={})], steps=1)
    with pytest.raises(ValueError, match="torch has one profiler at a time; 2 Profiles"):
        tiny_run(callbacks=[Profile(torch_profiler={}), Profile(torch_profiler={})], steps=1, directory=tmp_path)
