// As much of CUDA as the kernels' proofs need, on one thread of the CPU: device memory is memory, a launch runs its
// blocks one after the other, the threads of a block as coroutines that hand over only at a barrier or at an mma. A
// thread runs as far ahead of the others as barriers allow, first the first threads, then, with EMULATOR_REVERSED, the
// last: an output that depends on which is a race. Asynchrony, the memory model and the machine's rounding of sums are
// not shown.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

// -- types --

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) double2 { double x, y; };

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }

static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes  = low | (uint64_t) high << 32;
    uint32_t       result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= (uint32_t) (bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    }
    return result;
}

static inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float __uint_as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// -- threads --

static dim3 threadIdx, blockIdx, blockDim, gridDim;

struct emulated_thread {
    enum class at { START, WARP, BLOCK, END } where = at::START;
    ucontext_t              context;  // where it starts
    jmp_buf                 resumed;  // where it goes on: a context would also be switched by two system calls
    dim3                    index;
    std::unique_ptr<char[]> stack;

    int turn;  // which of the two it writes to next

    // copies to shared memory that are under way, by group; the last group is not committed yet
    std::vector<std::vector<std::pair<void *, const void *>>> copies;
};

struct emulated_block {
    std::vector<emulated_thread> threads;
    jmp_buf                      scheduler;
    emulated_thread *            running = nullptr;
    std::function<void()>        body;

    // of the mma or exchange that a warp is at, and of the one before, which other threads may still read
    struct { uint32_t a[4], b[2]; } fragments[2][1024];
    float exchanged[2][1024];

    std::unique_ptr<uint8_t[]> shared;
};

static emulated_block emulated;

static void emulated_wait(emulated_thread::at where) {
    emulated.running->where = where;
    if (_setjmp(emulated.running->resumed) == 0) {
        _longjmp(emulated.scheduler, 1);
    }
}

static void emulated_entry() {
    emulated.body();
    emulated_wait(emulated_thread::at::END);
}

static inline void __syncthreads() { emulated_wait(emulated_thread::at::BLOCK); }

template <typename T> static inline T __ldg(const T * p) { return *p; }
template <typename T> static inline void __stcs(T * p, T value) { *p = value; }
static inline void __threadfence() {}

static inline uint8_t * emulated_shared() { return emulated.shared.get(); }

static inline int atomicAdd(int * p, int value) {
    const int before = *p;
    *p += value;
    return before;
}

template <typename T> static inline T __ldcg(const T * p) { return *p; }

static void emulated_resume(emulated_thread & t) {
    emulated.running = &t;
    threadIdx        = t.index;
    if (_setjmp(emulated.scheduler) != 0) {
        return;
    }
    if (t.where == emulated_thread::at::START) {
        setcontext(&t.context);
    }
    _longjmp(t.resumed, 1);
}

[[noreturn]] static void emulated_abort(const char * why) {
    fprintf(stderr, "emulator: %s\n", why);
    abort();
}

static uint4 emulated_load(const uint4 * x) {
    if ((uintptr_t) x % sizeof(*x) != 0) {
        emulated_abort("a load of 16 bytes that is not aligned");
    }
    return *x;
}

[[noreturn]] static inline void __trap() { emulated_abort("a trap"); }

// Runs the threads first ... last until each has come to a barrier of the block or to its end.
static void emulated_run_warp(size_t first, size_t last, bool reversed) {
    using at = emulated_thread::at;
    for (;;) {
        int at_warp = 0, at_block = 0, ended = 0;
        for (size_t i = 0; i < last - first; ++i) {
            emulated_thread & t = emulated.threads[reversed ? last - 1 - i : first + i];
            if (t.where != at::END) {
                emulated_resume(t);
            }
            at_warp  += t.where == at::WARP;
            at_block += t.where == at::BLOCK;
            ended    += t.where == at::END;
        }
        if (at_warp == 0) {
            if (at_block != 0 && ended != 0) {
                emulated_abort("threads of a warp ended before a barrier");
            }
            return;
        }
        if (at_block + ended != 0 || at_warp != 32) {
            emulated_abort("an mma without its whole warp");
        }
    }
}

static void emulated_run_block(bool reversed) {
    const size_t n = emulated.threads.size();
    for (bool more = true; more;) {
        more = false;
        for (size_t w = 0; w < n; w += 32) {
            const size_t first = reversed ? (n - 1 - w) / 32 * 32 : w;
            emulated_run_warp(first, std::min(first + 32, n), reversed);
        }
        for (const emulated_thread & t : emulated.threads) {
            more = more || t.where != emulated_thread::at::END;
        }
    }
}

static bool emulated_reversed() {
    static const bool reversed = getenv("EMULATOR_REVERSED") != nullptr;
    return reversed;
}

// 16 bytes, as late as a kernel may rely on it, when their group is waited for; or, reversed, at once.
static void emulated_copy(void * to, const void * from) {
    if ((uintptr_t) to % 16 != 0 || (uintptr_t) from % 16 != 0) {
        emulated_abort("a copy that is not aligned");
    }
    if (emulated_reversed()) {
        memcpy(to, from, 16);
    } else {
        emulated.running->copies.back().emplace_back(to, from);
    }
}

static void emulated_commit() { emulated.running->copies.emplace_back(); }

static void emulated_wait_group(int left) {
    auto & copies = emulated.running->copies;
    while ((int) copies.size() - 1 > left) {
        for (const auto & copy : copies.front()) {
            memcpy(copy.first, copy.second, 16);
        }
        copies.erase(copies.begin());
    }
}

// body(), a call of a kernel, in every thread. Shared memory is poisoned before each block.
static void emulate(
        const std::function<void()> & body, dim3 grid, dim3 block, int shared = 0, void * /*stream*/ = nullptr) {
    const bool reversed = emulated_reversed();
    emulated.body       = body;
    blockDim            = block;
    gridDim             = grid;
    emulated.shared.reset(new uint8_t[shared + 1]);
    emulated.threads.resize(block.x * block.y);
    for (unsigned b = 0; b < grid.x * grid.y; ++b) {
        const unsigned at = reversed ? grid.x * grid.y - 1 - b : b;
        blockIdx = dim3(at % grid.x, at / grid.x);
        memset(emulated.shared.get(), 0xFF, shared);
        for (size_t i = 0; i < emulated.threads.size(); ++i) {
            emulated_thread & t = emulated.threads[i];
            t.index             = dim3(i % block.x, i / block.x);
            t.where             = emulated_thread::at::START;
            t.turn              = 0;
            t.copies.assign(1, {});
            if (!t.stack) {
                t.stack.reset(new char[1 << 16]);
            }
            getcontext(&t.context);
            t.context.uc_stack.ss_sp   = t.stack.get();
            t.context.uc_stack.ss_size = 1 << 16;
            t.context.uc_link          = nullptr;
            makecontext(&t.context, emulated_entry, 0);
        }
        emulated_run_block(reversed);
    }
}

static inline float emulated_bf16_value(uint32_t bits) {
    bits <<= 16;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// Of a whole warp.
static float __shfl_xor_sync(unsigned /*mask*/, float value, int lanes) {
    const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
    float * const  all    = emulated.exchanged[emulated.running->turn];
    emulated.running->turn ^= 1;
    all[thread] = value;
    emulated_wait(emulated_thread::at::WARP);
    return all[thread ^ lanes];
}

// c += a b by mma.m16n8k16, with the fragments as the PTX ISA lays them out over the lanes; value reads an element.
template <float (*value)(uint32_t)>
static void emulated_mma_of(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
    const unsigned lane   = thread % 32;
    auto *         warp   = emulated.fragments[emulated.running->turn] + thread - lane;
    emulated.running->turn ^= 1;
    memcpy(warp[lane].a, a, sizeof(a));
    memcpy(warp[lane].b, b, sizeof(b));
    emulated_wait(emulated_thread::at::WARP);
    for (int e = 0; e < 4; ++e) {
        const unsigned row = lane / 4 + (e >= 2 ? 8 : 0);
        const unsigned col = lane % 4 * 2 + (e & 1);
        float          sum = c[e];
        for (unsigned k = 0; k < 16; ++k) {
            // element (row, k) of A: register by the halves of row and k, lane by row and pair of k
            const uint32_t pair_a = warp[row % 8 * 4 + k % 8 / 2].a[(row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0)];
            const uint32_t pair_b = warp[col * 4 + k % 8 / 2].b[k >= 8 ? 1 : 0];
            const unsigned shift  = k % 2 * 16;
            sum += value(pair_a >> shift & 0xFFFF) * value(pair_b >> shift & 0xFFFF);
        }
        c[e] = sum;
    }
}

static void emulated_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emulated_mma_of<emulated_bf16_value>(c, a, b);
}

// -- the host's calls --

using cudaStream_t = void *;

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorMisalignedAddress };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };

static inline const char * cudaGetErrorString(cudaError_t status) { return status ? "error" : "success"; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

template <typename F> static inline cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int) { return cudaSuccess; }

static inline cudaError_t cudaGetDevice(int * device) {
    *device = 0;
    return cudaSuccess;
}

enum cudaDeviceAttr {
    cudaDevAttrL2CacheSize,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
};

// An sm_90 of so small an L2 that outputs of some tests fit and others do not, and of few multiprocessors, no divisor of
// much: the shares of a product begin and end within tiles.
static inline cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attribute, int) {
    static const int values[] = {1 << 16, 3, 9, 0, 227 * 1024};
    *value = values[attribute];
    return cudaSuccess;
}

static inline cudaError_t cudaMalloc(char ** p, size_t size) {
    *p = (char *) aligned_alloc(256, (size + 255) / 256 * 256);
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void * p) {
    free(p);
    return cudaSuccess;
}

static inline cudaError_t cudaMemset(void * p, int value, size_t size) {
    memset(p, value, size);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpy(void * to, const void * from, size_t size, cudaMemcpyKind) {
    memcpy(to, from, size);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpy2D(
        void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind) {
    for (size_t row = 0; row < height; ++row) {
        memcpy((char *) to + row * to_pitch, (const char *) from + row * from_pitch, width);
    }
    return cudaSuccess;
}
