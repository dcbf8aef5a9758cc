"""A steered run is repeated to the same bits from its acts, also across kills and on two ranks."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import read_run
from cadenza.errors import DirectoryError
from cadenza.steering import Steering, tell
from cadenza.steering.acts import log_of
from tests.distributed.standing import on_ranks
from tests.distributed.standing import standing_ranks as standing_ranks
from tests.long import seeds
from tests.steering.parts import kill, steps_of, training, until_steps
from tests.steering.repeatable import digest_of, train
from tests.steering.test_ranks import steered

STEPS = 300
SCRIPT = """
import sys
from pathlib import Path
from tests.steering.repeatable import digest_of, train
run = train(Path(sys.argv[1]), int(sys.argv[2]))
Path(sys.argv[1], "digest").write_text(digest_of(run))
"""


def series(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return random acts, of which some are refused."""
    draw = random.Random(seed)
    rates, momenta, sizes = (0.02, 0.01, 0.003), (0.0, 0.5, 0.85), (1, 2, 3, 4)
    choices: list[tuple[str, dict[str, Any]]] = [
        ("set", {"lr": draw.choice(rates)}),
        ("set", {"momentum": draw.choice(momenta)}),
        ("set", {"weight_decay": 0.01}),
        ("set", {"accumulate": draw.choice(sizes)}),
        ("set", {"lr": -1}),
        ("set", {"nothing": 1}),
        ("evaluate", {}),
        ("save", {}),
        ("note", {"text": "x"}),
    ]
    acts = draw.choices(choices, k=5)
    if draw.random() < 0.3:
        acts += [("pause", {}), ("set", {"lr": 0.02}), ("resume", {})]
    if draw.random() < 0.3:
        acts.append(("stop", {}))
    return acts


def send(run: Path, acts: list[tuple[str, dict[str, Any]]], states: list[str]) -> None:
    """Send acts one after the other, as long as the run goes on."""
    for verb, arguments in acts:
        states.append(tell(run, verb, arguments, wait_s=60)["state"])


@pytest.mark.parametrize("seed", seeds(3, 20))
def test_a_series_of_acts_is_repeated_to_the_same_bits(seed: int, tmp_path: Path) -> None:
    acts, states = series(seed), list[str]()
    sender = threading.Thread(target=send, args=(tmp_path / "live", acts, states))
    live = train(tmp_path / "live", STEPS, pace_s=0.004, at_step=(5, sender.start))
    sender.join()
    assert set(states) <= {"done", "refused"}
    again = train(tmp_path / "again", STEPS, acts=tmp_path / "live")
    assert again.progress.step == live.progress.step
    assert again.history["train/loss"] == live.history["train/loss"]
    assert digest_of(again) == digest_of(live)
    assert [*taken(tmp_path / "again")] == [one for one in taken(tmp_path / "live") if one[1] not in ("pause", "resume")]
    third = train(tmp_path / "third", STEPS, acts=tmp_path / "again")  # the repeated run can be repeated
    assert digest_of(third) == digest_of(live)


def taken(run: Path) -> list[tuple[int, str]]:
    """Return the steps and the verbs of the acts of a run."""
    return [(row["step"], row["verb"]) for row in log_of(str(run)) if "verb" in row]


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_a_run_that_is_killed_around_its_acts_ends_as_its_repeat(seed: int, tmp_path: Path) -> None:
    draw, run, states = random.Random(seed), tmp_path / "live", list[str]()
    acts = [one for one in series(seed) if one[0] not in ("stop", "pause", "resume")]
    reached = 0
    for number in range(6):
        last = number == 5
        with training(SCRIPT, run, str(STEPS), PACE_S="0" if last else "0.01") as process:
            if last:
                assert process.wait(300) == 0, process.stderr and process.stderr.read()
                break
            until_steps(run, min(reached + draw.randint(1, 20), STEPS - 20), process)
            sender = threading.Thread(target=send_one, args=(run, acts[number % len(acts)], states))
            sender.start()
            process_seen = draw.random() * 0.4
            threading.Event().wait(process_seen)  # before it is taken, in the middle, or after
            kill(process)
            sender.join()
            reached = steps_of(run)
    again = train(tmp_path / "again", STEPS, acts=run)
    assert (run / "digest").read_text() == digest_of(again)
    ids = [row["id"] for row in log_of(str(run)) if "verb" in row]
    assert len(ids) == len({*ids})
    assert read_run(run).status()["state"] == "finished"


def send_one(run: Path, act: tuple[str, dict[str, Any]], states: list[str]) -> None:
    states.append(tell(run, *act, wait_s=0.5)["state"])


def test_two_ranks_repeat_a_run(tmp_path: Path) -> None:
    acts: list[tuple[str, dict[str, Any]]] = [
        ("set", {"lr": 0.01}), ("set", {"accumulate": 2}), ("evaluate", {}), ("set", {"momentum": 0.5}), ("stop", {}),
    ]  # fmt: skip
    live, _ = on_ranks(partial(steered, tmp_path / "live", acts))
    again, other = on_ranks(partial(steered, tmp_path / "again", [], repeats=tmp_path / "live"))
    assert again[:2] == live[:2] == other[:2]
    assert torch.equal(again[4], live[4])


def test_a_directory_without_acts_cannot_be_repeated(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    with pytest.raises(DirectoryError, match=r"holds no acts: expected a steering/log\.jsonl"):
        Steering(acts=tmp_path / "run")
