"""Progress: in a terminal, in a file, in a notebook, by default; and it never harms the run."""

from __future__ import annotations

import os
import re
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
from cadenza.callbacks import Evaluate, FindLearningRate, LogTraining
from cadenza.compat.accelerated.callbacks import PrintProgressCallback
from cadenza.errors import MissingExtraError
from cadenza.loading.evaluation import Evaluation
from cadenza.sinks import Console, ProgressBar
from cadenza.sinks.progress_bar import FitView
from cadenza.sinks.progress_renderers import Row
from cadenza.testing import check_callback, tiny_loader, tiny_run, tiny_trainer
from tests.sinks.samples import failing
from tests.sinks.terminal import Terminal, shown_by_a_new_process, shown_in_terminal

Lines = pytest.CaptureFixture[str]

SCRIPT = """
import logging, os, sys, time, warnings
import torch
from torch.utils.data import DataLoader, Dataset
from cadenza import Callback, on
from cadenza.callbacks import Evaluate
from cadenza.sinks import ProgressBar
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

@on(Callback.on_step_end)
def dawdle(run):
    time.sleep(0.02)

@on(Callback.on_eval_batch_end)
def dawdle_as_well(run, evaluation, batch, outputs):
    time.sleep(0.02)

slow = [dawdle, dawdle_as_well, Evaluate(tiny_loader(9))]
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


def states(written: str) -> list[str]:
    """Return what stood on the line one after the other, as if the run had taken no time."""
    timeless = re.sub(r"\b\d+:\d\d\b", lambda found: re.sub(r"\d", "0", found[0]), written)
    return [state.strip() for state in re.split(r"[\r\n]|\x1b\[A", timeless) if state.strip()]


def piped(script: str, **variables: str) -> str:
    """Return what a script writes to a pipe."""
    with Terminal(SCRIPT + script, width=None, variables=variables) as pipe:
        pass
    assert pipe.exit_code == 0, pipe.written
    return pipe.written


# -- in a terminal -------------------------------------------------------------------------------------


def test_in_a_terminal_all_prints_are_whole_lines_above_one_bar() -> None:
    callbacks = "[talk, dawdle_as_well, Evaluate(tiny_loader(9)), ProgressBar(interval_s=0.01)]"
    run = f"tiny_trainer(callbacks={callbacks}, epochs=2, batches=3).fit()\nprint('after', file=kept[-1])"
    screen, written = shown_in_terminal(SCRIPT + run)
    *lines, bar, after, end = screen.lines
    assert lines == SPOKEN
    assert re.fullmatch(
        r"epoch 2/2  ━+  6/6  100%  loss \S+  eval/loss \S+  in \S+  \S+ (steps/s|s/step)(  \S+ samples/s)?", bar
    )
    assert (after, end) == ("after", ""), "a kept reference to the stream still writes to the terminal"
    assert screen.cursor_shown
    assert "\x1b[?25l" in written, "the cursor is hidden while the bar is there"
    assert re.search(r"epoch 1/2  .*3/6   50%", written)
    assert re.search(r"eval       .*[1-8]/9", written), "an evaluation has a bar of its own"


def test_the_newest_results_of_evaluations_stay_in_the_bar_and_in_its_last_line() -> None:
    both = "Evaluate(tiny_loader(), '3 steps'), Evaluate(tiny_loader(), '3 steps', name='test')"
    make = f"tiny_trainer(callbacks=[dawdle, {both}, ProgressBar(%s)], batches=12).fit()"
    screen, written = shown_in_terminal(SCRIPT + make % "interval_s=0.01", width=80)
    drawn = [float(value) for value in re.findall(r"  loss \S+ +eval/loss (\S+)  eta 0:00", written)]
    assert len({*drawn}) > 1, "the results are those of the last evaluation"
    assert re.search(r"  loss \S+  eval/loss \S+  in ", screen.lines[0])
    line = piped(make % "'plain'").splitlines()[-1]
    assert re.search(r"  loss \S+  eval/loss [\d.]+  in \S+  \S+ \S+  test/loss [\d.]+  ", line)


def test_with_tqdm_there_is_a_bar_and_one_below_while_it_evaluates() -> None:
    screen, written = shown_in_terminal(
        SCRIPT + "tiny_trainer(callbacks=[*slow, ProgressBar('tqdm', interval_s=0.02)], epochs=2).fit()"
    )
    first, *_, last = states(written)
    assert first == "epoch 1/2:   0%|" + first.split("|")[1] + "| 0/10 [00:00]"
    assert any(re.search(r"eval: +\d+%\|.*\| [1-8]/9 \[00:00, \S+ batches/s, eta 0:00\]", state) for state in states(written))
    ended = r"epoch 2/2: 100%\|█+\| 10/10 \[00:00, loss \S+, eval/loss \S+, in 0:00, \S+ (steps/s|s/step)(, \S+ samples/s)?\]"
    assert re.fullmatch(ended, last)
    assert states("\n".join(screen.lines)) == [last], "the bar of the evaluation is gone"


def test_a_narrow_terminal_without_colour_gets_what_fits() -> None:
    screen, written = shown_in_terminal(
        SCRIPT + "tiny_trainer(callbacks=[ProgressBar()]).fit()", width=40, variables={"NO_COLOR": "1"}
    )
    assert screen.text == ["epoch 1/1  ━━━━━━━━━━━━━━━━━  5/5  100%"]
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
    screen, _ = shown_by_a_new_process(SCRIPT + run)  # in a fork of a fork, the worker can wait forever
    shown = "\n".join(screen.lines)
    assert all(f"worker gives {index}" in shown for index in range(8))
    assert screen.lines[-2].startswith("epoch 5/5")
    assert screen.cursor_shown


def test_warnings_and_logs_do_not_tear_the_bars_on_stderr_and_each_bar_leaves_one_line() -> None:
    script = """
sys.stdout = open(os.devnull, "w")
warnings.simplefilter("always")
warnings.formatwarning = lambda message, *_: f"{message}\\n"

@on(Callback.on_step_end)
def talk(run):
    warnings.warn(f"warned in step {run.progress.step}")
    logging.getLogger("script").warning(f"logged in step {run.progress.step}")
    print("printed to a file")
    time.sleep(0.01)

trainer = tiny_trainer(progress=True, callbacks=[talk], batches=2)
trainer.callbacks[-1].interval_s = 0.001
trainer.fit()
trainer.fit()
trainer.evaluate(tiny_loader(3))
trainer.predict(tiny_loader(4), compute=lambda model, batch: model(batch[0]))
"""
    screen, written = shown_in_terminal(SCRIPT + script, width=200)
    assert "━" in written
    assert screen.cursor_shown
    spoken = [line for step in (1, 2) for line in (f"warned in step {step}", f"logged in step {step}")]
    assert [line for line in screen.lines if line in spoken] == spoken * 2
    starts = ["epoch 1/1  ━", "this trainer has trained 2 steps", "epoch 1/1  ━", "eval  ━", "predict  ━", ""]
    others = [line for line in screen.lines if line not in spoken]
    assert [line[: len(start)] for line, start in zip(others, starts, strict=True)] == starts


def test_a_run_inside_another_run_shows_lines_below_its_bar() -> None:
    script = """
@on(Callback.on_epoch_end)
def another(run):
    assert tiny_trainer(progress=True).fit().faults == []

run = tiny_trainer(progress=True, callbacks=[another]).fit()
print("faults", run.faults)
"""
    screen, _ = shown_in_terminal(SCRIPT + script)
    assert "faults []" in screen.lines
    assert sum(line.startswith("epoch 1/1") for line in screen.lines) == 2


@pytest.mark.parametrize(
    ("before", "variables"),
    [
        ("", {"CI": "1"}),
        ("", {"GITHUB_ACTIONS": "true", "CI": "true"}),
        ("", {"SLURM_JOB_ID": "1"}),
        ("", {"TERM": "dumb"}),
        ("sys.modules['rich'] = None", {}),
    ],
    ids=["CI", "GitHub", "SLURM", "dumb", "without rich"],
)
def test_a_terminal_of_a_machine_a_dumb_one_and_one_without_rich_get_a_line_at_the_end(
    before: str, variables: dict[str, str]
) -> None:
    run = f"{before}\ntiny_trainer(callbacks=[*slow, ProgressBar()]).fit()"
    screen, written = shown_in_terminal(SCRIPT + run, variables=variables)
    line, after = screen.lines
    assert line.startswith("epoch 1/1  step 5/5  100%  loss ")
    assert after == ""
    assert not set(written.replace("\r\n", "\n")) & {"\r", "\x1b"}


# -- in a pipe or a file -------------------------------------------------------------------------------


def test_in_a_pipe_there_are_a_few_plain_lines() -> None:
    written = piped("tiny_trainer(callbacks=[*slow[1:], ProgressBar(interval_s=0.05)], epochs=2).fit()")
    assert not set(written) & {"\r", "\x1b"}
    *between, last = written.splitlines()
    assert between, "an evaluation of 0.2 s is longer than the interval"
    assert all(re.fullmatch(r"(epoch [12]/2  step|eval  batch) .*\d+/\d+ .*", line) for line in between)
    assert any(re.search(r"batch [1-8]/9  +\d+%  \S+ batches/s  eta \d:\d\d", line) for line in between)
    assert re.fullmatch(r"epoch 2/2  step 10/10  100%  loss \S+  eval/loss \S+  in \S+  .*", last)


def test_the_variables_of_tqdm_count() -> None:
    again = "for name in [name for name in sys.modules if name.startswith('tqdm')]: del sys.modules[name]"  # it reads them then
    run = f"{again}\ntiny_trainer(callbacks=[ProgressBar('tqdm', interval_s=0.02)], epochs=2).fit()"
    assert piped(run, TQDM_DISABLE="1") == ""
    written = piped(run, TQDM_ASCII=" 123456789#")
    assert "10/10" in written
    assert written.isascii()


def test_an_output_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    run = (
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "run = tiny_trainer(callbacks=[dawdle, ProgressBar('rich', interval_s=0.001)]).fit()\n"
        f"open({str(tmp_path / 'result')!r}, 'w').write(f'{{run.outcome.kind}} {{[f.callback for f in run.faults]}}')\n"
        "os._exit(0)"
    )
    piped(run)
    assert (tmp_path / "result").read_text() == "finished ['ProgressBar']"


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


# -- the line of each kind -----------------------------------------------------------------------------


def endless() -> Iterator[object]:
    while True:
        yield from tiny_loader()


stop = on(Callback.on_step_end, at=3)(lambda run: run.stop("enough"))


@pytest.mark.parametrize(
    ("kind", "counted", "failed"),
    [
        ("plain", "epoch 1/1  3 steps  stopped  loss ", r"epoch 1/1  step 3/5   60%  failed  loss "),
        ("tqdm", "epoch 1/1: 3 steps [00:00, stopped, loss ", r"epoch 1/1: +60%\|.*\| 3/5 \[00:00, failed, "),
    ],
)
def test_a_run_without_a_known_end_is_counted_and_one_that_fails_leaves_the_bar_where_it_was(
    kind: Any, counted: str, failed: str, capsys: Lines
) -> None:
    tiny_run(callbacks=[stop, ProgressBar(kind)], loader=endless(), epochs=1)
    assert states("".join(capsys.readouterr()))[-1].startswith(counted)
    with pytest.raises(ArithmeticError):
        tiny_run(callbacks=[failing(3, ArithmeticError), ProgressBar(kind)])
    shown = "".join(capsys.readouterr())
    assert re.search(failed, states(shown)[-1])
    assert shown.endswith("\n")


@pytest.mark.parametrize(
    ("kind", "evaluated", "predicted"),
    [
        ("plain", r"eval  batch 3/3  100%  eval/loss {}  in 0:00", r"predict  batch 4/4  100%  in 0:00"),
        ("tqdm", r"eval: 100%\|█+\| 3/3 \[00:00, eval/loss {}, in 0:00\]", r"predict: 100%\|█+\| 4/4 \[00:00, in 0:00\]"),
    ],
)
def test_evaluate_and_predict_of_the_trainer_have_a_bar(kind: Any, evaluated: str, predicted: str, capsys: Lines) -> None:
    trainer = tiny_trainer(callbacks=[ProgressBar(kind)])
    results = trainer.evaluate(tiny_loader(3))
    assert re.fullmatch(evaluated.format(f"{results['eval/loss']:.4g}"), states("".join(capsys.readouterr()))[-1])
    trainer.predict(tiny_loader(4), compute=lambda model, batch: model(batch[0]))
    assert re.fullmatch(predicted, states("".join(capsys.readouterr()))[-1])
    assert timers() == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("plain", r"epoch {0}/{0}  step {1}/{1}  100%  loss {2}  in 0:00  .*"),
        ("tqdm", r"epoch {0}/{0}: 100%\|█+\| {1}/{1} \[00:00, loss {2}, in 0:00, .*"),
    ],
)
def test_one_instance_serves_several_runs_on_its_stream_alone_and_leaves_no_thread(kind: Any, line: str, capsys: Lines) -> None:
    bar, before = ProgressBar(kind), set(threading.enumerate())
    for epochs in (1, 2):
        run = tiny_run(callbacks=[bar], epochs=epochs)
        shown, silent = sorted(capsys.readouterr(), key=len, reverse=True)
        assert run.loss is not None
        assert re.fullmatch(line.format(epochs, 5 * epochs, f"{float(run.loss):#.4g}"), states(shown)[-1])
        assert silent == ""
    after = set(threading.enumerate()) - before
    assert [type(thread).__name__ for thread in after if "tqdm" in type(thread).__module__] == []


# -- by default ----------------------------------------------------------------------------------------

NOTE = "progress bar (default; progress=False turns it off)"


def test_the_trainer_adds_a_bar_and_the_plan_says_so(capsys: Lines) -> None:
    trainer = tiny_trainer(progress=True)
    assert [type(one) for one in trainer.callbacks] == [ProgressBar]
    assert NOTE in str(trainer.plan())
    quiet = tiny_trainer(progress=False)
    assert quiet.callbacks == []
    assert "progress bar" not in str(quiet.plan())
    quiet.fit()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("own", [ProgressBar("plain"), Console(), PrintProgressCallback()])
def test_a_callback_that_shows_progress_replaces_it(own: Callback) -> None:
    trainer = tiny_trainer(progress=True, callbacks=[LogTraining(1), own])
    assert trainer.callbacks[-1] is own
    assert NOTE not in str(trainer.plan())


def test_without_a_terminal_a_run_shows_one_line_on_stderr(capsys: Lines) -> None:
    run = tiny_trainer(progress=True, epochs=2, callbacks=[FindLearningRate(steps=10)]).fit()
    out, err = capsys.readouterr()
    assert run.progress.step == 10
    assert err.startswith("epoch 2/2  step 10/10  100%  loss ")  # and none for the trial of rates
    assert err.count("\n") == 1
    assert "epoch" not in out


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
    tiny_trainer(callbacks=[slow.waiting(), ProgressBar("plain", interval_s=0.001)]).evaluate(slow)
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
    assert (run.outcome and run.outcome.kind) == "finished"
    assert timers() == []


def test_wrong_arguments_are_errors_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="renderer must be 'auto', 'rich', 'plain', 'notebook' or 'tqdm'; got 'bar'"):
        ProgressBar("bar")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ValueError, match="interval_s must be more than 0 seconds, or None; got 0"):
        ProgressBar(interval_s=0)
    for package in ("rich", "tqdm"):
        monkeypatch.setitem(sys.modules, package, None)
        message = rf"ProgressBar\('{package}'\) needs the package '{package}'.*pip install 'cadenza\[progress\]'"
        with pytest.raises(MissingExtraError, match=message):
            ProgressBar(package)


@pytest.mark.parametrize("make", [Console, lambda: ProgressBar("auto"), lambda: ProgressBar("tqdm")])
def test_they_keep_the_contract_of_callbacks(make: Callable[[], Callback]) -> None:
    check_callback(make)


def test_a_run_of_tokens_shows_its_tokens_and_how_long_the_rest_takes() -> None:
    rows: list[Row] = []

    class Look(Callback):
        def on_fit_start(self, run: Run) -> None:
            self.view = FitView(run)

        def on_step_end(self, run: Run) -> None:
            rows.extend(self.view.rows())

    tiny_run(callbacks=[Look()], batches=3, max_tokens=100, tokens=lambda batch: 15)
    assert [(row.unit, row.done, row.total) for row in rows] == [("token", 15 * step, 100) for step in range(1, 8)]
    assert [row.label for row in rows] == [f"epoch {epoch}" for epoch in (1, 1, 1, 2, 2, 2, 3)]
    assert rows[1].percent == " 30%"
    assert any(fact.startswith("eta ") for fact in rows[2].facts)
    assert "step 3" in rows[2].facts or "step 2" in rows[2].facts
