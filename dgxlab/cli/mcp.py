"""dgxlab mcp: a project for programs, by the Model Context Protocol on stdin and stdout.

A program names experiments, sessions and tries, and gives no command, host or option: what it may do was decided when
the server was started. A path that it names must be in the project or in one of the trees that the server was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from dgxlab.cli._app import Workspace, experiment
from dgxlab.cli._out import Out
from dgxlab.cli.run import seconds
from dgxlab.errors import DgxlabError, UsageError, needs
from dgxlab.project import root

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from dgxlab.model import Experiment

PACKAGE = "mcp>=2.3"
Allowed = StrEnum("Allowed", ["try"])
_INSTRUCTIONS = """Measure changes to llama.cpp in this project. Each call of `try` states a hypothesis and measures a
checkout; `tries` is the ledger of all of them. AGENTS.md of the project says what to change and what to leave alone."""


def mcp(
    allow: list[Allowed] | None = Option(None, "--allow", help="Let programs start tries; without it, they only read."),
    tree: list[Path] | None = Option(
        None, "--tree", help="A checkout outside the project that programs may name; may be given again."
    ),
    max_minutes: float | None = Option(None, "--max-minutes", help="As of try: for the whole ledger."),
    max_tries: int = Option(0, "--max-tries", min=0, help="As of try; 0: no limit."),
    wait: int = Option(60, "--wait", metavar="MINUTES", min=0, help="As of try."),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Serve the project to programs (MCP).

    It speaks the Model Context Protocol on stdin and stdout, until stdin ends. The tools are plan, tries, report and
    sessions, and with --allow try, try. Needs pip install -e '.[mcp]'.

    Example: dgxlab mcp --allow try --tree ../llama.cpp
    """
    limits = {"wait_s": 60.0 * wait, "max_s": seconds(max_minutes), "max_tries": max_tries}
    place = replace(workspace, project=workspace.project or root())
    out.note(place.where)
    serve(_Tools(place, tuple(tree or ()), limits), allow_try=bool(allow)).run("stdio")


def serve(tools: _Tools, *, allow_try: bool) -> MCPServer[Any]:
    """Return the server of a project's tools; UsageError if the SDK is not installed."""
    with needs(PACKAGE, "the protocol is spoken by its SDK"):
        from mcp.server import MCPServer
        from mcp_types import ToolAnnotations
    server = MCPServer[Any]("dgxlab", instructions=_INSTRUCTIONS)
    reading, working = ToolAnnotations(read_only_hint=True), ToolAnnotations(destructive_hint=False)
    for tool in (tools.plan, tools.tries, tools.report, tools.sessions):
        server.tool(annotations=reading)(tool)
    if allow_try:
        server.tool("try", annotations=working)(tools.try_)
    return server


@dataclass(frozen=True)
class _Tools:
    """What programs may call; the SDK checks arguments by the annotations, and runs each call in a thread."""

    workspace: Workspace
    trees: tuple[Path, ...]
    limits: dict[str, Any]

    def plan(self, experiment: str, tree: str = "") -> str:
        """Show every command that a full run of an experiment would execute.

        Args:
            experiment: Its name in experiments/.
            tree: A checkout to build instead of the experiment's series.
        """
        from dgxlab.cli._plan import describe
        from dgxlab.lab import session
        from dgxlab.lab.request import Request
        from dgxlab.source import PinCache

        with _told():
            request = Request("run", self._experiment(experiment), tree=self._path(tree) if tree else None)
            return describe(session.full_plan(PinCache(), request, lambda event: None), {})

    def tries(self, baseline: str = "", number: int = 0) -> list[dict[str, Any]]:
        """Return the ledger of a loop, or one try of it with its verdicts, gates and changes.

        `diff` and `lines` are over what `diff_over` says: the baseline with its series, the parent, or the pin.

        Args:
            baseline: The name of the experiment that the loop improves; empty for every loop.
            number: The number of the try; 0 for all, without their changes.
        """
        from dgxlab.judgement import tries

        with _told(), self.workspace.store() as store:
            rows = tries.ledger(store, baseline)
            if not number:
                return [vars(each) for each in rows]
            try_id = tries.find(rows, str(number)).try_id
            return [{**tries.told(store, try_id), "diff": tries.change_of(store, try_id)}]

    def report(self, name: str) -> str:
        """Return the report of an experiment or a session in markdown.

        Args:
            name: The experiment's name, or the session's id or its last six characters.
        """
        from dgxlab import report
        from dgxlab.judgement import tries

        with _told(), self.workspace.store() as store:
            if not name:
                raise UsageError("a report needs the name of an experiment or a session", next="sessions")
            sessions = store.job_ids(name)
            if {name, *sessions} & tries.held_out(store):
                raise UsageError("what is held out is not shown", next="report of the try's other sessions")
            page = report.collect_job(store, store.named(name)) if sessions else report.collect(store, name)
            return report.render(page)

    def sessions(self, most: int = 50) -> list[dict[str, Any]]:
        """Return the newest sessions of the record, at most 1000, with what became of them."""
        from dgxlab import report
        from dgxlab.judgement import tries

        with _told(), self.workspace.store() as store:
            hidden = tries.held_out(store)
            return [row for row in report.sessions(store, most=min(max(most, 1), 1000)) if row["session"] not in hidden]

    def try_(self, baseline: str, tree: str, because: str, parent: str = "") -> dict[str, Any]:
        """Build, gate and measure a checkout against the best so far, and record how it ends; this takes minutes.

        Call it again with the same arguments if it was interrupted: it goes on. The same changes are measured again
        only against another parent.

        Args:
            baseline: The name of the experiment to improve.
            tree: The llama.cpp checkout, committed or not; new files must be known to git.
            because: The hypothesis: why it should be faster, in a sentence.
            parent: The promoted try to compare with; empty for the newest, 0 for the baseline itself.
        """
        from dgxlab.judgement import tries
        from dgxlab.lab import loop

        with _told(), self.workspace.lab(create=True) as lab:
            asked = loop.Try(self._experiment(baseline), self._path(tree), because, parent or None, **self.limits)
            try_id, reused = loop.attempt(lab, asked, lambda event: None)
            return {**tries.told(lab.store, try_id), "reused": reused}

    def _experiment(self, name: str) -> Experiment:
        from dgxlab.model import NAME

        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of an experiment", next="name one of experiments/")
        return experiment(name)

    def _path(self, text: str) -> Path:
        """Return a path that a program named, resolved; UsageError if it is no folder in what it may name."""
        assert self.workspace.project
        known = [each.resolve() for each in (self.workspace.project, *self.trees)]
        with suppress(OSError, ValueError):  # too long, or with a null byte
            path = Path(text).resolve()
            if path.is_dir() and any(path.is_relative_to(folder) for folder in known):
                return path
        raise UsageError(f"{text[:200]!r} is no folder in the project or the given trees", next="dgxlab mcp --tree DIR")


@contextmanager
def _told() -> Iterator[None]:
    """Turn an expected error into one that the protocol's client reads, with the next command."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except DgxlabError as error:
        following = f"; next: {error.next}" if error.next else ""
        raise ToolError("\n".join([error.message + following, *error.details.splitlines()])) from error
