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
        ("/usr/bin/python3: No module named pip", "pip is not installed for "),
        (
            "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\n"
            "ERROR: No matching distribution found for x==1",
            "pip finds no version of it at all: no package index has it, or none can be reached",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement x==9 (from versions: 0.1.1, 0.1.2)\n"
            "ERROR: No matching distribution found for x==9",
            "No matching distribution found for x==9",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "Could not install packages due to an OSError: [Errno 28] No space left on device",
        ),
        (
            'ERROR: Exception:\nTraceback (most recent call last):\n  File "x.py", line 1\nValueError: what now',
            "ValueError: what now",
        ),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says(output: str, expected: str) -> None:
    """Pip's own words, as it printed them, become one cause."""
    assert cause(output).startswith(expected)
