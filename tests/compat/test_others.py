"""An adapter of another package: recognized by its entry point, planned, resumed, and named in errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).with_name("example")

PRELUDE = """
import tempfile
import madeup
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.testing import check_adapter, tiny_loader, tiny_run, tiny_trainer
"""


def said(script: str, *, installed: bool = True) -> str:
    """Return what a script prints, with the example package installed, or with the made-up trainer alone."""
    path = os.pathsep.join([*sys.path, str(EXAMPLE)] if installed else sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    code = PRELUDE if installed else ""
    done = subprocess.run([sys.executable, "-c", code + script], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_its_callbacks_run_in_a_native_list_and_stand_in_the_plan() -> None:
    shown = said("""
one = madeup.LossSum()
trainer = tiny_trainer(steps=4, epochs=None, callbacks=[Evaluate(tiny_loader(), every="2 steps"), one])
print(trainer.plan())
trainer.fit()
print(len(one.results), one.total > 0, one in trainer.callbacks)
""")
    assert "of other systems: LossSum (madeup)" in shown
    assert "2 True True" in shown


def test_its_state_is_in_checkpoints() -> None:
    shown = said("""
def total(steps, folder, resume):
    one = madeup.LossSum()
    tiny_trainer(steps=steps, epochs=None, seed=1, directory=folder, callbacks=[one, Checkpoint("1 step")]).fit(resume=resume)
    return one.total

with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as cut:
    total(3, cut, False)
    print(total(6, cut, "auto") == total(6, whole, False))
""")
    assert shown.splitlines()[-1] == "True"


def test_an_error_names_the_callback_and_the_event_and_a_misspelled_event_is_found() -> None:
    shown = said("tiny_run(steps=3, callbacks=[madeup.Breaks()])")
    assert "ValueError: the disk is full" in shown
    assert "raised in Breaks.on_step_done" in shown
    shown = said("tiny_run(steps=1, callbacks=[madeup.Misspelled()])")
    assert "Misspelled.on_step_dome is never called: it is no event of madeup. Did you mean 'on_step_done'?" in shown


def test_the_testing_kit_checks_an_adapter() -> None:
    assert "kept\n" in said("check_adapter(madeup.LossSum, reads=True); print('kept')")
    assert "AssertionError" in said("check_adapter(madeup.LossSum)")  # it reads the device in every step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("MadeUpCallback.system = ''", "MadeUpCallback.system is the name of the other system; it is missing"),
        ("MadeUpCallback.__eq__ = object.__eq__", "an adapter equals its callback"),
        (
            "from cadenza import Callback; from cadenza.compat import Event; MadeUpCallback.events['on_begin'] = "
            "Event(Callback.on_fit_start, lambda adapter, hook: lambda run: None)",
            "events that a run never called, though their moments fired: on_begin",
        ),
    ],
)
def test_the_testing_kit_finds_what_is_wrong(change: str, message: str) -> None:
    import re

    shown = said(
        f"from madeup_adapter import MadeUpCallback\n{change}\ncheck_adapter(madeup.LossSum, reads=True); print('kept')"
    )
    assert re.search(message, shown), shown


def test_without_the_package_its_callback_is_no_callback_and_other_systems_are_not_imported() -> None:
    shown = said(
        f"import sys; sys.path.insert(0, {str(EXAMPLE)!r}); sys.path.insert(0, '.')\n"
        "import madeup\nfrom cadenza.testing import tiny_run\n"
        "tiny_run(steps=1)\n"
        "print([name for name in ('madeup_adapter', 'transformers', 'lightning', 'keras') if name in sys.modules])"
    )
    assert shown.splitlines()[-1] == "[]"


def test_an_adapter_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cadenza.adapters]\nother.Base = nowhere:Adapter\n")
    shown = said(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
Base = type("Base", (), {{"__module__": "other"}})
tiny_run(steps=1, callbacks=[Base()])
""")
    assert "CallbackError: the adapter 'nowhere:Adapter' of other.Base cannot be imported: No module named 'nowhere'" in shown
