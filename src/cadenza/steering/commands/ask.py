"""``cadenza ask``: questions to a run, answered from its directory."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from cadenza.commands.output import add_json, print_json, say
from cadenza.errors import CadenzaError
from cadenza.status import stragglers
from cadenza.steering.run_reader import RunReader, question, sentence, wrong

_GOOD = ("starting", "running", "paused", "elsewhere", "finished", "stopped")
QUESTIONS = ("status", "plan", "why", "why-not", "metric", "samples", "config", "health")
_WHAT = "of why and why-not, a decision or a callback; of metric, its name; of samples, the step"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Ask a run: it may go on, be over, have been killed, belong to another user, or be a copy. Only its directory is read, "
        "and little of it: the time does not depend on the number of records. Exit code 0: the answer is positive; 1: it is "
        "negative (a failed run, no such decision or value, a problem), or the directory holds no run."
    )
    parser.epilog = (
        "examples:\n  cadenza ask runs/first status\n  cadenza ask runs/first why stopped\n"
        "  cadenza ask runs/first why-not saved\n  cadenza ask runs/first metric train/loss --last 20 --json\n"
        "  cadenza ask runs/first samples 8120\n  cadenza ask runs/first health --json | jq .answer.problems"
    )
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("question", choices=QUESTIONS, metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("what", nargs="*", metavar="WHAT", help=_WHAT)
    parser.add_argument("--last", type=int, metavar="N", help="how many values of a metric (100 if left out) or decisions (1)")
    parser.add_argument("--whole", action="store_true", help="search files to their beginning, not only their last 32 MiB")
    add_json(parser, "print one line of JSON; its form has a version, see the page Ask and steer a run")
    put_errors_in_json(parser)
    parser.set_defaults(command=ask, error=parser.error)


def put_errors_in_json(parser: argparse.ArgumentParser) -> None:
    """Let a parser print its errors as one line of JSON if ``--json`` is among the arguments."""
    read = parser.parse_known_args
    complain = parser.error
    given: list[str] = []

    def parse(arguments: Any = None, namespace: Any = None) -> Any:
        given[:] = arguments or []
        return read(arguments, namespace)

    def error(message: str) -> NoReturn:
        if any(len(item) > 2 and "--json".startswith(item) for item in given):
            print_json(wrong(given, message), indent=None)
            raise SystemExit(2)
        complain(message)

    parser.parse_known_args = parse  # type: ignore[assignment, method-assign]
    parser.error = error  # type: ignore[method-assign]


def ask(arguments: argparse.Namespace) -> int:
    """Print the answer; return the exit code.

    Raises:
        CadenzaError: Without ``--json``, there is no answer.
        SystemExit: The question lacks an argument or has one too many.
    """
    what = " ".join(arguments.what)
    _check(arguments, what)
    whole = question(arguments.run, arguments.question, lambda: _answer(arguments, what))
    if arguments.json:
        print_json(whole, indent=None)
    elif not whole["ok"]:
        raise CadenzaError(whole["error"]["message"])
    else:
        for line in _lines(whole["answer"]):
            say(line)
    return 0 if whole["ok"] and _is_positive(arguments.question, whole["answer"]) else 1


def _check(arguments: argparse.Namespace, what: str) -> None:
    name = arguments.question
    if name in ("why-not", "metric", "samples") and not what:
        arguments.error(f"cadenza ask RUN {name} needs one more argument, such as: {_EXAMPLES[name]}")
    if name in ("status", "plan", "config", "health") and what:
        arguments.error(f"cadenza ask RUN {name} takes no more arguments; got {what!r}")
    if name == "samples" and not what.isdecimal():
        arguments.error(f"cadenza ask RUN samples STEP: expected the number of a step; got {what!r}")


_EXAMPLES = {"why-not": "why-not saved", "metric": "metric train/loss", "samples": "samples 8120"}


def _answer(arguments: argparse.Namespace, what: str) -> dict[str, Any]:
    run, name = RunReader(arguments.run, whole=arguments.whole), arguments.question
    if name == "metric":
        return run.metric(what, last=100 if arguments.last is None else arguments.last)
    if name == "samples":
        return run.samples(int(what))
    if name == "why":
        return run.why(what or "ended", last=1 if arguments.last is None else arguments.last)
    if name == "why-not":
        return run.why_not(what)
    answer: dict[str, Any] = getattr(run, name)()
    return answer


def _is_positive(name: str, answer: dict[str, Any]) -> bool:
    if name == "status":
        return answer["state"] in _GOOD
    if name == "health":
        return bool(answer["healthy"])
    if name == "metric":
        return bool(answer["steps"])
    return bool(answer["happened"]) if name == "why" else True


def _lines(answer: dict[str, Any]) -> list[str]:
    """Return an answer as lines for people: a name and its value; sentences without their name."""
    lines: list[str] = []
    for name, value in answer.items():
        if value in (None, "", [], {}):
            continue
        if name in ("text", "answer", "reasons"):
            lines += value.splitlines() if isinstance(value, str) else value
        elif name == "ranks" and isinstance(value, dict):
            lines += ["ranks:", *(f"  {line}" for line in stragglers.sentences(value))]
        elif isinstance(value, dict):
            lines += [f"{name}:", *(f"  {inner}: {item}" for inner, item in value.items())]
        elif isinstance(value, list) and isinstance(value[0], dict):
            lines += [f"{name}:", *(f"  {_sentence(item)}" for item in value)]
        else:
            lines.append(f"{name}: {value}")
    return lines


def _sentence(row: dict[str, Any]) -> str:
    """Return a decision or a problem as a line."""
    if "what" in row:
        return sentence(row)
    if "kind" in row:
        return f"{row['kind']}: {row['message']}"
    return ", ".join(f"{name} {value}" for name, value in row.items() if value not in (None, "", []))
