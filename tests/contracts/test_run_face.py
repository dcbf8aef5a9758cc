"""The face of a run: few public names, read-only, and harmless to look at."""

from __future__ import annotations

import inspect
import pydoc

import pytest
from torch import nn

from cadenza import Callback, Run, Trainer, on
from cadenza.engine.session import session_of
from cadenza.hooks.habits import INSTEAD_OF_SETTING, RUN
from cadenza.testing import tiny_run, tiny_trainer

PROPERTIES = """
batch decisions device driver evaluations faults history info is_main loader loss model optimizers outcome outputs profile
progress state
"""
VERBS = """
after_step at_end backward block_saves end_epoch fire log print replace_loader replace_model save skip_batch stop update warn
why why_not
"""
NAMES = sorted([*PROPERTIES.split(), *VERBS.split()])


def test_the_public_names_of_a_run_are_these_and_at_most_36() -> None:
    seen: list[list[str]] = []
    look = on(Callback.on_step_end)(lambda run: seen.append([name for name in dir(run) if not name.startswith("_")]))
    tiny_run(callbacks=[look], steps=1)
    assert seen == [NAMES]
    assert len(NAMES) <= 36


def test_help_says_of_a_name_of_another_trainer_that_it_does_not_exist() -> None:
    assert inspect.getdoc(inspect.getattr_static(Run, "lr")) == f"Does not exist: {RUN['lr']}."
    for kind, name in [(Run, "should_stop"), (Trainer, "should_stop"), (Trainer, "train")]:
        assert f"{name}\n |      Does not exist: call " in pydoc.plain(pydoc.render_doc(kind))


@pytest.mark.parametrize("name", [*NAMES, *RUN, "prgress", "mine"])
def test_assigning_to_any_attribute_is_an_error_that_says_what_to_do(name: str) -> None:
    run = tiny_run(steps=1)
    with pytest.raises(AttributeError, match=r"call |read |set an entry|change |add |give |[Kk]eep |evaluates|the run writes"):
        setattr(run, name, None)
    with pytest.raises(AttributeError):
        delattr(run, name)


def test_the_error_of_an_assignment_names_the_nearest_verb() -> None:
    run = tiny_run(steps=1)
    for name, verb in {"should_stop": "stop(reason)", "model": "replace_model", "loader": "replace_loader"}.items():
        with pytest.raises(AttributeError, match=rf"{name}.*call run\.{verb.replace('(', '.').replace(')', '.')}"):
            setattr(run, name, None)
    with pytest.raises(AttributeError, match=r"no 'modl' and takes no new attributes\. Did you mean 'model'\?"):
        run.modl = None
    assert set(INSTEAD_OF_SETTING) == set(PROPERTIES.split())


def test_reading_every_attribute_of_a_run_changes_nothing() -> None:
    def look(run: Run) -> None:
        session = session_of(run)
        session.sync.requests.preempt(15)  # a signal is recorded when it is taken, and not when somebody looks
        before = list(run.decisions)
        assert inspect.getmembers(run)
        assert repr(run)
        assert run._repr_html_()
        assert run.decisions == before
        session.sync.requests.signal, session.sync.requests.leave = None, False

    tiny_run(callbacks=[on(Callback.on_step_end, at=2)(look)])


def test_the_model_and_the_loader_are_replaced_in_on_setup_only() -> None:
    trainer = tiny_trainer(steps=1)

    def replace(run: Run) -> None:
        run.replace_loader(list(run.loader)[:1])
        with pytest.raises(ValueError, match="the optimizers hold 2 parameters of the present model that the new one does not"):
            run.replace_model(nn.Linear(1, 1))
        wrapped = nn.Sequential(run.model)
        run.replace_model(wrapped)
        assert run.model is wrapped

    trainer.callbacks.append(on(Callback.on_setup)(replace))
    run = trainer.fit()
    assert (run.progress.step, len(list(run.loader))) == (1, 1)
    with pytest.raises(RuntimeError, match=r"run\.replace_loader\(\.\.\.\) must be called in on_setup"):
        run.replace_loader([])
