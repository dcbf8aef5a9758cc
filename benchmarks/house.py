"""How much of the package a reader of one path must follow. The same script measures any version.

    python benchmarks/house.py [--names] [--json FILE] [--rounds 25]

A *function* is a ``def`` of the package; its lambdas and comprehensions belong to it. Functions without source, such as the
``__init__`` of a dataclass, do not count. Generated code counts if it has source and its file name begins with ``<cadenza``.
Each figure has two numbers of lines; a line of a nested function counts once:

- *body*: the code lines of the bodies, without signatures, docstrings, comments and blank lines;
- *whole*: all lines, from the first decorator to the end of the function.

The column *longer* counts the functions of more than two body lines, and *their body* the lines of these.

All runs have one process on the CPU, fp32, one optimizer, ``compute_loss=supervised(...)``, and no callbacks but those named.

forward      The functions on the stack between the user's call of `fit` and the model's forward in step 3. Wrappers
             that decorators make (``@wraps``) do not count.
forward+     The same with these wrappers.
checkpoint   The distinct functions that are executed in a run with ``Checkpoint(every="2 steps")``, at the end of step 2, from
             the first function that belongs to it (its instance is the first argument, or the code is in its file) until the
             folder of the checkpoint has its final name. The training thread counts until it starts the writer's thread,
             or fetches the next batch; the writer's thread counts until the end. Another run before this one makes all imports.
record       The distinct functions that are executed in a run with ``TensorBoard()`` and a directory, at the end of step 2,
             from the call of ``run.log("x", 1.0)`` until torch's file writer gets the value (``FileWriter.add_summary``, which
             ``SummaryWriter.add_scalar`` calls, too). Threads count as above, and so do the functions that the writer's
             thread is in at that time.
resume       The distinct functions that ``fit(resume="auto")`` adds to the start of a run: those executed until the first step
             starts, in a run with ``Checkpoint(every="2 steps")`` that ended after step 3, less those that its first
             `fit()` executed until its first step.
stop         The distinct functions that a stop on rank 1 of 2 adds: those that one of the ranks executes between the end of
             step 2, where rank 1 calls ``run.stop("enough")``, and ``on_stop``, less those that the same run without the stop
             executes in steps 3 and 4. DDP with gloo.
asked        The calls at a step: the functions that five schedules add to steps 2 to 200 (every=3, at=5, when=,
             "50 steps", "10 min", all at the end of a step). They are taken together and each alone; functions that a run
             without callbacks executes do not count.
built        The functions that are executed when these five listeners and a `Hooks` of them are made.
dispatch     Both: what decides which listeners are called. `files` and `folders` say where these functions are.
public names The names in ``dir(run)`` in a hook, without names that begin with an underscore.
session      The attributes of `Session` that modules other than its own use, the adapters in ``compat``
             included; and the modules of ``callbacks`` that import it.
modules      Files ``*.py`` directly in the package, with ``__init__``.
circles      Strongly connected sets of more than one module in the graph of imports at the top of modules and under ``if
             TYPE_CHECKING``, without the adapters in ``compat`` and the package's own ``__init__``. The second figure leaves
             out imports under ``if TYPE_CHECKING`` that name only `Run` of ``cadenza.run``. The third leaves out the same and
             counts imports inside functions. The last is the second figure for ``compat``.
tiny step    CPU time of ``fit()``, its start included, beside a loop written by hand: 1000 steps of ``Linear(10, 1)``, an
             instance of SGD, a list of batches, in turn; the median of the ratios. ``overhead.py`` and ``peers.py`` measure
             steps with more care.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # one process on the CPU

import house_source as source
import torch
from house_source import Executed, Function
from torch import Tensor, nn

from cadenza import Callback, Hooks, Trainer, on, supervised
from cadenza.callbacks import Checkpoint
from cadenza.sinks import TensorBoard
from cadenza.testing import launch

with contextlib.suppress(ImportError):  # for versions of `on` that take no strings
    from cadenza.hooks import periodic

STEP = 2  # the measured step; the first one may do more


class Batches:
    """A loader of some batches. Before it gives the batch after step `STEP` it waits for `ready`."""

    def __init__(self, count: int, ready: Callable[[], bool] = lambda: True) -> None:
        self.count, self.ready = count, ready

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.count):
            deadline = time.monotonic() + 10
            while number == STEP and not self.ready() and time.monotonic() < deadline:
                time.sleep(0.001)
            yield torch.ones(1, 10), torch.ones(1, 1)


class Read:
    """A loader created by a generator function."""

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        return self.read()


def trainer(model: nn.Module, loader: Iterable[Any], callbacks: Iterable[Callback] = (), **more: Any) -> Trainer:
    """Return the plainest trainer."""
    loss, optimizer = supervised(nn.functional.mse_loss), torch.optim.SGD(model.parameters(), lr=0.01)
    return Trainer(model, optimizer, loader, loss, max_epochs=1, callbacks=callbacks, driver="single", progress=False, **more)


def way_to_forward() -> list[Function]:
    """Return the functions between the call of `fit` and the model's forward."""
    found: list[Function] = []

    class Model(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            found[:] = reversed(source.stack())
            return super().forward(inputs)

    trainer(Model(10, 1), Batches(STEP + 1)).fit()
    return found


def leaving(executed: Executed) -> Callback:
    """Return a callback that ends the recording of the training thread when a batch is fetched."""
    return on(Callback.on_fetch_start)(lambda run: executed.leave())


def checkpoint_written(folder: Path) -> list[Function]:
    """Return the functions that are executed when a checkpoint is written in the run's directory."""
    checkpoint, armed, there = Checkpoint(every=f"{STEP} steps"), [], folder / "checkpoints"

    @on(Callback.on_step_end, at=STEP)
    def arm(run: Any) -> None:
        armed.append(True)

    def opens(frame: FrameType) -> bool:
        first = frame.f_code.co_varnames[:1]
        own = bool(first) and frame.f_locals.get(first[0]) is checkpoint
        return bool(armed) and (own or frame.f_code.co_filename == inspect.getfile(Checkpoint))

    executed = Executed(opens, lambda: any(there.glob("step-*")))
    loader = Batches(STEP + 1, executed.closed.is_set)
    with executed.recording():
        trainer(nn.Linear(10, 1), loader, [arm, checkpoint, leaving(executed)], directory=folder).fit()
    return executed.result()


def record_written(folder: Path) -> list[Function]:
    """Return the functions that are executed from ``run.log("x", 1.0)`` until torch's writer gets the value."""
    from torch.utils.tensorboard import FileWriter

    armed: list[bool] = []

    @on(Callback.on_step_end, at=STEP)
    def log(run: Any) -> None:
        armed.append(True)
        run.log("x", 1.0)

    executed = Executed(lambda frame: bool(armed))
    add_summary = FileWriter.add_summary

    def closing(self: Any, summary: Any, *arguments: Any, **keywords: Any) -> None:
        if any(value.tag == "x" for value in summary.value):
            executed.close(with_stack=True)
        add_summary(self, summary, *arguments, **keywords)

    FileWriter.add_summary = closing  # type: ignore[method-assign]
    try:
        quiet = contextlib.redirect_stderr(io.StringIO())  # the run prints that no callback writes checkpoints
        with quiet, executed.recording():
            loader = Batches(STEP + 1, executed.closed.is_set)
            trainer(nn.Linear(10, 1), loader, [log, TensorBoard(), leaving(executed)], directory=folder).fit()
    finally:
        FileWriter.add_summary = add_summary  # type: ignore[method-assign]
    return executed.result()


def started(folder: Path, *, resume: bool, steps: int) -> list[Function]:
    """Return the functions that `fit` executes before the first step starts. The run has `steps` steps."""
    executed = Executed()
    starts = on(Callback.on_step_start)(lambda run: executed.close())
    batches = [(torch.ones(1, 10), torch.ones(1, 1))] * 6
    callbacks = [starts, Checkpoint(every=f"{STEP} steps")]
    made = trainer(nn.Linear(10, 1), batches, callbacks, directory=folder, max_steps=steps)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), executed.recording():
        made.fit(resume="auto" if resume else False)
    return executed.result()


def resumed(folder: Path) -> list[Function]:
    """Return the functions that a resume adds to the start of a run."""
    fresh = set(started(folder, resume=False, steps=STEP + 1))
    return [function for function in started(folder, resume=True, steps=STEP + 3) if function not in fresh]


def between_steps(*, stop: bool) -> list[Function]:
    """Return what both ranks of two execute from the end of step 2 until ``on_stop``, or else until the end of step 4."""

    def work() -> list[Function]:
        running = [False]
        executed = Executed(lambda frame: running[0])

        @on(Callback.on_step_end)
        def look(run: Any) -> None:
            if run.progress.step == STEP:
                running[0] = True
                if stop and torch.distributed.get_rank() == 1:
                    run.stop("enough")
            elif not stop and run.progress.step == STEP + 2:
                executed.close()

        stopped = on(Callback.on_stop)(lambda run, reason: executed.close())
        model, batches = nn.Linear(10, 1), [(torch.ones(1, 10), torch.ones(1, 1))] * 8
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.01), supervised(nn.functional.mse_loss)
        quiet = contextlib.redirect_stderr(io.StringIO())
        with quiet, executed.recording():
            Trainer(model, optimizer, batches, loss, max_epochs=1, callbacks=[look, stopped], progress=False).fit()
        return executed.result()

    return list(dict.fromkeys(function for functions in launch(work) for function in functions))


def stopped() -> list[Function]:
    """Return the functions that a stop on rank 1 of 2 adds to a step."""
    usual = set(between_steps(stop=False))
    return [function for function in between_steps(stop=True) if function not in usual]


def nothing(run: Any) -> None:
    """Be called."""


class Periodic(Callback):
    """Calls `nothing` on a schedule that is a string, such as ``"50 steps"``."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule

    def listeners(self) -> list[Any]:
        return [periodic(self.schedule, nothing)]


def subscribed(schedule: str) -> Callback:
    """Return a callback with this schedule, also where `on` takes no strings."""
    try:
        return on(Callback.on_step_end, every=schedule)(nothing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return Periodic(schedule)


def scheduled() -> list[Callback]:
    """Return a listener of each kind of schedule, at the end of a step."""
    moment = Callback.on_step_end
    filtered = [on(moment, every=3), on(moment, at=5), on(moment, when=lambda run: run.progress.step % 7 == 0)]
    return [*(subscribe(nothing) for subscribe in filtered), subscribed("50 steps"), subscribed("10 min")]


def dispatched(callbacks: Iterable[Callback]) -> list[Function]:
    """Return the functions that are executed in steps 2 to 200 of a run."""
    executed = Executed(lambda frame: running[0])
    running = [False]

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in Batches(200):
            yield batch
            running[0] = True
        executed.close()

    with executed.recording():
        trainer(nn.Linear(10, 1), Read(loader), callbacks).fit()
    return executed.result()


def schedules_asked() -> list[Function]:
    """Return what schedules add to a step: together, and each alone, less what a step without callbacks executes."""
    lists = [scheduled(), *([callback] for callback in scheduled())]
    bare = set(dispatched([]))
    return list(dict.fromkeys(callback for callbacks in lists for callback in dispatched(callbacks) if callback not in bare))


def schedules_built() -> list[Function]:
    """Return the functions that are executed when the listeners and their dispatch are made."""
    executed = Executed()
    with executed.recording():
        Hooks(scheduled())
    return executed.result()


def public_names() -> list[str]:
    """Return the public names of a hook's argument."""
    found: list[str] = []

    @on(Callback.on_step_end, at=STEP)
    def look(run: Any) -> None:
        found.extend(name for name in dir(run) if not name.startswith("_"))

    trainer(nn.Linear(10, 1), Batches(STEP + 1), [look]).fit()
    return found


def tiny_step(rounds: int) -> float:
    """Return the CPU times of a tiny step and of the same step in a hand-written loop."""
    batches = [(torch.randn(16, 10), torch.randn(16, 1)) for _ in range(1000)]

    def by_hand() -> Callable[[], object]:
        model = nn.Linear(10, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def work() -> None:
            model.train()
            for inputs, targets in batches:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        return work

    def seconds(work: Callable[[], object]) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    ratios = []
    for _ in range(rounds + 1):
        hand = seconds(by_hand())
        ratios.append(seconds(trainer(nn.Linear(10, 1), batches).fit) / hand)
    return statistics.median(ratios[1:])  # the first warms up


def ways() -> dict[str, list[Function]]:
    """Return the functions of each figure."""
    built = schedules_built()  # first, as templates are compiled once in a process
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            checkpoint = checkpoint_written(Path(folder) / f"checkpoint{number}")
            record = record_written(Path(folder) / f"record{number}")
            resume = resumed(Path(folder) / f"resume{number}")
    forward, asked = way_to_forward(), schedules_asked()
    return {
        "forward": [function for function in forward if not function.wrapper],
        "forward+": forward,
        "checkpoint": checkpoint,
        "record": record,
        "resume": resume,
        "stop": stopped(),
        "asked": asked,
        "built": built,
        "dispatch": list(dict.fromkeys([*built, *asked])),
    }


def circles() -> dict[str, list[list[str]]]:
    """Return the circles of imports, with several rules."""

    def found(*, compat: bool = False, **rules: bool) -> list[list[str]]:
        some = source.circles(source.imports(**rules))
        return [group for group in some if compat == all(name.startswith("cadenza.compat.") for name in group)]

    return {
        "circles": found(functions=False, run_for_types=True),
        "but Run for types": found(functions=False, run_for_types=False),
        "and inside functions": found(functions=True, run_for_types=False),
        "circles in compat": found(functions=False, run_for_types=False, compat=True),
    }


def measured(rounds: int) -> dict[str, Any]:
    """Return all figures with the counted items."""
    ratio = tiny_step(rounds)
    figures: dict[str, Any] = {}
    for name, functions in ways().items():
        held = source.files(functions)
        longer = [function for function in functions if len(function.body) > 2]
        figures[name] = {
            "functions": len(functions),
            "body": source.body(functions),
            "longer": len(longer),
            "their body": source.body(longer),
            "whole": source.whole(functions),
            "files": len(held),
            "folders": len({os.path.dirname(file) for file in held}),
            "names": [str(function) for function in functions],
        }
    counted = {
        "public names": public_names(),
        "session": source.session_attributes(),
        "session in callbacks": source.callbacks_with_session(),
        "modules": sorted(path.name for path in source.PACKAGE.glob("*.py")),
    }
    figures |= {name: {"count": len(names), "names": names} for name, names in counted.items()}
    for name, found in circles().items():
        figures[name] = {"count": len(found), "sizes": [*map(len, found)], "names": [*map(", ".join, found)]}
    return figures | {"tiny step": {"ratio": round(ratio, 3)}}


def show(figures: dict[str, Any], *, names: bool) -> None:
    """Print the table; with `names` also what is counted."""
    columns = ("functions", "body", "longer", "their body", "whole", "files", "folders")
    print(f"{'':22}" + "".join(f"{column:>10}" for column in columns))
    for name, figure in figures.items():
        if "functions" in figure:
            print(f"{name:22}" + "".join(f"{figure[column]:10}" for column in columns))
    for name, figure in figures.items():
        if "functions" not in figure:
            sizes = f"   of {figure['sizes']} modules" if figure.get("sizes") else ""
            print(f"{name:22}{figure.get('count', figure.get('ratio')):>10}{sizes}")
    for name, figure in figures.items():
        if names and "names" in figure:
            print(f"\n{name}" + " (lines of the body, of the whole)" * ("functions" in figure))
            print(*(f"  {name}" for name in figure["names"]), sep="\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list what is counted")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with all names, to this file")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    figures = measured(arguments.rounds)
    show(figures, names=arguments.names)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
