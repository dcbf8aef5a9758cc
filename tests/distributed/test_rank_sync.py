"""The exchanges between ranks in a step, and when ranks wait for each other."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from cadenza import Callback, Run, on
from cadenza.callbacks import ClipGradients, Ema, Evaluate, LearningRate, LogTraining
from cadenza.drivers import DdpDriver
from cadenza.engine import silence
from cadenza.engine.session import session_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.schedule import Schedule
from cadenza.hooks.subscription import periodic
from cadenza.sinks import Console, ProgressBar
from cadenza.testing import launch
from tests.distributed.parts import loader, squared_error, trainer
from tests.distributed.parts import own_rank as rank


class Counting(DdpDriver):
    """DDP that counts how often the ranks wait for each other."""

    waits = exchanges = 0

    def reduce_later(self, value: Tensor) -> Callable[[], Tensor]:
        self.exchanges += 1
        number, arrived = self.exchanges, super().reduce_later(value)

        def read() -> Tensor:  # what is exchanged at a step boundary has had a batch to arrive, or this rank waits
            self.waits += value.is_floating_point() and number == self.exchanges
            return arrived()

        return read

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


def test_ranks_do_not_wait_in_a_step_without_possible_requests() -> None:
    assert waits() == [0, 0, 0, 0, 0]


def test_ranks_do_not_wait_in_a_step_with_possible_requests_if_there_are_none() -> None:
    @on(Callback.on_step_end)
    def listening(run: Run) -> None: ...

    assert waits(listening) == [0, 0, 0, 0, 0]


def test_callbacks_that_make_no_requests_cost_no_wait() -> None:
    class Quiet(Callback):
        asks = False

        def on_step_end(self, run: Run) -> None: ...

    assert waits(Quiet(), Ema(), ClipGradients(1.0)) == [0, 0, 0, 0, 0]
    assert waits(ClipGradients(1.0, log="norm", log_every=1)) == [1, 1, 1, 1, 1]
    assert waits(ClipGradients(1.0, log="norm")) == [0, 0, 0, 0, 0]


BAR: dict[str, Any] = {"interval_s": 60}


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [ProgressBar("plain", **BAR), LogTraining("40 steps")],
        lambda: [LogTraining(40), Ema(), ClipGradients(1.0), LearningRate(lambda one: StepLR(one, 10)), Console()],
        lambda: [
            LogTraining(40),
            ClipGradients(1.0, log="norm", log_every=40),
            on(Callback.on_batch_end, every=40)(print_none),
        ],
    ],
)
def test_schedules_that_are_seldom_due_make_ranks_wait_in_a_tenth_of_the_steps_at_most(
    callbacks: Callable[[], list[Callback]],
) -> None:
    def counted() -> tuple[int, int]:
        counts = []
        for some in ([], callbacks()):
            driver = Counting("cpu")
            assert trainer(loader(400), max_epochs=2, driver=driver, callbacks=some).fit().progress.step == 100
            counts.append(driver.waits)
        return counts[0], counts[1]

    (bare, waits), other = launch(counted)
    assert (bare, waits) == other
    assert 1 <= waits - bare <= 0.1 * 100


def print_none(run: Run, batch: Any, outputs: Any) -> None: ...


def test_ranks_exchange_nothing_in_quiet_steps_and_count_every_sample() -> None:
    def counted() -> tuple[int, list[tuple[int, int]], int]:
        seen: list[tuple[int, int]] = []
        silence.LONGEST_S = math.inf  # in this process: how long quiet steps take depends on the machine
        driver = Counting("cpu")

        @on(Callback.on_epoch_end)
        def note(run: Run) -> None:
            seen.append((run.progress.step, run.progress.samples))

        class Late(Callback):
            def listeners(self) -> list[Listener]:
                return [
                    periodic(Schedule.parse("150 steps"), lambda run: seen.append((run.progress.step, run.progress.samples)))
                ]

        run = trainer(loader(411), max_epochs=4, driver=driver, callbacks=[note, Late()]).fit()
        return driver.exchanges, seen, run.progress.samples

    (exchanges, seen, samples), second = launch(counted)
    assert (exchanges, seen, samples) == second
    assert seen == [(52, 411), (104, 822), (150, seen[2][1]), (156, 1233), (208, 1644)]
    assert seen[2][1] == 822 + 46 * 8
    assert samples == 4 * 411
    assert exchanges <= 10


def test_a_signal_in_quiet_steps_stops_all_ranks_at_the_same_step() -> None:
    def stopping() -> tuple[int, str]:
        asked: list[Run] = []

        class Keep(Callback):
            def on_fit_start(self, run: Run) -> None:
                asked.append(run)

        def ask(model: nn.Module, batch: Any) -> Tensor:
            if rank() == 1 and asked[0].progress.step == 20:
                session_of(asked[0]).sync.requests.preempt(signal.SIGTERM)
            return squared_error(model, batch)

        one = trainer(loader(480), max_epochs=50, compute_loss=ask, callbacks=[Keep()])
        with pytest.raises(SystemExit):
            one.fit()
        return asked[0].progress.step, asked[0].why("stopped")

    first, second = launch(stopping)
    assert first[0] == second[0]
    assert 21 <= first[0] < 20 + 140
    assert "SIGTERM" in first[1]


def test_ranks_wait_once_in_a_step_with_logged_values() -> None:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log({"a": 1.0, "b": torch.tensor(2.0)})

    assert waits(log) == [1, 1, 1, 1, 1]


def test_a_suspended_listener_costs_no_wait_and_is_called_when_it_is_due() -> None:

    class Seldom(Callback):
        def listeners(self) -> list[Listener]:
            return [periodic(Schedule.parse("12 steps"), self.act)]

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
    # The first two steps find the suspended listeners. The epoch ends after the 6th, which all ranks must know.
    assert [count for step, count in enumerate(in_steps, start=1) if step not in (1, 2, 6)] == [0] * 8


def test_a_stop_requested_before_the_batch_takes_effect_at_the_end_of_its_step() -> None:
    def stopping() -> int:
        @on(Callback.on_batch_start, at=3)
        def stop(run: Run, batch: Any) -> None:
            if rank() == 1:
                run.stop("enough")

        return trainer(loader(48), callbacks=[stop]).fit().progress.step

    assert launch(stopping) == [3, 3]


def test_an_unexpected_stop_is_sent_with_the_next_batch() -> None:
    def stopping() -> tuple[int, str]:
        silence.LONGEST_S = 0.0  # in this process: no quiet steps, at the end of which the request would be sent
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

    (first, why), (second, _) = launch(stopping)
    assert first == second == 4
    assert why.startswith("stopped by the script on rank 1")


@pytest.mark.parametrize("moment", [Callback.on_fit_start, Callback.on_epoch_start, Callback.on_epoch_end, Callback.on_log])
def test_one_rank_may_request_a_stop_outside_of_steps(moment: Any) -> None:
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

    # A request of the main process in on_log, after the record, is sent with the next step.
    steps = {Callback.on_fit_start: 0, Callback.on_epoch_start: 0, Callback.on_epoch_end: 6, Callback.on_log: 2}[moment]
    assert launch(stopping) == [(steps, "stopped", "enough")] * 2


@pytest.mark.parametrize("moment", [Callback.on_batch_start, Callback.on_fetch_end])
def test_values_logged_before_a_batch_or_after_the_last_one_are_reduced(moment: Any) -> None:
    def logged() -> list[tuple[int, float]]:
        times: list[None] = []

        def log(run: Run, *_: Any) -> None:
            times.append(None)
            run.log("a", len(times) + 10.0 * rank())

        return trainer(loader(48), max_epochs=1, accumulate=4, callbacks=[on(moment)(log)]).fit().history["a"]

    last = 6 if moment is Callback.on_batch_start else 7  # one more fetch finds the loader exhausted
    assert launch(logged) == [[(1, 4 + 5.0), (2, last + 5.0)]] * 2


def test_values_logged_at_a_moment_without_other_listeners_are_reduced() -> None:
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


def test_elapsed_time_is_the_mean_over_ranks() -> None:
    def passed() -> float:
        @on(Callback.on_fit_start)
        def set_back(run: Run) -> None:
            run.progress._began -= 10_000 * rank()

        return trainer(loader(48), callbacks=[set_back]).fit().progress.elapsed_s

    first, second = launch(passed)
    assert first == second
    assert 5_000 < first < 5_100


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

    assert launch(stepping) == [4, 4]  # the request of one rank takes effect at the next boundary, on all


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
    assert launch(fitting) == [(twice, [2, 4, 5, 6], [2, 4, 5, 6])] * 2  # a step later, but for the last step


@pytest.mark.parametrize("moment", [Callback.on_batch_start, Callback.on_before_backward])
def test_ranks_agree_on_a_skipped_batch_only_in_steps_in_which_a_listener_may_skip_it(moment: Any) -> None:
    """A listener that fails on one rank and is disabled there changes nothing for the exchange of the others."""

    def counted() -> tuple[list[int], int, int]:
        class Skips(Callback):
            on_fault = "disable"

            def listeners(self) -> list[Listener]:
                return [Listener(moment, self.skip, Schedule.parse("12 steps"))]

            def skip(self, run: Run, *_: Any) -> None:
                if rank() == 1:
                    if run.progress.step == 12:
                        run.skip_batch("asked on one rank")
                    else:
                        raise ValueError("fails on one rank")

        noting = WaitsAtSteps()
        data, driver = loader(48 * 8, shuffle=False), Counting("cpu")
        run = trainer(data, max_steps=40, driver=driver, callbacks=[noting, Skips()]).fit()
        return noting.in_steps, session_of(run).progress.step, len(run.decisions)

    first, second = launch(counted)
    assert first[:2] == second[:2]
    assert sum(first[0]) <= 12  # of 39 steps
    assert second[2] == 2  # skipped, then disabled


def test_a_callback_that_is_disabled_on_one_rank_does_not_separate_the_ranks() -> None:
    def training() -> tuple[int, list[tuple[int, float]]]:
        class Fragile(Callback):
            on_fault = "disable"

            def on_batch_start(self, run: Run, batch: Any) -> None:
                if rank() == 1 and run.progress.step == 3:
                    raise ValueError("fails on one rank")

        logging = on(Callback.on_step_end, every=3)(lambda run: run.log("at", run.progress.step))
        run = trainer(loader(48, shuffle=False), max_epochs=1, callbacks=[Fragile(), logging]).fit()
        return run.progress.step, run.history["at"]

    first, second = launch(training)
    assert first == second == (6, [(3, 3.0), (6, 6.0)])
