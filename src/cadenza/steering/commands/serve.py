"""``cadenza serve``: a local page of runs that follows them."""

from __future__ import annotations

import argparse
import secrets
import socket
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlencode

from cadenza.commands.output import say
from cadenza.errors import CadenzaError, MissingExtraError

ADDRESS = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Serve the report of runs as a page on this machine that follows them while they go on. The page is reached with the "
        "printed address alone, which holds a token. It only reads, unless --allow-steering lets it act on runs, as cadenza "
        "tell does. Ctrl-C ends the server, not the runs."
    )
    parser.epilog = (
        "examples:\n  cadenza serve runs/first\n  cadenza serve runs --port 8000\n  cadenza serve runs/first --allow-steering\n"
        "  ssh -L 8000:127.0.0.1:8000 machine cadenza serve runs --port 8000"
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run directory, or a folder of them")
    parser.add_argument("--port", type=int, default=0, metavar="N", help=f"the port on {ADDRESS}; a free one if left out")
    parser.add_argument("--allow-steering", action="store_true", help="let the page act on runs that have Steering()")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="how often to look; 1 if left out")
    parser.set_defaults(command=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C.

    Raises:
        MissingExtraError: A package of the extra ``serve`` is not installed.
        DirectoryError: The directory holds no run.
        CadenzaError: The port is taken, or an option has a wrong value.
    """
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtraError(package, needed_by="cadenza serve", extra="serve")
    if not arguments.every >= 0.05:
        raise CadenzaError(f"--every must be at least 0.05 seconds; got {arguments.every}")
    server = import_module("cadenza.steering.server")
    token = secrets.token_urlsafe(24)
    site = server.Site(arguments.directory, token, allow_steering=arguments.allow_steering, every_s=arguments.every)
    with _listening(arguments.port) as listening:
        say(f"http://{ADDRESS}:{listening.getsockname()[1]}/?{urlencode({'token': token})}")
        sys.stdout.flush()
        server.run(site, listening)
    return 0


def _listening(port: int) -> socket.socket:
    if not 0 <= port <= 65_535:
        raise CadenzaError(f"--port must be from 0 to 65535; got {port}")
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((ADDRESS, port))
        listening.listen()  # before the address is printed
    except OSError as error:
        listening.close()
        raise CadenzaError(f"port {port} of {ADDRESS} cannot be used: {error.strerror}. Give another --port.") from None
    return listening
