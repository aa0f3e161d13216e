// Named problems. A weight matrix has rows = ne01 = output features, and cols = ne00 = k.

#pragma once

#include <cstdint>
#include <vector>

struct matrix_shape {
    const char * name;
    int64_t      rows;
    int64_t      cols;
};

// An 8B model's layers; ffn_down is the shape that test-backend-ops times (m=4096, k=14336).
static const std::vector<matrix_shape> LAYERS = {
    {"ffn_down", 4096, 14336},
    {"ffn_up", 14336, 4096},
    {"attn_q", 4096, 4096},
    {"attn_k", 1024, 4096},
};

// More than 2^31 elements: where a 32-bit index would wrap.
static const matrix_shape STRESS = {"stress", 65536 + 67, 32768};

// Sizes just below, at and just above one and several tiles.
static inline std::vector<int64_t> around(int64_t tile) {
    std::vector<int64_t> sizes = {1, 2, 3};
    for (const int64_t tiles : {1, 2, 3, 7}) {
        for (const int64_t more : {-1, 0, 1}) {
            sizes.push_back(tiles * tile + more);
        }
    }
    return sizes;
}
