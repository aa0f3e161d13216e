// Activations that the product gathers, for configurations with `gather`: none is planned, but the harness tests and times them.
//
// A row of x becomes f16 once, not once for each of its experts, and in the launch that routes, for which it need not wait. Each
// 64 of k are 128 bytes side by side, those of a piece being the 16 bytes of nvfp4_grouped.cuh:
//
//   x16[rows][k/64][2 halves][4 fragments][16 bytes]     row token*slots + slot % slots; undo is of a row too
//
// One warp of the product copies the pieces of a tile's columns to where a bulk copy would have brought them, and with the last of
// them the columns' places in y and powers of two, so that no other warp looks for rows. Nothing is copied where no column is:
// what is there instead meets columns that are not written.

#pragma once

#include "nvfp4_grouped.cuh"

static constexpr int NVFP4_GROUPED_ROW_BYTES  = 128;  // 64 of k of a row
static constexpr int NVFP4_GROUPED_ROW_WARPS  = 16;   // of a block that routes or converts
static constexpr int NVFP4_GROUPED_ROW_BLOCKS = 2;    // of a multiprocessor: one converts while one routes

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// -- prepare --

// A block for each expert, then one for every 8 rows, threads (32, NVFP4_GROUPED_ROW_WARPS).
template <int tile_n>
static __global__ void __launch_bounds__(W4A16_WARP * NVFP4_GROUPED_ROW_WARPS, NVFP4_GROUPED_ROW_BLOCKS)
nvfp4_grouped_rows(const nvfp4_grouped_problem p, const int32_t * __restrict__ ids, const int64_t ids_token, const int n,
                   const int experts, const nvfp4_grouped_activations a, const int rows) {
    const int group = (int) blockIdx.x - experts;
    w4a16_wait_for_the_other();
    if (group < 0) {
        nvfp4_grouped_route_to<tile_n, NVFP4_GROUPED_ROW_WARPS>(p, ids, ids_token, n, blockIdx.x, experts);
        // the product copies weights once it may begin
        __threadfence();
        __syncthreads();
        w4a16_others_may_begin();
        return;
    }
    w4a16_others_may_begin();
    const int                 row   = 8 * group + threadIdx.x % 8;
    const int64_t             pitch = p.units * W4A16_STEPS * NVFP4_GROUPED_ROW_BYTES;
    const nvfp4_grouped_order order = {8 * pitch, pitch, NVFP4_GROUPED_ROW_BYTES, 16, 64};
    const float *             x     = a.x + row / p.slots * a.token + row % p.slots * a.slot;
    nvfp4_grouped_convert<NVFP4_GROUPED_ROW_WARPS, 1>(p, x, row < rows, group, order);
}

// -- the warp that copies --

static __device__ __forceinline__ void nvfp4_grouped_copy_word(void * to, const void * from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(w4a16_shared(to)), "l"(from) : "memory");
}

// Lane 8 f + c copies fragment f of column c of every eight: eight lanes write 128 bytes side by side, four read 64.
template <typename C>
static __device__ __forceinline__ void nvfp4_grouped_gather_activations(
        const nvfp4_grouped_problem & p, uint8_t * xs, w4a16_stages<C> & stages) {
    constexpr int           READ     = (C::TILE_N + W4A16_WARP - 1) / W4A16_WARP;
    const int               column   = threadIdx.x % 8;
    const int               fragment = threadIdx.x / 8;
    const int               pitch    = p.units * W4A16_STEPS * NVFP4_GROUPED_ROW_BYTES;
    const int               steps    = p.units * (W4A16_UNIT / C::X_STEP);
    w4a16_ring<C::X_STAGES> x;
    w4a16_wait_for_the_other();
    nvfp4_grouped_for_each_tile<C>(p, [&](const nvfp4_grouped_tile & tile) {
        int row[READ];  // of every 32nd column, -1 for none
#pragma unroll
        for (int i = 0; i < READ; ++i) {
            const int col = i * W4A16_WARP + threadIdx.x;
            const int of  = col < tile.columns ? p.of[tile.first + col] : -1;
            row[i] = of < 0 ? -1 : of / p.used * p.slots + of % p.used % p.slots;
        }
        const uint8_t * from = p.x16 + fragment * 16;
        const auto next = [&] {
            w4a16_arrive_after_copies(stages.x_full + x.stage);
            x.next();
            from += C::X_STEP / W4A16_STEP * NVFP4_GROUPED_ROW_BYTES;
        };
        for (int step = 0; step < steps; ++step) {
            if (step > 0) {
                next();
            }
            // asked for again in each step: kept, the addresses of 192 columns are more registers than the warp has
            int of_group[C::NT];
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt) {
                of_group[nt] = __shfl_sync(0xFFFFFFFF, row[nt / 4], nt % 4 * 8 + column);
            }
            w4a16_wait_for(stages.x_free + x.stage, x.parity ^ 1);
            uint8_t * const to = xs + x.stage * C::X_BYTES + fragment * 256 + column * 16;
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt) {
                const uint8_t * const at = from + (int64_t) of_group[nt] * pitch;
#pragma unroll
                for (int i = 0; i < C::X_STEP / W4A16_STEP; ++i) {
                    if (of_group[nt] >= 0) {
                        uint8_t * const there = to + (i * C::NT + nt) * NVFP4_GROUPED_GROUP_BYTES;
                        nvfp4_grouped_copy(there, at + i * NVFP4_GROUPED_ROW_BYTES);
                        nvfp4_grouped_copy(there + 128, at + i * NVFP4_GROUPED_ROW_BYTES + 64);
                    }
                }
            }
        }
        uint8_t * const to = xs + x.stage * C::X_BYTES + C::X_TILE;
#pragma unroll
        for (int i = 0; i < READ; ++i) {
            if (row[i] >= 0) {
                const int col = i * W4A16_WARP + threadIdx.x;
                nvfp4_grouped_copy_word(to + col * 4, p.of + tile.first + col);
                nvfp4_grouped_copy_word(to + (C::TILE_N + col) * 4, p.undo + row[i]);
            }
        }
        next();
    });
}

#else

template <int tile_n>
static __global__ void nvfp4_grouped_rows(const nvfp4_grouped_problem, const int32_t * __restrict__, const int64_t, const int,
                                          const int, const nvfp4_grouped_activations, const int) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// -- launch --

// What comes before the product, in one launch.
template <typename C>
static cudaError_t nvfp4_grouped_prepare_rows(const C, const nvfp4_grouped_args & a, cudaStream_t stream) {
    const nvfp4_grouped_problem     p       = nvfp4_grouped_problem_of<C>(a);
    const nvfp4_grouped_activations x       = {a.x, a.x_token, a.x_slot};
    const int                       experts = (int) a.experts;
    const int                       rows    = (int) a.tokens * p.slots;
    return nvfp4_grouped_launch(nvfp4_grouped_rows<C::TILE_N>, dim3((unsigned) (experts + (rows + 7) / 8)),
                                dim3(W4A16_WARP, NVFP4_GROUPED_ROW_WARPS), experts * (int) sizeof(int), stream, p, a.ids,
                                a.ids_token, (int) (a.tokens * a.used), experts, x, rows);
}
