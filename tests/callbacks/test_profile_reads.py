"""A hook that reads a tensor on the host at every step is named, with the line that does it. Others are not."""

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
from tests.checkpoint.test_resume_everything import make


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
    @on(Callback.on_batch_end)
    def look(run: Run, batch: Any, outputs: Any) -> None:
        outputs["loss"].item()

    read = reads(look, accumulate=2, batches=30)["look.on_batch_end"]
    assert (read.reads, read.steps) == (6, 3)


def test_a_cadence_is_not_named_and_one_of_every_second_step_is() -> None:
    seldom = on(Callback.on_step_end, every=50)(Reads().on_step_end)
    once = on(Callback.on_step_end, at=7)(Reads().on_step_end)
    assert not reads(seldom, once, steps=60)
    half = reads(on(Callback.on_step_end, when=lambda run: run.progress.step % 2 == 1)(Reads().on_step_end))
    assert half["on_step_end.on_step_end"].often.startswith("in 2 of 3 sampled steps")


def test_a_tensor_that_is_logged_is_not_read_by_the_hook() -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        assert run.loss is not None
        run.log("loss", run.loss)
        run.log({"twice": run.loss * 2})

    assert not reads(log, LogTraining("1 step"))


def test_reads_in_an_evaluation_do_not_count() -> None:
    class Judged(Callback):
        def on_eval_end(self, run: Run, evaluation: Any) -> None:
            torch.ones(()).item()

    assert not reads(Evaluate(tiny_loader(2), every="1 step"), Judged())


def test_reads_of_the_training_itself_do_not_count() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = nn.functional.mse_loss(model(batch[0]), batch[1])
        value.item()
        return value

    assert not reads(Callback(), compute_loss=loss)


def test_of_cadenzas_own_only_what_must_know_at_once_is_named(tmp_path: Path) -> None:
    """`StopOnNonFinite` must know before the update, `Recover` before the next step, and `Fingerprint` copies all values.

    Their docstrings say so.
    """
    run = make(tmp_path).fit()
    assert run.profile is not None
    assert {read.callback for read in run.profile.host_reads} == {"StopOnNonFinite", "Recover", "Fingerprint"}


def test_sinks_are_not_named(tmp_path: Path) -> None:
    assert not reads(ProgressBar(), Console("1 step"), JsonLines(tmp_path / "log.jsonl"), LogTraining("1 step"), Ema(0.9))


def test_a_short_run_is_observed_until_its_end() -> None:
    assert not reads(Reads(), steps=5)  # the one step may be that of a cadence
    assert reads(Reads(), steps=6)["Reads.on_step_end"].sampled == 2


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
