"""A profile you can trust: each nanosecond is counted once, where it belongs, and hooks that read a tensor are named."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Ema, Evaluate, LogTraining, StopOnNonFinite
from cadenza.callbacks.profile import Profile
from cadenza.hooks.dispatch import hooks_of
from cadenza.profiling.host_reads import READS
from cadenza.profiling.spans import HostRead, Timings
from cadenza.sinks import Console, JsonLines, ProgressBar
from cadenza.status.decisions import decide
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import failing
from tests.checkpoint.test_resume import with_everything as make

NAP_S = 0.02  # a bound from below: sleep never returns earlier, and load can only make it longer


def nap(*_: Any) -> None:
    time.sleep(NAP_S)


def timings(run: Run) -> Timings:
    """Return the run's profile; the rows sum to the wall time, always."""
    assert run.profile is not None
    profile = run.profile
    rows = [row.seconds for row in profile.rows]
    assert sum(rows) == pytest.approx(profile.wall_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in rows)
    return profile


def phases(run: Run) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in timings(run).phases}


def calls(run: Run) -> dict[str, int]:
    return {phase.name: phase.calls for phase in timings(run).phases}


def callbacks(run: Run) -> dict[tuple[str, str], tuple[int, float]]:
    return {(one.callback, one.moment): (one.calls, one.seconds) for one in timings(run).callbacks}


class PruneMoments(Callback, declares=True):
    def on_prune(self, run: Run, ratio: float) -> None:
        """Called after the smallest weights were set to zero."""


class Backward(torch.autograd.Function):
    """Takes its time on the way back."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        nap()
        return gradients[0]


class Moved:
    """A batch that takes its time on the way to the device."""

    def to(self, *_: Any, **__: Any) -> Tensor:
        nap()
        return torch.ones(2, 1)


def test_time_goes_to_the_phase_in_which_it_passes() -> None:
    def slow_batches() -> Iterator[Moved]:
        for _ in range(4):
            nap()
            yield Moved()

    def slow_loss(model: nn.Module, batch: Tensor) -> Any:
        nap()
        return Backward.apply(model(batch).sum())  # type: ignore[no-untyped-call]  # torch has no types there

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nap()
            return super().step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            nap()
            super().zero_grad(set_to_none)

    slow: dict[str, Any] = {"optimizer": lambda parameters: SlowSGD(parameters, lr=0.0), "compute_loss": slow_loss}
    spent = phases(tiny_run(callbacks=[Profile()], loader=slow_batches(), accumulate=2, **slow))
    for name, times in {"fetch": 4, "transfer": 4, "forward": 4, "backward": 4, "optimizer": 2, "zero_grad": 2}.items():
        assert spent[name] >= times * NAP_S, name


def test_calls_are_those_of_the_loop() -> None:
    run = tiny_run(callbacks=[Profile()], batches=5, accumulate=2, epochs=2)
    batches = dict.fromkeys(("transfer", "forward", "backward"), 10)
    assert calls(run) == {"setup": 1, "fetch": 12, **batches, "optimizer": 6, "zero_grad": 6, "loop": 6}
    assert timings(run).steps == 6


def test_each_evaluation_has_its_name_and_a_sanity_check_as_well() -> None:
    class SlowMetric:
        def update(self, predictions: Tensor, targets: Tensor) -> None:
            nap()

        def compute(self) -> float:
            return 0.0

        def reset(self) -> None: ...

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"predictions": model(batch[0]), "targets": batch[1]}

    judges = [
        Evaluate(tiny_loader(2), metrics={"a": SlowMetric()}, compute=compute, every="1 epoch", sanity_batches=1),
        Evaluate(tiny_loader(3), metrics={"a": SlowMetric()}, compute=compute, every="1 epoch", name="other"),
    ]
    run = tiny_run(callbacks=[Profile(), *judges], epochs=2)
    spent, counted = phases(run), calls(run)
    assert spent["evaluation eval"] >= 4 * NAP_S
    assert spent["evaluation other"] >= 6 * NAP_S
    assert spent["sanity eval"] >= NAP_S
    assert (counted["evaluation eval"], counted["evaluation other"], counted["sanity eval"]) == (2, 2, 1)


def test_saving_is_what_the_training_waits_for(tmp_path: Path) -> None:
    slow = on(Callback.on_save)(nap)
    run = tiny_run(callbacks=[Profile(), Checkpoint("2 steps", background=False), slow], steps=4, directory=tmp_path)
    counted = calls(run)["saving"]
    assert counted >= 2  # and the wait for the last at the end
    assert callbacks(run)["nap", "on_save"][1] >= 2 * NAP_S  # the callback's own time, not the saving's


@pytest.mark.parametrize("by", ["verbs", "hand"])
def test_a_step_fn_has_its_phases_and_what_it_does_itself_a_row(by: str) -> None:
    def step(run: Run, batch: Any) -> Tensor:
        loss: Tensor = run.model(batch[0]).sum() * 0.0
        if by == "verbs":
            nap()
            run.backward(loss)
            run.update()
            nap()
            loss = run.model(batch[0]).sum() * 0.0
            run.backward(loss)
            run.update()
        nap()
        return loss

    run = tiny_run(callbacks=[Profile()], step_fn=step, steps=2)
    spent, counted = phases(run), calls(run)
    assert spent["step_fn"] >= 2 * NAP_S
    assert counted["step_fn"] == 2
    if by == "verbs":
        assert spent["forward"] >= 4 * NAP_S
        assert (counted["forward"], counted["backward"], counted["optimizer"]) == (4, 4, 4)
    else:
        assert "forward" not in spent


def test_each_callback_at_each_moment_has_its_own_time() -> None:
    class Slow(Callback):
        def on_batch_start(self, run: Run, batch: Any) -> None:
            nap()

        def on_step_end(self, run: Run) -> None:
            nap()

    second = Slow()
    second.name = "second"
    filtered, closing = on(Callback.on_step_end, every=2)(nap), on(Callback.on_fit_start)(lambda run: run.at_end(nap))
    spent = callbacks(tiny_run(callbacks=[Profile(), Slow(), second, filtered, closing], steps=5))
    expected = {(who, moment): 5 for who in ("Slow", "second") for moment in ("on_batch_start", "on_step_end")}
    expected |= {("nap", "on_step_end"): 2, ("<lambda>", "at_end"): 1}
    for who_and_moment, count in expected.items():
        assert spent[who_and_moment][0] == count, who_and_moment
        assert spent[who_and_moment][1] >= count * NAP_S, who_and_moment


class Pruned(PruneMoments):
    def on_prune(self, run: Run, ratio: float) -> None:
        nap()


def test_what_happens_inside_of_a_callback_is_not_counted_twice_and_inside_of_the_forward_pass_does_not_end_it() -> None:
    outer = on(Callback.on_step_end)(lambda run: run.fire(PruneMoments.on_prune, 0.1))
    run = tiny_run(callbacks=[Profile(), outer, Pruned()], steps=3)
    spent = callbacks(run)
    assert spent["Pruned", "on_prune"] >= (3, 3 * NAP_S)
    inside = sum(seconds for _, seconds in spent.values()) + sum(phases(run).values())
    assert inside == pytest.approx(timings(run).wall_s, abs=1e-6)

    def loss(model: nn.Module, batch: Any) -> Any:
        nap()
        live[0].fire(PruneMoments.on_prune, 0.1)
        nap()
        return model(batch[0]).sum()

    live: list[Run] = []
    take = on(Callback.on_fit_start)(live.append)
    run = tiny_run(callbacks=[Profile(), Pruned(), take], steps=2, compute_loss=loss)
    assert phases(run)["forward"] >= 4 * NAP_S
    assert callbacks(run)["Pruned", "on_prune"] >= (2, 2 * NAP_S)


def test_two_in_one_list_are_both_right_and_write_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Profile(window=(0, 1)), Profile(window=(1, 1))
    tiny_run(callbacks=[first, second, on(Callback.on_step_end)(nap)], steps=3, directory=tmp_path)
    for profile in (first, second):
        assert sum(row.seconds for row in profile.table.rows) == pytest.approx(profile.table.wall_s, abs=1e-6)
        assert {one.callback for one in profile.table.callbacks} >= {"nap"}
    assert capsys.readouterr().out.count("profile: ") == 2
    written = {"profile.json", "profile-2.json", "trace.json", "trace-2.json"}
    assert {path.name for path in tmp_path.glob("*.json")} >= written


def test_each_fit_is_measured_anew_also_one_that_continues(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        return tiny_trainer(callbacks=[Profile(), Checkpoint(), on(Callback.on_load)(nap)], steps=steps, directory=tmp_path)

    assert timings(trainer(2).fit()).steps == 2
    resumed = trainer(5).fit(resume="auto")
    assert timings(resumed).steps == 3
    assert calls(resumed)["backward"] == 3
    assert callbacks(resumed)["nap", "on_load"] >= (1, NAP_S)


def test_the_table_shows_every_row_and_can_be_read_while_the_run_goes_on_but_not_before() -> None:
    profile, shown = Profile(), []
    with pytest.raises(RuntimeError, match="no table before its run is set up"):
        _ = profile.table
    look = on(Callback.on_step_end, at=2)(lambda run: shown.append(str(profile.table)))
    run = tiny_run(callbacks=[profile, look], steps=3)
    assert shown[0].startswith("profile: ")
    assert "2 steps" in shown[0]
    assert all(f"\n{phase.name} " in str(run.profile) for phase in timings(run).phases)
    assert "\n<lambda>, on_step_end " in str(run.profile)


# -- a run that is watched does what it does unwatched ------------------------------------------------


def test_moments_counters_weights_and_random_streams_are_the_same_bits() -> None:
    def trained(*callbacks: Callback) -> tuple[Any, list[Tensor]]:
        recorder, drawn = Recorder(), list[Tensor]()
        draw = on(Callback.on_batch_end)(lambda run, batch, outputs: drawn.append(torch.rand(()) + outputs["loss"].item()))
        others = [recorder, Evaluate(tiny_loader(2)), draw, StopOnNonFinite()]
        run = tiny_run(callbacks=[*callbacks, *others], epochs=6, accumulate=2, seed=1)
        return recorder.seen, [*drawn, *run.model.parameters()]

    (plain, before), (watched, after) = trained(), trained(Profile())
    assert watched == plain
    assert all(map(torch.equal, before, after))


def test_the_profile_of_a_run_that_failed_is_complete_and_errors_are_named_as_ever() -> None:
    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        nap()
        decide(run, "noticed", "just so")
        raise ValueError("broken")

    profile, live = Profile(), list[Run]()
    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[profile, on(Callback.on_fit_start)(live.append), fail])
    assert caught.value.__notes__ == ["raised in fail.on_step_end (callback 3 of 3) at epoch 1, step 2, batch 2"]
    assert callbacks(live[0])["fail", "on_step_end"] >= (1, NAP_S)
    assert profile.table == live[0].profile
    after = Recorder(Callback.on_fit_end)  # an end moment reaches all, though one failed
    with pytest.raises(ZeroDivisionError):
        tiny_run(callbacks=[Profile(), failing(Callback.on_fit_end, at=1), after], steps=1)
    assert after.names == ["on_fit_end"]


def test_a_callback_that_is_disabled_is_called_no_more_and_keeps_its_row(caplog: pytest.LogCaptureFixture) -> None:
    class Fragile(Callback):
        on_fault = "disable"

        def on_step_end(self, run: Run) -> None:
            nap()
            raise OSError("tracker down")

        def on_fit_end(self, run: Run) -> None:
            raise AssertionError("called though it is disabled")

    after = Recorder(Callback.on_step_end)
    with caplog.at_level(logging.CRITICAL, logger="cadenza"):
        run = tiny_run(callbacks=[Profile(), Fragile(), after], steps=4)
    assert len(run.faults) == 1
    assert len(after.names) == 4
    count, seconds = callbacks(run)["Fragile", "on_step_end"]
    assert (count, seconds >= NAP_S) == (1, True)
    assert ("Fragile", "on_fit_end") not in callbacks(run)


def test_an_evaluation_that_fails_ends_its_span_and_the_run_ends_the_profile() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("broken")

    judge = Evaluate(tiny_loader(2), compute=compute)

    @on(Callback.on_step_end)
    def careful(run: Run) -> None:
        with pytest.raises(ValueError, match="broken"):
            judge.evaluate(run)
        nap()

    run = tiny_run(callbacks=[Profile(), careful], steps=2)
    assert callbacks(run)["careful", "on_step_end"] >= (2, 2 * NAP_S)
    run = tiny_run(callbacks=[Profile(), Callback()], steps=1)  # of a run that is over, hooks are no longer measured
    assert hooks_of(run).profiler is None
    assert hooks_of(run).on_step_start.__func__ is Callback.on_step_start  # type: ignore[attr-defined]  # a method again


# -- what it leaves in the run's directory ------------------------------------------------------------


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
    assert ("Evaluate.evaluate", "evaluation eval") in parents


def test_what_is_not_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile.json").mkdir()
    run = tiny_run(callbacks=[Profile(window=(50, 3))], steps=3, directory=tmp_path)
    assert run.outcome.kind == "finished"  # type: ignore[union-attr]
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


def test_without_a_directory_only_what_is_asked_for_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    callbacks = [Profile(torch_profiler={**recorded, "active": 4}), failing(Callback.on_step_end, at=3)]
    with pytest.raises(ZeroDivisionError):
        tiny_run(callbacks=callbacks, steps=6, directory=tmp_path / "failing")
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
    look = on(Callback.on_batch_end)(lambda run, batch, outputs: outputs["loss"].item())
    read = reads(look, accumulate=2, batches=30)["<lambda>.on_batch_end"]
    assert (read.reads, read.steps) == (6, 3), "two batches of a step are two reads in one step"


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
    evaluate = Evaluate(tiny_loader(2), every="1 step")
    assert not reads(Log(), evaluate, LogTraining("1 step"), *sinks, Ema(0.9), compute_loss=loss)


def test_of_cadenzas_own_only_what_must_know_at_once_is_named(tmp_path: Path) -> None:
    """`StopOnNonFinite` must know before the update, `Recover` before the next step, and `Fingerprint` copies all values.

    Their docstrings say so.
    """
    run = make(tmp_path).fit()
    assert run.profile is not None
    assert {read.callback for read in run.profile.host_reads} == {"StopOnNonFinite", "Recover", "Fingerprint"}


def test_an_error_in_a_sampled_step_is_unchanged_and_the_methods_are_put_back() -> None:
    def broken(watched: bool) -> list[str]:
        fail = on(Callback.on_step_end, at=7)(lambda run: torch.ones(2).item())
        with pytest.raises(RuntimeError, match="a Tensor with 2 elements") as caught:
            tiny_run(callbacks=[*([Profile()] if watched else []), fail], steps=12)
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if frame.name != "broken"]

    assert broken(watched=True) == broken(watched=False)


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
