// What is compared with: the same conversion by a warp for each 64 weights, a byte and a scale a lane, two 2-byte
// stores, and a table of the sixteen codes. It is the strategy of ggml's own conversion.

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

static __device__ const int8_t TWICE_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static __device__ __forceinline__ float half_ue4m3(const uint32_t code) {
    const uint32_t exponent = code >> 3 & 15;
    const uint32_t mantissa = code & 7;
    const float    normal   = __uint_as_float((exponent + 119) << 23 | mantissa << 20);
    return code == 0x7F ? 0.0f : exponent == 0 ? mantissa * 0x1p-10f : normal;
}

static __global__ void warp_per_block(const uint8_t * __restrict__ x, nv_bfloat16 * __restrict__ y) {
    const uint8_t * block = x + (int64_t) blockIdx.x * 36;
    const int       sub   = threadIdx.x / 8;
    const float     d     = half_ue4m3(block[sub]);
    const uint8_t   q     = block[4 + threadIdx.x];
    const int64_t   i     = (int64_t) blockIdx.x * 64 + sub * 16 + threadIdx.x % 8;
    y[i + 0]              = __float2bfloat16(d * TWICE_E2M1[q & 15]);
    y[i + 8]              = __float2bfloat16(d * TWICE_E2M1[q >> 4]);
}

static cudaError_t warp_per_block_cuda(const void * x, nv_bfloat16 * y, const int64_t k, cudaStream_t stream) {
    warp_per_block<<<(unsigned) (k / 64), 32, 0, stream>>>((const uint8_t *) x, y);
    return cudaGetLastError();
}
