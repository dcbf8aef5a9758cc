"""Signals that ask for the end of a run: the step is completed and saved, and the run continues to the same bits."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Container
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cadenza import Callback, Run, Trainer, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.checkpoint.store import Saved, Store
from cadenza.checkpoint.store.files import Facts, LocalFiles
from cadenza.engine.session import session_of
from cadenza.files.disk import Unflushed
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Moment
from cadenza.status.decisions import Outcome
from cadenza.status.encoding import first_difference
from cadenza.status.signals import HANDLED, handle_signals
from cadenza.testing import tiny_model, tiny_run, tiny_trainer
from tests import forked
from tests.checkpoint.store.contents import latest
from tests.compat.fastnlp.toy import Hooks, live, trained
from tests.forked import Forked

# -- a training that is asked to end by a signal, in a process of its own -------------------------------


def _in_the_eighth_step(run: Run) -> bool:
    return run.progress.step == 7


def _after_the_first_epoch(run: Run) -> bool:
    return run.progress.step == 12


WHERE: dict[str, tuple[Moment, Callable[[Run], bool] | None]] = {
    "training": (Callback.on_after_backward, _in_the_eighth_step),
    "a fetch": (Callback.on_fetch_start, _in_the_eighth_step),
    "evaluation": (Callback.on_eval_batch_start, _after_the_first_epoch),
    "the end of an epoch": (Callback.on_epoch_end, _after_the_first_epoch),
    "the warm-up": (Callback.on_fit_start, None),
    "the last moment": (Callback.on_fit_end, None),
}


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are random anew at every reading."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4) + index / 24, torch.tensor(index % 2)


class KillingFiles(LocalFiles):
    """Files that send a signal to their process while the third checkpoint is being written."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number, self.manifests = number, 0

    def write(self, path: str, content: bytes, later: Unflushed | None = None) -> Facts:
        self.manifests += path.endswith("manifest.json")
        if self.manifests == 3 and threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), self.number)
            self.manifests += 1
        return super().write(path, content, later)


def trainer(directory: Path, *more: Callback, workers: int = 0, every: str = "4 steps", **options: Any) -> Trainer:
    """Return a training of 24 steps with dropout, batch norm, AdamW, an average, shuffling, augmentation and evaluation."""
    method = "fork" if workers else None  # the default in a fork of a server would be a new server
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=workers, multiprocessing_context=method),
        supervised(nn.CrossEntropyLoss()),
        max_epochs=2,
        seed=3,
        directory=directory,
        device="cpu",
        progress=False,
        callbacks=[
            Checkpoint(every, **options),
            Ema(0.9),
            Evaluate(DataLoader(Noise(), batch_size=8), sanity_batches=1),
            *more,
        ],
    )


def with_workers(directory: Path, method: str) -> Trainer:
    """Return a training: its fifth step waits for a signal, then reads three more batches."""
    training = trainer(directory, on(Callback.on_step_start, every=5)(_wait), workers=1)
    training.loader = DataLoader(Noise(), batch_size=2, num_workers=1, prefetch_factor=1, multiprocessing_context=method)
    training.accumulate = 4
    return training


def _wait(run: Run) -> None:
    sys.stdout.write("ready\n")  # the test waits for it
    sys.stdout.flush()
    while session_of(run).sync.requests.signal is None:
        time.sleep(0.01)  # not signal.pause(): a signal that came just before it would be waited for in vain
    sys.stdout.write("goes on\n")
    sys.stdout.flush()


def main(directory: Path, where: str, number: int) -> None:
    """Train, and send the signal to this process at `where`; ``twice`` sends it again at once, ``outside`` waits for it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup

    def send(run: Run, *_: Any) -> None:
        if session_of(run).sync.requests.signal is None:
            os.kill(os.getpid(), number)

    def send_twice(run: Run, *_: Any) -> None:
        os.kill(os.getpid(), number)
        (directory / "after the first").touch()
        os.kill(os.getpid(), number)
        (directory / "after the second").touch()

    class SignalInASave(Callback):
        def on_fit_start(self, run: Run) -> None:
            checkpoint = next(one for one in hooks_of(run).callbacks.values() if isinstance(one, Checkpoint))
            checkpoint.store.files = KillingFiles(directory / "checkpoints", number)

    if where == "a save":
        training = trainer(directory, SignalInASave())
    elif where == "the last save":
        training = trainer(directory, SignalInASave(), every="12 steps")  # two, and the third is that of the end
    elif where == "twice":
        training = trainer(directory, on(Callback.on_after_backward, when=_in_the_eighth_step)(send_twice))
    elif where == "outside":
        training = trainer(directory, on(Callback.on_step_end, at=5)(_wait), workers=2)
    elif where.endswith("workers"):
        training = with_workers(directory, where.removesuffix("ed workers"))
    elif where == "unhandled":
        training = trainer(directory, on(Callback.on_after_backward, when=_in_the_eighth_step)(send), on_signal=False)
    else:
        moment, when = WHERE[where]
        training = trainer(directory, on(moment, when=when)(send))
    training.fit(resume="auto")


def started(directory: Path, where: str, number: int) -> Forked:
    """Start it in a process of its own."""
    directory.mkdir(exist_ok=True)
    return forked.start(main, directory, where, number, output=directory.with_suffix(".txt"))


def final(directory: Path) -> dict[str, Any]:
    """Do the run, or go on with it; return all that it ends with."""
    training = trainer(directory)
    run = training.fit(resume="auto")
    assert (run.outcome and run.outcome.kind) == "finished"
    ema = next(callback for callback in training.callbacks if isinstance(callback, Ema))
    history = {name: run.history[name] for name in run.history.names}
    return {"model": dict(training.model.state_dict()), "ema": ema.state_dict(), "history": history, "random": torch.rand(3)}


# -- signals --------------------------------------------------------------------------------------------


def outcome(directory: Path) -> Any:
    return json.loads((directory / "run.json").read_text())["outcome"]


def step_of_newest(directory: Path) -> int:
    """Return the step of the newest checkpoint; no other one is damaged, and nothing is half written."""
    newest, skipped = latest(Store(directory / "checkpoints"))
    assert newest is not None
    assert skipped == []
    assert not list((directory / "checkpoints").glob(".t*"))
    return newest.step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of an undisturbed run."""
    return final(tmp_path_factory.mktemp("whole") / "run")


SAVED_AT: dict[str, Container[int]] = {
    "training": [8],
    "a fetch": [8],
    "evaluation": [12],
    "the end of an epoch": [12],
    "the warm-up": [0],
    "a save": range(12, 24),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [*((where, "SIGTERM") for where in SAVED_AT), *(("training", name) for name in ("SIGUSR1", "SIGHUP", "SIGINT"))],
)
def test_a_signal_ends_the_step_saves_and_the_run_continues_to_the_same_bits(
    tmp_path: Path, whole: dict[str, Any], where: str, name: str
) -> None:
    directory, number = tmp_path / "run", signal.Signals[name]
    process = started(directory, where, number)
    assert process.ended() == 128 + number
    assert "Traceback" not in process.said()
    kind = "interrupted" if name == "SIGINT" else "preempted"
    assert outcome(directory) == {"kind": kind, "reason": f"signal {name}"}
    assert step_of_newest(directory) in SAVED_AT[where]
    assert first_difference(final(directory), whole) is None


@pytest.mark.parametrize("where", ["the last save", "the last moment"])
def test_a_signal_when_all_is_done_loses_nothing(tmp_path: Path, where: str) -> None:
    process = started(tmp_path / "run", where, signal.SIGTERM)
    assert process.ended() == 143
    assert "Traceback" not in process.said()
    assert outcome(tmp_path / "run")["kind"] == "finished"
    assert step_of_newest(tmp_path / "run") == 24


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_second_signal_ends_at_once(tmp_path: Path, whole: dict[str, Any], number: signal.Signals) -> None:
    directory, by_keyboard = tmp_path / "run", number == signal.SIGINT
    process = started(directory, "twice", number)
    assert process.ended() == (1 if by_keyboard else -number)  # the process of a test ends so after KeyboardInterrupt
    assert (directory / "after the first").exists()
    assert not (directory / "after the second").exists()
    assert ("Press Ctrl-C again to end at once" in process.said()) is by_keyboard
    assert ("Traceback" in process.said()) is by_keyboard
    assert outcome(directory) == ({"kind": "failed", "reason": "KeyboardInterrupt()"} if by_keyboard else None)
    assert first_difference(final(directory), whole) is None


def test_a_signal_from_outside_to_a_run_with_workers(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    process = started(directory, "outside", signal.SIGTERM)
    process.until_it_says("ready\n")
    os.kill(process.pid, signal.SIGTERM)
    assert process.ended() == 143, process.said()
    assert outcome(directory)["kind"] == "preempted"
    assert first_difference(final(directory), whole) is None


@pytest.mark.parametrize(
    ("number", "method"),
    [
        (signal.SIGTERM, "fork"),
        (signal.SIGINT, "fork"),
        (signal.SIGHUP, "fork"),
        pytest.param(signal.SIGINT, "spawn", marks=pytest.mark.long),  # the worker imports torch anew
    ],
)
def test_a_signal_to_the_whole_group_leaves_the_workers_alone_that_the_step_still_reads(
    tmp_path: Path, number: signal.Signals, method: str
) -> None:
    """As a terminal sends Ctrl-C, and torchrun and SLURM send SIGTERM: to the run and to the workers of its loaders."""
    process = started(tmp_path / "run", f"{method}ed workers", number)
    process.until_it_says("ready\n")
    os.killpg(process.pid, number)
    assert process.ended() == 128 + number, process.said()
    assert "Traceback" not in process.said()
    assert step_of_newest(tmp_path / "run") == 5


def test_with_on_signal_false_a_signal_does_what_it_always_did(tmp_path: Path) -> None:
    process = started(tmp_path / "run", "unhandled", signal.SIGTERM)
    assert process.ended() == -signal.SIGTERM
    assert "Traceback" not in process.said()


# -- handlers, in this process ------------------------------------------------------------------------


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in HANDLED]


def seen_in_a_run(directory: Path, **options: Any) -> list[Any]:
    """Return the handlers that are there during the second step."""
    seen: list[Any] = []
    look = on(Callback.on_step_end, at=2)(lambda run: seen.extend(handlers()))
    tiny_run(directory=directory, steps=2, callbacks=[Checkpoint(**options), look])
    return seen


def test_handlers_are_there_while_the_run_goes_on_if_they_are_wanted_and_in_the_main_thread_alone(tmp_path: Path) -> None:
    before = handlers()
    during = seen_in_a_run(tmp_path / "run")
    assert all(callable(handler) and handler not in before for handler in during)
    assert handlers() == before

    @on(Callback.on_step_end)
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path / "failed", callbacks=[Checkpoint(), fail])
    assert handlers() == before

    seen: list[Any] = []
    assert seen_in_a_run(tmp_path / "off", on_signal=False) == before
    thread = threading.Thread(target=lambda: seen.extend(seen_in_a_run(tmp_path / "thread")))
    thread.start()
    thread.join()
    assert seen == before


@pytest.mark.parametrize(("number", "stays"), [(signal.SIGUSR1, False), (signal.SIGINT, True)])
def test_a_handler_of_the_users_own_is_put_back_and_that_for_ctrl_c_stays_in_force(
    tmp_path: Path, number: signal.Signals, stays: bool
) -> None:
    before = signal.signal(number, print)
    try:
        during = dict(zip(HANDLED, seen_in_a_run(tmp_path), strict=True))
        assert (during[number] is print) is stays
        assert signal.getsignal(number) is print
    finally:
        signal.signal(number, before)


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
    assert latest(Store(tmp_path / "checkpoints"))[0] == Saved(3, 1, "step-00000003")


def test_without_a_checkpoint_ctrl_c_is_what_it_always_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny_run(callbacks=[on(Callback.on_step_end, at=2)(lambda run: os.kill(os.getpid(), signal.SIGINT))])


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
    stop = on(Callback.on_step_end, at=4)(lambda run: run.stop("good enough"))
    preempt = on(Callback.on_step_end, at=4)(lambda run: os.kill(os.getpid(), signal.SIGTERM))
    callbacks = [preempt, stop] if signal_first else [stop, preempt]
    with pytest.raises(SystemExit) as left:
        tiny_trainer(directory=tmp_path, steps=10, callbacks=[*callbacks, Checkpoint()]).fit()
    assert left.value.code == 128 + signal.SIGTERM
    run = tiny_trainer(directory=tmp_path, steps=10, callbacks=[Checkpoint()]).fit(resume="auto")
    assert (run.progress.step, run.outcome) == (4, Outcome("stopped", "good enough"))


# -- a grace period: when a save may take longer than that, the weights are written first ---------------


class SlowFiles(LocalFiles):
    """A storage where the state of a checkpoint takes long, or never arrives."""

    fails = False

    def write_tensors(self, path: str, *arguments: object) -> Facts:
        if "state" in path and ".tmp-" in path:
            time.sleep(0.1)
        if "state" in path and self.fails and arguments[0]:
            raise KeyboardInterrupt("killed")  # as a kill would: nothing after it takes place
        return super().write_tensors(path, *arguments)  # type: ignore[arg-type]


def names_written(directory: Path, grace_s: float | None, *, fails: bool = False) -> list[tuple[str, bool]]:
    """Save at step 2, then end by a signal at step 4; return each manifest that was written, and whether weights only."""
    written: list[tuple[str, bool]] = []

    @on(Callback.on_fit_start)
    def slow(run: Run) -> None:
        checkpoint.store.files = files = SlowFiles(directory / "checkpoints")
        commit = checkpoint.store._commit

        def noted(folder: str, facts: dict[str, object], parts: dict[str, object], later: Unflushed) -> object:
            written.append((f"step {facts['step']}", bool(facts["weights_only"])))
            return commit(folder, facts, parts, later)

        checkpoint.store._commit = noted  # type: ignore[method-assign, assignment]
        files.fails = False

    @on(Callback.on_step_end, at=4)
    def send(run: Run) -> None:
        assert isinstance(checkpoint.store.files, SlowFiles)
        checkpoint.store.files.fails = fails
        os.kill(os.getpid(), signal.SIGTERM)

    checkpoint = Checkpoint("2 steps", grace_s=grace_s, background=False)
    with pytest.raises(KeyboardInterrupt if fails else SystemExit):
        tiny_trainer(directory=directory, steps=9, callbacks=[checkpoint, slow, send]).fit()
    return written


def test_only_if_the_time_may_be_too_short_the_weights_come_first_and_the_whole_checkpoint_replaces_them(
    tmp_path: Path,
) -> None:
    for name, grace_s in (("none", None), ("long", 60.0)):
        assert names_written(tmp_path / name, grace_s) == [("step 2", False), ("step 4", False)]
    assert names_written(tmp_path, 0.05) == [("step 2", False), ("step 4", True), ("step 4", False)]
    newest, skipped = latest(Store(tmp_path / "checkpoints"))
    assert newest is not None
    assert (newest.step, skipped) == (4, [])
    assert len(Store(tmp_path / "checkpoints").saved()) == 2  # of steps 2 and 4


def test_who_is_killed_in_between_has_the_weights_and_continues_at_the_checkpoint_before(tmp_path: Path) -> None:
    assert names_written(tmp_path, 0.05, fails=True) == [("step 2", False), ("step 4", True)]
    newest, [skipped] = latest(Store(tmp_path / "checkpoints"))
    assert newest is not None
    assert newest.step == 2
    assert "it holds weights only" in skipped
    model = tiny_model()
    load_weights(tmp_path, model)
    expected = dict(tiny_run(steps=4).model.named_parameters())
    assert torch.equal(model.weight, expected["weight"])


@pytest.mark.parametrize("grace_s", [0, True])
def test_a_grace_that_is_no_time_is_refused(grace_s: float) -> None:
    with pytest.raises(ValueError, match=f"grace_s must be above 0 seconds, or None if no limit is known; got {grace_s}"):
        Checkpoint(grace_s=grace_s)


# -- the kernel of a notebook --------------------------------------------------------------------------


def test_a_notebook_steers_its_run() -> None:
    with warnings.catch_warnings():  # jupyter_core and traitlets warn of each other
        warnings.simplefilter("ignore")
        import nbclient
        import nbformat
    cells = [
        "import warnings; warnings.simplefilter('error')",
        "from cadenza import Callback, on\nfrom cadenza.testing import tiny_trainer\n"
        "handle = tiny_trainer(steps=1_000_000, progress=True).start()\nhandle.pause('to look')",
        "handle",
        "seen = []\nhandle.attach(on(Callback.on_step_end)(lambda run: seen.append(run.progress.step)))\n"
        "handle.step_once()\nprint(len(seen), handle)",
        "handle.stop('enough')\nprint(handle.join().outcome)",
        "import os, signal, tempfile\nfrom cadenza.callbacks import Checkpoint\nfolder = tempfile.TemporaryDirectory()\n"
        "def train(interrupt_at=None):\n"
        "    trainer = tiny_trainer(steps=20, directory=folder.name, callbacks=[Checkpoint('1 step')])\n"
        "    for step in trainer.steps(resume='auto'):\n"
        "        for inputs, _ in step:\n"
        "            step.backward(trainer.model(inputs).square().mean())\n        print(step)\n"
        "        if step.run.progress.step == interrupt_at:\n"
        "            os.kill(os.getpid(), signal.SIGINT)  # as 'Interrupt the kernel' does\n"
        "    print(trainer.run.progress.step, trainer.run.outcome.kind)\n"
        "train(interrupt_at=17)",
        "train()\nfolder.cleanup()",
    ]
    v4: Any = nbformat.v4  # typed in part only
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    shown = [one.data["text/html"] for one in notebook.cells[2].outputs if "text/html" in one.get("data", {})]
    assert any("in the background</b> · paused" in one for one in shown)
    printed = ["".join(one.text for one in cell.outputs if one.output_type == "stream") for cell in notebook.cells]
    assert printed[3].startswith("1 <Handle: paused; ")
    assert printed[4].endswith("Outcome(kind='stopped', reason='enough')\n")
    assert "18 interrupted\n" in printed[5]
    assert printed[6].endswith("20 finished\n")


# -- in guests' trainers, and with their callbacks ----------------------------------------------------


def test_ctrl_c_that_a_native_checkpoint_takes_ends_the_training_as_fastnlp_does(tmp_path: Path) -> None:
    press = Hooks(on_train_batch_end=lambda trainer: signal.raise_signal(signal.SIGINT))
    trainer = trained(20, [press, Checkpoint("100 steps", directory=tmp_path)], n_epochs=4)
    outcome = live(trainer).outcome
    assert outcome is not None
    assert outcome.kind == "interrupted"


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_start", "on_train_epoch_end"])
def test_a_run_with_callbacks_of_lightning_that_sigterm_ends_continues_to_the_same_bits(tmp_path: Path, hook: str) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="the callbacks are those of Lightning: pip install lightning")
    from tests.compat.lightning.home import Recorder, native_trainer

    class Signal(pl.Callback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            setattr(self, hook, self.send)

        def send(self, trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step == (2 if hook == "on_train_batch_end" else 3) and not trainer.received_sigterm:
                os.kill(os.getpid(), signal.SIGTERM)

    def make(directory: str, *others: Any) -> Any:
        stop = pl.callbacks.EarlyStopping("val_loss", patience=9, min_delta=1.0)
        callbacks = [*others, stop, Checkpoint(every="2 steps")]
        return native_trainer(callbacks, max_epochs=3, directory=tmp_path / directory), stop

    recorder = Recorder()
    with pytest.raises(SystemExit):
        make("cut", Signal(), recorder)[0].fit()
    assert "on_train_end" not in recorder.names()
    (trainer, stop), (whole, other) = make("cut"), make("whole")
    again, run = trainer.fit(resume="auto"), whole.fit()
    assert torch.equal(again.model.weight, run.model.weight)
    assert stop.state_dict() == other.state_dict()
    assert again.history["eval/loss"] == run.history["eval/loss"]
