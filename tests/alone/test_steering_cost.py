"""What questions cost: the time of ``cadenza ask`` on a million records, beside the start of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

from cadenza.callbacks import LogTraining
from cadenza.testing import tiny_run

RECORDS = 1_000_000
SCRIPT = "import sys; from cadenza.commands.main import main; sys.exit(main(sys.argv[1:]))"  # as the installed command


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with a million records, 180 MB."""
    path = tmp_path_factory.mktemp("large") / "run"
    tiny_run(directory=path, callbacks=[LogTraining("1 step")])
    with (path / "metrics.jsonl").open("w") as file:
        for thousand in range(0, RECORDS, 1000):
            for step in range(thousand + 1, thousand + 1001):
                at = f'{{"epoch": 0, "step": {step}, "batch": {step}, "samples": {2 * step}, "time": {1.7e9 + step / 100:.3f}'
                file.write(f'{at}, "train/loss": {1 / step}, "train/lr": 0.1, "train/samples_per_s": 215.9961103745354}}\n')
    return path


def cpu_s(arguments: Sequence[str], times: int = 12) -> float:
    """Return the least processor time of a process."""
    return min(used_by([sys.executable, *arguments]) for _ in range(times))


def used_by(command: Sequence[str]) -> float:
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.long
@pytest.mark.parametrize("question", ["status", "metric train/loss", "why stopped", "health"])
def test_a_question_to_a_million_records_takes_at_most_50_ms_more_than_pythons_start(question: str, large: Path) -> None:
    """A start takes 8 ms of an idle processor; next to other work both take longer alike."""
    asked = cpu_s(["-c", SCRIPT, "ask", str(large), *question.split(), "--json"])
    started = cpu_s(["-c", "pass"])
    assert asked - started < 0.05 * max(1.0, started / 0.008), f"{asked:.3f} s, of which {started:.3f} s for Python"


def test_the_answer_is_that_of_the_last_record(large: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, "ask", str(large), "metric", "train/loss", "--last", "2", "--json"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert json.loads(done.stdout)["answer"]["steps"] == [RECORDS - 1, RECORDS]
