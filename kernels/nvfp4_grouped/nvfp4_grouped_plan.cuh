// Which tiles a product takes on which device.
//
//   const nvfp4_grouped_plan plan = nvfp4_grouped_plan_of(args, device);
//   if (plan.kernel != nullptr) { plan.kernel->launch(args, plan.blocks, stream); }
//
//   device    what nvfp4_grouped_device says of it
//   plan      kernel nullptr: there is none. A size or pointer is not as nvfp4_grouped.cuh wants it, or the device is older than
//             sm_90, or has less shared memory than the configuration needs
//   scratch   plan.scratch_bytes bytes: args.scratch is not looked at before
//
// A table has rows of increasing numbers of columns, those that an expert has in the mean: a product takes the first row that has
// as many. `./harness tune` times them beside others: README.md.

#pragma once

#include "nvfp4_grouped.cuh"

struct nvfp4_grouped_device {
    int    cc;               // compute capability, or what the code that runs was compiled for if that is less: 900 is 9.0
    int    multiprocessors;
    size_t shared;           // bytes of shared memory that a block can have
    bool   wgmma;            // the code that runs on it was compiled for sm_90a: nvfp4_grouped_has_wgmma()
};

// A configuration whose template arguments are known.
struct nvfp4_grouped_kernel {
    cudaError_t (*launch)(const nvfp4_grouped_args & args, int64_t blocks, cudaStream_t stream);
    cudaError_t (*prepare)(const nvfp4_grouped_args & args, cudaStream_t stream);  // all of it but the product
    size_t (*scratch_bytes)(const nvfp4_grouped_args & args);

    int tile_m, tile_n;
    int blocks;  // of a multiprocessor
    int shared;  // bytes of a block
};

struct nvfp4_grouped_plan {
    const nvfp4_grouped_kernel * kernel;
    int64_t                      blocks;
    size_t                       scratch_bytes;
};

struct nvfp4_grouped_row {
    int64_t              max_mean;
    nvfp4_grouped_kernel kernel;
};

struct nvfp4_grouped_table {
    const nvfp4_grouped_row * rows;
    int                       count;
};

template <int tile_m, int tile_n, int groups, int w_stages, int x_step, int x_stages, int blocks, bool wgmma>
static constexpr nvfp4_grouped_kernel nvfp4_grouped_kernel_of(const int multiprocessor_kb) {
    using C = nvfp4_grouped_config<tile_m, tile_n, groups, w_stages, x_step, x_stages, blocks, wgmma>;
    // a multiprocessor keeps 1 KB for each block
    return blocks * (C::SHARED + 1024) <= multiprocessor_kb * 1024
        ? nvfp4_grouped_kernel{nvfp4_grouped_cuda<C>, nvfp4_grouped_prepare_cuda<C>, nvfp4_grouped_scratch_bytes<C>, tile_m, tile_n,
                               blocks, C::SHARED}
        : throw "shared memory is too small";
}

static constexpr nvfp4_grouped_row NVFP4_GROUPED_SM_90A[] = {
    {48,        nvfp4_grouped_kernel_of<128,  64, 2, 5, 128, 5, 1, true>(228)},
    {INT64_MAX, nvfp4_grouped_kernel_of<128, 192, 2, 4,  64, 5, 1, true>(228)},
};

static constexpr nvfp4_grouped_row NVFP4_GROUPED_SM_90[] = {
    {12,        nvfp4_grouped_kernel_of< 64,  32, 1, 6, 256, 3, 2, false>(228)},
    {INT64_MAX, nvfp4_grouped_kernel_of<128,  64, 2, 5, 128, 5, 1, false>(228)},
};

static constexpr nvfp4_grouped_row NVFP4_GROUPED_SM_120[] = {
    {INT64_MAX, nvfp4_grouped_kernel_of<128, 64, 2, 2, 64, 4, 1, false>(100)},
};

template <int count> static constexpr nvfp4_grouped_table nvfp4_grouped_table_of(const nvfp4_grouped_row (&rows)[count]) {
    return {rows, count};
}

// count 0: there is none.
static inline nvfp4_grouped_table nvfp4_grouped_table_for(const nvfp4_grouped_device & device) {
    if (device.cc >= 1200) {
        return nvfp4_grouped_table_of(NVFP4_GROUPED_SM_120);
    }
    if (device.cc != 900) {
        return {nullptr, 0};
    }
    return device.wgmma ? nvfp4_grouped_table_of(NVFP4_GROUPED_SM_90A) : nvfp4_grouped_table_of(NVFP4_GROUPED_SM_90);
}

// Of the current device: a program may have code for several.
static inline bool nvfp4_grouped_has_wgmma() {
    return nvfp4_grouped_is_built<nvfp4_grouped_config<128, 192, 2, 4, 64, 5, 1, true>>();
}

static inline nvfp4_grouped_plan nvfp4_grouped_plan_of(nvfp4_grouped_args args, const nvfp4_grouped_device & device) {
    const nvfp4_grouped_plan  none  = {nullptr, 0, 0};
    const nvfp4_grouped_table table = nvfp4_grouped_table_for(device);
    args.scratch = nullptr;
    if (table.count == 0 || nvfp4_grouped_check(args, 1) != cudaSuccess) {
        return none;
    }
    const nvfp4_grouped_row * row = table.rows;
    while ((args.tokens * args.used + args.experts - 1) / args.experts > row->max_mean) {
        ++row;
    }
    if ((size_t) row->kernel.shared > device.shared) {
        return none;
    }
    return {&row->kernel, (int64_t) row->kernel.blocks * device.multiprocessors, row->kernel.scratch_bytes(args)};
}
