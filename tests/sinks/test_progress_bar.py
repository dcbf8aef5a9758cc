"""ProgressBar: in a terminal, in a file, in a notebook; and it never harms the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate
from cadenza.errors import MissingExtraError
from cadenza.loading.evaluation import Evaluation
from cadenza.sinks import ProgressBar
from cadenza.testing import check_callback, tiny_loader, tiny_run, tiny_trainer
from tests.sinks.terminal import environment, shown_by_a_new_process, shown_in_terminal

Lines = pytest.CaptureFixture[str]

SCRIPT = """
import logging, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from cadenza import Callback, on
from cadenza.callbacks import Evaluate
from cadenza.sinks import Console, ProgressBar
from cadenza.testing import tiny_loader, tiny_trainer

torch.set_num_threads(1)
kept = []
logging.basicConfig(format="%(message)s")

@on(Callback.on_step_end)
def talk(run):
    step = run.progress.step
    kept.append(sys.stdout)
    print("first half,", end=" ", flush=True)
    time.sleep(0.01)
    print(f"second half of step {step} [bold]")
    print(f"to stderr in step {step}", file=sys.stderr)
    logging.getLogger("script").warning(f"logged in step {step}")

@on(Callback.on_eval_batch_end)
def dawdle(run, evaluation, batch, outputs):
    time.sleep(0.02)

"""
SPOKEN = [
    line
    for step in range(1, 7)
    for line in (f"first half, second half of step {step} [bold]", f"to stderr in step {step}", f"logged in step {step}")
]


def timers() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("cadenza") and thread.name != "cadenza-writer"
    ]


# -- in a terminal -------------------------------------------------------------------------------------


def test_in_a_terminal_all_prints_are_whole_lines_above_one_bar() -> None:
    callbacks = "[talk, dawdle, Evaluate(tiny_loader(9)), ProgressBar(interval_s=0.01)]"
    run = f"tiny_trainer(callbacks={callbacks}, epochs=2, batches=3).fit()\nprint('after', file=kept[-1])"
    screen, written = shown_in_terminal(SCRIPT + run)
    *lines, bar, after, end = screen.lines
    assert lines == SPOKEN
    assert re.fullmatch(r"epoch 2/2  ━+  6/6  100%  loss \S+  in \S+  \S+ (steps/s|s/step)  \S+ samples/s", bar)
    assert (after, end) == ("after", ""), "a kept reference to the stream still writes to the terminal"
    assert screen.cursor_shown
    assert "\x1b[?25l" in written, "the cursor is hidden while the bar is there"
    assert re.search(r"epoch 1/2  .*3/6   50%", written)
    assert re.search(r"eval       .*[1-8]/9", written), "an evaluation has a bar of its own"


def test_a_keyboard_interrupt_leaves_the_terminal_clean() -> None:
    run = """
@on(Callback.on_step_end, at=4)
def interrupt(run):
    print("begun", end="")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

try:
    tiny_trainer(callbacks=[interrupt, Console(), ProgressBar(interval_s=0.01)], batches=6).fit()
except KeyboardInterrupt:
    print("it came through", file=sys.stderr)
"""
    screen, _ = shown_in_terminal(SCRIPT + run)
    assert screen.cursor_shown
    begun, bar, outcome, through, after = screen.lines
    assert (begun, through, after) == ("begun", "it came through", "")
    assert re.match(r"epoch 0/1  [━╸ ]+  4/6   66%  failed  loss ", bar)
    assert re.fullmatch(r"failed after 0 epochs, 4 steps, .*: KeyboardInterrupt\(\)", outcome)


def test_a_narrow_terminal_without_colour_gets_what_fits() -> None:
    screen, written = shown_in_terminal(
        SCRIPT + "tiny_trainer(callbacks=[ProgressBar()]).fit()", width=40, variables={"NO_COLOR": "1"}
    )
    assert [line for line in screen.lines if line] == ["epoch 1/1  ━━━━━━━━━━━━━━━━━  5/5  100%"]
    assert not re.search(r"\x1b\[[\d;]*3\dm", written)


def test_what_a_forked_worker_prints_is_not_stuck_behind_the_lock_of_the_bar() -> None:
    run = """
class Talking(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        print(f"worker gives {index}")
        return torch.ones(1), torch.ones(1)

@on(Callback.on_epoch_start)
def keep_busy(run):
    time.sleep(0.02)

workers = DataLoader(Talking(), batch_size=4, num_workers=1, multiprocessing_context="fork")
tiny_trainer(callbacks=[keep_busy, ProgressBar(interval_s=0.0001)], loader=workers, epochs=5).fit()
"""
    screen, _ = shown_by_a_new_process(SCRIPT + run)
    shown = "\n".join(screen.lines)
    assert all(f"worker gives {index}" in shown for index in range(8))
    assert screen.lines[-2].startswith("epoch 5/5")
    assert screen.cursor_shown


@pytest.mark.parametrize("variable", ["CI", "SLURM_JOB_ID"])
def test_a_terminal_of_a_machine_gets_lines(variable: str) -> None:
    screen, written = shown_in_terminal(SCRIPT + "tiny_trainer(callbacks=[ProgressBar()]).fit()", variables={variable: "1"})
    line, after = screen.lines
    assert line.startswith("epoch 1/1  step 5/5  100%  loss ")
    assert after == ""
    assert "\x1b" not in written


# -- in a file -----------------------------------------------------------------------------------------


def test_in_a_file_there_are_a_few_plain_lines(tmp_path: Path) -> None:
    run = "tiny_trainer(callbacks=[dawdle, Evaluate(tiny_loader(9)), ProgressBar(interval_s=0.05)], epochs=2).fit()"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", SCRIPT + run], stdout=out, check=True, timeout=300, env=environment())
    written = (tmp_path / "out").read_bytes().decode()
    assert not set(written) & {"\r", "\x1b"}
    *between, last = written.splitlines()
    assert between, "an evaluation of 0.2 s is longer than the interval"
    assert all(re.fullmatch(r"(epoch [12]/2  step|eval  batch) .*\d+/\d+ .*", line) for line in between)
    assert any(re.search(r"batch [1-8]/9  +\d+%  \S+ batches/s  eta \d:\d\d", line) for line in between)
    assert re.fullmatch(r"epoch 2/2  step 10/10  100%  loss \S+  in \S+  .*", last)


def test_a_run_without_a_known_end_is_counted(capsys: Lines) -> None:
    def endless() -> Iterator[object]:
        while True:
            yield from tiny_loader()

    @on(Callback.on_step_end, at=3)
    def stop(run: Run) -> None:
        run.stop("enough")

    tiny_run(callbacks=[stop, ProgressBar("plain")], loader=endless(), epochs=1)
    assert capsys.readouterr().out.startswith("epoch 0/1  3 steps  stopped  loss ")


# -- in a notebook -------------------------------------------------------------------------------------


def test_a_notebook_keeps_html_that_needs_no_widget() -> None:
    cells = [
        "import warnings; warnings.simplefilter('error')",
        "from cadenza.callbacks import Evaluate\nfrom cadenza.sinks import ProgressBar\n"
        "from cadenza.testing import tiny_loader, tiny_trainer",
        "bar = ProgressBar()\ntrainer = tiny_trainer(callbacks=[Evaluate(tiny_loader()), bar], epochs=2)\nrun = trainer.fit()",
        "trainer.evaluate(tiny_loader(), name='<test>')",
        "run = tiny_trainer(progress=True).fit()",
    ]
    v4: Any = nbformat.v4  # typed in part only
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    saved = v4.reads(v4.writes(notebook))
    [fit] = saved.cells[2].outputs
    evaluation, result = saved.cells[3].outputs
    assert fit.data.keys() == {"text/html", "text/plain"}
    assert '<progress value="10" max="10"' in fit.data["text/html"]
    assert fit.data["text/plain"].startswith("epoch 2/2  step 10/10  100%  loss ")
    assert "&lt;test&gt;" in evaluation.data["text/html"]
    assert "<test>/loss" in evaluation.data["text/plain"]
    assert "<test>/loss" in result.data["text/plain"]
    [default] = saved.cells[4].outputs
    assert default.data["text/plain"].startswith("epoch 1/1  step 5/5  100%  loss ")
    assert "widget" not in v4.writes(notebook)


# -- evaluation and prediction by themselves -----------------------------------------------------------


def test_evaluate_and_predict_of_the_trainer_have_a_bar(capsys: Lines) -> None:
    trainer = tiny_trainer(callbacks=[ProgressBar("plain")])
    results = trainer.evaluate(tiny_loader(3))
    trainer.predict(tiny_loader(4), compute=lambda model, batch: model(batch[0]))
    evaluated, predicted = re.sub(r"in \d+:\d\d", "in 0:00", capsys.readouterr().out).splitlines()
    assert evaluated == f"eval  batch 3/3  100%  eval/loss {results['eval/loss']:.4g}  in 0:00"
    assert predicted == "predict  batch 4/4  100%  in 0:00"
    assert timers() == []


def test_one_instance_serves_several_runs(capsys: Lines) -> None:
    bar = ProgressBar("plain")
    runs = [tiny_run(callbacks=[bar], epochs=epochs) for epochs in (1, 2)]
    first, second = re.sub(r"in \d+:\d\d", "in 0:00", capsys.readouterr().out).splitlines()
    losses = [float(run.loss) for run in runs if run.loss is not None]
    assert first.startswith(f"epoch 1/1  step 5/5  100%  loss {losses[0]:#.4g}  in 0:00  ")
    assert second.startswith(f"epoch 2/2  step 10/10  100%  loss {losses[1]:#.4g}  in 0:00  ")


# -- no harm -------------------------------------------------------------------------------------------


def test_the_timer_lives_as_long_as_the_run() -> None:
    alive: list[list[str]] = []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        alive.append(timers())
        if run.progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        tiny_run(callbacks=[ProgressBar("plain"), look])
    assert alive == [["cadenza-progress"]] * 2
    assert timers() == []
    assert not [note for note in caught.value.__notes__ if "failed as well" in note]


class Treacherous(list[Any]):
    """Tells its length to the run, and has something else in store when the bar's thread asks."""

    def __init__(self, surprise: Callable[[], object]) -> None:
        super().__init__(tiny_loader(2))
        self.asked, self.surprise = threading.Event(), surprise

    def __len__(self) -> int:
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
            self.surprise()
        return 2

    def waiting(self) -> Callback:
        @on(Callback.on_eval_batch_end)
        def wait(run: Run, evaluation: Evaluation, batch: object, outputs: object) -> None:
            assert self.asked.wait(timeout=200)

        return wait


def test_a_timer_that_is_busy_is_waited_for(capsys: Lines) -> None:
    slow = Treacherous(lambda: time.sleep(0.3))
    trainer = tiny_trainer(callbacks=[slow.waiting(), ProgressBar("plain", interval_s=0.001)])
    trainer.evaluate(slow)
    assert timers() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_until_nothing_is_being_drawn(capsys: Lines) -> None:
    drawing, begun, codes = list[int](), threading.Event(), list[int]()

    def draw() -> None:
        drawing.append(1)
        begun.set()
        time.sleep(0.1)
        drawing.clear()

    @on(Callback.on_eval_batch_end)
    def fork(run: Run, evaluation: Evaluation, batch: object, outputs: object) -> None:
        assert begun.wait(200)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
            child = os.fork()
        if child == 0:
            os._exit(len(drawing))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    tiny_trainer(callbacks=[fork, ProgressBar("plain", interval_s=0.001)]).evaluate(Treacherous(draw))
    assert codes == [0, 0]


def test_an_error_in_the_timer_is_reported_and_the_run_goes_on(capsys: Lines) -> None:
    def fail() -> None:
        raise ArithmeticError("no length for you")

    loader = Treacherous(fail)
    run = tiny_run(callbacks=[loader.waiting(), Evaluate(loader), ProgressBar("plain", interval_s=0.001)], epochs=2)
    assert [(fault.callback, str(fault.error)) for fault in run.faults] == [("ProgressBar", "no length for you")]
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert timers() == []


def test_an_output_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    run = (
        "run = tiny_trainer(callbacks=[talk, ProgressBar('rich', interval_s=0.001)]).fit()\n"
        f"open({str(tmp_path / 'result')!r}, 'w').write(f'{{run.outcome.kind}} {{[f.callback for f in run.faults]}}')\n"
        "os._exit(0)"
    )
    quiet = SCRIPT.replace("print(", "str(").replace(', end=" ", flush=True', "").replace(", file=sys.stderr", "")
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", quiet + run], stdout=full, check=True, timeout=300, env=environment())
    assert (tmp_path / "result").read_text() == "finished ['ProgressBar']"


# -- arguments -----------------------------------------------------------------------------------------


def test_wrong_arguments_are_errors_when_written() -> None:
    with pytest.raises(ValueError, match="renderer must be 'auto', 'rich', 'plain', 'notebook' or 'tqdm'; got 'bar'"):
        ProgressBar("bar")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="interval_s must be more than 0 seconds, or None; got 0"):
        ProgressBar(interval_s=0)


def test_without_rich_auto_shows_lines_and_rich_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = "sys.modules['rich'] = None\ntiny_trainer(callbacks=[ProgressBar()]).fit()"
    screen, written = shown_in_terminal(SCRIPT + run)
    assert screen.lines[0].startswith("epoch 1/1  step 5/5  100%  loss ")
    assert "\x1b" not in written
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'rich'.*pip install 'cadenza\[progress\]'"):
        ProgressBar("rich")


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(ProgressBar)
