// Which tiles a product takes on which device, and among how many blocks its work is divided.
//
//   const w4a16_plan plan = w4a16_plan_of(type, m, n, k, device);
//   if (plan.kernel != nullptr) { w4a16_mul_mat_cuda(plan, w, x, y, scratch, m, n, k, stream); }
//
//   w4a16_packed_plan_of(type, m, n, k, device)   the same for weights that w4a16_pack_cuda packed, which are then w
//
//   type, m, n, k  as in w4a16_gemm.cuh, n and m at least 1
//   device         what w4a16_device says of it
//   plan           kernel nullptr: there is none. k is no multiple of 256, the product is empty or too large, the device
//                  is older than sm_80 or has less shared memory than the configuration needs; of packed weights also
//                  where it is neither of compute capability 9.0 nor of 12.x
//   scratch        plan.scratch_bytes bytes; all pointers as in w4a16_gemm.cuh
//
// A table has rows of increasing n: a product takes the first that has as many columns, or the one before where that one's
// tiles are too few for the device, and so on. They are the configurations that were fastest of those that `./harness tune` times;
// README.md has the times.

#pragma once

#include "w4a16_packed_mma.cuh"
#include "w4a16_packed_wgmma.cuh"

struct w4a16_device {
    int    cc;               // compute capability, or what the code that runs was compiled for if that is less: 900 is 9.0
    int    multiprocessors;
    size_t shared;           // bytes of shared memory that a block can have
    bool   wgmma;            // the code that runs on it was compiled for sm_90a: w4a16_has_wgmma()
};

// A configuration whose template arguments are known.
struct w4a16_kernel {
    cudaError_t (*launch)(const void * w, const float * x, float * y, void * scratch, int64_t m, int64_t n, int64_t k,
                          int64_t blocks, cudaStream_t stream);
    size_t (*scratch_bytes)(int64_t m, int64_t n, int64_t k, int64_t blocks);

    int tile_m, tile_n;
    int blocks;  // of a multiprocessor
    int shared;  // bytes of a block
};

struct w4a16_plan {
    const w4a16_kernel * kernel;
    int64_t              blocks;
    size_t               scratch_bytes;
};

// -- tables --

struct w4a16_table_row {
    int64_t      max_n;
    w4a16_kernel kernel;
    int          fills = 0;  // only where its tiles are such a part of the multiprocessors, 5: a fifth, else the row before
};

struct w4a16_table {
    const w4a16_table_row * rows;
    int                     count;
    int64_t                 max_n;  // for more columns it is faster to dequantise and leave the product to a library
    int64_t                 min_n;  // for fewer it is not worth it to pack weights
};

template <typename C> static constexpr w4a16_kernel w4a16_kernel_by(const decltype(w4a16_kernel::launch) launch) {
    return {launch, w4a16_scratch_bytes<C>, C::TILE_M, C::TILE_N, C::BLOCKS, C::SHARED};
}

template <w4a16_type type, int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_stages, int blocks>
static constexpr w4a16_kernel w4a16_kernel_of() {
    using C = w4a16_config<type, tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks, true>;
    return w4a16_kernel_by<C>(w4a16_gemm_cuda<C>);
}

template <w4a16_type type, int tile_m, int tile_n, int w_stages, int x_stages, int blocks>
static constexpr w4a16_kernel w4a16_wgmma_kernel_of() {
    using C = w4a16_wgmma_config<type, tile_m, tile_n, 2, w_stages, x_stages, blocks>;
    return w4a16_kernel_by<C>(w4a16_wgmma_cuda<C>);
}

template <w4a16_type type, int tile_m, int tile_n, int groups, int w_stages, int x_step, int x_stages, int blocks>
static constexpr w4a16_kernel w4a16_packed_wgmma_kernel_of() {
    using C = w4a16_packed_wgmma_config<type, tile_m, tile_n, groups, w_stages, x_step, x_stages, blocks>;
    return w4a16_kernel_by<C>(w4a16_packed_wgmma_cuda<C>);
}

template <w4a16_type type, int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_step, int x_stages, int blocks>
static constexpr w4a16_kernel w4a16_packed_mma_kernel_of() {
    using C = w4a16_packed_mma_config<type, tile_m, tile_n, warp_m, warp_n, w_stages, x_step, x_stages, blocks>;
    return w4a16_kernel_by<C>(w4a16_packed_mma_cuda<C>);
}

template <int count>
static constexpr w4a16_table w4a16_table_of(const w4a16_table_row (&rows)[count], const int64_t max_n, const int64_t min_n = 1) {
    return rows[0].fills == 0 ? w4a16_table{rows, count, max_n, min_n} : throw "the first row has none before it to give way to";
}

// Whether the blocks that a row counts on fit a multiprocessor: it keeps 1 KB for each of them.
static constexpr bool w4a16_table_fits(const w4a16_table & table, const int multiprocessor_kb) {
    for (int i = 0; i < table.count; ++i) {
        const w4a16_kernel & kernel = table.rows[i].kernel;
        if (kernel.blocks * (kernel.shared + 1024) > multiprocessor_kb * 1024) {
            return false;
        }
    }
    return true;
}

// From sm_80 on, with the 100 KB that a multiprocessor of sm_86, sm_89 and sm_12x has. Not measured on any of them.
template <w4a16_type type> struct w4a16_sm_80 {
    static constexpr w4a16_table_row ROWS[] = {
        {16,        w4a16_kernel_of<type, 128,  16, 32, 16, 2, 4, 2>()},
        {32,        w4a16_kernel_of<type, 128,  32, 32, 32, 2, 2, 2>()},
        {64,        w4a16_kernel_of<type,  64,  64, 16, 64, 2, 2, 2>()},
        {INT64_MAX, w4a16_kernel_of<type, 128, 128, 32, 64, 2, 2, 1>()},
    };
    static constexpr w4a16_table TABLE = w4a16_table_of(ROWS, INT64_MAX);
    static_assert(w4a16_table_fits(TABLE, 100), "shared memory is too small");
};

// Measured on an H200.
template <w4a16_type type> struct w4a16_sm_90 {
    static constexpr w4a16_table_row ROWS[] = {
        {16,        w4a16_kernel_of<type, 128,  16, 32,  16, 4, 8, 2>()},
        {32,        w4a16_kernel_of<type, 128,  32, 32,  32, 3, 8, 2>()},
        {192,       w4a16_kernel_of<type, 128,  64, 32,  64, 3, 4, 2>()},
        {INT64_MAX, w4a16_kernel_of<type, 128, 128, 32, 128, 2, 4, 2>()},
    };
    static constexpr w4a16_table TABLE = w4a16_table_of(ROWS, 160);
    static_assert(w4a16_table_fits(TABLE, 228), "shared memory is too small");
};

// The same with packed weights.
template <w4a16_type type> struct w4a16_sm_90_packed {
    static constexpr w4a16_table_row ROWS[] = {
        {16,        w4a16_packed_mma_kernel_of<type, 128,  16, 16, 16, 3, 256, 3, 2>()},
        {32,        w4a16_packed_mma_kernel_of<type, 128,  32, 32, 32, 2, 128, 6, 2>()},
        {64,        w4a16_packed_mma_kernel_of<type,  64,  64, 16, 64, 3, 128, 4, 2>()},
        {192,       w4a16_packed_mma_kernel_of<type, 256,  64, 32, 64, 3, 128, 5, 1>()},
        {INT64_MAX, w4a16_packed_mma_kernel_of<type, 128, 128, 32, 64, 3, 128, 5, 1>()},
    };
    static constexpr w4a16_table TABLE = w4a16_table_of(ROWS, 256);
    static_assert(w4a16_table_fits(TABLE, 228), "shared memory is too small");
};

// Measured on an H200, and the row of up to 8 columns on H100s. Of 1024 columns a library is level, of 2048 it takes 0.9 to
// 1.0 of the time, of fewer it is slower.
template <w4a16_type type> struct w4a16_sm_90a {
    static constexpr w4a16_table_row ROWS[] = {
        {8,         w4a16_wgmma_kernel_of<type, 256,   8, 5, 8, 1>()},
        {16,        w4a16_wgmma_kernel_of<type, 128,  16, 5, 8, 2>()},
        {32,        w4a16_wgmma_kernel_of<type, 128,  32, 4, 8, 2>()},
        {64,        w4a16_wgmma_kernel_of<type, 256,  64, 3, 8, 1>(), 5},
        {128,       w4a16_wgmma_kernel_of<type, 128, 128, 4, 8, 1>(), 5},
        {INT64_MAX, w4a16_wgmma_kernel_of<type, 128, 256, 3, 4, 1>(), 3},
    };
    static constexpr w4a16_table TABLE = w4a16_table_of(ROWS, INT64_MAX);
    static_assert(w4a16_table_fits(TABLE, 228), "shared memory is too small");
};

// The same with packed weights: of few columns mma.sync's is level, and faster where weights come from memory.
template <w4a16_type type> struct w4a16_sm_90a_packed {
    static constexpr w4a16_table_row ROWS[] = {
        {16,        w4a16_packed_mma_kernel_of<type, 128,  16, 16, 16, 3, 256, 3, 2>()},
        {32,        w4a16_packed_wgmma_kernel_of<type, 128,  32, 2, 5, 256, 5, 1>()},
        {64,        w4a16_packed_wgmma_kernel_of<type, 128,  64, 2, 4, 256, 3, 1>(), 5},
        {128,       w4a16_packed_wgmma_kernel_of<type, 128, 128, 2, 4,  64, 8, 1>(), 5},
        {192,       w4a16_packed_wgmma_kernel_of<type, 128,  64, 2, 4, 256, 3, 1>(), 5},
        {512,       w4a16_packed_wgmma_kernel_of<type, 128, 128, 2, 4,  64, 8, 1>(), 5},
        {INT64_MAX, w4a16_packed_wgmma_kernel_of<type, 128, 256, 2, 3,  64, 5, 1>(), 2},
    };
    static constexpr w4a16_table TABLE = w4a16_table_of(ROWS, INT64_MAX);
    static_assert(w4a16_table_fits(TABLE, 228), "shared memory is too small");
};

// sm_12x with packed weights. Not measured on any: 48 multiprocessors of an H200 made 1,451 flop a clock each of 128 columns
// and 1,587 of 512, and a GB10's tensor cores make 1,024 at most.
template <w4a16_type type> struct w4a16_sm_120_packed {
    static constexpr w4a16_table_row ROWS[] = {
        {INT64_MAX, w4a16_packed_mma_kernel_of<type, 128, 128, 32, 64, 2, 64, 3, 1>()},
    };
    static constexpr w4a16_table TABLE = w4a16_table_of(ROWS, INT64_MAX, 128);
    static_assert(w4a16_table_fits(TABLE, 100), "shared memory is too small");
};

// Of the current device: a program may have code for several.
static inline bool w4a16_has_wgmma() {
    return w4a16_wgmma_is_built<w4a16_wgmma_config<w4a16_type::Q4_K, 128, 256, 2, 3, 4, 1>>();
}

template <template <w4a16_type> class tables> static inline const w4a16_table & w4a16_table_in(const w4a16_type type) {
    return type == w4a16_type::Q4_0 ? tables<w4a16_type::Q4_0>::TABLE : tables<w4a16_type::Q4_K>::TABLE;
}

static inline const w4a16_table & w4a16_table_for(const w4a16_type type, const w4a16_device & device) {
    if (device.cc != 900) {
        return w4a16_table_in<w4a16_sm_80>(type);
    }
    return device.wgmma ? w4a16_table_in<w4a16_sm_90a>(type) : w4a16_table_in<w4a16_sm_90>(type);
}

// nullptr: nothing is planned for packed weights.
static inline const w4a16_table * w4a16_packed_table_for(const w4a16_type type, const w4a16_device & device) {
    if (device.cc >= 1200) {
        return &w4a16_table_in<w4a16_sm_120_packed>(type);
    }
    if (device.cc != 900) {
        return nullptr;
    }
    return device.wgmma ? &w4a16_table_in<w4a16_sm_90a_packed>(type) : &w4a16_table_in<w4a16_sm_90_packed>(type);
}

// -- plan --

// A block a tile where tiles fill 15/16 of the blocks that the multiprocessors take, over as many rounds as it needs:
// there is nothing to add up then. Else as many blocks as there is room for, of the same share each.
static inline int64_t w4a16_blocks(const w4a16_kernel & kernel, const int64_t tiles, const int64_t units,
                                   const int multiprocessors) {
    const int64_t room   = (int64_t) kernel.blocks * multiprocessors;
    const int64_t rounds = (tiles + room - 1) / room;
    if (16 * tiles >= 15 * rounds * room) {
        return tiles;
    }
    return tiles * units < room ? tiles * units : room;
}

static inline w4a16_plan w4a16_plan_in(const w4a16_table & table, const int64_t m, const int64_t n, const int64_t k,
                                       const w4a16_device & device) {
    const w4a16_plan none = {nullptr, 0, 0};
    if (m < 1 || n < 1 || k < 1 || k % W4A16_UNIT != 0 || device.cc < 800 || m > INT32_MAX / 2 || n > INT32_MAX / 2) {
        return none;
    }
    const w4a16_table_row * row = table.rows;
    while (n > row->max_n) {
        ++row;
    }
    const auto tiles_of = [&](const w4a16_kernel & kernel) {
        return (m + kernel.tile_m - 1) / kernel.tile_m * ((n + kernel.tile_n - 1) / kernel.tile_n);
    };
    // the parts of a tile are added up one after the other, which takes longest where tiles are wide and few
    while (row->fills > 0 && row->fills * tiles_of(row->kernel) < device.multiprocessors) {
        --row;
    }
    const w4a16_kernel & kernel = row->kernel;
    const int64_t        units  = k / W4A16_UNIT;
    const int64_t        tiles  = tiles_of(kernel);
    if (units > INT32_MAX / W4A16_UNIT || tiles > INT32_MAX / units || (size_t) kernel.shared > device.shared) {
        return none;
    }
    const int64_t blocks = w4a16_blocks(kernel, tiles, units, device.multiprocessors);
    return {&kernel, blocks, kernel.scratch_bytes(m, n, k, blocks)};
}

static inline w4a16_plan w4a16_plan_of(const w4a16_type type, const int64_t m, const int64_t n, const int64_t k,
                                       const w4a16_device & device) {
    return w4a16_plan_in(w4a16_table_for(type, device), m, n, k, device);
}

static inline w4a16_plan w4a16_packed_plan_of(const w4a16_type type, const int64_t m, const int64_t n, const int64_t k,
                                              const w4a16_device & device) {
    const w4a16_table * table = w4a16_packed_table_for(type, device);
    return table == nullptr ? w4a16_plan{nullptr, 0, 0} : w4a16_plan_in(*table, m, n, k, device);
}

static inline cudaError_t w4a16_mul_mat_cuda(const w4a16_plan & plan, const void * w, const float * x, float * y,
                                             void * scratch, const int64_t m, const int64_t n, const int64_t k,
                                             cudaStream_t stream) {
    return plan.kernel->launch(w, x, y, scratch, m, n, k, plan.blocks, stream);
}
