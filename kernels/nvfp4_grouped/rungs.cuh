// The configurations that are tested and timed.

#pragma once

#include "nvfp4_grouped_plan.cuh"

#include <string>
#include <vector>

struct rung {
    std::string          name;
    nvfp4_grouped_kernel kernel;
    bool                 wgmma;
};

template <int tile_m, int tile_n, int groups, int w_stages, int x_step, int x_stages, int blocks, bool wgmma>
static rung rung_of() {
    const std::string tile = std::to_string(tile_m) + "x" + std::to_string(tile_n);
    return {(wgmma ? "wgmma " : "mma ") + tile + " w" + std::to_string(w_stages) + " x" + std::to_string(x_step) + "*" +
                std::to_string(x_stages) + " b" + std::to_string(blocks),
            nvfp4_grouped_kernel_of<tile_m, tile_n, groups, w_stages, x_step, x_stages, blocks, wgmma>(228), wgmma};
}

// What `tune` times: the rows of the tables first.
static std::vector<rung> all_rungs() {
    return {rung_of<128, 64, 2, 5, 128, 5, 1, true>(),  rung_of<128, 192, 2, 4, 64, 5, 1, true>(),
            rung_of<64, 32, 1, 6, 256, 3, 2, false>(),  rung_of<128, 64, 2, 5, 128, 5, 1, false>(),
            rung_of<128, 64, 2, 2, 64, 4, 1, false>(),
#ifndef NVFP4_GROUPED_FEW_RUNGS
            rung_of<64, 32, 1, 6, 256, 3, 2, true>(),   rung_of<64, 16, 1, 5, 128, 3, 3, true>(),
            rung_of<128, 16, 2, 4, 256, 3, 2, true>(),  rung_of<128, 32, 2, 3, 256, 3, 2, false>(),
            rung_of<128, 128, 2, 5, 64, 6, 1, true>(),  rung_of<128, 160, 2, 4, 64, 5, 1, true>(),
            rung_of<192, 32, 3, 5, 256, 3, 1, true>(),  rung_of<192, 64, 3, 4, 128, 4, 1, true>(),
            rung_of<192, 128, 3, 3, 64, 6, 1, true>(),  rung_of<256, 32, 4, 4, 256, 3, 1, true>(),
#endif // NVFP4_GROUPED_FEW_RUNGS
    };
}

static nvfp4_grouped_device this_device() {
    nvfp4_grouped_device d = {};
    int                  device, major, minor, shared;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    d.cc     = 100 * major + 10 * minor;
    d.shared = shared;
    d.wgmma  = d.cc == 900 && nvfp4_grouped_has_wgmma();
    return d;
}

// Those that run here.
static std::vector<rung> rungs_here() {
    const nvfp4_grouped_device d = this_device();
    std::vector<rung>          here;
    for (const rung & r : all_rungs()) {
        if ((size_t) r.kernel.shared <= d.shared && (!r.wgmma || d.wgmma)) {
            here.push_back(r);
        }
    }
    return here;
}
