"""Specs that the tests start from, and what they are read with."""

from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import Experiment
from dgxlab.spec import load
from tests.journals import PIN

BASE = f"""\
name: base
llama_cpp: {{pin: {PIN}}}
cmake: {{GGML_CUDA: true, CMAKE_CUDA_ARCHITECTURES: "121"}}
env: {{GGML_CUDA_FORCE_MMQ: "1"}}
models:
  q4k: {{path: ~/models/q4k.gguf}}
  small:
    synthetic: {{n_layer: 2, seed: 7}}
gates:
  - backend-ops: {{op: MUL_MAT, backend: CPU, expect: 1103/1103, unsupported: 306}}
bench:
  - backend-ops: {{op: MUL_MAT, backend: CPU, where: {{type_a: [q4_0, q4_K], m: 4096, n: [1, 8, 512]}}}}
  - llama-bench: {{model: q4k, n_prompt: [512, 2048], n_gen: 128, n_ubatch: [512, 2048]}}
  - batched-bench: {{model: small, npp: 128, ntg: [64], npl: [1, 8], flash_attn: auto}}
session: {{cycles: 6}}
"""
"""16 lines with every section."""

BENCH = "bench: [{batched-bench: {model: small, npp: 1, ntg: 1, npl: 1}}]\n"


def write(text: str, name: str = "x.yaml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def read(text: str, *overrides: str, host: str | None = None) -> Experiment:
    write(BASE, "base.yaml")
    return load(write("extends: base.yaml\n" + text), overrides, host)


def refusal(text: str, *overrides: str) -> SpecError:
    """Return the error of a spec; the text starts at line 1."""
    with pytest.raises(SpecError) as caught:
        load(write(text), overrides)
    return caught.value


def child_refusal(text: str, *overrides: str) -> SpecError:
    """Return the error of a spec that extends base.yaml; the text starts at line 2."""
    write(BASE, "base.yaml")
    return refusal("extends: base.yaml\n" + text, *overrides)
