// The proof of w4a16_gemm on the CPU: its kernels' own source, translated by tests/kernels/emulate.py.
//
// w4a16 edges                 some of the harness's edges, all of its other small tests
// w4a16 shape TYPE M N K RUNG one product
// w4a16 nmse                  the error as a part of MMQ's

#include "w4a16_gemm/proof.cuh"

static bool edges() {
    bool passed = references_agree();
    for (const weight_type type : TYPES) {
        passed = wrong_arguments_are_refused(type) && passed;
        for (const rung & r : {NAIVE, TILED}) {
            const int64_t size = block_size(type);
            passed = right({type, 1, 1, size}, r, 1) && passed;
            passed = right({type, 129, 17, 2 * size}, r, 2) && passed;
            passed = right({type, 65, 130, 3 * size}, r, 3) && passed;
            passed = right({type, 16, 9, 5 * size}, r, 4) && passed;
            passed = right({type, 40, 33, 4 * size}, r, 5, q4_fill::WILD) && passed;
        }
        passed = repeats_agree({type, 129, 3, 256}, 2) && passed;
    }
    return offsets_are_right() && passed;
}

static bool nmse() {
    bool passed = true;
    for (const weight_type type : TYPES) {
        for (const distribution how : {distribution::UNIFORM, distribution::GAUSSIAN}) {
            passed = nearer_than_mmq(TILED, {type, 128, 64, 1024}, how, 20261121) && passed;
        }
    }
    return passed;
}

int main(int argc, char ** argv) {
    const std::string verb = argc > 1 ? argv[1] : "";
    if (verb == "edges") {
        return edges() ? 0 : 1;
    }
    if (verb == "nmse") {
        return nmse() ? 0 : 1;
    }
    if (verb == "shape" && argc == 7) {
        const weight_type type = argv[2] == std::string("q4_0") ? weight_type::Q4_0 : weight_type::Q4_K;
        const rung &      r    = argv[6] == std::string("naive") ? NAIVE : TILED;
        return right({type, atoll(argv[3]), atoll(argv[4]), atoll(argv[5])}, r, 1) ? 0 : 1;
    }
    return 2;
}
