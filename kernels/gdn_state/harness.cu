// ./harness test             exit status 0 if everything is right
// ./harness edges            the part of it that a sanitizer can run
// ./harness bench            JSON lines on stdout, a table on stderr; nothing is timed that is not right
// ./harness tune             times of other numbers of warps and columns, on stderr
// ./harness one SEQS HEADS   one launch, for a profiler

#include "../common/copy.cuh"
#include "../common/bench.cuh"
#include "../common/graph.cuh"
#include "../common/verbs.cuh"
#include "proof.cuh"

// -- bench --

template <typename T> static std::vector<problem<T>> problems(const shape & s, int n_sets) {
    std::vector<problem<T>> sets;
    for (int i = 0; i < n_sets; ++i) {
        sets.emplace_back(s);
        sets[i].fill(7 * i);
    }
    return sets;
}

template <typename T, typename F>
static contender timed(const char * name, const std::vector<problem<T>> & sets, F launch) {
    const auto checked = [&sets, launch](int set, cudaStream_t s) { CUDA_CHECK(launch(sets[set].args(), s)); };
    return {name, sets[0].bytes(), graphed((int) sets.size(), checked)};
}

static void print_row(const shape & s, const contender & c, const timing & t) {
    json_line line;
    line.add("kernel", "gdn_state").add("variant", c.name).add("case", s.name()).add("seqs", s.seqs);
    line.add("heads", s.heads).add("qk_heads", s.qk_heads).add("cache", "cold");
    add_samples(line, c, t).print();
    fprintf(stderr, "%-9s %-10s %9.2f us +- %.2f %8.1f GB/s %6.0f MHz\n", s.name().c_str(), c.name.c_str(),
            median(t.time_us), median_deviation(t.time_us), median(bandwidth(c, t)), median(t.sm_clock_mhz));
}

// A copy of as many bytes as the f32 states read and written, ggml's chain, its step in place, ours for both types.
static bool bench_shape(bench & b, const shape & s) {
    if (!(equals_plain<float>(s) && equals_plain<__nv_bfloat16>(s) && chain_is_equal(s))) {
        return false;
    }
    const int                  n_sets = cold_sets(s.cells() * 2);
    const auto                 wide   = problems<float>(s, n_sets);
    const auto                 narrow = problems<__nv_bfloat16>(s, n_sets);
    const device_buffer        gathered(s.cells() * 4), updated(s.cells() * 4), ids(s.seqs * 4);
    std::vector<device_buffer> from, to;
    std::vector<int32_t>       order;
    for (int i = 0; i < n_sets; ++i) {
        from.emplace_back(s.cells() * 4);
        to.emplace_back(s.cells() * 4);
    }
    for (int64_t i = 0; i < s.seqs; ++i) {
        order.push_back((int32_t) i);
    }
    CUDA_CHECK(cudaMemcpy(ids.as<int32_t>(), order.data(), ids.size(), cudaMemcpyHostToDevice));
    const auto chain = [&](const gdn_state_args<float> & a, cudaStream_t stream) {
        return chain_cuda(a, ids.as<int32_t>(), gathered.as<float>(), updated.as<float>(), stream);
    };
    const std::vector<contender> all = {
        copy_of(from, to),
        timed("chain", wide, chain),
        timed("plain f32", wide, chain_step_cuda<float>),
        timed("f32", wide, gdn_state_cuda<float>),
        timed("bf16", narrow, gdn_state_cuda<__nv_bfloat16>),
    };
    const std::vector<timing> timings = b.measure(all, n_sets, std::max(12, 2 * n_sets));
    for (size_t c = 0; c < all.size(); ++c) {
        print_row(s, all[c], timings[c]);
    }
    return true;
}

static int bench_all() {
    bench b;
    bool  all = checker_is_sound();
    for (const int64_t seqs : {1, 8, 32, 64, 128, 256}) {
        all = all && bench_shape(b, {seqs, 32, 32});
    }
    return concluded(all);
}

// -- tune --

template <typename T, int warps, int cols> static void tune_one(bench & b, const shape & s) {
    const auto      sets   = problems<T>(s, cold_sets(s.cells() * 2));
    const auto      launch = [](const gdn_state_args<T> & a, cudaStream_t stream) {
        return gdn_state_launch<T, warps, cols>(a, stream);
    };
    const contender c = timed(name_of<T>(), sets, launch);
    const timing    t = b.measure({c}, (int) sets.size(), std::max(12, 2 * (int) sets.size()))[0];
    fprintf(stderr, "%-9s %-5s warps %d cols %2d %9.2f us %8.1f GB/s\n", s.name().c_str(), name_of<T>(), warps, cols,
            median(t.time_us), median(bandwidth(c, t)));
}

template <typename T> static void tune(bench & b, const shape & s) {
    tune_one<T, 4, 2>(b, s);
    tune_one<T, 1, 4>(b, s);
    tune_one<T, 2, 4>(b, s);
    tune_one<T, 8, 4>(b, s);
    tune_one<T, 1, 8>(b, s);
    tune_one<T, 4, 8>(b, s);
    if constexpr (sizeof(T) == 4) {
        tune_one<T, 16, 8>(b, s);
        tune_one<T, 2, 16>(b, s);
        tune_one<T, 8, 16>(b, s);
        tune_one<T, 4, 32>(b, s);
    }
}

static int tune_all() {
    bench b;
    for (const int64_t seqs : {1, 8, 128}) {
        tune<float>(b, {seqs, 32, 32});
        tune<__nv_bfloat16>(b, {seqs, 32, 32});
    }
    return 0;
}

static int one(int64_t seqs, int64_t heads) {
    return equals_plain<float>({seqs, heads, heads}) ? 0 : 1;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return concluded(everything()); }},
        {"edges", [](char **) { return concluded(edges(EDGES)); }},
        {"bench", [](char **) { return bench_all(); }},
        {"tune", [](char **) { return tune_all(); }},
        {"one SEQS HEADS", [](char ** is) { return one(atoll(is[0]), atoll(is[1])); }},
    });
}
