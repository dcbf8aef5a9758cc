"""What a profile leaves in the run's directory, and the hooks that it names: those that read a tensor at every step."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Ema, Evaluate, LogTraining, StopOnNonFinite
from cadenza.callbacks.profile import Profile
from cadenza.profiling.host_reads import READS
from cadenza.profiling.spans import HostRead
from cadenza.sinks import Console, JsonLines, ProgressBar
from cadenza.testing import tiny_loader, tiny_run
from tests.callbacks.parts import failing
from tests.callbacks.test_profile import NAP_S, nap
from tests.checkpoint.test_resume import with_everything as make


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


def test_profile_json_has_the_form_that_reports_read_and_no_trace_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[Profile(trace=None), on(Callback.on_step_end)(nap)], steps=3, directory=tmp_path)
    assert run.profile is not None
    data = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    assert data == run.profile.to_dict()
    assert list(data) == ["wall_s", "steps", "phases", "callbacks", "host_reads", "ranks"]
    assert data["steps"] == 3
    assert all(list(row) == ["name", "calls", "seconds"] for row in data["phases"])
    assert all(list(row) == ["callback", "moment", "calls", "seconds"] for row in data["callbacks"])
    assert "profile: " in (tmp_path / "console.log").read_text(encoding="utf-8")
    assert not (tmp_path / "trace.json").exists()


def test_the_trace_shows_the_steps_of_its_window(tmp_path: Path) -> None:
    tiny_run(callbacks=[Profile(window=(2, 3)), on(Callback.on_step_end)(nap)], steps=8, directory=tmp_path)
    events = events_in(tmp_path / "trace.json")
    names = [event["name"] for event in events]
    for phase in ("fetch", "transfer", "forward", "backward", "zero_grad"):
        assert names.count(phase) == 3, phase
    assert names.count("optimizer") == 6  # gradients are unscaled in a span of their own
    assert names.count("nap.on_step_end") == 3  # of the step before: the window opens at on_step_end
    assert all(event["dur"] >= NAP_S * 1e6 for event in events if event["name"] == "nap.on_step_end")


def test_spans_are_nested_and_none_overlaps_another(tmp_path: Path) -> None:
    callbacks = [Profile(window=(0, 10)), on(Callback.on_step_end)(nap), Evaluate(tiny_loader(2), every="1 step")]
    tiny_run(callbacks=callbacks, steps=4, directory=tmp_path)
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


def test_what_is_not_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile.json").mkdir()
    run = tiny_run(callbacks=[Profile(window=(50, 3))], steps=3, directory=tmp_path)
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    (failed,) = [message for message in caplog.messages if "profile.json could not be written" in message]
    late = "trace.json was not written: the run ended before step 50. Give Profile(window=(0, 20))."
    assert sorted(caplog.messages) == sorted([failed, late])
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


def test_torch_profiler_records_its_window_and_after_an_error_that_of_the_next_run(tmp_path: Path) -> None:
    recorded = {"wait": 1, "warmup": 1, "active": 2, "record_shapes": True}
    with pytest.raises(ValueError, match="torch has one profiler at a time; 2 Profiles"):
        tiny_run(callbacks=[Profile(torch_profiler={}), Profile(torch_profiler={})], directory=tmp_path / "two")
    with pytest.raises(ZeroDivisionError):
        tiny_run(
            callbacks=[Profile(torch_profiler={**recorded, "active": 4}), failing(Callback.on_step_end, at=3)],
            steps=6,
            directory=tmp_path / "failing",
        )
    tiny_run(callbacks=[Profile(torch_profiler=recorded)], steps=6, directory=tmp_path / "next")
    trace = json.loads((tmp_path / "next" / "torch-trace.json").read_text(encoding="utf-8"))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert any("aten::" in name for name in names)
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2


# -- hooks that read a tensor on the host -------------------------------------------------------------


class Reads(Callback):
    """Reads the loss at every step."""

    def on_step_end(self, run: Run) -> None:
        assert run.loss is not None
        self.last = run.loss.item()


@pytest.fixture(autouse=True)
def _methods_are_as_before() -> Iterator[None]:
    yield
    assert not set(READS) & vars(Tensor).keys()


def reads(*callbacks: Callback, steps: int = 12, **arguments: Any) -> dict[str, HostRead]:
    """Return what is named, by hook."""
    run = tiny_run(callbacks=[Profile(trace=None), *callbacks], steps=steps, **arguments)
    assert run.profile is not None
    return {f"{read.callback}.{read.moment}": read for read in run.profile.host_reads}


def test_a_hook_that_reads_the_loss_at_every_step_is_named_with_its_line() -> None:
    read = reads(Reads())["Reads.on_step_end"]
    assert (read.how, read.reads, read.steps, read.sampled) == ("tensor.item()", 3, 3, 3)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    name, _, number = read.location.partition(":")
    assert name == Path(__file__).name
    assert lines[int(number) - 1].strip() == "self.last = run.loss.item()"


def test_it_is_reported_once_and_recorded_as_a_decision(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        run = tiny_run(callbacks=[Profile(), Profile(), Reads()], steps=12, directory=tmp_path)
    assert len(caplog.messages) == 1
    first, advice = caplog.messages[0].split("\n")
    assert first.startswith("Reads.on_step_end read a tensor on the host in each of 3 sampled steps (tensor.item() at ")
    assert "Log the tensor itself with run.log" in advice
    assert f"! {first}" in capsys.readouterr().out
    noted = [decision for decision in run.decisions if decision.what == "read on the host"]
    assert [(decision.who, decision.when.step) for decision in noted] == [("Reads", 8)]
    written = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["host_reads"]
    assert [(one["callback"], one["moment"], one["steps"]) for one in written] == [("Reads", "on_step_end", 3)]


@pytest.mark.parametrize(
    ("read", "how"),
    [
        (lambda loss: float(loss.detach()), "float(tensor)"),
        (lambda loss: int(loss.detach()), "int(tensor)"),
        (lambda loss: not (loss > 1e9), "bool(tensor)"),
        (lambda loss: loss.tolist(), "tensor.tolist()"),
        (lambda loss: loss.detach().numpy(), "tensor.numpy()"),
        (lambda loss: loss.detach().cpu(), "tensor.cpu()"),
        (lambda loss: f"{loss.detach():.3f}", "tensor.item()"),  # what torch does inside; the line is ours
    ],
)
def test_every_way_to_read_counts(read: Any, how: str) -> None:
    @on(Callback.on_batch_end)
    def look(run: Run, batch: Any, outputs: Any) -> None:
        read(outputs["loss"])

    found = reads(look)["look.on_batch_end"]
    assert found.how == how
    assert found.location.startswith(Path(__file__).name)


def test_two_batches_of_a_step_are_two_reads_in_one_step() -> None:
    look = on(Callback.on_batch_end)(lambda run, batch, outputs: outputs["loss"].item())
    read = reads(look, accumulate=2, batches=30)["<lambda>.on_batch_end"]
    assert (read.reads, read.steps) == (6, 3)


def test_a_cadence_is_not_named_and_one_of_every_second_step_is() -> None:
    seldom = on(Callback.on_step_end, every=50)(Reads().on_step_end)
    once = on(Callback.on_step_end, at=7)(Reads().on_step_end)
    assert not reads(seldom, once, steps=60)
    half = reads(on(Callback.on_step_end, when=lambda run: run.progress.step % 2 == 1)(Reads().on_step_end))
    assert half["on_step_end.on_step_end"].often.startswith("in 2 of 3 sampled steps")
    assert not reads(Reads(), steps=5)  # the one step may be that of a cadence
    assert reads(Reads(), steps=6)["Reads.on_step_end"].sampled == 2


def test_what_sinks_evaluations_and_the_training_itself_read_does_not_count(tmp_path: Path) -> None:
    class Log(Callback):
        def on_step_end(self, run: Run) -> None:
            assert run.loss is not None
            run.log("loss", run.loss)
            run.log({"twice": run.loss * 2})

        def on_eval_end(self, run: Run, evaluation: Any) -> None:
            torch.ones(()).item()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = nn.functional.mse_loss(model(batch[0]), batch[1])
        value.item()
        return value

    sinks = [ProgressBar(), Console("1 step"), JsonLines(tmp_path / "log.jsonl")]
    assert not reads(
        Log(), Evaluate(tiny_loader(2), every="1 step"), LogTraining("1 step"), *sinks, Ema(0.9), compute_loss=loss
    )


def test_of_cadenzas_own_only_what_must_know_at_once_is_named(tmp_path: Path) -> None:
    """`StopOnNonFinite` must know before the update, `Recover` before the next step, and `Fingerprint` copies all values.

    Their docstrings say so.
    """
    run = make(tmp_path).fit()
    assert run.profile is not None
    assert {read.callback for read in run.profile.host_reads} == {"StopOnNonFinite", "Recover", "Fingerprint"}


def test_an_error_in_a_sampled_step_is_unchanged_and_the_methods_are_put_back() -> None:
    def broken(watched: bool) -> list[str]:
        @on(Callback.on_step_end, at=7)
        def fail(run: Run) -> None:
            torch.ones(2).item()

        with pytest.raises(RuntimeError, match="a Tensor with 2 elements") as caught:
            tiny_run(callbacks=[*([Profile()] if watched else []), fail], steps=12)
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if frame.name != "broken"]

    assert broken(watched=True) == broken(watched=False)


def test_weights_and_random_streams_are_the_same_bits() -> None:
    def drawn(*callbacks: Callback) -> list[Tensor]:
        seen: list[Tensor] = []
        draw = on(Callback.on_batch_end)(lambda run, batch, outputs: seen.append(torch.rand(()) + outputs["loss"].item()))
        run = tiny_run(callbacks=[*callbacks, draw, StopOnNonFinite()], steps=12, seed=1)
        return [*seen, *run.model.parameters()]

    for one, other in zip(drawn(), drawn(Profile()), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_model_that_a_hook_calls_is_compiled_as_ever() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda value: (value * 2).sum(), backend=counter)

    @on(Callback.on_step_end)
    def call(run: Run) -> None:
        if run.progress.step in (6, 7, 9):  # for the first time in a sampled step
            compiled(torch.ones(3)).item()

    assert set(reads(call)) == {"call.on_step_end"}
    assert counter.frame_count == 1
