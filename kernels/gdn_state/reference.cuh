// The gated delta rule in double, from its definition: decay, correct, read. Plain C++, with or without nvcc.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

// One head of one sequence. state: 128 x 128, transposed; it is updated. Returns the result.
static inline std::vector<double> gdn_reference(std::vector<double> & state, const float * q, const float * k,
                                                const float * v, double g, double beta) {
    const int           n = 128;
    std::vector<double> out(n);
    for (int col = 0; col < n; ++col) {
        double * s  = &state[col * n];
        double   kv = 0.0;
        for (int i = 0; i < n; ++i) {
            s[i] *= std::exp(g);
            kv   += s[i] * k[i];
        }
        for (int i = 0; i < n; ++i) {
            s[i]     += k[i] * (v[col] - kv) * beta;
            out[col] += s[i] * q[i] / std::sqrt((double) n);
        }
    }
    return out;
}
