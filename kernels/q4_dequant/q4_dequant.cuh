// Q4_0 and Q4_K in ggml's blocks to f16, at the speed of memory.
//
//   q4_0_dequant_f16_cuda(x, y, k, stream)
//   q4_K_dequant_f16_cuda(x, y, k, stream)
//
//   x       k/32 blocks of 18 bytes, 2-byte aligned, or k/256 blocks of 144 bytes, 4-byte aligned; contiguous (loads
//           are widest at 16-byte alignment)
//   y       k f16, contiguous, in the order of the weights; 16-byte aligned; does not overlap x
//   k       number of weights, a multiple of 32 or of 256, at most 2^31 tiles of 4096
//   stream  the launch is asynchronous and allocates nothing: it may be captured in a graph
//   returns cudaErrorInvalidValue for a k, cudaErrorMisalignedAddress for a pointer that is not as above, else what the
//           launch returned
//
// Limitations: sm_75 or newer. A weight beyond f16's range becomes infinite; scales are finite.
//
// Rounding, half to even:
//
//   Q4_0   w = d (q - 8)           q - 8 is exact, the product is rounded to f16 once: the nearest f16 of the exact
//                                  weight, the sign of a zero included.
//   Q4_K   w = d s q - dmin m      d s and dmin m are exact in f32 (11 + 6 bits), one fma is rounded to f32, that to
//                                  f16. The f32 is exact, and the result the nearest f16, where dmin's binade is from 3
//                                  below to 6 above d's, or either is 0. Otherwise the f32 may fall on the middle of
//                                  two f16 beside which the exact weight lies: the other neighbour, off by at most
//                                  1/2 + 2^-14 of their distance. It is the f16 of what ggml's CPU conversion has.
//
// Blocks, and which weights their bytes hold:
//
//   Q4_0, 32 weights      byte    0  1  | 2 ... 17 |
//                                   d   |    q     |      byte j of q: bits 0-3 weight j, bits 4-7 weight j + 16
//
//   Q4_K, 256 weights     byte    0  1  | 2  3 | 4 ... 15  | 16 ... 143 |
//                                   d   | dmin | s and m   | 4 x 32 q   |
//
//     byte j of a 32 q: bits 0-3 weight j of its 64 weights, bits 4-7 weight j + 32
//     s and m of 8 sub-blocks of 32 weights, 6 bits each: of 0-3 in bytes 0-3 and 4-7, bits 0-5; of 4-7 the low bits in
//     bytes 8-11, s in bits 0-3 and m in bits 4-7, the high bits in bits 6-7 of bytes 0-3 and 4-7
//
// The low nibbles of 8 bytes are 8 consecutive weights, and so are the high ones. A lane takes either: it reads 8 bytes
// and writes 16, a warp writes 512 bytes without a gap. Both types have 144 bytes for 256 weights, so that a tile of
// 4096 starts at 16 bytes if the first does: a thread block copies a tile to shared memory by 16-byte loads and picks
// it apart there.
//
// References: ggml's block_q4_0 and block_q4_K.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

static constexpr int Q4_DEQUANT_THREADS    = 128;
static constexpr int Q4_DEQUANT_PASSES     = 4;  // 8 weights a thread and pass
static constexpr int Q4_DEQUANT_PASS       = Q4_DEQUANT_THREADS * 8;
static constexpr int Q4_DEQUANT_TILE       = Q4_DEQUANT_PASS * Q4_DEQUANT_PASSES;
static constexpr int Q4_DEQUANT_TILE_BYTES = Q4_DEQUANT_TILE / 256 * 144;

static_assert(Q4_DEQUANT_TILE_BYTES % sizeof(uint4) == 0, "every tile must start at 16 bytes if the first does");
static_assert(Q4_DEQUANT_PASS % 256 == 0, "a pass must be whole blocks");

// -- dequantisation --

static __device__ __forceinline__ uint32_t q4_dequant_as_u32(const __half2 v) {
    return (uint32_t) __half_as_ushort(__low2half(v)) | (uint32_t) __half_as_ushort(__high2half(v)) << 16;
}

static __device__ __forceinline__ __half2 q4_dequant_as_half2(const uint32_t bits) {
    return __halves2half2(__ushort_as_half((unsigned short) bits), __ushort_as_half((unsigned short) (bits >> 16)));
}

struct q4_dequant_q4_0 {
    typedef uint16_t word_t;  // what a block is aligned to

    static constexpr int BLOCK       = 32;  // weights
    static constexpr int BLOCK_BYTES = 18;

    // Two weights from two bytes. A byte under 0x64 is the f16 1024 + code.
    static __device__ __forceinline__ uint32_t pair(const uint32_t codes, const __half2 d) {
        const __half2 code = q4_dequant_as_half2(__byte_perm(codes & 0x0F0F, 0x64, 0x4140));
        return q4_dequant_as_u32(__hmul2(__hsub2(code, q4_dequant_as_half2(0x64086408)), d));
    }

    // Weights 8 i to 8 i + 7 of a block.
    static __device__ __forceinline__ uint4 eight(const uint8_t * block, const int i) {
        const word_t * words = (const word_t *) block;
        const word_t * q     = words + 1 + i % 2 * 4;
        const int      shift = i / 2 * 4;
        const __half2  d     = __half2half2(__ushort_as_half(words[0]));
        return make_uint4(pair(q[0] >> shift, d), pair(q[1] >> shift, d), pair(q[2] >> shift, d),
                          pair(q[3] >> shift, d));
    }
};

struct q4_dequant_q4_K {
    typedef uint32_t word_t;

    static constexpr int BLOCK       = 256;
    static constexpr int BLOCK_BYTES = 144;

    // The code in a byte of `codes`: under 0x4B0000 it is the float 2^23 + code.
    static __device__ __forceinline__ float code(const uint32_t codes, const int byte) {
        return __uint_as_float(__byte_perm(codes, 0x4B000000, 0x7650 + byte)) - 8388608.0f;
    }

    // Two weights from bytes `byte` and `byte` + 1.
    static __device__ __forceinline__ uint32_t pair(
            const uint32_t codes, const int byte, const float step, const float least) {
        return q4_dequant_as_u32(__floats2half2_rn(fmaf(code(codes, byte), step, -least),
                                                   fmaf(code(codes, byte + 1), step, -least)));
    }

    // d s of a sub-block in x, dmin m in y.
    static __device__ __forceinline__ float2 scales(const uint4 head, const int sub) {
        const int      at    = sub % 4 * 8;
        const uint32_t first = head.y >> at;
        const uint32_t other = head.z >> at;
        const uint32_t low   = head.w >> at;
        const uint32_t s     = sub < 4 ? first & 63 : (low & 15) | (first >> 2 & 48);
        const uint32_t m     = sub < 4 ? other & 63 : (low >> 4 & 15) | (other >> 2 & 48);
        const float2   d     = __half22float2(q4_dequant_as_half2(head.x));
        return make_float2(d.x * s, d.y * m);
    }

    static __device__ __forceinline__ uint4 eight(const uint8_t * block, const int i) {
        const float2 scale = scales(*(const uint4 *) block, i / 4);
        const uint2  q     = *(const uint2 *) (block + 16 + i / 8 * 32 + i % 4 * 8);
        const int    shift = i % 8 / 4 * 4;
        const uint32_t q0  = q.x >> shift & 0x0F0F0F0F;
        const uint32_t q1  = q.y >> shift & 0x0F0F0F0F;
        return make_uint4(pair(q0, 0, scale.x, scale.y), pair(q0, 2, scale.x, scale.y), pair(q1, 0, scale.x, scale.y),
                          pair(q1, 2, scale.x, scale.y));
    }
};

// -- copy --

// Each byte is read once: L1 need not keep it.
static __device__ __forceinline__ uint4 q4_dequant_load(const uint4 * x) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x));
    return v;
}

template <typename word_t> static __device__ __forceinline__ word_t q4_dequant_load(const word_t * x) {
    return __ldg(x);
}

// n_bytes, at most a tile, to shared memory: all loads first, then all stores.
template <typename word_t>
static __device__ __forceinline__ void q4_dequant_stage(
        const uint8_t * __restrict__ x, uint8_t * tile, const int n_bytes) {
    constexpr int N_WORDS = Q4_DEQUANT_TILE_BYTES / sizeof(word_t);
    constexpr int N_LOADS = (N_WORDS + Q4_DEQUANT_THREADS - 1) / Q4_DEQUANT_THREADS;

    const int n_words = n_bytes / sizeof(word_t);
    word_t    words[N_LOADS];
#pragma unroll
    for (int l = 0; l < N_LOADS; ++l) {
        const int i = l * Q4_DEQUANT_THREADS + threadIdx.x;
        if (i < n_words) {
            words[l] = q4_dequant_load((const word_t *) x + i);
        }
    }
#pragma unroll
    for (int l = 0; l < N_LOADS; ++l) {
        const int i = l * Q4_DEQUANT_THREADS + threadIdx.x;
        if (i < n_words) {
            ((word_t *) tile)[i] = words[l];
        }
    }
}

template <bool stream_out>
static __device__ __forceinline__ void q4_dequant_store(uint4 * y, const uint4 eight) {
    if (stream_out) {
        __stcs(y, eight);
    } else {
        *y = eight;
    }
}

// -- kernel --

// One thread block a tile. stream_out: the output leaves L2 first.
template <typename format, bool stream_out>
static __global__ void __launch_bounds__(Q4_DEQUANT_THREADS)
q4_dequant_f16(const uint8_t * __restrict__ x, uint4 * __restrict__ y, const int64_t k) {
    __shared__ __align__(16) uint8_t tile[Q4_DEQUANT_TILE_BYTES];

    const int64_t first = (int64_t) blockIdx.x * Q4_DEQUANT_TILE;
    const int     n     = k - first < Q4_DEQUANT_TILE ? (int) (k - first) : Q4_DEQUANT_TILE;
    x += (int64_t) blockIdx.x * Q4_DEQUANT_TILE_BYTES;
    y += first / 8;

    // a tile that is cut off may end in the middle of 16 bytes
    if (n == Q4_DEQUANT_TILE && (uintptr_t) x % sizeof(uint4) == 0) {
        q4_dequant_stage<uint4>(x, tile, Q4_DEQUANT_TILE_BYTES);
    } else {
        q4_dequant_stage<typename format::word_t>(x, tile, n / format::BLOCK * format::BLOCK_BYTES);
    }
    __syncthreads();

    // a lane has the same place within its block in every pass
    const int       lane  = threadIdx.x % (format::BLOCK / 8);
    const uint8_t * block = tile + threadIdx.x / (format::BLOCK / 8) * format::BLOCK_BYTES;
#pragma unroll
    for (int p = 0; p < Q4_DEQUANT_PASSES; ++p) {
        const int i = p * Q4_DEQUANT_THREADS + threadIdx.x;
        if (i * 8 < n) {
            const uint8_t * from = block + p * (Q4_DEQUANT_TILE_BYTES / Q4_DEQUANT_PASSES);
            q4_dequant_store<stream_out>(y + i, format::eight(from, lane));
        }
    }
}

// -- launch --

// An output that fits into three quarters of L2 is left there for whoever reads it next; a larger one would only push
// its own beginning out, so it is streamed.
template <typename format>
static cudaError_t q4_dequant_f16_cuda(const void * x, __half * y, const int64_t k, cudaStream_t stream) {
    const int64_t n_tiles = k / Q4_DEQUANT_TILE + (k % Q4_DEQUANT_TILE != 0);
    if (k < 0 || k % format::BLOCK != 0 || n_tiles > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) x % sizeof(typename format::word_t) != 0 || (uintptr_t) y % sizeof(uint4) != 0) {
        return cudaErrorMisalignedAddress;
    }
    if (k == 0) {
        return cudaSuccess;
    }
    int         device = 0;
    int         l2     = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device);
    }
    if (status != cudaSuccess) {
        return status;
    }
    const bool stream_out = k > l2 / 4 * 3 / (int64_t) sizeof(__half);
    const auto kernel     = stream_out ? q4_dequant_f16<format, true> : q4_dequant_f16<format, false>;
    kernel<<<(unsigned) n_tiles, Q4_DEQUANT_THREADS, 0, stream>>>((const uint8_t *) x, (uint4 *) y, k);
    return cudaGetLastError();
}

static cudaError_t q4_0_dequant_f16_cuda(const void * x, __half * y, const int64_t k, cudaStream_t stream) {
    return q4_dequant_f16_cuda<q4_dequant_q4_0>(x, y, k, stream);
}

static cudaError_t q4_K_dequant_f16_cuda(const void * x, __half * y, const int64_t k, cudaStream_t stream) {
    return q4_dequant_f16_cuda<q4_dequant_q4_K>(x, y, k, stream);
}
