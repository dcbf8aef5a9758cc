"""`LogTraining`: loss, rates and speed in records, and the fraction of the device's peak. `Timer`, `DeviceStats` and limits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, attach, on, supervised
from cadenza.callbacks import Checkpoint, DeviceStats, Evaluate, LearningRate, Limit, LogTraining, TimeLimit, Timer
from cadenza.callbacks.device_stats import _of_device
from cadenza.engine.session import session_of
from cadenza.engine.throughput import known_peak
from cadenza.testing import Recorder, launch, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import Clock, failing, halving, two_optimizers
from tests.distributed.parts import driver


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("cadenza.callbacks.timer.perf_counter", clock := Clock())
    monkeypatch.setattr("cadenza.status.training_clock.time.perf_counter", clock)
    return clock


def test_a_time_limit_is_taken_at_the_end_of_a_step() -> None:
    recorder = Recorder()
    run = tiny_run(callbacks=[recorder, TimeLimit("0.000001 s")], epochs=3)
    assert recorder.names[-4:] == ["on_step_end", "on_stop", "on_epoch_end", "on_fit_end"]
    assert run.progress.step == 1


def test_a_limit_shortens_epochs_and_evaluations_never_lengthens_and_leaves_the_loaders_alone() -> None:
    seen: list[tuple[str, int | None]] = []
    long, short = Evaluate(tiny_loader(5)), Evaluate(tiny_loader(5), limit=1, name="short")
    look = on(Callback.on_eval_batch_end)(lambda run, evaluation, *_: seen.append((evaluation.name, evaluation.batch)))
    run = tiny_run(callbacks=[Limit(train=2, evaluation=3), long, short, look], epochs=2, batches=9)
    assert (run.progress.batch, run.progress.epoch) == (4, 2)
    assert seen == [("eval", 1), ("eval", 2), ("eval", 3), ("short", 1)] * 2
    assert long.evaluation.limit is None


def test_training_is_logged_with_loss_rate_and_speed_and_a_skipped_batch_without() -> None:
    run = tiny_run(callbacks=[LogTraining(every="2 steps")], losses=[1.0, 2.0, 3.0, 4.0], accumulate=1)
    assert run.history["train/loss"] == [(2, 2.0), (4, 4.0)]
    assert run.history["train/lr"] == [(2, 0.1), (4, 0.1)]
    assert all(value > 0 for _, value in run.history["train/samples_per_s"] + run.history["train/steps_per_s"])
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("not this one"))
    log = LogTraining("1 step", outputs=("loss", "size"), throughput=False)
    run = tiny_run(callbacks=[skip, log], compute_loss=sized, steps=3)
    assert [step for step, _ in run.history["train/loss"]] == [1, 3]
    assert run.history["train/size"] == [(1, 2), (3, 2)]


def sized(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": model(batch[0]).mean(), "size": len(batch[0])}


def test_other_outputs_are_logged_by_name_and_each_group_has_its_rate() -> None:
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
    run = tiny_run(
        directory=tmp_path,
        callbacks=[
            LogTraining(1, throughput=("steps",)),
            Evaluate(tiny_loader(2), every=1),
            Checkpoint(1),
            clock.lasting(0.5, Callback.on_step_start),
            clock.lasting(60, Callback.on_eval_batch_end),
            clock.lasting(600, Callback.on_save),
        ],
    )
    assert [value for _, value in run.history["train/steps_per_s"]] == [2.0] * 5
    assert clock.now > 3000


def trained(*callbacks: Callback, **arguments: Any) -> Run:
    arguments = {"compute_loss": supervised(nn.MSELoss()), "seed": 3, "loader": batches(), **arguments}
    return tiny_run(model=Network(), callbacks=callbacks, **arguments)


def mfu(**arguments: Any) -> LogTraining:
    return LogTraining(2, throughput=("mfu",), lr=False, outputs=(), **{"peak_flops": 1e6, **arguments})


def own_step(run: Run, batch: Any) -> Tensor:
    loss = nn.functional.mse_loss(run.model(batch[0]), batch[1])
    run.backward(loss)
    run.update()
    return loss


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


def test_the_model_is_compiled_as_without_the_count() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    trained(mfu(), compile={"backend": backend})
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # torch's own compiler
def test_a_compiled_function_beside_the_model_is_still_compiled_later() -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def forward(*arguments: Any) -> Any:
            ran.append(1)
            return graph.forward(*arguments)

        return forward

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
    def needs(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss if loss.item() > 0 else loss * 2

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
    return [
        clock.lasting(2, Callback.on_batch_start),
        clock.lasting(30, Callback.on_eval_batch_end),
        clock.lasting(100, Callback.on_epoch_start),
    ]


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


def test_the_memory_of_the_process_is_what_psutil_says_and_grows_with_a_tensor_and_it_is_busy() -> None:
    kept: list[torch.Tensor] = []

    @on(Callback.on_step_end, at=2)
    def fill(run: Run) -> None:
        kept.append(torch.ones(64 << 20, dtype=torch.uint8))

    work = on(Callback.on_step_start)(lambda run: sum(range(300_000)))
    run = tiny_run(callbacks=[work, fill, DeviceStats("1 step")], steps=2)
    (_, before), (_, after) = run.history["process/memory_gib"]
    assert after - before == pytest.approx(1 / 16, rel=0.2)
    assert after == pytest.approx(psutil.Process().memory_info().rss / GIB, rel=0.2)
    assert [step for step, _ in run.history["process/cpu_percent"]] == [1, 2]
    assert all(value > 0 for _, value in run.history["process/cpu_percent"])


def test_on_request_the_whole_machine_is_looked_at() -> None:
    run = tiny_run(callbacks=[DeviceStats("1 step", machine=True)], steps=2)
    machine = ["machine/memory_percent", "machine/cpu_percent"]
    assert run.history.names == ["process/memory_gib", "process/cpu_percent", *machine]
    assert 0 < run.history.latest["machine/memory_percent"] <= 100
    assert 0 <= run.history.latest["machine/cpu_percent"] <= 100


@pytest.mark.parametrize(
    ("psutil_there", "proc_there", "name"),
    [
        (False, True, "process/memory_gib"),
        (True, False, "process/memory_gib"),
        (False, False, "process/memory_peak_gib"),
    ],
)
def test_without_psutil_or_proc_the_next_best_value_is_logged(
    monkeypatch: pytest.MonkeyPatch, psutil_there: bool, proc_there: bool, name: str
) -> None:
    if not proc_there:
        monkeypatch.setattr(Path, "exists", lambda path: False)
    if not psutil_there:
        monkeypatch.setitem(sys.modules, "psutil", None)
    assert tiny_run(callbacks=[DeviceStats("1 step")], steps=1).history.names == [name, "process/cpu_percent"]


def test_numbers_of_the_allocator_are_logged_in_gib_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("memory_allocated", 1), ("memory_reserved", 2), ("max_memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size * GIB)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * GIB)
    names = ("allocated", "reserved", "peak")
    cuda = {f"device/memory_{name}_gib": size for size, name in enumerate(names, start=1)}
    assert _of_device(torch.device("cuda", 1)) == cuda
    assert _of_device(torch.device("mps")) == {"device/memory_allocated_gib": 1, "device/memory_driver_gib": 2}
    assert _of_device(torch.device("cpu")) == {}
