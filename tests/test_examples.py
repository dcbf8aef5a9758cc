"""The examples: on small data made here, and a few batches of the real ones where they are.

One is run as a user runs it. The others are run in a fork that has imported torch, with the same arguments.
"""

from __future__ import annotations

import gzip
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import forked

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"


def run_example(name: str, *arguments: str | Path, scratch: Path) -> str:
    """Run an example in a process of its own; return what it showed."""
    given = {"HF_HOME": str(scratch / "huggingface"), "OMP_NUM_THREADS": "1"}
    return forked.run(ROOT / "examples" / f"{name}.py", *arguments, folder=scratch, **given)


def number_after(words: str, shown: str) -> float:
    found = re.search(rf"{words} ([\d.]+)", shown)
    assert found is not None, shown
    return float(found[1])


def outcome_in(directory: Path) -> str:
    return str(json.loads((directory / "run.json").read_text())["outcome"]["kind"])


def write_idx(file: Path, values: torch.Tensor) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    file.write_bytes(gzip.compress(header + values.numpy().tobytes()))


def test_fashion_mnist_learns_from_idx_files(tmp_path: Path) -> None:
    # Each class is a bright bar in a row of its own.
    for part, count in (("train", 384), ("t10k", 100)):
        labels = (torch.arange(count) % 10).to(torch.uint8)
        images = torch.randint(0, 40, (count, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
        images[torch.arange(count), 2 * labels.long() + 2] = 250
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    command: list[str | Path] = [sys.executable, "-W", "error", ROOT / "examples" / "fashion_mnist.py", "--data", tmp_path]
    done = subprocess.run([*command, "--directory", tmp_path / "run"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert number_after("test accuracy", done.stdout) >= 0.9
    assert outcome_in(tmp_path / "run") == "finished"


def test_sst2_learns_from_tsv_files(tmp_path: Path) -> None:
    kind, unkind = "a fine and touching film", 'a "dull , dull film'  # a lone quote is part of the text
    rows = [f"{label}\t{' '.join([text] * (1 + row % 3))}" for row in range(100) for label, text in ((1, kind), (0, unkind))]
    (tmp_path / "train.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
    (tmp_path / "dev.tsv").write_text("\n".join(["label\tcontent", *rows[:40]]) + "\n")
    shown = run_example("sst2", "--data", tmp_path, "--directory", tmp_path / "run", scratch=tmp_path)
    assert number_after("dev accuracy", shown) >= 0.9
    assert outcome_in(tmp_path / "run") in ("finished", "stopped")


def test_shakespeare_learns_from_a_text_and_writes(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 1500)
    shown = run_example("shakespeare", "--data", text, "--epochs", "1", "--directory", tmp_path / "run", scratch=tmp_path)
    assert number_after("validation loss", shown) < 2.0  # knowing only how often each letter comes gives 2.6
    assert outcome_in(tmp_path / "run") == "finished"
    sample = shown[shown.index("the limit is reached") : shown.index("validation loss")].splitlines()[1:]
    assert len("\n".join(sample)) == 400


def test_gan_digits_updates_both_networks_and_logs_its_pictures(tmp_path: Path) -> None:
    run_example("gan_digits", "--quick", "--epochs", "40", "--directory", tmp_path / "run", scratch=tmp_path)
    assert outcome_in(tmp_path / "run") == "finished"
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [image.step for image in events.Images("samples")] == [100, 200]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(record["train/discriminator"] > 0 and record["train/generator"] > 0 for record in records)
    assert len({record["train/generator"] for record in records}) == len(records) > 1


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        pytest.param("fashion_mnist", "fashion-mnist", marks=pytest.mark.long),  # the formats of both are tested above
        pytest.param("sst2", "sst2", marks=pytest.mark.long),
        ("shakespeare", "tinyshakespeare"),
    ],
)
def test_the_real_data_are_found_and_read(name: str, folder: str, tmp_path: Path) -> None:
    if not (DATA / folder).exists():
        pytest.skip(f"the data are not in {DATA / folder}")
    shown = run_example(name, "--quick", "--epochs", "1", scratch=tmp_path)
    assert "finished after 1 epoch" in shown
    assert list(tmp_path.iterdir()) == ([tmp_path / "huggingface"] if name == "sst2" else [])  # no directory, no files


@pytest.mark.parametrize("name", ["fashion_mnist", "sst2", "shakespeare"])
def test_missing_data_are_told_with_the_place_to_get_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    example = str(ROOT / "examples" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [example, "--data", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(example, run_name="__main__")
    said = str(ended.value)
    assert str(tmp_path / "nowhere") in said
    assert "github.com/" in said
    assert "--data" in said
    assert not recwarn.list
