"""SavePretrained: each checkpoint has a folder that from_pretrained reads."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, Trainer, load_weights, on
from cadenza.callbacks import Checkpoint, Ema
from cadenza.checkpoint.store import Store
from cadenza.compat.transformers import SavePretrained, trainer
from cadenza.errors import CheckpointDamagedError, CheckpointError, StateError
from cadenza.testing import tiny_trainer
from tests.compat.transformers.parts import Texts, arguments, gpt2, made, pretrained, tokenizer, transformers, weights


def trained(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    """Train with a checkpoint after each step, of which the last two are kept."""
    trainer = made(folder, Checkpoint("1 step", keep_last=2, **options), *callbacks, seed=0)
    trainer.fit()
    return trainer


def test_a_checkpoint_has_the_model_and_the_tokenizer_is_deleted_with_them_and_notices_a_change(tmp_path: Path) -> None:
    trainer = trained(tmp_path, SavePretrained(tokenizer()))
    folder = tmp_path / "checkpoints"

    assert sorted(one.name for one in folder.glob("step-*")) == ["step-00000002", "step-00000003"]
    model = pretrained(folder / "last" / "pretrained")
    assert torch.equal(weights(model), weights(trainer.model))
    assert model.generation_config.eos_token_id == 2
    words = transformers.AutoTokenizer.from_pretrained(folder / "last" / "pretrained")
    assert words("w4 w5")["input_ids"] == [4, 5]
    before = pretrained(folder / "step-00000002" / "pretrained")
    assert not torch.equal(weights(before), weights(model))

    store = Store(folder)
    saved = store.saved()[-1]
    store.verify(saved)
    (folder / saved.name / "pretrained" / "config.json").write_text("{}")
    with pytest.raises(CheckpointDamagedError, match=r"pretrained/config\.json has 2 bytes"):
        store.verify(saved)


def test_a_processor_gets_a_text_path_and_the_module_of_the_trainer_is_callable(tmp_path: Path) -> None:
    class Words:
        def save_pretrained(self, folder: str) -> None:
            Path(folder + "/words.txt").write_text("a b")

    trained(tmp_path, SavePretrained(Words()))
    assert (tmp_path / "checkpoints" / "last" / "pretrained" / "words.txt").read_text() == "a b"
    module: Any = import_module("cadenza.compat.transformers.trainer")  # the name in the package after such an import
    with pytest.raises(TypeError, match="args must be TrainingArguments"):
        module(gpt2())


class Reads(transformers.TrainerCallback):  # type: ignore[misc]  # the package has no types here
    """Reads and writes in ``checkpoint-STEP``, as callbacks of other packages do."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        same = torch.equal(weights(pretrained(folder)), weights(model))
        written = json.loads((folder / "trainer_state.json").read_text())
        self.seen.append((written["global_step"], written["best_model_checkpoint"], same))
        model.save_pretrained(folder / "adapter_model")
        (folder / "config.json").unlink()

    def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        best = Path(state.best_model_checkpoint)
        self.best = best.name, (best / "adapter_model").is_dir()


class ReadsBest(transformers.TrainerCallback):  # type: ignore[misc]
    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        best = pretrained(state.best_model_checkpoint)
        self.same = torch.equal(weights(best), weights(model))


BY_STEPS = dict[str, Any](save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3, max_steps=9)


def test_the_best_checkpoint_of_their_state_is_read_at_the_end(tmp_path: Path) -> None:
    reads = ReadsBest()
    args = arguments(tmp_path, load_best_model_at_end=True, **BY_STEPS)
    trainer(gpt2(), args, Texts(), Texts(4), callbacks=[reads]).fit()
    assert reads.same


def test_their_callbacks_find_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_total_limit=1, metric_for_best_model="loss", **BY_STEPS)
    (tmp_path / "checkpoint-1").mkdir()  # of another program
    reads = Reads()
    trainer(gpt2(), args, Texts(), Texts(4), callbacks=[reads]).fit()
    assert [step for step, _, same in reads.seen if same] == [3, 6, 9]
    assert [Path(best).name for _, best, _ in reads.seen] == ["checkpoint-3", "checkpoint-6", "checkpoint-6"]
    assert reads.best == ("checkpoint-6", True)
    assert sorted(one.name for one in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-6", "checkpoint-9"]
    store = Store(tmp_path / "checkpoints")
    for saved in store.saved():
        store.verify(saved)  # what the callback wrote and deleted is not in the checkpoint
    assert (tmp_path / "checkpoints" / "last" / "pretrained" / "config.json").is_file()
    again = trainer(gpt2(), args, Texts(), Texts(4))
    resumed = again.fit(resume=tmp_path / "checkpoint-6")  # as resume_from_checkpoint of their trainer
    assert [one.when.step for one in resumed.decisions if one.what == "resumed"] == [6]
    (tmp_path / "checkpoint-1" / "trainer_state.json").touch()
    with pytest.raises(CheckpointError, match=r"is a checkpoint of transformers, .*from_pretrained, and start a new run"):
        again.fit(resume=tmp_path / "checkpoint-1")


def test_averaged_weights_are_written_instead(tmp_path: Path) -> None:
    trainer = trained(tmp_path, Ema(0.5), SavePretrained(weights="ema"))

    model = pretrained(tmp_path / "checkpoints" / "last" / "pretrained")
    load_weights(tmp_path, averaged := gpt2(), weights="ema")
    assert torch.equal(weights(model), weights(averaged))
    assert not torch.equal(weights(model), weights(trainer.model))


def test_checkpoints_behind_a_url_have_the_folder_as_well(tmp_path: Path) -> None:
    import fsspec

    trainer = trained(tmp_path, SavePretrained(), directory="memory://pretrained-test")
    fsspec.filesystem("memory").get("/pretrained-test/step-00000003/pretrained", str(tmp_path / "got"), recursive=True)

    model = pretrained(tmp_path / "got")
    assert torch.equal(weights(model), weights(trainer.model))


class Killed:
    """A tokenizer that ends the process in the second save, when the model is written and the tokenizer is not."""

    saves = 0

    def save_pretrained(self, folder: str) -> None:
        self.saves += 1
        if self.saves == 2:
            os._exit(9)


def test_a_killed_process_leaves_whole_checkpoints_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        torch.set_num_threads(1)
        try:
            trained(tmp_path, SavePretrained(Killed()), background=False)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    folder = tmp_path / "checkpoints"
    assert [one.name for one in folder.iterdir() if one.name.startswith("step-")] == ["step-00000001"]
    assert [one for one in folder.iterdir() if one.name.startswith(".tmp-")]

    again = made(tmp_path, Checkpoint("1 step"), SavePretrained(), seed=0)
    run = again.fit(resume="auto")
    assert torch.equal(weights(again.model), weights(trained(tmp_path / "whole").model))
    assert [one.when.step for one in run.decisions if one.what == "resumed"] == [1]
    assert not [one for one in folder.iterdir() if one.name.startswith(".tmp-")]


class Full:
    """A tokenizer for which the disk is full."""

    def save_pretrained(self, folder: str) -> None:
        raise OSError(28, "No space left on device")


def test_a_write_that_fails_is_a_decision_and_the_training_goes_on(tmp_path: Path) -> None:
    run = made(tmp_path, Checkpoint("1 step"), SavePretrained(Full())).fit()
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert "No space left" in run.why("not saved")
    assert not (tmp_path / "checkpoints" / "last" / "pretrained").exists()
    assert (tmp_path / "checkpoints" / "last" / "model.safetensors").exists()


def test_a_callback_adds_files_to_a_folder_of_a_checkpoint_alone(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b")

    @on(Callback.on_save)
    def add(run: Run, checkpoint: Any) -> None:
        checkpoint.files["report/tables/table.csv"] = tmp_path / "table.csv"
        for wrong in ("table.csv", "../table.csv", "/report/table.csv", "report//table.csv", "report\\table.csv"):
            with pytest.raises(StateError, match="must be in a folder of it"):
                checkpoint.files[wrong] = tmp_path / "table.csv"

    trained(tmp_path / "run", add)
    assert (tmp_path / "run" / "checkpoints" / "last" / "report" / "tables" / "table.csv").read_text() == "a,b"
    assert (tmp_path / "table.csv").exists()


def test_what_it_needs_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"SavePretrained needs a model with a save_pretrained.* got a Linear"):
        tiny_trainer(callbacks=[SavePretrained()]).fit()
    with pytest.raises(ValueError, match="no callback writes any"):
        made(tmp_path / "a", SavePretrained()).fit()
    with pytest.raises(ValueError, match="needs averaged weights, but no callback provides 'ema'"):
        made(tmp_path / "b", Checkpoint(), SavePretrained(weights="ema")).fit()
    with pytest.raises(ValueError, match="folder must be the name of a folder"):
        SavePretrained(folder="../elsewhere")
