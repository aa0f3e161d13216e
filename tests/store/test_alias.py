"""A job by its id, its beginning or its alias."""

from __future__ import annotations

import pytest

from dgxlab.errors import UsageError
from dgxlab.store import alias, named, the_one

IDS = ["20261120-103000-toy-abc123", "20261120-114500-toy-abc123", "20261121-100000-toy-fade00", "fade00"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (IDS[0], IDS[:1]),
        ("20261120-11", IDS[1:2]),
        ("20261120", IDS[:2]),
        ("abc123", IDS[:2]),
        ("bc123", []),
        ("fade00", ["fade00"]),  # the whole id of one goes before the alias of another
        ("", IDS),
    ],
)
def test_what_a_text_may_mean(text: str, meant: list[str]) -> None:
    """Several are all returned, in order."""
    assert named(IDS, text) == meant


def test_an_alias_of_several_is_refused_with_their_ids() -> None:
    """So that one of them can be copied."""
    assert the_one(named(IDS, "20261121"), "20261121") == IDS[2]
    with pytest.raises(UsageError) as error:
        the_one(named(IDS, alias(IDS[0])), "abc123")
    assert error.value.details.splitlines() == IDS[:2]
