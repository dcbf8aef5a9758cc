"""Targets of `Alert` (console, command, webhook, function) and the thread that sends to them."""

from __future__ import annotations

import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from threading import Condition, Event, Thread
from time import monotonic
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from cadenza.status.formats import counted
from cadenza.status.shown import brief

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")
_TIMEOUT_S = 30.0
_PAUSES_S = (1.0, 4.0)  # before the second and the third attempt
_END_S = 10.0  # how long the end of a run waits for pending alerts


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """One alert, as targets receive it.

    >>> AlertMessage("train/loss is 12, > 10", level="warning", step=40, rule="train/loss > 10", alert="Alert").step
    40
    """

    text: str
    """What happened, with the values."""
    level: Level
    """``"info"``, ``"warning"`` or ``"error"``."""
    step: int
    """The step of the record, or of the last record if there is no new one."""
    rule: str
    """The rule as it was written, or the name of the function."""
    alert: str
    """The name of the callback in the run."""
    epoch: int = 0
    """Completed epochs."""
    time: float = 0.0
    """Seconds since 1970."""
    run_id: str = ""
    """The id of the run; empty without a directory."""
    run_name: str = ""
    """The name of its directory; empty without one."""
    directory: str = ""
    """Its directory; empty without one."""

    def to_dict(self) -> dict[str, Any]:
        """Return the message as plain data, for the JSON of a webhook and for ``alerts.jsonl``."""
        return asdict(self)


class Target(ABC):
    """A destination of alerts. `send` may block: it is called in a separate thread."""

    @abstractmethod
    def send(self, message: AlertMessage) -> None:
        """Send an alert.

        Raises:
            Exception: It could not be sent. The run continues.
        """


class Console(Target):
    """The screen and ``console.log``. `Alert` writes to them in the training thread."""

    def __repr__(self) -> str:
        return "'console'"

    def send(self, message: AlertMessage) -> None:
        """Do nothing: see `Alert`."""


class Command(Target):
    """A program and its arguments, run without a shell.

    The program reads the text from stdin and the other fields from the environment.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments: list[str] = [*arguments]

    def __repr__(self) -> str:
        return f"the command {self.arguments[0]!r}"

    def send(self, message: AlertMessage) -> None:
        added = {f"CADENZA_ALERT_{name.upper()}": str(value) for name, value in message.to_dict().items()}
        done = subprocess.run(
            self.arguments,
            input=message.text + "\n",
            env={**os.environ, **added},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"it ended with exit code {done.returncode}: {lines[-1]}")


class Webhook(Target):
    """A URL that gets the message as JSON in a POST request. Many services treat the URL as a secret, so it is never shown."""

    def __init__(self, url: str) -> None:
        self.url: str = url

    def __repr__(self) -> str:
        return f"the webhook of {urlsplit(self.url).hostname}"

    def send(self, message: AlertMessage) -> None:
        body = json.dumps(message.to_dict()).encode()
        request = Request(self.url, body, {"Content-Type": "application/json", "User-Agent": "cadenza"}, method="POST")
        with urlopen(request, timeout=_TIMEOUT_S):  # the scheme was checked
            pass


class Called(Target):
    """A function of an `AlertMessage`."""

    def __init__(self, function: Callable[[AlertMessage], object]) -> None:
        self.function: Callable[[AlertMessage], object] = function

    def __repr__(self) -> str:
        return brief(self.function)

    def send(self, message: AlertMessage) -> None:
        self.function(message)


def targets_of(to: object) -> list[Target]:
    """Return the targets of `Alert`: one, or a list of them.

    Raises:
        TypeError: A target has an unknown type. The message lists the known ones.
        ValueError: There is none.

    >>> targets_of(["console", ["mail", "-s", "an alert", "me"], "https://example.org/hooks/secret"])
    ['console', the command 'mail', the webhook of example.org]
    """
    several = to if isinstance(to, Sequence) and not isinstance(to, str) else [to]
    if not several:
        raise ValueError('to must have at least one target; got none. Write to=["console"].')
    return [_target(target) for target in several]


def _target(target: object) -> Target:
    if isinstance(target, Target):
        return target
    if target == "console":
        return Console()
    if isinstance(target, str) and urlsplit(target).scheme in ("http", "https") and urlsplit(target).hostname:
        return Webhook(target)
    command = target if isinstance(target, Sequence) and not isinstance(target, str) else ()
    if command and all(isinstance(part, str) for part in command):
        return Command(command)
    if callable(target):
        return Called(target)
    raise TypeError(
        'a target must be "console", a URL that begins with "https://", a command as a list of arguments inside of the list, '
        f'such as to=["console", ["mail", "-s", "alert", "me"]], or a function of an AlertMessage; got {target!r}'
    )


class AlertSender:
    """A thread that sends alerts to slow targets and calls a function at a later time. It is started on first use."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._waiting: deque[AlertMessage] = deque()
        self._changed = Condition()
        self._ending = Event()
        self._thread: Thread | None = None
        self._watch: Callable[[], float | None] | None = None
        self.failures: deque[str] = deque()
        """Messages about unreachable targets, for the training thread."""

    def watch(self, look: Callable[[], float | None]) -> None:
        """Call `look` repeatedly in the thread. It returns the seconds until its next call, or None to wait for `wake`."""
        self._watch = look
        self._start()

    def wake(self) -> None:
        """Call the function of `watch` now."""
        with self._changed:
            self._changed.notify()

    def send(self, message: AlertMessage) -> None:
        """Send a message to all targets, in the thread."""
        with self._changed:
            self._waiting.append(message)
            self._changed.notify()
        self._start()

    def finish(self) -> None:
        """Send pending messages and end the thread, waiting a few seconds at most."""
        if self._thread is None:
            return
        with self._changed:
            self._ending.set()
            self._changed.notify()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            left = len(self._waiting) + 1
            self.failures.append(f"{counted(left, 'alert')} could not be sent within {_END_S:g} s after the end of the run")
        self._thread = self._watch = None  # release the function, which may hold a run

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._work, name="cadenza-alert", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        due: float | None = 0.0 if self._watch is not None else None
        while True:
            with self._changed:
                if not self._waiting:
                    if self._ending.is_set():
                        return
                    self._changed.wait(None if due is None else max(due - monotonic(), 0.0))
                message = self._waiting.popleft() if self._waiting else None
            if message is not None:
                for target in self._targets:
                    self._send(target, message)
            elif self._watch is not None and not self._ending.is_set():
                pause = self._watch()
                due = None if pause is None else monotonic() + pause

    def _send(self, target: Target, message: AlertMessage) -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                target.send(message)
            except Exception as error:  # a failing target never stops a run
                if pause_s is None:
                    self.failures.append(f"an alert of step {message.step} did not reach {target!r}: {_reason(error)}")
                    return
                self._ending.wait(pause_s)  # at the end of the run, retry without a delay
            else:
                return


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
