// ./harness test            exit status 0 if everything is right
// ./harness edges           the part of `test` that a sanitizer can run
// ./harness bench [LIBRARY] [LIBRARY] [LIBRARY]
//                           JSON lines on stdout, a table on stderr; a wrong output is not timed. LIBRARY: Marlin's,
//                           cuBLAS or libggml-cuda.so, whose products are timed beside ours: see rivals.cuh
// ./harness shapes LIBRARY  the products of four models, their weights in memory, beside those of one such
// ./harness tune            every rung at every size, weights in memory
// ./harness one TYPE M N K  one launch of each table, for a profiler or a sanitizer

#include "../common/verbs.cuh"
#include "rivals.cuh"
#include "tune.cuh"

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

static bool everything() {
    bool passed = edges();
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

// Returns false, with no time of it, if an output is wrong.
static bool bench_shape(bench & b, const std::string & name, const gemm_shape & s, const std::vector<rung> & rungs,
                        const std::vector<rival> & rivals) {
    bool all = true;
    for (const bool cold : {true, false}) {
        const field             f(s, cold);
        std::vector<contestant> contestants = contestants_of(rungs, f);
        for (const rival & r : rivals) {
            const std::vector<contestant> more = r(f);
            contestants.insert(contestants.end(), more.begin(), more.end());
        }
        for (const double us : contest(b, name, f, contestants)) {
            all = us > 0.0 && all;
        }
    }
    return all;
}

static int bench_all(char ** libraries) {
    if (!checker_is_sound()) {
        return 1;
    }
    std::vector<rival> rivals;
    for (; *libraries; ++libraries) {
        rivals.push_back(rival_of(*libraries));
    }
    bench b;
    bool  all = true;
    for (const weight_type type : TYPES) {
        for (const int64_t n : {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048}) {
            all = bench_shape(b, "ffn_down", {type, 4096, n, 14336}, rivals.empty() ? planned_rungs() : rungs_here(), rivals) && all;
        }
        for (size_t i = 1; i < LAYERS.size() && rivals.empty(); ++i) {
            for (const int64_t n : {16, 128, 512}) {
                all = bench_shape(b, LAYERS[i].name, {type, LAYERS[i].rows, n, LAYERS[i].cols}, rungs_here(), {}) && all;
            }
        }
    }
    return all ? 0 : 1;
}

// -- shapes --

// A model's products, of one layer; those that another has too are not repeated.
static const std::vector<matrix_shape> PRODUCTS = {
    {"llama-3-8b q", 4096, 4096},   {"llama-3-8b k", 1024, 4096},   {"llama-3-8b up", 14336, 4096}, {"llama-3-8b down", 4096, 14336},
    {"qwen3-8b up", 12288, 4096},   {"qwen3-8b down", 4096, 12288}, {"qwen3-32b q", 8192, 5120},    {"qwen3-32b k", 1024, 5120},
    {"qwen3-32b out", 5120, 8192},  {"qwen3-32b up", 25600, 5120},  {"qwen3-32b down", 5120, 25600}, {"qwen3-1.7b q", 2048, 2048},
    {"qwen3-1.7b k", 1024, 2048},   {"qwen3-1.7b up", 6144, 2048},  {"qwen3-1.7b down", 2048, 6144},
};

// How many times a rival's speed is ours, over products.
struct speedup {
    double      logarithms = 0.0, least = INFINITY;
    int         count = 0;
    std::string where;

    void add(double times, const std::string & of) {
        logarithms += std::log(times);
        ++count;
        if (times < least) {
            least = times;
            where = of;
        }
    }

    void print(const char * of) const {
        fprintf(stderr, "%s: %.2f times in the geometric mean of %d, %.2f at least (%s)\n", of, std::exp(logarithms / count),
                count, least, where.c_str());
    }
};

// Few samples and a part of the rows judged: 360 products in two minutes of an H200.
static int shapes(const char * path) {
    const rival             other = rival_of(path);
    const std::vector<rung> ours  = rungs_here();
    std::vector<speedup>    few(ours.size()), many(ours.size());
    bench                   b;
    bool                    all = true;
    for (const weight_type type : TYPES) {
        for (const matrix_shape & of : PRODUCTS) {
            for (const int64_t n : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048}) {
                const gemm_shape        s = {type, of.rows, n, of.cols};
                const field             f(s, true);
                std::vector<contestant> contestants = contestants_of(ours, f);
                for (const contestant & each : other(f)) {
                    contestants.push_back(each);
                }
                const std::vector<double> us = contest(b, of.name, f, contestants, 128, 5);
                if (us.size() == ours.size()) {
                    continue;
                }
                for (size_t i = 0; i < ours.size(); ++i) {
                    const double times = us[ours.size()] / us[i];
                    all = times > 0.0 && all;
                    (n <= 8 ? few : many)[i].add(times, s.text());
                }
            }
        }
    }
    for (size_t i = 0; i < ours.size(); ++i) {
        few[i].print((ours[i].name + ", up to 8 columns").c_str());
        many[i].print((ours[i].name + ", more columns").c_str());
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
        {"bench [LIBRARY] [LIBRARY] [LIBRARY]", bench_all},
        {"shapes LIBRARY", [](char ** is) { return shapes(is[0]); }},
        {"tune", [](char **) { return concluded(tune()); }},
        {"one TYPE M N K", [](char ** is) { return one(is[0], atoll(is[1]), atoll(is[2]), atoll(is[3])); }},
    });
}
