"""dgxlab bytes: a verdict about a kernel that is not written yet."""

import json
from pathlib import Path
from typing import Any

from dgxlab import synth
from dgxlab.model import SyntheticModel


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
