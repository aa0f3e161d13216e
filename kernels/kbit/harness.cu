// ./harness test             exit status 0 if everything is right
// ./harness edges            the part of it that a sanitizer can run
// ./harness bench [CUBLAS]   JSON lines on stdout, a table on stderr; nothing is timed that is not right
//                            CUBLAS: a libcublas.so, with which f16 weights and the router's other way are timed beside
// ./harness one K M          one product with 28672 x 8192 weights, for a profiler

#include "../common/copy.cuh"
#include "../common/cublas.cuh"
#include "../common/bench.cuh"
#include "../common/graph.cuh"
#include "../common/verbs.cuh"
#include "proof.cuh"

#include <memory>

// -- test --

// 100 times, from a graph, and beside another stream: equal bits.
template <typename T> static bool repeats(const shape & s) {
    problem<T> p(s), other(s);
    p.fill(1, true);
    other.fill(2, true);
    const kbit_plan             plan = p.plan();
    const std::vector<uint16_t> once = p.multiply(plan), beside = other.multiply(plan);
    const std::string           why  = wrong<T>(once, p.reference());
    bool                        same = true;
    for (int i = 0; i < 100; ++i) {
        same = same && p.multiply(plan) == once;
    }
    bool passed = said(why.empty(), s.name() + " " + name_of<T>() + ": the product", why);
    passed = said(same, s.name() + " " + name_of<T>() + ": 100 times, equal bits") && passed;

    cudaStream_t streams[2];
    for (cudaStream_t & stream : streams) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    const launch_set_t graph = graphed(1, [&](int, cudaStream_t stream) { CUDA_CHECK(kbit_gemm_cuda<T>(p.args(), plan, stream)); });
    p.c.poison();
    for (int i = 0; i < 100; ++i) {
        graph(0, streams[0]);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    passed = said(p.c.template host<uint16_t>() == once, s.name() + " " + name_of<T>() + ": 100 replays, equal bits") && passed;
    for (int i = 0; i < 100; ++i) {
        CUDA_CHECK(kbit_gemm_cuda<T>(p.args(), plan, streams[0]));
        CUDA_CHECK(kbit_gemm_cuda<T>(other.args(), plan, streams[1]));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    passed = said(p.c.template host<uint16_t>() == once && other.c.template host<uint16_t>() == beside,
                  s.name() + " " + name_of<T>() + ": two streams, equal bits") && passed;
    for (cudaStream_t & stream : streams) {
        CUDA_CHECK(cudaStreamDestroy(stream));
    }
    return passed;
}

static bool all_edges() {
    bool passed = general();
    for (int k = 2; k <= 5; ++k) {
        passed = edges(k) && passed;
    }
    return passed;
}

static bool everything() {
    bool passed = all_edges();
    for (int k = 2; k <= 5; ++k) {
        for (const int64_t m : {1, 3, 8, 16, 31, 64, 129, 257, 1024}) {
            passed = multiplies<__half>({k, m, 1032, 4096}, {}, true) && passed;
        }
        passed = multiplies<__nv_bfloat16>({k, 5, 4096, 14336}, {}, true) && passed;
        passed = repeats<__half>({k, 16, 4096, 4096}) && passed;
        passed = repeats<__nv_bfloat16>({k, 40, 768, 14336}) && passed;
    }
    return passed;
}

// -- bench --

static double row(const shape & s, const contender & c, const timing & t, double copy_gb_s) {
    json_line line;
    line.add("kernel", "kbit").add("variant", c.name).add("bits", (int64_t) s.k);
    line.add("m", s.n).add("n", s.m).add("k", s.k_dim).add("cache", "cold");
    add_samples(line, c, t).print();
    const double us = median(t.time_us);
    fprintf(stderr, "%-22s %-24s %8.2f us +- %.2f %7.1f GB/s %5.1f %% of copy %6.0f MHz\n", s.name().c_str(), c.name.c_str(), us,
            median_deviation(t.time_us), median(bandwidth(c, t)), 100 * median(bandwidth(c, t)) / copy_gb_s, median(t.sm_clock_mhz));
    return us;
}

using problems = std::vector<std::unique_ptr<problem<__half>>>;

// So many sets of weights that each is read from memory.
static problems sets_of(const shape & s) {
    problems all;
    for (int i = 0; i == 0 || i < cold_sets(all[0]->tiles.size()); ++i) {
        all.push_back(std::make_unique<problem<__half>>(s));
        all[i]->fill(1 + i, true);
    }
    return all;
}

struct library_way {
    const cublas *             blas;
    std::vector<device_buffer> weights;  // f16, as the codes have them
    device_buffer              y;

    library_way(const cublas * blas, const problems & sets) : blas(blas), y(sets[0]->s.m * sets[0]->s.n * 4) {
        const shape & s = sets[0]->s;
        for (int i = 0; i < cold_sets(s.n * s.k_dim * 2); ++i) {
            weights.emplace_back(s.n * s.k_dim * 2);
            unpack(*sets[i % sets.size()], i, nullptr);
        }
    }

    void unpack(const problem<__half> & p, int set, cudaStream_t stream) const {
        CUDA_CHECK(kbit_unpack_cuda(p.tiles.as<uint32_t>(), p.scales.as<uint8_t>(), p.codebook.as<float>(), p.s.k, p.s.n, p.s.k_dim,
                                    weights[set % weights.size()].as<__half>(), stream));
    }

    void multiply(const problem<__half> & p, int set, cudaStream_t stream) const {
        blas->multiply(weights[set % weights.size()].as<__half>(), p.a.as<__half>(), y.as<float>(), (int) p.s.n, (int) p.s.m,
                       (int) p.s.k_dim, stream);
    }
};

static bool bench_product(bench & b, const shape & s, double copy_gb_s, const cublas * blas) {
    const problems    sets = sets_of(s);
    const kbit_plan   plan = sets[0]->plan();
    const std::string why  = wrong<__half>(sets[0]->multiply(plan), sets[0]->reference());
    if (!said(why.empty(), s.name() + ": the product", why)) {
        return false;
    }
    const int64_t          small = sets[0]->a.size() + sets[0]->c.size();
    std::vector<contender> all;
    all.push_back({"fused", sets[0]->tiles.size() + sets[0]->scales.size() + small, [&](int set, cudaStream_t stream) {
                       CUDA_CHECK(kbit_gemm_cuda<__half>(sets[set % sets.size()]->args(), plan, stream));
                   }});
    std::unique_ptr<library_way> library;
    if (blas != nullptr) {
        library = std::make_unique<library_way>(blas, sets);
        all.push_back({"cuBLAS f16", s.n * s.k_dim * 2 + small, [&](int set, cudaStream_t stream) {
                           library->multiply(*sets[0], set, stream);
                       }});
        all.push_back({"dequantise and cuBLAS", all[0].bytes, [&](int set, cudaStream_t stream) {
                           library->unpack(*sets[set % sets.size()], set, stream);
                           library->multiply(*sets[0], set, stream);
                       }});
    }
    const int                 n_sets  = (int) sets.size();
    const std::vector<timing> timings = b.measure(all, n_sets, std::max(12, 2 * n_sets));
    std::vector<double>       us;
    for (size_t i = 0; i < all.size(); ++i) {
        us.push_back(row(s, all[i], timings[i], copy_gb_s));
    }
    if (blas != nullptr) {
        fprintf(stderr, "%-22s %d parts; %.2f times cuBLAS f16, %.2f times dequantise and cuBLAS\n", s.name().c_str(), plan.parts,
                us[1] / us[0], us[2] / us[0]);
    }
    return true;
}

// K=4, 16 tokens: the published inner loop, each weight read from memory once, beside ours.
static bool bench_published(bench & b, const shape & s, double copy_gb_s) {
    const problems                              sets = sets_of(s);
    std::vector<std::unique_ptr<published_way>> ways;
    for (const auto & p : sets) {
        ways.push_back(std::make_unique<published_way>(*p, 2));
    }
    ways[0]->multiply(nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::string why = wrong<__half>(sets[0]->c.host<uint16_t>(), sets[0]->reference());
    if (!said(why.empty(), s.name() + ": the published inner loop", why)) {
        return false;
    }
    const kbit_plan              plan  = sets[0]->plan();
    const int64_t                bytes = sets[0]->tiles.size() + sets[0]->scales.size() + sets[0]->a.size() + sets[0]->c.size();
    const std::vector<contender> all   = {
        {"fused", bytes, [&](int set, cudaStream_t stream) { CUDA_CHECK(kbit_gemm_cuda<__half>(sets[set]->args(), plan, stream)); }},
        {"published", bytes, [&](int set, cudaStream_t stream) { ways[set]->multiply(stream); }},
    };
    const std::vector<timing> timings = b.measure(all, (int) sets.size(), std::max(12, 2 * (int) sets.size()));
    const double              ours = row(s, all[0], timings[0], copy_gb_s), theirs = row(s, all[1], timings[1], copy_gb_s);
    fprintf(stderr, "%-22s %.2f times the published inner loop\n", s.name().c_str(), theirs / ours);
    return true;
}

static bool bench_dequantise(bench & b, int k, double copy_gb_s) {
    const shape                s    = {k, 1, 4096, 14336};
    const problems             sets = sets_of(s);
    std::vector<device_buffer> out;
    for (size_t i = 0; i < sets.size(); ++i) {
        out.emplace_back(s.n * s.k_dim * 2);
    }
    const int64_t                bytes = sets[0]->planes.size() + sets[0]->absmax.size() + s.n * s.k_dim * 2;
    const std::vector<contender> all   = {
        {"dequantise", bytes, [&](int set, cudaStream_t stream) {
             CUDA_CHECK(kbit_dequantise_cuda(sets[set]->planes.as<uint32_t>(), sets[set]->absmax.as<uint8_t>(),
                                             sets[set]->codebook.as<float>(), k, s.n * s.k_dim, out[set].as<__half>(), stream));
         }},
        {"unpack", bytes, [&](int set, cudaStream_t stream) {
             CUDA_CHECK(kbit_unpack_cuda(sets[set]->tiles.as<uint32_t>(), sets[set]->scales.as<uint8_t>(),
                                         sets[set]->codebook.as<float>(), k, s.n, s.k_dim, out[set].as<__half>(), stream));
         }},
    };
    const std::vector<timing> timings = b.measure(all, (int) sets.size(), std::max(12, 2 * (int) sets.size()));
    for (size_t i = 0; i < all.size(); ++i) {
        row(s, all[i], timings[i], copy_gb_s);
    }
    return true;
}

static int bench_all(const char * library) {
    bench                         b;
    const std::unique_ptr<cublas> blas = library ? std::make_unique<cublas>(library) : nullptr;
    const double                  copy = bench_copy(b, [](const matrix_shape &, const contender & c, const timing & t) {
        const double gb_s = median(bandwidth(c, t));
        fprintf(stderr, "copy of 1 GiB: %.0f GB/s\n", gb_s);
        return gb_s;
    });
    bool passed = true;
    for (int k = 2; k <= 5; ++k) {
        passed = passed && bench_dequantise(b, k, copy);
        for (const int64_t m : {1, 4, 8, 16}) {
            passed = passed && bench_product(b, {k, m, k < 4 ? 57344 : 28672, 8192}, copy, nullptr);  // 125 MB and more
        }
    }
    for (const int64_t m : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096}) {
        passed = passed && bench_product(b, {4, m, 14336, 4096}, copy, blas.get());
    }
    passed = passed && bench_published(b, {4, 16, 28672, 8192}, copy);
    for (const int64_t m : {1, 16}) {
        passed = passed && bench_product(b, {4, m, 4096, 14336}, copy, blas.get());
        passed = passed && bench_product(b, {4, m, 4096, 4096}, copy, blas.get());
    }
    return concluded(passed);
}

static int one(int k, int64_t m) {
    problem<__half> p({k, m, 28672, 8192});
    p.fill(1, true);
    return wrong<__half>(p.multiply(), p.reference()).empty() ? 0 : 1;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return concluded(everything()); }},
        {"edges", [](char **) { return concluded(all_edges()); }},
        {"bench [CUBLAS]", [](char ** is) { return bench_all(is[0]); }},
        {"one K M", [](char ** is) { return atoi(is[0]) > 0 && atoll(is[1]) > 0 ? one(atoi(is[0]), atoll(is[1])) : 2; }},
    });
}
