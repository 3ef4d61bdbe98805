/* The two moments of a parameter: halves of their values, and the updates that they make. */
#ifndef KERNELS_CUDA_MOMENTS_H
#define KERNELS_CUDA_MOMENTS_H

#include "kernels/cuda/sums.h"
#include "kernels/scalar_moments.h"

#define MOMENTS_EACH 8u /* elements per thread */

DEVICE_FN uint64_t moments_first(const place *at) {
    return (uint64_t)at->block * MOMENTS_EACH * LAUNCH_THREADS + at->thread;
}

DEVICE_FN void halve_moments(const place *at, const device_halves *h) {
    uint64_t first = moments_first(at);
    const uint32_t up = scalar_moment_up(h->second, h->decoded);
    for (uint32_t j = 0; j < MOMENTS_EACH; j++) {
        uint64_t i = first + j * LAUNCH_THREADS;
        if (i < h->count) {
            h->to[i] = scalar_moment_half(h->from[i], h->second, up);
        }
    }
}
KERNEL(halve_moments, device_halves)

typedef struct update_shared {
    double largest[DEVICE_UPDATE_BOUNDS][LAUNCH_THREADS];
} update_shared;

DEVICE_FN void update_elements(const place *at, const device_updates *u, update_shared *shared) {
    uint64_t start = moments_first(at), above = 0;
    double largest[DEVICE_UPDATE_BOUNDS] = {0, 0};
    for (uint32_t j = 0; j < MOMENTS_EACH; j++) {
        uint64_t i = start + j * LAUNCH_THREADS;
        if (i >= u->count) {
            break;
        }
        float here = u->values[i], other = scalar_moment_widen(u->other[i]), first = u->second ? other : here,
              second = u->second ? here : other;
        int exceeds = 0;
        for (uint32_t b = 0; b < DEVICE_UPDATE_BOUNDS; b++) {
            double update = scalar_update(first, second, u->eps[b]);
            largest[b] = update > largest[b] ? update : largest[b];
            exceeds |= scalar_update_exceeds(first, second, u->per[b], u->eps[b]);
        }
        above += (uint64_t)exceeds;
    }
    if (above) {
        add_u64(u->above, above);
    }
    for (uint32_t b = 0; b < DEVICE_UPDATE_BOUNDS; b++) {
        shared->largest[b][at->thread] = largest[b];
    }
}

DEVICE_FN void find_updates(const place *at, const device_updates *u, update_shared *shared, pass_own *own,
                            int phase) {
    (void)own;
    if (phase == 0) {
        update_elements(at, u, shared);
        return;
    }
    uint32_t half = LAUNCH_THREADS >> phase, i = at->thread;
    for (uint32_t b = 0; b < DEVICE_UPDATE_BOUNDS; b++) {
        double *of = shared->largest[b];
        if (i < half) {
            of[i] = of[i + half] > of[i] ? of[i + half] : of[i];
        } else if (phase > BLOCK_TREE && i == 0 && of[0] > 0) {
            raise_double(&u->largest[b], of[0]);
        }
    }
}
KERNEL_IN_PHASES(find_updates, device_updates, update_shared, pass_own, BLOCK_TREE + 2)

#endif
