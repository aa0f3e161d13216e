"""The byte gate against published figures and by hand, and what a model's file gives."""

from pathlib import Path
from typing import Any

import pytest

from dgxlab import gguf_header, synth
from dgxlab.errors import UsageError
from dgxlab.model import SyntheticModel
from dgxlab.traffic import Input, decide, of_model

DELTA_NET = {"sequences": 128, "heads": 48, "k_heads": 32, "state": 128, "type": "F32", "tokens": 1}
"""The state of a published decode step: one layer of 128 sequences."""


def observed(**values: float | str) -> dict[str, Input]:
    return {name: Input(value, True, "given") for name, value in values.items()}


def test_the_published_delta_net_is_near_its_floor() -> None:
    decision = decide("gated_delta_net", observed(**DELTA_NET, us=3980, peak=273), gain=1.5)
    assert decision.parts["state read"] + decision.parts["state written"] == pytest.approx(805.3e6, rel=1e-4)
    assert decision.bytes_min == pytest.approx(816e6, rel=1e-3)
    assert decision.floor_us == pytest.approx(2990, rel=1e-3)
    assert decision.gb_s == pytest.approx(205, rel=1e-2)
    assert decision.share == pytest.approx(0.75, abs=0.005)
    assert decision.cap == pytest.approx(1.33, abs=0.005)
    assert decision.verdict == "not worth it"
    assert decide("gated_delta_net", observed(**DELTA_NET, us=3980, peak=273), gain=1.3).verdict == "build"


def test_half_width_state_halves_the_floor() -> None:
    """Of a step of 384 ms with 48 such layers, half of the state's time goes at the same rate."""
    full = decide("gated_delta_net", observed(**DELTA_NET, us=3980, peak=273))
    half = decide("gated_delta_net", observed(**{**DELTA_NET, "type": "BF16"}, us=3980, peak=273))
    assert 384 - 48 * (full.bytes_min - half.bytes_min) / full.gb_s / 1e6 == pytest.approx(289, abs=2)


def test_an_assumed_type_never_says_build() -> None:
    """A rival's state that is taken for bf16 makes the kernel look twice as far from its floor."""
    known = observed(**DELTA_NET, us=3980, peak=273)
    known["type"] = Input("BF16", False, "a guess")
    decision = decide("gated_delta_net", known)
    assert (decision.verdict, decision.assumed) == ("unknown", ["type"])
    assert decision.cap > 2.5


@pytest.mark.parametrize(
    ("kernel", "values", "expected"),
    [
        ("mul_mat", {"m": 4096, "n": 8, "k": 14336, "type": "Q4_0"}, 4096 * 14336 * 18 / 32 + 8 * (14336 + 4096) * 4),
        ("copy", {"values": 1e6, "type": "F16"}, 4e6),
        ("get_rows", {"rows": 10, "width": 100, "type": "Q8_0"}, 1000 * (34 / 32 + 4)),
        (
            "attention",
            {"sequences": 2, "depth": 100, "heads": 8, "kv_heads": 2, "dim": 64, "type": "F16"},
            2 * 2 * 100 * 2 * 64 * 2 + 2 * 2 * 8 * 64 * 4,
        ),
        (
            "ssm_conv",
            {"sequences": 4, "channels": 100, "taps": 4, "tokens": 1},
            2 * 4 * 100 * 3 * 4 + 2 * 4 * 100 * 4 + 100 * 4 * 4,
        ),
        (
            "mul_mat_id",
            {"m": 768, "k": 2048, "tokens": 1, "experts": 128, "used": 8, "touched": 8, "type": "NVFP4"},
            8 * 768 * 2048 * 36 / 64 + 2048 * 4 + 8 * 768 * 4,
        ),
    ],
)
def test_bytes_follow_from_geometry(kernel: str, values: dict[str, Any], expected: float) -> None:
    decision = decide(kernel, observed(**values, us=1e9, peak=1000))
    assert decision.bytes_min == pytest.approx(expected)
    assert decision.verdict == "build"


def test_uniform_routing_touches_all_experts_at_last() -> None:
    """An assumption; what was counted in a trace is given as `touched`."""
    values = {"m": 768, "k": 2048, "experts": 128, "used": 8, "type": "NVFP4", "us": 1e9, "peak": 1000}
    weights = {n: decide("mul_mat_id", observed(tokens=n, **values)).parts["weights"] for n in (1, 32, 2048)}
    every = 128 * 768 * 2048 * 36 / 64
    assert weights[1] == pytest.approx(every / 16)
    assert weights[32] == pytest.approx(every * (1 - (1 - 1 / 16) ** 32))
    assert weights[2048] == pytest.approx(every)
    assert decide("mul_mat_id", observed(tokens=32, **values)).assumed == ["touched"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"us": 0}, "us must be above 0"),
        ({"us": 2000}, "below the floor of 2988 us"),
        ({"us": "soon"}, "us must be a number"),
        ({"peak": None}, "gated_delta_net needs peak:"),
        ({"heads": None, "peak": None}, "gated_delta_net needs heads, peak:"),
        ({"type": "Q9_9"}, "Q9_9 is no type of ggml"),
        ({"head": 48}, "gated_delta_net has no 'head'"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    values = {**DELTA_NET, "us": 3980, "peak": 273, **change}
    with pytest.raises(UsageError, match=words):
        decide("gated_delta_net", observed(**{name: value for name, value in values.items() if value is not None}))


def test_a_models_file_gives_its_geometry(tmp_path: Path) -> None:
    recipe = SyntheticModel(arch="qwen35moe", n_layer=4, n_vocab=40, ssm_v_heads=6, n_head_kv=2)
    synth.write(recipe, tmp_path / "m.gguf")
    known = list(of_model(gguf_header.read(tmp_path / "m.gguf")))
    assert {(name, value) for kernel, name, value in known if kernel == "gated_delta_net"} == {
        ("heads", 6),
        ("k_heads", 2),
        ("state", 128),
    }
    assert ("ssm_conv", "channels", 2 * 2 * 128 + 6 * 128) in known
    assert ("mul_mat_id", "experts", 8) in known
    assert ("attention", "kv_heads", 2) in known
