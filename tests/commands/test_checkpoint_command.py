"""``cadenza checkpoint``: what a person sees, on real checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza.callbacks import Checkpoint
from cadenza.commands.main import main
from cadenza.testing import tiny_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tiny_run(directory=tmp_path / "run", callbacks=[Checkpoint("2 steps", keep_last=None)], seed=1)
    return tmp_path / "run"


def test_list_shows_each_with_its_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "written", "MB", "state", "kept", "by", "reason"]
    assert [line.split()[0] for line in lines[1:]] == ["step-00000002", "step-00000004", "step-00000005"]
    assert lines[1].endswith("ok     all      every 2 steps")
    assert lines[-1].endswith("the end of the run")


def test_verify_tells_the_damaged_one_and_exits_with_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run / "checkpoints")]) == 0
    weights = run / "checkpoints" / "step-00000004" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert main(["checkpoint", "verify", str(run)]) == 1
    out, err = capsys.readouterr()
    assert "step-00000004  model.safetensors has changed since it was written" in out
    assert err == "cadenza: 1 of 3 checkpoints cannot be used\n"


def test_show_lists_the_tensors_of_the_newest_or_of_a_named_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "step             5" in shown
    assert "weight  (1, 1)  torch.float32" in shown
    assert main(["checkpoint", "show", str(run), "--name", "step-00000002"]) == 0
    assert "step             2" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(run), "--name", "step-9"]) == 1
    assert "there is no checkpoint 'step-9'; there is step-00000002, " in capsys.readouterr().err


def test_prune_keeps_the_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "prune", str(run), "--keep-last", "2"]) == 0
    assert capsys.readouterr().out == "deleted 1: step-00000002\n"
    assert sorted(path.name for path in (run / "checkpoints").glob("[ls]*")) == ["last", "step-00000004", "step-00000005"]


def test_a_place_without_checkpoints_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(tmp_path)]) == 1
    assert "there are no checkpoints in" in capsys.readouterr().err
