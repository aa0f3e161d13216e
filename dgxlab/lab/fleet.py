"""The same request on several hosts at once, each by itself: a job, a chain and a device of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Thread

from dgxlab.errors import DgxlabError, Interrupted
from dgxlab.lab import Lab, Watch
from dgxlab.lab.request import Request
from dgxlab.lab.session import Outcome, run

AT_ONCE = 20
"""Hosts that are followed at the same time; the others wait for their turn."""


@dataclass(frozen=True)
class Member:
    """How the request ended on one host; `outcome` is None where no job was started."""

    host: str
    outcome: Outcome | None = None
    error: DgxlabError | None = None


def run_all(
    open_lab: Callable[[], AbstractContextManager[Lab]], requests: Sequence[Request], watch: Callable[[str], Watch]
) -> list[Member]:
    """Run requests that differ in their hosts, and return how each ended, in their order.

    Args:
        open_lab: Opens the record, once for each thread.
        watch: Returns what sees the events of a host; it is called from several threads.

    Raises:
        Interrupted: on Ctrl-C; the jobs go on.
    """
    waiting, ended, broken = iter(requests), dict[str, Member](), list[BaseException]()

    def work() -> None:
        try:
            with open_lab() as lab:
                while not broken and (request := next(waiting, None)):
                    name = request.experiment.host
                    ended[name] = _one(lab, request, watch(name))
        except BaseException as error:  # a bug, or a record that cannot be opened: the main thread raises it
            broken.append(error)

    threads = [Thread(target=work, daemon=True) for _ in requests[:AT_ONCE]]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        names = requests[0].experiment.host
        raise Interrupted("stopped watching; the jobs go on", next=f"dgxlab jobs --host {names}") from None
    if broken:
        raise broken[0]
    return [ended[request.experiment.host] for request in requests]


def _one(lab: Lab, request: Request, watch: Watch) -> Member:
    name = request.experiment.host
    try:
        outcome = run(lab, request, watch)
    except DgxlabError as error:
        return Member(name, error=error)
    return Member(name, outcome, outcome.error)
