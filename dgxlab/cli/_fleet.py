"""Several requests at once, for the commands that measure: the same on each host, or those of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgxlab import report
from dgxlab.cli._app import Workspace
from dgxlab.cli._display import Lines
from dgxlab.cli._out import Out, plural
from dgxlab.errors import CheckFailed
from dgxlab.judgement import fleets, recorded
from dgxlab.lab.fleet import run_all, spread
from dgxlab.report.ask import of_experiment

if TYPE_CHECKING:
    from dgxlab.lab.fleet import Member
    from dgxlab.lab.request import Request
    from dgxlab.store import Job, Store


@dataclass(frozen=True)
class Several:
    """How several requests are carried out and reported; an error of one is raised when all have ended."""

    workspace: Workspace
    out: Out
    tell: Callable[[Job, str], None]
    fail_on: Collection[str]
    wide: bool

    def fleet(self, request: Request, hosts: Sequence[str]) -> None:
        """Run a request on each host, and report the devices side by side, with a verdict over them."""
        words = set[str]()
        with self.workspace.lab(create=True) as lab:
            members = self._run([request.at(host) for host in hosts], lambda each: each.experiment.host)
            outcomes = {member.host: member.outcome for member in members if member.outcome}
            if request.baseline:
                jobs = {host: outcome.job_id for host, outcome in outcomes.items()}
                fleets.record(lab.store, jobs)
                page = report.collect_fleet_sessions(lab.store, jobs)
                words = {str(row["verdict"]) for row in page.tables[0].rows}
            else:
                first = next(iter(outcomes.values()))
                ask = of_experiment(first.experiment, first.source, first.device)
                asks = [ask.on(host, outcome.device.id) for host, outcome in outcomes.items()]
                page = report.collect_fleet(lab.store, asks, failed=len(members) - len(outcomes))
            self._report(lab.store, members, page, f"{len(hosts)} hosts")
        self._fail(members, words, "a verdict over the devices")

    def sweep(self, requests: Sequence[Request], hosts: Sequence[str]) -> None:
        """Run each request on one of the hosts, and report the experiments beneath one another."""
        words = set[str]()
        with self.workspace.lab(create=True) as lab:
            placed = spread(lab.store, requests, hosts)
            members = self._run(placed, lambda each: f"{each.experiment.name} on {each.experiment.host}")
            outcomes = [member.outcome for member in members if member.outcome]
            if requests[0].baseline:
                jobs = [outcome.job_id for outcome in outcomes]
                page = report.collect_sweep_sessions(lab.store, jobs)
                words = {str(row["verdict"]) for row in page.tables[0].rows}
                words |= {each.verdict.verdict for job_id in jobs for each in recorded(lab.store, job_id)}
            else:
                asks = [of_experiment(each.experiment, each.source, each.device) for each in outcomes]
                page = report.collect_sweep(lab.store, asks, failed=len(members) - len(outcomes))
            count = f"{plural(len(requests), 'experiment')} on {plural(len(hosts), 'host')}"
            self._report(lab.store, members, page, count)
        self._fail(members, words, "a verdict")

    def _run(self, placed: Sequence[Request], name: Callable[[Request], str]) -> list[Member]:
        """Run requests; their names begin the lines about them. Raises the first error if none was carried out."""

        def watch(request: Request) -> Callable[[Any], None]:
            lines = Lines()

            def see(event: Any) -> None:
                for line in lines.of(event):
                    self.out.note(f"{name(request)}: {line}")

            return see

        members = run_all(self.workspace.lab, placed, watch)
        for member in (each for each in members if each.error):
            self.out.note(f"{name(member.request)}: {member.error}")
        if not any(member.outcome for member in members):
            self._fail(members)
        return members

    def _report(self, store: Store, members: Sequence[Member], page: report.Page, count: str) -> None:
        self.out.report(page, lambda: report.render_page(page, wide=self.wide))
        ended = [(member, member.outcome) for member in members if member.outcome and member.outcome.job_id]
        disturbed = [
            f"{outcome.disturbed} disturbed now on {member.host} (dgxlab report {outcome.job_id} has these)"
            for member, outcome in ended
            if outcome.disturbed and not member.request.baseline  # a session's verdicts tell
        ]
        counted = ", ".join([page.summary, *disturbed]) + "; --again measures all again" * bool(disturbed)
        for _, outcome in ended:
            self.tell(store.job(outcome.job_id), counted)
        self.out.note(f"{count}, {counted}; recorded in {self.workspace.database}")

    def _fail(self, members: Sequence[Member], words: Collection[str] = (), whose: str = "") -> None:
        for error in (member.error for member in members if member.error):
            raise error
        if failed := [word for word in self.fail_on if word in words]:
            raise CheckFailed(f"{whose} is {failed[0]}, on which to fail", next="dgxlab report")
