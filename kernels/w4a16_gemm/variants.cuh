// The configurations that are tested and timed, with both divisions of the work, and what the tables plan.

#pragma once

#include "../common/buffer.cuh"
#include "../common/reference.cuh"
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

static inline w4a16_type w4a16_of(weight_type type) {
    return type == weight_type::Q4_0 ? w4a16_type::Q4_0 : w4a16_type::Q4_K;
}

using gemm_t = cudaError_t (*)(const void *, const float *, float *, void *, int64_t, int64_t, int64_t, int64_t,
                               cudaStream_t);

// How the work is divided. TILES: a tile a block. SHARES: one equal share for each block that fits the GPU at once.
enum class division { TILES, SHARES };

struct variant {
    gemm_t       launch;
    int64_t      tile_m, tile_n;
    int64_t      blocks;  // of a multiprocessor
    size_t       (*scratch_bytes)(int64_t, int64_t, int64_t, int64_t);
    int          shared;
    w4a16_plan   (*plan)(int64_t, int64_t, int64_t);  // nullptr: the tiles are always the same, the blocks any number
    bool         packed = false;  // the weights
    const w4a16_table * (*table)() = nullptr;  // the table that plans
};

struct rung {
    std::string name;
    variant     by_type[2];
    division    divided;

    const variant & of(weight_type type) const { return by_type[(int) type]; }
};

static inline w4a16_device device_here() {
    int major = 0, minor = 0, multiprocessors = 0, shared = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return {100 * major + 10 * minor, multiprocessors, (size_t) shared, w4a16_has_wgmma()};
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

// -- configurations --

template <typename C> static variant variant_of(gemm_t launch, bool packed = false) {
    return {launch, C::TILE_M, C::TILE_N, C::BLOCKS, w4a16_scratch_bytes<C>, C::SHARED, nullptr, packed};
}

// Adds a configuration with both divisions.
static inline void add_both(std::vector<rung> & rungs, const std::string & name, const variant & q4_0, const variant & q4_K) {
    rungs.push_back({name + ":tiles", {q4_0, q4_K}, division::TILES});
    rungs.push_back({name + ":shares", {q4_0, q4_K}, division::SHARES});
}

// Named by the tile, the warp's, stages of weights and of activations, blocks a multiprocessor; `a`: dequantised ahead.
template <bool ahead, int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_stages, int blocks>
static void add_rungs(std::vector<rung> & rungs) {
    using w4a16_0 = w4a16_config<w4a16_type::Q4_0, tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks, ahead>;
    using w4a16_K = w4a16_config<w4a16_type::Q4_K, tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks, ahead>;
    char name[64];
    snprintf(name, sizeof(name), "%dx%d/%dx%d/%d,%d/%d%s", tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks,
             ahead ? "a" : "");
    add_both(rungs, name, variant_of<w4a16_0>(w4a16_gemm_cuda<w4a16_0>), variant_of<w4a16_K>(w4a16_gemm_cuda<w4a16_K>));
}

// Named by the tile, its warpgroups, stages of weights and of activations, blocks a multiprocessor.
template <int tile_m, int tile_n, int groups, int w_stages, int x_stages, int blocks>
static void add_wgmma_rungs(std::vector<rung> & rungs) {
    using wgmma_0 = w4a16_wgmma_config<w4a16_type::Q4_0, tile_m, tile_n, groups, w_stages, x_stages, blocks>;
    using wgmma_K = w4a16_wgmma_config<w4a16_type::Q4_K, tile_m, tile_n, groups, w_stages, x_stages, blocks>;
    char name[64];
    snprintf(name, sizeof(name), "wgmma %dx%d/%d/%d,%d/%d", tile_m, tile_n, groups, w_stages, x_stages, blocks);
    add_both(rungs, name, variant_of<wgmma_0>(w4a16_wgmma_cuda<wgmma_0>), variant_of<wgmma_K>(w4a16_wgmma_cuda<wgmma_K>));
}

static inline std::vector<rung> wgmma_rungs() {
    std::vector<rung> rungs;
    if (!w4a16_has_wgmma()) {
        return rungs;
    }
    add_wgmma_rungs<256, 128, 2, 2, 8, 1>(rungs);
    add_wgmma_rungs<128, 32, 2, 4, 8, 2>(rungs);
    add_wgmma_rungs<128, 256, 2, 3, 4, 1>(rungs);
    add_wgmma_rungs<256, 64, 2, 3, 8, 1>(rungs);
    add_wgmma_rungs<128, 128, 2, 4, 8, 1>(rungs);
    add_wgmma_rungs<128, 64, 2, 3, 6, 2>(rungs);
    add_wgmma_rungs<128, 16, 2, 5, 8, 2>(rungs);
    add_wgmma_rungs<256, 16, 2, 5, 8, 1>(rungs);
    add_wgmma_rungs<256, 32, 2, 4, 8, 1>(rungs);
    return rungs;
}

// Named by the tile, its warpgroups, stages of weights, stages of activations x k of a stage, blocks a multiprocessor.
template <int tile_m, int tile_n, int groups, int w_stages, int x_step, int x_stages, int blocks>
static void add_packed_wgmma_rungs(std::vector<rung> & rungs) {
    using packed_0 = w4a16_packed_wgmma_config<w4a16_type::Q4_0, tile_m, tile_n, groups, w_stages, x_step, x_stages, blocks>;
    using packed_K = w4a16_packed_wgmma_config<w4a16_type::Q4_K, tile_m, tile_n, groups, w_stages, x_step, x_stages, blocks>;
    char name[64];
    snprintf(name, sizeof(name), "packed %dx%d/%d/%d,%dx%d/%d", tile_m, tile_n, groups, w_stages, x_stages, x_step, blocks);
    add_both(rungs, name, variant_of<packed_0>(w4a16_packed_wgmma_cuda<packed_0>, true), variant_of<packed_K>(w4a16_packed_wgmma_cuda<packed_K>, true));
}

// The same name, with the warp's part in place of the warpgroups.
template <int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_step, int x_stages, int blocks>
static void add_packed_mma_rungs(std::vector<rung> & rungs) {
    using packed_0 =
        w4a16_packed_mma_config<w4a16_type::Q4_0, tile_m, tile_n, warp_m, warp_n, w_stages, x_step, x_stages, blocks>;
    using packed_K =
        w4a16_packed_mma_config<w4a16_type::Q4_K, tile_m, tile_n, warp_m, warp_n, w_stages, x_step, x_stages, blocks>;
    char name[64];
    snprintf(name, sizeof(name), "packed %dx%d/%dx%d/%d,%dx%d/%d", tile_m, tile_n, warp_m, warp_n, w_stages, x_stages,
             x_step, blocks);
    add_both(rungs, name, variant_of<packed_0>(w4a16_packed_mma_cuda<packed_0>, true), variant_of<packed_K>(w4a16_packed_mma_cuda<packed_K>, true));
}

// Two of different steps: one whose copying warps give registers away, one whose do not.
static inline std::vector<rung> packed_wgmma_rungs() {
    std::vector<rung> rungs;
    if (w4a16_has_wgmma()) {
        add_packed_wgmma_rungs<256, 64, 4, 4, 128, 3, 1>(rungs);
        add_packed_wgmma_rungs<128, 16, 2, 3, 256, 3, 2>(rungs);
    }
    return rungs;
}

// Two of different steps: one warp along n, and two.
static inline std::vector<rung> packed_mma_rungs() {
    std::vector<rung> rungs;
    if (device_here().cc >= 900) {
        add_packed_mma_rungs<128, 64, 32, 32, 2, 64, 4, 1>(rungs);
        add_packed_mma_rungs<128, 16, 32, 16, 2, 128, 3, 2>(rungs);
    }
    return rungs;
}

// Two that together reach every part of the kernel.
static inline std::vector<rung> fragment_rungs() {
    std::vector<rung> rungs;
    add_rungs<true, 128, 128, 32, 128, 2, 4, 2>(rungs);
    add_rungs<true, 128, 32, 32, 32, 3, 8, 2>(rungs);
    return rungs;
}

// -- as a table has it --

// Which table: of this device, of its architecture without wgmma (PLAIN), or of an sm_121, each for packed weights too.
enum class table_of { HERE, PACKED, PLAIN, PLAIN_PACKED, SM_121, SM_121_PACKED };

static constexpr bool is_packed(table_of of) {
    return of == table_of::PACKED || of == table_of::PLAIN_PACKED || of == table_of::SM_121_PACKED;
}

template <table_of of> static w4a16_device planned_device() {
    w4a16_device device = device_here();
    if (of != table_of::HERE && of != table_of::PACKED) {
        device.wgmma = false;
    }
    if (of == table_of::SM_121 || of == table_of::SM_121_PACKED) {
        device.cc     = 1210;
        device.shared = 99 * 1024;
    }
    return device;
}

template <w4a16_type type, table_of of> static const w4a16_table * planned_table() {
    const w4a16_device device = planned_device<of>();
    return is_packed(of) ? w4a16_packed_table_for(type, device) : &w4a16_table_for(type, device);
}

template <w4a16_type type, table_of of> static w4a16_plan planned(int64_t m, int64_t n, int64_t k) {
    const auto plan_of = is_packed(of) ? w4a16_packed_plan_of : w4a16_plan_of;
    return plan_of(type, m, n, k, planned_device<of>());
}

template <w4a16_type type, table_of of>
static cudaError_t launch_planned(const void * w, const float * x, float * y, void * scratch, int64_t m, int64_t n,
                                  int64_t k, int64_t /*blocks*/, cudaStream_t stream) {
    const w4a16_plan plan = planned<type, of>(m, n, k);
    return plan.kernel == nullptr ? cudaErrorInvalidValue : w4a16_mul_mat_cuda(plan, w, x, y, scratch, m, n, k, stream);
}

template <w4a16_type type, table_of of>
static size_t planned_scratch_bytes(int64_t m, int64_t n, int64_t k, int64_t /*blocks*/) {
    return planned<type, of>(m, n, k).scratch_bytes;
}

template <w4a16_type type, table_of of> static variant planned_variant() {
    return {launch_planned<type, of>, 0, 0, 0, planned_scratch_bytes<type, of>, 0, planned<type, of>,
            is_packed(of), planned_table<type, of>};
}

template <table_of of> static rung planned_rung(const char * name) {
    return {name, {planned_variant<w4a16_type::Q4_0, of>(), planned_variant<w4a16_type::Q4_K, of>()}, division::SHARES};
}

static const rung PLANNED              = planned_rung<table_of::HERE>("planned");
static const rung PLANNED_PACKED       = planned_rung<table_of::PACKED>("planned-packed");
static const rung PLANNED_PLAIN        = planned_rung<table_of::PLAIN>("planned-plain");
static const rung PLANNED_PLAIN_PACKED = planned_rung<table_of::PLAIN_PACKED>("planned-plain-packed");
static const rung PLANNED_121          = planned_rung<table_of::SM_121>("planned-121");
static const rung PLANNED_121_PACKED   = planned_rung<table_of::SM_121_PACKED>("planned-121-packed");

static inline bool has_table(const rung & r) { return r.of(weight_type::Q4_0).table() != nullptr; }

// The rungs that a caller gets on this device: unpacked weights and, where a table plans them, packed ones.
static inline std::vector<rung> rungs_here() {
    std::vector<rung> rungs = {PLANNED};
    if (has_table(PLANNED_PACKED)) {
        rungs.push_back(PLANNED_PACKED);
    }
    return rungs;
}

static inline std::vector<rung> planned_rungs() {
    std::vector<rung> rungs = rungs_here();
    rungs.push_back(PLANNED_PLAIN);
    if (has_table(PLANNED_PLAIN_PACKED)) {
        rungs.push_back(PLANNED_PLAIN_PACKED);
    }
    rungs.push_back(PLANNED_121);
    if (device_here().cc >= 900) {
        rungs.push_back(PLANNED_121_PACKED);
    }
    return rungs;
}
