"""Tokens and passwords of the command line and of URLs stand in no file of a run, and in no page that shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.commands.main import main
from cadenza.status.masking import masked_command
from cadenza.testing import tiny_run

SECRETS = ["--hf-token SECRET1", "--api_key=SECRET1", "hub.token=SECRET1", "--db-password SECRET1", "--my-passwd=SECRET1"]
SECRETS += [
    "--aws-secret-key SECRET1",
    "--access_key=SECRET1",
    "--apikey SECRET1",
    "trainer.credentials=SECRET1",
    "-token SECRET1",
]
SECRETS += [
    "--login=hf_SECRET1",
    "sk-SECRET1",
    "ghp_SECRET1",
    "AKIASECRET1",
    "--url=https://SECRET1@host/a",
    "https://me:SECRET1@host",
    "https://host/a?api_key=SECRET1&b=1",
    "--url=https://host/a?b=1&token=SECRET1",
    "github_pat_SECRET1",
    "gho_SECRET1",
]
PLAIN = [
    "--max-tokens 4096",
    "--tokenizer bert",
    "--num-key-value-heads 8",
    "--key-metric acc",
    "--seq-tokens 4096",
    "--lr=0.1",
]
PLAIN += ["--task=sk-learn", "https://host/a@b", "--token-count 5", "--password-file=a.txt", "--token --verbose"]


@pytest.mark.parametrize("words", SECRETS)
def test_the_value_of_a_secret_is_masked(words: str) -> None:
    shown = " ".join(masked_command(words.split()))
    assert "SECRET1" not in shown
    assert "***" in shown


@pytest.mark.parametrize("words", SECRETS)
def test_the_value_of_a_secret_is_masked_in_one_argument_and_in_a_text_too(words: str) -> None:
    shown = masked_command(["bash", "-c", f"train.py {words}"])[2]
    assert "SECRET1" not in shown
    assert "***" in shown


@pytest.mark.parametrize("words", PLAIN)
def test_other_values_are_shown(words: str) -> None:
    assert " ".join(masked_command(words.split())) == words
    assert masked_command([words]) == [words]


def test_no_file_and_no_page_of_a_run_holds_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train.py", *" ".join(SECRETS).split()]
    monkeypatch.setattr(sys, "argv", [*command])
    directory, page = tmp_path / "run", tmp_path / "page.html"

    @on(Callback.on_step_end, at=2)
    def say(run: Run) -> None:
        run.print("saving to s3://me:SECRET1@bucket/a")
        run.stop("the server https://me:SECRET1@host is gone")

    run = tiny_run(directory=directory, callbacks=[Checkpoint(directory="memory://me:SECRET1@bucket/a"), say])
    assert sys.argv == command
    assert "SECRET1" in run.outcome.reason  # type: ignore[union-attr]
    main(["report", str(directory), "--output", str(page)])
    capsys.readouterr()
    for name in ("why", "runs"):
        main([name, str(directory)])
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*directory.glob("*.*"), page)}
    assert {"run.json", "decisions.jsonl", "console.log", "page.html"} <= texts.keys()
    assert [name for name, text in texts.items() if "SECRET1" in text] == []
    assert "SECRET1" not in capsys.readouterr().out


def test_the_page_of_a_run_of_an_earlier_version_masks_what_its_files_hold(tmp_path: Path) -> None:
    directory, page = tmp_path / "run", tmp_path / "page.html"
    tiny_run(directory=directory)
    info = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    (directory / "run.json").write_text(json.dumps({**info, "command": ["train.py", "--hf-token", "SECRET1"]}))
    main(["report", str(directory), "--output", str(page)])
    assert "SECRET1" not in page.read_text(encoding="utf-8")
