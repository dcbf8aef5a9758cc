"""Logged pictures, sounds, histograms and texts, read from the run directory up to a size limit."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from cadenza.files.disk import open_regular
from cadenza.records.branch_files import media_in
from cadenza.report.story import Story
from cadenza.status.formats import counted, precise
from cadenza.status.markup import Html, element, joined

BYTES = 1_000_000
"""Maximum bytes of all media in the page."""
ONE = 120_000
"""Maximum bytes of one picture; larger ones are scaled down."""
_LARGEST = 20_000_000  # maximum bytes of a file to open
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Medium:
    """A file in the media folder of a run."""

    run: int
    step: int
    path: Path


@dataclass(slots=True)
class Chosen:
    """The media of one name on the page, by run: (step, markup) tuples."""

    shown: dict[int, list[tuple[int, Html]]] = field(default_factory=dict)


def media_of(stories: Sequence[Story]) -> dict[str, dict[int, list[Medium]]]:
    """Return the files by name and run, ordered by step. Steps that a resumed run has not reached again are left out."""
    found: dict[str, dict[int, list[Medium]]] = {}
    for run, story in enumerate(stories):
        for name, step, path in media_in(story.media) if story.media else ():
            if path.suffix in _SHOWS and step <= story.reached.step:
                found.setdefault(name, {}).setdefault(run, []).append(Medium(run, step, path))
    return found


def section(stories: Sequence[Story], swatches: Sequence[Html]) -> Html | None:
    """Return the media by name, all runs side by side, with a slider over the steps; None without media."""
    found = media_of(stories)
    if not found:
        return None
    chosen = {name: Chosen() for name in found}
    room, left_out = BYTES, 0
    for name, medium in _by_turns(found):
        shown = _shown(medium, f"{name}, {stories[medium.run].name}, step {medium.step}") if room > 0 else None
        if shown is None or len(shown) > room:
            left_out += 1
            continue
        room -= len(shown)
        chosen[name].shown.setdefault(medium.run, []).append((medium.step, shown))
    parts = [_named(name, picture, stories, swatches) for name, picture in chosen.items() if picture.shown]
    note = (
        f"{counted(left_out, 'file')} left out: too large for this page, or damaged. The media folder of the run has all files."
    )
    return joined([*parts, element("p", note, class_="note") if left_out else None])


def _by_turns(found: Mapping[str, Mapping[int, Sequence[Medium]]]) -> Iterator[tuple[str, Medium]]:
    """Yield the last of each name and run, then the first of each, then the rest, as the page has limited room."""
    rows = [(name, _spread(media)) for name, by_run in found.items() for media in by_run.values()]
    for turn in zip_longest(*([(name, medium) for medium in media] for name, media in rows)):
        yield from (picture for picture in turn if picture is not None)


def _spread(media: Sequence[Medium]) -> list[Medium]:
    """Return the last, the first, the middle, then repeatedly the middles of the gaps."""
    order, parts = dict.fromkeys([len(media) - 1, 0]), [(0, len(media) - 1)]
    for low, high in parts:
        if high - low > 1:
            middle = (low + high) // 2
            order[middle] = None
            parts += [(low, middle), (middle, high)]
    return [media[i] for i in order]


def _named(name: str, chosen: Chosen, stories: Sequence[Story], swatches: Sequence[Html]) -> Html:
    steps = sorted({step for shown in chosen.shown.values() for step, _ in shown})
    several = len(stories) > 1
    runs = []
    for run, shown in sorted(chosen.shown.items()):
        last = max(step for step, _ in shown)
        items = [
            element("div", item, element("p", f"step {step:,}", class_="count"), data_step=step, hidden=step != last)
            for step, item in sorted(shown, key=lambda pair: pair[0])
        ]
        head = element("figcaption", swatches[run], stories[run].name) if several else None
        runs.append(element("figure", head, *items, class_="media"))
    slider = element(
        "label",
        "step ",
        element("input", type="range", min=0, max=len(steps) - 1, value=len(steps) - 1, data_steps=json.dumps(steps)),
        element("output", f"{steps[-1]:,}"),
        class_="tool",
    )
    head = element("h3", name)
    return element(
        "section", head, slider if len(steps) > 1 else None, element("div", *runs, class_="gallery"), class_="medium"
    )


def _shown(medium: Medium, name: str) -> Html | None:
    """Return the markup of a file; None if it cannot be read."""
    try:
        with open_regular(medium.path, follow=False) as file:
            content = file.read(_LARGEST + 1)
        return _SHOWS[medium.path.suffix](content, name) if len(content) <= _LARGEST else None
    except (OSError, ValueError, TypeError, LookupError, SyntaxError):  # pillow may raise any of these
        return None


def _picture(content: bytes, name: str) -> Html | None:
    if not content.startswith(_PNG):
        return None
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    if len(content) > ONE:
        content = _smaller(content, width, height)
    if not content or len(content) > ONE or not 0 < width < 1 << 16 or not 0 < height < 1 << 16:
        return None
    times = max(1, min(160 // width, 320 // height))  # scale small pictures up with sharp pixels
    look = "sharp" if times > 1 else None
    return element("img", src=_uri("image/png", content), alt=name, width=width * times, height=height * times, class_=look)


def _smaller(content: bytes, width: int, height: int) -> bytes:
    """Return a picture, halved in size as often as needed; empty if pillow is not installed or the file is damaged."""
    try:
        from PIL import Image
    except ImportError:
        return b""
    if width * height > 50_000_000:
        return b""
    with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
        for _ in range(6):
            width, height = max(1, width // 2), max(1, height // 2)
            written = io.BytesIO()
            picture.resize((width, height)).save(written, "png", optimize=True)
            if len(written.getvalue()) <= ONE:
                return written.getvalue()
    return b""


def _sound(content: bytes, name: str) -> Html | None:
    if content[:4] != b"RIFF" or len(content) > 2 * ONE:
        return None
    return element("audio", controls=True, src=_uri("audio/wav", content), aria_label=name)


def _text(content: bytes, name: str) -> Html:
    text = content.decode("utf-8", "replace")
    return element("pre", text[:5000], "..." if len(text) > 5000 else None, tabindex="0", aria_label=name)


def _histogram(content: bytes, name: str) -> Html | None:
    data = json.loads(content)
    counts, edges = [float(number) for number in data["counts"]], [float(number) for number in data["edges"]]
    if not 0 < len(counts) <= 512 or len(edges) != len(counts) + 1 or not all(map(math.isfinite, [*counts, *edges])):
        return None
    wide, most = 240 / len(counts), max(*counts, 1.0)
    bars = "".join(
        f"M{i * wide:.1f},80V{80 - 76 * count / most:.1f}h{wide:.1f}V80z" for i, count in enumerate(counts) if count > 0
    )
    ends = [
        element("text", precise(edges[0]), x=0, y=95),
        element("text", precise(edges[-1]), x=240, y=95, text_anchor="end"),
    ]
    label = f"{name}: {counted(int(sum(counts)), 'value')} from {precise(edges[0])} to {precise(edges[-1])}"
    return element(
        "svg", element("path", d=bars), *ends, viewBox="0 0 240 100", role="img", aria_label=label, class_="histogram"
    )


_SHOWS = {".png": _picture, ".wav": _sound, ".txt": _text, ".json": _histogram}


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
