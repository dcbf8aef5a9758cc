"""``cadenza checkpoint``: list, verify, show, export and prune checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.checkpoint.catalogue import Catalogue, Reader, checked_name
from cadenza.checkpoint.retention import kept_by
from cadenza.checkpoint.store import Entry, Store
from cadenza.checkpoint.store.files import LAST
from cadenza.checkpoint.store.manifest import best_text, bytes_in
from cadenza.checkpoint.weights import MODEL, chosen_of, write_chosen
from cadenza.commands.output import add_json, complain, print_json, print_rows, say
from cadenza.errors import CheckpointError
from cadenza.status.branches import newest_branches
from cadenza.status.formats import counted, local_date


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the commands."""
    parser.description = "Look at, verify, export and delete checkpoints."
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command, text in (
        ("list", show_list, "one line a checkpoint, oldest first"),
        ("verify", verify_all, "read every file, and compare it with its checksum; exit code 1 if one differs"),
        ("show", show_newest, "what a checkpoint holds"),
        ("export", export, "write the model's weights to one safetensors file"),
        ("prune", prune, "delete all but the newest"),
    ):
        subparser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        subparser.add_argument("path", metavar="PATH", help="a run directory, a folder of checkpoints, or an fsspec URL")
        subparser.set_defaults(command=command)
        if name == "prune":
            subparser.add_argument("--keep-last", type=int, default=1, metavar="N", help="how many to keep; 1 if left out")
        if name == "export":
            subparser.add_argument("file", metavar="FILE", help="the file to write, such as weights.safetensors")
            subparser.add_argument("--weights", metavar="NAME", help="model, or averaged ones such as ema; as load_weights")
        if name in ("show", "export", "prune"):
            subparser.add_argument("--run", metavar="ID", help="if several runs save here: the id of one, or its beginning")
        if name in ("show", "export"):
            subparser.add_argument(
                "--which",
                "--name",
                metavar="WHICH",
                help="last, best, best:eval/acc, or a name such as step-500; last if left out",
            )
        if name in ("list", "show", "verify"):
            add_json(subparser)


def show_list(arguments: argparse.Namespace) -> None:
    """Print one line per checkpoint: name, run if there are several, time, size, state, and why it was written."""
    catalogue = _catalogue(arguments)
    lines = {branch.run: branch for branch in newest_branches(entry.branch for entry in catalogue.entries if entry.branch)}
    if catalogue.named is not None:
        lines[catalogue.named.run] = catalogue.named
    kept = {run: kept_by(Store(str(catalogue), run)) for run in lines}
    rows = [("name", "run", "written", "MB", "state", "kept by", "reason")]
    data = []
    for entry in catalogue.entries:
        manifest, problem = entry.manifest, _problem(entry)
        if problem or manifest is None or entry.branch is None:
            rows.append((entry.name, "", "", "", "damaged", "", problem))
            data.append({"name": entry.name, "step": entry.saved.step, "state": "damaged", "problem": problem})
            continue
        run = entry.branch.run
        rank = lines[run].rank(entry.saved, entry.branch)
        size = bytes_in(manifest)
        written = local_date(manifest["time"])
        state = _state(manifest, abandoned=rank is not None and rank[0] == 0)
        by = kept[run].get(entry.name, [])
        row = (entry.name, run[:12], written, f"{size / 1e6:.1f}", state, _rules_in(by), manifest["reason"])
        rows.append(row)
        facts = {
            "run": run,
            "time": manifest["time"],
            "bytes": size,
            "state": state,
            "kept_by": by,
            "reason": manifest["reason"],
        }
        data.append({"name": entry.name, "step": manifest["step"], **facts})
    if arguments.json:
        return print_json(data)
    return print_rows(rows if len(lines) > 1 else [(row[0], *row[2:]) for row in rows])


def verify_all(arguments: argparse.Namespace) -> None:
    """Print for each checkpoint whether every file matches its checksum.

    Raises:
        CheckpointError: A checkpoint does not.
    """
    data = []
    for entry in _catalogue(arguments).entries:
        problem = _problem(entry)
        data.append({"name": entry.name, "ok": not problem, "problem": problem or None})
        if not arguments.json:
            say(f"{entry.name}  {problem or 'ok'}")
    if arguments.json:
        print_json(data)
    if damaged := sum(not entry["ok"] for entry in data):
        raise CheckpointError(f"{damaged} of {counted(len(data), 'checkpoint')} cannot be used")


def show_newest(arguments: argparse.Namespace) -> None:
    """Print the contents of a checkpoint: manifest, the model's tensors, and the callbacks that have state."""
    entry = _catalogue(arguments).choose(checked_name(arguments.which))
    loaded = entry.store.read(entry.saved)
    entries = {key: value for key, value in loaded.manifest.items() if key not in ("files", "crc32", "weights")}
    entries |= {"weights": loaded.manifest["weights"]} if "weights" in loaded.manifest else {}  # last, with the line below
    if arguments.json:
        callbacks = [*loaded.state.get("callbacks", {})]
        tensors = {name: {"shape": [*tensor.shape], "dtype": str(tensor.dtype)} for name, tensor in loaded.model.items()}
        return print_json({"name": entry.name, **entries, "callbacks": callbacks, "model": tensors})
    entries |= {"time": local_date(loaded.manifest["time"])} if "time" in entries else {}
    best_texts = [f"{best['monitor']} {best_text(best)} at {best['checkpoint']}" for best in entries.pop("best", [])]
    entries |= {"best": ", ".join(best_texts)} if best_texts else {}
    for key, value in entries.items():
        say(f"{key:16} {value}")
    if "weights" in entries:
        say(f"{'':16} load_weights and export take these; weights='model' takes the model's own")
    say(f"{'callbacks':16} {', '.join(loaded.state.get('callbacks', {})) or 'none with a state'}")
    count = sum(tensor.numel() for tensor in loaded.model.values())
    say(f"{'model':16} {len(loaded.model)} tensors, {count:,} numbers")
    return print_rows([(name, str(tuple(tensor.shape)), str(tensor.dtype)) for name, tensor in loaded.model.items()])


def export(arguments: argparse.Namespace) -> None:
    """Write the model's weights in a checkpoint to one safetensors file.

    Raises:
        CheckpointError: There is none, or it cannot be used.
    """
    reader = Reader()
    entry = _catalogue(arguments).choose(checked_name(arguments.which), reader.problem)
    chosen = chosen_of(reader.read(entry), entry.path, entry.best, arguments.weights)
    write_chosen(chosen, arguments.file)
    averaged = "" if chosen.weights == MODEL else f" {chosen.weights!r}"
    say(f"wrote the weights{averaged} of {entry} to {arguments.file}")


def prune(arguments: argparse.Namespace) -> None:
    """Delete all but the newest checkpoints of one run; the newest that verifies is always kept.

    Checkpoints of abandoned branches count as older than all others.

    Raises:
        CheckpointError: ``--keep-last`` is below 1, or no checkpoint can be used.
    """
    if arguments.keep_last < 1:
        raise CheckpointError(f"--keep-last must be at least 1; got {arguments.keep_last}")
    catalogue = _catalogue(arguments)
    catalogue.choose(LAST)  # otherwise nothing is deleted
    gone = catalogue.prune([entry.name for _, entry in catalogue.ranked if entry.manifest is not None][-arguments.keep_last :])
    catalogue.stores[0].set_links({})
    say(f"deleted {len(gone)}: {', '.join(gone)}" if gone else "nothing to delete")


def _catalogue(arguments: argparse.Namespace) -> Catalogue:
    """Return the selected checkpoints, on the branch of ``--run``, otherwise on the branch of the run in the directory."""
    try:
        catalogue = Catalogue.at(arguments.path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    remark = catalogue.not_opened
    if not catalogue.entries:
        raise CheckpointError(
            f"there are no checkpoints in {arguments.path!r}: expected a run directory or a folder of checkpoints.{remark}"
        )
    if remark:
        complain(remark.strip())
    wanted = getattr(arguments, "run", None)
    if wanted is not None and not (catalogue.named is not None and catalogue.named.run.startswith(wanted)):
        runs = newest_branches(entry.branch for entry in catalogue.entries if entry.branch)
        found = [run for run in runs if run.run.startswith(wanted)]
        if len(found) != 1:
            raise CheckpointError(
                f"{counted(len(found), 'run')} that saved in {catalogue} have an id that begins with {wanted!r}"
            )
        catalogue.named = found[0]
    return catalogue


def _rules_in(kept_by: Sequence[Mapping[str, str]]) -> str:
    """Return the rules that keep a checkpoint as text, with the callbacks if more than one keeps it."""
    several = len({rule["callback"] for rule in kept_by}) > 1
    return ", ".join(f"{rule['callback']}: {rule['rule']}" if several else rule["rule"] for rule in kept_by)


def _problem(entry: Entry) -> str:
    return (entry.problem(exact=False) or "").removeprefix(f"{entry.name}: ")


def _state(manifest: dict[str, Any], *, abandoned: bool) -> str:
    marks = {
        "abandoned": abandoned,
        "not exact": not manifest["exact"],
        "not finite": not manifest["finite"],
        "weights only": bool(manifest.get("weights_only")),
    }
    return ", ".join(mark for mark, holds in marks.items() if holds) or "ok"
