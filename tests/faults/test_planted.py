"""Defects that are planted: the campaign's checks see each of them. No host is needed for these."""

import errno
import math
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from dgxlab import audit
from dgxlab.lab import raw
from dgxlab.model import events
from dgxlab.spec import resolve, yaml_file
from dgxlab.spec.nodes import Mark, Node
from dgxlab.store import Damaged
from dgxlab.tools import batched_bench, harness, llama_bench, reading, rows
from dgxlab.transport import host
from faults import hostile, moments
from faults.campaign import trials
from faults.fault import Broken, Fault, seeded
from faults.host import Box, Ran
from faults.kinds import commit, crowd, disk, fuzz, io, network, pages
from faults.kinds.canary import CANARY
from faults.kinds.mutants import MUTANTS
from faults.kinds.raw import RAW
from faults.kinds.root import ROOT
from faults.kinds.yaml import YAML
from faults.ledger import Launch
from faults.refusal import refusing
from faults.spaces import disk as small_disk
from tests.proxy import RESET_ON_CLOSE, Proxy
from tests.store.writer import killed


def failures(fault: Fault[Any], count: int) -> str:
    return "\n".join(failure.reason for failure in trials(fault, 1, range(count)).failures)


def test_a_line_that_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(argv: Sequence[str]) -> bytes:
        return " ".join(word if "/canary" in word else shlex.quote(word) for word in argv).encode()

    monkeypatch.setattr(hostile, "quote", careless)
    assert "program was run" in failures(CANARY, 12)


def test_an_acknowledged_line_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "killed", lambda *args: killed(*args) + 1000)
    assert "was acknowledged" in failures(commit.COMMIT, 2)


def test_two_that_measure_at_once() -> None:
    def launch(begin: float, end: float | None) -> Launch:
        return Launch(begin, 1, Path("/jobs/one/raw/run.out"), "llama-bench", [], end)

    crowd.alone([launch(3.0, 4.0), launch(1.0, 3.0)])
    for end in (3.0, None):
        with pytest.raises(Broken, match="began while"):
            crowd.alone([launch(1.0, end), launch(2.9, 4.0)])


def test_a_count_may_begin_with_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No defect: a gate that takes 045/45 for the same number is right."""
    count = re.compile("([0-9]+)/([0-9]+) tests")
    monkeypatch.setattr(fuzz, "damaged", lambda text, random: count.sub(r"0\1/00\2 tests", text))
    assert {fuzz.judge(tmp_path, seeded(1, "fuzz", n)) for n in range(20)} == {"exact", "refused"}


def test_a_reader_that_takes_the_digits_of_any_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(value: object, name: str) -> float:
        digits = "".join(c for c in str(value) if c in "0123456789.")
        return float(digits) if digits.count(".") < 2 and digits.strip(".") else math.pi

    for module in (rows, reading, llama_bench, batched_bench, harness):
        if hasattr(module, "finite"):
            monkeypatch.setattr(module, "finite", lenient)
    assert failures(fuzz.FUZZ, 400)


def test_a_journal_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(value: Any) -> Any:
        kind = events.EVENTS[str(value["event"])]
        event = kind.__new__(kind)
        for name, field in value.items():
            if name != "event":
                object.__setattr__(event, name, field)
        return event

    monkeypatch.setattr(events, "read", unread)
    assert "Traceback" in failures(MUTANTS, 60)


def test_raw_files_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "_compare", lambda *args: None)
    assert "taken for what" in failures(RAW, 4)


def test_an_agent_that_starts_in_any_root(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = host.BOOT.replace("if other := stranger", "if other := None and stranger")
    assert blind != host.BOOT
    monkeypatch.setattr(host, "BOOT", blind)
    assert "was asked although" in failures(ROOT, 2)


def test_a_loader_of_yaml_without_lines_or_errors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(yaml_file, "_at", lambda start, line: Mark(start.source))
        assert "without a line" in failures(YAML, 20)

    def silent(path: object, label: str, **options: object) -> Node:
        raise ValueError("no such line")

    monkeypatch.setattr(resolve, "read_file", silent)
    assert len(trials(YAML, 1, range(20)).failures) > 5


def test_damaged_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to damage one is told and mended; a check that says nothing is seen."""
    with pages.shelf() as place:
        assert len({pages.trial(place, seeded(5, "pages", number)) for number in range(30)}) > 8
        monkeypatch.setattr(audit, "check", lambda store: [])
        monkeypatch.setattr(pages, "WAYS", {"a sector": pages.WAYS["a sector"]})
        with pytest.raises((Broken, Damaged)):
            [pages.trial(place, seeded(5, "pages", number)) for number in range(100)]


def test_a_write_that_fails_is_met_and_told(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.mkdir()
    with refusing(tmp_path, os.environ) as program:
        refusals = io.Refusals(program, {})
        refusals.do("open", record, None)
        (record / "results.db").unlink()
        refused = program.do("open", record, 5, errno.ENOSPC, lasting=True)
        assert (refused["traceback"], refused["writes"] >= 5) == ("", True)
        assert io.NAMED.search(refused["error"])
        (record / "results.db").write_text("no database")
        with pytest.raises(Broken, match="is not an SQLite database"):
            refusals.do("open", record, seeded(1, "io", 1))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Of its own size, seen by those within alone, and empty again."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("before")
    with small_disk(tmp_path / "disk") as small:
        small.mount(1 << 20, folder)
        write = [*small.within(folder), "sh", "-c", "cat file; head -c 8000 /dev/zero >more"]
        small.fill(4096)
        full = subprocess.run(write, capture_output=True, text=True, check=False)
        assert (full.returncode, full.stdout) == (1, "before")
        assert os.strerror(errno.ENOSPC) in full.stderr
        small.clear()
        assert subprocess.run(write, capture_output=True, text=True, check=False).returncode == 0
        assert small.seen(folder / "more").stat().st_size == 8000
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_command_that_does_not_blame_the_full_disk() -> None:
    printed = "error: submit failed: the disk of box is full\n  [Errno 28]\nnext: dgxlab host clean box\n"
    assert disk._told(Ran(4, "", printed)) == "submit failed"
    assert disk._told(Ran(0, "", "")) == ""
    with pytest.raises(Broken, match="does not say"):
        disk._told(Ran(4, "", f"{printed}error: llama-bench of this build does not know -m\n"))


def test_a_reset_at_a_moment_before_the_run_has_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = Mock()
    monkeypatch.setattr(moments, "wait", moment)
    assert trials(network.RESET, seed=1, numbers=range(1)).met == {"submit": 1}
    assert moment.called  # this seed resets at a moment, not after some bytes


def test_silence_that_is_noticed_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LONGEST_S", 3.0)
    monkeypatch.setattr(network, "NOTICED_S", 0.0)
    tally = trials(network.BLACKHOLE, seed=3, numbers=range(1))
    assert [failure.reason[:12] for failure in tally.failures] == ["a silence of"]


@pytest.mark.parametrize("rc", [2, 4, 12])
def test_a_bad_network_that_is_told_as_something_else(rc: int, tmp_path: Path) -> None:
    with pytest.raises(Broken, match=f"ended with {rc}"):
        network._finish(cast(Box, None), tmp_path, Ran(rc, "", "error: x\nnext: y"))


def test_a_reset_of_one_side_ends_the_other() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Proxy(server.getsockname()[1]) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client,
    ):
        there, _ = server.accept()
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        there.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
