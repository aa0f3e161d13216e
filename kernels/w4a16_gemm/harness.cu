// ./harness test            exit status 0 if everything is right
// ./harness edges           the part of `test` that a sanitizer can run
// ./harness bench           JSON lines on stdout, a table on stderr; a wrong output is not timed
// ./harness tune            every rung at every size: right or not, and how long
// ./harness one TYPE M N K  one launch of each table, for a profiler or a sanitizer

#include "../common/bench.cuh"
#include "../common/verbs.cuh"
#include "proof.cuh"
#include "tune.cuh"

#include <random>

// -- test --

static bool edges() {
    bool passed = said(checker_is_sound(), "the checker fails what is wrong");
    passed      = references_agree() && passed;
    for (const weight_type type : TYPES) {
        for (const rung & r : fragment_rungs()) {
            passed = wrong_arguments_are_refused(r, type) && passed;
            passed = edges_are_right(r, type) && passed;
        }
        for (const rung & r : wgmma_rungs()) {
            passed = wrong_arguments_are_refused(r, type) && passed;
        }
        passed = impossible_plans_are_refused(type) && passed;
        passed = wide_tiles_fill_the_gpu(type) && passed;
        passed = wrong_packing_is_refused(type) && passed;
        for (const std::vector<rung> & packed : {packed_wgmma_rungs(), packed_mma_rungs()}) {
            for (const rung & r : packed) {
                passed = wrong_arguments_are_refused(r, type) && passed;
            }
        }
        for (const rung & r : planned_rungs()) {
            passed = edges_are_right(r, type) && passed;
            passed = switches_are_right(r, type, 300, 1280) && passed;
        }
    }
    passed = columns_are_right() && passed;
    return undoing_is_right() && passed;
}

static bool accuracy() {
    const uint64_t seed   = std::random_device()();
    bool           passed = true;
    fprintf(stderr, "inputs of seed %llu\n", (unsigned long long) seed);
    for (const weight_type type : TYPES) {
        for (const distribution how : {distribution::UNIFORM, distribution::GAUSSIAN}) {
            for (const rung & r : planned_rungs()) {
                passed = nearer_than_mmq(r, {type, 128, 64, 4096}, how, seed) && passed;
            }
        }
    }
    return passed;
}

static bool everything() {
    bool passed = edges();
    passed      = accuracy() && passed;
    for (const weight_type type : TYPES) {
        for (const rung & r : planned_rungs()) {
            passed = layers_are_right(r, type) && passed;
            for (const int64_t n : {9, 129, 512}) {
                passed = repeats_agree(r, {type, 1024, n, 4096}, 100) && passed;
            }
        }
        for (const rung & r : rungs_here()) {
            passed = switches_are_right(r, type, 4096, 14336) && passed;
            passed = stress_is_right(r, type) && passed;
        }
    }
    return passed;
}

// -- bench --

static void print_row(
        const std::string & name, const gemm_shape & s, const char * cache, const contender & c, const timing & t) {
    std::vector<double> tflops;
    for (const double us : t.time_us) {
        tflops.push_back(2e-6 * s.m * s.n * s.k / us);
    }
    json_line line;
    line.add("kernel", "w4a16_gemm")
        .add("variant", c.name)
        .add("case", name)
        .add("type", name_of(s.type))
        .add("m", s.m)
        .add("n", s.n)
        .add("k", s.k)
        .add("cache", cache)
        .add("tflops", tflops);
    add_samples(line, c, t).print();
    fprintf(stderr, "%-8s %s n=%-5lld %s %-6s %10.2f us +- %.2f %8.1f TFLOPS %8.1f GB/s %6.0f MHz\n", name.c_str(),
            name_of(s.type), (long long) s.n, cache, c.name.c_str(), median(t.time_us), median_deviation(t.time_us),
            median(tflops), median(bandwidth(c, t)), median(t.sm_clock_mhz));
}

// Returns false, without timing, if the output is wrong.
static bool bench_shape(bench & b, const std::string & name, const gemm_shape & s, const rung & r) {
    std::vector<problem> sets;
    std::vector<operand> weights;
    for (int i = 0; i == 0 || i < cold_sets(sets[0].bytes()); ++i) {
        sets.emplace_back(s);
        sets[i].fill(i);
        weights.push_back(sets[i].weights_of(r));
    }
    if (!right(sets[0], r, " " + name)) {
        return false;
    }
    const device_buffer scratch(sets[0].scratch_bytes(r));
    const contender     c = {r.name, sets[0].bytes(), [&](int set, cudaStream_t stream) {
                                 CUDA_CHECK(sets[set].launch(r, weights[set], scratch, stream));
                             }};
    print_row(name, s, "cold", c, b.measure({c}, (int) sets.size(), std::max(12, 2 * (int) sets.size()))[0]);
    print_row(name, s, "warm", c, b.measure({c}, 1, 12)[0]);
    return true;
}

static int bench_all() {
    if (!checker_is_sound()) {
        return 1;
    }
    bench b;
    bool  all = true;
    for (const weight_type type : TYPES) {
        for (const int64_t n : {16, 32, 64, 128, 256, 512, 1024, 2048}) {
            for (const rung & r : planned_rungs()) {
                all = bench_shape(b, "ffn_down", {type, 4096, n, 14336}, r) && all;
            }
        }
        for (size_t i = 1; i < LAYERS.size(); ++i) {
            for (const int64_t n : {16, 128, 512}) {
                for (const rung & r : rungs_here()) {
                    all = bench_shape(b, LAYERS[i].name, {type, LAYERS[i].rows, n, LAYERS[i].cols}, r) && all;
                }
            }
        }
    }
    return all ? 0 : 1;
}

static int one(const std::string & type, int64_t m, int64_t n, int64_t k) {
    for (const weight_type each : TYPES) {
        if (type == name_of(each)) {
            bool all = true;
            for (const rung & r : planned_rungs()) {
                all = right({each, m, n, k}, r, 1) && all;
            }
            return all ? 0 : 1;
        }
    }
    fprintf(stderr, "TYPE is q4_0 or q4_K, not %s\n", type.c_str());
    return 2;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return concluded(everything()); }},
        {"edges", [](char **) { return concluded(edges()); }},
        {"bench", [](char **) { return bench_all(); }},
        {"tune", [](char **) { return concluded(tune()); }},
        {"one TYPE M N K", [](char ** is) { return one(is[0], atoll(is[1]), atoll(is[2]), atoll(is[3])); }},
    });
}
