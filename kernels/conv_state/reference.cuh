// The convolution in double, from its definition. Plain C++, with or without nvcc.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

// One token of one sequence. state: [channels][3], the oldest first; it is updated. Returns the result.
static inline std::vector<double> conv_reference(std::vector<double> & state, const float * x, const float * weights,
                                                 int64_t channels) {
    std::vector<double> out(channels);
    for (int64_t c = 0; c < channels; ++c) {
        double       sum       = 0.0;
        const double window[4] = {state[3 * c], state[3 * c + 1], state[3 * c + 2], x[c]};
        for (int j = 0; j < 4; ++j) {
            sum += window[j] * weights[4 * c + j];
        }
        for (int j = 0; j < 3; ++j) {
            state[3 * c + j] = window[j + 1];
        }
        out[c] = sum / (1.0 + std::exp(-sum));
    }
    return out;
}
