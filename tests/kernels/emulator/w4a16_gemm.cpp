// The proof of w4a16_gemm on the CPU: its kernels' own source, translated by tests/kernels/emulate.py.
//
// w4a16 edges                 some of the harness's edges, all of its other small tests
// w4a16 tables                every configuration of the tables, and what they refuse
// w4a16 shape TYPE M N K RUNG [wild]
//                             one product; wild: scales and activations of every size
// w4a16 packed TYPE M K       rows of weights in ggml's blocks on stdin, packed on stdout

#include "w4a16_gemm/proof.cuh"

#include <iostream>
#include <iterator>

// Of each way to multiply both ways to divide the work; `tables` has all tiles.
static std::vector<rung> rungs() {
    const std::vector<rung> fragment = fragment_rungs();
    const std::vector<rung> wgmma    = wgmma_rungs();
    const std::vector<rung> packed   = packed_wgmma_rungs();
    const std::vector<rung> by_mma   = packed_mma_rungs();
    return {fragment[2], fragment[3], wgmma[2], wgmma[3], packed[2], packed[3], by_mma[0], by_mma[3]};
}

static bool edges() {
    const std::vector<rung> all    = rungs();
    bool                    passed = references_agree();
    for (const weight_type type : TYPES) {
        for (const rung & r : all) {
            const int64_t unit = W4A16_UNIT;
            passed = wrong_arguments_are_refused(r, type) && passed;
            passed = right({type, 1, 1, unit}, r, 1) && passed;
            passed = right({type, 129, 17, 2 * unit}, r, 2) && passed;
            passed = right({type, 65, 130, 3 * unit}, r, 3) && passed;
            passed = right({type, 16, 9, 5 * unit}, r, 4) && passed;
            passed = right({type, 40, 130, 4 * unit}, r, 5, q4_fill::WILD_F16) && passed;
            passed = repeats_agree(r, {type, 129, 3, 512}, 2) && passed;
        }
        // columns that a block converts in more than one go, one of them or two
        passed = right({type, 1, 1, 65 * 256}, all.back(), 6) && passed;
        passed = right({type, 1, 130, 33 * 256}, all[3], 7) && passed;
    }
    passed = columns_are_right() && passed;
    return undoing_is_right() && passed;
}

static bool tables() {
    bool passed = true;
    for (const weight_type type : TYPES) {
        passed = impossible_plans_are_refused(type) && passed;
        passed = wide_tiles_fill_the_gpu(type) && passed;
        passed = wrong_packing_is_refused(type) && passed;
        for (const rung & r : planned_rungs()) {
            passed = switches_are_right(r, type, 65, 512) && passed;
        }
    }
    return passed;
}

// False if it wrote outside its buffer.
static bool packed(const weight_type type, const int64_t m, const int64_t k) {
    const std::vector<uint8_t> w{std::istreambuf_iterator<char>(std::cin), {}};
    const problem              p({type, m, 1, k});
    if ((int64_t) w.size() != p.w.size()) {
        return said(false, "so many rows need " + std::to_string(p.w.size()) + " bytes");
    }
    p.copy_in(w, std::vector<float>(k));
    const operand weights = p.weights_of(PLANNED_PACKED);
    const auto    bytes   = w4a16_packed_bytes(type == weight_type::Q4_0 ? w4a16_type::Q4_0 : w4a16_type::Q4_K, m, k);
    std::cout.write((const char *) weights.at(), bytes).flush();
    return weights.guards_intact() && p.w.guards_intact();
}

int main(int argc, char ** argv) {
    const std::string verb = argc > 1 ? argv[1] : "";
    if (verb == "edges") {
        return edges() ? 0 : 1;
    }
    if (verb == "tables") {
        return tables() ? 0 : 1;
    }
    const weight_type type = argc > 2 && argv[2] == std::string("q4_0") ? weight_type::Q4_0 : weight_type::Q4_K;
    if (verb == "packed" && argc == 5) {
        return packed(type, atoll(argv[3]), atoll(argv[4])) ? 0 : 1;
    }
    if (verb == "shape" && argc >= 7) {
        bool              all  = true;
        std::vector<rung> all_rungs = rungs();
        for (const rung & r : planned_rungs()) {
            all_rungs.push_back(r);
        }
        for (const rung & r : all_rungs) {
            const q4_fill fill = argc > 7 ? q4_fill::WILD_F16 : q4_fill::ORDINARY;
            if (r.name == argv[6]) {
                all = right({type, atoll(argv[3]), atoll(argv[4]), atoll(argv[5])}, r, 1, fill) && all;
            }
        }
        return all ? 0 : 1;
    }
    return 2;
}
