"""A page of many runs in a real browser: parallel axes, search, folding, scales, media, dark mode, keyboard, screen readers."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from cadenza.records.record import Record
from cadenza.report import page as page_of
from cadenza.report import story_at
from cadenza.status.progress import Counters

from ..browsing import Opened, wait_for_frame, watched
from .pages import chart

RUNS = 6
NAMES = ["train/loss", "eval/acc", "odd/huge", "odd/tiny", "odd/gaps", "odd/point"]


def write_run(directory: Path, number: int) -> Path:
    """Write a run by hand: a noisy loss, an accuracy, and series that are hard to put on an axis."""
    chance, directory = random.Random(number), directory / f"run-{number}"
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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    runs = [write_run(folder, number) for number in range(RUNS)]
    for step in (10, 20):
        note = runs[0] / "media" / "note" / f"{step:010}.txt"
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"note {step}", encoding="utf-8")
    (folder / "report.html").write_text(page_of([story_at(run) for run in runs]), encoding="utf-8")
    return folder / "report.html"


@pytest.fixture
def show(browser: Browser, report: Path) -> Iterator[Opened]:
    with watched(browser, report.as_uri()) as opened:
        yield lambda width=1200, **options: opened(report.as_uri(), viewport={"width": width, "height": 900}, **options)


def rows(page: Page) -> list[str]:
    return [row.split("\t")[0] for row in page.locator("#run-table tbody tr:visible").all_inner_texts()]


def said(page: Page) -> str:
    return page.locator("#said").inner_text()


def drag(page: Page, x: float, start: float, end: float) -> None:
    page.mouse.move(x, start)
    page.mouse.down()
    page.mouse.move(x, end, steps=5)
    page.mouse.up()


def test_a_drag_along_an_axis_filters_axes_table_and_charts_and_a_double_click_keeps_all_again(show: Opened) -> None:
    page = show()
    area = page.locator(".axis-of-runs .area").first  # of optimizer: AdamW below, SGD above
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box
    x = box["x"] + box["width"] / 2
    drag(page, x, box["y"] + 3, box["y"] + 40)
    assert rows(page) == ["run-0", "run-2", "run-4"]
    assert page.locator(".threads path.out").count() == 3
    assert chart(page, "eval/acc").locator("path.line").count() == 3
    assert said(page) == "3 of 6 runs"
    page.mouse.dblclick(x, box["y"] + 20)
    assert len(rows(page)) == RUNS


def test_the_pointer_over_a_line_names_its_run_and_lets_it_stand_out(show: Opened) -> None:
    page = show()
    area = page.locator(".axis-of-runs .area").last  # of the metric: run-0 is the best, at the top
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2 - 2, box["y"] + 8)
    assert page.locator(".parallel .tip .at").inner_text() == "run-0"
    assert page.locator("#run-table tr.lit").get_attribute("data-run") == "0"
    assert page.locator(".curves path.lit").count() > 0
    page.mouse.move(5, 5)
    assert page.locator(".lit").count() == 0


def test_the_ends_of_an_axis_are_moved_with_the_keyboard(show: Opened) -> None:
    page = show()
    handle = page.get_by_role("slider", name="optimizer.lr, from")
    handle.focus()
    assert handle.get_attribute("aria-valuetext") == "0.001"
    page.keyboard.press("ArrowUp")
    assert handle.get_attribute("aria-valuetext") == "0.01"
    assert rows(page) == ["run-0", "run-1", "run-3", "run-4"]
    page.keyboard.press("Escape")
    assert len(rows(page)) == RUNS


def test_arguments_that_differ_are_columns_beside_the_best_value_and_sort(show: Opened) -> None:
    page = show()
    table = page.locator("#run-table")
    heads = table.locator("thead th").all_inner_texts()
    assert heads == ["run", "optimizer", "optimizer.lr", "seed", "eval/acc, best"]
    head = table.locator("th", has_text="optimizer.lr")
    for way, order in (("descending", ["run-0", "run-3"]), ("ascending", ["run-2", "run-5"])):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == way
        assert rows(page)[:2] == order
        assert said(page) == f"sorted by optimizer.lr, {way}"
    assert "1 ★" in table.locator("td.best").inner_text()


def test_search_shows_charts_by_name_and_survives_a_reload(show: Opened) -> None:
    page = show()
    page.get_by_role("searchbox").fill("ODD t")
    assert page.locator("figure[data-chart]:visible").count() == 2  # odd/tiny, odd/point
    assert said(page) == "2 of 6 charts"
    page.reload()
    assert page.locator("figure[data-chart]:visible").count() == 2
    page.get_by_role("searchbox").fill("no such chart")
    assert page.get_by_text("No chart has such a name.").is_visible()
    page.get_by_role("searchbox").fill("")
    assert page.locator("figure[data-chart]:visible").count() == 6


def test_a_group_folds_and_stays_folded_after_a_reload(show: Opened) -> None:
    page = show()
    page.locator("details.group summary", has_text="odd").click()
    assert page.locator("figure[data-chart]:visible").count() == 2
    page.reload()
    assert page.locator("figure[data-chart]:visible").count() == 2
    page.locator("details.group summary", has_text="odd").focus()
    page.keyboard.press("Enter")
    wait_for_frame(page)
    assert chart(page, "odd/huge").locator("path.line").count() == RUNS


def test_each_run_has_its_own_scale_or_all_are_normalised(show: Opened) -> None:
    page = show()
    page.locator(".legend button", has_text="run-5").click()
    plot = chart(page, "eval/acc")
    height = "paths => paths.map(path => path.getBBox().height)"
    shared = plot.locator("path.line").evaluate_all(height)
    page.locator("#scale").select_option("own")
    own = plot.locator("path.line").evaluate_all(height)
    assert min(own) > max(shared)
    assert plot.locator("text.right").count() >= 3
    assert "left axis run-0, right axis run-1, run-2 -0.195 to 0.8" in plot.locator("..").inner_text()
    page.locator("#scale").select_option("normalised")
    assert {"0", "0.5", "1"} & set(plot.locator("text.y").all_text_contents())
    assert plot.locator("text.right").count() == 0


def test_a_noisy_curve_has_a_calm_mean_over_its_faint_values_by_default(show: Opened) -> None:
    page = show()
    plot = chart(page, "train/loss")
    assert plot.locator("path.raw").count() == RUNS
    assert chart(page, "eval/acc").locator("path.raw").count() == 0
    length = "paths => paths.map(path => path.getTotalLength())"
    raw, calm = (plot.locator(kind).evaluate_all(length) for kind in ("path.raw", "path.line:not(.raw)"))
    assert all(one > other for one, other in zip(raw, calm, strict=True))
    assert "strong line: mean of 11 values around each step" in plot.locator("..").inner_text()
    page.locator("#mean").uncheck()
    assert plot.locator("path.raw").count() == 0


@pytest.mark.parametrize("width", [360, 900, 1600])
@pytest.mark.parametrize("log", [False, True])
def test_axis_labels_stay_inside_differ_and_do_not_touch(show: Opened, width: int, log: bool) -> None:
    page = show(width)
    if log:
        page.locator("#log").check()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    measure = """texts => texts.map(text => {
        const box = text.getBoundingClientRect(), frame = text.closest("svg").getBoundingClientRect();
        return [box.left - frame.left, frame.right - box.right, box.left, box.right, box.top, box.bottom];
    })"""
    for name in NAMES:
        plot = chart(page, name)
        found = plot.locator(".grid text").evaluate_all(measure)
        assert all(left >= -1 and right >= -1 for left, right, *_ in found), (name, found)
        for i, (_, _, *one) in enumerate(found):
            for _, _, *other in found[:i]:
                apart = one[0] >= other[1] or other[0] >= one[1] or one[2] >= other[3] - 4 or other[2] >= one[3] - 4
                assert apart, (name, plot.locator(".grid text").all_text_contents())
        heights = plot.locator("text.y").all_text_contents()
        assert len(set(heights)) == len(heights), (name, heights)


def test_the_values_of_a_chart_are_tables(show: Opened) -> None:
    page = show()
    figure = chart(page, "odd/gaps").locator("..")
    figure.locator(".values summary").click()
    ends, values = (figure.locator("table").nth(one) for one in range(2))
    assert ends.locator("tr").nth(1).inner_text().split("\t") == [
        "run-0",
        "1e-12 at 3",
        "1e-12 at 198",
        "1e-12 at 3",
        "1e-12 at 3",
    ]
    assert "not finite" in values.inner_text()
    assert values.locator("tbody tr").count() <= 50


def test_a_slider_shows_the_media_of_a_step(show: Opened) -> None:
    page = show()
    assert page.locator(".media pre:visible").inner_text() == "note 20"
    page.locator(".medium input").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator(".media pre:visible").inner_text() == "note 10"


def test_keys_read_zoom_and_leave_a_chart(show: Opened) -> None:
    page = show()
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


def test_every_control_can_be_reached_and_shows_its_focus(show: Opened) -> None:
    page = show()
    wanted = page.locator("button:visible, a:visible, input:visible, select:visible, summary:visible, .plot").count()
    seen = set()
    for _ in range(wanted + 60):
        page.keyboard.press("Tab")
        key, outline = page.evaluate("""() => {
            const node = document.activeElement;
            if (!node.dataset.seen) node.dataset.seen = String(Math.random());
            return [node.dataset.seen, getComputedStyle(node).outlineStyle];
        }""")
        if key in seen or page.evaluate("document.activeElement === document.body"):
            break
        seen.add(key)
        assert outline != "none"
    assert len(seen) >= wanted


def test_a_screen_reader_finds_names_roles_and_values(show: Opened) -> None:
    page = show()
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
def test_all_text_can_be_read_and_the_choice_of_colours_overrides_the_system_and_is_kept(show: Opened, scheme: str) -> None:
    page = show(color_scheme=scheme)
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


def test_runs_differ_without_colour(show: Opened) -> None:
    plot = chart(show(), "eval/acc")
    marks = plot.locator("path.marks").evaluate_all("paths => paths.map(one => one.getAttribute('d'))")
    dashes = plot.locator("path.line").evaluate_all("paths => paths.map(one => getComputedStyle(one).strokeDasharray)")
    shapes = [re.sub(r"M[\d.,-]+", "M", mark) for mark in marks]
    assert len(set(zip(shapes, dashes, strict=True))) == RUNS
