"""Signals that ask for the end of a run: the step is completed and saved, and the run continues to the same bits."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import cadenza
from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Ema
from cadenza.checkpoint.store import Saved, Store
from cadenza.status.decisions import Outcome
from cadenza.status.plain import first_difference
from cadenza.status.preemption import HANDLED, handle_signals
from cadenza.testing import tiny_run, tiny_trainer
from tests import forked
from tests.checkpoint import preempted
from tests.forked import Forked

ROOT = Path(__file__).parents[2]


def start(directory: Path, where: str, number: int) -> Forked:
    directory.mkdir(exist_ok=True)
    return forked.start(preempted.main, directory, where, number, output=directory.with_suffix(".txt"))


def ended(directory: Path, where: str, number: int) -> int:
    """Return how the program ended; below 0: by that signal."""
    process = start(directory, where, number)
    status = process.ended()
    assert "Traceback" not in process.said()
    return status


def outcome(directory: Path) -> Any:
    return json.loads((directory / "run.json").read_text())["outcome"]


def final(directory: Path) -> dict[str, Any]:
    """Do the run, or go on with it; return all that it ends with."""
    trainer = preempted.trainer(directory)
    run = trainer.fit(resume="auto")
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    ema = next(callback for callback in trainer.callbacks if isinstance(callback, Ema))
    history = {name: run.history[name] for name in run.history.names}
    return {"model": dict(trainer.model.state_dict()), "ema": ema.state_dict(), "history": history, "random": torch.rand(3)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of an undisturbed run."""
    return final(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(
    ("where", "step", "number"),
    [
        ("training", 8, signal.SIGTERM),
        ("training", 8, signal.SIGUSR1),
        ("training", 8, signal.SIGINT),
        ("a fetch", 8, signal.SIGTERM),
        ("evaluation", 12, signal.SIGTERM),
        ("evaluation", 12, signal.SIGUSR1),
        ("the end of an epoch", 12, signal.SIGTERM),
        ("the warm-up", 0, signal.SIGTERM),
    ],
)
def test_a_signal_ends_the_step_saves_and_the_run_continues_to_the_same_bits(
    tmp_path: Path, whole: dict[str, Any], where: str, step: int, number: signal.Signals
) -> None:
    directory = tmp_path / "run"
    assert ended(directory, where, number) == 128 + number
    kind = "interrupted" if number == signal.SIGINT else "preempted"
    assert outcome(directory) == {"kind": kind, "reason": f"signal {number.name}"}
    newest, skipped = Store(directory / "checkpoints").latest()
    assert newest is not None
    assert (newest.step, skipped) == (step, [])
    assert first_difference(final(directory), whole) is None


def test_a_signal_while_a_checkpoint_is_written_lets_it_be_finished(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    assert ended(directory, "a save", signal.SIGTERM) == 143
    assert outcome(directory)["kind"] == "preempted"
    store = Store(directory / "checkpoints")
    newest, skipped = store.latest()
    assert newest is not None
    assert newest.step >= 12
    assert skipped == []
    assert not list((directory / "checkpoints").glob(".t*"))
    assert first_difference(final(directory), whole) is None


@pytest.mark.parametrize("where", ["the last save", "the last moment"])
def test_a_signal_when_all_is_done_loses_nothing(tmp_path: Path, whole: dict[str, Any], where: str) -> None:
    directory = tmp_path / "run"
    assert ended(directory, where, signal.SIGTERM) == 143
    assert outcome(directory)["kind"] == "finished"
    newest, skipped = Store(directory / "checkpoints").latest()
    assert newest is not None
    assert (newest.step, skipped) == (36, [])
    assert not list((directory / "checkpoints").glob(".t*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_at_once(tmp_path: Path, whole: dict[str, Any], number: signal.Signals) -> None:
    directory = tmp_path / "run"
    assert ended(directory, "twice", number) == -number
    assert (directory / "after the first").exists()
    assert not (directory / "after the second").exists()
    assert outcome(directory) is None
    assert first_difference(final(directory), whole) is None


def test_a_second_ctrl_c_raises_keyboard_interrupt_at_once_and_the_first_says_so(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(cadenza.__file__).parents[1])}
    directory.mkdir()
    command = [sys.executable, "-m", "tests.checkpoint.preempted", str(directory), "twice", str(int(signal.SIGINT))]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, stderr=subprocess.PIPE, check=False)
    # Python ends a program after KeyboardInterrupt with the signal, or with 1 if an exit handler evaluates code: torch._dynamo
    # has one that imports tabulate where that package is installed.
    assert done.returncode in (-signal.SIGINT, 1)
    assert (directory / "after the first").exists()
    assert not (directory / "after the second").exists()
    assert "Press Ctrl-C again to end at once" in done.stderr
    assert outcome(directory) == {"kind": "failed", "reason": "KeyboardInterrupt()"}
    assert first_difference(final(directory), whole) is None


def test_a_signal_from_outside_to_a_run_with_workers(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    process = start(directory, "outside", signal.SIGTERM)
    process.until_it_says("ready\n")
    os.kill(process.pid, signal.SIGTERM)
    assert process.ended() == 143, process.said()
    assert outcome(directory)["kind"] == "preempted"
    assert first_difference(final(directory), whole) is None


@pytest.mark.parametrize(("number", "method"), [(signal.SIGTERM, "fork"), (signal.SIGINT, "spawn")])
def test_a_signal_to_the_whole_group_leaves_the_workers_alone_that_the_step_still_reads(
    tmp_path: Path, number: signal.Signals, method: str
) -> None:
    """As a terminal sends Ctrl-C, and torchrun and SLURM send SIGTERM: to the run and to the workers of its loaders."""
    directory = tmp_path / "run"
    process = start(directory, f"{method}ed workers", number)
    process.until_it_says("ready\n")
    os.killpg(process.pid, number)
    assert process.ended() == 128 + number, process.said()
    assert "Traceback" not in process.said()
    newest, skipped = Store(directory / "checkpoints").latest()
    assert newest is not None
    assert (newest.step, skipped) == (5, [])


def test_with_on_signal_false_a_signal_does_what_it_always_did(tmp_path: Path) -> None:
    assert ended(tmp_path / "run", "unhandled", signal.SIGTERM) == -signal.SIGTERM


# -- handlers, in this process ------------------------------------------------------------------------


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in HANDLED]


def seen_in_a_run(directory: Path, **options: Any) -> list[Any]:
    """Return the handlers that are there during the second step."""
    seen: list[Any] = []
    look = on(Callback.on_step_end, at=2)(lambda run: seen.extend(handlers()))
    tiny_run(directory=directory, steps=2, callbacks=[Checkpoint(**options), look])
    return seen


def test_handlers_are_there_while_the_run_goes_on_and_put_back_afterwards(tmp_path: Path) -> None:
    before = handlers()
    during = seen_in_a_run(tmp_path)
    assert all(callable(handler) and handler not in before for handler in during)
    assert handlers() == before


def test_handlers_are_put_back_after_an_error(tmp_path: Path) -> None:
    before = handlers()

    @on(Callback.on_step_end)
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path, callbacks=[Checkpoint(), fail])
    assert handlers() == before


def test_a_handler_of_the_users_own_is_put_back(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, print)
    try:
        seen_in_a_run(tmp_path)
        assert signal.getsignal(signal.SIGUSR1) is print
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_of_the_users_own_for_ctrl_c_stays_in_force(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, print)
    try:
        *_, during = seen_in_a_run(tmp_path)
        assert during is print
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, None), (signal.SIGTERM, 143)])
def test_in_a_notebook_ctrl_c_makes_fit_return_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int | None
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    send = on(Callback.on_step_end, at=3)(lambda run: os.kill(os.getpid(), number))
    trainer = tiny_trainer(directory=tmp_path, steps=9, callbacks=[send, Checkpoint("100 steps")])
    if status is None:
        run = trainer.fit()
        assert run.outcome is not None
        assert (run.outcome.kind, run.progress.step) == ("interrupted", 3)
    else:
        with pytest.raises(SystemExit) as end:
            trainer.fit()
        assert end.value.code == status
    assert Store(tmp_path / "checkpoints").latest()[0] == Saved(3, 1, "step-00000003")


def test_without_a_checkpoint_ctrl_c_is_what_it_always_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny_run(callbacks=[on(Callback.on_step_end, at=2)(lambda run: os.kill(os.getpid(), signal.SIGINT))])


def test_no_handler_is_installed_with_on_signal_false(tmp_path: Path) -> None:
    assert seen_in_a_run(tmp_path, on_signal=False) == handlers()


def test_no_handler_is_installed_in_another_thread(tmp_path: Path) -> None:
    before, seen = handlers(), []
    thread = threading.Thread(target=lambda: seen.extend(seen_in_a_run(tmp_path)))
    thread.start()
    thread.join()
    assert seen == before


def test_after_the_first_signal_the_earlier_handlers_are_restored() -> None:
    before = handlers()
    received: list[int] = []
    restore = handle_signals(received.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
    assert handlers() == before
    restore()
    assert handlers() == before


def test_a_forked_child_ends_by_the_signal_as_ever() -> None:
    received: list[int] = []
    ready, tell = os.pipe()
    restore = handle_signals(received.append)
    try:
        child = os.fork()
        if child == 0:
            try:
                os.write(tell, b"!")
                for _ in range(2000):
                    time.sleep(0.01)
            finally:
                os._exit(1)
        assert os.read(ready, 1) == b"!"  # Python forgets signals that come while it forks
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
    finally:
        restore()
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert received == []


KEPT: list[Any] = []


def leave_persistent_workers() -> None:
    """End a process while a loader with persistent workers is alive, as a script does with its trainer in a global name."""
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), num_workers=1, persistent_workers=True)
    KEPT.append(tiny_run(loader=loader, compute_loss=lambda model, batch: model.weight.sum(), epochs=1).loader)


def test_a_process_ends_that_still_has_persistent_workers() -> None:
    process = multiprocessing.get_context("fork").Process(target=leave_persistent_workers)
    process.start()
    process.join(20)
    left = process.exitcode is None
    process.kill()
    assert not left, "the process waits for workers that ignored its SIGTERM"
    assert process.exitcode == 0


@pytest.mark.parametrize("signal_first", [False, True])
def test_a_stop_that_a_hook_asks_for_in_the_step_of_a_signal_counts_after_the_resume(
    tmp_path: Path, signal_first: bool
) -> None:
    @on(Callback.on_step_end, at=4)
    def stop(run: Run) -> None:
        run.stop("good enough")

    @on(Callback.on_step_end, at=4)
    def preempt(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    callbacks = [preempt, stop] if signal_first else [stop, preempt]
    with pytest.raises(SystemExit) as left:
        tiny_trainer(directory=tmp_path, steps=10, callbacks=[*callbacks, Checkpoint()]).fit()
    assert left.value.code == 128 + signal.SIGTERM
    run = tiny_trainer(directory=tmp_path, steps=10, callbacks=[Checkpoint()]).fit(resume="auto")
    assert (run.progress.step, run.outcome) == (4, Outcome("stopped", "good enough"))
