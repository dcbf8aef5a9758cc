"""``cadenza mcp``: agents ask runs in their own protocol, as the client of the official SDK does over stdin and stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client, StdioServerParameters

from cadenza.callbacks import LogTraining
from cadenza.steering import read_run
from cadenza.testing import tiny_run
from tests.steering.parts import STEERED, command, training, until_steps
from tests.steering.test_ask import FORM

READS = {"runs", "status", "plan", "why", "why_not", "metric", "samples", "config", "health"}


def talk(directory: Path, converse: Callable[[Client], Awaitable[None]], *options: str) -> None:
    """Start the server as an agent does, and talk to it."""
    arguments = ["-m", "cadenza", "mcp", str(directory), *options]
    server = StdioServerParameters(command=sys.executable, args=arguments, env={**os.environ})

    async def connect() -> None:
        async with Client(server) as client:
            await converse(client)

    asyncio.run(connect())


async def call(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result
    answer: dict[str, Any] = json.loads(result.content[0].text)  # type: ignore[union-attr]  # the tools answer with text
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    for name in ("first", "second"):
        tiny_run(directory=folder / name, callbacks=[LogTraining("1 step")])
    return folder


def test_the_tools_answer_as_ask_does(folder: Path) -> None:
    async def converse(client: Client) -> None:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == READS
        assert all(tool.annotations and tool.annotations.read_only_hint and tool.description for tool in tools)
        runs = await call(client, "runs")
        assert runs == {"runs": [{"name": name, "state": "finished", "step": 5} for name in ("first", "second")]}
        asked: list[tuple[str, dict[str, Any]]]
        asked = [("status", {}), ("plan", {}), ("why", {"what": "ended"}), ("why_not", {"what": "saved"}), ("config", {})]
        asked += [("metric", {"name": "train/loss", "last": 2}), ("samples", {"step": 3}), ("health", {})]
        for tool, given in asked:
            answer = await call(client, tool, run="second", **given)
            jsonschema.validate(answer, FORM)
            assert answer["ok"], answer
            assert answer["run"] == str(folder / "second")
        last = await call(client, "metric", name="train/loss", run="second", last=2)
        assert last["answer"]["values"] == read_run(folder / "second").metric("train/loss", last=2)["values"]

    talk(folder, converse)


def test_a_question_that_has_no_answer_says_what_there_is(folder: Path) -> None:
    async def converse(client: Client) -> None:
        for run in ("", "third", "../first", str(folder / "first")):
            answer = await call(client, "status", run=run)
            assert answer["error"]["kind"] == "directory"
            assert answer["error"]["message"].endswith("There are: first, second")
        answer = await call(client, "samples", run="first", step=99)
        assert answer["error"]["kind"] == "value"
        told = await client.call_tool("tell", {"verb": "stop", "reason": "none", "run": "first"})
        assert told.is_error

    talk(folder, converse)


def test_an_agent_acts_only_where_it_is_allowed(tmp_path: Path) -> None:
    run = tmp_path / "run"

    async def converse(client: Client) -> None:
        told = await call(client, "tell", verb="set", arguments={"lr": 0.005}, reason="the loss jumps")
        assert (told["state"], told["result"]) == ("done", "lr 0.01 -> 0.005 in 1 parameter group")
        refused = await call(client, "tell", verb="set", arguments={"lr": -1}, reason="a mistake")
        assert refused["state"] == "refused"
        attached = await client.call_tool("tell", {"verb": "attach", "arguments": {"callback": "os:abort"}, "reason": "code"})
        assert attached.is_error
        assert (await call(client, "tell", verb="stop", reason="done"))["state"] == "done"

    with training(STEERED, run, "100000") as process:
        until_steps(run, 1, process)
        talk(run, converse, "--allow-steering")
        process.wait()
    decisions = read_run(run).why("steered", last=5)["decisions"]
    assert [decision["data"]["reason"] for decision in decisions] == ["the loss jumps", "done"]


def test_a_directory_without_a_run_is_said_before_any_talk(tmp_path: Path) -> None:
    done = command("mcp", str(tmp_path))
    assert done.returncode == 1
    assert "and holds none" in done.stderr
    assert not done.stdout
