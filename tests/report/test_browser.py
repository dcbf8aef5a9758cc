"""The page in a real browser: curves, hover, zoom, parallel axes, search, keyboard and screen readers; it asks no network."""

from __future__ import annotations

import json
import math
import random
import re
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FloatRect, Locator, Page

from cadenza.records.record import Record
from cadenza.report import page as page_of
from cadenza.report import story_at
from cadenza.report.story import Series, Story
from cadenza.status.progress import Counters

from ..browsing import Opened, wait_for_frame, watched
from .pages import chart, finished_run, logging

RUNS = 6
NAMES = ["train/loss", "eval/acc", "odd/huge", "odd/tiny", "odd/gaps", "odd/point"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two real runs: the second is worse, and one of its values is not finite here and there; and one of many."""
    folder = tmp_path_factory.mktemp("runs")
    odd = logging([math.nan if step % 4 == 3 else 10.0 ** (step % 5 - 2) for step in range(15)])
    two = [finished_run(folder / "one", (3.0, 1.0, 2.0)), finished_run(folder / "two", (4.0, 3.0, 2.5), odd)]
    many = [write_run(folder / f"run-{number}", number) for number in range(RUNS)]
    for step in (10, 20):
        note = many[0] / "media" / "note" / f"{step:010}.txt"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"note {step}", encoding="utf-8")
    for name, runs in (("two.html", two), ("many.html", many)):
        (folder / name).write_text(page_of([story_at(run) for run in runs]), encoding="utf-8")
    return folder


def write_run(directory: Path, number: int) -> Path:
    """Write a run by hand: a noisy loss, an accuracy, and series that are hard to put on an axis."""
    chance = random.Random(number)
    directory.mkdir()
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, 201):
            values = {
                "train/loss": math.exp(-step / 60) * (number + 1) * (1 + chance.gauss(0, 0.1)),
                "eval/acc": step / 200 - number / 10,
            }
            values |= {"odd/huge": -1e15 * step, "odd/tiny": 1 + 1e-9 * step, "odd/gaps": math.nan if step % 3 else 1e-12}
            values |= {"odd/point": 5.0} if step == 100 else {}
            file.write(Record(Counters(step=step), 1e9 + step, values).to_json() + "\n")
    arguments = {"optimizer": [{"name": ["SGD", "AdamW"][number % 2], "lr": 10.0 ** -(number % 3 + 1)}], "seed": number}
    info = {"arguments": arguments, "monitors": [{"monitor": "eval/acc", "mode": "max", "callback": "Checkpoint"}]}
    at = {"epoch": 1, "step": 200, "batch": 200, "batch_in_epoch": 0, "samples": 400}
    result = {"results": {"eval/acc": values["eval/acc"]}}
    decision = {"what": "evaluated", "who": "Evaluate", "why": "every epoch", **at, "data": result}
    (directory / "decisions.jsonl").write_text(json.dumps(decision) + "\n", encoding="utf-8")
    (directory / "run.json").write_text(json.dumps(info), encoding="utf-8")
    return directory


@pytest.fixture
def two(browser: Browser, reports: Path) -> Iterator[Opened]:
    address = (reports / "two.html").as_uri()
    with watched(browser, address) as opened:
        yield lambda width=1200, **options: opened(address, viewport={"width": width, "height": 800}, **options)


@pytest.fixture
def many(browser: Browser, reports: Path) -> Iterator[Opened]:
    address = (reports / "many.html").as_uri()
    with watched(browser, address) as opened:
        yield lambda width=1200, **options: opened(address, viewport={"width": width, "height": 900}, **options)


def box_of(one: Locator) -> FloatRect:
    one.scroll_into_view_if_needed()
    box = one.bounding_box()
    assert box
    return box


def at(plot: Locator, share: float) -> tuple[float, float]:
    """Return a place in the page: a share of the chart's width, half way down."""
    box = box_of(plot)
    return box["x"] + 52 + share * (box["width"] - 64), box["y"] + box["height"] / 2


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(*end, steps=5)


def labels(plot: Locator, axis: str) -> list[str]:
    return plot.locator(f"text.{axis}").all_text_contents()


def rows(page: Page) -> list[str]:
    return [row.split("\t")[0] for row in page.locator("#run-table tbody tr:visible").all_inner_texts()]


def said(page: Page) -> str:
    return page.locator("#said").inner_text()


# -- curves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_every_curve_is_drawn_inside_of_its_chart(two: Opened, script: bool) -> None:
    plots = two(java_script_enabled=script).locator(".plot").all()
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


def test_script_and_page_draw_the_same_curves(two: Opened) -> None:
    def heights(page: Page) -> list[list[float]]:
        """Where the curves run, in shares of their chart's height."""
        found = (
            "paths => paths.map(path => [0, .25, .5, 1].map(share => path.getPointAtLength(path.getTotalLength() * share).y))"
        )
        shares: list[list[float]] = page.locator(".curves path.line").evaluate_all(found)
        return shares

    width = 522  # here a chart is as wide as it was drawn
    drawn, again = heights(two(width=width, java_script_enabled=False)), heights(two(width=width))
    assert len(drawn) == len(again) == 11
    for one, other in zip(drawn, again, strict=True):
        assert one == pytest.approx(other, abs=1)


def test_hover_shows_the_values_of_all_runs_at_that_step_a_gap_too_and_a_line_in_every_chart(two: Opened) -> None:
    page = two()
    plot, gaps = chart(page, "eval/loss"), chart(page, "train/odd")
    page.mouse.move(*at(plot, 9 / 14))
    assert plot.locator(".tip").inner_text().split() == ["step", "10", "one", "1", "two", "3"]
    assert plot.locator(".hover circle").count() == 2
    assert page.locator(".cross").count() == 6
    page.mouse.move(5, 5)
    assert page.locator(".tip, .cross").count() == 0
    assert (gaps.locator("path.line").get_attribute("d") or "").count("M") == 4
    page.mouse.move(*at(gaps, 3 / 14))
    assert "not finite" in gaps.locator(".tip").inner_text()


def test_a_drag_zooms_all_charts_and_a_double_click_brings_the_whole_range_back(two: Opened) -> None:
    page = two()
    plot, other = chart(page, "train/loss"), chart(page, "train/lr")
    whole = labels(plot, "x")
    assert not page.locator("#reset").is_visible()
    drag(page, at(plot, 0.5), at(plot, 0.9))
    assert plot.locator(".selection").is_visible()
    page.mouse.up()
    zoomed = labels(plot, "x")
    assert zoomed != whole
    assert labels(other, "x") == zoomed
    assert all(8 <= float(label) <= 14 for label in zoomed)
    assert page.locator("#reset").is_visible()
    page.mouse.dblclick(*at(plot, 0.5))
    assert labels(plot, "x") == whole


HEIGHTS = "paths => paths.map(path => path.getBBox().height)"


def test_a_log_scale_leaves_out_what_has_no_logarithm_smoothing_draws_a_calmer_curve_and_the_legend_takes_runs_out(
    two: Opened,
) -> None:
    page = two()
    odd, loss = chart(page, "train/odd"), chart(page, "train/loss")
    page.locator("#log").check()
    assert {"0.01", "1", "100"} & set(labels(odd, "y"))
    assert "0" not in labels(odd, "y")
    assert odd.locator("path.line").count() == 1
    page.locator("#log").uncheck()
    page.locator("#smooth").fill("0.9")
    assert loss.locator("path.raw").count() == 2
    raw, calm = (loss.locator(kind).evaluate_all(HEIGHTS) for kind in ("path.raw", "path.line:not(.raw)"))
    assert all(one > other for one, other in zip(raw, calm, strict=True))
    page.locator("#smooth").fill("0")
    button = page.locator(".legend button", has_text="two")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert (loss.locator("path.line").count(), odd.locator("path.line").count()) == (1, 0)
    button.click()
    assert loss.locator("path.line").count() == 2


def test_each_run_has_its_own_scale_or_all_are_normalised(many: Opened) -> None:
    page = many()
    page.locator(".legend button", has_text="run-5").click()
    plot = chart(page, "eval/acc")
    shared = plot.locator("path.line").evaluate_all(HEIGHTS)
    page.locator("#scale").select_option("own")
    own = plot.locator("path.line").evaluate_all(HEIGHTS)
    assert min(own) > max(shared)
    assert plot.locator("text.right").count() >= 3
    assert "left axis run-0, right axis run-1, run-2 -0.195 to 0.8" in plot.locator("..").inner_text()
    page.locator("#scale").select_option("normalised")
    assert {"0", "0.5", "1"} & set(labels(plot, "y"))
    assert plot.locator("text.right").count() == 0


def test_a_noisy_curve_has_a_calm_mean_over_its_faint_values_by_default(many: Opened) -> None:
    page = many()
    plot = chart(page, "train/loss")
    assert plot.locator("path.raw").count() == RUNS
    assert chart(page, "eval/acc").locator("path.raw").count() == 0
    length = "paths => paths.map(path => path.getTotalLength())"
    raw, calm = (plot.locator(kind).evaluate_all(length) for kind in ("path.raw", "path.line:not(.raw)"))
    assert all(one > other for one, other in zip(raw, calm, strict=True))
    assert "strong line: mean of 11 values around each step" in plot.locator("..").inner_text()
    page.locator("#mean").uncheck()
    assert plot.locator("path.raw").count() == 0


MEASURE = """texts => texts.map(text => {
    const box = text.getBoundingClientRect(), frame = text.closest("svg").getBoundingClientRect();
    return [box.left - frame.left, frame.right - box.right, box.left, box.right, box.top, box.bottom];
})"""


@pytest.mark.parametrize("width", [360, 900, 1600])
def test_axis_labels_stay_inside_differ_and_do_not_touch(many: Opened, width: int) -> None:
    page = many(width)
    for log in (False, True):
        page.locator("#log").set_checked(log)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in NAMES:
            check_labels(chart(page, name), name)


def check_labels(plot: Locator, name: str) -> None:
    found = plot.locator(".grid text").evaluate_all(MEASURE)
    assert all(left >= -1 and right >= -1 for left, right, *_ in found), (name, found)
    for i, (_, _, *one) in enumerate(found):
        for _, _, *other in found[:i]:
            apart = one[0] >= other[1] or other[0] >= one[1] or one[2] >= other[3] - 4 or other[2] >= one[3] - 4
            assert apart, (name, plot.locator(".grid text").all_text_contents())
    heights = labels(plot, "y")
    assert len(set(heights)) == len(heights), (name, heights)


def test_runs_differ_without_colour_their_values_are_tables_and_a_slider_shows_the_media_of_a_step(many: Opened) -> None:
    page = many()
    plot = chart(page, "eval/acc")
    marks = plot.locator("path.marks").evaluate_all("paths => paths.map(one => one.getAttribute('d'))")
    dashes = plot.locator("path.line").evaluate_all("paths => paths.map(one => getComputedStyle(one).strokeDasharray)")
    shapes = [re.sub(r"M[\d.,-]+", "M", mark) for mark in marks]
    assert len(set(zip(shapes, dashes, strict=True))) == RUNS

    figure = chart(page, "odd/gaps").locator("..")
    figure.locator(".values summary").click()
    ends, values = (figure.locator("table").nth(one) for one in range(2))
    run = ["run-0", "1e-12 at 3", "1e-12 at 198", "1e-12 at 3", "1e-12 at 3"]
    assert ends.locator("tr").nth(1).inner_text().split("\t") == run
    assert "not finite" in values.inner_text()
    assert values.locator("tbody tr").count() <= 50

    assert page.locator(".media pre:visible").inner_text() == "note 20"
    page.locator(".medium input").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".media pre:visible").inner_text() == "note 10"


# -- many runs -----------------------------------------------------------------------------------------


def test_axes_of_runs_filter_by_drag_and_keys_and_the_pointer_over_a_line_names_its_run(many: Opened) -> None:
    page = many()
    box = box_of(page.locator(".axis-of-runs .area").first)  # of optimizer: AdamW below, SGD above
    x = box["x"] + box["width"] / 2
    drag(page, (x, box["y"] + 3), (x, box["y"] + 40))
    page.mouse.up()
    assert rows(page) == ["run-0", "run-2", "run-4"]
    assert page.locator(".threads path.out").count() == 3
    assert chart(page, "eval/acc").locator("path.line").count() == 3
    assert said(page) == "3 of 6 runs"
    page.mouse.dblclick(x, box["y"] + 20)
    assert len(rows(page)) == RUNS

    box = box_of(page.locator(".axis-of-runs .area").last)  # of the metric: run-0 is the best, at the top
    page.mouse.move(box["x"] + box["width"] / 2 - 2, box["y"] + 8)
    assert page.locator(".parallel .tip .at").inner_text() == "run-0"
    assert page.locator("#run-table tr.lit").get_attribute("data-run") == "0"
    assert page.locator(".curves path.lit").count() > 0
    page.mouse.move(5, 5)
    assert page.locator(".lit").count() == 0

    handle = page.get_by_role("slider", name="optimizer.lr, from")
    handle.focus()
    assert handle.get_attribute("aria-valuetext") == "0.001"
    page.keyboard.press("ArrowUp")
    assert handle.get_attribute("aria-valuetext") == "0.01"
    assert rows(page) == ["run-0", "run-1", "run-3", "run-4"]
    page.keyboard.press("Escape")
    assert len(rows(page)) == RUNS


def test_arguments_that_differ_are_columns_beside_the_best_value_and_sort(many: Opened) -> None:
    page = many()
    table = page.locator("#run-table")
    heads = table.locator("thead th").all_inner_texts()
    assert heads == ["run", "eval/acc, best", "optimizer", "optimizer.lr", "seed"]
    head = table.locator("th", has_text="optimizer.lr")
    for way, order in (("descending", ["run-0", "run-3"]), ("ascending", ["run-2", "run-5"])):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == way
        assert rows(page)[:2] == order
        assert said(page) == f"sorted by optimizer.lr, {way}"
    assert "1 ★" in table.locator("td.best").inner_text()


def test_search_shows_charts_by_name_a_group_folds_and_both_survive_a_reload(many: Opened) -> None:
    page = many()
    charts = page.locator("figure[data-chart]:visible")
    page.get_by_role("searchbox").fill("ODD t")
    assert charts.count() == 2  # odd/tiny, odd/point
    assert said(page) == "2 of 6 charts"
    page.reload()
    assert charts.count() == 2
    page.get_by_role("searchbox").fill("no such chart")
    assert page.get_by_text("No chart has such a name.").is_visible()
    page.get_by_role("searchbox").fill("")
    assert charts.count() == 6

    summary = page.locator("details.group summary", has_text="odd")
    summary.click()
    assert charts.count() == 2
    page.reload()
    assert charts.count() == 2
    summary.focus()
    page.keyboard.press("Enter")
    wait_for_frame(page)
    assert chart(page, "odd/huge").locator("path.line").count() == RUNS


# -- screens, fingers, keys and readers ----------------------------------------------------------------


def test_long_names_and_values_are_not_wider_than_the_screen_and_leave_room_for_the_table(browser: Browser) -> None:
    plan = "fit: " + "x" * 300
    info = {"arguments": {"data": ["x" * 90, {"path": "/" + "y" * 300, "none": None, "rate": 1e-5}]}, "plan": plan}
    series = {"z" * 200: Series(array("q", [1, 2]), array("d", [0.0, 1.0])), "": Series(array("q", [1]), array("d", [1.0]))}
    text = page_of([Story("n" * 120, info, series), Story("<b>é" * 30, {"plan": plan}, series), Story("c", {}, series)])
    page = browser.new_page(viewport={"width": 400, "height": 800})
    page.set_content(text)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert box_of(page.locator("#run-table tbody th").first)["width"] <= 200
    assert page.locator(".legend").evaluate("one => one.scrollWidth <= one.clientWidth")
    page.close()


SMALL = """() => [...document.querySelectorAll("a, button, select, summary, label")]
    .filter(one => one.getClientRects().length && one.getBoundingClientRect().height < 24)
    .map(one => one.textContent)"""


def test_a_finger_finds_large_targets_and_reads_values_that_stay_until_it_taps_beside_the_charts(two: Opened) -> None:
    page = two(400, has_touch=True, is_mobile=True)
    assert page.evaluate(SMALL) == []
    plot = chart(page, "eval/loss")
    page.touchscreen.tap(*at(plot, 9 / 14))
    assert plot.locator(".tip").inner_text().split() == ["step", "10", "one", "1", "two", "3"]
    page.touchscreen.tap(2, 2)
    assert page.locator(".tip, .cross").count() == 0


def test_it_prints_and_the_controls_stay_in_sight_but_not_on_small_screens_or_paper(two: Opened) -> None:
    def position(page: Page) -> str:
        found: str = page.locator(".controls").evaluate("one => getComputedStyle(one).position")
        return found

    page = two(color_scheme="dark")
    assert position(page) == "sticky"
    page.set_viewport_size({"width": 640, "height": 450})  # a window of 1280 x 900 with a zoom of 200 %
    assert position(page) == "static"
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(media="print")
    assert position(page) == "static"
    assert page.locator("pre").first.evaluate("one => getComputedStyle(one).overflow") == "visible"  # nothing is cut off
    assert page.pdf().startswith(b"%PDF")


def test_keys_read_zoom_and_leave_a_chart(many: Opened) -> None:
    page = many()
    plot = chart(page, "eval/acc")
    plot.focus()
    page.keyboard.press("End")
    assert said(page).startswith("eval/acc, step 200: run-0 1, run-1 0.9")
    assert plot.locator(".tip").inner_text().split()[:2] == ["step", "200"]
    page.keyboard.press("ArrowLeft")
    assert said(page).startswith("eval/acc, step 199")
    page.keyboard.press("+")
    assert said(page).startswith("steps 100 to")
    assert page.locator("#reset").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert not page.locator("#reset").is_visible()
    page.keyboard.press("Tab")
    assert not plot.evaluate("node => node === document.activeElement")


FOCUS = """() => {
    const node = document.activeElement;
    if (!node.dataset.seen) node.dataset.seen = String(Math.random());
    return [node.dataset.seen, getComputedStyle(node).outlineStyle, node === document.body];
}"""


def test_every_control_can_be_reached_and_shows_its_focus(many: Opened) -> None:
    page = many()
    wanted = page.locator("button:visible, a:visible, input:visible, select:visible, summary:visible, .plot").count()
    seen = set()
    for _ in range(wanted + 60):
        page.keyboard.press("Tab")
        key, outline, at_the_end = page.evaluate(FOCUS)
        if key in seen or at_the_end:
            break
        seen.add(key)
        assert outline != "none"
    assert len(seen) >= wanted


def test_a_screen_reader_finds_names_roles_and_values(many: Opened) -> None:
    page = many()
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    nodes = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")]
    assert {("application", name) for name in NAMES} <= set(nodes)
    roles = {role: [name for one, name in nodes if one == role] for role, _ in nodes}
    assert any(re.match(r"train/loss Values of 6 runs over the steps 1 to 200, from ", name) for name in roles["image"])
    for role in ("button", "searchbox", "slider", "combobox", "checkbox", "link", "columnheader", "region"):
        assert roles[role], role
        assert all(roles[role]), role
    assert "status" in roles
    assert "optimizer.lr, from" in roles["slider"]


LIGHT = """() => {
    const parse = colour => {
        const canvas = new OffscreenCanvas(1, 1).getContext("2d");
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const paper = node => {
        for (let one = node; one; one = one.parentElement) {
            const found = parse(getComputedStyle(one).backgroundColor);
            if (found[3]) return light(found);
        }
        return 1;
    };
    const bad = [];
    for (const node of document.querySelectorAll("body *")) {
        const text = [...node.childNodes].some(one => one.nodeType === 3 && one.textContent.trim());
        if (!text || ["SCRIPT", "STYLE", "OPTION"].includes(node.tagName) || !node.getClientRects().length) continue;
        const style = getComputedStyle(node), ink = light(parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color));
        const [low, high] = [ink, paper(node)].sort((a, b) => a - b), contrast = (high + 0.05) / (low + 0.05);
        if (contrast < 4.5) bad.push([node.tagName, node.className.baseVal ?? node.className, contrast]);
    }
    return bad;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_and_the_choice_of_colours_overrides_the_system_and_is_kept(many: Opened, scheme: str) -> None:
    page = many(color_scheme=scheme)
    assert page.evaluate(LIGHT) == []
    paper = "getComputedStyle(document.body).backgroundColor"
    before, other = page.evaluate(paper), {"light": "dark", "dark": "light"}[scheme]
    page.locator("#theme").select_option(other)
    assert page.evaluate(paper) != before
    assert page.evaluate(LIGHT) == []
    page.reload()
    assert page.evaluate(paper) != before
    page.emulate_media(media="print")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
