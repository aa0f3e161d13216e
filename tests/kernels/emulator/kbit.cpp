// The proof of kbit on the CPU: its kernels' own source, translated by tests/kernels/emulate.py.
//
// kbit general               the format, refusals, faults that must be seen
// kbit edges K               the harness's edges of so many bits
// kbit published-reduction   whether the published way to add up split sums is right, in this order of blocks
// kbit published-pipeline    whether the published two stages are

#include "kbit/proof.cuh"

int main(int argc, char ** argv) {
    const std::string verb = argc > 1 ? argv[1] : "";
    if (argc == 3 && verb == "edges") {
        return edges(atoi(argv[2])) ? 0 : 1;
    }
    return verb == "general"               ? !general()
           : verb == "published-reduction" ? !published_reduction_is_right()
           : verb == "published-pipeline"  ? !published_pipeline_is_right()
                                           : 2;
}
