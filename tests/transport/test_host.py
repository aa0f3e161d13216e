"""The agent's verbs as methods, on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from dgxlab.errors import HostError, RemoteError
from dgxlab.model import HostEntry
from dgxlab.source import PinCache
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host that has never heard of the agent."""
    return Host(LocalTransport(str(tmp_path / "root")))


def test_the_first_verb_brings_the_agent(host: Host) -> None:
    """Three calls the first time, one from then on."""
    host.probe()
    assert host.calls == 3
    host.probe()
    assert host.calls == 4


def test_what_a_verb_reads_is_sent_whole_though_the_agent_was_missing(host: Host, tmp_path: Path) -> None:
    """The first attempt may have eaten some of it before it was known that nobody listens."""
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


def test_another_answer_than_json_is_refused(tmp_path: Path) -> None:
    """A python there that is none."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho hello\n")
    python.chmod(0o755)
    host = Host(LocalTransport(str(tmp_path / "root"), python=str(python)))
    with pytest.raises(RemoteError, match="something else than JSON: 'hello"):
        host.probe()


def test_settings_reach_the_agent(tmp_path: Path) -> None:
    """What hosts.yaml says of PATH decides which tools are found."""
    for tool in ("cmake", "ninja"):
        fake = tmp_path / "bin" / tool
        fake.parent.mkdir(exist_ok=True)
        fake.write_text("#!/bin/sh\necho 'cmake version 99'\n")
        fake.chmod(0o755)
    entry = HostEntry("box", path_prepend=(str(tmp_path / "bin"),))
    facts = Host(LocalTransport(str(tmp_path / "root")), entry).probe().facts
    assert facts.toolchain.cmake == "cmake version 99"
    assert facts.details["tools"]["ninja"] == str(tmp_path / "bin" / "ninja")


class Silent(LocalTransport):
    """A way to a machine where nothing happens for longer than anybody waits."""

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run a sleep in place of the agent, with a patience that suits tests."""
        assert patience_s is not None
        return super().stream(["sleep", "60"], stdin, patience_s=0.2)


def test_a_verb_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    """A dead network disk would otherwise hold the command for ever."""
    with pytest.raises(HostError, match=r"was silent for 0\.2 s"):
        Host(Silent(str(tmp_path / "root"))).jobs()
