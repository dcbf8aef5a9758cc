"""Cost of a moment, of callbacks that are not due, and of a profile; ``peers.py`` measures the step itself.

    python benchmarks/overhead.py [--rounds 15] [--steps 400]

The model is an MLP 32-64-10, batches of 16, SGD, one thread: a step of some hundred microseconds, so that overhead shows.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from cadenza import Callback, Hooks, Trainer, on
from cadenza import callbacks as library
from cadenza.callbacks.profile import Profile
from cadenza.profiling.spans import Profiler
from cadenza.testing import tiny_run

Batch = tuple[Tensor, Tensor]
Work = Callable[[], None]


class NoOp(Callback):
    """Listens to every moment of a step and does nothing."""

    def on_step_start(self, run: object) -> None: ...
    def on_batch_start(self, run: object, batch: object) -> None: ...
    def on_batch_end(self, run: object, batch: object, outputs: object) -> None: ...
    def on_step_end(self, run: object) -> None: ...


FAR = "1000000 steps"


def not_due() -> list[Callback]:
    """Return all callbacks that act occasionally, with nothing due. Callbacks that work in each step are not included.

    Excluded are ClipGradients, StopOnNonFinite, Warmup while it lasts, and Profile.
    """
    valid = [(torch.randn(16, 32), torch.randint(0, 10, (16,)))]
    return [
        library.Summary(),
        library.Freeze("0", until="1 step"),
        library.MoveModules(nn.CrossEntropyLoss()),
        library.ConvertSyncBatchNorm(),
        library.Limit(evaluation=1),
        library.Derive(largest=lambda run: run.outputs["predictions"].max()),
        library.Ema(every=FAR),
        library.Swa(start=FAR, every=FAR),
        library.Warmup("1 step"),
        library.LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), every="1 epoch"),
        library.ScheduleValue(lambda run: run.optimizers[0].param_groups[0], "weight_decay", lambda step: 0.0, every=FAR),
        library.Evaluate(valid, every=FAR),
        library.EarlyStopping("eval/loss", mode="min"),
        library.BestWeights("eval/loss", "min"),
        library.ConfusionMatrix(classes=10),
        library.SampleImages(every=FAR),
        library.SavePredictions("predictions.csv"),
        library.Histograms(FAR),
        library.DeviceStats(FAR),
        library.LogTraining(FAR),
        library.TimeLimit("100 h"),
    ]


def training(batches: list[Batch], callbacks: Iterable[Callback]) -> Work:
    """Return a function that runs a training with these callbacks, to be called several times."""
    loss_fn = nn.CrossEntropyLoss()

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        loss: Tensor = loss_fn(model(inputs), targets)
        return loss

    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, batches, compute_loss, max_epochs=1, callbacks=callbacks, device="cpu", progress=False)

    def work() -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # Profile shows a table
            trainer.fit()

    return work


def new_model() -> nn.Module:
    """Return the MLP, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def interleaved(works: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Return CPU seconds of each work in each round, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            begin = time.process_time()
            work()
            times[name].append(time.process_time() - begin)
    return times


def profiled(batches: list[Batch], rounds: int) -> None:
    """Print the cost of a profile per step."""
    works = {
        "without": training(batches, []),
        "profile": training(batches, [Profile(trace=None)]),
        "10 no-op callbacks": training(batches, [NoOp() for _ in range(10)]),
        "profile, 10 no-op callbacks": training(batches, [Profile(trace=None), *(NoOp() for _ in range(10))]),
    }
    for work in works.values():
        work()  # warm-up
    times = interleaved(works, rounds)
    base = times["without"]
    print(f"a step, {statistics.median(base) / len(batches) * 1e6:.0f} us without callbacks")
    for name, mine in times.items():
        ratio = statistics.median(time / other for time, other in zip(mine, base, strict=True))
        print(f"  {name:28} {ratio:.3f}")


def waiting(batches: list[Batch], rounds: int) -> None:
    """Print the cost of all callbacks in a step in which none is due, compared with steps without them."""
    schedulers = (library.LearningRate,)
    lists = {
        "all": not_due,
        # torch wraps the step of an optimizer that has a scheduler: 1.4 us, whoever calls the scheduler
        "all but LearningRate": lambda: [callback for callback in not_due() if not isinstance(callback, schedulers)],
    }
    print(f"\n{len(not_due())} callbacks, none due, a step beside one without them")
    beside(batches, rounds, lists)


def scheduled(batches: list[Batch], rounds: int) -> None:
    """Print the cost of 50 functions with a schedule in a step, including due calls."""

    def fifty(text: str) -> Callable[[], list[Callback]]:
        return lambda: [on(Callback.on_step_end, every=text.format(10 + n, 20 * (10 + n)))(lambda run: None) for n in range(50)]

    texts = {"every 10 steps": "10 steps", "every 10 to 59 steps": "{0} steps", "in samples": "{1} samples", "not due": FAR}
    print("\n50 functions with schedules, a step beside one without them")
    beside(batches, rounds, {name: fifty(text) for name, text in texts.items()})


def beside(batches: list[Batch], rounds: int, lists: dict[str, Callable[[], list[Callback]]]) -> None:
    """Print the time of a step with each list of callbacks, compared with none."""
    steps: dict[str, list[float]] = {name: [] for name in ("none", *lists)}
    for _ in range(rounds):
        for name in steps:
            steps[name] += chunks(batches * 5, lists.get(name, list)())
    base = statistics.median(steps["none"])
    for name in lists:
        print(f"  {name:22} {statistics.median(steps[name]) / base:.4f}")


def chunks(batches: list[Batch], callbacks: list[Callback]) -> list[float]:
    """Return the seconds of each fifty steps of a run, without the first hundred, which include the setup."""
    loss_fn, marks = nn.CrossEntropyLoss(), [0.0]

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        marks.append(time.perf_counter())
        loss: Tensor = loss_fn(model(batch[0]), batch[1])
        return loss

    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with contextlib.redirect_stdout(io.StringIO()):
        Trainer(model, optimizer, batches, compute_loss, max_epochs=1, callbacks=callbacks, device="cpu", progress=False).fit()
    at = marks[101::50]
    return [later - earlier for earlier, later in itertools.pairwise(at)]


def moments() -> None:
    """Print the cost of a moment."""
    run = tiny_run(steps=1)
    direct, unheard, heard = NoOp(), Hooks([]), Hooks([NoOp()])
    ten = Hooks([NoOp() for _ in range(10)])
    unheard_watched, heard_watched, ten_watched = Hooks([]), Hooks([NoOp()]), Hooks([NoOp() for _ in range(10)])
    for hooks in (unheard_watched, heard_watched, ten_watched):
        hooks.start_profile(Profiler())

    def ns(call: Callable[[object], None]) -> float:
        count, best = 200_000, float("inf")
        for _ in range(7):
            begin = time.perf_counter()
            for _ in range(count):
                call(run)
            best = min(best, time.perf_counter() - begin)
        return best / count * 1e9

    empty = ns(lambda run: None)
    call = ns(direct.on_step_end)
    print(f"\none moment, ns (the call of an empty function included: {empty:.0f})")
    print(f"  unheard {ns(lambda run: unheard.on_step_end(run)) - empty:.0f}")  # type: ignore[arg-type]
    print(f"  heard once, above the call itself {ns(heard.on_step_end) - call:.0f}")  # type: ignore[arg-type]
    print(f"  heard ten times, each {ns(ten.on_step_end) / 10:.0f}")  # type: ignore[arg-type]
    print("the same while a profile is made")
    print(f"  unheard, at the end of a phase {ns(unheard_watched.on_step_start) - empty:.0f}")  # type: ignore[arg-type]
    print(f"  heard once, above the call itself {ns(heard_watched.on_step_end) - call:.0f}")  # type: ignore[arg-type]
    print(f"  heard ten times, each {ns(ten_watched.on_step_end) / 10:.0f}")  # type: ignore[arg-type]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable(logging.WARNING)  # the measurement includes hooks that never fire
    batches = [(torch.randn(16, 32), torch.randint(0, 10, (16,))) for _ in range(arguments.steps)]
    profiled(batches, arguments.rounds)
    waiting(batches, arguments.rounds)
    scheduled(batches, arguments.rounds)
    moments()


if __name__ == "__main__":
    main()
