"""The agent's command line: each request of the client is one short process, which prints its reply on stdout as JSON.

probe ROOT              facts, missing commits, model files that exist, running jobs, and paths in hosts.yaml
                        that do not exist; stdin has the commits and models
receive ROOT            store the git pack on stdin
tool ROOT NAME VERSION SHA256
                        unpack the build tool in the wheel on stdin
model ROOT ID SHA256    store a synthetic model's f16 file from stdin
submit ROOT JOB SHA256  stage and start a job with the plan on stdin; its state
status ROOT JOB         the job's state
jobs ROOT               every job's state, name, kind, experiment and age, and who else measures here
plan ROOT JOB           the job's plan
raw ROOT JOB LIMIT      the job's raw files, unless they are larger than LIMIT bytes
follow ROOT JOB OFFSET  the job's journal from this byte on, until the job ends; then END and the job's state
output ROOT JOB         what the job's builds print, until the job has built or ended
cancel ROOT JOB         end the job
inventory ROOT          size and last use of everything under the root
clean ROOT              remove the items on stdin
cluster ROOT            what jobs through Slurm need, and whether it is there
node ROOT               the facts of this node of a cluster, which are kept for the client
work FOLDER             run the job in this folder; `submit` starts this as a detached process
copies UUID ...         how fast these GPUs copy within their memory, in GB/s
sense                   the host's condition twice a second, for samples during a measurement
synth RECIPE OUT [VOCABULARY]
                        write a synthetic model
drive PROGRAM ...       measure a program that does not measure itself
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgxlab.errors import AGAIN, DgxlabError, RemoteError
from dgxlab.replies import END, LIVE

if TYPE_CHECKING:
    from dgxlab.agent.environment import Root
    from dgxlab.agent.job import Job
    from dgxlab.replies import Status

_FOLLOW_S = 0.1  # pause between looks at the journal


def main(argv: list[str]) -> int:
    """Run the verb `argv[0]` and return the exit status; an error goes to stderr as JSON, and the client raises it."""
    verb, *args = argv
    try:
        _of("environment").keep_to_processors()
        reply = VERBS[verb](*args)
    except (OSError, DgxlabError) as refusal:
        error: DgxlabError = _of("files").remote_error(verb, refusal) if isinstance(refusal, OSError) else refusal
        print(json.dumps({"exit_code": error.exit_code, **vars(error)}), file=sys.stderr)
        return error.exit_code
    if reply is not None:
        print(json.dumps(reply))
    return 0


def _of(module: str) -> Any:
    """Import a module of the agent: each verb needs few of them, and importing takes longer than most verbs."""
    return import_module(f"dgxlab.agent.{module}")


def _root(path: str) -> Root:
    # through a link, a home for example, the work folders would have other paths, and all would be compiled again
    root: Root = _of("environment").Root(Path(path).expanduser().resolve())
    root.create()
    return root


def _job(root: str, job_id: str) -> Job:
    job: Job = _of("job").Job(_root(root).jobs / job_id)
    return job


def probe(root: str) -> dict[str, Any]:
    """Return the fields of a `transport.host.Probe`; stdin has `commits`, `models` and `synthetic` models."""
    from dgxlab.model import to_json

    here, asked, models = _root(root), json.load(sys.stdin.buffer), _of("models")
    return {
        "facts": to_json(_of("facts").gather()),
        "absent": [*_of("environment").absent(), *_of("inventory").unfit(here)],
        "missing": _of("objects").Objects(here.objects).missing(asked["commits"]) if asked["commits"] else [],
        "models": {path: models.identify(here, path) for path in asked["models"]},
        "running": _of("job").running(here.jobs),
        "nodes": _of("slurm").nodes(here) if _of("environment").settings().slurm is not None else [],
        "to_send": models.to_send(here, asked["synthetic"]),
    }


def node(root: str) -> dict[str, Any]:
    """Return the facts of this node, and keep them for the client."""
    from dgxlab.model import to_json

    facts = _of("facts").gather()
    _of("slurm").remember(_root(root), facts)
    reply: dict[str, Any] = to_json(facts)
    return reply


def submit(root: str, job_id: str, sha256: str) -> dict[str, Any]:
    """Stage a job with the plan on stdin and a copy of this agent, start it, and return its status; safe to repeat.

    Raises:
        RemoteError: if the plan is incomplete, as after a cut connection.
        JobLost: if the job existed and was removed.
    """
    plan, jobs = sys.stdin.buffer.read(), _of("job")
    if hashlib.sha256(plan).hexdigest() != sha256:
        raise RemoteError(f"the plan of job {job_id} did not arrive whole", next=AGAIN)
    if _of("inventory").was_removed(_root(root), job_id):
        raise jobs.job_lost(job_id)
    status: Status = jobs.Job.stage(_root(root).jobs, job_id, plan, Path(sys.argv[0])).start()
    return vars(status)


def follow(root: str, job_id: str, offset: str) -> dict[str, Any]:
    """Copy the complete lines of a job's journal to stdout, from byte `offset` on, until the job ends or is damaged.

    END follows them. Returns the job's state.
    """
    job, at = _job(root, job_id), int(offset)
    while True:
        now = job.status()
        running = now.state in LIVE  # read before the journal, so that no line is missed
        readable = job.journal.exists() and not now.cause
        lines = _of("files").whole_lines(job.journal, at) if readable else b""
        at += len(lines)
        if lines:
            sys.stdout.buffer.write(lines)
            sys.stdout.buffer.flush()
        elif not running:
            sys.stdout.buffer.write(END)
            return vars(now)
        else:
            time.sleep(_FOLLOW_S)


def synth(recipe: str, out: str, vocabulary: str = "") -> None:
    """Write the synthetic model of a recipe (JSON) to the file `out`, with the tokenizer in the file `vocabulary`."""
    from dgxlab.model import SyntheticModel, from_json
    from dgxlab.synth import write

    write(from_json(SyntheticModel, json.loads(recipe)), Path(out), Path(vocabulary) if vocabulary else None)


def drive(program: str, *words: str) -> None:
    """Run a tool's own part of a launch."""
    from dgxlab.tools import TOOLS

    driver = TOOLS[program].drive
    assert driver
    driver(*words)


VERBS: dict[str, Callable[..., Any]] = {
    "probe": probe,
    "receive": lambda root: _of("objects").Objects(_root(root).objects).receive(sys.stdin.buffer),
    "tool": lambda root, *tool: _of("files").unpack(_root(root), *tool, sys.stdin.buffer),
    "model": lambda root, *model: _of("models").receive(_root(root), *model, sys.stdin.buffer),
    "submit": submit,
    "status": lambda root, job_id: vars(_job(root, job_id).status()),
    "jobs": lambda root: _of("job").listed(_root(root).jobs),
    "plan": lambda root, job_id: _of("job").plan(_job(root, job_id)),
    "raw": lambda root, job_id, limit: _job(root, job_id).send(int(limit), sys.stdout.buffer),
    "follow": follow,
    "output": lambda root, job_id: _of("build").copy_output(_job(root, job_id), sys.stdout.buffer),
    "cancel": lambda root, job_id: vars(_job(root, job_id).cancel()),
    "inventory": lambda root: [vars(item) for item in _of("inventory").inventory(_root(root))],
    "clean": lambda root: vars(_of("inventory").remove(_root(root), json.load(sys.stdin))),
    "cluster": lambda root: list(_of("slurm").examine(_root(root))),
    "node": node,
    "work": lambda folder: _of("work").work(Path(folder)),
    "copies": lambda *gpus: _of("copies").bandwidths(gpus),
    "sense": lambda: _of("facts").sense(),
    "synth": synth,
    "drive": drive,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
