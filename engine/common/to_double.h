/* Values of every dtype as doubles, for norms and differences. Internal to engine/. */
#ifndef ENGINE_TO_DOUBLE_H
#define ENGINE_TO_DOUBLE_H

#include "include/ckptdelta.h"

/* Element i of an array of any alignment. Floats exactly (NaN and infinities as such), integers and bool as 0. */
double element_to_double(ckd_dtype dtype, const void *values, uint64_t i);

#endif
