"""Packed 4-bit weights, read by the layout that w4a16_packed.cuh documents and nothing else of it."""

import numpy as np

Q4_0_BYTES = [
    *([0, 1, 14, 15], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]),
    *([12, 13, 14, 15], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]),
]
"""Of a lane's words of two blocks of Q4_0: which bytes of codes they have, the first four of the first block."""


LANE = (4, 4, 2, 2, 4)
"""[lane % 4][step][word][high nibbles][byte]: where a code of a row is in a unit."""


def places_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return which of its lane's two blocks each code of LANE is of, and its place in the unit."""
    t, step, word, high, byte = np.indices(LANE)
    i = 2 * step + word
    if kind == "q4_K":
        return high, 64 * t + 32 * high + 4 * i + byte
    return i // 4, 64 * t + 32 * (i // 4) + 16 * high + np.array(Q4_0_BYTES)[i, byte]


def unpacked(kind: str, packed: np.ndarray, m: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return m rows of k weights as doubles, and beside each how large its two terms are together.

    Args:
        kind: The type by ggml's name.
        packed: All bytes.
        m: Rows.
        k: Weights of a row, a multiple of 256.
    """
    units, n_strips = k // 256, (m + 15) // 16
    strips, rows = np.split(packed, [len(packed) - 64 * n_strips])
    strips = strips.reshape(units, n_strips, -1)
    block, place = places_of(kind)
    # codes as [unit][strip][lower row][lane / 4], then LANE
    nibbles = strips[..., :2048].reshape(units, n_strips, 4, 8, 4, 2, 2, 4)
    codes = np.stack([nibbles & 15, nibbles >> 4]).astype(np.float64).transpose(1, 2, 0, 4, 5, 3, 6, 7, 8)
    # what a code is multiplied by and what is added, as [unit][strip][lower row][lane / 4][lane % 4][block]
    of_block = 1 if kind == "q4_0" else 2
    scales = np.ascontiguousarray(strips[..., 2048:]).view("<f2").astype(np.float64)
    both = scales.reshape(units, n_strips, 8, 4, 2, of_block, 2).transpose(5, 0, 1, 6, 2, 3, 4)
    # the nibbles of the lower row count sixteen times as much, its d a sixteenth
    steps = both[0] * 2.0**-24 * np.array([1, 16])[:, None, None, None]
    added = -8 * steps if kind == "q4_0" else both[1]
    terms = codes * steps[..., np.indices(LANE)[0], block]
    added = added[..., np.indices(LANE)[0], block]

    def in_order(values: np.ndarray) -> np.ndarray:
        ordered = np.empty((units, n_strips, 2, 8, 256))
        ordered[..., place.ravel()] = values.reshape(ordered.shape)
        return rows.view("<f4")[:m, None] * ordered.transpose(1, 2, 3, 0, 4).reshape(16 * n_strips, k)[:m]

    return in_order(terms + added), in_order(np.abs(terms) + np.abs(added))
