"""Ports for servers that tests start in other processes."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a free port below the range from which the kernel takes ports, so that no other process gets it meanwhile."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(probe.getsockname()[1])
