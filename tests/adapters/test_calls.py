"""The cost of callbacks of other systems in a step: calls of functions, counted and not timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cadenza.adapters.recognition import adapted
from cadenza.hooks.dispatch import Hooks
from tests.engine.test_calls import by_cadenza, calls_a_batch

lightning = pytest.importorskip("lightning", reason="calls of Lightning's callbacks are counted: pip install lightning")
transformers = pytest.importorskip(
    "transformers", reason="calls of transformers's callbacks are counted: pip install transformers"
)
keras = pytest.importorskip("keras", reason="calls of Keras's callbacks are counted: pip install keras")

BASES = {"transformers": transformers.TrainerCallback, "lightning": lightning.Callback, "keras": keras.callbacks.Callback}
HOOKS = {
    "transformers": ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"),
    "lightning": (
        "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad",
        "on_train_batch_end",
    ),
    "keras": ("on_train_batch_begin", "on_train_batch_end"),
}  # fmt: skip

MOST = {("lightning", "on_train_batch_end"): 6}
"""Above the goal of 3: it has two listeners, and its outputs are a copy with a loss that is detached."""


def _work(*callbacks: Any) -> Callable[[list[Any]], object]:
    def work(batches: list[Any]) -> object:
        return by_cadenza(*(kind() for kind in callbacks))(batches)

    return work


def _nothing(self: object, *_: object, **__: object) -> None:
    pass


def overriding(base: type[Any], *names: str) -> type[Any]:
    """Return a class that overrides these events and does nothing."""
    return type("Overrides", (base,), dict.fromkeys(names, _nothing))


@pytest.mark.parametrize("system", BASES)
def test_a_callback_that_overrides_nothing_has_no_listener_and_adds_no_call(system: str) -> None:
    kind = overriding(BASES[system])
    assert Hooks(adapted([kind(), kind()])).by_moment == {}
    assert calls_a_batch(_work(kind, kind, kind)) == calls_a_batch(_work())


@pytest.mark.parametrize(("system", "name"), [(system, name) for system, names in HOOKS.items() for name in names])
def test_a_hook_adds_at_most_three_calls_beyond_its_own(system: str, name: str) -> None:
    """The first callback of a system brings what all of them share; each further one costs its hook alone."""
    bare = calls_a_batch(_work())
    one, two = (calls_a_batch(_work(*[overriding(BASES[system], name)] * count)) - bare for count in (1, 2))
    assert two - one - 1 <= MOST.get((system, name), 3)
