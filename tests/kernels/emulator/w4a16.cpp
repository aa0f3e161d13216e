// The proof of w4a16_gemm on the CPU: its kernels' own source, translated by tests/kernels/emulate.py.
//
// w4a16 edges                 some of the harness's edges, all of its other small tests
// w4a16 shape TYPE M N K RUNG one product
// w4a16 nmse                  the error as a part of MMQ's

#include "w4a16_gemm/proof.cuh"

static std::vector<rung> rungs() {
    std::vector<rung> all = fragment_rungs();
    all.insert(all.begin(), {NAIVE, TILED});
    return all;
}

static bool edges() {
    const std::vector<rung> all    = rungs();
    bool                    passed = references_agree();
    for (const weight_type type : TYPES) {
        for (const rung & r : all) {
            const int64_t unit = r.k_unit(type);
            passed = (&r == &all[0] || wrong_arguments_are_refused(r, type)) && passed;
            passed = right({type, 1, 1, unit}, r, 1) && passed;
            passed = right({type, 129, 17, 2 * unit}, r, 2) && passed;
            passed = right({type, 65, 130, 3 * unit}, r, 3) && passed;
            passed = right({type, 16, 9, 5 * unit}, r, 4) && passed;
            passed = right({type, 40, 33, 4 * unit}, r, 5, r.f16 ? q4_fill::WILD_F16 : q4_fill::WILD) && passed;
            passed = repeats_agree(r, {type, 129, 3, 512}, 2) && passed;
        }
    }
    return offsets_are_right() && passed;
}

static bool nmse() {
    bool passed = true;
    for (const weight_type type : TYPES) {
        for (const distribution how : {distribution::UNIFORM, distribution::GAUSSIAN}) {
            passed = nearer_than_mmq(TILED, {type, 128, 64, 1024}, how, 20261121) && passed;
            passed = nearer_than_mmq(fragment_rungs()[0], {type, 128, 64, 1024}, how, 20261121) && passed;
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
        bool              all  = true;
        for (const rung & r : rungs()) {
            if (r.name.find(argv[6]) != std::string::npos) {
                all = right({type, atoll(argv[3]), atoll(argv[4]), atoll(argv[5])}, r, 1) && all;
            }
        }
        return all ? 0 : 1;
    }
    return 2;
}
