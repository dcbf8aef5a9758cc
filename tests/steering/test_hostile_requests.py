"""Requests that other users, other sites and the contents of a directory make to ``cadenza serve``: each is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from cadenza.callbacks import LogTraining
from cadenza.testing import tiny_run
from tests.browsing import watched
from tests.steering.parts import STEERED, training, until_steps
from tests.steering.serving import Served, serving

STOP = {"verb": "stop", "arguments": {}, "reason": ""}
NESTED = b'{"a":' * 900 + b"1" + b"}" * 900


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "run"
    tiny_run(directory=path, epochs=1, callbacks=[LogTraining("1 step")])
    return path


@pytest.fixture(scope="module")
def reading(finished: Path) -> Iterator[Served]:
    """A server that only reads."""
    with serving(finished) as served:
        yield served


@pytest.fixture(scope="module")
def steering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that may act on a run that goes on."""
    run = tmp_path_factory.mktemp("steered") / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 1, process)
        with serving(run, "--allow-steering") as served:
            yield served, run
        assert process.poll() is None, "a hostile request ended the run"


READS: dict[str, tuple[str, dict[str, str], int]] = {
    "no token": ("/", {}, 403),
    "a wrong token": ("/?token=0123456789abcdef", {}, 403),
    "the beginning of the token": ("/?token=TOKE", {}, 403),
    "a token that is no ASCII": ("/?token=%C3%A9%00%F0%9F%8E%B5", {}, 403),
    "the token under another name": ("/?key=TOKEN", {}, 403),
    "the token as a header of a read": ("/", {"Authorization": "Bearer TOKEN"}, 403),
    "a wrong token beside the right one": ("/?token=TOKEN&token=wrong", {}, 403),
    "events without a token": ("/events", {}, 403),
    "another origin": ("/?token=TOKEN", {"Origin": "https://evil.example"}, 403),
    "the origin of a file": ("/?token=TOKEN", {"Origin": "null"}, 403),
    "the origin of another port": ("/events?token=TOKEN", {"Origin": "http://127.0.0.1:1"}, 403),
    "a script of another site": ("/?token=TOKEN", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    "a script of another port": ("/events?token=TOKEN", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
    "a file of the run": ("/run.json?token=TOKEN", {}, 404),
    "the key of the acts": ("/steering/key?token=TOKEN", {}, 404),
    "a path that leads out": ("/../../../../etc/passwd?token=TOKEN", {}, 404),
    "a coded path that leads out": ("/%2e%2e/%2e%2e/etc/passwd?token=TOKEN", {}, 404),
    "a run by its path": ("/?token=TOKEN&run=/etc", {}, 404),
    "a run outside of the directory": ("/?token=TOKEN&run=../run", {}, 404),
    "a run with a zero byte": ("/events?token=TOKEN&run=run%00", {}, 404),
}


@pytest.mark.parametrize("case", READS)
def test_a_read_that_is_not_the_page_is_refused(case: str, reading: Served) -> None:
    path, headers, code = READS[case]
    path = path.replace("token=TOKE", f"token={reading.token[:-1]}") if path.endswith("TOKE") else path
    got, text = reading.get(path, headers)
    assert got == code, text
    assert reading.token not in text
    assert "root:" not in text


def test_a_head_without_an_end_is_refused(reading: Served) -> None:
    try:
        code, _ = reading.get(headers={"X-Long": "a" * 200_000})
    except ConnectionError:  # the server has closed the connection while we sent
        code = 400
    assert code == 400
    assert reading.get()[0] == 200


HOSTS = [
    "evil.example",
    "evil.example:PORT",
    "127.0.0.1.evil.example:PORT",
    "localhost.evil.example",
    "127.0.0.1@evil.example",
    "127.0.0.1:PORT, evil.example",
    "0.0.0.0:PORT",
    "127.0.0.1:PORT/",
    "",
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_name_of_another_site_that_leads_here_is_refused(host: str, reading: Served) -> None:
    """DNS rebinding: the browser believes that it talks to the other site, and lets its scripts read the answer."""
    for path in ("/?token=TOKEN", "/"):
        code, _ = reading.send("GET", path, [("Host", host.replace("PORT", str(reading.port)))])
        assert code in (400, 421)


def test_two_hosts_or_none_are_refused(reading: Served) -> None:
    own = ("Host", f"127.0.0.1:{reading.port}")
    for hosts in ([own, ("Host", "evil.example")], []):
        assert reading.send("GET", "/?token=TOKEN", hosts)[0] in (400, 421)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(method: str, reading: Served) -> None:
    code, text = reading.get(method=method)
    assert code in (400, 403, 405), text


def test_a_server_that_only_reads_takes_no_act(reading: Served) -> None:
    assert reading.post(STOP) == (403, "acts are not allowed: start the server with --allow-steering")
    assert 'id="acts-form' not in reading.get()[1].partition("<script")[0]


ACTS: dict[str, tuple[Any, dict[str, str | None], int]] = {
    "no token": (STOP, {"Authorization": None}, 403),
    "a wrong token": (STOP, {"Authorization": "Bearer wrong"}, 403),
    "the token of another scheme": (STOP, {"Authorization": "Basic TOKEN"}, 403),
    "the token in a cookie": (STOP, {"Authorization": None, "Cookie": "token=TOKEN"}, 403),
    "no origin": (STOP, {"Origin": None}, 403),
    "another origin": (STOP, {"Origin": "https://evil.example"}, 403),
    "half of a character": ({"verb": "note", "arguments": {"text": "\ud800"}}, {}, 400),
    "half of a character as bytes": (b'{"verb": "note", "arguments": {"text": "\xed\xa0\x80"}}', {}, 400),
    "half of a character as a name": ({"verb": "set", "arguments": {"\ud800": 1}}, {}, 400),
    "half of a character in the reason": ({"verb": "save", "reason": "\udfff"}, {}, 400),
    "nested": (b'{"verb": "set", "arguments": ' + NESTED + b"}", {}, 400),
    "a site with our address as its beginning": (STOP, {"Origin": "http://127.0.0.1:PORT.evil.example"}, 403),
    "the origin of a sandbox": (STOP, {"Origin": "null"}, 403),
    "another host": (STOP, {"Host": "evil.example", "Origin": "http://evil.example"}, 421),
    "a form of another site": (b"verb=stop", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    "JSON as text": (STOP, {"Content-Type": "text/plain"}, 415),
    "a script of another site": (STOP, {"Sec-Fetch-Site": "cross-site"}, 403),
    "no JSON": (b"stop", {}, 400),
    "deep JSON": (b"[" * 10_000, {}, 400),
    "a list": ([STOP], {}, 400),
    "too large": ({**STOP, "reason": "a" * 20_000}, {}, 413),
    "code to attach": ({"verb": "attach", "arguments": {"callback": "os:abort"}}, {}, 400),
    "an unknown verb": ({"verb": "resume; rm"}, {}, 400),
    "a verb that is a list": ({"verb": ["stop"]}, {}, 400),
    "another author": ({**STOP, "author": "root"}, {}, 400),
    "arguments that are a list": ({**STOP, "arguments": ["lr"]}, {}, 400),
    "a reason that is a number": ({**STOP, "reason": 1}, {}, 400),
}


@pytest.mark.parametrize("case", ACTS)
def test_an_act_that_is_not_of_the_page_is_refused(case: str, steering: tuple[Served, Path]) -> None:
    served, run = steering
    act, headers, code = ACTS[case]
    given = {name: value and value.replace("PORT", str(served.port)) for name, value in headers.items()}
    got, text = served.post(act, given)
    assert got == code, text
    assert not [*(run / "steering" / "acts").glob("*.json")]
    assert not (run / "steering" / "log.jsonl").exists()


def test_the_token_in_the_address_of_an_act_is_not_enough(steering: tuple[Served, Path]) -> None:
    served, _ = steering
    assert served.post(STOP, {"Authorization": None}, "/tell?token=TOKEN")[0] == 403
    assert served.post(STOP, path="/tell?run=../run")[0] == 404


def test_the_server_listens_on_this_machine_alone_and_writes_no_token(reading: Served) -> None:
    with socket.socket() as other:
        other.settimeout(5)
        others = {facts[4][0] for facts in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
        for address in others:
            if not str(address).startswith("127."):
                assert other.connect_ex((str(address), reading.port)) != 0
    with serving(reading.directory) as served:
        served.get()
        served.get("/?token=wrong")
        served.process.terminate()
        out, err = served.process.communicate()
    assert served.token not in out + err


# -- contents of a directory --------------------------------------------------------------------------

SCRIPT = "<img src=x onerror=\"document.title='taken'\"></script><script>document.title='taken'</script>"


def decide(run: Path, **facts: object) -> None:
    row = {
        "what": "noted",
        "who": "Steering",
        "why": "why",
        "epoch": 0,
        "step": 1,
        "batch": 1,
        "samples": 1,
        "tokens": 0,
        "data": {},
    }
    with (run / "decisions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, **facts}) + "\n")


def test_html_in_names_values_reasons_and_notes_is_text(finished: Path, tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "runs"
    run = shutil.copytree(finished, folder / SCRIPT.replace("/", "_"))
    shutil.copytree(finished, folder / "other")
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        row = {"epoch": 1, "step": 9, "batch": 9, "samples": 9, "tokens": 0, "time": 1e9, SCRIPT: 1.0}
        file.write(json.dumps(row) + "\n")
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    info["outcome"] = {"kind": SCRIPT, "reason": SCRIPT}
    (run / "run.json").write_text(json.dumps(info), encoding="utf-8")
    data = {"verb": "note", "arguments": {"text": SCRIPT}, "author": SCRIPT, "reason": SCRIPT, "result": SCRIPT}
    decide(run, what="steered", who=SCRIPT, why=SCRIPT, data=data)
    decide(run, what="alerted", who=SCRIPT, why=SCRIPT)
    with serving(folder) as served, watched(browser, served.origin) as opened:
        page = opened(served.address)
        expect(page.locator(".card.live")).to_have_count(2, timeout=100_000)
        assert "taken" not in page.title().replace(SCRIPT, "").replace(SCRIPT.replace("/", "_"), "")
        assert page.locator("main img, main script").count() == 0
        page.locator(".card.live a").first.click()
        expect(page.locator(".card.live")).to_have_count(1, timeout=100_000)
        assert page.locator("main img, main script").count() == 0


def linked(name: str) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside)

    return change


def fifo(name: str) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def folder(name: str) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return change


def nested(run: Path, outside: Path) -> None:
    (run / "run.json").write_text("[" * 100_000)


FILES = ("metrics.jsonl", "decisions.jsonl", "profile.json", "ranks.json", "media")
CONTENTS: dict[str, Callable[[Path, Path], None]] = {
    **{f"a link as {name}": linked(name) for name in ("run.json", *FILES)},
    **{f"a pipe as {name}": fifo(name) for name in FILES},
    "a run of others by a link": lambda run, outside: (run.parent / "link").symlink_to(outside),
    "a folder as decisions.jsonl": folder("decisions.jsonl"),
    "no JSON": nested,
}


@pytest.mark.parametrize("case", CONTENTS)
def test_files_of_others_are_not_shown_and_block_no_page(case: str, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "runs" / "run")
    outside = tmp_path / "secret"
    outside.mkdir()
    secret = json.dumps(
        {
            "step": 1,
            "time": 1.0,
            "what": "secret words",
            "who": "secret words",
            "why": "secret words",
            "arguments": {"a": "secret words"},
        }
    )
    target = outside / "run.json"
    target.write_text(secret + "\n", encoding="utf-8")
    CONTENTS[case](run, outside if case.endswith(("media", "by a link")) else target)
    with serving(run.parent) as served:
        code, text = served.get()
        state = next(served.states())
        assert code == 200
        assert "secret words" not in text + json.dumps(state)
        assert [one["name"] for one in state["runs"]] == ["run"]
