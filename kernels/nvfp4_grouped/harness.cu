// ./harness test             exit status 0 if everything is right
// ./harness edges            the part of it that a sanitizer can run
// ./harness bench [CUBLAS]   JSON lines on stdout, a table on stderr; nothing is timed that is not right
//                            CUBLAS: a libcublas.so, with which the materialising way is timed beside
// ./harness tune             every configuration at every number of tokens: right or not, and how long
// ./harness one TOKENS       one product, for a profiler

#include "../common/bench.cuh"
#include "../common/verbs.cuh"
#include "rival.cuh"

#include <memory>

// 128 experts of a 30B-A3B, of which a token uses 8. test-backend-ops has a row of activations for each slot, as a model's last
// product; gate and up share one. Stock's times: test-backend-ops at the pin on an H200, weights warm, 8 slots.
struct bench_case {
    int64_t tokens;
    double  stock_us, target_us;
};

static const std::vector<bench_case> CASES = {{32, 203, 36}, {128, 395, 48}, {512, 436, 70}, {2048, 789, 190}};

static moe_shape shape_of(const bench_case & c, int64_t slots) {
    return {128, 8, 768, 2048, c.tokens, slots};
}

static rung planned_for(const problem & p) {
    const device_buffer      none(16);
    const nvfp4_grouped_plan plan = nvfp4_grouped_plan_of(p.args(none), this_device());
    if (plan.kernel == nullptr) {
        fprintf(stderr, "this GPU has no plan\n");
        exit(1);
    }
    return {"planned", *plan.kernel, false};
}

static problem problem_of(const moe_shape & s, uint64_t seed) {
    problem p(s);
    p.fill(seed);
    p.route(routed_evenly(s, seed));
    return p;
}

// -- test --

static bool edges() {
    bool passed = said(checker_is_sound(), "the checker fails what is wrong");
    for (const rung & r : rungs_here()) {
        passed = rung_is_right(r, false) && passed;
    }
    return plans_are_right() && passed;
}

static bool everything() {
    bool passed = edges();
    for (const bench_case & c : CASES) {
        for (const int64_t slots : {1, 8}) {
            const problem p = problem_of(shape_of(c, slots), c.tokens);
            passed = right(p, planned_for(p), "", c.tokens * 8 / 64) && passed;
        }
    }
    // the skewest routing, on what the largest tiles take
    problem p({128, 1, 768, 2048, 2048});
    p.fill(1);
    p.route(std::vector<int32_t>(2048, 77));
    return right(p, planned_for(p), ", all on one expert", 64) && passed;
}

// -- bench --

static double print_row(const moe_shape & s, const char * cache, const contender & c, const timing & t) {
    const double        flop = 2.0 * s.tokens * s.used * s.m * s.k;
    std::vector<double> tflops;
    for (const double us : t.time_us) {
        tflops.push_back(1e-6 * flop / us);
    }
    json_line line;
    line.add("kernel", "nvfp4_grouped")
        .add("variant", c.name)
        .add("case", s.slots == 1 ? "gate_up" : "down")
        .add("experts", s.experts)
        .add("used", s.used)
        .add("m", s.m)
        .add("k", s.k)
        .add("n", s.tokens)
        .add("cache", cache)
        .add("tflops", tflops);
    add_samples(line, c, t).print();
    const double us = median(t.time_us);
    fprintf(stderr, "tokens=%-5lld slots=%lld %s %-22s %9.2f us +- %.2f %7.1f TFLOPS %7.1f GB/s %6.0f MHz\n", (long long) s.tokens,
            (long long) s.slots, cache, c.name.c_str(), us, median_deviation(t.time_us), median(tflops),
            median(bandwidth(c, t)), median(t.sm_clock_mhz));
    return us;
}

static bool bench_shape(bench & b, const bench_case & c, const moe_shape & s, const cublas * blas) {
    std::vector<problem> sets;
    for (int i = 0; i == 0 || i < cold_sets(sets[0].bytes()); ++i) {
        sets.push_back(problem_of(s, i + 1));
    }
    const rung          planned = planned_for(sets[0]);
    const device_buffer scratch(scratch_of(planned, sets[0]));
    if (!right(sets[0], planned, "", s.tokens * s.used / 64)) {
        return false;
    }
    std::vector<contender> all = {
        {"planned", sets[0].bytes(), [&](int set, cudaStream_t stream) {
             CUDA_CHECK(planned.kernel.launch(sets[set].args(scratch), blocks_of(planned), stream));
         }},
        {"route and convert", sets[0].x.size(), [&](int set, cudaStream_t stream) {
             CUDA_CHECK(planned.kernel.prepare(sets[set].args(scratch), stream));
         }},
    };
    std::vector<std::unique_ptr<materialised>> rivals;
    for (size_t i = 0; blas && i < sets.size(); ++i) {
        rivals.push_back(std::make_unique<materialised>(sets[i], *blas));
    }
    if (blas && !rivals[0]->is_right()) {
        return false;
    }
    if (blas) {
        all.push_back({"materialised", sets[0].bytes(), [&](int set, cudaStream_t stream) { rivals[set]->multiply(stream); }});
    }
    for (const int n_sets : {(int) sets.size(), 1}) {
        const std::vector<timing> timings = b.measure(all, n_sets, std::max(12, 2 * n_sets));
        const double              us      = print_row(s, n_sets == 1 ? "warm" : "cold", all[0], timings[0]);
        for (size_t i = 1; i < all.size(); ++i) {
            print_row(s, n_sets == 1 ? "warm" : "cold", all[i], timings[i]);
        }
        if (n_sets == 1 && s.slots == s.used) {
            fprintf(stderr, "stock %.0f us, %.2f times; target %.0f us: %s\n", c.stock_us, c.stock_us / us, c.target_us,
                    us <= c.target_us ? "reached" : "missed");
        }
    }
    return true;
}

static int bench_all(const char * library) {
    if (!checker_is_sound()) {
        return 1;
    }
    bench                   b;
    bool                    all  = true;
    std::unique_ptr<cublas> blas = library ? std::make_unique<cublas>(library) : nullptr;
    for (const bench_case & c : CASES) {
        for (const int64_t slots : {8, 1}) {
            all = bench_shape(b, c, shape_of(c, slots), blas.get()) && all;
        }
    }
    return all ? 0 : 1;
}

// -- tune --

static bool tune_shape(bench & b, const moe_shape & s) {
    const problem p   = problem_of(s, 1);
    bool          all = true;
    for (const rung & r : rungs_here()) {
        const device_buffer scratch(scratch_of(r, p));
        if (!right(p, r, "", s.tokens * 8 / 16)) {
            all = false;
            continue;
        }
        const contender one = {r.name, p.bytes(), [&](int, cudaStream_t stream) {
                                   CUDA_CHECK(r.kernel.launch(p.args(scratch), blocks_of(r), stream));
                               }};
        print_row(s, "warm", one, b.measure({one}, 1, 12)[0]);
    }
    return all;
}

static bool tune() {
    bench b;
    bool  all = true;
    for (const bench_case & c : CASES) {
        for (const int64_t slots : {8, 1}) {
            all = tune_shape(b, shape_of(c, slots)) && all;
        }
    }
    return all;
}

static int one(int64_t tokens) {
    const problem p = problem_of(shape_of({tokens, 0, 0}, 8), 1);
    return right(p, planned_for(p), "", std::max<int64_t>(1, tokens * 8 / 64)) ? 0 : 1;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return concluded(everything()); }},
        {"edges", [](char **) { return concluded(edges()); }},
        {"bench [CUBLAS]", [](char ** is) { return bench_all(is[0]); }},
        {"tune", [](char **) { return concluded(tune()); }},
        {"one TOKENS", [](char ** is) { return atoll(is[0]) > 0 ? one(atoll(is[0])) : 2; }},
    });
}
