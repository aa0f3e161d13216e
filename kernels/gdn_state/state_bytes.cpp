// Saved states of several sequences, byte for byte, in a llama.cpp that has the series gdn-state.
//
//   gdn-state-bytes MODEL    exit status 0 if everything is right; MODEL has a gated delta net
//
// Sequences are decoded, copied, left out, begun anew, reversed and cleared. After each step the logits and the saved state
// of each sequence are hashed. LLAMA_GDN_STATE=1 must give the hashes of 0. It is read once a process, so that each run
// is a process of its own, forked before the library is used. Faults are planted through saved states, and must be seen.
//
// Then bf16 states: from the same state, a step must store what f32 states are when rounded. Exactly so without the
// path; the path's kernel adds in another order, by which a rounding in a hundred may be another.

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

// -- a context with sequences --

struct decoder {
    llama_model *          model = nullptr;
    llama_context *        ctx   = nullptr;
    std::vector<llama_pos> next  = std::vector<llama_pos>(SEQS, 0);

    decoder(const char * path, ggml_type type_s) {
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
            ctx                         = llama_init_from_model(model, params);
        }
    }

    decoder(const decoder &) = delete;

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

// -- in place or not --

enum class fault { NONE, WRITE_SKIPPED, NEIGHBOUR, STALE, PERMUTED };

static std::vector<int> all_but(int without = -1, bool reversed = false) {
    std::vector<int> seqs;
    for (int i = 0; i < SEQS; ++i) {
        if (i != without) {
            seqs.insert(reversed ? seqs.begin() : seqs.end(), i);
        }
    }
    return seqs;
}

static hashes_t scenario(const char * path, fault planted) {
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

    step(all_but(), 5);
    step(all_but());
    if (!whole) {
        return {};
    }
    const bytes_t before = d.state(1), neighbour = d.state(2);
    step(all_but());
    if (planted == fault::WRITE_SKIPPED) {
        d.restore(1, before);
    }
    if (planted == fault::NEIGHBOUR) {
        d.restore(1, neighbour);
    }
    step(all_but());

    d.forget(SEQS - 1);
    llama_memory_seq_cp(d.memory(), 0, SEQS - 1, -1, -1);
    d.next[SEQS - 1] = d.next[0];
    if (planted == fault::PERMUTED) {
        const bytes_t first = d.state(0), second = d.state(1);
        d.restore(0, second);
        d.restore(1, first);
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
        d.restore(0, old);
    }
    step(all_but(), 3);
    step(all_but());
    step(all_but());
    return whole ? hashes : hashes_t();
}

// Hashes of a run in a process of its own; {} where it failed.
static hashes_t forked(const char * on, const std::function<hashes_t()> & run) {
    int ends[2];
    if (pipe(ends) != 0) {
        return {};
    }
    const pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        setenv("LLAMA_GDN_STATE", on, 1);
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

// Where delta nets' states begin in saved bytes. They are last: a type, a row's size and the row for each layer. After a
// prompt that gave both contexts the same logits, the first of these types is what the bytes differ in first.
static size_t first_state(const bytes_t & with_f32, const bytes_t & with_bf16) {
    size_t at = 0;
    while (at < with_bf16.size() && with_f32[at] == with_bf16[at]) {
        ++at;
    }
    return at;
}

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

// How many of the bf16 states in `narrow` are not those in `wide` made narrow; all of a row where one is far off.
static uint64_t others_of(const bytes_t & wide, const bytes_t & narrow, size_t at, uint16_t (*narrowed)(float),
                          uint64_t & n_states) {
    const std::vector<bytes_t> a = rows_of(wide, at), b = rows_of(narrow, at);
    uint64_t                   others = 0;
    if (a.empty() || a.size() != b.size() || a[0].size() != 2 * b[0].size()) {
        return UINT64_MAX / 2 / SEQS;
    }
    for (size_t row = 0; row < a.size(); ++row) {
        float largest = 0.0f;
        for (size_t i = 0; i < b[row].size() / 2; ++i, ++n_states) {
            float    x;
            uint16_t y;
            memcpy(&x, a[row].data() + 4 * i, sizeof(x));
            memcpy(&y, b[row].data() + 2 * i, sizeof(y));
            largest        = std::max(largest, std::fabs(x));
            const bool far = !(std::fabs(x - float_of(y)) <= 0.01f * largest);
            others += far ? b[row].size() : narrowed(x) != y;
        }
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

// {states that differ after a prompt; after a token from the same states; there from cut ones; of so many; logits
// differ in the prompt; in the token; a saved state of another type was taken}
static hashes_t storage(const char * path) {
    decoder  f32(path, GGML_TYPE_F32), bf16(path, GGML_TYPE_BF16);
    hashes_t told(7, 0);
    size_t   at = 0;
    if (!f32.ctx || !bf16.ctx) {
        return {};
    }
    told[4] = f32.decode(all_but(), 5) != bf16.decode(all_but(), 5);
    for (int seq = 0; seq < SEQS; ++seq) {
        const bytes_t wide = f32.state(seq), narrow = bf16.state(seq);
        at = first_state(wide, narrow);
        told[0] += others_of(wide, narrow, at, rounded, told[3]);
        if (!f32.restore(seq, widened(wide, narrow, at))) {
            return {};
        }
    }
    told[5]       = f32.decode(all_but(), 1) != bf16.decode(all_but(), 1);
    uint64_t same = 0;
    for (int seq = 0; seq < SEQS; ++seq) {
        const bytes_t wide = f32.state(seq), narrow = bf16.state(seq);
        told[1] += others_of(wide, narrow, at, rounded, same);
        told[2] += others_of(wide, narrow, at, cut, same);
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
    const hashes_t stock = forked("0", [&] { return scenario(path, fault::NONE); });
    const hashes_t ours  = forked("1", [&] { return scenario(path, fault::NONE); });
    size_t         first = 0;
    while (first < stock.size() && first < ours.size() && stock[first] == ours[first]) {
        ++first;
    }
    const char * what = first % 2 ? "states" : "logits";
    judge(!stock.empty(), "the model is decoded");
    judge(!stock.empty() && stock == ours, "logits and saved states in place have every byte of the pin's",
          std::string(what) + " of step " + std::to_string(first / 2) + " differ");
    const auto seen = [&](const char * name, fault planted) {
        const hashes_t wrong = forked("1", [&] { return scenario(path, planted); });
        judge(wrong.size() == stock.size() && wrong != stock, std::string(name) + " is seen");
    };
    seen("a write-back that is skipped", fault::WRITE_SKIPPED);
    seen("a neighbour's slot", fault::NEIGHBOUR);
    seen("a stale state after a clear", fault::STALE);
    seen("slots that are permuted after a copy of a sequence", fault::PERMUTED);
}

// one_in: of so many states one may have been rounded another way, 0: none
static void narrow(const char * path, const char * on, uint64_t one_in) {
    const hashes_t    told  = forked(on, [&] { return storage(path); });
    const std::string where = std::string("with LLAMA_GDN_STATE=") + on + " ";
    judge(told.size() == 7 && told[3] > 0, where + "bf16 states are decoded");
    if (told.size() != 7) {
        return;
    }
    const uint64_t    allowed = one_in ? told[3] / one_in : 0;
    const std::string of      = " of " + std::to_string(told[3]) + " states differ";
    judge(told[4] == 0, where + "a prompt in one ubatch has the logits of f32 states");
    judge(told[0] == 0, where + "its bf16 states are the f32 ones, rounded", std::to_string(told[0]) + of);
    judge(told[1] <= allowed, where + "a token later they are too", std::to_string(told[1]) + of);
    judge(one_in || told[5] == 0, where + "and the token has the same logits");
    judge(told[2] > told[3] / 100, where + "states that are not rounded are seen");
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
    narrow(argv[1], "0", 0);
    narrow(argv[1], "1", 100);
    fprintf(stderr, "%s\n", passed ? "passed" : "FAILED");
    return passed ? 0 : 1;
}
