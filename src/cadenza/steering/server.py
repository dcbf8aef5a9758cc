"""The local page of runs: the report, which follows them by server-sent events, and acts where they are allowed.

A request is served only if it has the token, names this machine as its host, and comes from the page itself.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import CadenzaError, DirectoryError
from cadenza.files.locking import is_held
from cadenza.report import Live, Story, name_distinctly, page, story_at
from cadenza.report.commands.directories import NamedRuns
from cadenza.status.formats import amount, clock, counted, in_json, precise
from cadenza.status.markup import Html, element
from cadenza.steering.acts import LARGEST, VERBS, check_content
from cadenza.steering.condition import FAULTS
from cadenza.steering.run_reader import RunReader, sentence
from cadenza.steering.sending import tell

if TYPE_CHECKING:  # they are imported when a page is served: without the extra the module can be read
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

ALLOWED = tuple(verb for verb in VERBS if verb != "attach")
"""The verbs that the page may send. ``attach`` runs code, so it is left to the command line."""
STREAMS = 16
"""How many pages may be open at the same time."""
_AGAIN_S = 5.0
_ALIVE_S = 15.0
_WAIT_S = 5.0
_HEAD_S = 5.0
"""How long a connection may stay without a request."""
_FILES = ("run.json", "metrics.jsonl", "decisions.jsonl")
_VALUES = 8
_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Site:
    """The runs of a directory, as the page shows them.

    Args:
        directory: A run directory, or a folder of run directories.
        token: What each request must have.
        allow_steering: Whether the page may act on the runs.
        every_s: How often an open page looks for news, in seconds.

    Raises:
        DirectoryError: The directory does not exist, or it holds no run.
    """

    def __init__(self, directory: Path, token: str, *, allow_steering: bool = False, every_s: float = 1.0) -> None:
        self.runs: NamedRuns = NamedRuns(directory)
        self.token: str = token
        self.allow_steering: bool = allow_steering
        self._every_s = every_s
        self._lock = threading.Lock()
        self._states: dict[str, tuple[float, str, dict[str, Any]]] = {}
        self._pages: dict[tuple[str, ...], tuple[str, str]] = {}
        self._streams = 0
        self._ending = asyncio.Event()

    def end(self) -> None:
        """End the streams of open pages. The thread of the server must call this."""
        self._ending.set()

    def app(self) -> Starlette:
        """Return the application."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.routing import Route

        routes = [Route("/", self._page), Route("/events", self._events), Route("/tell", self._tell, methods=["POST"])]
        return Starlette(routes=routes, middleware=[Middleware(Guard, token=self.token)])

    # -- the runs ----------------------------------------------------------------------------------

    def _chosen(self, request: Request) -> dict[str, Path] | None:
        """Return the runs that a request is about; None if it names one that is not there. A name is never used as a path."""
        paths = self.runs.paths()
        name = request.query_params.get("run")
        if name is None:
            return paths or None
        return {name: paths[name]} if name in paths else None

    def _version(self, paths: Mapping[str, Path]) -> str:
        """Return a text that changes with the files of runs."""
        return sha256(repr([_signs(path) for path in paths.values()]).encode()).hexdigest()[:16]

    def states(self, paths: Mapping[str, Path]) -> dict[str, Any]:
        """Return the present state of runs, as the script of the page shows it. May be called from any thread."""
        with self._lock:
            return {"version": self._version(paths), "runs": [self._state(name, path) for name, path in paths.items()]}

    def _state(self, name: str, path: Path) -> dict[str, Any]:
        now = time.monotonic()
        signs = _signs(path)
        looked, before, state = self._states.get(name, (0.0, "", {}))
        if signs != before or now - looked > _AGAIN_S:
            state = {"name": name, "link": path != self.runs.directory, **_shown(path), "acts": False}
            state["acts"] = self.allow_steering and state.pop("steering", False)
            self._states[name] = now, signs, state
        return state

    # -- answers -----------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse, PlainTextResponse

        paths = await asyncio.to_thread(self._chosen, request)
        if paths is None:
            return PlainTextResponse("there is no such run here", 404)
        return HTMLResponse(await asyncio.to_thread(self.rendered, paths))

    def rendered(self, paths: Mapping[str, Path]) -> str:
        """Return the page of runs; the same text as long as their files are the same."""
        with self._lock:
            key = tuple(paths)
            version = self._version(paths)
            before, text = self._pages.get(key, ("", ""))
            if before != version:
                stories = [_story(path) for path in paths.values()]
                name_distinctly(stories, [*paths.values()])
                text = page(stories, Live(self._panel(version, several=len(paths) > 1), _file("live.css"), _file("live.js")))
                self._pages = {**dict([*self._pages.items()][-3:]), key: (version, text)}
            return text

    async def _events(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse, StreamingResponse

        paths = await asyncio.to_thread(self._chosen, request)
        if paths is None:
            return PlainTextResponse("there is no such run here", 404)
        if self._streams >= STREAMS:
            return PlainTextResponse(f"{counted(STREAMS, 'page')} are open; close one", 503)
        return StreamingResponse(self._stream(request), media_type="text/event-stream")

    async def _stream(self, request: Request) -> AsyncIterator[str]:
        self._streams += 1
        try:
            before = ""
            told = time.monotonic()
            while not self._ending.is_set():
                paths = await asyncio.to_thread(self._chosen, request)
                if paths is None:
                    return
                now = json.dumps(in_json(await asyncio.to_thread(self.states, paths)))
                if now != before:
                    before = now
                    told = time.monotonic()
                    yield f"data: {now}\n\n"
                elif time.monotonic() - told > _ALIVE_S:
                    told = time.monotonic()
                    yield ":\n\n"
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), self._every_s)
        finally:
            self._streams -= 1

    async def _tell(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, PlainTextResponse

        if not self.allow_steering:
            return PlainTextResponse("acts are not allowed: start the server with --allow-steering", 403)
        paths = await asyncio.to_thread(self._chosen, request)
        if paths is None or len(paths) != 1:
            return PlainTextResponse("name one run", 404)
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return PlainTextResponse("an act must be JSON", 415)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > LARGEST:
                return PlainTextResponse(f"an act has at most {LARGEST} bytes", 413)
        try:
            verb, arguments, reason = _act_in(body)
            path = next(iter(paths.values()))
            answer = await asyncio.to_thread(tell, path, verb, arguments, reason=reason, wait_s=_WAIT_S)
        except (ValueError, CadenzaError) as error:
            return PlainTextResponse(str(error), 400)
        told = answer.get("result") or answer.get("why") or "the run has come to no step boundary yet"
        return JSONResponse({"text": f"{verb}: {answer['state']}: {told}", "state": answer["state"]})

    # -- the parts of the page ---------------------------------------------------------------------

    def _panel(self, version: str, *, several: bool) -> Html:
        follow = element("input", type="checkbox", id="follow", checked=True)
        head = element(
            "div",
            element("h2", "Live"),
            element("p", "connecting", id="link", class_="note", role="status"),
            element("label", follow, " update the report", class_="tool"),
            class_="live-head",
        )
        form = None
        if self.allow_steering:
            form = element("p", "Open one of the runs to act on it.", class_="note") if several else _form()
        runs = element("div", id="live-runs", class_="cards")
        return element("section", head, runs, form, id="live", aria_label="live", data_version=version)


def run(site: Site, listening: socket.socket) -> None:
    """Serve a site on a socket until a signal ends it. Requests are not logged: their addresses hold the token."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):  # type: ignore[misc]  # mypy skips uvicorn
        """A connection that is closed while it has no request: idle ones of other users would keep out the page."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.loop.call_later(_HEAD_S, self._look, None)

        def _look(self, before: object) -> None:
            is_idle = self.cycle is None or self.cycle.response_complete
            if is_idle and self.cycle is before:  # no request since the last look
                self.transport.close()
            elif not self.transport.is_closing():
                self.loop.call_later(_HEAD_S, self._look, self.cycle if is_idle else self)

    class Server(uvicorn.Server):  # type: ignore[misc]
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            site.end()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        site.app(),
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=4 * STREAMS,
        timeout_graceful_shutdown=int(_WAIT_S) + 1,  # an act that is sent gets its answer
        lifespan="off",
        http=Connection,  # h11 limits the size of a head
        ws="none",
    )
    Server(config).run(sockets=[listening])


class Guard:
    """Refuse requests without the token, of another host name, or from another site; add headers to all answers."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request."""
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        reason, code = refusal(Request(scope), self._token)
        answer = PlainTextResponse(reason, code) if reason else self._app
        await answer(scope, receive, guarded)


def refusal(request: Request, token: str) -> tuple[str, int]:
    """Return why a request is refused and the code of the answer; an empty text for one that is served."""
    headers = request.headers
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):  # a name of another site that leads to this machine
        return "the Host header must name this machine: use the address that the server printed", 421
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site")
    is_post = request.method == "POST"
    if (origin is not None or is_post) and origin != f"http://{hosts[0]}":
        return "the request comes from another site", 403
    if site in ("cross-site", "same-site") and (is_post or headers.get("sec-fetch-mode") != "navigate"):
        return "the request comes from another site", 403
    given = headers.get("authorization", "") if is_post else f"Bearer {request.query_params.get('token', '')}"
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        return "the token is missing or wrong: use the address that the server printed", 403
    return "", 200


def _act_in(body: bytes) -> tuple[str, dict[str, Any], str]:
    """Return verb, arguments and reason in the body of a request.

    Raises:
        ValueError: It holds no act that the page may send.
    """
    try:
        act = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("an act must be JSON") from None
    if not isinstance(act, dict) or not act.keys() <= {"verb", "arguments", "reason"}:
        raise ValueError("an act must be an object with verb, arguments and reason")
    verb = act.get("verb")
    arguments = act.get("arguments", {})
    reason = act.get("reason", "")
    if verb not in ALLOWED:
        raise ValueError(f"the verb must be one of {', '.join(ALLOWED)}")
    if not isinstance(arguments, dict) or not isinstance(reason, str):
        raise ValueError("arguments must be an object, and reason a text")
    check_content(act)
    return str(verb), arguments, reason


def _signs(path: Path) -> str:
    """Return a text that changes with the files of a run that the page shows."""
    facts = []
    for name in _FILES:
        try:
            found = os.stat(path / name)
            facts.append((found.st_size, found.st_mtime_ns))
        except OSError:
            facts.append((-1, -1))
    return repr((facts, is_held(path)))


def _leads_out(path: Path) -> str:
    """Return a sentence about a link in a run directory to a file outside of it, which is not read; empty without one."""
    whole = path.resolve()
    for name in (*_FILES, "profile.json", "ranks.json", "media"):
        if (path / name).is_symlink() and not (path / name).resolve().is_relative_to(whole):
            return f"{name} is a link that leads out of the run directory, so the run is not shown."
    return ""


def _story(path: Path) -> Story:
    """Return the data of a run; nothing but its name if it has no files yet, or files of others."""
    if problem := _leads_out(path):
        return Story(path.resolve().name, problems=[problem])
    try:
        return story_at(path)
    except DirectoryError:
        return Story(path.resolve().name)


def _shown(path: Path) -> dict[str, Any]:
    """Return the state of a run as texts and numbers for its card."""
    try:
        if problem := _leads_out(path):
            raise DirectoryError(problem)
        status = RunReader(path).status()
    except DirectoryError as error:
        none: list[Any] = []
        return {
            "state": "unreadable",
            "look": "failed",
            "sentence": str(error),
            "figures": "",
            "fraction": None,
            "values": none,
            "news": none,
        }
    epochs = f", epoch {status['epoch']:,}" + (f" of {status['epochs']:,}" if status["epochs"] else "")
    steps = f"step {status['step']:,}" + (f" of {status['steps']:,}" if status["steps"] else "")
    outcome = status["outcome"] if isinstance(status["outcome"], Mapping) else {}
    over = f" ({outcome.get('reason')})" if outcome and status["state"] == outcome.get("kind") else ""
    parts = [f"{clock(status['elapsed_s'])} elapsed"] if status["elapsed_s"] is not None and not over else []
    parts += [f"{clock(status['remaining_s'])} left"] if status["remaining_s"] is not None else []
    if status["steps_per_s"] and not over:
        parts.append(f"{amount(status['steps_per_s'])} steps/s")
    return {
        "state": status["state"],
        "look": status["state"] if re.fullmatch(r"[a-z]+", status["state"]) else "",
        "sentence": f"{status['state']}{over}: {steps}{epochs}",
        "figures": ", ".join(parts),
        "fraction": status["fraction"],
        "values": [[name, precise(value)] for name, value in [*status["values"].items()][:_VALUES]],
        "news": [{"text": sentence(row), "kind": _kind(row["what"])} for row in status["decisions"]],
        "steering": status["steering"]["enabled"],
    }


def _kind(what: str) -> str:
    """Return the class of a decision on the page; empty for one that is not announced."""
    return "fault" if what in FAULTS else "act" if what in ("steered", "not steered", "paused", "continued") else ""


def _form() -> Html:
    """Return the form for acts on one run."""
    buttons = [
        element("button", verb.capitalize(), type="submit", data_verb=verb, class_="danger" if verb == "stop" else None)
        for verb in ("pause", "resume", "save", "evaluate", "stop")
    ]
    reason = element("label", "reason, for the record", element("input", id="act-reason", maxlength=1000), class_="long")
    row = {"class_": "acts-row"}
    setting = [
        element("label", "setting", element("input", id="act-name", value="lr", maxlength=100)),
        element("label", "value", element("input", id="act-value", inputmode="decimal", maxlength=100)),
        element("label", "group, or all", element("input", id="act-group", maxlength=100)),
        element("button", "Set", type="submit", data_verb="set"),
    ]
    note = [
        element("label", "note", element("input", id="act-note", maxlength=1000), class_="long"),
        element("button", "Note", type="submit", data_verb="note"),
    ]
    none = "The run takes no acts now: it is over, or it was started without Steering() in its callbacks."
    return element(
        "form",
        element(
            "fieldset",
            element("legend", "Act on this run"),
            element("div", reason, **row),
            element("div", *buttons, **row),
            element("div", *setting, **row),
            element("div", *note, **row),
            id="acts-fields",
            disabled=True,
        ),
        element("p", none, id="acts-none", class_="note"),
        element("p", id="act-result", class_="note", role="status"),
        id="acts-form",
    )


def _file(name: str) -> str:
    return resources.files("cadenza.steering").joinpath("live", name).read_text("utf-8")
