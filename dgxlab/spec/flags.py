"""The flags of llama-bench and llama-batched-bench: which a spec says by a key, and which dgxlab sets itself.

Every table maps a key to its flag in the long form where there is one, then its other spellings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Flags = Mapping[str, tuple[str, ...]]

LLAMA_BENCH_SIZES: Flags = {
    "n_prompt": ("--n-prompt", "-p"),
    "n_gen": ("--n-gen", "-n"),
    "repetitions": ("--repetitions", "-r"),
    "model": ("--model", "-m"),
}

LLAMA_BENCH_AXES: Flags = {
    "n_depth": ("--n-depth", "-d"),
    "n_batch": ("--batch-size", "-b"),
    "n_ubatch": ("--ubatch-size", "-ub"),
    "type_k": ("--cache-type-k", "-ctk"),
    "type_v": ("--cache-type-v", "-ctv"),
    "n_threads": ("--threads", "-t"),
    "n_gpu_layers": ("--n-gpu-layers", "-ngl"),
    "n_cpu_moe": ("--n-cpu-moe", "-ncmoe"),
    "split_mode": ("--split-mode", "-sm"),
    "main_gpu": ("--main-gpu", "-mg"),
    "no_kv_offload": ("--no-kv-offload", "-nkvo"),
    "flash_attn": ("--flash-attn", "-fa"),
    "use_mmap": ("--mmap", "-mmp"),
    "embeddings": ("--embeddings", "-embd"),
    "cpu_mask": ("--cpu-mask", "-C"),
    "cpu_strict": ("--cpu-strict",),
    "poll": ("--poll",),
}
"""By the column that llama-bench prints; each takes one value, booleans as 0 or 1."""

BATCHED_BENCH_SIZES: Flags = {
    "npp": ("-npp",),
    "ntg": ("-ntg",),
    "npl": ("-npl",),
    "model": ("--model", "-m"),
}

BATCHED_BENCH_AXES: Flags = {
    "n_ctx": ("--ctx-size", "-c"),
    "n_batch": ("--batch-size", "-b"),
    "n_ubatch": ("--ubatch-size", "-ub"),
    "n_threads": ("--threads", "-t"),
    "n_gpu_layers": ("--n-gpu-layers", "-ngl", "--gpu-layers"),
    "split_mode": ("--split-mode", "-sm"),
    "main_gpu": ("--main-gpu", "-mg"),
    "flash_attn": ("--flash-attn", "-fa"),
    "type_k": ("--cache-type-k", "-ctk"),
    "type_v": ("--cache-type-v", "-ctv"),
}
"""By the parameter's name in llama.cpp; each takes one value and a launch of its own."""

_DOWNLOADS = (
    *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token", "--offline"),
    *("-mu", "--model-url", "-dr", "--docker-repo"),
)
_STOPS = ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--list-devices", "--completion-bash")
_LLAMA_BENCH_OWNED = ("-o", "--output", "-oe", "--output-err", "-pg", "--progress", "--no-warmup", "--delay")
_BATCHED_BENCH_OWNED = ("--output-format", "--log-disable", "--log-file", "--log-colors")


def refused(tool: str, args: Sequence[str]) -> dict[int, str]:
    """Return why arguments of a bench entry are refused, by their place; empty when all are fine.

    Args:
        tool: "llama-bench" or "batched-bench".
        args: Raw arguments; llama.cpp reads `--batch_size` as `--batch-size`.
    """
    reasons = _reasons(tool)
    flags = {place: arg.split("=")[0] for place, arg in enumerate(args) if arg.startswith("-")}
    spelled = {place: flag.replace("_", "-") if flag.startswith("--") else flag for place, flag in flags.items()}
    return {place: reasons[flag] for place, flag in spelled.items() if flag in reasons}


def _reasons(tool: str) -> dict[str, str]:
    bench = tool == "llama-bench"
    tables = (LLAMA_BENCH_SIZES, LLAMA_BENCH_AXES) if bench else (BATCHED_BENCH_SIZES, BATCHED_BENCH_AXES)
    owned = _LLAMA_BENCH_OWNED if bench else _BATCHED_BENCH_OWNED
    reasons = dict.fromkeys(owned, "is set by dgxlab, which reads the tool's output")
    reasons |= dict.fromkeys(_DOWNLOADS, "would measure another model: name it under models")
    reasons |= dict.fromkeys(_STOPS, "measures nothing")
    keyed = {flag: f"has a key of its own: {key}" for table in tables for key, flags in table.items() for flag in flags}
    return reasons | keyed
