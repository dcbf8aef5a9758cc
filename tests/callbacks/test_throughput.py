"""The speed in records: samples, steps and tokens per second, and the fraction of the device's peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, attach, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.engine import throughput as module
from cadenza.testing import launch, tiny_loader, tiny_run, tiny_trainer
from tests.distributed.parts import driver

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


class Clock:
    """The time, which passes only where a test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("cadenza.status.training_clock.time.perf_counter", lambda: self.now)

    def lasting(self, seconds: float, moment: Any) -> Callback:
        def last(*_: Any) -> None:
            self.now += seconds

        return on(moment)(last)


def counting(**arguments: Any) -> Any:
    return {"loader": tiny_loader(4), "tokens": lambda batch: 10, **arguments}


def test_steps_samples_and_tokens_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    log = LogTraining("2 steps", throughput=("samples", "tokens", "steps"), outputs=(), lr=False)
    run = tiny_run(**counting(callbacks=[clock.lasting(0.5, Callback.on_step_start), log]))
    assert run.history.latest == {"train/samples_per_s": 4.0, "train/tokens_per_s": 20.0, "train/steps_per_s": 2.0}


def test_by_default_tokens_are_logged_if_they_are_counted() -> None:
    log = LogTraining(1, outputs=(), lr=False)
    assert list(tiny_run(callbacks=[log]).history.names) == ["train/samples_per_s", "train/steps_per_s"]
    assert tiny_run(**counting(callbacks=[log])).history.names[-1] == "train/tokens_per_s"
    assert tiny_run(callbacks=[LogTraining(1, throughput=False, lr=False)]).history.names == ["train/loss"]


def test_evaluations_and_saves_do_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(monkeypatch)
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


def test_tokens_that_nothing_counts_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"has 'tokens', but nothing counts them: return 'tokens' from compute_loss, or give"):
        tiny_run(callbacks=[LogTraining(1, throughput=("tokens",))])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"throughput": ("token",)}, ValueError, r"throughput has no 'token'; expected .* Did you mean 'tokens'\?"),
        ({"throughput": "tokens"}, TypeError, "throughput must be True, False or a sequence of 'steps', .*; got 'tokens'"),
        ({"peak_flops": 0}, ValueError, "peak_flops must be above 0; got 0"),
        ({"flops": float("nan")}, ValueError, "flops must be above 0; got nan"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LogTraining(**arguments)


# -- the fraction of the peak ------------------------------------------------------------------------


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
def test_the_operations_of_the_first_batch_are_counted(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    clock = Clock(monkeypatch)
    run = trained(clock.lasting(0.5, Callback.on_batch_start), mfu(), **CASES[case])
    assert [value for _, value in run.history["train/mfu"]] == [pytest.approx(FLOPS / 0.5 / 1e6)] * (run.progress.step // 2)


@pytest.mark.parametrize("case", CASES)
def test_the_count_changes_no_result(case: str) -> None:
    with_it, without = (trained(*callbacks, **CASES[case]) for callbacks in ([mfu()], []))
    assert all(map(torch.equal, with_it.model.parameters(), without.model.parameters()))


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


def test_a_batch_that_is_skipped_is_not_the_one_that_is_counted() -> None:
    @on(Callback.on_batch_start, at=1)
    def skip(run: Run, batch: Any) -> None:
        run.skip_batch("not this one")

    log = mfu()
    trained(skip, log)
    assert log._speed is not None
    assert log._speed._flops == FLOPS


def test_the_operations_of_a_loop_of_ones_own_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, loss = Clock(monkeypatch), nn.MSELoss()
    for over in ("steps", "attach"):
        model, seconds = Network(), clock.lasting(0.5, Callback.on_step_start)
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
        assert [value for _, value in run.history["train/mfu"]] == [2.0, 2.0], over


def test_given_operations_are_not_counted() -> None:
    log = mfu(flops=5.0)
    trained(log)
    assert log._speed is not None
    assert log._speed._flops == 5.0
    assert not any(listener.moment is Callback.on_batch_start for listener in log.listeners())


def test_each_rank_counts_its_own_and_the_record_has_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> Any:
        patch = pytest.MonkeyPatch()
        clock = Clock(patch)
        run = trained(clock.lasting(0.5, Callback.on_batch_start), mfu(), driver=driver())
        return run.history["train/mfu"]

    assert launch(work) == [[(2, pytest.approx(FLOPS / 0.5 / 1e6))]] * 2


def test_a_loss_that_needs_values_cannot_be_counted_if_the_model_is_compiled() -> None:
    def needs(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        return loss if loss.item() > 0 else loss * 2

    with pytest.raises(ValueError, match=r"counted from shapes, but this loss needs values: .*LogTraining\(flops=\.\.\.\)"):
        trained(mfu(), compute_loss=needs, compile={"backend": "eager"})


def test_an_unknown_device_is_an_error_before_the_first_step() -> None:
    trainer = tiny_trainer(callbacks=[mfu(peak_flops=None)])
    with pytest.raises(ValueError, match=r"needs the peak of the device, and that of 'cpu' is not known. Give .*peak_flops="):
        trainer.fit()


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
    assert module.known_peak(name) == peak
