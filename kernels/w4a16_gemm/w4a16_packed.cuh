// Weights that were brought into the order of the tensor cores' fragments before: eight are taken apart by nine
// instructions, and a tile's are copied in one piece.
//
//   w4a16_packed_bytes(type, m, k)                     what packed weights take
//   w4a16_pack_cuda(type, w, packed, m, k, stream)     two launches, asynchronous, that allocate nothing
//
//   w        as in w4a16_gemm.cuh; read by w4a16_pack_cuda alone
//   packed   w4a16_packed_bytes bytes, 16-byte aligned; overlaps none of the others
//   m        at most 8,388,480 to pack
//
// Packing runs from sm_80 on. w4a16_packed_mma.cuh and w4a16_packed_wgmma.cuh multiply, from sm_90 on, and share what is
// here.
//
// Packed weights are [k/256][strips of 16 rows], then 2^(24 - e) as an f32 for each row. A strip of a unit of 256 of k:
//
//   codes   [k/64][lane] 16 bytes, lane = 4 g + t: words 2s, 2s+1 of rows g and g+8 as in w4a16_gemm.cuh, of each first the
//           low nibbles, then the high ones; of row g in nibbles 0 2 4 6, of row g+8 in nibbles 1 3 5 7
//   scales  [lane] 8 or 16 bytes: the lane's two blocks of 32, of each d for both rows, and for Q4_K what is added
//
// A code in the last bits of an f16 is that many of its least number, 2^-24. d is scaled by the row's 2^e, so that the
// largest is in 2^14 ... 2^15: code times d, plus what is added, is one instruction for two weights. What is rounded to a
// multiple of f16's least number is off by up to 2^-25 then, where the row's largest d times 8 is at least 2^-7. The
// nibbles of row g+8 count sixteen times as much, its d a sixteenth.

#pragma once

#include "w4a16_stages.cuh"

static constexpr int W4A16_STRIP = 16;  // rows

template <w4a16_type type> static constexpr int w4a16_scale_bytes = type == w4a16_type::Q4_0 ? 8 : 16;  // of a lane
template <w4a16_type type>
static constexpr int w4a16_strip_bytes = W4A16_STRIP * W4A16_UNIT / 2 + W4A16_WARP * w4a16_scale_bytes<type>;

template <typename T> static __host__ __device__ __forceinline__ T w4a16_strips(const T m) {
    return (m + W4A16_STRIP - 1) / W4A16_STRIP;
}

// Where 2^(24 - e) of the rows are.
template <w4a16_type type>
static __host__ __device__ __forceinline__ int64_t w4a16_rows_at(const int64_t units, const int64_t strips) {
    return units * strips * w4a16_strip_bytes<type>;
}

// Units of packed weights, x_step of k of activations at a time, which two threads copy.
template <w4a16_type type, int tile_m, int tile_n, int w_stages, int x_step, int x_stages> struct w4a16_packed_units {
    static constexpr int X_STEP  = x_step;
    static constexpr int COPIERS = 1;  // of weights

    static constexpr int STRIPS  = tile_m / W4A16_STRIP;
    static constexpr int W_BYTES = STRIPS * w4a16_strip_bytes<type>;
    static constexpr int X_BYTES = tile_n * X_STEP * (int) sizeof(__half);
    static constexpr int SHARED  = w_stages * W_BYTES + x_stages * X_BYTES;

    static_assert(W4A16_UNIT % X_STEP == 0 && X_STEP % 64 == 0, "steps must cover a unit");
    static_assert(W_BYTES % 128 == 0 && X_BYTES % 128 == 0, "stages must be aligned");
};

// -- packing --

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// What a code of a block of 32 is multiplied by, and what is added.
template <w4a16_type type>
static __device__ __forceinline__ float2 w4a16_step_and_offset(const uint8_t * unit, const int block) {
    if (type == w4a16_type::Q4_0) {
        const float d = __half2float(*(const __half *) (unit + 18 * block));
        return make_float2(d, -8.0f * d);
    }
    const uint8_t * scales = unit + 4;
    const int       j      = block % 4;
    const int       step   = block < 4 ? scales[j] & 0x3F : (scales[8 + j] & 0xF) | (scales[j] >> 6 << 4);
    const int       offset = block < 4 ? scales[4 + j] & 0x3F : (scales[8 + j] >> 4) | (scales[4 + j] >> 6 << 4);
    const float2    dm     = __half22float2(*(const __half2 *) unit);
    return make_float2(dm.x * (float) step, -dm.y * (float) offset);
}

// The power of two by which a row's d are scaled.
static __device__ __forceinline__ int w4a16_row_power(const uint32_t largest_step, const uint32_t largest_offset) {
    const int by_step   = 14 + 127 - (int) (largest_step >> 23);
    const int by_offset = 38 + 127 - (int) (largest_offset >> 23);
    const int power     = by_step < by_offset ? by_step : by_offset;
    return power < -100 ? -100 : power > 60 ? 60 : power;
}

static __device__ __forceinline__ float w4a16_power_of_two(const int power) {
    return __uint_as_float((uint32_t) (127 + power) << 23);
}

// 2^e of 2^(24 - e).
static __device__ __forceinline__ float w4a16_inverse(const float by_row) {
    return w4a16_power_of_two(24 + 127 - (int) (__float_as_uint(by_row) >> 23));
}

// One warp a row, blocks of (32, 8).
template <w4a16_type type>
static __global__ void w4a16_pack_rows(const uint8_t * __restrict__ w, float * __restrict__ by_row, const int m,
                                       const int units) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= m) {
        return;
    }
    const uint8_t * from   = w + (int64_t) row * units * W4A16_UNIT_BYTES;
    uint32_t        step   = 0;
    uint32_t        offset = 0;
    // of numbers that are not negative the bits are in the same order
    for (int i = threadIdx.x; i < units * 8; i += W4A16_WARP) {
        const float2 v = w4a16_step_and_offset<type>(from + (int64_t) (i / 8) * W4A16_UNIT_BYTES, i % 8);
        step   = max(step, __float_as_uint(fabsf(v.x)));
        offset = max(offset, __float_as_uint(fabsf(v.y)));
    }
    for (int i = W4A16_WARP / 2; i > 0; i /= 2) {
        step   = max(step, __shfl_xor_sync(0xFFFFFFFF, step, i));
        offset = max(offset, __shfl_xor_sync(0xFFFFFFFF, offset, i));
    }
    if (threadIdx.x == 0) {
        by_row[row] = w4a16_power_of_two(24 - w4a16_row_power(step, offset));
    }
}

// What a lane has of the scales of rows g and g + 8, times powers of two.
template <w4a16_type type>
static __device__ __forceinline__ void w4a16_pack_scales(uint32_t * to, const uint8_t * upper, const uint8_t * lower,
                                                         const float by_upper, const float by_lower, const int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 u = w4a16_step_and_offset<type>(upper, 2 * t + i);
        const float2 l = w4a16_step_and_offset<type>(lower, 2 * t + i);
        const float  least = w4a16_power_of_two(-24);
        if (type == w4a16_type::Q4_0) {
            to[i] = w4a16_as_u32(__floats2half2_rn(u.x * by_upper, l.x * (by_lower / 16)));
        } else {
            to[2 * i]     = w4a16_as_u32(__floats2half2_rn(u.x * by_upper, l.x * (by_lower / 16)));
            to[2 * i + 1] = w4a16_as_u32(__floats2half2_rn(u.y * by_upper * least, l.y * by_lower * least));
        }
    }
}

// Blocks (units, strips / 8), threads (32, 8): a warp packs a strip of a unit. Rows beyond the matrix are its last one.
template <w4a16_type type>
static __global__ void w4a16_pack(const uint8_t * __restrict__ w, uint8_t * __restrict__ packed,
                                  const float * __restrict__ by_row, const int m, const int strips) {
    const int strip = blockIdx.y * blockDim.y + threadIdx.y;
    if (strip >= strips) {
        return;
    }
    const int     t      = threadIdx.x % 4;
    const int64_t stride = (int64_t) gridDim.x * W4A16_UNIT_BYTES;
    const int     upper  = min(W4A16_STRIP * strip + (int) threadIdx.x / 4, m - 1);
    const int     lower  = min(upper + 8, m - 1);

    const uint8_t * rows[2] = {w + upper * stride + blockIdx.x * W4A16_UNIT_BYTES,
                               w + lower * stride + blockIdx.x * W4A16_UNIT_BYTES};
    uint8_t *       to      = packed + ((int64_t) blockIdx.x * strips + strip) * w4a16_strip_bytes<type>;
    uint4 *         codes   = (uint4 *) to + threadIdx.x;
#pragma unroll
    for (int step = 0; step < W4A16_STEPS; ++step) {
        w4a16_row<type> u, l;
        if (step % 2 == 0) {
            u.template load<0>(rows[0], t, step / 2);
            l.template load<0>(rows[1], t, step / 2);
        } else {
            u.template load<1>(rows[0], t, step / 2);
            l.template load<1>(rows[1], t, step / 2);
        }
        codes[step * W4A16_WARP] = make_uint4(
            (u.q[0] & 0x0F0F0F0F) | (l.q[0] & 0x0F0F0F0F) << 4, (u.q[0] >> 4 & 0x0F0F0F0F) | (l.q[0] & 0xF0F0F0F0),
            (u.q[1] & 0x0F0F0F0F) | (l.q[1] & 0x0F0F0F0F) << 4, (u.q[1] >> 4 & 0x0F0F0F0F) | (l.q[1] & 0xF0F0F0F0));
    }
    uint32_t * scales = (uint32_t *) (codes - threadIdx.x + W4A16_STEPS * W4A16_WARP) +
                        threadIdx.x * (w4a16_scale_bytes<type> / 4);
    w4a16_pack_scales<type>(scales, rows[0], rows[1], w4a16_inverse(by_row[upper]), w4a16_inverse(by_row[lower]), t);
}

#else

// with the kernel's qualifiers: see w4a16_to_f16's
template <w4a16_type type>
static __global__ void w4a16_pack_rows(const uint8_t * __restrict__, float * __restrict__, const int, const int) {
    __trap();
}

template <w4a16_type type>
static __global__ void w4a16_pack(const uint8_t * __restrict__, uint8_t * __restrict__, const float * __restrict__, const int,
                                  const int) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

static inline size_t w4a16_packed_bytes(const w4a16_type type, const int64_t m, const int64_t k) {
    const int64_t strip = type == w4a16_type::Q4_0 ? w4a16_strip_bytes<w4a16_type::Q4_0> : w4a16_strip_bytes<w4a16_type::Q4_K>;
    return (size_t) (w4a16_strips(m) * (k / W4A16_UNIT * strip + W4A16_STRIP * (int64_t) sizeof(float)));
}

template <w4a16_type type>
static cudaError_t w4a16_pack_all(const uint8_t * w, uint8_t * packed, const int64_t m, const int64_t k, cudaStream_t stream) {
    const int64_t units  = k / W4A16_UNIT;
    const int64_t strips = w4a16_strips(m);
    float *       by_row = (float *) (packed + w4a16_rows_at<type>(units, strips));
    const dim3    block(W4A16_WARP, 8);
    w4a16_pack_rows<type><<<(unsigned) ((m + 7) / 8), block, 0, stream>>>(w, by_row, (int) m, (int) units);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        return status;
    }
    const dim3 grid((unsigned) units, (unsigned) ((strips + 7) / 8));
    w4a16_pack<type><<<grid, block, 0, stream>>>(w, packed, by_row, (int) m, (int) strips);
    return cudaGetLastError();
}

static inline cudaError_t w4a16_pack_cuda(const w4a16_type type, const void * w, void * packed, const int64_t m,
                                          const int64_t k, cudaStream_t stream) {
    if (m < 0 || k <= 0 || k % W4A16_UNIT != 0 || k / W4A16_UNIT > INT32_MAX / W4A16_UNIT || (m + 127) / 128 > 65535) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) w % 16 != 0 || (uintptr_t) packed % 16 != 0) {
        return cudaErrorMisalignedAddress;
    }
    if (m == 0) {
        return cudaSuccess;
    }
    const auto pack = type == w4a16_type::Q4_0 ? w4a16_pack_all<w4a16_type::Q4_0> : w4a16_pack_all<w4a16_type::Q4_K>;
    return pack((const uint8_t *) w, (uint8_t *) packed, m, k, stream);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// -- the threads that copy --

template <typename C>
static __device__ __forceinline__ void w4a16_copy_packed(
        const w4a16_problem & p, uint8_t * ws, w4a16_stages<C> & stages) {
    const int               strips = w4a16_strips(p.m);
    w4a16_ring<C::W_STAGES> w;
    w4a16_for_each_part(p, [&](const w4a16_part & part) {
        const int       first = part.tile / p.tiles_n * C::STRIPS;
        const int       bytes = min(C::STRIPS, strips - first) * w4a16_strip_bytes<C::TYPE>;
        const uint8_t * from  = p.w + ((int64_t) part.first * strips + first) * w4a16_strip_bytes<C::TYPE>;
        for (int unit = part.first; unit < part.last; ++unit) {
            w4a16_wait_for(stages.w_free + w.stage, w.parity ^ 1);
            w4a16_expect(stages.w_full + w.stage, bytes);
            w4a16_bulk_copy(ws + w.stage * C::W_BYTES, from, bytes, stages.w_full + w.stage);
            from += (int64_t) strips * w4a16_strip_bytes<C::TYPE>;
            w.next();
        }
    });
}

// Pieces of 32 of k.
template <typename C>
static __device__ __forceinline__ void w4a16_copy_activations(
        const w4a16_problem & p, uint8_t * xs, w4a16_stages<C> & stages) {
    constexpr int PIECE = C::TILE_N * 64;

    const int64_t           stride = (int64_t) p.tiles_n * (C::TILE_N * 4);
    w4a16_ring<C::X_STAGES> x;
    w4a16_wait_for_the_other();
    w4a16_for_each_part(p, [&](const w4a16_part & part) {
        const uint4 * from  = p.x16 + (int64_t) part.first * 8 * stride + part.tile % p.tiles_n * (C::TILE_N * 4);
        const int     steps = (part.last - part.first) * (W4A16_UNIT / C::X_STEP);
        for (int step = 0; step < steps; ++step) {
            w4a16_wait_for(stages.x_free + x.stage, x.parity ^ 1);
            w4a16_expect(stages.x_full + x.stage, C::X_BYTES);
#pragma unroll
            for (int i = 0; i < C::X_STEP / 32; ++i) {
                w4a16_bulk_copy(xs + x.stage * C::X_BYTES + i * PIECE, from, PIECE, stages.x_full + x.stage);
                from += stride;
            }
            x.next();
        }
    });
}

// -- the warps that multiply --

// What a lane has of the scales of a strip: d of both rows, and what is added to theirs, for the two halves of k with Q4_0,
// for low and for high nibbles with Q4_K.
template <w4a16_type type> struct w4a16_strip_scales {
    __half2 d[2], c[2];

    __device__ __forceinline__ void load(const uint8_t * scales) {
        if constexpr (type == w4a16_type::Q4_0) {
            const uint2 v = *(const uint2 *) (scales + 8 * threadIdx.x);
            // -8 times the least number, and sixteen times as much for the lower row
            const __half2 less_8 = w4a16_as_half2(0x80808008);
            d[0] = w4a16_as_half2(v.x);
            d[1] = w4a16_as_half2(v.y);
            c[0] = __hmul2(d[0], less_8);
            c[1] = __hmul2(d[1], less_8);
        } else {
            const uint4 v = *(const uint4 *) (scales + 16 * threadIdx.x);
            d[0] = w4a16_as_half2(v.x);
            c[0] = w4a16_as_half2(v.y);
            d[1] = w4a16_as_half2(v.z);
            c[1] = w4a16_as_half2(v.w);
        }
    }

    // The word of 16 of k, of a step of 64, as the fragment of weights; high: it was the high nibbles.
    __device__ __forceinline__ void take_apart(uint32_t (&a)[4], const uint32_t q, const int step, const int high) const {
        const int     of    = type == w4a16_type::Q4_0 ? step / 2 : high;
        const __half2 upper = __low2half2(d[of]), plus_upper = __low2half2(c[of]);
        const __half2 lower = __high2half2(d[of]), plus_lower = __high2half2(c[of]);
        a[0] = w4a16_as_u32(__hfma2(w4a16_as_half2(q & 0x000F000F), upper, plus_upper));
        a[1] = w4a16_as_u32(__hfma2(w4a16_as_half2(q & 0x00F000F0), lower, plus_lower));
        a[2] = w4a16_as_u32(__hfma2(w4a16_as_half2(q >> 8 & 0x000F000F), upper, plus_upper));
        a[3] = w4a16_as_u32(__hfma2(w4a16_as_half2(q >> 8 & 0x00F000F0), lower, plus_lower));
    }
};

// The sums of a warp's part of a tile, its weights, and the stages that it reads.
template <typename C> class w4a16_packed_sums : public w4a16_sums<C> {
    using sums = w4a16_sums<C>;

  public:
    __device__ __forceinline__ w4a16_packed_sums(const w4a16_problem & p, const uint8_t * ws, w4a16_stages<C> & stages,
                                                 w4a16_ring<C::W_STAGES> & w, w4a16_ring<C::X_STAGES> & x, const int tile)
        : sums(p, tile), stages_(stages), w_(w), x_(x),
          ws_(ws + this->warp_row_ / W4A16_STRIP * w4a16_strip_bytes<C::TYPE>) {}

    __device__ __forceinline__ void write() const {
        const int64_t at     = w4a16_rows_at<C::TYPE>(this->p_.units, w4a16_strips(this->p_.m));
        const float * by_row = (const float *) (this->p_.w + at);
        sums::write([by_row](const int row) { return by_row[row]; });
    }

  protected:
    // The beginning of a unit that is there, or is waited for.
    __device__ __forceinline__ void load_unit() {
        w4a16_wait_for(stages_.w_full + w_.stage, w_.parity);
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
            scales_[mt].load(strip(mt) + W4A16_STEPS * W4A16_WARP * sizeof(uint4));
        }
        load_codes(0);
    }

    // Those of a step of 64 of k.
    __device__ __forceinline__ void load_codes(const int s) {
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
            codes_[mt] = ((const uint4 *) strip(mt))[s * W4A16_WARP + threadIdx.x];
        }
    }

    // This warp is done with a unit: the copy engine does not wait for reads by itself.
    __device__ __forceinline__ void release_unit() {
        w4a16_before_copies();
        w4a16_release(stages_.w_free + w_.stage);
        w_.next();
    }

    w4a16_stages<C> &         stages_;
    w4a16_ring<C::W_STAGES> & w_;
    w4a16_ring<C::X_STAGES> & x_;

    uint4                       codes_[C::MT];
    w4a16_strip_scales<C::TYPE> scales_[C::MT];

  private:
    __device__ __forceinline__ const uint8_t * strip(const int mt) const {
        return ws_ + w_.stage * C::W_BYTES + mt * w4a16_strip_bytes<C::TYPE>;
    }

    const uint8_t * const ws_;  // this warp's
};

// -- a block --

// Threads (32, ALL / 32): after the warps that multiply come two of which one thread copies. Where registers are given to
// others, all that come after are a warpgroup, which gives them.
template <typename C, typename tile_t> static __device__ __forceinline__ void w4a16_packed_block(const w4a16_problem & p) {
    extern __shared__ __align__(128) uint8_t w4a16_packed_shared[];
    __shared__ w4a16_stages<C> stages;
    __shared__ bool            last_of_tile;

    uint8_t * const xs = w4a16_packed_shared;
    uint8_t * const ws = xs + C::X_STAGES * C::X_BYTES;
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        stages.init();
    }
    __syncthreads();

    if (threadIdx.y < C::WARPS) {
        if constexpr (C::REGISTERS > 0) {
            w4a16_take_registers<C::REGISTERS>();
        }
        w4a16_ring<C::W_STAGES> w;
        w4a16_ring<C::X_STAGES> x;
        w4a16_wait_for_the_other();
        w4a16_for_each_part(p, [&](const w4a16_part & part) {
            tile_t t(p, ws, xs, stages, w, x, part.tile);
            t.multiply(part.first, part.last);
            w4a16_finish(t, p, part, last_of_tile, [] { w4a16_meet(C::THREADS); });
        });
        return;
    }
    if constexpr (C::REGISTERS > 0) {
        w4a16_give_registers<C::KEPT_REGISTERS>();
    }
    if (threadIdx.x == 0 && threadIdx.y == C::WARPS) {
        w4a16_copy_packed<C>(p, ws, stages);
    }
    if (threadIdx.x == 0 && threadIdx.y == C::WARPS + 1) {
        w4a16_copy_activations<C>(p, xs, stages);
    }
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
