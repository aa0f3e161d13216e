// Quantised weights and activations on the device, and what the kernels make of them.

#pragma once

#include "../common/fill.cuh"
#include "kbit_gemm.cuh"
#include "reference.cuh"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

// The 2^k means of N(0,1) over equiprobable bins, by the largest magnitude: the mean over a bin is the difference of densities at its
// ends by its probability. Bits for bits those of kbit.py.
static inline std::vector<float> normal_codebook(int k) {
    const int           n = 1 << k;
    std::vector<double> density(n + 1, 0.0);
    for (int i = 1; i < n; ++i) {
        double low = -10.0, high = 10.0;
        for (int step = 0; step < 200; ++step) {
            const double x = 0.5 * (low + high);
            (0.5 * std::erfc(-x / std::sqrt(2.0)) < (double) i / n ? low : high) = x;
        }
        density[i] = std::exp(-0.5 * low * low);
    }
    std::vector<float> entries;
    for (int i = 0; i < n; ++i) {
        entries.push_back((float) ((density[i] - density[i + 1]) / density[n - 1]));
    }
    return entries;
}

struct shape {
    int     k;
    int64_t m, n, k_dim;

    std::string name() const {
        return "K=" + std::to_string(k) + " " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k_dim);
    }
};

template <typename T> static __global__ void fill_normal_kernel(T * x, int64_t n, uint64_t seed, float factor) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        // the sum of 4 uniform numbers, scaled to variance 1
        float sum = -2.0f;
        for (int part = 0; part < 4; ++part) {
            sum += (float) (hash_at(seed, 4 * i + part) >> 8) / (1 << 24);
        }
        kbit_round(factor * 1.7320508f * sum, x[i]);
    }
}

template <typename T> static void fill_normal(const device_buffer & x, uint64_t seed, float factor = 1.0f) {
    const int64_t n = x.size() / (int64_t) sizeof(T);
    fill_normal_kernel<T><<<blocks_of(n), 256>>>(x.as<T>(), n, seed, factor);
    CUDA_CHECK(cudaGetLastError());
}

template <typename V> static void to_device(const device_buffer & to, const std::vector<V> & from) {
    CUDA_CHECK(cudaMemcpy(to.as<void>(), from.data(), from.size() * sizeof(V), cudaMemcpyHostToDevice));
}

// T: of activations.
template <typename T> struct problem {
    shape              s;
    std::vector<float> entries;
    device_buffer      codebook, planes, absmax, tiles, scales, a, c, flags, workspace;

    explicit problem(const shape & s, const std::vector<float> & entries = {})
        : s(s), entries(entries.empty() ? normal_codebook(s.k) : entries), codebook(4 << s.k), planes(s.n * s.k_dim / 32 * 4 * s.k),
          absmax(s.n * s.k_dim / 32), tiles(kbit_tile_words(s.k, s.n, s.k_dim) * 4), scales(kbit_tile_scales(s.n, s.k_dim) * 4),
          a(s.m * s.k_dim * 2), c(s.m * s.n * 2), flags(3 * 4),
          workspace(kbit_workspace(s.m, s.n, std::max(plan().parts, 16))) {
        to_device(codebook, this->entries);
        CUDA_CHECK(cudaMemset(workspace.as<char>(), 0, workspace.size()));
        CUDA_CHECK(cudaMemset(flags.as<char>(), 0, flags.size()));
    }

    // Any codes and scales, or those of weights that are quantised.
    void fill(uint64_t seed, bool normal = false) {
        fill_normal<T>(a, seed);
        if (normal) {
            device_buffer w(s.n * s.k_dim * 4);
            fill_normal<float>(w, seed + 1, 0.1f);
            CUDA_CHECK(kbit_quantise_cuda(w.as<float>(), codebook.as<float>(), s.k, s.n * s.k_dim, planes.as<uint32_t>(),
                                          absmax.as<uint8_t>(), flags.as<int>(), nullptr));
            CUDA_CHECK(cudaDeviceSynchronize());
        } else {
            std::vector<uint32_t> bits(planes.size() / 4);
            std::vector<uint8_t>  bytes(absmax.size());
            for (size_t i = 0; i < bits.size(); ++i) {
                bits[i] = (uint32_t) ((seed + i + 1) * 0x9E3779B97F4A7C15ull >> 21);
            }
            for (size_t i = 0; i < bytes.size(); ++i) {
                bytes[i] = (uint8_t) ((seed + i) * 0x9E3779B1u >> 20);
            }
            to_device(planes, bits);
            to_device(absmax, bytes);
        }
        repack();
    }

    void repack() const {
        CUDA_CHECK(kbit_repack_cuda(planes.as<uint32_t>(), absmax.as<uint8_t>(), s.k, s.n, s.k_dim, tiles.as<uint32_t>(),
                                    scales.as<uint8_t>(), nullptr));
    }

    kbit_args args() const {
        return {s.k, s.m, s.n, s.k_dim, a.as<void>(), tiles.as<uint32_t>(), scales.as<uint8_t>(), codebook.as<float>(), c.as<void>(),
                workspace.as<void>()};
    }

    kbit_plan plan() const {
        int device, multiprocessors, shared;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
        return kbit_plan_of(s.k, s.m, s.n, s.k_dim, multiprocessors, shared);
    }

    std::vector<uint16_t> multiply(const kbit_plan & plan) const {
        c.poison();
        CUDA_CHECK(kbit_gemm_cuda<T>(args(), plan, nullptr));
        CUDA_CHECK(cudaDeviceSynchronize());
        return c.host<uint16_t>();
    }

    std::vector<uint16_t> multiply() const { return multiply(plan()); }

    std::vector<double2> reference() const {
        const device_buffer out(s.m * s.n * (int64_t) sizeof(double2));
        reference_product<T><<<blocks_of(s.m * s.n), 256>>>(a.as<T>(), planes.as<uint32_t>(), absmax.as<uint8_t>(), codebook.as<float>(),
                                                           s.k, s.m, s.n, s.k_dim, out.as<double2>());
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaDeviceSynchronize());
        return out.host<double2>();
    }
};

template <typename T> static double value_as(uint16_t bits) {
    T v;
    memcpy((void *) &v, &bits, sizeof(v));
    return kbit_float(v);
}

// Empty if each output is what it must be: rounded to T, sums in f32 before, of which none is off by more than 2^-17 of its terms.
template <typename T> static std::string wrong(const std::vector<uint16_t> & out, const std::vector<double2> & reference) {
    const double rounding = sizeof(T) == 2 && std::is_same<T, __half>::value ? 1.0 / 2048 : 1.0 / 256;
    double       squares  = 0.0;
    for (size_t i = 0; i < reference.size(); ++i) {
        const double value = value_as<T>(out[i]);
        const double bound = rounding * std::fabs(reference[i].x) + reference[i].y / (1 << 17) + 6e-8;
        squares += reference[i].x * reference[i].x;
        if (!(std::fabs(value - reference[i].x) <= bound)) {
            char text[160];
            snprintf(text, sizeof(text), "output %zu is %g, must be %g, within %g", i, value, reference[i].x, bound);
            return text;
        }
    }
    return squares > 0.0 ? "" : "the reference is 0";
}
