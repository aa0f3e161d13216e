"""A request on several hosts at once, for the commands that measure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab.cli._app import Workspace
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed

if TYPE_CHECKING:
    from dgxlab.lab.request import Request
    from dgxlab.store import Job


def measure_fleet(
    requests: Sequence[Request],
    workspace: Workspace,
    out: Out,
    fail_on: Collection[str],
    tell: Callable[[Job, str], None],
    *,
    wide: bool,
) -> None:
    """Run a request on several hosts, print their report, then raise the first error."""
    from dgxlab import report
    from dgxlab.cli._display import Lines
    from dgxlab.lab import fleet
    from dgxlab.report.ask import of_experiment

    def watch(host: str) -> Callable[[Any], None]:
        lines = Lines()

        def see(event: Any) -> None:
            for line in lines.of(event):
                out.note(f"{host}: {line}")

        return see

    first = requests[0]
    with workspace.lab(create=True) as lab:
        members = fleet.run_all(workspace.lab, requests, watch)
        for member in (each for each in members if each.error):
            out.note(f"{member.host}: {member.error}")
        error = next((member.error for member in members if member.error), None)
        ended = [(request, member.outcome) for request, member in zip(requests, members, strict=True) if member.outcome]
        if error and not ended:
            raise error
        if first.baseline:
            page = report.collect_fleet_sessions(lab.store, {r.experiment.host: o.job_id for r, o in ended})
        else:
            page = report.collect_fleet(
                lab.store, [of_experiment(r.experiment, outcome.source, outcome.device) for r, outcome in ended]
            )
        out.report(page, lambda: report.render_page(page, wide=wide))
        for _, outcome in ended:
            if outcome.job_id:
                tell(lab.store.job(outcome.job_id), page.summary)
    out.note(f"{plural(len(members), 'host')}, {page.summary}; recorded in {workspace.database}")
    if error:
        raise error
    words = {str(row["verdict"]) for row in page.tables[0].rows if "verdict" in row} if page.tables else set()
    if failed := [word for word in fail_on if word in words]:
        raise CheckFailed(f"a verdict over the devices is {failed[0]}, on which to fail", next="dgxlab report")
