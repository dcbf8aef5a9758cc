"""Replica groups by torchft: groups are killed and started again by torchrun, and the others go on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'cadenza[torchft]'")

from cadenza import Callback, Run, on
from cadenza.errors import DistributedError
from cadenza.parallel import ReplicaGroups
from cadenza.testing import tiny_run, tiny_trainer
from tests.parallel import replicas
from tests.parallel.replicas import SAMPLES, Job, job, resumed_alone

NAMES = ("group0", "group1", "group2")


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with replicas.lighthouse() as address:
        yield address


def check(one: Job, kills: dict[str, int]) -> dict[str, Any]:
    """End a job in which each group was killed so many times, compare its groups, and return what the first one recorded."""
    first, *others = one.finish()
    for end in others:
        assert (end["ended"], end["epoch"]) == (first["ended"], first["epoch"])
        assert end["weights"] == first["weights"]
    for name in one.groups:
        rows = one.rows(name)
        assert sum("began" in row for row in rows) == 1 + kills.get(name, 0)  # no other group was started again
        assert one.lost(name) <= sum(kills.values())
    applied, computed = one.uses()
    assert {applied[epoch, sample] for epoch in range(first["epoch"]) for sample in range(SAMPLES)} == {1}
    assert max(computed.values()) <= 1 + sum(kills.values())  # once more for each lost step
    return first


def test_a_killed_group_comes_back_with_the_state_of_the_others_which_go_on(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        one.begin(*NAMES)
        one.until_all_train()
        one.kill_inside_a_step("group1")
        one.until_all_train()
        end = check(one, {"group1": 1})
        assert one.lost("group0") == one.lost("group2") == 1  # the step in which it was killed
        evaluated = [[row["evaluated"] for row in one.rows(name) if "evaluated" in row] for name in NAMES]
        assert evaluated[0][-1] == evaluated[1][-1] == evaluated[2][-1]
    assert resumed_alone(tmp_path) == end["weights"]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_twenty_kills_at_random_cost_the_others_a_step_each_at_most(tmp_path: Path, ranks: int) -> None:
    kills, chance = dict.fromkeys(NAMES, 0), random.Random(ranks)
    with job(tmp_path) as one:
        one.begin(*NAMES, ranks=ranks, accumulate=ranks)
        for _ in range(20):
            one.until_all_train()
            time.sleep(chance.random())  # it is killed at any point of a step
            victim = chance.choice(NAMES)
            kills[victim] += 1
            one.kill(victim)
        one.until_all_train()
        check(one, kills)


def test_a_job_resumes_from_the_checkpoint_of_one_group_on_another_number_of_groups(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        one.begin(*NAMES)
        one.until_all_train()
        before = one.finish()[0]
    (tmp_path / "last epoch").unlink()
    with job(tmp_path) as one:
        one.begin("group0", "group1", epochs=before["epoch"] + 2)
        ends = [one.end_of(name) for name in one.groups]
        applied, _ = one.uses()
    assert [end["epoch"] for end in ends] == [before["epoch"] + 2] * 2
    assert ends[0]["weights"] == ends[1]["weights"] != before["weights"]
    assert ends[1]["caught"][0] >= before["ended"]
    assert {applied[epoch, sample] for epoch in range(ends[0]["epoch"]) for sample in range(SAMPLES)} == {1}


def test_one_group_alone_trains_as_a_run_without_groups(lighthouse: str) -> None:
    plain = tiny_run(seed=1, batches=5, epochs=2, device="cpu")
    run = tiny_run(seed=1, batches=5, epochs=2, device="cpu", callbacks=[ReplicaGroups(lighthouse=lighthouse)])
    assert run.progress.now() == plain.progress.now()
    assert all(map(torch.equal, run.model.parameters(), plain.model.parameters()))


@pytest.mark.parametrize("lost", [1, 3], ids=["the first", "the last and shorter one of the epoch"])
def test_a_lost_step_updates_nothing_and_its_batches_are_read_again(lighthouse: str, lost: int) -> None:
    groups, read = ReplicaGroups(lighthouse=lighthouse), list[tuple[int, float]]()

    @on(Callback.on_batch_start)
    def note(run: Run, batch: Any) -> None:
        read.append((run.progress.step + 1, float(batch[0].sum())))

    @on(Callback.on_after_backward)
    def fail(run: Run, outputs: Any) -> None:
        if run.progress.step + 1 == lost:
            groups._manager.report_error(RuntimeError("on purpose"))

    run = tiny_run(batches=5, accumulate=2, seed=1, device="cpu", callbacks=[groups, note, fail])
    plain = tiny_run(batches=5, accumulate=2, seed=1, device="cpu")
    assert [decision.why for decision in run.decisions if decision.what == "step lost"] == ["on purpose"]
    assert (run.progress.epoch, run.progress.step, plain.progress.step) == (1, 4, 3)
    again = [batch for step, batch in read if step == lost]
    assert again == [batch for step, batch in read if step == lost + 1]
    assert all(map(torch.equal, run.model.parameters(), plain.model.parameters()))


def test_fewer_groups_than_needed_are_an_error_that_says_what_to_do(lighthouse: str) -> None:
    trainer = tiny_trainer(callbacks=[ReplicaGroups(2, lighthouse=lighthouse, quorum_timeout_s=1)])
    with pytest.raises(DistributedError, match="no quorum of 2 replica groups within 1 s: there is 1"):
        trainer.fit()


def test_a_lighthouse_that_is_not_there_is_an_error_that_names_it() -> None:
    trainer = tiny_trainer(callbacks=[ReplicaGroups(lighthouse="http://127.0.0.1:1", timeout_s=1)])
    with pytest.raises(DistributedError, match=r"the lighthouse at .http://127\.0\.0\.1:1."):
        trainer.fit()


@pytest.mark.parametrize(
    ("named", "arguments"),
    [("max_tokens", {"max_tokens": 5, "tokens": len}), ("a step_fn", {"step_fn": lambda run, batch: 0, "compute_loss": None})],
)
def test_what_does_not_work_with_groups_is_refused(named: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"ReplicaGroups does not work with {named}"):
        tiny_trainer(callbacks=[ReplicaGroups(lighthouse="http://127.0.0.1:1")], **arguments).fit()


def test_without_the_address_of_a_lighthouse_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="TORCHFT_LIGHTHOUSE"):
        tiny_run(callbacks=[ReplicaGroups()])
