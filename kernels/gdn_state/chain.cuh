// llama.cpp's own way at the pin, three launches: the states are gathered by id into a buffer of the graph, the kernel
// reads them there and writes the new ones behind its result, and a copy takes these to their cells. Written anew, with
// the launches' geometry and each sum's order.

#pragma once

#include "gdn_state.cuh"

// A block takes 256 neighbours of one row, 4 bytes a thread.
static __global__ void chain_gather(const float * states, const int32_t * ids, float * gathered, int64_t row) {
    const int64_t i = (int64_t) blockIdx.y * blockDim.x + threadIdx.x;
    if (i < row) {
        gathered[blockIdx.x * row + i] = states[ids[blockIdx.x] * row + i];
    }
}

// The lanes that share a column, and a lane's rows in the order in which it adds them: f32 as ggml does; bf16, which
// ggml has not, as gdn_state.cuh does.
template <typename T> struct chain_order {
    static constexpr int LANES = 32;
    static constexpr int ROWS  = 4;

    static __device__ int   row(int lane, int r) { return lane + 32 * r; }
    static __device__ float wide(float x) { return x; }
    static __device__ float narrow(float x) { return x; }
};

template <> struct chain_order<__nv_bfloat16> {
    static constexpr int LANES = 16;
    static constexpr int ROWS  = 8;

    static __device__ int           row(int lane, int r) { return 8 * lane + r; }
    static __device__ float         wide(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
};

// T: of the states. A warp has one column. A plain butterfly; lanes beyond those that share a column do the same again,
// and store nothing.
template <typename T> static __global__ void __launch_bounds__(128) chain_step(const gdn_state_args<T> a, float scale) {
    using order        = chain_order<T>;
    const int     lane = threadIdx.x % order::LANES;
    const int     col  = blockIdx.x / a.heads * 4 + threadIdx.y;
    const int64_t head = blockIdx.x % a.heads;
    const int64_t seq  = blockIdx.y;
    const int64_t at   = ((seq * a.heads + head) * GDN_STATE_SIZE + col) * GDN_STATE_SIZE;
    const float * q    = a.q + seq * a.qk_seq_stride + head % a.qk_heads * a.qk_head_stride;
    const float * k    = a.k + seq * a.qk_seq_stride + head % a.qk_heads * a.qk_head_stride;

    float s[order::ROWS];
    float kv = 0.0f;
    for (int r = 0; r < order::ROWS; ++r) {
        s[r] = order::wide(a.from[at + order::row(lane, r)]);
        kv += s[r] * k[order::row(lane, r)];
    }
    for (int distance = order::LANES / 2; distance > 0; distance /= 2) {
        kv += __shfl_xor_sync(0xFFFFFFFF, kv, distance);
    }
    const float g     = expf(a.g[seq * a.gate_seq_stride + head * a.gate_head_stride]);
    const float v     = a.v[seq * a.v_seq_stride + head * a.v_head_stride + col];
    const float delta = (v - g * kv) * a.beta[seq * a.gate_seq_stride + head * a.gate_head_stride];
    float       out   = 0.0f;
    for (int r = 0; r < order::ROWS; ++r) {
        s[r] = g * s[r] + k[order::row(lane, r)] * delta;
        out += s[r] * q[order::row(lane, r)];
    }
    for (int distance = order::LANES / 2; distance > 0; distance /= 2) {
        out += __shfl_xor_sync(0xFFFFFFFF, out, distance);
    }
    if (threadIdx.x == 0) {
        a.out[(seq * a.heads + head) * GDN_STATE_SIZE + col] = out * scale;
    }
    for (int r = 0; r < order::ROWS && threadIdx.x < order::LANES; ++r) {
        a.to[at + order::row(lane, r)] = order::narrow(s[r]);
    }
}

template <typename T> static cudaError_t chain_step_cuda(const gdn_state_args<T> & a, cudaStream_t stream) {
    const dim3 grid((unsigned) (GDN_STATE_SIZE / 4 * a.heads), (unsigned) a.seqs);
    chain_step<T><<<grid, dim3(32, 4), 0, stream>>>(a, 1.0f / sqrtf((float) GDN_STATE_SIZE));
    return cudaGetLastError();
}

// gathered and updated: a state for each sequence.
static cudaError_t chain_cuda(const gdn_state_args<float> & a, const int32_t * ids, float * gathered, float * updated,
                              cudaStream_t stream) {
    const int64_t         row  = a.heads * GDN_STATE_CELL;
    const dim3            grid((unsigned) a.seqs, (unsigned) ((row + 255) / 256));
    gdn_state_args<float> step = a;
    step.from = gathered;
    step.to   = updated;
    chain_gather<<<grid, 256, 0, stream>>>(a.from, ids, gathered, row);
    const cudaError_t status = chain_step_cuda(step, stream);
    if (status != cudaSuccess) {
        return status;
    }
    return cudaMemcpyAsync(a.to, updated, a.seqs * row * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}
