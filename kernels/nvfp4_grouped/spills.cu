// What a series compiles of this folder, for `make spills`: every configuration in a table.

#include "nvfp4_grouped_plan.cuh"

const nvfp4_grouped_row * tables[] = {NVFP4_GROUPED_SM_90A, NVFP4_GROUPED_SM_90, NVFP4_GROUPED_SM_120};
