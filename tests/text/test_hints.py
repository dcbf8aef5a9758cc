"""The hints are data: true of the functions they are for, and read by no run that has no error."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import cadenza
from cadenza import Callback, Loop, Run, Step, Steps, Trainer
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.engine.error_context import _BUILT
from cadenza.hooks.moments import moments_of
from cadenza.optim.precision import PRECISIONS
from cadenza.text.hints import answered, data, hints

ARGUMENTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "trainer": (Trainer,),
    "fit": (Trainer.fit,),
    "evaluate": (Evaluate, Trainer.evaluate, Trainer.predict),
    "checkpoint": (Checkpoint,),
    "early-stopping": (EarlyStopping,),
}
ATTRIBUTES: dict[str, type] = {"trainer-attributes": Trainer, "run": Run, "step": Step, "steps": Steps, "loop": Loop}


@pytest.mark.parametrize("table", ARGUMENTS)
def test_an_answer_about_an_argument_names_one_that_exists_and_is_for_names_that_do_not(table: str) -> None:
    exist: list[set[str]] = [set(inspect.signature(function).parameters) for function in ARGUMENTS[table]]
    meant = {name for answer in hints(table).values() for name in re.findall(r"^Did you mean '(\w+)'", answer)}
    assert meant <= exist[0].union(*exist)
    assert not set(hints(table)) & exist[0].intersection(*exist)


@pytest.mark.parametrize("table", ATTRIBUTES)
def test_an_answer_about_an_attribute_is_for_a_name_that_does_not_exist(table: str) -> None:
    assert not [name for name in hints(table) if hasattr(ATTRIBUTES[table], name)]


def test_moments_and_precisions_of_the_answers_exist() -> None:
    moments = moments_of(Callback)
    assert not [name for name in hints("names") if name in cadenza.__all__ or name in cadenza.callbacks.__all__]
    assert set(hints("moments").values()) <= set(moments)
    assert not set(hints("moments")) & set(moments)
    assert set(hints("precision").values()) == {f"Did you mean {name!r}?" for name in PRECISIONS}


def test_a_table_has_a_name_once() -> None:
    tables = data("hints.toml")
    for table, answers in tables.items():
        names = [] if table == "shared" else [name for several in answers.values() for name in several.split()]
        assert len(names) == len(set(names)), table
    assert all(any(answer in answers for table, answers in tables.items() if table != "shared") for answer in tables["shared"])


def test_each_cure_has_a_text_that_fits_its_patterns_or_a_function() -> None:
    cures = data("cures.toml")["cure"]
    assert {cure["build"] for cure in cures if "build" in cure} == set(_BUILT)
    for cure in cures:
        for pattern in cure["error"]:
            groups = re.compile(pattern).groups
            assert "build" in cure or cure["text"].format(*range(groups + 1), device="cpu")


A_RUN = """
import sys
from cadenza import Callback, Run
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.testing import tiny_loader, tiny_run
from cadenza.text.hints import data

class Hook(Callback):
    def on_step_end(self, r: Run) -> None:
        assert not hasattr(r, "_private")

callbacks = [Hook(), Evaluate(tiny_loader()), Checkpoint("2 steps"), EarlyStopping("eval/loss", "min")]
tiny_run(callbacks=callbacks, directory=sys.argv[1])
assert data.cache_info().misses == 0
"""


def test_a_run_without_an_error_reads_no_hints(tmp_path: Any) -> None:
    done = subprocess.run([sys.executable, "-c", A_RUN, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_a_call_that_does_not_fit_is_answered() -> None:
    @answered("fit")
    def fit(self: object, resume: bool = False) -> None:
        raise TypeError("of the function")

    calls: list[tuple[Callable[[], None], str]] = [
        (lambda: fit(0, ckpt_path="a"), r"fit has no argument 'ckpt_path'\. Did you mean 'resume'\?"),  # type: ignore[call-arg]
        (lambda: fit(0, True, "a"), r"fit takes at most 1 positional argument.*; got 2\. Trainer\(model"),  # type: ignore[call-arg]
        (lambda: fit(0), "^of the function$"),
    ]
    for wrong, message in calls:
        with pytest.raises(TypeError, match=message):
            wrong()
