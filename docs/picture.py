"""The moments of a run as a picture, from the table of moments: for `docs/generate.py`.

The picture is as wide as a small screen, and its colours follow the page in the site and the reader's preference elsewhere.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from cadenza import Callback
from cadenza.engine.plan import indented
from cadenza.hooks.moments import moments_of

WIDTH, ROW, TOP, INDENT = 360, 22, 8, 12  # in pixels
SCOPES = {"epoch": "for each epoch", "step": "for each step", "batch": "for each batch", "eval_batch": "for each batch"}
TITLE = "The moments of a training run"
STYLE = """
  .moments { --ink: #1f2328; --soft: #59636e; --line: #6f7bc4; --fill: #5c6bc0; --paper: #fff; }
  @media (prefers-color-scheme: dark) {
    .moments { --ink: #e6e8ee; --soft: #a9b1bd; --line: #8c9eff; --fill: #8c9eff; --paper: #1c1f26; }
  }
  .moments text { fill: var(--ink); font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
  .moments .note { fill: var(--soft); font: italic 12px system-ui, sans-serif; text-anchor: end; }
  .moments .paper { fill: var(--paper); }
  .moments .scope { fill: var(--fill); fill-opacity: .07; stroke: var(--line); stroke-opacity: .8; }
"""


def rows() -> list[tuple[str, int]]:
    """Return each moment and its depth: the moments inside of the training are one level below `on_fit_start`."""
    return [(moment.__name__, (len(line) - len(line.lstrip())) // 2) for line, moment in indented(moments_of(Callback))]


def scopes(table: list[tuple[str, int]]) -> list[tuple[str, int, int, int]]:
    """Return the name, the depth, and the first and last row of each start with its end, where other moments are between."""
    found = []
    for first, (name, depth) in enumerate(table):
        inner = name.removeprefix("on_").removesuffix("_start")
        last = next((at for at, row in enumerate(table) if row == (f"on_{inner}_end", depth)), first)
        if last > first + 1:
            found.append((inner, depth, first, last))
    return found


def moments_svg() -> str:
    """Return the picture as SVG."""
    table = rows()
    last = max(at for at, (name, _) in enumerate(table) if name == "on_fit_end")
    shown = [*table[: last + 1], ("", 0), *table[last + 1 :]]  # a free row before the moments of other occasions
    described = ". ".join(f"{'inside of that, ' * depth}{name}" for name, depth in table)
    height = 2 * TOP + ROW * len(shown)
    parts = [
        f'<svg class="moments" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="moments-title moments-desc">',
        f'<title id="moments-title">{TITLE}</title>',
        f'<desc id="moments-desc">In the order in which they fire: {escape(described)}.</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
    ]
    for inner, depth, first, end in scopes(shown):
        left, top = 4 + INDENT * depth, TOP + ROW * first + 1
        box = f'x="{left}" y="{top}" width="{WIDTH - 2 * left}" height="{ROW * (end - first + 1) - 2}" rx="5"'
        parts.append(f'<rect class="scope" {box}/>')
        if inner in SCOPES:
            parts.append(f'<text class="note" x="{WIDTH - left - 8}" y="{top + 14}">{SCOPES[inner]}</text>')
    parts.append(f'<text class="note" x="{WIDTH - 12}" y="{TOP + ROW * (last + 1) + 15}">at other times</text>')
    for at, (name, depth) in enumerate(shown):
        if name:
            parts.append(f'<text x="{12 + INDENT * depth}" y="{TOP + ROW * at + 15}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
