"""fastNLP's environment: the launch time, the rank, and functions of the main process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import all_rank_call_context, envs, get_global_rank, is_cur_env_distributed, rank_zero_call
from cadenza.compat.fastnlp.core.metrics import Accuracy
from cadenza.compat.fastnlp.envs import FASTNLP_GLOBAL_RANK, FASTNLP_LAUNCH_TIME, FASTNLP_NO_SYNC
from cadenza.compat.fastnlp.envs.utils import get_global_seed

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


def environment_after_import(**given: str) -> dict[str, str]:
    """Return the environment of a new process that imports the adapter."""
    code = "import os, cadenza.compat.fastnlp; print(*(f'{k}={v}' for k, v in os.environ.items() if 'FASTNLP' in k), sep='\\n')"
    clean = {name: value for name, value in os.environ.items() if "FASTNLP" not in name}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **given}, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_the_import_sets_the_rank_that_torchrun_gave_and_keeps_the_launch_time_of_the_parent() -> None:
    assert environment_after_import(FASTNLP_LAUNCH_TIME="earlier", **TORCHRUN) == {
        "FASTNLP_LAUNCH_TIME": "earlier",
        "FASTNLP_GLOBAL_RANK": "3",
        "FASTNLP_BACKEND_LAUNCH": "1",
        "FASTNLP_LOG_LEVEL": "AUTO",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d\d_\d\d_\d\d_\d{6}", os.environ[FASTNLP_LAUNCH_TIME])


def test_a_process_alone_is_rank_zero_of_no_distributed_environment() -> None:
    assert (get_global_rank(), is_cur_env_distributed()) == (0, False)


def test_a_function_of_rank_zero_runs_on_the_main_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    @rank_zero_call
    def rank_of(text: str) -> str:
        """Return the rank with a text."""
        return f"{text} {get_global_rank()} {os.environ[FASTNLP_NO_SYNC]}"

    assert (rank_of("rank"), rank_of.__name__, FASTNLP_NO_SYNC in os.environ) == ("rank 0 2", "rank_of", False)
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "1")
    assert rank_of("rank") is None
    with all_rank_call_context():
        assert rank_of("rank") == "rank 0 2"
    assert (get_global_rank(), is_cur_env_distributed()) == (1, True)


def test_the_environment_is_restored_after_an_error() -> None:
    @rank_zero_call
    def failing() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        failing()
    assert FASTNLP_NO_SYNC not in os.environ


def test_the_main_process_removes_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "1")
    envs.rank_zero_rm(tmp_path / "file")
    assert (tmp_path / "file").exists()
    monkeypatch.setenv(FASTNLP_GLOBAL_RANK, "0")
    for name in ("file", "folder", "missing"):
        envs.rank_zero_rm(str(tmp_path / name))
    envs.rank_zero_rm(None)
    assert list(tmp_path.iterdir()) == []


def test_the_seed_of_all_processes_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTNLP_GLOBAL_SEED", "7")
    assert get_global_seed() == 7
    monkeypatch.delenv("FASTNLP_GLOBAL_SEED")
    assert get_global_seed() == get_global_seed() < 1_000_000


def test_the_names_are_those_of_the_package() -> None:
    for name in ("rank_zero_call", "logger", "print", "seq_len_to_mask", "cache_results", "Accuracy", "get_gpu_count"):
        assert hasattr(fastnlp, name)
    assert fastnlp.Accuracy is Accuracy
