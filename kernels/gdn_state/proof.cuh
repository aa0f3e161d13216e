// What `./harness test` proves.

#pragma once

#include "../common/check_selftest.cuh"
#include "chain.cuh"
#include "problem.cuh"

template <typename T> static const char * name_of() {
    return sizeof(T) == 4 ? "f32" : "bf16";
}

template <typename T> static std::string label(const std::string & what) {
    return std::string(name_of<T>()) + " " + what;
}

template <typename T> using launch_t = std::function<cudaError_t(const problem<T> &)>;

template <typename T> static cudaError_t ours(const problem<T> & p) {
    return gdn_state_cuda(p.args(), nullptr);
}

// In place too, a warp a column, in ggml's order for f32: what ours must equal, bit by bit.
template <typename T> static cudaError_t plain(const problem<T> & p) {
    return chain_step_cuda(p.args(), nullptr);
}

// The cell of the first sequence is cleared, as of one that begins; then so many tokens, each with inputs of its own.
template <typename T>
static outcome<T> run(const problem<T> & p, const launch_t<T> & launch, int steps = 3, bool clear = true) {
    p.cache.poison();
    p.out.poison();
    p.fill(11);
    if (clear) {
        CUDA_CHECK(cudaMemset(p.states(), 0, p.cell() * sizeof(T)));
    }
    for (int step = 0; step < steps; ++step) {
        p.fill_inputs(100 * step);
        CUDA_CHECK(launch(p));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    return outcome<T>(p);
}

// -- against double --

static const tolerance OF_F32  = {1e-4, 1e-11};  // any order of f32 sums
static const tolerance OF_BF16 = {0.05, 5.1e-6};  // one rounding to bf16: its nmse is at most 2^-16 / 3

template <typename T> static double number(T x);

template <> double number(float x) {
    return x;
}

template <> double number(uint16_t x) {
    return value_of(x);
}

struct expected {
    std::vector<double> out, states;
};

// After one token of every head. cache: every element before it.
template <typename T, typename bits_t>
static expected expected_of(const problem<T> & p, const std::vector<bits_t> & cache) {
    const std::vector<float> q = p.q.template host<float>(), k = p.k.template host<float>();
    const std::vector<float> v = p.v.template host<float>();
    const std::vector<float> g = p.g.template host<float>(), beta = p.beta.template host<float>();
    expected                 e;
    for (int64_t i = 0; i < p.s.seqs * p.s.heads; ++i) {
        const int64_t       qk = 128 * (i / p.s.heads * p.s.qk_heads + i % p.s.heads % p.s.qk_heads);
        std::vector<double> state;
        for (int64_t at = 0; at < GDN_STATE_CELL; ++at) {
            state.push_back(number(cache[p.cell() + i * GDN_STATE_CELL + at]));
        }
        const std::vector<double> result = gdn_reference(state, &q[qk], &k[qk], &v[128 * i], g[i], beta[i]);
        e.out.insert(e.out.end(), result.begin(), result.end());
        e.states.insert(e.states.end(), state.begin(), state.end());
    }
    return e;
}

// bits_t: what an element of a state is read as.
// must: whether it has to agree.
template <typename T, typename bits_t>
static bool agrees_with_double(const shape & s, const tolerance & of_state, const launch_t<T> & launch,
                               bool must = true) {
    const problem<T> p(s);
    run<T>(p, launch, 0);
    const expected e = expected_of(p, p.cache.template host<bits_t>());
    p.out.poison();
    CUDA_CHECK(launch(p));
    CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<bits_t> states = p.cache.template host<bits_t>();
    const std::vector<float>  out    = p.out.template host<float>();
    const auto in = [](const std::vector<double> & x) { return [&x](int64_t r, int64_t c) { return x[r * 128 + c]; }; };
    const verdict a = compare(out.data(), in(e.out), s.seqs * s.heads, 128, OF_F32);
    const verdict b = compare(states.data() + p.cell(), in(e.states), s.seqs * s.heads * 128, 128, of_state);
    char          text[160];
    snprintf(text, sizeof(text), "nmse of results %.2g, of states %.2g%s", a.nmse, b.nmse,
             must ? " " : ", which must fail");
    return said((a.passed && b.passed) == must, label<T>(s.name() + " against double"),
                must ? text + a.why + b.why : text);
}

// -- bit by bit --

template <typename T> static bool equals_plain(const shape & s) {
    const problem<T> p(s);
    return said(run<T>(p, ours<T>) == run<T>(p, plain<T>),
                label<T>(s.name() + " has every bit of the plain kernel, in the cells beside too"));
}

template <typename T> static bool two_launches_agree(const shape & s) {
    const problem<T> p(s);
    return said(run<T>(p, ours<T>) == run<T>(p, ours<T>), label<T>("two runs are bit-equal"));
}

// Gathered elsewhere, and written to the cells: where a sequence's cell is not its own.
template <typename T> static bool out_of_place_is_equal(const shape & s) {
    const problem<T>    p(s);
    const device_buffer gathered(p.state_bytes());
    const auto          launch = [&](const problem<T> & of) {
        gdn_state_args<T> a = of.args();
        CUDA_CHECK(cudaMemcpy(gathered.as<T>(), a.from, of.state_bytes(), cudaMemcpyDeviceToDevice));
        a.from = gathered.as<T>();
        return gdn_state_cuda(a, nullptr);
    };
    return said(run<T>(p, launch) == run<T>(p, plain<T>), label<T>("out of place is equal"));
}

// ggml's three launches, with the cells in order.
static bool chain_is_equal(const shape & s) {
    const problem<float>       p(s);
    const device_buffer        gathered(p.state_bytes()), updated(p.state_bytes()), ids(s.seqs * 4);
    std::vector<int32_t>       order(s.seqs);
    for (int64_t i = 0; i < s.seqs; ++i) {
        order[i] = (int32_t) i;
    }
    CUDA_CHECK(cudaMemcpy(ids.as<int32_t>(), order.data(), ids.size(), cudaMemcpyHostToDevice));
    const auto chain = [&](const problem<float> & of) {
        return chain_cuda(of.args(), ids.as<int32_t>(), gathered.as<float>(), updated.as<float>(), nullptr);
    };
    return said(run<float>(p, ours<float>) == run<float>(p, chain),
                label<float>(s.name() + " equals gather, step and copy"));
}

// -- what must fail --

// Each product and sum rounded to bf16, a thread a column.
static __global__ void bf16_arithmetic_kernel(const gdn_state_args<__nv_bfloat16> a, float scale) {
    const int     col  = threadIdx.x;
    const int64_t head = blockIdx.x, seq = blockIdx.y;
    const int64_t at   = ((seq * a.heads + head) * GDN_STATE_SIZE + col) * GDN_STATE_SIZE;
    const int64_t qk   = seq * a.qk_seq_stride + head % a.qk_heads * a.qk_head_stride;
    const auto    b    = [](float x) { return __float2bfloat16_rn(x); };

    const __nv_bfloat16 g     = b(expf(a.g[seq * a.heads + head]));
    __nv_bfloat16       kv    = b(0.0f), out = b(0.0f);
    for (int i = 0; i < GDN_STATE_SIZE; ++i) {
        kv = b(__bfloat162float(kv) + __bfloat162float(b(__bfloat162float(a.from[at + i]) * a.k[qk + i])));
    }
    const float v     = a.v[(seq * a.heads + head) * GDN_STATE_SIZE + col];
    const float beta  = a.beta[seq * a.heads + head];
    const float delta = __bfloat162float(b((v - __bfloat162float(g) * __bfloat162float(kv)) * beta));
    for (int i = 0; i < GDN_STATE_SIZE; ++i) {
        const float decayed = __bfloat162float(b(__bfloat162float(g) * __bfloat162float(a.from[at + i])));
        a.to[at + i] = b(decayed + __bfloat162float(b(a.k[qk + i] * delta)));
        out = b(__bfloat162float(out) + __bfloat162float(a.to[at + i]) * a.q[qk + i]);
    }
    a.out[(seq * a.heads + head) * 128 + col] = __bfloat162float(out) * scale;
}

static cudaError_t bf16_arithmetic(const problem<__nv_bfloat16> & p) {
    const dim3 grid((unsigned) p.s.heads, (unsigned) p.s.seqs);
    bf16_arithmetic_kernel<<<grid, GDN_STATE_SIZE>>>(p.args(), 0.08838835f);
    return cudaGetLastError();
}

// Each sequence with the state of another.
template <typename T> static cudaError_t permuted(const problem<T> & p) {
    for (int64_t i = 0; i < p.s.seqs; ++i) {
        gdn_state_args<T> a = p.args();
        a.from += (p.s.seqs - 1 - i) * p.cell();
        a.to   += (p.s.seqs - 1 - i) * p.cell();
        a.q    += i * a.qk_seq_stride;
        a.k    += i * a.qk_seq_stride;
        a.v    += i * a.v_seq_stride;
        a.g    += i * a.gate_seq_stride;
        a.beta += i * a.gate_seq_stride;
        a.out  += i * 128 * p.s.heads;
        a.seqs  = 1;
        const cudaError_t status = gdn_state_cuda(a, nullptr);
        if (status != cudaSuccess) {
            return status;
        }
    }
    return cudaSuccess;
}

template <typename T> static bool faults_are_seen() {
    const problem<T>    p({2, 2, 1});
    const device_buffer elsewhere(p.state_bytes());
    const auto          with = [&](int64_t from, int64_t to, bool skipped) {
        return [&, from, to, skipped](const problem<T> & of) {
            gdn_state_args<T> a = of.args();
            a.from += from * of.cell();
            a.to    = skipped ? elsewhere.as<T>() : a.to + to * of.cell();
            return gdn_state_cuda(a, nullptr);
        };
    };
    const outcome<T> right = run<T>(p, plain<T>);
    bool             all   = said(run<T>(p, with(0, 0, false)) == right,
                                  label<T>("without a fault is equal"));
    const auto       fails = [&](const char * what, const launch_t<T> & launch, bool clear = true) {
        all = said(!(run<T>(p, launch, 3, clear) == right), label<T>(std::string(what) + " is seen")) && all;
    };
    fails("a write-back that is skipped", with(0, 0, true));
    fails("a neighbour's slot, read", with(1, 0, false));
    fails("a neighbour's slot, written", with(0, -1, false));
    fails("a neighbour's slot, both", with(1, 1, false));
    fails("slots that are permuted", permuted<T>);
    fails("a stale state after a clear", ours<T>, false);
    return all;
}

// -- arguments --

template <typename T> static bool wrong_arguments_are_refused() {
    const problem<T> p({2, 4, 2});
    const outcome<T> before  = run<T>(p, ours<T>);
    bool             refused = true;
    const auto       status  = [&](int64_t seqs, int64_t heads, int64_t qk_heads, int from_by, int to_by) {
        gdn_state_args<T> a = p.args();
        a.seqs = seqs, a.heads = heads, a.qk_heads = qk_heads;
        a.from = (const T *) ((const char *) a.from + from_by);
        a.to   = (T *) ((char *) a.to + to_by);
        return gdn_state_cuda(a, nullptr);
    };
    refused = status(-1, 4, 2, 0, 0) == cudaErrorInvalidValue && refused;
    refused = status(65536, 4, 2, 0, 0) == cudaErrorInvalidValue && refused;
    refused = status(2, 0, 2, 0, 0) == cudaErrorInvalidValue && refused;
    refused = status(2, 4, 3, 0, 0) == cudaErrorInvalidValue && refused;
    refused = status(2, 4, 0, 0, 0) == cudaErrorInvalidValue && refused;
    refused = status(2, 4, 2, 4, 0) == cudaErrorMisalignedAddress && refused;
    refused = status(2, 4, 2, 0, 4) == cudaErrorMisalignedAddress && refused;
    refused = status(0, 4, 2, 0, 0) == cudaSuccess && refused;
    CUDA_CHECK(cudaDeviceSynchronize());
    return said(refused && outcome<T>(p) == before,
                label<T>("wrong arguments are refused, no sequences are no work"));
}

// -- all --

static const std::vector<shape> EDGES  = {{1, 1, 1}, {2, 2, 1}, {3, 3, 3}, {7, 6, 2}, {5, 32, 16}};
static const std::vector<shape> MODELS = {{1, 32, 16}, {33, 32, 16}, {128, 32, 32}, {256, 32, 16}, {17, 48, 16}};

static bool edges(const std::vector<shape> & shapes) {
    using bf16  = __nv_bfloat16;
    bool passed = said(checker_is_sound(), "the checker fails what is wrong");
    passed      = wrong_arguments_are_refused<float>() && wrong_arguments_are_refused<bf16>() && passed;
    for (const shape & s : shapes) {
        passed = agrees_with_double<float, float>(s, OF_F32, ours<float>) && passed;
        passed = agrees_with_double<bf16, uint16_t>(s, OF_BF16, ours<bf16>) && passed;
        passed = equals_plain<float>(s) && equals_plain<bf16>(s) && chain_is_equal(s) && passed;
    }
    passed = out_of_place_is_equal<float>({2, 2, 1}) && out_of_place_is_equal<bf16>({2, 2, 1}) && passed;
    passed = faults_are_seen<float>() && faults_are_seen<bf16>() && passed;
    return agrees_with_double<bf16, uint16_t>({2, 2, 1}, OF_BF16, bf16_arithmetic, false) && passed;
}

static bool everything() {
    using bf16  = __nv_bfloat16;
    bool passed = edges(EDGES);
    for (const shape & s : MODELS) {
        passed = equals_plain<float>(s) && equals_plain<bf16>(s) && passed;
    }
    passed = agrees_with_double<float, float>({33, 32, 16}, OF_F32, ours<float>) && passed;
    passed = agrees_with_double<bf16, uint16_t>({33, 32, 16}, OF_BF16, ours<bf16>) && passed;
    passed = chain_is_equal({128, 32, 32}) && two_launches_agree<float>({128, 32, 16}) && passed;
    return two_launches_agree<bf16>({128, 32, 16}) && passed;
}
