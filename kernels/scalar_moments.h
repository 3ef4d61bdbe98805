/*
 * The arithmetic of one element's update, |m| / (sqrt(v) + eps), for gcc, clang and nvcc alike
 * (engine/lossy/lossy.h). Encoders only. IEEE double precision, no contraction.
 */
#ifndef KERNELS_SCALAR_MOMENTS_H
#define KERNELS_SCALAR_MOMENTS_H

#include <math.h>

#include "kernels/scalar_lattice.h"

#define SCALAR_HALF_NONE UINT16_C(0x7fc0) /* NaN: the element has no update */

/*
 * The high half of a moment's float. `up` is 0xffff to round the magnitude up, 0 to round it down: a small first
 * moment and a large second one make a small update. NaN for values that are not finite, and for negative
 * second moments.
 */
KERNELS_FN uint16_t scalar_moment_half(float value, int second, uint32_t up) {
    uint32_t bits = scalar_bits(value), magnitude = bits & UINT32_C(0x7fffffff);
    uint32_t high = ((second ? magnitude : bits) + up) >> 16;
    int none = (magnitude >= UINT32_C(0x7f800000)) | (second & (bits > UINT32_C(0x80000000)));
    return (uint16_t)(none ? SCALAR_HALF_NONE : high);
}
/* Input values are rounded so that updates do not grow, decoded values so that they do not shrink. */
KERNELS_FN uint32_t scalar_moment_up(int second, int decoded) {
    return second == decoded ? 0 : UINT32_C(0xffff);
}
KERNELS_FN float scalar_moment_widen(uint16_t half) {
    return scalar_float((uint32_t)half << 16);
}

/* Is the update larger than 1 / per? False for NaN. */
KERNELS_FN int scalar_update_exceeds(float first, float second, double per, double eps) {
    double root = (double)scalar_magnitude(first) * per - eps;
    return (root > 0) & (root < (double)INFINITY) & (root * root > (double)second) & (second >= 0.0f);
}

/* The update; 0 if there is none, or if it is infinite. */
KERNELS_FN double scalar_update(float first, float second, double eps) {
    double update = (double)scalar_magnitude(first) / (sqrt((double)second) + eps);
    int finite = (scalar_bits(first) & UINT32_C(0x7fffffff)) < UINT32_C(0x7f800000);
    int counts = (second >= 0.0f) & finite & (update < (double)INFINITY);
    return counts ? update : 0;
}

#endif
