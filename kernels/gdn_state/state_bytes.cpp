// Saved states of several sequences, byte for byte, in a llama.cpp that has the series gdn-state.
//
//   gdn-state-bytes MODEL    exit status 0 if everything is right; MODEL has a gated delta net
//
// Sequences are decoded, copied, left out, begun anew, reversed and cleared. After each step the logits and the saved state
// of each sequence are hashed. LLAMA_GDN_STATE=1, alone and with LLAMA_GDN_CONV=1, must give the hashes of 0. They are
// read once a process, so that each run is a process of its own, forked before the library is used. Faults are planted
// through saved states, those of the nets and of their convolutions and those of the convolutions alone, and must be seen.
//
// Then the graphs: which of their convolutions a backend may compute as one kernel. No backend has to.
//
// Then bf16 states: from the same state, a step must store what f32 states are when rounded. Exactly so without the
// path; the path's kernel adds in another order, by which a rounding in a hundred may be another.

#include "../ggml/src/ggml-cuda/conv-match.h"
#include "llama.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

static const int SEQS = 8;

using bytes_t  = std::vector<uint8_t>;
using hashes_t = std::vector<uint64_t>;  // two a step: of the logits and of the states

static uint64_t fnv(const void * data, size_t size, uint64_t hash = 0xcbf29ce484222325) {
    for (size_t i = 0; i < size; ++i) {
        hash = (hash ^ ((const uint8_t *) data)[i]) * 0x100000001b3;
    }
    return hash;
}

// -- the nodes of a graph, as they are computed --

// Compares what a match names, before and after, with the convolution in double.
struct watcher {
    std::vector<ggml_tensor *> nodes;
    std::vector<conv_match>    matches;      // of an earlier token, whose graph is used again
    uint64_t                   right = 0;    // of the matches, the convolution as it is defined
    std::vector<float>         states, out;  // expected of the one that is computed

    // asked before a node is computed whether to stop after it, and called there
    bool watch(ggml_tensor * node, bool ask) {
        bool stop = !ask;
        if (ask) {
            nodes.push_back(node);
        }
        for (const conv_match & m : matches) {
            const bool begins = node == m.cells->src[0]->src[0], ends = node == m.out;
            stop = stop || begins || ends;
            if (begins && !ask) {
                expect(m);
            }
            if (ends && !ask) {
                right += read(m.cells) == states && agrees(read(m.out));
            }
        }
        return stop;
    }

  private:
    static std::vector<float> read(const ggml_tensor * tensor) {
        std::vector<float> x(ggml_nbytes(tensor) / sizeof(float));
        ggml_backend_tensor_get(tensor, x.data(), 0, x.size() * sizeof(float));
        return x;
    }

    // after the windows were joined, before their last inputs are copied
    void expect(const conv_match & m) {
        const std::vector<float> kept = read(m.states), x = read(m.x), weights = read(m.weights);
        const size_t             channels = m.states->ne[1], stride = m.x->nb[2] / sizeof(float);
        states.clear();
        out.clear();
        for (size_t i = 0; i < kept.size() / 3; ++i) {
            const float window[] = {kept[3 * i], kept[3 * i + 1], kept[3 * i + 2], x[i / channels * stride + i % channels]};
            double      sum      = 0.0;
            for (int j = 0; j < 4; ++j) {
                sum += (double) window[j] * weights[i % channels * 4 + j];
            }
            states.insert(states.end(), window + 1, window + 4);
            out.push_back((float) (sum / (1.0 + std::exp(-sum))));
        }
    }

    bool agrees(const std::vector<float> & got) const {
        bool all = got.size() == out.size();
        for (size_t i = 0; i < out.size() && all; ++i) {
            all = std::fabs(got[i] - out[i]) <= 1e-5f * (1.0f + std::fabs(out[i]));
        }
        return all;
    }
};

// -- a context with sequences --

struct decoder {
    llama_model *          model = nullptr;
    llama_context *        ctx   = nullptr;
    std::vector<llama_pos> next  = std::vector<llama_pos>(SEQS, 0);

    decoder(const char * path, ggml_type type_s, watcher * by = nullptr) {
        ggml_backend_load_all();
        llama_model_params with = llama_model_default_params();
        with.n_gpu_layers       = 99;
        model                   = llama_model_load_from_file(path, with);
        if (model) {
            llama_context_params params = llama_context_default_params();
            params.n_ctx                = 64 * SEQS;
            params.n_seq_max            = SEQS;
            params.n_threads            = 2;
            params.n_threads_batch      = 2;
            params.type_s               = type_s;
            params.cb_eval              = by ? watch : nullptr;
            params.cb_eval_user_data    = by;
            ctx                         = llama_init_from_model(model, params);
        }
    }

    decoder(const decoder &) = delete;

    static bool watch(ggml_tensor * node, bool ask, void * by) { return ((watcher *) by)->watch(node, ask); }

    ~decoder() {
        llama_free(ctx);
        llama_model_free(model);
    }

    llama_memory_t memory() const { return llama_get_memory(ctx); }

    // so many tokens for each of some sequences, in one ubatch; returns all logits, {} where it fails
    std::vector<float> decode(const std::vector<int> & seqs, int n_tokens) {
        const int          n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
        llama_batch        batch   = llama_batch_init(SEQS * n_tokens, 0, 1);
        std::vector<float> logits;
        for (const int seq : seqs) {
            for (int i = 0; i < n_tokens; ++i) {
                const int at        = batch.n_tokens++;
                batch.token[at]     = (next[seq] * 7919 + seq * 104729 + 17) % n_vocab;
                batch.pos[at]       = next[seq]++;
                batch.n_seq_id[at]  = 1;
                batch.seq_id[at][0] = seq;
                batch.logits[at]    = true;
            }
        }
        if (llama_decode(ctx, batch) == 0) {
            for (int i = 0; i < batch.n_tokens; ++i) {
                logits.insert(logits.end(), llama_get_logits_ith(ctx, i), llama_get_logits_ith(ctx, i) + n_vocab);
            }
        }
        llama_batch_free(batch);
        return logits;
    }

    // the recurrent state alone, or all of a sequence
    bytes_t state(int seq, llama_state_seq_flags flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) const {
        bytes_t bytes(llama_state_seq_get_size_ext(ctx, seq, flags));
        bytes.resize(llama_state_seq_get_data_ext(ctx, bytes.data(), bytes.size(), seq, flags));
        return bytes;
    }

    bool restore(int seq, const bytes_t & bytes) {
        const auto flags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;
        return llama_state_seq_set_data_ext(ctx, bytes.data(), bytes.size(), seq, flags) == bytes.size();
    }

    void forget(int seq) {
        llama_memory_seq_rm(memory(), seq, -1, -1);
        next[seq] = 0;
    }
};

// -- saved bytes --

// A header; then a type, a row's size and the row for each layer, of the convolutions first and then of the nets.
static std::vector<bytes_t> rows_of(const bytes_t & saved, size_t at) {
    std::vector<bytes_t> rows;
    while (at + 12 <= saved.size()) {
        uint64_t size;
        memcpy(&size, saved.data() + at + 4, sizeof(size));
        at += 12;
        if (size > saved.size() - at) {
            return {};
        }
        rows.emplace_back(saved.begin() + at, saved.begin() + at + size);
        at += size;
    }
    return rows;
}

static size_t first_row(const bytes_t & saved) {
    for (size_t at = 0; at < 64; at += 4) {
        size_t end = at;
        for (const bytes_t & row : rows_of(saved, at)) {
            end += 12 + row.size();
        }
        if (end == saved.size() && end > at) {
            return at;
        }
    }
    return saved.size();
}

// The bytes of `saved` with the convolutions' states of `other`; turned: each window's oldest input last.
static bytes_t with_convolutions(bytes_t saved, const bytes_t & other, bool turned = false) {
    size_t                     at   = first_row(other);
    const std::vector<bytes_t> rows = rows_of(other, at);
    for (size_t layer = 0; layer < rows.size() / 2; ++layer) {
        at += 12;
        for (size_t i = 0; i + 4 <= rows[layer].size(); i += 4) {
            const size_t from = turned ? i / 12 * 12 + 8 - i % 12 : i;
            memcpy(saved.data() + at + i, rows[layer].data() + from, 4);
        }
        at += rows[layer].size();
    }
    return saved;
}

// The bytes of `saved` with nets' states of 0.
static bytes_t without_nets(bytes_t saved) {
    size_t                     at   = first_row(saved);
    const std::vector<bytes_t> rows = rows_of(saved, at);
    for (size_t layer = 0; layer < rows.size(); ++layer) {
        at += 12;
        if (layer >= rows.size() / 2) {
            memset(saved.data() + at, 0, rows[layer].size());
        }
        at += rows[layer].size();
    }
    return saved;
}

// -- in place or not --

enum class fault { NONE, WRITE_SKIPPED, NEIGHBOUR, STALE, PERMUTED, TURNED };

static std::vector<int> all_but(int without = -1, bool reversed = false) {
    std::vector<int> seqs;
    for (int i = 0; i < SEQS; ++i) {
        if (i != without) {
            seqs.insert(reversed ? seqs.begin() : seqs.end(), i);
        }
    }
    return seqs;
}

// convs: the fault is in the convolutions' states alone
static hashes_t scenario(const char * path, fault planted, bool convs = false) {
    decoder  d(path, GGML_TYPE_F32);
    hashes_t hashes;
    bool     whole = d.ctx != nullptr;
    const auto step = [&](const std::vector<int> & seqs, int n_tokens = 1) {
        const std::vector<float> logits = whole ? d.decode(seqs, n_tokens) : std::vector<float>();
        uint64_t                 states = fnv(nullptr, 0);
        whole                           = !logits.empty();
        for (int seq = 0; seq < SEQS && whole; ++seq) {
            const bytes_t bytes = d.state(seq, LLAMA_STATE_SEQ_FLAGS_NONE);
            states              = fnv(bytes.data(), bytes.size(), states);
        }
        hashes.push_back(fnv(logits.data(), logits.size() * sizeof(float)));
        hashes.push_back(states);
    };

    const auto put = [&](int seq, const bytes_t & other) {
        d.restore(seq, convs ? with_convolutions(d.state(seq), other) : other);
    };

    step(all_but(), 5);
    step(all_but());
    if (!whole) {
        return {};
    }
    const bytes_t before = d.state(1), neighbour = d.state(2);
    step(all_but());
    if (planted == fault::WRITE_SKIPPED) {
        put(1, before);
    }
    if (planted == fault::NEIGHBOUR) {
        put(1, neighbour);
    }
    if (planted == fault::TURNED) {
        d.restore(1, with_convolutions(d.state(1), d.state(1), true));
    }
    step(all_but());

    d.forget(SEQS - 1);
    llama_memory_seq_cp(d.memory(), 0, SEQS - 1, -1, -1);
    d.next[SEQS - 1] = d.next[0];
    if (planted == fault::PERMUTED) {
        const bytes_t first = d.state(0), second = d.state(1);
        put(0, second);
        put(1, first);
    }
    step(all_but());
    step(all_but());

    step(all_but(1));
    step(all_but());
    step(all_but());

    d.forget(2);
    step(all_but());
    step(all_but());

    step(all_but(-1, true));
    step(all_but(-1, true));
    step({0}, 4);
    step({0});

    bytes_t old = d.state(0);
    llama_memory_clear(d.memory(), true);
    d.next.assign(SEQS, 0);
    if (planted == fault::STALE) {
        memset(old.data() + sizeof(uint32_t), 0xFF, sizeof(llama_pos));  // at position -1, before the first token
        d.restore(0, convs ? without_nets(old) : old);
    }
    step(all_but(), 3);
    step(all_but());
    step(all_but());
    return whole ? hashes : hashes_t();
}

// Hashes of a run in a process of its own; {} where it failed.
static hashes_t forked(const char * state, const char * conv, const std::function<hashes_t()> & run) {
    int ends[2];
    if (pipe(ends) != 0) {
        return {};
    }
    const pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        setenv("LLAMA_GDN_STATE", state, 1);
        setenv("LLAMA_GDN_CONV", conv, 1);
        const hashes_t hashes = run();
        const ssize_t  size   = (ssize_t) (hashes.size() * sizeof(uint64_t));
        _exit(write(ends[1], hashes.data(), size) == size ? 0 : 1);
    }
    close(ends[1]);
    hashes_t hashes;
    uint64_t hash;
    while (read(ends[0], &hash, sizeof(hash)) == sizeof(hash)) {
        hashes.push_back(hash);
    }
    close(ends[0]);
    int status = 1;
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0 ? hashes : hashes_t();
}

// -- convolutions as one kernel --

struct graph {
    ggml_context * ctx;
    ggml_cgraph *  nodes;

    explicit graph(const std::vector<ggml_tensor *> & of)
        : ctx(ggml_init({ggml_graph_overhead_custom(8192, false), nullptr, true})),
          nodes(ggml_new_graph_custom(ctx, 8192, false)) {
        for (ggml_tensor * node : of) {
            ggml_build_forward_expand(nodes, node);
        }
    }

    graph(const graph &) = delete;

    ~graph() { ggml_free(ctx); }

    std::vector<conv_match> matches() const {
        std::vector<conv_match> all;
        conv_match              m;
        for (int i = 0; i < nodes->n_nodes; ++i) {
            if (conv_match_find(nodes, i, m)) {
                all.push_back(m);
            }
        }
        return all;
    }
};

// How many of the spoilt graphs still match: another reader, memory that overlaps, another order of reading and writing.
static uint64_t spoilt_matches(const std::vector<ggml_tensor *> & of) {
    const graph      whole(of);
    const conv_match m       = whole.matches()[0];
    const size_t     n       = whole.matches().size();
    uint64_t         missed  = 0;
    const auto       without = [&](void *& data, const void * moved) {
        void * const kept = data;
        data              = const_cast<void *>(moved);
        missed += whole.matches().size() != n - 1;
        data = kept;
    };
    void *& cells = const_cast<ggml_tensor *>(m.cells)->data;
    void *& out   = const_cast<ggml_tensor *>(m.out)->data;
    without(cells, (const char *) m.states->data + sizeof(float));
    without(cells, m.x->data);
    without(out, (const char *) m.x->data + sizeof(float));
    without(out, m.states->data);

    std::vector<ggml_tensor *> late = of;  // the copy after the convolution and its SiLU
    const auto                 copy = std::find(late.begin(), late.end(), m.cells);
    late.erase(copy);
    late.insert(std::find(late.begin(), late.end(), m.out) + 1, const_cast<ggml_tensor *>(m.cells));
    missed += graph(late).matches().size() != n - 1;

    ggml_context * more = ggml_init({ggml_tensor_overhead(), nullptr, true});
    std::vector<ggml_tensor *> read = of;
    read.push_back(ggml_cont(more, m.cells->src[0]->src[0]));
    missed += graph(read).matches().size() != n - 1;
    ggml_free(more);
    return missed;
}

// {layers with a convolution; of them one kernel: in a prompt, in a token; those whose match names what they compute; one
// kernel: two tokens after a sequence was copied; spoilt graphs that match}
static hashes_t one_kernel(const char * path) {
    watcher    by;
    decoder    d(path, GGML_TYPE_F32, &by);
    const auto matches = [&](int n_tokens) {
        by.nodes.clear();
        return d.decode(all_but(), n_tokens).empty() ? std::vector<conv_match>() : graph(by.nodes).matches();
    };
    if (!d.ctx) {
        return {};
    }
    const uint64_t prompt = matches(5).size();
    const bytes_t  saved  = d.state(0);
    by.matches            = matches(1);
    const uint64_t token  = by.matches.size();
    matches(1);
    by.matches.clear();
    const uint64_t spoilt = token > 0 ? spoilt_matches(by.nodes) : UINT64_MAX;

    d.forget(SEQS - 1);
    llama_memory_seq_cp(d.memory(), 0, SEQS - 1, -1, -1);
    d.next[SEQS - 1] = d.next[0];
    matches(1);
    return {rows_of(saved, first_row(saved)).size() / 2, prompt, token, by.right, matches(1).size(), spoilt};
}

// -- what is refused --

// {a batch without sequences was taken; one of a sequence beyond the slots; either changed what follows}
static hashes_t beyond(const char * path) {
    decoder  d(path, GGML_TYPE_F32), other(path, GGML_TYPE_F32);
    hashes_t told(3, 0);
    if (!d.ctx || !other.ctx || d.decode(all_but(), 2).empty() || other.decode(all_but(), 2).empty()) {
        return {};
    }
    told[0] = !d.decode({}, 1).empty();

    llama_batch batch  = llama_batch_init(1, 0, 1);
    batch.n_tokens     = 1;
    batch.token[0]     = 1;
    batch.pos[0]       = 0;
    batch.n_seq_id[0]  = 1;
    batch.seq_id[0][0] = SEQS;
    batch.logits[0]    = true;
    told[1]            = llama_decode(d.ctx, batch) == 0;
    llama_batch_free(batch);

    told[2] = d.decode(all_but(), 1) != other.decode(all_but(), 1) || d.state(0) != other.state(0);
    return told;
}

// -- bf16 states --

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static uint16_t rounded(float x) {
    return (uint16_t) ((bits_of(x) + 0x7FFF + (bits_of(x) >> 16 & 1)) >> 16);  // to the nearest, ties to even
}

static uint16_t cut(float x) {
    return (uint16_t) (bits_of(x) >> 16);
}

static float float_of(uint16_t bf16) {
    const uint32_t bits = (uint32_t) bf16 << 16;
    float          x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// Where delta nets' states begin in saved bytes. After a prompt that gave both contexts the same logits, the first of
// their types is what the bytes differ in first.
static size_t first_state(const bytes_t & with_f32, const bytes_t & with_bf16) {
    size_t at = 0;
    while (at < with_bf16.size() && with_f32[at] == with_bf16[at]) {
        ++at;
    }
    return at;
}

// How many of the bf16 states in `narrow` are not those in `wide` made narrow, in the first `layers`; all of a layer where
// one of any layer is far off. n_states counts those of the first layers.
static uint64_t others_of(const bytes_t & wide, const bytes_t & narrow, size_t at, uint16_t (*narrowed)(float),
                          size_t layers, uint64_t & n_states) {
    const std::vector<bytes_t> a = rows_of(wide, at), b = rows_of(narrow, at);
    uint64_t                   others = 0;
    if (a.empty() || a.size() != b.size() || a[0].size() != 2 * b[0].size()) {
        return UINT64_MAX / 2 / SEQS;
    }
    for (size_t row = 0; row < a.size(); ++row) {
        std::vector<float>    x(a[row].size() / 4);
        std::vector<uint16_t> y(x.size());
        memcpy(x.data(), a[row].data(), 4 * x.size());
        memcpy(y.data(), b[row].data(), 2 * y.size());
        float largest = 0.0f;
        for (const float each : x) {
            largest = std::max(largest, std::fabs(each));
        }
        for (size_t i = 0; i < x.size(); ++i) {
            const bool far = !(std::fabs(x[i] - float_of(y[i])) <= 0.01f * largest);
            others += far ? x.size() : row < layers && narrowed(x[i]) != y[i];
        }
        n_states += row < layers ? x.size() : 0;
    }
    return others;
}

// The bytes of f32 states, with the values of bf16 ones in them.
static bytes_t widened(bytes_t wide, const bytes_t & narrow, size_t at) {
    for (const bytes_t & row : rows_of(narrow, at)) {
        at += 12;
        for (size_t i = 0; i < row.size() / 2; ++i) {
            memset(wide.data() + at, 0, 2);
            memcpy(wide.data() + at + 2, row.data() + 2 * i, 2);
            at += 4;
        }
    }
    return wide;
}

// {states that differ after a prompt; after a token from the same states, in the first layers; there from cut ones; of so
// many after the prompt; logits differ in the prompt; in the token; a saved state of another type was taken; of so many
// after the token}
static hashes_t storage(const char * path, size_t layers) {
    decoder  f32(path, GGML_TYPE_F32), bf16(path, GGML_TYPE_BF16);
    hashes_t told(8, 0);
    size_t   at = 0;
    if (!f32.ctx || !bf16.ctx) {
        return {};
    }
    told[4] = f32.decode(all_but(), 5) != bf16.decode(all_but(), 5);
    for (int seq = 0; seq < SEQS; ++seq) {
        const bytes_t wide = f32.state(seq), narrow = bf16.state(seq);
        at = first_state(wide, narrow);
        told[0] += others_of(wide, narrow, at, rounded, SIZE_MAX, told[3]);
        if (!f32.restore(seq, widened(wide, narrow, at))) {
            return {};
        }
    }
    told[5]       = f32.decode(all_but(), 1) != bf16.decode(all_but(), 1);
    uint64_t same = 0;
    for (int seq = 0; seq < SEQS; ++seq) {
        const bytes_t wide = f32.state(seq), narrow = bf16.state(seq);
        told[1] += others_of(wide, narrow, at, rounded, layers, told[7]);
        told[2] += others_of(wide, narrow, at, cut, layers, same);
    }
    told[6] = f32.restore(0, bf16.state(0)) || bf16.restore(1, f32.state(1));
    return told;
}

// -- all --

static bool passed = true;

static void judge(bool right, const std::string & what, const std::string & why = "") {
    fprintf(stderr, "%s %s%s%s\n", right ? "ok  " : "FAIL", what.c_str(), right || why.empty() ? "" : ": ", right ? "" : why.c_str());
    passed = passed && right;
}

static void in_place(const char * path) {
    const hashes_t stock = forked("0", "0", [&] { return scenario(path, fault::NONE); });
    judge(!stock.empty(), "the model is decoded");
    const auto equal = [&](const char * state, const char * conv) {
        const hashes_t ours  = forked(state, conv, [&] { return scenario(path, fault::NONE); });
        size_t         first = 0;
        while (first < stock.size() && first < ours.size() && stock[first] == ours[first]) {
            ++first;
        }
        const std::string with = std::string("with LLAMA_GDN_STATE=") + state + " and LLAMA_GDN_CONV=" + conv;
        const char *      what = first % 2 ? "states" : "logits";
        judge(!stock.empty() && stock == ours, with + " logits and saved states have every byte of the pin's",
              std::string(what) + " of step " + std::to_string(first / 2) + " differ");
    };
    equal("1", "0");
    equal("1", "1");
    const auto seen = [&](const char * name, fault planted, bool convs) {
        const hashes_t wrong = forked("1", "1", [&] { return scenario(path, planted, convs); });
        judge(wrong.size() == stock.size() && wrong != stock,
              std::string(name) + (convs ? ", of the convolutions alone," : "") + " is seen");
    };
    for (const bool convs : {false, true}) {
        seen("a write-back that is skipped", fault::WRITE_SKIPPED, convs);
        seen("a neighbour's slot", fault::NEIGHBOUR, convs);
        seen("a stale state after a clear", fault::STALE, convs);
        seen("slots that are permuted after a copy of a sequence", fault::PERMUTED, convs);
    }
    seen("a window in another order", fault::TURNED, true);
}

static void fused(const char * path) {
    const hashes_t told = forked("1", "1", [&] { return one_kernel(path); });
    judge(told.size() == 6 && told[0] > 0, "the model's graphs have convolutions");
    if (told.size() != 6) {
        return;
    }
    const auto is = [&](size_t at, uint64_t expected, const char * what) {
        judge(told[at] == expected, what, std::to_string(told[at]) + " are, and not " + std::to_string(expected));
    };
    is(1, 0, "no convolution of a prompt is one kernel");
    is(2, told[0], "each of a token is");
    is(3, told[0], "each reads and writes what the nodes do");
    is(4, told[0], "each is two tokens after a sequence was copied");
    is(5, 0, "no spoilt graph is");
}

static void refused(const char * path) {
    const hashes_t told = forked("1", "1", [&] { return beyond(path); });
    judge(told.size() == 3 && told[0] == 0, "a batch of no sequences is refused");
    judge(told.size() == 3 && told[1] == 0, "a sequence beyond the slots is refused");
    judge(told.size() == 3 && told[2] == 0, "what was refused changed nothing");
}

// Stock's path is exact. Ours may add in another order: one in a hundred states of the first layer may be rounded another
// way. Its output may then be quantised another way for the next layers' products, so that their states may only not be far
// off.
static void narrow(const char * path, const char * on, bool exact) {
    const hashes_t    told  = forked(on, on, [&] { return storage(path, exact ? SIZE_MAX : 1); });
    const std::string where = std::string("with both variables ") + on + " ";
    judge(told.size() == 8 && told[3] > 0, where + "bf16 states are decoded");
    if (told.size() != 8) {
        return;
    }
    const auto of = [&](size_t differ, size_t all) {
        return std::to_string(told[differ]) + " of " + std::to_string(told[all]) + " states differ";
    };
    judge(told[4] == 0, where + "a prompt in one ubatch has the logits of f32 states");
    judge(told[0] == 0, where + "its bf16 states are the f32 ones, rounded", of(0, 3));
    judge(told[1] <= (exact ? 0 : told[7] / 100), where + "a token later they are too", of(1, 7));
    judge(!exact || told[5] == 0, where + "and the token has the same logits");
    judge(told[2] > told[7] / 100, where + "states that are not rounded are seen");
    judge(told[6] == 0, where + "a saved state of the other type is refused");
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL\n", argv[0]);
        return 2;
    }
    const auto errors = [](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fprintf(stderr, "%s", text);
        }
    };
    llama_log_set(errors, nullptr);
    in_place(argv[1]);
    fused(argv[1]);
    refused(argv[1]);
    narrow(argv[1], "0", true);
    narrow(argv[1], "1", false);
    fprintf(stderr, "%s\n", passed ? "passed" : "FAILED");
    return passed ? 0 : 1;
}
