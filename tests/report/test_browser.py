"""The page in a real browser: the curves are there, hover and zoom work, and nothing is asked of any network."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page

from cadenza.commands.main import main
from cadenza.report import page as page_of
from cadenza.report.story import Series, Story

from ..browsing import Opened, watched
from .pages import chart, finished_run, logging


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: the second is worse, and one of its values is not finite here and there."""
    folder = tmp_path_factory.mktemp("runs")
    odd = logging([math.nan if step % 4 == 3 else 10.0 ** (step % 5 - 2) for step in range(15)])
    finished_run(folder / "one", (3.0, 1.0, 2.0))
    finished_run(folder / "two", (4.0, 3.0, 2.5), odd)
    assert main(["report", str(folder / "one"), str(folder / "two"), "--output", str(folder / "report.html")]) == 0
    return folder / "report.html"


@pytest.fixture
def show(browser: Browser, report: Path) -> Iterator[Opened]:
    with watched(browser, report.as_uri()) as opened:
        yield lambda width=1200, **options: opened(report.as_uri(), viewport={"width": width, "height": 800}, **options)


def labels(plot: Locator, axis: str) -> list[str]:
    return plot.locator(f"text.{axis}").all_text_contents()


def at(plot: Locator, share: float) -> tuple[float, float]:
    """Return a place in the page: a share of the chart's width, half way down."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    return box["x"] + 52 + share * (box["width"] - 64), box["y"] + box["height"] / 2


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_every_curve_is_drawn_inside_of_its_chart(show: Opened, script: bool) -> None:
    page = show(java_script_enabled=script)
    plots = page.locator(".plot").all()
    assert len(plots) == 6
    for plot in plots:
        frame = plot.bounding_box()
        assert frame
        for curve in plot.locator("path.line").all():
            box = curve.bounding_box()
            assert box
            assert box["width"] > 100
            assert frame["x"] <= box["x"]
            assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 3
            assert frame["y"] - 1 <= box["y"]
            assert box["y"] + box["height"] <= frame["y"] + frame["height"]


def test_script_and_page_draw_the_same_curves(show: Opened) -> None:
    def heights(page: Page) -> list[list[float]]:
        """Where the curves run, in shares of their chart's height."""
        found = (
            "paths => paths.map(path => [0, .25, .5, 1].map(share => path.getPointAtLength(path.getTotalLength() * share).y))"
        )
        shares: list[list[float]] = page.locator(".curves path.line").evaluate_all(found)
        return shares

    width = 522  # here a chart is as wide as it was drawn
    drawn, again = heights(show(width=width, java_script_enabled=False)), heights(show(width=width))
    assert len(drawn) == len(again) == 11
    for one, other in zip(drawn, again, strict=True):
        assert one == pytest.approx(other, abs=1)


def test_hover_shows_the_values_of_all_runs_at_that_step_and_a_line_in_every_chart(show: Opened) -> None:
    page = show()
    plot = chart(page, "eval/loss")
    page.mouse.move(*at(plot, 9 / 14))
    assert plot.locator(".tip").inner_text().split() == ["step", "10", "one", "1", "two", "3"]
    assert plot.locator(".hover circle").count() == 2
    assert page.locator(".cross").count() == 6
    page.mouse.move(5, 5)
    assert page.locator(".tip, .cross").count() == 0


def test_a_value_that_is_not_finite_is_a_gap_and_is_called_so(show: Opened) -> None:
    page = show()
    plot = chart(page, "train/odd")
    assert (plot.locator("path.line").get_attribute("d") or "").count("M") == 4
    page.mouse.move(*at(plot, 3 / 14))
    assert "not finite" in plot.locator(".tip").inner_text()


def test_a_drag_zooms_all_charts_and_a_double_click_brings_the_whole_range_back(show: Opened) -> None:
    page = show()
    plot, other = chart(page, "train/loss"), chart(page, "train/lr")
    whole = labels(plot, "x")
    assert not page.locator("#reset").is_visible()
    page.mouse.move(*at(plot, 0.5))
    page.mouse.down()
    page.mouse.move(*at(plot, 0.9), steps=4)
    assert plot.locator(".selection").is_visible()
    page.mouse.up()
    zoomed = labels(plot, "x")
    assert zoomed != whole
    assert labels(other, "x") == zoomed
    assert all(8 <= float(label) <= 14 for label in zoomed)
    assert page.locator("#reset").is_visible()
    page.mouse.dblclick(*at(plot, 0.5))
    assert labels(plot, "x") == whole


def test_the_log_scale_has_powers_and_leaves_out_what_has_no_logarithm(show: Opened) -> None:
    page = show()
    plot = chart(page, "train/odd")
    page.locator("#log").check()
    assert {"0.01", "1", "100"} & set(labels(plot, "y"))
    assert "0" not in labels(plot, "y")
    assert plot.locator("path.line").count() == 1


def test_smoothing_draws_a_calmer_curve_over_the_raw_one(show: Opened) -> None:
    page = show()
    plot = chart(page, "train/loss")
    page.locator("#smooth").fill("0.9")
    assert plot.locator("path.raw").count() == 2
    length = "paths => paths.map(path => path.getBBox().height)"
    raw, calm = (plot.locator(kind).evaluate_all(length) for kind in ("path.raw", "path.line:not(.raw)"))
    assert all(one > other for one, other in zip(raw, calm, strict=True))


def test_the_legend_takes_runs_out_and_puts_them_back(show: Opened) -> None:
    page = show()
    button = page.locator(".legend button", has_text="two")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert chart(page, "train/loss").locator("path.line").count() == 1
    assert chart(page, "train/odd").locator("path.line").count() == 0
    button.click()
    assert chart(page, "train/loss").locator("path.line").count() == 2


def test_long_names_and_values_are_not_wider_than_the_screen_and_leave_room_for_the_table(browser: Browser) -> None:
    plan = "fit: " + "x" * 300
    info = {"arguments": {"data": ["x" * 90, {"path": "/" + "y" * 300, "none": None, "rate": 1e-5}]}, "plan": plan}
    series = {"z" * 200: Series(array("q", [1, 2]), array("d", [0.0, 1.0])), "": Series(array("q", [1]), array("d", [1.0]))}
    text = page_of([Story("n" * 120, info, series), Story("<b>é" * 30, {"plan": plan}, series), Story("c", {}, series)])
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.set_content(text)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    name = page.locator("#run-table tbody th").first.bounding_box()
    assert name
    assert name["width"] <= 200
    assert page.locator(".legend").evaluate("one => one.scrollWidth <= one.clientWidth")
    page.close()


def test_a_finger_reads_values_that_stay_until_it_taps_beside_the_charts(show: Opened) -> None:
    page = show(400, has_touch=True, is_mobile=True)
    plot = chart(page, "eval/loss")
    page.touchscreen.tap(*at(plot, 9 / 14))
    assert plot.locator(".tip").inner_text().split() == ["step", "10", "one", "1", "two", "3"]
    page.touchscreen.tap(2, 2)
    assert page.locator(".tip, .cross").count() == 0


SMALL = """() => [...document.querySelectorAll("a, button, select, summary, label")]
    .filter(one => one.getClientRects().length && one.getBoundingClientRect().height < 24)
    .map(one => one.textContent)"""


def test_a_finger_finds_large_targets(show: Opened) -> None:
    assert show(400, has_touch=True, is_mobile=True).evaluate(SMALL) == []


def test_the_controls_stay_in_sight_but_not_on_small_screens_or_paper(show: Opened) -> None:
    def position(page: Page) -> str:
        found: str = page.locator(".controls").evaluate("one => getComputedStyle(one).position")
        return found

    page = show()
    assert position(page) == "sticky"
    page.set_viewport_size({"width": 640, "height": 450})  # a window of 1280 x 900 with a zoom of 200 %
    assert position(page) == "static"
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(media="print")
    assert position(page) == "static"
    assert page.locator("pre").first.evaluate("one => getComputedStyle(one).overflow") == "visible"  # nothing is cut off


def test_it_prints(show: Opened) -> None:
    assert show(color_scheme="dark").pdf().startswith(b"%PDF")
