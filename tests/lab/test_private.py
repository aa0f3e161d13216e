"""Private data is in no file that other users can read, and a secret is in none at all."""

from __future__ import annotations

import dataclasses
import gzip
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dgxlab.lab.session import Request, run
from dgxlab.model import HostEntry
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests.lab.conftest import ToyLab
from tests.lab.test_detached import quiet

SECRET = "hf_0f3c9a-never-to-be-seen"  # noqa: S105 - made up


@pytest.fixture
def own(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> ToyLab:
    """A lab whose host is its own, and has a token in hosts.yaml."""
    new = make_toy_lab(root=tmp_path / "root")
    host = Host(LocalTransport(str(new.root)), HostEntry("local", env={"HF_TOKEN": SECRET}))
    return dataclasses.replace(new, host=host, lab=dataclasses.replace(new.lab, connect=lambda name: host))


def files(*folders: Path) -> Iterator[Path]:
    """Yield every plain file below some folders."""
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def content(path: Path) -> bytes:
    """Return what a file holds, unpacked."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def test_a_token_of_a_host_is_recorded_nowhere(own: ToyLab) -> None:
    """Programs there get it; no plan, journal, build, raw output or database has it."""
    experiment = own.experiment()
    outcome = run(own.lab, Request("run", experiment), quiet)
    assert outcome.error is None
    present = list(files(own.root, own.folder))
    assert {"journal.jsonl", "plan.json", "rc", "results.db", "CMakeCache.txt"} <= {path.name for path in present}
    assert len([path for path in present if path.suffix == ".gz"]) == 1
    assert [path for path in present if SECRET.encode() in content(path)] == []


def test_what_is_kept_is_closed_to_others(own: ToyLab) -> None:
    """Whatever the umask: the host's folder and the raw files' 0700, the database and each raw file 0600."""
    before = os.umask(0)
    try:
        assert run(own.lab, Request("run", own.experiment()), quiet).error is None
    finally:
        os.umask(before)
    folders, kept = (own.root, own.lab.raw), (own.lab.store.path, *own.lab.raw.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700] * 2
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600] * 2
