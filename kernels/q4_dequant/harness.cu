// ./harness test               exit status 0 if everything is right
// ./harness edges              the part of it that a sanitizer can run
// ./harness bench [LIBRARY]    JSON lines on stdout, a table on stderr; nothing is timed that is not right
//                              LIBRARY: libcublas.so.13, whose products of what we dequantise are timed as well
// ./harness rival LIBRARY      those products alone
// ./harness one TYPE ROWS COLS one launch, for a profiler

#include "../common/copy.cuh"
#include "../common/verbs.cuh"
#include "proof.cuh"
#include "rival.cuh"

// -- test --

static bool edges() {
    bool passed = said(checker_is_sound(), "the checker fails what is wrong");
    passed      = references_agree() && passed;
    passed      = every_code_is_right() && passed;
    for (const weight_type type : TYPES) {
        passed = wrong_arguments_are_refused(type) && passed;
        passed = edges_are_right(type, around(Q4_DEQUANT_TILE / block_size(type))) && passed;
        passed = wild_scales_are_right(type, 1 << 20) && passed;
    }
    return passed;
}

static bool everything() {
    bool passed = edges();
    for (const weight_type type : TYPES) {
        passed = layers_are_right(type) && passed;
        passed = stress_is_right(type) && passed;
        passed = two_launches_agree(type, LAYERS[3].rows * LAYERS[3].cols) && passed;
    }
    return passed;
}

// -- bench --

// Returns GB/s.
static double print_row(const char * type, const matrix_shape & shape, const char * cache, const contender & c,
                        const timing & t) {
    const double gb_s = median(bandwidth(c, t));
    json_line    line;
    line.add("kernel", "q4_dequant")
        .add("variant", c.name)
        .add("case", shape.name)
        .add("type", type)
        .add("rows", shape.rows)
        .add("cols", shape.cols)
        .add("cache", cache);
    add_samples(line, c, t).print();
    fprintf(stderr, "%-8s %-4s %s %-6s %9.2f us +- %.2f %8.1f GB/s %6.0f MHz\n", shape.name, type, cache,
            c.name.c_str(), median(t.time_us), median_deviation(t.time_us), gb_s, median(t.sm_clock_mhz));
    return gb_s;
}

// False, and nothing timed, if the output is wrong.
static bool bench_shape(bench & b, weight_type type, const matrix_shape & shape, double copy_gb_s) {
    std::vector<problem>       sets;
    std::vector<device_buffer> from, to;
    for (int i = 0; i == 0 || i < cold_sets(sets[0].bytes()); ++i) {
        sets.emplace_back(type, shape.rows * shape.cols);
        sets[i].fill(i);
        from.emplace_back(sets[i].bytes() / 2);
        to.emplace_back(sets[i].bytes() / 2);
    }
    if (!right(sets[0], shape.name, shape.rows)) {
        return false;
    }
    const auto launch = [&](int set, cudaStream_t s) { CUDA_CHECK(sets[set].launch(s)); };
    const std::vector<contender> all = {copy_of(from, to), {"tile", sets[0].bytes(), launch}};
    for (const int n_sets : {(int) sets.size(), 1}) {
        const std::vector<timing> timings = b.measure(all, n_sets, std::max(12, 2 * n_sets));
        std::vector<double>       gb_s;
        for (size_t c = 0; c < all.size(); ++c) {
            gb_s.push_back(print_row(name_of(type), shape, n_sets == 1 ? "warm" : "cold", all[c], timings[c]));
        }
        fprintf(stderr, "%.1f %% of the 1 GiB copy, %.1f %% of a copy of as many bytes\n", 100 * gb_s[1] / copy_gb_s,
                100 * gb_s[1] / gb_s[0]);
    }
    return true;
}

// -- rival --

static void print_product(const rival_problem & p, int64_t n, int version, const contender & c, const timing & t) {
    const double        flop = 2.0 * p.m * n * p.k;
    std::vector<double> tflops;
    for (const double us : t.time_us) {
        tflops.push_back(1e-6 * flop / us);
    }
    const bool multiplies = c.name == "product" || c.name == "gemm";
    json_line  line;
    line.add("kernel", "q4_dequant")
        .add("variant", "cublas " + c.name)
        .add("type", name_of(p.weights.type))
        .add("m", p.m)
        .add("n", n)
        .add("k", p.k)
        .add("cache", "warm")
        .add("cublas", (int64_t) version);
    if (multiplies) {
        line.add("tflops", tflops);
    }
    add_samples(line, c, t).print();
    fprintf(stderr, "%s n=%-5lld %-10s %9.2f us +- %.2f %8.1f TFLOPS %8.1f GB/s %6.0f MHz\n", name_of(p.weights.type),
            (long long) n, c.name.c_str(), median(t.time_us), median_deviation(t.time_us),
            multiplies ? median(tflops) : 0.0, median(bandwidth(c, t)), median(t.sm_clock_mhz));
}

// The whole, then its parts. False, and nothing timed, if the product is wrong.
static bool rival_shape(bench & b, const cublas & blas, const rival_problem & p, const product & reference, int64_t n) {
    const verdict v    = p.judge(blas, reference, n);
    const int64_t read = p.weights.bytes(), converted = p.convert_bytes(n), multiplied = p.gemm_bytes(n);
    if (!said(v.passed, std::string("cublas ") + name_of(p.weights.type) + " n=" + std::to_string(n), v.why)) {
        return false;
    }
    const std::vector<contender> all = {
        {"product", read + converted + multiplied, [&, n](int, cudaStream_t s) { p.multiply(blas, n, s); }},
        {"dequantise", read, [&](int, cudaStream_t s) { CUDA_CHECK(p.weights.launch(s)); }},
        {"convert", converted, [&, n](int, cudaStream_t s) { p.convert(n, s); }},
        {"gemm", multiplied, [&, n](int, cudaStream_t s) { p.gemm(blas, n, s); }},
    };
    const std::vector<timing> timings = b.measure(all, 1, 12);
    for (size_t c = 0; c < all.size(); ++c) {
        print_product(p, n, blas.version(), all[c], timings[c]);
    }
    return true;
}

// One reference for all n: the columns of fewer are the first of more.
static bool rival(bench & b, const char * library) {
    const cublas blas(library);
    bool         all = true;
    for (const weight_type type : TYPES) {
        const rival_problem p(type, 4096, 2048, 14336);
        const product       reference =
            multiply_on_device(type, p.weights.x.as<uint8_t>(), p.x.as<float>(), p.m, p.n_max, p.k);
        for (const int64_t n : {16, 32, 64, 128, 256, 512, 1024, 2048}) {
            all = rival_shape(b, blas, p, reference, n) && all;
        }
    }
    return all;
}

static int bench_all(const char * library) {
    if (!checker_is_sound()) {
        return 1;
    }
    bench        b;
    bool         all       = true;
    const double copy_gb_s = bench_copy(b, [](const matrix_shape & bytes, const contender & c, const timing & t) {
        return print_row("u8", bytes, "cold", c, t);
    });
    for (const weight_type type : TYPES) {
        for (const matrix_shape & shape : LAYERS) {
            all = bench_shape(b, type, shape, copy_gb_s) && all;
        }
    }
    return (!library || rival(b, library)) && all ? 0 : 1;
}

static int rival_alone(const char * library) {
    if (!checker_is_sound()) {
        return 1;
    }
    bench b;
    return rival(b, library) ? 0 : 1;
}

static int one(const std::string & type, int64_t rows, int64_t cols) {
    for (const weight_type each : TYPES) {
        if (type == name_of(each)) {
            const problem p(each, rows * cols);
            p.fill(1);
            return right(p, "one", rows) ? 0 : 1;
        }
    }
    fprintf(stderr, "TYPE is q4_0 or q4_K, not %s\n", type.c_str());
    return 2;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return concluded(everything()); }},
        {"edges", [](char **) { return concluded(edges()); }},
        {"bench [LIBRARY]", [](char ** is) { return bench_all(is[0]); }},
        {"rival LIBRARY", [](char ** is) { return rival_alone(is[0]); }},
        {"one TYPE ROWS COLS", [](char ** is) { return one(is[0], atoll(is[1]), atoll(is[2])); }},
    });
}
