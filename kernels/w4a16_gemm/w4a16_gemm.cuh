// Products of 4-bit weights in ggml's blocks with f32 activations on f16 tensor cores: y = w x.
//
//   w4a16_gemm_cuda<config>(w, x, y, scratch, m, n, k, blocks, stream)
//
//   config   a w4a16_config: the type and the tiles
//   w        m rows of k weights in ggml's blocks, contiguous; 16-byte aligned
//   x        n rows (tokens) of k f32, contiguous; 16-byte aligned
//   y        n rows of m f32, contiguous: y[j*m + i] is row i of w by row j of x; 4-byte aligned; overlaps none of the
//            others
//   scratch  w4a16_scratch_bytes<config>(m, n, k, blocks) bytes that are written and read; 16-byte aligned
//   m, n, k  as test-backend-ops counts them: ne01, ne11, ne00; k a multiple of 256 for both types
//   blocks   thread blocks among which the work is divided: the tiles' number makes each do one tile; any other, each
//            the same share of tiles times k (Stream-K)
//   stream   two launches, asynchronous, that allocate nothing: they may be captured in a graph, and replayed
//   returns  cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer that is not as above, else what
//            the launches returned
//
// Limitations: sm_80 or newer. One matrix a call: no batch, no experts, no strides. A weight beyond f16's largest number,
// 65504, becomes infinite, as it does where ggml converts weights to f16.
//
// Deterministic: an output is a sum in an order that depends on the sizes and on blocks alone.
//
// Accuracy. Both operands are rounded to f16, all sums are in f32. A column (token) of activations whose largest is in
// 2^-8 ... 2^15 is only rounded: what f16 has as a multiple of its least number is off by 2^-17 of the largest at most. Any
// other is scaled by the power of two that brings its largest into 2^14 ... 2^15, and the outputs back. Weights need none: d
// is an f16, what it is multiplied by are integers, so that no product is between two multiples of the least number.
//
// No copy of the weights: the order of k within a sum is free as long as both operands have it. Both types have 144 bytes
// for 256 weights of a row, a unit. Lane 4 g + t takes the 32 bytes of codes of two blocks of 32 of rows g and g + 8, as
// they are: words i = 0 ... 7, and a word's 4 bytes are two pairs of low nibbles, bytes 0 2 and 1 3, and two of high ones.
// Low nibbles of all lanes are the fragment of one mma.m16n8k16, the high ones of the next. Activations are written in
// the order in which this takes the weights apart, 32 of k (a word of every lane) by 8 columns in the 32 x 16 bytes that
// the lanes of a warp load at once:
//
//   x16[k/32][columns/8][lane][word], lane = 4 g + t for column g: low 0 2 | low 1 3 | high 0 2 | high 1 3
//
// A fragment of mma.m16n8k16, lane = 4 g + t:
//
//   a0 row g, k 2t 2t+1     a1 row g+8, k 2t 2t+1     a2 row g, k 2t+8 2t+9     a3 row g+8, k 2t+8 2t+9
//   b0 column g, k 2t 2t+1  b1 column g, k 2t+8 2t+9
//   c0 row g, column 2t     c1 row g, column 2t+1     c2 row g+8, column 2t     c3 row g+8, column 2t+1
//
// Shared memory: rows of 144 bytes, as they lie in w: 36 words, so that 8 rows by 4 lanes meet no bank twice, Q4_K in
// loads of 16 bytes (16 header, 32 t codes), Q4_0 in loads of 4 (two blocks of 18 bytes are 9 words).
//
// References: PTX ISA, warp-level matrix fragments for m16n8k16, cp.async; ggml's block_q4_0 and block_q4_K.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

enum class w4a16_type { Q4_0, Q4_K };

template <w4a16_type type> static constexpr int w4a16_block_size  = type == w4a16_type::Q4_0 ? 32 : 256;
template <w4a16_type type> static constexpr int w4a16_block_bytes = type == w4a16_type::Q4_0 ? 18 : 144;

static constexpr int W4A16_WARP       = 32;
static constexpr int W4A16_UNIT       = 256;  // of k
static constexpr int W4A16_UNIT_BYTES = 144;  // of a row
static constexpr int W4A16_STEP       = 64;   // of k, between two barriers
static constexpr int W4A16_STEPS      = W4A16_UNIT / W4A16_STEP;

// A tile of tile_m x tile_n outputs by warps of warp_m x warp_n. Units of weights go through w_stages, steps of activations
// through x_stages of shared memory; blocks of them fit a multiprocessor.
template <w4a16_type type_, int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_stages, int blocks>
struct w4a16_warps {
    static constexpr w4a16_type TYPE = type_;

    static constexpr int TILE_M   = tile_m;
    static constexpr int TILE_N   = tile_n;
    static constexpr int WARP_M   = warp_m;
    static constexpr int WARP_N   = warp_n;
    static constexpr int WARPS_M  = TILE_M / WARP_M;
    static constexpr int WARPS    = WARPS_M * (TILE_N / WARP_N);
    static constexpr int THREADS  = W4A16_WARP * WARPS;
    static constexpr int W_STAGES = w_stages;
    static constexpr int X_STAGES = x_stages;
    static constexpr int BLOCKS   = blocks;
    static constexpr int MT       = WARP_M / 16;  // fragments of a warp
    static constexpr int NT       = WARP_N / 8;

    static_assert(TILE_M % WARP_M == 0 && TILE_N % WARP_N == 0, "the warps must cover the tile");
};

// ahead: the weights of 32 of k are taken apart while the 32 before are multiplied.
template <w4a16_type type_, int tile_m, int tile_n, int warp_m, int warp_n, int w_stages, int x_stages, int blocks,
          bool ahead>
struct w4a16_config : w4a16_warps<type_, tile_m, tile_n, warp_m, warp_n, w_stages, x_stages, blocks> {
    static constexpr bool AHEAD = ahead;

    static constexpr int W_BYTES = tile_m * W4A16_UNIT_BYTES;  // of a stage
    static constexpr int X_BYTES = tile_n * W4A16_STEP * (int) sizeof(__half);
    static constexpr int SHARED  = w_stages * W_BYTES + x_stages * X_BYTES;

    static_assert(tile_m % (w4a16_config::THREADS / 8) == 0, "8 threads copy a row of weights");
    static_assert(X_BYTES / 16 % w4a16_config::THREADS == 0, "the threads must cover the activations");
    static_assert((x_stages & (x_stages - 1)) == 0, "stages are counted with a mask");
    // a unit is waited for with the step x_stages - 1 after the one that it was asked for in
    static_assert(x_stages <= W4A16_STEPS * (w_stages - 1) && w_stages <= x_stages, "weights must come in time");
};

// The order of 16-bit activations. Either way 32 of k by 8 columns are 512 bytes, [k/32][columns/8], of four parts: low
// nibbles 0 2, low 1 3, high 0 2, high 1 3 (w4a16_gather).
//
//   FRAGMENTS  [lane][part], lane = 4 (column % 8) + t: what a lane of mma.m16n8k16 loads at once
//   CORES      [part][column % 8][t]: the core matrices of wgmma, 8 columns by 16 bytes
enum class w4a16_order { FRAGMENTS, CORES };

static constexpr int W4A16_X_WARPS = 16;  // of a block that converts
static constexpr int W4A16_X_AHEAD = 4;   // pieces of activations that a thread asks for at once

// -- what a block works on --

struct w4a16_problem {
    const uint8_t * w;
    const uint4 *   x16;
    const float *   undo;
    float *         y;
    float4 *        partials;
    int *           counters;
    int             m, n, units, tiles_n;
    int             share, more;  // units of a block; so many blocks have one more
};

// -- one instruction --

static __device__ __forceinline__ __half2 w4a16_as_half2(const uint32_t bits) {
    __half2 v;
    memcpy(&v, &bits, sizeof(v));
    return v;
}

static __device__ __forceinline__ uint32_t w4a16_as_u32(const __half2 v) {
    uint32_t bits;
    memcpy(&bits, &v, sizeof(bits));
    return bits;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// c += a b
static __device__ __forceinline__ void w4a16_mma(
        float (&c)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory, there once their group has been waited for
static __device__ __forceinline__ void w4a16_copy(void * to, const void * from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 : : "r"((uint32_t) __cvta_generic_to_shared(to)), "l"(from) : "memory");
}

static __device__ __forceinline__ void w4a16_commit() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// until all of this thread's groups but the last so many are there
template <int groups> static __device__ __forceinline__ void w4a16_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(groups) : "memory");
}

// The kernel that was launched to begin before this one has ended may begin, and waits where it needs what this one wrote.
static __device__ __forceinline__ void w4a16_others_may_begin() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

static __device__ __forceinline__ void w4a16_wait_for_the_other() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

// The bits of q in a mask, and those of 1024 as two f16: one instruction, of which the compiler makes two if it is left to it.
template <uint32_t mask> static __device__ __forceinline__ uint32_t w4a16_codes(const uint32_t q) {
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits) : "r"(q), "n"(mask), "r"(0x64006400));
    return bits;
}

// -- dequantisation --

// 0x6400 is 1024 as an f16, whose last bit then counts 1: two codes less 8, of nibbles 0 and 4, or 16 times as large of
// nibbles 1 and 5.
static __device__ __forceinline__ __half2 w4a16_low(const uint32_t q) {
    return __hsub2(w4a16_as_half2(w4a16_codes<0x000F000F>(q)), w4a16_as_half2(0x64086408));
}

static __device__ __forceinline__ __half2 w4a16_high(const uint32_t q) {
    const __half2 sixteenth = w4a16_as_half2(0x2C002C00);
    const __half2 less_72   = w4a16_as_half2(0xD480D480);
    return __hfma2(w4a16_as_half2(w4a16_codes<0x00F000F0>(q)), sixteenth, less_72);
}

// What a lane holds of a row: the codes of one of the four steps of a unit and what scales them.
template <w4a16_type type> struct w4a16_row;

// d of the 32 weights that the words belong to
template <> struct w4a16_row<w4a16_type::Q4_0> {
    uint32_t q[2];
    __half2  d;

    // Two blocks: d0, 16 bytes, d1, 16 bytes are 9 words. The first half of the steps takes words 0 to 4 without d1, as
    // bytes 0 1 14 15, 2 ... 5, 6 ... 9, 10 ... 13 of the first block; the second words 4 to 8 without d1, as
    // 12 ... 15, 0 ... 3, 4 ... 7, 8 ... 11 of the second.
    template <int odd> __device__ __forceinline__ void load(const uint8_t * row, const int t, const int half) {
        const uint32_t * v = (const uint32_t *) (row + 36 * t) + 4 * half;
        if (odd == 0) {
            const uint32_t a = v[0];
            q[0] = __byte_perm(a, v[4], half ? 0x7654 : 0x5432);
            q[1] = v[1];
            d    = w4a16_as_half2(__byte_perm(a, 0, half ? 0x3232 : 0x1010));
        } else {
            q[0] = v[2];
            q[1] = v[3];
        }
    }

    __device__ __forceinline__ __half2 low(const __half2 v) const { return __hmul2(v, d); }
    __device__ __forceinline__ __half2 high(const __half2 v) const { return __hmul2(v, d); }
};

// Of two sub-blocks of 32, whose codes are the low and the high nibbles: what a code less 8 is multiplied by, and what is
// added.
template <> struct w4a16_row<w4a16_type::Q4_K> {
    uint32_t q[2];
    __half2  d, c;

    template <int odd> __device__ __forceinline__ void load(const uint8_t * row, const int t, const int half) {
        if (odd == 0 && half == 0) {
            scales(*(const uint4 *) row, t);
        }
        const uint2 v = *(const uint2 *) (row + 16 + 32 * t + 16 * half + 8 * odd);
        q[0] = v.x;
        q[1] = v.y;
    }

    __device__ __forceinline__ __half2 low(const __half2 v) const {
        return __hfma2(v, __low2half2(d), __low2half2(c));
    }

    __device__ __forceinline__ __half2 high(const __half2 v) const {
        return __hfma2(v, __high2half2(d), __high2half2(c));
    }

  private:
    // d, dmin, then 8 scales and 8 minima of 6 bits: the first 4 of each have a byte to themselves, whose two high bits
    // are those of the 4 others, whose low 4 bits share a byte. Sub-blocks 2t and 2t + 1.
    __device__ __forceinline__ void scales(const uint4 head, const int t) {
        const int      shift = t % 2 * 16;
        const uint32_t s     = head.y >> shift;
        const uint32_t m     = head.z >> shift;
        const uint32_t both  = head.w >> shift;
        const uint32_t sc    = t < 2 ? s & 0x3F3F : (both & 0x0F0F) | (s >> 2 & 0x3030);
        const uint32_t mn    = t < 2 ? m & 0x3F3F : (both >> 4 & 0x0F0F) | (m >> 2 & 0x3030);
        const __half2  dm    = w4a16_as_half2(head.x);
        d = __hmul2(__low2half2(dm), small(sc));
        c = __hfma2(__hneg2(__high2half2(dm)), small(mn), __hmul2(d, w4a16_as_half2(0x48004800)));
    }

    // bytes 0 and 1
    static __device__ __forceinline__ __half2 small(const uint32_t bytes) {
        return __hsub2(w4a16_as_half2(__byte_perm(bytes, 0x64646464, 0x4140)), w4a16_as_half2(0x64006400));
    }
};

// -- activations --

static __device__ __forceinline__ float w4a16_largest(const float4 & v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

static __device__ __forceinline__ uint32_t w4a16_pair(const float a, const float b, const float scale) {
    return w4a16_as_u32(__floats2half2_rn(a * scale, b * scale));
}

// The 8 activations of 256 of k that meet word i of lane t: two pairs of low nibbles, two of high ones. Each time, bytes
// b b+2 and b+1 b+3, but for the word of Q4_0 that has bytes 0 1 14 15.
template <w4a16_type type> struct w4a16_gathered {
    float4 low, high;

    __device__ __forceinline__ void load(const float * x, const int t, const int i) {
        if (type == w4a16_type::Q4_0) {
            const int    first  = 64 * t + (i == 0 ? 0 : i < 4 ? 4 * i - 2 : i == 4 ? 44 : 4 * i + 12);
            const int    second = i == 0 ? first + 14 : first + 2;
            const float2 a = *(const float2 *) (x + first);
            const float2 b = *(const float2 *) (x + second);
            const float2 c = *(const float2 *) (x + first + 16);
            const float2 d = *(const float2 *) (x + second + 16);
            low  = make_float4(a.x, a.y, b.x, b.y);
            high = make_float4(c.x, c.y, d.x, d.y);
        } else {
            low  = *(const float4 *) (x + 64 * t + 4 * i);
            high = *(const float4 *) (x + 64 * t + 4 * i + 32);
        }
    }

    __device__ __forceinline__ void clear() { low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f); }

    __device__ __forceinline__ float largest() const { return fmaxf(w4a16_largest(low), w4a16_largest(high)); }

    __device__ __forceinline__ uint4 pairs(const float scale) const {
        return make_uint4(w4a16_pair(low.x, low.z, scale), w4a16_pair(low.y, low.w, scale),
                          w4a16_pair(high.x, high.z, scale), w4a16_pair(high.y, high.w, scale));
    }
};

// The exponent, as a float has it, that the largest of a column is taken to have: that of 2^14, which is not scaled, if it
// need not be, else its own, but so that both factors are normal numbers.
static __device__ __forceinline__ uint32_t w4a16_taken_as(const float largest) {
    const uint32_t e = __float_as_uint(largest) >> 23;
    return largest == 0.0f || (e >= 127 - 8 && e < 127 + 15) ? 127 + 14 : e < 15 ? 15 : e > 254 ? 254 : e;
}

// What brings a number of that exponent into 2^14 ... 2^15, and what brings it back.
static __device__ __forceinline__ float w4a16_scale(const uint32_t exponent) {
    return __uint_as_float((268 - exponent) << 23);
}

static __device__ __forceinline__ float w4a16_undo(const uint32_t exponent) {
    return __uint_as_float((exponent - 14) << 23);
}

// The largest of a column that a block of threads (32, 16) has, or of the one of two that lane bit 2 says, from each
// thread's largest. All meet here.
template <int cols> static __device__ __forceinline__ float w4a16_largest_of(float largest) {
    static_assert(W4A16_X_WARPS * cols <= W4A16_WARP, "each lane has the largest of one warp");

    __shared__ float of_warps[cols][W4A16_X_WARPS];

    const int col  = threadIdx.x / 4 % cols;
    const int lane = threadIdx.x / (4 * cols) * 4 + threadIdx.x % 4;  // of those of the column
    for (int i = W4A16_WARP / 2; i > 0; i /= 2) {
        if (cols == 1 || i != 4) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, i));
        }
    }
    if (lane == 0) {
        of_warps[col][threadIdx.y] = largest;
    }
    __syncthreads();
    largest = of_warps[col][lane % W4A16_X_WARPS];
    for (int i = W4A16_WARP / 2; i > 0; i /= 2) {
        if (cols == 1 || i != 4) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, i));
        }
    }
    return largest;
}

// A block's columns by convert(scale), which returns a thread's largest before it is scaled: as they are, and once more if
// that is not enough. What gets the outputs back goes to undo, a thread's own column, by the thread that writes.
template <int cols, typename convert_t>
static __device__ __forceinline__ void w4a16_convert_columns(const convert_t convert, float & undo, const bool writes) {
    const uint32_t taken_as = w4a16_taken_as(w4a16_largest_of<cols>(convert(1.0f)));
    if (writes) {
        undo = w4a16_undo(taken_as);
    }
    if (w4a16_scale(taken_as) != 1.0f) {
        convert(w4a16_scale(taken_as));
    }
}

// Blocks of one column or of two side by side, threads (32, 16): a warp has the words of 256 of k of one, or half of them
// of two. Lane bits 0 1 are t, then comes the column, then the word. Columns from n on are 0. The counters of the tiles are set
// to 0 besides.
template <w4a16_type type, w4a16_order order, int cols>
static __global__ void __launch_bounds__(W4A16_WARP * W4A16_X_WARPS, 2)
w4a16_to_f16(const float * __restrict__ x, uint32_t * __restrict__ x16, float * __restrict__ undo,
             int * __restrict__ counters, const int n_counters, const int n, const int units) {
    constexpr int THREADS = W4A16_WARP * W4A16_X_WARPS;
    constexpr int WORDS   = 8 / cols;

    w4a16_others_may_begin();
    for (int64_t i = (int64_t) blockIdx.x * THREADS + threadIdx.y * W4A16_WARP + threadIdx.x; i < n_counters;
         i += (int64_t) gridDim.x * THREADS) {
        counters[i] = 0;
    }

    const int     t      = threadIdx.x % 4;
    const int     col    = cols * blockIdx.x + threadIdx.x / 4 % cols;
    const int     word   = threadIdx.x / (4 * cols);
    const int     place  = col % 8 * 4 + t;
    const int     parts  = units * cols;
    const int64_t stride = (int64_t) gridDim.x * cols / 8 * (4 * W4A16_WARP);  // of 32 of k
    const float * from   = x + (int64_t) col * units * W4A16_UNIT;
    uint32_t *    to     = x16 + (int64_t) (col / 8) * (4 * W4A16_WARP);

    const auto convert = [&](const float scale) {
        float largest = 0.0f;
        for (int first = threadIdx.y; first < parts; first += W4A16_X_AHEAD * W4A16_X_WARPS) {
            w4a16_gathered<type> v[W4A16_X_AHEAD];
#pragma unroll
            for (int i = 0; i < W4A16_X_AHEAD; ++i) {
                const int part = first + i * W4A16_X_WARPS;
                if (col < n && part < parts) {
                    v[i].load(from + part / cols * W4A16_UNIT, t, part % cols * WORDS + word);
                } else {
                    v[i].clear();
                }
            }
#pragma unroll
            for (int i = 0; i < W4A16_X_AHEAD; ++i) {
                const int part = first + i * W4A16_X_WARPS;
                if (part < parts) {
                    uint32_t *  piece = to + (part / cols * 8 + part % cols * WORDS + word) * stride;
                    const uint4 pairs = v[i].pairs(scale);
                    if (order == w4a16_order::FRAGMENTS) {
                        ((uint4 *) piece)[place] = pairs;
                    } else {
                        piece[place]      = pairs.x;
                        piece[place + 32] = pairs.y;
                        piece[place + 64] = pairs.z;
                        piece[place + 96] = pairs.w;
                    }
                }
                largest = fmaxf(largest, v[i].largest());
            }
        }
        return largest;
    };
    w4a16_convert_columns<cols>(convert, undo[col], threadIdx.y == 0 && word == 0 && t == 0);
}

// -- division --

// Where block b begins.
static __device__ __forceinline__ int w4a16_begin(const w4a16_problem & p, const int b) {
    return p.share * b + (b < p.more ? b : p.more);
}

// The block that has a unit.
static __device__ __forceinline__ int w4a16_block_of(const w4a16_problem & p, const int unit) {
    const int longer = p.more * (p.share + 1);
    return unit < longer ? unit / (p.share + 1) : p.more + (unit - longer) / p.share;
}

// What a block has of a tile.
struct w4a16_part {
    int tile, begin, first, last;  // begin: the tile's; units first ... last - 1 of it

    __device__ __forceinline__ w4a16_part(const w4a16_problem & p, const int at, const int end) {
        tile  = at / p.units;
        begin = tile * p.units;
        first = at - begin;
        last  = end - begin < p.units ? end - begin : p.units;
    }
};

// The parts that a block has, one after the other.
template <typename work_t>
static __device__ __forceinline__ void w4a16_for_each_part(const w4a16_problem & p, const work_t work) {
    const int end = w4a16_begin(p, blockIdx.x + 1);
    for (int at = w4a16_begin(p, blockIdx.x); at < end;) {
        const w4a16_part part(p, at, end);
        at = part.begin + part.last;
        work(part);
    }
}

// -- tile --

// The sums of a warp's part of a tile.
template <typename C> class w4a16_sums {
  public:
    __device__ __forceinline__ w4a16_sums(const w4a16_problem & p, const int tile)
        : p_(p), tid_(threadIdx.y * W4A16_WARP + threadIdx.x), warp_row_(threadIdx.y % C::WARPS_M * C::WARP_M),
          warp_col_(threadIdx.y / C::WARPS_M * C::WARP_N), row0_(tile / p.tiles_n * C::TILE_M),
          col0_(tile % p.tiles_n * C::TILE_N) {}

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    acc_[mt][nt][e] = 0.0f;
                }
            }
        }
    }

    // To a slot of the partials; each thread reads and writes the same places.
    __device__ __forceinline__ void store(const int64_t slot) const {
        float4 * to = p_.partials + slot * (C::TILE_M * C::TILE_N / 4) + tid_;
#pragma unroll
        for (int mt = 0; mt < C::MT; ++mt) {
#pragma unroll
            for (int nt = 0; nt < C::NT; ++nt) {
                const float (&c)[4] = acc_[mt][nt];
                to[(mt * C::NT + nt) * C::THREADS] = make_float4(c[0], c[1], c[2], c[3]);
            }
        }
    }

    // So many slots of a narrow tile are read at once: one after the other, each would be waited for.
    static constexpr int SLOTS = 8 / (C::MT * C::NT) > 1 ? 8 / (C::MT * C::NT) : 1;

    // Adds to the sums what is in the first of these slots.
    __device__ __forceinline__ void add(const int64_t (&slots)[SLOTS], const int count) {
        float4 v[SLOTS][C::MT][C::NT];
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const float4 * from = p_.partials + slots[i] * (C::TILE_M * C::TILE_N / 4) + tid_;
#pragma unroll
            for (int t = 0; t < C::MT * C::NT; ++t) {
                v[i][t / C::NT][t % C::NT] = SLOTS == 1 || i < count ? __ldcg(from + t * C::THREADS) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
#pragma unroll
            for (int t = 0; t < C::MT * C::NT; ++t) {
                const float4 & from = v[i][t / C::NT][t % C::NT];
                float (&c)[4]       = acc_[t / C::NT][t % C::NT];
                c[0] += from.x;
                c[1] += from.y;
                c[2] += from.z;
                c[3] += from.w;
            }
        }
    }

    // To y, what is there of it.
    __device__ __forceinline__ void write() const {
        write([](int) { return 1.0f; });
    }

  protected:
    // A row of the outputs times a factor, a power of two.
    template <typename factor_t> __device__ __forceinline__ void write(const factor_t factor) const {
        const int row = row0_ + warp_row_ + threadIdx.x / 4;
        const int col = col0_ + warp_col_ + threadIdx.x % 4 * 2;
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int to_col = col + 8 * nt + e;
                if (to_col >= p_.n) {
                    continue;
                }
                const float undo = p_.undo[to_col];
                float *     y    = p_.y + (int64_t) to_col * p_.m + row;
#pragma unroll
                for (int mt = 0; mt < C::MT; ++mt) {
                    if (row + 16 * mt < p_.m) {
                        y[16 * mt] = undo * (factor(row + 16 * mt) * acc_[mt][nt][e]);
                    }
                    if (row + 16 * mt + 8 < p_.m) {
                        y[16 * mt + 8] = undo * (factor(row + 16 * mt + 8) * acc_[mt][nt][e + 2]);
                    }
                }
            }
        }
    }

    const w4a16_problem & p_;
    const int             tid_, warp_row_, warp_col_, row0_, col0_;

    float acc_[C::MT][C::NT][4];
};

template <typename C> class w4a16_tile : public w4a16_sums<C> {
    using sums = w4a16_sums<C>;

  public:
    __device__ __forceinline__ w4a16_tile(const w4a16_problem & p, uint8_t * ws, uint8_t * xs, const int tile)
        : sums(p, tile), ws_(ws), xs_(xs) {}

    // The sums of units first ... last - 1.
    __device__ __forceinline__ void multiply(const int first, const int last) {
        const int steps = (last - first) * W4A16_STEPS;
        this->clear();

        // prologue: all stages but one of each; not unrolled, for the registers of its addresses
        __syncthreads();
#pragma unroll 1
        for (int s = 0; s < C::X_STAGES - 1; ++s) {
            if (s < C::W_STAGES - 1 && first + s < last) {
                copy_weights(first + s, s);
            }
            if (s < steps) {
                copy_activations(first * W4A16_STEPS + s, s);
            }
            w4a16_commit();
        }
        if (C::AHEAD) {
            w4a16_wait<C::X_STAGES - 2>();
            __syncthreads();
            load<0>(0, 0);
            dequantise_all<0>();
        }

        int w_stage = 0;
        for (int half = 0; 2 * half < steps; ++half) {
            const int odd = half % 2;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int step = 2 * half + j;
                w4a16_wait<C::X_STAGES - 2>();
                // all copies of this step are there for all, and nobody reads what was read in the step before
                __syncthreads();
                const int next = step + C::X_STAGES - 1;
                if (next < steps) {
                    copy_activations(first * W4A16_STEPS + next, next & (C::X_STAGES - 1));
                }
                if (j == 0 && odd == 0) {
                    const int unit = first + half / 2 + C::W_STAGES - 1;
                    if (unit < last) {
                        copy_weights(unit, w_stage == 0 ? C::W_STAGES - 1 : w_stage - 1);
                    }
                }
                w4a16_commit();

                const uint8_t * x = xs_ + (step & (C::X_STAGES - 1)) * C::X_BYTES;
                if (!C::AHEAD) {
                    load_step(j, w_stage, odd);
                }
                multiply_32<0>(x);
                if (j == 1 && odd) {
                    w_stage = w_stage == C::W_STAGES - 1 ? 0 : w_stage + 1;
                }
                if (C::AHEAD && step + 1 < steps) {
                    load_step(1 - j, w_stage, j == 0 ? odd : odd ^ 1);
                }
                multiply_32<1>(x);
            }
        }
        w4a16_wait<0>();
    }

    // Rows beyond the matrix are read as its last one and not written.
    __device__ __forceinline__ const uint8_t * source(const int row, const int unit) const {
        const int there = row0_ + row < p_.m ? row0_ + row : p_.m - 1;
        return p_.w + (int64_t) there * p_.units * W4A16_UNIT_BYTES + unit * W4A16_UNIT_BYTES;
    }

    // Nine pieces a row: eight by eight threads side by side, then the last ones. Not unrolled: it takes registers for
    // addresses, and there are none to spare.
    __device__ __forceinline__ void copy_weights(const int unit, const int stage) const {
        uint8_t * to = ws_ + stage * C::W_BYTES;
#pragma unroll 1
        for (int row = tid_ / 8; row < C::TILE_M; row += C::THREADS / 8) {
            w4a16_copy(to + row * W4A16_UNIT_BYTES + tid_ % 8 * 16, source(row, unit) + tid_ % 8 * 16);
        }
#pragma unroll 1
        for (int row = tid_; row < C::TILE_M; row += C::THREADS) {
            w4a16_copy(to + row * W4A16_UNIT_BYTES + 128, source(row, unit) + 128);
        }
    }

    // Two pieces of 32 of k, each contiguous in both memories.
    __device__ __forceinline__ void copy_activations(const int step, const int stage) const {
        constexpr int PIECE = C::TILE_N * 4;  // of 16 bytes

        const int64_t stride = (int64_t) p_.tiles_n * PIECE;
        const uint4 * from   = p_.x16 + 2 * step * stride + col0_ * 4;
        uint8_t *     to     = xs_ + stage * C::X_BYTES + tid_ * 16;
        if constexpr (PIECE % C::THREADS == 0) {
#pragma unroll
            for (int i = 0; i < 2 * PIECE; i += C::THREADS) {
                w4a16_copy(to + i * 16, from + i / PIECE * stride + i % PIECE + tid_);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2 * PIECE; i += C::THREADS) {
                const int at = i + tid_;
                w4a16_copy(to + i * 16, from + at / PIECE * stride + at % PIECE);
            }
        }
    }

    // A step of the warp's rows from shared memory.
    template <int odd> __device__ __forceinline__ void load(const int stage, const int half) {
        const uint8_t * w = ws_ + stage * C::W_BYTES + (warp_row_ + threadIdx.x / 4) * W4A16_UNIT_BYTES;
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            rows_[r].template load<odd>(w + 8 * r * W4A16_UNIT_BYTES, threadIdx.x % 4, half);
        }
    }

    __device__ __forceinline__ void load_step(const int odd, const int stage, const int half) {
        if (odd) {
            load<1>(stage, half);
        } else {
            load<0>(stage, half);
        }
    }

    // Word i of row r: two rows of it are a fragment of low nibbles and one of high ones.
    template <int i> __device__ __forceinline__ void dequantise(const int r) {
        const auto &   row = rows_[r];
        const uint32_t q   = row.q[i];
        auto &         a   = a_[C::AHEAD ? i : 0][r / 2];
        a[0][r % 2]     = w4a16_as_u32(row.low(w4a16_low(q)));
        a[0][r % 2 + 2] = w4a16_as_u32(row.low(w4a16_low(q >> 8)));
        a[1][r % 2]     = w4a16_as_u32(row.high(w4a16_high(q)));
        a[1][r % 2 + 2] = w4a16_as_u32(row.high(w4a16_high(q >> 8)));
    }

    template <int i> __device__ __forceinline__ void dequantise_all() {
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            dequantise<i>(r);
        }
    }

    // 32 of k, word i of a step. Beside its last word the weights that are taken apart are the next step's.
    template <int i> __device__ __forceinline__ void multiply_32(const uint8_t * x) {
        const uint4 * from = (const uint4 *) x + (i * (C::TILE_N / 8) + warp_col_ / 8) * W4A16_WARP + threadIdx.x;
        if (!C::AHEAD) {
            dequantise_all<i>();
        }
        uint4 b = from[0];
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt) {
            const uint4 next = nt + 1 < C::NT ? from[(nt + 1) * W4A16_WARP] : b;
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                w4a16_mma(acc_[mt][nt], a_[C::AHEAD ? i : 0][mt][0], b.x, b.y);
            }
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                w4a16_mma(acc_[mt][nt], a_[C::AHEAD ? i : 0][mt][1], b.z, b.w);
            }
            b = next;
            if (C::AHEAD) {
                dequantise_ahead<1 - i>(nt);
            }
        }
    }

    // Its share of the next words beside column nt.
    template <int i> __device__ __forceinline__ void dequantise_ahead(const int nt) {
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            if (r * C::NT / (2 * C::MT) == nt) {
                dequantise<i>(r);
            }
        }
    }

  protected:
    using sums::acc_;
    using sums::col0_;
    using sums::p_;
    using sums::row0_;
    using sums::tid_;
    using sums::warp_col_;
    using sums::warp_row_;

    uint8_t * const ws_;
    uint8_t * const xs_;

    w4a16_row<C::TYPE> rows_[2 * C::MT];
    uint32_t           a_[C::AHEAD ? 2 : 1][C::MT][2][4];
};

// -- kernel --

// The most shared memory that a block can have. A kernel that needs more is not compiled.
#if !defined(__CUDA_ARCH__)
static constexpr int W4A16_ARCH_SHARED = INT32_MAX;
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
static constexpr int W4A16_ARCH_SHARED = 163 * 1024;
#elif __CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200
static constexpr int W4A16_ARCH_SHARED = 99 * 1024;
#else
static constexpr int W4A16_ARCH_SHARED = 227 * 1024;
#endif // !defined(__CUDA_ARCH__)

// Adds to a counter and returns its old value. What other threads stored before the last barrier comes before it, what they
// load behind the next one comes after it. Fences in every thread take longer: 2 to 7 % of a product of up to 32 columns (H100).
static __device__ __forceinline__ int w4a16_count(int * counter, const int more) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(more) : "memory");
    return before;
}

// Writes a tile that a block has all of. Else its parts go to slots, of which a block needs two at most, for its first tile
// and for its last; the block that adds the last units to the tile's counter adds up the slots, in the order of k, and
// writes. All threads that multiplied come here, and meet.
template <typename tile_t, typename meet_t>
static __device__ __forceinline__ void w4a16_finish(
        tile_t & t, const w4a16_problem & p, const w4a16_part & part, bool & last_of_tile, const meet_t meet) {
    const int units = part.last - part.first;
    if (units < p.units) {
        t.store(2 * blockIdx.x + (part.first == 0));
        __threadfence_block();  // not needed for the order; without it ptxas spills registers of a kernel for sm_121
        meet();
        if (threadIdx.x == 0 && threadIdx.y == 0) {
            last_of_tile = w4a16_count(p.counters + part.tile, units) + units == p.units;
        }
        meet();
        if (!last_of_tile) {
            return;
        }
        t.clear();
        const int end = w4a16_block_of(p, part.begin + p.units - 1) + 1;
        for (int b = w4a16_block_of(p, part.begin); b < end; b += tile_t::SLOTS) {
            int64_t slots[tile_t::SLOTS];
#pragma unroll
            for (int i = 0; i < tile_t::SLOTS; ++i) {
                slots[i] = b + i < end ? 2 * (b + i) + (w4a16_begin(p, b + i) <= part.begin) : 0;
            }
            t.add(slots, end - b);
        }
    }
    t.write();
}

// Threads (32, warps). Block b works from w4a16_begin(b) to w4a16_begin(b + 1) of tiles x units, units of one tile side by
// side.
template <typename C>
static __global__ void __launch_bounds__(C::THREADS, C::BLOCKS) w4a16_gemm(const w4a16_problem p) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ bool last_of_tile;

    if (C::SHARED > W4A16_ARCH_SHARED) {
        __trap();
        return;
    }
    w4a16_for_each_part(p, [&](const w4a16_part & part) {
        w4a16_tile<C> t(p, shared, shared + C::W_STAGES * C::W_BYTES, part.tile);
        t.multiply(part.first, part.last);
        w4a16_finish(t, p, part, last_of_tile, [] { __syncthreads(); });
    });
}

#else

// A stub's parameters have the qualifiers of the kernel's: for these architectures alone the host calls the stub by them.
template <w4a16_type type, w4a16_order order, int cols>
static __global__ void w4a16_to_f16(const float * __restrict__, uint32_t * __restrict__, float * __restrict__,
                                    int * __restrict__, const int, const int, const int) {
    __trap();
}

template <typename C> static __global__ void w4a16_gemm(const w4a16_problem) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// -- launch --

// Where in the scratch memory what begins, in bytes.
struct w4a16_layout {
    int64_t tiles_m, tiles_n, undo, counters, partials, size;
};

template <typename C>
static inline w4a16_layout w4a16_layout_of(const int64_t m, const int64_t n, const int64_t k, const int64_t blocks) {
    const auto   aligned = [](int64_t size) { return (size + 255) / 256 * 256; };
    w4a16_layout l;
    l.tiles_m  = (m + C::TILE_M - 1) / C::TILE_M;
    l.tiles_n  = (n + C::TILE_N - 1) / C::TILE_N;
    l.undo     = l.tiles_n * C::TILE_N * k * (int64_t) sizeof(__half);
    l.counters = l.undo + aligned(l.tiles_n * C::TILE_N * (int64_t) sizeof(float));
    l.partials = l.counters + aligned(l.tiles_m * l.tiles_n * (int64_t) sizeof(int));
    l.size     = l.partials;
    if (blocks != l.tiles_m * l.tiles_n) {
        l.size += 2 * blocks * C::TILE_M * C::TILE_N * (int64_t) sizeof(float);
    }
    return l;
}

template <typename C>
static inline size_t w4a16_scratch_bytes(const int64_t m, const int64_t n, const int64_t k, const int64_t blocks) {
    return (size_t) w4a16_layout_of<C>(m, n, k, blocks).size;
}

// One column a block makes many of few. In the order of fragments that writes 64 bytes side by side; in that of core matrices
// 16, half of what memory is written by, which costs more than it wins once there are columns enough for all
// multiprocessors.
template <w4a16_type type, w4a16_order order>
static cudaError_t w4a16_to_f16_cuda(const float * x, uint32_t * x16, float * undo, int * counters, const int n_counters,
                                     const int64_t n, const int64_t cols, const int64_t units, cudaStream_t stream) {
    constexpr int OF_MANY = order == w4a16_order::FRAGMENTS ? 1 : 2;

    const bool    few    = cols <= 128;
    const int64_t blocks = few ? cols : cols / OF_MANY;
    const auto    kernel = few ? w4a16_to_f16<type, order, 1> : w4a16_to_f16<type, order, OF_MANY>;
    const dim3    block(W4A16_WARP, W4A16_X_WARPS);
    kernel<<<(unsigned) blocks, block, 0, stream>>>(x, x16, undo, counters, n_counters, (int) n, (int) units);
    return cudaGetLastError();
}

// A kernel for the products of a configuration, its threads and the order in which it reads the activations.
struct w4a16_entry {
    void (*run)(w4a16_problem);
    int         warps;
    w4a16_order order;
    bool        waits;  // itself, for the activations: it begins before
};

template <typename C>
static cudaError_t w4a16_launch(const w4a16_entry & kernel, const void * w, const float * x, float * y, void * scratch,
                                const int64_t m, const int64_t n, const int64_t k, const int64_t blocks,
                                cudaStream_t stream) {
    if (m < 0 || n < 0 || k <= 0 || k % W4A16_UNIT != 0 || k / W4A16_UNIT > INT32_MAX / W4A16_UNIT ||
        m > INT32_MAX - C::TILE_M || n > INT32_MAX - C::TILE_N || blocks < 1 || blocks > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) w % 16 != 0 || (uintptr_t) x % sizeof(float4) != 0 || (uintptr_t) y % sizeof(float) != 0 ||
        (uintptr_t) scratch % 16 != 0) {
        return cudaErrorMisalignedAddress;
    }
    if (m == 0 || n == 0) {
        return cudaSuccess;
    }
    const w4a16_layout l     = w4a16_layout_of<C>(m, n, k, blocks);
    const int64_t      units = k / W4A16_UNIT;
    const int64_t      work  = l.tiles_m * l.tiles_n * units;
    if (work > INT32_MAX || blocks > work) {
        return cudaErrorInvalidValue;
    }

    uint8_t *           base = (uint8_t *) scratch;
    const w4a16_problem p    = {(const uint8_t *) w, (const uint4 *) base, (const float *) (base + l.undo), y,
                                (float4 *) (base + l.partials), (int *) (base + l.counters), (int) m, (int) n, (int) units,
                                (int) l.tiles_n, (int) (work / blocks), (int) (work % blocks)};
    cudaError_t status = cudaFuncSetAttribute(kernel.run, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
    if (status != cudaSuccess) {
        return status;
    }
    const auto to_f16 = kernel.order == w4a16_order::FRAGMENTS ? w4a16_to_f16_cuda<C::TYPE, w4a16_order::FRAGMENTS>
                                                               : w4a16_to_f16_cuda<C::TYPE, w4a16_order::CORES>;
    status = to_f16(x, (uint32_t *) base, (float *) (base + l.undo), p.counters, (int) (l.tiles_m * l.tiles_n), n,
                    l.tiles_n * C::TILE_N, units, stream);
    if (status != cudaSuccess) {
        return status;
    }
    cudaLaunchAttribute attribute;
    attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim            = dim3((unsigned) blocks);
    config.blockDim           = dim3(W4A16_WARP, kernel.warps);
    config.dynamicSmemBytes   = C::SHARED;
    config.stream             = stream;
    config.attrs              = &attribute;
    config.numAttrs           = kernel.waits ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel.run, p);
}

template <typename C>
static cudaError_t w4a16_gemm_cuda(const void * w, const float * x, float * y, void * scratch, const int64_t m,
                                   const int64_t n, const int64_t k, const int64_t blocks, cudaStream_t stream) {
    const w4a16_entry kernel = {w4a16_gemm<C>, C::WARPS, w4a16_order::FRAGMENTS, false};
    return w4a16_launch<C>(kernel, w, x, y, scratch, m, n, k, blocks, stream);
}
