"""Where `Alert` sends: servers of mail, of webhooks and of topics that go on, and programs; and how often."""

from __future__ import annotations

import asyncio
import email
import email.header
import email.policy
import json
import os
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, AuthResult

from cadenza import Callback, Run, on
from cadenza.callbacks import Alert, Checkpoint
from cadenza.testing import tiny_run, tiny_trainer
from cadenza.trackers import Email, Ntfy, alert_targets
from cadenza.trackers.alert_targets import Target
from tests.waiting import until

TEXT = "x is 3, > 2"


def log_x(*values: float) -> Callback:
    return on(Callback.on_step_end)(lambda run: run.log("x", values[run.progress.step - 1]))


def sent_to(target: object, *values: float, **options: Any) -> Run:
    """Train with an alert at each value above 2 that goes to a target."""
    alert = Alert("x > 2", to=[target], **options)
    return tiny_run(callbacks=[log_x(*(values or (3.0,))), alert], steps=len(values) or 1)


def not_sent(run: Run) -> list[str]:
    return [decision.why for decision in run.decisions if decision.what == "not sent"]


# -- a mail server ------------------------------------------------------------------------------------


@dataclass
class Mails:
    """A mail server, and the messages that came."""

    port: int = 0
    came: list[email.message.EmailMessage] = field(default_factory=list)
    recipients: list[list[str]] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802  # the server calls it
        self.came.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        self.recipients.append(envelope.rcpt_tos)
        return "250 OK"

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        self.logins.append((data.login.decode(), data.password.decode()))
        return AuthResult(success=data.password == b"right", handled=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of localhost and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@contextmanager
def listening(mails: Mails, context: ssl.SSLContext | None) -> Iterator[int]:
    """Serve mails in a thread until the end of the block; yield the port. With a context, encryption is offered."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def protocol() -> SMTP:
        return SMTP(mails, tls_context=context, authenticator=mails.authenticate, auth_require_tls=True, loop=loop)

    async def begin() -> asyncio.Server:
        return await loop.create_server(protocol, "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(100)
    yield server.sockets[0].getsockname()[1]

    async def end() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(100)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(params=["plain", "encrypted"])
def mails(request: pytest.FixtureRequest, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Mails]:
    context = None
    if request.param == "encrypted":
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    mails = Mails()
    with listening(mails, context) as mails.port:
        yield mails


@pytest.mark.parametrize("mails", ["plain"], indirect=True)
def test_the_mail_server_of_this_machine_gets_a_message_of_one_subject_line(mails: Mails, tmp_path: Path) -> None:
    to = Email(["ann@example.org", "ben@example.org"], f"smtp://localhost:{mails.port}")
    run = tiny_run(
        callbacks=[log_x(3.0), Alert("x > 2", to=[to], name="Bcc: eve@example.org\n")], steps=1, directory=tmp_path / "first"
    )
    assert not not_sent(run)
    [mail], [recipients] = mails.came, mails.recipients
    assert mail["Subject"] == "first: Bcc: eve@example.org (warning)"
    assert (mail["From"], mail["To"], mail["Bcc"]) == ("ann@example.org", "ann@example.org, ben@example.org", None)
    assert recipients == ["ann@example.org", "ben@example.org"]
    body = mail.get_content()
    assert TEXT in body
    assert f"run_id: {run.info.id}" in body


@pytest.mark.parametrize("mails", ["encrypted"], indirect=True)
def test_a_user_logs_in_over_an_encrypted_connection(mails: Mails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_SMTP_PASSWORD", "right")
    assert not not_sent(sent_to(Email("ann@example.org", f"smtp://localhost:{mails.port}", user="ann")))
    assert mails.logins == [("ann", "right")]
    assert len(mails.came) == 1


@pytest.mark.parametrize("mails", ["plain"], indirect=True)
def test_a_password_is_not_sent_without_encryption_and_never_shown(
    mails: Mails, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    to = Email("ann@example.org", f"smtp://localhost:{mails.port}", user="ann", password="right-secret")
    alert = Alert("x > 2", to=[to])
    run = tiny_run(callbacks=[log_x(3.0), alert], steps=1, directory=tmp_path)
    [why] = not_sent(run)
    assert "did not reach the e-mail to ann@example.org" in why
    assert (mails.logins, mails.came) == ([], [])
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "right-secret" not in written.decode(errors="replace") + repr(alert) + repr(to) + repr(run.decisions)


@pytest.mark.parametrize("mails", ["encrypted"], indirect=True)
def test_a_wrong_password_or_certificate_is_said_and_the_run_goes_on(mails: Mails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    to = Email("ann@example.org", f"smtp://localhost:{mails.port}", user="ann", password="wrong")
    [why] = not_sent(sent_to(to))
    assert "SMTPAuthenticationError" in why
    assert "wrong" not in why.partition("SMTPAuthenticationError")[0]
    monkeypatch.delenv("SSL_CERT_FILE")
    [why] = not_sent(sent_to(to))
    assert "CERTIFICATE_VERIFY_FAILED" in why
    assert mails.came == []


# -- a server of HTTP ---------------------------------------------------------------------------------


@dataclass
class Web:
    """A server, what came, and what it answers."""

    address: str = ""
    came: list[tuple[str, dict[str, str], str]] = field(default_factory=list)
    answers: list[tuple[int, str]] = field(default_factory=list)


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            web.came.append((self.path, dict(self.headers.items()), body))
            code, where = web.answers.pop(0) if web.answers else (200, "")
            self.send_response(code)
            if where:
                self.send_header("Location", where)
            self.end_headers()

        def do_GET(self) -> None:
            web.came.append((self.path, dict(self.headers.items()), "a redirection was followed"))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    web.address = f"http://127.0.0.1:{server.server_port}"
    yield web
    server.shutdown()
    server.server_close()


def test_a_topic_gets_the_text_with_title_priority_and_token(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_NTFY_TOKEN", "tk_secret")
    run = sent_to(Ntfy(f"{web.address}/topic-é".replace("é", "e")), level="error", name="zu groß\nX-Evil: 1")
    assert not not_sent(run)
    [(path, headers, body)] = web.came
    assert path == "/topic-e"
    assert headers["Priority"] == "5"
    assert headers["Authorization"] == "Bearer tk_secret"
    assert str(email.header.make_header(email.header.decode_header(headers["Title"]))) == "cadenza: zu groß X-Evil: 1 (error)"
    assert "X-Evil" not in headers
    assert TEXT in body


@pytest.mark.parametrize("kind", ["webhook", "topic"])
def test_a_redirection_is_not_followed_and_is_said(kind: str, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lose the body, and take the token to another host."""
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    web.answers += [(302, f"{web.address}/elsewhere"), (307, f"{web.address}/elsewhere"), (301, f"{web.address}/elsewhere")]
    url = f"{web.address}/secret"
    [why] = not_sent(sent_to(url if kind == "webhook" else Ntfy(url, token="tk_secret")))
    assert "HTTP Error 301" in why
    assert {path for path, _, _ in web.came} == {"/secret"}
    assert "secret" not in why


def test_the_end_of_a_line_after_a_token_is_not_a_part_of_it(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    assert not not_sent(sent_to(Ntfy(f"{web.address}/topic", token="tk_secret\n")))
    monkeypatch.setenv("CADENZA_NTFY_TOKEN", "tk_secret\n")
    assert not not_sent(sent_to(Ntfy(f"{web.address}/topic")))
    assert [headers["Authorization"] for _, headers, _ in web.came] == ["Bearer tk_secret"] * 2
    monkeypatch.setenv("CADENZA_NTFY_TOKEN", "tk_secret\nX-Evil: 1")
    [why] = not_sent(sent_to(Ntfy(f"{web.address}/topic")))
    assert why.endswith("the topic of 127.0.0.1: CADENZA_NTFY_TOKEN must be ASCII without spaces")


# -- programs -----------------------------------------------------------------------------------------


def test_the_desktop_gets_the_texts_as_arguments_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "osascript" if sys.platform == "darwin" else "notify-send"
    program = tmp_path / name
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(tmp_path / 'came')!r}, 'w'))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert not not_sent(sent_to("desktop", name='--x"; rm -rf $HOME; "'))
    came = json.loads((tmp_path / "came").read_text())
    assert came[-2:] == ['cadenza: --x"; rm -rf $HOME; " (warning)', f'--x"; rm -rf $HOME; " (warning) at step 1: {TEXT}']
    assert name == "osascript" or came[-3] == "--"


def test_a_machine_without_the_program_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setenv("PATH", str(tmp_path))
    [why] = not_sent(sent_to("desktop"))
    assert "did not reach 'desktop': FileNotFoundError" in why


ECHO = "import sys; sys.exit(sys.argv[1])"  # the text goes to stderr
SECRET: dict[str, tuple[Any, str]] = {
    "a command that fails": ([sys.executable, "-c", ECHO, "s3cret"], "it ended with exit code 1"),
    "a command that does not end": (["sh", "-c", "exec sleep 1000", "s3cret"], "it did not end within 0.2 s"),
    "a command that is not there": (["no-such-program", "s3cret"], "FileNotFoundError (ENOENT)"),
    "a server that is not there": ("http://127.0.0.1:9/s3cret", "ConnectionRefusedError (ECONNREFUSED)"),
    "a function": (lambda message: json.loads("s3cret"), "JSONDecodeError"),
    "a function that opens a file": (lambda message: Path("/s3cret").read_text(), "FileNotFoundError (ENOENT)"),
}


@pytest.mark.parametrize("case", SECRET)
def test_the_reason_of_a_failure_is_its_kind_and_no_file_of_the_run_has_the_secret(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alert_targets, "_PAUSES_S", (0.0, 0.0))
    target, reason = SECRET[case]
    if "does not end" in case:
        monkeypatch.setattr(alert_targets, "_TIMEOUT_S", 0.2)
    run = tiny_run(callbacks=[log_x(3.0), Alert("x > 2", to=[target])], steps=1, directory=tmp_path)
    [why] = not_sent(run)
    assert why.endswith(f": {reason}")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "s3cret" not in written.decode(errors="replace") + caplog.text


def test_a_command_that_leaves_a_child_in_the_background_has_sent_its_alert(tmp_path: Path) -> None:
    """The child keeps what the command inherited, until the file of the test is removed."""
    (tmp_path / "goes on").touch()
    script = "echo x >> came; (while [ -e 'goes on' ]; do sleep 0.05; done; touch ended) & echo hi"
    assert not not_sent(sent_to(["sh", "-c", f"cd {tmp_path} && {{ {script}; }}"]))
    assert (tmp_path / "came").read_text() == "x\n"
    assert not (tmp_path / "ended").exists()
    (tmp_path / "goes on").unlink()
    until((tmp_path / "ended").exists)


# -- how often ----------------------------------------------------------------------------------------


def test_within_the_pause_alerts_are_held_back_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr("cadenza.trackers.alert.time.time", lambda: now[0])
    came: list[tuple[int, int]] = []

    def later(run: Run) -> None:
        if run.progress.step == 7:
            now[0] += 3600.0

    alert = Alert("x > 2", to=["console", lambda message: came.append((message.step, message.held))], pause="1 h")
    run = tiny_run(callbacks=[on(Callback.on_step_end)(later), log_x(3, 1, 3, 1, 3, 1, 3, 1, 3), alert], steps=9)
    assert came == [(1, 0), (7, 2)]
    assert [decision.when.step for decision in run.decisions if decision.what == "alerted"] == [1, 3, 5, 7, 9]
    assert "Alert (warning) at step 7: x is 3, > 2 (2 alerts held back before it)" in caplog.text
    assert "at step 3" not in caplog.text


def test_a_continued_run_goes_on_with_the_pause(tmp_path: Path) -> None:
    came: list[int] = []

    @on(Callback.on_step_end, at=3)
    def fail(run: Run) -> None:
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise ZeroDivisionError

    def fit() -> Run:
        alert = Alert("x > 2", to=lambda message: came.append(message.step), pause="1 h")
        return tiny_trainer(
            callbacks=[log_x(3, 1, 3, 1, 3), alert, Checkpoint(every="1 step"), fail], steps=5, directory=tmp_path / "run"
        ).fit(resume="auto")

    with pytest.raises(ZeroDivisionError):
        fit()
    fit()
    assert came == [1]


@pytest.mark.parametrize("fails_at", [4, 8])
def test_a_continued_run_knows_how_many_alerts_were_held_back(fails_at: int, tmp_path: Path, monkeypatch: Any) -> None:
    """The pause ends before step 7. The last checkpoint is two steps before the error, so steps are repeated."""
    now = [1e9]
    monkeypatch.setattr("cadenza.trackers.alert.time.time", lambda: now[0])
    came: list[tuple[int, int]] = []

    @on(Callback.on_step_end)
    def fail(run: Run) -> None:
        now[0] = 1e9 + (7200 if run.progress.step >= 11 else 3600 if run.progress.step >= 7 else 0)
        if run.progress.step == fails_at and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise ZeroDivisionError

    def fit() -> Run:
        alert = Alert("x > 2", to=lambda message: came.append((message.step, message.held)), pause="1 h")
        values = log_x(3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3)
        return tiny_trainer(
            callbacks=[fail, values, alert, Checkpoint(every="3 steps")], steps=11, epochs=None, directory=tmp_path / "run"
        ).fit(resume="auto")

    with pytest.raises(ZeroDivisionError):
        fit()
    fit()
    assert came == [(1, 0), (7, 2), (11, 1)]


WRONG = [
    (lambda: Email("ann"), ValueError, 'addresses such as "me@example.org"'),
    (lambda: Email([]), ValueError, 'addresses such as "me@example.org"'),
    (lambda: Email("ann@example.org\nBcc: eve@example.org"), ValueError, "addresses such as"),
    (lambda: Email("ann@example.org", "mail.example.org"), ValueError, "server must be"),
    (lambda: Email("ann@example.org", "smtp://ann:secret@example.org"), ValueError, "the user another argument"),
    (lambda: Ntfy("https://ntfy.sh"), ValueError, "the address of a topic"),
    (lambda: Ntfy("ftp://ntfy.sh/topic"), ValueError, "the address of a topic"),
    (lambda: Alert("x > 2", to="https://example.org/a secret"), TypeError, "ASCII without spaces"),
    (lambda: Alert("x > 2", to="ftp://example.org/secret"), TypeError, "must begin with https://"),
    (lambda: Alert("x > 2", to="https://ann:secret@example.org/hook"), TypeError, "no user"),
    (lambda: Alert("x > 2", to="https://secret@example.org/hook"), TypeError, "no user"),
    (lambda: Alert("x > 2", to="http://example.org:secret/x"), TypeError, "must begin with https://"),
    (lambda: Alert("x > 2", to="http://[secret/x"), TypeError, "must begin with https://"),
    (lambda: Alert("x > 2", to="example.org/hooks/secret"), TypeError, "got a str"),
    (lambda: Alert("x > 2", to=[["curl", "secret", 5]]), TypeError, "got a list"),
    (lambda: Ntfy("https://ann:secret@ntfy.sh/topic"), ValueError, "the address of a topic"),
    (lambda: Ntfy("https://ntfy.sh:secret/topic"), ValueError, "the address of a topic"),
    (lambda: Ntfy("https://ntfy.sh/topic", token="a secret"), ValueError, "token must be ASCII without spaces"),
    (lambda: Ntfy("https://ntfy.sh/topic", token="secrét"), ValueError, "token must be ASCII without spaces"),
    (lambda: Email("ann@example.org", "smtp://example.org:secret"), ValueError, "server must be"),
    (lambda: Alert("x > 2", to="mailto:ann"), ValueError, "addresses such as"),
    (lambda: Alert("x > 2", pause="10 steps"), ValueError, "pause must be a time"),
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG)
def test_a_wrong_target_is_refused_at_once_and_its_secret_not_shown(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        make()
    assert "secret" not in str(caught.value)


def test_each_target_shows_no_secret() -> None:
    targets: list[Target] = [Ntfy("https://ntfy.sh/secret", token="secret"), Email("a@b.org", user="ann", password="secret")]
    assert [repr(target) for target in targets] == ["the topic of ntfy.sh", "the e-mail to a@b.org"]
