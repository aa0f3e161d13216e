// Packed copies of weights and who writes what, on the CPU: w4a16_copies.cuh with the real packing, emulated.
//
// w4a16_copies    exit status 0 if no copy is ever older than its weights

#include "w4a16_gemm/w4a16_copies.cuh"
#include "common/check.cuh"
#include "w4a16_gemm/w4a16_packed.cuh"

static constexpr int64_t M = 32, K = 512;
static constexpr auto    TYPE = w4a16_type::Q4_0;

static const size_t SIZE = M * K / 256 * W4A16_UNIT_BYTES;
static bool         no_memory = false;

void * w4a16_copies::pack(const w4a16_weights & weights, cudaStream_t stream) const {
    char * copy = nullptr;
    if (no_memory) {
        return nullptr;
    }
    CUDA_CHECK(cudaMalloc(&copy, (size_t) w4a16_packed_bytes(TYPE, weights.m, weights.k)));
    pack_again(weights, copy, stream);
    return copy;
}

void w4a16_copies::pack_again(const w4a16_weights & weights, void * copy, cudaStream_t stream) const {
    CUDA_CHECK(w4a16_pack_cuda(TYPE, weights.data, copy, weights.m, weights.k, stream));
}

// Two tensors, one after the other, as in a model's buffer.
struct buffer {
    char *       base = nullptr;
    w4a16_copies copies{0};

    buffer() {
        CUDA_CHECK(cudaMalloc(&base, 2 * SIZE));
        fill(0, 2 * SIZE, 1);
    }

    w4a16_weights at(int i) const { return {base + i * SIZE, 0, K, M, SIZE}; }

    void fill(size_t first, size_t size, int seed) const {
        for (size_t i = first; i < first + size; ++i) {
            base[i] = (char) (i % 18 == 1 ? 0x20 : 7 * i + 31 * seed);  // a scale's high byte: finite
        }
    }

    // As a product would find it: none, or what packing has now.
    bool none(int i) { return copies.get(at(i), nullptr) == nullptr; }

    bool current(int i) {
        const size_t size  = w4a16_packed_bytes(TYPE, M, K);
        char *       fresh = nullptr;
        CUDA_CHECK(cudaMalloc(&fresh, size));
        CUDA_CHECK(w4a16_pack_cuda(TYPE, at(i).data, fresh, M, K, nullptr));
        const void * copy  = copies.get(at(i), nullptr);
        const bool   equal = copy != nullptr && memcmp(copy, fresh, size) == 0;
        CUDA_CHECK(cudaFree(fresh));
        return equal;
    }
};

static int failures = 0;

static void must(bool passed, const char * what) {
    fprintf(stderr, "%s %s\n", passed ? "ok  " : "FAIL", what);
    failures += !passed;
}

static void host_writes() {
    buffer       b;
    const void * first = b.copies.get(b.at(0), nullptr);
    must(b.current(0) && b.current(1), "a copy is what packing gives");
    b.fill(100, 1, 2);
    must(!b.current(0), "without notice a copy is old: the comparison sees it");
    b.copies.written(b.base + 100, 1);
    must(b.current(0) && b.copies.get(b.at(0), nullptr) == first, "one byte written: packed again at its address");
    b.fill(SIZE - 1, 2, 3);
    b.copies.written(b.base + SIZE - 1, 2);
    must(b.current(0) && b.current(1), "the end of one and the beginning of the next: both packed again");
}

static void graph_writes() {
    const uint64_t before = w4a16_copies::generation;
    buffer         b;
    must(b.current(0) && b.current(1), "two copies");
    b.copies.will_write(b.base + SIZE - 18, 18);
    must(w4a16_copies::generation == before + 1, "captured graphs are out of date");
    b.fill(SIZE - 18, 18, 4);
    must(b.none(0) && b.current(1), "the last block of one written by a graph: it has no copy, the other one has");
    b.copies.will_write(b.base + SIZE - 18, 18);
    must(w4a16_copies::generation == before + 1, "the same graph again changes nothing");
    b.copies.written(b.base, SIZE);
    must(b.none(0), "nor does the host");
}

static void graph_writes_first() {
    buffer b;
    b.copies.will_write(b.base + SIZE, SIZE);
    must(b.current(0) && b.none(1), "written by a graph before its first product: it gets no copy");
}

static void no_copy() {
    buffer b;
    no_memory = true;
    must(b.none(0), "no memory: no copy");
    no_memory = false;
    must(b.none(0), "and it is not tried again");
    emulated_capturing = true;
    must(b.none(1), "no copy is made while a graph is captured");
    emulated_capturing = false;
    must(b.current(1), "but afterwards");
}

static void freed() {
    const uint64_t before = w4a16_copies::generation;
    { buffer b; }
    must(w4a16_copies::generation == before, "a buffer without copies is freed: graphs stay");
    { buffer b; b.current(0); }
    must(w4a16_copies::generation == before + 1, "one with copies is freed: captured graphs are out of date");
    { buffer b; b.copies.will_write(b.base, 1); }
    must(w4a16_copies::generation == before + 2, "one that graphs write is freed: they tell the next buffer there");
}

int main() {
    host_writes();
    graph_writes();
    graph_writes_first();
    no_copy();
    freed();
    return failures;
}
