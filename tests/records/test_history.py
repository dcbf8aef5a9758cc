"""History keeps a bounded view of what was logged, the same after a resume, and the file keeps all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from cadenza import Callback, History, Record, Run, Trainer, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.status.plain import first_difference
from cadenza.status.progress import Counters
from cadenza.testing import prove_resume, tiny_run, tiny_trainer


def test_history_has_each_series_the_latest_values_and_the_names() -> None:
    history = tiny_run(callbacks=[LogTraining(every="2 steps", throughput=False)], epochs=1).history
    assert history.names == ["train/loss", "train/lr"]
    assert history["train/lr"] == [(2, 0.1), (4, 0.1)]
    assert history.latest["train/lr"] == 0.1
    assert "train/loss" in history
    assert "eval/loss" not in history
    with pytest.raises(KeyError, match=r"nothing was logged as 'train/los'\. Did you mean 'train/loss'\?"):
        history["train/los"]


def test_history_becomes_a_frame_with_a_row_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(callbacks=[count, LogTraining(every="2 steps", throughput=False, lr=False)], steps=4)
    frame = run.history.to_frame()
    assert frame.index.name == "step"
    assert list(frame.index) == list(frame["steps"]) == [1, 2, 3, 4]
    assert list(frame.columns) == ["steps", "train/loss"]
    assert frame["train/loss"].notna().tolist() == [False, True, False, True]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"History\.to_frame\(\) needs the package 'pandas'.*pip install 'cadenza\[data\]'"):
        History().to_frame()


def filled(count: int, limit: int, names: tuple[str, ...] = ("x",)) -> History:
    history = History(limit)
    for step in range(1, count + 1):
        history.add(Record(Counters(step=step), 0.0, dict.fromkeys(names, step / 2)))
    return history


@pytest.mark.parametrize("limit", [4, 5, 10, 11])
def test_beyond_the_limit_an_even_view_is_kept_with_the_first_and_the_newest(limit: int) -> None:
    for count in range(1, 200):
        history = filled(count, limit)
        steps = [step for step, _ in history["x"]]
        every = history.thinned.get("x", 1)
        assert steps == sorted({*range(1, count + 1, every), count})
        assert history["x"] == [(step, step / 2) for step in steps]
        assert limit / 2 <= len(steps) < limit or count < limit
        assert history.latest == {"x": count / 2}
        if count < limit:
            assert (len(steps), history.thinned) == (count, {})


def test_a_name_that_is_seldom_logged_keeps_all_of_its_values() -> None:
    history = History(10)
    for step in range(1, 101):
        values = {"often": 1.0, "seldom": 2.0} if step % 20 == 0 else {"often": 1.0}
        history.add(Record(Counters(step=step), 0.0, values))
    assert [step for step, _ in history["seldom"]] == [20, 40, 60, 80, 100]
    assert set(history.thinned) == {"often"}


def test_all_names_of_a_record_are_thinned_and_the_first_is_told_of_once() -> None:
    history = History(10)
    told = [history.add(Record(Counters(step=step), 0.0, {"a": 1.0, "b": 2.0})) for step in range(1, 100)]
    assert history["a"] == [(step, 1.0) for step, _ in history["b"]]
    (sentence,) = filter(None, told)
    assert sentence.startswith("'a' has 10 values: run.history keeps one in 2 of them from here on")


def test_what_it_holds_and_what_it_saves_stay_bounded_by_a_limit_of_use() -> None:
    history = filled(100_000, 1000)
    assert sys.getsizeof(history["x"]) < 20_000
    steps, values, *_ = history.state_dict()["x"]
    assert steps.dtype is torch.int64
    assert values.dtype is torch.float64
    assert len(steps) == len(values) < 1000
    with pytest.raises(ValueError, match="limit must be at least 4 values of a name; got 1"):
        History(1)


def test_it_goes_on_after_a_checkpoint_as_if_there_had_been_none() -> None:
    for cut in range(1, 60):
        saved = filled(cut, 10).state_dict()
        history = History.from_state(saved, 10)
        for step in range(cut + 1, 61):
            history.add(Record(Counters(step=step), 0.0, {"x": step / 2}))
        assert first_difference(history.state_dict(), filled(60, 10).state_dict()) is None


@on(Callback.on_setup)
def few(run: Run) -> None:
    run.history.limit = 8


@on(Callback.on_step_end)
def count(run: Run) -> None:
    run.log("steps", run.progress.step)


def test_a_run_says_so_once_and_its_file_has_all(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[few, count], epochs=4, directory=tmp_path)
    assert [step for step, _ in run.history["steps"]] == [1, 5, 9, 13, 17, 20]
    assert [decision.what for decision in run.decisions].count("history thinned") == 1
    assert "'steps' has 8 values" in run.why("history thinned")
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["steps"] for line in lines] == list(range(1, 21))


def test_a_run_that_continues_has_the_history_of_a_whole_one() -> None:
    def make(directory: Path) -> Trainer:
        return tiny_trainer(callbacks=[few, count, Checkpoint("1 epoch")], epochs=6, seed=1, directory=directory)

    prove_resume(make, at=[3, 8, 9, 21], in_process=True)
