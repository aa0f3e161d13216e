"""Several requests at once: the same on each host of a fleet, or those of a sweep spread over hosts.

Each is whole on one host, with a job, a chain and a device of its own; those of one host follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Thread

from dgxlab.errors import DgxlabError, Interrupted, command
from dgxlab.lab import Lab, Watch
from dgxlab.lab.request import Request
from dgxlab.lab.session import Outcome, run
from dgxlab.store import Store

AT_ONCE = 20  # hosts that are followed at the same time; the others wait for their turn


@dataclass(frozen=True)
class Member:
    """How a request ended; `outcome` is None where no job was started."""

    request: Request
    outcome: Outcome | None = None
    error: DgxlabError | None = None

    @property
    def host(self) -> str:
        """The host's name."""
        return self.request.experiment.host


def spread(store: Store, requests: Sequence[Request], hosts: Sequence[str]) -> list[Request]:
    """Return each request for one of the hosts: the one that has results of it, else the one with the fewest."""
    measured = "SELECT 1 FROM jobs JOIN runs USING (job_id) WHERE experiment = ? AND status = 'valid' LIMIT 1"
    placed: dict[int, str] = {}
    for number, request in enumerate(requests):
        known = (host for host in hosts if store.rows(measured, (request.at(host).experiment.digest,)))
        if host := next(known, None):
            placed[number] = host
    for number in range(len(requests)):
        if number not in placed:
            taken = list(placed.values())
            placed[number] = min(hosts, key=taken.count)
    return [request.at(placed[number]) for number, request in enumerate(requests)]


def run_all(
    open_lab: Callable[[], AbstractContextManager[Lab]], requests: Sequence[Request], watch: Callable[[Request], Watch]
) -> list[Member]:
    """Run requests, those of different hosts at the same time, and return how each ended, in their order.

    `open_lab` is called once for each thread; `watch`, which is called from several, returns what sees the events of a
    request. Raises Interrupted on Ctrl-C; the jobs go on.
    """
    of_host: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        of_host.setdefault(request.experiment.host, []).append(number)
    waiting, ended, broken = iter(of_host.values()), dict[int, Member](), list[BaseException]()

    def work() -> None:
        try:
            with open_lab() as lab:
                while numbers := next(waiting, None):
                    for number in numbers:
                        if broken:
                            return
                        ended[number] = _one(lab, requests[number], watch(requests[number]))
        except BaseException as error:  # a bug, or a record that cannot be opened: the main thread raises it
            broken.append(error)

    threads = [Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(of_host)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        host = requests[0].experiment.host
        raise Interrupted("stopped watching; the jobs go on", next=command("dgxlab", "jobs", "--host", host)) from None
    if broken:
        raise broken[0]
    return [ended[number] for number in range(len(requests))]


def _one(lab: Lab, request: Request, watch: Watch) -> Member:
    try:
        outcome = run(lab, request, watch)
    except DgxlabError as error:
        return Member(request, error=error)
    return Member(request, outcome, outcome.error)
