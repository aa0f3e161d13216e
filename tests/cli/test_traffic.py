"""dgxlab bytes: a verdict about a kernel that is not written yet."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dgxlab import synth
from dgxlab.model import SyntheticModel
from dgxlab.traffic import _KERNELS


def test_a_model_gives_the_geometry_and_a_missing_type_is_an_assumption(dgxlab: Any, tmp_path: Path) -> None:
    synth.write(SyntheticModel(arch="qwen35", n_layer=4, n_vocab=40), tmp_path / "m.gguf")
    words = ["bytes", "gated_delta_net", "--model", tmp_path / "m.gguf", "--given", "sequences=128"]
    words += ["--given", "peak=4300", "--given", "tokens=1", "--given", "us=45"]
    ran = dgxlab(*words, "--given", "type=F32", "--format", "json")
    assert ran.rc == 0
    printed = json.loads(ran.out)
    assert (printed["verdict"], printed["inputs"]["heads"]["origin"]) == ("build", "m.gguf")
    ran = dgxlab(*words)
    assert ran.rc == 5
    assert "unknown" in ran.out
    assert "type" in ran.err
    assert dgxlab("bytes", "copy", "--given", "values").rc == 2


def test_the_example_of_the_help_gives_a_verdict(dgxlab: Any) -> None:
    example = dgxlab("bytes", "--help").out.partition("Example: dgxlab ")[2].partition("\n\n")[0]
    ran = dgxlab(*shlex.split(example))
    assert (ran.rc, ran.err) == (0, "")
    assert ran.out.startswith("copy: build\n")


@pytest.mark.parametrize(
    ("options", "error", "mend"),
    [
        (
            ["--assume", "peak=900"],
            "whether a rewrite of copy can win 1.2x is unknown: type, peak must be read or measured, not assumed",
            "dgxlab bytes copy --given values=1e8 --given us=4000 --assume peak=900 --given type=F32 --given peak=900",
        ),
        (
            ["--given", "type=F32", "--given", "peak=200"],
            "a rewrite of copy is not worth it: it can win 1.00x at most, not 1.2x",
            "dgxlab report --form profile",
        ),
    ],
)
def test_what_is_not_built_says_why_and_what_to_type(dgxlab: Any, options: list[str], error: str, mend: str) -> None:
    ran = dgxlab("bytes", "copy", "--given", "values=1e8", "--given", "us=4000", *options)
    assert (ran.rc, ran.error, ran.next) == (5, error, mend)
    if mend.startswith("dgxlab bytes"):
        assert dgxlab(*shlex.split(mend)[1:]).rc == 0


@pytest.mark.parametrize("kernel", _KERNELS)
def test_all_that_is_missing_is_named_in_a_command_that_works(dgxlab: Any, kernel: str) -> None:
    refused = dgxlab("bytes", kernel, "--assume", "us=50")
    again = shlex.split(refused.next)[1:]
    assert again[:4] == ["bytes", kernel, "--assume", "us=50"]
    ran = dgxlab(*again)
    assert ran.rc == 5
    assert ran.out.startswith(f"{kernel}: unknown\n")
    assert dgxlab(*again[:-2]).next == refused.next  # one alone is missing, and the others stay


def test_a_misspelt_kernel(dgxlab: Any) -> None:
    assert dgxlab("bytes", "MUL_MAT").error.endswith("; did you mean mul_mat?")
