"""`Trainer.start`: a run in the background, which a notebook pauses, continues and changes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Handle, Run, Trainer, on
from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer

with warnings.catch_warnings():  # jupyter_core and traitlets warn of each other
    warnings.simplefilter("ignore")
    import nbclient
    import nbformat


def decided(handle: Handle, *what: str) -> list[tuple[str, str]]:
    return [(one.what, one.who) for one in handle.run.decisions if one.what in what]


# -- to the end -----------------------------------------------------------------------------------


def test_a_run_in_the_background_ends_as_fit_does() -> None:
    torch.manual_seed(1)
    before = tiny_trainer(epochs=2)
    expected = before.fit()
    torch.manual_seed(1)
    trainer = tiny_trainer(epochs=2)
    run = trainer.start().join()
    assert run is trainer.run
    assert run.outcome == expected.outcome
    assert run.progress.now() == expected.progress.now()
    assert all(map(torch.equal, trainer.model.parameters(), before.model.parameters()))


def test_it_takes_the_arguments_of_fit(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        return tiny_trainer(steps=steps, directory=tmp_path, callbacks=[Checkpoint("2 steps")])

    trainer(3).start().join()
    handle = trainer(6).start(resume="auto")
    assert [one.when.step for one in handle.join().decisions if one.what == "resumed"] == [3]
    over = trainer(6).start(resume="auto")
    assert over.join().progress.step == 6
    assert "the limit is reached" in repr(over)
    with pytest.raises(TypeError, match="resume"):
        trainer(6).start(resume=3)  # type: ignore[arg-type]  # on purpose


def test_an_error_is_kept_for_join(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        gate.wait(60)
        raise ValueError("the batch is broken")

    handle = tiny_trainer(callbacks=[fail]).start()
    assert handle.run.outcome is None
    gate.set()
    while not handle.done:
        time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(ValueError, match="the batch is broken"):
            handle.join()
    assert "failed: ValueError('the batch is broken')" in repr(handle)
    assert "the run in the background failed: ValueError('the batch is broken')" in caplog.text
    assert handle.run.outcome is not None
    assert handle.run.outcome.kind == "failed"


def test_a_run_that_cannot_begin_raises_its_error_where_it_is_asked_for() -> None:
    handle = tiny_trainer(callbacks=[Checkpoint()]).start()  # it has no folder
    for ask in (lambda: handle.run, handle.pause, handle.join):
        with pytest.raises(ValueError, match="Checkpoint needs a folder"):
            ask()
    assert "failed" in repr(handle)


def test_one_trainer_trains_one_run_at_a_time(started: Any) -> None:
    trainer = tiny_trainer(steps=1_000_000)
    handle = started(trainer)
    for again in (trainer.start, trainer.fit, trainer.steps):
        with pytest.raises(RuntimeError, match="trains in the background already"):
            again()
    handle.stop("enough")
    assert handle.join().outcome.kind == "stopped"
    handle.stop("again")  # nothing is left to stop
    with pytest.raises(RuntimeError, match="the run is over"):
        handle.pause()


def test_join_waits_no_longer_than_it_is_given(started: Any) -> None:
    with pytest.raises(TimeoutError, match=r"goes on after 0.01 s: <Handle: training; "):
        started().join(0.01)


# -- paused ---------------------------------------------------------------------------------------


def test_a_paused_run_stands_at_a_step_boundary(started: Any) -> None:
    handle = started()
    handle.pause("to look at the weights")
    step, weights = handle.run.progress.step, [one.clone() for one in handle.run.model.parameters()]
    time.sleep(0.05)
    assert handle.run.progress.step == step
    assert all(map(torch.equal, handle.run.model.parameters(), weights))
    assert handle.paused
    assert repr(handle).startswith("<Handle: paused; ")
    assert "paused" in handle._repr_html_()
    handle.pause()  # nothing more to do
    handle.resume()
    while handle.run.progress.step == step:
        time.sleep(0.01)
    assert [(one.what, one.why, one.who) for one in handle.run.decisions] == [
        ("paused", "to look at the weights", "the script"),
        ("continued", "handle.resume() was called", "the script"),
    ]


def test_step_once_does_one_step_also_over_the_end_of_an_epoch(started: Any) -> None:
    handle = started(batches=2)
    handle.step_once()  # of a run that goes on
    first = handle.run.progress.step
    for more in range(1, 6):
        assert handle.paused
        handle.step_once()
        assert handle.run.progress.step == first + more
    assert handle.run.progress.epoch >= 2


def test_a_hook_pauses_its_run(started: Any) -> None:
    known = threading.Event()

    @on(Callback.on_step_end, at=3)
    def halt(run: Run) -> None:
        known.wait(60)
        handle.pause("step 3")

    handle = started(callbacks=[halt])
    known.set()
    while not handle.paused:
        time.sleep(0.01)
    assert handle.run.progress.step == 3
    assert decided(handle, "paused") == [("paused", "halt")]
    handle.resume()
    assert decided(handle, "continued") == [("continued", "the script")]


def test_a_paused_run_can_be_stopped_and_ends_whole(tmp_path: Path, started: Any) -> None:
    handle = started(directory=tmp_path, callbacks=[Checkpoint("1 epoch")])
    handle.pause()
    step = handle.run.progress.step
    handle.stop("enough")
    run = handle.join(60)
    assert (run.outcome.kind, run.outcome.reason, run.progress.step) == ("stopped", "enough", step)
    assert list((tmp_path / "checkpoints").glob(f"*{step}*"))


def test_the_last_step_can_be_the_one(started: Any) -> None:
    gate = threading.Event()

    @on(Callback.on_step_end, at=1)
    def wait(run: Run) -> None:
        gate.wait(60)

    handle = started(steps=3, callbacks=[wait])
    threading.Timer(0.05, gate.set).start()
    while handle.run.progress.step < 3:
        handle.step_once()
    assert handle.paused
    with pytest.raises(RuntimeError, match="the run is over"):
        handle.step_once()
    assert handle.join(60).outcome.kind == "finished"


def test_time_in_a_pause_does_not_count_as_training(started: Any) -> None:
    handle = started()
    handle.pause()
    before_s = handle.run.progress.training_s
    time.sleep(0.05)
    assert handle.run.progress.training_s - before_s < 0.04


def test_a_script_that_ends_in_a_pause_ends(tmp_path: Path) -> None:
    script = (
        "from cadenza.testing import tiny_trainer\n"
        f"handle = tiny_trainer(steps=1_000_000, directory={str(tmp_path)!r}).start()\n"
        "handle.pause()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert "the script is over while the run is paused" in (tmp_path / "decisions.jsonl").read_text()


# -- elsewhere ------------------------------------------------------------------------------------


def test_a_notebook_steers_its_run() -> None:
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
    assert "moved in the first steps" not in printed[5] + printed[6]  # names of the notebook, such as get_ipython


def test_a_stop_iteration_of_a_hook_stays_what_it_is() -> None:
    @on(Callback.on_step_end)
    def empty(run: Run) -> None:
        raise StopIteration("on purpose")

    with pytest.raises(StopIteration, match="on purpose"):
        tiny_trainer(callbacks=[empty]).start().join()
