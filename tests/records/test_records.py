"""What is logged in a step becomes one record, reduced over batches and ranks, and history keeps a bounded view of them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy
import pytest
import torch

from cadenza import Audio, Callback, Figure, Histogram, History, Image, Record, Run, Text, Trainer, on
from cadenza.callbacks import Checkpoint, LogTraining
from cadenza.records import metric_buffer
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.status.encoding import first_difference
from cadenza.status.progress import Counters
from cadenza.testing import launch, prove_resume, tiny_run, tiny_trainer
from tests.distributed.parts import own_rank, trainer


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


def test_what_is_logged_at_the_end_of_an_epoch_or_of_the_fit_or_before_an_error_still_comes_out() -> None:
    run = tiny_run(callbacks=[logging(("e", 1), moment=Callback.on_epoch_end), logging(("f", 2), moment=Callback.on_fit_end)])
    assert run.history.latest == {"e": 1, "f": 2}
    seen: list[Any] = []
    keep = on(Callback.on_log)(lambda run, record: seen.append(record.values))
    fail = on(Callback.on_step_end)(lambda run: run.history["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        tiny_run(callbacks=[logging(("a", 1)), fail, keep])
    assert seen == [{"a": 1}]


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


def test_media_travel_beside_the_numbers_and_are_copies_and_those_of_a_wrong_shape_are_errors() -> None:
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
    with pytest.raises(KeyError, match=r"nothing was logged as 'train/los'\. Did you mean 'train/loss'\?"):
        history.latest["train/los"]
    assert history.latest.get("train/los") is None


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


def test_all_names_are_thinned_but_one_that_is_seldom_logged_and_the_first_is_told_of_once() -> None:
    history, told = History(10), list[str | None]()
    for step in range(1, 101):
        values = {"a": 1.0, "b": 2.0} | ({"seldom": 3.0} if step % 20 == 0 else {})
        told.append(history.add(Record(Counters(step=step), 0.0, values)))
    assert history["a"] == [(step, 1.0) for step, _ in history["b"]]
    assert [step for step, _ in history["seldom"]] == [20, 40, 60, 80, 100]
    assert set(history.thinned) == {"a", "b"}
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


# -- run.log(..., reduce=...), against numpy ---------------------------------------------------------


WAYS: dict[str, Callable[[Any], float]] = {"mean": numpy.mean, "sum": numpy.sum, "max": numpy.max, "min": numpy.min}
VALUES: dict[str, Sequence[Any]] = {
    "floats": [0.1, -2.5, 3e7],
    "whole numbers": [3, -4, 2**40],
    "bools": [True, False, True],
    "one": [0.25],
    "nan": [1.0, math.nan, 2.0],
    "infinite": [1.0, math.inf, 2.0],
    "both infinities": [math.inf, -math.inf],
    "tensors": [torch.tensor(2.0), torch.tensor(5), torch.tensor(True), torch.tensor(0.5, dtype=torch.bfloat16)],
    "numpy": [numpy.float32(0.5), numpy.int64(3)],
}


def buffered(way: str, values: Sequence[Any], weights: Sequence[Any] | None = None) -> float:
    buffer = MetricBuffer()
    for value, weight in zip(values, weights or [None] * len(values), strict=True):
        buffer.add_reduced("x", value, way, weight)
    [record] = buffer.take(Counters(), wait=True)
    return record.values["x"]


def plain(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values]


@pytest.fixture(params=["host", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take tensors on the CPU for those of a device, which must stay unread until the record is taken."""
    if request.param == "device":
        monkeypatch.setattr(metric_buffer, "_loggable", lambda name, value: torch.as_tensor(value))


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_values_of_a_step_become_one_number(way: str, kind: str) -> None:
    expected = WAYS[way](plain(VALUES[kind]))
    assert buffered(way, VALUES[kind]) == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.usefixtures("where")
def test_the_last_value_is_the_last_and_a_mean_may_be_weighted() -> None:
    assert buffered("last", [3.0, 1.0, 2.0]) == 2.0
    values, weights = [0.5, 2.0, -1.0], [10, 30, 2.5]
    assert buffered("mean", values, weights) == pytest.approx(float(numpy.average(values, weights=weights)))
    assert buffered("mean", [0.5, math.nan], [4, 0]) == 0.5
    assert math.isnan(buffered("mean", [math.nan, 7.0], [0, 0])), "no value counts"


def test_batches_of_a_window_and_several_hooks_are_reduced_together() -> None:
    class Log(Callback):
        def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None:
            run.log("batches", 1, reduce="sum")
            run.log("inputs", batch[0].mean(), reduce="mean", weight=len(batch[0]))
            run.log("largest", batch[0].max(), reduce="max")
            run.log("plain", run.progress.batch)

        def on_step_end(self, run: Run) -> None:
            run.log({"batches": 10}, reduce="sum")

    run = tiny_run(accumulate=2, batches=5, callbacks=[Log()])
    inputs = torch.linspace(-1, 1, 10).split(4)
    assert [value for _, value in run.history["batches"]] == [12, 12, 11]
    assert [value for _, value in run.history["inputs"]] == pytest.approx([float(part.mean()) for part in inputs], abs=1e-7)
    assert [value for _, value in run.history["largest"]] == pytest.approx([float(part.max()) for part in inputs])
    assert [value for _, value in run.history["plain"]] == [2, 4, 5]
    assert run.history.names == ["batches", "inputs", "largest", "plain"]


def logged(ranks: int, script: Callable[[Run, int], None], names: Sequence[str]) -> list[dict[str, float]]:
    """Return the latest values of a run of one step on each rank. The script is given the rank."""

    def work() -> dict[str, float]:
        log = on(Callback.on_step_end)(lambda run: script(run, own_rank()))
        latest = trainer(max_steps=1, callbacks=[log]).fit().history.latest
        return {name: latest[name] for name in names}

    return launch(work, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("uneven", [False, True])
def test_ranks_are_reduced_together(ranks: int, uneven: bool) -> None:
    """With names of one rank alone, ranks exchange what they have in another way."""
    values = {rank: [rank + 0.5, 3.0 * (-1) ** rank, 0.1][: 1 + rank if uneven else 3] for rank in range(ranks)}
    kinds = {"": 0.0, "/nan": math.nan, "/inf": math.inf}

    def script(run: Run, rank: int) -> None:
        for way in (*WAYS, "last"):
            for kind, odd in kinds.items():
                for value in values[rank]:
                    run.log(f"{way}{kind}", value + odd if rank == 1 else value, reduce=way)  # type: ignore[arg-type]
        run.log("weighted", rank, reduce="mean", weight=2.0**rank)
        run.log("default", float(rank))
        if uneven and rank == 1:
            run.log("alone", 7, reduce="max")

    everything = [value for own in values.values() for value in own]
    odd = [value for rank, own in values.items() if rank != 1 for value in own]
    expected = {way: function(everything) for way, function in WAYS.items()}
    expected |= {f"{way}/nan": math.nan for way in WAYS} | {f"{way}/inf": math.inf for way in ("mean", "sum", "max")}
    expected |= {"min/inf": min(odd), "weighted": numpy.average(range(ranks), weights=[2.0**rank for rank in range(ranks)])}
    expected |= {f"last{kind}": values[0][-1] for kind in kinds} | {"default": (ranks - 1) / 2}
    expected |= {"alone": 7.0} if uneven else {}
    assert logged(ranks, script, [*expected]) == [pytest.approx(expected, nan_ok=True)] * ranks


def test_more_names_than_one_exchange_holds_are_reduced() -> None:
    def script(run: Run, rank: int) -> None:
        for number in range(40):
            run.log({f"mean {number}": rank * number}, reduce="mean")
            run.log({f"max {number}": rank * number}, reduce="max")

    expected = {f"mean {number}": number / 2 for number in range(40)} | {f"max {number}": number for number in range(40)}
    assert logged(2, script, [*expected]) == [pytest.approx(expected)] * 2


def test_tensors_of_a_device_are_reduced_over_ranks_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_buffer, "_loggable", lambda name, value: torch.as_tensor(value))

    def script(run: Run, rank: int) -> None:
        for way in (*WAYS, "last"):
            for value in (torch.tensor(rank + 1.0), torch.tensor(-rank)):
                run.log(way, value, reduce=way)  # type: ignore[arg-type]
        run.log("default", torch.tensor(float(rank)))
        run.log("nan", torch.tensor(math.nan if rank else 1.0), reduce="min")

    values = [1.0, 0.0, 2.0, -1.0]
    expected = {way: function(values) for way, function in WAYS.items()} | {"last": 0.0, "default": 0.5, "nan": math.nan}
    assert logged(2, script, [*expected]) == [pytest.approx(expected, nan_ok=True)] * 2


def test_mixed_reductions_of_a_name_are_an_error_that_names_both() -> None:
    buffer = MetricBuffer()
    buffer.add_reduced("x", 1.0, "sum")
    buffer.add("y", 1.0)
    with pytest.raises(ValueError, match=r"'x' is logged with reduce='sum' and with reduce='max': expected one of the two"):
        buffer.add_reduced("x", 1.0, "max")
    with pytest.raises(ValueError, match=r"'x' is logged with reduce='sum' and without reduce="):
        buffer.add("x", 1.0)
    with pytest.raises(ValueError, match=r"'y' is logged without reduce= and with reduce='mean'"):
        buffer.add_reduced("y", 1.0, "mean")
    buffer.take(Counters(), wait=True)
    with pytest.raises(ValueError, match=r"'x' is logged with reduce='sum' and with reduce='min'"):
        buffer.add_reduced("x", 1.0, "min")


def test_ranks_that_reduce_a_name_in_different_ways_end_with_that_error() -> None:
    def script(run: Run, rank: int) -> None:
        run.log("x", 1.0, reduce="sum" if rank else "max")

    with pytest.raises(BaseExceptionGroup) as caught:
        logged(2, script, ["x"])
    assert "'x' is logged with reduce='max' and with reduce='sum'" in repr(caught.value.exceptions[0])


NO_NUMBER = r"run\.log\('x', \.\.\.\) takes a number, a tensor of shape \(\) or Image"
NO_NAME = "takes a name, such as 'train/lr', and a value, or a dict of them; got the name"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": 1.0, "reduce": "avg"}, ValueError, r"reduce must be one of 'mean', .*; got 'avg'. Did you mean 'mean'\?"),
        ({"value": 1.0, "reduce": "sum", "weight": 2}, ValueError, r"weight= is for reduce='mean'; got it for 'x' with"),
        ({"value": 1.0, "weight": 2}, ValueError, r"weight= is for reduce='mean'; got it for 'x' without reduce="),
        ({"value": 1.0, "reduce": "mean", "weight": -1}, ValueError, r"the weight of 'x' must be at least 0; got -1"),
        ({"value": 1.0, "reduce": "mean", "weight": math.nan}, ValueError, r"the weight of 'x' must be at least 0; got nan"),
        ({"value": Text("a"), "reduce": "sum"}, TypeError, r"reduce= is for numbers; got 'x' with a Text"),
        ({"value": torch.ones(2), "reduce": "sum"}, TypeError, r"takes a number, a tensor of shape \(\)"),
        ({"value": torch.ones(3)}, TypeError, r"got a tensor of shape \(3,\)\. Reduce it, or log Histogram\(tensor\)"),
        *(({"value": value}, TypeError, NO_NUMBER) for value in (None, "text", [1, 2], object(), 1j)),
        ({"value": 1, "reduce": "sum", "name": "tokens"}, ValueError, r"'tokens' is the name of a counter"),
        *(
            ({"value": 0.5, "name": name}, ValueError, f"Log the value as 'train/{name}'")
            for name in ("epoch", "step", "batch", "samples", "time")
        ),
        ({"value": 1, "reduce": "sum", "name": 3}, TypeError, r"run.log takes a name"),
        *(({"value": 0.5, "name": name}, TypeError, NO_NAME) for name in (None, 3, ("a", "b"))),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    log = on(Callback.on_step_end)(lambda run: run.log(**{"name": "x", **arguments}))
    with pytest.raises(error, match=message):
        tiny_run(callbacks=[log])
