"""An sshd with narrow limits: a trial of the campaign's that meets two of them at once."""

from __future__ import annotations

import pytest

from faults.campaign import trials
from faults.kinds.sshd import SSHD


@pytest.mark.slow
def test_limits_of_sshd() -> None:
    """A run waits for a connection, and each command of it for a session; the transport's tests have a slow sign-in."""
    tally = trials(SSHD, seed=1, numbers=[7])
    assert tally.failures == []
    assert "connection dropped" in next(iter(tally.met))
