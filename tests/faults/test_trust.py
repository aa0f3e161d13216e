"""No user signs in to a host whose key is not the known one, and the campaign would see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.campaign import trials
from faults.fault import Broken
from faults.kinds.trust import UNTRUSTED, Way, _refused, _right, way

pytestmark = pytest.mark.slow
TRIALS = 3


def test_keys_that_are_not_trusted() -> None:
    """A few trials of the campaign's: no user is let in, and the printed command mends it."""
    tally = trials(UNTRUSTED, seed=1, numbers=range(TRIALS))
    assert tally.failures == []
    assert tally.met.total() == TRIALS
    assert len(tally.met) > 1


@pytest.fixture(scope="module")
def place() -> Iterator[Way]:
    """Give a host with a jump host."""
    with way() as made:
        yield made


@pytest.mark.parametrize("jump", [False, True])
def test_a_host_that_is_let_in_is_a_failure(place: Way, jump: bool) -> None:
    """The check that a command was refused fails with keys that are right."""
    place.configure(jump=jump, lenient="", known=_right(place))
    with pytest.raises(Broken, match="jobs --host box ended with 0 at a key that is not trusted"):
        _refused(place, "box", ["jobs", "--host", "box"], "none")


def test_a_client_that_names_its_user_was_let_in_too_far(place: Way) -> None:
    """Exit code and sentence are no evidence: a client that the host turns away went on after the key."""
    place.configure(jump=False, lenient="", known=_right(place))
    (place.home / ".ssh" / "id_ed25519").rename(place.home / "away")
    try:
        with pytest.raises(Broken, match="let in: jobs --host box went on"):
            _refused(place, "box", ["jobs", "--host", "box"], "none")
    finally:
        (place.home / "away").rename(place.home / ".ssh" / "id_ed25519")
