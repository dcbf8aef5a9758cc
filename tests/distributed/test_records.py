"""Records on several ranks: numbers are means, and each is written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Ema, LogTraining
from cadenza.engine.session import session_of
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.record import Text
from cadenza.testing import launch
from tests.distributed.parts import Stream, loader, squared_error, trainer, weights_of
from tests.distributed.parts import own_rank as rank
from tests.distributed.standing import on_ranks


def test_records_hold_the_mean_over_all_ranks_and_are_written_once(tmp_path: Path) -> None:
    def logging() -> dict[str, Any]:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log({"rank": rank(), "loss": torch.tensor(float(rank())), "alike": 0.1, "count": 7})

        run = trainer(max_epochs=1, directory=tmp_path, callbacks=[log]).fit()
        return {name: run.history[name] for name in run.history.names}

    first, second = on_ranks(logging, ranks=3)[:2]
    assert first == second
    assert first["rank"] == [(1, 1.0), (2, 1.0)]
    assert first["loss"] == [(1, 1.0), (2, 1.0)]
    assert first["alike"] == [(1, 0.1), (2, 0.1)]  # though 0.1 + 0.1 + 0.1 is no 3 times 0.1
    assert first["count"] == [(1, 7), (2, 7)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("names", [1, 24, 25, 80])
def test_a_record_may_have_any_number_of_names(names: int) -> None:
    def logging() -> dict[str, float]:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log({str(number): float(number * rank()) for number in range(names)})

        return trainer(max_steps=1, callbacks=[log]).fit().history.latest

    assert on_ranks(logging) == [{str(number): number / 2 for number in range(names)}] * 2


STEPS = range(1, 5)
LOGGED: dict[str, tuple[Callable[[Run], dict[str, float]], dict[str, list[tuple[int, float]]]]] = {
    "of one rank, also in the last step": (
        lambda run: {"a": float(run.progress.step)} if rank() == 1 else {},
        {"a": [(step, float(step)) for step in STEPS]},
    ),
    "of all ranks": (
        lambda run: {"a": run.progress.step + float(rank())},
        {"a": [(step, step + 0.5) for step in STEPS]},
    ),
    "with different names": (
        lambda run: {
            "ab"[rank()]: 1.0,
            **({"c": 2.0} if run.progress.step % 2 == rank() else {}),
            "both": float(rank()),
        },
        {
            **{name: [(step, 1.0) for step in STEPS] for name in "ab"},
            "c": [(step, 2.0) for step in STEPS],
            "both": [(step, 0.5) for step in STEPS],
        },
    ),
}


@pytest.mark.parametrize("name", LOGGED)
def test_numbers_are_in_the_record_of_their_step_and_the_mean_of_those_ranks_that_logged_them(name: str) -> None:
    values, expected = LOGGED[name]

    def logging() -> dict[str, list[tuple[int, float]]]:
        log = on(Callback.on_step_end)(lambda run: run.log(values(run)))
        history = trainer(loader(4 * 2 * 4), max_epochs=1, callbacks=[log]).fit().history
        return {name: history[name] for name in history}

    assert on_ranks(logging) == [expected] * 2


def test_what_is_logged_outside_of_steps_is_reduced_as_well() -> None:
    def logging() -> dict[str, float]:
        class Log(Callback):
            def on_epoch_start(self, run: Run) -> None:
                run.log("epoch_start", rank())

            def on_epoch_end(self, run: Run) -> None:
                run.log("epoch_end", rank())

            def on_fit_end(self, run: Run) -> None:
                run.log("fit_end", rank())

        return trainer(max_epochs=1, callbacks=[Log()]).fit().history.latest

    assert on_ranks(logging) == [{"epoch_start": 0.5, "epoch_end": 0.5, "fit_end": 0.5}] * 2


@pytest.mark.parametrize("moment", [Callback.on_batch_start, Callback.on_fetch_end])
def test_values_logged_before_a_batch_or_after_the_last_one_are_reduced(moment: Any) -> None:
    def logged() -> list[tuple[int, float]]:
        times: list[None] = []

        def log(run: Run, *_: Any) -> None:
            times.append(None)
            run.log("a", len(times) + 10.0 * rank())

        return trainer(loader(48), max_epochs=1, accumulate=4, callbacks=[on(moment)(log)]).fit().history["a"]

    last = 6 if moment is Callback.on_batch_start else 7  # one more fetch finds the loader exhausted
    assert on_ranks(logged) == [[(1, 4 + 5.0), (2, last + 5.0)]] * 2


def test_values_logged_at_a_moment_without_other_listeners_are_reduced() -> None:
    def logged() -> dict[str, list[float]]:
        means: dict[str, list[float]] = {}
        for name in ("on_before_backward", "on_after_backward", "on_after_zero_grad", "on_batch_end", "on_step_end"):

            def log(run: Run, *_: Any) -> None:
                run.log("a", float(rank()))

            run = trainer(loader(48), max_epochs=1, callbacks=[on(getattr(Callback, name))(log)]).fit()
            means[name] = sorted({value for _, value in run.history["a"]})
        return means

    first, second = on_ranks(logged)
    assert first == second
    assert set(map(tuple, first.values())) == {(0.5,)}


def test_numbers_of_one_rank_in_the_last_step_of_a_stream_are_in_their_record_before_the_end_of_the_epoch() -> None:
    def seen() -> list[Any]:
        at_end: list[Any] = []

        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            if rank() == 1:
                run.log("a", float(run.progress.step))

        note = on(Callback.on_epoch_end)(lambda run: at_end.append(run.history["a"]))
        trainer(Stream(4 * 2 * 4), max_epochs=1, callbacks=[log, note]).fit()
        return at_end[0]  # type: ignore[no-any-return]

    assert on_ranks(seen) == [[(step, float(step)) for step in range(1, 5)]] * 2


def test_an_error_of_one_rank_ends_all_and_keeps_the_numbers_that_it_logged() -> None:
    def failing() -> tuple[str, list[tuple[int, float]]]:
        runs: list[Run] = []

        @on(Callback.on_step_end)
        def fail(run: Run) -> None:
            runs.append(run)
            if rank() == 1:
                run.log("a", float(run.progress.step))
            if rank() == 1 and run.progress.step == 3:
                raise ValueError("fails on one rank")

        with pytest.raises(Exception, match="fails on one rank") as raised:
            trainer(loader(96), callbacks=[fail]).fit()
        return type(raised.value).__name__, runs[-1].history["a"]

    (first, before), (second, history) = launch(failing)
    assert (first, second) == ("DistributedError", "ValueError")
    assert history == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert before == history[: len(before)]


@pytest.mark.parametrize("speaks", ["ends epochs", "logs", "logs, then all save"])
def test_a_run_with_requests_or_numbers_of_one_rank_resumes_to_the_same_bits(speaks: str, tmp_path: Path) -> None:
    def trained(folder: str, steps: int | None) -> tuple[Tensor, dict[str, Any]]:
        @on(Callback.on_step_end)
        def speak(run: Run) -> None:
            if rank() == 1 and "logs" in speaks:
                run.log("a", float(run.progress.step))
            if rank() == 1 and speaks == "ends epochs" and run.progress.step in (3, 8):
                run.end_epoch("one rank alone")
            if speaks == "logs, then all save" and run.progress.step == 5:
                run.save("all ranks")

        callbacks = [speak, Checkpoint("4 steps"), Ema(0.9)]
        one = trainer(loader(96), max_steps=steps, max_epochs=2, directory=tmp_path / folder, callbacks=callbacks)
        run = one.fit(resume="auto")
        return weights_of(one), {name: run.history[name] for name in run.history}

    def whole_and_cut() -> Any:
        trained("cut", 7)
        return trained("whole", None), trained("cut", None)

    for (weights, history), (again, others) in on_ranks(whole_and_cut):
        assert torch.equal(weights, again)
        assert history == others


def test_a_value_that_is_not_finite_on_one_rank_is_not_in_the_mean() -> None:
    def logging() -> str:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log({"nan": float("nan") if rank() else 1.0, "inf": float("inf") if rank() else 1.0, "fine": 2.0})

        return repr(trainer(max_steps=1, callbacks=[log]).fit().history.latest)

    assert on_ranks(logging) == ["{'nan': nan, 'inf': inf, 'fine': 2.0}"] * 2


def test_pictures_and_texts_are_those_of_the_main_process() -> None:
    def logging() -> list[str]:
        heard: list[str] = []

        class Log(Callback):
            def on_step_end(self, run: Run) -> None:
                run.log({"text": Text(f"rank {rank()}"), "number": 1.0})

            def on_log(self, run: Run, record: Any) -> None:
                heard.append(record.media["text"].text)

        trainer(max_steps=1, callbacks=[Log()]).fit()
        return heard

    assert on_ranks(logging) == [["rank 0"], []]


def test_marks_of_names_are_alike_only_for_the_same_names() -> None:
    def told(*names: str) -> list[float]:
        buffer = MetricBuffer()
        for name in names:
            buffer.add(name, 1.0)
        return buffer.summary()[:4]

    assert told() == [0, 0, 0, 0]
    assert told("a", "b") == told("a", "b")
    assert told("a", "b") != told("b", "a") != told("ab") != told("a")
    assert told("a", "b\nc") != told("a\nb", "c")


@pytest.mark.parametrize("number_format", [torch.float32, torch.bfloat16, torch.float64])
def test_the_loss_in_a_record_has_the_bits_of_the_mean_over_ranks(number_format: torch.dtype) -> None:
    """As a replay computes it."""

    def losses() -> tuple[list[float], list[float]]:
        seen: list[float] = []

        @on(Callback.on_step_end)
        def see(run: Run) -> None:
            mean = session_of(run).sync.mean_loss()
            assert mean is not None
            seen.append(mean.item())

        def compute(model: Any, batch: Any) -> Tensor:
            return squared_error(model, batch).to(number_format) * 10.0 ** rank()

        run = trainer(loader(4 * 3 * 6), max_epochs=1, compute_loss=compute, callbacks=[LogTraining(1), see]).fit()
        return [value for _, value in run.history["train/loss"]], seen

    (logged, seen), *others = on_ranks(losses, ranks=3)
    assert len(set(logged)) == 6
    assert logged == seen
    assert [(logged, seen)] * 2 == others
