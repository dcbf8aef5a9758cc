"""The page in a real browser: the curves are there, hover and zoom work, and nothing is asked of any network."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page

from cadenza.commands.main import main
from cadenza.report import page as page_of
from cadenza.report.story import Series, Story

from .pages import finished_run, logging

Shown = Callable[..., Page]


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
def show(browser: Browser, report: Path) -> Iterator[Shown]:
    """Open the page; at the end, all that went wrong in it and all that it asked for is looked at."""
    wrong: list[str] = []
    asked: list[str] = []
    contexts = []

    def opened(width: int = 1200, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(report.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
    assert asked == [report.as_uri()] * len(contexts)


def chart(page: Page, name: str) -> Locator:
    return page.locator("figure", has=page.locator("title", has_text=name)).locator(".plot")


def labels(plot: Locator, axis: str) -> list[str]:
    return plot.locator(f"text.{axis}").all_text_contents()


def at(plot: Locator, share: float) -> tuple[float, float]:
    """Return a place in the page: a share of the chart's width, half way down."""
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box
    return box["x"] + 52 + share * (box["width"] - 64), box["y"] + box["height"] / 2


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_every_curve_is_drawn_inside_of_its_chart(show: Shown, script: bool) -> None:
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


def test_script_and_page_draw_the_same_curves(show: Shown) -> None:
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


def test_hover_shows_the_values_of_all_runs_at_that_step_and_a_line_in_every_chart(show: Shown) -> None:
    page = show()
    plot = chart(page, "eval/loss")
    page.mouse.move(*at(plot, 9 / 14))
    assert plot.locator(".tip").inner_text().split() == ["step", "10", "one", "1", "two", "3"]
    assert plot.locator(".hover circle").count() == 2
    assert page.locator(".cross").count() == 6
    page.mouse.move(5, 5)
    assert page.locator(".tip, .cross").count() == 0


def test_a_value_that_is_not_finite_is_a_gap_and_is_called_so(show: Shown) -> None:
    page = show()
    plot = chart(page, "train/odd")
    assert (plot.locator("path.line").get_attribute("d") or "").count("M") == 4
    page.mouse.move(*at(plot, 3 / 14))
    assert "not finite" in plot.locator(".tip").inner_text()


def test_a_drag_zooms_all_charts_and_a_double_click_brings_the_whole_range_back(show: Shown) -> None:
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


def test_the_log_scale_has_powers_and_leaves_out_what_has_no_logarithm(show: Shown) -> None:
    page = show()
    plot = chart(page, "train/odd")
    page.locator("#log").check()
    assert {"0.01", "1", "100"} & set(labels(plot, "y"))
    assert "0" not in labels(plot, "y")
    assert plot.locator("path.line").count() == 1


def test_smoothing_draws_a_calmer_curve_over_the_raw_one(show: Shown) -> None:
    page = show()
    plot = chart(page, "train/loss")
    page.locator("#smooth").fill("0.9")
    assert plot.locator("path.raw").count() == 2
    length = "paths => paths.map(path => path.getBBox().height)"
    raw, calm = (plot.locator(kind).evaluate_all(length) for kind in ("path.raw", "path.line:not(.raw)"))
    assert all(one > other for one, other in zip(raw, calm, strict=True))


def test_the_legend_takes_runs_out_and_puts_them_back(show: Shown) -> None:
    page = show()
    button = page.locator(".legend button", has_text="two")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert chart(page, "train/loss").locator("path.line").count() == 1
    assert chart(page, "train/odd").locator("path.line").count() == 0
    button.click()
    assert chart(page, "train/loss").locator("path.line").count() == 2


def test_arrow_keys_read_the_values_and_escape_ends_the_zoom(show: Shown) -> None:
    page = show()
    plot = chart(page, "eval/loss")
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert plot.locator(".tip").inner_text().split()[:2] == ["step", "10"]
    page.keyboard.press("Escape")
    assert plot.locator(".tip").count() == 0


def test_a_click_on_a_head_sorts_the_table(show: Shown) -> None:
    page = show()
    table = page.locator("table.sortable").nth(1)
    head = table.locator("th", has_text="eval/loss")
    for way, order in (("descending", ["3", "2", "1 ★"]), ("ascending", ["1 ★", "2", "3"])):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == way
        assert [row.split("\t")[-1] for row in table.locator("tbody tr").all_inner_texts()] == order


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_light_and_dark_and_can_be_read_in_both(show: Shown, scheme: str) -> None:
    page = show(color_scheme=scheme)
    luminance = """selector => {
        const [style, body] = [selector, "body"].map(one => getComputedStyle(document.querySelector(one)));
        const light = colour => colour.match(/\\d+/g).slice(0, 3).map(part => part / 255)
            .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
            .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
        return [light(body.backgroundColor), light(style.stroke === "none" ? style.color : style.stroke)];
    }"""
    for selector in ("body", ".note", "path.line.c0", "path.line.c1"):
        paper, ink = page.evaluate(luminance, selector)
        assert (paper > 0.5) == (scheme == "light")
        contrast = (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05)
        assert contrast >= 4.5 if selector in ("body", ".note") else contrast >= 3


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_wider_than_the_screen(show: Shown, width: int) -> None:
    page = show(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


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


def test_it_prints(show: Shown) -> None:
    assert show(color_scheme="dark").pdf().startswith(b"%PDF")
