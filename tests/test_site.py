"""The site: every page, public name and link is in it, and it works from a file, without a server or a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser, Locator, Page

from cadenza import Callback
from cadenza.testing import tiny_run, tiny_trainer
from tests.long import LONG

from .browsing import Opened, watched

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from adapter_pages import ADAPTERS, offered  # noqa: E402
from public_names import homes, page_of  # noqa: E402

DOCS = ROOT / "docs"
WIDTHS = (400, 900, 1600)
USUAL_WIDTHS = [400, pytest.param(900, marks=pytest.mark.long), 1600]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, as `make docs` does. A warning ends the build."""
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("INFO ")] == []
    return folder


def built(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run MkDocs. With `--quiet` it would ignore warnings, also in strict mode."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder), *arguments]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_page_that_is_not_in_the_navigation_and_a_broken_link_end_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[lost](other.md#nowhere) [missing](nothing.md)\n", encoding="utf-8")
    (tmp_path / "docs" / "other.md").write_text("# Other\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\nnav: [index.md]\nhooks: []\nplugins: []\ntheme: {{name: mkdocs}}\n",
        encoding="utf-8",
    )
    done = built(tmp_path / "out", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode == 1
    for said in ('not included in the "nav"', "does not contain an anchor '#nowhere'", "'nothing.md'"):
        assert said in done.stderr


class Parsed(HTMLParser):
    """The anchors of a page, its links, the links of its navigation, and what it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids, self.links, self.loads, self.nav = set[str](), list[str](), list[str](), set[str]()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag == "a" and (href := given.get("href")) is not None:
            self.links.append(href)
            if "md-nav__link" in (given.get("class") or ""):
                self.nav.add(href)
        self.loads += [value for name in ("src", "href") if tag != "a" and (value := given.get(name))]


@cache
def parsed(page: Path) -> Parsed:
    return Parsed(page)


def pages_of(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if page.name != "404.html")


def anchors(site: Path, full: str) -> set[str]:
    return parsed(site / Path(page_of(homes()[full])).with_suffix(".html")).ids


@pytest.mark.parametrize("module", sorted({full.rpartition(".")[0] for full in homes()}))
def test_each_public_name_has_its_anchor_in_the_reference(site: Path, module: str) -> None:
    names = [full for full in homes() if full.rpartition(".")[0] == module]
    assert names
    assert [full for full in names if full not in anchors(site, full)] == []


@pytest.mark.parametrize("made", [tiny_trainer, tiny_run, Callback], ids=["Trainer", "Run", "Callback"])
def test_each_public_attribute_and_method_of_the_main_classes_is_shown(site: Path, made: Callable[[], object]) -> None:
    one = made()
    full = f"cadenza.{type(one).__name__}"
    public = {name for name in dir(one) if not name.startswith("_")}
    assert len(public) > 10
    assert {f"{full}.{name}" for name in public} - anchors(site, full) == set()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_each_class_and_function_that_an_adapter_offers_is_on_its_page(site: Path, adapter: str) -> None:
    page = (site / "reference" / "compat" / f"{adapter}.html").read_text(encoding="utf-8")
    rows = list(offered(adapter))
    assert len(rows) > 30
    assert [row for row in rows if f"<code>{row[1]}</code>" not in page or f">{row[0]}<" not in page] == []


def test_each_page_of_docs_is_in_the_navigation(site: Path) -> None:
    linked = {(page.parent / href.partition("#")[0]).resolve() for page in pages_of(site) for href in parsed(page).nav}
    sources = [page for page in DOCS.rglob("*.md") if page != DOCS / "index.md"]
    assert len(sources) > 40
    missing = [page for page in sources if (site / page.relative_to(DOCS)).with_suffix(".html").resolve() not in linked]
    assert missing == [], "add them to `nav` in mkdocs.yml"


def test_all_links_lead_to_a_page_and_an_anchor_in_it_and_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    broken = []
    for page in pages_of(site):
        for href in parsed(page).links:
            if re.match(r"https?:|mailto:", href):
                continue
            file, _, anchor = unquote(href).partition("#")
            target = (page.parent / file).resolve() if file else page
            if not target.is_file() or (anchor and anchor not in parsed(target).ids):
                broken.append((page.name, href))
    assert broken == []

    assert [(page.name, one) for page in pages_of(site) for one in parsed(page).loads if re.match(r"(https?:)?//", one)] == []


@pytest.fixture
def show(browser: Browser, site: Path) -> Iterator[Opened]:
    """Open a page from its file."""
    with watched(browser, site.as_uri()) as opened:
        yield lambda path, **options: opened((site / path).as_uri(), **options)


ARTICLE = re.compile(r"<article .*?</article>", re.DOTALL)
TOO_WIDE = """[...document.querySelectorAll("article")]
    .filter(one => one.getBoundingClientRect().left + one.scrollWidth > innerWidth)
    .map(one => [one.querySelector("h1").textContent, innerWidth])"""


def test_no_page_is_wider_than_the_screen(show: Opened, site: Path) -> None:
    page = show("index.html", java_script_enabled=False)
    texts = [file.read_text(encoding="utf-8") for file in pages_of(site)]
    articles = [found[0] for text in texts if (found := ARTICLE.search(text))]
    assert len(articles) == len(texts) > 100
    # All pages differ in their article alone: to lay them out together takes seconds, to load each one a minute.
    page.locator("article").evaluate("(one, articles) => { one.outerHTML = articles }", "".join(articles))
    wide = []
    for width in WIDTHS if LONG else WIDTHS[:1]:  # what fits a telephone seldom fits no desk
        page.set_viewport_size({"width": width, "height": 800})
        wide += page.evaluate(TOO_WIDE)
        assert wide or page.evaluate("document.documentElement.scrollWidth") <= width
    assert wide == []


@pytest.mark.parametrize("path", ["index.html", "moments.html", "reference/cadenza/Trainer.html", "recipes/index.html"])
def test_a_whole_page_is_not_wider_than_the_screen(show: Opened, path: str) -> None:
    page = show(path, java_script_enabled=False)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


SEARCHED = {
    "resume": "checkpoints.html",
    "gradient accumulation": "moments.html",
    "mixed precision": "reference/cadenza/Trainer.html",
    "early stopping": "reference/callbacks/EarlyStopping.html",
    "multi gpu": "guides/scale.html",
    "learning rate": "reference/callbacks/LearningRate.html",
    "wandb": "reference/sinks/Wandb.html",
    "freeze": "reference/callbacks/Freeze.html",
    "seed": "reference/cadenza/Trainer.html",
    "lightning": "guides/from-lightning.html",
    "checkpoint": "checkpoints.html",
    "callback": "writing-a-callback.html",
    "learning rate per epoch": "learning-rates.html",
    "save model": "checkpoints.html",
    "freeze layers": "reference/callbacks/Freeze.html",
    "gradient clipping": "reference/callbacks/ClipGradients.html",
    "cuda out of memory": "troubleshooting.html",
    "train loss history": "logging.html",
    "fp16": "reference/cadenza/Trainer.html",
    "two optimizers": "recipes/gan.html",
    "validation": "evaluation.html",
    "continue a stopped run": "checkpoints.html",
    "confusion matrix": "reference/callbacks/ConfusionMatrix.html",
    "progress bar": "reference/sinks/ProgressBar.html",
    "audio": "recipes/audio.html",
    "gan": "recipes/gan.html",
}
SETTLED = """words => {
    const links = [...document.querySelectorAll(".md-search-result__item > a")];
    const marked = links.map(one => new URL(one.href).searchParams.get("h"));
    const begins = words.split(" ").map(word => word.match(/[a-z]+/)[0].slice(0, 3));
    return marked.some(one => one && begins.some(begin => one.toLowerCase().includes(begin)));
}"""


def search_field(page: Page) -> Locator:
    """Return the field of the search when its index is there: words that come before are not found."""
    field = page.locator("input.md-search__input")
    field.focus()
    page.wait_for_function("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')")
    return field


def typed(field: Locator, words: str) -> None:
    """Replace the words in the field: each key starts a search, so only the last one is pressed."""
    field.fill(words[:-1])
    field.press_sequentially(words[-1])


def test_the_words_of_a_newcomer_find_the_right_page_among_the_first_three(show: Opened, site: Path) -> None:
    page = show("index.html", viewport={"width": 1600, "height": 800})
    field = search_field(page)
    lost = {}
    for words, wanted in SEARCHED.items():
        typed(field, words)
        page.wait_for_function(SETTLED, arg=words)
        links = page.locator(".md-search-result__item > a").evaluate_all("links => links.map(one => one.href)")
        pages = list(dict.fromkeys(re.split("[?#]", link.removeprefix(f"{site.as_uri()}/"))[0] for link in links))
        if wanted not in pages[:3]:
            lost[words] = pages[:5]
    assert lost == {}


@pytest.mark.parametrize("width", USUAL_WIDTHS)
def test_the_search_finds_a_class_and_opens_its_page(show: Opened, width: int) -> None:
    page = show("index.html", viewport={"width": width, "height": 800})
    if width < 960:
        page.locator("label.md-header__button[for=__search]").click()
    typed(search_field(page), "EarlyStopping")
    result = page.locator(".md-search-result__link[href*='reference/callbacks/EarlyStopping.html']").first
    result.wait_for()
    result.click()
    page.wait_for_url("**/reference/callbacks/EarlyStopping.html*")
    assert page.locator("h1").inner_text().split()[0] == "EarlyStopping"


@pytest.mark.parametrize("first", ["light", "dark"])
def test_the_toggle_changes_the_colours_that_the_system_prefers(show: Opened, first: str) -> None:
    page = show("moments.html", color_scheme=first)
    schemes = {"light": "default", "dark": "slate"}
    ink = "getComputedStyle(document.querySelector('svg.moments text')).fill"
    assert page.locator("body").get_attribute("data-md-color-scheme") == schemes.pop(first)
    before = page.evaluate(ink)
    page.locator("label.md-header__button[for^=__palette]:visible").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") == next(iter(schemes.values()))
    assert page.evaluate(ink) != before


def test_the_picture_of_the_moments_shows_all_of_them_and_has_a_name(show: Opened) -> None:
    page = show("moments.html", viewport={"width": 400, "height": 800})
    picture = page.get_by_role("img", name="The moments of a training run")
    box = picture.bounding_box()
    assert box
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 400
    moments = {name for name in vars(Callback) if name.startswith("on_") and callable(getattr(Callback, name))}
    assert moments <= set(picture.locator("text").all_text_contents())


def test_code_can_be_copied(show: Opened) -> None:
    page = show("start.html")
    assert page.locator("button.md-code__button[title*=Copy]").count() == page.locator(".highlight pre").count() > 5
