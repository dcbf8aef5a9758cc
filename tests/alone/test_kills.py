"""Processes that are killed: in a save, while they prune, while they hold a directory, and one rank of two."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza import Callback, Run
from cadenza.callbacks import Best, Checkpoint, Evaluate
from cadenza.checkpoint import retention
from cadenza.checkpoint.store import Store, checkpoints
from cadenza.errors import DirectoryError
from cadenza.hooks import At, Every, First, Last
from cadenza.hooks.dispatch import hooks_of
from cadenza.status.plain import first_difference
from cadenza.testing import launch, launching, tiny_trainer
from tests.alone import test_preemption as preempted
from tests.long import seeds

ROOT = Path(__file__).parents[2]


def test_a_run_that_is_killed_in_a_save_goes_on_at_the_one_before(tmp_path: Path) -> None:
    assert preempted.started(tmp_path / "killed", "a save", signal.SIGKILL).ended() == -signal.SIGKILL
    folder = tmp_path / "killed" / "checkpoints"
    newest, skipped = Store(folder).latest()
    assert (newest and newest.step, skipped) == (8, [])
    assert list(folder.glob(".tmp-step-00000012-*"))
    assert first_difference(preempted.final(tmp_path / "killed"), preempted.final(tmp_path / "whole")) is None
    assert '"at step-00000008"' in (tmp_path / "killed" / "decisions.jsonl").read_text()
    assert not list(folder.glob(".tmp*"))


def children_of(pid: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_processes_cannot_have_one_directory_and_a_killed_one_blocks_no_other(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = preempted.started(directory, "outside", signal.SIGTERM)
    process.until_it_says("ready\n")
    workers = children_of(process.pid)
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
def test_trainings_that_are_killed_at_random_instants_end_in_the_same_bits() -> None:
    """A short version of ``benchmarks/kill.py``, which says what is trained: three signals, processes of their own."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "kill.py"), "--kills", "8", "--seed", "5"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills after training began: 8 " in done.stdout
    assert "unequal or not ended: 0\n" in done.stdout
    assert "newest checkpoint unreadable: 0, failed to continue: 0\n" in done.stdout


def test_the_other_processes_are_ended_soon_after_one_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending() -> None:
        if os.environ["RANK"] == "1":
            subprocess.Popen(["sleep", "5"], close_fds=False)  # it keeps the files of rank 1 open, as a loader's worker does
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    monkeypatch.setattr(launching, "GRACE_S", 0.5)
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
