// As much of CUDA as the kernels' proofs need, on one thread of the CPU: device memory is memory, a launch runs its
// blocks one after the other, the threads of a block as coroutines that hand over only at a barrier or at an mma. A
// thread runs as far ahead of the others as barriers allow, first the first threads, then, with EMULATOR_REVERSED, the
// last: an output that depends on which is a race. Copies are made as late as a kernel may rely on them and products of a
// warpgroup at once, or, reversed, copies at once and products as late: what is read before it is there, or overwritten
// while it is read, is an output too. The memory model and the machine's rounding of sums are not shown.

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
#include <iterator>
#include <map>
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
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline double2 make_double2(double x, double y) { return {x, y}; }

static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    const uint64_t bytes  = low | (uint64_t) high << 32;
    uint32_t       result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= (uint32_t) (bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    }
    return result;
}

static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned by) {
    return (uint32_t) ((low | (uint64_t) high << 32) >> by % 32);
}

static inline float __fdiv_rn(float x, float y) { return x / y; }

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
    enum class at { START, WARP, SPIN, BLOCK, END } where = at::START;
    ucontext_t              context;  // where it starts, once
    jmp_buf                 resumed;  // where it goes on, in the next block too: contexts are switched by system calls
    bool                    begun = false;
    dim3                    index;
    std::unique_ptr<char[]> stack;

    int turn;  // which of the two it writes to next

    // copies to shared memory that are under way, by group; the last group is not committed yet
    std::vector<std::vector<std::pair<void *, const void *>>> copies;

    // products of a warpgroup that are under way, the same
    std::vector<std::vector<std::function<void()>>> products;
};

struct emulated_block {
    std::vector<emulated_thread> threads;
    jmp_buf                      scheduler;
    emulated_thread *            running = nullptr;
    std::function<void()>        body;

    // of the mma or exchange that a warp is at, and of the one before, which other threads may still read
    struct { uint32_t a[4], b[2], scale_a, scale_b; } fragments[2][1024];
    float exchanged[2][1024];

    const void * rows[2][1024];  // the same of ldmatrix

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
    for (;;) {
        emulated.body();
        emulated_wait(emulated_thread::at::END);
    }
}

static inline void __syncthreads() { emulated_wait(emulated_thread::at::BLOCK); }

template <typename T> static inline T __ldg(const T * p) { return *p; }
template <typename T> static inline void __stcs(T * p, T value) { *p = value; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

static inline uint8_t * emulated_shared() { return emulated.shared.get(); }

static inline size_t __cvta_generic_to_shared(const void * p) { return (const uint8_t *) p - emulated_shared(); }

static inline float emulated_f16_value(uint32_t bits);

template <typename T> static inline T atomicAdd(T * p, T value) {
    const T before = *p;
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
    if (!t.begun) {
        t.begun = true;
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

// What changed so that a thread that waits may go on.
static long emulated_events = 0;

// Runs the threads first ... last until each waits or has ended; from a barrier of the block only if it is open, and
// from an instruction of the warp only if all of it is there.
static void emulated_run_warp(size_t first, size_t last, bool open, bool reversed) {
    using at = emulated_thread::at;
    bool whole = false;
    do {
        int at_warp = 0, gone = 0;
        for (size_t i = 0; i < last - first; ++i) {
            emulated_thread & t     = emulated.threads[reversed ? last - 1 - i : first + i];
            const bool        ready = t.where == at::START || t.where == at::SPIN || (t.where == at::BLOCK && open);
            if (t.where == at::WARP ? whole : ready && !whole) {
                emulated_events += t.where != at::SPIN;
                emulated_resume(t);
            }
        }
        for (size_t i = first; i < last; ++i) {
            at_warp += emulated.threads[i].where == at::WARP;
            gone    += emulated.threads[i].where == at::BLOCK || emulated.threads[i].where == at::END;
        }
        if (at_warp != 0 && gone != 0) {
            emulated_abort("an instruction of a warp without its whole warp");
        }
        whole = at_warp == 32;
    } while (whole);
}

static void emulated_run_block(bool reversed) {
    const size_t n = emulated.threads.size();
    for (;;) {
        size_t     ended = 0, at_barrier = 0;
        const long before = emulated_events;
        for (const emulated_thread & t : emulated.threads) {
            ended      += t.where == emulated_thread::at::END;
            at_barrier += t.where == emulated_thread::at::BLOCK;
        }
        if (ended == n) {
            return;
        }
        if (at_barrier != 0 && at_barrier != n && ended != 0) {
            emulated_abort("threads ended before a barrier of the block");
        }
        for (size_t w = 0; w < n; w += 32) {
            const size_t first = reversed ? (n - 1 - w) / 32 * 32 : w;
            emulated_run_warp(first, std::min(first + 32, n), at_barrier == n, reversed);
        }
        if (emulated_events == before) {
            emulated_abort("every thread waits for another");
        }
    }
}

static bool emulated_reversed() {
    static const bool reversed = getenv("EMULATOR_REVERSED") != nullptr;
    return reversed;
}

// Whether a run has the defect of that number, one of those that tests plant.
[[maybe_unused]] static bool emulated_defect(int number) {
    static const char * const wanted = getenv("EMULATOR_DEFECT");
    static const int          chosen = wanted != nullptr ? atoi(wanted) : -1;
    return number == chosen;
}

// Of device memory: where each piece begins and its bytes.
static std::map<const char *, size_t> emulated_allocations;

static void emulated_check_copy(const void * to, const void * from, size_t bytes) {
    if ((uintptr_t) to % 16 != 0 || (uintptr_t) from % 16 != 0 || bytes % 16 != 0) {
        emulated_abort("a copy that is not aligned");
    }
    const char * const begin = (const char *) from;
    const auto         after = emulated_allocations.upper_bound(begin);
    if (after == emulated_allocations.begin() || begin + bytes > std::prev(after)->first + std::prev(after)->second) {
        emulated_abort("a copy of what is in no device memory");
    }
}

// 16 bytes, as late as a kernel may rely on it, when their group is waited for; or, reversed, at once.
static void emulated_copy(void * to, const void * from) {
    emulated_check_copy(to, from, 16);
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

// -- barriers in shared memory --

struct emulated_barrier {
    int      count = 0, pending = 0, bytes = 0;
    uint32_t phases = 0;  // ended

    std::vector<std::function<void()>> copies;
};

static std::map<const uint64_t *, emulated_barrier> emulated_barriers;

// Whether a phase ended.
static bool emulated_settle(emulated_barrier & b) {
    if (b.pending != 0 || b.bytes != 0) {
        return false;
    }
    ++b.phases;
    b.pending = b.count;
    ++emulated_events;
    return true;
}

static void emulated_barrier_init(uint64_t * barrier, int count) {
    emulated_barrier b;
    b.count = b.pending = count;
    emulated_barriers[barrier] = b;
}

// Whom it was that waited comes first: he may overwrite at once what was released.
static void emulated_arrive(uint64_t * barrier, int bytes) {
    emulated_barrier & b = emulated_barriers.at(barrier);
    if (b.pending == 0) {
        emulated_abort("more arrive at a barrier than it counts");
    }
    b.bytes += bytes;
    --b.pending;
    ++emulated_events;
    if (emulated_settle(b)) {
        emulated_wait(emulated_thread::at::SPIN);
        ++emulated_events;
    }
}

// As late as a kernel may rely on it, when somebody asks whether it is there; or, reversed, at once.
static void emulated_bulk_copy(void * to, const void * from, int bytes, uint64_t * barrier) {
    emulated_check_copy(to, from, bytes);
    emulated_barrier & b = emulated_barriers.at(barrier);
    b.copies.push_back([&b, to, from, bytes] {
        memcpy(to, from, bytes);
        b.bytes -= bytes;
    });
    if (emulated_reversed()) {
        b.copies.back()();
        b.copies.pop_back();
        emulated_settle(b);
    }
}

// Arrives once what the thread copied is there, as late as above.
static void emulated_arrive_after_copies(uint64_t * barrier) {
    emulated_barrier & b      = emulated_barriers.at(barrier);
    const auto         copies = emulated.running->copies.back();
    emulated.running->copies.back().clear();
    b.copies.push_back([&b, copies] {
        for (const auto & copy : copies) {
            memcpy(copy.first, copy.second, 16);
        }
        if (b.pending-- == 0) {
            emulated_abort("more arrive at a barrier than it counts");
        }
    });
    if (emulated_reversed()) {
        b.copies.back()();
        b.copies.pop_back();
        emulated_settle(b);
    }
}

// Whether the phase of a parity has ended; hands over if not.
static uint32_t emulated_has_ended(uint64_t * barrier, uint32_t parity) {
    emulated_barrier & b = emulated_barriers.at(barrier);
    if (!b.copies.empty()) {
        for (const auto & copy : b.copies) {
            copy();
        }
        b.copies.clear();
        emulated_settle(b);
    }
    if (b.phases % 2 != parity) {
        ++emulated_events;
        return 1;
    }
    emulated_wait(emulated_thread::at::SPIN);
    return 0;
}

// Of so many threads.
static void emulated_meet(int threads) {
    static int  waiting = 0;
    static long meeting = 0;
    const long  mine    = meeting;
    if (++waiting == threads) {
        waiting = 0;
        ++meeting;
        ++emulated_events;
    }
    while (meeting == mine) {
        emulated_wait(emulated_thread::at::SPIN);
    }
    ++emulated_events;
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
            t.products.assign(1, {});
            if (!t.stack) {
                t.stack.reset(new char[1 << 16]);
                getcontext(&t.context);
                t.context.uc_stack.ss_sp   = t.stack.get();
                t.context.uc_stack.ss_size = 1 << 16;
                t.context.uc_link          = nullptr;
                makecontext(&t.context, emulated_entry, 0);
            }
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

// Each thread's value, once its whole warp has given them.
template <typename T> static const float * emulated_exchanged(T value) {
    static_assert(sizeof(T) == sizeof(float), "32 bits");
    float * const all = emulated.exchanged[emulated.running->turn];
    emulated.running->turn ^= 1;
    memcpy(all + threadIdx.x + threadIdx.y * blockDim.x, &value, sizeof(value));
    emulated_wait(emulated_thread::at::WARP);
    return all;
}

// The value of the thread `from`, of the same warp.
template <typename T> static T emulated_exchange(T value, unsigned from) {
    memcpy(&value, emulated_exchanged(value) + from, sizeof(value));
    return value;
}

static inline void __syncwarp() { emulated_exchanged(0.0f); }

static unsigned __ballot_sync(unsigned /*mask*/, bool yes) {
    const float * const all   = emulated_exchanged(yes ? 1.0f : 0.0f) + (threadIdx.x + threadIdx.y * blockDim.x) / 32 * 32;
    unsigned            lanes = 0;
    for (int i = 0; i < 32; ++i) {
        lanes |= (unsigned) (all[i] == 1.0f) << i;
    }
    return lanes;
}

static bool __all_sync(unsigned mask, bool yes) { return __ballot_sync(mask, yes) == 0xFFFFFFFF; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename T> static T __shfl_xor_sync(unsigned /*mask*/, T value, int lanes) {
    return emulated_exchange(value, (threadIdx.x + threadIdx.y * blockDim.x) ^ lanes);
}

template <typename T> static T __shfl_sync(unsigned /*mask*/, T value, int lane, int width = 32) {
    return emulated_exchange(value, (threadIdx.x + threadIdx.y * blockDim.x) / width * width + lane % width);
}

[[maybe_unused]] static uint32_t __ballot_sync(unsigned /*mask*/, int predicate) {
    const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
    uint32_t       bits   = (uint32_t) (predicate != 0) << thread % 32;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        bits |= __shfl_xor_sync(0xFFFFFFFF, bits, lanes);
    }
    return bits;
}

// Lanes that have none so far below keep their own.
template <typename T> static T __shfl_up_sync(unsigned /*mask*/, T value, unsigned lanes) {
    const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
    return emulated_exchange(value, thread % 32 < lanes ? thread : thread - lanes);
}

// Four matrices of 8 x 8, as the PTX ISA lays them out: lane i says where row i % 8 of matrix i / 8 is. Two rows of a
// matrix on the same banks would be right but slow, and an output does not show it: no kernel here is to have them.
static void emulated_ldmatrix(uint32_t (&r)[4], const void * row) {
    const unsigned      thread = threadIdx.x + threadIdx.y * blockDim.x;
    const unsigned      lane   = thread % 32;
    const void ** const rows   = emulated.rows[emulated.running->turn] + thread - lane;
    emulated.running->turn ^= 1;
    if ((uintptr_t) row % 16 != 0) {
        emulated_abort("a row of ldmatrix that is not aligned");
    }
    rows[lane] = row;
    emulated_wait(emulated_thread::at::WARP);
    for (unsigned i = lane / 8 * 8; i < lane; ++i) {
        if ((uintptr_t) rows[i] / 16 % 8 == (uintptr_t) row / 16 % 8 && rows[i] != row) {
            emulated_abort("two rows of ldmatrix on the same banks");
        }
    }
    for (unsigned i = 0; i < 4; ++i) {
        memcpy(&r[i], (const uint8_t *) rows[8 * i + lane / 4] + lane % 4 * 4, sizeof(r[i]));
    }
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

static inline float emulated_fp4_of(unsigned code, unsigned scale, unsigned size) {
    static const float magnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const float        value = code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
    if (scale == (size == 16 ? 127u : 255u)) {
        return NAN;
    }
    if (size == 32) {
        return std::ldexp(value, (int) scale - 127);
    }
    return std::ldexp(value * (scale < 8 ? scale : 8 + scale % 8), scale < 8 ? -9 : (int) (scale / 8) - 10);
}

// E2M1 under a scale for each `size` codes: UE4M3 for 16, UE8M0 for 32. Each code has its own sign, of zero too.
static inline float emulated_fp4_value(uint32_t word, uint32_t scales, unsigned k, unsigned size) {
    static const std::vector<float> values = [] {
        std::vector<float> all;
        for (unsigned i = 0; i < 2 * 256 * 16; ++i) {
            const unsigned scale = i / 16 % 256;
            all.push_back(i < 256 * 16 ? emulated_fp4_of(i % 16, scale & 127, 16) : emulated_fp4_of(i % 16, scale, 32));
        }
        return all;
    }();
    return values[(size == 32) * 4096 + (scales >> k / size * 8 & 255) * 16 + (word >> k % 8 * 4 & 15)];
}

// c += a b by a block-scaled mma.m16n8k64, fragments and who has which scale as the PTX ISA lays them out.
static void emulated_mma_fp4(
        float * c, const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t scale_a, uint32_t scale_b, unsigned size) {
    const unsigned thread = threadIdx.x + threadIdx.y * blockDim.x;
    const unsigned lane   = thread % 32;
    auto *         warp   = emulated.fragments[emulated.running->turn] + thread - lane;
    emulated.running->turn ^= 1;
    memcpy(warp[lane].a, a, sizeof(a));
    memcpy(warp[lane].b, b, sizeof(b));
    warp[lane].scale_a = scale_a;
    warp[lane].scale_b = scale_b;
    emulated_wait(emulated_thread::at::WARP);
    for (unsigned e = 0; e < 4; ++e) {
        const unsigned row = lane / 4 + e / 2 * 8;
        const unsigned col = lane % 4 * 2 + e % 2;
        for (unsigned k = 0; k < 64; ++k) {
            const unsigned from   = k / 8 % 4;
            const uint32_t word_a = warp[row % 8 * 4 + from].a[row / 8 + k / 32 * 2];
            const uint32_t word_b = warp[col * 4 + from].b[k / 32];
            c[e] += emulated_fp4_value(word_a, warp[row % 8 * 4 + row / 8].scale_a, k, size) *
                    emulated_fp4_value(word_b, warp[col * 4].scale_b, k, size);
        }
    }
}

// c += a b by a warp's part of wgmma.m64nNk16, a from registers; b says where its core matrices are.
template <int n> static void emulated_multiply(float (&c)[n][4], const uint32_t (&a)[4], uint64_t b) {
    const unsigned  thread = threadIdx.x + threadIdx.y * blockDim.x;
    const unsigned  lane   = thread % 32;
    auto *          warp   = emulated.fragments[emulated.running->turn] + thread - lane;
    const uint8_t * from   = emulated_shared() + ((b & 0x3FFF) << 4);
    const unsigned  along_k = (b >> 16 & 0x3FFF) << 4, along_n = (b >> 32 & 0x3FFF) << 4;
    emulated.running->turn ^= 1;
    memcpy(warp[lane].a, a, sizeof(a));
    emulated_wait(emulated_thread::at::WARP);
    for (int i = 0; i < n; ++i) {
        for (unsigned e = 0; e < 4; ++e) {
            const unsigned row = lane / 4 + (e >= 2 ? 8 : 0);
            const unsigned col = lane % 4 * 2 + (e & 1);
            float          sum = c[i][e];
            for (unsigned k = 0; k < 16; ++k) {
                const uint32_t pair_a = warp[row % 8 * 4 + k % 8 / 2].a[(row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0)];
                uint16_t       value_b;
                memcpy(&value_b, from + k / 8 * along_k + i * along_n + col * 16 + k % 8 * 2, sizeof(value_b));
                sum += emulated_f16_value(pair_a >> k % 2 * 16 & 0xFFFF) * emulated_f16_value(value_b);
            }
            c[i][e] = sum;
        }
    }
}

// At once; or, reversed, when its group is waited for: until then neither its registers nor what it reads may change.
template <int n> static void emulated_wgmma(float (&c)[n][4], const uint32_t (&a)[4], uint64_t b) {
    if (emulated_reversed()) {
        emulated.running->products.back().push_back([&c, &a, b] { emulated_multiply(c, a, b); });
    } else {
        emulated_multiply(c, a, b);
    }
}

static void emulated_commit_products() { emulated.running->products.emplace_back(); }

static void emulated_wait_products(int left) {
    auto & products = emulated.running->products;
    while ((int) products.size() - 1 > left) {
        for (const auto & product : products.front()) {
            product();
        }
        products.erase(products.begin());
    }
}

// -- the host's calls --

using cudaStream_t = void *;

static const cudaStream_t cudaStreamPerThread = nullptr;

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorMisalignedAddress };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };

static inline const char * cudaGetErrorString(cudaError_t status) { return status ? "error" : "success"; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

struct cudaFuncAttributes { size_t sharedSizeBytes; };

// As of a kernel that is compiled.
template <typename F> static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * attributes, F) {
    attributes->sharedSizeBytes = 1;
    return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };

struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct { int programmaticStreamSerializationAllowed; } val;
};

struct cudaLaunchConfig_t {
    dim3                  gridDim, blockDim;
    size_t                dynamicSmemBytes;
    cudaStream_t          stream;
    cudaLaunchAttribute * attrs;
    unsigned              numAttrs;
};

// The launches that were captured; only cudaLaunchKernelEx's are.
using cudaGraph_t     = std::vector<std::function<void()>> *;
using cudaGraphExec_t = cudaGraph_t;

static cudaGraph_t emulated_graph = nullptr;  // that is being captured

// After what was launched before, also where it may begin earlier.
template <typename... P, typename... A>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * config, void (*kernel)(P...), const A &... arguments) {
    const auto launch = [=, grid = config->gridDim, block = config->blockDim, shared = (int) config->dynamicSmemBytes] {
        emulate([&] { kernel(arguments...); }, grid, block, shared);
    };
    if (config->gridDim.x == 0) {
        return cudaErrorInvalidValue;
    }
    if (emulated_graph != nullptr) {
        emulated_graph->push_back(launch);
    } else {
        launch();
    }
    return cudaSuccess;
}

enum { cudaStreamNonBlocking, cudaStreamCaptureModeThreadLocal };

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, int) {
    *stream = nullptr;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

static inline cudaError_t cudaStreamBeginCapture(cudaStream_t, int) {
    emulated_graph = new std::vector<std::function<void()>>;
    return cudaSuccess;
}

static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t * graph) {
    *graph         = emulated_graph;
    emulated_graph = nullptr;
    return cudaSuccess;
}

static inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, void *, size_t * nodes) {
    *nodes = graph->size();
    return cudaSuccess;
}

static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t * executable, cudaGraph_t graph, int) {
    *executable = new std::vector<std::function<void()>>(*graph);
    return cudaSuccess;
}

static inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return cudaGraphDestroy(executable); }

static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    for (const auto & launch : *executable) {
        launch();
    }
    return cudaSuccess;
}

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
    emulated_allocations[*p] = size;
    return cudaSuccess;
}

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };

static bool emulated_capturing = false;

[[maybe_unused]] static cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus * status) {
    *status = emulated_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void * p) {
    emulated_allocations.erase((const char *) p);
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

static inline cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, size, kind);
}

static inline cudaError_t cudaMemcpy2D(
        void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind) {
    for (size_t row = 0; row < height; ++row) {
        memcpy((char *) to + row * to_pitch, (const char *) from + row * from_pitch, width);
    }
    return cudaSuccess;
}
