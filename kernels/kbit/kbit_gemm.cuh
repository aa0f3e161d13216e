// Products of activations and codebook weights on 16-bit tensor cores: C = A W^T.
//
//   kbit_gemm_cuda<T>(args, plan, stream)   plan: kbit_plan_of(k, m, n, k_dim, multiprocessors, shared), or any parts and blocks
//
//   a          m rows (tokens) of k_dim T, f16 or bf16, contiguous; 16-byte aligned
//   tiles, scales, codebook   as in kbit.cuh
//   c          m rows of n T, contiguous; 2-byte aligned; overlaps none of the others
//   workspace  plan.workspace bytes, 256-byte aligned, zeros before its first use: every launch leaves its counters 0. One for each
//              stream, which all products of up to 4096 tiles of 256 rows by 64 tokens can share
//   returns    cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer, else what the launch returned
//
// One launch, asynchronous, that allocates nothing: graphs can replay it. Where the launch before lets others begin before its own
// end, as this one does, weights are read before that end: such a launch must not write weights. sm_80 and newer.
//
// A weight is its codebook entry rounded to T, times its scale, rounded to T: what kbit_unpack_cuda writes. Sums are in f32, of `parts`
// that are added in their order, whichever blocks made them: bits depend on the plan's parts, not on its blocks.
//
// How. A block has up to 64 tokens and all of a tile of 256 rows, 8 warps by 2 strips, which share activations in shared memory. The units
// of all tiles, one after the other, are shared out to equal parts; sums of a tile that several parts have are added in their order.
// Rows of W are the rows of mma.m16n8k16, tokens its columns. Lane 4 g + t takes its weights from a tile as they lie, 16 bytes at a
// time straight to registers; as the order of k within a sum is free, it multiplies them by 16 bytes of row-major activations: of
// k 32 t + 8 j ... + 7 of 128. Codes become weights by tables in shared memory of all pairs (of K=2 quadruples) of entries, a copy for
// each lane, so that no two meet on a bank: a permute or a shift and a mask, a load and a product with the scale for two weights.
//
// References: PTX ISA, warp-level matrix fragments for m16n8k16, cp.async, griddepcontrol.

#pragma once

#include "kbit.cuh"
#include "w4a16_gemm.cuh"

static constexpr int KBIT_MOST_TOKENS = 64;  // of a block
static constexpr int KBIT_WARPS  = 8;
static constexpr int KBIT_STRIPS = 2;   // of a warp
static constexpr int KBIT_STAGES      = 3;   // of activations

// 8 nt tokens, weights asked for `ahead` units before they are used, blocks that fit a multiprocessor. A table of the codebook's entries
// side by side, CODES an entry, with a copy for each of REPLICAS lanes.
template <typename T_, int K_, int nt, int ahead, int blocks, int replicas, bool wide> struct kbit_config {
    using T = T_;

    static constexpr int K       = K_;
    static constexpr int NT      = nt;
    static constexpr int AHEAD   = ahead;
    static constexpr int BLOCKS  = blocks;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    static constexpr int LEAST   = BLOCKS > 2 ? 2 : AHEAD > 1 || nt > 2 ? 1 : BLOCKS;  // else registers spill, where none was measured
#else
    static constexpr int LEAST   = BLOCKS;
#endif
    static constexpr int TOKENS  = 8 * nt;
    static constexpr int UNITS   = nt <= 2 ? 2 : 1;         // of a stage
    static constexpr int SUMS    = KBIT_STRIPS * nt * KBIT_THREADS;  // of a tile, by fours
    static constexpr int X_UNIT  = TOKENS * KBIT_UNIT / 8;  // pieces of 16 bytes
    static constexpr int X_STAGE = UNITS * X_UNIT;

    static constexpr int  CODES       = K == 2 ? 4 : 2;
    static constexpr int  ENTRIES     = 1 << (K * CODES);
    static constexpr int  REPLICAS    = replicas;
    static constexpr int  ENTRY_BYTES = REPLICAS * CODES * 2;
    static constexpr bool WIDE        = wide;  // an entry each 256 bytes: a permute of bytes makes its place
    static constexpr int  SHIFT       = WIDE ? 8 : ENTRY_BYTES == 128 ? 7 : ENTRY_BYTES == 64 ? 6 : 5;
    static constexpr int  TABLE_BYTES = ENTRIES << SHIFT;
    static constexpr int  SHARED      = TABLE_BYTES + KBIT_STAGES * X_STAGE * 16;

    static_assert(WIDE ? K * CODES == 8 : 1 << SHIFT == ENTRY_BYTES, "places are made by a permute or a shift");
    static_assert(X_STAGE % KBIT_THREADS == 0, "all threads copy alike");
};

struct kbit_problem {
    const void *     a;
    const uint32_t * tiles;
    const uint16_t * scales;
    const float *    codebook;
    void *           c;
    int *            counters;
    float4 *         partials;
    int              m, n, k_dim, units, strips, parts;
};

// of 256 rows
static __host__ __device__ __forceinline__ int kbit_tiles(const int strips) {
    return (strips + KBIT_WARPS * KBIT_STRIPS - 1) / (KBIT_WARPS * KBIT_STRIPS);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// -- one instruction --

// read once: past L1. Volatile, as it is asked for long before it is used.
static __device__ __forceinline__ uint4 kbit_load(const uint4 * x) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x));
    return v;
}

static __device__ __forceinline__ uint2 kbit_load(const uint2 * x) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y) : "l"(x));
    return v;
}

static __device__ __forceinline__ uint16_t kbit_load(const uint16_t * x) {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(x));
    return v;
}

static __device__ __forceinline__ void kbit_mma(
        __half, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    w4a16_mma(c, a, b[0], b[1]);
}

static __device__ __forceinline__ void kbit_mma(
        __nv_bfloat16, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ uint32_t kbit_times(__half, const uint32_t a, const uint32_t b) {
    return w4a16_as_u32(__hmul2(w4a16_as_half2(a), w4a16_as_half2(b)));
}

static __device__ __forceinline__ uint32_t kbit_times(__nv_bfloat16, const uint32_t a, const uint32_t b) {
    __nv_bfloat162 x, y;
    uint32_t       bits;
    memcpy(&x, &a, sizeof(x));
    memcpy(&y, &b, sizeof(y));
    x = __hmul2(x, y);
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

// E4M4 in the exponent and the mantissa of T is it times 2^-4 or 2^-116, subnormals included.
static __device__ __forceinline__ uint32_t kbit_scale(const __half type, const uint32_t byte) {
    return kbit_times(type, byte >> 2, 0x4C004C00);
}

static __device__ __forceinline__ uint32_t kbit_scale(const __nv_bfloat16 type, const uint32_t byte) {
    return kbit_times(type, byte >> 5, 0x79807980);
}

template <typename T> static __device__ __forceinline__ uint32_t kbit_pair(const float low, const float high) {
    T        v[2];
    uint32_t bits;
    kbit_round(low, v[0]);
    kbit_round(high, v[1]);
    memcpy(&bits, v, sizeof(bits));
    return bits;
}

// -- tables --

template <typename C> static __device__ __forceinline__ void kbit_fill_tables(uint8_t * table, const float * codebook) {
    constexpr int PARTS = C::ENTRY_BYTES / 16;
    constexpr int MASK  = (1 << C::K) - 1;
    for (unsigned i = threadIdx.x; i < C::ENTRIES * PARTS; i += KBIT_THREADS) {
        const unsigned entry = i / PARTS;
        const uint32_t v     = kbit_pair<typename C::T>(codebook[entry & MASK], codebook[entry >> C::K & MASK]);
        uint32_t       w     = v;
        if (C::CODES == 4) {
            w = kbit_pair<typename C::T>(codebook[entry >> 2 * C::K & MASK], codebook[entry >> 3 * C::K & MASK]);
        }
        ((uint4 *) (table + (entry << C::SHIFT)))[i % PARTS] = make_uint4(v, w, v, w);
    }
}

// Where the table has the entry of some bits of a stream of words, for this lane.
template <typename C> static __device__ __forceinline__ uint32_t kbit_offset(const uint32_t * words, const int first, const uint32_t lane) {
    if constexpr (C::WIDE) {
        return __byte_perm(words[first / 32], lane, 0x5504 | first % 32 / 8 << 4);
    } else {
        return kbit_field<C::K * C::CODES, C::SHIFT>(words, first) | lane;
    }
}

// -- a lane's weights --

// Its words and scales of a tile.
template <int K> struct kbit_words {
    uint32_t of[2 * K];
    uint32_t scales;

    __device__ __forceinline__ void load(const kbit_problem & p, const int tile) {
        const int        lane = threadIdx.x % KBIT_WARP;
        const uint32_t * from = p.tiles + (int64_t) tile * (2 * K * KBIT_WARP);
#pragma unroll
        for (int i = 0; i < K / 2; ++i) {
            const uint4 v = kbit_load((const uint4 *) from + i * KBIT_WARP + lane);
            of[4 * i] = v.x, of[4 * i + 1] = v.y, of[4 * i + 2] = v.z, of[4 * i + 3] = v.w;
        }
        if constexpr (K % 2) {
            const uint2 v = kbit_load((const uint2 *) (from + (2 * K - 2) * KBIT_WARP) + lane);
            of[2 * K - 2] = v.x, of[2 * K - 1] = v.y;
        }
        scales = kbit_load(p.scales + (int64_t) tile * KBIT_WARP + lane);
    }

    // twice the scale of a row, g or g+8
    template <typename T> __device__ __forceinline__ uint32_t scale(const T type, const int row) const {
        return kbit_scale(type, __byte_perm(scales, 0, row ? 0x1414 : 0x0404));
    }
};

// 4 weights of a row: codes 4 s ... 4 s + 3 of a block, of which the first two are in a[row], the others in a[row + 2].
template <typename C>
static __device__ __forceinline__ void kbit_take_apart(
        uint32_t (&a)[4], const uint32_t * block, const int s, const uint32_t scale, const int row, const uint8_t * table,
        const uint32_t lane) {
    const typename C::T type = {};
    if constexpr (C::CODES == 4) {
        const uint2 v = *(const uint2 *) (table + kbit_offset<C>(block, 8 * s, lane));
        a[row]     = kbit_times(type, v.x, scale);
        a[row + 2] = kbit_times(type, v.y, scale);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t at = kbit_offset<C>(block, (2 * s + i) * 2 * C::K, lane);
            a[row + 2 * i] = kbit_times(type, *(const uint32_t *) (table + at), scale);
        }
    }
}

// Where 8 of k of a token lie among those of a unit, [8 tokens][j][4 token + t] for k 32 t + 8 j: tokens and t are exchanged by j, so that
// neither writing nor reading meets a bank twice.
static __device__ __forceinline__ int kbit_piece(const int group, const int j, const int lane) {
    return (group * 4 + j) * KBIT_WARP + (lane ^ (j % 2 * 4 + j / 2 * 2));
}

// of: which 8 of k
static __device__ __forceinline__ int kbit_piece_of(const int token, const int of) {
    return kbit_piece(token / 8, of % 4, token % 8 * 4 + of / 4);
}

// Four sums of a lane, of rows g and g+8 of a strip and two of 8 tokens from `token` on, to where they are in the matrix.
template <typename T>
static __device__ __forceinline__ void kbit_write(const kbit_problem & p, const int strip, const int token, const float (&sums)[4]) {
    const int lane = threadIdx.x % KBIT_WARP;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = strip * KBIT_ROWS + lane / 4 + i / 2 * 8, column = token + lane % 4 * 2 + i % 2;
        if (row < p.n && column < p.m) {
            kbit_round(sums[i], ((T *) p.c)[(int64_t) column * p.n + row]);
        }
    }
}

// Of those that share a sum, whether this block is the last to have stored its part.
static __device__ __forceinline__ bool kbit_is_last(int * counter, const int done, const int of) {
    __shared__ bool last;

    __syncthreads();
    if (threadIdx.x == 0) {
        last = w4a16_count(counter, done) + done == of;
        if (last) {
            *counter = 0;  // for the next launch
        }
    }
    __syncthreads();
    return last;
}

// -- a warp's sums --

// Tiles' units one after the other, of which each part has an equal share.
static __device__ __forceinline__ int64_t kbit_first(const kbit_problem & p, const int part) {
    return (int64_t) kbit_tiles(p.strips) * p.units * part / p.parts;
}

static __device__ __forceinline__ int kbit_part_of(const kbit_problem & p, const int64_t unit) {
    return (int) (((unit + 1) * p.parts - 1) / ((int64_t) kbit_tiles(p.strips) * p.units));
}

// Where the sums of a part of a tile go: from one to the next the part or the tile is another, and a tile's are side by side.
template <typename C> static __device__ __forceinline__ float4 * kbit_partials(const kbit_problem & p, const int part, const int tile) {
    return p.partials + ((int64_t) blockIdx.y * (p.parts + kbit_tiles(p.strips)) + part + tile) * C::SUMS + threadIdx.x;
}

template <typename C> class kbit_sums {
    using T = typename C::T;

    static constexpr int AT_ONCE = C::NT < 4 ? 4 / C::NT : 1;  // parts whose sums are read before any is added
    static constexpr int BUFFERS = C::AHEAD + 1;
    static constexpr int PERIOD  = BUFFERS % C::UNITS == 0 ? BUFFERS : BUFFERS * C::UNITS;

  public:
    __device__ __forceinline__ kbit_sums(const kbit_problem & p, uint8_t * shared)
        : p_(p), table_(shared), xs_((uint4 *) (shared + C::TABLE_BYTES)), token_(blockIdx.y * C::TOKENS),
          lane_((threadIdx.x % KBIT_WARP) % C::REPLICAS * (C::CODES * 2)) {}

    // The weights of the first units: they depend on no other launch.
    __device__ __forceinline__ void begin(const int tile, const int first, const int last) {
        strip_ = (tile * KBIT_WARPS + (int) threadIdx.x / KBIT_WARP) * KBIT_STRIPS;
#pragma unroll
        for (int i = 0; i < C::AHEAD; ++i) {
            load(i, first + i, last);
        }
    }

    __device__ __forceinline__ void multiply(const int first, const int last) {
        clear();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KBIT_STAGES - 1; ++i) {
            copy_activations(first + i * C::UNITS, last, i);
        }
        int           stage = 0;
        const uint4 * x     = nullptr;
        for (int unit = first; unit < last; unit += PERIOD) {
#pragma unroll
            for (int i = 0; i < PERIOD; ++i) {
                if (unit + i < last) {
                    load((i + C::AHEAD) % BUFFERS, unit + i + C::AHEAD, last);
                    if (i % C::UNITS == 0) {
                        w4a16_wait<KBIT_STAGES - 2>();
                        // all copies of this stage are there for all, and no warp still reads the stage before
                        __syncthreads();
                        copy_activations(unit + i + (KBIT_STAGES - 1) * C::UNITS, last, stage == 0 ? KBIT_STAGES - 1 : stage - 1);
                        x     = xs_ + stage * C::X_STAGE;
                        stage = stage == KBIT_STAGES - 1 ? 0 : stage + 1;
                    }
                    multiply_unit(i % BUFFERS, x + i % C::UNITS * C::X_UNIT);
                }
            }
        }
        w4a16_wait<0>();
    }

    __device__ __forceinline__ void store(float4 * to) const {
#pragma unroll
        for (int i = 0; i < KBIT_STRIPS * C::NT; ++i) {
            const float(&v)[4] = acc_[i / C::NT][i % C::NT];
            to[i * KBIT_THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }

    // The sums of all parts of a tile, in their order.
    __device__ __forceinline__ void add_up(const int tile) {
        clear();
        const int first = kbit_part_of(p_, (int64_t) tile * p_.units), last = kbit_part_of(p_, (int64_t) (tile + 1) * p_.units - 1);
        const float4 * from = kbit_partials<C>(p_, first, tile);
#pragma unroll AT_ONCE
        for (int part = first; part <= last; ++part, from += C::SUMS) {
#pragma unroll
            for (int i = 0; i < KBIT_STRIPS * C::NT; ++i) {
                const float4 v = __ldcg(from + i * KBIT_THREADS);
                float(&to)[4]  = acc_[i / C::NT][i % C::NT];
                to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
            }
        }
    }

    __device__ __forceinline__ void write(const int tile) const {
        const int strip = (tile * KBIT_WARPS + (int) threadIdx.x / KBIT_WARP) * KBIT_STRIPS;
#pragma unroll
        for (int i = 0; i < KBIT_STRIPS * C::NT; ++i) {
            kbit_write<T>(p_, strip + i / C::NT, token_ + i % C::NT * 8, acc_[i / C::NT][i % C::NT]);
        }
    }

  private:
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < KBIT_STRIPS * C::NT * 4; ++i) {
            acc_[i / (4 * C::NT)][i / 4 % C::NT][i % 4] = 0.0f;
        }
    }

    // Strips beyond the matrix are its last one, and are not written.
    __device__ __forceinline__ void load(const int buffer, const int unit, const int last) {
        if (unit >= last) {
            return;
        }
#pragma unroll
        for (int mt = 0; mt < KBIT_STRIPS; ++mt) {
            words_[buffer][mt].load(p_, min(strip_ + mt, p_.strips - 1) * p_.units + unit);
        }
    }

    __device__ __forceinline__ void copy_activations(const int unit, const int last, const int stage) const {
        if (unit < last) {
#pragma unroll
            for (int i = 0; i < C::X_STAGE / KBIT_THREADS; ++i) {
                const int at    = i * KBIT_THREADS + (int) threadIdx.x;
                const int token = at / (16 * C::UNITS), of = at / 16 % C::UNITS;
                const int k     = (unit + of) * KBIT_UNIT + at % 16 * 8;
                uint4 *   to    = xs_ + stage * C::X_STAGE + of * C::X_UNIT + kbit_piece_of(token, at % 16);
                if (token_ + token < p_.m && k < p_.k_dim) {
                    w4a16_copy(to, (const T *) p_.a + (int64_t) (token_ + token) * p_.k_dim + k);
                } else {
                    *to = make_uint4(0, 0, 0, 0);
                }
            }
        }
        w4a16_commit();
    }

    __device__ __forceinline__ void multiply_unit(const int buffer, const uint4 * x) {
        uint32_t scale[KBIT_STRIPS][2];
#pragma unroll
        for (int i = 0; i < KBIT_STRIPS * 2; ++i) {
            scale[i / 2][i % 2] = words_[buffer][i / 2].scale(T(), i % 2);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint4 b[C::NT];
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt) {
                b[nt] = x[kbit_piece(nt, j, threadIdx.x % KBIT_WARP)];
            }
#pragma unroll
            for (int mt = 0; mt < KBIT_STRIPS; ++mt) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint32_t a[4];
                    kbit_take_apart<C>(a, words_[buffer][mt].of, 2 * j + i, scale[mt][0], 0, table_, lane_);
                    kbit_take_apart<C>(a, words_[buffer][mt].of + C::K, 2 * j + i, scale[mt][1], 1, table_, lane_);
#pragma unroll
                    for (int nt = 0; nt < C::NT; ++nt) {
                        const uint32_t part[2] = {i == 0 ? b[nt].x : b[nt].z, i == 0 ? b[nt].y : b[nt].w};
                        kbit_mma(T(), acc_[mt][nt], a, part);
                    }
                }
            }
        }
    }

    const kbit_problem & p_;
    const uint8_t *      table_;
    uint4 *              xs_;
    const int            token_;
    const uint32_t       lane_;
    int                  strip_;

    kbit_words<C::K> words_[BUFFERS][KBIT_STRIPS];
    float    acc_[KBIT_STRIPS][C::NT][4];
};

// -- kernel --

// What a block multiplies at once: units first ... last - 1 of a tile, as far as its parts go.
struct kbit_segment {
    int part, tile, first, last;

    __device__ __forceinline__ kbit_segment(const kbit_problem & p, const int part, const int64_t at)
        : part(part), tile((int) (at / p.units)), first((int) (at % p.units)),
          last((int) min((int64_t) p.units, first + kbit_first(p, part + 1) - at)) {}

    // the next one of a part, or the first of the next part
    __device__ __forceinline__ kbit_segment next(const kbit_problem & p) const {
        const int64_t at = (int64_t) tile * p.units + last;
        return {p, part + (at == kbit_first(p, part + 1)), at};
    }
};

// Blocks (of parts, slices of tokens), each of consecutive parts. Who is the last to be there adds up a tile that several parts share.
template <typename C> static __global__ void __launch_bounds__(KBIT_THREADS, C::LEAST) kbit_gemm(const kbit_problem p) {
    extern __shared__ __align__(128) uint8_t kbit_shared[];

    if constexpr (C::SHARED > W4A16_ARCH_SHARED) {
        __trap();
    } else {
        const int  part = (int) ((int64_t) p.parts * blockIdx.x / gridDim.x);
        const int  end  = (int) ((int64_t) p.parts * (blockIdx.x + 1) / gridDim.x);
        kbit_sums<C> sums(p, kbit_shared);
        kbit_segment now(p, part, kbit_first(p, part));
        sums.begin(now.tile, now.first, now.last);
        kbit_fill_tables<C>(kbit_shared, p.codebook);
        w4a16_others_may_begin();
        w4a16_wait_for_the_other();
        while (now.part < end) {
            sums.multiply(now.first, now.last);
            const kbit_segment then = now.next(p);
            if (then.part < end) {
                sums.begin(then.tile, then.first, then.last);
            }
            bool whole = now.last - now.first == p.units;
            if (!whole) {
                sums.store(kbit_partials<C>(p, now.part, now.tile));
                whole = kbit_is_last(p.counters + blockIdx.y * kbit_tiles(p.strips) + now.tile, now.last - now.first, p.units);
                if (whole) {
                    sums.add_up(now.tile);
                }
            }
            if (whole) {
                sums.write(now.tile);
            }
            now = then;
        }
    }
}

#else

template <typename C> static __global__ void kbit_gemm(const kbit_problem) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// -- plan --

struct kbit_args {
    int              k;
    int64_t          m, n, k_dim;
    const void *     a;
    const uint32_t * tiles;
    const uint8_t *  scales;
    const float *    codebook;
    void *           c;
    void *           workspace;
};

// parts: of all tiles' units. blocks: among which they are.
struct kbit_plan {
    int     parts, blocks;
    bool    small;  // shared memory: smaller tables
    int64_t workspace;
};

static inline int64_t kbit_over(const int64_t x, const int64_t by) { return (x + by - 1) / by; }

// of 8 tokens
static inline int kbit_groups_of(const int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8; }

static inline int64_t kbit_slices(const int64_t m) { return kbit_over(m, KBIT_MOST_TOKENS); }

// The router: up to so many tokens the product takes the weights apart itself, beyond kbit_unpack_cuda and a library multiply. Each 64
// tokens take them apart anew: K=4, 14336 x 4096 on an H200, 74 us against 78 with 128 tokens, 136 against 91 with 256.
static inline int64_t kbit_most_fused(int /*k*/) { return 128; }

// A multiple of what 4096 tiles of 256 rows by 64 tokens need: products up to that size have theirs at one place.
static inline int64_t kbit_counters(const int64_t m, const int64_t n) {
    return kbit_over(kbit_slices(m) * kbit_tiles((int) kbit_strips(n)), 4096) * 4096 * (int64_t) sizeof(int);
}

static inline int64_t kbit_workspace(const int64_t m, const int64_t n, const int parts) {
    const int64_t slots = kbit_slices(m) * (parts + kbit_tiles((int) kbit_strips(n)));
    return kbit_counters(m, n) + slots * KBIT_STRIPS * kbit_groups_of(m) * KBIT_THREADS * (int64_t) sizeof(float4);
}

static constexpr int kbit_blocks_of(const int k, const int groups) { return groups == 8 || (k == 5 && groups == 4) ? 1 : k == 3 && groups == 1 ? 3 : 2; }

// A part for each block that has room at a time, of 2 units at least; as many of each tile, where those are nine tenths of them.
static inline kbit_plan kbit_plan_of(const int k, const int64_t m, const int64_t n, const int64_t k_dim, const int multiprocessors,
                                     const int shared) {
    const int64_t tiles = kbit_tiles((int) kbit_strips(n)), most = kbit_over(tiles * kbit_units(k_dim), 2);
    const int64_t room  = multiprocessors * kbit_blocks_of(k, kbit_groups_of(m)) / kbit_slices(m);
    const int64_t equal = room < 1 ? 1 : room < most ? room : most;
    const int     parts = (int) (10 * (equal % tiles) <= equal ? equal - equal % tiles : equal);
    return {parts, parts, shared < 200 * 1024, kbit_workspace(m, n, parts)};
}

// -- launch --

template <typename C> static cudaError_t kbit_launch(const kbit_args & g, const kbit_plan & plan, cudaStream_t stream) {
    const kbit_problem p = {g.a, g.tiles, (const uint16_t *) g.scales, g.codebook, g.c, (int *) g.workspace,
                            (float4 *) ((uint8_t *) g.workspace + kbit_counters(g.m, g.n)), (int) g.m, (int) g.n, (int) g.k_dim,
                            (int) kbit_units(g.k_dim), (int) kbit_strips(g.n), plan.parts};
    const cudaError_t status = cudaFuncSetAttribute(kbit_gemm<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
    if (status != cudaSuccess) {
        return status;
    }
    cudaLaunchAttribute attribute;
    attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim            = dim3((unsigned) plan.blocks, (unsigned) kbit_slices(g.m));
    config.blockDim           = dim3(KBIT_THREADS);
    config.dynamicSmemBytes   = C::SHARED;
    config.stream             = stream;
    config.attrs              = &attribute;
    config.numAttrs           = 1;
    return cudaLaunchKernelEx(&config, kbit_gemm<C>, p);
}

// As trials on an H200 with 8 and 16 tokens found them (plans/kbit.md): more units ahead where registers allow, two blocks that hold 16 copies of
// K=5's table rather than one with 32.
template <typename T, int K, int nt> static cudaError_t kbit_by_memory(const kbit_args & g, const kbit_plan & plan, cudaStream_t stream) {
    constexpr bool FEW      = nt <= 2;
    constexpr int  AHEAD    = (K == 4 && nt == 1) || (K < 4 && nt == 2) ? 3 : 1;
    constexpr int  BLOCKS   = kbit_blocks_of(K, nt);
    constexpr int  REPLICAS = K == 2 || K == 5 ? 16 : 32;
    if constexpr (K == 5 || (K == 4 && FEW)) {
        if (plan.small) {
            return kbit_launch<kbit_config<T, K, nt, 1, BLOCKS, K == 5 ? 8 : 32, false>>(g, plan, stream);
        }
    }
    return kbit_launch<kbit_config<T, K, nt, AHEAD, BLOCKS, REPLICAS, FEW && K % 2 == 0>>(g, plan, stream);
}

template <typename T> static cudaError_t kbit_gemm_cuda(const kbit_args & g, const kbit_plan & plan, cudaStream_t stream) {
    if (kbit_check(g.k, g.n, g.k_dim) != cudaSuccess || g.m < 1 || g.m > 65535 * KBIT_MOST_TOKENS || plan.parts < 1 ||
        plan.parts > kbit_tiles((int) kbit_strips(g.n)) * kbit_units(g.k_dim) || plan.blocks < 1 || plan.blocks > plan.parts) {
        return cudaErrorInvalidValue;
    }
    if (!kbit_aligned(g.a, 16) || !kbit_aligned(g.tiles, 16) || !kbit_aligned(g.scales, 2) || !kbit_aligned(g.c, 2) ||
        !kbit_aligned(g.workspace, 256)) {
        return cudaErrorMisalignedAddress;
    }
    return kbit_by_bits(g.k, [&](const auto bits) {
        constexpr int K = decltype(bits)::value;
        switch (kbit_groups_of(g.m)) {
            case 1: return kbit_by_memory<T, K, 1>(g, plan, stream);
            case 2: return kbit_by_memory<T, K, 2>(g, plan, stream);
            case 4: return kbit_by_memory<T, K, 4>(g, plan, stream);
            default: return kbit_by_memory<T, K, 8>(g, plan, stream);
        }
    });
}
