// ./harness test                exit status 0 if everything is right
// ./harness edges               the part of it that a sanitizer can run
// ./harness bench               JSON lines on stdout, a table on stderr; nothing is timed that is not right
// ./harness tune                times of other numbers of channels and sequences a thread, on stderr
// ./harness one SEQS CHANNELS   one launch, for a profiler

#include "../common/copy.cuh"
#include "../common/bench.cuh"
#include "../common/graph.cuh"
#include "../common/verbs.cuh"
#include "proof.cuh"

static std::vector<problem> problems(const shape & s, int n_sets) {
    std::vector<problem> sets;
    for (int i = 0; i < n_sets; ++i) {
        sets.emplace_back(s);
        sets[i].fill(7 * i);
    }
    return sets;
}

template <typename F> static contender timed(const char * name, const std::vector<problem> & sets, F launch) {
    const auto checked = [&sets, launch](int set, cudaStream_t s) { CUDA_CHECK(launch(sets[set].args(), s)); };
    return {name, sets[0].bytes(), graphed((int) sets.size(), checked)};
}

static void say_row(const shape & s, const contender & c, const timing & t) {
    fprintf(stderr, "%-9s %-10s %9.2f us +- %.2f %8.1f GB/s %6.0f MHz\n", s.name().c_str(), c.name.c_str(),
            median(t.time_us), median_deviation(t.time_us), median(bandwidth(c, t)), median(t.sm_clock_mhz));
}

// A copy of as many bytes, ggml's chain with and without its gather, ours.
static bool bench_shape(bench & b, const shape & s) {
    if (!equals_chain(s)) {
        return false;
    }
    const int                  n_sets = cold_sets(problem(s).bytes());
    const auto                 sets   = problems(s, n_sets);
    const room                 own(s);
    std::vector<device_buffer> from, to;
    for (int i = 0; i < n_sets; ++i) {
        from.emplace_back(sets[0].bytes() / 2);
        to.emplace_back(sets[0].bytes() / 2);
    }
    const auto chain  = [&](const conv_state_args & a, cudaStream_t stream) { return own.chain(a, stream); };
    const auto joined = [&](const conv_state_args & a, cudaStream_t stream) {
        return chain_joined(a, own.windows.as<float>(), stream);
    };
    const std::vector<contender> all = {
        copy_of(from, to),
        timed("chain", sets, chain),
        timed("no gather", sets, joined),
        timed("fused", sets, conv_state_cuda),
    };
    const std::vector<timing> timings = b.measure(all, n_sets, std::max(12, 2 * n_sets));
    for (size_t c = 0; c < all.size(); ++c) {
        json_line line;
        line.add("kernel", "conv_state").add("variant", all[c].name).add("case", s.name()).add("seqs", s.seqs);
        line.add("channels", s.channels).add("cache", "cold");
        add_samples(line, all[c], timings[c]).print();
        say_row(s, all[c], timings[c]);
    }
    return true;
}

static int bench_all() {
    bench b;
    bool  all = checker_is_sound();
    for (const int64_t seqs : {1, 8, 32, 64, 128, 256}) {
        all = all && bench_shape(b, {seqs, 8192});
    }
    return concluded(all);
}

// -- tune --

template <int chans, int batch> static void tune_one(bench & b, const shape & s) {
    const auto        sets   = problems(s, cold_sets(problem(s).bytes()));
    const std::string name   = std::to_string(chans) + " of " + std::to_string(batch);
    const auto        launch = conv_state_launch<chans, batch>;
    const contender   c      = timed(name.c_str(), sets, launch);
    say_row(s, c, b.measure({c}, (int) sets.size(), std::max(12, 2 * (int) sets.size()))[0]);
}

static int tune_all() {
    bench b;
    for (const int64_t seqs : {1, 8, 32, 128}) {
        const shape s = {seqs, 8192};
        tune_one<1, 1>(b, s);
        tune_one<1, 2>(b, s);
        tune_one<1, 4>(b, s);
        tune_one<4, 1>(b, s);
        tune_one<4, 2>(b, s);
        tune_one<4, 4>(b, s);
    }
    return 0;
}

int main(int argc, char ** argv) {
    return run_verb(argc, argv, {
        {"test", [](char **) { return concluded(everything()); }},
        {"edges", [](char **) { return concluded(edges(EDGES)); }},
        {"bench", [](char **) { return bench_all(); }},
        {"tune", [](char **) { return tune_all(); }},
        {"one SEQS CHANNELS", [](char ** is) { return equals_chain({atoll(is[0]), atoll(is[1])}) ? 0 : 1; }},
    });
}
