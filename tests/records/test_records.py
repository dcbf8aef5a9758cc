"""What is logged in a step becomes one record: in history, in order, as plain numbers."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy
import pytest
import torch

from cadenza import Audio, Callback, Figure, Histogram, Image, Record, Run, Text, on
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.testing import tiny_run


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
