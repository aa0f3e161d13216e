// Products of FP4 tiles on Blackwell's block-scaled tensor cores: the running sums are the mma's own accumulators.
//
//   fp4_accumulate<type, columns>(x, y, sum, k0)    sum += x y^T, 256 deep; a device function for 8 warps of a block
//
//   type     NVFP4: a UE4M3 scale for 16 codes; MXFP4: a UE8M0 scale for 32. Codes are E2M1
//   columns  of y: 8, 16, 24, 32, 40, or a multiple of 16 up to 128
//   x        128 rows of 76 words: 64 of codes (8 codes a word), 8 of scales (a word for 64 codes), 4 unused
//   y        columns of 36 words: 4 of scales, 32 of codes
//   k0       0 or 32: the first of the 32 words of each row of x that are multiplied
//   sum      columns/2 floats a thread, in registers: see fp4_fragments
//
// x and y are in shared memory, 16-byte aligned; both have a word's codes in the same order. blockDim is (32, 8).
// Layouts and division of the work are those of ggml's MMQ, into which patches/fp4-accumulate puts this function.
//
// Limitations: sm_120a and sm_121a. How many bits the tensor cores keep of a running sum is not documented.
//
// A fragment of mma.m16n8k64, lane = 4 g + t, codes 8t ... 8t + 7 of a word:
//
//   a0 row g, word t       a1 row g+8, word t      a2 row g, word t+4      a3 row g+8, word t+4
//   b0 column g, word t    b1 column g, word t+4
//   c0 row g, column 2t    c1 row g, column 2t+1   c2 row g+8, column 2t   c3 row g+8, column 2t+1
//   scales of row g from lane 4g, of row g+8 from lane 4g+1, of column g from lane 4g
//
// References: PTX ISA, warp-level block scaling, mma.m16n8k64.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

enum class fp4_type { MXFP4, NVFP4 };

static constexpr int FP4_ROWS     = 128;
static constexpr int FP4_WARPS    = 8;
static constexpr int FP4_X_STRIDE = 76;
static constexpr int FP4_Y_STRIDE = 36;
static constexpr int FP4_DEPTH    = 32;  // words of a row that one call multiplies

// 16 rows of 8 words: lane i says where four words of row i % 16 begin
static __device__ __forceinline__ void fp4_load(uint32_t (&r)[4], const int * row) {
    [[maybe_unused]] const uint32_t at = (uint32_t) __cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

static __device__ __forceinline__ void fp4_mma_mx(
        float * c, const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
    asm("mma.sync.aligned.kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, 0}, %11, {0, 0};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
}

static __device__ __forceinline__ void fp4_mma_nv(
        float * c, const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
    asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, 0}, %11, {0, 0};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
}

// c += a b; c is 4 floats
template <fp4_type type>
static __device__ __forceinline__ void fp4_mma(
        float * c, const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
    if constexpr (type == fp4_type::NVFP4) {
        fp4_mma_nv(c, a, b, scale_a, scale_b);
    } else {
        fp4_mma_mx(c, a, b, scale_a, scale_b);
    }
}

// Calls multiply(at, a, b, scale_a, scale_b) for each mma of the warp, whose sums are sum[at ... at + 3].
//
// From 48 columns on two warps share 32 rows, and take 8 columns in turn; below, each has 16 rows to itself.
template <int columns, typename multiply_t>
static __device__ __forceinline__ void fp4_fragments(const int * x, const int * y, int k0, const multiply_t multiply) {
    constexpr int STRIPES   = columns >= 48 ? 2 : 1;  // of 16 rows, and warps that share them
    constexpr int FRAGMENTS = FP4_DEPTH / 8;

    const int lane   = threadIdx.x;
    const int row0   = threadIdx.y / STRIPES * STRIPES * 16;
    const int column = threadIdx.y % STRIPES * 8 + lane / 4;

    uint32_t a[STRIPES][FRAGMENTS][4], scale_a[STRIPES][FRAGMENTS];
#pragma unroll
    for (int s = 0; s < STRIPES; ++s) {
        const int * loaded = x + (row0 + 16 * s + lane % 16) * FP4_X_STRIDE + k0 + lane / 16 * 4;
        const int * scaled = x + (row0 + 16 * s + lane / 4 + lane % 2 * 8) * FP4_X_STRIDE + 64 + k0 / 8;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            fp4_load(a[s][f], loaded + 8 * f);
            scale_a[s][f] = scaled[f];
        }
    }
#pragma unroll
    for (int j = 0; j < columns; j += 8 * STRIPES) {
        const int * scales = y + (j + column) * FP4_Y_STRIDE;
        const int * codes  = scales + 4 + lane % 4;
        uint32_t    b[FRAGMENTS][2], scale_b[FRAGMENTS];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            b[f][0]    = codes[8 * f];
            b[f][1]    = codes[8 * f + 4];
            scale_b[f] = scales[f];
        }
#pragma unroll
        for (int s = 0; s < STRIPES; ++s) {
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f) {
                multiply((j / 8 + s) * 4, a[s][f], b[f], scale_a[s][f], scale_b[f]);
            }
        }
    }
}

template <fp4_type type, int columns>
static __device__ __forceinline__ void fp4_accumulate(
        const int * __restrict__ x, const int * __restrict__ y, float * __restrict__ sum, const int k0) {
    fp4_fragments<columns>(x, y, k0,
        [=](int at, const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
            fp4_mma<type>(sum + at, a, b, scale_a, scale_b);
        });
}
