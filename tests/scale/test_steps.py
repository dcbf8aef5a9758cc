"""What the ranks exchange in a step: no rank waits for another in a step in which nothing was requested or logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import (
    Checkpoint,
    ClipGradients,
    EarlyStopping,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
    Recover,
    StopOnNonFinite,
    Swa,
    Timer,
)
from cadenza.compat import fastnlp
from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.drivers import DdpDriver
from cadenza.engine import rank_sync
from cadenza.engine.session import session_of
from cadenza.errors import LossError
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.schedule import Every, Schedule, When
from cadenza.hooks.subscription import periodic
from cadenza.loading import TensorBatches
from cadenza.sinks import Console, JsonLines, ProgressBar
from cadenza.testing import launch
from tests.distributed.drivers import ddp, fsdp
from tests.distributed.parts import Batch, Stream, loader, own_rank, rank, samples, squared_error, trainer, weights_of
from tests.distributed.standing import on_ranks

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

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.waited: list[int] = []
        self.started: list[int] = []

    def listeners(self) -> list[Listener]:
        return silent(super().listeners())

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


SELDOM: list[Callable[[], list[Callback]]] = [
    list,
    lambda: [ProgressBar("plain", interval_s=60), LogTraining("40 steps")],
    lambda: [LogTraining(40), Ema(), ClipGradients(1.0), LearningRate(schedule), Console()],
    lambda: [
        LogTraining(40),
        ClipGradients(1.0, log="norm", log_every=40),
        on(Callback.on_batch_end, every=40)(lambda run, batch, outputs: None),
    ],
]


def test_schedules_that_are_seldom_due_make_ranks_wait_in_a_tenth_of_the_steps_at_most() -> None:
    def waits(callbacks: list[Callback]) -> int:
        mark = Mark(Watched())
        assert trainer(loader(400), callbacks=[mark, *callbacks]).fit().progress.step == 100
        return mark.waited[-1] - mark.waited[0]

    first, second = launch(lambda: [waits(make()) for make in SELDOM])
    assert first == second
    assert all(1 <= count - first[0] <= 0.1 * 100 for count in first[1:])


def test_ranks_exchange_nothing_in_quiet_steps_and_count_every_sample() -> None:
    def counted() -> tuple[int, list[tuple[int, int]]]:
        seen: list[tuple[int, int]] = []
        rank_sync.LONGEST_S = math.inf  # in this process: how long quiet steps take depends on the machine
        exchanges: list[Tensor] = []

        class Counting(DdpDriver):
            def reduce_later(self, value: Tensor) -> Callable[[], Tensor]:
                exchanges.append(value)
                return super().reduce_later(value)

        def note(run: Run) -> None:
            seen.append((run.progress.step, run.progress.samples))

        callbacks = [on(Callback.on_epoch_end)(note), on(Callback.on_step_end, every="150 steps")(note)]
        note(trainer(loader(411), max_epochs=4, driver=Counting("cpu"), callbacks=callbacks).fit())
        return len(exchanges), seen

    (exchanges, seen), second = launch(counted)
    assert (exchanges, seen) == second
    assert seen == [(52, 411), (104, 822), (150, 822 + 46 * 8), (156, 1233), (208, 1644), (208, 4 * 411)]
    assert exchanges <= 10 + 4 * 5  # at the end of each epoch, ranks wait five times


def test_a_suspended_listener_costs_no_wait_and_is_called_when_it_is_due() -> None:

    class Seldom(Callback):
        def listeners(self) -> list[Listener]:
            return [periodic(Schedule.parse("12 steps"), self.act)]

        def act(self, run: Run) -> None:
            if run.driver.rank == 1:
                run.stop("this was the twelfth")

    def counted() -> tuple[list[int], int]:
        mark = Mark(Watched())
        run = trainer(loader(48), max_epochs=5, callbacks=[mark, Seldom()]).fit()
        return _differences(mark.waited), run.progress.step

    first, second = launch(counted)
    assert first == second
    in_steps, steps = first
    assert steps == 12
    # The first two steps find the suspended listeners. The epoch ends after the 6th, which all ranks must know.
    assert [count for step, count in enumerate(in_steps, start=1) if step not in (1, 2, 6)] == [0] * 8


@pytest.mark.parametrize("moment", [Callback.on_batch_start, Callback.on_before_backward])
def test_ranks_agree_on_a_skipped_batch_only_in_steps_in_which_a_listener_may_skip_it(moment: Any) -> None:
    """A listener that fails on one rank and is disabled there changes nothing for the exchange of the others."""

    def counted() -> tuple[list[int], int, int]:
        class SkipsOne(Callback):
            on_fault = "disable"

            def listeners(self) -> list[Listener]:
                return [Listener(moment, self.skip, Schedule.parse("12 steps"))]

            def skip(self, run: Run, *_: Any) -> None:
                if rank() == 1:
                    if run.progress.step == 12:
                        run.skip_batch("asked on one rank")
                    else:
                        raise ValueError("fails on one rank")

        mark = Mark(Watched())
        run = trainer(loader(48 * 8, shuffle=False), max_steps=40, callbacks=[mark, SkipsOne()]).fit()
        return _differences(mark.waited), run.progress.step, len(run.decisions)

    first, second = launch(counted)
    assert first[:2] == second[:2]
    assert sum(first[0]) <= 12  # of 39 steps
    assert second[2] == 2  # skipped, then disabled


def test_ranks_exchange_nothing_in_steps_of_callbacks_that_only_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rank_sync, "LONGEST_S", math.inf)  # however slow the steps are
    usual: list[Callback] = [LogTraining(50), Ema(), ClipGradients(1.0), LearningRate(schedule), Console(), Checkpoint()]

    def exchanges() -> tuple[int, int, int]:
        watched = Watched()
        count = Mark(watched)
        run = trainer(loader(4 * 2 * 100), max_epochs=1, callbacks=[count, *usual], directory=tmp_path / "run").fit()
        assert run.progress.step == 100
        assert [step for step, _ in run.history["train/loss"]] == [50, 100]
        assert run.progress.samples == 800
        return watched.started, count.started[50] - count.started[49], count.started[99] - count.started[51]

    for at_all, with_record, between_records in launch(exchanges):
        assert at_all < 70  # many of them at the start and at the end
        assert with_record == 2  # with the batch, and at the end of the step: the loss is in the record
        assert between_records == 0  # the quiet window ends where the next record is due


def test_no_rank_waits_for_the_next_batch_of_data_that_is_sharded_already() -> None:
    """The ranks exchange the lengths of their loaders once in an epoch."""

    def waits(own: Any) -> tuple[list[int], int]:
        mark = Mark(Watched())
        run = trainer(own, max_epochs=2, callbacks=[mark, Own()], driver=DdpDriver("cpu", share_data=False)).fit()
        return _differences(mark.waited[4:10]), run.progress.batch

    def counted() -> list[tuple[list[int], int]]:
        data: Any = samples(4 * 2 * 12)
        tensors = TensorBatches(data.tensors[0][rank() :: 2], data.tensors[1][rank() :: 2], batch_size=4)
        return [
            waits(own) for own in (DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank())), list(tensors), tensors)
        ]

    assert launch(counted) == [[([0] * 5, 24)] * 3] * 2


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


def test_an_exchange_of_the_default_group_never_meets_one_of_a_run() -> None:
    """A callback may communicate with torch's functions at any moment, also while an exchange of the run is under way."""

    def training() -> list[float]:
        sums: list[float] = []

        def loss(model: nn.Module, batch: Any) -> Tensor:
            own = torch.tensor([1.0 + own_rank()] * 8)
            dist.all_reduce(own)
            sums.append(float(own.sum()))
            return squared_error(model, batch)

        trainer(loader(96), max_epochs=1, compute_loss=loss, callbacks=[Own()]).fit()
        return sums

    assert launch(training) == [[24.0] * 12] * 2


# -- schedules, weights, skips, loops of ones own and streams


def never(run: Run) -> bool:
    return False


class Skips(Callback):
    """A callback that may skip batches, and does not."""

    def on_batch_start(self, run: Run, batch: Any) -> None: ...
    def on_before_backward(self, run: Run, outputs: Any) -> None: ...


class Silent(Skips):
    def listeners(self) -> list[Listener]:
        return silent(super().listeners())


class OfFastnlp(fastnlp.Callback):
    def on_train_batch_end(self, trainer: Any) -> None: ...


class OfAccelerated(TrainerCallback):
    def on_train_step_end(self, trainer: Any, *_: Any, **__: Any) -> None: ...


def scheduled(function: Callable[[Run], bool] | Schedule) -> Callback:
    return on(Callback.on_step_end, every=function)(lambda run: None)


def weighted(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return a loss with a weight; that of every fifth batch is 0, and its loss NaN, as for padding."""
    weight = float(batch[2][0] // 4 % 5)
    return {"loss": squared_error(model, batch) * (1.0 if weight else math.nan), "weight": weight}


def own_step(run: Run, batch: Batch) -> Tensor:
    loss = squared_error(run.model, batch)
    run.backward(loss)
    run.update()
    return loss.detach()


def own_loop(one: Trainer, compute_loss: Callable[..., Any] = squared_error) -> None:
    for step in one.steps():
        for batch in step:
            step.backward(step.forward(compute_loss, batch))


def sharded() -> dict[str, Any]:
    return {"driver": fsdp()}


def own_weights() -> dict[str, Any]:
    data = loader(4 * 2 * 12, shuffle=False)  # no step in which both ranks have a batch of weight 0
    return {"compute_loss": None, "train": partial(own_loop, compute_loss=weighted), "data": data}


Case = tuple[int, Callable[[], list[Callback]], Callable[[], dict[str, Any]]]
OWN_STEP: dict[str, Any] = {"compute_loss": None, "step_fn": own_step}
OWN_LOOP: dict[str, Any] = {"compute_loss": None, "train": own_loop}
CASES: dict[str, Case] = {  # with one more for loops of one's own and a step_fn with DDP: their reduction of gradients
    "two schedules that are functions": (0, lambda: [scheduled(never), Checkpoint(never)], dict),
    "a function and a length": (0, lambda: [scheduled(When(never) & Every("100 steps"))], dict),
    "a function or a length": (1, lambda: [scheduled(When(never) | Every("100 steps"))], dict),
    "a callback that may skip": (2, lambda: [Skips()], dict),
    "a callback that is silent": (0, lambda: [Silent()], dict),
    "a batch hook of fastNLP": (1, lambda: [cast("Any", OfFastnlp())], dict),
    "a batch hook of pytorch-accelerated": (1, lambda: [cast("Any", OfAccelerated())], dict),
    "losses that may break": (0, lambda: [Recover(), Checkpoint("100 steps", background=False)], dict),
    "weights": (0, list, lambda: {"compute_loss": weighted}),
    "logged numbers": (1, lambda: [on(Callback.on_step_end)(lambda run: run.log({"a": 1.0, "b": torch.tensor(2.0)}))], dict),
    "a norm that is logged in each step": (1, lambda: [ClipGradients(1.0, log="norm", log_every=1)], dict),
    "a norm that is seldom logged": (0, lambda: [ClipGradients(1.0, log="norm")], dict),
    "FSDP with weights": (0, list, lambda: {"compute_loss": weighted, **sharded()}),
    "FSDP and non-finite losses": (1, lambda: [StopOnNonFinite()], sharded),
    "FSDP and non-finite gradients": (2, lambda: [StopOnNonFinite(gradients=True)], sharded),
    "a step_fn": (1 + 2, list, lambda: OWN_STEP),
    "a step_fn and non-finite losses": (1 + 3, lambda: [StopOnNonFinite()], lambda: OWN_STEP),
    "a step_fn and FSDP": (0, list, lambda: {**OWN_STEP, **sharded()}),
    "a loop": (1 + 1, list, lambda: OWN_LOOP),
    "a loop with weights and non-finite losses": (1 + 1, lambda: [StopOnNonFinite()], own_weights),
}


def test_the_waits_of_plain_steps_are_those_of_the_guide(tmp_path: Path) -> None:
    cases: dict[str, Case] = {**{name: (0, make, dict) for name, make in LISTS.items()}, **CASES}

    def counted() -> dict[str, tuple[list[int], int]]:
        found = {}
        for name, (_, make, arguments) in cases.items():
            waited, started = plain_steps(make, tmp_path / name, **arguments())
            found[name] = waited, max(started)
        return found

    for found in launch(counted):
        assert {name: waited for name, (waited, _) in found.items()} == {name: [case[0]] * 5 for name, case in cases.items()}
        for name, (_, most) in found.items():  # in a list: with the batch, and at the end of the step
            assert most - cases[name][0] <= (2 if name in LISTS else 4), name


# -- weights ----------------------------------------------------------------------------------------


def train_weighted(steps: int | None = None, **arguments: Any) -> tuple[Tensor, float | None]:
    """Return the weights of the model, and the unit of the weights of batches."""
    accumulate = 2 if rank() is not None else 4  # two ranks take as many samples in a step as one process
    callbacks = [Checkpoint()] if "directory" in arguments else []
    arguments = {"compute_loss": weighted, "accumulate": accumulate, **arguments}
    one = trainer(loader(4 * 30, shuffle=False), max_steps=steps, callbacks=callbacks, **arguments)
    run = one.fit(resume="auto" if callbacks else False)
    return weights_of(one), session_of(run).step.weight_unit


def test_weights_that_travel_with_the_batches_give_the_result_of_one_process_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    def both() -> Any:
        train_weighted(7, directory=tmp_path / "cut")
        return train_weighted(), train_weighted(directory=tmp_path / "cut")

    expected, alone = train_weighted()
    assert alone is None
    for (weights, unit), (again, kept) in on_ranks(both):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, again)
        assert unit == kept == 0.5  # the weights of the first batches are 0 and 1


def test_a_weight_on_some_ranks_only_is_an_error_on_all() -> None:
    def training() -> str:
        def sometimes(model: nn.Module, batch: Batch) -> dict[str, Any]:
            outputs = weighted(model, batch)
            return {"loss": squared_error(model, batch)} if own_rank() == 1 and batch[2][0] > 30 else outputs

        with pytest.raises(LossError, match="on some ranks only"):
            train_weighted(compute_loss=sometimes)
        return "raised"

    assert on_ranks(training) == ["raised"] * 2


# -- schedules that are functions -------------------------------------------------------------------


def due_at(function: Callable[[Run], bool] | Schedule, data: Any = None, **arguments: Any) -> list[int]:
    """Return the steps after which a listener with this schedule is called on this rank, in two epochs of 4 steps."""
    steps: list[int] = []
    note = on(Callback.on_step_end, every=function)(lambda run: steps.append(run.progress.step))
    trainer(loader(4 * 2 * 4) if data is None else data, callbacks=[note], **arguments).fit()
    return steps


def on_one_rank(run: Run) -> bool:
    return rank() == 1 and run.progress.step in (4, 8)


STREAM: dict[str, Any] = {"data": Stream(4 * 2 * 4)}
SCHEDULES: dict[str, tuple[Callable[[Run], bool] | Schedule, dict[str, Any], list[int]]] = {
    "on all ranks: at once": (lambda run: run.progress.step in (2, 3, 8), {}, [2, 3, 8]),
    "on one: a step later": (lambda run: rank() == 1 and run.progress.step in (2, 6), {}, [3, 7]),
    "on one, then on the other": (lambda run: run.progress.step == 2 + own_rank(), {}, [3, 4]),
    "at the end of an epoch all ranks wait": (lambda run: rank() == 0 and run.progress.step in (4, 8), {}, [4, 8]),
    "a part: at once": (When(lambda run: rank() == 1 and run.progress.step == 2) | Every("5 steps"), {}, [2, 5]),
    "in the last step of a stream": (on_one_rank, STREAM, [4, 8]),
    "in a stream, and in the last step": (on_one_rank, {**STREAM, "max_steps": 8, "max_epochs": None}, [5, 8]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_is_a_function_is_due_at_the_same_steps_on_all_ranks(name: str) -> None:
    function, arguments, expected = SCHEDULES[name]
    assert on_ranks(lambda: due_at(function, **arguments)) == [expected] * 2


def test_a_checkpoint_holds_that_a_schedule_is_due_at_the_next_step(tmp_path: Path) -> None:
    def trained(resume: Any) -> tuple[Tensor, list[int]]:
        calls: list[int] = []

        @on(Callback.on_step_end, every=lambda run: rank() == 1 and run.progress.step % 3 == 2)
        def halve(run: Run) -> None:
            calls.append(run.progress.step)
            run.optimizers[0].param_groups[0]["lr"] *= 0.5

        folder = tmp_path / ("again" if resume else "whole")
        one = trainer(loader(96), max_steps=9, directory=folder, callbacks=[halve, Checkpoint("5 steps", keep_last=9)])
        one.fit(resume=resume)
        return weights_of(one), calls

    def both() -> Any:
        whole = trained(False)
        (saved,) = (tmp_path / "whole" / "checkpoints").glob("*5")
        return whole, trained(saved)

    for (weights, calls), (others, later) in on_ranks(both):
        assert (calls, later) == ([3, 6, 9], [6, 9])
        assert weights.equal(others)


# -- streams without a length -----------------------------------------------------------------------


class Shards(IterableDataset[Any]):
    """Four shards of different lengths: rank 0 of 2 has 14 batches of 4 samples, and rank 1 has 13."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def shards(self) -> list[range]:
        return [range(25), range(25, 50), range(50, 81), range(81, 108)]

    def read_shard(self, shard: range, start: int) -> Iterator[Any]:
        for number in shard[start:]:
            self.read.append(number)
            yield samples(108)[number]

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the shards are read")


class OwnPart(IterableDataset[Any]):
    """A stream that is sharded already, without positions: 12 batches of 4 on rank 0, and 14 on rank 1."""

    def __iter__(self) -> Iterator[Any]:
        return (samples(112)[number] for number in range(own_rank(), (96, 112)[own_rank()], 2))


def test_the_end_of_a_stream_is_known_a_batch_before_if_batches_can_be_read_ahead(tmp_path: Path) -> None:
    def counted() -> list[tuple[list[int], int]]:
        found = []
        cases: list[tuple[Any, int]] = [(Shards, 0), (OwnPart, 1), (OwnPart, 0)]
        for make, workers in cases:
            driver = None if make is Shards else ddp(share_data=False)
            data = DataLoader(make(), 4, num_workers=workers)
            waited, started = plain_steps(list, tmp_path / f"{make.__name__} {workers}", data, driver=driver)
            found.append((waited, max(started)))
        return found

    for found in launch(counted):
        assert [waited for waited, _ in found] == [[waits] * 5 for waits in (0, 0, 1)]
        assert all(most <= 2 for _, most in found)  # with the batch, unless ranks are quiet, and with the data


def test_a_stream_of_shards_ends_with_the_first_rank_and_continues_at_the_batch_after_the_last_one_used(tmp_path: Path) -> None:
    def trained(folder: str, steps: int | None) -> tuple[Tensor, int, list[int]]:
        data = Shards()
        callbacks = [Checkpoint()]
        one = trainer(DataLoader(data, 4), max_steps=steps, max_epochs=2, directory=tmp_path / folder, callbacks=callbacks)
        run = one.fit(resume="auto")
        return weights_of(one), run.progress.step, data.read

    def both() -> Any:
        whole = trained("whole", None)
        trained("cut", 5)
        return whole, trained("cut", None)

    for (weights, steps, read), (again, total, after) in on_ranks(both):
        assert steps == total == 26
        assert torch.equal(weights, again)
        assert after == read[4 * 5 :]
