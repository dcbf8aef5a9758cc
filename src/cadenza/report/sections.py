"""The sections of the report other than curves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cadenza.report.story import StoredCheckpoint, Story, act_text
from cadenza.status.decisions import Decision
from cadenza.status.formats import counted, duration, local_date, shown_date, size
from cadenza.status.markup import Html, element, joined
from cadenza.status.stragglers import PARTS

FEW = 3
"""With more runs than this, the parts of each run are folded."""
PROFILE_HINT = "This run has no profile. Add Profile() to its callbacks to see the time of each part here."

SEEN = "A rank for which others wait waits the least."
UNSEEN = "On a GPU, kernels wait for other ranks, and this time counts as compute. The order is that of the time for data."


def card(story: Story, head: Html | None) -> Html:
    """Return a summary of a run: outcome, counters, device."""
    at, arguments = story.reached, story.info.get("arguments")
    model = arguments.get("model") if isinstance(arguments, Mapping) else None
    rows: dict[str, object] = {
        "epochs": f"{at.epoch:,}" if at.batch or not at.step else None,
        "steps": f"{at.step:,}",
        "samples": f"{at.samples:,}" if at.samples else None,
        "tokens": f"{at.tokens:,}" if at.tokens else None,
        "took": story.took,
        "device": story.info.get("device"),
        "seed": story.info.get("seed"),
        "model": model,
    }
    shown = [element("div", element("dt", name), element("dd", fact)) for name, fact in rows.items() if fact not in (None, "")]
    ending = element("p", element("span", class_=f"state {story.kind or 'open'}", aria_hidden="true"), story.ending)
    problems = [element("p", problem, class_="fault") for problem in story.problems]
    return element("article", head, ending, *problems, element("dl", *shown), class_="card")


def checkpoints(story: Story) -> Html:
    """Return the table of the checkpoints."""
    if not story.checkpoints:
        return element("p", "No checkpoints in the run's directory.", class_="note")
    rows = [_checkpoint(kept) for kept in story.checkpoints]
    note = "Read from the manifests. "
    hint = joined([note, element("code", "cadenza checkpoint verify"), " reads every file."])
    table = _table(("checkpoint", "epoch", "step", "written", "size", "written for", ""), rows, figures={1, 2, 4})
    return element("div", table, element("p", hint, class_="note"))


def _checkpoint(kept: StoredCheckpoint) -> list[object]:
    name, manifest = element("code", kept.name), kept.manifest
    if not manifest:
        return [name, "", "", "", "", element("span", kept.problem, class_="fault"), ""]
    from cadenza.checkpoint.store.manifest import bytes_in  # imported here because it needs torch

    marks = {"not exact": not manifest.get("exact"), "not finite": not manifest.get("finite", True)}
    marks["weights only"] = bool(manifest.get("weights_only"))
    length = size(bytes_in(manifest))
    marked = ", ".join(mark for mark, holds in marks.items() if holds)
    when = element("time", local_date(manifest["time"]))
    return [name, f"{manifest.get('epoch', 0):,}", f"{manifest['step']:,}", when, length, manifest["reason"], marked]


def profile(story: Story) -> Html:
    """Return the times by phase, and by callback and hook."""
    measured = story.profile
    if not measured:
        return element("p", PROFILE_HINT, class_="note")
    try:
        wall, steps = float(measured["wall_s"]), int(measured["steps"])
        phases = [[phase["name"], int(phase["calls"]), float(phase["seconds"])] for phase in measured["phases"]]
        ranks = [
            [
                rank["part"],
                f"rank {int(rank['slowest'])}",
                *(duration(float(rank[key])) for key in ("seconds", "mean_s", "least_s")),
            ]
            for rank in measured.get("ranks", ())
        ]
        hooks = [[row["callback"], row["moment"], int(row["calls"]), float(row["seconds"])] for row in measured["callbacks"]]
    except (LookupError, TypeError, ValueError) as error:
        return element("p", f"profile.json cannot be read: {error!r}", class_="fault")
    phases.sort(key=lambda row: -row[-1])
    hooks.sort(key=lambda row: -row[-1])
    head = f"{duration(wall)} for {counted(steps, 'step')}."
    return element(
        "div",
        element("p", head, class_="note"),
        element("h4", "by phase"),
        _table(("phase", "calls", "time", "of all", "each call"), _timed(phases, wall), figures={1, 2, 4}),
        element("h4", "by rank") if ranks else None,
        _table(("part", "slowest", "its time", "mean", "least"), ranks, figures={2, 3, 4}) if ranks else None,
        element("h4", "by callback") if hooks else None,
        _table(("callback", "moment", "calls", "time", "of all", "each call"), _timed(hooks[:60], wall), figures={2, 3, 5})
        if hooks
        else None,
        element("p", f"{len(hooks) - 60} more took less time.", class_="note") if len(hooks) > 60 else None,
    )


def ranks(story: Story) -> Html | None:
    """Return the parts of the time of the slowest ranks and of all; None with one rank."""
    if story.ranks is None:
        return None
    slowest, mean = story.ranks["slowest"], story.ranks["mean"]
    named = [(f"rank {row['rank']}", row, row["slow_in"] or "") for row in slowest]
    rows = [
        [name, *(_bar(parts[part]) for part in PARTS), slow_in]
        for name, parts, slow_in in [*named, (f"mean of {counted(story.ranks['ranks'], 'rank')}", mean, "")]
    ]
    note = f"The slowest ranks in {duration(story.ranks['seconds'])}. "
    note += SEEN if story.ranks["waits_seen"] else UNSEEN
    table = _table(("rank", *PARTS, "slow in"), rows, figures={1, 2, 3})
    return element("div", element("p", note, class_="note"), table)


def _timed(rows: Iterable[Sequence[Any]], wall_s: float) -> list[list[object]]:
    return [
        [*names, f"{calls:,}", duration(seconds), _bar(seconds / wall_s if wall_s > 0 else 0.0),
         duration(seconds / calls) if calls else "-"]
        for *names, calls, seconds in rows
    ]  # fmt: skip


def _bar(fraction: float) -> Html:
    length = f"width:{min(max(fraction, 0.0), 1.0) * 100:.1f}%"
    bar = element("span", element("i", style=length), class_="bar", aria_hidden="true")
    return element("span", bar, f"{fraction * 100:.1f} %", class_="fraction")


def decisions(story: Story, most: int) -> Html:
    """Return faults, a summary by author, and the newest decisions."""
    if not story.decisions:
        return element("p", "The run took no decision.", class_="note")
    faults = [
        element("p", element("b", f"{fault.who} {fault.what}"), f" at {fault.when}: {fault.why}", class_="fault")
        for fault in story.faults
    ]
    newest = story.decisions[-most:]
    rows: list[list[object]] = [[f"{act.when.epoch:,}", f"{act.when.step:,}", act.what, act.who, act.why] for act in newest]
    left_out = len(story.decisions) - len(newest)
    summary = f"all {len(story.decisions):,}" if not left_out else f"the last {len(newest):,} of {len(story.decisions):,}"
    each = element(
        "details", element("summary", summary), _table(("epoch", "step", "what", "who", "why"), rows, figures={0, 1})
    )
    return element("div", *faults[:most], _summed(story.decisions), each)


def acts(story: Story, most: int) -> Html | None:
    """Return the acts of ``cadenza tell``, oldest first; None without any."""
    rows: list[list[object]] = [
        [f"{act.when.step:,}", act_text(act), act.data.get("author", ""), act.data.get("reason", ""), _result(act)]
        for act in story.acts[-most:]
    ]
    return _table(("step", "act", "author", "reason", "result"), rows, figures={0}) if rows else None


def _result(act: Decision) -> object:
    if act.what == "steered":
        return act.data.get("result", "")
    return element("span", f"refused: {act.why.partition(': ')[2]}", class_="fault")


def _summed(all_of_them: Sequence[Decision]) -> Html:
    kinds: dict[tuple[str, str], list[Decision]] = {}
    for decision in all_of_them:
        kinds.setdefault((decision.what, decision.who), []).append(decision)
    rows: list[list[object]] = [
        [what, who, f"{len(group):,}", f"{group[-1].when.step:,}", group[-1].why] for (what, who), group in kinds.items()
    ]
    return _table(("what", "who", "times", "last at step", "last reason"), rows[:100], figures={2, 3})


def environment(stories: Sequence[Story], swatches: Sequence[Html]) -> Html:
    """Return the content of ``run.json`` side by side. Rows that differ between runs are marked."""
    columns = [_flat(story.info) for story in stories]
    names = list(dict.fromkeys(name for column in columns for name in column))
    several, many = len(stories) > 1, len(stories) > FEW
    rows = []
    for name in names:
        cells = [column.get(name, "") for column in columns]
        alike = several and len(set(cells)) == 1
        differs = several and not alike and name not in ("id", "started", "ended", "command")
        sign = element("span", " ≠", title="differs", aria_label="differs", role="img", class_="sign") if differs else None
        head = element("th", name, sign, scope="row")
        one_for_all = [element("td", cells[0], colspan=len(cells))]
        row = one_for_all if alike and many else [element("td", cell) for cell in cells]
        rows.append(element("tr", head, *row, class_="differs" if differs else None))
    top = element(
        "tr", element("td"), *(element("th", s, story.name, scope="col") for s, story in zip(swatches, stories, strict=True))
    )
    table = element("table", element("thead", top) if several else None, element("tbody", *rows), class_="facts")
    return element("div", table, class_="wide", tabindex="0", role="region", aria_label="environment")


def _flat(info: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a nested mapping to strings, without the plan, which has a separate section."""
    flat: dict[str, str] = {}
    for name, value in info.items():
        if name in ("plan", "outcome") or value is None or value == []:
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, "" if name in ("arguments", "versions") else f"{prefix}{name}.")
        else:
            flat[prefix + name] = _as_text(name, value)
    return flat


def _as_text(name: str, value: Any) -> str:
    if name in ("started", "ended"):
        return shown_date(value)
    if isinstance(value, list):
        return (" " if name == "command" else "; ").join(_as_text("", item) for item in value)[:2000]
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_as_text('', item)}" for key, item in value.items())
    return (value if isinstance(value, str) else json.dumps(value))[:2000]


def plan(story: Story) -> Html | None:
    """Return the plan; None if ``run.json`` does not hold it."""
    text = story.info.get("plan")
    return element("pre", str(text)[:60_000], tabindex="0") if text else None


def for_each(stories: Sequence[Story], swatches: Sequence[Html], show: Callable[[Story], Html | None]) -> Html | None:
    """Return one part per run, where present; equal parts are shown once.

    With multiple runs, each part is headed by the names of its runs. The parts of many runs are folded.
    """
    parts = [(joined([swatch, story.name]), show(story)) for story, swatch in zip(stories, swatches, strict=True)]
    named: dict[Html, list[Html]] = {}
    for name, part in parts:
        if part is not None:
            named.setdefault(part, []).append(name)
    if len(stories) == 1 or not named:
        return next(iter(named), None)
    if len(stories) <= FEW:
        return joined([joined([element("h3", *_listed(names)), part]) for part, names in named.items()])
    return joined([element("details", element("summary", *_listed(names)), part) for part, names in named.items()])


def _listed(names: Sequence[Html]) -> list[object]:
    listed: list[object] = [part for name in names[:4] for part in (name, ", ")]
    del listed[-1]
    return [*listed, f" and {len(names) - 4} more"] if len(names) > 4 else listed


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], figures: set[int]) -> Html:
    """Return a table that scrolls on narrow pages. `figures` are the indices of numeric columns."""
    classes = ["figure" if i in figures else None for i in range(len(head))]
    top = element("tr", *(element("th", name, scope="col", class_=kind) for name, kind in zip(head, classes, strict=True)))
    body = [element("tr", *(element("td", c, class_=kind) for c, kind in zip(row, classes, strict=True))) for row in rows]
    return element(
        "div",
        element("table", element("thead", top), element("tbody", *body)),
        class_="wide",
        tabindex="0",
        role="region",
        aria_label=head[0],
    )
