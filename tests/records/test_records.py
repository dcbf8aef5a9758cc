"""What is logged in a step becomes one record, and history keeps a bounded view of them, the same after a resume."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy
import pytest
import torch

from cadenza import Audio, Callback, Figure, Histogram, History, Image, Record, Run, Text, Trainer, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.status.plain import first_difference
from cadenza.status.progress import Counters
from cadenza.testing import prove_resume, tiny_run, tiny_trainer


def logging(*pairs: tuple[str, Any], moment: Any = Callback.on_step_end) -> Callback:
    def log(run: Run, *_: Any) -> None:
        for name, value in pairs:
            run.log(name, value)

    return on(moment)(log)


def records_of(*callbacks: Callback, **arguments: Any) -> list[Record]:
    records: list[Record] = []
    keep = on(Callback.on_log)(lambda run, record: records.append(record))
    tiny_run(callbacks=[*callbacks, keep], **arguments)
    return records


def test_all_that_is_logged_in_a_step_is_one_record_and_a_later_value_of_a_name_replaces_the_earlier() -> None:
    early = logging(("a", 0), ("a", 1), moment=Callback.on_batch_start)
    records = records_of(early, logging(("b", 2.5)), batches=2)
    assert [(record.step, dict(record.values)) for record in records] == [(1, {"a": 1, "b": 2.5}), (2, {"a": 1, "b": 2.5})]


def test_sinks_get_a_record_before_the_next_step_starts() -> None:
    order: list[str] = []
    told = on(Callback.on_log)(lambda run, record: order.append(f"log {record.step}"))
    begun = on(Callback.on_step_start)(lambda run: order.append(f"start {run.progress.step + 1}"))
    tiny_run(callbacks=[logging(("a", 1)), told, begun], steps=2)
    assert order == ["start 1", "log 1", "start 2", "log 2"]


def test_what_is_logged_at_the_end_of_an_epoch_or_of_the_fit_still_comes_out() -> None:
    run = tiny_run(callbacks=[logging(("e", 1), moment=Callback.on_epoch_end), logging(("f", 2), moment=Callback.on_fit_end)])
    assert run.history.latest == {"e": 1, "f": 2}


def test_what_was_logged_before_an_error_still_comes_out() -> None:
    records: list[Record] = []

    def fail(run: Run) -> None:
        raise RuntimeError("broken")

    keep = on(Callback.on_log)(lambda run, record: records.append(record))
    with pytest.raises(RuntimeError):
        tiny_run(callbacks=[logging(("a", 1)), on(Callback.on_step_end)(fail), keep])
    assert [record.values for record in records] == [{"a": 1}]


@pytest.mark.parametrize(
    "value",
    [3, 2.5, torch.tensor(2.5), torch.tensor(3), numpy.float32(2.5), numpy.float64(2.5), numpy.int64(3), numpy.array(3)],
)
def test_numbers_of_all_kinds_become_plain_ones(value: Any) -> None:
    logged = records_of(logging(("a", value)), steps=1)[0].values["a"]
    assert isinstance(logged, int | float)
    assert logged == value


def test_a_tensor_is_logged_as_it_was_when_it_was_logged() -> None:
    weights: list[float] = []

    @on(Callback.on_before_optimizer_step)
    def log_weight(run: Run) -> None:
        weight = next(run.model.parameters())[0, 0]
        weights.append(weight.item())
        run.log("weight", weight)

    assert tiny_run(callbacks=[log_weight], steps=1).history["weight"] == [(1, weights[0])]


@pytest.mark.parametrize("value", [None, "text", [1, 2], object(), 1j])
def test_what_is_no_number_is_an_error_that_names_it(value: Any) -> None:
    with pytest.raises(TypeError, match=r"run\.log\('a', \.\.\.\) takes a number, a tensor of shape \(\) or Image"):
        tiny_run(callbacks=[logging(("a", value))])


def test_a_tensor_with_a_shape_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"got a tensor of shape \(3,\)\. Reduce it, or log Histogram\(tensor\)"):
        tiny_run(callbacks=[logging(("a", torch.ones(3)))])


@pytest.mark.parametrize("name", ["epoch", "step", "batch", "samples", "time"])
def test_a_number_cannot_take_the_name_of_a_counter(name: str) -> None:
    with pytest.raises(ValueError, match=f"Log the value as 'train/{name}'"):
        MetricBuffer().add(name, 0.5)


@pytest.mark.parametrize("name", [None, 3, ("a", "b")])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(TypeError, match="takes a name, such as 'train/lr', and a value, or a dict of them; got the name"):
        MetricBuffer().add(name, 0.5)


def test_media_travel_beside_the_numbers_and_are_copies() -> None:
    pixels = torch.zeros(3, 2, 2)
    media = {
        "image": Image(pixels),
        "sound": Audio(torch.zeros(8), rate=8000),
        "spread": Histogram(torch.zeros(2, 2)),
        "words": Text("**bold**"),
        "figure": Figure(plt.figure()),
    }
    pixels.fill_(1)
    record = records_of(logging(*media.items(), ("n", 1)), steps=1)[0]
    assert record.media == media
    assert record.values == {"n": 1}
    assert cast("Image", record.media["image"]).pixels.sum() == 0


def test_media_of_a_wrong_shape_are_errors() -> None:
    with pytest.raises(ValueError, match=r"an Image has shape \(C, H, W\) with C of 1, 3 or 4; got \(2, 2\)"):
        Image(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"an Audio has shape \(T,\); got \(1, 8\)"):
        Audio(torch.zeros(1, 8), rate=8000)


def test_tensors_that_are_no_longer_wanted_do_not_hold_their_graph() -> None:
    buffer = MetricBuffer()
    loss = torch.ones((), requires_grad=True) * 2
    buffer.add("loss", loss)
    assert not buffer.idle
    assert [record.values for record in buffer.take(tiny_run(steps=1).progress.now(), wait=True)] == [{"loss": 2.0}]
    assert buffer.idle


def test_numbers_that_are_not_finite_are_valid_json() -> None:
    values = (("nan", math.nan), ("up", math.inf), ("down", -math.inf), ("one", 1.0))
    line = json.loads(records_of(logging(*values), steps=1)[0].to_json(), parse_constant=pytest.fail)
    assert [line[name] for name, _ in values] == ["NaN", "Infinity", "-Infinity", 1.0]
    assert (line["epoch"], line["step"], line["batch"], line["samples"]) == (0, 1, 1, 2)


# -- history, a bounded view of what was logged --------------------------------------------------------


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
