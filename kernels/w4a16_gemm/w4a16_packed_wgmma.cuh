// Products of packed weights on wgmma.
//
//   w4a16_packed_wgmma_cuda<config>(packed, x, y, scratch, m, n, k, blocks, stream)
//                                   as w4a16_gemm_cuda, but w is packed, config a w4a16_packed_wgmma_config
//
// sm_90a alone.

#pragma once

#include "w4a16_packed.cuh"
#include "w4a16_wgmma.cuh"

template <w4a16_type type, int tile_m, int tile_n, int groups, int w_stages, int x_step, int x_stages, int blocks>
struct w4a16_packed_wgmma_config : w4a16_warpgroups<type, tile_m, tile_n, groups, w_stages, x_stages, blocks>,
                                   w4a16_packed_units<type, tile_m, tile_n, w_stages, x_step, x_stages> {
    static constexpr int ALL = w4a16_packed_wgmma_config::THREADS + (blocks == 1 ? 4 : 2) * W4A16_WARP;

    // Of what a multiprocessor has, in pieces of 8 a thread, a warpgroup that copies keeps 24, and the others share the
    // rest. 0: none are given.
    static constexpr int KEPT_REGISTERS = 24;
    static constexpr int REGISTERS =
        blocks == 1 ? (65536 / ALL / 8 * 8 * ALL - KEPT_REGISTERS * 4 * W4A16_WARP) / w4a16_packed_wgmma_config::THREADS / 8 * 8
                    : 0;

    static_assert(REGISTERS <= 255, "no thread has more");
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- the warps that multiply --

template <typename C> class w4a16_packed_wgmma_tile : public w4a16_packed_sums<C> {
    using sums = w4a16_packed_sums<C>;

  public:
    __device__ __forceinline__ w4a16_packed_wgmma_tile(const w4a16_problem & p, const uint8_t * ws, const uint8_t * xs,
                                                       w4a16_stages<C> & stages, w4a16_ring<C::W_STAGES> & w,
                                                       w4a16_ring<C::X_STAGES> & x, const int tile)
        : sums(p, ws, stages, w, x, tile), xs_(xs), x_done_(x.stage) {}

    // The sums of units first ... last - 1.
    __device__ __forceinline__ void multiply(const int first, const int last) {
        this->clear();
        this->load_unit();
        take_apart<0>();
        this->load_codes(1);
        for (int unit = first; unit < last; ++unit) {
            step<0>(unit > first, true);
            step<1>(true, true);
            step<2>(true, unit + 1 < last);
            step<3>(true, unit + 1 < last);
        }
        w4a16_wgmma_wait<0>();
        release_activations();
    }

  private:
    // 64 of k are multiplied while the next 64 are taken apart: once those before are done, whose registers they take. More:
    // there is a next unit. In this order: with the next taken apart before the wait for activations the compiler waits
    // for each product by itself (C7513).
    template <int s> __device__ __forceinline__ void step(const bool before, const bool more) {
        constexpr int STEPS = C::X_STEP / 64;  // of a stage of activations

        if (s % STEPS == 0) {
            w4a16_wait_for(stages_.x_full + x_.stage, x_.parity);
        }
        multiply_64<s>();
        if (s % STEPS == STEPS - 1) {
            x_.next();
        }
        w4a16_wgmma_wait<1>();
        if (s % STEPS == 0 && before) {
            release_activations();
        }
        take_apart<(s + 1) % 4>();
        if (s < 2) {
            this->load_codes(s + 2);
        } else if (s == 2) {
            this->release_unit();
            if (more) {
                this->load_unit();
            }
        } else if (more) {
            this->load_codes(1);
        }
    }

    template <int s> __device__ __forceinline__ void take_apart() {
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
            const uint32_t words[4] = {codes_[mt].x, codes_[mt].y, codes_[mt].z, codes_[mt].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scales_[mt].take_apart(a_[s % 2][mt][i], words[i], s, i % 2);
            }
        }
    }

    template <int s> __device__ __forceinline__ void multiply_64() {
        const uint8_t * x = xs_ + x_.stage * C::X_BYTES + s % (C::X_STEP / 64) * (C::TILE_N * 128);
        const uint64_t  b = w4a16_descriptor(x);
        w4a16_wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                w4a16_wgmma(this->acc_[mt], a_[s % 2][mt][i], b + (i / 2 * (C::TILE_N * 64) + i % 2 * 256) / 16);
            }
        }
        w4a16_wgmma_commit();
    }

    __device__ __forceinline__ void release_activations() {
        w4a16_release(stages_.x_free + x_done_);
        x_done_ = x_done_ == C::X_STAGES - 1 ? 0 : x_done_ + 1;
    }

    using sums::codes_;
    using sums::scales_;
    using sums::stages_;
    using sums::x_;

    const uint8_t * const xs_;
    int                   x_done_;
    uint32_t              a_[2][C::MT][4][4];
};

// -- kernel --

// As w4a16_gemm; threads as w4a16_packed_block says.
template <typename C>
static __global__ void __launch_bounds__(C::ALL, C::BLOCKS) w4a16_packed_wgmma(const w4a16_problem p) {
    w4a16_packed_block<C, w4a16_packed_wgmma_tile<C>>(p);
}

#else

template <typename C> static __global__ void w4a16_packed_wgmma(const w4a16_problem) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// -- launch --

template <typename C>
static cudaError_t w4a16_packed_wgmma_cuda(const void * packed, const float * x, float * y, void * scratch, const int64_t m,
                                           const int64_t n, const int64_t k, const int64_t blocks, cudaStream_t stream) {
    const w4a16_entry kernel = {w4a16_packed_wgmma<C>, C::ALL / W4A16_WARP, w4a16_order::CORES, true};
    return w4a16_launch<C>(kernel, packed, x, y, scratch, m, n, k, blocks, stream);
}
