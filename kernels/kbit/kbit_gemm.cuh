// Products of activations and codebook weights on 16-bit tensor cores: C = A W^T.
//
//   kbit_gemm_cuda<T>(args, plan, stream)   plan: kbit_plan_of(k, m, n, k_dim, multiprocessors, shared), or any chunks and splits
//
//   a          m rows (tokens) of k_dim T, f16 or bf16, contiguous; 16-byte aligned
//   tiles, scales, codebook   as in kbit.cuh
//   c          m rows of n T, contiguous; 2-byte aligned; overlaps none of the others
//   workspace  plan.workspace bytes, 256-byte aligned, zeros before its first use: every launch leaves its counters 0. One for each
//              stream
//   returns    cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer, else what the launch returned
//
// One launch, asynchronous, that allocates nothing: graphs can replay it. Where the launch before lets others begin before its own
// end, as this one does, weights are read before that end: such a launch must not write weights. sm_80 and newer.
//
// A weight is its codebook entry rounded to T, times its scale, rounded to T: what kbit_unpack_cuda writes. Sums are in f32. A sum is
// that of `chunks` parts of k, added in their order, whichever blocks made them: bits depend on chunks, not on splits.
//
// How. Rows of W are the rows of mma.m16n8k16, tokens its columns. Lane 4 g + t takes its weights from a tile as they lie, 16 bytes at a
// time straight to registers, a unit ahead; as the order of k within a sum is free, it multiplies them by 16 bytes of row-major
// activations: of k 32 t + 8 j ... + 7 of 128. Codes become weights by tables in shared memory of all pairs (of K=2 quadruples) of
// entries, a copy for each lane, so that no two meet on a bank: a shift, a mask, a load and a product with the scale for two weights.
// The published way, bits of planes and a shuffle for each weight, takes 64 to 138 instructions for 8 weights; this takes 15.
//
// References: PTX ISA, warp-level matrix fragments for m16n8k16, cp.async, griddepcontrol.

#pragma once

#include "kbit.cuh"
#include "w4a16_gemm.cuh"

static constexpr int KBIT_HALF        = 128;  // of k: between two barriers
static constexpr int KBIT_STAGES      = 3;    // of activations
static constexpr int KBIT_WARPS       = 8;
static constexpr int KBIT_MOST_CHUNKS = 16;
static constexpr int KBIT_MOST_TOKENS = 64;   // of a block
static constexpr int KBIT_MT          = 2;    // strips of a warp

// A block has 8 nt tokens, each of its 8 warps mt strips of 16 rows, whose weights are asked for `ahead` units before they are used.
// Blocks of them fit a multiprocessor. Replicas: of the table.
template <typename T_, int K_, int nt, int mt, int ahead, int blocks, int replicas> struct kbit_config {
    using T = T_;

    static constexpr int K      = K_;
    static constexpr int NT     = nt;
    static constexpr int MT     = mt;
    static constexpr int AHEAD  = ahead;
    static constexpr int BLOCKS = blocks;
    static constexpr int ROWS   = KBIT_WARPS * mt * KBIT_ROWS;
    static constexpr int TOKENS = 8 * nt;

    static constexpr int CODES       = K == 2 ? 4 : 2;  // of an entry
    static constexpr int ENTRIES     = 1 << (K * CODES);
    static constexpr int REPLICAS    = replicas;
    static constexpr int ENTRY_BYTES = REPLICAS * CODES * 2;
    static constexpr int SHIFT       = ENTRY_BYTES == 128 ? 7 : ENTRY_BYTES == 64 ? 6 : 5;
    static constexpr int TABLE_BYTES = ENTRIES * ENTRY_BYTES;
    static constexpr int X_BYTES     = TOKENS * KBIT_HALF * 2;  // of a stage
    static constexpr int SHARED      = TABLE_BYTES + KBIT_STAGES * X_BYTES;

    static_assert(1 << SHIFT == ENTRY_BYTES, "offsets are made by a shift");
};

struct kbit_problem {
    const void *    a;
    const uint4 *   tiles;
    const uint32_t * scales;
    const float *   codebook;
    void *          c;
    int *           counters;
    float4 *        partials;
    int             m, n, k_dim, units, strips, tiles_n, chunks, splits;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// -- one instruction --

// read once: past L1. Volatile, as it is asked for long before it is used.
static __device__ __forceinline__ uint4 kbit_load(const uint4 * x) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x));
    return v;
}

static __device__ __forceinline__ uint32_t kbit_load(const uint32_t * x) {
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(x));
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
        ((uint4 *) table)[i] = make_uint4(v, w, v, w);
    }
}

// Where the table has the entry of some bits of a stream of words, for this lane.
template <int shift, int bits>
static __device__ __forceinline__ uint32_t kbit_offset(const uint32_t * words, const int first, const uint32_t lane) {
    const int      at   = first % 32;
    const uint32_t low  = words[first / 32];
    const uint32_t mask = ((1u << bits) - 1) << shift;
    const uint32_t v    = at + bits > 32 ? __funnelshift_r(low, words[first / 32 + 1], at - shift)
                          : at >= shift  ? low >> (at - shift)
                                         : low << (shift - at);
    return (v & mask) | lane;
}

// -- a warp's sums --

// Where a block puts the sums of a chunk of one of all tiles of all slices.
template <typename C> static __device__ __forceinline__ float4 * kbit_partials(const kbit_problem & p, const int of, const int chunk) {
    const int64_t tiles = (int64_t) gridDim.y * p.tiles_n;
    return p.partials + (chunk * tiles + of) * (C::MT * C::NT * KBIT_THREADS);
}

template <typename C> class kbit_sums {
    using T = typename C::T;

  public:
    __device__ __forceinline__ kbit_sums(const kbit_problem & p, uint8_t * shared, const int tile, const int token)
        : p_(p), table_(shared), xs_(shared + C::TABLE_BYTES), token_(token),
          lane_((threadIdx.x % KBIT_WARP) % C::REPLICAS * (C::CODES * 2)),
          strip_((tile * KBIT_WARPS + (int) threadIdx.x / KBIT_WARP) * C::MT) {}

    // The weights of the first units of a part of k: they depend on no other launch.
    __device__ __forceinline__ void begin(const int first, const int last) {
#pragma unroll
        for (int i = 0; i < C::AHEAD; ++i) {
            load(i, first + i, last);
        }
        clear();
    }

    __device__ __forceinline__ void multiply(const int first, const int last) {
        const int end = 2 * last;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < KBIT_STAGES - 1; ++i) {
            copy_activations(2 * first + i, end, i);
        }
        int stage = 0;
        for (int unit = first; unit < last; unit += C::AHEAD + 1) {
#pragma unroll
            for (int i = 0; i <= C::AHEAD; ++i) {
                if (unit + i < last) {
                    load((i + C::AHEAD) % (C::AHEAD + 1), unit + i + C::AHEAD, last);
                    multiply_half<0>(i, 2 * (unit + i), end, stage);
                    multiply_half<1>(i, 2 * (unit + i) + 1, end, stage);
                }
            }
        }
        w4a16_wait<0>();
    }

    __device__ __forceinline__ void store(float4 * to) const {
#pragma unroll
        for (int i = 0; i < C::MT * C::NT; ++i) {
            const float(&v)[4] = acc_[i / C::NT][i % C::NT];
            to[i * KBIT_THREADS + threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }

    // The sum of all chunks, in their order.
    __device__ __forceinline__ void add_up(const int of) {
        clear();
#pragma unroll 2
        for (int chunk = 0; chunk < p_.chunks; ++chunk) {
            const float4 * from = kbit_partials<C>(p_, of, chunk) + threadIdx.x;
#pragma unroll
            for (int i = 0; i < C::MT * C::NT; ++i) {
                float(&v)[4]      = acc_[i / C::NT][i % C::NT];
                const float4 part = __ldcg(from + i * KBIT_THREADS);
                v[0] += part.x;
                v[1] += part.y;
                v[2] += part.z;
                v[3] += part.w;
            }
        }
    }

    __device__ __forceinline__ void write() const {
        const int lane = threadIdx.x % KBIT_WARP;
#pragma unroll
        for (int i = 0; i < C::MT * C::NT * 4; ++i) {
            const int row   = (strip_ + i / (4 * C::NT)) * KBIT_ROWS + lane / 4 + i % 4 / 2 * 8;
            const int token = token_ + i / 4 % C::NT * 8 + lane % 4 * 2 + i % 2;
            if (row < p_.n && token < p_.m) {
                kbit_round(acc_[i / (4 * C::NT)][i / 4 % C::NT][i % 4], ((T *) p_.c)[(int64_t) token * p_.n + row]);
            }
        }
    }

  private:
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < C::MT * C::NT * 4; ++i) {
            acc_[i / (4 * C::NT)][i / 4 % C::NT][i % 4] = 0.0f;
        }
    }

    // Strips beyond the matrix are its last one, and are not written.
    __device__ __forceinline__ void load(const int buffer, const int unit, const int last) {
        if (unit >= last) {
            return;
        }
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
            const int       strip = min(strip_ + mt, p_.strips - 1);
            const int64_t   tile  = (int64_t) strip * p_.units + unit;
            const uint4 *   from  = p_.tiles + tile * (C::K * KBIT_WARP) + threadIdx.x % KBIT_WARP;
            uint32_t(&words)[4 * C::K] = words_[buffer][mt];
#pragma unroll
            for (int i = 0; i < C::K; ++i) {
                const uint4 v = kbit_load(from + i * KBIT_WARP);
                words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
            }
            scales_[buffer][mt] = kbit_load(p_.scales + tile * KBIT_WARP + threadIdx.x % KBIT_WARP);
        }
    }

    // 128 of k, in pieces of 8: [8 tokens][j][4 token + t] for k 32 t + 8 j, every other j with its tokens exchanged by twos, so that
    // neither writing nor reading meets a bank twice.
    __device__ __forceinline__ void copy_activations(const int half, const int end, const int stage) const {
        if (half < end) {
            for (unsigned i = threadIdx.x; i < C::TOKENS * (KBIT_HALF / 8); i += KBIT_THREADS) {
                const int token = i / 16, t = i % 16 / 4, j = i % 4;
                const int k     = half * KBIT_HALF + (int) i % 16 * 8;
                const int slot  = (token / 8 * 4 + j) * KBIT_WARP + ((token % 8 * 4 + t) ^ j % 2 * 4);
                uint4 *   to    = (uint4 *) (xs_ + stage * C::X_BYTES) + slot;
                if (token_ + token < p_.m && k < p_.k_dim) {
                    w4a16_copy(to, (const T *) p_.a + (int64_t) (token_ + token) * p_.k_dim + k);
                } else {
                    *to = make_uint4(0, 0, 0, 0);
                }
            }
        }
        w4a16_commit();
    }

    template <int h>
    __device__ __forceinline__ void multiply_half(const int buffer, const int half, const int end, int & stage) {
        w4a16_wait<KBIT_STAGES - 2>();
        // all copies of this half are there for all, and no warp still reads what was read in the half before
        __syncthreads();
        copy_activations(half + KBIT_STAGES - 1, end, stage == 0 ? KBIT_STAGES - 1 : stage - 1);

        const uint4 * x = (const uint4 *) (xs_ + stage * C::X_BYTES);
        stage = stage == KBIT_STAGES - 1 ? 0 : stage + 1;
        uint32_t scale[C::MT][2];
#pragma unroll
        for (int i = 0; i < C::MT * 2; ++i) {
            const int byte = 2 * h + i % 2;
            scale[i / 2][i % 2] =
                kbit_scale(T(), __byte_perm(scales_[buffer][i / 2], 0, 0x0404 | byte << 4 | byte << 12));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint4 b[C::NT];
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt) {
                b[nt] = x[(nt * 4 + j) * KBIT_WARP + (threadIdx.x % KBIT_WARP ^ j % 2 * 4)];
            }
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint32_t a[4];
                    take_apart(a, words_[buffer][mt] + 2 * h * C::K, 2 * j + i, scale[mt][0], 0);
                    take_apart(a, words_[buffer][mt] + (2 * h + 1) * C::K, 2 * j + i, scale[mt][1], 1);
#pragma unroll
                    for (int nt = 0; nt < C::NT; ++nt) {
                        const uint32_t part[2] = {i == 0 ? b[nt].x : b[nt].z, i == 0 ? b[nt].y : b[nt].w};
                        kbit_mma(T(), acc_[mt][nt], a, part);
                    }
                }
            }
        }
    }

    // 4 weights of a row: codes 4 s ... 4 s + 3 of a block, of which the first two are in a[row], the others in a[row + 2].
    __device__ __forceinline__ void take_apart(
            uint32_t (&a)[4], const uint32_t * block, const int s, const uint32_t scale, const int row) const {
        if constexpr (C::CODES == 4) {
            const uint2 v = *(const uint2 *) (table_ + kbit_offset<C::SHIFT, 8>(block, 8 * s, lane_));
            a[row]     = kbit_times(T(), v.x, scale);
            a[row + 2] = kbit_times(T(), v.y, scale);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t at = kbit_offset<C::SHIFT, 2 * C::K>(block, (2 * s + i) * 2 * C::K, lane_);
                a[row + 2 * i] = kbit_times(T(), *(const uint32_t *) (table_ + at), scale);
            }
        }
    }

    const kbit_problem & p_;
    const uint8_t *      table_;
    uint8_t *            xs_;
    const int            token_;
    const uint32_t       lane_;
    const int            strip_;

    uint32_t words_[C::AHEAD + 1][C::MT][4 * C::K];
    uint32_t scales_[C::AHEAD + 1][C::MT];
    float    acc_[C::MT][C::NT][4];
};

// -- kernel --

static __device__ __forceinline__ int kbit_part(const int of, const int i, const int parts) {
    return (int) ((unsigned) of * (unsigned) i / (unsigned) parts);  // of < 2^16, i <= 16
}

// Blocks (tiles x splits, slices of tokens). A block makes its chunks of a tile's sum; whose chunks are the last to be there adds all up.
template <typename C> static __global__ void __launch_bounds__(KBIT_THREADS, C::BLOCKS) kbit_gemm(const kbit_problem p) {
    extern __shared__ __align__(128) uint8_t kbit_shared[];
    __shared__ bool last_of_tile;

    if constexpr (C::SHARED > W4A16_ARCH_SHARED) {
        __trap();
    } else {
        const int tile  = blockIdx.x % p.tiles_n;
        const int split = blockIdx.x / p.tiles_n;
        const int begin = kbit_part(p.chunks, split, p.splits);
        const int end   = kbit_part(p.chunks, split + 1, p.splits);
        const int of    = blockIdx.y * p.tiles_n + tile;

        kbit_sums<C> sums(p, kbit_shared, tile, blockIdx.y * C::TOKENS);
        for (int chunk = begin; chunk < end; ++chunk) {
            const int first = kbit_part(p.units, chunk, p.chunks);
            const int last  = kbit_part(p.units, chunk + 1, p.chunks);
            sums.begin(first, last);
            if (chunk == begin) {
                kbit_fill_tables<C>(kbit_shared, p.codebook);
                w4a16_others_may_begin();
                w4a16_wait_for_the_other();
            }
            sums.multiply(first, last);
            if (p.chunks > 1) {
                sums.store(kbit_partials<C>(p, of, chunk));
            }
        }
        if (p.chunks > 1) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                last_of_tile = atomicAdd(p.counters + of, end - begin) + end - begin == p.chunks;
            }
            __syncthreads();
            if (!last_of_tile) {
                return;
            }
            __threadfence();
            sums.add_up(of);
            if (threadIdx.x == 0) {
                p.counters[of] = 0;  // for the next launch
            }
        }
        sums.write();
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

// chunks: of k, whose sums are added in their order, at most 16 and no more than units of 256. splits: blocks among which they are.
struct kbit_plan {
    int     chunks, splits;
    bool    small;  // shared memory: copies of K=5's table for a quarter of the lanes
    int64_t workspace;
};

static inline int kbit_groups_of(const int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8; }

// mt strips a warp
static inline int64_t kbit_tiles_n(const int64_t n, const int mt) { return (kbit_strips(n) + KBIT_WARPS * mt - 1) / (KBIT_WARPS * mt); }

static inline int64_t kbit_slices(const int64_t m) { return (m + KBIT_MOST_TOKENS - 1) / KBIT_MOST_TOKENS; }

// The router: up to so many tokens the product takes the weights apart itself, beyond kbit_unpack_cuda and a library multiply. Each 64
// tokens take them apart anew: K=4, 14336 x 4096 on an H200, 74 us against 99 with 128 tokens, 145 against 111 with 256.
static inline int64_t kbit_most_fused(int /*k*/) { return 128; }

static inline int64_t kbit_workspace(const int64_t m, const int64_t n, const int chunks, const int mt = KBIT_MT) {
    const int64_t tiles    = kbit_slices(m) * kbit_tiles_n(n, mt);
    const int64_t counters = (tiles * (int64_t) sizeof(int) + 255) / 256 * 256;
    const int64_t partials = chunks * tiles * mt * kbit_groups_of(m) * KBIT_THREADS * (int64_t) sizeof(float4);
    return counters + (chunks > 1 ? partials : 0);
}

static constexpr int kbit_blocks_of(const int k, const int groups) { return k == 5 || groups > 2 ? 1 : 2; }

// As many chunks as make rounds of blocks short: a round takes its units, and about one more to begin and to end.
// fit: blocks at a time.
static inline kbit_plan kbit_plan_for(const int64_t fit, const int mt, const int64_t m, const int64_t n, const int64_t k_dim) {
    const int64_t tiles = kbit_slices(m) * kbit_tiles_n(n, mt);
    const int64_t units = kbit_units(k_dim);
    int64_t       best  = INT64_MAX;
    kbit_plan     plan  = {1, 1, false, 0};
    for (int chunks = 1; chunks <= KBIT_MOST_CHUNKS && chunks <= units; ++chunks) {
        const int64_t cost = (tiles * chunks + fit - 1) / fit * ((units + chunks - 1) / chunks + 1);
        if (cost < best) {
            best        = cost;
            plan.chunks = plan.splits = chunks;
        }
    }
    plan.workspace = kbit_workspace(m, n, plan.chunks, mt);
    return plan;
}

static inline kbit_plan kbit_plan_of(const int k, const int64_t m, const int64_t n, const int64_t k_dim, const int multiprocessors,
                                     const int shared) {
    kbit_plan plan = kbit_plan_for((int64_t) multiprocessors * kbit_blocks_of(k, kbit_groups_of(m)), KBIT_MT, m, n, k_dim);
    plan.small     = shared < 200 * 1024;
    return plan;
}

// -- launch --

template <typename C> static cudaError_t kbit_launch(const kbit_args & g, const kbit_plan & plan, cudaStream_t stream) {
    const int64_t      slices   = kbit_slices(g.m);
    const int64_t      tiles_n  = kbit_tiles_n(g.n, C::MT);
    const int64_t      counters = (slices * tiles_n * (int64_t) sizeof(int) + 255) / 256 * 256;
    const kbit_problem p = {g.a, (const uint4 *) g.tiles, (const uint32_t *) g.scales, g.codebook, g.c, (int *) g.workspace,
                            (float4 *) ((uint8_t *) g.workspace + counters), (int) g.m, (int) g.n, (int) g.k_dim,
                            (int) kbit_units(g.k_dim), (int) kbit_strips(g.n), (int) tiles_n, plan.chunks, plan.splits};
    const cudaError_t status = cudaFuncSetAttribute(kbit_gemm<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
    if (status != cudaSuccess) {
        return status;
    }
    cudaLaunchAttribute attribute;
    attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim            = dim3((unsigned) (tiles_n * plan.splits), (unsigned) slices);
    config.blockDim           = dim3(KBIT_THREADS);
    config.dynamicSmemBytes   = C::SHARED;
    config.stream             = stream;
    config.attrs              = &attribute;
    config.numAttrs           = 1;
    return cudaLaunchKernelEx(&config, kbit_gemm<C>, p);
}

template <typename T, int K, int nt> static cudaError_t kbit_by_memory(const kbit_args & g, const kbit_plan & plan, cudaStream_t stream) {
    constexpr int REPLICAS = K == 2 ? 16 : 32;
    constexpr int BLOCKS   = kbit_blocks_of(K, nt);
    if constexpr (K == 5) {
        if (plan.small) {
            return kbit_launch<kbit_config<T, K, nt, KBIT_MT, 1, BLOCKS, 8>>(g, plan, stream);
        }
    }
    return kbit_launch<kbit_config<T, K, nt, KBIT_MT, 1, BLOCKS, REPLICAS>>(g, plan, stream);
}

template <typename T> static cudaError_t kbit_gemm_cuda(const kbit_args & g, const kbit_plan & plan, cudaStream_t stream) {
    if (kbit_check(g.k, g.n, g.k_dim) != cudaSuccess || g.m < 1 || g.m > 65535 * KBIT_MOST_TOKENS || plan.chunks < 1 ||
        plan.chunks > kbit_units(g.k_dim) || plan.splits < 1 || plan.splits > plan.chunks) {
        return cudaErrorInvalidValue;
    }
    if (!kbit_aligned(g.a, 16) || !kbit_aligned(g.tiles, 16) || !kbit_aligned(g.scales, 4) || !kbit_aligned(g.c, 2) ||
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
