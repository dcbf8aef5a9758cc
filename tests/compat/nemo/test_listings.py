"""The listings of NeMo's guides, run as scripts: only imports, data paths and dots are changed.

Those of 0.11 train on scikit-learn's images of digits, those of 0.10 on spoken digits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.compat.nemo.graphs import OFFLINE, names_in, numbers, written
from tests.sinks.wandb_file import WandbFile

SHARED = Path(__file__).resolve().parents[4] / "shared"


IN_ONE_PROCESS = """
import os, runpy, sys
listings, folder, names, *sys.argv[1:] = sys.argv[1:]
sys.path[0] = listings
for name in names.split(","):
    print("-- listing", name, flush=True)
    os.makedirs(os.path.join(folder, name))
    os.chdir(os.path.join(folder, name))
    runpy.run_path(os.path.join(listings, name + ".py"), run_name="__main__")
    for shared in ("digits", "spoken"):  # each listing has a factory of its own
        sys.modules.pop(shared, None)
"""


def run_listings(listings: Path, names: list[str], folder: Path, *arguments: str | Path) -> dict[str, str]:
    """Run scripts in a new interpreter, each in the folder of its name; return what each of them printed."""
    # A W&B service that another test has started in this process would keep the script's run open.
    environment = {name: value for name, value in os.environ.items() if name not in ("WANDB_SERVICE", "WANDB_DIR")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_ONE_PROCESS, listings, folder, ",".join(names), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**environment, **OFFLINE, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    shown = (part.partition("\n") for part in done.stdout.split("-- listing ")[1:])
    return {name: text for name, _, text in shown}


def missing_lines(document: str, block: int, script: Path) -> list[str]:
    """Return the lines of a document's listing that a script lacks, except those with dots. Skip without the document."""
    files = list((SHARED / "seeds").glob(f"{document}_*.txt"))
    if not files:
        pytest.skip(f"the documents are not in {SHARED / 'seeds'}")
    _, *parts = files[0].read_text(encoding="utf-8").split(".. code-block:: python\n")
    indented = list(takewhile(lambda line: not line.strip() or line.startswith("    "), parts[block].splitlines()))
    wanted = [line[4:].rstrip() for line in indented if line.strip() and "..." not in line]
    there = {line.rstrip() for line in script.read_text(encoding="utf-8").splitlines()}
    return [line for line in wanted if line not in there]


def sent(folder: Path) -> WandbFile:
    """Return the content of the only offline run of Weights & Biases in a folder."""
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return WandbFile(file)


LISTINGS = Path(__file__).parent / "listings"
LISTINGS_OF_0_10 = Path(__file__).parents[1] / "nemo10" / "listings"

Ran = tuple[dict[str, str], Path]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run the listings of 0.11; return what each printed, and the folder of their folders."""
    folder = tmp_path_factory.mktemp("listings")
    return run_listings(LISTINGS, ["confusion", "step_time", "loggers"], folder), folder


@pytest.fixture(scope="module")
def ran_0_10(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("listings")
    names = ["loss_logger", "audio", "checkpoints", "training_script"]
    sounds = SHARED / "data" / "fsdd-mini"
    if not sounds.is_dir():
        pytest.skip(f"the data are not in {sounds}")
    return run_listings(LISTINGS_OF_0_10, names, folder, sounds), folder


@pytest.mark.parametrize(
    ("document", "block", "script", "changed"),
    [
        ("001", 1, LISTINGS / "loggers.py", []),
        ("001", 2, LISTINGS / "confusion.py", []),
        ("001", 3, LISTINGS / "step_time.py", []),
        ("000", 0, LISTINGS_OF_0_10 / "training_script.py", []),
        ("000", 1, LISTINGS_OF_0_10 / "loss_logger.py", ["from nemo import logging"]),
        ("000", 2, LISTINGS_OF_0_10 / "loss_logger.py", []),
        ("000", 3, LISTINGS_OF_0_10 / "audio.py", []),
        ("000", 4, LISTINGS_OF_0_10 / "loss_logger.py", [")"]),  # the extra bracket
        ("000", 5, LISTINGS_OF_0_10 / "checkpoints.py", []),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_the_scripts_are_the_document_s_listings(document: str, block: int, script: Path, changed: list[str]) -> None:
    assert missing_lines(document, block, script) in (changed, [])


# -- 0.11 ---------------------------------------------------------------------------------------------


def test_the_built_in_callbacks_print_write_and_send_the_chosen_tensors(ran: Ran) -> None:
    shown, folder = ran[0]["loggers"].splitlines(), ran[1] / "loggers"
    losses = [float(text.rpartition(" ")[2]) for text in shown if "] loss: " in text]
    assert len(losses) == -(-8 * 29 // 10)
    assert losses[-1] < 0.5 < 2 < losses[0]
    ends = [(name, 29 * epoch) for epoch in range(1, 9) for name in ("misc/epoch", "misc/epoch_time")]
    logged = [(name, step) for step in (0, 100, 200) for name in ("loss", "p", "param/lr")]
    assert sorted(written(folder / "work" / "tensorboard")) == sorted(ends + logged)
    assert numbers(folder / "work" / "tensorboard", "p")[-1] > 0.8
    offline = sent(folder)
    assert (offline.run.display_name, offline.run.project) == ("my_exp", "my_proj")
    unique = shown[-1].removeprefix("unique name of recall: ")
    rows = [row for row in offline.rows if "LR" in row]
    assert [row["_step"] for row in rows] == [0, 100, 200]
    assert rows[0].keys() >= {"loss", "F1", unique, "LR"}
    assert rows[0]["loss"] == pytest.approx(losses[0])
    assert rows[-1]["F1"] > rows[0]["F1"]
    assert [row["epoch"] for row in offline.rows if "epoch" in row] == list(range(8))


def test_the_function_prints_a_confusion_matrix_every_150_steps_and_the_class_measures_the_time_of_a_step(ran: Ran) -> None:
    rows = [line.rpartition("[")[2].strip(" ]").split() for line in ran[0]["confusion"].splitlines()]
    matrices = torch.tensor([[int(value) for value in row] for row in rows]).view(2, 10, 10)
    assert matrices.sum((1, 2)).tolist() == [64, 64]
    right = matrices.diagonal(dim1=1, dim2=2).sum(1)
    assert right[1] > 50 > right[0]
    assert float(ran[0]["step_time"].splitlines()[-1].removeprefix("mean step time ")) > 0


# -- 0.10 ---------------------------------------------------------------------------------------------


def test_the_training_script_logs_saves_and_evaluates(ran_0_10: Ran) -> None:
    shown, folder = ran_0_10[0]["training_script"], ran_0_10[1] / "training_script"
    steps = 12 * 6
    evaluated = [*range(0, steps, 12), steps]
    assert [step for tag, step in written(folder / "work" / "tensorboard") if tag == "accuracy"] == evaluated
    accuracy = numbers(folder / "work" / "tensorboard", "accuracy")
    assert accuracy[-1] > 0.5 > accuracy[0]
    assert [float(text.rpartition(" ")[2]) for text in shown.splitlines() if "Accuracy" in text] == pytest.approx(accuracy)
    files = [f"{name}-EPOCH-{number}.pt" for name in ("Listener", "trainer") for number in (11, 12, 3, 7)]
    assert names_in(folder / "work" / "checkpoints") == files
    offline = sent(folder)
    assert (offline.run.display_name, offline.run.project) == ("spoken", "digits")
    assert [row["_step"] for row in offline.rows] == evaluated
    assert [row["accuracy"] for row in offline.rows] == pytest.approx(accuracy)


def test_the_loss_is_printed_and_written_every_500_steps(ran_0_10: Ran) -> None:
    shown, folder = ran_0_10[0]["loss_logger"], ran_0_10[1] / "loss_logger"
    printed = [float(text.rpartition(" ")[2]) for text in shown.splitlines() if "] Loss " in text]
    assert numbers(folder / "work" / "tensorboard", "Train_Loss") == pytest.approx(printed)
    assert printed[1] < printed[0]
    assert [step for tag, step in written(folder / "work" / "tensorboard") if tag == "Train_Loss"] == [0, 500]


def test_the_sound_of_a_sample_is_written_to_tensorboard(ran_0_10: Ran) -> None:
    events = EventAccumulator(str(ran_0_10[1] / "audio" / "work" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("Train_Loss")] == [0, 2, 4]
    sounds = events.Audio("Train_Sample")
    assert [(one.step, one.length_frames) for one in sounds] == [(0, 4000), (2, 4000), (4, 4000)]
    loudest = [torch.frombuffer(bytearray(one.encoded_audio_string[44:]), dtype=torch.int16).abs().max() for one in sounds]
    assert min(loudest) > 300  # speech, not silence


def test_the_checkpoint_callback_saves_and_the_training_resumes(ran_0_10: Ran) -> None:
    shown, folder = ran_0_10[0]["checkpoints"], ran_0_10[1] / "checkpoints"
    assert [text for text in shown.splitlines() if text.startswith("steps")] == ["steps 0 to 3", "steps 0 to 5", "steps 5 to 8"]
    files = [f"{name}-STEP-{number}.pt" for name in ("Listener", "trainer") for number in (2, 4, 5, 6, 8)]
    assert names_in(folder / "work" / "checkpoints") == files
