"""A lost host is tried again, with growing pauses and an end; a journal is read on from where it was cut."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab import plan
from dgxlab.agent.job import Job
from dgxlab.errors import HostError
from dgxlab.lab import Lab
from dgxlab.lab.jobs import follow
from dgxlab.lab.raw import archive, listing, path_of
from dgxlab.lab.request import source_of
from dgxlab.source import PinCache
from dgxlab.store import Store
from dgxlab.transport import retry, ssh_connection
from dgxlab.transport.base import HostLost
from dgxlab.transport.host import Host
from dgxlab.transport.ssh import SshTransport
from dgxlab.transport.ssh_trust import NotTrusted
from tests.agent.test_child import wait_until
from tests.lab.conftest import ToyLab, quiet, undisturbed
from tests.proxy import Proxy
from tests.transport.conftest import QUICK, Client, Reach

QUICKLY = (0.01,) * 40


@pytest.fixture
def far_lab(shared: tuple[Path, Path, str], proxy: Proxy, reach: Reach, tmp_path: Path) -> Iterator[ToyLab]:
    """A lab whose host is behind the proxy."""
    repository, root, pin = shared
    (tmp_path / "lab" / "patches").mkdir(parents=True)
    store = Store.open(tmp_path / "lab" / "results.db")
    host = Host(reach(root=str(root), limits=QUICK))
    lab = Lab(store, PinCache(tmp_path / "pins.git"), lambda name: host)
    yield ToyLab(lab, host, root, repository, pin, tmp_path / "lab")
    store.close()


def journal(lab: ToyLab, job_id: str) -> bytes:
    return (lab.root / "jobs" / job_id / "journal.jsonl").read_bytes()


def test_raw_files_come_whole_over_a_line_that_breaks(far_lab: ToyLab, proxy: Proxy) -> None:
    outcome, _ = far_lab.run(again=True)
    path = path_of(far_lab.lab.raw, outcome.job_id)
    before = listing(path)
    assert path.stat().st_size > 4000
    path.unlink()
    notes: list[str] = []
    proxy.cut_after = 3000
    job = far_lab.lab.store.job(outcome.job_id)
    _, files = archive(far_lab.lab, job, None, lambda event: notes.append(str(event.note)))
    assert files == before
    assert list(path.parent.iterdir()) == [path]
    assert notes[0].endswith(f" {outcome.job_id} from box")
    assert "box was cut" in notes[1]
    assert len(notes) == 2


def test_a_journal_read_over_many_cuts_is_byte_for_byte_the_journal(far_lab: ToyLab, proxy: Proxy) -> None:
    outcome, _ = far_lab.run(again=True)
    long = f"{outcome.job_id}-long"
    shutil.copytree(far_lab.root / "jobs" / outcome.job_id, far_lab.root / "jobs" / long)
    with (far_lab.root / "jobs" / long / "journal.jsonl").open("a") as file:
        file.writelines(f'{{"seq":{n},"event":"progress","note":"{"x" * (n % 300)}"}}\n' for n in range(5000))
    (far_lab.root / "jobs" / long / "rc.reserved").touch()
    Job(far_lab.root / "jobs" / long).finish(exit_code=0, status="done", message="", next="")
    notes: list[str] = []

    def note(sentence: str) -> None:
        notes.append(sentence)
        proxy.cut_after = 120_000 + 7_919 * len(notes)

    proxy.cut_after = 300
    pieces: list[bytes] = []
    state = retry.follow(far_lab.host, long, 0, pieces.append, note, QUICKLY)
    proxy.cut_after = None
    assert (state.state, state.job_id) == ("done", long)
    assert b"".join(pieces) == journal(far_lab, long)
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert len(pieces) > 1
    assert len(notes) > 3
    assert "box was cut" in notes[0]
    assert notes[0].endswith("; trying again in 0.01 s (1 of 40)")


def test_running_job_outlives_the_line(far_lab: ToyLab, proxy: Proxy) -> None:
    """The line breaks, then falls silent; the job runs on, and its journal is read on from where it stood."""
    lab, way = far_lab, far_lab.host.transport
    assert isinstance(way, SshTransport)
    job = lab.submit(lab.slow())
    notes: list[str] = []

    def silence(cut: object) -> None:
        wait_until(lambda: way._connection not in (None, cut))  # signed in again
        proxy.blackhole()

    def note(sentence: str) -> None:
        notes.append(sentence)
        if len(notes) == 1:
            threading.Thread(target=silence, args=(way._connection,)).start()
        else:
            proxy.heal()
            lab.release()

    printed = bytearray()

    def take(piece: bytes) -> None:
        printed.extend(piece)
        if b'"event":"run"' in piece and not notes:
            proxy.cut()

    retry.follow(lab.host, job.job_id, 0, take, note, QUICKLY)
    assert printed == journal(lab, job.job_id)
    assert json.loads(printed.splitlines()[-1])["event"] == "end"
    assert "box was cut" in notes[0]
    assert " 3 s; trying again" in notes[1]
    assert follow(lab.lab, lab.host, job.job_id, quiet) is None
    assert len(lab.values()) == 4


def test_submitting_over_a_breaking_line_runs_once(far_lab: ToyLab, proxy: Proxy) -> None:
    """Wherever the answer was lost, asking again starts no second run."""
    lab = far_lab
    lab.run(lab.experiment(bench=()))
    experiment = lab.experiment()
    job = plan.make(experiment, source_of(lab.lab.cache, experiment, None, quiet), job_id=plan.new_job_id("toy"))
    notes: list[str] = []

    def note(sentence: str) -> None:
        notes.append(sentence)
        proxy.wait_until_closed()
        proxy.cut_after = 1800 + 350 * len(notes)

    lab.host.transport.close()  # type: ignore[attr-defined]
    proxy.wait_until_closed()
    proxy.cut_after = 50
    status = retry.again(lab.host, lambda: lab.host.submit(job), note, QUICKLY)
    proxy.cut_after = None
    assert status.state in ("running", "done")
    assert len(notes) > 1
    # the line is whole again: what is left of the last limit may cut it once more
    printed = bytearray()
    retry.follow(lab.host, job.job_id, 0, printed.extend, notes.append, QUICKLY)
    events = [event["event"] for event in undisturbed([json.loads(line) for line in printed.splitlines()])]
    assert (events.count("job"), events.count("end"), events.count("run")) == (1, 1, 3)


def test_attempts_end_with_the_last_cause(far_lab: ToyLab, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_connection, "DROPPED_PAUSES_S", ())
    proxy.refuse = True
    notes: list[str] = []
    began = time.monotonic()
    with pytest.raises(HostError, match=r"after 4 attempts; .*: box \(127.0.0.1:") as caught:
        retry.again(far_lab.host, far_lab.host.jobs, notes.append, (0.1, 0.2, 0.3))
    assert time.monotonic() - began > 0.6
    endings = [f"trying again in 0.{n} s ({n} of 3)" for n in (1, 2, 3)]
    assert [sentence.partition("; ")[2] for sentence in notes] == endings
    assert not isinstance(caught.value, HostLost)
    assert caught.value.next.startswith("ssh -o BatchMode=yes ")


def test_host_that_is_not_trusted_is_not_asked_again(far_lab: ToyLab, client: Client) -> None:
    client.knows()
    notes: list[str] = []
    with pytest.raises(NotTrusted):
        retry.again(far_lab.host, far_lab.host.jobs, notes.append, QUICKLY)
    with pytest.raises(NotTrusted):
        retry.follow(far_lab.host, "job", 0, len, notes.append, QUICKLY)
    assert notes == []


def test_pauses_grow_to_ten_minutes_in_all() -> None:
    assert list(retry.PAUSES_S) == sorted(retry.PAUSES_S)
    assert 500 < sum(retry.PAUSES_S) < 700
