"""What the ranks tell each other in a step, and records of all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.cadence import Cadence
from cadenza.callbacks import Evaluate, LogTraining
from cadenza.drivers import DdpDriver
from cadenza.hooks import periodic
from cadenza.listener import Listener
from cadenza.records import Book, Text
from cadenza.testing import launch
from tests.distributed.parts import loader, squared_error, trainer


def rank() -> int:
    return int(os.environ["RANK"])


class Counting(DdpDriver):
    """DDP that counts how often the ranks wait for each other."""

    waits = 0

    def reduce(self, value: Tensor, *how: Any) -> Tensor:
        self.waits += 1
        return super().reduce(value, *how)


class WaitsAtSteps(Callback):
    """Notes, at the start of each step, how often the ranks had waited for each other."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_start(self, run: Run) -> None:
        assert isinstance(run.driver, Counting)
        self.seen.append(run.driver.waits)

    @property
    def in_steps(self) -> list[int]:
        return [after - before for before, after in zip(self.seen, self.seen[1:], strict=False)]


def waits(*callbacks: Callback, **arguments: Any) -> list[int]:
    """Return how often two ranks waited for each other in each of the steps of an epoch of 6."""

    def counted() -> list[int]:
        noting = WaitsAtSteps()
        data = loader(48, shuffle=False)
        trainer(data, max_epochs=1, driver=Counting("cpu"), callbacks=[noting, *callbacks], **arguments).fit()
        return noting.in_steps

    first, second = launch(counted)
    assert first == second
    return first


def test_nobody_waits_in_a_step_in_which_nobody_may_ask_for_anything() -> None:
    assert waits() == [0, 0, 0, 0, 0]


def test_ranks_wait_once_in_a_step_in_which_somebody_may() -> None:
    @on(Callback.on_step_end)
    def listening(run: Run) -> None: ...

    assert waits(listening) == [1, 1, 1, 1, 1]


def test_they_wait_once_in_a_step_that_is_logged_too() -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log({"a": 1.0, "b": torch.tensor(2.0)})

    assert waits(log) == [1, 1, 1, 1, 1]


def test_who_sleeps_makes_nobody_wait_and_is_heard_when_it_wakes() -> None:

    class Seldom(Callback):
        def listeners(self) -> list[Listener]:
            return [periodic(Cadence.parse("12 steps"), self.act)]

        def act(self, run: Run) -> None:
            if run.driver.rank == 1:
                run.stop("this was the twelfth")

    def counted() -> tuple[list[int], int]:
        noting = WaitsAtSteps()
        run = trainer(loader(48), max_epochs=5, driver=Counting("cpu"), callbacks=[noting, Seldom()]).fit()
        return noting.in_steps, run.progress.step

    first, second = launch(counted)
    assert first == second
    in_steps, steps = first
    assert steps == 12
    # The first two find out who sleeps; the 6th and 7th have the end of an epoch between them, of which all must know.
    assert [count for step, count in enumerate(in_steps, start=1) if step not in (1, 2, 6)] == [0] * 8


def test_a_stop_that_is_asked_for_before_the_batch_is_known_at_the_end_of_its_step() -> None:
    def stopping() -> int:
        @on(Callback.on_batch_start, at=3)
        def stop(run: Run, batch: Any) -> None:
            if rank() == 1:
                run.stop("enough")

        return trainer(loader(48), callbacks=[stop]).fit().progress.step

    assert launch(stopping) == [3, 3]


def test_a_stop_that_nobody_could_expect_is_told_with_the_next_batch() -> None:
    def stopping() -> tuple[int, str]:
        runs: list[Run] = []

        @on(Callback.on_fit_start)
        def keep(run: Run) -> None:
            runs.append(run)

        def loss(model: Any, batch: Any) -> Tensor:
            if rank() == 1 and runs[0].progress.step == 2:
                runs[0].stop("asked for in the loss")
            return squared_error(model, batch)

        run = trainer(loader(48), compute_loss=loss, callbacks=[keep]).fit()
        return run.progress.step, run.why("stopped")

    (first, told), (second, _) = launch(stopping)
    assert first == second == 4
    assert told.startswith("stopped by the script on rank 1")


@pytest.mark.parametrize("moment", [Callback.on_fit_start, Callback.on_epoch_start, Callback.on_epoch_end, Callback.on_log])
def test_a_stop_may_be_asked_for_by_one_rank_outside_of_steps(moment: Any) -> None:
    def stopping() -> tuple[int, str, str]:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log("a", 1.0)

        def stop(run: Run, *_: Any) -> None:
            if rank() == (0 if moment is Callback.on_log else 1):
                run.stop("enough")

        run = trainer(loader(48), callbacks=[log, on(moment)(stop)]).fit()
        assert run.outcome is not None
        return run.progress.step, run.outcome.kind, run.outcome.reason

    # What the main process asks for in on_log, when the record is out, is told with the next step.
    steps = {Callback.on_fit_start: 0, Callback.on_epoch_start: 0, Callback.on_epoch_end: 6, Callback.on_log: 2}[moment]
    assert launch(stopping) == [(steps, "stopped", "enough")] * 2


@pytest.mark.parametrize("moment", [Callback.on_batch_start, Callback.on_fetch_end])
def test_what_is_logged_before_the_batch_is_told_or_when_there_is_none_is_reduced(moment: Any) -> None:
    def logged() -> list[tuple[int, float]]:
        times: list[None] = []

        def log(run: Run, *_: Any) -> None:
            times.append(None)
            run.log("a", len(times) + 10.0 * rank())

        return trainer(loader(48), max_epochs=1, accumulate=4, callbacks=[on(moment)(log)]).fit().history["a"]

    last = 6 if moment is Callback.on_batch_start else 7  # the loader is asked once more, when it has no more
    assert launch(logged) == [[(1, 4 + 5.0), (2, last + 5.0)]] * 2


def test_what_is_logged_at_a_moment_that_nobody_else_hears_is_reduced() -> None:
    def logged() -> dict[str, list[float]]:
        means: dict[str, list[float]] = {}
        for name in ("on_before_backward", "on_after_backward", "on_after_zero_grad", "on_batch_end", "on_step_end"):

            def log(run: Run, *_: Any) -> None:
                run.log("a", float(rank()))

            run = trainer(loader(48), max_epochs=1, callbacks=[on(getattr(Callback, name))(log)]).fit()
            means[name] = sorted({value for _, value in run.history["a"]})
        return means

    first, second = launch(logged)
    assert first == second
    assert set(map(tuple, first.values())) == {(0.5,)}


def test_the_time_is_the_mean_of_what_passed_on_all_ranks() -> None:
    def passed() -> float:
        @on(Callback.on_fit_start)
        def set_back(run: Run) -> None:
            run.progress._began -= 10_000 * rank()

        return trainer(loader(48), callbacks=[set_back]).fit().progress.elapsed_s

    first, second = launch(passed)
    assert first == second
    assert 5_000 < first < 5_100


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


def test_a_step_fn_may_ask_at_any_time() -> None:
    def stepping() -> int:
        def step(run: Run, batch: Any) -> Tensor:
            loss = torch.nn.functional.mse_loss(run.model(batch[0]), batch[1])
            run.backward(loss)
            run.update()
            if rank() == 1 and run.progress.step == 2:
                run.stop("enough")
            return loss

        return trainer(loader(48), compute_loss=None, step_fn=step).fit().progress.step

    assert launch(stepping) == [3, 3]


def test_a_cadence_that_is_a_function_is_due_on_all_ranks_if_it_is_on_one() -> None:
    def fitting() -> tuple[list[int], list[int], list[int]]:
        asked: list[int] = []

        def due(run: Run) -> bool:
            asked.append(run.progress.step)
            return run.progress.step % 3 == rank()

        judge = Evaluate(loader(8, shuffle=False), every=due)
        history = trainer(loader(48), max_epochs=1, callbacks=[LogTraining(due, throughput=False), judge]).fit().history
        return asked, [step for step, _ in history["train/loss"]], [step for step, _ in history["eval/loss"]]

    twice = [step for step in range(1, 7) for _ in range(2)]
    assert launch(fitting, timeout_s=20) == [(twice, [1, 3, 4, 6], [1, 3, 4, 6])] * 2


def test_marks_of_names_are_alike_only_for_the_same_names() -> None:
    def told(*names: str) -> list[float]:
        book = Book()
        for name in names:
            book.add(name, 1.0)
        return book.told()[:4]

    assert told() == [0, 0, 0, 0]
    assert told("a", "b") == told("a", "b")
    assert told("a", "b") != told("b", "a") != told("ab") != told("a")
    assert told("a", "b\nc") != told("a\nb", "c")
