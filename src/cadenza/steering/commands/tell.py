"""``cadenza tell``: act on a run that goes on."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cadenza.commands.output import add_json, clean, print_json, say
from cadenza.errors import CadenzaError, DirectoryError
from cadenza.steering.acts import VERBS
from cadenza.steering.commands.ask import put_errors_in_json
from cadenza.steering.run_reader import failed
from cadenza.steering.sending import tell

WAITING = 3
"""The exit code for an act without a result in time."""
_LATE = {"waiting": "the run has not taken it yet", "taken": "the run has begun it, and has no result yet"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Tell a run to do something at its next step boundary, on all ranks at the same step. The run must have Steering() in "
        "its callbacks, or CADENZA_STEERING=1 in its environment, and belong to the same user. Exit code 0: it is done; 1: it "
        "is refused, and the reason is printed; 3: the run has come to no step boundary in time, and the act still waits."
    )
    parser.epilog = (
        'examples:\n  cadenza tell runs/first stop --reason "good enough"\n  cadenza tell runs/first pause\n'
        "  cadenza tell runs/first set lr=1e-4\n  cadenza tell runs/first set lr=1e-4 group=head\n"
        "  cadenza tell runs/first set accumulate=4\n  cadenza tell runs/first note the learning rate was too high\n"
        "  cadenza tell runs/first attach probes:GradientNorm --json"
    )
    parser.add_argument("run", metavar="RUN", help="the directory of a run that goes on")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    parser.add_argument(
        "what", nargs="*", metavar="WHAT", help="of set, NAME=VALUE and group=NAME; of note, a text; of attach, module:Callback"
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the decision that the run records")
    parser.add_argument("--wait", type=float, default=5.0, metavar="SECONDS", help="wait so long for the result; 5 if left out")
    add_json(parser, "print one line of JSON; its form has a version, see the page Ask and steer a run")
    put_errors_in_json(parser)
    parser.set_defaults(command=act, error=parser.error)


def act(arguments: argparse.Namespace) -> int:
    """Send the act, wait for its result and print it; return the exit code.

    Raises:
        DirectoryError: Without ``--json``, the directory holds no run.
        SystemExit: The verb lacks an argument or has one too many.
    """
    try:
        given = given_to(arguments.verb, arguments.what)
    except CadenzaError as error:
        arguments.error(str(error))
    try:
        found = tell(arguments.run, arguments.verb, given, reason=arguments.reason, wait_s=arguments.wait)
    except DirectoryError as error:
        if not arguments.json:
            raise
        print_json(failed(arguments.run, arguments.verb, "directory", error), indent=None)
        return 1
    if arguments.json:
        print_json(found, indent=None)
    else:
        at = f" at step {found['step']}" if found["step"] is not None else ""
        say(clean(f"{found['state']}{at}: {found.get('result') or found.get('why') or _LATE[found['state']]}"))
    return {"done": 0, "waiting": WAITING, "taken": WAITING}.get(found["state"], 1)


def given_to(verb: str, given: list[str]) -> dict[str, Any]:
    """Return the arguments of a verb from those of a command line.

    Raises:
        CadenzaError: There are too few or too many.

    >>> given_to("set", ["lr=1e-4", "group=head"]), given_to("note", ["too", "high"]), given_to("save", [])
    ({'lr': 0.0001, 'group': 'head'}, {'text': 'too high'}, {})
    """
    if verb == "note":
        if not given:
            raise CadenzaError("note needs a text, as in: cadenza tell RUN note the rate was too high")
        return {"text": " ".join(given)}
    if verb == "attach":
        if len(given) != 1 or ":" not in given[0]:
            raise CadenzaError(f"attach needs one module:Callback; got {' '.join(given) or 'nothing'}")
        return {"callback": given[0]}
    if verb == "set":
        if not given or not all("=" in item for item in given):
            raise CadenzaError(f"set needs NAME=VALUE, such as lr=1e-4; got {' '.join(given) or 'nothing'}")
        return {name: _value(text) for name, _, text in (item.partition("=") for item in given)}
    if given:
        raise CadenzaError(f"{verb} takes no more arguments; got {' '.join(given)!r}. Give a reason with --reason.")
    return {}


def _value(text: str) -> Any:
    """Return a number, a list or another plain value of JSON; text for anything else."""
    try:
        return json.loads(text)
    except ValueError:
        try:
            return float(text)  # such as 1e-4 without a point, which JSON has too, or .1
        except ValueError:
            return text
