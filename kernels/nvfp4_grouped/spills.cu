// What a series compiles of this folder, for `make spills`: every configuration in a table; and the same by gather.

#define NVFP4_GROUPED_FEW_RUNGS

#include "../common/check.cuh"
#include "rungs.cuh"

const nvfp4_grouped_row * tables[] = {NVFP4_GROUPED_SM_90A, NVFP4_GROUPED_SM_90, NVFP4_GROUPED_SM_120};
const std::vector<rung>   gathered = all_rungs();
