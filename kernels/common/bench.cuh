// Timing of kernels side by side, and the JSON lines that `dgxlab import` reads.
//
// A sample is one run over all buffer sets, several launches between two events, divided by the launches: what a launch
// costs in a stream of them, without the two microseconds that an event adds. The contenders take turns sample by
// sample, so that a drifting clock meets them all alike. Cold: as many buffer sets as it takes that a set comes back
// only after 3 x L2 of other traffic. Warm: one set.

#pragma once

#include "check.cuh"

#include <algorithm>
#include <cuda_runtime.h>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

static constexpr int SAMPLES = 21;

struct contender {
    std::string                            name;
    int64_t                                bytes;   // read + written by one launch
    std::function<void(int, cudaStream_t)> launch;  // on that buffer set
};

struct timing {
    std::vector<double> time_us;
    std::vector<double> sm_clock_mhz;
};

static inline double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    const size_t half = x.size() / 2;
    return x.size() % 2 ? x[half] : (x[half - 1] + x[half]) / 2;
}

static inline double median_deviation(const std::vector<double> & x) {
    std::vector<double> away;
    for (const double each : x) {
        away.push_back(std::fabs(each - median(x)));
    }
    return median(away);
}

// -- clock --

static __device__ __forceinline__ uint64_t globaltimer_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

// The timer moves in steps: both ends of the interval wait for one.
static __global__ void clock_probe(float * mhz) {
    const uint64_t seen = globaltimer_ns();
    uint64_t       from = seen;
    while (from == seen) {
        from = globaltimer_ns();
    }
    const int64_t cycles = clock64();
    uint64_t      to     = from;
    while (to < from + 20000) {
        to = globaltimer_ns();
    }
    *mhz = 1e3f * (float) (clock64() - cycles) / (float) (to - from);
}

// -- measuring --

class bench {
  public:
    bench() {
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreate(&start_));
        CUDA_CHECK(cudaEventCreate(&stop_));
        CUDA_CHECK(cudaMallocHost(&mhz_, sizeof(float)));
    }

    ~bench() {
        cudaFreeHost(mhz_);
        cudaEventDestroy(stop_);
        cudaEventDestroy(start_);
        cudaStreamDestroy(stream_);
    }

    bench(const bench &)             = delete;
    bench & operator=(const bench &) = delete;

    // One timing for each contender; the first sample of each is a warmup.
    std::vector<timing> measure(const std::vector<contender> & all, int n_sets, int launches, int samples = SAMPLES) {
        std::vector<timing> timings(all.size());
        for (int i = -1; i < samples; ++i) {
            for (size_t c = 0; c < all.size(); ++c) {
                const double us  = sample_us(all[c], n_sets, launches);
                const double mhz = sm_clock_mhz();
                if (i >= 0) {
                    timings[c].time_us.push_back(us);
                    timings[c].sm_clock_mhz.push_back(mhz);
                }
            }
        }
        return timings;
    }

  private:
    double sample_us(const contender & c, int n_sets, int launches) {
        c.launch(n_sets - 1, stream_);  // so that the first timed launch waits in line, and finds L2 as the others do
        CUDA_CHECK(cudaEventRecord(start_, stream_));
        for (int i = 0; i < launches; ++i) {
            c.launch(i % n_sets, stream_);
        }
        CUDA_CHECK(cudaEventRecord(stop_, stream_));
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaEventSynchronize(stop_));
        float ms = 0.0f;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start_, stop_));
        return 1e3 * ms / launches;
    }

    double sm_clock_mhz() {
        clock_probe<<<1, 1, 0, stream_>>>(mhz_);
        CUDA_CHECK(cudaGetLastError());
        CUDA_CHECK(cudaStreamSynchronize(stream_));
        return *mhz_;
    }

    cudaStream_t stream_;
    cudaEvent_t  start_, stop_;
    float *      mhz_;
};

// How many sets of that many bytes a cold measurement rotates through.
static inline int cold_sets(int64_t bytes_per_set) {
    int device = 0;
    int l2     = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device));
    return 1 + (int) ((3LL * l2 + bytes_per_set - 1) / bytes_per_set);
}

// -- JSON lines --

class json_line {
  public:
    json_line & add(const char * key, const std::string & value) { return raw(key, '"' + value + '"'); }
    json_line & add(const char * key, const char * value) { return add(key, std::string(value)); }
    json_line & add(const char * key, int64_t value) { return raw(key, std::to_string(value)); }
    json_line & add(const char * key, bool value) { return raw(key, value ? "true" : "false"); }

    json_line & add(const char * key, const std::vector<double> & values) {
        std::string list;
        char        number[32];
        for (const double value : values) {
            snprintf(number, sizeof(number), "%s%.6g", list.empty() ? "" : ",", value);
            list += number;
        }
        return raw(key, '[' + list + ']');
    }

    void print() const {
        printf("{%s}\n", text_.c_str());
        fflush(stdout);
    }

  private:
    json_line & raw(const char * key, const std::string & value) {
        text_ += (text_.empty() ? "\"" : ",\"") + std::string(key) + "\":" + value;
        return *this;
    }

    std::string text_;
};

static inline std::string today() {
    const time_t now = time(nullptr);
    char         text[16];
    strftime(text, sizeof(text), "%Y-%m-%d", gmtime(&now));
    return text;
}

// GB/s of each sample.
static inline std::vector<double> bandwidth(const contender & c, const timing & t) {
    std::vector<double> gb_s;
    for (const double us : t.time_us) {
        gb_s.push_back(1e-3 * c.bytes / us);
    }
    return gb_s;
}

// What every line ends with: the samples, and where and when they were taken.
static inline json_line & add_samples(json_line & line, const contender & c, const timing & t) {
    cudaDeviceProp gpu;
    CUDA_CHECK(cudaGetDeviceProperties(&gpu, 0));
    return line.add("time_us", t.time_us)
        .add("bandwidth_gb_s", bandwidth(c, t))
        .add("sm_clock_mhz", t.sm_clock_mhz)
        .add("gpu", gpu.name)
        .add("arch", "sm_" + std::to_string(10 * gpu.major + gpu.minor))
        .add("date", today());
}
