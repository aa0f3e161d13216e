"""A run over a bad network ends as over a good one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import cast

import pytest

from faults.campaign import trials
from faults.fault import Broken
from faults.host import Box, Ran
from faults.kinds import network
from faults.kinds.network import BLACKHOLE, RESET
from tests.proxy import RESET_ON_CLOSE, Proxy

pytestmark = pytest.mark.slow
TRIALS = 3


def test_resets() -> None:
    """A few trials of the campaign's: all of them end well, and the fault met a run."""
    tally = trials(RESET, seed=1, numbers=range(TRIALS))
    assert tally.failures == []
    assert tally.met.total() == TRIALS
    assert tally.met["after"] < TRIALS


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones only: a long one takes a minute, and the transport's own tests have it with short limits."""
    monkeypatch.setattr(network, "LONGEST_S", 4.0)
    tally = trials(BLACKHOLE, seed=1, numbers=[2])
    assert tally.failures == []
    assert tally.met["after"] == 0


def test_silence_that_is_noticed_late_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that no real program can keep."""
    monkeypatch.setattr(network, "LONGEST_S", 3.0)
    monkeypatch.setattr(network, "NOTICED_S", 0.0)
    tally = trials(BLACKHOLE, seed=3, numbers=range(1))
    assert [failure.reason[:12] for failure in tally.failures] == ["a silence of"]


def test_a_reset_of_one_side_ends_the_other() -> None:
    """As on a network: a client whose server is gone does not wait for it in silence."""
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


@pytest.mark.parametrize("rc", [2, 4, 12])
def test_other_ends_are_failures(rc: int, tmp_path: Path) -> None:
    """A bad network may be told as such and as nothing else; no host is needed to see that."""
    with pytest.raises(Broken, match=f"ended with {rc}"):
        network._finish(cast(Box, None), tmp_path, Ran(rc, "", "error: x\nnext: y"))
