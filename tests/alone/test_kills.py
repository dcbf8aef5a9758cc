"""Processes that are killed: in a save, in a rollback, while they prune, while they log; and what is there when they go on."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Best, Checkpoint, Evaluate, LogTraining
from cadenza.checkpoint import retention
from cadenza.checkpoint.store import Store, checkpoints
from cadenza.errors import DirectoryError
from cadenza.hooks import At, Every, First, Last
from cadenza.hooks.dispatch import hooks_of
from cadenza.records import writer
from cadenza.records.writer import Channel, Writer
from cadenza.sinks import Csv
from cadenza.status.decisions import Outcome
from cadenza.status.encoding import first_difference
from cadenza.status.run_info import RunInfo
from cadenza.testing import launch, launcher, tiny_loader, tiny_run, tiny_trainer
from tests.alone import test_preemption as preempted
from tests.callbacks.test_recover import decided, equal, recorded, trainer_in, weights_of
from tests.checkpoint.store.contents import latest
from tests.forked import start
from tests.long import seeds
from tests.sinks.readers import CSV, QUIET, TENSORBOARD, OfMlflow
from tests.sinks.samples import logging, metrics_of
from tests.sinks.terminal import shown_in_terminal
from tests.sinks.test_outages import EXPECTED, STEPS, FailingCsv, FailingTensorBoard, Outage, Ticking
from tests.sinks.test_trackers import in_own_process

# -- in a save, and while they hold a directory --------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_a_run_that_is_killed_in_a_save_goes_on_at_the_one_before(tmp_path: Path) -> None:
    assert preempted.started(tmp_path / "killed", "a save", signal.SIGKILL).ended() == -signal.SIGKILL
    folder = tmp_path / "killed" / "checkpoints"
    newest, skipped = latest(Store(folder))
    assert (newest and newest.step, skipped) == (8, [])
    assert list(folder.glob(".tmp-step-00000012-*"))
    assert first_difference(preempted.final(tmp_path / "killed"), preempted.final(tmp_path / "whole")) is None
    assert '"at step-00000008"' in (tmp_path / "killed" / "decisions.jsonl").read_text()
    assert not list(folder.glob(".tmp*"))


def test_two_processes_cannot_have_one_directory_and_a_killed_one_blocks_no_other(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = preempted.started(directory, "outside", signal.SIGTERM)
    process.until_it_says("ready\n")
    workers = [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
    try:
        with pytest.raises(DirectoryError, match=rf"is in use by process {process.pid} on .*Wait for it, stop it, or give"):
            preempted.trainer(directory).fit(resume="auto")
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # they live on when their parent is dead
        os.kill(process.pid, signal.SIGKILL)
        assert process.ended() == -signal.SIGKILL
        alive = [worker for worker in workers if Path(f"/proc/{worker}").exists()]
        assert len(alive) == len(workers) == 2
        run = preempted.trainer(directory).fit(resume="auto")
        assert run.progress.step == 24
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("jobs", ["mixed", "features"])
def test_trainings_that_are_killed_at_random_instants_end_in_the_same_bits(jobs: str) -> None:
    """A short version of ``benchmarks/kill.py``, which says what is trained: three signals, processes of their own."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    arguments = ["--jobs", jobs, "--kills", "8", "--seed", "5"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "kill.py"), *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills: 8 " in done.stdout
    assert "unequal or not ended: 0\n" in done.stdout
    assert "newest checkpoint unreadable: 0, failed to continue: 0\n" in done.stdout


def test_the_other_processes_are_ended_soon_after_one_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending() -> None:
        if os.environ["RANK"] == "1":
            subprocess.Popen(["sleep", "5"], close_fds=False)  # it keeps the files of rank 1 open, as a loader's worker does
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    monkeypatch.setattr(launcher, "GRACE_S", 0.5)
    with pytest.raises(BaseExceptionGroup, match=r"ranks \[0\] had not ended 0.5 s later, and were killed") as caught:
        launch(ending)
    assert [str(error) for error in caught.value.exceptions] == ["rank 1 ended without a result: signal SIGKILL"]


# -- random keep rules in random runs that are killed while they prune, and a model of the rules --------

BATCHES = 4  # an epoch
SECONDS = [0.0]  # the clock of the checkpoints: it is the same after a resume


class Case:
    """One random run: its callbacks, with their intervals and rules, and its results by step."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.steps = dice.randint(8, 18)
        self.times = [0.0]
        for _ in range(self.steps):
            self.times.append(self.times[-1] + dice.choice([1, 5, 20, 70]))
        self.values = {name: [dice.choice([0.1, 0.2, 0.3, 0.5, 0.8, float("nan")]) for _ in range(self.steps)] for name in "ab"}
        self.savers = [(dice.choice([1, 1, 2, 3]), self.rules()) for _ in range(dice.choice([1, 1, 2, 3]))]
        self.kill_at = dice.randint(1, 60)

    def rules(self) -> list[tuple[str, Any]]:
        """Return rules as a kind and its arguments."""
        dice, found = self.dice, []
        for _ in range(dice.randint(1, 3)):
            kind = dice.choice(["last", "last", "first", "every", "every", "at", "best", "best"])
            length: Any = dice.choice(
                [f"{dice.randint(2, 7)} steps", f"{dice.choice([10, 60, 100])} s", "1 epoch", "0.5 epoch"]
            )
            if kind == "best":
                length = (dice.choice("ab"), dice.randint(1, 3), dice.choice(["min", "max"]))
            elif kind in ("last", "first") and dice.random() < 0.5:
                length = dice.randint(1, 3)
            found.append((kind, length))
        return found

    def callbacks(self) -> list[Callback]:
        """Return the callbacks of the run."""
        return [Results(self), *(Checkpoint(f"{every} steps", keep=list(map(value, rules)), background=False, on_signal=False)
                                 for every, rules in self.savers)]  # fmt: skip

    def kept(self) -> list[int]:
        """Return the steps of the checkpoints at the end, by the meaning of the rules."""
        alive: list[tuple[int, frozenset[int]]] = []
        for step in range(1, self.steps + 1):
            owners = {
                index
                for index, (every, rules) in enumerate(self.savers)
                if step == self.steps or step % every == 0 or any(
                    kind == "best" and self._is_new_best([one for one, names in alive if index in names], step, *length)
                    for kind, length in rules
                )
            }  # fmt: skip
            if owners:
                alive.append((step, frozenset(owners)))
                keep = {step}
                for index, (_, rules) in enumerate(self.savers):
                    own = [one for one, names in alive if index in names]
                    for kind, length in rules:
                        keep |= self._kept_by(kind, length, own)
                alive = [one for one in alive if one[0] in keep]
        return [step for step, _ in alive]

    def _is_new_best(self, own: list[int], step: int, name: str, count: int, mode: str) -> bool:
        value = self.values[name][step - 1]
        better = [one for one in own if not self._is_better(name, mode, value, self.values[name][one - 1])]
        return value == value and len(better) < count

    def _is_better(self, name: str, mode: str, value: float, other: float) -> bool:
        return other != other or (value > other if mode == "max" else value < other)

    def _kept_by(self, kind: str, length: Any, own: list[int]) -> set[int]:
        if kind == "best":
            name, count, mode = length
            known = [one for one in own if self.values[name][one - 1] == self.values[name][one - 1]]
            better = {one: [other for other in known if self._beats(name, mode, other, one)] for one in known}
            return {one for one in known if len(better[one]) < count}
        if isinstance(length, int):
            return set(own[-length:] if kind == "last" else own[:length])
        amount, unit = float(length.split()[0]), length.split()[1]
        at = {one: {"steps": float(one), "s": self.times[one], "epoch": one / BATCHES}[unit] for one in own}
        if not own:
            return set()
        if kind == "last":
            return {one for one in own if at[one] > max(at.values()) - amount}
        if kind == "first":
            return {one for one in own if at[one] <= amount}
        multiples = [amount] if kind == "at" else [amount * index for index in range(1, 2000)]
        reached = [next((one for one in own if at[one] >= multiple), None) for multiple in multiples]
        return {one for one in reached if one is not None}

    def _beats(self, name: str, mode: str, one: int, other: int) -> bool:
        value, than = self.values[name][one - 1], self.values[name][other - 1]
        return (value, -one) > (than, -other) if mode == "max" else (value, one) < (than, other)


def value(rule: tuple[str, Any]) -> Any:
    """Return a rule as a user writes it."""
    kind, length = rule
    if kind == "best":
        return Best(f"eval/{length[0]}", length[1], mode=length[2])
    kinds: dict[str, Any] = {"last": Last, "first": First, "every": Every, "at": At}
    return kinds[kind](length)


class Results(Callback):
    """Reports the results of a case after each step, and sets the clock."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_setup(self, run: Run) -> None:
        SECONDS[0] = 1e9
        run.evaluations["eval"] = self.evaluation = Evaluate([]).evaluation

    def on_step_end(self, run: Run) -> None:
        step = run.progress.step
        SECONDS[0] = 1e9 + self.case.times[step]
        self.evaluation.results = {f"eval/{name}": values[step - 1] for name, values in self.case.values.items()}
        hooks_of(run).on_eval_end(run, self.evaluation)


def pruned(folder: Path, seed: int) -> dict[str, Any]:
    """Run a case, killed in a process of its own, then to its end; return what is kept, and what the model keeps."""
    case, directory = Case(seed), folder / str(seed)

    def train() -> Any:
        return tiny_trainer(directory=directory, steps=case.steps, batches=BATCHES, seed=1, callbacks=case.callbacks())

    if not (child := os.fork()):
        try:
            die_at(case.kill_at)
            train().fit()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    train().fit(resume="auto")
    store = Store(directory / "checkpoints")
    return {
        "seed": seed,
        "rules": repr(case.savers),
        "ended by": status,
        "kept": [saved.step for saved in store.saved()],
        "model": case.kept(),
        "left": [path.name for path in (directory / "checkpoints").iterdir() if path.name[:2] in (".t", ".n")],
        "dangling": [name for name, target in store.files.links().items() if store.named(target) is None],
    }


def die_at(count: int) -> None:
    """Kill this process at a change of the file system while it prunes."""
    left = [count]

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if pruning[0]:
                left[0] -= 1
                if left[0] <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **keywords)

        return call

    pruning, apply = [False], retention.Retention.apply

    def watched(*arguments: Any) -> Any:
        pruning[0] = True
        try:
            return apply(*arguments)
        finally:
            pruning[0] = False

    retention.Retention.apply = watched  # type: ignore[assignment, method-assign]
    for name in ("rename", "replace", "unlink", "rmdir", "symlink"):
        setattr(os, name, dying(getattr(os, name)))


def test_after_a_kill_during_pruning_the_end_is_that_of_a_model_of_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checkpoints, retention):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: SECONDS[0]))
    results = [pruned(tmp_path, 1 + seed) for seed in seeds(usual=5, long=20)]
    for one in results:
        assert one["kept"] == one["model"], one
        assert (one["left"], one["dangling"]) == ([], []), one
        assert one["ended by"] in (0, signal.SIGKILL), one
    assert sum(one["ended by"] == signal.SIGKILL for one in results) >= len(results) / 2


# -- in a rollback of `Recover` ------------------------------------------------------------------------

BAD = {100: math.nan}


class Kill(Callback):
    """Kills the process at a step of the part of the run with this many rollbacks, or when it begins again."""

    def __init__(self, step: int, rollbacks: int) -> None:
        self.step, self.rollbacks = step, rollbacks

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.step and len(decided(run, "went back")) == self.rollbacks:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_setup(self, run: Run) -> None:
        if self.step == 0 and json.loads((run.info.directory / "run.json").read_text())["continued"]:  # type: ignore[operator]
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def whole_rollback(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trainer_in(tmp_path_factory.mktemp("whole"), BAD, epochs=1).fit()


@pytest.mark.parametrize("case", ["between", "while repeating", "later"])
def test_a_run_that_is_killed_in_a_rollback_ends_with_the_same_bits(tmp_path: Path, case: str, whole_rollback: Run) -> None:
    (went,) = decided(whole_rollback, "went back")
    kills: dict[str, Any] = {"between": (0, 0), "while repeating": (went["to"] + 1, 1), "later": (went["step"] + 3, 1)}
    if (child := os.fork()) == 0:
        try:
            trainer_in(tmp_path, BAD, Kill(*kills[case]), epochs=1).fit()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    run = trainer_in(tmp_path, BAD, epochs=1).fit(resume="auto")
    assert (run.outcome and run.outcome.kind) == "finished"
    assert equal(weights_of(run), weights_of(whole_rollback))
    assert run.history["train/loss"] == whole_rollback.history["train/loss"]
    assert recorded(run, "batch left out") == recorded(whole_rollback, "batch left out")


# -- the scripts of "From your own loop" ---------------------------------------------------------------


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("kill_own_loops")
    module.warm_up()
    return module


@pytest.mark.skipif(sys.platform == "win32", reason="kills forked processes")
@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("gpt", 1),
        pytest.param("gan", 1, marks=pytest.mark.long),
        ("policy", 1),
        pytest.param("policy", 2, marks=pytest.mark.long),
    ],
)
def test_a_script_that_is_killed_ends_in_the_same_bits(script: str, ranks: int, tmp_path: Path, kills: Any) -> None:
    whole = tmp_path / "whole"
    seconds = kills.left_alone(script, whole, ranks)
    found = kills.killed(script, whole, tmp_path / "killed", seconds, 2, random.Random(ranks), ranks)
    assert found.difference is None
    run = whole / "runs" / script
    assert {"console.log", "metrics.csv", "tensorboard", "checkpoints"} <= {path.name for path in run.iterdir()}
    saved = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert saved["outcome"]["kind"] in ("finished", "stopped")
    assert any('"eval/' in line for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())


# -- records: each is there once after the resume ------------------------------------------------------


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def log_and_save(directory: Path, kill_at: int = -1) -> None:
    """Log every step, and save every 20 steps."""

    @on(Callback.on_step_end)
    def step(run: Run) -> None:
        if run.progress.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [LogTraining("1 step", throughput=False), Checkpoint("20 steps"), step]
    tiny_trainer(callbacks=callbacks, steps=60, seed=1, directory=directory).fit(resume="auto")


def test_a_kill_loses_no_record_of_a_checkpoint_and_the_resumed_run_has_every_record_once(tmp_path: Path) -> None:
    log_and_save(tmp_path / "whole")
    killed = start(log_and_save, tmp_path / "killed", 55, output=tmp_path / "written")
    assert killed.ended() == -signal.SIGKILL, killed.said()
    steps = [row["step"] for row in rows(tmp_path / "killed")]
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 40, "a checkpoint writes the records before it"
    log_and_save(tmp_path / "killed")
    whole, again = ([{**row, "time": 0} for row in rows(tmp_path / name)] for name in ("whole", "killed"))
    assert again == whole
    assert len(again) == 60


def test_a_run_that_is_interrupted_in_an_evaluation_keeps_what_the_step_has_logged(tmp_path: Path) -> None:
    """The rest of the step is repeated after the resume."""

    class Before(Callback):
        def on_step_end(self, run: Run) -> None:
            run.log("mean", run.progress.step, reduce="mean", weight=3)
            run.log("sum", 1, reduce="sum")

    class After(Before):
        pass

    def fit(*, interrupted: bool) -> Run:
        @on(Callback.on_eval_batch_end, when=lambda run: interrupted and run.progress.step == 2)
        def interrupt(run: Run, *_: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

        evaluate = Evaluate(tiny_loader(2), every="1 step")
        callbacks = [Before(), evaluate, After(), interrupt, Checkpoint("1 step")]
        return tiny_trainer(callbacks=callbacks, directory=tmp_path, seed=1).fit(resume="auto")

    with pytest.raises(SystemExit):
        fit(interrupted=True)
    run = fit(interrupted=False)
    assert run.history["mean"] == [(step, step) for step in range(1, 6)]
    assert run.history["sum"] == [(step, 2) for step in range(1, 6)]
    assert [line["sum"] for line in rows(tmp_path) if "sum" in line] == [2] * 5


# -- sinks: what was logged arrives, and the end does not wait for long --------------------------------


def train_and_die(directory: Path) -> None:
    """Train with two sinks that fail from step 50 on; the process is killed at step 250."""
    table, board = FailingCsv(), FailingTensorBoard()
    kill = on(Callback.on_step_end, at=250)(lambda run: os.kill(os.getpid(), signal.SIGKILL))
    callbacks = [Ticking(), Outage(table, end=1000), Outage(board, end=1000), table, board, Checkpoint(every="100 steps"), kill]
    tiny_trainer(callbacks=callbacks, steps=STEPS, directory=directory).fit()


def test_a_run_that_was_killed_in_the_outage_sends_all_when_it_is_continued(tmp_path: Path) -> None:
    killed = start(train_and_die, tmp_path / "run", output=tmp_path / "written")
    assert killed.ended() == -signal.SIGKILL, killed.said()
    callbacks = [Ticking(), FailingCsv(), FailingTensorBoard(), Checkpoint(every="100 steps")]
    run = tiny_trainer(callbacks=callbacks, steps=STEPS, directory=tmp_path / "run").fit(resume="auto")
    assert CSV.values(run.info)["number"] == TENSORBOARD.values(run.info)["number"] == EXPECTED


def test_a_service_of_wandb_that_is_killed_disables_it_and_the_run_goes_on(tmp_path: Path) -> None:
    kill = "[one.kill() for one in psutil.Process().children() if one.name() == 'wandb-core']"
    end = "os._exit(0)"  # wandb would tell at exit that its service is gone
    sink = f"Wandb('tests', mode='offline', settings={QUIET})"
    variables = {"WANDB_ERROR_REPORTING": "false"}
    ended = in_own_process(sink, tmp_path, variables, offline=False, act=kill, steps=300, end=end)
    [fault] = ended.faults
    assert any(name in fault for name in ("Connection", "Broken", "MailboxClosed")), "as wandb calls a service that is gone"
    assert ended.outcome == "finished"
    assert ended.written.count("Wandb failed in") == 1
    assert len(metrics_of(tmp_path / "run")) == 300


def test_a_signal_ends_a_run_of_mlflow_as_killed(tmp_path: Path) -> None:
    reader, facts = OfMlflow(), list[RunInfo]()
    reader.uri = f"sqlite:///{tmp_path}/mlflow.db"

    @on(Callback.on_step_end, at=2)
    def terminate(run: Run) -> None:
        facts.append(run.info)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        tiny_run(callbacks=[logging({"a": 1}), Checkpoint(), terminate, reader.make()], directory=tmp_path)
    assert reader.outcome(facts[0]) == "KILLED"
    assert reader.values(facts[0])["a"] == [(1, 1), (2, 1)]


def test_a_keyboard_interrupt_leaves_the_terminal_clean() -> None:
    script = """
import os, signal, sys, time
from cadenza import Callback, on
from cadenza.sinks import Console, ProgressBar
from cadenza.testing import tiny_trainer

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
    screen, _ = shown_in_terminal(script)
    assert screen.cursor_shown
    begun, bar, outcome, through, after = screen.lines
    assert (begun, through, after) == ("begun", "it came through", "")
    assert re.match(r"epoch 1/1  [━╸ ]+  4/6   66%  failed  loss ", bar)
    assert re.fullmatch(r"failed after 4 steps, in epoch 1, .*: KeyboardInterrupt\(\)", outcome)


# -- the deadline of the last records -----------------------------------------------------------------


def test_a_close_within_its_time_is_waited_for_and_one_that_takes_too_long_is_an_error() -> None:
    channel = Channel(Writer(), lambda records: None, lambda: time.sleep(0.05))
    channel.ask_close()
    channel.finish(60.0)
    assert channel.over
    go, begin = threading.Event(), time.monotonic()
    channel = Channel(Writer(), lambda records: None, lambda: go.wait(120))
    channel.ask_close()
    with pytest.raises(TimeoutError, match=r"not written within 0\.1 s"):
        channel.finish(0.1)
    assert 0.1 <= time.monotonic() - begin < 60.0
    go.set()


def test_sinks_that_hang_at_the_end_share_one_patience_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "_END_HANGS_S", 0.05)
    go = threading.Event()

    class Hanging(Csv):
        patience_s = 1.0

        def close(self, outcome: Outcome | None) -> None:
            assert outcome is None or go.wait(200)  # None: the table is written anew
            super().close(outcome)

    sinks = [Hanging(f"{number}.csv") for number in range(5)]
    begun: list[float] = []
    note = on(Callback.on_fit_end)(lambda run: begun.append(time.monotonic()))
    callbacks = [Ticking(), *sinks[:3], Csv("own.csv"), *sinks[3:], note]
    run = tiny_run(callbacks=callbacks, steps=5, directory=tmp_path)
    waited = time.monotonic() - begun[0]
    go.set()
    assert 1.0 <= waited < 5.0  # each for itself would take 5 s
    assert [fault.callback for fault in run.faults] == ["Hanging#5", "Hanging#4", "Hanging#3", "Hanging#2", "Hanging"]
    shown = re.findall(r"waiting up to \d s for the last records of (.*)", capsys.readouterr().out)
    assert shown[-1] == "Hanging, Hanging#2, Hanging#3, Hanging#4, Hanging#5"
    assert CSV.values(run.info)["number"] == [(step, float(step)) for step in range(1, 6)]
