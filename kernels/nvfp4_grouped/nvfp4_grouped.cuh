// Products of tokens with those of many NVFP4 matrices that they were routed to (MUL_MAT_ID), in one kernel that takes the
// 4-bit weights apart as it multiplies them: y = w[id] x on f16 tensor cores.
//
//   nvfp4_grouped_cuda<config>(args, blocks, stream)
//
//   config   a nvfp4_grouped_config: the tiles, and whether wgmma multiplies
//   args     pointers and sizes, as the struct below says; nothing of y, scratch and the others overlaps
//   blocks   thread blocks that share the tiles, any number from 1 on
//   stream   two or three launches, asynchronous, that allocate nothing and read ids on the device alone: they may be captured in a
//            graph, and replayed with other ids
//   returns  cudaErrorInvalidValue for a size, cudaErrorMisalignedAddress for a pointer or stride that is not as below, else
//            what the launches returned
//
// Limitations: sm_90 or newer, wgmma on sm_90a alone. k a multiple of 256, so that rows begin at 16 bytes.
//
// An id that is no expert's computes nothing: its row of y stays as it was. Two equal ids of a token are two products.
//
// Deterministic: an output is a sum in the order of k, whatever else is multiplied beside it.
//
// Accuracy. A weight is exact: E2M1 by UE4M3 has 6 significant bits at most, between 2^-10 and 2880, and f16 has all of these
// times 2^-7. As nvfp4_dequant and ggml's CPU have it, scale byte 0x7F counts as 0 and bit 7 of a scale is ignored.
// Activations are rounded to f16, a column (token) scaled by a power of two where it must be (w4a16_gemm.cuh). Sums are f32.
//
// Launches. Route: a block for each expert counts all ids and lists those of its own, in their order, at columns that begin at
// a multiple of 8; an expert's columns are cut into chunks of tile_n. Convert: a block for 8 columns writes them as f16. With few
// ids both are one launch, whose blocks each find their own columns. Then a block multiplies one tile after the other, a chunk
// by tile_m rows of its expert, while other warps of it copy what is next.
//
// A row of weights by 256 of k, a unit, is 144 bytes: 4 blocks of 4 scales and 32 bytes of codes. Lane 4 g + t takes block t
// of rows g and g + 8: its sub-block s is what the lane has of step s, 64 of k. The 8 codes of a word are the pairs of low
// nibbles of bytes 0 2 and 1 3, then of high ones: of each two pairs, a fragment of m16n8k16. Activations lie in that order:
//
//   x16[k/64][columns/8][4 fragments][2 halves][8 columns][16 bytes]     fragment 2 word + high, half: pair 0 2 or 1 3
//
// where a row of 16 bytes has, for t = 0 ... 3, weights 64 t + 16 s + 4 word + 8 high + half + {0, 2} of the unit. It is a row
// of a core matrix of wgmma, and what mma.sync's lanes load side by side.
//
// References: PTX ISA, wgmma, matrix descriptors without swizzle; OCP Microscaling Formats (E2M1), OCP 8-bit Floating Point.

#pragma once

#include "w4a16_wgmma.cuh"

struct nvfp4_grouped_args {
    const void *    w;        // for each expert m rows of k weights in ggml's blocks, rows contiguous; 16-byte aligned
    const int32_t * ids;      // experts of a token, contiguous
    const float *   x;        // k f32, contiguous; 16-byte aligned
    float *         y;        // y[(token*used + slot)*m + row]
    void *          scratch;  // nvfp4_grouped_scratch_bytes<config>(args) bytes, written and read; 256-byte aligned
    int64_t         experts, tokens, used, m, k;
    int64_t         w_expert;         // bytes from one expert to the next, a multiple of 16
    int64_t         ids_token;        // ids from one token to the next
    int64_t         slots;            // of a token in x: slot s of its experts reads slot s % slots
    int64_t         x_token, x_slot;  // f32 from one to the next, multiples of 4
};

static constexpr int NVFP4_GROUPED_MAX_EXPERTS = 4096;  // whose counts are in shared memory
static constexpr int NVFP4_GROUPED_ROUTERS     = 1024;  // threads
static constexpr int NVFP4_GROUPED_FEW         = 1024;  // ids, up to which blocks that convert find their own columns
static constexpr int NVFP4_GROUPED_GROUP_BYTES = 1024;  // 64 of k by 8 columns

// Tiles of tile_m x tile_n by so many times four warps, side by side along m, of mma.sync or wgmma. Units of weights go through
// w_stages, x_step of k of activations through x_stages of shared memory; blocks of them fit a multiprocessor.
template <int tile_m, int tile_n, int groups, int w_stages, int x_step, int x_stages, int blocks, bool wgmma>
struct nvfp4_grouped_config {
    static constexpr int  TILE_M   = tile_m;
    static constexpr int  TILE_N   = tile_n;
    static constexpr int  WARPS    = 4 * groups;
    static constexpr int  WARP_M   = tile_m / WARPS;
    static constexpr int  MT       = WARP_M / 16;  // fragments of a warp
    static constexpr int  NT       = tile_n / 8;
    static constexpr int  THREADS  = W4A16_WARP * WARPS;
    static constexpr int  ALL      = THREADS + 4 * W4A16_WARP;
    static constexpr int  COPIERS  = 72;  // of weights, in three warps: eight rows at once. A thread of one more copies activations
    static constexpr int  FEW      = tile_n > 64 ? 0 : NVFP4_GROUPED_FEW;  // wide tiles are for many ids
    static constexpr int  W_STAGES = w_stages;
    static constexpr int  X_STAGES = x_stages;
    static constexpr int  X_STEP   = x_step;
    static constexpr int  BLOCKS   = blocks;
    static constexpr bool WGMMA    = wgmma;

    static constexpr int W_BYTES = tile_m * W4A16_UNIT_BYTES;  // of a stage
    static constexpr int X_BYTES = tile_n * x_step * (int) sizeof(__half);
    static constexpr int SHARED  = w_stages * W_BYTES + x_stages * X_BYTES;

    // Those that copy keep 56, the others share the rest. 0: none are given.
    static constexpr int KEPT_REGISTERS = 56;
    static constexpr int REGISTERS =
        wgmma && blocks == 1 ? (65536 / ALL / 8 * 8 * ALL - KEPT_REGISTERS * 4 * W4A16_WARP) / THREADS / 8 * 8 : 0;

    static_assert(MT * 16 * WARPS == tile_m, "the warps must cover the rows");
    static_assert(tile_n % 16 == 0 && tile_n <= 256, "wgmma takes no other widths");
    static_assert(COPIERS % 9 == 0 && W_BYTES / 16 % COPIERS == 0, "the threads must cover the weights");
    static_assert(W4A16_UNIT % x_step == 0 && x_step % W4A16_STEP == 0, "steps must cover a unit");
    static_assert(x_stages > 1, "a stage is given back once the next one is multiplied");
    static_assert(REGISTERS <= 255, "no thread has more");
};

// What the launches share.
struct nvfp4_grouped_problem {
    const uint8_t * w;
    uint8_t *       x16;
    float *         undo;    // of a column, and 2^7 for its weights
    int32_t *       of;      // of a column: token*used + slot, or -1 for none
    uint4 *         chunks;  // expert, first column, columns
    int32_t *       chunks_used;
    float *         y;
    int64_t         w_expert;
    int64_t         groups;  // of 8 columns, at most
    int             m, units, tiles_m;
};

struct nvfp4_grouped_activations {
    const float * x;
    int           used, slots;
    int64_t       token, slot;  // f32 from one to the next
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// -- route --

static __device__ __forceinline__ int nvfp4_grouped_sum(int of_lane) {
#pragma unroll
    for (int i = W4A16_WARP / 2; i > 0; i /= 2) {
        of_lane += __shfl_xor_sync(0xFFFFFFFF, of_lane, i);
    }
    return of_lane;
}

// One block an expert. A warp has a part of the ids, 32 of them after the other, so that their order stays.
template <int tile_n>
static __global__ void __launch_bounds__(NVFP4_GROUPED_ROUTERS)
nvfp4_grouped_route(const nvfp4_grouped_problem p, const int32_t * __restrict__ ids, const int64_t ids_token, const int used,
                    const int n) {
    extern __shared__ __align__(16) uint8_t nvfp4_grouped_counts[];
    constexpr int  WARPS = NVFP4_GROUPED_ROUTERS / W4A16_WARP;
    constexpr int  AHEAD = 8;  // reads that wait for the memory together
    __shared__ int of_warps[WARPS];
    __shared__ int groups_before, chunks_before, groups;

    int * const counts  = (int *) nvfp4_grouped_counts;
    const int   experts = gridDim.x;
    const int   expert  = blockIdx.x;
    const int   warp    = threadIdx.x / W4A16_WARP;
    const int   lane    = threadIdx.x % W4A16_WARP;
    const int   share   = (n + NVFP4_GROUPED_ROUTERS - 1) / NVFP4_GROUPED_ROUTERS * W4A16_WARP;
    const int   begin   = min(warp * share, n);
    const int   end     = min(begin + share, n);
    const int   tokens  = W4A16_WARP / used, slots = W4A16_WARP % used;  // from a lane's id to its next

    // all lanes come along, some with id -1
    const auto for_each_id = [&](const auto work) {
        int token = (begin + lane) / used, slot = (begin + lane) % used;
        for (int first = begin; first < end; first += AHEAD * W4A16_WARP) {
            int id[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int at = first + i * W4A16_WARP + lane;
                id[i] = at < end ? ids[token * ids_token + slot] : -1;
                token += tokens, slot += slots;
                if (slot >= used) {
                    ++token, slot -= used;
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                work(id[i], first + i * W4A16_WARP + lane);
            }
        }
    };

    w4a16_wait_for_the_other();
    w4a16_others_may_begin();
    for (int e = threadIdx.x; e < experts; e += NVFP4_GROUPED_ROUTERS) {
        counts[e] = 0;
    }
    __syncthreads();
    int mine = 0;
    for_each_id([&](const int id, int) {
        if (id >= 0 && id < experts) {
            atomicAdd(counts + id, 1);
        }
        mine += __popc(__ballot_sync(0xFFFFFFFF, id == expert));
    });
    if (lane == 0) {
        of_warps[warp] = mine;
    }
    __syncthreads();

    // the first warp adds up what the experts before have, and all of them
    if (warp == 0) {
        int before = 0, chunks = 0;
        for (int e = lane; e < expert; e += W4A16_WARP) {
            before += (counts[e] + 7) / 8;
            chunks += (counts[e] + tile_n - 1) / tile_n;
        }
        before = nvfp4_grouped_sum(before);
        chunks = nvfp4_grouped_sum(chunks);
        if (lane == 0) {
            groups_before = before;
            chunks_before = chunks;
            groups        = before + (counts[expert] + 7) / 8;
            if (expert == experts - 1) {
                *p.chunks_used = chunks + (counts[expert] + tile_n - 1) / tile_n;
            }
        }
    }
    __syncthreads();

    const int count = counts[expert];
    const int first = groups_before * 8;
    int       at    = first;
    for (int w = 0; w < warp; ++w) {
        at += of_warps[w];
    }
    for_each_id([&](const int id, const int i) {
        const uint32_t lanes = __ballot_sync(0xFFFFFFFF, id == expert);
        if (id == expert) {
            p.of[at + __popc(lanes & ((1u << lane) - 1))] = i;
        }
        at += __popc(lanes);
    });
    // the last expert's block: also the groups of no expert
    const int64_t until = (expert == experts - 1 ? p.groups : groups) * 8;
    for (int64_t i = first + count + threadIdx.x; i < until; i += NVFP4_GROUPED_ROUTERS) {
        p.of[i] = -1;
    }
    for (int i = threadIdx.x; i * tile_n < count; i += NVFP4_GROUPED_ROUTERS) {
        p.chunks[chunks_before + i] = make_uint4(expert, first + i * tile_n, min(tile_n, count - i * tile_n), 0);
    }
}

// -- convert --

// The 8 columns of a block of threads (32, warps): lane 8 q + c has column c's 16 of each of 4 blocks, of which q says word and
// nibble. of: column c's. Together: steps whose reads wait for the memory at once.
template <int warps, int together>
static __device__ __forceinline__ void nvfp4_grouped_convert(const nvfp4_grouped_problem & p, const nvfp4_grouped_activations & a,
                                                             const int of) {
    __shared__ float of_warps[warps][8];

    const int     col  = threadIdx.x % 8;
    const int     word = threadIdx.x / 8 % 2;
    const int     high = threadIdx.x / 16;
    const float * from = a.x + of / a.used * a.token + of % a.used % a.slots * a.slot + 4 * word + 8 * high;
    uint8_t *     to   = p.x16 + (int64_t) blockIdx.x * NVFP4_GROUPED_GROUP_BYTES + (2 * word + high) * 256 + col * 16;

    const int     steps = p.units * W4A16_STEPS;

    const auto convert = [&](const float scale) {
        float largest = 0.0f;
        for (int first = threadIdx.y; first < steps; first += together * warps) {
            float4 read[together][4];
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const int step = first + i * warps;
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const float * at = from + step / W4A16_STEPS * W4A16_UNIT + step % W4A16_STEPS * 16 + 64 * t;
                    read[i][t] = of < 0 || step >= steps ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *(const float4 *) at;
                    largest    = fmaxf(largest, w4a16_largest(read[i][t]));
                }
            }
#pragma unroll
            for (int i = 0; i < together; ++i) {
                const int step = first + i * warps;
                if (step < steps) {
                    const float4(&v)[4] = read[i];
                    uint8_t * there = to + step * p.groups * NVFP4_GROUPED_GROUP_BYTES;
                    *(uint4 *) there = make_uint4(w4a16_pair(v[0].x, v[0].z, scale), w4a16_pair(v[1].x, v[1].z, scale),
                                                  w4a16_pair(v[2].x, v[2].z, scale), w4a16_pair(v[3].x, v[3].z, scale));
                    *(uint4 *) (there + 128) = make_uint4(w4a16_pair(v[0].y, v[0].w, scale), w4a16_pair(v[1].y, v[1].w, scale),
                                                          w4a16_pair(v[2].y, v[2].w, scale), w4a16_pair(v[3].y, v[3].w, scale));
                }
            }
        }
        return largest;
    };
    // as they are first, which is enough for most
    float largest = convert(1.0f);
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 8));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 16));
    if (threadIdx.x < 8) {
        of_warps[threadIdx.y][col] = largest;
    }
    __syncthreads();
    for (int w = 0; w < warps; ++w) {
        largest = fmaxf(largest, of_warps[w][col]);
    }
    const uint32_t taken_as = w4a16_taken_as(largest);
    if (threadIdx.y == 0 && threadIdx.x < 8) {
        p.undo[(int64_t) blockIdx.x * 8 + col] = 128.0f * w4a16_undo(taken_as);
    }
    if (w4a16_scale(taken_as) != 1.0f) {
        convert(w4a16_scale(taken_as));
    }
}

// Blocks of 8 columns, threads (32, warps).
template <int warps, int together>
static __global__ void __launch_bounds__(W4A16_WARP * warps)
nvfp4_grouped_to_f16(const nvfp4_grouped_problem p, const nvfp4_grouped_activations a) {
    // in this order: the product copies weights once it may begin, of the tiles that the route wrote
    w4a16_wait_for_the_other();
    w4a16_others_may_begin();
    const int of = p.of[(int64_t) blockIdx.x * 8 + threadIdx.x % 8];
    if (!__all_sync(0xFFFFFFFF, of < 0)) {  // each warp has all columns
        nvfp4_grouped_convert<warps, together>(p, a, of);
    }
}

// -- both at once --

// The expert that group blockIdx.x of columns belongs to, or -1 for none, and what those before it have.
struct nvfp4_grouped_owner {
    int expert, groups, chunks;
};

// One warp, from how many columns the experts have: a lane has experts side by side.
template <int tile_n>
static __device__ __forceinline__ void nvfp4_grouped_find(nvfp4_grouped_owner & owner, int32_t * all_chunks, const int * counts,
                                                          const int experts) {
    const int  lane  = threadIdx.x;
    const int  each  = (experts + W4A16_WARP - 1) / W4A16_WARP;
    const int  first = min(lane * each, experts);
    const int  last  = min(first + each, experts);
    int        groups = 0, chunks = 0;
    const auto add = [&](const int e) {
        groups += (counts[e] + 7) / 8;
        chunks += (counts[e] + (tile_n - 1)) / tile_n;
    };
    for (int e = first; e < last; ++e) {
        add(e);
    }
    const int own_groups = groups, own_chunks = chunks;
#pragma unroll
    for (int i = 1; i < W4A16_WARP; i *= 2) {
        const int from = max(lane - i, 0);
        const int g = __shfl_sync(0xFFFFFFFF, groups, from), c = __shfl_sync(0xFFFFFFFF, chunks, from);
        groups += lane < i ? 0 : g;
        chunks += lane < i ? 0 : c;
    }
    if (lane == W4A16_WARP - 1) {
        *all_chunks = chunks;
    }
    const int until = groups, group = blockIdx.x;
    groups -= own_groups;
    chunks -= own_chunks;
    if (group >= groups && group < until) {
        int e = first;
        for (; group >= groups + (counts[e] + 7) / 8; ++e) {
            add(e);
        }
        owner = {e, groups, chunks};
    }
}

// As the two above with at most NVFP4_GROUPED_FEW ids. A warp has ids side by side, so that their order stays.
template <int tile_n, int warps>
static __global__ void __launch_bounds__(W4A16_WARP * warps)
nvfp4_grouped_few(const nvfp4_grouped_problem p, const int32_t * __restrict__ ids, const int64_t ids_token, const int n,
                  const int experts, const nvfp4_grouped_activations a) {
    extern __shared__ __align__(16) uint8_t nvfp4_grouped_counts[];
    constexpr int THREADS = W4A16_WARP * warps;
    constexpr int EACH    = NVFP4_GROUPED_FEW / THREADS;
    static_assert(EACH * THREADS == NVFP4_GROUPED_FEW, "the threads must cover the ids");
    __shared__ int                 of_warps[warps], of_columns[8], all_chunks;
    __shared__ nvfp4_grouped_owner owner;

    int * const counts = (int *) nvfp4_grouped_counts;
    const int   lane   = threadIdx.x;
    const int   warp   = threadIdx.y;
    const int   tid    = warp * W4A16_WARP + lane;
    const auto  at     = [&](const int i) { return (warp * EACH + i) * W4A16_WARP + lane; };
    for (int e = tid; e < experts; e += THREADS) {
        counts[e] = 0;
    }
    if (tid < 8) {
        of_columns[tid] = -1;
    }
    if (tid == 0) {
        owner.expert = -1;
    }
    w4a16_wait_for_the_other();
    int id[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        id[i] = at(i) < n ? ids[at(i) / a.used * ids_token + at(i) % a.used] : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (id[i] >= 0 && id[i] < experts) {
            atomicAdd(counts + id[i], 1);
        }
    }
    __syncthreads();
    if (warp == 0) {
        nvfp4_grouped_find<tile_n>(owner, &all_chunks, counts, experts);
    }
    __syncthreads();

    if (blockIdx.x == 0 && tid == 0) {
        *p.chunks_used = all_chunks;
    }
    const int group = (int) blockIdx.x - owner.groups;  // of the expert's
    if (owner.expert >= 0 && group == 0) {
        const int count = counts[owner.expert];
        for (int i = tid; i * tile_n < count; i += THREADS) {
            p.chunks[owner.chunks + i] =
                make_uint4(owner.expert, owner.groups * 8 + i * tile_n, min(tile_n, count - i * tile_n), 0);
        }
    }
    // the product copies weights once it may begin, and the first thread that lets it does so for its block
    __threadfence();
    __syncthreads();
    w4a16_others_may_begin();
    if (owner.expert < 0) {
        return;
    }
    int mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        mine += __popc(__ballot_sync(0xFFFFFFFF, id[i] == owner.expert));
    }
    if (lane == 0) {
        of_warps[warp] = mine;
    }
    __syncthreads();
    int col = -8 * group;
    for (int w = 0; w < warp; ++w) {
        col += of_warps[w];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const uint32_t lanes = __ballot_sync(0xFFFFFFFF, id[i] == owner.expert);
        const int      to    = col + __popc(lanes & ((1u << lane) - 1));
        if (id[i] == owner.expert && to >= 0 && to < 8) {
            of_columns[to] = at(i);
        }
        col += __popc(lanes);
    }
    __syncthreads();
    const int of = of_columns[lane % 8];
    if (tid < 8) {
        p.of[(int64_t) blockIdx.x * 8 + tid] = of;
    }
    nvfp4_grouped_convert<warps, 1>(p, a, of);
}

// -- tiles --

struct nvfp4_grouped_tile {
    int expert, row0, first, columns;
};

// Those that a block has, one after the other: the tiles of a chunk side by side in time, as they read the same activations.
template <typename C, typename work_t>
static __device__ __forceinline__ void nvfp4_grouped_for_each_tile(const nvfp4_grouped_problem & p, const work_t work) {
    const int tiles = __ldcg(p.chunks_used) * p.tiles_m;
    const auto chunk_of = [&](const int i) { return __ldcg(p.chunks + min(i, tiles - 1) / p.tiles_m); };
    if ((int) blockIdx.x >= tiles) {
        return;
    }
    uint4 next = chunk_of(blockIdx.x);
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const uint4 chunk = next;
        next = chunk_of(i + gridDim.x);  // before it is needed, as the memory takes its time
        work(nvfp4_grouped_tile{(int) chunk.x, i % p.tiles_m * C::TILE_M, (int) chunk.y, (int) chunk.z});
    }
}

// -- the threads that copy --

// 16 bytes to shared memory, and to L2 what is beside them: the next units of the row.
static __device__ __forceinline__ void nvfp4_grouped_copy(void * to, const void * from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" : : "r"(w4a16_shared(to)), "l"(from) : "memory");
}

// Pieces of 16 bytes, nine a row: a thread has the same one of each eighth row. Rows beyond the matrix are copied as another.
template <typename C>
static __device__ __forceinline__ void nvfp4_grouped_copy_weights(
        const nvfp4_grouped_problem & p, uint8_t * ws, w4a16_stages<C> & stages, const int tid) {
    constexpr int           ROWS  = C::COPIERS / 9;
    const int64_t           pitch = p.units * W4A16_UNIT_BYTES, eighth = ROWS * pitch;
    w4a16_ring<C::W_STAGES> w;
    nvfp4_grouped_for_each_tile<C>(p, [&](const nvfp4_grouped_tile & tile) {
        const int       row  = min(tile.row0 + tid / 9, p.m - 1);
        const int       last = p.m - 1 - row;
        const uint8_t * from = p.w + tile.expert * p.w_expert + row * pitch + tid % 9 * 16;
        for (int unit = 0; unit < p.units; ++unit) {
            w4a16_wait_for(stages.w_free + w.stage, w.parity ^ 1);
            uint8_t * const to = ws + w.stage * C::W_BYTES + tid * 16;
            const uint8_t * at = from;
#pragma unroll
            for (int i = 0; i < C::TILE_M; i += ROWS) {
                nvfp4_grouped_copy(to + i * W4A16_UNIT_BYTES, at);
                at += i + ROWS <= last ? eighth : 0;
            }
            w4a16_arrive_after_copies(stages.w_full + w.stage);
            w.next();
            from += W4A16_UNIT_BYTES;
        }
    });
}

// Only the groups of columns that are there: what else is in a stage meets columns that are not written.
template <typename C>
static __device__ __forceinline__ void nvfp4_grouped_copy_activations(
        const nvfp4_grouped_problem & p, uint8_t * xs, w4a16_stages<C> & stages) {
    const int64_t           stride = p.groups * NVFP4_GROUPED_GROUP_BYTES;
    w4a16_ring<C::X_STAGES> x;
    w4a16_wait_for_the_other();
    nvfp4_grouped_for_each_tile<C>(p, [&](const nvfp4_grouped_tile & tile) {
        const uint8_t * from  = p.x16 + (int64_t) (tile.first / 8) * NVFP4_GROUPED_GROUP_BYTES;
        const int       bytes = (tile.columns + 7) / 8 * NVFP4_GROUPED_GROUP_BYTES;
        for (int step = 0; step < p.units * (W4A16_UNIT / C::X_STEP); ++step) {
            w4a16_wait_for(stages.x_free + x.stage, x.parity ^ 1);
            w4a16_expect(stages.x_full + x.stage, C::X_STEP / W4A16_STEP * bytes);
#pragma unroll
            for (int i = 0; i < C::X_STEP / W4A16_STEP; ++i) {
                uint8_t * to = xs + x.stage * C::X_BYTES + i * (C::TILE_N / 8 * NVFP4_GROUPED_GROUP_BYTES);
                w4a16_bulk_copy(to, from, bytes, stages.x_full + x.stage);
                from += stride;
            }
            x.next();
        }
    });
}

// -- dequantisation --

// The four scales of a block times 2^7, UE4M3's 7 bits being an f16 that is 2^8 too small.
static __device__ __forceinline__ void nvfp4_grouped_scales(__half2 (&scales)[2], const uint32_t d) {
    // bit 7 of a byte of `other`: it is not 0x7F
    const uint32_t differs = d ^ 0x7F7F7F7F;
    const uint32_t other   = ((differs & 0x7F7F7F7F) + 0x7F7F7F7F) | differs;
    const uint32_t bits    = d & (((other & 0x80808080) >> 7) * 0x7F);
    const __half2  two_15  = w4a16_as_half2(0x78007800);
    scales[0] = __hmul2(w4a16_as_half2(__byte_perm(bits, 0, 0x4140) << 7), two_15);
    scales[1] = __hmul2(w4a16_as_half2(__byte_perm(bits, 0, 0x4342) << 7), two_15);
}

// Two weights times 2^-7: a code's lowest three bits at the foot of the exponent are an f16 that is 2^14 too small.
template <int shift> static __device__ __forceinline__ uint32_t nvfp4_grouped_pair(const uint32_t q, const __half2 scale) {
    const uint32_t at = q << shift;
    return w4a16_as_u32(__hmul2(w4a16_as_half2((at & 0x80008000) | (at >> 3 & 0x0E000E00)), scale));
}

// -- the warps that multiply --

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

static constexpr bool NVFP4_GROUPED_HAS_WGMMA = true;

// Core matrices without swizzle: 128 bytes from one to the next along k, a group along the columns.
static __device__ __forceinline__ uint64_t nvfp4_grouped_descriptor(const void * shared) {
    return (uint64_t) ((w4a16_shared(shared) & 0x3FFFF) >> 4) | (uint64_t) (128 >> 4) << 16 |
           (uint64_t) (NVFP4_GROUPED_GROUP_BYTES >> 4) << 32;
}

// Columns from `at` on, up to width, by the widest instructions.
template <int width, int at, int nt>
static __device__ __forceinline__ void nvfp4_grouped_wgmma(float (&c)[nt][4], const uint32_t (&a)[4], const uint64_t b) {
    constexpr int left = width - at;
    constexpr int wide = left >= 256 ? 256 : left >= 128 ? 128 : left >= 64 ? 64 : left >= 32 ? 32 : left >= 16 ? 16 : 8;
    w4a16_wgmma(reinterpret_cast<float (&)[wide / 8][4]>(c[at / 8]), a, b + at / 8 * (NVFP4_GROUPED_GROUP_BYTES >> 4));
    if constexpr (left > wide) {
        nvfp4_grouped_wgmma<width, at + wide>(c, a, b);
    }
}

#else

// for names alone: a configuration that calls them is not compiled
static constexpr bool NVFP4_GROUPED_HAS_WGMMA = false;

static __device__ __forceinline__ uint64_t nvfp4_grouped_descriptor(const void *) { return 0; }
template <int width, int at, int nt>
static __device__ __forceinline__ void nvfp4_grouped_wgmma(float (&)[nt][4], const uint32_t (&)[4], uint64_t) {}
static __device__ __forceinline__ void w4a16_wgmma_fence() {}
static __device__ __forceinline__ void w4a16_wgmma_commit() {}
template <int groups> static __device__ __forceinline__ void w4a16_wgmma_wait() {}

#endif // !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The sums of a warp's part of a tile.
template <typename C> class nvfp4_grouped_sums {
  public:
    __device__ __forceinline__ nvfp4_grouped_sums(const nvfp4_grouped_problem & p, const uint8_t * ws, const uint8_t * xs,
                                                  w4a16_stages<C> & stages, w4a16_ring<C::W_STAGES> & w,
                                                  w4a16_ring<C::X_STAGES> & x, const nvfp4_grouped_tile & tile)
        : p_(p), xs_(xs), stages_(stages), w_(w), x_(x), tile_(tile), x_done_(x.stage),
          ws_(ws + (threadIdx.y * C::WARP_M + threadIdx.x / 4) * W4A16_UNIT_BYTES + threadIdx.x % 4 * 36) {}

    // width: what is multiplied of the columns, as many as there are or more.
    template <int width> __device__ __forceinline__ void multiply() {
        clear<width>();
        if (EARLY) {
            read_columns();
        }
        load_unit();
        take_apart<0>();
        load_codes(1);
        for (int unit = 0; unit < p_.units; ++unit) {
            const bool more = unit + 1 < p_.units;
            step<width, 0>(unit > 0, true);
            step<width, 1>(true, true);
            step<width, 2>(true, more);
            step<width, 3>(true, more);
        }
        if (C::WGMMA) {
            w4a16_wgmma_wait<0>();
        }
        release_activations();
        if (!EARLY) {
            read_columns();
        }
        write<width>();
    }

  private:
    // What belongs to every 32nd column: the lanes ask each other for the rest.
    __device__ __forceinline__ void read_columns() {
#pragma unroll
        for (int i = 0; i < READ; ++i) {
            const int  col   = i * W4A16_WARP + threadIdx.x;
            const bool there = col < tile_.columns;
            of_[i]   = there ? p_.of[tile_.first + col] : -1;
            undo_[i] = there ? p_.undo[tile_.first + col] : 0.0f;
        }
    }

    // To y, what is there of it.
    template <int width> __device__ __forceinline__ void write() const {
        const int row = tile_.row0 + threadIdx.y * C::WARP_M + threadIdx.x / 4;
#pragma unroll
        for (int nt = 0; nt < width / 8; ++nt) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int   lane = nt % 4 * 8 + threadIdx.x % 4 * 2 + e;
                const int   to   = __shfl_sync(0xFFFFFFFF, of_[nt / 4], lane);
                const float by   = __shfl_sync(0xFFFFFFFF, undo_[nt / 4], lane);
                float *     y    = p_.y + (int64_t) to * p_.m;
#pragma unroll
                for (int r = 0; r < 2 * C::MT; ++r) {
                    if (to >= 0 && row + 8 * r < p_.m) {
                        y[row + 8 * r] = by * acc_[r / 2][nt][e + r % 2 * 2];
                    }
                }
            }
        }
    }

    template <int width> __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < C::MT * width / 2; ++i) {
            acc_[i / (width / 2)][i / 4 % (width / 8)][i % 4] = 0.0f;
        }
    }

    // The beginning of a unit that is there, or is waited for.
    __device__ __forceinline__ void load_unit() {
        w4a16_wait_for(stages_.w_full + w_.stage, w_.parity);
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            nvfp4_grouped_scales(scales_[r], *(const uint32_t *) row(r));
        }
        load_codes(0);
    }

    // Those of a step of 64 of k.
    __device__ __forceinline__ void load_codes(const int s) {
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            codes_[r][0] = *(const uint32_t *) (row(r) + 4 + 8 * s);
            codes_[r][1] = *(const uint32_t *) (row(r) + 8 + 8 * s);
        }
    }

    __device__ __forceinline__ const uint8_t * row(const int r) const {
        return ws_ + w_.stage * C::W_BYTES + 8 * r * W4A16_UNIT_BYTES;
    }

    template <int s> __device__ __forceinline__ void take_apart() {
#pragma unroll
        for (int r = 0; r < 2 * C::MT; ++r) {
            const __half2 scale = s % 2 ? __high2half2(scales_[r][s / 2]) : __low2half2(scales_[r][s / 2]);
#pragma unroll
            for (int word = 0; word < 2; ++word) {
                uint32_t(&low)[4]  = a_[s % 2][r / 2][2 * word];
                uint32_t(&high)[4] = a_[s % 2][r / 2][2 * word + 1];
                low[r % 2]      = nvfp4_grouped_pair<12>(codes_[r][word], scale);
                low[r % 2 + 2]  = nvfp4_grouped_pair<4>(codes_[r][word], scale);
                high[r % 2]     = nvfp4_grouped_pair<8>(codes_[r][word], scale);
                high[r % 2 + 2] = nvfp4_grouped_pair<0>(codes_[r][word], scale);
            }
        }
    }

    // 64 of k are multiplied while the next 64 are taken apart, in the order that ptxas does not serialise
    // (w4a16_packed_wgmma.cuh). More: there is a next unit.
    template <int width, int s> __device__ __forceinline__ void step(const bool before, const bool more) {
        constexpr int STEPS = C::X_STEP / W4A16_STEP;  // of a stage of activations

        if (s % STEPS == 0) {
            w4a16_wait_for(stages_.x_full + x_.stage, x_.parity);
        }
        const uint8_t * x = xs_ + x_.stage * C::X_BYTES + s % STEPS * (C::TILE_N / 8 * NVFP4_GROUPED_GROUP_BYTES);
        if constexpr (C::WGMMA) {
            by_wgmma<width, s>(x);
        } else {
            by_mma<s>(x);
        }
        if (s % STEPS == STEPS - 1) {
            x_.next();
        }
        if (C::WGMMA) {
            w4a16_wgmma_wait<1>();
        }
        if (s % STEPS == 0 && before) {
            release_activations();
        }
        take_apart<(s + 1) % 4>();
        if (s < 2) {
            load_codes(s + 2);
        } else if (s == 2) {
            w4a16_release(stages_.w_free + w_.stage);
            w_.next();
            if (more) {
                load_unit();
            }
        } else if (more) {
            load_codes(1);
        }
    }

    template <int width, int s> __device__ __forceinline__ void by_wgmma(const uint8_t * x) {
        const uint64_t b = nvfp4_grouped_descriptor(x);
        w4a16_wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int mt = 0; mt < C::MT; ++mt) {
                nvfp4_grouped_wgmma<width, 0>(acc_[mt], a_[s % 2][mt][i], b + i * (256 >> 4));
            }
        }
        w4a16_wgmma_commit();
    }

    // The groups of columns that are there.
    template <int s> __device__ __forceinline__ void by_mma(const uint8_t * x) {
#pragma unroll
        for (int nt = 0; nt < C::NT; ++nt) {
            if (8 * nt < tile_.columns) {
                const uint32_t * b = (const uint32_t *) (x + nt * NVFP4_GROUPED_GROUP_BYTES) + threadIdx.x;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int mt = 0; mt < C::MT; ++mt) {
                        w4a16_mma(acc_[mt][nt], a_[s % 2][mt][i], b[64 * i], b[64 * i + 32]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void release_activations() {
        if (!C::WGMMA) {
            // the copy engine does not wait for reads by itself
            w4a16_before_copies();
        }
        w4a16_release(stages_.x_free + x_done_);
        x_done_ = x_done_ == C::X_STAGES - 1 ? 0 : x_done_ + 1;
    }

    static constexpr int  READ  = (C::TILE_N + W4A16_WARP - 1) / W4A16_WARP;
    static constexpr bool EARLY = READ <= 2;  // more registers than these are needed for what is multiplied

    const nvfp4_grouped_problem & p_;
    const uint8_t * const         xs_;
    w4a16_stages<C> &             stages_;
    w4a16_ring<C::W_STAGES> &     w_;
    w4a16_ring<C::X_STAGES> &     x_;
    const nvfp4_grouped_tile      tile_;
    int                           x_done_;
    const uint8_t * const         ws_;  // this lane's block of its upper row

    float    acc_[C::MT][C::NT][4];
    uint32_t a_[2][C::MT][4][4];
    uint32_t codes_[2 * C::MT][2];
    __half2  scales_[2 * C::MT][2];
    int      of_[READ];
    float    undo_[READ];
};

// -- kernel --

// By the narrowest of these that has a tile's columns: an expert has as many as it has, and the tensor cores take time for each.
// More of them in one kernel, and ptxas serialises wgmma for want of registers (C7512).
template <typename C, int width = C::TILE_N <= 64 ? 8 : 64>
static __device__ __forceinline__ void nvfp4_grouped_multiply(nvfp4_grouped_sums<C> & sums, const int columns) {
    constexpr int wider = width < 128 || C::TILE_N > 192 ? 2 * width : width + 32;
    if constexpr (!C::WGMMA || width >= C::TILE_N) {
        sums.template multiply<C::TILE_N>();
    } else if (columns <= width) {
        sums.template multiply<width>();
    } else {
        nvfp4_grouped_multiply<C, wider>(sums, columns);
    }
}

template <typename C> static __device__ __forceinline__ void nvfp4_grouped_block(const nvfp4_grouped_problem & p) {
    extern __shared__ __align__(128) uint8_t nvfp4_grouped_shared[];
    __shared__ w4a16_stages<C> stages;

    uint8_t * const xs = nvfp4_grouped_shared;
    uint8_t * const ws = xs + C::X_STAGES * C::X_BYTES;
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        stages.init();
    }
    __syncthreads();

    if (threadIdx.y < C::WARPS) {
        if constexpr (C::REGISTERS > 0) {
            w4a16_take_registers<C::REGISTERS>();
        }
        w4a16_wait_for_the_other();
        w4a16_ring<C::W_STAGES> w;
        w4a16_ring<C::X_STAGES> x;
        nvfp4_grouped_for_each_tile<C>(p, [&](const nvfp4_grouped_tile & tile) {
            nvfp4_grouped_sums<C> sums(p, ws, xs, stages, w, x, tile);
            nvfp4_grouped_multiply<C>(sums, tile.columns);
        });
        return;
    }
    if constexpr (C::REGISTERS > 0) {
        w4a16_give_registers<C::KEPT_REGISTERS>();
    }
    const int tid = (threadIdx.y - C::WARPS) * W4A16_WARP + threadIdx.x;
    if (tid < C::COPIERS) {
        // weights may come before
        nvfp4_grouped_copy_weights<C>(p, ws, stages, tid);
    } else if (tid == 3 * W4A16_WARP) {
        nvfp4_grouped_copy_activations<C>(p, xs, stages);
    }
}

// Threads (32, WARPS + 4).
template <typename C>
static __global__ void __launch_bounds__(C::ALL, C::BLOCKS) nvfp4_grouped(const nvfp4_grouped_problem p) {
    if constexpr ((C::WGMMA && !NVFP4_GROUPED_HAS_WGMMA) || C::SHARED > W4A16_ARCH_SHARED) {
        __trap();
    } else {
        nvfp4_grouped_block<C>(p);
    }
}

#else

// with the kernel's qualifiers: see w4a16_to_f16's
template <int tile_n>
static __global__ void nvfp4_grouped_route(const nvfp4_grouped_problem, const int32_t * __restrict__, const int64_t, const int,
                                           const int) {
    __trap();
}

template <int warps, int together>
static __global__ void nvfp4_grouped_to_f16(const nvfp4_grouped_problem, const nvfp4_grouped_activations) {
    __trap();
}

template <int tile_n, int warps>
static __global__ void nvfp4_grouped_few(const nvfp4_grouped_problem, const int32_t * __restrict__, const int64_t, const int,
                                         const int, const nvfp4_grouped_activations) {
    __trap();
}

template <typename C> static __global__ void nvfp4_grouped(const nvfp4_grouped_problem) {
    __trap();
}

#endif // !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// -- launch --

// Where in the scratch memory what begins, in bytes, and how much of it can be needed: whatever the ids are.
struct nvfp4_grouped_layout {
    int64_t groups, chunks;
    int64_t undo, of, chunks_at, chunks_used, size;
};

template <typename C> static inline nvfp4_grouped_layout nvfp4_grouped_layout_of(const nvfp4_grouped_args & a) {
    const auto           aligned = [](int64_t size) { return (size + 255) / 256 * 256; };
    const int64_t        n       = a.tokens * a.used;
    const int64_t        taken   = n < a.experts ? n : a.experts;
    nvfp4_grouped_layout l;
    l.groups    = (n + 7 * taken) / 8;
    l.chunks    = (n + (C::TILE_N - 1) * taken) / C::TILE_N;
    l.undo      = l.groups * 8 * a.k * (int64_t) sizeof(__half);
    l.of        = l.undo + aligned(l.groups * 8 * (int64_t) sizeof(float));
    l.chunks_at = l.of + aligned(l.groups * 8 * (int64_t) sizeof(int32_t));
    l.chunks_used    = l.chunks_at + aligned(l.chunks * (int64_t) sizeof(uint4));
    l.size      = l.chunks_used + 256;
    return l;
}

template <typename C> static inline size_t nvfp4_grouped_scratch_bytes(const nvfp4_grouped_args & a) {
    return (size_t) nvfp4_grouped_layout_of<C>(a).size;
}

// As <<<>>>, but it begins before what was launched last has ended, for which it waits itself.
template <typename... P, typename... A>
static cudaError_t nvfp4_grouped_launch(void (*kernel)(P...), const dim3 grid, const dim3 block, const int shared,
                                        cudaStream_t stream, const A &... arguments) {
    cudaLaunchAttribute attribute;
    attribute.id                                         = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim            = grid;
    config.blockDim           = block;
    config.dynamicSmemBytes   = shared;
    config.stream             = stream;
    config.attrs              = &attribute;
    config.numAttrs           = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

static inline cudaError_t nvfp4_grouped_check(const nvfp4_grouped_args & a, const int64_t blocks) {
    const int64_t row_bytes = a.k / W4A16_UNIT * W4A16_UNIT_BYTES;
    if (a.k < W4A16_UNIT || a.k % W4A16_UNIT != 0 || a.k > INT32_MAX / 64 || a.m < 1 || a.m > INT32_MAX / 2 || a.tokens < 0 ||
        a.experts < 1 || a.experts > NVFP4_GROUPED_MAX_EXPERTS || a.used < 1 || a.slots < 1 || blocks < 1 ||
        blocks > INT32_MAX || a.tokens > (INT32_MAX / 2 - 8 * NVFP4_GROUPED_MAX_EXPERTS) / a.used || a.ids_token < a.used ||
        a.w_expert < a.m * row_bytes) {
        return cudaErrorInvalidValue;
    }
    if ((uintptr_t) a.w % 16 != 0 || a.w_expert % 16 != 0 || (uintptr_t) a.ids % 4 != 0 || (uintptr_t) a.x % 16 != 0 ||
        a.x_token % 4 != 0 || a.x_slot % 4 != 0 || (uintptr_t) a.y % 4 != 0 || (uintptr_t) a.scratch % 256 != 0) {
        return cudaErrorMisalignedAddress;
    }
    return cudaSuccess;
}

template <typename C> static inline nvfp4_grouped_problem nvfp4_grouped_problem_of(const nvfp4_grouped_args & a) {
    const nvfp4_grouped_layout l    = nvfp4_grouped_layout_of<C>(a);
    uint8_t * const            base = (uint8_t *) a.scratch;
    return {(const uint8_t *) a.w, base, (float *) (base + l.undo), (int32_t *) (base + l.of), (uint4 *) (base + l.chunks_at),
            (int32_t *) (base + l.chunks_used), a.y, a.w_expert, l.groups, (int) a.m, (int) (a.k / W4A16_UNIT),
            (int) ((a.m + C::TILE_M - 1) / C::TILE_M)};
}

// What comes before the product. Many ids are routed by blocks of their own, as each reads all of them.
template <typename C> static cudaError_t nvfp4_grouped_prepare_cuda(const nvfp4_grouped_args & a, cudaStream_t stream) {
    constexpr int                   FEW_WARPS = 16, WARPS = 8;  // the fewer blocks, the more of each
    constexpr int                   TOGETHER  = C::FEW > 0 ? 1 : 4;  // more registers leave the product less room to begin
    const nvfp4_grouped_problem     p       = nvfp4_grouped_problem_of<C>(a);
    const nvfp4_grouped_activations x       = {a.x, (int) a.used, (int) a.slots, a.x_token, a.x_slot};
    const int                       experts = (int) a.experts;
    const int                       n       = (int) (a.tokens * a.used);
    const int                       shared  = experts * (int) sizeof(int);
    const dim3                      blocks((unsigned) p.groups);
    if constexpr (C::FEW > 0) {
        if (n <= C::FEW) {
            return nvfp4_grouped_launch(nvfp4_grouped_few<C::TILE_N, FEW_WARPS>, blocks, dim3(W4A16_WARP, FEW_WARPS), shared, stream,
                                        p, a.ids, a.ids_token, n, experts, x);
        }
    }
    const cudaError_t status = nvfp4_grouped_launch(nvfp4_grouped_route<C::TILE_N>, dim3((unsigned) experts),
                                                    dim3(NVFP4_GROUPED_ROUTERS), shared, stream, p, a.ids, a.ids_token, x.used, n);
    return status != cudaSuccess
        ? status : nvfp4_grouped_launch(nvfp4_grouped_to_f16<WARPS, TOGETHER>, blocks, dim3(W4A16_WARP, WARPS), 0, stream, p, x);
}

template <typename C>
static cudaError_t nvfp4_grouped_cuda(const nvfp4_grouped_args & a, const int64_t blocks, cudaStream_t stream) {
    cudaError_t status = nvfp4_grouped_check(a, blocks);
    if (status != cudaSuccess || a.tokens == 0) {
        return status;
    }
    const nvfp4_grouped_problem p     = nvfp4_grouped_problem_of<C>(a);
    const int64_t               tiles = nvfp4_grouped_layout_of<C>(a).chunks * p.tiles_m;
    if (tiles > INT32_MAX / 2) {
        return cudaErrorInvalidValue;
    }
    status = cudaFuncSetAttribute(nvfp4_grouped<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED);
    if (status == cudaSuccess) {
        status = nvfp4_grouped_prepare_cuda<C>(a, stream);
    }
    if (status != cudaSuccess) {
        return status;
    }
    return nvfp4_grouped_launch(nvfp4_grouped<C>, dim3((unsigned) (blocks < tiles ? blocks : tiles)),
                                dim3(W4A16_WARP, C::ALL / W4A16_WARP), C::SHARED, stream, p);
}

// Whether the code that runs here was compiled for sm_90a: what was not has no wgmma.
template <typename C> static bool nvfp4_grouped_is_built() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, nvfp4_grouped<C>) == cudaSuccess && attributes.sharedSizeBytes > 0;
}
