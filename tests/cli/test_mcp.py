"""`dgxlab mcp`, asked by the client of the protocol's own SDK, over stdin and stdout."""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

from tests.cli.conftest import Project
from tests.cli.test_loop import BENCH, SPEC, TIME, Loop

Ask = Callable[[str, dict[str, Any]], Awaitable[Any]]


@pytest.fixture
def loop(project: Project, tmp_path: Path) -> Loop:
    project.spec("stock", SPEC)
    return Loop(project, project.checkout(tmp_path / "llama.cpp"))


def served(project: Project, *options: object, use: Callable[[Client, Ask], Awaitable[None]]) -> None:
    """Start the server in the project as a client does, and use it."""
    kept = ("PATH", "PYTHONPATH", "HOME", "XDG_CONFIG_HOME", "DGXLAB_LOCKS")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    argv = ["-m", "dgxlab", "mcp", *map(str, options)]

    async def talk() -> None:
        async with Client(
            StdioServerParameters(command=sys.executable, args=argv, env=env, cwd=project.folder)
        ) as client:

            async def ask(tool: str, arguments: dict[str, Any]) -> Any:
                answer = await client.call_tool(tool, arguments)
                if answer.is_error:
                    return answer.content[0].text
                return answer.structured_content.get("result", answer.structured_content)

            await use(client, ask)

    anyio.run(talk)


def test_it_only_reads_unless_it_may_try(loop: Loop) -> None:
    async def use(client: Client, ask: Ask) -> None:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["plan", "tries", "report", "sessions"]
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
        assert "llama-bench" in await ask("plan", {"experiment": "stock"})
        outside = await ask("plan", {"experiment": "stock", "tree": str(loop.checkout)})
        no_folder = "is no folder in the project or the given trees; next: dgxlab mcp --tree DIR"
        assert f"'{loop.checkout}' {no_folder}" in outside
        assert "is no name of an experiment" in await ask("plan", {"experiment": "../other"})
        assert "has no experiment 'none'" in await ask("plan", {"experiment": "none"})
        assert "validation error" in await ask("plan", {"experiment": 3})
        for path in ("x\0y", "x" * 10_000, "absent"):
            assert no_folder in await ask("plan", {"experiment": "stock", "tree": path})
        assert "a report needs the name" in await ask("report", {"name": ""})
        assert len(await ask("sessions", {"most": -1})) == 1
        assert "Unknown tool" in str(await refused(client, "try", {"baseline": "stock", "tree": ".", "because": "x"}))

    loop.project.ok("noise", "stock")
    served(loop.project, use=use)


async def refused(client: Client, tool: str, arguments: dict[str, Any]) -> object:
    try:
        return await client.call_tool(tool, arguments)
    except Exception as error:
        return error


def test_a_program_tries_and_sees_no_held_out_cell(loop: Loop) -> None:
    loop.project.ok("noise", "stock")
    loop.edit(BENCH, TIME, "9000000")
    given = {"baseline": "stock", "tree": str(loop.checkout), "because": "it is faster"}

    async def use(client: Client, ask: Ask) -> None:
        done = await ask("try", given)
        assert (done["ended"], done["held_out"], done["reused"]) == ("promoted", {"cells": 1, "slower": 0}, False)
        assert (await ask("try", given))["reused"]
        (row,) = await ask("tries", {})
        assert (row["ended"], "diff" in row) == ("promoted", False)
        (shown,) = await ask("tries", {"baseline": "stock", "number": 1})
        assert "+    return (i ? 9000000" in shown["diff"]
        assert shown["diff_over"] == row["diff_over"] == "baseline"
        listed = await ask("sessions", {})
        assert sorted(row["kind"] for row in listed) == ["ab", "noise", "screen"]
        assert "| pp16 | faster |" in await ask("report", {"name": done["sessions"][-1]})
        (hidden,) = [row["session"] for row in loop.project.json("sessions") if "held-out" in row["name"]]
        for name in ("stock-held-out", hidden, hidden[-6:]):
            assert "what is held out is not shown" in await ask("report", {"name": name})
        assert "has used 1 of 1 tries" in await ask("try", {**given, "tree": str(other)})

    other = loop.project.checkout(loop.checkout.with_name("other"))
    Loop(loop.project, other).edit(BENCH, TIME, "8000000")
    served(loop.project, "--allow", "try", "--tree", loop.checkout, "--tree", other, "--max-tries", "1", use=use)
