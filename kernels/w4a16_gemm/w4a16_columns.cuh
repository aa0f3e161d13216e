// Activations as f16 for a GEMM of f16 by a library, so that none is beyond f16's range and nothing of note is below it.
//
//   w4a16_columns_to_f16_cuda(x, x16, undo, n, k, stream)
//   w4a16_columns_undo_cuda(y, undo, m, n, stream)
//
//   x       n columns (tokens) of k f32, contiguous; 16-byte aligned
//   x16     n columns of k f16, contiguous; 16-byte aligned: column j of x times 1 / undo[j]
//   undo    n f32, powers of two
//   y       n columns of m f32, contiguous: what the product of x16 is; multiplied by undo in place
//   k       a multiple of 8
//   stream  a launch, asynchronous, that allocates nothing: it may be captured in a graph
//   returns cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer that is not as above, else what
//           the launch returned
//
// A column whose largest is in 2^-8 ... 2^15 is only rounded: f16 is exact to 2^-25 below its normal numbers, 2^-17 of the
// largest, and undo is 1. Such columns are the rule, and the second launch then leaves y as it is. Another is scaled so
// that its largest comes into 2^14 ... 2^15. Columns do not meet: an infinite or NaN token does nothing to another.

#pragma once

#include "w4a16_gemm.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// One block a column, threads (32, 16). As w4a16_to_f16.
static __global__ void __launch_bounds__(W4A16_WARP * W4A16_X_WARPS, 2)
w4a16_columns_to_f16(const float * __restrict__ x, uint4 * __restrict__ x16, float * __restrict__ undo, const int64_t k) {
    constexpr int THREADS = W4A16_WARP * W4A16_X_WARPS;

    const float4 * from    = (const float4 *) (x + blockIdx.x * k);
    uint4 *        to      = x16 + blockIdx.x * k / 8;
    const auto     convert = [&](const float scale) {
        float largest = 0.0f;
        for (int64_t first = threadIdx.y * W4A16_WARP + threadIdx.x; first < k / 8; first += W4A16_X_AHEAD * THREADS) {
            float4 v[W4A16_X_AHEAD][2];
#pragma unroll
            for (int i = 0; i < W4A16_X_AHEAD; ++i) {
                const int64_t at = first + i * THREADS;
                v[i][0] = at < k / 8 ? from[2 * at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                v[i][1] = at < k / 8 ? from[2 * at + 1] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int i = 0; i < W4A16_X_AHEAD; ++i) {
                const float4 & a = v[i][0];
                const float4 & b = v[i][1];
                if (first + i * THREADS < k / 8) {
                    to[first + i * THREADS] = make_uint4(w4a16_pair(a.x, a.y, scale), w4a16_pair(a.z, a.w, scale),
                                                         w4a16_pair(b.x, b.y, scale), w4a16_pair(b.z, b.w, scale));
                }
                largest = fmaxf(largest, fmaxf(w4a16_largest(a), w4a16_largest(b)));
            }
        }
        return largest;
    };
    w4a16_convert_columns<1>(convert, undo[blockIdx.x], threadIdx.y == 0 && threadIdx.x == 0);
}

// One block a column, threads (32, 16).
static __global__ void __launch_bounds__(W4A16_WARP * W4A16_X_WARPS)
w4a16_columns_undo(float * __restrict__ y, const float * __restrict__ undo, const int64_t m) {
    const float by = undo[blockIdx.x];
    if (by == 1.0f) {
        return;
    }
    for (int64_t i = threadIdx.y * W4A16_WARP + threadIdx.x; i < m; i += W4A16_WARP * W4A16_X_WARPS) {
        y[blockIdx.x * m + i] *= by;
    }
}

#else

static __global__ void w4a16_columns_to_f16(const float *, uint4 *, float *, int64_t) {
    __trap();
}

static __global__ void w4a16_columns_undo(float *, const float *, int64_t) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

static inline cudaError_t w4a16_columns_to_f16_cuda(const float * x, __half * x16, float * undo, const int64_t n,
                                                    const int64_t k, cudaStream_t stream) {
    if (n < 1 || n > INT32_MAX || k < 8 || k % 8 != 0) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) x % sizeof(float4) != 0 || (uintptr_t) x16 % sizeof(uint4) != 0) {
        return cudaErrorMisalignedAddress;
    }
    const dim3 block(W4A16_WARP, W4A16_X_WARPS);
    w4a16_columns_to_f16<<<(unsigned) n, block, 0, stream>>>(x, (uint4 *) x16, undo, k);
    return cudaGetLastError();
}

static inline cudaError_t w4a16_columns_undo_cuda(float * y, const float * undo, const int64_t m, const int64_t n,
                                                  cudaStream_t stream) {
    if (m < 1 || n < 1 || n > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    const dim3 block(W4A16_WARP, W4A16_X_WARPS);
    w4a16_columns_undo<<<(unsigned) n, block, 0, stream>>>(y, undo, m);
    return cudaGetLastError();
}
