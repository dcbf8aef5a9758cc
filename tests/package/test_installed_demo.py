"""The demo runs from the wheel, in a folder outside of the checkout."""

from __future__ import annotations

import re

import pytest

from tests.package.conftest import Environment

pytestmark = pytest.mark.timeout(900)  # the first test installs torch


def test_the_demo_trains_to_97_percent_and_its_run_becomes_a_report(with_demo: Environment) -> None:
    shown = with_demo.run("cadenza", "demo", "--directory", "digits").stdout
    accuracy = re.search(r"test  *\S *300 \S *\S+ \S *(\d\.\d+)", shown)
    assert accuracy is not None, shown
    assert float(accuracy[1]) >= 0.97
    with_demo.run("cadenza", "report", "digits", "--output", "digits.html")
    assert "valid/acc" in (with_demo.folder / "digits.html").read_text(encoding="utf-8")


def test_the_plan_and_the_progress_bar_of_a_new_script_need_no_more_than_the_extra(with_demo: Environment) -> None:
    script = (
        "from cadenza.testing import tiny_trainer; from cadenza.sinks import ProgressBar, TensorBoard\n"
        "trainer = tiny_trainer(callbacks=[ProgressBar('rich'), TensorBoard()], directory='tiny')\n"
        "print(trainer.plan()); print(trainer.fit().outcome.kind)"
    )
    assert with_demo.run("python", "-W", "error", "-c", script).stdout.rstrip().endswith("finished")
