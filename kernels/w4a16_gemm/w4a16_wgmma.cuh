// w4a16_gemm.cuh on Hopper's own instructions: wgmma, with the weights from registers and the activations from shared
// memory, and the bulk copy engine.
//
//   w4a16_wgmma_cuda<config>(w, x, y, scratch, m, n, k, blocks, stream)   all as w4a16_gemm_cuda's, but config is a
//                                                                         w4a16_wgmma_config
//
// sm_90a alone. w4a16_wgmma_is_built<config>() says whether what runs was compiled for it.
//
// A fragment of wgmma's m64k16 in registers is mma.m16n8k16's, of 16 rows in each of four warps, and so are its sums: the
// weights are taken apart as there. The order of rows within a product of 64 is free besides, so that each warp has rows
// side by side. One warpgroup more copies: it waits for what is free, the others for what is there, and gives them its
// registers. One of its warps has the bulk copy engine bring activations in large pieces; three bring weights, 144 bytes a
// row, by cp.async: the engine takes some 35 ns for each row.
//
// References: PTX ISA, wgmma, matrix descriptors without swizzle, cp.async.bulk, mbarrier.

#pragma once

#include "w4a16_stages.cuh"

// A tile of tile_m x tile_n outputs by warpgroups side by side along m.
template <w4a16_type type, int tile_m, int tile_n, int groups, int w_stages, int x_stages, int blocks>
struct w4a16_warpgroups : w4a16_warps<type, tile_m, tile_n, tile_m / (4 * groups), tile_n, w_stages, x_stages, blocks> {
    static_assert(tile_m % (64 * groups) == 0, "a warpgroup takes 64 rows at a time");
};

// Units of weights as they lie, steps of activations.
template <w4a16_type type, int tile_m, int tile_n, int groups, int w_stages, int x_stages, int blocks>
struct w4a16_wgmma_config : w4a16_warpgroups<type, tile_m, tile_n, groups, w_stages, x_stages, blocks> {
    static constexpr bool AHEAD   = true;
    static constexpr int  COPIERS = 3 * W4A16_WARP;  // of weights
    static constexpr int  ALL     = w4a16_wgmma_config::THREADS + 4 * W4A16_WARP;

    static constexpr int W_BYTES = tile_m * W4A16_UNIT_BYTES;
    static constexpr int X_BYTES = tile_n * W4A16_STEP * (int) sizeof(__half);
    static constexpr int SHARED  = w_stages * W_BYTES + x_stages * X_BYTES;

    static_assert(blocks > 1 || groups == 2, "registers are given to two warpgroups");
    static_assert(W_BYTES / 16 % COPIERS == 0, "the threads must cover the weights");
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- one instruction --

static __device__ __forceinline__ void w4a16_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

static __device__ __forceinline__ void w4a16_wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// until all groups but the last so many are done
template <int groups> static __device__ __forceinline__ void w4a16_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(groups) : "memory");
}

// Core matrices without swizzle: 128 bytes from one to the next along k, 512 along the columns.
static __device__ __forceinline__ uint64_t w4a16_descriptor(const void * shared) {
    return (uint64_t) ((w4a16_shared(shared) & 0x3FFFF) >> 4) | (uint64_t) (128 >> 4) << 16 | (uint64_t) (512 >> 4) << 32;
}

#define W4A16_SUMS(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])

// c += a b: 64 rows, of which this warp has 16, by 8 columns for each of c
static __device__ __forceinline__ void w4a16_wgmma(float (&c)[1][4], const uint32_t (&a)[4], const uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
                 "%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, %8, p, 1, 1, 0; }"
                 : W4A16_SUMS(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void w4a16_wgmma(float (&c)[2][4], const uint32_t (&a)[4], const uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
                 : W4A16_SUMS(0), W4A16_SUMS(1)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void w4a16_wgmma(float (&c)[4][4], const uint32_t (&a)[4], const uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
                 : W4A16_SUMS(0), W4A16_SUMS(1), W4A16_SUMS(2), W4A16_SUMS(3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void w4a16_wgmma(float (&c)[8][4], const uint32_t (&a)[4], const uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : W4A16_SUMS(0), W4A16_SUMS(1), W4A16_SUMS(2), W4A16_SUMS(3), W4A16_SUMS(4), W4A16_SUMS(5),
                   W4A16_SUMS(6), W4A16_SUMS(7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void w4a16_wgmma(float (&c)[16][4], const uint32_t (&a)[4], const uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
                 : W4A16_SUMS(0), W4A16_SUMS(1), W4A16_SUMS(2), W4A16_SUMS(3), W4A16_SUMS(4), W4A16_SUMS(5),
                   W4A16_SUMS(6), W4A16_SUMS(7), W4A16_SUMS(8), W4A16_SUMS(9), W4A16_SUMS(10), W4A16_SUMS(11),
                   W4A16_SUMS(12), W4A16_SUMS(13), W4A16_SUMS(14), W4A16_SUMS(15)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void w4a16_wgmma(float (&c)[32][4], const uint32_t (&a)[4], const uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "{%128, %129, %130, %131}, %132, p, 1, 1, 0; }"
                 : W4A16_SUMS(0), W4A16_SUMS(1), W4A16_SUMS(2), W4A16_SUMS(3), W4A16_SUMS(4), W4A16_SUMS(5),
                   W4A16_SUMS(6), W4A16_SUMS(7), W4A16_SUMS(8), W4A16_SUMS(9), W4A16_SUMS(10), W4A16_SUMS(11),
                   W4A16_SUMS(12), W4A16_SUMS(13), W4A16_SUMS(14), W4A16_SUMS(15), W4A16_SUMS(16), W4A16_SUMS(17),
                   W4A16_SUMS(18), W4A16_SUMS(19), W4A16_SUMS(20), W4A16_SUMS(21), W4A16_SUMS(22), W4A16_SUMS(23),
                   W4A16_SUMS(24), W4A16_SUMS(25), W4A16_SUMS(26), W4A16_SUMS(27), W4A16_SUMS(28), W4A16_SUMS(29),
                   W4A16_SUMS(30), W4A16_SUMS(31)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef W4A16_SUMS

// -- the warps that copy --

template <typename C> class w4a16_copier {
  public:
    __device__ __forceinline__ w4a16_copier(const w4a16_problem & p, uint8_t * shared, w4a16_stages<C> & stages)
        : p_(p), xs_(shared), ws_(shared + C::X_STAGES * C::X_BYTES), stages_(stages),
          tid_((threadIdx.y - C::WARPS) * W4A16_WARP + threadIdx.x) {}

    __device__ __forceinline__ void copy(const int tile, const int first, const int last) {
        const int row0 = tile / p_.tiles_n * C::TILE_M;
        const int col0 = tile % p_.tiles_n * C::TILE_N;
        if (tid_ < C::COPIERS) {
            for (int unit = first; unit < last; ++unit) {
                copy_weights(row0, unit);
            }
        } else {
            // weights come before
            w4a16_wait_for_the_other();
#pragma unroll 1
            for (int step = first * W4A16_STEPS; step < last * W4A16_STEPS; ++step) {
                copy_activations(col0, step);
            }
        }
    }

  private:
    // Pieces of 16 bytes, nine a row. Rows beyond the matrix are copied as its last one.
    __device__ __forceinline__ void copy_weights(const int row0, const int unit) {
        w4a16_wait_for(stages_.w_free + w_.stage, w_.parity ^ 1);
        uint8_t * const       to     = ws_ + w_.stage * C::W_BYTES;
        const uint8_t * const from   = p_.w + (int64_t) unit * W4A16_UNIT_BYTES;
        const int64_t         stride = p_.units * W4A16_UNIT_BYTES;
        // counted on: a division for each piece takes longer than the copies
        int row  = row0 + tid_ / 9;
        int part = tid_ % 9 * 16;
#pragma unroll 2
        for (int i = 0; i < C::W_BYTES / 16; i += C::COPIERS) {
            w4a16_copy(to + (i + tid_) * 16, from + (row < p_.m ? row : p_.m - 1) * stride + part);
            row  += C::COPIERS / 9;
            part += C::COPIERS % 9 * 16;
            if (part >= W4A16_UNIT_BYTES) {
                part -= W4A16_UNIT_BYTES;
                ++row;
            }
        }
        w4a16_arrive_after_copies(stages_.w_full + w_.stage);
        w_.next();
    }

    // Two pieces of 32 of k, which are one where a tile has all columns.
    __device__ __forceinline__ void copy_activations(const int col0, const int step) {
        uint64_t * const barrier = stages_.x_full + x_.stage;
        w4a16_wait_for(stages_.x_free + x_.stage, x_.parity ^ 1);
        if (threadIdx.x == 0) {
            const int64_t   stride = (int64_t) p_.tiles_n * (C::TILE_N * 4);
            const uint4 *   from   = p_.x16 + 2 * step * stride + col0 * 4;
            uint8_t * const to     = xs_ + x_.stage * C::X_BYTES;
            w4a16_expect(barrier, C::X_BYTES);
            if (p_.tiles_n == 1) {
                w4a16_bulk_copy(to, from, C::X_BYTES, barrier);
            } else {
                w4a16_bulk_copy(to, from, C::X_BYTES / 2, barrier);
                w4a16_bulk_copy(to + C::X_BYTES / 2, from + stride, C::X_BYTES / 2, barrier);
            }
        }
        __syncwarp();
        x_.next();
    }

    const w4a16_problem & p_;
    uint8_t * const       xs_;
    uint8_t * const       ws_;
    w4a16_stages<C> &     stages_;
    const int             tid_;

    w4a16_ring<C::W_STAGES> w_;
    w4a16_ring<C::X_STAGES> x_;
};

// -- the warps that multiply --

template <typename C> class w4a16_wgmma_tile : public w4a16_tile<C> {
    using base = w4a16_tile<C>;

  public:
    __device__ __forceinline__ w4a16_wgmma_tile(const w4a16_problem & p, uint8_t * shared, w4a16_stages<C> & stages,
                                                w4a16_ring<C::W_STAGES> & w, w4a16_ring<C::X_STAGES> & x, const int tile)
        : base(p, shared + C::X_STAGES * C::X_BYTES, shared, tile), stages_(stages), w_(w), x_(x) {}

    // The sums of units first ... last - 1.
    __device__ __forceinline__ void multiply(const int first, const int last) {
        this->clear();
        w4a16_wait_for(stages_.w_full + w_.stage, w_.parity);
        this->template load<0>(w_.stage, 0);
        this->template dequantise_all<0>();
        for (int unit = first; unit < last; ++unit) {
            step<0>(unit > first, false);
            step<1>(true, false);
            step<2>(true, false);
            step<3>(true, unit + 1 < last);
        }
        w4a16_wgmma_wait<0>();
        w4a16_release(stages_.x_free + (x_.stage == 0 ? C::X_STAGES : x_.stage) - 1);
    }

  private:
    // Step s of a unit. Beside its first word its second is taken apart and the rows of the next step are read, beside
    // that the next step's first: the tensor cores have one word while the next becomes ready.
    template <int s> __device__ __forceinline__ void step(const bool before, const bool more) {
        w4a16_wait_for(stages_.x_full + x_.stage, x_.parity);
        multiply_word<0>();
        w4a16_wgmma_wait<1>();
        if (before) {
            w4a16_release(stages_.x_free + (x_.stage == 0 ? C::X_STAGES : x_.stage) - 1);
        }
        this->template dequantise_all<1>();
        if (s < 3) {
            this->template load<(s + 1) % 2>(w_.stage, (s + 1) / 2);
            if (s == 2) {
                w4a16_release(stages_.w_free + w_.stage);
                w_.next();
            }
        } else if (more) {
            w4a16_wait_for(stages_.w_full + w_.stage, w_.parity);
            this->template load<0>(w_.stage, 0);
        }
        multiply_word<1>();
        w4a16_wgmma_wait<1>();
        this->template dequantise_all<0>();
        x_.next();
    }

    template <int i> __device__ __forceinline__ void multiply_word() {
        const uint64_t b = w4a16_descriptor(this->xs_ + x_.stage * C::X_BYTES + i * (C::X_BYTES / 2));
        w4a16_wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                w4a16_wgmma(this->acc_[mt], this->a_[i][mt][j], b + j * (256 >> 4));
            }
        }
        w4a16_wgmma_commit();
    }

    w4a16_stages<C> &         stages_;
    w4a16_ring<C::W_STAGES> & w_;
    w4a16_ring<C::X_STAGES> & x_;
};

// -- kernel --

template <typename C>
static __device__ __forceinline__ void w4a16_copy_all(
        const w4a16_problem & p, uint8_t * shared, w4a16_stages<C> & stages) {
    w4a16_copier<C> copier(p, shared, stages);
    w4a16_for_each_part(p, [&](const w4a16_part & part) { copier.copy(part.tile, part.first, part.last); });
}

template <typename C>
static __device__ __forceinline__ void w4a16_multiply_all(
        const w4a16_problem & p, uint8_t * shared, w4a16_stages<C> & stages, bool & last_of_tile) {
    w4a16_ring<C::W_STAGES> w;
    w4a16_ring<C::X_STAGES> x;
    w4a16_wait_for_the_other();
    w4a16_for_each_part(p, [&](const w4a16_part & part) {
        w4a16_wgmma_tile<C> t(p, shared, stages, w, x, part.tile);
        t.multiply(part.first, part.last);
        w4a16_finish(t, p, part, last_of_tile, [] { w4a16_meet(C::THREADS); });
    });
}

// As w4a16_gemm, threads (32, warps + 4).
template <typename C>
static __global__ void __launch_bounds__(C::ALL, C::BLOCKS) w4a16_wgmma_gemm(const w4a16_problem p) {
    extern __shared__ __align__(128) uint8_t w4a16_wgmma_shared[];
    __shared__ w4a16_stages<C> stages;
    __shared__ bool            last_of_tile;

    if (threadIdx.x == 0 && threadIdx.y == 0) {
        stages.init();
    }
    __syncthreads();

    // 40 of 128 threads and 232 of 256: what a multiprocessor has
    if (threadIdx.y >= C::WARPS) {
        if (C::BLOCKS == 1) {
            w4a16_give_registers<40>();
        }
        w4a16_copy_all<C>(p, w4a16_wgmma_shared, stages);
    } else {
        if (C::BLOCKS == 1) {
            w4a16_take_registers<232>();
        }
        w4a16_multiply_all<C>(p, w4a16_wgmma_shared, stages, last_of_tile);
    }
}

#else

template <typename C> static __global__ void w4a16_wgmma_gemm(const w4a16_problem) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- launch --

template <typename C>
static cudaError_t w4a16_wgmma_cuda(const void * w, const float * x, float * y, void * scratch, const int64_t m,
                                    const int64_t n, const int64_t k, const int64_t blocks, cudaStream_t stream) {
    const w4a16_entry kernel = {w4a16_wgmma_gemm<C>, C::WARPS + 4, w4a16_order::CORES, true};
    return w4a16_launch<C>(kernel, w, x, y, scratch, m, n, k, blocks, stream);
}

// Whether the code that runs here was compiled for sm_90a: what was not has no barriers in shared memory.
template <typename C> static bool w4a16_wgmma_is_built() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, w4a16_wgmma_gemm<C>) == cudaSuccess && attributes.sharedSizeBytes > 0;
}
