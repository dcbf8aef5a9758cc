"""Files of models and trainings, the folders that callbacks save, and trainings that continue: cases 16, 18 to 21, 23 to 25."""

from __future__ import annotations

import io
import json
import math
import os
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza.callbacks import Ema
from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import Callback, CheckpointCallback, Event, LoadBestModelCallback, TrainBatchLoop, Trainer
from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.compat.fastnlp.core.callbacks.topk_saver import TopkQueue
from cadenza.errors import CheckpointError, CheckpointMismatchError, StateError
from tests.compat.fastnlp import toy
from tests.compat.fastnlp.toy import Raising, Scribe, Scripted, Toy, loader, toy_trainer, trained, weights_of

pytestmark = pytest.mark.usefixtures("launch")
FILES = ("on_save_model", "on_load_model", "on_save_checkpoint", "on_load_checkpoint")


def test_case_25_each_of_four_methods_has_its_own_event_and_files(tmp_path: Path) -> None:
    scribe = Scribe(*FILES)
    trainer = toy_trainer(8, [scribe], n_epochs=1)
    calls_seen = []
    for name in ("save_model", "load_model", "save_checkpoint", "load_checkpoint"):
        getattr(trainer, name)(tmp_path / name.partition("_")[2])
        calls_seen.append(scribe.names)
        scribe.seen.clear()
    assert calls_seen[:3] == [["on_save_model"], ["on_load_model"], ["on_save_checkpoint"]]
    assert calls_seen[3] == []  # there was no saved state
    assert files(tmp_path / "model") == {"fastnlp_model.pkl.tar"}
    assert files(tmp_path / "checkpoint") == {"fastnlp_checkpoint.pkl.tar", "fastnlp_model.pkl.tar"}


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_the_file_says_whether_it_holds_a_model_or_weights(tmp_path: Path, saved: bool, loaded: bool) -> None:
    trainer, other = toy_trainer(), toy_trainer()
    with torch.no_grad():
        trainer.model.linear.weight.fill_(7.0)  # type: ignore[union-attr,operator]
    for target_ in (tmp_path, io.BytesIO()):
        trainer.save_model(target_, only_state_dict=saved)
        if isinstance(target_, io.BytesIO):
            target_.seek(0)
        other.load_model(target_, only_state_dict=loaded)
        assert torch.equal(weights_of(trainer), weights_of(other))
        other = toy_trainer()


class Trap:
    """Does something when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def test_a_missing_file_is_named_and_weights_execute_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        toy_trainer().run(resume_from=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no fastnlp_model\.pkl\.tar"):
        toy_trainer().load_model(tmp_path)
    torch.save(Trap(), tmp_path / "fastnlp_model.pkl.tar")
    with pytest.raises(CheckpointError, match="must hold weights only"):
        toy_trainer().load_model(tmp_path)
    assert not (tmp_path / "sprung").exists()


class Keeping(Callback):
    """Has a state, and saves at a batch."""

    def __init__(self, folder: Path, batch: int | None = None, event: str = "on_train_batch_end") -> None:
        self.calls_seen: list[int] = []
        self.loaded: Any = None

        def save(trainer: Any, *_: Any) -> None:
            self.calls_seen.append(trainer.global_forward_batches)
            if trainer.global_forward_batches == batch:
                trainer.save_checkpoint(folder)

        setattr(self, event, save)

    def on_save_checkpoint(self, trainer: Any) -> dict[str, Any]:
        return {"calls_seen": list(self.calls_seen)}

    def on_load_checkpoint(self, trainer: Any, states: dict[str, Any] | None) -> None:
        self.loaded = (states, trainer.global_forward_batches)


class Noisy(Toy):
    """Draws random numbers in each step."""

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().train_step(nn.functional.dropout(x, 0.3), y)


def shuffled(seen: list[list[float]], *callbacks: Any, batch: int = 4, **arguments: Any) -> Trainer:
    """Return a trainer of three epochs of 20 rows in random order, with dropout and momentum."""
    torch.manual_seed(5)
    model = Noisy()
    return toy_trainer(
        callbacks=[toy.batches_seen(seen), *callbacks],
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        train_dataloader=loader(20, shuffle=True, batch_size=batch),
        n_epochs=3,
        **arguments,
    )


def continued(folder: Path, *callbacks: Any, **arguments: Any) -> tuple[Trainer, list[list[float]]]:
    """Return a trainer that continued at the checkpoint in a folder, and the batches that it read."""
    torch.manual_seed(99)
    rest: list[list[float]] = []
    trainer = shuffled(rest, *callbacks, **arguments)
    trainer.run(resume_from=folder)
    return trainer, rest


@pytest.mark.parametrize(("accumulate", "saved"), [(1, 7), (1, 5), (3, 7), (3, 10), (7, 5), (7, 6)])
def test_case_23_a_resumed_training_is_bit_identical_also_inside_a_window(tmp_path: Path, accumulate: int, saved: int) -> None:
    whole: list[list[float]] = []
    native, restored = Ema(decay=0.5), Ema(decay=0.5)
    first = shuffled(whole, native, Keeping(tmp_path, saved), accumulation_steps=accumulate)
    first.run()
    keeping = Keeping(tmp_path)
    second, rest = continued(tmp_path, restored, keeping, accumulation_steps=accumulate)
    assert rest == whole[saved:]
    assert keeping.loaded[1] == saved
    assert torch.equal(weights_of(first), weights_of(second))
    assert str(native.state_dict()) == str(restored.state_dict())


def test_case_23_hooks_see_the_restored_counters(tmp_path: Path) -> None:
    shuffled([], Keeping(tmp_path, 7)).run()
    scribe = Scribe("on_train_begin", "on_train_epoch_begin", "on_train_batch_begin", "on_train_end")
    continued(tmp_path, Keeping(tmp_path), scribe)
    assert scribe.seen[:3] == [(name, 1, 2, 7) for name in ("on_train_begin", "on_train_epoch_begin", "on_train_batch_begin")]
    assert len(scribe.at("on_train_batch_begin")) == 8
    assert scribe.seen[-1] == ("on_train_end", 3, 0, 15)


@pytest.mark.parametrize(
    ("event", "saved", "whole", "rest"),
    [
        ("on_train_batch_end", 7, [3, 6, 9, 12, 15], [9, 12, 15]),
        ("on_before_backward", 10, [2, 5, 8, 11, 14], [11, 14]),  # at the end of an epoch
    ],
)
def test_case_23_and_24_filters_continue_to_count(event: str, saved: int, whole: Any, rest: Any, tmp_path: Path) -> None:
    def ends(callback: Callback) -> tuple[Trainer, list[int]]:
        seen: list[int] = []
        Trainer.on(Event(event, every=3))(lambda trainer, *_: seen.append(trainer.global_forward_batches))
        return shuffled([], callback), seen

    trainer, seen = ends(Keeping(tmp_path, saved))
    trainer.run()
    assert seen == whole
    trainer, seen = ends(Keeping(tmp_path))
    trainer.run(resume_from=tmp_path)
    assert seen == rest


@pytest.mark.parametrize(
    ("saved", "event", "values", "ends", "evaluations"),
    [
        (5, "on_train_batch_end", (0, 0.2, 0.3, 0.4), [(1, 0, 5), (2, 0, 10), (3, 0, 15)], [(0, 5, 5), (1, 5, 10), (2, 5, 15)]),
        (10, "on_evaluate_end", (0.0, 0.3), [(2, 0, 10), (3, 0, 15)], [(2, 5, 15)]),
    ],
    ids=["before its evaluation", "in its evaluation"],
)
def test_case_23_a_checkpoint_at_the_end_of_an_epoch_ends_it_and_continues_with_the_next(
    saved: int, event: str, values: Any, ends: Any, evaluations: Any, tmp_path: Path
) -> None:
    """Deviation: fastNLP trains the epoch again."""
    whole: list[list[float]] = []
    first = shuffled(whole, Keeping(tmp_path, saved, event), metrics={"acc": Scripted(0.0, 0.1, 0.2, 0.3)})
    first.run()
    scribe = Scribe("on_train_epoch_end", "on_evaluate_end")
    second, rest = continued(tmp_path, Keeping(tmp_path), scribe, metrics={"acc": Scripted(*values)})
    assert rest == whole[saved:]
    assert (scribe.at("on_train_epoch_end"), scribe.at("on_evaluate_end")) == (ends, evaluations)
    assert torch.equal(weights_of(first), weights_of(second))


def test_case_23_the_users_state_is_restored(tmp_path: Path) -> None:
    """Deviation: fastNLP's documents say it is, and it is not."""
    trainer = toy_trainer()
    trainer.state["best"] = [0.5, {"epoch": 3}]
    trainer.save_checkpoint(tmp_path)
    other = toy_trainer()
    other.load_checkpoint(tmp_path)
    assert other.state == {"best": [0.5, {"epoch": 3}]}
    trainer.state["function"] = print
    with pytest.raises(StateError, match="function"):
        trainer.save_checkpoint(tmp_path)


def test_without_resume_training_only_the_weights_are_restored(tmp_path: Path) -> None:
    """Deviation: fastNLP fails."""
    keeping = Keeping(tmp_path, 7)
    shuffled([], keeping).run()
    other = Keeping(tmp_path)
    trainer = shuffled([], other)
    trainer.load_checkpoint(tmp_path, resume_training=False)
    assert (trainer.global_forward_batches, other.loaded) == (0, None)
    assert not torch.equal(weights_of(trainer), weights_of(shuffled([])))


def test_batches_of_another_size_continue_at_the_same_sample(tmp_path: Path) -> None:
    whole: list[list[float]] = []
    shuffled(whole, Keeping(tmp_path, 2)).run()
    rest: list[list[float]] = []
    trainer = shuffled(rest, Keeping(tmp_path), batch=8)
    trainer.run(resume_from=tmp_path)
    assert [*chain(*rest)][:12] == [*chain(*whole)][8:20]
    with pytest.raises(CheckpointMismatchError, match="do not end there"):
        shuffled([], batch=5).load_checkpoint(tmp_path)


def test_callbacks_with_one_name_have_separate_states(tmp_path: Path) -> None:
    """Deviation: fastNLP keeps the first one's only."""
    one, two = Keeping(tmp_path), Keeping(tmp_path)
    one.calls_seen, two.calls_seen = [1], [2]
    trainer = toy_trainer(callbacks=[one, two])
    trainer.save_checkpoint(tmp_path)
    trainer.load_checkpoint(tmp_path)
    assert (one.loaded[0], two.loaded[0]) == ({"calls_seen": [1]}, {"calls_seen": [2]})
    assert list(CallbackManager([one, two]).on_save_checkpoint(trainer)) == ["Keeping", "Keeping#2"]


class Calls(TrainBatchLoop):
    """A loop of the user's own that calls the trainer's."""

    def run(self, trainer: Any, dataloader: Any) -> None:
        super().run(trainer, dataloader)


SAVED = (1, 3, 5, 6, 8, 9, 10)  # of ten batches, five in each epoch


@pytest.mark.parametrize(("loop", "accumulate"), [(None, 2), (None, 3), (None, 7), (Calls(), 1), (Calls(), 2), (Calls(), 3)])
def test_a_resume_also_inside_a_window_over_two_epochs_is_bit_identical(tmp_path: Path, accumulate: int, loop: Any) -> None:
    def made() -> Trainer:
        trainer = toy_trainer(20, n_epochs=2, accumulation_steps=accumulate)
        if loop is not None:
            trainer.train_batch_loop = loop
        return trainer

    whole = made()
    for batch in SAVED:
        save = lambda trainer, at=batch: trainer.save_checkpoint(tmp_path / str(at))  # noqa: E731  # one for each batch
        whole.add_callback_fn(Event.on_train_batch_end(once=batch), save)
    whole.run()
    for batch in SAVED:
        resumed = made()
        resumed.run(resume_from=tmp_path / str(batch))
        assert resumed.global_forward_batches == 10
        assert torch.equal(weights_of(whole), weights_of(resumed))


@pytest.mark.parametrize(("accumulate", "failing"), [(5, 3), (5, 4), (2, 5), (3, 7)])
def test_a_checkpoint_in_on_exception_holds_the_incomplete_window(tmp_path: Path, accumulate: int, failing: int) -> None:
    options: dict[str, Any] = {"n_epochs": 2, "accumulation_steps": accumulate}
    broken = toy_trainer(20, Raising("on_before_backward", failing, RuntimeError("once")), **options)
    broken.add_callback_fn(Event.on_exception(), lambda trainer, error: trainer.save_checkpoint(tmp_path))
    with pytest.raises(RuntimeError, match="once"):
        broken.run()
    resumed = toy_trainer(20, **options)
    resumed.run(resume_from=tmp_path)
    assert torch.equal(weights_of(trained(20, **options)), weights_of(resumed))


# -- folders of callbacks ----------------------------------------------------------------------------------

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
    stop = fastnlp.EarlyStopCallback(monitor="acc#acc", patience=2)
    judged(0.5, 0.4, 0.3, 0.9, 0.9, callbacks=[scribe, stop, CheckpointCallback(tmp_path)]).run()
    assert scribe.seen[-3:] == [("on_train_epoch_begin", 3, 0, 15), ("on_exception", 3, 0, 15), ("on_train_end", 3, 0, 15)]
    assert folders(tmp_path) == {"model-epoch_3-batch_15-exception_EarlyStopException"}


@pytest.mark.parametrize(
    ("error", "saved"), [(KeyError(), False), (LookupError(), True), (KeyboardInterrupt(), True)], ids=repr
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


def test_a_checkpoint_restores_the_best_values_and_the_folder_of_each_callback(tmp_path: Path) -> None:
    first = judged(0.9, callbacks=CheckpointCallback(tmp_path, topk=1, monitor="acc#acc"))
    first.run()
    first.save_checkpoint(tmp_path / "resume")
    save = CheckpointCallback(tmp_path, topk=1, monitor="acc#acc")
    again = judged(0.9, 0.1, callbacks=save)
    again.load_checkpoint(tmp_path / "resume")
    again.run(num_eval_sanity_batch=0)
    assert list(save.topk_saver.queue.values.values()) == [0.9]
    assert folders(tmp_path) == {"model-epoch_0-batch_5-acc#acc_0.9"}

    def savers() -> list[CheckpointCallback]:
        kinds = (("high", True), ("low", False))
        return [CheckpointCallback(tmp_path / name, topk=1, monitor="acc", larger_better=larger) for name, larger in kinds]

    first = judged(0.3, 0.7, callbacks=savers())
    first.run()
    first.save_checkpoint(tmp_path / "both")
    others = savers()
    judged(0.3, 0.7, callbacks=others).load_checkpoint(tmp_path / "both")
    kept = [["model-epoch_1-batch_10-acc_0.7"], ["model-epoch_0-batch_5-acc_0.3"]]
    assert [list(one.topk_saver.queue.values) for one in others] == kept


def test_a_saver_saves_and_deletes_and_functions_may_write_and_read(tmp_path: Path) -> None:
    saver = fastnlp.TopkSaver(folder=tmp_path, only_state_dict=False)
    folder = Path(saver.save(toy_trainer(), "mine"))
    assert folder == tmp_path / "launch" / "mine"
    assert isinstance(torch.load(folder / MODEL, weights_only=False), Toy)
    saver.rm("mine")
    assert folders(tmp_path) == set()
    write = lambda folder: Path(folder, "mine.txt").write_text("saved")  # noqa: E731  # a function of one's own
    trained(8, CheckpointCallback(tmp_path, last=True, model_save_fn=write, use_timestamp_folder=False), n_epochs=1)
    assert files(tmp_path / "model-last") == {"mine.txt"}
    trainer = toy_trainer()
    targets: list[str] = []
    trainer.save_model(tmp_path / "own", model_save_fn=targets.append)
    trainer.load_model(tmp_path / "own", model_load_fn=targets.append)
    assert targets == [str(tmp_path / "own")] * 2
    assert files(tmp_path / "own") == set()
    with pytest.raises(RuntimeError, match="need a folder; got a stream"):
        trainer.save_model(io.BytesIO(), model_save_fn=targets.append)


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
def test_wrong_arguments_of_savers_are_errors(options: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        CheckpointCallback(**{"folder": tmp_path, **options})
    with pytest.raises(RuntimeError, match="topk=1 needs a monitor"):
        judged(0.1, callbacks=CheckpointCallback(tmp_path, topk=1))


# -- the best model --------------------------------------------------------------------------------------


def keeping(weights: list[torch.Tensor]) -> Callback:
    """Return a callback that keeps the weights after each evaluation."""
    return toy.Hooks(on_evaluate_end=lambda trainer, results: weights.append(weights_of(trainer).clone()))


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
    callbacks = [LoadBestModelCallback("acc"), fastnlp.EarlyStopCallback("acc", patience=2), keeping(weights)]
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
