"""Groups of GPU kernels by name: what a kernel of llama.cpp, cuBLAS or the driver computes.

`{type}` in a group is ggml's name of the weights' type, which the kernel's name has as a number: 40 is NVFP4.
"""

import re

from dgxlab.gguf_header import TYPES

_RULES = tuple(
    (re.compile(pattern), group)
    for pattern, group in (
        (r"\bmul_mat_(?:q|vec_q|vec_q_moe|q_stream_k_fixup)<[^,>]*?(?P<type>\d+)[,>]", "products {type}"),
        (r"\bquantize_(?:mmq_)?(?:q8_1|mxfp4|nvfp4)\b", "activation quantise"),
        (r"\bflash_attn|\bsoft_?max|\bsoftcap|\bdiag_mask", "attention"),
        (r"\b(?:rms|l2|group)?_?norm_f32", "norms"),
        (r"\brope_", "rope"),
        (
            r"\bgated_(?:delta_net|linear_attn)|\bgdn_state|\bssm_(?:conv|scan)|\brwkv_|\bsolve_tri|\bcumsum|\btri_kernel",
            "state",
        ),
        (r"\btopk_moe|\bargsort|\bmm_ids_helper|\binit_(?:indices|offsets)|RadixSort|\bargmax", "routing"),
        (r"\bdequantize_block", "dequantise"),
        (r"\bmul_mat_(?:f|f_ids|vec_f)\b|gemm|gemv|nvjet|cutlass|xmma|splitK|k_compute_batched_ptrs", "products float"),
        (r"^\[mem|\bcpy_|\bk_(?:get|set)_rows|\bconcat|\bconvert_unary|\bk_repeat|\bpad_f32|\bfill_kernel", "copies"),
        (
            r"\bk_bin_bcast|\bunary_|\bswiglu|\bscale_f32|\bop_clamp|\badd_id|\bsilu|\breduce_rows|\bxielu|\bacc_f32",
            "elementwise",
        ),
    )
)
"""(pattern, group); the first pattern that matches decides."""

OTHER = "other"
"""The group of kernels that no rule matches."""


def group_of(kernel: str) -> str:
    """Return the group of a kernel, given its name: `attention`, `products q4_0`."""
    for pattern, group in _RULES:
        if match := pattern.search(kernel):
            number = int(match.groupdict().get("type") or -1)
            return group.format(type=TYPES.get(number, (f"type {number}",))[0])
    return OTHER


def short(kernel: str) -> str:
    """Return a kernel's name without return type and parameters, from CUPTI, nsys or ncu: `mul_mat_q<40, 128>`.

    Without what only one build calls it, so that a kernel has one name in all; three equal parameters are `float x3`.
    """
    name = re.sub(r"\((?:ggml_type|int|bool|unsigned int|long)\)(?=[\w-])", "", kernel)  # nsys and ncu write (int)64
    name = re.sub(r"\[clone .*\]$|<unnamed>::|\(anonymous namespace\)::|\b_INTERNAL_\w+::", "", name)
    name = re.sub(r"&\(void (\w+)[^()]*\([^()]*\)\)", r"&\1", name)  # a function as an argument
    name = re.sub(r"(, [^,<>]+)(?:\1(?=[,>])){2,}", lambda m: f"{m[1]} x{len(m[0]) // len(m[1])}", name)
    depth, end = 0, len(name)
    for place, char in enumerate(name):
        depth += (char in "<") - (char in ">")
        if char == "(" and depth == 0:
            end = place
            break
    return re.sub(r"^(?:static )?void ", "", name[:end]).strip()
