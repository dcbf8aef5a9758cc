"""The listings of NeMo 0.11's guide, run as scripts on scikit-learn's digits: only imports and dots are changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM, TrainableNM
from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core.callbacks import TensorboardLogger
from tests.compat.nemo.graphs import numbers, written
from tests.compat.nemo.scripts import missing_lines, run_listing, sent, spoken_digits

LISTINGS = Path(__file__).parent / "listings"


@pytest.mark.parametrize(("block", "script"), [(1, "loggers"), (2, "confusion"), (3, "step_time")])
def test_the_scripts_are_the_document_s_listings(block: int, script: str) -> None:
    assert missing_lines("001", block, LISTINGS / f"{script}.py") == []


def test_the_built_in_callbacks_print_write_and_send_the_chosen_tensors(tmp_path: Path) -> None:
    shown = run_listing(LISTINGS / "loggers.py", tmp_path).splitlines()
    losses = [float(text.rpartition(" ")[2]) for text in shown if "] loss: " in text]
    assert len(losses) == -(-8 * 29 // 10)
    assert losses[-1] < 0.5 < 2 < losses[0]
    ends = [(name, 29 * epoch) for epoch in range(1, 9) for name in ("misc/epoch", "misc/epoch_time")]
    logged = [(name, step) for step in (0, 100, 200) for name in ("loss", "p", "param/lr")]
    assert sorted(written(tmp_path / "work" / "tensorboard")) == sorted(ends + logged)
    assert numbers(tmp_path / "work" / "tensorboard", "p")[-1] > 0.8
    offline = sent(tmp_path)
    assert (offline.run.display_name, offline.run.project) == ("my_exp", "my_proj")
    unique = shown[-1].removeprefix("unique name of recall: ")
    rows = [row for row in offline.rows if "LR" in row]
    assert [row["_step"] for row in rows] == [0, 100, 200]
    assert rows[0].keys() >= {"loss", "F1", unique, "LR"}
    assert rows[0]["loss"] == pytest.approx(losses[0])
    assert rows[-1]["F1"] > rows[0]["F1"]
    assert [row["epoch"] for row in offline.rows if "epoch" in row] == list(range(8))


def test_the_decorated_function_prints_a_confusion_matrix_every_150_steps(tmp_path: Path) -> None:
    text = run_listing(LISTINGS / "confusion.py", tmp_path)
    rows = [line.rpartition("[")[2].strip(" ]").split() for line in text.splitlines()]
    matrices = torch.tensor([[int(value) for value in row] for row in rows]).view(2, 10, 10)
    assert matrices.sum((1, 2)).tolist() == [64, 64]
    right = matrices.diagonal(dim1=1, dim2=2).sum(1)
    assert right[1] > 50 > right[0]


def test_the_class_measures_the_mean_time_of_a_step(tmp_path: Path) -> None:
    shown = run_listing(LISTINGS / "step_time.py", tmp_path)
    assert float(shown.splitlines()[-1].removeprefix("mean step time ")) > 0


def test_a_custom_function_writes_sounds_to_tensorboard(tmp_path: Path) -> None:
    """The guide refers to the documentation for this."""
    import wave

    paths = sorted(spoken_digits().glob("*.wav"))[:6]
    sounds = []
    for path in paths:
        with wave.open(str(path)) as file:
            sounds.append(torch.frombuffer(bytearray(file.readframes(2000)), dtype=torch.int16) / 2**15)
    waves = torch.stack([nn.functional.pad(sound, (0, 2000 - len(sound))) for sound in sounds])
    factory = NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)
    sound, digit = DataLayerNM.of([(waves, torch.zeros(6, dtype=torch.long))], ["sound", "digit"])()
    scores = TrainableNM.of(nn.Linear(2000, 10), ["sound"], ["scores"])(sound=sound)
    loss = LossNM.of(nn.functional.cross_entropy, ["scores", "digit"])(scores=scores, digit=digit)

    def write(values: list[Tensor], writer: object, step: int) -> None:
        writer.add_scalar("loss", values[0], step)  # type: ignore[attr-defined]  # a SummaryWriter
        writer.add_audio("sound", values[1][step], step, sample_rate=8000)  # type: ignore[attr-defined]
        writer.add_image("scores", values[2].softmax(1).unsqueeze(0), step)  # type: ignore[attr-defined]

    logger = TensorboardLogger(factory.tb_writer, 2, ["loss", sound, scores], custom_tb_log_func=write)
    factory.train([loss], "sgd", {"lr": 0.1, "max_steps": 6}, [logger])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    sounds = events.Audio("sound")
    assert [(one.step, one.length_frames, one.sample_rate) for one in sounds] == [(step, 2000, 8000) for step in (0, 2, 4)]
    for one in sounds:
        samples = torch.frombuffer(bytearray(one.encoded_audio_string[44:]), dtype=torch.int16) / 2**15
        torch.testing.assert_close(samples, waves[one.step], atol=2e-4, rtol=0)
    assert [(one.step, one.height, one.width) for one in events.Images("scores")] == [(step, 6, 10) for step in (0, 2, 4)]
