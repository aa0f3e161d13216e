"""Several requests at once, for the commands that measure: one on several hosts, or a sweep over one or several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab.cli._app import Workspace
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed

if TYPE_CHECKING:
    from dgxlab.lab.fleet import Member
    from dgxlab.lab.request import Request
    from dgxlab.report import Page
    from dgxlab.store import Job, Store


def measure_fleet(
    requests: Sequence[Request],
    hosts: Sequence[str],
    workspace: Workspace,
    out: Out,
    fail_on: Collection[str],
    tell: Callable[[Job, str], None],
    *,
    wide: bool,
) -> None:
    """Run a request on each host, or those of a sweep each on one of them; report, then raise the first error."""
    from dgxlab import judgement, report
    from dgxlab.lab import fleet

    sweep = len(requests) > 1
    with workspace.lab(create=True) as lab:
        placed = fleet.spread(lab.store, requests, hosts) if sweep else [requests[0].at(host) for host in hosts]
        members = fleet.run_all(workspace.lab, placed, lambda request: _watch(request, out, sweep=sweep))
        for member in (each for each in members if each.error):
            out.note(f"{_name(member.request, sweep=sweep)}: {member.error}")
        error = next((member.error for member in members if member.error), None)
        ended = [member for member in members if member.outcome]
        if error and not ended:
            raise error
        if requests[0].baseline and not sweep:
            fleet.judge(lab, ended)
        page = _page(lab.store, ended, sweep=sweep)
        out.report(page, lambda: report.render_page(page, wide=wide))
        jobs = [job_id for member in ended if member.outcome and (job_id := member.outcome.job_id)]
        for job_id in jobs:
            tell(lab.store.job(job_id), page.summary)
        words = {str(row["verdict"]) for table in page.tables[:1] for row in table.rows if "verdict" in row}
        if sweep:
            words |= {each.verdict.verdict for job_id in jobs for each in judgement.recorded(lab.store, job_id)}
    count = f"{plural(len(requests), 'experiment')} on {plural(len(hosts), 'host')}" if sweep else f"{len(hosts)} hosts"
    out.note(f"{count}, {page.summary}; recorded in {workspace.database}")
    if error:
        raise error
    if failed := [word for word in fail_on if word in words]:
        over = "" if sweep else " over the devices"
        raise CheckFailed(f"a verdict{over} is {failed[0]}, on which to fail", next="dgxlab report")


def _page(store: Store, ended: Sequence[Member], *, sweep: bool) -> Page:
    from dgxlab import report
    from dgxlab.report.ask import of_experiment

    outcomes = [(member.host, member.outcome) for member in ended if member.outcome]
    if ended[0].request.baseline:
        if sweep:
            return report.collect_sweep_sessions(store, [outcome.job_id for _, outcome in outcomes if outcome.job_id])
        return report.collect_fleet_sessions(
            store, {host: outcome.job_id for host, outcome in outcomes if outcome.job_id}
        )
    if sweep:
        asks = [of_experiment(outcome.experiment, outcome.source, outcome.device) for _, outcome in outcomes]
        return report.collect_sweep(store, asks)
    first = outcomes[0][1]
    ask = of_experiment(first.experiment, first.source, first.device)
    return report.collect_fleet(store, [ask.on(host, outcome.device.id) for host, outcome in outcomes])


def _name(request: Request, *, sweep: bool) -> str:
    host = request.experiment.host
    return f"{request.experiment.name} on {host}" if sweep else host


def _watch(request: Request, out: Out, *, sweep: bool) -> Callable[[Any], None]:
    from dgxlab.cli._display import Lines

    lines, name = Lines(), _name(request, sweep=sweep)

    def see(event: Any) -> None:
        for line in lines.of(event):
            out.note(f"{name}: {line}")

    return see
