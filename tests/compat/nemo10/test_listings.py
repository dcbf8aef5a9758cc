"""The listings of NeMo 0.10's guide, run as scripts on spoken digits: only imports, data paths and dots are changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.compat.nemo.graphs import names_in, numbers, written
from tests.compat.nemo.scripts import missing_lines, run_listing, sent, spoken_digits

LISTINGS = Path(__file__).parent / "listings"


def run(name: str, folder: Path) -> str:
    return run_listing(LISTINGS / f"{name}.py", folder, spoken_digits())


@pytest.mark.parametrize(
    ("block", "script", "changed"),
    [
        (0, "training_script", []),
        (1, "loss_logger", ["from nemo import logging"]),
        (2, "loss_logger", []),
        (3, "audio", []),
        (4, "loss_logger", [")"]),  # the extra bracket
        (5, "checkpoints", []),
    ],
)
def test_the_scripts_are_the_document_s_listings(block: int, script: str, changed: list[str]) -> None:
    assert missing_lines("000", block, LISTINGS / f"{script}.py") in (changed, [])


def test_the_training_script_logs_saves_and_evaluates(tmp_path: Path) -> None:
    shown = run("training_script", tmp_path)
    steps = 12 * 6
    evaluated = [*range(0, steps, 12), steps]
    assert [step for tag, step in written(tmp_path / "work" / "tensorboard") if tag == "accuracy"] == evaluated
    accuracy = numbers(tmp_path / "work" / "tensorboard", "accuracy")
    assert accuracy[-1] > 0.5 > accuracy[0]
    assert [float(text.rpartition(" ")[2]) for text in shown.splitlines() if "Accuracy" in text] == pytest.approx(accuracy)
    files = [f"{name}-EPOCH-{number}.pt" for name in ("Listener", "trainer") for number in (11, 12, 3, 7)]
    assert names_in(tmp_path / "work" / "checkpoints") == files
    offline = sent(tmp_path)
    assert (offline.run.display_name, offline.run.project) == ("spoken", "digits")
    assert [row["_step"] for row in offline.rows] == evaluated
    assert [row["accuracy"] for row in offline.rows] == pytest.approx(accuracy)


def test_the_loss_is_printed_and_written_every_500_steps(tmp_path: Path) -> None:
    shown = run("loss_logger", tmp_path)
    printed = [float(text.rpartition(" ")[2]) for text in shown.splitlines() if "] Loss " in text]
    assert numbers(tmp_path / "work" / "tensorboard", "Train_Loss") == pytest.approx(printed)
    assert printed[1] < printed[0]
    assert [step for tag, step in written(tmp_path / "work" / "tensorboard") if tag == "Train_Loss"] == [0, 500]


def test_the_sound_of_a_sample_is_written_to_tensorboard(tmp_path: Path) -> None:
    run("audio", tmp_path)
    events = EventAccumulator(str(tmp_path / "work" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("Train_Loss")] == [0, 2, 4]
    sounds = events.Audio("Train_Sample")
    assert [(one.step, one.length_frames) for one in sounds] == [(0, 4000), (2, 4000), (4, 4000)]
    loudest = [torch.frombuffer(bytearray(one.encoded_audio_string[44:]), dtype=torch.int16).abs().max() for one in sounds]
    assert min(loudest) > 300  # speech, not silence


def test_the_checkpoint_callback_saves_and_the_training_resumes(tmp_path: Path) -> None:
    shown = run("checkpoints", tmp_path)
    assert [text for text in shown.splitlines() if text.startswith("steps")] == ["steps 0 to 3", "steps 0 to 5", "steps 5 to 8"]
    files = [f"{name}-STEP-{number}.pt" for name in ("Listener", "trainer") for number in (2, 4, 5, 6, 8)]
    assert names_in(tmp_path / "work" / "checkpoints") == files
