"""Replica groups by torchft: groups are killed and started again by torchrun, and the others go on."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from cadenza.parallel.replica_groups import ReplicaGroups

pytest.importorskip("torchft", reason="torchft is not installed: pip install 'cadenza[torchft]'")

from tests.parallel.replicas import SAMPLES, Job, job

NAMES = ("group0", "group1", "group2")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUST_LOG", "error")


def check(one: Job, kills: dict[str, int]) -> None:
    """Check the end of a job in which each group was killed so many times."""
    ends = one.finish()
    first = ends[0]
    for end in ends[1:]:
        assert (end["ended"], end["epoch"]) == (first["ended"], first["epoch"])
        assert end["weights"] == first["weights"]
    for name in one.groups:
        rows = one.rows(name)
        assert sum("began" in row for row in rows) == 1 + kills[name]  # nobody else was started again
        lost = sum(row.get("updated") is False for row in rows)
        assert lost <= sum(kills.values())
    epochs = first["epoch"]
    applied, computed = one.uses()
    assert {applied[epoch, sample] for epoch in range(epochs) for sample in range(SAMPLES)} == {1}
    assert max(computed.values()) <= 1 + sum(kills.values())


def test_a_killed_group_comes_back_and_the_others_go_on(tmp_path: Path) -> None:
    with job(tmp_path) as one:
        one.begin(*NAMES)
        one.until_all_train()
        one.kill("group1")
        one.until_all_train()
        check(one, {"group0": 0, "group1": 1, "group2": 0})
