/* Values of every dtype as doubles, for norms and differences. Internal to engine/. */
#ifndef ENGINE_TO_DOUBLE_H
#define ENGINE_TO_DOUBLE_H

#include "include/ckptdelta.h"

/*
 * Converts element i of an array of any alignment. Floats are exact, NaN and infinities included; integers and bool
 * give 0.
 */
double element_to_double(ckd_dtype dtype, const void *values, uint64_t i);

#endif
