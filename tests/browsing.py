"""Pages in a real browser, which must log nothing and ask no network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page

Opened = Callable[..., Page]


@contextmanager
def watched(browser: Browser, inside: str) -> Iterator[Opened]:
    """Yield a function that opens an address in a new context.

    At the end, no page has logged anything, and none has asked for an address that does not begin with `inside`.
    """
    wrong: list[str] = []
    asked: list[str] = []
    contexts = []

    def opened(address: str, **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(300_000)
        page.on("console", lambda message: wrong.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        if options.get("java_script_enabled", True):
            wait_for_frame(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    elsewhere = [url for url in asked if not url.startswith((inside, "data:", "blob:"))]
    assert (wrong, elsewhere) == ([], []), f"a page logged {wrong} and asked for {elsewhere}"
    assert asked


def wait_for_frame(page: Page) -> None:
    """Wait until a page is drawn: the observers of a change of size run at the end of a frame, before the second request."""
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
