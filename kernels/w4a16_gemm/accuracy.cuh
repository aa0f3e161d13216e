// The error of llama.cpp's own product: quantisers, and MMQ's arithmetic in double. Plain C++.

#pragma once

#include "../common/reference.cuh"

#include <algorithm>
#include <random>

enum class distribution { UNIFORM, GAUSSIAN };

static inline std::vector<float> random_floats(distribution how, int64_t count, uint64_t seed) {
    std::mt19937_64                       bits(seed);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::normal_distribution<float>       gaussian;
    std::vector<float>                    x(count);
    for (float & each : x) {
        each = how == distribution::UNIFORM ? uniform(bits) : gaussian(bits);
    }
    return x;
}

// -- f16 --

// The nearest f16, half to even. No input here comes near f16's largest.
static inline double f16_round(double x) {
    const double step = std::ldexp(1.0, std::max(x == 0.0 ? -14 : std::ilogb(x), -14) - 10);
    return std::nearbyint(x / step) * step;
}

static inline void f16_store(uint8_t * p, double x) {
    const double   magnitude = std::fabs(f16_round(x));
    const int      exponent  = magnitude < std::ldexp(1.0, -14) ? -14 : std::ilogb(magnitude);
    const uint32_t ulps      = (uint32_t) std::ldexp(magnitude, 10 - exponent);  // from 1024 on a normal number
    const uint32_t bits      = (x < 0.0 ? 0x8000 : 0) | (((uint32_t) (exponent + 14) << 10) + ulps);
    p[0] = (uint8_t) bits;
    p[1] = (uint8_t) (bits >> 8);
}

// -- quantisers --

static inline int code_of(double x) {
    return (int) std::fmin(15.0, std::fmax(0.0, std::nearbyint(x)));
}

// As ggml does: the value furthest from 0 becomes code 0, which means -8.
static inline void quantise_q4_0(const float * x, uint8_t * block) {
    const float far = *std::max_element(x, x + 32, [](float a, float b) { return std::fabs(a) < std::fabs(b); });
    f16_store(block, far / -8.0);
    const double d = f16_at(block);
    for (int i = 0; i < 16; ++i) {
        const auto code = [&](float value) { return d == 0.0 ? 8 : code_of(value / d + 8.0); };
        block[2 + i]    = (uint8_t) (code(x[i]) | code(x[i + 16]) << 4);
    }
}

static inline void store_six_bits(uint8_t * s, int i, int value) {
    const int j = i % 8;
    if (j < 4) {
        s[i < 8 ? j : j + 4] |= value;
    } else {
        s[j + 4] |= (value & 15) << (i < 8 ? 0 : 4);
        s[i < 8 ? j - 4 : j] |= value >> 4 << 6;
    }
}

// The scale spans the least to the greatest of each 32, from which ggml's search starts.
static inline void quantise_q4_K(const float * x, uint8_t * block) {
    double step[8], least[8];
    for (int j = 0; j < 8; ++j) {
        const auto ends = std::minmax_element(x + 32 * j, x + 32 * j + 32);
        least[j]        = std::fmax(0.0, -*ends.first);
        step[j]         = (*ends.second + least[j]) / 15.0;
    }
    std::fill(block, block + 144, (uint8_t) 0);
    f16_store(block, *std::max_element(step, step + 8) / 63.0);
    f16_store(block + 2, *std::max_element(least, least + 8) / 63.0);
    const double d    = f16_at(block);
    const double dmin = f16_at(block + 2);
    for (int j = 0; j < 8; ++j) {
        store_six_bits(block + 4, j, d == 0.0 ? 0 : (int) std::fmin(63.0, std::nearbyint(step[j] / d)));
        store_six_bits(block + 4, 8 + j, dmin == 0.0 ? 0 : (int) std::fmin(63.0, std::nearbyint(least[j] / dmin)));
    }
    for (int i = 0; i < 256; ++i) {
        const weight_parts p    = q4_K_parts(block, i);
        const int          code = p.step == 0.0 ? 0 : code_of((x[i] - p.centre) / p.step + 8.0);
        block[16 + i / 64 * 32 + i % 32] |= code << (i % 64 < 32 ? 0 : 4);
    }
}

static inline std::vector<uint8_t> quantise(weight_type type, const std::vector<float> & x) {
    const int64_t        size = block_size(type);
    std::vector<uint8_t> w(x.size() / size * block_bytes(type));
    for (size_t b = 0; b < x.size() / size; ++b) {
        const auto quantise_block = type == weight_type::Q4_0 ? quantise_q4_0 : quantise_q4_K;
        quantise_block(&x[b * size], &w[b * block_bytes(type)]);
    }
    return w;
}

// -- MMQ --

// 32 activations as MMQ reads them: 8 bits each, their scale, and the sum of the unrounded ones, both f16.
struct q8_1_block {
    double code[32];
    double scale, sum;
};

static inline q8_1_block q8_1_of(const float * x) {
    q8_1_block b       = {};
    double     largest = 0.0, sum = 0.0;
    for (int i = 0; i < 32; ++i) {
        largest = std::fmax(largest, std::fabs(x[i]));
        sum    += x[i];
    }
    for (int i = 0; i < 32 && largest > 0.0; ++i) {
        b.code[i] = std::round(x[i] * 127.0 / largest);
    }
    b.scale = f16_round(largest / 127.0);
    b.sum   = f16_round(sum);
    return b;
}

// 32 weights as MMQ reads them: integers, a scale and a minimum. MMQ rounds the products of Q4_K's two scales to f16.
struct mmq_block {
    double code[32];
    double scale, least;
};

static inline mmq_block mmq_block_of(weight_type type, const uint8_t * row, int64_t first) {
    mmq_block b = {};
    for (int i = 0; i < 32; ++i) {
        const weight_parts p = parts_of(type, row, first + i);
        const bool         k = type == weight_type::Q4_K;
        b.code[i] = k ? p.code : p.code - 8;
        b.scale   = k ? f16_round(p.step) : p.step;
        b.least   = k ? f16_round(8.0 * p.step - p.centre) : 0.0;
    }
    return b;
}

// MMQ's output without the rounding of its f32 sums: n rows of m.
static inline std::vector<double> multiply_as_mmq(
        weight_type type, const uint8_t * w, const float * x, int64_t m, int64_t n, int64_t k) {
    std::vector<double>     y(m * n);
    std::vector<q8_1_block> columns(n * k / 32);
    for (size_t b = 0; b < columns.size(); ++b) {
        columns[b] = q8_1_of(x + 32 * b);
    }
    for (int64_t row = 0; row < m; ++row) {
        for (int64_t b = 0; b < k / 32; ++b) {
            const mmq_block weights = mmq_block_of(type, w + row * (k / block_size(type) * block_bytes(type)), 32 * b);
            for (int64_t col = 0; col < n; ++col) {
                const q8_1_block & column = columns[col * (k / 32) + b];
                double             sum    = 0.0;
                for (int i = 0; i < 32; ++i) {
                    sum += weights.code[i] * column.code[i];
                }
                y[col * m + row] += weights.scale * column.scale * sum - weights.least * column.sum;
            }
        }
    }
    return y;
}
