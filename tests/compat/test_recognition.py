"""Callbacks of other systems are recognized by their base class, wherever Cadenza takes callbacks; their cost in a step."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Trainer
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.compat.adapter.description import description_of
from cadenza.errors import CallbackError
from cadenza.hooks.dispatch import Hooks, hooks_of
from cadenza.loops.foreign_callbacks import adapt, adapted
from cadenza.testing import check_callback, prove_resume, simulate, tiny_loader, tiny_run, tiny_trainer
from cadenza.timetravel import replay_step, what_if
from tests.engine.test_calls import PER_BATCH, PER_STEP, Work, by_cadenza, calls_a_batch, evaluated_by_cadenza, loss_of, sgd

lightning = pytest.importorskip("lightning", reason="callbacks of Lightning are recognized: pip install lightning")
pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="so are those of pip install pytorch-lightning")
transformers = pytest.importorskip("transformers", reason="so are those of pip install transformers")
keras = pytest.importorskip("keras", reason="so are those of pip install keras")


class Counts:
    """Counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def count(self, *_: Any, **__: Any) -> None:
        self.seen += 1


class OfLightning(Counts, lightning.Callback):  # type: ignore[name-defined, misc]
    on_train_batch_end = Counts.count


class OfPytorchLightning(Counts, pytorch_lightning.Callback):  # type: ignore[name-defined, misc]
    on_train_batch_end = Counts.count


class OfTransformers(Counts, transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    on_step_end = Counts.count


class OfKeras(Counts, keras.callbacks.Callback):  # type: ignore[name-defined, misc]
    on_train_batch_end = Counts.count


class Derived(OfLightning):
    """A subclass of a subclass."""


CLASSES: list[Callable[[], Any]] = [OfLightning, OfPytorchLightning, OfTransformers, OfKeras, Derived]


class Own:
    def on_train_begin(self, *_: Any) -> None: ...


@pytest.mark.parametrize("kind", CLASSES)
def test_an_instance_stands_among_native_callbacks(kind: Any) -> None:
    class Native(Callback):
        seen = 0

        def on_step_end(self, run: Any) -> None:
            self.seen += 1

    first, foreign, last = Native(), kind(), Native()
    run = tiny_run(callbacks=[first, foreign, last])
    assert (first.seen, foreign.seen, last.seen) == (5, 5, 5)
    listed = [name for name in hooks_of(run).callbacks if not name.startswith("transformers.")]  # what its adapter adds
    assert listed == ["Native", kind.__name__, "Native#2"]
    tiny_run(callbacks=[foreign])
    assert foreign.seen == 10  # an instance may serve several trainers


@pytest.mark.parametrize("kind", CLASSES)
def test_a_class_is_refused_with_the_instance_to_write_and_an_instance_twice(kind: Any) -> None:
    name, one, evaluate = kind.__name__, kind(), Evaluate(tiny_loader())
    with pytest.raises(CallbackError, match=rf"callbacks\[1\] is the class {name}; expected an instance: {name}\("):
        tiny_trainer(callbacks=[evaluate, kind])
    with pytest.raises(CallbackError, match=rf"callbacks\[2\] is in the list twice: {name}\(\.\.\.\). Make a second"):
        tiny_trainer(callbacks=[one, evaluate, one])
    tiny_trainer(callbacks=[one, kind()])


def test_a_callback_that_is_no_list_is_refused() -> None:
    for given in (OfKeras(), OfLightning(), OfTransformers(), OfTransformers):
        with pytest.raises(CallbackError, match=r"callbacks must be a list of callbacks; got Of\w+.*Write callbacks=\[...\]"):
            Trainer(nn.Linear(1, 1), torch.optim.SGD, tiny_loader(), max_epochs=1, callbacks=given)


def test_an_object_of_no_system_or_of_two_is_refused() -> None:
    with pytest.raises(CallbackError, match=r"callbacks\[0\] is not a callback"):
        tiny_trainer(callbacks=[Own()])
    with pytest.raises(TypeError, match="expected a callback of another system, with one of the bases transformers"):
        adapt(Own())
    with pytest.raises(TypeError, match="expected a callback of another system"):
        adapt(OfKeras)
    with pytest.raises(CallbackError, match=r"OfTwo is derived from callbacks of two systems, lightning and keras. Make one"):
        tiny_trainer(callbacks=[type("OfTwo", (lightning.Callback, keras.callbacks.Callback), {})()])


def test_the_list_of_the_caller_is_not_changed() -> None:
    given = [OfKeras()]
    trainer = tiny_trainer(callbacks=given)
    assert type(given[0]) is OfKeras
    assert adapted(trainer.callbacks) == trainer.callbacks
    assert tiny_trainer(callbacks=(one for one in given)).callbacks[0].name == "OfKeras"


@pytest.mark.parametrize("order", [1, -1])
def test_names_that_systems_share_do_not_depend_on_the_order(tmp_path: Path, order: int) -> None:
    def trainer(order: int, epochs: int) -> Trainer:
        stops: list[Any] = [
            EarlyStopping("eval/loss", mode="min", patience=9),
            lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=9),
            keras.callbacks.EarlyStopping("val_loss", patience=9),
        ]
        callbacks = [Evaluate(tiny_loader()), *stops[::order], Checkpoint("1 epoch")]
        return tiny_trainer(callbacks=callbacks, directory=tmp_path, epochs=epochs)

    plan = trainer(order, 2).plan()
    names = {"EarlyStopping", "EarlyStopping (lightning)", "EarlyStopping (keras)"}
    assert names < set(plan.hooks.callbacks)
    [note] = [one for one in plan.notes if one.startswith("of other systems: ")]
    assert set(note.removeprefix("of other systems: ").split(", ")) == names - {"EarlyStopping"}

    trainer(1, 2).fit()
    continued = trainer(order, 3)
    run = continued.fit(resume="auto")
    best = min(value for _, value in run.history["eval/loss"])
    adapters: list[Any] = [one for one in continued.callbacks if (one.name or "").startswith("EarlyStopping (")]
    foreign = [one.callback for one in adapters]
    assert [float(one.best_score if hasattr(one, "best_score") else one.best) for one in foreign] == pytest.approx([best, best])


def test_a_method_named_almost_like_an_event_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Typo(lightning.Callback):  # type: ignore[name-defined, misc]
        def on_training_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
        def on_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
        def on_demand(self) -> None: ...

    class Older(keras.callbacks.Callback):  # type: ignore[name-defined, misc]
        def on_epoch_ends(self, epoch: int, logs: Any = None) -> None: ...

    expected = [
        "Typo.on_epoch_end is never called: it is no event of lightning. Did you mean 'on_train_epoch_end'?",
        "Typo.on_training_epoch_end is never called: it is no event of lightning. Did you mean 'on_train_epoch_end'?",
        "Older.on_epoch_ends is never called: it is no event of keras. Did you mean 'on_epoch_end'?",
    ]
    trainer = tiny_trainer(callbacks=[Typo(), Older()])
    assert [one for one in trainer.plan().notes if "never called" in one] == [f"! {text}" for text in expected]
    trainer.fit()
    assert all(text in caplog.text for text in expected)


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OfLightning, OfTransformers])
def test_what_if_names_a_callback_of_another_system(tmp_path: Path, kind: type) -> None:
    tiny_run(directory=tmp_path, epochs=1)
    with pytest.raises(CallbackError, match=f"cannot play {kind.__name__}, a callback of .*: expected EarlyStopping"):
        what_if(tmp_path, [kind()])


def test_a_replay_has_what_the_checkpoints_watched(tmp_path: Path) -> None:
    def make() -> Trainer:
        saving = Checkpoint("5 steps", keep_last=None, keep_best=("eval/loss", "min"))
        stopping = transformers.EarlyStoppingCallback(early_stopping_patience=3)
        return tiny_trainer(directory=tmp_path, epochs=2, seed=1, callbacks=[Evaluate(tiny_loader()), stopping, saving])

    make().fit()
    with replay_step(make(), tmp_path, 8) as again:
        again.step_once()
        assert again.run.progress.step == 8


def _fails(*_: Any, **__: Any) -> None:
    raise ValueError("too small")


@pytest.mark.parametrize(
    ("base", "event"),
    [
        (lightning.Callback, "setup"),
        (lightning.Callback, "on_train_batch_start"),
        (transformers.TrainerCallback, "on_optimizer_step"),
        (transformers.TrainerCallback, "on_step_end"),
        (keras.callbacks.Callback, "on_train_begin"),
        (keras.callbacks.Callback, "on_train_batch_end"),
    ],
)
def test_an_error_names_the_hook_of_the_other_system(base: type[Any], event: str) -> None:
    with pytest.raises(ValueError, match="too small") as raised:
        tiny_run(callbacks=[OfLightning(), type("Broken", (base,), {event: _fails})()])
    place = "3 of 4" if base is transformers.TrainerCallback else "2 of 2"  # its adapter adds two
    assert raised.value.__notes__[-1].startswith(f"raised in Broken.{event} (callback {place})")


class MayFail(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    on_fault, on_step_end = "disable", _fails


def test_a_callback_may_say_that_a_fault_only_disables_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = tiny_run(callbacks=[MayFail()])
    assert run.progress.step == 5
    assert [one.callback for one in run.faults] == ["MayFail"]


class Unmapped(lightning.Callback):  # type: ignore[name-defined, misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.loops = trainer.no_such_thing


def test_an_attribute_that_is_not_mapped_is_named_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer(callbacks=[Unmapped()])
    line = "Unmapped reads trainer.no_such_thing in on_train_start. "
    assert any(note.startswith(f"! {line}") for note in trainer.plan().notes)
    with pytest.raises(AttributeError, match=r"Unmapped reads trainer\.no_such_thing"):
        trainer.fit()
    assert "Unmapped will fail: it reads trainer.no_such_thing in on_train_start" in caplog.text


# -- all that takes callbacks ----------------------------------------------------------------------------------


class WithoutState(keras.callbacks.Callback):  # type: ignore[name-defined, misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["loss"] >= 0


class SharesArguments(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert state.global_step > 0


def test_check_callback_takes_them() -> None:
    check_callback(WithoutState, reads=True)
    check_callback(SharesArguments)
    with pytest.raises(AssertionError, match="an instance of OfKeras that has served other runs gives another result"):
        check_callback(OfKeras)  # it does not reset its counter


@pytest.mark.parametrize("kind", [OfLightning, OfTransformers, OfKeras])
def test_the_helpers_for_tests_take_them(kind: Any) -> None:
    foreign = kind()
    assert simulate([foreign], metrics={"eval/loss": [1.0, 2.0]}).progress.epoch == 2
    assert foreign.seen == 4

    def make(directory: Path) -> Trainer:
        return tiny_trainer(callbacks=[kind(), Checkpoint()], directory=directory, epochs=2, seed=1)

    prove_resume(make, at=[3], in_process=True)


# -- the list of a trainer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES)
def test_the_list_of_a_trainer_takes_and_gives_back_callbacks_as_they_are(kind: Any) -> None:
    trainer, foreign, first = tiny_trainer(callbacks=[OfLightning()]), kind(), tiny_trainer().callbacks
    held: list[Any] = trainer.callbacks
    held.append(foreign)
    assert foreign in held
    assert foreign.__class__.__name__ in str(trainer.plan())
    assert foreign.__class__.__name__ in trainer.plan().hooks.callbacks
    trainer.fit()
    assert foreign.seen == 5
    held.remove(foreign)
    trainer.fit()
    assert (foreign.seen, held is trainer.callbacks, foreign in held) == (5, True, False)
    trainer.callbacks = [foreign, *first]
    trainer.evaluate(tiny_loader())
    trainer.fit()
    assert foreign.seen == 10
    trainer.callbacks.append(foreign)
    with pytest.raises(CallbackError, match=rf"is in the list twice: {kind.__name__}\(\.\.\.\)"):
        trainer.fit()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_list_may_be_copied_before_and_after_a_run(kind: Any, copied: Callable[[Any], Any]) -> None:
    foreign = kind()
    trainer = tiny_trainer(callbacks=[foreign])
    before = copied(trainer.callbacks)
    trainer.fit()
    after = copied(trainer.callbacks)
    assert foreign not in (*before, *after)
    for copies, seen in ((before, 0), (after, 5)):
        [one] = [one.callback for one in copies if one.name == kind.__name__]
        assert one.seen == seen
        tiny_run(callbacks=copies)
        assert (one.seen, foreign.seen) == (seen + 5, 5)


# -- the cost: calls of functions, of Python and of C, counted and not timed -------------------------------------
#
# A list with one such callback is compared with an empty one. So the work that all callbacks of a system share counts as well:
# the logs and counters of transformers, and the means of Keras.

BASES = {"transformers": transformers.TrainerCallback, "lightning": lightning.Callback, "keras": keras.callbacks.Callback}


def overriding(system: str, *names: str) -> Any:
    """Return a callback that overrides these events, and counts their calls without calling anything."""

    def count(self: Any, *_: object, **__: object) -> None:
        self.count += 1

    return type("Overrides", (BASES[system],), {"count": 0, **dict.fromkeys(names, count)})()


def added(loop: Callable[..., Work], system: str, *names: str) -> float:
    """Return the calls that a callback with these events adds to a batch, without those of the events."""
    made: list[Any] = []

    def work(batches: list[Any]) -> object:
        made.append(overriding(system, *names))
        return loop(made[-1])(batches)

    calls = calls_a_batch(work)
    own: int = made[-2].count - made[-1].count
    return calls - own / 40 - bare(loop)


@cache
def bare(loop: Callable[..., Work]) -> float:
    return calls_a_batch(loop())


def by_windows(*callbacks: Any) -> Work:
    return by_cadenza(*callbacks, accumulate=4)


def predicted(*callbacks: Any) -> Work:
    def work(batches: list[Any]) -> object:
        model = nn.Linear(8, 1)
        options: Any = {"callbacks": callbacks, "device": "cpu", "progress": False}
        trainer = Trainer(model, sgd(model.parameters()), batches, loss_of, max_epochs=1, **options)
        return trainer.predict(batches, compute=lambda model, batch: model(batch[0]))

    return work


def events(*moments: Callable[..., None]) -> list[tuple[str, str]]:
    """Return the events of all systems that these moments call."""
    return [(system, name) for system in BASES for name, one in description_of(system).events.items() if one.moment in moments]


@pytest.mark.parametrize("system", BASES)
def test_a_callback_that_overrides_nothing_has_no_listener_and_adds_no_call(system: str) -> None:
    assert Hooks(adapted([overriding(system), overriding(system)])).by_moment == {}
    assert added(by_cadenza, system) == 0


@pytest.mark.parametrize(("system", "name"), events(*PER_BATCH, *PER_STEP))
def test_an_event_adds_at_most_three_calls_to_a_step_beyond_its_own(system: str, name: str) -> None:
    assert added(by_cadenza, system, name) <= 3
    assert added(by_windows, system, name) <= 3 + 1 / 4  # in a step of four batches, one call finds out which is the last


@pytest.mark.parametrize("system", BASES)
def test_so_do_all_other_events_together(system: str) -> None:
    inside = {name for _, name in events(*PER_BATCH, *PER_STEP)}
    assert added(by_cadenza, system, *(name for name in description_of(system).events if name not in inside)) <= 3


def of_transformers(*callbacks: Any) -> Work:
    """Return the training of a model with a weighted loss, of which the floating point operations are counted."""

    class Model(nn.Linear):
        main_input_name = "inputs"

        def num_parameters(self, exclude_embeddings: bool) -> int:
            return self.in_features

    def weighted(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(model, (batch["inputs"], batch["labels"])), "weight": 4}

    def work(batches: list[Any]) -> object:
        model, loader = Model(8, 1), [{"inputs": inputs, "labels": labels} for inputs, labels in batches]
        options: Any = {"callbacks": callbacks, "device": "cpu", "progress": False}
        return Trainer(model, sgd(model.parameters()), loader, weighted, max_epochs=1, **options).fit()

    return work


def test_weighted_losses_and_floating_point_operations_of_transformers_add_no_call() -> None:
    assert added(of_transformers, "transformers", "on_step_end") <= 3


TO_NUMPY = {("keras", "on_predict_batch_end"): 15}
"""Above the goal: Keras gives predictions as arrays of NumPy, and the conversion calls functions of torch."""


@pytest.mark.parametrize(("system", "name"), events(Callback.on_eval_batch_start, Callback.on_eval_batch_end))
def test_an_event_adds_at_most_three_calls_to_a_batch_of_an_evaluation_or_a_prediction(system: str, name: str) -> None:
    assert added(evaluated_by_cadenza, system, name) <= 3
    assert added(predicted, system, name) <= TO_NUMPY.get((system, name), 3)
