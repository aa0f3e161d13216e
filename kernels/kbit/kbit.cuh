// Codebook quantisation of 2 to 5 bits: blocks of 32 weights with one scale each.
//
//   kbit_quantise_cuda     x[n]           -> planes, absmax
//   kbit_dequantise_cuda   planes, absmax -> out[n]
//   kbit_repack_cuda       planes, absmax -> tiles, scales, the order in which kbit_gemm.cuh multiplies
//   kbit_unpack_cuda       tiles, scales  -> out[N][K_dim]
//
//   x, out    f16, bf16 or f32; 16-byte aligned; n = N K_dim, a multiple of 32
//   codebook  2^K f32, ascending, on the device; a code's value is codebook[code] * absmax
//   planes    K words of 32 bits a block; bit j of word b is bit b of the code of element j; 4 K-byte aligned
//   absmax    a block's largest magnitude: E4M4 in a byte, or f16
//   tiles     kbit_tile_words(K, N, K_dim) words, 16-byte aligned
//   scales    kbit_tile_scales(N, K_dim) words: E4M4 alone
//   flags     3 ints that are set, never cleared: x has NaN or infinity; an absmax is beyond its format; the codebook does not ascend
//   returns   cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer, else what the launch returned
//
// One launch each, asynchronous, that allocates nothing. sm_80 and newer.
//
// W[N][K_dim] has its blocks along K_dim: block n (K_dim/32) + k/32. Quantised is x / max(absmax, 1e-8), absmax as it is in x, to the
// nearest entry: the number of middles between neighbours that are below it.
//
// E4M4, bias 11: e > 0 -> 2^(e-11) (1 + m/16), e = 0 -> 2^-10 m/16. From 2^-14 (the smallest, 2^-10 the smallest normal) to 31.
//
// A tile is 16 rows by 128 of k; lane 4 g + t of a warp has block t of rows g and g+8. Codes of a block are 32 K bits in the order of k,
// K words. Beyond N and K_dim codes and scales are 0.
//
//   tiles   [N/16][K_dim/128]: a lane's 2 K words, row g's first: [K/2][lane] 16 bytes, and of an odd K [lane] 8 bytes behind
//   scales  [N/16][K_dim/128][lane] 2 bytes: of rows g and g+8

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

static constexpr int KBIT_BLOCK   = 32;   // weights that share a scale
static constexpr int KBIT_ROWS    = 16;   // of a tile
static constexpr int KBIT_UNIT    = 128;  // of k
static constexpr int KBIT_WARP    = 32;
static constexpr int KBIT_THREADS = 256;

enum kbit_flag { KBIT_NOT_FINITE, KBIT_BEYOND_FORMAT, KBIT_NOT_ASCENDING };

static __host__ __device__ __forceinline__ int64_t kbit_strips(const int64_t n) { return (n + KBIT_ROWS - 1) / KBIT_ROWS; }
static __host__ __device__ __forceinline__ int64_t kbit_units(const int64_t k_dim) { return (k_dim + KBIT_UNIT - 1) / KBIT_UNIT; }

static inline int64_t kbit_tile_scales(const int64_t n, const int64_t k_dim) {
    return kbit_strips(n) * kbit_units(k_dim) * (2 * KBIT_WARP / 4);
}

static inline int64_t kbit_tile_words(const int k, const int64_t n, const int64_t k_dim) {
    return kbit_tile_scales(n, k_dim) * 4 * k;
}

// -- numbers --

static __host__ __device__ __forceinline__ float kbit_float(const float x) { return x; }
static __host__ __device__ __forceinline__ float kbit_float(const __half x) { return __half2float(x); }
static __host__ __device__ __forceinline__ float kbit_float(const __nv_bfloat16 x) { return __bfloat162float(x); }

static __host__ __device__ __forceinline__ void kbit_round(const float x, float & to) { to = x; }
static __host__ __device__ __forceinline__ void kbit_round(const float x, __half & to) { to = __float2half_rn(x); }
static __host__ __device__ __forceinline__ void kbit_round(const float x, __nv_bfloat16 & to) { to = __float2bfloat16_rn(x); }

// not less than 0
static __host__ __device__ __forceinline__ float kbit_decode(const uint8_t code) {
    const uint32_t bits = code < 16 ? 0 : ((uint32_t) code + ((127 - 11) << 4)) << 19;
    float          x;
    memcpy(&x, &bits, sizeof(x));
    return code < 16 ? (float) code * (1.0f / 16384.0f) : x;
}

// The nearest, of two the even one; 31 for what is larger.
static __host__ __device__ __forceinline__ uint8_t kbit_encode(const float x) {
    if (!(x < 31.0f)) {
        return 0xFF;
    }
    if (x < 1.0f / 1024.0f) {
        return (uint8_t) rintf(x * 16384.0f);  // 16 is the smallest normal
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return (uint8_t) (((bits + 0x3FFFF + (bits >> 19 & 1)) >> 19) - ((127 - 11) << 4));
}

static __device__ __forceinline__ float kbit_absmax(const uint8_t x) { return kbit_decode(x); }
static __device__ __forceinline__ float kbit_absmax(const __half x) { return __half2float(x); }

static __host__ __device__ __forceinline__ float kbit_store_absmax(const float x, uint8_t & to) {
    to = kbit_encode(x);
    return 31.0f;
}

static __host__ __device__ __forceinline__ float kbit_store_absmax(const float x, __half & to) {
    to = __float2half_rn(x);
    return 65504.0f;
}

// -- quantise --

// A warp a block, lane j its element j.
template <typename T, typename A, int K>
static __global__ void __launch_bounds__(KBIT_THREADS) kbit_quantise(
        const T * __restrict__ x, const float * __restrict__ codebook, uint32_t * __restrict__ planes, A * __restrict__ absmax,
        int * __restrict__ flags, const int64_t blocks) {
    __shared__ float middles[1 << K];

    if (threadIdx.x < (1 << K) - 1) {
        const float low = codebook[threadIdx.x], high = codebook[threadIdx.x + 1];
        middles[threadIdx.x] = 0.5f * (low + high);
        if (!(low < high) || !(high - low < 1e30f)) {
            flags[KBIT_NOT_ASCENDING] = 1;
        }
    }
    __syncthreads();
    const int lane = threadIdx.x % KBIT_WARP;
    for (int64_t block = (int64_t) blockIdx.x * (KBIT_THREADS / KBIT_WARP) + threadIdx.x / KBIT_WARP; block < blocks;
         block += (int64_t) gridDim.x * (KBIT_THREADS / KBIT_WARP)) {
        const float v       = kbit_float(x[block * KBIT_BLOCK + lane]);
        float       largest = fabsf(v);
        if ((__float_as_uint(v) & 0x7F800000) == 0x7F800000) {
            flags[KBIT_NOT_FINITE] = 1;
        }
        for (int i = KBIT_WARP / 2; i > 0; i /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, i));
        }
        const float scaled = __fdiv_rn(v, fmaxf(largest, 1e-8f));
        int         code   = 0;
#pragma unroll
        for (int b = K - 1; b >= 0; --b) {
            code += middles[code + (1 << b) - 1] < scaled ? 1 << b : 0;
        }
        uint32_t mine = 0;
#pragma unroll
        for (int b = 0; b < K; ++b) {
            const uint32_t plane = __ballot_sync(0xFFFFFFFF, code >> b & 1);
            mine = lane == b ? plane : mine;
        }
        if (lane < K) {
            planes[block * K + lane] = mine;
        }
        if (lane == 0 && kbit_store_absmax(largest, absmax[block]) < largest) {
            flags[KBIT_BEYOND_FORMAT] = 1;
        }
    }
}

// -- dequantise --

// A block's planes: K words side by side, of which four threads take a byte each.
template <int K> static __device__ __forceinline__ void kbit_load_planes(uint32_t (&planes)[K], const uint32_t * from) {
    if constexpr (K == 4) {
        const uint4 v = *(const uint4 *) from;
        planes[0] = v.x, planes[1] = v.y, planes[2] = v.z, planes[3] = v.w;
    } else if constexpr (K == 2) {
        const uint2 v = *(const uint2 *) from;
        planes[0] = v.x, planes[1] = v.y;
    } else {
#pragma unroll
        for (int b = 0; b < K; ++b) {
            planes[b] = from[b];
        }
    }
}

// A byte each of codes: byte b of codes[2 r + h] is that of element 8 b + 4 h + r. Four planes are transposed by nibbles.
template <int K> static __device__ __forceinline__ void kbit_codes(uint32_t (&codes)[8], const uint32_t (&planes)[K]) {
    uint32_t of[4] = {planes[0], planes[1], K > 2 ? planes[K > 2 ? 2 : 0] : 0, K > 3 ? planes[K > 3 ? 3 : 0] : 0};
    const auto exchange = [](uint32_t & a, uint32_t & b, const int by, const uint32_t mask) {
        const uint32_t both = (a >> by ^ b) & mask;
        b ^= both;
        a ^= both << by;
    };
    exchange(of[0], of[2], 2, 0x33333333);
    exchange(of[1], of[3], 2, 0x33333333);
    exchange(of[0], of[1], 1, 0x55555555);
    exchange(of[2], of[3], 1, 0x55555555);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        codes[i] = of[i / 2] >> i % 2 * 4 & 0x0F0F0F0F;
        if constexpr (K == 5) {
            codes[i] |= (planes[4] >> (i % 2 * 4 + i / 2) & 0x01010101) << 4;
        }
    }
}

// The codebook, an entry each 256 bytes, of which the first half has a copy for each lane: no two lanes meet on a bank.
template <int K, typename F> static __device__ __forceinline__ void kbit_fill_table(float (&table)[2 * KBIT_WARP << K], const F value) {
    for (int i = threadIdx.x; i < (1 << K) * KBIT_WARP; i += KBIT_THREADS) {
        table[i / KBIT_WARP * 2 * KBIT_WARP + i % KBIT_WARP] = value(i / KBIT_WARP);
    }
    __syncthreads();
}

// Blocks of T, one of each lane of a warp, on their way to memory: lanes write 16 bytes side by side.
template <typename T> class kbit_blocks {
    static constexpr int PIECES = KBIT_BLOCK * sizeof(T) / 16;  // of a block

  public:
    // 8 elements
    __device__ __forceinline__ void put(const int eight, const T (&v)[8]) {
        uint4 parts[PIECES / 4];
        memcpy(parts, v, sizeof(parts));
#pragma unroll
        for (int i = 0; i < PIECES / 4; ++i) {
            pieces_[slot(threadIdx.x % KBIT_WARP, eight * (PIECES / 4) + i)] = parts[i];
        }
    }

    // place(lane): where its block goes, or null
    template <typename F> __device__ __forceinline__ void write(const F place) const {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int at = i * KBIT_WARP + threadIdx.x % KBIT_WARP;
            T *       to = place(at / PIECES);
            if (to != nullptr) {
                ((uint4 *) to)[at % PIECES] = pieces_[slot(at / PIECES, at % PIECES)];
            }
        }
        __syncwarp();
    }

  private:
    // neither writing nor reading meets a bank twice
    static __device__ __forceinline__ int slot(const int lane, const int piece) {
        return lane * PIECES + (piece ^ lane / (8 / PIECES) % PIECES);
    }

    uint4 pieces_[KBIT_WARP * PIECES];
};

// A lane has a block.
template <typename T, typename A, int K>
static __global__ void __launch_bounds__(KBIT_THREADS, 4) kbit_dequantise(
        const uint32_t * __restrict__ planes, const A * __restrict__ absmax, const float * __restrict__ codebook,
        T * __restrict__ out, const int64_t blocks) {
    __shared__ float          table[2 * KBIT_WARP << K];
    __shared__ kbit_blocks<T> on_the_way[KBIT_THREADS / KBIT_WARP];

    const uint32_t lane  = threadIdx.x % KBIT_WARP;
    const int64_t  first = (int64_t) blockIdx.x * KBIT_THREADS + threadIdx.x - lane;
    uint32_t       bits[K] = {};
    float          scale   = 0.0f;
    if (first + lane < blocks) {
        kbit_load_planes<K>(bits, planes + (first + lane) * K);
        scale = kbit_absmax(absmax[first + lane]);
    }
    kbit_fill_table<K>(table, [&](const int code) { return codebook[code]; });
    uint32_t codes[8];
    kbit_codes<K>(codes, bits);
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
        T v[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const uint32_t at = __byte_perm(codes[e % 4 * 2 + e / 4], lane * 4, 0x5504 | eight << 4);
            kbit_round(*(const float *) ((const uint8_t *) table + at) * scale, v[e]);
        }
        on_the_way[threadIdx.x / KBIT_WARP].put(eight, v);
    }
    on_the_way[threadIdx.x / KBIT_WARP].write([&](const int of) {
        return first + of < blocks ? out + (first + of) * KBIT_BLOCK : nullptr;
    });
}

// -- tiles --

// Where a lane's word is.
template <int K> static __device__ __forceinline__ int64_t kbit_word_of(const int64_t tile, const int lane, const int word) {
    const int of_odd = 2 * K - 2;
    return tile * (2 * K * KBIT_WARP) + (K % 2 && word >= of_odd ? of_odd * KBIT_WARP + lane * 2 + word - of_odd
                                                                 : (word / 4 * KBIT_WARP + lane) * 4 + word % 4);
}

// Some bits of a stream of words, `shift` to the left of where they end.
template <int bits, int shift> static __device__ __forceinline__ uint32_t kbit_field(const uint32_t * words, const int first) {
    const int      at  = first % 32;
    const uint32_t low = words[first / 32];
    const uint32_t v   = at + bits > 32 ? __funnelshift_r(low, words[first / 32 + 1], at - shift)
                         : at >= shift  ? low >> (at - shift)
                                        : low << (shift - at);
    return v & ((1u << bits) - 1) << shift;
}

// A thread packs a block: the codes from planes to K bits each.
template <int K>
static __global__ void __launch_bounds__(KBIT_THREADS) kbit_repack(
        const uint32_t * __restrict__ planes, const uint8_t * __restrict__ absmax, uint32_t * __restrict__ tiles,
        uint8_t * __restrict__ scales, const int64_t n, const int64_t blocks_of_row, const int64_t parts) {
    const int64_t part = (int64_t) blockIdx.x * KBIT_THREADS + threadIdx.x;
    if (part >= parts) {
        return;
    }
    const int     which = (int) (part % 2);
    const int     lane  = (int) (part / 2 % KBIT_WARP);
    const int64_t tile  = part / (2 * KBIT_WARP);
    const int64_t units = (blocks_of_row + 3) / 4;
    const int64_t row   = tile / units * KBIT_ROWS + lane / 4 + which * 8;
    const int64_t block = tile % units * 4 + lane % 4;
    const bool    there = row < n && block < blocks_of_row;
    uint32_t      from[K] = {}, to[K] = {};
    if (there) {
        kbit_load_planes<K>(from, planes + (row * blocks_of_row + block) * K);
    }
#pragma unroll
    for (int bit = 0; bit < 32 * K; ++bit) {
        to[bit / 32] |= (from[bit % K] >> bit / K & 1) << bit % 32;
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
        tiles[kbit_word_of<K>(tile, lane, which * K + i)] = to[i];
    }
    scales[part] = there ? absmax[row * blocks_of_row + block] : 0;
    __threadfence();  // a product may begin to read as soon as this ends
}

// What kbit_gemm.cuh multiplies: the entry rounded to T, times the scale, rounded. A warp has a tile.
template <typename T, int K>
static __global__ void __launch_bounds__(KBIT_THREADS, 4) kbit_unpack(
        const uint32_t * __restrict__ tiles, const uint8_t * __restrict__ scales, const float * __restrict__ codebook,
        T * __restrict__ out, const int64_t n, const int k_dim, const unsigned all) {
    __shared__ float          table[2 * KBIT_WARP << K];
    __shared__ kbit_blocks<T> on_the_way[KBIT_THREADS / KBIT_WARP];

    const int     lane = threadIdx.x % KBIT_WARP;
    const unsigned tile = blockIdx.x * (KBIT_THREADS / KBIT_WARP) + threadIdx.x / KBIT_WARP;
    uint32_t      words[2 * K] = {};
    float         scale[2]     = {};
    if (tile < all) {
#pragma unroll
        for (int i = 0; i < 2 * K; ++i) {
            words[i] = tiles[kbit_word_of<K>(tile, lane, i)];
        }
        scale[0] = kbit_decode(scales[((int64_t) tile * KBIT_WARP + lane) * 2]);
        scale[1] = kbit_decode(scales[((int64_t) tile * KBIT_WARP + lane) * 2 + 1]);
    }
    kbit_fill_table<K>(table, [&](const int code) {
        T entry;
        kbit_round(codebook[code], entry);
        return kbit_float(entry);
    });
    const unsigned units = (unsigned) kbit_units(k_dim);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
            T v[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const uint32_t at = kbit_field<K, 8>(words + which * K, (eight * 8 + e) * K) | lane * 4;
                kbit_round(*(const float *) ((const uint8_t *) table + at) * scale[which], v[e]);
            }
            on_the_way[threadIdx.x / KBIT_WARP].put(eight, v);
        }
        on_the_way[threadIdx.x / KBIT_WARP].write([&](const int of) {
            const int64_t row = tile / units * KBIT_ROWS + of / 4 + which * 8;
            const int     k   = (int) (tile % units) * KBIT_UNIT + of % 4 * KBIT_BLOCK;
            return tile < all && row < n && k < k_dim ? out + row * k_dim + k : nullptr;
        });
    }
}

// -- launches --

static inline cudaError_t kbit_check(const int k, const int64_t n, const int64_t k_dim) {
    const bool sizes = k >= 2 && k <= 5 && n >= 1 && k_dim >= KBIT_BLOCK && k_dim % KBIT_BLOCK == 0 && k_dim < 1 << 24 &&
                       n < 1 << 28 && n * k_dim < (int64_t) 1 << 40;
    return sizes ? cudaSuccess : cudaErrorInvalidValue;
}

static inline cudaError_t kbit_check(const int k, const int64_t n) {
    const bool sizes = k >= 2 && k <= 5 && n >= KBIT_BLOCK && n % KBIT_BLOCK == 0 && n < (int64_t) 1 << 40;
    return sizes ? cudaSuccess : cudaErrorInvalidValue;
}

static inline bool kbit_aligned(const void * p, const uintptr_t to) { return (uintptr_t) p % to == 0; }

// f(std::integral_constant) of a number of bits that is known to be one of these.
template <int K> struct kbit_bits { static constexpr int value = K; };

template <typename F> static cudaError_t kbit_by_bits(const int k, const F f) {
    switch (k) {
        case 2: return f(kbit_bits<2>());
        case 3: return f(kbit_bits<3>());
        case 4: return f(kbit_bits<4>());
        case 5: return f(kbit_bits<5>());
        default: return cudaErrorInvalidValue;
    }
}

static inline unsigned kbit_grid(const int64_t work, const int64_t of_block) { return (unsigned) ((work + of_block - 1) / of_block); }

template <typename T, typename A>
static cudaError_t kbit_quantise_cuda(const T * x, const float * codebook, const int k, const int64_t n, uint32_t * planes, A * absmax,
                                      int * flags, cudaStream_t stream) {
    if (kbit_check(k, n) != cudaSuccess) {
        return cudaErrorInvalidValue;
    }
    if (!kbit_aligned(x, sizeof(T)) || !kbit_aligned(planes, 4) || !kbit_aligned(absmax, sizeof(A))) {
        return cudaErrorMisalignedAddress;
    }
    const int64_t blocks = n / KBIT_BLOCK;
    const int64_t most   = 1 << 16;  // then a warp has several
    const int64_t grid   = (blocks + 7) / 8 < most ? (blocks + 7) / 8 : most;
    return kbit_by_bits(k, [&](const auto bits) {
        constexpr int K = decltype(bits)::value;
        kbit_quantise<T, A, K><<<(unsigned) grid, KBIT_THREADS, 0, stream>>>(x, codebook, planes, absmax, flags, blocks);
        return cudaGetLastError();
    });
}

template <typename T, typename A>
static cudaError_t kbit_dequantise_cuda(const uint32_t * planes, const A * absmax, const float * codebook, const int k, const int64_t n,
                                        T * out, cudaStream_t stream) {
    if (kbit_check(k, n) != cudaSuccess) {
        return cudaErrorInvalidValue;
    }
    if (!kbit_aligned(out, 16) || !kbit_aligned(planes, k % 2 == 0 ? 4 * k : 4) || !kbit_aligned(absmax, sizeof(A))) {
        return cudaErrorMisalignedAddress;
    }
    return kbit_by_bits(k, [&](const auto bits) {
        constexpr int  K    = decltype(bits)::value;
        const unsigned grid = kbit_grid(n / KBIT_BLOCK, KBIT_THREADS);
        kbit_dequantise<T, A, K><<<grid, KBIT_THREADS, 0, stream>>>(planes, absmax, codebook, out, n / KBIT_BLOCK);
        return cudaGetLastError();
    });
}

static inline cudaError_t kbit_repack_cuda(const uint32_t * planes, const uint8_t * absmax, const int k, const int64_t n,
                                           const int64_t k_dim, uint32_t * tiles, uint8_t * scales, cudaStream_t stream) {
    if (kbit_check(k, n, k_dim) != cudaSuccess) {
        return cudaErrorInvalidValue;
    }
    if (!kbit_aligned(planes, k % 2 == 0 ? 4 * k : 4) || !kbit_aligned(tiles, 16) || !kbit_aligned(scales, 4)) {
        return cudaErrorMisalignedAddress;
    }
    return kbit_by_bits(k, [&](const auto bits) {
        constexpr int K     = decltype(bits)::value;
        const int64_t parts = kbit_tile_scales(n, k_dim) * 4;
        kbit_repack<K><<<kbit_grid(parts, KBIT_THREADS), KBIT_THREADS, 0, stream>>>(planes, absmax, tiles, scales, n,
                                                                                   k_dim / KBIT_BLOCK, parts);
        return cudaGetLastError();
    });
}

template <typename T>
static cudaError_t kbit_unpack_cuda(const uint32_t * tiles, const uint8_t * scales, const float * codebook, const int k, const int64_t n,
                                    const int64_t k_dim, T * out, cudaStream_t stream) {
    if (kbit_check(k, n, k_dim) != cudaSuccess) {
        return cudaErrorInvalidValue;
    }
    if (!kbit_aligned(tiles, 16) || !kbit_aligned(out, 16)) {
        return cudaErrorMisalignedAddress;
    }
    return kbit_by_bits(k, [&](const auto bits) {
        constexpr int  K    = decltype(bits)::value;
        const int64_t  all  = kbit_strips(n) * kbit_units(k_dim);
        const unsigned grid = kbit_grid(all, KBIT_THREADS / KBIT_WARP);
        kbit_unpack<T, K><<<grid, KBIT_THREADS, 0, stream>>>(tiles, scales, codebook, out, n, (int) k_dim, (unsigned) all);
        return cudaGetLastError();
    });
}
