"""The source of a callback class says which events it has, and what it uses of their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from cadenza.adapters import description as descriptions
from cadenza.adapters.description import Description
from cadenza.adapters.foreign import Event
from cadenza.adapters.surface import surface as surfaces
from cadenza.adapters.surface.surface import Surface, surface_of
from cadenza.adapters.view import View
from cadenza.hooks.moments import Callback

# The base class and the views of a system of this test. Real ones are read in tests/commands/test_compat.py.


class StrategyView(View):
    title: ClassVar[str] = "trainer.strategy"

    @property
    def rank(self) -> int:
        return 0


class TrainerView(View):
    title: ClassVar[str] = "trainer"
    absent: ClassVar[Mapping[str, str]] = {"connector": "Use run.driver in a native callback."}

    @property
    def step(self) -> int:
        return 0

    @property
    def strategy(self) -> StrategyView:
        return StrategyView(self._run)

    @property
    def should_stop(self) -> bool:
        return False

    @should_stop.setter
    def should_stop(self, value: bool) -> None: ...

    def save(self, path: str) -> None: ...


class Base:
    def on_begin(self, trainer: Any, module: Any) -> None: ...
    def on_step(self, trainer: Any, module: Any, logs: Any = None, **kwargs: Any) -> None: ...
    def on_never(self, trainer: Any, module: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}


Base.__module__, Base.__name__ = "lightning.testing", "Callback"  # what recognition looks at

DESCRIPTION = Description(
    events={
        "on_begin": Event(Callback.on_fit_start),
        "on_step": Event(Callback.on_step_end, note="after the update"),
        "on_never": Event(None, note="a native run has no such phase"),
    },
    arguments={"trainer": TrainerView, "module": None, "logs": None},
)


@pytest.fixture(autouse=True)
def own_system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(surfaces, "description_of", lambda system: DESCRIPTION)
    surfaces._surface.cache_clear()
    yield
    surfaces._surface.cache_clear()
    descriptions.description_of.cache_clear()


def read(thing: Any) -> Surface:
    found = surface_of(thing)
    assert found is not None
    return found


class Silent(Base):
    """Overrides nothing."""

    stage = 1


class Uses(Base):
    def on_begin(self, t: Any, m: Any) -> None:  # other names than the base class has
        strategy = t.strategy
        t.should_stop = strategy.rank > m.layers
        t.save("here")

    def on_step(self, trainer: Any, module: Any, logs: Any = None, **kwargs: Any) -> None:
        self.value = logs["loss"] + logs.get("accuracy") + kwargs["trainer"].step

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}


def test_a_class_that_overrides_nothing_uses_nothing() -> None:
    surface = read(Silent)
    assert (surface.events, surface.uses, surface.mapped) == ((), (), True)


def test_events_and_attributes_are_found_whatever_the_arguments_are_called() -> None:
    surface = read(Uses)
    assert [(one.name, one.moment) for one in surface.events] == [("on_begin", "on_fit_start"), ("on_step", "on_step_end")]
    assert surface.state == ("state_dict",)
    assert [(one.kind, one.text, one.provided) for one in surface.uses] == [
        ("reads", "trainer.strategy", True),
        ("reads", "trainer.strategy.rank", True),
        ("reads", "module.layers", None),
        ("sets", "trainer.should_stop", True),
        ("calls", "trainer.save", True),
        ("reads", "logs['loss']", None),
        ("reads", "logs['accuracy']", None),
        ("reads", "trainer.step", True),
    ]
    assert surface.mapped


class Wrong(Base):
    def on_begin(self, trainer: Any, module: Any) -> None:
        self.depth = trainer.connector.depth
        trainer.step = 3
        if self.depth:
            trainer.stp += 1

    def on_never(self, trainer: Any, module: Any) -> None:
        trainer.anything()


def test_what_is_absent_is_named_with_the_replacement() -> None:
    assert [(one.kind, one.text, one.certain) for one in read(Wrong).missing] == [
        ("reads", "trainer.connector", True),
        ("sets", "trainer.step", True),
        ("reads", "trainer.stp", False),
        ("sets", "trainer.stp", False),
    ]
    assert list(read(Wrong).notes()) == [
        "! Wrong reads trainer.connector in on_begin. Use run.driver in a native callback.",
        "! Wrong sets trainer.step in on_begin. A native run only lets it be read.",
        "! Wrong reads trainer.stp in on_begin. Did you mean 'step'?",
        "! Wrong overrides on_never, which is never called: a native run has no such phase",
    ]


class Rethrows(Base):
    def on_begin(self, trainer: Any, module: Any) -> None:
        try:
            _ = trainer.connector.depth
        except AttributeError:
            raise ValueError("no depth") from None


def test_an_error_that_is_raised_again_is_no_preparation() -> None:
    assert [one.text for one in read(Rethrows).missing] == ["trainer.connector"]


class Outside:
    def __init__(self, trainer: Any) -> None:
        _ = trainer.connector


class PassesOn(Base):
    def on_begin(self, trainer: Any, module: Any) -> None:
        self.outside = Outside(trainer)
        self.shown = str(trainer.strategy)

    def on_step(self, trainer: Any, module: Any, logs: Any = None, **kwargs: Any) -> None:
        self.again(trainer, 3)

    def again(self, trainer: Any, depth: int) -> None:
        if depth:
            self.again(trainer, depth - 1)


def test_classes_and_unknown_functions_that_receive_an_argument_are_listed() -> None:
    surface = read(PassesOn)
    assert [(one.event, one.text) for one in surface.passed_on] == [("on_begin", "Outside(trainer)")]
    assert surface.mapped


class Given(Base):
    def __init__(self, begin: Any = None, **hooks: Any) -> None:
        if begin is not None:
            self.on_begin = begin  # type: ignore[method-assign]
        for name, hook in hooks.items():
            setattr(self, name, hook)


def test_hooks_that_are_arguments_are_those_of_the_instance() -> None:
    assert [one.name for one in read(Given).events] == ["on_begin"]
    assert read(Given).dynamic
    given = Given(on_step=lambda trainer, module, **kwargs: trainer.connector)
    surface = read(given)
    assert [one.name for one in surface.events] == ["on_step"]
    assert [one.text for one in surface.missing] == ["trainer.connector"]
    assert not surface.dynamic


def test_a_source_that_cannot_be_read_is_named() -> None:
    namespace: dict[str, Any] = {"Base": Base}
    exec("class Typed(Base):\n    def on_begin(self, trainer, module):\n        trainer.connector\n", namespace)
    built_in = type("BuiltIn", (Base,), {"on_begin": print})
    for kind, name in ((namespace["Typed"], "Typed.on_begin"), (built_in, "BuiltIn.print")):
        surface = read(kind)
        assert surface.unreadable == (name,)
        assert [one.name for one in surface.events] == ["on_begin"]
        assert not surface.mapped
        assert [*surface.notes("Two")] == [f"! Two has methods without source, and what they use is not checked: {name}"]


def test_another_class_has_no_surface() -> None:
    assert surface_of(Callback) is None
    assert surface_of(3) is None
