"""The folders that fastNLP's callbacks save, and their content: cases 16 and 18 to 21."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.compat.fastnlp import CheckpointCallback, EarlyStopCallback, LoadBestModelCallback, TopkSaver, Trainer
from cadenza.compat.fastnlp.core.callbacks.topk_saver import TopkQueue
from tests.compat.fastnlp.toy import Raising, Scribe, Scripted, Toy, toy_trainer

MODEL, CHECKPOINT, RESULTS = "fastnlp_model.pkl.tar", "fastnlp_checkpoint.pkl.tar", "fastnlp_evaluate_results.json"


@pytest.fixture(autouse=True)
def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTNLP_LAUNCH_TIME", "launch")


def folders(target_: Path) -> set[str]:
    return {path.name for path in (target_ / "launch").iterdir()}


def judged(*values: float, **arguments: Any) -> Trainer:
    """Return a trainer of five batches an epoch that judges itself as written, once before and once an epoch."""
    return toy_trainer(20, metrics={"acc": Scripted(0.0, *values)}, n_epochs=len(values), **arguments)


def weight(model: Toy) -> torch.Tensor:
    return model.linear.weight.detach().clone()


def test_case_18_epochs_batches_and_the_last_one_have_separate_folders(tmp_path: Path) -> None:
    save = CheckpointCallback(tmp_path, every_n_epochs=2, every_n_batches=4, last=True)
    toy_trainer(20, save, n_epochs=4).run()
    batches = {"model-epoch_0-batch_4", "model-epoch_1-batch_8", "model-epoch_2-batch_12", "model-epoch_3-batch_16"}
    assert folders(tmp_path) == {"model-epoch_2", "model-epoch_4", "model-last", *batches, "model-epoch_3-batch_20"}
    assert all([path.name for path in folder.iterdir()] == [MODEL] for folder in (tmp_path / "launch").iterdir())


def test_the_saved_model_is_the_current_one(tmp_path: Path) -> None:
    trainer = toy_trainer(20, CheckpointCallback(tmp_path, every_n_epochs=1, last=True), n_epochs=2)
    trainer.run()
    for name in ("model-epoch_2", "model-last"):
        saved = torch.load(tmp_path / "launch" / name / MODEL, weights_only=True)
        assert torch.equal(saved["linear.weight"], weight(trainer.model))  # type: ignore[arg-type]  # it is a Toy
    earlier = torch.load(tmp_path / "launch" / "model-epoch_1" / MODEL, weights_only=True)
    assert not torch.equal(earlier["linear.weight"], saved["linear.weight"])


def test_case_19_the_best_two_are_kept_and_of_equal_ones_the_later(tmp_path: Path) -> None:
    save = CheckpointCallback(tmp_path, topk=2, monitor="acc#acc")
    judged(0.1, 0.5, 0.3, 0.5, 0.2, 0.9, callbacks=save).run()
    assert folders(tmp_path) == {"model-epoch_3-batch_20-acc#acc_0.5", "model-epoch_5-batch_30-acc#acc_0.9"}
    for name, value in (("model-epoch_3-batch_20-acc#acc_0.5", 0.5), ("model-epoch_5-batch_30-acc#acc_0.9", 0.9)):
        folder = tmp_path / "launch" / name
        assert {path.name for path in folder.iterdir()} == {MODEL, RESULTS}
        assert (folder / RESULTS).read_text() == json.dumps({"acc#acc": value}, indent=2)


def test_case_20_the_smallest_can_be_the_best(tmp_path: Path) -> None:
    save = CheckpointCallback(tmp_path, topk=1, monitor="acc", larger_better=False, save_evaluate_results=False)
    judged(0.1, 0.5, 0.3, 0.5, 0.2, 0.9, callbacks=save).run()
    assert folders(tmp_path) == {"model-epoch_0-batch_5-acc_0.1"}
    assert [path.name for path in (tmp_path / "launch" / "model-epoch_0-batch_5-acc_0.1").iterdir()] == [MODEL]


def test_case_20_a_queue_drops_the_lowest_value() -> None:
    queue = TopkQueue(2)
    pushed = [queue.push(name, value) for name, value in zip("abcdef", [1, 2, 1, 1, 0.5, 3], strict=True)]
    assert pushed == [None, None, "a", "c", "e", "d"]
    assert queue.values == {"b": 2, "f": 3}
    assert TopkQueue(1).push("nan", math.nan) is None
    keeps_all = TopkQueue(-1)
    assert [keeps_all.push(name, 0) for name in "abc"] == [None] * 3


def test_topk_minus_1_keeps_all_evaluations_and_the_name_of_a_function_is_escaped(tmp_path: Path) -> None:
    save = CheckpointCallback(tmp_path, topk=-1, monitor=lambda results: results["acc#acc"], larger_better=False)
    judged(0.2, 0.1, callbacks=save).run()
    names = sorted(folders(tmp_path))
    assert [name[: len("model-epoch_0-batch_5")] for name in names] == ["model-epoch_0-batch_5", "model-epoch_1-batch_10"[:21]]
    assert all("_lambda_" in name and "<" not in name for name in names)


def test_the_monitor_of_the_trainer_is_the_default(tmp_path: Path) -> None:
    judged(0.1, 0.5, callbacks=CheckpointCallback(tmp_path, topk=1), monitor="acc#acc").run()
    assert folders(tmp_path) == {"model-epoch_1-batch_10-acc#acc_0.5"}


def test_case_16_an_early_stop_is_saved_by_default_and_nothing_else(tmp_path: Path) -> None:
    scribe = Scribe("on_train_epoch_begin", "on_fetch_data_begin", "on_exception", "on_train_end")
    stop = EarlyStopCallback(monitor="acc#acc", patience=2)
    judged(0.5, 0.4, 0.3, 0.9, 0.9, callbacks=[scribe, stop, CheckpointCallback(tmp_path)]).run()
    assert scribe.seen[-3:] == [("on_train_epoch_begin", 3, 0, 15), ("on_exception", 3, 0, 15), ("on_train_end", 3, 0, 15)]
    assert folders(tmp_path) == {"model-epoch_3-batch_15-exception_EarlyStopException"}


def test_exceptions_are_saved_by_their_exact_class(tmp_path: Path) -> None:
    for error, saved in ((KeyError("x"), False), (LookupError("x"), True), (KeyboardInterrupt(), True)):
        target_ = tmp_path / type(error).__name__
        save = CheckpointCallback(target_, on_exceptions=[LookupError, KeyboardInterrupt])
        trainer = toy_trainer(20, [save, Raising("on_train_batch_end", 3, error)])
        if isinstance(error, KeyboardInterrupt):
            trainer.run()
        else:
            with pytest.raises(type(error)):
                trainer.run()
        wanted = {f"model-epoch_0-batch_{trainer.global_forward_batches}-exception_{type(error).__name__}"}
        assert (folders(target_) if saved else {path.name for path in target_.iterdir()}) == (wanted if saved else set())


def test_a_training_state_can_be_saved_and_resumed(tmp_path: Path) -> None:
    def saved(target_: str, **run: Any) -> Trainer:
        save = CheckpointCallback(tmp_path / target_, every_n_batches=3, save_object="trainer")
        trainer = toy_trainer(20, save, n_epochs=2)
        trainer.run(**run)
        return trainer

    whole = saved("whole")
    folder = tmp_path / "whole" / "launch" / "trainer-epoch_1-batch_6"
    assert {path.name for path in folder.iterdir()} == {MODEL, CHECKPOINT}
    again = saved("again", resume_from=folder)
    assert torch.equal(weight(again.model), weight(whole.model))  # type: ignore[arg-type]  # they are Toys
    assert folders(tmp_path / "whole") == {f"trainer-epoch_{e}-batch_{g}" for e, g in ((0, 3), (1, 6), (1, 9))}


def test_a_checkpoint_restores_the_best_values_and_the_folder(tmp_path: Path) -> None:
    def trainer(launch: str, *values: float) -> tuple[Trainer, CheckpointCallback]:
        save = CheckpointCallback(tmp_path, topk=1, monitor="acc#acc")
        return judged(*values, callbacks=save), save

    first, _ = trainer("launch", 0.9)
    first.run()
    first.save_checkpoint(tmp_path / "resume")
    again, save = trainer("launch", 0.9, 0.1)
    again.load_checkpoint(tmp_path / "resume")
    again.run(num_eval_sanity_batch=0)
    assert list(save.topk_saver.queue.values.values()) == [0.9]
    assert folders(tmp_path) == {"model-epoch_0-batch_5-acc#acc_0.9"}


def test_two_checkpoint_callbacks_have_separate_states(tmp_path: Path) -> None:
    def savers() -> list[CheckpointCallback]:
        return [
            CheckpointCallback(tmp_path / "high", topk=1, monitor="acc"),
            CheckpointCallback(tmp_path / "low", topk=1, monitor="acc", larger_better=False),
        ]

    first = judged(0.3, 0.7, callbacks=savers())
    first.run()
    first.save_checkpoint(tmp_path / "resume")
    again = savers()
    judged(0.3, 0.7, callbacks=again).load_checkpoint(tmp_path / "resume")
    assert [list(one.topk_saver.queue.values) for one in again] == [
        ["model-epoch_1-batch_10-acc_0.7"],
        ["model-epoch_0-batch_5-acc_0.3"],
    ]


def test_the_folder_of_the_launch_can_be_omitted_and_a_function_can_write(tmp_path: Path) -> None:
    def write(folder: str) -> None:
        Path(folder, "mine.txt").write_text("saved")

    save = CheckpointCallback(tmp_path, last=True, model_save_fn=write, use_timestamp_folder=False)
    toy_trainer(8, save, n_epochs=1).run()
    assert [path.name for path in (tmp_path / "model-last").iterdir()] == ["mine.txt"]


def test_a_saver_saves_and_deletes(tmp_path: Path) -> None:
    saver, trainer = TopkSaver(folder=tmp_path, only_state_dict=False), toy_trainer()
    folder = saver.save(trainer, "mine")
    assert Path(folder) == tmp_path / "launch" / "mine"
    assert isinstance(torch.load(Path(folder) / MODEL, weights_only=False), Toy)
    saver.rm("mine")
    assert folders(tmp_path) == set()


def test_a_misspelled_argument_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CheckpointCallback(tmp_path, every_n_epoch=1, mine=2)
    (said,) = caplog.messages
    assert said.startswith("every_n_epoch= is passed to the trainer's method")
    assert said.endswith("Did you mean 'every_n_epochs'?")


def test_wrong_arguments_of_savers_are_errors_in_the_constructor(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="got the file"):
        CheckpointCallback(file)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="every_n_epochs must be a whole number of at least 1"):
            CheckpointCallback(tmp_path, every_n_epochs=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_exceptions must be classes of exceptions; got <class 'int'>"):
        CheckpointCallback(tmp_path, on_exceptions=int)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_exceptions must be classes of exceptions; got 3"):
        CheckpointCallback(tmp_path, on_exceptions=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="needs topk; got topk=0"):
        CheckpointCallback(tmp_path, monitor="acc")
    with pytest.raises(ValueError, match="topk must be"):
        CheckpointCallback(tmp_path, topk=-2)
    with pytest.raises(RuntimeError, match="topk=1 needs a monitor"):
        judged(0.1, callbacks=CheckpointCallback(tmp_path, topk=1))


# -- the best model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "folder", "kept"])
def test_case_21_the_best_model_is_loaded_at_the_end(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    weights: list[torch.Tensor] = []
    options = {} if where == "memory" else {"save_folder": tmp_path, "delete_after_train": where == "folder"}
    best = LoadBestModelCallback("acc#acc", **options)  # type: ignore[arg-type]  # any of them
    trainer = judged(0.1, 0.5, 0.3, 0.5, 0.2, 0.2, callbacks=[best, Noting(weights)])
    trainer.run()
    assert best.meta == {"epoch": 1, "batch": 10}
    assert torch.equal(weight(trainer.model), weights[1])  # type: ignore[arg-type]  # it is a Toy
    assert not torch.equal(weights[1], weights[-1])
    assert "'acc#acc' was 0.5 in epoch 1, after 10 batches" in capsys.readouterr().out
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    kept = ["launch", "launch/best_so_far", f"launch/best_so_far/{MODEL}"]
    assert left == (kept if where == "kept" else [])


class Noting(Scribe):
    """Keeps the weights after each evaluation."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.weights.append(weight(trainer.model))


def test_after_an_error_the_weights_stay_and_the_best_are_kept(tmp_path: Path) -> None:
    best = LoadBestModelCallback("acc#acc", save_folder=tmp_path)
    trainer = judged(0.5, 0.1, callbacks=[best, Raising("on_train_batch_end", 7, RuntimeError("broken"))])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run()
    saved = torch.load(tmp_path / "launch" / "best_so_far" / MODEL, weights_only=True)
    assert not torch.equal(weight(trainer.model), saved["linear.weight"])  # type: ignore[arg-type]  # it is a Toy


def test_after_an_early_stop_the_best_model_is_loaded() -> None:
    weights: list[torch.Tensor] = []
    callbacks = [LoadBestModelCallback("acc"), EarlyStopCallback("acc", patience=2), Noting(weights)]
    trainer = judged(0.5, 0.4, 0.3, 0.9, callbacks=callbacks)
    trainer.run()
    assert len(weights) == 3
    assert torch.equal(weight(trainer.model), weights[0])  # type: ignore[arg-type]  # it is a Toy


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_checkpoint_restores_the_best_model(tmp_path: Path, in_folder: bool) -> None:
    def trainer(*values: float) -> Trainer:
        options: dict[str, Any] = {"save_folder": tmp_path / "best", "delete_after_train": False} if in_folder else {}
        best = LoadBestModelCallback("acc", **options)
        save = CheckpointCallback(tmp_path, every_n_batches=8, save_object="trainer")
        return judged(*values, callbacks=[best, save])

    whole = trainer(0.9, 0.1)
    whole.run()
    again = trainer(0.1, 0.1)
    again.run(resume_from=tmp_path / "launch" / "trainer-epoch_1-batch_8")
    assert torch.equal(weight(again.model), weight(whole.model))  # type: ignore[arg-type]  # they are Toys


def test_custom_save_and_load_functions_need_each_other_and_a_folder(tmp_path: Path) -> None:
    said: list[str] = []

    def save(folder: str) -> None:
        said.append(f"saved in {Path(folder).name}")

    def load(folder: str) -> None:
        said.append(f"loaded from {Path(folder).name}")

    best = LoadBestModelCallback("acc", save_folder=tmp_path, model_save_fn=save, model_load_fn=load)
    judged(0.1, 0.5, callbacks=best).run()
    assert said == ["saved in best_so_far"] * 2 + ["loaded from best_so_far"]
    with pytest.raises(AssertionError, match="belong together"):
        LoadBestModelCallback("acc", save_folder=tmp_path, model_save_fn=save)
    with pytest.raises(AssertionError, match="needs save_folder"):
        LoadBestModelCallback("acc", model_save_fn=save, model_load_fn=load)
    with pytest.raises(RuntimeError, match="needs a monitor"):
        judged(0.1, callbacks=LoadBestModelCallback())
