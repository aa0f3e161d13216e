// Kernel times of a process, with no profiler installed and no privileges: preloaded, and named in
// CUDA_INJECTION64_PATH, this library records every kernel, copy and memset by CUPTI's activity API, those inside CUDA
// graphs node by node, and marks each call of llama_decode. It writes tab-separated lines to TRACE_OUT:
//
//   trace    1 PROGRAM PID                                     the version of this format
//   kernel   NUMBER DEVICE GRID BLOCK REGISTERS NAME           what is launched, each once
//   pass     TOKENS BEGIN END                                  a call of llama_decode and all its work
//   launch   NUMBER STREAM NODE START DURATION                 one launch; NODE is 0 outside a graph
//   end      PASSES LAUNCHES DROPPED                           without this line the file was cut short
//
// Times are nanoseconds on CUPTI's clock. A kernel belongs to the pass that it starts in: the pass ends with a
// synchronisation, so no kernel is still running when the next begins.

#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr size_t BUFFER = 8 << 20;

struct Pass {
    int32_t tokens;
    uint64_t begin, end;
};

struct Launch {
    uint32_t kernel, stream;
    uint64_t node, start, end;
};

// leaked on purpose: CUPTI may deliver records while static objects are being destroyed
struct State {
    std::mutex lock;
    std::map<std::string, uint32_t> kernels;  // a kernel's line, by which it is numbered
    std::vector<std::string> lines;
    std::vector<Launch> launches;
    std::vector<Pass> passes;
    size_t dropped = 0;
};
State & state = *new State;

uint64_t now() {
    uint64_t time = 0;
    cuptiGetTimestamp(&time);
    return time;
}

std::string demangled(const char * name) {
    int status = 0;
    char * text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string result = status == 0 ? text : name;
    free(text);
    return result;
}

// Number what is launched: by its shape and its name as CUPTI has it, which is demangled once.
uint32_t number(const std::string & shape, const char * name) {
    auto [place, is_new] = state.kernels.try_emplace(shape + name, uint32_t(state.lines.size()));
    if (is_new) {
        state.lines.push_back(shape + demangled(name));
    }
    return place->second;
}

std::string shape_of(const CUpti_ActivityKernel10 & k) {
    char text[160];
    snprintf(text, sizeof(text), "%u\t%d,%d,%d\t%d,%d,%d\t%u\t", k.deviceId, k.gridX, k.gridY, k.gridZ, k.blockX,
             k.blockY, k.blockZ, k.registersPerThread);
    return text;
}

std::string shape_of(uint32_t device) {
    return std::to_string(device) + "\t-\t-\t0\t";
}

const char * name_of(uint8_t copy) {
    switch (copy) {
        case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD: return "[memcpy host to device]";
        case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH: return "[memcpy device to host]";
        case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD: return "[memcpy device to device]";
        default: return "[memcpy]";
    }
}

template <class Record> void add(const Record & r, uint32_t kernel) {
    state.launches.push_back({kernel, r.streamId, r.graphNodeId, r.start, r.end});
}

void CUPTIAPI requested(uint8_t ** buffer, size_t * size, size_t * records) {
    *size = BUFFER;
    *records = 0;
    *buffer = static_cast<uint8_t *>(aligned_alloc(8, BUFFER));
}

void CUPTIAPI completed(CUcontext context, uint32_t stream, uint8_t * buffer, size_t, size_t valid) {
    std::lock_guard<std::mutex> guard(state.lock);
    CUpti_Activity * record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            auto & r = *reinterpret_cast<CUpti_ActivityKernel10 *>(record);
            add(r, number(shape_of(r), r.name));
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            auto & r = *reinterpret_cast<CUpti_ActivityMemcpy6 *>(record);
            add(r, number(shape_of(r.deviceId), name_of(r.copyKind)));
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            auto & r = *reinterpret_cast<CUpti_ActivityMemset4 *>(record);
            add(r, number(shape_of(r.deviceId), "[memset]"));
        }
    }
    size_t dropped = 0;
    cuptiActivityGetNumDroppedRecords(context, stream, &dropped);
    state.dropped += dropped;
    free(buffer);
}

void write() {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    std::lock_guard<std::mutex> guard(state.lock);
    const char * path = getenv("TRACE_OUT");
    FILE * file = path ? fopen(path, "w") : nullptr;
    if (!file) {
        fprintf(stderr, "trace: TRACE_OUT is no file that can be written\n");
        return;
    }
    char program[PATH_MAX] = "";
    if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0) {
        program[0] = 0;
    }
    fprintf(file, "trace\t1\t%s\t%d\n", program, getpid());
    for (size_t i = 0; i < state.lines.size(); i++) {
        fprintf(file, "kernel\t%zu\t%s\n", i, state.lines[i].c_str());
    }
    using number = unsigned long long;
    for (const Pass & p : state.passes) {
        fprintf(file, "pass\t%d\t%llu\t%llu\n", p.tokens, number(p.begin), number(p.end));
    }
    for (const Launch & l : state.launches) {
        fprintf(file, "launch\t%u\t%u\t%llu\t%llu\t%llu\n", l.kernel, l.stream, number(l.node), number(l.start),
                number(l.end - l.start));
    }
    fprintf(file, "end\t%zu\t%zu\t%zu\n", state.passes.size(), state.launches.size(), state.dropped);
    fclose(file);
}

bool ok(CUptiResult result, const char * what) {
    const char * text = "";
    if (result != CUPTI_SUCCESS) {
        cuptiGetResultString(result, &text);
        fprintf(stderr, "trace: %s: %s\n", what, text);
    }
    return result == CUPTI_SUCCESS;
}

}  // namespace

// The driver calls this when CUDA starts; 1 is success.
extern "C" int InitializeInjection() {
    if (!ok(cuptiActivityRegisterCallbacks(requested, completed), "callbacks")) {
        return 0;
    }
    bool enabled = true;
    for (auto kind :
         {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET}) {
        enabled = ok(cuptiActivityEnable(kind), "activity") && enabled;
    }
    return enabled && atexit(write) == 0;
}

// As in llama.h: the number of tokens, then six pointers. It is passed on unread.
struct Batch {
    int32_t tokens;
    void * rest[6];
};

// In place of libllama's: the same call, marked, with all of its work done when it returns.
extern "C" int32_t llama_decode(void * context, Batch batch) {
    static auto decode = reinterpret_cast<int32_t (*)(void *, Batch)>(dlsym(RTLD_NEXT, "llama_decode"));
    static auto synchronize = reinterpret_cast<void (*)(void *)>(dlsym(RTLD_NEXT, "llama_synchronize"));
    uint64_t begin = now();
    int32_t status = decode(context, batch);
    synchronize(context);
    uint64_t end = now();  // before waiting for the lock
    std::lock_guard<std::mutex> guard(state.lock);
    state.passes.push_back({batch.tokens, begin, end});
    return status;
}
