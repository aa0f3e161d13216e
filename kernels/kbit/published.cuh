// Three errors of a published design, built as they were written down, so that the proof can show that it sees them; and its inner loop,
// in a kernel that is right, which ours is timed against.

#pragma once

#include "problem.cuh"

// Its repacking. Weights W[K_dim][N] are quantised in one row, so that blocks run along N, but a column's words for 32 of k are taken
// from block (k N + n) / 32.
template <typename V> static std::vector<V> published_gather(const std::vector<V> & flat, int64_t n, int64_t k_dim, int words) {
    std::vector<V> to;
    for (int64_t column = 0; column < n; ++column) {
        for (int64_t k = 0; k < k_dim; k += 32) {
            const int64_t block = (k * n + column) / 32;
            to.insert(to.end(), flat.begin() + block * words, flat.begin() + (block + 1) * words);
        }
    }
    return to;
}

// Its reduction of split sums: a block of each split; the first overwrites, the others add, who counts last converts.
static __global__ void published_reduce(const float * parts, float * workspace, int * counter, float * out) {
    __shared__ bool last;

    const float part = parts[blockIdx.x * blockDim.x + threadIdx.x];
    if (blockIdx.x == 0) {
        workspace[threadIdx.x] = part;
    } else {
        atomicAdd(workspace + threadIdx.x, part);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == (int) gridDim.x - 1;
    }
    __syncthreads();
    if (last) {
        out[threadIdx.x] = workspace[threadIdx.x];
    }
}

// Its pipeline of two stages: one group for the first two tiles, and tile kt + 2 goes where tile kt is being read. Each thread sums what
// its neighbour copied.
static __global__ void published_pipeline(const uint4 * tiles, int count, uint32_t * out) {
    __shared__ uint4 stages[2][KBIT_WARP];

    const int thread = threadIdx.x, neighbour = (threadIdx.x + 1) % KBIT_WARP;
    uint32_t  sum = 0;
    w4a16_copy(&stages[0][thread], tiles + thread);
    w4a16_copy(&stages[1][thread], tiles + KBIT_WARP + thread);
    w4a16_commit();
    for (int kt = 0; kt < count; ++kt) {
        w4a16_wait<1>();
        __syncthreads();
        if (kt + 2 < count) {
            w4a16_copy(&stages[(kt + 2) % 2][thread], tiles + (kt + 2) * KBIT_WARP + thread);
        }
        w4a16_commit();
        sum += stages[kt % 2][neighbour].x;
    }
    w4a16_wait<0>();
    out[thread] = sum;
}

static bool published_mapping_fails() {
    problem<__half> p({4, 5, 64, 128});
    p.fill(3, true);
    // the same weights, transposed and quantised its way
    device_buffer w(64 * 128 * 4);
    fill_normal<float>(w, 4, 0.1f);
    CUDA_CHECK(kbit_quantise_cuda(w.as<float>(), p.codebook.as<float>(), 4, 64 * 128, p.planes.as<uint32_t>(), p.absmax.as<uint8_t>(),
                                  p.flags.as<int>(), nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint32_t> planes = p.planes.host<uint32_t>();
    const std::vector<uint8_t>  absmax = p.absmax.host<uint8_t>();
    const std::vector<__half>   a      = p.a.host<__half>();
    std::vector<double>         must(5 * 64, 0.0);
    for (int i = 0; i < 5 * 64 * 128; ++i) {
        const int     token = i / (64 * 128), k = i / 64 % 128;
        const int64_t at    = k * 64 + i % 64;
        must[token * 64 + i % 64] += kbit_float(a[token * 128 + k]) * reference_scale(absmax[at / 32]) *
                                     p.entries[reference_code(planes.data(), 4, at / 32, (int) (at % 32))];
    }
    to_device(p.planes, published_gather(planes, 64, 128, 4));
    to_device(p.absmax, published_gather(absmax, 64, 128, 1));
    p.repack();
    const std::vector<uint16_t> out    = p.multiply();
    double                      errors = 0.0, squares = 0.0;
    for (int i = 0; i < 5 * 64; ++i) {
        errors += std::pow(value_as<__half>(out[i]) - must[i], 2.0);
        squares += must[i] * must[i];
    }
    return errors > 0.5 * squares;  // other weights altogether
}

// Whether it adds up 5 parts, one of which is not there yet when another is added.
[[maybe_unused]] static bool published_reduction_is_right() {
    const device_buffer parts(5 * 32 * 4), workspace(32 * 4), counter(4), out(32 * 4);
    to_device(parts, std::vector<float>(5 * 32, 1.0f));
    CUDA_CHECK(cudaMemset(workspace.as<char>(), 0, 32 * 4));
    CUDA_CHECK(cudaMemset(counter.as<char>(), 0, 4));
    published_reduce<<<5, 32>>>(parts.as<float>(), workspace.as<float>(), counter.as<int>(), out.as<float>());
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    return out.host<float>() == std::vector<float>(32, 5.0f);
}

[[maybe_unused]] static bool published_pipeline_is_right() {
    const device_buffer   tiles(6 * 32 * 16), out(32 * 4);
    std::vector<uint32_t> words(6 * 32 * 4);
    for (size_t i = 0; i < words.size(); ++i) {
        words[i] = (uint32_t) i / 128 + 1;  // of each tile its number
    }
    to_device(tiles, words);
    published_pipeline<<<1, 32>>>(tiles.as<uint4>(), 6, out.as<uint32_t>());
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaDeviceSynchronize());
    return out.host<uint32_t>() == std::vector<uint32_t>(32, 1 + 2 + 3 + 4 + 5 + 6);
}

// -- its inner loop, in a kernel that is right --

// 16 tokens by 128 columns a block, 64 of k a stage, planes in shared memory, and for each weight K bits and a shuffle. The stages are
// three and the sums of splits are added in their order.
template <int K> struct published_stage {
    __half   a[16][72];  // 64, padded
    uint32_t planes[128 * 2 * K];
    uint8_t  absmax[128 * 2];
};

// A weight: bit b of its code is at its row of plane b; lane i of the warp has entry i.
template <int K>
static __device__ __forceinline__ __half published_weight(const uint32_t * planes, int row, uint32_t entry, __half scale) {
    int code = 0;
#pragma unroll
    for (int b = 0; b < K; ++b) {
        code |= (int) (planes[b] >> row & 1) << b;
    }
    return __hmul(__ushort_as_half((unsigned short) __shfl_sync(0xFFFFFFFF, entry, code)), scale);
}

template <int K>
static __global__ void __launch_bounds__(256) published_gemm(const __half * a, const uint32_t * tiles, const uint8_t * absmax,
                                                             const float * codebook, float * parts, int m, int n, int k_dim) {
    extern __shared__ __align__(16) uint8_t published_shared[];

    published_stage<K> * stages = (published_stage<K> *) published_shared;
    const int            lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = k_dim / 64;
    const int            first = all * blockIdx.y / gridDim.y, last = all * (blockIdx.y + 1) / gridDim.y;
    const uint32_t       entry = lane < 1 << K ? __half_as_ushort(__float2half_rn(codebook[lane])) : 0;
    float                acc[2][4] = {};
    const auto fetch = [&](int kt) {
        if (kt < last) {
            published_stage<K> & s    = stages[kt % 3];
            const int64_t        tile = (int64_t) kt * (n / 128) + blockIdx.x;
            if (threadIdx.x < 128) {
                const int row = threadIdx.x / 8, at = threadIdx.x % 8 * 8;
                if (row < m) {
                    w4a16_copy(&s.a[row][at], a + (int64_t) row * k_dim + kt * 64 + at);
                } else {
                    memset((void *) &s.a[row][at], 0, 16);
                }
            }
            for (int i = threadIdx.x; i < 64 * K; i += 256) {
                w4a16_copy(s.planes + 4 * i, tiles + tile * (256 * K) + 4 * i);
            }
            if (threadIdx.x < 16) {
                w4a16_copy(s.absmax + 16 * threadIdx.x, absmax + tile * 256 + 16 * threadIdx.x);
            }
        }
        w4a16_commit();
    };
    fetch(first);
    fetch(first + 1);
    for (int kt = first; kt < last; ++kt) {
        w4a16_wait<1>();
        __syncthreads();
        fetch(kt + 2);
        const published_stage<K> & s = stages[kt % 3];
#pragma unroll
        for (int ks = 0; ks < 4; ++ks) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                memcpy(&x[i], &s.a[lane / 4 + i % 2 * 8][ks * 16 + lane % 4 * 2 + i / 2 * 8], 4);
            }
#pragma unroll
            for (int nb = 0; nb < 2; ++nb) {
                const int    block = (warp * 16 + nb * 8 + lane / 4) * 2 + ks / 2;
                const __half scale = __float2half_rn(kbit_decode(s.absmax[block]));
                __half       w[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int row = ks % 2 * 16 + lane % 4 * 2 + r % 2 + r / 2 * 8;
                    w[r] = published_weight<K>(s.planes + block * K, row, entry, scale);
                }
                w4a16_mma(acc[nb], x, w4a16_as_u32(__halves2half2(w[0], w[1])), w4a16_as_u32(__halves2half2(w[2], w[3])));
            }
        }
    }
    w4a16_wait<0>();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int token = lane / 4 + i % 4 / 2 * 8, column = blockIdx.x * 128 + warp * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
        parts[((int64_t) blockIdx.y * 16 + token) * n + column] = acc[i / 4][i % 4];
    }
}

static __global__ void published_sum(const float * parts, __half * c, int64_t outputs, int n, int splits) {
    const int64_t i = (int64_t) blockIdx.x * 256 + threadIdx.x;
    if (i < outputs) {
        float sum = 0.0f;
        for (int split = 0; split < splits; ++split) {
            sum += parts[(int64_t) split * 16 * n + i];
        }
        c[i] = __float2half_rn(sum);
    }
}

// Its order of tiles, [k/64][n/128][column][block][plane], of weights whose blocks run along k.
template <typename V> static std::vector<V> published_tiles(const std::vector<V> & from, int64_t n, int64_t k_dim, int words) {
    std::vector<V> to(from.size());
    for (int64_t block = 0; block < n * k_dim / 32; ++block) {
        const int64_t column = block / (k_dim / 32), k = block % (k_dim / 32);
        const int64_t at = ((k / 2 * (n / 128) + column / 128) * 128 + column % 128) * 2 + k % 2;
        std::copy(from.begin() + block * words, from.begin() + (block + 1) * words, to.begin() + at * words);
    }
    return to;
}

// K=4, up to 16 tokens, N a multiple of 128, K_dim of 64.
struct published_way {
    const problem<__half> & p;
    device_buffer           tiles, absmax, parts;
    int                     splits;

    published_way(const problem<__half> & p, int splits)
        : p(p), tiles(p.planes.size()), absmax(p.absmax.size()), parts((int64_t) splits * 16 * p.s.n * 4), splits(splits) {
        to_device(tiles, published_tiles(p.planes.host<uint32_t>(), p.s.n, p.s.k_dim, 4));
        to_device(absmax, published_tiles(p.absmax.host<uint8_t>(), p.s.n, p.s.k_dim, 1));
    }

    void multiply(cudaStream_t stream) const {
        const dim3    grid((unsigned) (p.s.n / 128), (unsigned) splits);
        const int     shared  = 3 * (int) sizeof(published_stage<4>);
        const int64_t outputs = p.s.m * p.s.n;
        published_gemm<4><<<grid, 256, shared, stream>>>(p.a.as<__half>(), tiles.as<uint32_t>(), absmax.as<uint8_t>(),
                                                         p.codebook.as<float>(), parts.as<float>(), (int) p.s.m, (int) p.s.n,
                                                         (int) p.s.k_dim);
        published_sum<<<blocks_of(outputs), 256, 0, stream>>>(parts.as<float>(), p.c.as<__half>(), outputs, (int) p.s.n, splits);
        CUDA_CHECK(cudaGetLastError());
    }
};

static bool published_loop_is_right() {
    problem<__half> p({4, 11, 128, 256});
    p.fill(5);
    const published_way way(p, 2);
    p.c.poison();
    way.multiply(nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    return wrong<__half>(p.c.host<uint16_t>(), p.reference()).empty();
}
