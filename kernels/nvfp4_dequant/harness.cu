// ./harness test               exit status 0 if everything is right
// ./harness bench [LIBRARY]    JSON lines on stdout, a table on stderr; nothing is timed that is not right
//                              LIBRARY: a built libggml-cuda.so, whose own conversion is timed beside ours
// ./harness one ROWS COLS      one launch, for a profiler

#include "../common/copy.cuh"
#include "../common/buffer.cuh"
#include "../common/check_selftest.cuh"
#include "../common/fill.cuh"
#include "../common/library.cuh"
#include "../common/shapes.cuh"
#include "../common/verbs.cuh"
#include "baseline.cuh"
#include "nvfp4_dequant.cuh"
#include "reference.cuh"

#include <cuda_fp16.h>

// What a kernel writes, 2 bytes a weight.
enum class output { BF16, FP16 };

struct kernel_under_test {
    const char *                                                                   name;
    output                                                                         writes;
    std::function<cudaError_t(const void *, nv_bfloat16 *, int64_t, cudaStream_t)> launch;
};

static const kernel_under_test OURS     = {"tile", output::BF16, nvfp4_dequant_bf16_cuda};
static const kernel_under_test BASELINE = {"warp_per_block", output::BF16, warp_per_block_cuda};

// llama.cpp's own conversion out of its built library: to fp16, as it has none to bf16. A weight is exact in both.
static kernel_under_test stock_of(const char * path) {
    using stock_t       = void (*)(const void *, nv_bfloat16 *, int64_t, cudaStream_t);
    constexpr int NVFP4 = 40;  // enum ggml_type
    stock_t (*conversion_of)(int);
    library(path).find(conversion_of, "_Z21ggml_get_to_fp16_cuda9ggml_type");
    const stock_t convert = conversion_of(NVFP4);
    if (!convert) {
        fprintf(stderr, "%s has no conversion from NVFP4\n", path);
        exit(1);
    }
    return {"ggml", output::FP16, [convert](const void * x, nv_bfloat16 * y, int64_t k, cudaStream_t stream) {
        convert(x, y, k, stream);
        return cudaGetLastError();
    }};
}

struct fp16_bits {
    uint16_t bits;
};

static double value_of(fp16_bits x) {
    return __half2float(__ushort_as_half(x.bits));
}

struct problem {
    int64_t       n;  // weights
    device_buffer x, y;

    explicit problem(int64_t n, int64_t x_offset = 0) : n(n), x(n / 64 * 36, x_offset), y(n * sizeof(nv_bfloat16)) {}

    int64_t bytes() const { return x.size() + y.size(); }

    void fill(uint64_t seed, nvfp4_fill how = nvfp4_fill::MIXED) const {
        fill_nvfp4(x.as<uint8_t>(), n / 64, seed, how);
    }

    cudaError_t launch(const kernel_under_test & kernel, cudaStream_t stream = nullptr) const {
        return kernel.launch(x.as<void>(), y.as<nv_bfloat16>(), n, stream);
    }

    void run(const kernel_under_test & kernel) const {
        y.poison();
        CUDA_CHECK(launch(kernel));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};

// -- test --

// Judge rows x cols weights from the first-th on. T is uint16_t for bf16.
template <typename T> static verdict judge(const problem & p, int64_t first, int64_t rows, int64_t cols) {
    const int64_t        n = rows * cols;
    std::vector<uint8_t> x(n / 64 * 36);
    std::vector<T>       y(n);
    CUDA_CHECK(cudaMemcpy(x.data(), p.x.as<uint8_t>() + first / 64 * 36, x.size(), cudaMemcpyDeviceToHost));
    CUDA_CHECK(cudaMemcpy(y.data(), p.y.as<T>() + first, n * sizeof(T), cudaMemcpyDeviceToHost));
    const auto reference = [&](int64_t row, int64_t col) { return nvfp4_weight(x.data(), row * cols + col); };
    verdict    v         = compare(y.data(), reference, rows, cols, EXACT);
    if (v.passed && !(p.y.guards_intact() && p.x.guards_intact())) {
        v.passed = false;
        v.why    = "it wrote outside its output";
    }
    return v;
}

static bool right(const problem & p, const kernel_under_test & kernel, const std::string & what, int64_t rows) {
    p.run(kernel);
    const auto    as_written = kernel.writes == output::BF16 ? judge<uint16_t> : judge<fp16_bits>;
    const verdict v          = as_written(p, 0, rows, p.n / rows);
    return said(v.passed, std::string(kernel.name) + " " + what, v.why);
}

// All 256 scale bytes x 16 codes, each code in every place of a sub-block.
static bool every_code_is_exact(const kernel_under_test & kernel) {
    const problem p(1024 * 64);
    p.fill(0, nvfp4_fill::EVERY);
    return right(p, kernel, "256 scale bytes x 16 codes", 1024);
}

static bool edges_are_right() {
    bool all = true;
    for (const int64_t blocks : around(NVFP4_DEQUANT_TILE / 64)) {
        for (const int64_t offset : {0, 4, 8, 12}) {
            const problem p(blocks * 64, offset);
            p.fill(blocks + offset);
            all = right(p, OURS, std::to_string(blocks) + " blocks at offset " + std::to_string(offset), blocks) && all;
        }
    }
    return all;
}

static bool layers_are_right() {
    bool all = true;
    for (const matrix_shape & s : LAYERS) {
        const problem p(s.rows * s.cols);
        p.fill(s.rows);
        all = right(p, OURS, s.name, s.rows) && all;
    }
    return all;
}

// Beginning, the two sides of element 2^31, end.
static bool stress_is_right() {
    const problem p(STRESS.rows * STRESS.cols);
    const int64_t n   = 16 * STRESS.cols;
    bool          all = true;
    p.fill(31);
    p.run(OURS);
    for (const int64_t first : {(int64_t) 0, ((int64_t) 1 << 31) - n / 2, p.n - n}) {
        const verdict v = judge<uint16_t>(p, first, 16, STRESS.cols);
        all             = said(v.passed, "tile stress from weight " + std::to_string(first), v.why) && all;
    }
    return all;
}

static bool two_launches_agree() {
    const problem p(LAYERS[3].rows * LAYERS[3].cols);
    p.fill(7);
    p.run(OURS);
    const std::vector<uint16_t> once = p.y.host<uint16_t>();
    p.run(OURS);
    return said(once == p.y.host<uint16_t>(), "two launches are bit-equal");
}

static bool wrong_arguments_are_refused() {
    const problem p(128);
    char *        x      = p.x.as<char>();
    nv_bfloat16 * y      = p.y.as<nv_bfloat16>();
    const int64_t huge   = INT64_MAX / 64 * 64 - NVFP4_DEQUANT_TILE;
    const auto    status = [&](int64_t k, int x_by, int y_by) {
        return nvfp4_dequant_bf16_cuda(x + x_by, y + y_by, k, nullptr);
    };
    p.y.poison();
    bool refused = true;
    for (const int64_t k : {(int64_t) -64, (int64_t) 63, huge}) {
        refused = status(k, 0, 0) == cudaErrorInvalidValue && refused;
    }
    refused = status(64, 2, 0) == cudaErrorMisalignedAddress && refused;
    refused = status(64, 0, 4) == cudaErrorMisalignedAddress && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint16_t> untouched(p.n, 0xFFFF);
    const bool empty = status(0, 0, 0) == cudaSuccess && p.y.host<uint16_t>() == untouched;
    return said(refused && empty, "wrong arguments are refused, no weights are no work");
}

static int test() {
    bool passed = said(checker_is_sound(), "the checker fails what is wrong");
    passed      = every_code_is_exact(OURS) && passed;
    passed      = every_code_is_exact(BASELINE) && passed;
    passed      = wrong_arguments_are_refused() && passed;
    passed      = edges_are_right() && passed;
    passed      = layers_are_right() && passed;
    passed      = stress_is_right() && passed;
    passed      = two_launches_agree() && passed;
    fprintf(stderr, "%s\n", passed ? "passed" : "FAILED");
    return passed ? 0 : 1;
}

// -- bench --

// Returns GB/s.
static double print_row(const matrix_shape & shape, const char * cache, const contender & c, const timing & t) {
    const double gb_s = median(bandwidth(c, t));
    json_line    line;
    line.add("kernel", "nvfp4_dequant")
        .add("variant", c.name)
        .add("case", shape.name)
        .add("rows", shape.rows)
        .add("cols", shape.cols)
        .add("cache", cache);
    add_samples(line, c, t).print();
    fprintf(stderr, "%-8s %s %-15s %9.2f us +- %.2f %8.1f GB/s %6.0f MHz\n", shape.name, cache, c.name.c_str(),
            median(t.time_us), median_deviation(t.time_us), gb_s, median(t.sm_clock_mhz));
    return gb_s;
}

// Ours first, then its rivals. False, and nothing timed, if an output is wrong.
static bool bench_shape(bench & b, const matrix_shape & shape, double copy_gb_s,
                        const std::vector<kernel_under_test> & kernels) {
    const int64_t              n = shape.rows * shape.cols;
    std::vector<problem>       sets;
    std::vector<device_buffer> from, to;
    for (int i = 0; i == 0 || i < cold_sets(sets[0].bytes()); ++i) {
        sets.emplace_back(n);
        sets[i].fill(i);
        from.emplace_back(sets[i].bytes() / 2);
        to.emplace_back(sets[i].bytes() / 2);
    }
    std::vector<contender> all = {copy_of(from, to)};
    for (const kernel_under_test & kernel : kernels) {
        if (!right(sets[0], kernel, shape.name, shape.rows)) {
            return false;
        }
        const auto launch = [&, kernel](int set, cudaStream_t s) { CUDA_CHECK(sets[set].launch(kernel, s)); };
        all.push_back({kernel.name, sets[0].bytes(), launch});
    }
    for (const int n_sets : {(int) sets.size(), 1}) {
        const std::vector<timing> timings = b.measure(all, n_sets, std::max(12, 2 * n_sets));
        std::vector<double>       gb_s;
        for (size_t c = 0; c < all.size(); ++c) {
            gb_s.push_back(print_row(shape, n_sets == 1 ? "warm" : "cold", all[c], timings[c]));
        }
        fprintf(stderr, "%.1f %% of the 1 GiB copy, %.1f %% of a copy of as many bytes", 100 * gb_s[1] / copy_gb_s,
                100 * gb_s[1] / gb_s[0]);
        for (size_t c = 2; c < all.size(); ++c) {
            fprintf(stderr, ", %.1fx %s", gb_s[1] / gb_s[c], all[c].name.c_str());
        }
        fprintf(stderr, "\n");
    }
    return true;
}

static int bench_all(const char * library) {
    if (!checker_is_sound()) {
        return 1;
    }
    std::vector<kernel_under_test> kernels = {OURS, BASELINE};
    if (library) {
        kernels.push_back(stock_of(library));
    }
    bench        b;
    bool         all       = true;
    const double copy_gb_s = bench_copy(b, [](const matrix_shape & bytes, const contender & c, const timing & t) {
        return print_row(bytes, "cold", c, t);
    });
    for (const matrix_shape & shape : LAYERS) {
        all = bench_shape(b, shape, copy_gb_s, kernels) && all;
    }
    return all ? 0 : 1;
}

static int one(int64_t rows, int64_t cols) {
    const problem p(rows * cols);
    p.fill(1);
    return right(p, OURS, "one", rows) ? 0 : 1;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return test(); }},
        {"bench [LIBRARY]", [](char ** is) { return bench_all(is[0]); }},
        {"one ROWS COLS", [](char ** is) { return one(atoll(is[0]), atoll(is[1])); }},
    });
}
