// The configurations to choose a table's from.

#pragma once

#include "contest.cuh"

static void add_tuned_packed_wgmma_rungs(std::vector<rung> & rungs) {
    add_packed_wgmma_rungs<256, 16, 4, 4, 256, 4, 1>(rungs);
    add_packed_wgmma_rungs<128, 16, 2, 7, 256, 7, 1>(rungs);
    add_packed_wgmma_rungs<128, 32, 2, 5, 256, 5, 1>(rungs);
    add_packed_wgmma_rungs<128, 64, 2, 4, 256, 3, 1>(rungs);
    add_packed_wgmma_rungs<128, 64, 2, 5, 128, 6, 1>(rungs);
    add_packed_wgmma_rungs<256, 32, 4, 3, 256, 4, 1>(rungs);
    add_packed_wgmma_rungs<256, 32, 4, 4, 128, 6, 1>(rungs);
    add_packed_wgmma_rungs<256, 64, 4, 3, 256, 3, 1>(rungs);
    add_packed_wgmma_rungs<256, 64, 4, 4,  64, 6, 1>(rungs);
    add_packed_wgmma_rungs<128, 128, 2, 4, 64, 8, 1>(rungs);
    add_packed_wgmma_rungs<256, 128, 2, 3, 64, 6, 1>(rungs);
    add_packed_wgmma_rungs<128, 256, 2, 3, 64, 5, 1>(rungs);
    add_packed_wgmma_rungs<128, 256, 2, 4, 64, 4, 1>(rungs);
}

// The first group fits the shared memory of sm_90, the last that of sm_12x.
static void add_tuned_packed_mma_rungs(std::vector<rung> & rungs) {
    add_packed_mma_rungs< 64,  16, 16, 16, 3, 256, 3, 4>(rungs);
    add_packed_mma_rungs<128,  16, 16, 16, 3, 256, 3, 2>(rungs);
    add_packed_mma_rungs<128,  16, 32, 16, 3, 128, 6, 2>(rungs);
    add_packed_mma_rungs<256,  16, 32, 16, 4, 256, 4, 1>(rungs);
    add_packed_mma_rungs< 64,  32, 16, 32, 3, 256, 2, 3>(rungs);
    add_packed_mma_rungs<128,  32, 32, 32, 2, 128, 6, 2>(rungs);
    add_packed_mma_rungs<256,  32, 32, 32, 3, 256, 4, 1>(rungs);
    add_packed_mma_rungs< 64,  64, 16, 64, 3, 128, 4, 2>(rungs);
    add_packed_mma_rungs<128,  64, 32, 32, 4, 128, 7, 1>(rungs);
    add_packed_mma_rungs<128,  64, 32, 64, 2, 128, 3, 2>(rungs);
    add_packed_mma_rungs<256,  64, 32, 64, 3, 128, 5, 1>(rungs);
    add_packed_mma_rungs<256,  64, 64, 32, 3, 128, 5, 1>(rungs);
    add_packed_mma_rungs< 64, 128, 32, 64, 2, 128, 2, 2>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 4,  64, 8, 1>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 4, 128, 4, 1>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 3, 128, 5, 1>(rungs);

    add_packed_mma_rungs< 64,  16, 16, 16, 2, 128, 4, 2>(rungs);
    add_packed_mma_rungs< 64,  32, 16, 32, 2, 128, 3, 2>(rungs);
    add_packed_mma_rungs< 64,  64, 16, 64, 2,  64, 3, 2>(rungs);
    add_packed_mma_rungs<128, 128, 32, 64, 2,  64, 3, 1>(rungs);
}

static std::vector<rung> tuned_rungs() {
    std::vector<rung> rungs = packed_wgmma_rungs();
    if (w4a16_has_wgmma()) {
        add_tuned_packed_wgmma_rungs(rungs);
    }
    if (device_here().cc >= 900) {
        add_tuned_packed_mma_rungs(rungs);
    }
    for (const auto & more : {packed_mma_rungs(), wgmma_rungs(), fragment_rungs()}) {
        rungs.insert(rungs.end(), more.begin(), more.end());
    }
    add_rungs<false, 128, 128, 32, 128, 2, 4, 2>(rungs);
    add_rungs<false, 128, 128, 64, 64, 2, 4, 2>(rungs);
    add_rungs<false, 128, 128, 32, 64, 2, 4, 2>(rungs);
    add_rungs<true, 128, 128, 32, 64, 2, 4, 1>(rungs);
    add_rungs<true, 256, 128, 32, 128, 2, 4, 1>(rungs);
    add_rungs<true, 128, 64, 32, 64, 2, 4, 3>(rungs);
    add_rungs<true, 128, 64, 32, 64, 3, 4, 2>(rungs);
    add_rungs<true, 128, 32, 32, 32, 2, 4, 4>(rungs);
    add_rungs<true, 128, 16, 32, 16, 4, 8, 2>(rungs);
    add_rungs<true, 128, 16, 32, 16, 2, 4, 4>(rungs);
    add_rungs<true, 64, 16, 16, 16, 4, 8, 4>(rungs);
    add_rungs<true, 64, 64, 16, 64, 3, 4, 3>(rungs);

    const int shared = (int) device_here().shared;
    rungs.erase(std::remove_if(rungs.begin(), rungs.end(),
                               [&](const rung & r) { return r.of(weight_type::Q4_K).shared > shared; }),
                rungs.end());
    return rungs;
}

// Skips tiles much wider than the product, which compute unused columns, and much narrower ones, which reread the weights.
static bool worth_it(const rung & r, const gemm_shape & s) {
    const int64_t tile_n = r.of(s.type).tile_n;
    return r.of(s.type).plan != nullptr ||
           (tile_n <= std::max<int64_t>(16, s.n) && s.n <= 16 * tile_n && (tile_n >= 64 || s.n <= 4 * tile_n));
}

static bool tune() {
    std::vector<rung>       rungs   = tuned_rungs();
    const std::vector<rung> planned = planned_rungs();
    rungs.insert(rungs.end(), planned.begin(), planned.end());
    bench b;
    bool  all = true;
    for (const weight_type type : TYPES) {
        for (const int64_t n : {1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048}) {
            const gemm_shape  s = {type, 4096, n, 14336};
            const field       f(s, true);
            std::vector<rung> worth;
            std::copy_if(rungs.begin(), rungs.end(), std::back_inserter(worth), [&](const rung & r) { return worth_it(r, s); });
            for (const double us : contest(b, "ffn_down", f, contestants_of(worth, f), JUDGED, 7)) {
                all = us > 0.0 && all;
            }
        }
    }
    return all;
}
