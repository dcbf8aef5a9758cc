"""Real runs to report on, and a page as a browser's parser sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cadenza import Callback, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.hooks.moments import BaseCallback
from cadenza.report import name_distinctly, page, story_at
from cadenza.testing import tiny_run

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def judge_by(values: Iterable[float], **arguments: Any) -> Evaluate:
    """Return an evaluation that reports these losses, one after another."""
    script = iter(values)

    def next_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": torch.tensor(next(script))}

    return Evaluate([torch.zeros(1)], compute=next_loss, **arguments)


def finished_run(directory: Path, losses: Sequence[float] = (3.0, 1.0, 2.0), *more: BaseCallback) -> Path:
    """Do a run with everything that the report tells of; `losses` are the results of its evaluations."""
    callbacks = [LogTraining("1 step"), judge_by(losses), Checkpoint(keep_best=("eval/loss", "min"), background=False), *more]
    tiny_run(epochs=len(losses), seed=1, directory=directory, callbacks=callbacks)
    return directory


def logging(values: Sequence[float], name: str = "train/odd") -> BaseCallback:
    """Return a callback that logs these values, one a step."""
    return on(Callback.on_step_end)(lambda run: run.log(name, values[run.progress.step - 1]))


class Parsed(HTMLParser):
    """A page: its elements in order, each with its attributes and the text right inside of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes), []))
        if tag not in ("meta", "input", "img"):
            self._open.append(self.elements[-1][2])

    def handle_endtag(self, tag: str) -> None:
        words = self._open.pop()
        if self._open and tag not in ("script", "style"):
            self._open[-1] += words

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].append(data)

    def all(self, tag: str, **attributes: str) -> list[str]:
        """Return the text of every such element; of ``class_`` one word must be there."""
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        return [
            "".join(words)
            for name, has, words in self.elements
            if name == tag and all(value in (has.get(key) or "").split() for key, value in wanted.items())
        ]

    @property
    def words(self) -> str:
        """All that a reader sees."""
        return " ".join("".join(self.all("body")).split())

    @property
    def data(self) -> Any:
        """What the script is given."""
        return json.loads(self.all("script", id="data")[0])


def report(*directories: Path) -> Parsed:
    """Return the page of these runs."""
    stories = [story_at(path) for path in directories]
    name_distinctly(stories, directories)
    return Parsed(page(stories))


def chart(page: Page, name: str) -> Locator:
    """Return the plot of this name in a page in a browser."""
    return page.locator("figure", has=page.locator("title", has_text=re.compile(f"^{re.escape(name)}$"))).locator(".plot")
