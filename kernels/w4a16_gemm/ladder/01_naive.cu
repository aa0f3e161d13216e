// Rung 1: one warp a tile of 16 x 8 outputs, everything straight from global memory, each weight taken apart by every
// warp that needs it. Contract and numerics are those of ../w4a16_gemm.cuh, of which it uses only the type; the scratch
// memory is not used. It is kept unchanged, as the reference that shows where a later rung differs.

#include "../w4a16_gemm.cuh"

#include <cuda_bf16.h>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

static __device__ __forceinline__ void naive_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ uint32_t naive_pair(const float low, const float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return (uint32_t) __bfloat16_as_ushort(v.x) | (uint32_t) __bfloat16_as_ushort(v.y) << 16;
}

static __device__ __forceinline__ float naive_half(const uint8_t * p) {
    return __half2float(__ushort_as_half((unsigned short) (p[0] | p[1] << 8)));
}

static __device__ __forceinline__ float naive_bf16(const float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

// Weight i of a row as a bf16's value, less what naive_scale gives back.
template <w4a16_type type> static __device__ float naive_weight(const uint8_t * row, int64_t i);

template <> __device__ float naive_weight<w4a16_type::Q4_0>(const uint8_t * row, const int64_t i) {
    const int codes = row[i / 32 * 18 + 2 + i % 16];
    return (float) ((i % 32 < 16 ? codes & 15 : codes >> 4) - 8);
}

template <> __device__ float naive_weight<w4a16_type::Q4_K>(const uint8_t * row, const int64_t i) {
    const uint8_t * block = row + i / 256 * 144;
    const uint8_t * s     = block + 4;
    const int       j     = (int) (i % 256 / 32);
    const int       codes = block[16 + j / 2 * 32 + i % 32];
    const int       sc    = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    const int       mn    = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    const float     d     = naive_half(block) * (float) sc;
    const float     c     = fmaf(8.0f, d, -(naive_half(block + 2) * (float) mn));
    return naive_bf16(fmaf((float) ((j % 2 ? codes >> 4 : codes & 15) - 8), naive_bf16(d), naive_bf16(c)));
}

template <w4a16_type type>
static __device__ __forceinline__ float naive_scale(const uint8_t * row, const int64_t i) {
    return type == w4a16_type::Q4_0 ? naive_half(row + i / 32 * 18) : 1.0f;
}

template <w4a16_type type>
static __global__ void __launch_bounds__(32)
naive_gemm(const uint8_t * __restrict__ w, const float * __restrict__ x, float * __restrict__ y,
           const int64_t m, const int64_t n, const int64_t k) {
    const int       g         = threadIdx.x / 4;
    const int       t         = threadIdx.x % 4;
    const int64_t   row_bytes = k / w4a16_block_size<type> * w4a16_block_bytes<type>;
    const int64_t   row       = (int64_t) blockIdx.x * 16 + g;
    const int64_t   col       = (int64_t) blockIdx.y * 8;
    // rows beyond the matrix are read as its last row and not written
    const uint8_t * w0        = w + (row < m ? row : m - 1) * row_bytes;
    const uint8_t * w8        = w + (row + 8 < m ? row + 8 : m - 1) * row_bytes;
    const float *   x0        = x + (col + g < n ? col + g : n - 1) * k;
    float           acc[4]    = {0.0f, 0.0f, 0.0f, 0.0f};

    for (int64_t i = 0; i < k; i += 32) {
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k16 = 0; k16 < 32; k16 += 16) {
            const int64_t  l    = i + k16 + 2 * t;
            const uint32_t a[4] = {naive_pair(naive_weight<type>(w0, l), naive_weight<type>(w0, l + 1)),
                                   naive_pair(naive_weight<type>(w8, l), naive_weight<type>(w8, l + 1)),
                                   naive_pair(naive_weight<type>(w0, l + 8), naive_weight<type>(w0, l + 9)),
                                   naive_pair(naive_weight<type>(w8, l + 8), naive_weight<type>(w8, l + 9))};
            const uint32_t b[2] = {naive_pair(x0[l], x0[l + 1]), naive_pair(x0[l + 8], x0[l + 9])};
            naive_mma(c, a, b);
        }
        for (int e = 0; e < 4; ++e) {
            acc[e] = fmaf(naive_scale<type>(e < 2 ? w0 : w8, i), c[e], acc[e]);
        }
    }
    for (int e = 0; e < 4; ++e) {
        const int64_t to_row = row + e / 2 * 8;
        const int64_t to_col = col + 2 * t + e % 2;
        if (to_row < m && to_col < n) {
            y[to_col * m + to_row] = acc[e];
        }
    }
}

#else

template <w4a16_type type>
static __global__ void naive_gemm(const uint8_t *, const float *, float *, int64_t, int64_t, int64_t) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

template <w4a16_type type>
static cudaError_t naive_gemm_cuda(const void * w, const float * x, float * y, void * /*scratch*/,
                                   const int64_t m, const int64_t n, const int64_t k, cudaStream_t stream) {
    const dim3 grid((unsigned) ((m + 15) / 16), (unsigned) ((n + 7) / 8));
    naive_gemm<type><<<grid, 32, 0, stream>>>((const uint8_t *) w, x, y, m, n, k);
    return cudaGetLastError();
}
