"""Acts: signed files in the directory of a run that say what it is to do, and the log of those that were taken.

::

    RUN/steering/listening.json   the run takes acts; removed when it ends
    RUN/steering/key              the secret that signs acts, readable for the user of the run alone
    RUN/steering/acts/ID.json     acts that wait for a step boundary
    RUN/steering/log.jsonl        a line when an act is taken, with its step, and one with its result or the refusal
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cadenza.steering.tail import opened

FOLDER, WAITING, KEY, LOG, LISTENING = "steering", "acts", "key", "log.jsonl", "listening.json"
FIELDS = ("id", "run", "verb", "arguments", "author", "time", "reason")
VERBS = ("stop", "pause", "resume", "save", "evaluate", "set", "note", "attach")
LARGEST = 16_384
"""The most bytes of an act."""
DEEPEST = 8
"""The most levels of objects and lists in an act. The act itself is the first."""
_NAME = re.compile(r"\d{20}-[0-9a-f]{16}\.json")


class Act(NamedTuple):
    """One act. Acts that wait for the same boundary are carried out in the order of their ids, which begin with the time."""

    id: str
    run: str
    """The id of the run."""
    verb: str
    arguments: Mapping[str, Any]
    author: str
    time: float
    """When it was written, by the clock of its author, in seconds since 1970."""
    reason: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the act as plain data: a line of the log."""
        return dict(zip(FIELDS, self, strict=True))

    def __str__(self) -> str:
        pairs = self.arguments.items()
        given = [str(value) if name in ("text", "callback") else f"{name}={value}" for name, value in pairs]
        return " ".join([self.verb, *given])


def new_act(run: str, verb: str, arguments: Mapping[str, Any], reason: str = "", author: str = "") -> Act:
    """Return an act with an id of its own.

    Args:
        run: The id of the run.
        verb: One of `VERBS`.
        arguments: Plain values by name.
        reason: Why, for the decision.
        author: Who acts; empty: the user of this process and the machine.
    """
    now = time.time()
    name = f"{int(now * 1e9):020d}-{os.urandom(8).hex()}"
    return Act(name, run, verb, dict(arguments), author or _user(), round(now, 3), reason)


def file_of(act: Act, key: bytes) -> bytes:
    """Return the content of the file of an act."""
    content = act.plain()
    return json.dumps({**content, "signature": _signature(content, key)}).encode()


def act_in(content: bytes, key: bytes) -> Act:
    """Return the act in a file.

    Raises:
        ValueError: It is none, or is not signed with this key. The message says what is wrong.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None
    if not isinstance(found, dict) or found.keys() != {*FIELDS, "signature"}:
        raise ValueError(f"it must be an object with {', '.join(FIELDS)} and signature")
    check_content(found)
    signature = found.pop("signature")
    if not isinstance(signature, str) or not hmac.compare_digest(signature.encode(), _signature(found, key).encode()):
        raise ValueError("its signature is not that of the key of this run")
    act = Act(**found)
    texts = act.id, act.run, act.verb, act.author, act.reason
    if not all(isinstance(text, str) for text in texts) or not isinstance(act.arguments, dict):
        raise ValueError("its fields have other types than those of an act")
    return act


def check_content(act: Mapping[str, Any]) -> None:
    """Check the plain data of an act, before it has any effect.

    Raises:
        ValueError: It is nested too deeply to be shown, or a text has half of a surrogate pair, which UTF-8 cannot write.
    """
    level: list[Any] = [act]
    for _ in range(DEEPEST):
        level = [part for whole in level for part in _parts(whole)]
    if level:
        raise ValueError(f"an act has at most {DEEPEST} levels of objects and lists; this one has more")
    try:
        json.dumps(act, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("the texts of an act must be Unicode; one has half of a surrogate pair") from None


def _parts(whole: Mapping[str, Any] | list[Any] | tuple[Any, ...]) -> list[Any]:
    """Return the objects and lists in an object or a list."""
    parts = whole.values() if isinstance(whole, Mapping) else whole
    return [part for part in parts if isinstance(part, Mapping | list | tuple)]


def is_name(name: str) -> bool:
    """Return whether a file can hold an act."""
    return _NAME.fullmatch(name) is not None


def log_of(run: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the log of acts of a run directory, oldest first; none without a log."""
    try:
        with opened(os.path.join(run, FOLDER, LOG)) as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            yield row


def _signature(content: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _user() -> str:
    """Return the user and the machine, such as ``ann@node-3``."""
    try:
        import pwd  # there is none on Windows

        name = pwd.getpwuid(os.geteuid()).pw_name
        host = os.uname().nodename
    except (ImportError, KeyError, AttributeError):
        name, host = os.environ.get("USERNAME", "unknown"), os.environ.get("COMPUTERNAME", "unknown")
    return f"{name}@{host}"
