// A whole product around fp4_accumulate, and the same with fresh accumulators, as MMQ has it.

#pragma once

#include "../common/buffer.cuh"
#include "../common/fill.cuh"
#include "../nvfp4_dequant/reference.cuh"
#include "fp4_accumulate.cuh"

#include <string>

// MMQ's way: every mma begins at zero, and the sums are added up outside the tensor cores.
template <fp4_type type, int columns>
static __device__ __forceinline__ void fp4_add_outside(const int * x, const int * y, float * sum, const int k0) {
    fp4_fragments<columns>(x, y, k0,
        [=](int at, const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b) {
            float c[4] = {};
            fp4_mma<type>(c, a, b, scale_a, scale_b);
#pragma unroll
            for (int l = 0; l < 4; ++l) {
                sum[at + l] += c[l];
            }
        });
}

// blockIdx.x is a tile of 128 rows, blockIdx.y one of columns. x and y lie tile by tile, each 512 or 256 deep, in the
// layout of shared memory. out[column * rows + row]
template <fp4_type type, int columns, bool outside>
static __global__ void __launch_bounds__(256, 1) fp4_product(const int * x, const int * y, float * out, int steps) {
// nvcc makes PTX of the plain architecture too, which has no such instructions
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
    extern __shared__ __align__(16) uint8_t fp4_shared[];
    int * const   x_tile = (int *) fp4_shared;
    int * const   y_tile = x_tile + FP4_ROWS * FP4_X_STRIDE;
    constexpr int X      = FP4_ROWS * FP4_X_STRIDE;
    constexpr int Y      = columns * FP4_Y_STRIDE;

    const int thread = threadIdx.y * 32 + threadIdx.x;
    float     sum[columns / 2] = {};
    for (int step = 0; step < 2 * steps; ++step) {
        if (step % 2 == 0) {
            for (int i = thread; i < X; i += 256) {
                x_tile[i] = x[((int64_t) blockIdx.x * steps + step / 2) * X + i];
            }
        }
        for (int i = thread; i < Y; i += 256) {
            y_tile[i] = y[((int64_t) blockIdx.y * 2 * steps + step) * Y + i];
        }
        __syncthreads();
        if constexpr (outside) {
            fp4_add_outside<type, columns>(x_tile, y_tile, sum, step % 2 * FP4_DEPTH);
        } else {
            fp4_accumulate<type, columns>(x_tile, y_tile, sum, step % 2 * FP4_DEPTH);
        }
        __syncthreads();
    }

    constexpr int STRIPES = columns >= 48 ? 2 : 1;
    const int64_t rows    = (int64_t) gridDim.x * FP4_ROWS;
    const int64_t row     = blockIdx.x * FP4_ROWS + threadIdx.y / STRIPES * STRIPES * 16 + threadIdx.x / 4;
    const int64_t column  = blockIdx.y * columns + threadIdx.y % STRIPES * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) {
        const int tile = i / 4;
        out[(column + tile / STRIPES * STRIPES * 8 + i % 2) * rows + row + tile % STRIPES * 16 + i % 4 / 2 * 8] = sum[i];
    }
#else
    __trap();
#endif // !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
}

static __device__ __forceinline__ uint32_t fp4_scales(fp4_type type, uint64_t seed, int64_t word) {
    uint32_t scales = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t random = hash_at(seed, word * 4 + i);
        // MXFP4: 2^-8 ... 2^7 in the low half; what is in the other must not matter
        scales |= (type == fp4_type::NVFP4 ? mixed_scale(random) : i < 2 ? 119 + random % 16 : random % 256) << 8 * i;
    }
    return scales;
}

// Random codes and scales: rows of `stride` words, of which `scales` begin at the word `first`.
static __global__ void fp4_fill(int * x, int64_t n, fp4_type type, uint64_t seed, int stride, int first, int scales) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        const int at = (int) (i % stride) - first;
        x[i] = (int) (at >= 0 && at < scales ? fp4_scales(type, seed, i) : hash_at(~seed, i));
    }
}

template <fp4_type type_, int columns_> struct problem {
    static constexpr fp4_type TYPE    = type_;
    static constexpr int      COLUMNS = columns_;

    int           row_tiles, column_tiles, steps;  // of 512
    device_buffer x, y, out;

    problem(int row_tiles, int column_tiles, int steps)
        : row_tiles(row_tiles), column_tiles(column_tiles), steps(steps),
          x((int64_t) row_tiles * steps * FP4_ROWS * FP4_X_STRIDE * 4),
          y((int64_t) column_tiles * steps * 2 * COLUMNS * FP4_Y_STRIDE * 4), out((int64_t) rows() * columns() * 4) {}

    int rows() const { return row_tiles * FP4_ROWS; }
    int columns() const { return column_tiles * COLUMNS; }
    int k() const { return steps * 512; }

    int64_t bytes() const { return x.size() + y.size() + out.size(); }

    std::string name() const {
        return std::string(TYPE == fp4_type::NVFP4 ? "nvfp4" : "mxfp4") + " m=" + std::to_string(rows()) +
               " n=" + std::to_string(columns()) + " k=" + std::to_string(k()) + " tile=" + std::to_string(COLUMNS);
    }

    void fill(uint64_t seed) const {
        const int64_t n_x = x.size() / 4, n_y = y.size() / 4;
        fp4_fill<<<(unsigned) ((n_x + 255) / 256), 256>>>(x.as<int>(), n_x, TYPE, seed, FP4_X_STRIDE, 64, 8);
        fp4_fill<<<(unsigned) ((n_y + 255) / 256), 256>>>(y.as<int>(), n_y, TYPE, seed + 1, FP4_Y_STRIDE, 0, 4);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaDeviceSynchronize());
    }

    template <bool outside> cudaError_t launch(cudaStream_t stream = nullptr) const {
        const auto    kernel = fp4_product<TYPE, COLUMNS, outside>;
        constexpr int SHARED = (FP4_ROWS * FP4_X_STRIDE + COLUMNS * FP4_Y_STRIDE) * 4;
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED));
        kernel<<<dim3(row_tiles, column_tiles), dim3(32, FP4_WARPS), SHARED, stream>>>(
            x.as<int>(), y.as<int>(), out.as<float>(), steps);
        return cudaGetLastError();
    }
};
