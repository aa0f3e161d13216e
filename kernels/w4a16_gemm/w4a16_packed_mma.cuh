// Products of packed weights on mma.sync.
//
//   w4a16_packed_mma_cuda<config>(packed, x, y, scratch, m, n, k, blocks, stream)
//                                 as w4a16_gemm_cuda, but w is packed, config a w4a16_packed_mma_config
//
// sm_90 and newer, without the features of one architecture alone.
//
// What w4a16_gemm.cuh's loop waits for is its copies: each warp stops for them, all meet at a barrier for each 64 of k. Here
// two threads of other warps copy in large pieces, and a warp waits for what it needs alone. It asks for the activations of 16
// columns before it multiplies those of the 8 before, across the edges of stages.

#pragma once

#include "w4a16_packed.cuh"

template <w4a16_type type, int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_step, int x_stages, int blocks>
struct w4a16_packed_mma_config : w4a16_warps<type, tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks>,
                                 w4a16_packed_units<type, tile_m, tile_n, w_stages, x_step, x_stages> {
    static constexpr int ALL       = w4a16_packed_mma_config::THREADS + 2 * W4A16_WARP;
    static constexpr int REGISTERS = 0;  // none are given

    static_assert(warp_n % 16 == 0, "activations are held in two turns");
    static_assert(x_stages > 1, "the next stage is waited for before this one is given back");
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// -- the warps that multiply --

template <typename C> class w4a16_packed_mma_tile : public w4a16_packed_sums<C> {
    using sums = w4a16_packed_sums<C>;

  public:
    __device__ __forceinline__ w4a16_packed_mma_tile(const w4a16_problem & p, const uint8_t * ws, const uint8_t * xs,
                                                     w4a16_stages<C> & stages, w4a16_ring<C::W_STAGES> & w,
                                                     w4a16_ring<C::X_STAGES> & x, const int tile)
        : sums(p, ws, stages, w, x, tile), xs_(xs + this->warp_col_ * 64 + threadIdx.x * sizeof(uint4)) {}

    // The sums of units first ... last - 1.
    __device__ __forceinline__ void multiply(const int first, const int last) {
        this->clear();
        this->load_unit();
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            take_apart<0>(r / 2, r % 2);
        }
        w4a16_wait_for(stages_.x_full + x_.stage, x_.parity);
        b_[0] = activations(x_.stage, 0, 0);
        b_[1] = activations(x_.stage, 0, 1);
        for (int unit = first; unit < last; ++unit) {
            const bool more = unit + 1 < last;
            piece<0>(more);
            piece<1>(more);
            piece<2>(more);
            piece<3>(more);
            piece<4>(more);
            piece<5>(more);
            piece<6>(more);
            piece<7>(more);
        }
    }

  private:
    static constexpr int PIECES = C::X_STEP / 32;  // of a stage of activations

    // 32 of k of a unit, beside which the next 32 are taken apart. More: there is a next unit.
    template <int i> __device__ __forceinline__ void piece(const bool more) {
        constexpr bool last_of_stage = i % PIECES == PIECES - 1;

        w4a16_ring<C::X_STAGES> next = x_;
        if (last_of_stage) {
            next.next();
        }
        if (i % 2 == 1 && i < 7) {
            this->load_codes((i + 1) / 2);
        }
        if (i == 7 && more) {
            this->load_unit();
        }
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt) {
            const uint4 b = b_[nt % 2];
            // before it is needed: even what is there takes time to be seen
            if (last_of_stage && (i < 7 || more) && nt == (C::NT > 4 ? C::NT - 4 : 0)) {
                w4a16_wait_for(stages_.x_full + next.stage, next.parity);
            }
            if (nt + 2 < C::NT) {
                b_[nt % 2] = activations(x_.stage, i % PIECES, nt + 2);
            } else if (i < 7 || more) {
                b_[nt % 2] = activations(next.stage, (i + 1) % PIECES, nt + 2 - C::NT);
            }
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                w4a16_mma(this->acc_[mt][nt], a_[i % 2][mt][0], b.x, b.y);
            }
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                w4a16_mma(this->acc_[mt][nt], a_[i % 2][mt][1], b.z, b.w);
            }
            take_share_apart<(i + 1) % 8>(nt);
        }
        if (i == 5) {
            this->release_unit();
        }
        if (last_of_stage) {
            // the copy engine does not wait for reads by itself
            w4a16_before_copies();
            w4a16_release(stages_.x_free + x_.stage);
        }
        x_ = next;
    }

    // What this lane has of 32 of k by 8 columns.
    __device__ __forceinline__ uint4 activations(const int stage, const int piece, const int nt) const {
        return *(const uint4 *) (xs_ + stage * C::X_BYTES + piece * (C::TILE_N * 64) + nt * (W4A16_WARP * sizeof(uint4)));
    }

    // The share of a piece beside columns nt.
    template <int i> __device__ __forceinline__ void take_share_apart(const int nt) {
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            if ((2 * r + 1) * C::NT / (4 * C::MT) == nt) {
                take_apart<i>(r / 2, r % 2);
            }
        }
    }

    // 16 of the 32 of k of a piece: those of the low nibbles or of the high ones.
    template <int i> __device__ __forceinline__ void take_apart(const int mt, const int high) {
        const uint4 &  codes = codes_[mt];
        const uint32_t word  = i % 2 == 0 ? (high ? codes.y : codes.x) : (high ? codes.w : codes.z);
        scales_[mt].take_apart(a_[i % 2][mt][high], word, i / 2, high);
    }

    using sums::codes_;
    using sums::scales_;
    using sums::stages_;
    using sums::x_;

    const uint8_t * const xs_;  // this lane's
    uint32_t              a_[2][C::MT][2][4];
    uint4                 b_[2];
};

// -- kernel --

// As w4a16_gemm; threads as w4a16_packed_block says.
template <typename C>
static __global__ void __launch_bounds__(C::ALL, C::BLOCKS) w4a16_packed_mma(const w4a16_problem p) {
    if constexpr (C::SHARED > W4A16_ARCH_SHARED) {
        __trap();
    } else {
        w4a16_packed_block<C, w4a16_packed_mma_tile<C>>(p);
    }
}

#else

template <typename C> static __global__ void w4a16_packed_mma(const w4a16_problem) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// -- launch --

template <typename C>
static cudaError_t w4a16_packed_mma_cuda(const void * packed, const float * x, float * y, void * scratch, const int64_t m,
                                         const int64_t n, const int64_t k, const int64_t blocks, cudaStream_t stream) {
    const w4a16_entry kernel = {w4a16_packed_mma<C>, C::ALL / W4A16_WARP, w4a16_order::FRAGMENTS, true};
    return w4a16_launch<C>(kernel, packed, x, y, scratch, m, n, k, blocks, stream);
}
