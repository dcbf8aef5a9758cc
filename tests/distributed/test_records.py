"""Records on several ranks: numbers are means, and each is written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import LogTraining
from cadenza.engine.session import session_of
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.record import Text
from cadenza.testing import launch
from tests.distributed.parts import loader, squared_error, trainer
from tests.distributed.parts import own_rank as rank


def test_records_hold_the_mean_over_all_ranks_and_are_written_once(tmp_path: Path) -> None:
    def logging() -> dict[str, Any]:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log({"rank": rank(), "loss": torch.tensor(float(rank())), "alike": 0.1, "count": 7})

        run = trainer(max_epochs=1, directory=tmp_path, callbacks=[log]).fit()
        return {name: run.history[name] for name in run.history.names}

    first, second = launch(logging, ranks=3)[:2]
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

    assert launch(logging) == [{str(number): number / 2 for number in range(names)}] * 2


def test_what_one_rank_logs_alone_is_in_the_record_and_means_are_over_those_who_logged() -> None:
    def logging() -> tuple[dict[str, float], int]:
        @on(Callback.on_step_end, at=2)
        def log(run: Run) -> None:
            run.log("both", float(rank()))
            if rank() == 1:
                run.log("mine", 5.0)

        run = trainer(max_steps=3, callbacks=[log]).fit()
        return run.history.latest, run.history["mine"][0][0]

    assert launch(logging) == [({"both": 0.5, "mine": 5.0}, 2)] * 2


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

    assert launch(logging) == [{"epoch_start": 0.5, "epoch_end": 0.5, "fit_end": 0.5}] * 2


def test_a_value_that_is_not_finite_on_one_rank_is_not_in_the_mean() -> None:
    def logging() -> str:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log({"nan": float("nan") if rank() else 1.0, "inf": float("inf") if rank() else 1.0, "fine": 2.0})

        return repr(trainer(max_steps=1, callbacks=[log]).fit().history.latest)

    assert launch(logging) == ["{'nan': nan, 'inf': inf, 'fine': 2.0}"] * 2


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

    assert launch(logging) == [["rank 0"], []]


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

    (logged, seen), *others = launch(losses, ranks=3)
    assert len(set(logged)) == 6
    assert logged == seen
    assert [(logged, seen)] * 2 == others
