"""``run.state``: the user's own values, all of which can be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cadenza.errors import StateError
from cadenza.status.state import State
from cadenza.testing import tiny_run


def test_entries_can_be_read_and_written_as_attributes() -> None:
    state = tiny_run(steps=1).state
    state.best = 0.5
    state["rounds"] = [1, (2, {"a": torch.ones(2)}), None, "text", True]
    assert (state["best"], state.best) == (0.5, 0.5)
    del state.best
    assert list(state) == ["rounds"]


WAYS: dict[str, Callable[[State, Any], Any]] = {
    "item": lambda state, value: state.__setitem__("key", value),
    "attribute": lambda state, value: setattr(state, "key", value),
    "update": lambda state, value: state.update(key=value),
    "or": lambda state, value: state.__ior__({"key": value}),
    "default": lambda state, value: state.setdefault("key", value),
    "constructor": lambda state, value: State(key=value),
}


@pytest.mark.parametrize("value", [print, {1, 2}, object(), b"bytes", 1j])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_value_that_cannot_be_saved_is_an_error_whichever_way_it_is_set(value: Any, way: Callable[[State, Any], Any]) -> None:
    state = State()
    with pytest.raises(
        StateError, match=r"run\.state\['key'\] cannot be saved: expected None, bool, int, float, str, a tensor"
    ):
        way(state, value)
    assert not state


def test_the_error_names_the_place_inside() -> None:
    with pytest.raises(StateError, match=r"run\.state\['a'\]\['b'\]\[1\] cannot be saved: .*got set"):
        State(a={"b": [1, {2}]})
    with pytest.raises(StateError, match=r"run\.state\['a'\] cannot be saved: expected keys of type str; got 1"):
        State(a={1: 2})


def test_a_name_that_is_not_there_is_an_error_that_lists_what_is() -> None:
    state = State(best=1)
    with pytest.raises(AttributeError, match=r"run\.state has no 'bets'; it has \['best'\]"):
        _ = state.bets
    with pytest.raises(AttributeError, match=r"run\.state has no 'bets'"):
        del state.bets
