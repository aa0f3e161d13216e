// Seeded device fills: the same seed gives the same bytes on every GPU.

#pragma once

#include "check.cuh"

#include <cstdint>
#include <cuda_runtime.h>

// splitmix64's finaliser
static __device__ __forceinline__ uint32_t hash_at(uint64_t seed, uint64_t i) {
    uint64_t z = (seed << 32) + (i + 1) * 0x9E3779B97F4A7C15ull;
    z          = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z          = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t) (z >> 32);
}

static inline unsigned blocks_of(int64_t n) {
    return (unsigned) ((n + 255) / 256);
}

static __global__ void fill_uniform_kernel(float * x, int64_t n, uint64_t seed, float low, float high) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        x[i] = low + (high - low) * (float) (hash_at(seed, i) >> 8) / (1 << 24);
    }
}

// uniform in [low, high)
static inline void fill_uniform(float * x, int64_t n, uint64_t seed, float low, float high) {
    fill_uniform_kernel<<<blocks_of(n), 256>>>(x, n, seed, low, high);
    CUDA_CHECK(cudaGetLastError());
}

// -- NVFP4 blocks: 4 scale bytes, then 32 bytes of 4-bit codes, for 64 weights --

enum class nvfp4_fill {
    MIXED,     // random codes; of the scales one in 8 is 0, one in 8 the largest, one in 8 a denormal, the rest random
    EVERY,     // sub-block i has scale byte i % 256 and all 16 codes; their places differ from 256 to 256
};

static __device__ __forceinline__ uint8_t mixed_scale(uint32_t random) {
    const uint32_t kind = random % 8;
    const uint32_t rest = random / 8;
    return kind == 0 ? 0x00 : kind == 1 ? 0x7E : kind == 2 ? 1 + rest % 7 : rest % 0x7F;
}

static __device__ __forceinline__ uint8_t every_code(int64_t sub_block, int byte) {
    const int turn = (int) (sub_block / 256 % 16);
    const int low  = ((byte + turn) & 7) | (turn & 8);
    return low | (low ^ 8) << 4;
}

static __global__ void fill_nvfp4_kernel(uint8_t * x, int64_t n_blocks, uint64_t seed, nvfp4_fill how) {
    const int64_t block = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= n_blocks) {
        return;
    }
    uint8_t * d = x + block * 36;
    for (int s = 0; s < 4; ++s) {
        const int64_t sub_block = block * 4 + s;
        const bool    every     = how == nvfp4_fill::EVERY;
        d[s]                    = every ? sub_block % 256 : mixed_scale(hash_at(seed, sub_block));
        for (int j = 0; j < 8; ++j) {
            d[4 + s * 8 + j] = every ? every_code(sub_block, j) : hash_at(~seed, sub_block * 8 + j);
        }
    }
}

static inline void fill_nvfp4(uint8_t * x, int64_t n_blocks, uint64_t seed, nvfp4_fill how = nvfp4_fill::MIXED) {
    fill_nvfp4_kernel<<<(unsigned) ((n_blocks + 255) / 256), 256>>>(x, n_blocks, seed, how);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
}
