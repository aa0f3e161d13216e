// What `./harness test` proves.

#pragma once

#include "../common/check_selftest.cuh"
#include "product.cuh"

#include <vector>

// The k-th of 512 numbers that begin at the word `codes`, under scales that begin at `scales`.
static double fp4_value(fp4_type type, const uint32_t * codes, const uint32_t * scales, int k) {
    static const nvfp4_values VALUES;
    const uint32_t            word  = scales[k / 64];
    const double              value = VALUES.e2m1[codes[k / 8] >> k % 8 * 4 & 15];
    return type == fp4_type::NVFP4 ? value * VALUES.ue4m3[word >> k % 64 / 16 * 8 & 255]
                                   : std::ldexp(value, (int) (word >> k % 64 / 32 * 8 & 255) - 127);
}

// Outputs and what they must be, each divided by the sum of the absolute values of what it adds up: a sum that cancels
// is no more exact than its terms.
struct judged {
    std::vector<float>  out;
    std::vector<double> expected;
};

template <typename problem_t> static judged judge(const problem_t & p) {
    constexpr int               C = problem_t::COLUMNS;
    const std::vector<uint32_t> x = p.x.template host<uint32_t>(), y = p.y.template host<uint32_t>();
    std::vector<double>         xs((int64_t) p.rows() * p.k()), ys((int64_t) p.columns() * p.k());
    judged                      j = {p.out.template host<float>(), {}};
    for (int64_t row = 0; row < p.rows(); ++row) {
        for (int k = 0; k < p.k(); ++k) {
            const uint32_t * from =
                &x[((row / FP4_ROWS * p.steps + k / 512) * FP4_ROWS + row % FP4_ROWS) * FP4_X_STRIDE];
            xs[row * p.k() + k] = fp4_value(problem_t::TYPE, from, from + 64, k % 512);
        }
    }
    for (int64_t column = 0; column < p.columns(); ++column) {
        for (int k = 0; k < p.k(); ++k) {
            const uint32_t * from = &y[((column / C * p.steps * 2 + k / 256) * C + column % C) * FP4_Y_STRIDE];
            ys[column * p.k() + k] = fp4_value(problem_t::TYPE, from + 4, from, k % 256);
        }
        for (int64_t row = 0; row < p.rows(); ++row) {
            double sum = 0.0, magnitude = 0.0;
            for (int k = 0; k < p.k(); ++k) {
                const double term = xs[row * p.k() + k] * ys[column * p.k() + k];
                sum       += term;
                magnitude += std::fabs(term);
            }
            j.out[column * p.rows() + row] = (float) (j.out[column * p.rows() + row] / magnitude);
            j.expected.push_back(sum / magnitude);
        }
    }
    return j;
}

// An error of 2^-10 of the terms' sum is allowed, as the tensor cores may keep 14 bits of a sum, as Hopper's are said to
// of FP8 products. The errors themselves are printed: they say whether accumulating there costs accuracy.
static const tolerance OF_SUM = {0x1p-10, 1e-4};

template <bool outside, typename problem_t> static bool right(const problem_t & p) {
    p.out.poison();
    CUDA_CHECK(p.template launch<outside>());
    CUDA_CHECK(cudaDeviceSynchronize());
    const judged  j  = judge(p);
    const auto    at = [&](int64_t row, int64_t col) { return j.expected[row * p.rows() + col]; };
    const verdict v  = compare(j.out.data(), at, p.columns(), p.rows(), OF_SUM);
    char          text[120];
    snprintf(text, sizeof(text), "%s, largest error 2^%.1f of the terms, nmse %.2g ", outside ? "added outside" : "accumulated",
             std::log2(v.max_abs), v.nmse);
    const bool inside = p.out.guards_intact();
    return said(v.passed && inside, p.name(), text + v.why + (inside ? "" : "; it wrote beyond its output"));
}

template <typename problem_t> static bool repeats_agree(const problem_t & p) {
    std::vector<float> before;
    bool               agree = true;
    for (int i = 0; i < 3; ++i) {
        p.out.poison();
        CUDA_CHECK(p.template launch<false>());
        CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<float> now = p.out.template host<float>();
        agree  = agree && (i == 0 || memcmp(now.data(), before.data(), p.out.size()) == 0);
        before = now;
    }
    return said(agree, p.name(), "three launches agree in every bit");
}

template <fp4_type type, int columns> static bool tile_is_right(int row_tiles, int column_tiles, int steps) {
    const problem<type, columns> p(row_tiles, column_tiles, steps);
    p.fill(columns);
    const bool accumulated = right<false>(p);
    const bool outside     = right<true>(p);
    return repeats_agree(p) && accumulated && outside;
}

// One step and several: a step that forgets the sums before it, or counts them twice, is wrong in the others alone.
template <fp4_type type> static bool edges() {
    bool passed = tile_is_right<type, 8>(1, 1, 1);
    passed      = tile_is_right<type, 40>(1, 2, 2) && passed;
    passed      = tile_is_right<type, 48>(2, 1, 1) && passed;
    return tile_is_right<type, 128>(1, 1, 2) && passed;
}

static bool all_edges() {
    const bool sound = said(checker_is_sound(), "the checker fails what is wrong");
    const bool nv    = edges<fp4_type::NVFP4>();
    return edges<fp4_type::MXFP4>() && nv && sound;
}
