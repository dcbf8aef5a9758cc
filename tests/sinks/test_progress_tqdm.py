"""ProgressBar with tqdm: its look, its variables, and no harm to the run."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate
from cadenza.errors import MissingExtraError
from cadenza.sinks import ProgressBar
from cadenza.testing import check_callback, tiny_loader, tiny_run, tiny_trainer
from tests.sinks.terminal import environment, shown_in_terminal

Lines = pytest.CaptureFixture[str]

SCRIPT = """
import time
from cadenza import Callback, on
from cadenza.callbacks import Evaluate
from cadenza.sinks import ProgressBar
from cadenza.testing import tiny_loader, tiny_trainer

@on(Callback.on_step_end)
def dawdle(run):
    time.sleep(0.02)

@on(Callback.on_eval_batch_end)
def dawdle_as_well(run, evaluation, batch, outputs):
    time.sleep(0.02)

bar = ProgressBar("tqdm", interval_s=0.02)
tiny_trainer(callbacks=[dawdle, dawdle_as_well, Evaluate(tiny_loader(9)), bar], epochs=2).fit()
"""


def states(written: str) -> list[str]:
    """Return what stood on the line one after the other, as if the run had taken no time."""
    written = re.sub(r"\b\d+:\d\d\b", lambda found: re.sub(r"\d", "0", found[0]), written)
    return [state.strip() for state in re.split(r"[\r\n]|\x1b\[A", written) if state.strip()]


def test_in_a_terminal_there_is_a_bar_and_one_below_while_it_evaluates() -> None:
    screen, written = shown_in_terminal(SCRIPT)
    first, *_, last = states(written)
    assert first == "epoch 0/2:   0%|" + first.split("|")[1] + "| 0/10 [00:00]"
    assert any(re.search(r"eval: +\d+%\|.*\| [1-8]/9 \[00:00, \S+ batches/s, eta 0:00\]", state) for state in states(written))
    ended = r"epoch 2/2: 100%\|█+\| 10/10 \[00:00, loss \S+, in 0:00, \S+ (steps/s|s/step), \S+ samples/s\]"
    assert re.fullmatch(ended, last)
    assert states("\n".join(screen.lines)) == [last], "the bar of the evaluation is gone"


def test_the_variables_of_tqdm_count() -> None:
    assert written_with(TQDM_DISABLE="1") == ""
    written = written_with(TQDM_ASCII=" 123456789#")
    assert "10/10" in written
    assert written.isascii()


def written_with(**variables: str) -> str:
    """Return what the script writes to a pipe."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment(**variables))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def test_it_shows_the_loss_and_leaves_no_thread(capsys: Lines) -> None:
    before = set(threading.enumerate())
    run = tiny_run(callbacks=[Evaluate(tiny_loader()), ProgressBar("tqdm")], epochs=2)
    shown = capsys.readouterr()
    assert run.loss is not None
    assert f"loss {float(run.loss):#.4g}, in 0:00" in states(shown.err)[-1]
    assert shown.out == ""
    after = set(threading.enumerate()) - before
    assert [type(thread).__name__ for thread in after if "tqdm" in type(thread).__module__] == []


def test_a_run_without_a_known_end_is_counted(capsys: Lines) -> None:
    def endless() -> Iterator[object]:
        while True:
            yield from tiny_loader()

    @on(Callback.on_step_end, at=3)
    def stop(run: Run) -> None:
        run.stop("enough")

    tiny_run(callbacks=[stop, ProgressBar("tqdm")], loader=endless(), epochs=1)
    assert states(capsys.readouterr().err)[-1].startswith("epoch 0/1: 3 steps [00:00, stopped, loss ")


def test_an_evaluation_by_itself_has_a_bar(capsys: Lines) -> None:
    results = tiny_trainer(callbacks=[ProgressBar("tqdm")]).evaluate(tiny_loader(3))
    last = states(capsys.readouterr().err)[-1]
    assert last.startswith("eval: 100%|")
    assert last.endswith(f"| 3/3 [00:00, eval/loss {results['eval/loss']:.4g}, in 0:00]")


def test_one_instance_serves_several_runs(capsys: Lines) -> None:
    bar = ProgressBar("tqdm")
    for epochs in (1, 2):
        tiny_run(callbacks=[bar], epochs=epochs)
    ends = [state for state in states(capsys.readouterr().err) if ", in 0:00" in state]
    assert {state.split("|")[0] + state.split("|")[2][:6].rstrip(" [") for state in ends} == {
        "epoch 1/1: 100% 5/5",
        "epoch 2/2: 100% 10/10",
    }


def test_an_error_of_the_run_leaves_the_bar_where_it_was(capsys: Lines) -> None:
    @on(Callback.on_step_end, at=3)
    def fail(run: Run) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        tiny_run(callbacks=[fail, ProgressBar("tqdm")])
    shown = capsys.readouterr().err
    assert re.search(r"epoch 0/1: +60%\|.*\| 3/5 \[00:00, failed, ", states(shown)[-1])
    assert shown.endswith("\n")


def test_without_tqdm_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingExtraError, match=r"ProgressBar\('tqdm'\) needs the package 'tqdm'.*'cadenza\[progress\]'"):
        ProgressBar("tqdm")


def test_it_keeps_the_contract_of_callbacks() -> None:
    check_callback(lambda: ProgressBar("tqdm"))
