// What codes, weights and products are, from planes and bytes alone and in double: shares nothing with the kernels but the rounding to
// 16 bits.

#pragma once

#include "../common/buffer.cuh"
#include "kbit.cuh"

// The bits of an element's code lie at one place of K planes.
static __host__ __device__ inline int reference_code(const uint32_t * planes, int k, int64_t block, int j) {
    int code = 0;
    for (int b = 0; b < k; ++b) {
        code |= (int) (planes[block * k + b] >> j & 1) << b;
    }
    return code;
}

static __host__ __device__ inline double reference_scale(uint8_t byte) {
    const int e = byte / 16, m = byte % 16;
    return e == 0 ? ldexp(m / 16.0, -10) : ldexp(1.0 + m / 16.0, e - 11);
}

template <typename T> static __host__ __device__ inline double rounded(double x) {
    T v;
    kbit_round((float) x, v);  // the products of what has 11 bits with what has 5 are exact in float
    return kbit_float(v);
}

// One thread an output. magnitude: the sum of |a w|, of which errors are parts.
template <typename T>
static __global__ void reference_product(const T * a, const uint32_t * planes, const uint8_t * absmax, const float * codebook, int k,
                                         int64_t m, int64_t n, int64_t k_dim, double2 * out) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= m * n) {
        return;
    }
    const int64_t token = i / n, row = i % n;
    double        sum = 0.0, magnitude = 0.0;
    for (int64_t block = 0; block < k_dim / 32; ++block) {
        const int64_t at    = row * (k_dim / 32) + block;
        const double  scale = reference_scale(absmax[at]);
        for (int j = 0; j < 32; ++j) {
            const double w = rounded<T>(rounded<T>(codebook[reference_code(planes, k, at, j)]) * scale);
            const double x = kbit_float(a[token * k_dim + block * 32 + j]);
            sum += x * w;
            magnitude += fabs(x * w);
        }
    }
    out[i] = make_double2(sum, magnitude);
}

// Weights as kbit_dequantise has them: rounded once; or as the product has them, whose entry is rounded before.
template <typename T>
static std::vector<T> reference_weights(const std::vector<uint32_t> & planes, const std::vector<double> & scales,
                                        const std::vector<float> & codebook, int k, bool entry_rounded) {
    std::vector<T> w(planes.size() / k * 32);
    for (size_t i = 0; i < w.size(); ++i) {
        const float entry = codebook[reference_code(planes.data(), k, (int64_t) (i / 32), (int) (i % 32))];
        kbit_round((float) ((entry_rounded ? (float) rounded<T>(entry) : entry) * (float) scales[i / 32]), w[i]);
    }
    return w;
}
