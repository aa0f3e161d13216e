// Products of one shape, timed side by side: by our kernels and by others'.

#pragma once

#include "../common/bench.cuh"
#include "../common/graph.cuh"
#include "proof.cuh"

#include <algorithm>
#include <memory>

// One scale for 128 weights of Q4_0, as Marlin has: the first of four blocks gives its own to the others.
static __global__ void share_scales(uint8_t * w, int64_t blocks) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < blocks) {
        memcpy(w + 18 * i, w + 18 * (i / 4 * 4), 2);
    }
}

// Operands that a sample takes in turn, and how many products it has.
struct field {
    std::vector<problem> sets;
    int                  products;

    // Cold: so many sets that weights come from memory. Products of 1.5 ms at 3 TB/s and 400 TFLOPS.
    field(const gemm_shape & s, bool cold) {
        for (int i = 0; i == 0 || (cold && i < cold_sets(sets[0].bytes())); ++i) {
            sets.emplace_back(s);
            sets.back().fill(i);
            if (s.type == weight_type::Q4_0) {
                const int64_t blocks = s.m * s.k / 32;
                share_scales<<<(unsigned) ((blocks + 255) / 256), 256>>>(sets.back().w.as<uint8_t>(), blocks);
                CUDA_CHECK(cudaGetLastError());
            }
        }
        const double least_us = std::max(1e-6 * sets[0].bytes() / 3.0, 2e-6 * s.m * s.n * s.k / 400.0);
        products = std::max((int) sets.size(), std::max(2, std::min(200, (int) (1500.0 / least_us))));
    }
};

// One whose products are timed; the field whose matrices it multiplies outlives it.
struct contestant {
    std::string           name;
    double                looseness;               // its tolerance, in ours
    launch_set_t          multiply;                // a set, into its y
    launch_set_t          timed        = nullptr;  // a part of it; nullptr: all
    std::function<void()> multiply_all = nullptr;  // a whole sample, and waits for it, where nothing can be captured
};

using rival = std::function<std::vector<contestant>(const field &)>;  // none: it does not multiply such matrices

static std::vector<contestant> contestants_of(const std::vector<rung> & rungs, const field & f) {
    std::shared_ptr<std::vector<operand>> operands[2];  // unpacked, and packed
    std::vector<contestant>               all;
    for (const rung & r : rungs) {
        auto & weights = operands[r.of(f.sets[0].shape.type).packed];
        if (!weights) {
            weights = std::make_shared<std::vector<operand>>();
            for (const problem & p : f.sets) {
                weights->push_back(p.weights_of(r));
            }
        }
        const auto scratch = std::make_shared<device_buffer>(f.sets[0].scratch_bytes(r));
        all.push_back({r.name, 1.0, [r, weights, scratch, &f](int set, cudaStream_t stream) {
            CUDA_CHECK(f.sets[set].launch(r, (*weights)[set], *scratch, stream));
        }});
    }
    return all;
}

// Its first rows of the first set, by the reference of these.
static bool is_right(const contestant & c, const problem & p, const product & reference, int64_t rows) {
    tolerance limit = tolerance_of(PLANNED, p.shape, rows, q4_fill::ORDINARY);
    limit.max_abs *= c.looseness;
    limit.nmse    *= c.looseness;
    p.y.poison();
    c.multiply(0, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    const verdict v = judge(p, reference, limit, 0, rows);
    return said(v.passed && p.y.guards_intact(), c.name + " " + p.shape.text(), v.why);
}

static double print_row(const std::string & name, const field & f, const contestant & who, timing t) {
    const gemm_shape &  s = f.sets[0].shape;
    std::vector<double> tflops;
    for (double & us : t.time_us) {
        us /= f.products;
        tflops.push_back(2e-6 * s.m * s.n * s.k / us);
    }
    const char * const cache = f.sets.size() > 1 ? "cold" : "warm";
    const contender    c     = {who.name, f.sets[0].bytes(), nullptr};
    json_line          line;
    line.add("kernel", "w4a16_gemm").add("variant", c.name).add("case", name).add("type", name_of(s.type));
    line.add("m", s.m).add("n", s.n).add("k", s.k).add("cache", cache).add("graph", true).add("tflops", tflops);
    add_samples(line, c, t).print();
    fprintf(stderr, "%-10s %s n=%-5lld %s %-28s %9.2f us +- %.2f %7.1f TFLOPS %7.1f GB/s %5.0f MHz\n", name.c_str(),
            name_of(s.type), (long long) s.n, cache, c.name.c_str(), median(t.time_us), median_deviation(t.time_us),
            median(tflops), median(bandwidth(c, t)), median(t.sm_clock_mhz));
    return median(t.time_us);
}

// A CUDA graph of products, or what waits for them.
static contender sample_of(const contestant & c, const field & f, bool wait) {
    if (c.multiply_all) {
        return {c.name, f.sets[0].bytes(), [&c](int, cudaStream_t) { c.multiply_all(); }};
    }
    const auto enqueue = [&](cudaStream_t stream) {
        for (int product = 0; product < f.products; ++product) {
            (c.timed ? c.timed : c.multiply)(product % (int) f.sets.size(), stream);
        }
    };
    const std::shared_ptr<CUgraphExec_st> graph(captured(enqueue), cudaGraphExecDestroy);
    return {c.name, f.sets[0].bytes(), [graph, wait](int, cudaStream_t stream) {
        CUDA_CHECK(cudaGraphLaunch(graph.get(), stream));
        CUDA_CHECK(wait ? cudaStreamSynchronize(stream) : cudaSuccess);
    }};
}

static constexpr int64_t JUDGED = 512;  // rows, of a product that is timed; the tests judge all

// Microseconds a product of each, NaN of a wrong one. Beside one that can only be waited for, each is.
static std::vector<double> contest(bench & b, const std::string & name, const field & f, const std::vector<contestant> & all,
                                   int64_t most_rows = JUDGED, int samples = SAMPLES) {
    const bool wait = std::any_of(all.begin(), all.end(), [](const contestant & c) { return c.multiply_all != nullptr; });
    const int64_t          rows      = std::min(f.sets[0].shape.m, most_rows);
    const product          reference = reference_of(f.sets[0], 0, rows);
    std::vector<contender> right;
    std::vector<size_t>    places;
    for (size_t i = 0; i < all.size(); ++i) {
        if (is_right(all[i], f.sets[0], reference, rows)) {
            right.push_back(sample_of(all[i], f, wait));
            places.push_back(i);
        }
    }
    const std::vector<timing> timings = b.measure(right, 1, 1, samples);
    std::vector<double>       us(all.size(), NAN);
    for (size_t i = 0; i < right.size(); ++i) {
        us[places[i]] = print_row(name, f, all[places[i]], timings[i]);
    }
    return us;
}
