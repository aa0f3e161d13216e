// Seeded device fills for products of 4-bit weights: ggml's blocks of Q4_0 and Q4_K, and f32 activations.

#pragma once

#include "fill.cuh"
#include "reference.cuh"

enum class q4_fill {
    ORDINARY,  // scales of one order of magnitude and both signs, activations in -1 ... 1: every term counts
    WILD,      // of the scales one in 8 is 0, one in 8 the largest, one in 8 a denormal; of the activations one in 8 is
               // 0, one in 64 is 1000 times as large
    WILD_F16,  // the same, but the largest scales are the largest whose weights are f16 numbers
};

// An f16, never NaN or Inf.
static __device__ __forceinline__ uint16_t q4_scale(weight_type type, uint32_t random, q4_fill how) {
    const uint32_t sign     = random & 0x8000;
    const uint32_t mantissa = random & 0x3FF;
    const uint32_t kind     = how != q4_fill::ORDINARY ? random >> 16 & 7 : 7;
    const uint32_t exponent = 7 + (random >> 20 & 1);
    // 65504; 8188, of which Q4_0 takes -8 ... 7 times; 64, of which Q4_K takes 63 x 15 times and the same of a minimum
    const uint32_t largest  = how == q4_fill::WILD ? 0x7BFF : type == weight_type::Q4_0 ? 0x6FFF : 0x5400;
    return sign | (kind == 0 ? 0 : kind == 1 ? largest : kind == 2 ? mantissa : exponent << 10 | mantissa);
}

static __global__ void fill_q4_kernel(weight_type type, uint8_t * w, int64_t n_blocks, uint64_t seed, q4_fill how) {
    const int64_t block = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (block >= n_blocks) {
        return;
    }
    const int n_bytes  = (int) block_bytes(type);
    const int n_scales = type == weight_type::Q4_0 ? 1 : 2;
    uint8_t * bytes    = w + block * n_bytes;
    for (int i = 0; i < n_bytes; ++i) {
        const uint32_t random = hash_at(seed, block * n_bytes + (i < 2 * n_scales ? i / 2 * 2 : i));
        bytes[i]              = i >= 2 * n_scales ? random >> 8 : q4_scale(type, random, how) >> i % 2 * 8;
    }
}

static __global__ void fill_f32_kernel(float * x, int64_t count, uint64_t seed, q4_fill how) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    const uint32_t random = hash_at(~seed, i);
    const float    value  = ((int32_t) (random >> 8) - (1 << 23)) * 0x1p-23f;
    const uint32_t kind   = how != q4_fill::ORDINARY ? random & 63 : 63;
    x[i] = kind % 8 == 0 ? 0.0f : kind == 1 ? 1000.0f * value : value;
}

// n_weights: a multiple of the block size.
static inline void fill_q4(weight_type type, uint8_t * w, int64_t n_weights, uint64_t seed, q4_fill how) {
    const int64_t n_blocks = n_weights / block_size(type);
    fill_q4_kernel<<<(unsigned) ((n_blocks + 255) / 256), 256>>>(type, w, n_blocks, seed, how);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
}

static inline void fill_f32(float * x, int64_t count, uint64_t seed, q4_fill how) {
    fill_f32_kernel<<<(unsigned) ((count + 255) / 256), 256>>>(x, count, seed, how);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
}
