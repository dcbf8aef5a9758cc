"""Files of models and of trainings, and trainings that continue at them: cases 23 to 25."""

from __future__ import annotations

import io
import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza.callbacks import Ema
from cadenza.compat.fastnlp import Callback, Event, TrainBatchLoop, Trainer
from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.errors import CheckpointError, CheckpointMismatchError, StateError
from tests.compat.fastnlp.toy import Raising, Scribe, Scripted, Toy, batches_seen, loader, toy_trainer, trained, weights_of

FILES = ("on_save_model", "on_load_model", "on_save_checkpoint", "on_load_checkpoint")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    assert names(tmp_path / "model") == ["fastnlp_model.pkl.tar"]
    assert names(tmp_path / "checkpoint") == ["fastnlp_checkpoint.pkl.tar", "fastnlp_model.pkl.tar"]


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


def test_reading_weights_executes_no_code_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Trap(), tmp_path / "fastnlp_model.pkl.tar")
    with pytest.raises(CheckpointError, match="must hold weights only"):
        toy_trainer().load_model(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_custom_functions_may_write_and_read(tmp_path: Path) -> None:
    trainer = toy_trainer()
    targets: list[str] = []
    trainer.save_model(tmp_path / "own", model_save_fn=targets.append)
    trainer.load_model(tmp_path / "own", model_load_fn=targets.append)
    assert targets == [str(tmp_path / "own")] * 2
    assert names(tmp_path / "own") == []
    with pytest.raises(RuntimeError, match="need a folder; got a stream"):
        trainer.save_model(io.BytesIO(), model_save_fn=targets.append)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        toy_trainer().run(resume_from=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no fastnlp_model\.pkl\.tar"):
        toy_trainer().load_model(tmp_path)


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
        callbacks=[batches_seen(seen), *callbacks],
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
        train_dataloader=loader(20, shuffle=True, batch_size=batch),
        evaluate_dataloaders=loader(8) if "metrics" in arguments else None,
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
def test_case_23_and_24_a_filter_continues_to_count(
    event: str, saved: int, whole: list[int], rest: list[int], tmp_path: Path
) -> None:
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
        (
            5,
            "on_train_batch_end",
            (0.0, 0.2, 0.3, 0.4),
            [(1, 0, 5), (2, 0, 10), (3, 0, 15)],
            [(0, 5, 5), (1, 5, 10), (2, 5, 15)],
        ),
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
def test_a_resume_at_batches_also_inside_a_window_over_two_epochs_ends_with_the_same_bits(
    tmp_path: Path, accumulate: int, loop: TrainBatchLoop | None
) -> None:
    def made() -> Trainer:
        trainer = toy_trainer(20, n_epochs=2, accumulation_steps=accumulate)
        if loop is not None:
            trainer.train_batch_loop = loop
        return trainer

    whole = made()
    for batch in SAVED:
        whole.add_callback_fn(
            Event.on_train_batch_end(once=batch), lambda trainer, at=batch: trainer.save_checkpoint(tmp_path / str(at))
        )
    whole.run()
    for batch in SAVED:
        resumed = made()
        resumed.run(resume_from=tmp_path / str(batch))
        assert resumed.global_forward_batches == 10
        assert torch.equal(weights_of(whole), weights_of(resumed))


@pytest.mark.parametrize(("accumulate", "failing"), [(5, 3), (5, 4), (2, 5), (3, 7)])
def test_a_checkpoint_in_on_exception_holds_the_incomplete_accumulation_window(
    tmp_path: Path, accumulate: int, failing: int
) -> None:
    options: dict[str, Any] = {"n_epochs": 2, "accumulation_steps": accumulate}
    broken = toy_trainer(20, Raising("on_before_backward", failing, RuntimeError("once")), **options)
    broken.add_callback_fn(Event.on_exception(), lambda trainer, error: trainer.save_checkpoint(tmp_path))
    with pytest.raises(RuntimeError, match="once"):
        broken.run()
    resumed = toy_trainer(20, **options)
    resumed.run(resume_from=tmp_path)
    assert torch.equal(weights_of(trained(20, **options)), weights_of(resumed))
