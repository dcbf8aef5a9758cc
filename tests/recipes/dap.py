"""A small client of the Debug Adapter Protocol: what an editor sends to debugpy."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Client:
    """A connection to debugpy on a port of this machine."""

    def __init__(self, port: int, *, timeout_s: float = 300) -> None:
        ends = time.monotonic() + timeout_s
        while True:
            try:
                self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
                break
            except OSError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.1)
        self.stream, self.number, self.seen = self.socket.makefile("rb"), 0, list[dict[str, Any]]()

    def attach(self, script: Path, line: int) -> None:
        """Attach, and set a breakpoint, as the launch configuration of the page does."""
        self.send("initialize", adapterID="debugpy")
        self.send("attach", justMyCode=True)
        self.event("initialized")
        self.request("setBreakpoints", source={"path": str(script)}, breakpoints=[{"line": line}])
        self.request("configurationDone")

    def stopped(self) -> tuple[int, dict[str, Any]]:
        """Wait for a breakpoint; return the thread and its top frame."""
        thread = self.event("stopped")["threadId"]
        return thread, self.request("stackTrace", threadId=thread)["stackFrames"][0]

    def value(self, expression: str, frame: dict[str, Any]) -> str:
        """Evaluate an expression in a frame, as the debug console does."""
        return str(self.request("evaluate", expression=expression, frameId=frame["id"], context="repl")["result"])

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, and return the body of its answer."""
        number = self.send(command, **arguments)
        answer = self.wait(lambda message: message.get("request_seq") == number)
        assert answer["success"], answer
        return answer.get("body", {})  # type: ignore[no-any-return]

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event, and return its body."""
        return self.wait(lambda message: message.get("event") == name).get("body", {})  # type: ignore[no-any-return]

    def send(self, command: str, **arguments: Any) -> int:
        self.number += 1
        data = json.dumps({"seq": self.number, "type": "request", "command": command, "arguments": arguments}).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
        return self.number

    def wait(self, fits: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first message that fits, and remove it."""
        found: dict[str, Any] | None
        while (found := next(filter(fits, self.seen), None)) is None:
            length = 0
            while (line := self.stream.readline().strip()) != b"":
                length = int(line.partition(b":")[2]) if line.lower().startswith(b"content-length") else length
            if not length:
                raise EOFError("debugpy closed the connection")
            self.seen.append(json.loads(self.stream.read(length)))
        self.seen.remove(found)
        return found

    def close(self) -> None:
        self.stream.close()
        self.socket.close()
