"""``cadenza serve`` in a process of its own, and requests to it that no browser would send."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Served:
    """A server that goes on."""

    address: str
    """As it was printed."""
    process: subprocess.Popen[str]
    directory: Path

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.address).query)["token"][0]

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(
        self, path: str = "/?token=TOKEN", headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, str]:
        """Send a request, in which TOKEN stands for the token; return the code and the text of the answer."""
        return self.send(method, path, [("Host", f"127.0.0.1:{self.port}"), *(headers or {}).items()])

    def post(self, act: object, headers: Mapping[str, str | None] | None = None, path: str = "/tell") -> tuple[int, str]:
        """Send an act as the page does; `headers` replace those of the page, and None leaves one out."""
        own = {"Host": f"127.0.0.1:{self.port}", "Origin": self.origin, "Content-Type": "application/json"}
        given = {**own, "Authorization": f"Bearer {self.token}", **(headers or {})}
        body = act if isinstance(act, bytes) else json.dumps(act).encode()
        sent = [(name, value) for name, value in given.items() if value is not None]
        return self.send("POST", path, [*sent, ("Content-Length", str(len(body)))], body)

    def send(self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes = b"") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        connection.putrequest(method, path.replace("TOKEN", self.token), skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value.replace("TOKEN", self.token))
        connection.endheaders(body)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def accepts(self, path: str) -> bool:
        """Return whether a read is answered with code 200; what follows is not read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        connection.request("GET", path.replace("TOKEN", self.token))
        accepted = connection.getresponse().status == 200
        connection.close()
        return accepted

    def states(self, query: str = "") -> Generator[dict[str, Any], None, None]:
        """Yield what the page is sent, without an end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        connection.request("GET", f"/events?token={self.token}{query}")
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        try:
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            connection.close()


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Served]:
    """Serve a directory until the end of the block."""
    command = [sys.executable, "-m", "cadenza", "serve", str(directory), "--every", "0.1", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.communicate()
        yield Served(address, process, directory)
    finally:
        process.kill()
        process.communicate()
