// A batch of sequences on the device, with its states in cells of a cache.

#pragma once

#include "../common/buffer.cuh"
#include "../common/fill.cuh"
#include "gdn_state.cuh"
#include "reference.cuh"

#include <cstring>
#include <string>
#include <vector>

// bf16 from f32
static __global__ void narrow_kernel(const float * x, __nv_bfloat16 * y, int64_t n) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        y[i] = __float2bfloat16_rn(x[i]);
    }
}

struct shape {
    int64_t seqs, heads, qk_heads;

    int64_t cells() const { return seqs * heads * GDN_STATE_CELL; }

    std::string name() const {
        return std::to_string(seqs) + "x" + std::to_string(heads) + "/" + std::to_string(qk_heads);
    }
};

// The cache has a cell more than there are sequences, before and after their own.
template <typename T> struct problem {
    shape         s;
    device_buffer q, k, v, g, beta, cache, out;

    explicit problem(const shape & s)
        : s(s), q(s.seqs * s.qk_heads * 512), k(s.seqs * s.qk_heads * 512), v(s.seqs * s.heads * 512),
          g(s.seqs * s.heads * 4), beta(s.seqs * s.heads * 4), cache((s.cells() + 2 * cell()) * sizeof(T)),
          out(s.seqs * s.heads * 512) {}

    int64_t cell() const { return s.heads * GDN_STATE_CELL; }

    T * states() const { return cache.as<T>() + cell(); }

    int64_t state_bytes() const { return s.cells() * (int64_t) sizeof(T); }

    // What one launch reads and writes.
    int64_t bytes() const {
        return 2 * state_bytes() + q.size() + k.size() + v.size() + g.size() + beta.size() + out.size();
    }

    // A key has a norm of about 1, so that a state neither grows nor vanishes: the decay is weak.
    void fill(uint64_t seed) const {
        fill_inputs(seed);
        device_buffer wide((s.cells() + 2 * cell()) * 4);
        uniform(wide, seed + 5, -1.0f, 1.0f);
        if (sizeof(T) == 4) {
            CUDA_CHECK(cudaMemcpy(cache.as<T>(), wide.as<T>(), cache.size(), cudaMemcpyDeviceToDevice));
        } else {
            const int64_t n = cache.size() / sizeof(T);
            narrow_kernel<<<blocks_of(n), 256>>>(wide.as<float>(), cache.as<__nv_bfloat16>(), n);
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    }

    void fill_inputs(uint64_t seed) const {
        uniform(q, seed + 0, -0.15f, 0.15f);
        uniform(k, seed + 1, -0.15f, 0.15f);
        uniform(v, seed + 2, -0.3f, 5.0f);
        uniform(g, seed + 3, -0.05f, -1e-4f);
        uniform(beta, seed + 4, 0.0f, 1.0f);
    }

    static void uniform(const device_buffer & x, uint64_t seed, float low, float high) {
        fill_uniform(x.as<float>(), x.size() / 4, seed, low, high);
    }

    gdn_state_args<T> args() const {
        return {q.as<float>(), k.as<float>(), v.as<float>(), g.as<float>(), beta.as<float>(),
                states(), states(), out.as<float>(), s.seqs, s.heads, s.qk_heads,
                128, 128 * s.qk_heads, 128, 128 * s.heads, 1, s.heads};
    }
};

// What a launch left: everything that it may have written.
template <typename T> struct outcome {
    std::vector<char> cache, out;
    bool              inside;  // nothing was written beyond the buffers

    explicit outcome(const problem<T> & p)
        : cache(p.cache.template host<char>()), out(p.out.template host<char>()),
          inside(p.cache.guards_intact() && p.out.guards_intact() && p.q.guards_intact() && p.k.guards_intact()) {}

    bool operator==(const outcome & other) const {
        return inside && other.inside && cache == other.cache && out == other.out;
    }
};
