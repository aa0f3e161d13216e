// NVFP4 in ggml's blocks to bf16, every weight exact, at the speed of memory.
//
//   nvfp4_dequant_bf16_cuda(x, y, k, stream)
//
//   x       k/64 blocks of 36 bytes, contiguous; 4-byte aligned (loads are widest at 16-byte alignment)
//   y       k bf16, contiguous, in the order of the weights; 16-byte aligned; does not overlap x
//   k       number of weights, a multiple of 64, at most 2^31 tiles of 4096
//   stream  the launch is asynchronous and allocates nothing: it may be captured in a graph
//   returns cudaErrorInvalidValue for a k, cudaErrorMisalignedAddress for a pointer that is not as above, else what the
//           launch returned
//
// Limitations: sm_80 or newer (bf16 arithmetic). One tensor a call; a tensor-wide scale is the caller's business.
//
// Each weight is bit-equal to ggml's CPU conversion for all 256 scale bytes and 16 codes: scale byte 0x7F, NaN by its
// format, counts as 0, bit 7 of a scale is ignored, code 8 is +0, and a negative code under a zero scale is -0. (ggml's
// own CUDA conversion takes bit 7 for a sign. No quantiser sets it.)
//
// A block, and which weights its bytes hold:
//
//   byte    0    1    2    3   | 4 ... 11  | 12 ... 19 | 20 ... 27 | 28 ... 35 |
//           d0   d1   d2   d3  |   q of 0  |   q of 1  |   q of 2  |   q of 3  |    4 sub-blocks of 16 weights
//
//   byte j of a sub-block's q, j = 0 ... 7:   bits 0-3 are weight j, bits 4-7 are weight j + 8
//
// So the low nibbles of 8 bytes are 8 consecutive weights, and so are the high ones. A lane takes either: it reads 8
// bytes and a scale, and writes 16 bytes, a warp writes 512 bytes without a gap.
//
// 36 bytes is no multiple of 16, but a tile of 128 blocks is: a thread block copies a tile to shared memory by 16-byte
// loads and picks it apart there.
//
// References: OCP Microscaling Formats (E2M1), OCP 8-bit Floating Point (E4M3).

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

static constexpr int NVFP4_DEQUANT_THREADS      = 128;
static constexpr int NVFP4_DEQUANT_PASSES       = 4;  // 8 weights a thread and pass
static constexpr int NVFP4_DEQUANT_TILE         = NVFP4_DEQUANT_THREADS * NVFP4_DEQUANT_PASSES * 8;
static constexpr int NVFP4_DEQUANT_BLOCK        = 64;  // weights
static constexpr int NVFP4_DEQUANT_BLOCK_BYTES  = 36;
static constexpr int NVFP4_DEQUANT_TILE_BYTES   = NVFP4_DEQUANT_TILE / NVFP4_DEQUANT_BLOCK * NVFP4_DEQUANT_BLOCK_BYTES;
static constexpr int NVFP4_DEQUANT_PASS_BYTES   = NVFP4_DEQUANT_TILE_BYTES / NVFP4_DEQUANT_PASSES;

static_assert(NVFP4_DEQUANT_TILE_BYTES % sizeof(uint4) == 0, "every tile must start at 16 bytes if the first does");
static_assert(NVFP4_DEQUANT_THREADS % 8 == 0, "a pass must be whole blocks");

// -- dequantisation --

static __device__ __forceinline__ __nv_bfloat162 nvfp4_dequant_as_bf162(const uint32_t bits) {
    return __halves2bfloat162(__ushort_as_bfloat16((unsigned short) bits),
                              __ushort_as_bfloat16((unsigned short) (bits >> 16)));
}

static __device__ __forceinline__ uint32_t nvfp4_dequant_as_u32(const __nv_bfloat162 v) {
    return (uint32_t) __bfloat16_as_ushort(v.x) | (uint32_t) __bfloat16_as_ushort(v.y) << 16;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// A UE4M3 scale in both halves. Its 7 bits, put at the foot of the exponent, are a bf16 that is 2^120 too small, and a
// denormal exactly where the scale is one: the product is exact.
static __device__ __forceinline__ __nv_bfloat162 nvfp4_dequant_scale(const uint32_t d) {
    const __nv_bfloat162 two_120 = nvfp4_dequant_as_bf162(0x7B807B80);
    const uint32_t       bits    = d == 0x7F ? 0 : (d & 0x7F) * 0x00100010;
    return __hmul2(nvfp4_dequant_as_bf162(bits), two_120);
}

// Two weights from bytes that stand twice in their halves of q: once where `up` lifts the code's sign to bit 15, once
// where `down` lowers its other three bits to the foot of the exponent, which makes a bf16 that is 2^126 too small.
// Adding +0 turns the -0 of code 8 into +0, as ggml has it. A weight has at most 6 significant bits, bf16 keeps 8.
static __device__ __forceinline__ uint32_t nvfp4_dequant_pair(
        const uint32_t q, const int up, const int down, const __nv_bfloat162 d) {
    const __nv_bfloat162 two_126 = nvfp4_dequant_as_bf162(0x7E807E80);
    const uint32_t       bits    = ((q << up) & 0x80008000) | ((q >> down) & 0x01C001C0);
    const __nv_bfloat162 e2m1    = __hfma2(nvfp4_dequant_as_bf162(bits), two_126, nvfp4_dequant_as_bf162(0));
    return nvfp4_dequant_as_u32(__hmul2(e2m1, d));
}

// The 8 weights of the low or of the high nibbles.
static __device__ __forceinline__ uint4 nvfp4_dequant_eight(
        const uint32_t q0, const uint32_t q1, const uint32_t d, const bool high) {
    const int            up    = high ? 0 : 4;
    const int            down  = high ? 6 : 2;
    const __nv_bfloat162 scale = nvfp4_dequant_scale(d);
    return make_uint4(nvfp4_dequant_pair(__byte_perm(q0, 0, 0x1100), up, down, scale),
                      nvfp4_dequant_pair(__byte_perm(q0, 0, 0x3322), up, down, scale),
                      nvfp4_dequant_pair(__byte_perm(q1, 0, 0x1100), up, down, scale),
                      nvfp4_dequant_pair(__byte_perm(q1, 0, 0x3322), up, down, scale));
}

#else

static __device__ __forceinline__ uint4 nvfp4_dequant_eight(uint32_t, uint32_t, uint32_t, bool) {
    __trap();
    return make_uint4(0, 0, 0, 0);
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// -- copy --

// Each byte is read once: L1 need not keep it (H200, 4096x14336: 39.4 us, 40.0 through L1).
static __device__ __forceinline__ uint4 nvfp4_dequant_load(const uint4 * x) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(x));
    return v;
}

static __device__ __forceinline__ uint32_t nvfp4_dequant_load(const uint32_t * x) {
    return __ldg(x);
}

// n_bytes, at most a tile, to shared memory: all loads first, then all stores.
template <typename word_t>
static __device__ __forceinline__ void nvfp4_dequant_stage(
        const uint8_t * __restrict__ x, uint8_t * tile, const int n_bytes) {
    constexpr int N_WORDS = NVFP4_DEQUANT_TILE_BYTES / sizeof(word_t);
    constexpr int N_LOADS = (N_WORDS + NVFP4_DEQUANT_THREADS - 1) / NVFP4_DEQUANT_THREADS;

    const int n_words = n_bytes / sizeof(word_t);
    word_t    words[N_LOADS];
#pragma unroll
    for (int l = 0; l < N_LOADS; ++l) {
        const int i = l * NVFP4_DEQUANT_THREADS + threadIdx.x;
        if (i < n_words) {
            words[l] = nvfp4_dequant_load((const word_t *) x + i);
        }
    }
#pragma unroll
    for (int l = 0; l < N_LOADS; ++l) {
        const int i = l * NVFP4_DEQUANT_THREADS + threadIdx.x;
        if (i < n_words) {
            ((word_t *) tile)[i] = words[l];
        }
    }
}

template <bool stream_out>
static __device__ __forceinline__ void nvfp4_dequant_store(uint4 * y, const uint4 eight) {
    if (stream_out) {
        __stcs(y, eight);
    } else {
        *y = eight;
    }
}

// -- kernel --

// One thread block a tile. stream_out: the output leaves L2 first.
template <bool stream_out>
static __global__ void __launch_bounds__(NVFP4_DEQUANT_THREADS)
nvfp4_dequant_bf16(const uint8_t * __restrict__ x, uint4 * __restrict__ y, const int64_t k) {
    __shared__ __align__(16) uint8_t tile[NVFP4_DEQUANT_TILE_BYTES];

    const int64_t first = (int64_t) blockIdx.x * NVFP4_DEQUANT_TILE;
    const int     n     = k - first < NVFP4_DEQUANT_TILE ? (int) (k - first) : NVFP4_DEQUANT_TILE;
    x += (int64_t) blockIdx.x * NVFP4_DEQUANT_TILE_BYTES;
    y += first / 8;

    // a tile that is cut off may end in the middle of 16 bytes
    if (n == NVFP4_DEQUANT_TILE && (uintptr_t) x % sizeof(uint4) == 0) {
        nvfp4_dequant_stage<uint4>(x, tile, NVFP4_DEQUANT_TILE_BYTES);
    } else {
        nvfp4_dequant_stage<uint32_t>(x, tile, n / NVFP4_DEQUANT_BLOCK * NVFP4_DEQUANT_BLOCK_BYTES);
    }
    __syncthreads();

    // a lane has the same place within its block in every pass
    const int       sub   = threadIdx.x % 8 / 2;
    const bool      high  = threadIdx.x % 2;
    const uint8_t * block = tile + threadIdx.x / 8 * NVFP4_DEQUANT_BLOCK_BYTES;
#pragma unroll
    for (int p = 0; p < NVFP4_DEQUANT_PASSES; ++p) {
        const int i = p * NVFP4_DEQUANT_THREADS + threadIdx.x;
        if (i * 8 < n) {
            const uint8_t *  d = block + p * NVFP4_DEQUANT_PASS_BYTES;
            const uint32_t * q = (const uint32_t *) (d + 4 + sub * 8);
            nvfp4_dequant_store<stream_out>(y + i, nvfp4_dequant_eight(q[0], q[1], d[sub], high));
        }
    }
}

// -- launch --

// An output that fits into three quarters of L2 is left there for whoever reads it next; a larger one would only push
// its own beginning out, so it is streamed. (H200, dequantise and read: 33 MB 19.5 us, streamed 23.4; 117 MB 75.4 us,
// streamed 75.0.)
static cudaError_t nvfp4_dequant_bf16_cuda(const void * x, nv_bfloat16 * y, const int64_t k, cudaStream_t stream) {
    const int64_t n_tiles = (k + NVFP4_DEQUANT_TILE - 1) / NVFP4_DEQUANT_TILE;
    if (k < 0 || k % NVFP4_DEQUANT_BLOCK != 0 || n_tiles > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) x % sizeof(uint32_t) != 0 || (uintptr_t) y % sizeof(uint4) != 0) {
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
    const bool stream_out = k * (int64_t) sizeof(__nv_bfloat16) > l2 / 4 * 3;
    const auto kernel     = stream_out ? nvfp4_dequant_bf16<true> : nvfp4_dequant_bf16<false>;
    kernel<<<(unsigned) n_tiles, NVFP4_DEQUANT_THREADS, 0, stream>>>((const uint8_t *) x, (uint4 *) y, k);
    return cudaGetLastError();
}
