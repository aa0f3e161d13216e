// What is tested, and when an output is right.

#pragma once

#include "../common/buffer.cuh"
#include "../common/check_selftest.cuh"
#include "../common/fill.cuh"
#include "../common/graph.cuh"
#include "../nvfp4_dequant/reference.cuh"
#include "rungs.cuh"

#include <algorithm>
#include <random>

struct moe_shape {
    int64_t experts, used, m, k, tokens;
    int64_t slots = 1;  // of a token in the second operand: 1 is broadcast
    bool    padded = false;  // views: something between rows, experts and a token's ids
};

static std::string text_of(const moe_shape & s) {
    return std::to_string(s.used) + " of " + std::to_string(s.experts) + " m=" + std::to_string(s.m) + " k=" +
           std::to_string(s.k) + " tokens=" + std::to_string(s.tokens) + (s.slots == 1 ? " broadcast" : "") +
           (s.padded ? " padded" : "");
}

// A token's experts, all different.
static std::vector<int32_t> routed_evenly(const moe_shape & s, const uint64_t seed) {
    std::mt19937_64      random(seed);
    std::vector<int32_t> ids, all(s.experts);
    for (int64_t e = 0; e < s.experts; ++e) {
        all[e] = (int32_t) e;
    }
    for (int64_t t = 0; t < s.tokens; ++t) {
        std::shuffle(all.begin(), all.end(), random);
        ids.insert(ids.end(), all.begin(), all.begin() + s.used);
    }
    return ids;
}

static __global__ void fill_activations(float * x, int64_t count, int64_t k, uint64_t seed, int power) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        // rows are of different sizes: times 2^-2p, 2^-p, 1, 2^p, 2^2p
        const float by = __uint_as_float((uint32_t) (127 + ((int) (i / k % 5) - 2) * power) << 23);
        x[i] = by * (((int32_t) (hash_at(~seed, i) >> 8) - (1 << 23)) * 0x1p-23f);
    }
}

struct problem {
    moe_shape            shape;
    int64_t              w_expert, ids_token, x_slot, x_token;
    device_buffer        w, x, ids, y;
    std::vector<int32_t> routed;  // tokens x used

    explicit problem(const moe_shape & s)
        : shape(s), w_expert(s.m * (s.k / 64 * 36) + (s.padded ? 288 : 0)), ids_token(s.used + (s.padded ? 3 : 0)),
          x_slot(s.k + (s.padded ? 64 : 0)), x_token(s.slots * x_slot + (s.padded ? 128 : 0)), w(s.experts * w_expert),
          x(std::max<int64_t>(1, s.tokens) * x_token * sizeof(float)),
          ids(std::max<int64_t>(1, s.tokens) * ids_token * sizeof(int32_t)),
          y(std::max<int64_t>(1, s.tokens) * s.used * s.m * sizeof(float)) {}

    nvfp4_grouped_args args(const device_buffer & scratch) const {
        return {w.as<void>(), ids.as<int32_t>(), x.as<float>(), y.as<float>(), scratch.as<void>(), shape.experts,
                shape.tokens, shape.used, shape.m, shape.k, w_expert, ids_token, shape.slots, x_token, x_slot};
    }

    // What a product must read or write at least once.
    int64_t bytes() const {
        std::vector<bool> hit(shape.experts);
        for (const int32_t id : routed) {
            hit[id] = true;
        }
        return std::count(hit.begin(), hit.end(), true) * shape.m * (shape.k / 64 * 36) + x.size() + y.size();
    }

    void fill(uint64_t seed, int power = 3) const {
        fill_nvfp4(w.as<uint8_t>(), w.size() / 36, seed);
        const int64_t count = x.size() / sizeof(float);
        fill_activations<<<(unsigned) ((count + 255) / 256), 256>>>(x.as<float>(), count, shape.k, seed, power);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaDeviceSynchronize());
    }

    void route(const std::vector<int32_t> & to) {
        routed = to;
        std::vector<int32_t> all(ids.size() / sizeof(int32_t), 0);
        for (int64_t i = 0; i < (int64_t) to.size(); ++i) {
            all[i / shape.used * ids_token + i % shape.used] = to[i];
        }
        CUDA_CHECK(cudaMemcpy(ids.as<void>(), all.data(), ids.size(), cudaMemcpyHostToDevice));
    }
};

static int64_t blocks_of(const rung & r) {
    return (int64_t) r.kernel.blocks * this_device().multiprocessors;
}

static int64_t scratch_of(const rung & r, const problem & p) {
    const device_buffer none(16);
    return (int64_t) r.kernel.scratch_bytes(p.args(none));
}

// -- when an output is right --

// One row of y in double, and its magnitudes: the sums of the absolute values of what is added up.
static void reference_row(const problem & p, const std::vector<uint8_t> & w, const std::vector<float> & x, int64_t i,
                          std::vector<double> & y, std::vector<double> & magnitude) {
    const moe_shape & s    = p.shape;
    const float *     from = &x[i / s.used * p.x_token + i % s.used % s.slots * p.x_slot];
    for (int64_t row = 0; row < s.m; ++row) {
        const uint8_t * blocks = &w[row * (s.k / 64 * 36)];
        double          sum = 0.0, size = 0.0;
        for (int64_t j = 0; j < s.k; ++j) {
            const double term = nvfp4_weight(blocks, j) * from[j];
            sum  += term;
            size += std::fabs(term);
        }
        y.push_back(sum);
        magnitude.push_back(size);
    }
}

// Rounding activations to f16 is off by 2^-11 of each term at most, 1.9e-4 in the quadratic mean; 3.2: what the quadratic mean of
// the terms is to their mean, with scales of every size. Eight deviations of a sum of k terms of random signs are the limit.
static tolerance tolerance_of(const moe_shape & s) {
    return {std::fmin(0x1.1p-11, 8.0 * 1.9e-4 * 3.2 / std::sqrt((double) s.k)), 1e-6};
}

// Rows of y of every `stride`-th product; those of no expert must be as they were.
static verdict judge(const problem & p, const int64_t stride, const tolerance * other = nullptr) {
    const moe_shape &          s       = p.shape;
    const int64_t              w_bytes = s.m * (s.k / 64 * 36);
    const std::vector<float>   x       = p.x.host<float>();
    const std::vector<float>   all     = p.y.host<float>();
    const int64_t              n       = s.tokens * s.used;
    std::vector<double>        expected, magnitude;
    std::vector<float>         y;
    std::vector<uint8_t>       w(w_bytes);
    for (int64_t i = 0; i < n; ++i) {
        const bool routed = p.routed[i] >= 0 && p.routed[i] < s.experts;
        for (int64_t row = 0; row < s.m; ++row) {
            uint32_t bits;
            memcpy(&bits, &all[i * s.m + row], sizeof(bits));
            if (routed ? !std::isfinite(all[i * s.m + row]) : bits != 0xFFFFFFFF) {
                return {false, 1, i, row, 0.0, 0.0, routed ? "an output is not finite" : "a row of no expert was written"};
            }
        }
        if (routed && i % stride == 0) {
            CUDA_CHECK(cudaMemcpy(w.data(), p.w.as<uint8_t>() + p.routed[i] * p.w_expert, w_bytes, cudaMemcpyDeviceToHost));
            reference_row(p, w, x, i, expected, magnitude);
            y.insert(y.end(), &all[i * s.m], &all[i * s.m] + s.m);
        }
    }
    for (size_t i = 0; i < y.size(); ++i) {
        const double size = magnitude[i] > 0.0 ? magnitude[i] : 1.0;
        y[i]        = (float) (y[i] / size);
        expected[i] = expected[i] / size;
    }
    const auto reference = [&](int64_t col, int64_t row) { return expected[col * s.m + row]; };
    return compare(y.data(), reference, (int64_t) y.size() / s.m, s.m, other ? *other : tolerance_of(s));
}

static bool launched(const problem & p, const rung & r, const device_buffer & scratch, cudaGraphExec_t graph = nullptr) {
    p.y.poison();
    CUDA_CHECK(graph ? cudaGraphLaunch(graph, nullptr) : r.kernel.launch(p.args(scratch), blocks_of(r), nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    return p.y.guards_intact() && scratch.guards_intact() && p.w.guards_intact() && p.x.guards_intact();
}

static bool right(const problem & p, const rung & r, const std::string & what, const int64_t stride = 1) {
    const device_buffer scratch(scratch_of(r, p));
    CUDA_CHECK(cudaMemset(scratch.as<char>(), 0x3F, scratch.size()));  // a pool gives anything; the poison is -1, an "of" of none
    const bool inside = launched(p, r, scratch);
    const verdict v   = judge(p, stride);
    return said(v.passed && inside, r.name + " " + text_of(p.shape) + what, inside ? v.why : "it wrote outside its buffers");
}

static bool right(const moe_shape & s, const rung & r, const std::vector<int32_t> & to, const std::string & what, int power = 3) {
    problem p(s);
    p.fill(s.tokens + s.m, power);
    p.route(to);
    return right(p, r, what);
}

// -- the tests --

// So many tokens on one expert, one on another: on both sides of a tile.
static bool counts_are_right(const rung & r, const moe_shape & like, const std::vector<int64_t> & counts) {
    bool all = true;
    for (const int64_t count : counts) {
        moe_shape s = like;
        s.used = 1, s.tokens = count + 1;
        std::vector<int32_t> ids(s.tokens, (int32_t) s.experts - 1);
        ids[count / 2] = 1;
        all = right(s, r, ids, ", " + std::to_string(count) + " on one expert") && all;
    }
    return all;
}

// A graph's replays read the ids as they are then: other ids with the same scratch memory, more of them on one expert and fewer,
// and the first again. Its nodes are the launches: two, or three where wide tiles are routed by a launch of its own.
static bool replays_are_right(const rung & r, const moe_shape & s) {
    problem p(s);
    p.fill(5);
    const device_buffer        scratch(scratch_of(r, p));
    const std::vector<int32_t> evenly = routed_evenly(s, 1), otherwise = routed_evenly(s, 2);
    const std::vector<int32_t> one(s.tokens * s.used, 2);
    int                        turn = 0;
    size_t                     nodes;
    const cudaGraphExec_t      graph = captured(
        [&](cudaStream_t stream) { CUDA_CHECK(r.kernel.launch(p.args(scratch), blocks_of(r), stream)); }, &nodes);
    bool all = said(nodes == (r.kernel.tile_n > 64 ? 3u : 2u), r.name + " captured in a graph of " + std::to_string(nodes) + " nodes");
    for (const std::vector<int32_t> & ids : {evenly, one, otherwise, evenly}) {
        p.route(ids);
        const bool    inside = launched(p, r, scratch, graph);
        const verdict v      = judge(p, 1);
        all = said(inside && v.passed, r.name + " replay " + std::to_string(turn++), v.why) && all;
    }
    CUDA_CHECK(cudaGraphExecDestroy(graph));
    return all;
}

// The judge itself: ids that are permuted without the output, and one row exchanged, must fail.
static bool permutations_are_seen(const rung & r, const moe_shape & s) {
    problem p(s);
    p.fill(6);
    p.route(routed_evenly(s, 3));
    const device_buffer scratch(scratch_of(r, p));
    launched(p, r, scratch);
    std::vector<int32_t> permuted = p.routed;
    std::rotate(permuted.begin(), permuted.begin() + 1, permuted.end());
    p.routed = permuted;
    return said(!judge(p, 1).passed, r.name + " ids permuted without the output are seen");
}

static bool repeats_agree(const rung & r, const moe_shape & s) {
    problem p(s);
    p.fill(7);
    p.route(routed_evenly(s, 4));
    const device_buffer      scratch(scratch_of(r, p));
    std::vector<float>       before;
    bool                     agree = true;
    for (int i = 0; i < 3; ++i) {
        scratch.poison();
        launched(p, r, scratch);
        const std::vector<float> now = p.y.host<float>();
        agree  = agree && (i == 0 || memcmp(now.data(), before.data(), p.y.size()) == 0);
        before = now;
    }
    return said(agree, r.name + " three launches agree in every bit");
}

static bool wrong_arguments_are_refused(const rung & r) {
    problem p({4, 2, 16, 256, 2});
    p.fill(8);
    p.route(routed_evenly(p.shape, 5));
    const device_buffer scratch(scratch_of(r, p));
    const auto          status = [&](const auto & change, int64_t blocks = 1) {
        nvfp4_grouped_args a = p.args(scratch);
        change(a);
        return r.kernel.launch(a, blocks, nullptr);
    };
    using args = nvfp4_grouped_args;
    p.y.poison();
    bool refused = true;
    for (const int64_t k : {0, 64, 255, 320, -256}) {
        refused = status([=](args & a) { a.k = k; }) == cudaErrorInvalidValue && refused;
    }
    refused = status([](args & a) { a.m = 0; }) == cudaErrorInvalidValue && refused;
    refused = status([](args & a) { a.used = 0; }) == cudaErrorInvalidValue && refused;
    refused = status([](args & a) { a.slots = 0; }) == cudaErrorInvalidValue && refused;
    refused = status([](args & a) { a.experts = NVFP4_GROUPED_MAX_EXPERTS + 1; }) == cudaErrorInvalidValue && refused;
    refused = status([](args & a) { a.tokens = -1; }) == cudaErrorInvalidValue && refused;
    refused = status([](args & a) { a.tokens = INT32_MAX; }) == cudaErrorInvalidValue && refused;
    refused = status([](args & a) { a.w_expert -= 16; }) == cudaErrorInvalidValue && refused;
    refused = status([](args &) {}, 0) == cudaErrorInvalidValue && refused;
    refused = status([](args & a) { a.w = (const char *) a.w + 4; }) == cudaErrorMisalignedAddress && refused;
    refused = status([](args & a) { a.x += 1; }) == cudaErrorMisalignedAddress && refused;
    refused = status([](args & a) { a.x_token += 2; }) == cudaErrorMisalignedAddress && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    const bool untouched = p.y.host<uint32_t>() == std::vector<uint32_t>(p.y.size() / 4, 0xFFFFFFFF);
    const bool nothing   = status([](args & a) { a.tokens = 0; }) == cudaSuccess;
    CUDA_CHECK(cudaDeviceSynchronize());
    const bool still = p.y.host<uint32_t>() == std::vector<uint32_t>(p.y.size() / 4, 0xFFFFFFFF);
    return said(refused && untouched && nothing && still, r.name + " wrong arguments are refused, no tokens are no work");
}

// Ids that are no expert's, below and above, and the same one twice.
static bool strange_ids_are_right(const rung & r) {
    const moe_shape      s   = {4, 2, 24, 256, 5, 2};
    std::vector<int32_t> ids = {0, -1, 4, 1, INT32_MIN, INT32_MAX, 2, 2, 3, 0};
    return right(s, r, ids, ", ids out of range and twice");
}

// Every scale byte by every code; the codes' places differ from expert to expert.
static bool every_code_is_right(const rung & r) {
    problem p({16, 1, 16, 256, 16});
    p.fill(10);
    fill_nvfp4(p.w.as<uint8_t>(), p.w.size() / 36, 0, nvfp4_fill::EVERY);
    p.route(routed_evenly(p.shape, 10));
    return right(p, r, ", every scale and code");
}

static bool plans_are_right() {
    const nvfp4_grouped_device here = this_device();
    problem                    p({16, 2, 40, 256, 24});
    const device_buffer        none(16);
    nvfp4_grouped_args         a = p.args(none);
    nvfp4_grouped_device       older = here, small = here;
    older.cc = 800, small.shared = 48 * 1024;
    bool all = nvfp4_grouped_plan_of(a, older).kernel == nullptr && nvfp4_grouped_plan_of(a, small).kernel == nullptr;
    a.k = 320;
    all = nvfp4_grouped_plan_of(a, here).kernel == nullptr && all;
    p.fill(9);
    p.route(routed_evenly(p.shape, 6));
    for (const nvfp4_grouped_device & d : {here, nvfp4_grouped_device{here.cc, here.multiprocessors, here.shared, false},
                                           nvfp4_grouped_device{1210, here.multiprocessors, 99 * 1024, false}}) {
        // the table of an older device runs here as well
        const nvfp4_grouped_plan plan = nvfp4_grouped_plan_of(p.args(none), d);
        all = plan.kernel != nullptr && right(p, {"planned", *plan.kernel, d.wgmma}, "") && all;
    }
    return said(all, "plans");
}

// Of one configuration; quick: on the emulator.
static bool rung_is_right(const rung & r, const bool quick) {
    const int64_t tile = r.kernel.tile_n;
    bool          all  = wrong_arguments_are_refused(r);
    all = strange_ids_are_right(r) && all;
    all = every_code_is_right(r) && all;
    all = right({3, 1, 1, 256, 1}, r, {1}, "") && all;
    all = right({5, 5, 65, 512, 3, 5, true}, r, routed_evenly({5, 5, 65, 512, 3}, 7), ", all experts") && all;
    all = right({7, 2, 129, 768, 40, 1, true}, r, routed_evenly({7, 2, 129, 768, 40}, 8), "") && all;
    all = right({8, 2, 33, 512, 20, 2}, r, routed_evenly({8, 2, 33, 512, 20}, 9), ", every size", 24) && all;
    all = right({7, 3, 17, 256, 400, 1, true}, r, routed_evenly({7, 3, 17, 256, 400}, 11), ", many ids") && all;
    // all on one expert; all empty but two
    all = right({6, 1, 20, 256, 70}, r, std::vector<int32_t>(70, 3), ", all on one expert") && all;
    std::vector<int32_t> two;
    for (int i = 0; i < 44; ++i) {
        two.insert(two.end(), {i % 2 ? 0 : 30, i % 2 ? 30 : 0});
    }
    all = right({31, 2, 20, 256, 44, 2}, r, two, ", all empty but two") && all;
    all = counts_are_right(r, {3, 1, 17, 256, 1}, {tile - 1, tile, tile + 1}) && all;
    all = counts_are_right(r, {3, 1, 17, 256, 1}, {127, 128, 129}) && all;
    all = replays_are_right(r, {9, 2, 33, quick ? 512 : 2048, 30, 2}) && all;
    all = permutations_are_seen(r, {6, 2, 16, 256, 10}) && all;
    return repeats_agree(r, {6, 2, 70, 512, 20}) && all;
}
