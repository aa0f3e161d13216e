// What a product of 4-bit weights with activations is, in double, from the definitions of ggml's blocks. Plain C++ for
// small outputs; with nvcc also on the device, for large ones.
//
// Beside each output stands its magnitude: the sum of the absolute values of what is added up. A sum that cancels is no
// more exact than its terms, so that errors are judged as parts of it.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __CUDACC__
#include "buffer.cuh"

#define REFERENCE_FN static __host__ __device__ inline
#else
#define REFERENCE_FN static inline
#endif // __CUDACC__

enum class weight_type { Q4_0, Q4_K };

REFERENCE_FN int64_t block_size(weight_type type) {
    return type == weight_type::Q4_0 ? 32 : 256;
}

REFERENCE_FN int64_t block_bytes(weight_type type) {
    return type == weight_type::Q4_0 ? 18 : 144;
}

static inline const char * name_of(weight_type type) {
    return type == weight_type::Q4_0 ? "q4_0" : "q4_K";
}

// -- weights --

// A weight is step * (code - 8) + centre. Both are exact: a scale has 11 significant bits, its factor 6.
struct weight_parts {
    double step, centre;
    int    code;
};

// binary16: sign, 5 exponent bits of bias 15, 10 mantissa bits.
REFERENCE_FN double f16_value(uint32_t bits) {
    const int    exponent  = bits >> 10 & 31;
    const int    mantissa  = bits & 1023;
    const double magnitude = exponent == 0 ? ldexp((double) mantissa, -24) : ldexp(1024.0 + mantissa, exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

REFERENCE_FN double f16_at(const uint8_t * p) {
    return f16_value(p[0] | (uint32_t) p[1] << 8);
}

// d, then 16 bytes: weight j in the low nibble of byte j, weight j + 16 in its high one. w = d (code - 8)
REFERENCE_FN weight_parts q4_0_parts(const uint8_t * block, int i) {
    const uint8_t codes = block[2 + i % 16];
    return {f16_at(block), 0.0, i < 16 ? codes & 15 : codes >> 4};
}

// Number i of the 16 of 6 bits: 8 scales, then 8 minima. The first 4 of each have a byte to themselves, whose two high
// bits are those of the 4 others, whose low 4 bits share a byte.
REFERENCE_FN int q4_K_six_bits(const uint8_t * s, int i) {
    const int j = i % 8;
    if (j < 4) {
        return s[i < 8 ? j : j + 4] & 63;
    }
    const int low = i < 8 ? s[j + 4] & 15 : s[j + 4] >> 4;
    return low | s[i < 8 ? j - 4 : j] >> 6 << 4;
}

// d, dmin, 12 bytes of scales and minima, then 4 x 32 bytes for 64 weights each, low nibbles first.
// w = d scale code - dmin minimum
REFERENCE_FN weight_parts q4_K_parts(const uint8_t * block, int i) {
    const uint8_t codes = block[16 + i / 64 * 32 + i % 32];
    const double  step  = f16_at(block) * q4_K_six_bits(block + 4, i / 32);
    const double  least = f16_at(block + 2) * q4_K_six_bits(block + 4, 8 + i / 32);
    return {step, 8.0 * step - least, i % 64 < 32 ? codes & 15 : codes >> 4};
}

REFERENCE_FN weight_parts parts_of(weight_type type, const uint8_t * row, int64_t i) {
    const int64_t   size  = block_size(type);
    const uint8_t * block = row + i / size * block_bytes(type);
    return type == weight_type::Q4_0 ? q4_0_parts(block, (int) (i % size)) : q4_K_parts(block, (int) (i % size));
}

REFERENCE_FN double weight_of(const weight_parts & p) {
    return p.step * (p.code - 8) + p.centre;
}

REFERENCE_FN double magnitude_of(const weight_parts & p) {
    return fabs(p.step * (p.code - 8)) + fabs(p.centre);
}

// -- product --

struct product {
    std::vector<double> y;          // n rows of m
    std::vector<double> magnitude;  // as y
};

// w: m rows of k weights in blocks; x: n rows of k.
static inline product multiply_on_cpu(
        weight_type type, const uint8_t * w, const float * x, int64_t m, int64_t n, int64_t k) {
    product             p = {std::vector<double>(m * n), std::vector<double>(m * n)};
    std::vector<double> value(k), size(k);
    for (int64_t row = 0; row < m; ++row) {
        for (int64_t i = 0; i < k; ++i) {
            const weight_parts parts = parts_of(type, w + row * (k / block_size(type) * block_bytes(type)), i);
            value[i] = weight_of(parts);
            size[i]  = magnitude_of(parts);
        }
        for (int64_t col = 0; col < n; ++col) {
            double y = 0.0, magnitude = 0.0;
            for (int64_t i = 0; i < k; ++i) {
                y         += value[i] * x[col * k + i];
                magnitude += size[i] * std::fabs(x[col * k + i]);
            }
            p.y[col * m + row]         = y;
            p.magnitude[col * m + row] = magnitude;
        }
    }
    return p;
}

#ifdef __CUDACC__

// A weight and its magnitude as float: of Q4_0 exact, of Q4_K to 2^-24, which is nothing beside bf16's 2^-8.
static __global__ void reference_weights(weight_type type, const uint8_t * w, float2 * out, int64_t count) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        const weight_parts parts = parts_of(type, w, i);
        out[i]                   = make_float2((float) weight_of(parts), (float) magnitude_of(parts));
    }
}

// One thread an output, 16 x 16 of them a block, summed in double.
static __global__ void reference_product(
        const float2 * w, const float * x, double2 * out, int64_t m, int64_t n, int64_t k) {
    __shared__ float2 ws[16][17];
    __shared__ float  xs[16][17];

    const int64_t row0 = (int64_t) blockIdx.x * 16;
    const int64_t col0 = (int64_t) blockIdx.y * 16;
    double        y = 0.0, magnitude = 0.0;
    for (int64_t i = 0; i < k; i += 16) {
        const bool row_is_there = row0 + threadIdx.y < m;
        const bool col_is_there = col0 + threadIdx.y < n;
        ws[threadIdx.y][threadIdx.x] = row_is_there ? w[(row0 + threadIdx.y) * k + i + threadIdx.x] : make_float2(0, 0);
        xs[threadIdx.y][threadIdx.x] = col_is_there ? x[(col0 + threadIdx.y) * k + i + threadIdx.x] : 0.0f;
        __syncthreads();
        for (int j = 0; j < 16; ++j) {
            y         += (double) ws[threadIdx.x][j].x * xs[threadIdx.y][j];
            magnitude += (double) ws[threadIdx.x][j].y * fabsf(xs[threadIdx.y][j]);
        }
        __syncthreads();
    }
    if (row0 + threadIdx.x < m && col0 + threadIdx.y < n) {
        out[(col0 + threadIdx.y) * m + row0 + threadIdx.x] = make_double2(y, magnitude);
    }
}

// As multiply_on_cpu, of operands on the device.
static inline product multiply_on_device(
        weight_type type, const uint8_t * w, const float * x, int64_t m, int64_t n, int64_t k) {
    const device_buffer weights(m * k * sizeof(float2));
    const device_buffer out(m * n * sizeof(double2));
    const dim3          grid((unsigned) ((m + 15) / 16), (unsigned) ((n + 15) / 16));
    const dim3          block(16, 16);
    reference_weights<<<(unsigned) ((m * k + 255) / 256), 256>>>(type, w, weights.as<float2>(), m * k);
    CUDA_CHECK(cudaGetLastError());
    reference_product<<<grid, block>>>(weights.as<float2>(), x, out.as<double2>(), m, n, k);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    product p;
    for (const double2 & each : out.host<double2>()) {
        p.y.push_back(each.x);
        p.magnitude.push_back(each.y);
    }
    return p;
}

#endif // __CUDACC__
