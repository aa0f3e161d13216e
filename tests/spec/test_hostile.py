"""Whatever a file or a `--set` holds, loading gives an experiment or a SpecError, and nothing else."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dgxlab.errors import SpecError
from dgxlab.model import Experiment
from dgxlab.spec import json_schema, load, yaml_file
from tests.spec.specs import BASE

HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
bounded = settings(max_examples=100, deadline=None, suppress_health_check=HEALTH)

LOADERS = [loader for name in ("CSafeLoader", "SafeLoader") if (loader := getattr(yaml, name, None))]

STRUCTURE = (
    "&a |*a|!!str |<<: |? |: |- |[|]|{|}|,|#|>-\n|---\n|...\n|%YAML 1.1\n|\t|\r|\x00|\x85|\ufeff|\u2028|\"|'|\n  "
)
WORDS = 'on|0123|1_0|12:34|.inf|1e999|999999999999999999999|=|null|~|y|2026-01-01|é|\U0001f600|"\\ud800"|"\\U00110000"'
TOKENS = st.sampled_from(
    [*STRUCTURE.split("|"), "|\n", *WORDS.split("|"), "x" * 99, "gates", "bench", "extends: ", "../"]
)

SCHEMA = json_schema()
KNOWN = {key for part in (SCHEMA, *SCHEMA["$defs"].values()) for key in part["properties"]}
KEYS = st.sampled_from(sorted(KNOWN)) | st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["MUL_MAT", "CPU", "1103/1103", "q4k", "small", "hot", "auto", "a" * 40, "/x", "-m", "base.yaml"])
    | st.text(max_size=12)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def survives(content: bytes, *overrides: str) -> None:
    """Load the content with every parser, and with base.yaml there to extend."""
    Path("base.yaml").write_text(BASE)
    Path("h.yaml").write_bytes(content)
    for loader in LOADERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yaml_file, "_LOADER", loader)
            message = "no error"
            try:
                assert isinstance(load(Path("h.yaml"), overrides), Experiment)
            except SpecError as error:
                message = error.message
            assert message.isprintable()


FILES = {
    "bytes": st.binary(max_size=200),
    "tokens": st.lists(TOKENS | st.text(string.printable, max_size=5), max_size=30).map(
        lambda tokens: "".join(tokens).encode("utf-8", "surrogatepass")
    ),
    "a spec with a part replaced": st.tuples(st.integers(0, len(BASE)), st.integers(0, 30), TOKENS).map(
        lambda change: (BASE[: change[0]] + change[2] + BASE[change[0] + change[1] :]).encode()
    ),
    "values in known places": st.dictionaries(KEYS, VALUES, max_size=6).map(lambda tree: json.dumps(tree).encode()),
    "a child with any value": st.tuples(KEYS, VALUES).map(
        lambda entry: json.dumps({"extends": "base.yaml", entry[0]: entry[1]}).encode()
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_any_file(kind: str) -> None:
    bounded(given(content=FILES[kind])(survives))()


@bounded
@given(
    st.lists(KEYS | st.integers(-1, 3).map(str), min_size=1, max_size=6),
    SCALARS.map(json.dumps) | TOKENS | VALUES.map(json.dumps),
)
def test_any_set(path: list[str], value: str) -> None:
    survives(BASE.encode(), f"{'.'.join(path)}={value}")
