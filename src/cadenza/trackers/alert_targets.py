"""Targets of `Alert` (console, desktop, command, webhook, e-mail, ntfy, function) and the thread that sends to them."""

from __future__ import annotations

import errno
import json
import os
import re
import ssl
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from email.header import Header
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from functools import partial
from threading import Condition, Event, Thread
from time import monotonic
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from cadenza.status.formats import counted
from cadenza.status.reprs import brief

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
    held: int = 0
    """The number of alerts that were held back since the last one that was sent."""

    def to_dict(self) -> dict[str, Any]:
        """Return the message as plain data, for the JSON of a webhook and for ``alerts.jsonl``."""
        return asdict(self)


def line_of(message: AlertMessage) -> str:
    """Return a message as one line."""
    held = f" ({counted(message.held, 'alert')} held back before it)" if message.held else ""
    return f"{message.alert} ({message.level}) at step {message.step}: {message.text}{held}"


def title_of(message: AlertMessage) -> str:
    """Return a title of one line."""
    return " ".join(f"{message.run_name or 'cadenza'}: {message.alert} ({message.level})".split())


class Target(ABC):
    """A destination of alerts. `send` may block: it is called in a separate thread."""

    @abstractmethod
    def send(self, message: AlertMessage) -> None:
        """Send an alert.

        Raises:
            Exception: It could not be sent. The run continues, and reports the kind of the error without its text.
        """


class _UnsentError(Exception):
    """An alert could not be sent. The text holds no secret of the target, so the run reports it."""


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
        _run(self.arguments, message.text + "\n", {**os.environ, **added})


class Desktop(Target):
    """A notification on the desktop of the machine that trains: by ``notify-send``, or on macOS by ``osascript``."""

    def __repr__(self) -> str:
        return "'desktop'"

    def send(self, message: AlertMessage) -> None:
        # the texts are arguments of their own, never a part of a script
        texts = [title_of(message), line_of(message)]
        if sys.platform == "darwin":
            script = ["on run texts", "display notification (item 2 of texts) with title (item 1 of texts)", "end run"]
            _run(["osascript", *(part for line in script for part in ("-e", line)), *texts])
        else:
            urgency = {"info": "low", "warning": "normal", "error": "critical"}[message.level]
            _run(["notify-send", f"--urgency={urgency}", "--app-name=cadenza", "--", *texts])


class Webhook(Target):
    """A URL that gets the message as JSON in a POST request. Many services treat the URL as a secret, so it is never shown."""

    def __init__(self, url: str) -> None:
        self.url: str = url

    def __repr__(self) -> str:
        return f"the webhook of {urlsplit(self.url).hostname}"

    def send(self, message: AlertMessage) -> None:
        body = json.dumps(message.to_dict()).encode()
        _post(self.url, body, {"Content-Type": "application/json"})


class Ntfy(Target):
    """A topic of an ntfy server, which sends to phones: the text as the body of a POST request, title and priority in its head.

    Who knows the topic reads the alerts, so only the host is shown.

    Args:
        url: The address of the topic, such as ``"https://ntfy.sh/a-topic-that-is-hard-to-guess"``, without a user in it.
        token: An access token of the server; None takes the variable ``CADENZA_NTFY_TOKEN``, if there is one.

    Raises:
        ValueError: `url` is not the address of a topic, or `token` is not ASCII without spaces.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        if not _is_url(url) or not urlsplit(url).path.strip("/"):
            raise ValueError('url must be the address of a topic, such as "https://ntfy.sh/my-topic"; got another text')
        self.url: str = url
        self._token = None if token is None else token.strip()
        if self._token and not _is_token(self._token):
            raise ValueError("token must be ASCII without spaces; got another text")

    def __repr__(self) -> str:
        return f"the topic of {urlsplit(self.url).hostname}"

    def send(self, message: AlertMessage) -> None:
        token = self._token or os.environ.get("CADENZA_NTFY_TOKEN", "").strip()
        if token and not _is_token(token):
            raise _UnsentError("CADENZA_NTFY_TOKEN must be ASCII without spaces")
        priority = {"info": "3", "warning": "4", "error": "5"}[message.level]
        headers = {"Title": Header(title_of(message), "utf-8").encode(maxlinelen=0), "Priority": priority}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        _post(self.url, line_of(message).encode(), headers)


class Email(Target):
    """An e-mail, sent by a mail server. The connection is encrypted, except to this machine without a user.

    Args:
        to: One address, or several.
        server: ``"smtp://host:port"``, which begins the encryption by STARTTLS, or ``"smtps://host:port"``. The ports are 587
            and 465 if left out. ``"smtp://localhost:25"`` is the mail server of this machine.
        sender: The address of the sender; None takes the first of `to`.
        user: The name at the server; None sends no name and no password.
        password: None takes the variable ``CADENZA_SMTP_PASSWORD``. It is neither shown nor stored.

    Raises:
        ValueError: `server` or an address cannot be read.
    """

    def __init__(
        self,
        to: str | Sequence[str],
        server: str = "smtp://localhost:25",
        *,
        sender: str | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        self.to: list[str] = [to] if isinstance(to, str) else [*to]
        wrong = [address for address in [*self.to, *filter(None, [sender])] if not re.fullmatch(r"[^@\s,]+@[^@\s,]+", address)]
        if wrong or not self.to:
            raise ValueError(f'to and sender must be addresses such as "me@example.org"; got {wrong or self.to}')
        if not _is_address(server, "smtp", "smtps"):
            raise ValueError('server must be "smtp://host:port" or "smtps://host:port", and the user another argument')
        parts = urlsplit(server)
        self._secure = parts.scheme == "smtps"
        self._host = parts.hostname or ""
        self._port = parts.port or (465 if self._secure else 587)
        self.sender: str = sender or self.to[0]
        self._user = user
        self._password = password

    def __repr__(self) -> str:
        return f"the e-mail to {', '.join(self.to)}"

    def send(self, message: AlertMessage) -> None:
        import smtplib

        mail = EmailMessage()
        mail["From"] = self.sender
        mail["To"] = ", ".join(self.to)
        mail["Subject"] = title_of(message)
        mail["Date"] = formatdate()
        mail["Message-ID"] = make_msgid(domain="cadenza.invalid")
        facts = "\n".join(f"{name}: {value}" for name, value in message.to_dict().items() if value not in ("", 0))
        mail.set_content(f"{line_of(message)}\n\n{facts}\n")
        context = ssl.create_default_context()
        kind = partial(smtplib.SMTP_SSL, context=context) if self._secure else smtplib.SMTP
        with kind(self._host, self._port, timeout=_TIMEOUT_S) as server:
            if not self._secure and (self._user or self._host not in ("localhost", "127.0.0.1", "::1")):
                server.starttls(context=context)
            if self._user:
                server.login(self._user, self._password or os.environ.get("CADENZA_SMTP_PASSWORD", ""))
            server.send_message(mail)


def _run(command: Sequence[str], given: str = "", environment: Mapping[str, str] | None = None) -> None:
    """Run a program until it ends. Its output has no pipe, which a child in the background would keep open."""
    text = given.encode(errors="replace")
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, input=text, env=environment, stdout=silent, stderr=silent, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _UnsentError(f"it did not end within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise _UnsentError(f"it ended with exit code {done.returncode}")


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a POST request. A redirection is an error: it would lose the body, and take secrets to another host."""
    request = Request(url, body, {"User-Agent": "cadenza", **headers}, method="POST")
    with build_opener(_NoRedirection).open(request, timeout=_TIMEOUT_S):  # the scheme was checked
        pass


class _NoRedirection(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirection."""


def _is_url(text: str) -> bool:
    """Return whether a text is an address that can be requested. A user in it is refused: errors would quote its password."""
    return _is_address(text, "http", "https") and text.isascii() and not re.search(r"[\s\x00-\x1f\x7f]", text)


def _is_address(text: str, *schemes: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in schemes and bool(parts.hostname) and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # of a port or a host that cannot be read, which the error quotes
        return False


def _is_token(text: str) -> bool:
    return re.fullmatch(r"[!-~]+", text) is not None


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
    if target == "desktop":
        return Desktop()
    if isinstance(target, str) and target.startswith("mailto:"):
        return Email(target.removeprefix("mailto:"))
    if isinstance(target, str) and _is_url(target):
        return Webhook(target)
    if isinstance(target, str) and "://" in target:  # it may hold a secret
        raise TypeError(
            "a URL must begin with https:// or http://, have a host and no user, and be ASCII without spaces; got another one"
        )
    command = target if isinstance(target, Sequence) and not isinstance(target, str) else ()
    if command and all(isinstance(part, str) for part in command):
        return Command(command)
    if callable(target):
        return Called(target)
    raise TypeError(
        'a target must be "console", "desktop", "mailto:me@example.org", a URL that begins with "https://", Email(...) or '
        "Ntfy(...) of cadenza.trackers, a command as a list of arguments inside of the list, such as "
        f'to=["console", ["mail", "-s", "alert", "me"]], or a function of an AlertMessage; got {_kind(target)}'
    )


def _kind(target: object) -> str:
    """Return a name, or the type of anything else: it may hold a secret."""
    return repr(target) if isinstance(target, str) and re.fullmatch(r"[a-z]{1,12}", target) else f"a {type(target).__name__}"


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
    """Return the kind of an error, without its text: that may quote a URL, an argument or a token."""
    if isinstance(error, _UnsentError):
        return str(error)
    if isinstance(error, HTTPError):
        return f"HTTP Error {error.code}"
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        error = error.reason
    number = getattr(error, "errno", None) or 0
    code = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "smtp_code", errno.errorcode.get(number))
    return type(error).__name__ + (f" ({code})" if code else "")
