// One token of a causal convolution over 4 tokens, a channel by itself, for every sequence of a batch: the inputs that
// it remembers are updated where they are, and SiLU is applied.
//
//   conv_state_cuda(args, stream)
//
//   x        f32, the token's inputs: contiguous channels for each sequence
//   weights  f32, contiguous, [channels][4], the oldest input's first
//   state    f32, contiguous, [seqs][channels][3], the oldest input first. `from` is read and `to` is written: the same
//            address, or ranges that do not overlap
//   out      f32, contiguous, [seqs][channels]: the address of x, where x is contiguous, or a range that does not overlap
//   strides  in elements
//   stream   the launch is asynchronous and allocates nothing: it may be captured in a graph
//   returns  cudaErrorInvalidValue for sizes, else what the launch returned; zero sequences are no work
//
//   window = state, x
//   out    = silu(sum of window[j] weights[j])
//   state  = window without its first
//
// Each thread reads all of its elements before it writes them, and no other thread reads them: in place needs no
// barrier. A thread has 4 channels, so that it moves 16 bytes at a time, where addresses and sizes allow it, else one.
// It has 2 sequences where there are enough of them, with the weights read once.
//
// The sum is in the order of ggml's own kernel, with a bias of 0 added as there, so that every bit agrees.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

static constexpr int CONV_STATE_TAPS    = 4;  // inputs of a sum: the token's own and those of the state
static constexpr int CONV_STATE_KEPT    = CONV_STATE_TAPS - 1;
static constexpr int CONV_STATE_THREADS = 128;

struct conv_state_args {
    const float * x;
    const float * weights;
    const float * from;
    float *       to;
    float *       out;
    int64_t       seqs;
    int64_t       channels;
    int64_t       x_seq_stride;
};

// -- neighbours in memory --

// wide: 16 bytes at a time, else one element
template <bool wide, int n> static __device__ __forceinline__ void conv_state_load(const float * from, float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += wide ? 4 : 1) {
        if constexpr (wide) {
            const float4 v = *(const float4 *) (from + i);
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        } else {
            x[i] = from[i];
        }
    }
}

template <bool wide, int n> static __device__ __forceinline__ void conv_state_store(float * to, const float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += wide ? 4 : 1) {
        if constexpr (wide) {
            *(float4 *) (to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
        } else {
            to[i] = x[i];
        }
    }
}

// -- kernel --

// chans, batch: how many channels and sequences a thread has. Grid (channels / chans / threads, seqs / batch), rounded up.
template <int chans, int batch>
static __global__ void __launch_bounds__(CONV_STATE_THREADS) conv_state_step(const conv_state_args a) {
    constexpr int  TAPS  = CONV_STATE_TAPS;
    constexpr int  KEPT  = CONV_STATE_KEPT;
    constexpr bool WIDE  = chans % 4 == 0;
    const int64_t  chan  = ((int64_t) blockIdx.x * CONV_STATE_THREADS + threadIdx.x) * chans;
    const int64_t  first = (int64_t) blockIdx.y * batch;
    if (chan >= a.channels) {
        return;
    }

    float kept[batch][chans * KEPT];
    float x[batch][chans];
    float w[chans * TAPS];
#pragma unroll
    for (int s = 0; s < batch; ++s) {
        if (first + s < a.seqs) {
            conv_state_load<WIDE>(a.from + ((first + s) * a.channels + chan) * KEPT, kept[s]);
            conv_state_load<WIDE>(a.x + (first + s) * a.x_seq_stride + chan, x[s]);
        }
    }
    conv_state_load<WIDE>(a.weights + chan * TAPS, w);

#pragma unroll
    for (int s = 0; s < batch; ++s) {
        if (first + s < a.seqs) {
            float next[chans * KEPT];
            float out[chans];
#pragma unroll
            for (int c = 0; c < chans; ++c) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < TAPS; ++j) {
                    const float input = j < KEPT ? kept[s][c * KEPT + j] : x[s][c];
                    sum += input * w[c * TAPS + j];
                    if (j > 0) {
                        next[c * KEPT + j - 1] = input;
                    }
                }
                sum += 0.0f;
                out[c] = sum / (1.0f + expf(-sum));
            }
            conv_state_store<WIDE>(a.to + ((first + s) * a.channels + chan) * KEPT, next);
            conv_state_store<WIDE>(a.out + (first + s) * a.channels + chan, out);
        }
    }
}

// -- launch --

template <int chans, int batch> static cudaError_t conv_state_launch(const conv_state_args & a, cudaStream_t stream) {
    constexpr int64_t columns = chans * CONV_STATE_THREADS;
    const dim3 grid((unsigned) ((a.channels + columns - 1) / columns), (unsigned) ((a.seqs + batch - 1) / batch));
    conv_state_step<chans, batch><<<grid, CONV_STATE_THREADS, 0, stream>>>(a);
    return cudaGetLastError();
}

// Whether every access of 4 neighbours is aligned to 16 bytes.
static inline bool conv_state_is_wide(const conv_state_args & a) {
    const uintptr_t bits = (uintptr_t) a.x | (uintptr_t) a.weights | (uintptr_t) a.from | (uintptr_t) a.to | (uintptr_t) a.out;
    return bits % sizeof(float4) == 0 && a.channels % 4 == 0 && a.x_seq_stride % 4 == 0;
}

static cudaError_t conv_state_cuda(const conv_state_args & a, cudaStream_t stream) {
    if (a.channels <= 0 || a.seqs < 0 || a.seqs > UINT16_MAX || a.x_seq_stride < a.channels) {
        return cudaErrorInvalidValue;
    }
    if (a.seqs == 0) {
        return cudaSuccess;
    }
    if (!conv_state_is_wide(a)) {
        return conv_state_launch<1, 1>(a, stream);
    }
    return a.seqs < 32 ? conv_state_launch<4, 1>(a, stream) : conv_state_launch<4, 2>(a, stream);
}
