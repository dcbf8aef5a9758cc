"""The source of a callback class says which events it has, and what it uses of their arguments.

What is read from it is what happens in a run: an attribute that is named as missing fails, and no other one does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cadenza.compat.adapter.surface.surface import Surface, surface_of
from cadenza.compat.transformers import Arguments
from cadenza.errors import AdapterError
from cadenza.hooks.moments import Callback
from cadenza.testing import tiny_run, tiny_trainer

lightning: Any = pytest.importorskip("lightning", reason="the callbacks are those of Lightning: pip install lightning")
transformers: Any = pytest.importorskip("transformers", reason="and of transformers: pip install transformers")
keras: Any = pytest.importorskip("keras", reason="and of Keras: pip install keras")

# -- runs --------------------------------------------------------------------------------------------------

HEAD = """
import contextlib, functools
import keras, lightning, transformers
from helpers_of_a_package import Helper, reads_it

NAME = "missing"

def outside(trainer): return trainer.missing
def fine(trainer): return trainer.global_step
def wrapped(function):
    @functools.wraps(function)
    def call(self, *args, **kwargs): return function(self, *args, **kwargs)
    return call
def wrapped_badly(function):
    def call(self, *args, **kwargs): return function(self, *args, **kwargs)
    return call

class Base(lightning.Callback):
    def helper(self, it): return it.missing
    def __private(self, it): return it.missing
    def use_private(self, it): return self.__private(it)
    def by_name(self, first=None, *, it=None): return it.missing
    def pair(self, trainer): return 1, trainer
    @staticmethod
    def static(it): return it.missing
    @classmethod
    def of_class(cls, it): return it.missing
    @property
    def kept_step(self): return self.kept.missing
    @functools.cached_property
    def cached_step(self): return self.kept.missing
    @property
    def plugin(self): return self.kept.strategy

class Mixin:
    def mixed(self, it): return it.missing

class OfTransformers(transformers.TrainerCallback):
    def look(self, it): return it.no_field
    def look_by_name(self, model=None, args=None, **kwargs): return args.no_field
    def of_model(self, model=None, args=None, **kwargs): return model.weight

class OfKeras(keras.callbacks.Callback):
    def look(self, it): return it.no_field
    def look_at_model(self): return self.model.compile()
"""
PACKAGE = """
def reads_it(it): return it.missing
class Helper:
    def __init__(self, it): self.it = it
"""

LIGHTNING_FAILS = [
    "trainer.missing",
    "getattr(trainer, 'missing')",
    "getattr(trainer, NAME)",
    "t = trainer; t.missing",
    "t = u = trainer; u.missing",
    "t, n = trainer, 3; t.missing",
    "n, (t, *_) = 3, (trainer, 1); t.missing",
    "(t := trainer).missing",
    "[t.missing for t in [trainer]]",
    "for logger in trainer.loggers: logger.missing",
    "for i, logger in enumerate(trainer.loggers): logger.missing",
    "for one, logger in zip('a', reversed(trainer.loggers)): logger.missing",
    "trainer.loggers[0].missing",
    "self.helper(trainer)",
    "self.helper(it=trainer)",
    "self.by_name(it=trainer)",
    "self.static(trainer)",
    "self.of_class(trainer)",
    "self.mixed(trainer)",
    "self.use_private(trainer)",
    "Base.helper(self, trainer)",
    "super().helper(trainer)",
    "act = self.helper; act(trainer)",
    "one, it = self.pair(trainer); it.missing",
    "self.kept = trainer; self.kept_step",
    "self.kept, n = trainer, 1; self.cached_step",
    "self.kept = trainer; self.plugin.missing",
    "if trainer.global_step: return\n        trainer.missing",
    "setattr(self, 'kept', trainer); self.kept.missing",
    "(lambda it: it.missing)(trainer)",
    "act = lambda it: it.missing; act(trainer)",
    "act = lambda: trainer.missing; act()",
    "def act(it): return it.missing\n        act(trainer)",
    "outside(trainer)",
    "reads_it(trainer)",
    "from helpers_of_a_package import reads_it as it\n        it(trainer)",
    "import helpers_of_a_package\n        helpers_of_a_package.reads_it(trainer)",
    "f'{trainer.missing}'",
    "trainer.missing = 3",
    "trainer.strategy.missing",
    "setattr(trainer, 'missing', 3)",
    "trainer.global_step = 3",
    "if not hasattr(trainer, 'missing'): trainer.missing",
    "if hasattr(trainer, 'missing') or True: trainer.missing",
    "hasattr(trainer, 'missing') or trainer.missing",
    "try: trainer.missing\n        except KeyError: pass",
    "try: trainer.missing\n        except AttributeError: raise",
]
LIGHTNING_WORKS = [
    "trainer.global_step",
    "getattr(trainer, 'missing', None)",
    "if hasattr(trainer, 'missing'): trainer.missing",
    "t = trainer\n        if hasattr(t, NAME): t.missing",
    "if not hasattr(trainer, 'missing'): return\n        trainer.missing",
    "if not hasattr(trainer, 'missing'): pass\n        else: trainer.missing",
    "if not (trainer is self or not hasattr(trainer, 'missing')): trainer.missing",
    "hasattr(trainer, 'missing') and trainer.missing",
    "not hasattr(trainer, 'missing') or trainer.missing",
    "trainer.missing if hasattr(trainer, 'missing') else 0",
    "try: trainer.missing\n        except AttributeError: pass",
    "try: outside(trainer)\n        except Exception: pass",
    "with contextlib.suppress(AttributeError): trainer.missing",
    "isinstance(trainer.strategy, Mixin) and trainer.strategy.missing",
    "for logger in trainer.loggers: logger.log_metrics({'a': 1.0}, 1)",
    "for logger in trainer.loggers:\n            if not isinstance(logger, Mixin): continue\n            logger.missing",
    "fine(trainer)",
    "Helper(trainer)",
    "trainer = Mixin(); trainer.missing = 3; trainer.missing",
    "outside = fine; outside(trainer)",
    "pl_module.anything if hasattr(pl_module, 'anything') else 0",
    "self.missing = 3; self.missing",
    "trainer.should_stop = False",
]
TRANSFORMERS_FAILS = [
    "args.no_field",
    "a = args; a.no_field",
    "getattr(args, 'no_field')",
    "args.seed = 3",
    "args.no_field = 3",
    "self.look(args)",
    "self.look_by_name(**kwargs, args=args)",
]
TRANSFORMERS_WORKS = [
    "args.seed",
    "args.run_name = 'one'",
    "args.gradient_checkpointing_kwargs",
    "getattr(args, 'no_field', 3)",
    "args.to_dict()",
    "state.anything = 3; state.anything",
    "kwargs['model'].weight",
    "self.of_model(**kwargs)",
]
KERAS_FAILS = [
    "self.model.compile()",
    "model = self.model; model.compile()",
    "self.look(self.model.optimizer)",
    "self._model.compile()",
    "self.look_at_model()",
    "self.model.optimizer.no_field = 3",
    "self.model.metrics = []",
]
KERAS_WORKS = [
    "self.model.stop_training = False",
    "self.model.optimizer.learning_rate = 0.1",
    "self.model.optimizer.iterations",
    "getattr(self.model, 'no_field', 3)",
    "self.params['epochs']",
]
TRANSFORMERS_HEADS = [
    "def on_step_end(self, args, state, control, **kwargs):",
    "def on_step_end(self, *given, **kwargs):\n        args = given[0]",
]
KERAS_HEADS = [
    "def on_train_batch_end(self, batch, logs=None):",
    "def set_model(self, model):\n        super().set_model(model)",
]
LIGHTNING_HEADS = [
    "def on_train_start(self, trainer, pl_module):",
    "def on_train_start(self, t, *rest):\n        trainer = t",
    "def on_train_start(self, *args):\n        trainer, pl_module = args",
    "def on_train_start(self, *args, **kwargs):\n        trainer = args[0]",
    "@wrapped\n    def on_train_start(self, trainer, pl_module):",
    "@wrapped_badly\n    def on_train_start(self, trainer, pl_module):",
    "def on_train_start(self, *args): return self.go_on(*args)\n    def go_on(self, trainer, pl_module):",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("written")
    (path / "helpers_of_a_package.py").write_text(PACKAGE)
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))
    sys.modules.pop("helpers_of_a_package", None)


def imported(folder: Path, name: str, classes: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(HEAD + classes)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(callback: object) -> Surface:
    found = surface_of(callback)
    assert found is not None
    assert not found.unreadable
    return found


def failure(callback: object, *others: Any) -> tuple[str, str] | None:
    """Return the view and the attribute of the error in a run."""
    try:
        tiny_run(callbacks=[callback, *others])
    except AdapterError as error:
        view: Any = type(error.obj)
        return f"{view.title}.{error.name}", str(error.name)
    return None


def classes(bases: str, heads_and_bodies: list[tuple[str, str]]) -> str:
    return "".join(
        f"class C{index}({bases}):\n    {head}\n        {body}\n" for index, (head, body) in enumerate(heads_and_bodies)
    )


CASES = {
    "lightning": (LIGHTNING_FAILS, LIGHTNING_WORKS, "Base, Mixin", LIGHTNING_HEADS),
    "transformers": (TRANSFORMERS_FAILS, TRANSFORMERS_WORKS, "OfTransformers", TRANSFORMERS_HEADS),
    "keras": (KERAS_FAILS, KERAS_WORKS, "OfKeras", KERAS_HEADS),
}


@pytest.mark.parametrize("system", CASES)
def test_what_is_missing_fails_and_what_is_not_works(system: str, folder: Path) -> None:
    fails, works, bases, heads = CASES[system]
    written = [(heads[0], body) for body in (*fails, *works)] + [(head, fails[0]) for head in heads[1:]]
    module = imported(folder, f"callbacks_of_{system}", classes(bases, written))
    wrong = dict[str, object]()
    for index, (head, body) in enumerate(written):
        callback = getattr(module, f"C{index}")()
        said = read(callback)
        named = {(one.text.removeprefix("self.").removeprefix("_"), one.name) for one in said.missing}
        happened = failure(callback)
        is_right = happened in named if body in fails else said.mapped and not (named or happened)
        if not is_right:
            wrong[f"{head} {body}"] = (happened, named)
    assert wrong == {}


def test_arguments_that_the_list_gives_are_not_missing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = imported(folder, "given_arguments", classes("OfTransformers", [(TRANSFORMERS_HEADS[0], "args.no_field")]))
    plan = tiny_trainer(callbacks=[module.C0(), Arguments(no_field=3)]).plan()
    assert not [note for note in plan.notes if "no_field" in note]
    assert failure(module.C0(), Arguments(no_field=3)) is None
    assert "will fail" not in caplog.text
    [note] = [note for note in tiny_trainer(callbacks=[module.C0()]).plan().notes if "no_field" in note]
    assert note == "! C0 reads args.no_field in on_step_end. Give Arguments(no_field=...) of cadenza.compat.transformers."


# -- what a surface holds ----------------------------------------------------------------------------------


class Uses(lightning.Callback):  # type: ignore[misc]
    def on_train_start(self, t: Any, m: Any) -> None:  # other names than the base class has
        strategy = t.strategy
        t.should_stop = strategy.global_rank > m.layers
        t.save_checkpoint("here")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.value = outputs["loss"] + outputs.get("accuracy")

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}


def test_events_and_attributes_are_found_whatever_the_arguments_are_called() -> None:
    surface = read(Uses)
    events = [("on_train_start", "on_train_start"), ("on_train_batch_end", "on_batch_end")]
    assert [(one.name, one.moment) for one in surface.events] == events
    assert surface.state == ("state_dict",)
    assert [(one.kind, one.text, one.provided) for one in surface.uses] == [
        ("reads", "trainer.strategy", True),
        ("reads", "trainer.strategy.global_rank", True),
        ("reads", "pl_module.layers", None),
        ("sets", "trainer.should_stop", True),
        ("calls", "trainer.save_checkpoint", True),
    ]
    assert surface.mapped
    nothing = read(type("Silent", (lightning.Callback,), {"stage": 1}))
    assert (nothing.events, nothing.uses, nothing.mapped) == ((), (), True)


class Wrong(lightning.Callback):  # type: ignore[misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.depth = trainer.tuner.depth
        trainer.global_step = 3
        if self.depth:
            trainer.globl_step += 1


class OfTransformers(transformers.TrainerCallback):  # type: ignore[misc]
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.value = logs["loss"] + logs.get("accuracy") + kwargs["model"].layers

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.anything()


def test_what_is_absent_and_an_event_that_is_never_called_are_named() -> None:
    assert [(one.kind, one.text, one.certain) for one in read(Wrong).missing] == [
        ("reads", "trainer.tuner", True),
        ("sets", "trainer.global_step", True),
        ("reads", "trainer.globl_step", False),
        ("sets", "trainer.globl_step", False),
    ]
    assert list(read(Wrong).notes()) == [
        "! Wrong reads trainer.tuner in on_train_start. "
        "Put cadenza.callbacks.FindLearningRate or FindBatchSize into callbacks.",
        "! Wrong sets trainer.global_step in on_train_start. A native run only lets it be read.",
        "! Wrong reads trainer.globl_step in on_train_start. Did you mean 'global_step'?",
    ]
    surface = read(OfTransformers)
    assert [one.text for one in surface.uses] == ["logs['loss']", "logs['accuracy']", "model.layers", "args.anything"]
    assert surface.missing == []
    assert list(surface.notes()) == [
        "! OfTransformers overrides on_push_begin, which is never called: a native run pushes nothing to the Hub"
    ]


class Outside:
    def __init__(self, trainer: Any) -> None:
        _ = trainer.tuner


class PassesOn(lightning.Callback):  # type: ignore[misc]
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.outside = Outside(trainer)
        self.shown = str(trainer.strategy)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.again(trainer, 3)

    def again(self, trainer: Any, depth: int) -> None:
        if depth:
            self.again(trainer, depth - 1)


def test_classes_and_unknown_functions_that_receive_an_argument_are_listed() -> None:
    surface = read(PassesOn)
    assert [(one.event, one.text) for one in surface.passed_on] == [("on_train_start", "Outside(trainer)")]
    assert surface.mapped


class Given(lightning.Callback):  # type: ignore[misc]
    def __init__(self, begin: Any = None, **hooks: Any) -> None:
        if begin is not None:
            self.on_train_start = begin
        for name, hook in hooks.items():
            setattr(self, name, hook)


def test_hooks_that_are_arguments_are_those_of_the_instance() -> None:
    assert [one.name for one in read(Given).events] == ["on_train_start"]
    assert read(Given).dynamic
    surface = read(Given(on_train_end=lambda trainer, module: trainer.tuner))
    assert [one.name for one in surface.events] == ["on_train_end"]
    assert [one.text for one in surface.missing] == ["trainer.tuner"]
    assert not surface.dynamic


def test_a_source_that_cannot_be_read_is_named() -> None:
    namespace: dict[str, Any] = {"Base": lightning.Callback}
    exec("class Typed(Base):\n    def on_train_start(self, trainer, module):\n        trainer.tuner\n", namespace)
    built_in = type("BuiltIn", (lightning.Callback,), {"on_train_start": print})
    for kind, name in ((namespace["Typed"], "Typed.on_train_start"), (built_in, "BuiltIn.print")):
        surface = surface_of(kind)
        assert surface is not None
        assert surface.unreadable == (name,)
        assert [one.name for one in surface.events] == ["on_train_start"]
        assert not surface.mapped
        assert [*surface.notes("Two")] == [f"! Two has methods without source, and what they use is not checked: {name}"]
    assert surface_of(Callback) is surface_of(3) is None  # no classes of other systems
