// Products of 4-bit weights in ggml's blocks with f32 activations on f16 tensor cores: y = w x.
//
//   ldmatrix_gemm_cuda<type>(w, x, y, scratch, m, n, k, stream)
//
//   type     w4a16_type::Q4_0 or w4a16_type::Q4_K
//   w        m rows of k weights in ggml's blocks, contiguous; 16-byte aligned
//   x        n rows (tokens) of k f32, contiguous; 16-byte aligned
//   y        n rows of m f32, contiguous: y[j*m + i] is row i of w by row j of x; 4-byte aligned; overlaps none of the
//            others
//   scratch  ldmatrix_gemm_scratch_bytes(n, k) bytes that are written and read; 16-byte aligned
//   m, n, k  as test-backend-ops counts them: ne01, ne11, ne00; k a multiple of 256 for both types; n at most
//            65535 x 128, m at most 2^31 - 129, k below 2^31
//   stream   two launches, asynchronous, that allocate nothing: they may be captured in a graph
//   returns  cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer that is not as above, else what
//            the launches returned
//
// Limitations: sm_80 or newer. One matrix a call: no batch, no experts, no strides. Rung 2 with ldmatrix and f16:
// weights dequantised into shared memory by every column of tiles; no prepack, no asynchronous copy, no split of k. A
// weight beyond f16's largest number becomes infinite.
//
// Deterministic: each output is one sum in an order that depends on k alone.
//
// Accuracy: both operands are rounded to f16, all sums are in f32; columns of activations whose largest is too large or
// too small for f16 are scaled by a power of two, as w4a16_columns.cuh says. Q4_0: (q-8) d, rounded once. Q4_K:
// fma(q-8, d, 8d-m).
//
// A tile of 128 x 128 outputs, 8 warps of 64 x 32 each, k in steps of 32 through two stages of shared memory, in its
// own order. A row of a step is 4 pieces of 16 bytes, which is what ldmatrix takes of a row, and one unused:
//
//      row 0   | k 0-7  | k 8-15 | k 16-23 | k 24-31 |   -    |
//      row 1   | k 0-7  | ...
//
// 32 banks are 8 groups of a piece. ldmatrix reads a matrix of 8 x 8, one piece of 8 rows, in one pass if no two of the
// pieces have the same group. Piece c of row r has group (5 r + c) mod 8: eight of them for r = 0 ... 7. With rows of 4
// pieces it would be (4 r + c) mod 8: two of them, hence four passes in place of one. Stores of 16 bytes go by eight
// lanes as well:
//
//   weights      lanes are 16 rows by 2 halves, rows first: 8 rows, one piece                           5 r + c
//   activations  4 lanes are a row, for 64 bytes side by side in memory; the 4 beside them are not the  c = 0 ... 3,
//                next row, whose piece 3 would meet piece 0 (5 + 3 = 8), but the 4th after it           20 + c: 4 ... 7
//
// 16 of k of a warp are 6 ldmatrix of 4 passes for 16 mma; rung 2's loads of 4 bytes are 24 passes too, but 24
// instructions.
//
// Lane l gives ldmatrix.x4 the address of row l % 8 of matrix l / 8, and lane 4 g + t gets columns 2t 2t+1 of row g of
// each. The matrices of 16 rows by 16 of k, rows first, are a0 ... a3 of mma.m16n8k16; of 16 columns they are b0 of the
// first eight, b0 of the others, b1 of the first, b1 of the others:
//
//   a0 row g, k 2t 2t+1     a1 row g+8, k 2t 2t+1     a2 row g, k 2t+8 2t+9     a3 row g+8, k 2t+8 2t+9
//   b0 column g, k 2t 2t+1  b1 column g, k 2t+8 2t+9
//   c0 row g, column 2t     c1 row g, column 2t+1     c2 row g+8, column 2t     c3 row g+8, column 2t+1
//
// References: PTX ISA, ldmatrix and warp-level matrix fragments for m16n8k16; ggml's block_q4_0 and block_q4_K.

#include "../w4a16_columns.cuh"

static constexpr int LDMATRIX_WARPS = 8;
static constexpr int LDMATRIX_BM    = 128;
static constexpr int LDMATRIX_BN    = 128;
static constexpr int LDMATRIX_BK    = 32;  // a block of Q4_0, a sub-block of Q4_K: one scale a row
static constexpr int LDMATRIX_WM    = 64;  // of a warp
static constexpr int LDMATRIX_WN    = 32;
static constexpr int LDMATRIX_ROW   = LDMATRIX_BK / 8 + 1;  // pieces of 16 bytes in shared memory

static constexpr int LDMATRIX_THREADS  = W4A16_WARP * LDMATRIX_WARPS;
static constexpr int LDMATRIX_WARPS_M  = LDMATRIX_BM / LDMATRIX_WM;
static constexpr int LDMATRIX_TILES_M  = LDMATRIX_WM / 16;  // fragments of a warp
static constexpr int LDMATRIX_TILES_N  = LDMATRIX_WN / 8;
static constexpr int LDMATRIX_X_ROWS   = LDMATRIX_THREADS / (LDMATRIX_BK / 8);  // of activations, a piece a thread
static constexpr int LDMATRIX_X_PIECES = LDMATRIX_BN / LDMATRIX_X_ROWS;

static_assert(LDMATRIX_WARPS_M * (LDMATRIX_BN / LDMATRIX_WN) == LDMATRIX_WARPS, "the warps must cover the tile");
static_assert(LDMATRIX_X_PIECES * LDMATRIX_X_ROWS == LDMATRIX_BN, "the threads must cover the activations");
static_assert(LDMATRIX_BM * 2 == LDMATRIX_THREADS, "two threads must dequantise a row");

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// One step of k. Eight f16 in 16 bytes.
struct ldmatrix_stage {
    uint4 w[LDMATRIX_BM][LDMATRIX_ROW];
    uint4 x[LDMATRIX_BN][LDMATRIX_ROW];
};

// -- one instruction --

// Loads four 8 x 8 matrices; each lane gives the address of one row.
static __device__ __forceinline__ void ldmatrix_load(uint32_t (&r)[4], const uint4 * row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t) __cvta_generic_to_shared(row)) : "memory");
}

// -- dequantisation --

// A weight is (code - 8) d + c.
struct ldmatrix_scale {
    __half2 d, c;

    // Bytes 0 and 1 or 2 and 3 of q. Under 0x64 a byte is the f16 1024 + code.
    __device__ __forceinline__ uint32_t pair(const uint32_t q, const bool high) const {
        const uint32_t bits   = __byte_perm(q, 0x64646464, high ? 0x4342 : 0x4140);
        const __half2  less_8 = __hsub2(w4a16_as_half2(bits), w4a16_as_half2(0x64086408));
        return w4a16_as_u32(__hfma2(less_8, d, c));
    }

    // Eight weights of consecutive k from eight codes, the low nibbles of q0 and q1.
    __device__ __forceinline__ uint4 eight(uint32_t q0, uint32_t q1) const {
        q0 &= 0x0F0F0F0F;
        q1 &= 0x0F0F0F0F;
        return make_uint4(pair(q0, false), pair(q0, true), pair(q1, false), pair(q1, true));
    }
};

// The scale of sub-block j from a block's first 16 bytes: d, dmin, then 8 x 2 numbers of 6 bits.
static __device__ __forceinline__ ldmatrix_scale ldmatrix_q4_K_scale(const uint4 head, const int j) {
    const uint32_t s    = head.y >> 8 * (j % 4);
    const uint32_t m    = head.z >> 8 * (j % 4);
    const uint32_t both = head.w >> 8 * (j % 4);
    const uint32_t sc   = j < 4 ? s & 63 : (both & 15) | (s >> 2 & 48);
    const uint32_t mn   = j < 4 ? m & 63 : (both >> 4 & 15) | (m >> 2 & 48);
    const float2   dm   = __half22float2(w4a16_as_half2(head.x));
    const float    d    = dm.x * (float) sc;
    const float    c    = fmaf(8.0f, d, -dm.y * (float) mn);
    return {__floats2half2_rn(d, d), __floats2half2_rn(c, c)};
}

// What a thread holds of the next step, between its loads and its stores: 16 weights of one row, as they are in memory,
// so that nothing waits for the loads before the stores. The two threads of a row are half 0 and half 1.
template <w4a16_type type> struct ldmatrix_weights;

// 2 bytes d, then 16 bytes: byte i holds weight i in its low nibble, weight i + 16 in its high one. Two blocks are 9
// words: the second begins in the middle of word 4.
template <> struct ldmatrix_weights<w4a16_type::Q4_0> {
    uint32_t d, q[3];

    __device__ __forceinline__ void load(const uint8_t * row, const int step, const int half) {
        const uint32_t * v = (const uint32_t *) (row + (int64_t) (step / 2) * 36) + step % 2 * 4;
        d = v[0];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            q[i] = v[2 * half + i];
        }
    }

    __device__ __forceinline__ void store(uint4 (&w)[LDMATRIX_ROW], const int step, const int half) const {
        const int            codes = step % 2 ? 0x7654 : 0x5432;
        const uint32_t       q0    = __byte_perm(q[0], q[1], codes);
        const uint32_t       q1    = __byte_perm(q[1], q[2], codes);
        const uint32_t       both  = __byte_perm(d, 0, step % 2 ? 0x3232 : 0x1010);
        const ldmatrix_scale scale = {w4a16_as_half2(both), w4a16_as_half2(0)};
        w[0 + half] = scale.eight(q0, q1);
        w[2 + half] = scale.eight(q0 >> 4, q1 >> 4);
    }
};

// 16 bytes of scales, then 4 x 32 bytes: byte i of the j-th 32 holds weight 64 j + i and weight 64 j + 32 + i.
template <> struct ldmatrix_weights<w4a16_type::Q4_K> {
    uint4 head, q;

    __device__ __forceinline__ void load(const uint8_t * row, const int step, const int half) {
        const uint4 * block = (const uint4 *) (row + (int64_t) (step / 8) * W4A16_UNIT_BYTES);
        head = block[0];
        q    = block[1 + step % 8 / 2 * 2 + half];
    }

    __device__ __forceinline__ void store(uint4 (&w)[LDMATRIX_ROW], const int step, const int half) const {
        const ldmatrix_scale scale = ldmatrix_q4_K_scale(head, step % 8);
        const int            shift = step % 2 * 4;
        w[2 * half + 0] = scale.eight(q.x >> shift, q.y >> shift);
        w[2 * half + 1] = scale.eight(q.z >> shift, q.w >> shift);
    }
};

// -- copy --

// What a thread holds of the next step of the activations: a piece of one column, and the same piece of every 64th
// after it. Columns beyond n are read as the last one and not written.
struct ldmatrix_activations {
    const uint4 * from[LDMATRIX_X_PIECES];
    uint4         pieces[LDMATRIX_X_PIECES];

    __device__ __forceinline__ ldmatrix_activations(const uint4 * x, const int64_t k8, const int col, const int cols) {
#pragma unroll
        for (int l = 0; l < LDMATRIX_X_PIECES; ++l) {
            const int there = col + l * LDMATRIX_X_ROWS;
            from[l]         = x + (there < cols ? there : cols - 1) * k8;
        }
    }

    __device__ __forceinline__ void load(const int step) {
#pragma unroll
        for (int l = 0; l < LDMATRIX_X_PIECES; ++l) {
            pieces[l] = from[l][(int64_t) step * (LDMATRIX_BK / 8)];
        }
    }

    __device__ __forceinline__ void store(ldmatrix_stage & stage, const int col, const int piece) const {
#pragma unroll
        for (int l = 0; l < LDMATRIX_X_PIECES; ++l) {
            stage.x[col + l * LDMATRIX_X_ROWS][piece] = pieces[l];
        }
    }
};

// -- multiplication --

// A step of a warp's tile whose first row and column are row and col.
static __device__ __forceinline__ void ldmatrix_multiply(
        const ldmatrix_stage & stage, float (&acc)[LDMATRIX_TILES_M][LDMATRIX_TILES_N][4],
        const int row, const int col) {
    const int lane_row   = threadIdx.x % 16;
    const int lane_piece = threadIdx.x / 16;

#pragma unroll
    for (int p = 0; p < LDMATRIX_BK / 8; p += 2) {
        uint32_t b[LDMATRIX_TILES_N / 2][4];
#pragma unroll
        for (int j = 0; j < LDMATRIX_TILES_N / 2; ++j) {
            ldmatrix_load(b[j], &stage.x[col + 16 * j + lane_row][p + lane_piece]);
        }
#pragma unroll
        for (int i = 0; i < LDMATRIX_TILES_M; ++i) {
            uint32_t a[4];
            ldmatrix_load(a, &stage.w[row + 16 * i + lane_row][p + lane_piece]);
#pragma unroll
            for (int j = 0; j < LDMATRIX_TILES_N; ++j) {
                w4a16_mma(acc[i][j], a, b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
            }
        }
    }
}

// Writes a warp's tile to y; only its first m x n outputs exist.
static __device__ __forceinline__ void ldmatrix_write(
        const float (&acc)[LDMATRIX_TILES_M][LDMATRIX_TILES_N][4], const float * __restrict__ undo,
        float * __restrict__ y, const int64_t stride, const int m, const int n) {
#pragma unroll
    for (int j = 0; j < LDMATRIX_TILES_N; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int col = 8 * j + threadIdx.x % 4 * 2 + e;
            if (col >= n) {
                continue;
            }
            const float by = undo[col];
#pragma unroll
            for (int i = 0; i < 2 * LDMATRIX_TILES_M; ++i) {
                const int row = 8 * i + threadIdx.x / 4;
                if (row < m) {
                    y[col * stride + row] = by * acc[i / 2][j][i % 2 * 2 + e];
                }
            }
        }
    }
}

// -- kernel --

// One block a tile, threads (32, 8): threadIdx.x is the lane, threadIdx.y the warp. The loads of a step are under way
// while the one before it is multiplied. Rows beyond m are read as the last one and not written.
template <w4a16_type type>
static __global__ void __launch_bounds__(LDMATRIX_THREADS, 2)
ldmatrix_gemm(const uint8_t * __restrict__ w, const uint4 * __restrict__ x, const float * __restrict__ undo,
              float * __restrict__ y, const int m, const int n, const int k) {
    __shared__ __align__(16) ldmatrix_stage stages[2];

    const int row0  = blockIdx.x * LDMATRIX_BM;
    const int col0  = blockIdx.y * LDMATRIX_BN;
    const int rows  = m - row0 < LDMATRIX_BM ? m - row0 : LDMATRIX_BM;
    const int cols  = n - col0 < LDMATRIX_BN ? n - col0 : LDMATRIX_BN;
    const int steps = k / LDMATRIX_BK;

    const int lane     = threadIdx.x;
    const int warp     = threadIdx.y;
    const int w_row    = warp * 16 + lane % 16;
    const int w_half   = lane / 16;
    const int x_col    = warp * 8 + lane / 4 % 2 * 4 + lane / 8;
    const int x_piece  = lane % 4;
    const int warp_row = warp % LDMATRIX_WARPS_M * LDMATRIX_WM;
    const int warp_col = warp / LDMATRIX_WARPS_M * LDMATRIX_WN;

    w += (row0 + (w_row < rows ? w_row : rows - 1)) * ((int64_t) (k / W4A16_UNIT) * W4A16_UNIT_BYTES);

    ldmatrix_weights<type> next_w;
    ldmatrix_activations   next_x(x + (int64_t) col0 * (k / 8) + x_piece, k / 8, x_col, cols);
    float                  acc[LDMATRIX_TILES_M][LDMATRIX_TILES_N][4] = {};

    // prologue: step 0 into stage 0
    next_w.load(w, 0, w_half);
    next_x.load(0);
    next_w.store(stages[0].w[w_row], 0, w_half);
    next_x.store(stages[0], x_col, x_piece);
    __syncthreads();

    for (int step = 0; step < steps; ++step) {
        const bool more = step + 1 < steps;
        if (more) {
            next_w.load(w, step + 1, w_half);
            next_x.load(step + 1);
        }
        ldmatrix_multiply(stages[step % 2], acc, warp_row, warp_col);
        // no warp reads that stage: all have passed the barrier after the step that read it
        if (more) {
            next_w.store(stages[(step + 1) % 2].w[w_row], step + 1, w_half);
            next_x.store(stages[(step + 1) % 2], x_col, x_piece);
        }
        __syncthreads();
    }

    y += (int64_t) (col0 + warp_col) * m + row0 + warp_row;
    ldmatrix_write(acc, undo + col0 + warp_col, y, m, rows - warp_row, cols - warp_col);
}

#else

template <w4a16_type type>
static __global__ void ldmatrix_gemm(const uint8_t * __restrict__, const uint4 * __restrict__,
                                     const float * __restrict__, float * __restrict__, const int, const int,
                                     const int) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// -- launch --

static inline size_t ldmatrix_gemm_scratch_bytes(const int64_t n, const int64_t k) {
    return (size_t) n * (k * sizeof(__half) + sizeof(float));
}

template <w4a16_type type>
static cudaError_t ldmatrix_gemm_cuda(const void * w, const float * x, float * y, void * scratch,
                                      const int64_t m, const int64_t n, const int64_t k, cudaStream_t stream) {
    const int64_t tiles_m = (m + LDMATRIX_BM - 1) / LDMATRIX_BM;
    const int64_t tiles_n = (n + LDMATRIX_BN - 1) / LDMATRIX_BN;
    if (m < 0 || n < 0 || k <= 0 || k % W4A16_UNIT != 0 || m > INT32_MAX - LDMATRIX_BM || k > INT32_MAX ||
        tiles_n > UINT16_MAX) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) w % 16 != 0 || (uintptr_t) x % sizeof(float4) != 0 || (uintptr_t) y % sizeof(float) != 0 ||
        (uintptr_t) scratch % sizeof(uint4) != 0) {
        return cudaErrorMisalignedAddress;
    }
    if (m == 0 || n == 0) {
        return cudaSuccess;
    }
    __half * const    x16    = (__half *) scratch;
    float * const     undo   = (float *) (x16 + n * k);
    const cudaError_t status = w4a16_columns_to_f16_cuda(x, x16, undo, n, k, stream);
    if (status != cudaSuccess) {
        return status;
    }
    const dim3 grid((unsigned) tiles_m, (unsigned) tiles_n);
    const dim3 block(W4A16_WARP, LDMATRIX_WARPS);
    ldmatrix_gemm<type><<<grid, block, 0, stream>>>(
        (const uint8_t *) w, (const uint4 *) scratch, undo, y, (int) m, (int) n, (int) k);
    return cudaGetLastError();
}
