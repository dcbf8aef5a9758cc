"""What the ranks exchange in a step: no rank waits for another in a step in which nothing was requested or logged."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import (
    Checkpoint,
    ClipGradients,
    EarlyStopping,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
    StopOnNonFinite,
    Swa,
    Timer,
)
from cadenza.drivers import DdpDriver
from cadenza.engine import silence
from cadenza.engine.session import session_of
from cadenza.errors import DataError, DistributedError
from cadenza.loading import TensorBatches
from cadenza.sinks import Console, JsonLines, ProgressBar
from cadenza.testing import launch
from tests.distributed.parts import loader, samples, squared_error, trainer, weights_of
from tests.distributed.parts import own_rank as rank

BLOCKING: tuple[str, ...] = ("all_reduce", "broadcast", "reduce", "gather", "all_gather", "all_gather_object", "gather_object")
BLOCKING += ("broadcast_object_list", "barrier", "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")


class Watched:
    """All calls of collectives in this process, other than the reduction of gradients: those for which the rank waits.

    A wait for a collective that was started before the last backward pass does not count: it had that long to arrive.
    """

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.started = 0
        self.passes = 0
        for name in BLOCKING:
            setattr(dist, name, self._watching(name, getattr(dist, name)))

    def _watching(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
            self.started += 1
            if async_op:
                return self.Work(self, name, collective(*arguments, async_op=True, **options))
            self.waited.append(name)
            return collective(*arguments, **options)

        return watched

    class Work:
        def __init__(self, watched: Watched, name: str, work: Any) -> None:
            self.watched, self.name, self.work, self.since = watched, name, work, watched.passes

        def wait(self) -> None:
            if self.watched.passes == self.since:
                self.watched.waited.append(f"{self.name}, started in this batch")
            self.work.wait()


class Mark(Callback):
    """Notes at the start of each step what was waited for until then."""

    asks = False

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.waited: list[int] = []
        self.started: list[int] = []

    def on_step_start(self, run: Run) -> None:
        self.waited.append(len(self.watched.waited))
        self.started.append(self.watched.started)

    def on_after_backward(self, run: Run, outputs: Any) -> None:
        self.watched.passes += 1


class Own(Callback):
    """A callback of a user, which may make a request in any step and does not."""

    def on_step_end(self, run: Run) -> None: ...
    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None: ...
    def on_after_backward(self, run: Run, outputs: Any) -> None: ...


def schedule(one: Any) -> Any:
    return StepLR(one, 10)


LISTS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "a hook of one's own": lambda: [Own()],
    "a function": lambda: [on(Callback.on_step_end)(lambda run: None)],
    "updates": lambda: [Ema(), ClipGradients(1.0), LearningRate(schedule)],
    "logs": lambda: [LogTraining(50), ClipGradients(1.0, log="norm", log_every=50)],
    "a progress bar": lambda: [ProgressBar("plain", interval_s=60), Own()],
    "the usual ones": lambda: [LogTraining(50), Ema(), ClipGradients(1.0), LearningRate(schedule), Console(), Own()],
    "checkpoints": lambda: [Checkpoint("100 steps"), JsonLines("rows.jsonl"), Own()],
    "evaluations": lambda: [Evaluate(loader(8), every="100 steps"), EarlyStopping("eval/loss", "min"), Own()],
    "averages": lambda: [Swa("50%"), Ema(), Own()],
    "checks": lambda: [StopOnNonFinite(gradients=True), Own()],
    "times": lambda: [Timer("50 steps"), LogTraining("50 steps"), Own()],
}


def plain_steps(
    make: Callable[[], list[Callback]],
    folder: Path,
    data: Any = None,
    train: Callable[[Trainer], object] = Trainer.fit,
    **arguments: Any,
) -> tuple[list[int], list[int]]:
    """Return for each of the steps 5 to 10 of an epoch how often this rank waited, and how many collectives it started."""
    watched = Watched()
    mark = Mark(watched)
    data = loader(4 * 2 * 12) if data is None else data
    train(trainer(data, max_epochs=1, callbacks=[mark, *make()], directory=folder, **arguments))
    waited, started = (numbers[4:10] for numbers in (mark.waited, mark.started))
    return _differences(waited), _differences(started)


def _differences(numbers: Sequence[int]) -> list[int]:
    return [after - before for before, after in pairwise(numbers)]


@pytest.mark.parametrize("name", LISTS)
def test_no_rank_waits_in_a_plain_step(name: str, tmp_path: Path) -> None:
    def counted() -> tuple[list[int], list[int]]:
        return plain_steps(LISTS[name], tmp_path / "run")

    for waited, started in launch(counted):
        assert waited == [0] * 5
        assert max(started) <= 2  # with the batch, and at the end of the step


def test_ranks_exchange_nothing_in_steps_of_callbacks_that_only_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(silence, "LONGEST_S", math.inf)  # however slow the steps are
    usual: list[Callback] = [LogTraining(50), Ema(), ClipGradients(1.0), LearningRate(schedule), Console(), Checkpoint()]

    class Count(Mark):
        _reads_totals = False

    def exchanges() -> tuple[int, int, int]:
        watched = Watched()
        count = Count(watched)
        run = trainer(loader(4 * 2 * 100), max_epochs=1, callbacks=[count, *usual], directory=tmp_path / "run").fit()
        assert run.progress.step == 100
        assert [step for step, _ in run.history["train/loss"]] == [50, 100]
        assert run.progress.samples == 800
        return watched.started, count.started[50] - count.started[49], count.started[99] - count.started[51]

    for at_all, with_record, between_records in launch(exchanges):
        assert at_all < 70  # many of them at the start and at the end
        assert with_record == 2  # with the batch, and at the end of the step: the loss is in the record
        assert between_records == 0  # the quiet window ends where the next record is due


@pytest.mark.parametrize("kind", ["sampler", "list", "tensors"])
def test_no_rank_waits_for_the_next_batch_of_data_that_is_sharded_already(kind: str) -> None:
    """The ranks exchange the lengths of their loaders once in an epoch."""

    def counted() -> tuple[list[int], int]:
        data: Any = samples(4 * 2 * 12)
        if kind == "sampler":
            own: Any = DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank()))
        else:
            own = TensorBatches(data.tensors[0][rank() :: 2], data.tensors[1][rank() :: 2], batch_size=4)
            own = list(own) if kind == "list" else own
        watched = Watched()
        mark = Mark(watched)
        driver = DdpDriver("cpu", share_data=False)
        run = trainer(own, max_epochs=2, callbacks=[mark, Own()], driver=driver).fit()
        return _differences(mark.waited[4:10]), run.progress.batch

    assert launch(counted) == [([0] * 5, 24)] * 2


@pytest.mark.parametrize(("length", "message"), [(7, "returned only 6"), (5, "returned more")])
def test_a_sharded_loader_with_a_wrong_length_is_an_error_on_all_ranks(length: int, message: str) -> None:
    class Wrong(DistributedSampler[Any]):
        def __len__(self) -> int:
            return 4 * length

    def training() -> str:
        data = samples(48)
        with pytest.raises((DataError, DistributedError)) as raised:
            trainer(DataLoader(data, 4, sampler=Wrong(data, 2, rank(), shuffle=False)), max_epochs=1).fit()
        return str(raised.value)

    assert all(message in told for told in launch(training))


def stopped_at(stops: Callable[[Run], bool], **arguments: Any) -> tuple[int, str]:
    @on(Callback.on_step_end)
    def stop(run: Run) -> None:
        if stops(run):
            run.stop("enough")

    run = trainer(loader(96), callbacks=[stop], **arguments).fit()
    return run.progress.step, run.why("stopped")


def test_a_request_of_all_ranks_takes_effect_at_once() -> None:
    (first, why), (second, _) = launch(lambda: stopped_at(lambda run: run.progress.step == 3))
    assert first == second == 3
    assert why == "stopped by stop at epoch 0, step 3, batch 3: enough"


def test_a_request_of_one_rank_takes_effect_one_step_later_on_all() -> None:
    (first, why), (second, _) = launch(lambda: stopped_at(lambda run: rank() == 1 and run.progress.step == 3))
    assert first == second == 4
    assert "on rank 1" in why


def test_a_request_of_one_rank_in_the_last_step_of_an_epoch_takes_effect_there() -> None:
    """All ranks wait at the end of an epoch."""
    (first, _), (second, _) = launch(lambda: stopped_at(lambda run: rank() == 1 and run.progress.step == 12))
    assert first == second == 12


def test_a_signal_of_one_rank_stops_all_ranks_after_the_next_step() -> None:
    def stopping() -> int:
        seen: list[Run] = []

        @on(Callback.on_step_end)
        def receive(run: Run) -> None:
            seen.append(run)
            if rank() == 1 and run.progress.step == 3:
                session_of(run).sync.requests.preempt(signal.SIGTERM)

        with pytest.raises(SystemExit):
            trainer(loader(96), callbacks=[receive]).fit()
        return seen[-1].progress.step

    assert launch(stopping) == [4, 4]


def logged(values: Callable[[Run], dict[str, float]], data: Any = None) -> dict[str, list[tuple[int, float]]]:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        run.log(values(run))

    history = trainer(loader(4 * 2 * 4) if data is None else data, max_epochs=1, callbacks=[log]).fit().history
    return {name: history[name] for name in history}


def test_numbers_of_one_rank_are_in_the_record_of_their_step_on_all_ranks() -> None:
    """Also those of the last step, and of each step."""
    rows = [(step, float(step)) for step in range(1, 5)]
    assert launch(lambda: logged(lambda run: {"a": float(run.progress.step)} if rank() == 1 else {})) == [{"a": rows}] * 2


def test_numbers_of_all_ranks_are_reduced_to_their_mean() -> None:
    rows = [(step, step + 0.5) for step in range(1, 5)]
    assert launch(lambda: logged(lambda run: {"a": run.progress.step + float(rank())})) == [{"a": rows}] * 2


def test_numbers_with_different_names_are_in_one_record_on_all_ranks() -> None:
    def own(run: Run) -> dict[str, float]:
        return {"ab"[rank()]: 1.0, **({"c": 2.0} if run.progress.step % 2 == rank() else {})}

    ones = [(step, 1.0) for step in range(1, 5)]
    assert launch(lambda: logged(own)) == [{"a": ones, "b": ones, "c": [(step, 2.0) for step in range(1, 5)]}] * 2


@pytest.mark.parametrize("source", [0, 1])
def test_numbers_of_one_rank_alone_are_sent_by_it_and_nothing_is_gathered_from_all(source: int) -> None:
    """Such as what the main process logs for itself: what a rank receives does not grow with the ranks."""

    def training() -> tuple[set[str], list[tuple[int, float]]]:
        during: list[str] = []
        watched = Watched()

        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            during[:] = watched.waited
            if rank() == source:
                run.log({f"a{number}": float(run.progress.step) for number in range(40)})

        begin = on(Callback.on_fit_start)(lambda run: watched.waited.clear())
        run = trainer(loader(4 * 2 * 4), max_epochs=1, callbacks=[begin, log]).fit()
        return {*during}, run.history["a39"]

    for names, logged in launch(training):
        assert "broadcast_object_list" in names
        assert not {name for name in names if "gather" in name}
        assert logged == [(step, float(step)) for step in range(1, 5)]


class Stream:
    """Batches of a loader, without a length."""

    def __iter__(self) -> Any:
        return iter(loader(4 * 2 * 4, shuffle=False))


def test_numbers_of_one_rank_in_the_last_step_of_a_stream_are_in_their_record_before_the_end_of_the_epoch() -> None:
    def seen() -> list[Any]:
        at_end: list[Any] = []

        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            if rank() == 1:
                run.log("a", float(run.progress.step))

        note = on(Callback.on_epoch_end)(lambda run: at_end.append(run.history["a"]))
        trainer(Stream(), max_epochs=1, callbacks=[log, note]).fit()
        return at_end[0]  # type: ignore[no-any-return]

    assert launch(seen) == [[(step, float(step)) for step in range(1, 5)]] * 2


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

    def whole() -> Any:
        return trained("whole", None)

    def cut() -> Any:
        trained("cut", 7)
        return trained("cut", None)

    for (weights, history), (again, others) in zip(launch(whole), launch(cut), strict=True):
        assert torch.equal(weights, again)
        assert history == others


def test_an_exchange_of_the_default_group_never_meets_one_of_a_run() -> None:
    """A callback may communicate with torch's functions at any moment, also while an exchange of the run is under way."""

    def training() -> list[float]:
        sums: list[float] = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            own = torch.tensor([1.0 + rank()] * 8)
            dist.all_reduce(own)
            sums.append(float(own.sum()))
            return squared_error(model, batch)

        trainer(loader(96), max_epochs=1, compute_loss=loss, callbacks=[Own()]).fit()
        return sums

    assert launch(training) == [[24.0] * 12] * 2
