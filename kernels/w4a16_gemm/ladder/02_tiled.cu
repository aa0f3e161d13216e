// Products of 4-bit weights in ggml's blocks with f32 activations on bf16 tensor cores: y = w x.
//
//   tiled_gemm_cuda<type>(w, x, y, scratch, m, n, k, stream)
//
//   type     w4a16_type::Q4_0 or w4a16_type::Q4_K
//   w        m rows of k weights in ggml's blocks, contiguous; Q4_0 2-byte aligned, Q4_K 16-byte aligned
//   x        n rows (tokens) of k f32, contiguous; 16-byte aligned
//   y        n rows of m f32, contiguous: y[j*m + i] is row i of w by row j of x; 4-byte aligned; overlaps none of the
//            others
//   scratch  tiled_gemm_scratch_bytes(n, k) bytes that are written and read; 16-byte aligned
//   m, n, k  as test-backend-ops counts them: ne01, ne11, ne00; k a multiple of the block (32 or 256), n at most
//            65535 x 128
//   stream   two launches, asynchronous, that allocate nothing: they may be captured in a graph
//   returns  cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer that is not as above, else what
//            the launches returned
//
// Limitations: sm_80 or newer. One matrix a call: no batch, no experts, no strides. Rung 2 of the ladder: block-tiled,
// weights dequantised into shared memory by every column of tiles; no prepack, no asynchronous copy, no split of k.
//
// Deterministic: each output is one sum in an order that depends on k alone.
//
// Accuracy. Activations are rounded to bf16, all sums are in f32. Q4_0: the tensor cores get q-8, which is exact, and
// the block's d scales the block's sum in f32, so that nothing else is rounded; (q-8)*d as a bf16 would double the
// error. Q4_K: fma(q-8, d, 8d-m) in bf16. With q*d-m the rounding of d is multiplied by up to 15 and not by up to 8,
// and the rounding of m comes on top.
//
// A tile of 128 x 128 outputs, 8 warps of 64 x 32 each, k in steps of 32 through two stages of shared memory:
//
//             n                          one step of one stage, 20 words of 4 bytes a row:
//         w0 w2 w4 w6
//      m  w0 w2 w4 w6                      | 16 words: 32 bf16 of k | 4 words unused |
//         w1 w3 w5 w7
//         w1 w3 w5 w7                    20 g + t takes each value modulo 32 once for g < 8, t < 4: a fragment's
//                                        loads meet no bank twice
//
// A fragment of mma.m16n8k16, lane = 4 g + t:
//
//   a0 row g, k 2t 2t+1     a1 row g+8, k 2t 2t+1     a2 row g, k 2t+8 2t+9     a3 row g+8, k 2t+8 2t+9
//   b0 column g, k 2t 2t+1  b1 column g, k 2t+8 2t+9
//   c0 row g, column 2t     c1 row g, column 2t+1     c2 row g+8, column 2t     c3 row g+8, column 2t+1
//
// References: PTX ISA, warp-level matrix fragments for m16n8k16; ggml's block_q4_0 and block_q4_K.

#include "../w4a16_gemm.cuh"

#include <cuda_bf16.h>

static constexpr int TILED_WARP   = 32;
static constexpr int TILED_WARPS  = 8;
static constexpr int TILED_BM     = 128;
static constexpr int TILED_BN     = 128;
static constexpr int TILED_BK     = 32;  // a block of Q4_0, a sub-block of Q4_K: one scale a row
static constexpr int TILED_WM     = 64;  // of a warp
static constexpr int TILED_WN     = 32;
static constexpr int TILED_STRIDE = TILED_BK / 2 + 4;  // words of a row in shared memory

static constexpr int TILED_THREADS  = TILED_WARP * TILED_WARPS;
static constexpr int TILED_WARPS_M  = TILED_BM / TILED_WM;
static constexpr int TILED_TILES_M  = TILED_WM / 16;  // fragments of a warp
static constexpr int TILED_TILES_N  = TILED_WN / 8;
static constexpr int TILED_X_ROWS   = TILED_THREADS / (TILED_BK / 8);  // of activations, 8 a thread
static constexpr int TILED_X_CHUNKS = TILED_BN / TILED_X_ROWS;

static_assert(TILED_WARPS_M * (TILED_BN / TILED_WN) == TILED_WARPS, "the warps must cover the tile");
static_assert(TILED_X_CHUNKS * TILED_X_ROWS == TILED_BN, "the threads must cover the activations");
static_assert(TILED_BM * 2 == TILED_THREADS, "two threads must dequantise a row");

template <w4a16_type type> static constexpr int tiled_block_align = type == w4a16_type::Q4_0 ? 2 : 16;

// One step of k. Pairs of bf16 in words.
struct tiled_stage {
    uint32_t w[TILED_BM][TILED_STRIDE];
    uint32_t x[TILED_BN][TILED_STRIDE];
    float    d[TILED_BM];  // Q4_0: what scales the step's sums
};

// -- one instruction --

static __device__ __forceinline__ __nv_bfloat162 tiled_as_bf162(const uint32_t bits) {
    return __halves2bfloat162(__ushort_as_bfloat16((unsigned short) bits),
                              __ushort_as_bfloat16((unsigned short) (bits >> 16)));
}

static __device__ __forceinline__ uint32_t tiled_as_u32(const __nv_bfloat162 v) {
    return (uint32_t) __bfloat16_as_ushort(v.x) | (uint32_t) __bfloat16_as_ushort(v.y) << 16;
}

static __device__ __forceinline__ float tiled_half(const uint32_t bits) {
    return __half2float(__ushort_as_half((unsigned short) bits));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// c += a b
static __device__ __forceinline__ void tiled_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// -- dequantisation --

// Two codes, bytes 0 and 1 or 2 and 3 of q, less 8. 0x4300 is 128 as a bf16, whose last bit then counts 1.
static __device__ __forceinline__ __nv_bfloat162 tiled_less_8(const uint32_t q, const bool high) {
    const uint32_t bits = __byte_perm(q, 0x43434343, high ? 0x4342 : 0x4140);
    return __hsub2(tiled_as_bf162(bits), tiled_as_bf162(0x43084308));
}

// Eight weights of consecutive k from eight codes, one a byte.
struct tiled_as_is {
    __device__ __forceinline__ uint4 operator()(const uint32_t q0, const uint32_t q1) const {
        return make_uint4(tiled_as_u32(tiled_less_8(q0, false)), tiled_as_u32(tiled_less_8(q0, true)),
                          tiled_as_u32(tiled_less_8(q1, false)), tiled_as_u32(tiled_less_8(q1, true)));
    }
};

struct tiled_scaled {
    __nv_bfloat162 d, c;  // c is 8d-m

    __device__ __forceinline__ uint32_t pair(const uint32_t q, const bool high) const {
        return tiled_as_u32(__hfma2(tiled_less_8(q, high), d, c));
    }

    __device__ __forceinline__ uint4 operator()(const uint32_t q0, const uint32_t q1) const {
        return make_uint4(pair(q0, false), pair(q0, true), pair(q1, false), pair(q1, true));
    }
};

// The scale and the minimum of sub-block j from a block's first 16 bytes: d, dmin, then 8 x 2 numbers of 6 bits.
static __device__ __forceinline__ tiled_scaled tiled_q4_K_scale(const uint4 head, const int j) {
    const uint32_t s0 = head.y >> 8 * (j % 4) & 0xFF;
    const uint32_t s4 = head.z >> 8 * (j % 4) & 0xFF;
    const uint32_t s8 = head.w >> 8 * (j % 4) & 0xFF;
    const uint32_t sc = j < 4 ? s0 & 63 : (s8 & 15) | (s0 >> 6) << 4;
    const uint32_t mn = j < 4 ? s4 & 63 : (s8 >> 4) | (s4 >> 6) << 4;
    const float    d  = tiled_half(head.x) * (float) sc;
    const float    m  = tiled_half(head.x >> 16) * (float) mn;
    const float    c  = fmaf(8.0f, d, -m);
    return {__floats2bfloat162_rn(d, d), __floats2bfloat162_rn(c, c)};
}

// What a thread holds of the next step, between its loads and its stores: 16 weights of one row. The two threads of a
// row are half 0 and half 1.
template <w4a16_type type> struct tiled_weights;

// 2 bytes d, then 16 bytes: byte i holds weight i in its low nibble, weight i + 16 in its high one. Rows begin at even
// addresses.
template <> struct tiled_weights<w4a16_type::Q4_0> {
    uint32_t d, q0, q1;

    __device__ __forceinline__ void load(const uint8_t * row, const int step, const int half) {
        const uint16_t * block = (const uint16_t *) (row + (int64_t) step * w4a16_block_bytes<w4a16_type::Q4_0>);
        const uint16_t * q     = block + 1 + 4 * half;
        d  = block[0];
        q0 = q[0] | (uint32_t) q[1] << 16;
        q1 = q[2] | (uint32_t) q[3] << 16;
    }

    __device__ __forceinline__ void clear() { d = q0 = q1 = 0; }

    __device__ __forceinline__ void store(
            tiled_stage & stage, const int row, const int /*step*/, const int half) const {
        const tiled_as_is dequantise;
        uint4 *           w = (uint4 *) stage.w[row];
        w[0 + half] = dequantise(q0 & 0x0F0F0F0F, q1 & 0x0F0F0F0F);
        w[2 + half] = dequantise(q0 >> 4 & 0x0F0F0F0F, q1 >> 4 & 0x0F0F0F0F);
        if (half == 0) {
            stage.d[row] = tiled_half(d);
        }
    }
};

// 16 bytes of scales, then 4 x 32 bytes: byte i of the j-th 32 holds weight 64 j + i and weight 64 j + 32 + i.
template <> struct tiled_weights<w4a16_type::Q4_K> {
    uint4 head, q;

    __device__ __forceinline__ void load(const uint8_t * row, const int step, const int half) {
        const uint4 * block = (const uint4 *) (row + (int64_t) (step / 8) * w4a16_block_bytes<w4a16_type::Q4_K>);
        head = block[0];
        q    = block[1 + step % 8 / 2 * 2 + half];
    }

    __device__ __forceinline__ void clear() { head = q = make_uint4(0, 0, 0, 0); }

    __device__ __forceinline__ void store(tiled_stage & stage, const int row, const int step, const int half) const {
        const tiled_scaled dequantise = tiled_q4_K_scale(head, step % 8);
        const int          shift      = step % 2 * 4;
        uint4 *            w          = (uint4 *) stage.w[row] + 2 * half;
        w[0] = dequantise(q.x >> shift & 0x0F0F0F0F, q.y >> shift & 0x0F0F0F0F);
        w[1] = dequantise(q.z >> shift & 0x0F0F0F0F, q.w >> shift & 0x0F0F0F0F);
    }
};

// -- copy --

// Eight f32 a thread to bf16.
static __global__ void tiled_to_bf16(const float4 * __restrict__ x, uint4 * __restrict__ y, const int64_t n8) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n8) {
        return;
    }
    const float4 a = x[2 * i];
    const float4 b = x[2 * i + 1];
    y[i] = make_uint4(tiled_as_u32(__floats2bfloat162_rn(a.x, a.y)), tiled_as_u32(__floats2bfloat162_rn(a.z, a.w)),
                      tiled_as_u32(__floats2bfloat162_rn(b.x, b.y)), tiled_as_u32(__floats2bfloat162_rn(b.z, b.w)));
}

// A thread's activations of the next step: 8 of one row, and 8 at the same k in every 64th row after it.
// Rows beyond n count as 0.
struct tiled_activations {
    uint4 chunks[TILED_X_CHUNKS];

    __device__ __forceinline__ void load(const uint4 * x, const int64_t k8, const int row, const int n) {
#pragma unroll
        for (int l = 0; l < TILED_X_CHUNKS; ++l) {
            const bool there = row + l * TILED_X_ROWS < n;
            chunks[l]        = there ? x[l * TILED_X_ROWS * k8] : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void store(tiled_stage & stage, const int row, const int chunk) const {
#pragma unroll
        for (int l = 0; l < TILED_X_CHUNKS; ++l) {
            ((uint4 *) stage.x[row + l * TILED_X_ROWS])[chunk] = chunks[l];
        }
    }
};

// -- multiplication --

// K16 pieces of 16 of k from the first on, of a warp's tile whose first row and column are row and col. With scale, the
// piece's sums are scaled by the rows' d before they are added.
template <int K16, bool scale>
static __device__ __forceinline__ void tiled_multiply(
        const tiled_stage & stage, float (&acc)[TILED_TILES_M][TILED_TILES_N][4],
        const int row, const int col, const int first) {
    const int g = threadIdx.x / 4;
    const int t = threadIdx.x % 4;

    uint32_t b[TILED_TILES_N][K16][2];
#pragma unroll
    for (int j = 0; j < TILED_TILES_N; ++j) {
#pragma unroll
        for (int p = 0; p < K16; ++p) {
            const uint32_t * x = stage.x[col + 8 * j + g] + 8 * (first + p) + t;
            b[j][p][0] = x[0];
            b[j][p][1] = x[4];
        }
    }
#pragma unroll
    for (int i = 0; i < TILED_TILES_M; ++i) {
        const int top = row + 16 * i + g;
        uint32_t  a[K16][4];
#pragma unroll
        for (int p = 0; p < K16; ++p) {
            const uint32_t * w = stage.w[top] + 8 * (first + p) + t;
            a[p][0] = w[0];
            a[p][1] = w[8 * TILED_STRIDE];
            a[p][2] = w[4];
            a[p][3] = w[8 * TILED_STRIDE + 4];
        }
#pragma unroll
        for (int j = 0; j < TILED_TILES_N; ++j) {
            float   sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            float (&c)[4]   = scale ? sums : acc[i][j];
#pragma unroll
            for (int p = 0; p < K16; ++p) {
                tiled_mma(c, a[p], b[j][p]);
            }
            if (scale) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    acc[i][j][e] = fmaf(stage.d[top + e / 2 * 8], sums[e], acc[i][j][e]);
                }
            }
        }
    }
}

template <w4a16_type type>
static __device__ __forceinline__ void tiled_multiply_step(
        const tiled_stage & stage, float (&acc)[TILED_TILES_M][TILED_TILES_N][4], const int row, const int col) {
    if constexpr (type == w4a16_type::Q4_0) {
        tiled_multiply<2, true>(stage, acc, row, col, 0);
    } else {
        // half the fragments at a time: fewer registers
        tiled_multiply<1, false>(stage, acc, row, col, 0);
        tiled_multiply<1, false>(stage, acc, row, col, 1);
    }
}

// Writes a warp's tile to y; only its first m x n outputs exist.
static __device__ __forceinline__ void tiled_write(
        const float (&acc)[TILED_TILES_M][TILED_TILES_N][4], float * __restrict__ y,
        const int64_t stride, const int m, const int n) {
#pragma unroll
    for (int i = 0; i < TILED_TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < TILED_TILES_N; ++j) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int row = 16 * i + threadIdx.x / 4 + c / 2 * 8;
                const int col = 8 * j + threadIdx.x % 4 * 2 + c % 2;
                if (row < m && col < n) {
                    y[col * stride + row] = acc[i][j][c];
                }
            }
        }
    }
}

// -- kernel --

// One block a tile, threads (32, 8): threadIdx.x is the lane, threadIdx.y the warp. The loads of a step are under way
// while the one before it is multiplied.
template <w4a16_type type>
static __global__ void __launch_bounds__(TILED_THREADS)
tiled_gemm(const uint8_t * __restrict__ w, const uint4 * __restrict__ x, float * __restrict__ y,
           const int64_t m, const int64_t n, const int64_t k) {
    __shared__ __align__(16) tiled_stage stages[2];

    const int64_t row0  = (int64_t) blockIdx.x * TILED_BM;
    const int64_t col0  = (int64_t) blockIdx.y * TILED_BN;
    const int     rows  = m - row0 < TILED_BM ? (int) (m - row0) : TILED_BM;
    const int     cols  = n - col0 < TILED_BN ? (int) (n - col0) : TILED_BN;
    const int     steps = (int) (k / TILED_BK);

    const int tid      = threadIdx.y * TILED_WARP + threadIdx.x;
    const int w_row    = tid / 2;
    const int w_half   = tid % 2;
    const int x_row    = tid / (TILED_BK / 8);
    const int x_chunk  = tid % (TILED_BK / 8);
    const int warp_row = threadIdx.y % TILED_WARPS_M * TILED_WM;
    const int warp_col = threadIdx.y / TILED_WARPS_M * TILED_WN;

    w += (row0 + w_row) * (k / w4a16_block_size<type> * w4a16_block_bytes<type>);
    x += (col0 + x_row) * (k / 8) + x_chunk;

    tiled_weights<type> next_w;
    tiled_activations   next_x;
    float               acc[TILED_TILES_M][TILED_TILES_N][4] = {};

    // prologue: step 0 into stage 0
    next_w.clear();
    if (w_row < rows) {
        next_w.load(w, 0, w_half);
    }
    next_x.load(x, k / 8, x_row, cols);
    next_w.store(stages[0], w_row, 0, w_half);
    next_x.store(stages[0], x_row, x_chunk);
    __syncthreads();

    for (int step = 0; step < steps; ++step) {
        const bool more = step + 1 < steps;
        if (more) {
            if (w_row < rows) {
                next_w.load(w, step + 1, w_half);
            }
            x += TILED_BK / 8;
            next_x.load(x, k / 8, x_row, cols);
        }
        tiled_multiply_step<type>(stages[step % 2], acc, warp_row, warp_col);
        // no warp reads that stage: all have passed the barrier after the step that read it
        if (more) {
            next_w.store(stages[(step + 1) % 2], w_row, step + 1, w_half);
            next_x.store(stages[(step + 1) % 2], x_row, x_chunk);
        }
        __syncthreads();
    }

    tiled_write(acc, y + (col0 + warp_col) * m + row0 + warp_row, m, rows - warp_row, cols - warp_col);
}

#else

static __global__ void tiled_to_bf16(const float4 *, uint4 *, int64_t) {
    __trap();
}

template <w4a16_type type>
static __global__ void tiled_gemm(const uint8_t *, const uint4 *, float *, int64_t, int64_t, int64_t) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// -- launch --

static inline size_t tiled_gemm_scratch_bytes(const int64_t n, const int64_t k) {
    return (size_t) n * k * sizeof(__nv_bfloat16);
}

template <w4a16_type type>
static cudaError_t tiled_gemm_cuda(const void * w, const float * x, float * y, void * scratch,
                                   const int64_t m, const int64_t n, const int64_t k, cudaStream_t stream) {
    constexpr int TO_BF16_THREADS = 256;

    const int64_t tiles_m = (m + TILED_BM - 1) / TILED_BM;
    const int64_t tiles_n = (n + TILED_BN - 1) / TILED_BN;
    if (m < 0 || n < 0 || k <= 0 || k % w4a16_block_size<type> != 0 || tiles_m > INT32_MAX || tiles_n > UINT16_MAX) {
        return cudaErrorInvalidValue;
    }
    const int64_t n8          = n * (k / 8);
    const int64_t n8_in_block = (n8 + TO_BF16_THREADS - 1) / TO_BF16_THREADS;
    if (k / 8 > INT32_MAX || n8_in_block > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) w % tiled_block_align<type> != 0 || (uintptr_t) x % sizeof(float4) != 0 ||
        (uintptr_t) y % sizeof(float) != 0 || (uintptr_t) scratch % sizeof(uint4) != 0) {
        return cudaErrorMisalignedAddress;
    }
    if (m == 0 || n == 0) {
        return cudaSuccess;
    }
    tiled_to_bf16<<<(unsigned) n8_in_block, TO_BF16_THREADS, 0, stream>>>((const float4 *) x, (uint4 *) scratch, n8);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) {
        return status;
    }
    const dim3 grid((unsigned) tiles_m, (unsigned) tiles_n);
    const dim3 block(TILED_WARP, TILED_WARPS);
    tiled_gemm<type><<<grid, block, 0, stream>>>((const uint8_t *) w, (const uint4 *) scratch, y, m, n, k);
    return cudaGetLastError();
}
