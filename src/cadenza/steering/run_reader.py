"""Questions to a run, answered from the files in its directory: `read_run`. No torch is imported, and nothing is changed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from cadenza.errors import DirectoryError, nearest
from cadenza.steering.condition import described, health_of
from cadenza.steering.facts import Facts, Row, number, records

SCHEMA = 1
"""The version of the answers. It grows when a field is removed or changes its meaning; a field that is added keeps it."""
_DECISIONS = 5
_ENDINGS = ("ended", "stopped", "finished", "left", "rolled back", "interrupted", "preempted", "failed", "killed", "running")


def read_run(run: str | os.PathLike[str]) -> RunReader:
    """Return what answers questions about a run: of one that goes on, is over or was killed, also of another user.

    Args:
        run: The run directory; a copy of one will do.

    Raises:
        DirectoryError: It holds no run.

    >>> import tempfile
    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = tiny_run(callbacks=[LogTraining("1 step", throughput=False)], directory=folder)
    ...     run = read_run(folder)
    ...     status, rate = run.status(), run.metric("train/lr", last=2)
    >>> status["state"], status["step"], status["fraction"]
    ('finished', 5, 1.0)
    >>> rate["steps"], rate["values"]
    ([4, 5], [0.1, 0.1])
    """
    return RunReader(run)


class RunReader:
    """A run directory that answers questions with plain data, as ``cadenza ask`` prints them. Each question reads anew.

    Args:
        run: The run directory.
        whole: Search files to their beginning. Otherwise a question reads at most their last 32 MiB.

    Raises:
        DirectoryError: It holds no run.
    """

    def __init__(self, run: str | os.PathLike[str], *, whole: bool = False) -> None:
        self._facts = Facts(os.fspath(run), whole=whole)

    def __repr__(self) -> str:
        return f"<RunReader: {self._facts.path}>"

    def status(self) -> dict[str, Any]:
        """Return the state, the counters, how much is done, the newest values and decisions."""
        facts = self._facts.read()
        rows = list(facts.newest())
        return {
            "name": os.path.basename(os.path.realpath(facts.path)),
            "id": facts.info.get("id"),
            "state": facts.state,
            **described(facts, rows),
            "values": facts.values(rows),
            "checkpoints": facts.checkpoints(),
            "decisions": [decision for decision, _ in zip(facts.decisions(), range(_DECISIONS), strict=False)][::-1],
            "outcome": facts.info.get("outcome"),
            "ranks": facts.ranks(),
            "steering": facts.steering(),
        }

    def plan(self) -> dict[str, Any]:
        """Return the plan: the moments of the run, each with the callbacks that it calls, in order."""
        plan = self._facts.read().info.get("plan")
        text = plan if isinstance(plan, str) else ""
        return {"text": text, "moments": dict(_moments(text))}

    def config(self) -> dict[str, Any]:
        """Return the arguments of the trainer, the versions, the command line and the device. Secrets are masked."""
        info = import_module("cadenza.status.masking").masked(self._facts.read().info)
        names = "id", "arguments", "command", "device", "seed", "git_commit", "versions", "started", "continued", "branch"
        return {name: info.get(name) for name in names}

    def health(self) -> dict[str, Any]:
        """Return the problems: no news, values that are not finite, failed callbacks, unreadable files, a full disk."""
        return health_of(self._facts.read())

    def metric(self, name: str, *, last: int = 100) -> dict[str, Any]:
        """Return the last values of a metric, oldest first, with their steps and times.

        Args:
            name: Such as ``"train/loss"``.
            last: How many values to return at most.

        Raises:
            ValueError: `last` is less than 1.
        """
        _check_last(last)
        facts = self._facts.read()
        tail = facts.tail("metrics.jsonl")
        found: list[Row] = []
        for row in records(tail, name):
            found.append(row)
            if len(found) == last:
                break
        found.reverse()
        values = [number(row[name]) for row in found]
        finite = [value for value in values if abs(value) < float("inf")]
        known = [] if found else [*facts.values(list(facts.newest()))]
        return {
            "name": name,
            "steps": [row["step"] for row in found],
            "values": values,
            "times": [row["time"] for row in found],
            "last": values[-1] if values else None,
            "min": min(finite, default=None),
            "max": max(finite, default=None),
            "mean": sum(finite) / len(finite) if finite else None,
            "not_finite": len(values) - len(finite),
            "complete": tail.complete,
            "known": known,
            "hint": nearest(name, known).strip() if known else "",
        }

    def samples(self, step: int) -> dict[str, Any]:
        """Return which samples each rank read in a step. This question alone imports torch.

        Raises:
            ValueError: The run has no such step, or its ``run.json`` does not describe the data.
        """
        info = import_module("cadenza.records.directory").read_info(self._facts.path)
        named: dict[str, Any] = import_module("dataclasses").asdict(info.samples(step))
        return {**named, "batches": [*named["batches"]]}

    def why(self, what: str = "ended", *, last: int = 1) -> dict[str, Any]:
        """Return the last decisions of a kind or of a callback, such as ``"stopped"``; ``"ended"`` says how the run ended.

        Raises:
            ValueError: `last` is less than 1.
        """
        _check_last(last)
        facts = self._facts.read()
        sought = facts.state if what == "ended" else what
        found = [decision for decision, _ in zip(facts.decisions(sought), range(last), strict=False)][::-1]
        ending = what in (*_ENDINGS, facts.state)
        sentences = [sentence(row) for row in found] or ([facts.ending] if ending else [])
        known = [] if sentences else sorted({str(decision["what"]) for decision in facts.decisions()})
        return {
            "what": what,
            "answer": sentences or [f"nothing was {what!r} in this run.{nearest(what, known)}"],
            "happened": bool(found) or what in ("ended", facts.state),
            "decisions": found,
            "outcome": facts.info.get("outcome"),
            "state": facts.state,
            "known": known,
        }

    def why_not(self, what: str) -> dict[str, Any]:
        """Return why something did not happen, as far as the files say: the end of the run, its plan, earlier decisions.

        `Run.why_not` in the process of the run knows more: how far schedules and monitors are.
        """
        facts = self._facts.read()
        last = next(facts.decisions(what), None)
        reasons: list[str] = []
        failed = next(facts.decisions(f"not {what}"), None)
        reasons += [] if failed is None else [f"it failed: {sentence(failed)}"]
        owners = {str(decision["who"]) for decision in facts.decisions(what)} | {what}
        disabled = next((decision for decision in facts.decisions("disabled") if decision["who"] in owners), None)
        reasons += [] if disabled is None else [sentence(disabled)]
        plan, step = facts.info.get("plan"), facts.reached()["step"]
        for moment, callbacks in _moments(plan if isinstance(plan, str) else ""):
            for name, _, schedule in (callback.partition(" (") for callback in callbacks):
                if moment == what or (schedule and name in owners):
                    due = f"is due {schedule.rstrip(')')}" if schedule else "is called each time"
                    reasons.append(f"{name}, {moment}, {due}, now at step {step}")
        over = [] if facts.goes_on else [f"the run does not go on: {facts.ending}"]
        unknown = [] if reasons else [f"no callback that the files name does it; a hook may request it: {what!r}"]
        return {"what": what, "happened": last is not None, "last": last, "reasons": [*over, *reasons, *unknown]}


def _check_last(last: int) -> None:
    if last < 1:
        raise ValueError(f"last must be at least 1; got {last}")


def _moments(plan: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the moments of a plan, and the callbacks that each of them calls."""
    for line in plan.splitlines()[1:]:
        moment, _, rest = line.strip().partition(" ")
        if moment.startswith(("on_", "run.fire(")) and rest.strip():
            yield moment, rest.strip().split(" > ")


def sentence(decision: Mapping[str, Any]) -> str:
    """Return a decision as a sentence."""
    at = f"epoch {decision.get('epoch')}, step {decision.get('step')}"
    return f"{decision['what']} by {decision['who']} at {at}: {decision['why']}"


def wrong(arguments: Sequence[str], message: str) -> dict[str, Any]:
    """Return the answer to arguments that cannot be read. The first two that are no options are the run and the question."""
    run, name, *_ = [item for item in arguments if not item.startswith("-")] + ["", ""]
    return failed(run, name, "arguments", message)


def question(run: str, name: str, ask: Any) -> dict[str, Any]:
    """Return the whole answer to a question, with the version of its form; or the error.

    Args:
        run: The run directory.
        name: The name of the question, such as ``"status"``.
        ask: Returns the answer.
    """
    try:
        return {**_head(run, name), "ok": True, "answer": ask()}
    except DirectoryError as error:
        return failed(run, name, "directory", error)
    except ValueError as error:
        return failed(run, name, "value", error)


def failed(run: str, name: str, kind: str, error: object) -> dict[str, Any]:
    """Return the answer to a question or an act that has none, with the kind of the error: ``directory``, ``value`` ..."""
    return {**_head(run, name), "ok": False, "error": {"kind": kind, "message": str(error)}}


def _head(run: str, name: str) -> dict[str, Any]:
    path = os.path.abspath(run) if run else None
    return {"schema": SCHEMA, "question": name or None, "run": path, "time": round(time.time(), 3)}
