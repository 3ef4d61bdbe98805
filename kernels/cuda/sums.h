/*
 * Statistics of lossy tiles. Sums are doubles. Their order depends only on the shapes, without atomic
 * additions: per thread, per row, per block, then over all blocks.
 */
#ifndef KERNELS_CUDA_SUMS_H
#define KERNELS_CUDA_SUMS_H

#include "kernels/cuda/launch.h"
#include "kernels/scalar_lattice.h"

#define SUMS_LANES 32u /* threads per row */
#define SUMS_TREE  5   /* phases that join a row's threads: 2^5 = 32 */
#define BLOCK_TREE 8   /* phases that join the threads of a block: 2^8 = 256 */

DEVICE_FN device_sums sums_none(void) {
    const float limit = scalar_float(UINT32_C(0x7f800000));
    device_sums s = {0, 0, 0, 0, 0, 0, limit, 0, limit, 0, 0};
    return s;
}

DEVICE_FN void sums_add(device_sums *to, const device_sums *s) {
    to->now += s->now;
    to->moved += s->moved;
    to->weighted += s->weighted;
    to->finite += s->finite;
    to->compared += s->compared;
    to->largest = s->largest > to->largest ? s->largest : to->largest;
    to->smallest = s->smallest < to->smallest ? s->smallest : to->smallest;
    to->farthest = s->farthest > to->farthest ? s->farthest : to->farthest;
    to->lowest = s->lowest < to->lowest ? s->lowest : to->lowest;
    to->parent_bits |= s->parent_bits;
}

/* Compares bits: NaN, and magnitudes above `limit`, are not within. */
DEVICE_FN bool sums_within(float v, float limit) {
    return (scalar_bits(v) & UINT32_C(0x7fffffff)) <= scalar_bits(limit);
}

/* The value of the lowest bit of a float; 0 for zero. */
DEVICE_FN float sums_lowest(uint32_t bits) {
    uint32_t size = bits & UINT32_C(0x7fffffff);
    uint32_t without = bits & UINT32_C(0x7fffff) ? size & (size - 1) : 0;
    return scalar_float(size) - scalar_float(without);
}

/* ---- a pass over a tile ---- */

/* Adds one element, as kernels.sums_of does. weight: its row's times its column's. */
DEVICE_FN void pass_add(device_sums *s, const device_pass *p, float now, float parent_values, float weight) {
    bool finite = sums_within(now, p->max[0]);
    float kept = finite ? now : 0.0f, size = scalar_magnitude(kept);
    s->largest = size > s->largest ? size : s->largest;
    s->smallest = finite && now < s->smallest ? now : s->smallest;
    s->finite += finite;
    s->now += (double)kept * (double)kept;
    if (p->parent_values) {
        float moved = now - parent_values;
        finite = sums_within(moved, p->max[1]);
        kept = finite ? moved : 0.0f;
        size = scalar_magnitude(kept);
        s->farthest = size > s->farthest ? size : s->farthest;
        if (p->lattice) {
            float lowest = sums_lowest(scalar_bits(parent_values));
            s->lowest = lowest > 0.0f && lowest < s->lowest ? lowest : s->lowest;
            s->parent_bits |= scalar_bits(parent_values);
        }
    }
    s->compared += finite;
    s->moved += (double)kept * (double)kept;
    kept = p->weight ? kept * weight : kept;
    s->weighted += (double)kept * (double)kept;
}

/* Returns the element (or its magnitude) if it counts for its row and column: positive and at most `limit`. Else 0. */
DEVICE_FN float pass_counted(float now, bool magnitudes, float limit) {
    int32_t bits = (int32_t)(scalar_bits(now) & (magnitudes ? UINT32_C(0x7fffffff) : UINT32_MAX));
    return bits > 0 && bits <= (int32_t)scalar_bits(limit) ? scalar_float((uint32_t)bits) : 0.0f;
}

typedef struct pass_shared {
    device_sums all[LAUNCH_THREADS];
    double row[LAUNCH_THREADS];
    uint32_t count[LAUNCH_THREADS];
} pass_shared;

typedef struct pass_own {
    uint32_t unused;
} pass_own;

DEVICE_FN void pass_row(const place *at, const device_pass *p, pass_shared *shared) {
    uint64_t row = (uint64_t)at->block * DEVICE_PASS_ROWS + at->thread / SUMS_LANES, start = row * p->columns,
             end = start + p->columns;
    uint64_t last = p->phase + p->count;
    end = end < last ? end : last;
    device_sums all = sums_none();
    double sum = 0;
    uint32_t count = 0;
    float row_weight = p->row_weight && start < last ? p->row_weight[row] : 1.0f;
    for (uint64_t i = start + at->thread % SUMS_LANES; i < end; i += SUMS_LANES) {
        if (i >= p->phase) {
            float now = p->now[i - p->phase], weight = p->weight ? p->weight[i - start] * row_weight : 1.0f;
            float counted = pass_counted(now, p->magnitudes, p->max[0]);
            pass_add(&all, p, now, p->parent_values ? p->parent_values[i - p->phase] : 0.0f, weight);
            sum += (double)counted;
            count += counted > 0.0f;
        }
    }
    shared->all[at->thread] = all;
    shared->row[at->thread] = sum;
    shared->count[at->thread] = count;
}

DEVICE_FN void pass_finish(const place *at, const device_pass *p, pass_shared *shared) {
    uint64_t row = (uint64_t)at->block * DEVICE_PASS_ROWS + at->thread / SUMS_LANES;
    if (at->thread % SUMS_LANES == 0 && p->row && row * p->columns < p->phase + p->count) {
        p->row[row] = shared->row[at->thread];
        p->row_count[row] = (double)shared->count[at->thread];
    }
    if (at->thread == 0) {
        device_sums all = shared->all[0];
        for (uint32_t r = 1; r < DEVICE_PASS_ROWS; r++) {
            sums_add(&all, &shared->all[r * SUMS_LANES]);
        }
        p->blocks[at->block] = all;
    }
}

DEVICE_FN void pass_tile(const place *at, const device_pass *p, pass_shared *shared, pass_own *own,
                         int phase) {
    (void)own;
    if (phase == 0) {
        pass_row(at, p, shared);
    } else if (phase <= SUMS_TREE) {
        uint32_t half = SUMS_LANES >> phase, i = at->thread;
        if (i % SUMS_LANES < half) {
            sums_add(&shared->all[i], &shared->all[i + half]);
            shared->row[i] += shared->row[i + half];
            shared->count[i] += shared->count[i + half];
        }
    } else {
        pass_finish(at, p, shared);
    }
}
KERNEL_IN_PHASES(pass_tile, device_pass, pass_shared, pass_own, SUMS_TREE + 2)

/* ---- errors ---- */

typedef struct block_sums {
    device_sums all[LAUNCH_THREADS];
} block_sums;

DEVICE_FN void block_tree(const place *at, block_sums *shared, int phase) {
    uint32_t half = LAUNCH_THREADS >> phase;
    if (at->thread < half) {
        sums_add(&shared->all[at->thread], &shared->all[at->thread + half]);
    }
}

DEVICE_FN float error_rounded(float v, ckd_dtype to) {
    uint32_t bits = scalar_bits(v);
    if (to == CKD_BF16) {
        bits = (uint32_t)scalar_bf16_from_f32(bits) << 16;
    } else if (to == CKD_F16) {
        bits = scalar_f32_from_f16(scalar_f16_from_f32(bits));
    }
    return scalar_float(bits);
}

DEVICE_FN void error_add(device_sums *s, float given, float decoded, bool rounded) {
    const float limit = scalar_float(UINT32_C(0x7f7fffff));
    if (sums_within(given, limit)) {
        float error = scalar_magnitude(given - decoded);
        bool within = sums_within(error, limit);
        s->finite++;
        s->compared += !within;
        s->now += (double)given * (double)given;
        s->moved += within ? (double)error * (double)error : 0;
        s->farthest = within && error > s->farthest ? error : s->farthest;
    } else if (rounded) {
        s->compared += scalar_bits(given) != scalar_bits(decoded);
    }
}

DEVICE_FN void error_tile(const place *at, const device_errors *e, block_sums *shared, pass_own *own,
                          int phase) {
    (void)own;
    if (phase == 0) {
        uint64_t first = (uint64_t)at->block * DEVICE_ERROR_ELEMENTS, end = first + DEVICE_ERROR_ELEMENTS;
        device_sums s = sums_none();
        end = end < e->count ? end : e->count;
        for (uint64_t i = first + at->thread; i < end; i += LAUNCH_THREADS) {
            error_add(&s, error_rounded(e->given[i], e->rounded), error_rounded(e->decoded[i], e->rounded),
                      e->rounded != CKD_DTYPE_NONE);
        }
        shared->all[at->thread] = s;
    } else if (phase <= BLOCK_TREE) {
        block_tree(at, shared, phase);
    } else if (at->thread == 0) {
        e->blocks[at->block] = shared->all[0];
    }
}
KERNEL_IN_PHASES(error_tile, device_errors, block_sums, pass_own, BLOCK_TREE + 2)

/* ---- all blocks ---- */

typedef struct join_arguments {
    const device_sums *blocks;
    device_sums *all;
    uint64_t count;
} join_arguments;

DEVICE_FN void join_blocks(const place *at, const join_arguments *j, block_sums *shared, pass_own *own,
                           int phase) {
    (void)own;
    if (phase == 0) {
        device_sums s = sums_none();
        for (uint64_t i = at->thread; i < j->count; i += LAUNCH_THREADS) {
            sums_add(&s, &j->blocks[i]);
        }
        shared->all[at->thread] = s;
    } else if (phase <= BLOCK_TREE) {
        block_tree(at, shared, phase);
    } else if (at->thread == 0) {
        *j->all = shared->all[0];
    }
}
KERNEL_IN_PHASES(join_blocks, join_arguments, block_sums, pass_own, BLOCK_TREE + 2)

/* ---- columns ---- */

/* One thread per column and panel of rows. */
DEVICE_FN void sum_columns(const place *at, const device_columns *c) {
    uint64_t column = (uint64_t)at->block * LAUNCH_THREADS + at->thread, last = c->phase + c->count;
    if (column >= c->columns) {
        return;
    }
    uint64_t rows = (last + c->columns - 1) / c->columns, row = rows * at->span / c->panels,
             end = rows * (at->span + 1) / c->panels;
    double sum = 0, scales = 0;
    uint32_t count = 0;
    for (; row < end; row++) {
        uint64_t i = row * c->columns + column;
        if (i >= c->phase && i < last) {
            float counted = pass_counted(c->now[i - c->phase], c->magnitudes, c->max);
            bool counts = counted > 0.0f;
            sum += (double)counted;
            count += counts;
            scales += c->row_scale && counts ? c->row_scale[row] : 0;
        }
    }
    uint64_t to = at->span * c->columns + column;
    c->sum[to] = sum;
    c->count_of[to] = count;
    if (c->scales) {
        c->scales[to] = scales;
    }
}
KERNEL(sum_columns, device_columns)

#endif
