"""The folders that fastNLP's callbacks save, and their content: cases 16 and 18 to 21."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.compat.fastnlp import Callback, CheckpointCallback, EarlyStopCallback, LoadBestModelCallback, TopkSaver, Trainer
from cadenza.compat.fastnlp.core.callbacks.topk_saver import TopkQueue
from tests.compat.fastnlp.toy import Hooks, Raising, Scribe, Scripted, Toy, toy_trainer, trained, weights_of

pytestmark = pytest.mark.usefixtures("launch")
MODEL, CHECKPOINT, RESULTS = "fastnlp_model.pkl.tar", "fastnlp_checkpoint.pkl.tar", "fastnlp_evaluate_results.json"


def folders(target_: Path) -> set[str]:
    return {path.name for path in (target_ / "launch").iterdir()}


def judged(*values: float, **arguments: Any) -> Trainer:
    """Return a trainer of five batches an epoch that judges itself as written, once before and once an epoch."""
    return toy_trainer(20, metrics={"acc": Scripted(0.0, *values)}, n_epochs=len(values), **arguments)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_case_18_epochs_batches_and_the_last_one_have_separate_folders_with_the_current_model(tmp_path: Path) -> None:
    save = CheckpointCallback(tmp_path, every_n_epochs=2, every_n_batches=4, last=True)
    trainer = trained(20, save, n_epochs=4)
    batches = {f"model-epoch_{epoch}-batch_{batch}" for epoch, batch in ((0, 4), (1, 8), (2, 12), (3, 16), (3, 20))}
    assert folders(tmp_path) == {"model-epoch_2", "model-epoch_4", "model-last", *batches}
    assert all(files(folder) == {MODEL} for folder in (tmp_path / "launch").iterdir())
    earlier, *saved = (
        torch.load(tmp_path / "launch" / name / MODEL, weights_only=True)["linear.weight"]
        for name in ("model-epoch_2", "model-epoch_4", "model-last")
    )
    assert all(torch.equal(one, trainer.model.linear.weight) for one in saved)  # type: ignore[union-attr,arg-type]  # a Toy
    assert not torch.equal(earlier, saved[0])


VALUES = (0.1, 0.5, 0.3, 0.5, 0.2, 0.9)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"topk": 2, "monitor": "acc#acc"},
            {"model-epoch_3-batch_20-acc#acc_0.5": 0.5, "model-epoch_5-batch_30-acc#acc_0.9": 0.9},
        ),
        ({"topk": 1, "monitor": "acc", "larger_better": False}, {"model-epoch_0-batch_5-acc_0.1": 0.1}),
        ({"topk": 1}, {"model-epoch_5-batch_30-acc#acc_0.9": 0.9}),
    ],
    ids=["the best two, and of equal ones the later", "the smallest", "the monitor of the trainer"],
)
@pytest.mark.parametrize("with_results", [True, False])
def test_case_19_and_20_the_best_are_kept(options: Any, expected: dict[str, float], with_results: bool, tmp_path: Path) -> None:
    save = CheckpointCallback(tmp_path, save_evaluate_results=with_results, **options)
    judged(*VALUES, callbacks=save, monitor="acc#acc").run()
    assert folders(tmp_path) == expected.keys()
    for name, value in expected.items():
        folder = tmp_path / "launch" / name
        assert files(folder) == ({MODEL, RESULTS} if with_results else {MODEL})
        if with_results:
            assert (folder / RESULTS).read_text() == json.dumps({"acc#acc": value}, indent=2)


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
    first, second = sorted(folders(tmp_path))
    assert first.startswith("model-epoch_0-batch_5")
    assert second.startswith("model-epoch_1-batch_10")
    assert all("_lambda_" in name and "<" not in name for name in (first, second))


def test_case_16_an_early_stop_is_saved_by_default_and_nothing_else(tmp_path: Path) -> None:
    scribe = Scribe("on_train_epoch_begin", "on_fetch_data_begin", "on_exception", "on_train_end")
    stop = EarlyStopCallback(monitor="acc#acc", patience=2)
    judged(0.5, 0.4, 0.3, 0.9, 0.9, callbacks=[scribe, stop, CheckpointCallback(tmp_path)]).run()
    assert scribe.seen[-3:] == [("on_train_epoch_begin", 3, 0, 15), ("on_exception", 3, 0, 15), ("on_train_end", 3, 0, 15)]
    assert folders(tmp_path) == {"model-epoch_3-batch_15-exception_EarlyStopException"}


@pytest.mark.parametrize(
    ("error", "saved"), [(KeyError("x"), False), (LookupError("x"), True), (KeyboardInterrupt(), True)], ids=repr
)
def test_exceptions_are_saved_by_their_exact_class(error: BaseException, saved: bool, tmp_path: Path) -> None:
    save = CheckpointCallback(tmp_path, on_exceptions=[LookupError, KeyboardInterrupt])
    trainer = toy_trainer(20, [save, Raising("on_train_batch_end", 3, error)])
    with nullcontext() if isinstance(error, KeyboardInterrupt) else pytest.raises(type(error)):
        trainer.run()
    wanted = {f"model-epoch_0-batch_{trainer.global_forward_batches}-exception_{type(error).__name__}"}
    assert (folders(tmp_path) if saved else files(tmp_path)) == (wanted if saved else set())


def test_a_training_state_can_be_saved_and_resumed(tmp_path: Path) -> None:
    def saved(target: str, **run: Any) -> Trainer:
        save = CheckpointCallback(tmp_path / target, every_n_batches=3, save_object="trainer")
        trainer = toy_trainer(20, save, n_epochs=2)
        trainer.run(**run)
        return trainer

    whole = saved("whole")
    folder = tmp_path / "whole" / "launch" / "trainer-epoch_1-batch_6"
    assert files(folder) == {MODEL, CHECKPOINT}
    assert torch.equal(weights_of(saved("again", resume_from=folder)), weights_of(whole))
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
        kinds = (("high", True), ("low", False))
        return [CheckpointCallback(tmp_path / name, topk=1, monitor="acc", larger_better=larger) for name, larger in kinds]

    first = judged(0.3, 0.7, callbacks=savers())
    first.run()
    first.save_checkpoint(tmp_path / "resume")
    again = savers()
    judged(0.3, 0.7, callbacks=again).load_checkpoint(tmp_path / "resume")
    kept = [["model-epoch_1-batch_10-acc_0.7"], ["model-epoch_0-batch_5-acc_0.3"]]
    assert [list(one.topk_saver.queue.values) for one in again] == kept


def test_a_saver_saves_and_deletes_and_a_function_can_write(tmp_path: Path) -> None:
    saver = TopkSaver(folder=tmp_path, only_state_dict=False)
    folder = Path(saver.save(toy_trainer(), "mine"))
    assert folder == tmp_path / "launch" / "mine"
    assert isinstance(torch.load(folder / MODEL, weights_only=False), Toy)
    saver.rm("mine")
    assert folders(tmp_path) == set()
    write = lambda folder: Path(folder, "mine.txt").write_text("saved")  # noqa: E731  # a function of one's own
    trained(8, CheckpointCallback(tmp_path, last=True, model_save_fn=write, use_timestamp_folder=False), n_epochs=1)
    assert files(tmp_path / "model-last") == {"mine.txt"}


def test_a_misspelled_argument_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CheckpointCallback(tmp_path, every_n_epoch=1, mine=2)
    (said,) = caplog.messages
    assert said.startswith("every_n_epoch= is passed to the trainer's method")
    assert said.endswith("Did you mean 'every_n_epochs'?")


NOT_CLASSES = "on_exceptions must be classes of exceptions; got"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(({"every_n_epochs": n}, ValueError, "every_n_epochs must be a whole number of at least 1") for n in (0, -1, 1.5)),
        ({"folder": __file__}, ValueError, "got the file"),
        ({"on_exceptions": int}, TypeError, f"{NOT_CLASSES} <class 'int'>"),
        ({"on_exceptions": 3}, TypeError, f"{NOT_CLASSES} 3"),
        ({"monitor": "acc"}, RuntimeError, "needs topk; got topk=0"),
        ({"topk": -2}, ValueError, "topk must be"),
    ],
)
def test_wrong_arguments_of_savers_are_errors_in_the_constructor(
    options: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        CheckpointCallback(**{"folder": tmp_path, **options})
    with pytest.raises(RuntimeError, match="topk=1 needs a monitor"):
        judged(0.1, callbacks=CheckpointCallback(tmp_path, topk=1))


# -- the best model --------------------------------------------------------------------------------------


def keeping(weights: list[torch.Tensor]) -> Callback:
    """Return a callback that keeps the weights after each evaluation."""
    return Hooks(on_evaluate_end=lambda trainer, results: weights.append(weights_of(trainer).clone()))


@pytest.mark.parametrize("where", ["memory", "folder", "kept"])
def test_case_21_the_best_model_is_loaded_at_the_end(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    weights: list[torch.Tensor] = []
    options: Any = {} if where == "memory" else {"save_folder": tmp_path, "delete_after_train": where == "folder"}
    best = LoadBestModelCallback("acc#acc", **options)
    trainer = judged(0.1, 0.5, 0.3, 0.5, 0.2, 0.2, callbacks=[best, keeping(weights)])
    trainer.run()
    assert best.meta == {"epoch": 1, "batch": 10}
    assert torch.equal(weights_of(trainer), weights[1])
    assert not torch.equal(weights[1], weights[-1])
    assert "'acc#acc' was 0.5 in epoch 1, after 10 batches" in capsys.readouterr().out
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    kept = ["launch", "launch/best_so_far", f"launch/best_so_far/{MODEL}"]
    assert left == (kept if where == "kept" else [])


def test_the_best_model_is_loaded_after_an_early_stop_but_after_an_error_it_is_kept(tmp_path: Path) -> None:
    weights: list[torch.Tensor] = []
    callbacks = [LoadBestModelCallback("acc"), EarlyStopCallback("acc", patience=2), keeping(weights)]
    trainer = judged(0.5, 0.4, 0.3, 0.9, callbacks=callbacks)
    trainer.run()
    assert len(weights) == 3
    assert torch.equal(weights_of(trainer), weights[0])
    best = LoadBestModelCallback("acc#acc", save_folder=tmp_path)
    trainer = judged(0.5, 0.1, callbacks=[best, Raising("on_train_batch_end", 7, RuntimeError("broken"))])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run()
    saved = torch.load(tmp_path / "launch" / "best_so_far" / MODEL, weights_only=True)
    assert not torch.equal(trainer.model.linear.weight, saved["linear.weight"])  # type: ignore[union-attr,arg-type]  # a Toy


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_checkpoint_restores_the_best_model(tmp_path: Path, in_folder: bool) -> None:
    def trainer(*values: float) -> Trainer:
        options: dict[str, Any] = {"save_folder": tmp_path / "best", "delete_after_train": False} if in_folder else {}
        save = CheckpointCallback(tmp_path, every_n_batches=8, save_object="trainer")
        return judged(*values, callbacks=[LoadBestModelCallback("acc", **options), save])

    whole, again = trainer(0.9, 0.1), trainer(0.1, 0.1)
    whole.run()
    again.run(resume_from=tmp_path / "launch" / "trainer-epoch_1-batch_8")
    assert torch.equal(weights_of(again), weights_of(whole))


def test_custom_save_and_load_functions_need_each_other_and_a_folder(tmp_path: Path) -> None:
    said: list[str] = []
    save: dict[str, Any] = {"model_save_fn": lambda folder: said.append(f"saved in {Path(folder).name}")}
    load: dict[str, Any] = {"model_load_fn": lambda folder: said.append(f"loaded from {Path(folder).name}")}
    judged(0.1, 0.5, callbacks=LoadBestModelCallback("acc", save_folder=tmp_path, **save, **load)).run()
    assert said == ["saved in best_so_far"] * 2 + ["loaded from best_so_far"]
    with pytest.raises(AssertionError, match="belong together"):
        LoadBestModelCallback("acc", save_folder=tmp_path, **save)
    with pytest.raises(AssertionError, match="needs save_folder"):
        LoadBestModelCallback("acc", **save, **load)
    with pytest.raises(RuntimeError, match="needs a monitor"):
        judged(0.1, callbacks=LoadBestModelCallback())
