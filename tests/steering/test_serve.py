"""``cadenza serve`` in a browser: the page follows a run and acts on it, by keyboard and for a screen reader."""

from __future__ import annotations

import re
import shutil
import signal
import socket
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from cadenza.callbacks import LogTraining
from cadenza.steering import read_run
from cadenza.testing import tiny_run
from tests.browsing import watched
from tests.steering.parts import STEERED, command, kill, steps_of, training, until_steps
from tests.steering.serving import serving
from tests.waiting import until

expect.set_options(timeout=100_000)


def last_step(page: Page) -> int:
    """Return the last step of the curves."""
    return int(page.evaluate("span[1]"))


def drawn(page: Page) -> str | None:
    """Return the path of the first curve."""
    return page.locator("figure[data-chart='0'] .line").first.get_attribute("d")


def test_the_page_follows_a_run_until_its_end(tmp_path: Path, browser: Browser) -> None:
    run = tmp_path / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 60, process)
        with serving(run) as served, watched(browser, served.origin) as opened:
            page = opened(served.address)
            card = page.locator(".card.live")
            expect(card).to_contain_text("running: step ")
            expect(card.locator("progress")).to_have_attribute("aria-label", "progress of run")
            first, curve = last_step(page), drawn(page)
            until(lambda: last_step(page) > first + 50)
            assert drawn(page) != curve
            shown = page.locator("figure[data-chart='0'] p.count").last.inner_text()
            assert int(shown.partition(" ")[0].replace(",", "")) > 100
            assert page.evaluate("performance.getEntriesByType('navigation').length") == 1
            page.get_by_label("update the report").uncheck()
            kill(process)
            expect(card).to_contain_text("killed: step ")
            expect(page.locator("#said")).to_contain_text("run: killed")
            still = last_step(page)
            page.get_by_label("update the report").check()
            until(lambda: last_step(page) == steps_of(run) >= still)


def test_a_run_that_is_over_and_a_copy_of_one_are_shown(tmp_path: Path, browser: Browser) -> None:
    tiny_run(directory=tmp_path / "runs" / "first", callbacks=[LogTraining("1 step")])
    shutil.copytree(tmp_path / "runs" / "first", tmp_path / "runs" / "deep" / "second")
    with serving(tmp_path / "runs") as served, watched(browser, served.origin) as opened:
        page = opened(served.address)
        cards = page.locator(".card.live")
        expect(cards).to_have_count(2)
        expect(cards.first).to_contain_text("finished (the limit is reached): step 5")
        page.get_by_role("link", name="deep/second").click()
        expect(page.locator("h1")).to_have_text("second")
        expect(cards).to_have_count(1)


@pytest.mark.parametrize("wide", [400, 1400])
def test_by_keyboard_a_reader_acts_on_the_run_and_hears_the_result(wide: int, tmp_path: Path, browser: Browser) -> None:
    run = tmp_path / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 1, process)
        with serving(run, "--allow-steering") as served, watched(browser, served.origin) as opened:
            page = opened(served.address, viewport={"width": wide, "height": 900})
            expect(page.get_by_role("group", name="Act on this run").get_by_role("button", name="Stop")).to_be_enabled()
            assert page.evaluate("document.documentElement.scrollWidth") == wide, "the page scrolls sideways"
            page.get_by_label("reason, for the record").focus()
            page.keyboard.type("the loss <jumps>")
            while page.evaluate("document.activeElement.id") != "act-value":
                page.keyboard.press("Tab")
            page.keyboard.type("0.005")
            page.keyboard.press("Enter")
            result = page.get_by_role("status").filter(has_text="set: done")
            expect(result).to_have_text("set: done: lr 0.01 -> 0.005 in 1 parameter group")
            expect(page.locator("#said")).to_contain_text("steered by Steering")
            table = page.locator("#acts tbody")
            expect(table).to_contain_text("set lr=0.005")
            expect(table).to_contain_text("the loss <jumps>")
            expect(page.locator("figure[data-chart='0'] path.act").first).to_be_attached()
            for verb in ("Pause", "Resume"):
                page.get_by_role("button", name=verb).press("Space")
                expect(page.locator("#act-result")).to_contain_text(f"{verb.lower()}: done")
            page.on("dialog", lambda dialog: dialog.accept())
            page.get_by_label("reason, for the record").fill("the loss <jumps>")  # the form is empty after an act
            page.get_by_role("button", name="Stop").press("Enter")
            expect(page.locator(".card.live")).to_contain_text("stopped (the loss <jumps>)")
            expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    assert read_run(run).why("steered", last=9)["decisions"][0]["data"]["reason"] == "the loss <jumps>"


def test_what_happens_while_the_page_loads_itself_anew_is_announced(tmp_path: Path, browser: Browser) -> None:
    run = tmp_path / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 1, process)
        with serving(run) as served, watched(browser, served.origin) as opened:
            page = opened(served.address)
            expect(page.locator(".card.live")).to_contain_text("running: step ")

            def serve(route: Route) -> None:
                if route.request.resource_type == "fetch":  # the report has a value of a new name: the page must be new
                    report = route.fetch()
                    route.fulfill(response=report, body=report.text().replace('"name":"train/loss"', '"name":"train/other"'))
                else:
                    kill(process)
                    route.continue_()

            page.route(served.address, serve)
            expect(page.locator("#said")).to_contain_text("run: killed")
            assert page.evaluate("performance.getEntriesByType('navigation')[0].type") == "reload"


def test_every_control_has_a_name_and_every_part_a_landmark(tmp_path: Path, browser: Browser) -> None:
    run = tmp_path / "run"
    with training(STEERED, run, "100000") as process:
        until_steps(run, 2, process)
        with serving(run, "--allow-steering") as served, watched(browser, served.origin) as opened:
            page = opened(served.address)
            page.wait_for_selector(".card.live")
            for control in page.locator("#live").locator("input, button, progress").all():
                named = control.evaluate(
                    "node => node.getAttribute('aria-label') || node.labels?.[0]?.textContent || node.textContent"
                )
                assert named.strip(), control.evaluate("node => node.outerHTML")
            assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
            assert page.get_by_role("region", name="live").count() == 1
            assert page.locator("#said").get_attribute("aria-live") == "polite"
            headings = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(one => Number(one.tagName[1]))")
            assert all(after - before <= 1 for before, after in pairwise(headings)), headings


def test_the_server_ends_at_ctrl_c_while_a_page_is_open(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path / "run", callbacks=[LogTraining("1 step")])
    with serving(tmp_path / "run") as served:
        states = served.states()
        assert next(states)["runs"][0]["state"] == "finished"
        served.process.send_signal(signal.SIGINT)
        assert served.process.communicate() == ("", "cadenza: interrupted\n")
        assert served.process.returncode == 130
        assert [*states] == []  # the stream is closed in full


def test_connections_that_send_no_request_do_not_keep_out_the_page(tmp_path: Path) -> None:
    from cadenza.steering.server import STREAMS

    tiny_run(directory=tmp_path / "run", callbacks=[LogTraining("1 step")])
    with serving(tmp_path / "run") as served, ExitStack() as opened:
        states = served.states()
        next(states)
        halves = [b"", b"GET / HTTP/1.1\r\n", b"GET /?token=x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET"]
        for number in range(4 * STREAMS):
            idle = opened.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            idle.sendall(halves[number % len(halves)])
        assert served.get()[0] == 503
        until(lambda: served.get()[0] == 200)
        decision = (tmp_path / "run" / "decisions.jsonl").open("a")
        opened.enter_context(decision).write("\n")
        decision.flush()
        assert next(states)["runs"][0]["state"] == "finished"  # the open page is still followed


def test_no_more_pages_than_the_limit_stay_open(tmp_path: Path) -> None:
    from cadenza.steering.server import STREAMS

    tiny_run(directory=tmp_path / "run", callbacks=[LogTraining("1 step")])
    with serving(tmp_path / "run") as served:
        streams = [served.states() for _ in range(STREAMS)]
        for stream in streams:
            next(stream)
        assert served.get("/events?token=TOKEN") == (503, f"{STREAMS} pages are open; close one")
        streams.pop().close()
        until(lambda: served.accepts("/events?token=TOKEN"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], r"'nowhere' is not a folder"),
        (["."], r"and holds none"),
        ([".", "--port", "70000"], r"and holds none|--port must be"),
        ([".", "--every", "0"], r"--every must be at least"),
    ],
)
def test_wrong_arguments_are_said(options: list[str], message: str, tmp_path: Path) -> None:
    done = command("serve", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path / "run", callbacks=[LogTraining("1 step")])
    with serving(tmp_path / "run") as served:
        done = command("serve", str(tmp_path / "run"), "--port", str(served.port))
    assert done.returncode == 1
    assert f"port {served.port} of 127.0.0.1 cannot be used" in done.stderr
