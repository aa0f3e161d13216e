// A batch of sequences on the device, with what they remember in cells of a cache.

#pragma once

#include "../common/buffer.cuh"
#include "../common/fill.cuh"
#include "conv_state.cuh"
#include "reference.cuh"

#include <string>
#include <vector>

struct shape {
    int64_t seqs, channels;

    int64_t row() const { return channels * CONV_STATE_KEPT; }

    std::string name() const { return std::to_string(seqs) + "x" + std::to_string(channels); }
};

// The cache has a cell more than there are sequences, before and after their own. offset: of all addresses, in bytes.
struct problem {
    shape         s;
    device_buffer x, weights, cache, out;

    explicit problem(const shape & s, int64_t offset = 0)
        : s(s), x(s.seqs * s.channels * 4, offset), weights(s.channels * CONV_STATE_TAPS * 4, offset),
          cache((s.seqs + 2) * s.row() * 4, offset), out(s.seqs * s.channels * 4, offset) {}

    float * states() const { return cache.as<float>() + s.row(); }

    int64_t state_bytes() const { return s.seqs * s.row() * 4; }

    // What one launch reads and writes.
    int64_t bytes() const { return 2 * state_bytes() + x.size() + weights.size() + out.size(); }

    void fill(uint64_t seed) const {
        fill_inputs(seed);
        fill_uniform(weights.as<float>(), weights.size() / 4, seed + 1, -1.0f, 1.0f);
        fill_uniform(cache.as<float>(), cache.size() / 4, seed + 2, -1.0f, 1.0f);
    }

    void fill_inputs(uint64_t seed) const { fill_uniform(x.as<float>(), x.size() / 4, seed, -2.0f, 2.0f); }

    conv_state_args args() const {
        return {x.as<float>(), weights.as<float>(), states(), states(), out.as<float>(), s.seqs, s.channels, s.channels};
    }
};

// What a launch left: everything that it may have written.
struct outcome {
    std::vector<char> cache, out;
    bool              inside;  // nothing was written beyond the buffers

    explicit outcome(const problem & p)
        : cache(p.cache.host<char>()), out(p.out.host<char>()),
          inside(p.cache.guards_intact() && p.out.guards_intact() && p.x.guards_intact() && p.weights.guards_intact()) {}

    bool operator==(const outcome & other) const {
        return inside && other.inside && cache == other.cache && out == other.out;
    }
};
