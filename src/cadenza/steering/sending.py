"""The side of the teller: write an act into the directory of a run, and wait for its result."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from typing import Any

from cadenza.steering.acts import FOLDER, KEY, LARGEST, LISTENING, VERBS, WAITING, Act, check_content, file_of, log_of, new_act
from cadenza.steering.facts import Facts
from cadenza.steering.run_reader import SCHEMA
from cadenza.steering.tail import opened

_LOOK_S = 0.02


def tell(
    run: str | os.PathLike[str],
    verb: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    reason: str = "",
    author: str = "",
    wait_s: float = 5.0,
) -> dict[str, Any]:
    """Tell a run to do something at its next step boundary, and return what became of it.

    The answer has a ``state``: ``"done"`` with a ``result``; ``"refused"`` with ``why``; ``"waiting"`` if the run has not come
    to a step boundary in time: the act stays, and is carried out at the next one, also by the process that continues the run;
    ``"taken"`` if the run has begun it and has no result yet.

    Args:
        run: The run directory.
        verb: One of stop, pause, resume, save, evaluate, set, note and attach.
        arguments: Plain values by name: ``{"lr": 1e-4}`` for set, ``{"text": ...}`` for note, ``{"callback": ...}`` for attach.
        reason: Why, for the decision.
        author: Who acts; empty: the user of this process and the machine.
        wait_s: How long to wait for a run that starts, and for the result, in seconds.

    Raises:
        DirectoryError: The directory holds no run.
    """
    path = os.fspath(run)
    facts, end = Facts(path), time.monotonic() + wait_s
    while facts.state == "starting" and not _listens(path) and time.monotonic() < end:
        time.sleep(_LOOK_S)
        facts.read()
    act = new_act(str(facts.info.get("id", "")), verb, arguments or {}, reason, author)
    try:
        check_content(act.plain())
    except ValueError as error:
        unclear = act._replace(arguments={}, author="", reason="")  # the answer must be readable
        return _answer(path, unclear, {"state": "refused", "why": str(error)})
    try:
        _send(path, act, _checked(facts, act))
    except _RefusedError as error:
        return _answer(path, act, {"state": "refused", "why": str(error)})
    while (found := _result(path, act)) is None and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return _answer(path, act, found or _late(path, act))


class _RefusedError(Exception):
    """The act is not sent."""


def _checked(facts: Facts, act: Act) -> bytes:
    """Return the key for an act."""
    if act.verb not in VERBS:
        raise _RefusedError(f"{act.verb!r} is not a verb. Use one of {', '.join(VERBS)}.")
    if not facts.goes_on:
        raise _RefusedError(f"no process trains the run: {facts.ending}")
    folder = os.path.join(facts.path, FOLDER)
    key = os.path.join(folder, KEY)
    if not _listens(facts.path):
        raise _RefusedError(
            "the run takes no acts. Start it with Steering() in callbacks=[...], or with CADENZA_STEERING=1 in its environment."
        )
    try:
        me = os.geteuid() if hasattr(os, "geteuid") else 0
        owner = os.lstat(os.path.join(facts.path, "run.json")).st_uid
        for path, kind in ((folder, stat.S_ISDIR), (os.path.join(folder, WAITING), stat.S_ISDIR), (key, stat.S_ISREG)):
            found = os.lstat(path)
            right = kind(found.st_mode) and not (hasattr(os, "geteuid") and found.st_mode & 0o022)
            if not right or found.st_uid not in (owner, me):
                raise _RefusedError(f"{path!r} must belong to the user of the run, who alone can write it, and be no link.")
        with opened(key) as file:
            return file.read(LARGEST)
    except OSError as error:
        raise _RefusedError(
            f"the key of the run cannot be read ({error.strerror or error}). Act as the user that trains it."
        ) from None


def _listens(path: str) -> bool:
    return os.path.exists(os.path.join(path, FOLDER, LISTENING))


def _send(path: str, act: Act, key: bytes) -> None:
    """Write the file of an act: under a name that no run reads, then under its own."""
    content = file_of(act, key)
    if len(content) > LARGEST:
        raise _RefusedError(f"the act has {len(content)} bytes; at most {LARGEST} are possible. Shorten its text.")
    folder = os.path.join(path, FOLDER, WAITING)
    beside = os.path.join(folder, f".{act.id}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(beside, os.path.join(folder, f"{act.id}.json"))
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        raise _RefusedError(f"the act cannot be written into {folder!r}: {error.strerror or error}") from None


def _late(path: str, act: Act) -> dict[str, Any]:
    """Return what became of an act without a result: it waits, unless the run is over. Then it is withdrawn."""
    facts = Facts(path)
    if facts.state in ("finished", "stopped"):
        try:
            os.unlink(os.path.join(path, FOLDER, WAITING, f"{act.id}.json"))
        except OSError:  # it was taken in between
            return _result(path, act) or {"state": "taken"}
        return {"state": "refused", "why": f"the run is over: {facts.ending}"}
    if os.path.lexists(os.path.join(path, FOLDER, WAITING, f"{act.id}.json")):
        return {"state": "waiting"}
    return _result(path, act) or {"state": "taken"}


def _result(path: str, act: Act) -> dict[str, Any] | None:
    """Return what the log says about an act; None if it has no result yet."""
    for row in log_of(path):
        if row["id"] == act.id and ("result" in row or "refused" in row):
            at = {"step": row.get("step"), "epoch": row.get("epoch")}
            if "refused" in row:
                return {"state": "refused", "why": str(row["refused"]), **at}
            return {"state": "done", "result": str(row["result"]), **at}
    return None


def _answer(path: str, act: Act, found: Mapping[str, Any]) -> dict[str, Any]:
    given = act.plain()
    del given["run"]
    return {"schema": SCHEMA, "run": os.path.abspath(path), "act": given, "step": None, "epoch": None, **found}
