// What `./harness test` proves.

#pragma once

#include "../common/check_selftest.cuh"
#include "chain.cuh"
#include "problem.cuh"

#include <numeric>

using launch_t = std::function<cudaError_t(const problem &)>;

static cudaError_t ours(const problem & p) {
    return conv_state_cuda(p.args(), nullptr);
}

// Room for the chain's own buffers.
struct room {
    device_buffer gathered, windows, ids;

    explicit room(const shape & s) : gathered(s.seqs * s.row() * 4), windows(s.seqs * s.channels * 16), ids(s.seqs * 4) {
        std::vector<int32_t> order(s.seqs);
        std::iota(order.begin(), order.end(), 0);
        CUDA_CHECK(cudaMemcpy(ids.as<int32_t>(), order.data(), ids.size(), cudaMemcpyHostToDevice));
    }

    cudaError_t chain(const conv_state_args & a, cudaStream_t stream = nullptr) const {
        return chain_cuda(a, ids.as<int32_t>(), gathered.as<float>(), windows.as<float>(), stream);
    }
};

// The pin's launches: what ours must equal, bit by bit.
static cudaError_t chain(const problem & p) {
    return room(p.s).chain(p.args());
}

// The cell of the first sequence is cleared, as of one that begins; then so many tokens, each with inputs of its own.
static outcome run(const problem & p, const launch_t & launch, int steps = 5, bool clear = true) {
    p.cache.poison();
    p.out.poison();
    p.fill(11);
    if (clear) {
        CUDA_CHECK(cudaMemset(p.states(), 0, p.s.row() * 4));
    }
    for (int step = 0; step < steps; ++step) {
        p.fill_inputs(100 * step);
        CUDA_CHECK(launch(p));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    return outcome(p);
}

// -- against double --

static bool agrees_with_double(const shape & s) {
    const problem p(s);
    run(p, ours, 2);
    const std::vector<float> before = p.cache.host<float>(), x = p.x.host<float>(), weights = p.weights.host<float>();
    p.out.poison();
    CUDA_CHECK(ours(p));
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<double> results, states;
    for (int64_t seq = 0; seq < s.seqs; ++seq) {
        const float *             cell = before.data() + (seq + 1) * s.row();
        std::vector<double>       state(cell, cell + s.row());
        const std::vector<double> out = conv_reference(state, &x[seq * s.channels], weights.data(), s.channels);
        results.insert(results.end(), out.begin(), out.end());
        states.insert(states.end(), state.begin(), state.end());
    }
    const std::vector<float> after = p.cache.host<float>(), out = p.out.host<float>();
    const auto    in = [](const std::vector<double> & d, int64_t cols) {
        return [&d, cols](int64_t r, int64_t c) { return d[r * cols + c]; };
    };
    const verdict a = compare(out.data(), in(results, s.channels), s.seqs, s.channels, {1e-5, 1e-11});
    const verdict b = compare(after.data() + s.row(), in(states, s.row()), s.seqs, s.row(), EXACT);
    char          text[64];
    snprintf(text, sizeof(text), "nmse of results %.2g ", a.nmse);
    return said(a.passed && b.passed, s.name() + " against double", text + a.why + b.why);
}

// -- bit by bit --

static bool equals_chain(const shape & s) {
    const problem p(s);
    return said(run(p, ours) == run(p, chain), s.name() + " has every bit of the chain, in the cells beside too");
}

// One element at a time, where the addresses allow no more.
static bool unaligned_is_equal(const shape & s) {
    const problem p(s, 4);
    return said(run(p, ours) == run(p, chain), s.name() + " is equal where no address is aligned to 16 bytes");
}

static bool two_launches_agree(const shape & s) {
    const problem p(s);
    return said(run(p, ours) == run(p, ours), s.name() + ": two runs are bit-equal");
}

// Gathered elsewhere, and written to the cells: where a sequence's cell is not its own.
static bool out_of_place_is_equal(const shape & s) {
    const problem       p(s);
    const device_buffer gathered(p.state_bytes());
    const auto          launch = [&](const problem & of) {
        conv_state_args a = of.args();
        CUDA_CHECK(cudaMemcpy(gathered.as<float>(), a.from, of.state_bytes(), cudaMemcpyDeviceToDevice));
        a.from = gathered.as<float>();
        return conv_state_cuda(a, nullptr);
    };
    return said(run(p, launch) == run(p, chain), s.name() + " out of place is equal");
}

// The results where the inputs were, as an allocator may have it.
static bool over_the_inputs_is_equal(const shape & s) {
    const problem p(s);
    const auto    launch = [](const problem & of) {
        conv_state_args a = of.args();
        CUDA_CHECK(cudaMemcpy(a.out, a.x, of.out.size(), cudaMemcpyDeviceToDevice));
        a.x = a.out;
        return conv_state_cuda(a, nullptr);
    };
    return said(run(p, launch) == run(p, chain), s.name() + " over the inputs is equal");
}

// Inputs that are part of a wider row: one of 8 more for each sequence.
static bool strided_is_equal(const shape & s) {
    const problem       p(s);
    const int64_t       width = s.channels + 8;
    const device_buffer rows(s.seqs * width * 4);
    const auto          launch = [&](const problem & of) {
        conv_state_args a = of.args();
        CUDA_CHECK(cudaMemcpy2D(rows.as<float>(), width * 4, a.x, s.channels * 4, s.channels * 4, s.seqs,
                                cudaMemcpyDeviceToDevice));
        a.x            = rows.as<float>();
        a.x_seq_stride = width;
        return conv_state_cuda(a, nullptr);
    };
    return said(run(p, launch) == run(p, chain), s.name() + " with wider rows is equal");
}

// -- what must fail --

// The window moves on before it is multiplied: reads and writes in the wrong order.
static cudaError_t written_before_read(const problem & p) {
    const device_buffer elsewhere(p.out.size());
    conv_state_args     moves = p.args();
    moves.out                 = elsewhere.as<float>();
    const cudaError_t status  = conv_state_cuda(moves, nullptr);
    if (status != cudaSuccess) {
        return status;
    }
    const device_buffer nowhere(p.state_bytes());
    conv_state_args     reads = p.args();
    reads.to                  = nowhere.as<float>();
    return conv_state_cuda(reads, nullptr);
}

// Each sequence with the state of another.
static cudaError_t permuted(const problem & p) {
    for (int64_t i = 0; i < p.s.seqs; ++i) {
        conv_state_args a = p.args();
        a.from += (p.s.seqs - 1 - i) * p.s.row();
        a.to   += (p.s.seqs - 1 - i) * p.s.row();
        a.x    += i * p.s.channels;
        a.out  += i * p.s.channels;
        a.seqs  = 1;
        const cudaError_t status = conv_state_cuda(a, nullptr);
        if (status != cudaSuccess) {
            return status;
        }
    }
    return cudaSuccess;
}

static bool faults_are_seen() {
    const problem       p({2, 256});
    const device_buffer elsewhere(p.state_bytes());
    const auto          with = [&](int64_t from, int64_t to, bool skipped) {
        return [&, from, to, skipped](const problem & of) {
            conv_state_args a = of.args();
            a.from += from * of.s.row();
            a.to    = skipped ? elsewhere.as<float>() : a.to + to * of.s.row();
            return conv_state_cuda(a, nullptr);
        };
    };
    const outcome right = run(p, chain);
    bool          all   = said(run(p, with(0, 0, false)) == right, "without a fault is equal");
    const auto    fails = [&](const char * what, const launch_t & launch, bool clear = true) {
        all = said(!(run(p, launch, 5, clear) == right), std::string(what) + " is seen") && all;
    };
    fails("a write-back that is skipped", with(0, 0, true));
    fails("a neighbour's slot, read", with(1, 0, false));
    fails("a neighbour's slot, written", with(0, -1, false));
    fails("slots that are permuted", permuted);
    fails("a window that is written before it is read", written_before_read);
    all = said(!(run(p, ours, 2, false) == run(p, chain, 2)), "a stale state after a clear is seen") && all;
    return all;
}

// -- arguments --

static bool wrong_arguments_are_refused() {
    const problem p({2, 256});
    const outcome before  = run(p, ours);
    bool          refused = true;
    const auto    status  = [&](int64_t seqs, int64_t channels, int64_t x_seq_stride) {
        conv_state_args a = p.args();
        a.seqs = seqs, a.channels = channels, a.x_seq_stride = x_seq_stride;
        return conv_state_cuda(a, nullptr);
    };
    refused = status(-1, 256, 256) == cudaErrorInvalidValue && refused;
    refused = status(65536, 256, 256) == cudaErrorInvalidValue && refused;
    refused = status(2, 0, 256) == cudaErrorInvalidValue && refused;
    refused = status(2, 256, 255) == cudaErrorInvalidValue && refused;
    refused = status(0, 256, 256) == cudaSuccess && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    return said(refused && outcome(p) == before, "wrong arguments are refused, no sequences are no work");
}

// -- all --

static const std::vector<shape> EDGES  = {{1, 1}, {1, 128}, {3, 5}, {2, 512}, {7, 130}, {5, 1028}, {33, 516}, {34, 132}};
static const std::vector<shape> MODELS = {{1, 8192}, {33, 8192}, {128, 8192}, {256, 8192}, {17, 10240}, {256, 77}};

static bool edges(const std::vector<shape> & shapes) {
    bool passed = said(checker_is_sound(), "the checker fails what is wrong");
    passed      = wrong_arguments_are_refused() && passed;
    for (const shape & s : shapes) {
        passed = agrees_with_double(s) && passed;
        passed = equals_chain(s) && unaligned_is_equal(s) && passed;
    }
    for (const shape & s : {shape{2, 512}, shape{33, 516}}) {
        passed = out_of_place_is_equal(s) && over_the_inputs_is_equal(s) && strided_is_equal(s) && passed;
    }
    return faults_are_seen() && passed;
}

static bool everything() {
    bool passed = edges(EDGES);
    for (const shape & s : MODELS) {
        passed = equals_chain(s) && passed;
    }
    return agrees_with_double({33, 8192}) && two_launches_agree({128, 8192}) && passed;
}
