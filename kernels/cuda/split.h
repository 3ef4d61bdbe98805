/* Standalone values: extents of their integers, and levels of rows and columns. */
#ifndef KERNELS_CUDA_SPLIT_H
#define KERNELS_CUDA_SPLIT_H

#include "kernels/cuda/symbols.h"

typedef struct split_arguments {
    const device_split *all;
} split_arguments;

/* ---- extents: one per block ---- */

#define EXTENT_SOME 16u /* threads whose results one thread joins */

typedef struct extent_shared {
    uint64_t low[LAUNCH_THREADS], high[LAUNCH_THREADS], differing[LAUNCH_THREADS];
} extent_shared;

typedef struct extent_own {
    uint32_t unused;
} extent_own;

DEVICE_FN void extent_look(const place *at, const device_split *s, extent_shared *e) {
    uint64_t low = UINT64_MAX, high = 0, differing = 0, any = integer_at(s->integers, s->width, 0);
    for (uint32_t turn = 0; turn < DEVICE_EXTENT_EACH; turn++) {
        uint64_t i = (uint64_t)at->block * DEVICE_EXTENT_ALL + turn * LAUNCH_THREADS + at->thread;
        if (i < s->n) {
            uint64_t v = integer_at(s->integers, s->width, (uint32_t)i);
            low = v < low ? v : low;
            high = v > high ? v : high;
            differing |= v ^ any;
        }
    }
    e->low[at->thread] = low;
    e->high[at->thread] = high;
    e->differing[at->thread] = differing;
}

/* Joins the results of `count` threads, `stride` apart, into those of the first one. */
DEVICE_FN void extent_join(extent_shared *e, uint32_t first, uint32_t stride, uint32_t count) {
    for (uint32_t i = 1; i < count; i++) {
        uint32_t j = first + i * stride;
        e->low[first] = e->low[j] < e->low[first] ? e->low[j] : e->low[first];
        e->high[first] = e->high[j] > e->high[first] ? e->high[j] : e->high[first];
        e->differing[first] |= e->differing[j];
    }
}

DEVICE_FN void find_extents(const place *at, const split_arguments *a, extent_shared *e, extent_own *own,
                            int phase) {
    const device_split *s = &a->all[at->span];
    (void)own;
    if ((uint64_t)at->block * DEVICE_EXTENT_ALL >= s->n) {
        return;
    }
    if (phase == 0) {
        extent_look(at, s, e);
    } else if (phase == 1 && at->thread % EXTENT_SOME == 0) {
        extent_join(e, at->thread, 1, EXTENT_SOME);
    } else if (phase == 2 && at->thread == 0) {
        extent_join(e, 0, EXTENT_SOME, LAUNCH_THREADS / EXTENT_SOME);
        device_extent *to = &s->extents[at->block];
        to->low = e->low[0];
        to->high = e->high[0];
        to->any = integer_at(s->integers, s->width, 0);
        to->differing = e->differing[0];
    }
}
KERNEL_IN_PHASES(find_extents, split_arguments, extent_shared, extent_own, 3)

/* ---- rows and columns ---- */

/* A thread takes consecutive elements, so that it adds to few rows. */
DEVICE_FN void sum_lines(const place *at, const split_arguments *a) {
    const device_split *s = &a->all[at->span];
    uint64_t i = (uint64_t)at->block * DEVICE_EXTENT_ALL + at->thread * DEVICE_EXTENT_EACH,
             end = i + DEVICE_EXTENT_EACH, squares = 0, in_row = 0;
    if (!s->sums || i >= s->n) {
        return;
    }
    end = end < s->n ? end : s->n;
    uint32_t row = (uint32_t)((s->phase + i) / s->columns), column = (uint32_t)((s->phase + i) % s->columns);
    for (; i < end; i++) {
        uint64_t v = integer_at(s->integers, s->width, (uint32_t)i);
        uint32_t symbol = (uint32_t)((v >> s->bits) - s->bias) & 255u;
        if (symbol) {
            uint64_t both = symbol | UINT64_C(1) << 32;
            add_u64(&s->sums[s->rows + column], both);
            in_row += both;
            squares += symbol * symbol;
        }
        if (++column == s->columns) {
            add_u64(&s->sums[row++], in_row);
            column = 0;
            in_row = 0;
        }
    }
    if (in_row) {
        add_u64(&s->sums[row], in_row);
    }
    add_u64(s->squares, squares);
}
KERNEL(sum_lines, split_arguments)

DEVICE_FN void add_levels(const place *at, const split_arguments *a) {
    const device_split *s = &a->all[at->span];
    if (!s->levels) {
        return;
    }
    for (uint32_t turn = 0; turn < DEVICE_EXTENT_EACH; turn++) {
        uint64_t i = (uint64_t)at->block * DEVICE_EXTENT_ALL + turn * LAUNCH_THREADS + at->thread;
        if (i < s->n) {
            uint64_t row = (s->phase + i) / s->columns, column = (s->phase + i) % s->columns;
            uint32_t sum = (uint32_t)s->levels[row] + s->levels[s->rows + column];
            s->contexts[i] = (uint8_t)(sum < 255u ? sum : 255u);
        }
    }
}
KERNEL(add_levels, split_arguments)

#endif
