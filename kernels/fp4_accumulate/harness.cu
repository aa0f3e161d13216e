// ./harness test        exit status 0 if everything is right; each line has its errors, of both ways of adding
// ./harness edges       the part of it that a sanitizer can run
// ./harness bench       JSON lines on stdout, a table on stderr; nothing is timed that is not right
// ./harness one TILES   one launch of 4096 x 128 TILES x 14336, for a profiler

#include "../common/bench.cuh"
#include "../common/verbs.cuh"
#include "proof.cuh"

template <fp4_type type> static bool layers() {
    const bool deep = tile_is_right<type, 128>(2, 1, 28);
    const bool wide = tile_is_right<type, 112>(8, 3, 8);
    return tile_is_right<type, 64>(8, 5, 7) && wide && deep;
}

static bool everything() {
    const bool passed = all_edges();
    const bool nv     = layers<fp4_type::NVFP4>();
    return layers<fp4_type::MXFP4>() && nv && passed;
}

template <typename problem_t, bool outside> static contender timed(const std::vector<problem_t> & sets) {
    return {outside ? "outside" : "accumulate", sets[0].bytes(),
            [&sets](int set, cudaStream_t s) { CUDA_CHECK(sets[set].template launch<outside>(s)); }};
}

template <fp4_type type> static bool bench_type(bench & b) {
    using problem_t = problem<type, 128>;
    if (!tile_is_right<type, 128>(2, 1, 28)) {
        return false;
    }
    std::vector<problem_t> sets;
    for (int i = 0, n = cold_sets(problem_t(32, 4, 28).bytes()); i < n; ++i) {
        sets.emplace_back(32, 4, 28);
        sets[i].fill(i);
    }
    const std::vector<contender> all     = {timed<problem_t, true>(sets), timed<problem_t, false>(sets)};
    const std::vector<timing>    timings = b.measure(all, (int) sets.size(), std::max(12, 2 * (int) sets.size()));
    for (size_t c = 0; c < all.size(); ++c) {
        json_line line;
        line.add("kernel", "fp4_accumulate").add("variant", all[c].name).add("case", sets[0].name()).add("cache", "cold");
        add_samples(line, all[c], timings[c]).print();
        const double us = median(timings[c].time_us), mhz = median(timings[c].sm_clock_mhz);
        fprintf(stderr, "%-45s %-10s %9.2f us +- %.2f %7.1f TFLOPS %6.0f MHz\n", sets[0].name().c_str(), all[c].name.c_str(),
                us, median_deviation(timings[c].time_us), 2e-6 * 4096 * 512 * 14336 / us, mhz);
    }
    return true;
}

static int bench_all() {
    bench      b;
    const bool nv = bench_type<fp4_type::NVFP4>(b);
    return concluded(bench_type<fp4_type::MXFP4>(b) && nv && checker_is_sound());
}

static int one(int tiles) {
    const problem<fp4_type::NVFP4, 128> p(32, tiles, 28);
    p.fill(0);
    CUDA_CHECK(p.launch<false>());
    CUDA_CHECK(cudaDeviceSynchronize());
    return 0;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return concluded(everything()); }},
        {"edges", [](char **) { return concluded(all_edges()); }},
        {"bench", [](char **) { return bench_all(); }},
        {"one TILES", [](char ** is) { return atoi(is[0]) > 0 ? one(atoi(is[0])) : 2; }},
    });
}
