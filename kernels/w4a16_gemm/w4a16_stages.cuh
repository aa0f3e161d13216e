// Stages of shared memory that some warps copy to while others read what is there: mbarriers and the bulk copy engine, sm_90
// and newer.
//
// References: PTX ISA, mbarrier, cp.async.bulk, setmaxnreg.

#pragma once

#include "w4a16_gemm.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Lanes of a warp that arrive when it has read a stage. One is enough, but racecheck does not follow __syncwarp.
#ifdef W4A16_EVERY_LANE_ARRIVES
static constexpr int W4A16_ARRIVALS = 32;
#else
static constexpr int W4A16_ARRIVALS = 1;
#endif // W4A16_EVERY_LANE_ARRIVES

// -- one instruction --

static __device__ __forceinline__ uint32_t w4a16_shared(const void * p) {
    return (uint32_t) __cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void w4a16_barrier_init(uint64_t * barrier, const int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(w4a16_shared(barrier)), "r"(count) : "memory");
}

// What this thread wrote to shared memory, or read, comes before what the copy engine reads or writes after the next barrier.
static __device__ __forceinline__ void w4a16_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

static __device__ __forceinline__ void w4a16_arrive(uint64_t * barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(w4a16_shared(barrier)) : "memory");
}

// arrives, and so many bytes are to come
static __device__ __forceinline__ void w4a16_expect(uint64_t * barrier, const int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 : : "r"(w4a16_shared(barrier)), "r"(bytes) : "memory");
}

// arrives once all that this thread copied by cp.async is there
static __device__ __forceinline__ void w4a16_arrive_after_copies(uint64_t * barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(w4a16_shared(barrier)) : "memory");
}

// until the phase of this parity has ended
static __device__ __forceinline__ void w4a16_wait_for(uint64_t * barrier, const uint32_t parity) {
    uint32_t ended = 0;
    while (ended == 0) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(ended) : "r"(w4a16_shared(barrier)), "r"(parity) : "memory");
    }
}

// bytes, a multiple of 16, to shared memory, which the barrier counts
static __device__ __forceinline__ void w4a16_bulk_copy(
        void * to, const void * from, const int bytes, uint64_t * barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 : : "r"(w4a16_shared(to)), "l"(from), "r"(bytes), "r"(w4a16_shared(barrier)) : "memory");
}

// of so many threads
static __device__ __forceinline__ void w4a16_meet(const int threads) {
    asm volatile("bar.sync 1, %0;" : : "r"(threads) : "memory");
}

// A warpgroup has fewer registers a thread from now on, or more, of what others gave: sm_90a alone.
template <int registers> static __device__ __forceinline__ void w4a16_give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(registers));
}

template <int registers> static __device__ __forceinline__ void w4a16_take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(registers));
}

// -- stages --

// What is copied to and what is read from, in turn.
template <int stages> struct w4a16_ring {
    int      stage  = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <typename C> struct w4a16_stages {
    uint64_t w_full[C::W_STAGES], w_free[C::W_STAGES], x_full[C::X_STAGES], x_free[C::X_STAGES];

    // one thread
    __device__ __forceinline__ void init() {
        for (int i = 0; i < C::W_STAGES; ++i) {
            w4a16_barrier_init(w_full + i, C::COPIERS);
            w4a16_barrier_init(w_free + i, C::WARPS * W4A16_ARRIVALS);
        }
        for (int i = 0; i < C::X_STAGES; ++i) {
            w4a16_barrier_init(x_full + i, 1);
            w4a16_barrier_init(x_free + i, C::WARPS * W4A16_ARRIVALS);
        }
        w4a16_before_copies();
    }
};

// A warp is done with a stage.
static __device__ __forceinline__ void w4a16_release(uint64_t * barrier) {
    __syncwarp();
    if (threadIdx.x < W4A16_ARRIVALS) {
        w4a16_arrive(barrier);
    }
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
