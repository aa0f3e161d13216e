// llama.cpp's own way at the pin, four launches: the states are gathered by id, joined with the inputs, the last three of
// each window are copied to the cells, and the windows are multiplied. Written anew, with the order of the sums.

#pragma once

#include "conv_state.cuh"

// A block takes 256 neighbours of one row, 4 bytes a thread.
static __global__ void chain_gather(const float * states, const int32_t * ids, float * gathered, int64_t row) {
    const int64_t i = (int64_t) blockIdx.y * blockDim.x + threadIdx.x;
    if (i < row) {
        gathered[blockIdx.x * row + i] = states[ids[blockIdx.x] * row + i];
    }
}

// Over all elements of the windows, [seqs][channels][4].
static __global__ void chain_concat(const conv_state_args a, float * windows) {
    const int64_t i   = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t row = i / 4;
    if (i < a.seqs * a.channels * 4) {
        windows[i] = i % 4 < 3 ? a.from[row * 3 + i % 4] : a.x[row / a.channels * a.x_seq_stride + row % a.channels];
    }
}

// Over all elements of the states.
static __global__ void chain_copy(const conv_state_args a, const float * windows) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.seqs * a.channels * 3) {
        a.to[i] = windows[i / 3 * 4 + i % 3 + 1];
    }
}

// Over all results.
static __global__ void chain_multiply(const conv_state_args a, const float * windows, const float bias) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.seqs * a.channels) {
        float sum = 0.0f;
        for (int j = 0; j < 4; ++j) {
            sum += windows[i * 4 + j] * a.weights[i % a.channels * 4 + j];
        }
        sum += bias;
        a.out[i] = sum / (1.0f + expf(-sum));
    }
}

// windows: room for all of them. The states are where they are: what is left once there is no gather.
static cudaError_t chain_joined(const conv_state_args & a, float * windows, cudaStream_t stream) {
    const int64_t n = a.seqs * a.channels;
    chain_concat<<<(unsigned) ((n * 4 + 255) / 256), 256, 0, stream>>>(a, windows);
    chain_copy<<<(unsigned) ((n * 3 + 255) / 256), 256, 0, stream>>>(a, windows);
    chain_multiply<<<(unsigned) ((n + 127) / 128), 128, 0, stream>>>(a, windows, 0.0f);
    return cudaGetLastError();
}

// gathered: room for all states.
static cudaError_t chain_cuda(const conv_state_args & a, const int32_t * ids, float * gathered, float * windows,
                              cudaStream_t stream) {
    const int64_t   row    = a.channels * 3;
    conv_state_args joined = a;
    joined.from            = gathered;
    chain_gather<<<dim3((unsigned) a.seqs, (unsigned) ((row + 255) / 256)), 256, 0, stream>>>(a.from, ids, gathered, row);
    return chain_joined(joined, windows, stream);
}
