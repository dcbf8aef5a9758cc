"""``run.log(..., reduce=...)``: the values of a step, and of all ranks, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.records import metric_buffer
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.record import Text
from cadenza.status.progress import Counters
from cadenza.testing import launch, tiny_run
from tests.distributed.parts import own_rank, trainer

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
    assert buffered("mean", [math.nan, 7.0], [0, 0]) == 0


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
    def unread(value: Any) -> bool:
        return value.on_device if hasattr(value, "on_device") else isinstance(value, torch.Tensor)

    monkeypatch.setattr(metric_buffer, "_loggable", lambda name, value: torch.as_tensor(value))
    monkeypatch.setattr(metric_buffer, "_on_device", unread)

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
        ({"value": 1, "reduce": "sum", "name": "tokens"}, ValueError, r"'tokens' is the name of a counter"),
        ({"value": 1, "reduce": "sum", "name": 3}, TypeError, r"run.log takes a name"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    log = on(Callback.on_step_end)(lambda run: run.log(**{"name": "x", **arguments}))
    with pytest.raises(error, match=message):
        tiny_run(callbacks=[log])
