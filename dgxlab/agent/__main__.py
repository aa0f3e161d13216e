"""The agent's command line: what the client asks of a host, each a short program with JSON on stdout.

probe ROOT              facts, missing commits, which model files are there, what runs, and what hosts.yaml
                        names that is not there; the commits and models are on stdin
receive ROOT            objects on stdin
tool ROOT NAME VERSION SHA256
                        a wheel on stdin: unpack the build tool in it
model ROOT ID SHA256    a synthetic model's f16 file on stdin
submit ROOT JOB SHA256  plan on stdin: stage it, start it, tell its state
status ROOT JOB         its state          jobs ROOT    every job's state, name, kind and age
plan ROOT JOB           its plan           raw ROOT JOB LIMIT   its raw files, unless they are larger
follow ROOT JOB OFFSET  its journal from a byte on, until it ends
cancel ROOT JOB         end it
inventory ROOT          what lies there, its size and last use
clean ROOT              remove the things on stdin
work FOLDER             carry it out (the detached part)
sense                   what Linux says of the host, twice a second (beside what is measured)
synth RECIPE OUT [VOCABULARY]
                        write a synthetic model
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from dgxlab.errors import AGAIN, DgxlabError, RemoteError

FOLLOW_S = 0.1
"""Pause between looks at the journal."""


def main(argv: list[str]) -> int:
    """Do what `argv` asks; errors go to stderr as one JSON line, which the client turns back into an error."""
    verb, *args = argv
    try:
        reply = VERBS[verb](*args)
    except OSError as refusal:
        from dgxlab.agent.failure import refused

        return _told(refused(verb, refusal))
    except DgxlabError as error:
        return _told(error)
    if reply is not None:
        print(json.dumps(reply))
    return 0


def _told(error: DgxlabError) -> int:
    """Write an error as the client reads it, and return its exit code."""
    words = {"exit_code": error.exit_code, "message": error.message, "next": error.next, "details": error.details}
    print(json.dumps(words), file=sys.stderr)
    return error.exit_code


def probe(root: str) -> dict[str, Any]:
    """Return facts, the missing ones of the commits, the identity of each model path, and the jobs that run.

    With them goes what hosts.yaml names and this host does not have.
    """
    from dgxlab.agent import environment, facts, models
    from dgxlab.agent import jobs as all_jobs
    from dgxlab.agent.inventory import unfit
    from dgxlab.agent.objects import Objects
    from dgxlab.model import to_json

    asked = json.load(sys.stdin.buffer)
    return {
        "facts": to_json(facts.gather()),
        "absent": [*environment.absent(), *unfit(_root(root))],
        "missing": Objects(_root(root).objects).missing(asked["commits"]) if asked["commits"] else [],
        "models": {path: models.identify(path) for path in asked["models"]},
        "running": all_jobs.running(_root(root).jobs),
        "to_send": models.to_send(_root(root), asked["synthetic"]),
    }


def receive(root: str) -> None:
    """Take objects from stdin."""
    from dgxlab.agent.objects import Objects

    Objects(_root(root).objects).receive(sys.stdin.buffer)


def tool(root: str, name: str, version: str, sha256: str) -> None:
    """Take a build tool's wheel from stdin."""
    from dgxlab.agent.wheels import unpack

    unpack(_root(root), name, version, sha256, sys.stdin.buffer)


def model(root: str, model_id: str, sha256: str) -> None:
    """Take a synthetic model's f16 file from stdin."""
    from dgxlab.agent.models import receive as take

    take(_root(root), model_id, sha256, sys.stdin.buffer)


def submit(root: str, job_id: str, sha256: str) -> dict[str, Any]:
    """Stage the plan on stdin under this very agent, start it, and return its status; harmless to repeat.

    Raises:
        RemoteError: if the plan is not whole; a cut connection looks like its end.
        JobLost: if it was here, and was removed.
    """
    from dgxlab.agent.inventory import was_removed
    from dgxlab.agent.job import Job
    from dgxlab.agent.jobs import gone

    plan = sys.stdin.buffer.read()
    if hashlib.sha256(plan).hexdigest() != sha256:
        raise RemoteError(f"the plan of job {job_id} did not arrive whole", next=AGAIN)
    if was_removed(_root(root), job_id):
        raise gone(job_id)
    job = Job.stage(_root(root).jobs, job_id, plan, Path(sys.argv[0]))
    return vars(job.start())


def status(root: str, job_id: str) -> dict[str, Any]:
    """Return a job's status."""
    from dgxlab.agent.job import Job

    return vars(Job(_root(root).jobs / job_id).status())


def jobs(root: str) -> list[dict[str, Any]]:
    """Return every job's status, name, kind and age, oldest first."""
    from dgxlab.agent.jobs import listed

    return listed(_root(root).jobs)


def plan(root: str, job_id: str) -> Any:
    """Return a job's plan."""
    from dgxlab.agent.job import Job
    from dgxlab.agent.jobs import plan as plan_of

    return plan_of(Job(_root(root).jobs / job_id))


def raw(root: str, job_id: str, limit: str) -> None:
    """Write the size of a job's raw files and, unless that is above the limit, the files."""
    from dgxlab.agent.archive import send
    from dgxlab.agent.job import Job

    send(Job(_root(root).jobs / job_id), int(limit), sys.stdout.buffer)


def follow(root: str, job_id: str, offset: str) -> None:
    """Copy the journal's whole lines to stdout from `offset` on, until the job no longer runs.

    Nothing is copied of a journal that is not what the job wrote.
    """
    from dgxlab.agent.job import Job
    from dgxlab.agent.journal import whole_lines

    job, at = Job(_root(root).jobs / job_id), int(offset)
    while True:
        now = job.status()
        running = now.state == "running"  # looked at first: what comes after its end is then read below
        lines = whole_lines(job.journal, at) if job.journal.exists() and not now.cause else b""
        at += len(lines)
        if lines:
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
        elif not running:
            return
        else:
            time.sleep(FOLLOW_S)


def cancel(root: str, job_id: str) -> dict[str, Any]:
    """End a job and return its status."""
    from dgxlab.agent.job import Job

    return vars(Job(_root(root).jobs / job_id).cancel())


def inventory(root: str) -> list[dict[str, Any]]:
    """Return what lies under the root."""
    from dgxlab.agent.inventory import inventory as look

    return [vars(item) for item in look(_root(root))]


def clean(root: str) -> dict[str, Any]:
    """Remove the things that stdin names as [kind, name, last use]."""
    from dgxlab.agent.inventory import remove

    return vars(remove(_root(root), json.load(sys.stdin)))


def work(folder: str) -> None:
    """Carry out a staged job."""
    from dgxlab.agent.work import work as carry_out

    carry_out(Path(folder))


def sense() -> None:
    """Print the host's condition twice a second."""
    from dgxlab.agent.sensors import sense as look

    look()


def synth(recipe: str, out: str, vocabulary: str = "") -> None:
    """Write a synthetic model, with the tokenizer of a llama.cpp vocabulary."""
    from dgxlab.model import SyntheticModel, from_json
    from dgxlab.synth import write

    write(from_json(SyntheticModel, json.loads(recipe)), Path(out), Path(vocabulary) if vocabulary else None)


VERBS: dict[str, Any] = {
    verb.__name__: verb
    for verb in (
        *(probe, receive, tool, model, submit, status, jobs, plan, raw, follow, cancel, inventory, clean),
        *(work, sense, synth),
    )
}


def _root(path: str) -> Any:
    from dgxlab.agent.root import Root

    root = Root(Path(path).expanduser())
    root.create()
    return root


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
