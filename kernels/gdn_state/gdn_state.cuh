// One token of the gated delta rule for every sequence of a batch, the states updated where they are.
//
//   gdn_state_cuda(args, stream)
//
//   q, k     f32, a vector of 128 for each of qk_heads heads and each sequence: head h takes head h % qk_heads
//   v        f32, a vector of 128 for each head and sequence
//   g, beta  f32, a number for each head and sequence: the logarithm of the decay, and the step
//   state    f32 or bf16, contiguous: a matrix of 128 x 128 for each head and sequence, transposed: S[i][col] is at
//            128 * col + i. `from` is read and `to` is written: the same address, or ranges that do not overlap
//   out      f32, contiguous, [seqs][heads][128]
//   strides  in elements; a vector's own elements are contiguous
//   stream   the launch is asynchronous and allocates nothing: it may be captured in a graph
//   returns  cudaErrorInvalidValue for sizes, cudaErrorMisalignedAddress for a state that is not aligned to 16 bytes,
//            else what the launch returned; zero sequences are no work
//
// Limitations: vectors of 128, one decay a head, one token, sm_80 or newer. Arithmetic is f32 for both types of state.
//
//   kv[col]    = sum of S[i][col] k[i]
//   delta[col] = (v[col] - e^g kv[col]) beta
//   S[i][col]  = e^g S[i][col] + k[i] delta[col]
//   out[col]   = (sum of S[i][col] q[i]) / sqrt(128)
//
// A lane takes several columns at once, so that all their loads are in flight together: one column is too few bytes to
// hide the latency of memory. Each thread writes the elements that it read, so updating in place needs no barrier.
// Blocks that are neighbours have neighbouring columns (H200, 128 x 32 heads, bf16: 72.0 us, with neighbouring heads
// 74.7). Streaming loads and stores gained nothing.
//
// The sums of f32 states are added in the order of ggml's own kernel, so that every bit agrees: a lane adds its rows in
// turn, then a butterfly over the warp goes from a distance of 16 to 1.
//
// References: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).

#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

static constexpr int GDN_STATE_SIZE = 128;  // rows and columns of a state
static constexpr int GDN_STATE_CELL = GDN_STATE_SIZE * GDN_STATE_SIZE;

// T: float or __nv_bfloat16
template <typename T> struct gdn_state_args {
    const float * q;
    const float * k;
    const float * v;
    const float * g;
    const float * beta;
    const T *     from;
    T *           to;
    float *       out;
    int64_t       seqs;
    int64_t       heads;
    int64_t       qk_heads;
    int64_t       qk_head_stride, qk_seq_stride;
    int64_t       v_head_stride, v_seq_stride;
    int64_t       gate_head_stride, gate_seq_stride;  // of g and of beta
};

// -- a lane's rows of a column, from memory and back --

// f32: a lane has the rows lane, lane + 32, lane + 64, lane + 96, so a column is a warp's.
template <typename T> struct gdn_state_lane {
    static constexpr int LANES = 32;  // that share a column
    static constexpr int ROWS  = GDN_STATE_SIZE / LANES;

    static __device__ __forceinline__ int row(const int lane, const int r) { return r * LANES + lane; }

    static __device__ __forceinline__ void load(const float * column, const int lane, float (&s)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            s[r] = column[row(lane, r)];
        }
    }

    static __device__ __forceinline__ void store(float * column, const int lane, const float (&s)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            column[row(lane, r)] = s[r];
        }
    }
};

// bf16: a lane has eight rows that are neighbours, one load of 16 bytes, so a column is half a warp's.
template <> struct gdn_state_lane<__nv_bfloat16> {
    static constexpr int LANES = 16;
    static constexpr int ROWS  = GDN_STATE_SIZE / LANES;

    static __device__ __forceinline__ int row(const int lane, const int r) { return lane * ROWS + r; }

    static __device__ __forceinline__ void load(const __nv_bfloat16 * column, const int lane, float (&s)[ROWS]) {
        const uint4    v       = ((const uint4 *) column)[lane];
        const uint32_t bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            s[r] = __uint_as_float(r % 2 ? bits[r / 2] & 0xFFFF0000 : bits[r / 2] << 16);
        }
    }

    static __device__ __forceinline__ uint32_t pack(const float low, const float high) {
        return (uint32_t) __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
               (uint32_t) __bfloat16_as_ushort(__float2bfloat16_rn(high)) << 16;
    }

    static __device__ __forceinline__ void store(__nv_bfloat16 * column, const int lane, const float (&s)[ROWS]) {
        ((uint4 *) column)[lane] = make_uint4(pack(s[0], s[1]), pack(s[2], s[3]), pack(s[4], s[5]), pack(s[6], s[7]));
    }
};

// -- reduction --

// The sums over `lanes` neighbours of n values a lane, both powers of two: the lanes from lanes/n j on get the sum of
// value j. The first steps of the butterfly halve the values that a lane has, so that 8 sums over 32 lanes take 9
// exchanges and not 40. Each sum adds the same pairs as a butterfly of its own.
template <int left, int distance, int n>
static __device__ __forceinline__ void gdn_state_fold(float (&x)[n], const int lane) {
    if constexpr (left > 1) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < left / 2; ++i) {
            const float give = upper ? x[i] : x[i + left / 2];
            const float keep = upper ? x[i + left / 2] : x[i];
            x[i] = keep + __shfl_xor_sync(0xFFFFFFFF, give, distance);
        }
        gdn_state_fold<left / 2, distance / 2>(x, lane);
    } else if constexpr (distance > 0) {
        x[0] += __shfl_xor_sync(0xFFFFFFFF, x[0], distance);
        gdn_state_fold<1, distance / 2>(x, lane);
    }
}

template <int lanes, int n> static __device__ __forceinline__ float gdn_state_sums(float (&x)[n], const int lane) {
    static_assert(n <= lanes && (n & (n - 1)) == 0, "a sum must have a lane");
    gdn_state_fold<n, lanes / 2>(x, lane);
    return x[0];
}

// -- kernel --

// Block (32, warps), of which each lane has `cols` columns; grid (128 / columns of a block * heads, seqs).
template <typename T, int warps, int cols>
static __global__ void __launch_bounds__(32 * warps) gdn_state_step(const gdn_state_args<T> a, const float scale) {
    using mine             = gdn_state_lane<T>;
    constexpr int ROWS     = mine::ROWS;
    constexpr int LANES    = mine::LANES;
    constexpr int GROUPS   = 32 / LANES;  // of lanes, each with columns of its own
    constexpr int PER_SUM  = LANES / cols;
    constexpr int PARTS    = GDN_STATE_SIZE / (warps * cols * GROUPS);
    static_assert(PARTS * warps * cols * GROUPS == GDN_STATE_SIZE, "whole blocks");

    const int     group = threadIdx.x / LANES;
    const int     lane  = threadIdx.x % LANES;
    const int     part  = blockIdx.x % PARTS;
    const int64_t head  = blockIdx.x / PARTS;
    const int64_t seq   = blockIdx.y;
    const int     first = ((part * warps + threadIdx.y) * GROUPS + group) * cols;
    const int64_t at    = ((seq * a.heads + head) * GDN_STATE_SIZE + first) * GDN_STATE_SIZE;

    float s[cols][ROWS];
#pragma unroll
    for (int c = 0; c < cols; ++c) {
        mine::load(a.from + at + c * GDN_STATE_SIZE, lane, s[c]);
    }

    const int64_t qk   = seq * a.qk_seq_stride + head % a.qk_heads * a.qk_head_stride;
    const int64_t gate = seq * a.gate_seq_stride + head * a.gate_head_stride;
    const int     col  = first + lane / PER_SUM;  // whose sums this lane gets
    const float   v    = a.v[seq * a.v_seq_stride + head * a.v_head_stride + col];
    const float   beta = a.beta[gate];
    const float   g    = expf(a.g[gate]);

    float k[ROWS];
    float q[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        k[r] = a.k[qk + mine::row(lane, r)];
        q[r] = a.q[qk + mine::row(lane, r)];
    }

    float sums[cols];
#pragma unroll
    for (int c = 0; c < cols; ++c) {
        sums[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            sums[c] += s[c][r] * k[r];
        }
    }
    const float kv    = gdn_state_sums<LANES>(sums, lane);
    const float delta = (v - g * kv) * beta;

#pragma unroll
    for (int c = 0; c < cols; ++c) {
        const float d = __shfl_sync(0xFFFFFFFF, delta, c * PER_SUM, LANES);
        sums[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            s[c][r] = g * s[c][r] + k[r] * d;
            sums[c] += s[c][r] * q[r];
        }
        mine::store(a.to + at + c * GDN_STATE_SIZE, lane, s[c]);
    }
    const float out = gdn_state_sums<LANES>(sums, lane);
    if (lane % PER_SUM == 0) {
        a.out[(seq * a.heads + head) * GDN_STATE_SIZE + col] = out * scale;
    }
}

// -- launch --

template <typename T, int warps, int cols>
static cudaError_t gdn_state_launch(const gdn_state_args<T> & a, cudaStream_t stream) {
    constexpr int columns = warps * cols * 32 / gdn_state_lane<T>::LANES;
    const dim3    grid((unsigned) (GDN_STATE_SIZE / columns * a.heads), (unsigned) a.seqs);
    gdn_state_step<T, warps, cols><<<grid, dim3(32, warps), 0, stream>>>(a, 1.0f / sqrtf((float) GDN_STATE_SIZE));
    return cudaGetLastError();
}

// The fastest of those that `./harness tune` has, at 128 sequences (H200: f32 133.9 us, bf16 72.0 us).
template <typename T> static cudaError_t gdn_state_cuda(const gdn_state_args<T> & a, cudaStream_t stream) {
    const bool whole = a.heads > 0 && a.qk_heads > 0 && a.heads % a.qk_heads == 0;
    if (!whole || a.seqs > UINT16_MAX || 0 > a.seqs) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) a.from % sizeof(uint4) != 0 || (uintptr_t) a.to % sizeof(uint4) != 0) {
        return cudaErrorMisalignedAddress;
    }
    if (a.seqs == 0) {
        return cudaSuccess;
    }
    if constexpr (sizeof(T) == sizeof(float)) {
        return gdn_state_launch<T, 1, 8>(a, stream);
    } else {
        return gdn_state_launch<T, 2, 4>(a, stream);
    }
}
