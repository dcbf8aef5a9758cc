"""``cadenza capsule``: what broke in a step, from the capsule that was written then."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cadenza.commands.output import add_json, clean, complain, print_json, say, say_folded
from cadenza.errors import CheckpointError
from cadenza.timetravel.capsule_files import capsule_at, capsules_in, facts_of_capsule

_SHOWN = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Show the capsules that the callback Capsule wrote when a step broke: the step, its samples, and the first module and "
        "parameter that were not finite. In Python, replay_capsule(trainer, RUN) repeats the step."
    )
    parser.epilog = "examples:\n  cadenza capsule runs/first\n  cadenza capsule runs/first/capsules/step-00000120 --json"
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, or a capsule in it")
    add_json(parser)
    parser.set_defaults(command=show)


def show(arguments: argparse.Namespace) -> None:
    """Print each capsule of the run that can be read.

    Raises:
        CheckpointError: There is none, or one cannot be read.
    """
    facts, problems = [], list[CheckpointError]()
    for path in capsules_in(arguments.run) or [capsule_at(arguments.run)]:
        try:
            facts.append((path, facts_of_capsule(path)))
        except CheckpointError as problem:
            problems.append(problem)
    if arguments.json:
        print_json([{"path": str(path), **fact} for path, fact in facts])
    for number, (path, fact) in enumerate([] if arguments.json else facts):
        if number:
            say()
        say_folded(clean(f"{path}: {fact['why']}"), " ", "  ")
        rows = _rows(fact)
        widest = max(len(name) for name, _ in rows)
        for name, value in rows:
            say_folded(f"{name:<{widest}}  {clean(value)}", " ", " " * (widest + 2))
    for one_more in problems[1:]:
        complain(str(one_more))
    if problems:
        raise problems[0]


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    rank = f", rank {facts['rank']} of {facts['ranks']}" if facts["ranks"] > 1 else ""
    rows = [("step", f"{facts['step']}{rank}")]
    for batch in facts["batches"]:
        at = f"epoch {batch['epoch'] + 1}, batch {batch['batch_in_epoch'] + 1}"
        rows.append(("batch", f"{at}: {_samples(batch['samples'])}"))
    if (failed := facts.get("not_loaded")) is not None:
        at = f"epoch {failed['epoch'] + 1}, batch {failed['batch_in_epoch'] + 1}"
        rows.append(("not loaded", f"{at}: {_samples(failed['samples'])}"))
    rows.append(("loss", ", ".join(map(str, facts["losses"])) or "not known: the step ended before"))
    rows += [
        (name.partition("_")[0], str(facts[name])) for name in ("module", "parameter", "tensor") if facts[name] is not None
    ]
    if facts["guilty_samples"]:
        rows.append(("not finite", _samples(facts["guilty_samples"])))
    absent = ("second_pass",) if failed is not None else ("batches_left_out", "second_pass")
    rows += [(name.replace("_", " "), facts[name]) for name in absent if name in facts]
    rows.append(("weights", "those before the step" if facts["weights_exact"] else "the newest earlier ones that were finite"))
    return rows


def _samples(samples: list[int] | None) -> str:
    if samples is None:
        return "the loader has no indices"
    more = f", ... ({len(samples)})" if len(samples) > _SHOWN else ""
    return f"samples {', '.join(map(str, samples[:_SHOWN]))}{more}"
