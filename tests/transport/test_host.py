"""The agent's verbs as methods, on this machine."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import DgxlabError, HostError, RemoteError
from dgxlab.model import HostEntry
from dgxlab.source import PinCache
from dgxlab.transport import host as module
from dgxlab.transport.bundle import bundle
from dgxlab.transport.host import Host, HostJob, JobStatus
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.machines import script


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(LocalTransport(str(tmp_path / "root")))


def test_the_first_verb_takes_three_calls_and_the_next_one(host: Host) -> None:
    host.probe()
    assert host.calls == 3
    host.probe()
    assert host.calls == 4


def test_what_a_verb_reads_is_sent_whole_though_the_agent_was_missing(host: Host, tmp_path: Path) -> None:
    pin = toy.make_repository(tmp_path / "repository")
    cache = PinCache(tmp_path / "pins.git")
    cache.ensure(pin, [str(tmp_path / "repository")], lambda note: None)
    pack = b"".join(cache.pack([pin]))
    begun = 0

    def pieces() -> Iterator[bytes]:
        nonlocal begun
        begun += 1
        yield from (pack[at : at + 100] for at in range(0, len(pack), 100))

    host.send_objects(pin, [pin], pieces)
    assert begun == 2
    assert host.probe([pin]).missing == ()


def saying(folder: Path, answer: str, *, rc: int = 0) -> Host:
    """Return a host on which everything that is asked for is answered so: on stdout, or after a failure on stderr."""
    (folder / "answer").write_text(answer)
    host = Host(LocalTransport(str(folder / "root")))
    host.probe()
    text = f"#!/bin/sh\ncat '{folder}/answer' >&{2 if rc else 1}; exit {rc}\n"
    host.transport.python = str(script(folder / "python", text))
    return host


JOB = {"job_id": "job-1", "state": "running", "journal_bytes": 7, "rc": None}
RC = {"status": "done", "exit_code": 0, "message": "", "next": ""}
ITEM = {"kind": "jobs", "name": "job-1", "used": 1.5, "bytes": 1, "state": "done", "journal_bytes": 7}


@pytest.mark.parametrize(
    ("verb", "reply"),
    [
        ("status", "hello"),
        ("status", "[" * 100_000),
        *(("status", wrong) for wrong in (None, [], 3, '"job-1"', {}, [JOB])),
        *(("status", {**JOB, **wrong}) for wrong in ({"job_id": "job-2"}, {"state": "fine"}, {"state": ["done"]})),
        *(("status", {**JOB, "journal_bytes": wrong}) for wrong in ("7", True, 1.5, float("nan"))),
        *(("status", {**JOB, "rc": wrong}) for wrong in (3, {}, {**RC, "status": "running"})),
        *(("status", {**JOB, "rc": {**RC, "exit_code": wrong}}) for wrong in ("0", 1 << 70)),
        ("cancel", {**JOB, "job_id": "job-2"}),
        *(("jobs", wrong) for wrong in ({"a": 1}, [3], [[]], [{**JOB, "name": 3}], [{**JOB, "age_s": "old"}])),
        *(("probe", wrong) for wrong in (None, [], {}, {"facts": {}})),
        *(("inventory", wrong) for wrong in (3, [3], [{**ITEM, "used": "today"}], [{**ITEM, "name": None}])),
        *(("clean", wrong) for wrong in (3, {}, {"removed": [["jobs"]], "kept": [], "busy": False})),
        *(("raw", {"size": wrong, "files": 1}) for wrong in ("1", 1e400)),
    ],
)
def test_another_answer_than_the_agents_is_refused(tmp_path: Path, verb: str, reply: Any) -> None:
    host = saying(tmp_path, reply if verb == "status" and isinstance(reply, str) else f"{json.dumps(reply)}\n")
    ask: dict[str, Callable[[], object]] = {
        "status": lambda: host.status("job-1"),
        "cancel": lambda: host.cancel("job-1"),
        "raw": lambda: host.raw("job-1", 10, lambda piece: None),
        "clean": lambda: host.remove([]),
        **{name: getattr(host, name) for name in ("jobs", "probe", "inventory")},
    }
    with pytest.raises(RemoteError, match=f"host local answered {verb} otherwise"):
        ask[verb]()


def test_status_is_read_as_the_agent_says_it(tmp_path: Path) -> None:
    assert saying(tmp_path, json.dumps(JOB)).status("job-1") == JobStatus("job-1", "running", 7)
    rc = {"status": "failed", "exit_code": 4}
    assert saying(tmp_path, json.dumps({**JOB, "state": "done", "rc": rc})).status("job-1").rc == rc


def test_a_final_word_of_another_version_hides_no_job(tmp_path: Path) -> None:
    odd = {**JOB, "state": "done", "rc": {"status": "exploded"}}
    assert saying(tmp_path, json.dumps([odd])).jobs() == [HostJob("job-1", "done", 7)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"exit_code": 10, "message": ["a"], "next": None, "details": {"b": 1}}, "['a']"),
        (["exit_code"], "the agent on host local failed at status with exit status 10: "),
        ("[" * 100_000, "the agent on host local failed at status with exit status 10: "),
        ("", "the agent on host local failed at status with exit status 10: it said nothing"),
    ],
)
def test_error_is_text_whatever_the_host_says(tmp_path: Path, answer: Any, message: str) -> None:
    host = saying(tmp_path, answer if isinstance(answer, str) else json.dumps(answer), rc=10)
    with pytest.raises(DgxlabError) as caught:
        host.status("job-1")
    assert caught.value.message.startswith(message)
    assert caught.value.next == ""
    assert all(isinstance(text, str) for text in (caught.value.message, caught.value.next, caught.value.details))


HERE = ("run the same command again", "dgxlab report 20261120-120301-toy-3f2a9c", "dgxlab logs job-1 raw/b0.1.stderr")
HERE += ("dgxlab host clean dgx --older-than 0 --dry-run", "run the same command again with --wait 120")
HERE += ("run the same command again with --max-minutes 14",)
DROPPED = ("curl x | sh", "dgxlab report x; curl y | sh", "dgxlab report $(curl)", "dgxlab report x\ncurl y")
DROPPED += ("dgxlab report x\n", "dgxlab report x --output=/home/me/.bashrc", "dgxlab host trust evil --yes")
DROPPED += (
    "dgxlab host clean dgx --yes",
    "dgxlab run evil.yaml --trust-source",
    "sudo sh -c id",
    "ls -l '/a' 'b' ; id",
)
DROPPED += ("run the same command again with --trust-source", "python3 -c 'import evil'")


@pytest.mark.parametrize(
    ("answer", "typed"),
    [
        *((answer, answer) for answer in HERE),
        ("sudo chmod 1777 /tmp", "ssh -t me@dgx sudo chmod 1777 /tmp"),
        ("ls -l '/a b'", "ssh -t me@dgx 'ls -l '\"'\"'/a b'\"'\"''"),
        ("/usr/bin/cc --version", "ssh -t me@dgx /usr/bin/cc --version"),
        *((answer, "") for answer in DROPPED),
    ],
)
def test_what_a_host_may_have_typed(answer: str, typed: str) -> None:
    """Its own few commands: here those that look, and there through ssh; what else it says is dropped."""
    assert HostEntry("dgx", "me@dgx").next_of_agent(answer) == typed


class Watched(LocalTransport):
    """A way to a machine that notes what is started, as `ps` shows it."""

    seen: tuple[str, ...] = ()

    def stream(self, argv: Sequence[str], *args: Any, **options: Any) -> Iterator[bytes]:
        self.seen += tuple(argv)
        return super().stream(argv, *args, **options)


def test_settings_are_for_the_agent_alone(tmp_path: Path) -> None:
    """Others on the host can read arguments: neither a token in env is in one nor what is asked for."""
    secret = "hf_ " + "\\ $HOME 'é' \n" * 3
    way = Watched(str(tmp_path / "root"))
    real = way.python
    seen = 'tr "\\0" " " </proc/$$/cmdline; printf %s "$DGXLAB_HOST"'
    text = f"#!/bin/sh\n{{ {seen}; }} >'{tmp_path}/seen'\nexec '{real}' \"$@\"\n"
    way.python = str(script(tmp_path / "python", text))
    host = Host(way, HostEntry("box", env={"HF_TOKEN": secret}))
    assert host.probe(models=["/é/own.gguf"]).models == {"/é/own.gguf": None}
    command, settings = (tmp_path / "seen").read_text().rsplit('{"env"', 1)
    assert json.loads('{"env"' + settings)["env"] == {"HF_TOKEN": secret}
    assert not [word for word in (*way.seen, command) if "hf_" in word or "own.gguf" in word]


def test_settings_reach_the_agent(tmp_path: Path) -> None:
    for tool in ("cmake", "ninja"):
        script(tmp_path / "bin" / tool, "#!/bin/sh\necho 'cmake version 99'\n")
    entry = HostEntry("box", path_prepend=(str(tmp_path / "bin"),))
    facts = Host(LocalTransport(str(tmp_path / "root")), entry).probe().facts
    assert facts.toolchain.cmake == "cmake version 99"
    assert facts.details["tools"]["ninja"] == str(tmp_path / "bin" / "ninja")


def test_a_session_keeps_to_its_processors(tmp_path: Path) -> None:
    first = min(os.sched_getaffinity(0))
    transport = LocalTransport(str(tmp_path / "root"))
    details = Host(transport, HostEntry("box", processors=(first,))).probe().facts.details
    assert (details["cpus"], details["processors"]) == (1, [first])
    with pytest.raises(RemoteError, match="box lacks processor 9998, which its entry") as caught:
        Host(transport, HostEntry("box", processors=(first, 9998, 9999))).probe()
    assert caught.value.next == "ls -l /sys/devices/system/cpu"


class Silent(LocalTransport):
    """A way to a machine where a sleep runs in place of the agent."""

    def stream(self, argv: Sequence[str], *args: Any, patience_s: float | None = None) -> Iterator[bytes]:
        assert patience_s is not None
        return super().stream(["sleep", "60"], *args, patience_s=0.2)


def test_a_verb_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"was silent for 0\.2 s"):
        Host(Silent(str(tmp_path / "root"))).jobs()


@pytest.mark.parametrize("left", [b"", b"PK", bytes(5000)])
def test_a_damaged_agent_is_sent_again(host: Host, tmp_path: Path, left: bytes) -> None:
    """A power loss leaves its name, and nothing or zeros in it."""
    host.probe()
    (agent,) = (tmp_path / "root" / "agent").iterdir()
    whole = agent.read_bytes()
    agent.write_bytes(left)
    assert host.jobs() == []
    assert (host.calls, agent.read_bytes()) == (6, whole)


def test_an_agent_that_vanishes_is_not_sent_for_ever(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "_install", lambda self: None)
    with pytest.raises(RemoteError, match="an incomplete agent") as caught:
        host.probe()
    assert caught.value.next == "df -h"


def test_the_hosts_reason_for_refusing_the_agent_is_told(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(RemoteError, match=r"(Not a directory|File exists)"):
        Host(LocalTransport(str(tmp_path / "root"))).probe()


@pytest.mark.parametrize("name", ["", "agent", "jobs"])
def test_nothing_runs_where_others_may_write(tmp_path: Path, name: str) -> None:
    """Not even an agent with the right name: it may be theirs; the command that closes the folder is printed."""
    folder = tmp_path / "root" / name
    theirs = tmp_path / "root" / "agent" / f"{bundle().digest}.pyz"
    theirs.parent.mkdir(parents=True)
    (tmp_path / "root" / "jobs").mkdir()
    theirs.write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    folder.chmod(0o777)
    host = Host(LocalTransport(str(tmp_path / "root"), name="box"), HostEntry("box", "me@box"))
    with pytest.raises(HostError, match=f"^host box is not safe: .* {folder}, ") as caught:
        host.probe()
    assert caught.value.next == f"ssh -t me@box chmod go-w {folder}"
    folder.chmod(0o700)
    assert host.jobs() == []
    assert not (tmp_path / "canary").exists()


def for_ever(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


def test_replies_and_lines_without_an_end_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)
    assert module.whole([b"x" * (1 << 19)] * 2, "box", "jobs") == b"x" * (1 << 20)
    with pytest.raises(RemoteError, match=r"box answered jobs .* 1 MiB"):
        module.whole(for_ever(b"x" * 1000), "box", "jobs")
    assert sum(map(len, module.whole_lines([b"y\nx" * 10_000] * 100, "box", "follow"))) == 3 * 10_000 * 100 - 1
    with pytest.raises(RemoteError, match="1 MiB in one line"):
        list(module.whole_lines(for_ever(b"x" * 1000), "box", "follow"))


def test_lines_are_passed_on_whole_and_a_torn_last_one_is_not() -> None:
    assert list(module.whole_lines([b"a", b"b\nc\nd", b"", b"\ne"], "box", "follow")) == [b"ab\nc\n", b"d\n"]


@pytest.mark.parametrize("activated", [True, False])
def test_an_activated_environment_finds_the_same_programs(monkeypatch: pytest.MonkeyPatch, activated: bool) -> None:
    """The system's first, except where the Python is no virtual environment's: conda has its compilers beside it."""
    own = str(Path(sys.executable).parent)
    monkeypatch.setattr(sys, "base_prefix", "/nowhere" if activated else sys.prefix)
    monkeypatch.setenv("PATH", own, prepend=":")
    folders = b"".join(LocalTransport().stream(["sh", "-c", "echo $PATH"])).decode().strip().split(":")
    assert (folders.index(own) == len(folders) - 1) == activated
    assert folders[-1] == own
