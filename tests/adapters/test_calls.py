"""The cost of callbacks of other systems in a step: calls of functions, of Python and of C, counted and not timed.

A list with one such callback is compared with an empty one. So the work that all callbacks of a system share counts as well:
the logs and counters of transformers, and the means of Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import nn

from cadenza import Callback, Trainer
from cadenza.adapters.description import description_of
from cadenza.adapters.recognition import adapted
from cadenza.hooks.dispatch import Hooks
from tests.engine.test_calls import PER_BATCH, PER_STEP, Work, by_cadenza, calls_a_batch, evaluated_by_cadenza, loss_of, sgd

lightning = pytest.importorskip("lightning", reason="calls of Lightning's callbacks are counted: pip install lightning")
transformers = pytest.importorskip(
    "transformers", reason="calls of transformers's callbacks are counted: pip install transformers"
)
keras = pytest.importorskip("keras", reason="calls of Keras's callbacks are counted: pip install keras")

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
