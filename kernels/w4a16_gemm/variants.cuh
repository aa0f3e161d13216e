// What there is to be tested and timed: the rungs, and the tiles and divisions of the last of them.

#pragma once

#include "../common/buffer.cuh"
#include "../common/reference.cuh"
#include "ladder/01_naive.cu"
#include "ladder/02_tiled.cu"
#include "w4a16_plan.cuh"

#include <functional>
#include <string>

// m, n, k as test-backend-ops counts them: rows of the weights, columns (tokens), what is summed over.
struct gemm_shape {
    weight_type type;
    int64_t     m, n, k;

    std::string text() const {
        const auto size = [](const char * name, int64_t value) { return name + std::to_string(value); };
        return name_of(type) + size(" m=", m) + size(" n=", n) + size(" k=", k);
    }
};

using gemm_t = cudaError_t (*)(const void *, const float *, float *, void *, int64_t, int64_t, int64_t, int64_t,
                               cudaStream_t);

// How the work is divided: a tile a block, or the same share for each of so many blocks as a multiprocessor has room
// for, times the multiprocessors.
enum class division { TILES, SHARES };

struct variant {
    gemm_t       launch;
    int64_t      tile_m, tile_n;
    int64_t      blocks;  // of a multiprocessor
    size_t       (*scratch_bytes)(int64_t, int64_t, int64_t, int64_t);
    const void * kernel;  // nullptr: there is no choice of blocks
    int          threads, shared;
    w4a16_plan   (*plan)(int64_t, int64_t, int64_t);  // nullptr: the tiles are always the same
};

struct rung {
    std::string name;
    bool        f16;       // else bf16
    variant     by_type[2];
    division    divided;

    const variant & of(weight_type type) const { return by_type[(int) type]; }

    int64_t k_unit(weight_type type) const { return f16 ? W4A16_UNIT : block_size(type); }
};

static inline w4a16_device device_here() {
    int major = 0, minor = 0, multiprocessors = 0, shared = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return {100 * major + 10 * minor, multiprocessors, (size_t) shared};
}

static inline int64_t blocks_of(const rung & r, const gemm_shape & s) {
    const variant & v = r.of(s.type);
    if (v.plan != nullptr) {
        return v.plan(s.m, s.n, s.k).blocks;
    }
    const int64_t tiles = (s.m + v.tile_m - 1) / v.tile_m * ((s.n + v.tile_n - 1) / v.tile_n);
    const int64_t work  = tiles * (s.k / W4A16_UNIT);
    return r.divided == division::TILES ? tiles : std::min(work, device_here().multiprocessors * v.blocks);
}

// -- the rungs before --

template <w4a16_type type>
static cudaError_t launch_naive(const void * w, const float * x, float * y, void * scratch, int64_t m, int64_t n,
                                int64_t k, int64_t /*blocks*/, cudaStream_t stream) {
    return naive_gemm_cuda<type>(w, x, y, scratch, m, n, k, stream);
}

template <w4a16_type type>
static cudaError_t launch_tiled(const void * w, const float * x, float * y, void * scratch, int64_t m, int64_t n,
                                int64_t k, int64_t /*blocks*/, cudaStream_t stream) {
    return tiled_gemm_cuda<type>(w, x, y, scratch, m, n, k, stream);
}

static inline size_t bf16_bytes(int64_t /*m*/, int64_t n, int64_t k, int64_t /*blocks*/) {
    return tiled_gemm_scratch_bytes(n, k);
}

static const rung NAIVE = {"naive", false,
    {{launch_naive<w4a16_type::Q4_0>, 16, 8, 1, bf16_bytes, nullptr, 32, 0, nullptr},
     {launch_naive<w4a16_type::Q4_K>, 16, 8, 1, bf16_bytes, nullptr, 32, 0, nullptr}}, division::TILES};
static const rung TILED = {"tiled", false,
    {{launch_tiled<w4a16_type::Q4_0>, 128, 128, 1, bf16_bytes, nullptr, 256, 0, nullptr},
     {launch_tiled<w4a16_type::Q4_K>, 128, 128, 1, bf16_bytes, nullptr, 256, 0, nullptr}}, division::TILES};

// -- this one --

template <typename C> static variant variant_of() {
    return {w4a16_gemm_cuda<C>, C::TILE_M, C::TILE_N, C::BLOCKS, w4a16_scratch_bytes<C>,
            reinterpret_cast<const void *>(&w4a16_gemm<C>), C::THREADS, C::SHARED, nullptr};
}

// Named by the tile, the warp's, stages of weights and of activations, blocks a multiprocessor; `a`: dequantised ahead.
template <bool ahead, int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_stages, int blocks>
static void add_rungs(std::vector<rung> & rungs) {
    using w4a16_0 = w4a16_config<w4a16_type::Q4_0, tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks, ahead>;
    using w4a16_K = w4a16_config<w4a16_type::Q4_K, tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks, ahead>;
    char name[64];
    snprintf(name, sizeof(name), "%dx%d/%dx%d/%d,%d/%d%s", tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks,
             ahead ? "a" : "");
    for (const division divided : {division::TILES, division::SHARES}) {
        rungs.push_back({std::string(name) + (divided == division::TILES ? ":tiles" : ":shares"), true,
                         {variant_of<w4a16_0>(), variant_of<w4a16_K>()}, divided});
    }
}

// Two in which every part of the kernel is reached.
static inline std::vector<rung> fragment_rungs() {
    std::vector<rung> rungs;
    add_rungs<true, 128, 128, 32, 128, 2, 4, 2>(rungs);
    add_rungs<true, 128, 32, 32, 32, 3, 8, 2>(rungs);
    return rungs;
}

// -- as a table has it --

// The table of the device that is here, or the one of an sm_121 of as many multiprocessors.
template <bool here> static w4a16_device planned_device() {
    const w4a16_device device = device_here();
    return here ? device : w4a16_device{1210, device.multiprocessors, 99 * 1024};
}

template <w4a16_type type, bool here> static w4a16_plan planned(int64_t m, int64_t n, int64_t k) {
    return w4a16_plan_of(type, m, n, k, planned_device<here>());
}

template <w4a16_type type, bool here>
static cudaError_t launch_planned(const void * w, const float * x, float * y, void * scratch, int64_t m, int64_t n,
                                  int64_t k, int64_t /*blocks*/, cudaStream_t stream) {
    const w4a16_plan plan = planned<type, here>(m, n, k);
    return plan.kernel == nullptr ? cudaErrorInvalidValue : w4a16_mul_mat_cuda(plan, w, x, y, scratch, m, n, k, stream);
}

template <w4a16_type type, bool here>
static size_t planned_scratch_bytes(int64_t m, int64_t n, int64_t k, int64_t /*blocks*/) {
    return planned<type, here>(m, n, k).scratch_bytes;
}

template <w4a16_type type, bool here> static variant planned_variant() {
    return {launch_planned<type, here>, 0, 0, 0, planned_scratch_bytes<type, here>, nullptr, 0, 0, planned<type, here>};
}

static const rung PLANNED = {"planned", true,
    {planned_variant<w4a16_type::Q4_0, true>(), planned_variant<w4a16_type::Q4_K, true>()}, division::SHARES};
static const rung PLANNED_121 = {"planned-121", true,
    {planned_variant<w4a16_type::Q4_0, false>(), planned_variant<w4a16_type::Q4_K, false>()}, division::SHARES};
