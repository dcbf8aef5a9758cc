"""``cadenza mcp``: the questions of ``cadenza ask``, and allowed acts, as tools of the Model Context Protocol."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cadenza.errors import DirectoryError, MissingExtraError, nearest
from cadenza.report.commands.directories import NamedRuns
from cadenza.status.formats import in_json
from cadenza.steering.run_reader import RunReader, question
from cadenza.steering.sending import tell

if TYPE_CHECKING:
    from mcp.server import MCPServer

_ABOUT = (
    "Questions to training runs of Cadenza, answered from their directories. Each answer has ok, and either answer or error. "
    "`run` is a name that the tool runs returns; it can be left out if there is one run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Let agents ask runs in the Model Context Protocol, over stdin and stdout: the tools are the questions of cadenza ask. "
        "They only read. With --allow-steering there is also a tool for acts, as cadenza tell."
    )
    parser.epilog = (
        "examples:\n  cadenza mcp runs\n  cadenza mcp runs/first --allow-steering\n"
        '  in the settings of an agent: {"command": "cadenza", "args": ["mcp", "/path/of/runs"]}'
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a run directory, or a folder of them")
    parser.add_argument("--allow-steering", action="store_true", help="add the tool `tell`, for runs that have Steering()")
    parser.set_defaults(command=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Answer an agent until it closes stdin.

    Raises:
        MissingExtraError: The package ``mcp`` is not installed.
        DirectoryError: The directory holds no run.
    """
    if find_spec("mcp") is None:
        raise MissingExtraError("mcp", needed_by="cadenza mcp", extra="mcp")
    server_of(arguments.directory, allow_steering=arguments.allow_steering).run("stdio")
    return 0


def server_of(directory: Path, *, allow_steering: bool = False) -> MCPServer[Any]:
    """Return the server of a directory.

    Raises:
        DirectoryError: The directory holds no run.
    """
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    tools = Tools(NamedRuns(directory))
    server: MCPServer[Any] = MCPServer("cadenza", instructions=_ABOUT, log_level="WARNING")
    reading: tuple[Callable[..., Any], ...] = (
        tools.runs, tools.status, tools.plan, tools.why, tools.why_not, tools.metric, tools.samples, tools.config, tools.health,
    )  # fmt: skip
    for tool in reading:
        server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    if allow_steering:
        server.add_tool(tools.tell, annotations=ToolAnnotations(read_only_hint=False, open_world_hint=False))
    return server


class Tools:
    """The tools. Their docstrings are what an agent reads."""

    def __init__(self, runs: NamedRuns) -> None:
        self._runs = runs

    def runs(self) -> dict[str, Any]:
        """List the runs with their states and steps."""
        listed = []
        for name in self._runs.paths():
            answer = self._asked(name, "status", lambda run: run.status())
            found = answer.get("answer", {"state": "unreadable", "step": None})
            listed.append({"name": name, "state": found["state"], "step": found["step"]})
        return {"runs": listed}

    def status(self, run: str = "") -> dict[str, Any]:
        """Say the state of a run, how much is done, the time left, its newest values, last decisions and checkpoints."""
        return self._asked(run, "status", lambda reader: reader.status())

    def plan(self, run: str = "") -> dict[str, Any]:
        """List the moments of a run, each with the callbacks that it calls."""
        return self._asked(run, "plan", lambda reader: reader.plan())

    def why(self, what: str = "ended", run: str = "", last: int = 1) -> dict[str, Any]:
        """Say why a run decided something, such as stopped, saved, alerted or steered; ended: how the run ended."""
        return self._asked(run, "why", lambda reader: reader.why(what, last=last))

    def why_not(self, what: str, run: str = "") -> dict[str, Any]:
        """Say what the files of a run know about why something, such as saved, did not happen."""
        return self._asked(run, "why-not", lambda reader: reader.why_not(what))

    def metric(self, name: str, run: str = "", last: int = 100) -> dict[str, Any]:
        """Return the last values of a metric, such as train/loss, with their steps and times."""
        return self._asked(run, "metric", lambda reader: reader.metric(name, last=last))

    def samples(self, step: int, run: str = "") -> dict[str, Any]:
        """Name the samples that each rank read in a step."""
        return self._asked(run, "samples", lambda reader: reader.samples(step))

    def config(self, run: str = "") -> dict[str, Any]:
        """Return the arguments, versions, command line, device and seed of a run. Secrets are masked."""
        return self._asked(run, "config", lambda reader: reader.config())

    def health(self, run: str = "") -> dict[str, Any]:
        """List the problems of a run: no news, values that are not finite, failures, alerts, a full disk."""
        return self._asked(run, "health", lambda reader: reader.health())

    def tell(
        self,
        verb: Literal["stop", "pause", "resume", "save", "evaluate", "set", "note"],
        reason: str,
        run: str = "",
        arguments: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Act on a run at its next step. `arguments`: of set, such as {"lr": 1e-4}; of note, {"text": ...}.

        The state of the answer is done with a result, refused with why, or waiting. Give the reason: the run records it.
        """
        try:
            return dict(in_json(tell(self._path(run), verb, arguments, reason=reason)))
        except DirectoryError as error:
            return {"ok": False, "error": {"kind": "directory", "message": str(error)}}

    def _asked(self, run: str, name: str, ask: Callable[[RunReader], dict[str, Any]]) -> dict[str, Any]:
        directory = str(self._runs.paths().get(run, self._runs.directory))
        return dict(in_json(question(directory, name, lambda: ask(RunReader(self._path(run))))))

    def _path(self, run: str) -> Path:
        """Return the directory of a run by its name.

        Raises:
            DirectoryError: There is no such run, or several and no name.
        """
        paths = self._runs.paths()
        if not run and len(paths) == 1:
            return next(iter(paths.values()))
        if run not in paths:
            listed = ", ".join(paths)
            raise DirectoryError(f"there is no run {run!r} here.{nearest(run, paths)} There are: {listed}")
        return paths[run]
