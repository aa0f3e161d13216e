"""A small project that builds like llama.cpp and prints what llama.cpp printed, or misbehaves on request.

Real git, cmake, ninja and a compiler; only the programs are small. The faults of a benchmark (hang, crash, garbage)
cannot be asked of the real ones. TOY in an entry's env chooses the behaviour, TOY_COUNT is a file to count calls in,
TOY_MS makes every launch take so much longer, TOY_HOLD is a file for whose removal each launch waits. TOY_LEDGER is a
file in which each launch writes down, a line each and with tabs between the words, what it really was and printed; with
it no two launches print the same values:

    begin LAUNCH SECONDS PID STDOUT ARGV      SECONDS of the monotonic clock, STDOUT the file that it goes to
    said LAUNCH LINE                          a line of stdout
    end LAUNCH SECONDS                        missing where a signal ended it
"""

import re
from collections.abc import Mapping
from pathlib import Path

from dgxlab.model import Expectation, Experiment, FileModel, ParityGate
from dgxlab.tools import BackendOpsBench, BatchedBench, LlamaBench, ServeBench
from tests import repos

git = repos.git

CMAKE = """cmake_minimum_required(VERSION 3.14)
project(toy C)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
file(GLOB SOURCES ggml/*.c)
add_library(ggml SHARED ${SOURCES})
set_target_properties(ggml PROPERTIES VERSION 0.1 SOVERSION 0)
foreach(tool test-backend-ops llama-bench llama-batched-bench llama-completion llama-perplexity llama-server)
  add_executable(${tool} tools/${tool}.c)
  target_link_libraries(${tool} ggml)
endforeach()
"""

GGML = """#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>
static int ledger = -1;
static long number_of_launch = 0;
long launch(void) { return number_of_launch; }
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
static void note(const char * format, ...) {  /* in one write: others append to the ledger too */
    static char line[1 << 16];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (ledger >= 0 && write(ledger, line, length) != length) { abort(); }
}
static void end(void) { fflush(stdout); note("end\\t%ld\\t%.6f\\n", launch(), now()); }
static void leave(const char * how) {  /* a process that outlives this one by a minute */
    if (fork()) { return; }
    if (strchr(how, 's')) { setsid(); }
    if (strchr(how, 'c')) { for (int fd = 0; fd < 100; fd++) { close(fd); } }
    if (strchr(how, 't')) { signal(SIGTERM, SIG_IGN); }
    for (int i = 0; i < 3000; i++) { usleep(20000); if (strchr(how, 'f') && fork()) { break; } }
    _exit(0);
}
void begin(int argc, char ** argv) {
    if (getenv("TOY_LEAVES")) { leave(getenv("TOY_LEAVES")); }
    char out[4096] = "", words[1 << 14] = "";
    const char * path = getenv("TOY_LEDGER"), * ms = getenv("TOY_MS");
    if (path && (ledger = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)) >= 0) {
        if (readlink("/proc/self/fd/1", out, sizeof out - 1) < 0) { abort(); }
        for (int i = 0; i < argc; i++) { strcat(strcat(words, i ? " " : ""), argv[i]); }
        flock(ledger, LOCK_EX);
        number_of_launch = lseek(ledger, 0, SEEK_END) + 1;  /* no other launch has it */
        note("begin\\t%ld\\t%.6f\\t%d\\t%s\\t%s\\n", launch(), now(), getpid(), out, words);
        flock(ledger, LOCK_UN);
        atexit(end);
    }
    if (ms) { usleep(1000 * atoi(ms)); }
    const char * hold = getenv("TOY_HOLD");
    for (int i = 0; hold && !access(hold, F_OK) && i < 1200; i++) { usleep(100000); }  /* two minutes at most */
}
void say(const char * format, ...) {  /* printf, and every whole line into the ledger */
    static char line[1 << 14];
    static int length = 0;
    va_list args;
    va_start(args, format);
    length += vsnprintf(line + length, sizeof line - length, format, args);
    va_end(args);
    for (char * stop; (stop = strchr(line, '\\n')); memmove(line, stop, length -= stop - line), line[length] = 0) {
        *stop++ = 0;
        puts(line);
        note("said\\t%ld\\t%s\\n", launch(), line);
    }
}
const char * toy(void) { const char * how = getenv("TOY"); return how ? how : ""; }
long calls(void) {
    FILE * file = fopen(getenv("TOY_COUNT"), "a");
    fputc('x', file);
    fflush(file);
    return ftell(file);
}
int first_is_cut(void) { return !strcmp(toy(), "first is cut") && calls() == 1; }
int misbehave(void) {
    if (getenv("TOY_PATH")) { fprintf(stderr, "toy-path: on\\n"); }
    if (!strcmp(toy(), "hang")) { sleep(600); }
    if (!strcmp(toy(), "busy")) { for (double start = now(); now() < start + 1;) {} }
    if (!strcmp(toy(), "crash")) { raise(SIGSEGV); }
    if (!strcmp(toy(), "killed")) { raise(SIGKILL); }
    if (!strcmp(toy(), "status")) { fprintf(stderr, "error: out of toys\\n"); exit(7); }
    if (!strcmp(toy(), "nothing")) { exit(0); }
    return 0;
}
int count(const char * list) { int n = 1; for (; *list; list++) { n += *list == ','; } return n; }
int number(const char * list, int i) { while (i--) { list = strchr(list, ',') + 1; } return atoi(list); }
const char * option(int argc, char ** argv, const char * name, const char * otherwise) {
    for (int i = 1; i + 1 < argc; i++) { if (!strcmp(argv[i], name)) { return argv[i + 1]; } }
    return otherwise;
}
"""

HEAD = "".join(f"#include <{name}.h>\n" for name in ("stdio", "stdlib", "string", "unistd"))
HEAD += "".join(f"{head};\n" for head in re.findall(r"(?m)^((?!static)[a-z].*?\)) \{", GGML))
"""What every program includes and declares: all functions of the library that are not static."""

BACKEND_OPS = """
int main(int argc, char ** argv) {
    const char * op = option(argc, argv, "-o", "MUL_MAT");
    const char * backend = option(argc, argv, "-b", "");
    int name = strcspn(op, "(");
    if (argc == 2) { printf("Usage: test-backend-ops [mode] [-o <op>] [-b <backend>] [-p <regex>] [--output <o>]\\n"); return 1; }
    begin(argc, argv);
    fprintf(stderr, "toy-marker: here\\n");
    if (!strcmp(argv[1], "perf")) {
        misbehave();
        for (int n = 1; n <= 512; n *= 8) {
            say("INSERT INTO test_backend_ops (test_time, build_commit, backend_name, op_name, op_params, test_mode, "
                "supported, passed, error_message, time_us, flops, bandwidth_gb_s, memory_kb, n_runs, "
                "device_description, backend_reg_name) VALUES ('2026-11-20T10:35:06Z', 'unknown', '%s', '%s', "
                "'type_a=q4_0,type_b=f32,m=4096,n=%d,k=14336', 'perf', '1', '1', '', '%ld.5', '%ld000000.25', "
                "'0.000000', '32328', '69864', '', '');\\n", backend, op, n, 100 + n + launch(), 1000 + n + launch());
        }
        return 0;
    }
    int rounding = !strcmp(toy(), "rounding");
    const char *last = rounding ? "type_a=q4_1,type_b=f32,m=16,n=1,k=256,o=1" : "type_a=q4_0,n=9";
    long call = getenv("TOY_COUNT") ? calls() : 1;
    int alone = strchr(op, '(') != NULL, first = (rounding || !strncmp(toy(), "flaky", 5)) && call == 1;
    int failing = !strcmp(toy(), "wrong") || first || (!strcmp(toy(), "wrong in the suite") && !alone);
    int fewer = !strcmp(toy(), "fewer") || (!first && !strcmp(toy(), "flaky, then fewer"));
    if (getenv("TOY_PATH")) { fprintf(stderr, "toy-path: on\\n"); }
    say("Testing 1 devices\\n\\nBackend 1/1: CPU\\n");
    if (strcmp(backend, "CPU")) { say("  Skipping\\n1/1 backends passed\\n\\033[1;32mOK\\033[0m\\n"); return 0; }
    say("  Device description: toy\\n  Device memory: 1 MB (1 MB free)\\n\\n");
    for (int n = 1; n <= 3 - fewer && !alone; n++) {
        say("  %.*s(type_a=f32,n=%d): \\033[1;32mOK\\033[0m\\n", name, op, strcmp(toy(), "one case") ? n : 1);
    }
    say("  %.*s(type_a=f16,n=1): not supported [CPU] \\n", name, op);
    if (failing) { say("[MUL_MAT] ERR = 0.0%s%ld > 0.0005   ", rounding ? "0" : "", call); } else { say("  "); }
    say("%.*s(%s): %s\\n", name, op, last, failing ? "\\033[1;31mFAIL\\033[0m" : "\\033[1;32mOK\\033[0m");
    int total = alone ? 1 : 4 - fewer;
    say("  %d/%d tests passed\\n", total - failing, total);
    if (failing) { say("\\nFailing tests:\\n  MUL_MAT(%s)\\n", last); }
    say("  Backend CPU: %s\\n", failing ? "\\033[1;31mFAIL\\033[0m" : "\\033[1;32mOK\\033[0m");
    say("%d/1 backends passed\\n%s\\n", 1 - failing, failing ? "\\033[1;31mFAIL\\033[0m" : "\\033[1;32mOK\\033[0m");
    return failing;
}
"""

LLAMA_BENCH = """
static long noise(void) {  /* ns, at most 1 % from run to run; with TOY_COUNT the same in every test */
    static unsigned mixed = 0;
    if (mixed || strcmp(toy(), "noisy")) { return 1000 * (mixed % 97); }
    mixed = getenv("TOY_COUNT") ? calls() : getpid();  /* both have a stride, which nothing linear hides */
    mixed = (mixed ^ mixed >> 16) * 0x7feb352du;
    mixed = (mixed ^ mixed >> 15) * 0x846ca68bu;
    return 1000 * ((mixed ^= mixed >> 16) % 97);
}
static long ns(int i) {
    return (i ? 10000000 + 1000 * i + noise() + launch() : 20000000) * (strcmp(toy(), "half") ? 1 : 2);
}
static void row(int pp, int tg, int r) {
    say("{\\"build_commit\\": \\"unknown\\", \\"model_filename\\": \\"m\\", \\"n_prompt\\": %d, \\"n_gen\\": %d, "
           "\\"n_depth\\": 0, \\"n_ubatch\\": 512, \\"avg_ts\\": 1.0, \\"samples_ns\\": [ ", pp, tg);
    for (int i = 0; i < r; i++) { say("%s%ld", i ? ", " : "", ns(i)); }
    say(" ],\\"samples_ts\\": [ ");
    for (int i = 0; i < r; i++) { say("%s%g", i ? ", " : "", 1e9 * (pp + tg) / ns(i)); }
    say(" ]}\\n");
    fflush(stdout);
}
int main(int argc, char ** argv) {
    if (argc == 2) { printf("  -m -p -n -r -o -ub --output\\n"); return 0; }
    begin(argc, argv);
    const char * p = option(argc, argv, "-p", "0"), * n = option(argc, argv, "-n", "0");
    int r = atoi(option(argc, argv, "-r", "5")), rows = 0;
    fprintf(stderr, "toy-marker: here\\n");
    for (int i = 0; i < count(p); i++) {
        if (number(p, i)) { row(number(p, i), 0, r); rows++; }
        if (!strcmp(toy(), "backtrace") && rows == 1) {
            say("{\\"build_commit\\": \\"unk#0  0x00007f in ggml_abort ()\\n#1  main\\n");
        }
        if (!strcmp(toy(), "slow")) { sleep(3); }
        misbehave();
    }
    for (int i = 0; i < count(n); i++) { if (number(n, i)) { row(0, number(n, i), r); } }
    return 0;
}
"""

BATCHED_BENCH = """
int main(int argc, char ** argv) {
    if (argc == 2) { printf("  -m -c -npp -ntg -npl -b -ub --output-format\\n"); return 0; }
    begin(argc, argv);
    const char * l = option(argc, argv, "-npl", "1");
    int pp = atoi(option(argc, argv, "-npp", "0")), tg = atoi(option(argc, argv, "-ntg", "0"));
    double warm_pp = 0.5 + 1e-6 * launch(), warm_tg = 0.25 + 1e-6 * launch();
    misbehave();
    for (int i = 0; i < count(l) - 2 * !strcmp(toy(), "short"); i++) {
        int pl = number(l, i);
        double cold = i < count(l) / 2 ? 2 : 1, t_pp = cold * warm_pp, t_tg = cold * warm_tg;
        say("{\\"n_kv_max\\": 1, \\"n_batch\\": 2048, \\"pp\\": %d, \\"tg\\": %d, \\"pl\\": %d, \\"n_kv\\": 1, \\"t_pp\\": %.9g, "
            "\\"speed_pp\\": %f, \\"t_tg\\": %.9g, \\"speed_tg\\": %f, \\"t\\": %.9g, \\"speed\\": %f}\\n", pp, tg, pl,
            t_pp, pl * pp / t_pp, t_tg, pl * tg / t_tg, t_pp + t_tg, pl * (pp + tg) / (t_pp + t_tg));
    }
    return 0;
}
"""

COMPLETION = """
int main(int argc, char ** argv) {
    if (argc == 2) {
        printf("-m -f -no-cnv --no-display-prompt --ignore-eos --temp --seed -n -c -b -ub -ngl -fit\\n");
        return 0;
    }
    misbehave();
    FILE * prompt = fopen(option(argc, argv, "-f", ""), "r");
    int words = 1, n = atoi(option(argc, argv, "-n", "0")), c;
    while ((c = fgetc(prompt)) != EOF) { words += c == ' '; }
    printf("once upon a toy\\n");
    fprintf(stderr, "prompt eval time = 1.00 ms / %5d tokens (1.0 ms per token)\\n", words + 1);
    if (first_is_cut()) { return 0; }
    fprintf(stderr, "       eval time = 1.00 ms / %5d runs   (1.0 ms per token)\\n", n - 1);
    return 0;
}
"""

PERPLEXITY = """
int main(int argc, char ** argv) {
    if (argc == 2) {
        printf("-m -f --chunks --kl-divergence --kl-divergence-base -c -b -ub -ngl --device -fit\\n");
        return 0;
    }
    const char * base = option(argc, argv, "--kl-divergence-base", "");
    int chunks = atoi(option(argc, argv, "--chunks", "0"));
    if (chunks) {
        FILE * out = fopen(base, "w");
        fprintf(out, "%d", chunks);
        for (int i = 1; i <= chunks; i++) { printf("[%d]10.5000,", i); }
        fprintf(stderr, "0.01 I Final estimate: PPL = 10.5000 +/- 0.25000\\n");
        return fclose(out);
    }
    misbehave();
    FILE * in = fopen(base, "r");
    if (!in || fscanf(in, "%d", &chunks) != 1) { return 0; }
    const char * kld = !strcmp(toy(), "worse") ? "0.004000" : "0.001000";
    for (int i = 1; i <= chunks - !strcmp(toy(), "short"); i++) {
        printf("%4d      10.5000 ±    0.2500       0.00100 ±    0.00010       %.7s ±    0.00010     0.100 ±  0.010 %%    "
               "99.000 ±  0.100 %%\\n", i, kld);
    }
    printf("Mean PPL(Q)/PPL(base)         :   1.001000 ±   0.000100\\nMean    KLD:   %s ±   0.000100\\n", kld);
    if (first_is_cut()) { return 0; }
    printf("Same top p: 99.000 ± 0.100 %%\\n");
    return 0;
}
"""

SERVER = """
int main(int argc, char ** argv) {
    if (argc == 2) { printf("-m -c -np -fit --cache-ram --host --port\\n"); return 0; }
    if (getenv("TOY_PATH")) { fprintf(stderr, "toy-path: on\\n"); }
    char * words[64] = {"python3", getenv("TOY_SERVER"), *toy() ? getenv("TOY") : "untimed"};
    memcpy(words + 3, argv + 1, argc * sizeof *argv);
    execvp(*words, words);
    return 1;
}
"""
"""Starts TOY_SERVER, tests/tools/server.py, which misbehaves as TOY says."""

FILES = {
    "CMakeLists.txt": CMAKE,
    "ggml/ggml.c": GGML,
    "tools/test-backend-ops.c": HEAD + BACKEND_OPS,
    "tools/llama-bench.c": HEAD + LLAMA_BENCH,
    "tools/llama-batched-bench.c": HEAD + BATCHED_BENCH,
    "tools/llama-completion.c": HEAD + COMPLETION,
    "tools/llama-perplexity.c": HEAD + PERPLEXITY,
    "tools/llama-server.c": HEAD + SERVER,
}

GGUF = b"GGUF\x03" + bytes(59)
"""A model file without tensors."""

SPEC = """
name: {name}
llama_cpp: {{pin: "{pin}", sources: [{repository}]}}
models: {{m: {{path: {model}}}}}
gates:
  - backend-ops: {{op: MUL_MAT, backend: CPU, expect: 4/4, unsupported: 1}}
bench:
  - llama-bench: {{model: m, n_prompt: [16, 32], n_gen: 4}}
"""
"""A whole spec of the toy, to be filled with name, pin, repository and model."""


def make_repository(folder: Path, files: Mapping[str, str] = FILES) -> str:
    return repos.upstream(folder, files)


def experiment(repository: Path, pin: str, root: Path, **changes: object) -> Experiment:
    """Return an experiment on the toy: a gate and one entry for each tool."""
    model = root / "toy.gguf"
    if not model.exists():
        model.write_bytes(GGUF)
    fields: dict[str, object] = {
        "name": "toy",
        "pin": pin,
        "sources": (str(repository),),
        "path": str(root / "toy.yaml"),
        "root": str(root),
        "models": {"m": FileModel(str(model))},
        "gates": (parity(),),
        "bench": (backend_ops(), llama_bench(), batched_bench()),
    }
    return Experiment(**{**fields, **changes})  # type: ignore[arg-type]


def parity(total: int = 4, **changes: object) -> ParityGate:
    return ParityGate("MUL_MAT", "CPU", Expectation(total, total), 1, **changes)  # type: ignore[arg-type]


def backend_ops(**changes: object) -> BackendOpsBench:
    where = {"type_a": ("q4_0",), "m": (4096,), "k": (14336,), "n": (8, 512)}
    return BackendOpsBench(**{"op": "MUL_MAT", "backend": "CPU", "where": where, **changes})  # type: ignore[arg-type]


def llama_bench(**changes: object) -> LlamaBench:
    return LlamaBench(**{"model": "m", "n_prompt": (16, 32), "n_gen": (4,), **changes})  # type: ignore[arg-type]


def batched_bench(**changes: object) -> BatchedBench:
    return BatchedBench(**{"model": "m", "npp": (16,), "ntg": (4,), "npl": (1, 2, 4), **changes})  # type: ignore[arg-type]


def serve(**changes: object) -> ServeBench:
    env = {"TOY_SERVER": str(Path(__file__).parent / "tools" / "server.py"), **changes.pop("env", {})}  # type: ignore[dict-item]
    sizes = {"n_prompt": (16,), "n_gen": (160,), "streams": (1, 2), "repetitions": 1, "env": env}
    return ServeBench(**{"model": "m", **sizes, **changes})  # type: ignore[arg-type]
