"""The parity gate against the real test-backend-ops: what its filters do, and that its false greens are refused."""

import subprocess
from pathlib import Path

import pytest

from dgxlab.model import ParityGate
from dgxlab.tools.parity import GateReading, judge_gate, read_gate

pytestmark = pytest.mark.llama

ANY = ParityGate("MUL_MAT", "CPU")
TYPES = "type_a=(q4_0|q4_K),type_b=f32,m=16,n=1,k=256,bs=.1,1.,nr=.2,1."


def launch(llama_bin: Path, *args: str, backend: str = "CPU") -> tuple[GateReading, int]:
    """Run a gate; returns what it printed about the backend, and its exit status."""
    argv = [llama_bin / "test-backend-ops", "test", "-b", backend, *args]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    return read_gate(done.stdout, backend), done.returncode


def cases(llama_bin: Path) -> list[str]:
    """Return the distinct supported cases of a small filter, as the program prints them."""
    argv = [llama_bin / "test-backend-ops", "test", "-b", "CPU", "-o", "MUL_MAT", "-p", TYPES]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    return sorted(
        {line.strip().rpartition(": ")[0] for line in done.stdout.split("\n") if "OK\x1b" in line and "(" in line}
    )


def test_a_case_string_runs_just_that_case(llama_bin: Path) -> None:
    """Each case, given back alone, is the only one that runs; two joined by a comma run both."""
    first, second = cases(llama_bin)
    for wanted, total in ((first, 1), (second, 1), (f"{first},{second}", 2)):
        reading, rc = launch(llama_bin, "-o", wanted)
        assert (reading.passed, reading.total, reading.unsupported) == (total, total, 0)
        assert reading.last_case in wanted
        assert judge_gate(reading, rc, ANY) == ()


@pytest.mark.parametrize(
    ("backend", "args"),
    [("CUDA9", ["-o", "MUL_MAT"]), ("CPU", ["-o", "NO_SUCH_OP"]), ("CPU", ["-o", "MUL_MAT", "-p", "m=123456"])],
)
def test_the_programs_false_greens_are_refused(llama_bin: Path, backend: str, args: list[str]) -> None:
    """A backend that is not there, an op that is not, parameters that match nothing: status 0, and no pass."""
    reading, rc = launch(llama_bin, *args, backend=backend)
    assert rc == 0
    assert judge_gate(reading, rc, ANY) != ()
