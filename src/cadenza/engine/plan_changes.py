"""How a plan differs from the plan of an earlier run, which its ``run.json`` holds as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cadenza.errors import DirectoryError
from cadenza.files.disk import read_object


def plan_in(directory: Path) -> str | None:
    """Return the plan of the run in `directory`; None if there is none.

    Raises:
        DirectoryError: ``run.json`` cannot be read.
    """
    try:
        info = read_object(directory / "run.json")
    except ValueError as error:
        raise DirectoryError(f"{str(directory / 'run.json')!r} cannot be read: {error}") from None
    plan = (info or {}).get("plan")
    return plan if isinstance(plan, str) else None


def plan_changes(before: str, now: str) -> list[str]:
    r"""Return the lines that differ: those of the earlier plan with ``-``, those of the present one with ``+``.

    Listeners are compared moment by moment, and the length and the settings of the run one by one. The directory may differ.

    >>> before = "fit: 2 epochs, 10 steps\non_step_end   Log (every 5 steps) > Ema\non_epoch_end  Evaluate"
    >>> now = "fit: 4 epochs, 10 steps\non_step_end   Log (every 2 steps) > Ema\non_epoch_end  Evaluate"
    >>> print(*plan_changes(before, now), sep="\n")
    - fit: 2 epochs
    + fit: 4 epochs
    - on_step_end: Log (every 5 steps)
    + on_step_end: Log (every 2 steps)
    """
    earlier, present = dict(_rows(before)), dict(_rows(now))
    lines = []
    for name in {**present, **earlier}:
        gone, new = earlier.get(name, []), present.get(name, [])
        if Counter(gone) == Counter(new):
            separator = ", " if name == "fit" else " > "
            pairs = [("-", [separator.join(gone)]), ("+", [separator.join(new)])] if gone != new else []
        else:
            pairs = [("-", [*(Counter(gone) - Counter(new)).elements()]), ("+", [*(Counter(new) - Counter(gone)).elements()])]
        lines += [f"{sign} {name}: {text}" for sign, texts in pairs for text in texts]
    return lines


def _rows(plan: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the entries of each row: the headline, and the listeners of each moment."""
    for line in plan.splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "fit:":
            yield "fit", [part for part in rest.split(", ") if not part.startswith("into ")]
        elif name.startswith(("on_", "run.fire(")):
            yield name, [text for text in rest.strip().split(" > ") if text]
