"""LogTraining, Timer, DeviceStats and limits: loss, rates, speed and the device in records. Alert: rules on records."""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as threads
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, attach, on, supervised
from cadenza.callbacks import Alert, AlertMessage, Checkpoint, Evaluate, LearningRate, Limit, LogTraining, Timer
from cadenza.callbacks.device_stats import DeviceStats, _of_device
from cadenza.callbacks.time_limit import TimeLimit
from cadenza.engine.session import session_of
from cadenza.engine.training_log import known_peak
from cadenza.hooks.subscription import Subscription
from cadenza.records import read_decisions
from cadenza.records.record import Record
from cadenza.report.story import story_at
from cadenza.testing import Recorder, launch, tiny_loader, tiny_run, tiny_trainer
from cadenza.trackers import alert_targets
from tests.callbacks.parts import Clock, failing, halving, own_step, two_optimizers
from tests.distributed.parts import driver
from tests.distributed.parts import trainer as trainer_on_ranks
from tests.waiting import until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("cadenza.callbacks.timer.perf_counter", clock := Clock())
    monkeypatch.setattr("cadenza.status.progress.time.perf_counter", clock)
    return clock


def test_limits_shorten_epochs_and_evaluations_leave_loaders_alone_and_are_taken_at_the_end_of_a_step() -> None:
    run = tiny_run(callbacks=[recorder := Recorder(), TimeLimit("0.000001 s")], epochs=3)
    assert recorder.names[-4:] == ["on_step_end", "on_stop", "on_epoch_end", "on_fit_end"]
    assert run.progress.step == 1
    seen: list[tuple[str, int | None]] = []
    long, short = Evaluate(tiny_loader(5)), Evaluate(tiny_loader(5), limit=1, name="short")
    look = on(Callback.on_eval_batch_end)(lambda run, evaluation, *_: seen.append((evaluation.name, evaluation.batch)))
    run = tiny_run(callbacks=[Limit(train=2, evaluation=3), long, short, look], epochs=2, batches=9)
    assert (run.progress.batch, run.progress.epoch) == (4, 2)
    assert seen == [("eval", 1), ("eval", 2), ("eval", 3), ("short", 1)] * 2
    assert long.evaluation.limit is None


def sized(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": model(batch[0]).mean(), "size": len(batch[0])}


def test_training_is_logged_with_loss_rates_speed_and_other_outputs_and_a_skipped_batch_without() -> None:
    run = tiny_run(callbacks=[LogTraining(every="2 steps")], losses=[1.0, 2.0, 3.0, 4.0], accumulate=1)
    assert run.history["train/loss"] == [(2, 1.5), (4, 3.5)]
    assert run.history["train/lr"] == [(2, 0.1), (4, 0.1)]
    assert all(value > 0 for _, value in run.history["train/samples_per_s"] + run.history["train/steps_per_s"])
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("not this one"))
    log = LogTraining("1 step", outputs=("loss", "size"), throughput=False)
    run = tiny_run(callbacks=[skip, log], compute_loss=sized, steps=3)
    assert [step for step, _ in run.history["train/loss"]] == [1, 3]
    assert run.history["train/size"] == [(1, 2), (3, 2)]
    log = LogTraining(every="1 step", outputs=("size",), throughput=False, prefix="t")
    run = tiny_run(callbacks=[log], optimizer=two_optimizers, compute_loss=sized, steps=1)
    assert run.history.latest == {"t/size": 2, "t/lr/0": 0.1, "t/lr/1": 0.1}


def test_the_rate_that_is_logged_is_the_one_of_the_next_update_with_all_factors() -> None:
    def double(run: Run) -> None:
        session_of(run).rates.factors[0] = [lambda step: 2.0 * step]

    halve = LearningRate(halving)
    run = tiny_run(callbacks=[on(Callback.on_setup)(double), halve, LogTraining("1 step", throughput=False)], steps=2)
    assert dict(run.history["train/lr"]) == pytest.approx({1: 0.05 * 4, 2: 0.025 * 6})


FLOPS = 2 * 4 * 8 * 16 * 2 + 2 * 4 * 16 * 2 * 3
"""Of a batch of 4: the first layer has no gradient of its inputs."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.first(inputs).relu(), 0.5, self.training))  # type: ignore[no-any-return]


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 8, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def test_steps_samples_and_tokens_of_a_second(clock: Clock) -> None:
    seconds = clock.lasting(0.5, Callback.on_step_start)
    counted: dict[str, Any] = {"loader": tiny_loader(4), "tokens": lambda batch: 10}
    for throughput in (("samples", "tokens", "steps"), True):  # by default tokens are logged if they are counted
        run = tiny_run(callbacks=[seconds, LogTraining("2 steps", throughput=throughput, outputs=(), lr=False)], **counted)
        assert run.history.latest == {"train/samples_per_s": 4.0, "train/tokens_per_s": 20.0, "train/steps_per_s": 2.0}
    run = tiny_run(callbacks=[LogTraining(1, outputs=(), lr=False)])
    assert list(run.history.names) == ["train/samples_per_s", "train/steps_per_s"]
    assert tiny_run(callbacks=[LogTraining(1, throughput=False, lr=False)]).history.names == ["train/loss"]


def test_evaluations_and_saves_do_not_count(clock: Clock, tmp_path: Path) -> None:
    lasting = {Callback.on_step_start: 0.5, Callback.on_eval_batch_end: 60, Callback.on_save: 600}
    costs = [clock.lasting(seconds, moment) for moment, seconds in lasting.items()]
    callbacks = [LogTraining(1, throughput=("steps",)), Evaluate(tiny_loader(2), every=1), Checkpoint(1), *costs]
    run = tiny_run(directory=tmp_path, callbacks=callbacks)
    assert [value for _, value in run.history["train/steps_per_s"]] == [2.0] * 5
    assert clock.now > 3000


def trained(*callbacks: Callback, **arguments: Any) -> Run:
    arguments = {"compute_loss": supervised(nn.MSELoss()), "seed": 3, "loader": batches(), **arguments}
    return tiny_run(model=Network(), callbacks=callbacks, **arguments)


def mfu(**arguments: Any) -> LogTraining:
    return LogTraining(2, throughput=("mfu",), lr=False, outputs=(), **{"peak_flops": 1e6, **arguments})


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2, "epochs": 2},
    "step_fn": {"step_fn": own_step, "compute_loss": None},
    "compiled": {"compile": {"backend": "eager"}},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_operations_of_the_first_batch_are_counted_and_no_result_changes(clock: Clock, case: str) -> None:
    run = trained(clock.lasting(0.5, Callback.on_batch_start), mfu(), **CASES[case])
    assert [value for _, value in run.history["train/mfu"]] == [pytest.approx(FLOPS / 0.5 / 1e6)] * (run.progress.step // 2)
    assert all(map(torch.equal, run.model.parameters(), trained(**CASES[case]).model.parameters()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # torch's own compiler
def test_the_model_is_compiled_as_without_the_count_and_a_function_beside_it_is_still_compiled_later() -> None:
    graphs, ran = list[Any](), list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)

        def forward(*arguments: Any) -> Any:
            ran.append(1)
            return graph.forward(*arguments)

        return forward

    torch._dynamo.reset()
    trained(mfu(), compile={"backend": backend})
    assert len(graphs) == 1
    ran.clear()
    error = torch.compile(lambda predictions, targets: (predictions - targets).square().mean(), backend=backend)
    trained(mfu(), compute_loss=supervised(error))
    assert len(ran) == 3, "of four batches; the first is counted"


def test_a_batch_that_is_skipped_is_not_the_one_that_is_counted_and_given_operations_are_not_counted() -> None:
    skip = on(Callback.on_batch_start, at=1)(lambda run, batch: run.skip_batch("not this one"))
    for log, flops in ((mfu(), FLOPS), (mfu(flops=5.0), 5.0)):
        trained(skip, log)
        assert log._speed is not None
        assert log._speed._flops == flops
    assert not any(listener.moment is Callback.on_batch_start for listener in log.listeners())


@pytest.mark.parametrize("over", ["steps", "attach"])
def test_the_operations_of_a_loop_of_ones_own_are_counted(clock: Clock, over: str) -> None:
    loss, model, seconds = nn.MSELoss(), Network(), clock.lasting(0.5, Callback.on_step_start)
    log = LogTraining(1, throughput=("mfu",), peak_flops=float(FLOPS))
    arguments: dict[str, Any] = {"callbacks": [seconds, log], "max_steps": 2, "progress": False, "device": "cpu"}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if over == "steps":
        trainer = Trainer(model, optimizer, batches(), **arguments)
        for step in trainer.steps():
            for inputs, targets in step:
                step.backward(loss(model(inputs), targets))
        run = trainer.run
    else:
        with attach(model, optimizer, **arguments) as loop:
            for inputs, targets in batches(2):
                with loop.step(), loop.batch((inputs, targets)):
                    loop.backward(loss(model(inputs), targets))
                    loop.update()
        run = loop.run
    assert [value for _, value in run.history["train/mfu"]] == [2.0, 2.0]


def test_each_rank_counts_its_own_and_the_record_has_the_mean(clock: Clock) -> None:
    def work() -> Any:
        run = trained(clock.lasting(0.5, Callback.on_batch_start), mfu(), driver=driver())
        return run.history["train/mfu"]

    assert launch(work) == [[(2, pytest.approx(FLOPS / 0.5 / 1e6))]] * 2


def test_a_loss_that_needs_values_cannot_be_counted_if_the_model_is_compiled() -> None:
    def needs(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).sum() * (1 if batch[0].sum().item() > 0 else 2)

    with pytest.raises(ValueError, match=r"counted from shapes, but this loss needs values: .*LogTraining\(flops=\.\.\.\)"):
        trained(mfu(), compute_loss=needs, compile={"backend": "eager"})


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_peaks_are_found_by_the_name_of_the_device(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


# -- Timer --------------------------------------------------------------------------------------------


def costs(clock: Clock) -> list[Callback]:
    """Return callbacks with which a batch takes 2 s, an evaluation 30 s, and the start of an epoch 100 s."""
    lasting = {Callback.on_batch_start: 2, Callback.on_eval_batch_end: 30, Callback.on_epoch_start: 100}
    return [clock.lasting(seconds, moment) for moment, seconds in lasting.items()]


def test_each_stage_has_its_time_and_its_count(clock: Clock, tmp_path: Path) -> None:
    timer = Timer("2 steps")
    saves = clock.lasting(500, Callback.on_save)
    callbacks = [timer, *costs(clock), saves, Evaluate(tiny_loader(1), every="1 epoch"), Checkpoint("1 epoch")]
    run = tiny_run(epochs=2, batches=4, accumulate=2, callbacks=callbacks, directory=tmp_path)
    counts = {stage: timer.count(stage) for stage in ("fit", "epoch", "step", "evaluation", "save")}
    assert counts == {"fit": 1, "epoch": 2, "step": 4, "evaluation": 2, "save": 2}
    assert timer.elapsed_s("step") == 4 * 4
    assert timer.elapsed_s("epoch") == 2 * (100 + 8)
    assert timer.elapsed_s("evaluation") == 2 * 30
    assert timer.elapsed_s("save") == 2 * 500
    assert timer.elapsed_s("fit") == timer.elapsed_s() == 216 + 60 + 1000
    assert timer.elapsed_s("train") == 216
    assert run.history["time/step_s"] == [(2, 4.0), (4, 4.0)]
    assert run.history["time/epoch_s"] == [(2, 108.0), (4, 108.0)]
    assert run.history["time/eval_s"] == [(2, 30.0), (4, 30.0)]
    assert [step for step, _ in run.history["time/fit_s"]] == [2, 4]


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_a_resumed_run_counts_on(clock: Clock, tmp_path: Path, cut: int) -> None:
    def fit(steps: int) -> Timer:
        timer = Timer()
        callbacks = [timer, *costs(clock), Checkpoint("1 step")]
        tiny_trainer(steps=steps, batches=3, callbacks=callbacks, directory=tmp_path).fit(resume="auto")
        return timer

    assert fit(cut).elapsed_s("step") == 2 * cut
    clock.now += 1e6  # the time between the fits
    timer = fit(6)
    assert (timer.count("step"), timer.elapsed_s("step")) == (6, 12)
    assert timer.count("epoch") == 2
    starts = 3 if cut != 3 else 2  # on_epoch_start fires again in an epoch that is continued
    assert timer.elapsed_s("fit") == 12 + 100 * starts


def test_the_stage_under_way_counts_too_and_another_run_of_the_same_instance_counts_from_zero(clock: Clock) -> None:
    timer, seen = Timer(), list[float]()
    look = on(Callback.on_step_end)(lambda run: seen.append(timer.elapsed_s("fit")))
    for _ in range(2):
        seen.clear()
        tiny_run(batches=3, callbacks=[timer, *costs(clock), clock.lasting(5, Callback.on_fetch_end), look])
        assert seen == [107, 114, 121]
        assert (timer.count("step"), timer.elapsed_s("fit")) == (3, 126)
        assert timer.elapsed_s("step") == 3 * (5 + 2), "the fetch that finds no batch belongs to no step"


def test_after_an_error_the_times_end_there(clock: Clock) -> None:
    timer = Timer()
    with pytest.raises(ZeroDivisionError):
        tiny_run(callbacks=[timer, *costs(clock), failing(Callback.on_batch_end, at=2)])
    clock.now += 1000
    assert timer.elapsed_s("fit") == 104


def test_a_block_of_other_code_is_measured(clock: Clock) -> None:
    timer = Timer()
    for _ in range(2):
        with timer.measure("export"):
            clock.now += 7
    assert (timer.count("export"), timer.elapsed_s("export")) == (2, 14)
    with pytest.raises(ValueError, match="Timer measures 'step' already: give the block another name"), timer.measure("step"):
        pass


# -- DeviceStats --------------------------------------------------------------------------------------


GIB = 1 << 30


def test_the_process_has_the_memory_that_psutil_says_and_is_busy_and_on_request_the_machine_is_looked_at() -> None:
    pages = mmap.mmap(-1, 64 << 20)  # a tensor may take memory that the process has already
    fill = on(Callback.on_step_end, at=2)(lambda run: pages.write(b"1" * len(pages)))
    work = on(Callback.on_step_start)(lambda run: sum(range(300_000)))
    run = tiny_run(callbacks=[work, fill, DeviceStats("1 step")], steps=2)
    (_, before), (_, after) = run.history["process/memory_gib"]
    assert after - before == pytest.approx(1 / 16, rel=0.2)
    assert after == pytest.approx(psutil.Process().memory_info().rss / GIB, rel=0.2)
    assert [step for step, _ in run.history["process/cpu_percent"]] == [1, 2]
    assert all(value > 0 for _, value in run.history["process/cpu_percent"])
    run = tiny_run(callbacks=[DeviceStats("1 step", machine=True)], steps=2)
    machine = ["machine/memory_percent", "machine/cpu_percent"]
    assert run.history.names == ["process/memory_gib", "process/cpu_percent", *machine]
    assert 0 < run.history.latest["machine/memory_percent"] <= 100
    assert 0 <= run.history.latest["machine/cpu_percent"] <= 100


@pytest.mark.parametrize(
    ("psutil_there", "proc_there", "kind"), [(False, True, "memory"), (True, False, "memory"), (False, False, "memory_peak")]
)
def test_without_psutil_or_proc_the_next_best_value_is_logged(
    monkeypatch: pytest.MonkeyPatch, psutil_there: bool, proc_there: bool, kind: str
) -> None:
    if not proc_there:
        monkeypatch.setattr(Path, "exists", lambda path: False)
    if not psutil_there:
        monkeypatch.setitem(sys.modules, "psutil", None)
    assert tiny_run(callbacks=[DeviceStats("1 step")], steps=1).history.names == [f"process/{kind}_gib", "process/cpu_percent"]


def test_numbers_of_the_allocator_are_logged_in_gib_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("memory_allocated", 1), ("memory_reserved", 2), ("max_memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size * GIB)
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * GIB)
    cuda = {"device/memory_allocated_gib": 1, "device/memory_reserved_gib": 2, "device/memory_peak_gib": 3}
    assert _of_device(torch.device("cuda", 1)) == cuda
    assert reset == [torch.device("cuda", 1)], "the next peak is that of the time since then"
    assert _of_device(torch.device("mps")) == {"device/memory_allocated_gib": 1, "device/memory_driver_gib": 2}
    assert _of_device(torch.device("cpu")) == {}


def test_retries_of_the_allocator_count_from_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, logged = iter([2, 2, 5, 6]), list[Any]()  # at the start, and each time
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": next(counted)})
    monkeypatch.setattr("cadenza.callbacks.device_stats._of_device", lambda device: {})
    monkeypatch.setattr("cadenza.callbacks.device_stats._has_utilization", lambda run: False)
    run: Any = SimpleNamespace(device=torch.device("cuda", 0), is_main=True, log=lambda *values: logged.append(values))
    stats = DeviceStats("1 step")
    stats.on_fit_start(run)
    for _ in range(3):
        stats.log(run)
    assert [value for name, *value in logged if name == "device/allocation_retries"] == [[0], [3], [1]]


# -- Alert --------------------------------------------------------------------------------------------


NAN, INF = float("nan"), float("inf")


def logging_values(values: Sequence[float | None], name: str = "x") -> Subscription:
    """Log one of the values in each step; None: nothing."""

    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        value = values[run.progress.step - 1]
        if value is not None:
            run.log(name, value)

    return log


def fired(rule: Any, values: Sequence[float | None]) -> list[tuple[int, str]]:
    """Return the steps and texts of the alerts of a run that logs the values as ``x``."""
    sent: list[AlertMessage] = []
    tiny_run(callbacks=[logging_values(values), Alert(rule, to=sent.append, pause=None)], steps=len(values))
    return [(message.step, message.text) for message in sent]


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("x > 2", [1, 3, 4, 2, 5], [(2, "x is 3, > 2"), (5, "x is 5, > 2")]),
        ("x >= 2", [1, 2, 1], [(2, "x is 2, >= 2")]),
        ("x < -1e-3", [0, -1, NAN], [(2, "x is -1, < -0.001")]),
        ("x <= 1 for 3 records", [1, 1, 2, 1, None, 1, 1, 1], [(7, "x is 1, <= 1 in 3 records")]),
        ("x rises 3 times", [1, 2, 3, 4, 5, 4, 5, 6, 7], [(4, "x rose 3 times, to 4"), (9, "x rose 3 times, to 7")]),
        ("x rises 2 times", [1, 2, NAN, 3, 3, 4], [(4, "x rose 2 times, to 3")]),
        ("x falls", [1, 2, 1, 0, 1], [(3, "x fell, to 1")]),
        ("non-finite", [1, NAN, INF, 1, -INF], [(2, "x is nan"), (5, "x is -inf")]),
        ("x non-finite", [1, INF], [(2, "x is inf")]),
        ("no record for 10 h", [1, 2], []),
    ],
)
def test_an_alert_is_sent_when_its_rule_begins_to_hold(
    rule: str, values: Sequence[float | None], expected: list[tuple[int, str]]
) -> None:
    assert fired(rule, values) == expected


def test_a_function_of_the_record_or_of_the_history_is_a_rule_and_steps_without_a_record_do_not_call_it() -> None:
    calls: list[int] = []

    def large(record: Record) -> str | None:
        calls.append(record.step)
        return f"{record.values['x']} is large" if record.values["x"] > 2 else None

    def doubled(record: Record, history: Mapping[str, Any]) -> str | None:
        first = history["x"][0][1]
        return f"twice {first:g}" if record.values["x"] >= 2 * first else None

    assert fired(large, [1, 3, None, 4, 2, None, 5]) == [(2, "3 is large"), (7, "5 is large")]
    assert calls == [1, 2, 4, 5, 7]
    assert fired(doubled, [1, 3, 4]) == [(2, "twice 1")]
    run = tiny_run(callbacks=[logging_values([1, 2]), Alert(lambda record: str(record.values["y"]))], steps=2)
    assert [(fault.callback, fault.moment) for fault in run.faults] == [("Alert", "on_log")], "an error disables the rule"


def test_a_name_that_no_record_has_is_a_warning_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    tiny_run(callbacks=[logging_values([1, 2, 3], "train/loss"), Alert("train/los > 1")], steps=3)
    assert [record.getMessage().split(".")[0] for record in caplog.records] == [
        "Alert watches 'train/los', and the record of step 1 does not have it",
        "Alert watches 'train/los', and no record had it",
    ]
    assert "Did you mean 'train/loss'?" in caplog.text


def test_an_alert_is_on_the_console_in_the_decisions_in_a_file_and_in_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alert = Alert("x > 2", level="error", name="too large")
    run = tiny_run(callbacks=[logging_values([1, 3]), alert], steps=2, directory=tmp_path)
    shown = "too large (error) at step 2: x is 3, > 2"
    assert shown in caplog.text
    assert shown in (tmp_path / "console.log").read_text()
    [decision] = read_decisions(tmp_path / "decisions.jsonl")
    assert (decision.what, decision.who, decision.data["level"]) == ("alerted", "too large", "error")
    [row] = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert (row["text"], row["step"], row["run_id"]) == ("x is 3, > 2", 2, run.info.id)
    assert [fault.why for fault in story_at(tmp_path).faults] == ["x is 3, > 2"]


def test_a_continued_run_sends_each_alert_once(tmp_path: Path) -> None:
    sent: list[int] = []
    values = [1, 3, 1, 1, 3, 3, 3, 1, 3]

    def fit(fail_at: int = 99) -> Run:
        alert = Alert("x > 2", to=lambda message: sent.append(message.step), pause=None)
        callbacks = [logging_values(values), alert, Checkpoint(every="3 steps"), failing(Callback.on_step_end, fail_at)]
        return tiny_trainer(callbacks=callbacks, steps=len(values), directory=tmp_path).fit(resume="auto")

    for step in (6, 8):
        with pytest.raises(ZeroDivisionError):
            fit(step)
    run = fit()
    assert sent == [2, 5, 9]
    assert [decision.when.step for decision in run.decisions if decision.what == "alerted"] == [9]
    assert [one.when.step for one in read_decisions(tmp_path / "decisions.jsonl") if one.what == "alerted"] == [2, 5, 9]


@pytest.mark.parametrize("what", ["record", "x"])
def test_silence_is_noticed_while_the_training_hangs_and_once(what: str, caplog: pytest.LogCaptureFixture) -> None:
    came = list[AlertMessage]()

    @on(Callback.on_step_end)
    def hang(run: Run) -> None:
        if what == "x":
            run.log("y", 1.0)  # a record without the name does not end the silence
        if run.progress.step in (4, 7):
            before = len(came)
            until(lambda: len(came) > before)
        run.log("x", 1.0)

    run = tiny_run(callbacks=[hang, Alert(f"no {what} for 0.2 s", to=["console", came.append], pause=None)], steps=8)
    texts = [message.text for message in came]
    assert f"no {what} for 0.2 s, the last one was of step 3" in texts
    assert f"no {what} for 0.2 s, the last one was of step 6" in texts
    assert len(set(texts)) == len(texts)
    assert [decision.why for decision in run.decisions if decision.what == "alerted"] == texts
    assert f"Alert (warning) at step 3: no {what} for 0.2 s" in caplog.text
    assert not [thread for thread in threads() if thread.name == "cadenza-alert"]


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """A server on this machine: its address, the bodies that came, and the states that it answers first."""
    bodies: list[dict[str, Any]] = []
    states: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(states.pop(0) if states else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret", bodies, states
    server.shutdown()
    server.server_close()


def test_a_webhook_gets_the_message_as_json(webhook: tuple[str, list[dict[str, Any]], list[int]], tmp_path: Path) -> None:
    url, bodies, _ = webhook
    run = tiny_run(callbacks=[logging_values([1, 3]), Alert("x > 2", to=url)], steps=2, directory=tmp_path / "first")
    [body] = bodies
    assert {"text": "x is 3, > 2", "level": "warning", "step": 2, "rule": "x > 2", "alert": "Alert"}.items() <= body.items()
    assert (body["run_id"], body["run_name"]) == (run.info.id, "first")
    assert "secret" not in (tmp_path / "first" / "run.json").read_text() + repr(run.decisions)


def test_a_target_that_fails_is_tried_again_then_reported_and_never_stops_the_run(
    webhook: tuple[str, list[dict[str, Any]], list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    url, bodies, states = webhook
    states += [500, 503]
    run = tiny_run(callbacks=[logging_values([3]), Alert("x > 2", to=url)], steps=1)
    assert len(bodies) == 3
    assert [decision.what for decision in run.decisions] == ["alerted"]

    def broken(message: AlertMessage) -> None:
        raise KeyError("my secret")

    run = tiny_run(callbacks=[logging_values([3]), Alert("x > 2", to=[broken, ["false"]])], steps=1)
    assert run.outcome.kind == "finished"  # type: ignore[union-attr]
    first, second = [decision.why for decision in run.decisions if decision.what == "not sent"]
    assert first.endswith(": KeyError")
    failed = "it ended with exit code 1"
    assert second == f"an alert of step 1 did not reach the command 'false': {failed}"
    assert first in caplog.text
    assert "secret" not in repr(Alert("x > 2", to=url))


def test_a_command_gets_the_text_as_input_and_the_rest_in_its_environment(tmp_path: Path) -> None:
    script = "import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read() + os.environ['CADENZA_ALERT_STEP'])"
    command = [sys.executable, "-c", script, str(tmp_path / "a b; rm -rf $HOME")]
    tiny_run(callbacks=[logging_values([1, 3]), Alert("x > 2", to=[command])], steps=2)
    assert (tmp_path / "a b; rm -rf $HOME").read_text() == "x is 3, > 2\n2"


def test_the_steps_do_not_wait_for_a_slow_target() -> None:
    go, steps = Event(), list[int]()

    @on(Callback.on_step_end)
    def count(run: Run) -> None:
        steps.append(run.progress.step)
        if run.progress.step == 50:
            go.set()

    def slow(message: AlertMessage) -> None:
        assert go.wait(200)

    run = tiny_run(callbacks=[logging_values([3.0] * 50), Alert("x > 2", to=slow), count], steps=50)
    assert len(steps) == 50
    assert run.faults == []


def test_several_ranks_send_one_alert_about_the_mean(tmp_path: Path) -> None:
    def training() -> list[str]:
        log = on(Callback.on_step_end)(lambda run: run.log("x", float(run.progress.step * run.driver.rank)))

        def keep(message: AlertMessage) -> None:
            with (tmp_path / "sent").open("a") as file:
                file.write(f"{message.step} {message.text}\n")

        return [one.what for one in trainer_on_ranks(max_steps=4, callbacks=[log, Alert("x > 2", to=keep)]).fit().decisions]

    first, *others = launch(training, ranks=3)
    assert (tmp_path / "sent").read_text() == "3 x is 3, > 2\n"
    assert first.count("alerted") == 1
    assert all("alerted" not in other for other in others)
