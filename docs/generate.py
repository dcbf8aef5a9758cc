"""Generate the parts of README and docs that come from the code: ``python docs/generate.py``. A test runs it with ``--check``.

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- end -->``; names after it are passed to its function.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from absent import absent, absent_fastnlp, absent_nemo, of_0_5
from counterparts import COUNTERPARTS
from own_loop import parts as parts_of_own_loop
from picture import moments_svg
from reference import classes, counterparts

from cadenza import Callback
from cadenza.callbacks import Evaluate
from cadenza.compat.fastnlp.api_of_0_5 import ARGUMENTS, HOOKS, PROPERTIES
from cadenza.compat.transformers.fields import FIELDS
from cadenza.engine.plan import indented
from cadenza.hooks.counters import counting_of
from cadenza.hooks.moments import moments_of
from cadenza.status.formats import plural
from cadenza.testing import Recorder, tiny_loader, tiny_run

ROOT = Path(__file__).resolve().parents[1]
PART = re.compile(r"(?P<start><!-- generated: (?P<name>\w+)(?P<names>[\w\s]*) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def diagram() -> str:
    """Return the moments of a recorded run: 2 epochs of 5 batches, 2 batches a step, an evaluation of 2 batches."""
    recorder = Recorder()
    tiny_run(callbacks=[recorder, Evaluate(tiny_loader(2))], epochs=2, batches=5, accumulate=2)
    return f"```text\n{recorder.diagram()}\n```\n"


def moments() -> str:
    """Return the table of moments, from their docstrings."""
    rows = ["| moment | called | `every=` and `at=` count |", "|---|---|---|"]
    for line, moment in indented(moments_of(Callback)):
        indent = "&nbsp;" * (len(line) - len(line.lstrip()))
        said = " ".join((moment.__doc__ or "").split()).removeprefix("Called ")
        counting = counting_of(moment)
        unit, under_way = counting.unit, counting.unit in counting.under_way
        counts = "its firings" if unit == "time" else f"{unit} in progress" if under_way else f"completed {plural(unit)}"
        rows.append(f"| {indent}`{moment.__name__}` | {said} | {counts} |")
    return "\n".join(rows) + "\n"


def decisions() -> str:
    """Return the list of design decisions, by their titles."""
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = [(page.name, page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")) for page in pages]
    return "".join(f"- [{title}]({name})\n" for name, title in titles)


def training_arguments() -> str:
    """Return the table of the fields of ``TrainingArguments``."""
    rows = ["| field | effect | here |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {field.how} | {field.says} |" for name, field in FIELDS.items())]) + "\n"


PARTS = {
    "classes": classes,
    "decisions": decisions,
    "diagram": diagram,
    "moments": moments,
    "counterparts": lambda: counterparts(COUNTERPARTS),
    "absent_accelerated": lambda: absent("accelerated"),
    "absent_fastnlp": lambda: absent_fastnlp(of_0_5=False),
    "absent_fastnlp_0_5": lambda: absent_fastnlp(of_0_5=True),
    "absent_nemo": absent_nemo,
    "training_arguments": training_arguments,
    "hooks_of_0_5": lambda: of_0_5("a callback of 0.5", {**HOOKS, **PROPERTIES}),
    "arguments_of_0_5": lambda: of_0_5("`Trainer` of 0.5", ARGUMENTS),
    **parts_of_own_loop(),
}


def generated(text: str) -> str:
    """Return a page with its generated parts updated."""
    return PART.sub(lambda part: part["start"] + PARTS[part["name"]](*part["names"].split()) + part["end"], text)


def main() -> int:
    """Write all pages and the picture of the moments; with ``--check``, only report files that are out of date."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: generated(page.read_text(encoding="utf-8")) for page in pages}
    texts[ROOT / "docs" / "assets" / "moments.svg"] = moments_svg()
    stale = []
    for file, text in texts.items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(file.relative_to(ROOT))
            if "--check" not in sys.argv:
                file.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.stderr.write(f"out of date: {', '.join(map(str, stale))}. Run: python docs/generate.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
