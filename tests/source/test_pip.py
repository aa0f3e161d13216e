"""What pip says when it does not download."""

from __future__ import annotations

import pytest

from dgxlab.source.pip import cause


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3."
            "connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection "
            "refused')': /simple/x/\nERROR: No matching distribution found for x==1",
            "pip reaches no package index: Failed to establish a new connection: [Errno 111] Connection refused",
        ),
        ("Traceback\nModuleNotFoundError: No module named 'pip'", "pip is not installed for "),
        (
            "Location 'file:///x' is ignored\nERROR: No matching distribution found for x==9",
            "No matching distribution found for x==9",
        ),
        (
            "ERROR: [Errno 28] No space left on device: '/x'",
            "[Errno 28] No space left on device: '/x'",
        ),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says(output: str, expected: str) -> None:
    """Pip's own words, as it printed them, become one cause."""
    assert cause(output).startswith(expected)
