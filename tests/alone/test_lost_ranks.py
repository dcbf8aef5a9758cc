"""A rank that is killed, hangs or is slow is named on all ranks; and torchrun starts again what was killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable as Function
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Profile
from cadenza.checkpoint.store import Store
from cadenza.checkpoint.store.files import Facts, LocalFiles
from cadenza.drivers import DdpDriver, first_error
from cadenza.errors import DistributedError
from cadenza.hooks.moments import Moment
from cadenza.loading.evaluation import Evaluation
from cadenza.report import page, story_at
from cadenza.testing import launch, launcher
from tests.checkpoint.store.contents import latest
from tests.distributed.drivers import sharded
from tests.distributed.parts import Batch, Partly, loader, own_rank, rank, squared_error, trainer
from tests.distributed.test_restarts import torchrun, training, undisturbed
from tests.distributed.test_shards import fit, saving, store_in
from tests.ports import free_port
from tests.waiting import until


def kill(given_up: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pause(given_up: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_on(given_up: Path) -> None:
    while not given_up.exists():
        pass


HANGS: dict[Function[[Path], None], str] = {
    kill: r"^rank 0 ends because another process ended\. rank 1 ended without an error message \(killed, or crashed\); "
    r"last seen at step 1 in `hang\.on_step_end` \(test_lost_ranks\.py:\d+\), \d\.\d s ago$",
    pause: r"rank 1 did not reach step 2 within 1 s; last seen at step 1 in `hang\..*, \d\.\d s ago, "
    "and it posts no more: paused, or killed",
    loop_on: r"rank 1 did not reach step 2 within 1 s; last seen at step 1 in `hang\.on_step_end` \(test_lost_ranks\.py:\d+\)",
}


@pytest.fixture(autouse=True)
def frequent_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_error, "EVERY_S", 0.1)


@pytest.mark.parametrize("stop", [kill, loop_on, pytest.param(pause, marks=pytest.mark.long)])
def test_the_rank_that_stops_is_named(stop: Function[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given_up = tmp_path / "given up"

    def train() -> None:
        @on(Callback.on_step_end, at=1)
        def hang(run: Run) -> None:
            if rank() == 1:
                time.sleep(0.3)  # until its next post
                stop(given_up)

        try:
            trainer(callbacks=[hang], driver=DdpDriver("cpu", timeout_s=1)).fit()
        finally:
            given_up.touch()

    monkeypatch.setattr(launcher, "GRACE_S", 0.1 if stop is pause else 20)
    with pytest.raises(BaseExceptionGroup) as caught:
        launch(train)
    told = [error for error in caught.value.exceptions if isinstance(error, DistributedError)]
    assert len(told) == (2 if stop is loop_on else 1)
    for error in told:
        assert re.search(HANGS[stop], str(error)), error
        stacks = [note for note in error.__notes__ if note.startswith("rank 1 was here (most recent call last):")]
        assert len(stacks) == (stop is loop_on)
        assert all("test_lost_ranks.py" in stack and "in loop_on" in stack and "given_up.exists()" in stack for stack in stacks)


def test_ranks_that_wait_for_each_other_are_named_with_the_stack_of_each() -> None:
    def train() -> list[str]:
        driver = DdpDriver("cpu", timeout_s=3)
        own = dist.new_group(timeout=timedelta(seconds=60))

        @on(Callback.on_step_end, at=2)
        def hang(run: Run) -> None:
            if rank() == 1:
                dist.barrier(own)

        with pytest.raises(DistributedError, match="the ranks wait for each other at different calls") as caught:
            trainer(callbacks=[hang], driver=driver).fit()
        return caught.value.__notes__

    for notes in launch(train):
        assert "rank 0 was here" in "".join(notes)
        assert "dist.barrier(own)" in "".join(notes)


def test_the_start_may_take_longer_than_a_step_in_each_run(tmp_path: Path) -> None:
    given_up = tmp_path / "given up"
    driver = partial(DdpDriver, "cpu", timeout_s={"start": 60, "step": 0.5})

    def train() -> list[str]:
        @on(Callback.on_fit_start)
        def slow(run: Run) -> None:
            if rank() == 1:
                time.sleep(1)  # longer than a step may take

        @on(Callback.on_step_end, at=2)
        def hang(run: Run) -> None:
            if rank() == 1:
                until(given_up.exists)

        kinds = list[str]()
        for _ in range(2):
            outcome = trainer(callbacks=[slow], driver=driver(), max_steps=3).fit().outcome
            kinds.append("" if outcome is None else outcome.kind)
        with pytest.raises(DistributedError) as caught:
            trainer(callbacks=[slow, hang], driver=driver()).fit()
        given_up.touch()
        return [*kinds, str(caught.value)]

    for *kinds, told in launch(train):
        assert kinds == ["finished", "finished"]
        assert "rank 1 did not reach step 3 within 0.5 s" in told


@pytest.mark.parametrize("act", ["evaluate", "predict"])
@pytest.mark.parametrize("fits", [True, False])
def test_the_start_of_an_evaluation_ends_with_its_first_batch(act: str, fits: bool, tmp_path: Path) -> None:
    given_up = tmp_path / "given up"
    driver = partial(DdpDriver, "cpu", timeout_s={"start": 60, "step": 0.5})

    def work() -> str:
        @on(Callback.on_eval_start)
        def slow(run: Run, evaluation: Evaluation) -> None:
            if rank() == 1:
                time.sleep(1)  # longer than a step may take

        @on(Callback.on_eval_batch_end)
        def hang(run: Run, evaluation: Evaluation, *_: Any) -> None:
            if rank() == 1 and evaluation.batch == 2:
                until(given_up.exists)

        one = trainer(callbacks=[slow, hang], driver=driver(), max_steps=3)
        if fits:
            one.fit()
        try:
            with pytest.raises(DistributedError) as caught:
                getattr(one, act)(loader(32), compute=lambda model, batch: {"predictions": model(batch[0])})
        finally:
            given_up.touch()
        return str(caught.value)

    for told in launch(work):
        assert "within 0.5 s" in told


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"step": 0}, "timeout_s['step'] must be greater than 0 seconds; got 0"),
        ({"stop": 3}, "timeout_s has limits for start, step, save; got 'stop'"),
        (0, "timeout_s must be greater than 0 seconds; got 0"),
    ],
)
def test_a_wrong_time_limit_is_named(limits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DdpDriver("cpu", timeout_s=limits)


def test_a_rank_that_waits_for_its_data_is_named_with_the_line_of_the_data_set(tmp_path: Path) -> None:
    given_up = tmp_path / "given up"

    class Slow:
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(loader()):
                while number == 3 and rank() == 1 and not given_up.exists():
                    time.sleep(0.01)
                yield batch

    def train() -> str:
        with pytest.raises(DistributedError) as caught:
            trainer(Slow(), driver=DdpDriver("cpu", timeout_s=1)).fit()
        given_up.touch()
        return str(caught.value)

    for text in launch(train):
        assert "rank 1 did not reach step 2 within 1 s; last seen at step 1 in the training loader (test_lost_ranks.py:" in text


@pytest.mark.parametrize("alone", ["fit", "evaluate"])
def test_a_rank_that_does_not_come_to_the_start_of_a_run_or_to_an_evaluation_is_named(alone: str, tmp_path: Path) -> None:
    def call() -> str:
        one = trainer(driver=DdpDriver("cpu", timeout_s=1), max_epochs=1)
        if alone == "evaluate":
            one.fit()
        if rank() == 1:
            until((tmp_path / "given up").exists)
            return ""
        with pytest.raises(DistributedError) as caught:
            one.fit() if alone == "fit" else one.evaluate(loader())
        (tmp_path / "given up").touch()
        return str(caught.value)

    where = {"fit": "at the start of a run", "evaluate": "in evaluate"}[alone]
    said, _ = launch(call)
    assert said.startswith(
        f"rank 0 waited 1 s {where}, and rank 1 did not come. Every rank must call Trainer, fit, evaluate and"
    )


def test_a_rank_that_waits_too_long_says_so_also_after_a_run_that_failed_for_an_unused_parameter(tmp_path: Path) -> None:
    given_up = tmp_path / "given up"

    def failing() -> list[str]:
        @on(Callback.on_step_end, at=1)
        def late(run: Run) -> None:
            if run.is_main:
                until(given_up.exists)

        with pytest.raises(RuntimeError, match="finished reduction in the prior iteration") as unused:
            trainer(model=Partly(), driver=DdpDriver(timeout_s=1)).fit()  # the limit of the process group, so of both runs
        with pytest.raises((RuntimeError, DistributedError)) as waited:
            trainer(callbacks=[late], driver=DdpDriver(timeout_s=1)).fit()
        given_up.touch()
        return [*unused.value.__notes__, str(waited.value)]

    notes = launch(failing)
    assert all("pass driver=DdpDriver(find_unused_parameters=True)" in own[0] for own in notes)
    assert "rank 1 waited too long for another process. rank 0 did not reach step 2 within 1 s; last seen at" in notes[1][-1]


def test_a_rank_that_is_killed_or_exits_is_told_with_its_signal_or_exit_code() -> None:
    def ending() -> None:
        os.kill(os.getpid(), signal.SIGKILL) if rank() == 0 else os._exit(3)

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(ending)
    assert {str(error) for error in caught.value.exceptions} == {
        "rank 0 ended without a result: signal SIGKILL", "rank 1 ended without a result: exit code 3",
    }  # fmt: skip


def test_a_rank_that_is_killed_while_it_writes_leaves_no_checkpoint_and_the_older_one_is_continued(tmp_path: Path) -> None:
    expected, *_ = launch(lambda: fit(tmp_path / "whole", 7)[0])

    def killed() -> None:
        driver, write = sharded(), LocalFiles.write_tensors

        def die(self: LocalFiles, path: str, *arguments: Any, **named: Any) -> Facts:
            facts = write(self, path, *arguments, **named)
            if driver.rank == 1 and "step-00000006" in path and "state" in path:
                os.kill(os.getpid(), signal.SIGKILL)
            return facts

        setattr(LocalFiles, "write_tensors", die)  # noqa: B010  # in this process only
        saving(tmp_path / "cut", 7, driver).fit()

    with pytest.raises(BaseExceptionGroup):
        launch(killed)
    store = store_in(tmp_path / "cut")
    assert [saved.name for saved in store.saved()] == ["step-00000003"]
    assert latest(store)[0] is not None
    again, *_ = launch(lambda: fit(tmp_path / "cut", 7, resume=True)[0])
    assert torch.equal(again, expected)
    assert not [path for path in (tmp_path / "cut/checkpoints").iterdir() if path.name.startswith(".t")]


@pytest.mark.parametrize("which", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize(("step", "background"), [(2, True), (2, False), (3, True)])  # the last save is that of step 3
def test_a_rank_that_is_killed_in_a_save_is_named_by_those_that_wait_for_its_part(
    step: int, background: bool, which: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(first_error, "EVERY_S", 0.25)

    def trained(folder: Path) -> dict[str, Tensor]:
        saves = Checkpoint(f"{1 if step < 3 else 2} steps", background=background)
        one = trainer(callbacks=[saves], driver=DdpDriver("cpu", timeout_s=600), max_epochs=1, directory=folder)
        return dict(one.fit(resume="auto").model.state_dict())

    def killed() -> None:
        write = LocalFiles.write_tensors

        def die(self: LocalFiles, path: str, *arguments: Any, **named: Any) -> Facts:
            if own_rank() == which and f"step-{step:08d}" in path:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, path, *arguments, **named)

        setattr(LocalFiles, "write_tensors", die)  # noqa: B010  # in this process only
        trained(tmp_path / "cut")

    began = time.monotonic()
    with pytest.raises(BaseExceptionGroup) as caught:
        launch(killed)
    assert time.monotonic() - began < 30
    (told,) = [str(error) for error in caught.value.exceptions if isinstance(error, DistributedError)]
    assert f"rank {which} ended without an error message (killed, or crashed); last seen at step" in told
    older = Store(tmp_path / "cut/checkpoints", "")
    assert latest(older)[0] is not None
    assert next(saved.step for saved in older.saved()) == (1 if step == 2 else 2)
    again, expected = launch(lambda: trained(tmp_path / "cut")), launch(lambda: trained(tmp_path / "whole"))
    for one, other in zip(again, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_the_slowest_rank_of_each_part_is_in_the_profile_and_in_the_report(tmp_path: Path) -> None:
    def slow_forward(model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(0.05 * own_rank())
        return squared_error(model, batch)

    @on(Callback.on_step_end)
    def slow_hook(run: Run) -> None:
        time.sleep(0.05 * (1 - own_rank()))
        run.driver.barrier()

    def fit() -> tuple[dict[str, int], str, bool]:
        one = trainer(compute_loss=slow_forward, callbacks=[Profile(), slow_hook], directory=tmp_path)
        profile = one.fit().profile
        assert profile is not None
        shown = {one.part: one.slowest for one in profile.ranks}
        return shown, str(profile), "reduce" in vars(one.driver)

    main, other = launch(fit)
    assert set(main[0]) == {"data", "forward", "backward", "callbacks", "waiting"}
    assert (main[0]["forward"], main[0]["callbacks"]) == (1, 0)
    assert "slowest rank by part:" in main[1]
    assert "waiting for ranks" in main[1]
    assert other[0] == {}
    assert not main[2]
    written = json.loads((tmp_path / "profile.json").read_text())["ranks"]
    assert [one["slowest"] for one in written if one["part"] == "forward"] == [1]
    assert "by rank" in page([story_at(tmp_path)])


# -- torchrun: what it starts again continues by itself, and its signals reach all ranks ---------------


def kill_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("at", "step", "victim"),
    [
        pytest.param(Callback.on_before_backward, 4, 1, id="another killed in a step"),
        pytest.param(Callback.on_before_backward, 4, 0, id="the main process killed in a step", marks=pytest.mark.long),
        pytest.param(Callback.on_save, 4, 0, id="killed in a save", marks=pytest.mark.long),
        pytest.param(Callback.on_batch_start, 0, 0, id="killed before the first checkpoint", marks=pytest.mark.long),
    ],
)
def test_what_is_started_again_ends_with_the_same_bits(at: Moment, step: int, victim: int, tmp_path: Path) -> None:
    train = training(tmp_path, at, step, victim, kill_rank)
    (ranks,) = launch(lambda: torchrun(train, tmp_path / "logs", restarts=1), 1)
    assert (tmp_path / "failed").exists()
    for weights, resumed, _ in ranks.values():
        assert torch.equal(weights, undisturbed())
        assert len(resumed) == (step > 0)


def test_sigterm_to_torchrun_ends_all_with_a_checkpoint_and_the_next_start_goes_on(tmp_path: Path) -> None:
    def terminate() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)  # until torchrun has handed it on

    train = training(tmp_path, Callback.on_step_end, 4, 1, terminate)
    with pytest.raises(BaseExceptionGroup, match="1 of 1 ranks failed"):
        launch(lambda: torchrun(train, tmp_path / "logs", restarts=0), 1)
    outcome = json.loads((tmp_path / "run" / "run.json").read_text())["outcome"]
    assert outcome == {"kind": "preempted", "reason": "signal SIGTERM"}
    (ranks,) = launch(lambda: torchrun(train, tmp_path / "logs", restarts=0), 1)
    for weights, resumed, _ in ranks.values():
        assert torch.equal(weights, undisturbed())
        assert len(resumed) == 1


@pytest.mark.long
def test_two_machines_write_once_and_start_again_together_though_they_count_apart(tmp_path: Path) -> None:
    train, port = training(tmp_path, Callback.on_before_backward, 4, 1, kill_rank), free_port()
    machines = launch(lambda: torchrun(train, tmp_path / "logs", restarts=3, nodes=2, port=port), 2)
    ranks = [result for machine in machines for result in machine.values()]
    assert sorted(place for *_, place in ranks) == [["0", "0", "2"], ["1", "0", "2"]]  # both are the first on their machine
    for weights, resumed, _ in ranks:
        assert torch.equal(weights, undisturbed())
        assert len(resumed) == 1
    steps = [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert steps == ["step-00000007", "step-00000008"]


@pytest.mark.long
def test_a_machine_that_is_lost_for_good_is_left_out_and_the_rest_of_the_epoch_is_trained_without_it(tmp_path: Path) -> None:
    lost = tmp_path / "lost"

    def train() -> list[int]:
        if os.environ["WORLD_SIZE"] == "1":  # too early if the other machine is slow: as it comes, both start again
            until(lost.exists)

        @on(Callback.on_step_end, at=4)
        def lose(run: Run) -> None:
            if os.environ["MACHINE"] == "1":
                until((tmp_path / "run" / "checkpoints" / "step-00000003").exists)  # written in the background
                lost.touch()
                os.kill(os.getppid(), signal.SIGKILL)  # torchrun of this machine
                kill_rank()

        run = trainer(
            loader(48),
            max_epochs=1,
            directory=tmp_path / "run",
            driver="auto",
            device="cpu",
            callbacks=[Checkpoint("1 step"), lose],
        ).fit(resume="auto")
        return [run.driver.world_size, run.progress.origin.samples, run.progress.samples]

    def machine() -> Any:
        number = os.environ["MACHINE"] = os.environ["RANK"]
        if number == "0":  # it serves the rendezvous
            return torchrun(train, tmp_path / "logs", restarts=3, nodes=2, fewest=1, port=port)
        until(partial(is_open, port))
        options = {"restarts": 3, "nodes": 2, "fewest": 1, "port": port}
        agent = multiprocessing.get_context("fork").Process(target=torchrun, args=(train, tmp_path / "logs"), kwargs=options)
        agent.start()
        agent.join(200)
        return agent.exitcode

    port = free_port()
    assert launch(machine) == [{0: [1, 24, 48]}, -signal.SIGKILL]


def is_open(port: int) -> bool:
    """Return whether a process of this machine accepts connections at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
