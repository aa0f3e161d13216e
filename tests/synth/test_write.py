"""The GGUF that a recipe makes: its bytes, its tensors, its weights, and what is refused."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dgxlab import synth
from dgxlab.errors import RemoteError, SpecError
from dgxlab.model import SyntheticModel

Fields = dict[str, Any]
SMALL = SyntheticModel(n_layer=2, n_embd=64, n_ff=96, n_head=4, n_head_kv=2, n_vocab=37)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    models.mkdir()
    return models


def read(path: Path) -> tuple[Fields, Fields]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def written(folder: Path, recipe: SyntheticModel = SMALL, vocabulary: Path | None = None) -> tuple[Fields, Fields]:
    synth.write(recipe, folder / "m.gguf", vocabulary)
    return read(folder / "m.gguf")


def test_the_same_recipe_gives_the_same_bytes_in_another_process(folder: Path) -> None:
    synth.write(SMALL, folder / "here.gguf")
    program = "import sys; from pathlib import Path; from dgxlab import synth; from dgxlab.model import SyntheticModel"
    program += f"\nsynth._CHUNK = 64\nsynth.write({SMALL!r}, Path(sys.argv[1]))"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", program, str(folder / "there.gguf")], check=True, env=env)
    assert (folder / "here.gguf").read_bytes() == (folder / "there.gguf").read_bytes()


def test_a_tensors_weights_depend_on_seed_and_name_alone(folder: Path) -> None:
    (_, a), (_, b), (_, c) = (written(folder, replace(SMALL, **change)) for change in ({}, {"n_layer": 3}, {"seed": 1}))
    assert np.array_equal(a["blk.0.attn_q.weight"], b["blk.0.attn_q.weight"])
    assert not np.array_equal(a["blk.0.attn_q.weight"], c["blk.0.attn_q.weight"])
    assert not np.array_equal(a["blk.0.attn_q.weight"], a["blk.1.attn_q.weight"])


def test_tensors_and_metadata_are_the_recipes(folder: Path) -> None:
    fields, tensors = written(folder)
    wanted = {
        "general.architecture": "llama",
        "general.file_type": 1,
        "tokenizer.ggml.model": "no_vocab",
        "llama.vocab_size": 37,
        "llama.context_length": 4096,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
    }
    assert {key: fields[key] for key in wanted} == wanted
    assert {name: data.shape for name, data in tensors.items() if "blk.1" not in name} == {
        "token_embd.weight": (37, 64),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
        "output_norm.weight": (64,),
        "output.weight": (37, 64),
    }
    assert {str(data.dtype) for name, data in tensors.items() if "norm" in name} == {"float32"}
    assert {str(data.dtype) for name, data in tensors.items() if "norm" not in name} == {"float16"}
    assert sum(data.nbytes for data in tensors.values()) == synth.size(SMALL)


def test_weights_are_gaussian_at_trained_scale(folder: Path) -> None:
    _, tensors = written(folder, replace(SMALL, n_embd=256, n_ff=1024))
    up = tensors["blk.0.ffn_up.weight"].astype(np.float64).ravel()
    assert abs(up.mean()) < 2e-4
    assert up.std() == pytest.approx(0.02, rel=0.01)
    assert np.mean(np.abs(up) < 0.02) == pytest.approx(0.6827, abs=0.01)
    assert np.mean(np.abs(up) > 0.04) == pytest.approx(0.0455, abs=0.005)
    assert tensors["blk.1.ffn_down.weight"].astype(np.float64).std() == pytest.approx(0.01, rel=0.02)
    assert tensors["blk.1.attn_output.weight"].astype(np.float64).std() == pytest.approx(0.01, rel=0.02)
    assert all(np.all(data == 1.0) for name, data in tensors.items() if "norm" in name)
    assert all(np.all(np.isfinite(data)) for data in tensors.values())
    assert abs(np.corrcoef(up[:-1], up[1:])[0, 1]) < 0.01


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_expert": 16}, "n_expert means nothing for architecture llama"),
        ({"arch": "qwen3moe", "n_ff_shared": 64}, "n_ff_shared means nothing for architecture qwen3moe"),
        ({"arch": "qwen3moe", "n_expert_used": 9}, "n_expert_used 9 is more than n_expert, which is 8"),
        ({"arch": "qwen3moe", "n_ff_expert": 48}, "n_ff_expert 48 is no multiple of 32"),
        ({"arch": "qwen35", "n_layer": 3}, "n_layer 3 is below full_attention_interval 4"),
        ({"arch": "qwen35", "n_layer": 4, "ssm_k_heads": 3}, "ssm_v_heads 4 is no multiple of ssm_k_heads 3"),
        ({"arch": "qwen35", "n_layer": 4, "decay_min": 1.0}, "decay_min 1 is more than decay_max"),
        ({"arch": "qwen35", "n_layer": 4, "head_dim": 12}, "head_dim 12 is no multiple of 8"),
        ({"quant": "MXFP4_MOE"}, "MXFP4_MOE is for experts, and llama has none"),
        ({"plain_text": True}, "plain_text needs vocab"),
        ({"n_head": 3}, "n_embd 64 does not give 3 heads"),
        ({"n_embd": 96, "n_head": 32}, "n_embd 96 does not give 32 heads (n_head) of an even width"),
        ({"n_head_kv": 3}, "n_head 4 is no multiple of n_head_kv 3"),
        ({"n_embd": 80}, "n_embd 80 is no multiple of 32, the block length of Q4_0"),
        ({"n_ff": 100}, "n_ff 100 is no multiple of 32, the block length of Q4_0"),
        ({"quant": "Q4_K_M"}, "n_embd 64 is no multiple of 256, the block length of Q4_K_M"),
        ({"quant": "IQ4_XS"}, "n_embd 64 is no multiple of 256, the block length of IQ4_XS"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_writing(folder: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        synth.write(replace(SMALL, **change), folder / "m.gguf")
    assert words in caught.value.message
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("quant", ["F16", "BF16", "IQ4_NL", "Q8_0", "q5_1", "NVFP4", "SOMETHING_NEW"])
def test_types_whose_blocks_fit_are_left_to_llama_quantize(quant: str) -> None:
    synth.check(replace(SMALL, n_ff=128, quant=quant))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(folder: Path) -> None:
    (folder / "m.gguf.tmp").symlink_to("/dev/full")
    with pytest.raises(RemoteError, match="could not write") as caught:
        synth.write(SMALL, folder / "m.gguf")
    assert os.strerror(errno.ENOSPC) in caught.value.message
    assert caught.value.next.startswith("df -h")
    assert list(folder.iterdir()) == []


def test_without_gguf_the_next_step_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RemoteError, match="gguf") as caught:
        synth.write(SMALL, folder / "m.gguf")
    assert "install gguf" in caught.value.next


def test_an_older_file_is_replaced_only_by_a_whole_one(folder: Path) -> None:
    out = folder / "m.gguf"
    out.write_bytes(b"old")
    with pytest.raises(SpecError):
        synth.write(replace(SMALL, n_head=3), out)
    assert out.read_bytes() == b"old"
    synth.write(SMALL, out)
    assert out.read_bytes()[:4] == b"GGUF"
    assert [path.name for path in folder.iterdir()] == ["m.gguf"]


# -- vocabularies and scales ------------------------------------------------------------------------------------------


@pytest.fixture
def vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(synth.VOCABULARIES, "llama-spm", 37)
    path = folder / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(11)  # of the model that it was taken from
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"▁{number}" for number in range(37)])
    writer.add_token_scores([-0.5 * number for number in range(37)])
    writer.add_token_types([2, 3, 3, *[6] * 4, *[1] * 30])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    return path


def test_the_tokenizer_is_the_vocabularys_and_nothing_else_is(folder: Path, vocabulary: Path) -> None:
    of_text, weights = written(folder, replace(SMALL, vocab="llama-spm", vocab_pin="a" * 40), vocabulary)
    (of_mute, others), (wanted, _) = written(folder), read(vocabulary)
    tokenizer = {name: value for name, value in wanted.items() if name.startswith("tokenizer.")}
    assert len(tokenizer) == 6
    assert {name: value for name, value in of_text.items() if name.startswith("tokenizer.")} == tokenizer
    assert of_text["llama.context_length"] == of_mute["llama.context_length"] == SMALL.n_ctx_train
    assert weights.keys() == others.keys()
    assert all(np.array_equal(weights[name], others[name]) for name in others)


def test_plain_text_never_takes_a_token_without_text(folder: Path, vocabulary: Path) -> None:
    """The output rows of unknown, control and byte tokens are zero; the others and the embeddings are as without."""
    recipe = replace(SMALL, vocab="llama-spm", vocab_pin="a" * 40)
    synth.write(recipe, folder / "any.gguf", vocabulary)
    synth.write(replace(recipe, plain_text=True), folder / "plain.gguf", vocabulary)
    (_, every), (_, plain) = (read(folder / f"{name}.gguf") for name in ("any", "plain"))
    assert not plain["output.weight"][:7].any()
    assert np.all(every["output.weight"][:7].any(axis=1))
    assert np.array_equal(plain["output.weight"][7:], every["output.weight"][7:])
    assert all(np.array_equal(plain[name], every[name]) for name in every if name != "output.weight")


def test_another_number_of_tokens_is_refused(folder: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synth.VOCABULARIES, "llama-spm", 38)
    recipe = replace(SMALL, vocab="llama-spm", n_vocab=38)
    with pytest.raises(SpecError, match="37 tokens, not 38"):
        synth.write(recipe, folder / "text.gguf", vocabulary)
    assert not (folder / "text.gguf").exists()


def test_every_matrix_of_a_layer_has_a_scale(folder: Path) -> None:
    (_, scaled), (_, plain) = written(folder, replace(SMALL, scales=True)), written(folder)
    scales = {name: value for name, value in scaled.items() if name.endswith(".scale")}
    assert len(scales) == 7 * SMALL.n_layer
    assert {(value.dtype.str, value.shape) for value in scales.values()} == {("<f4", (1,))}
    assert all(0.5 <= value[0] < 1 for value in scales.values())
    assert len({float(value[0]) for value in scales.values()}) > 7
    assert {name for name in scaled if name not in scales} == plain.keys()
    assert all(np.array_equal(scaled[name], plain[name]) for name in plain)


def test_heads_decay_from_slow_to_fast(folder: Path) -> None:
    """The log of a token's decay is ssm_a softplus(dt) where nothing is added: the range that the recipe names."""
    recipe = replace(SMALL, arch="qwen35", n_layer=4, ssm_v_heads=8, decay_min=0.001, decay_max=0.128)
    synth.write(recipe, folder / "m.gguf")
    _, tensors = read(folder / "m.gguf")
    decay = tensors["blk.0.ssm_a"] * np.log1p(np.exp(tensors["blk.0.ssm_dt.bias"]))
    assert decay == pytest.approx([-0.001 * 2**head for head in range(8)], rel=1e-5)
    assert "blk.3.ssm_a" not in tensors
    assert "blk.3.attn_k.weight" in tensors


def test_a_skewed_router_prefers_its_first_experts(folder: Path) -> None:
    """Of random activations the first expert gets many more than the last; without skew about as many."""
    activations = np.random.default_rng(1).standard_normal((4096, 64))
    shares = {}
    for skew in (0.0, 2.0):
        recipe = replace(SMALL, arch="qwen3moe", n_expert=16, routing_skew=skew)
        synth.write(recipe, folder / "m.gguf")
        _, tensors = read(folder / "m.gguf")
        best = np.argsort(activations @ tensors["blk.0.ffn_gate_inp.weight"].T, axis=1)[:, -2:]
        counts = np.bincount(best.ravel(), minlength=16)
        shares[skew] = counts[:4].sum() / counts[-4:].sum()
    assert shares[0.0] == pytest.approx(1, abs=0.6)
    assert shares[2.0] > 5


def test_a_token_passes_the_experts_that_are_used() -> None:
    """Two of eight experts, all of the attention, no embeddings, no router."""
    recipe = replace(SMALL, arch="qwen3moe", n_layer=1, n_ff_expert=96, head_dim=16)
    attention = 64 * 64 + 2 * 32 * 64 + 64 * 64
    assert synth.active(recipe) == attention + 2 * 3 * 64 * 96
