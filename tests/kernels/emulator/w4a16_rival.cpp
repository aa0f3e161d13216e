// w4a16_rival LIBRARY   products of ggml, by the class that the harness times them with: its CUDA backend is another here

#include "common/ggml.cuh"
#include "w4a16_gemm/proof.cuh"

int main(int, char ** argv) {
    const ggml by(argv[1]);
    bool       passed = true;
    for (const weight_type type : TYPES) {
        std::vector<problem> sets;
        for (int set = 0; set < 2; ++set) {
            sets.emplace_back(gemm_shape{type, 48, 7, 512});
            sets[set].fill(set);
        }
        const std::vector<int> set_of = {0, 1, 0};
        const ggml_products    all(by, type == weight_type::Q4_0 ? 2 : 12, 48, 7, 512, 2, set_of);
        for (int set = 0; set < 2; ++set) {
            memcpy(all.w(set), sets[set].w.as<void>(), sets[set].w.size());
            memcpy(all.x(set), sets[set].x.as<void>(), sets[set].x.size());
        }
        all.compute();
        for (size_t i = 0; i < set_of.size(); ++i) {
            const problem & p = sets[set_of[i]];
            memcpy(p.y.as<void>(), all.y(i), p.y.size());
            const verdict v = judge(p, reference_of(p, 0, 48), {4e-3, 64e-6}, 0, 48);
            passed = said(v.passed, "product " + std::to_string(i) + " " + p.shape.text(), v.why) && passed;
        }
    }
    return concluded(passed);
}
