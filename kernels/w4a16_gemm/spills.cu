// What a series compiles of this folder, for `make spills`: every configuration in a table.

#include "w4a16_columns.cuh"
#include "w4a16_plan.cuh"

const w4a16_table * tables[] = {&w4a16_sm_80<w4a16_type::Q4_0>::TABLE, &w4a16_sm_80<w4a16_type::Q4_K>::TABLE,
                                &w4a16_sm_90<w4a16_type::Q4_0>::TABLE, &w4a16_sm_90<w4a16_type::Q4_K>::TABLE,
                                &w4a16_sm_90a<w4a16_type::Q4_0>::TABLE, &w4a16_sm_90a<w4a16_type::Q4_K>::TABLE,
                                &w4a16_sm_90_packed<w4a16_type::Q4_0>::TABLE,
                                &w4a16_sm_90_packed<w4a16_type::Q4_K>::TABLE,
                                &w4a16_sm_90a_packed<w4a16_type::Q4_0>::TABLE,
                                &w4a16_sm_90a_packed<w4a16_type::Q4_K>::TABLE,
                                &w4a16_sm_120_packed<w4a16_type::Q4_0>::TABLE,
                                &w4a16_sm_120_packed<w4a16_type::Q4_K>::TABLE};
