"""Commands for llama-quantize, the types that it must make, and how near its weights are."""

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from dgxlab import gguf_header, quantise, synth
from dgxlab.errors import RemoteError, SpecError
from dgxlab.gguf_header import BLOCKS, Header, TensorInfo
from dgxlab.model import DerivedModel, FileModel, SyntheticModel, quantisation
from dgxlab.quantise.fidelity import RUN, RUNS, class_of, fidelity, sampled_runs

FILE = FileModel("/m.gguf")


def header(**tensors: str) -> Header:
    """Return a header with matrices of 4 rows of 256 weights; __ in a name is a dot."""
    infos = [
        TensorInfo(name.replace("__", "."), (256, 4), kind, 0, 1024 // BLOCKS[kind][0] * BLOCKS[kind][1])
        for name, kind in tensors.items()
    ]
    return Header({}, tuple(infos), 0)


PLAIN = {"token_embd__weight": "F16", "blk__0__attn_q__weight": "F16", "blk__0__ffn_down__weight": "F16"}
EXPERTS = {**PLAIN, "blk__0__ffn_up_exps__weight": "F16", "blk__0__ffn_gate_inp__weight": "F32"}
NET = {**PLAIN, "blk__0__ssm_alpha__weight": "F16", "blk__0__ssm_conv1d__weight": "F32"}


def test_nvfp4_has_a_way_of_its_own() -> None:
    (program, *words, source, out, kind) = quantise.argv(DerivedModel(FILE, "NVFP4", pure=True))
    assert (program, source, out, kind) == ("{bin}/llama-quantize", "{in}", "{out}", "Q8_0")
    assert " ".join(words) == (
        "--tensor-type ssm_(alpha|beta|ba)=f16 --tensor-type blk=nvfp4 "
        "--output-tensor-type f16 --token-embedding-type f16"
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (quantisation(SyntheticModel(quant="Q4_0")), "--pure {in} {out} Q4_0"),
        (quantisation(SyntheticModel(quant="MXFP4_MOE")), "{in} {out} MXFP4_MOE"),
        (DerivedModel(FILE, "Q4_K_M"), "{in} {out} Q4_K_M"),
        (DerivedModel(FILE, "F32"), "--allow-requantize {in} {out} F32"),
        (DerivedModel(FILE, "Q4_0", allow_requantize=True), "--allow-requantize {in} {out} Q4_0"),
        (DerivedModel(FILE, "IQ2_XS", imatrix="~/i.gguf"), "--imatrix {imatrix} {in} {out} IQ2_XS"),
    ],
)
def test_commands(how: DerivedModel, words: str) -> None:
    assert " ".join(quantise.argv(how)) == f"{{bin}}/llama-quantize {words}"


QUANTISED = dict.fromkeys(PLAIN, "Q4_K")


@pytest.mark.parametrize(
    ("how", "source", "result", "problem"),
    [
        (DerivedModel(FILE, "Q4_K_M", pure=True), PLAIN, QUANTISED, ""),
        (DerivedModel(FILE, "Q4_K_M"), PLAIN, {**QUANTISED, "token_embd__weight": "Q6_K"}, ""),
        (
            DerivedModel(FILE, "Q4_K_M", pure=True),
            PLAIN,
            {**QUANTISED, "token_embd__weight": "Q6_K"},
            "embd.weight is Q6_K",
        ),
        (DerivedModel(FILE, "Q4_K_M"), PLAIN, dict.fromkeys(PLAIN, "Q8_0"), "most weights of its layers are Q8_0"),
        (DerivedModel(FILE, "Q4_K_M", pure=True), PLAIN, {"token_embd__weight": "Q4_K"}, "attn_q.weight is missing"),
        (DerivedModel(FILE, "MXFP4_MOE"), PLAIN, dict.fromkeys(PLAIN, "Q8_0"), ""),  # refused before: check_source
        (
            DerivedModel(FILE, "MXFP4_MOE"),
            EXPERTS,
            {**dict.fromkeys(EXPERTS, "Q8_0"), "blk__0__ffn_gate_inp__weight": "F32"},
            "ffn_up_exps.weight is Q8_0, not MXFP4",
        ),
        (
            DerivedModel(FILE, "NVFP4"),
            NET,
            {**dict.fromkeys(NET, "NVFP4"), "token_embd__weight": "F16", "blk__0__ssm_conv1d__weight": "F32"},
            "ssm_alpha.weight is NVFP4, not F16",
        ),
        (DerivedModel(FILE, "NVFP4"), NET, dict.fromkeys(NET, "F16"), "attn_q.weight is F16, not NVFP4"),
        (DerivedModel(FILE, "F32"), QUANTISED, dict.fromkeys(PLAIN, "F32"), ""),
    ],
)
def test_the_types_must_be_those_that_were_asked_for(
    how: DerivedModel, source: dict[str, str], result: dict[str, str], problem: str
) -> None:
    if not problem:
        assert quantise.check_types(how, header(**source), header(**result)) is None  # type: ignore[func-returns-value]
        return
    with pytest.raises(RemoteError, match=problem):
        quantise.check_types(how, header(**source), header(**result))


def test_a_fallback_for_rows_that_are_no_whole_blocks_is_refused() -> None:
    source, result = (
        Header({}, (TensorInfo("blk.0.ffn_up.weight", (96, 4), kind, 0, 1),), 0) for kind in ("F16", "Q5_0")
    )
    with pytest.raises(RemoteError, match=r"ffn_up\.weight is Q5_0, .* no multiple of 256"):
        quantise.check_types(DerivedModel(FILE, "Q4_K_M"), source, result)


@pytest.mark.parametrize(
    ("how", "source", "problem"),
    [
        (DerivedModel(FILE, "Q4_0"), PLAIN, ""),
        (DerivedModel(FILE, "Q4_0"), QUANTISED, "quantised already, in Q4_K: Q4_0 made from it"),
        (DerivedModel(FILE, "Q4_0", allow_requantize=True), QUANTISED, ""),
        (DerivedModel(FILE, "F32"), QUANTISED, ""),
        (DerivedModel(FILE, "MXFP4_MOE"), PLAIN, "MXFP4_MOE is for experts"),
        (DerivedModel(FILE, "MXFP4_MOE"), EXPERTS, ""),
        (DerivedModel(FILE, "IQ3_XXS"), PLAIN, "IQ3_XXS needs an importance matrix"),
        (DerivedModel(FILE, "IQ3_XXS", imatrix="/i"), PLAIN, ""),
        (DerivedModel(FILE, "IQ4_XS"), PLAIN, ""),
    ],
)
def test_what_a_source_is_refused_for(how: DerivedModel, source: dict[str, str], problem: str) -> None:
    if not problem:
        assert quantise.check_source(how, header(**source)) is None  # type: ignore[func-returns-value]
        return
    with pytest.raises(SpecError, match=problem) as refusal:
        quantise.check_source(how, header(**source))
    assert refusal.value.next


def test_classes() -> None:
    names = {
        "token_embd.weight": "embedding",
        "output.weight": "output",
        "blk.3.attn_output.weight": "attention",
        "blk.3.ffn_down.weight": "ffn",
        "blk.3.ffn_down_exps.weight": "experts",
        "blk.3.ffn_up_shexp.weight": "ffn",
        "blk.3.ssm_out.weight": "ssm",
        "blk.3.nextn.eh_proj.weight": "other",
    }
    assert {name: class_of(name) for name in names} == names


def test_places_are_spread_over_a_tensor_and_are_whole_blocks() -> None:
    assert sampled_runs(64) == [(0, 64)]
    assert sampled_runs(RUN + 32) == [(0, RUN), (RUN, 32)]
    many = sampled_runs(1000 * RUN)
    assert len(many) == RUNS
    assert all(start % RUN == 0 and count == RUN for start, count in many)
    assert (many[0][0], many[-1][0]) == (0, 968 * RUN)


def test_fidelity_is_that_of_the_weights(tmp_path: Path) -> None:
    """Against the gguf package over all weights: these tensors are smaller than a sample."""
    recipe = SyntheticModel(
        arch="qwen35", n_layer=4, n_embd=64, n_ff=64, n_head=1, n_head_kv=1, n_vocab=16, ssm_state=32, ssm_v_heads=2
    )
    source, result = tmp_path / "f16.gguf", tmp_path / "q8.gguf"
    synth.write(recipe, source)
    writer, expected = gguf.GGUFWriter(result, "qwen35"), {}
    for tensor in gguf.GGUFReader(source).tensors:
        if tensor.tensor_type.name != "F16":
            writer.add_tensor(tensor.name, tensor.data)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        content = gguf.quants.quantize(tensor.data.astype(np.float32), kind)
        writer.add_tensor(tensor.name, content, raw_dtype=kind)
        back = gguf.quants.dequantize(content, kind).astype(float)
        expected[tensor.name] = ((back - tensor.data) ** 2).sum(), (tensor.data.astype(float) ** 2).sum()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before, after = gguf_header.read(source), gguf_header.read(result)
    classes = fidelity(source, before, result, after)
    assert sorted(classes) == ["attention", "embedding", "ffn", "output", "ssm"]
    noise, signal = map(sum, zip(*(sums for name, sums in expected.items() if ".ffn_" in name), strict=True))
    assert classes["ffn"]["nmse"] == pytest.approx(noise / signal, rel=1e-6)
    assert classes["ffn"]["sqnr_db"] == pytest.approx(-10 * math.log10(noise / signal))
    assert classes["ffn"]["types"] == "Q8_0"
    assert classes["ffn"]["sampled"] == classes["ffn"]["weights"] == 4 * 3 * 64 * 64
    assert 40 < (classes["ssm"]["sqnr_db"] or 0) < 60
    # a net's projection is named as an attention's
    assert classes["ssm"]["weights"] > sum(t.size for t in after.tensors if ".ssm_" in t.name and t.type == "Q8_0")
    content = source.read_bytes()
    source.write_bytes(content[: before.begin] + b"\xff" * (len(content) - before.begin))  # not a number, all of them
    assert {each["nmse"] for each in fidelity(source, before, result, after).values()} == {None}
    unknown = Header({}, tuple(replace(tensor, type="Q2_K") for tensor in after.tensors), after.begin)
    assert {each["nmse"] for each in fidelity(source, before, result, unknown).values()} == {None}
