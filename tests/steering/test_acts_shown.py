"""Acts on a run are marked in its report and beside its curves in ``cadenza compare``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from cadenza.callbacks import LogTraining
from cadenza.commands.main import main
from cadenza.report import page, story_at
from cadenza.steering import read_run
from cadenza.testing import tiny_run
from tests.browsing import watched
from tests.report.pages import Parsed, chart
from tests.steering.test_tell import told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that carried an act out, one that refused one, and one without acts."""
    folder = tmp_path_factory.mktemp("steered")
    log = LogTraining("1 step")
    told(folder / "steered", "set", {"lr": 0.01}, beside=[log])
    told(folder / "refused", "set", {"lr": -1.0}, beside=[LogTraining("1 step")])
    tiny_run(directory=folder / "plain", callbacks=[LogTraining("1 step")], seed=1)
    return folder


def step_of(run: Path, what: str) -> int:
    return int(read_run(run).why(what)["decisions"][0]["step"])


def test_the_report_has_a_table_of_acts_and_a_mark_in_each_chart(runs: Path) -> None:
    text = page([story_at(runs / "steered")])
    at = step_of(runs / "steered", "steered")
    assert f"Acts at step {at:,}: set lr=0.01 by ann." in text
    assert text.count('class="act c0 m0 d0"') == text.count("<figure")
    parsed = Parsed(text)
    data = json.loads(next("".join(inner) for tag, given, inner in parsed.elements if given.get("id") == "data"))
    assert data["acts"] == [{"run": 0, "step": at, "text": "set lr=0.01 by ann"}]
    acts = text.partition('<section id="acts">')[2].partition("</section>")[0]
    for part in ("set lr=0.01", "ann", "a test", "lr 0.1 -&gt; 0.01 in 1 parameter group", f"{at:,}"):
        assert part in acts
    assert '<section id="acts">' not in page([story_at(runs / "plain")])


def test_an_act_that_was_refused_is_listed_with_the_reason_and_not_marked(runs: Path) -> None:
    text = page([story_at(runs / "refused")])
    acts = text.partition('<section id="acts">')[2].partition("</section>")[0]
    assert "refused: lr must be a finite number, at least 0; got -1.0" in acts
    assert 'class="act ' not in text


def test_a_reader_at_the_step_of_an_act_is_told_of_it(runs: Path, tmp_path: Path, browser: Browser) -> None:
    at = step_of(runs / "steered", "steered")
    file = tmp_path / "report.html"
    file.write_text(page([story_at(runs / "steered"), story_at(runs / "plain")]), encoding="utf-8")
    with watched(browser, "file://") as opened:
        shown = opened(f"file://{file}", viewport={"width": 1400, "height": 900})
        loss = chart(shown, "train/loss")
        assert loss.locator("path.act").count() == 1
        loss.focus()
        shown.keyboard.press("Home")
        steps = shown.evaluate("charts[0].lines[0].raw.x")
        for _ in range(min(range(len(steps)), key=lambda i: abs(steps[i] - at))):
            shown.keyboard.press("ArrowRight")
        assert "set lr=0.01 by ann" in shown.locator("#said").inner_text()
        assert "set lr=0.01 by ann" in loss.locator(".tip").inner_text()


def test_compare_marks_acts_below_the_curves_and_lists_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steered, refused, at = runs / "steered", runs / "refused", step_of(runs / "steered", "steered")
    assert main(["compare", str(steered), str(refused), str(runs / "plain")]) == 0
    lines = capsys.readouterr().out.splitlines()
    curve = next(i for i, line in enumerate(lines) if line == "curve of train/loss")
    assert [line.split()[0] for line in lines[curve + 1 : curve + 5]] == ["steered", "acts", "refused", "plain"]
    marks, steps = lines[curve + 2], read_run(steered).metric("train/loss", last=10_000)["steps"]
    drawn = lines[curve + 1].index(lines[curve + 1].split()[1])
    assert marks.index("^") - drawn == steps.index(at) * min(24, len(steps)) // len(steps)
    acts = [line for line in lines if line.startswith(("steered  ", "refused  ")) and " set lr" in line]
    assert any(f"{at:,}  set lr=0.01  ann     a test  lr 0.1 -> 0.01 in 1 parameter group" in line for line in acts)
    assert any("set lr=-1.0  ann     a test  refused: lr must be a finite number" in line for line in acts), acts
    assert main(["compare", str(steered), str(runs / "plain"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["runs"]
    assert [act["data"]["verb"] for act in data[0]["acts"]] == ["set"]
    assert data[1]["acts"] == []
