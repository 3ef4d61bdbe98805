/* Loops over runs of a lossy tile, for encoders; part of kernels/cpu_loops.h, which includes it. */

/*
 * Compares bits: larger magnitudes, and NaNs, are larger integers. The top bit of `any` collects the signs of
 * limits minus bits and, if `positive`, of the values.
 */
CPU_LOOP static bool beyond(const float *now, const float *parent_values, const float limits[3],
                            bool positive, size_t n) {
    const uint32_t mask = positive ? UINT32_MAX : INT32_MAX;
    const uint32_t max = scalar_bits(limits[0]), max_before = scalar_bits(limits[1]),
                   max_moved = scalar_bits(limits[2]);
    uint32_t any = 0;
    if (!parent_values) {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = scalar_bits(now[i]) & mask;
            any |= bits | (max - bits);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = scalar_bits(now[i]) & mask, from = scalar_bits(parent_values[i]) & mask;
            uint32_t moved = scalar_bits(now[i] - parent_values[i]) & INT32_MAX;
            any |= bits | (max - bits) | from | (max_before - from) | (max_moved - moved);
        }
    }
    return any >> 31;
}

CPU_LOOP static void bins_of(uint16_t *bin, const float *values, float per_unit, uint16_t max, size_t n) {
    const float last = (float)max;
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        float at = scalar_magnitude(values[i]) * per_unit;
        bin[i] = (uint16_t)(int32_t)(at < last ? at : last);
    }
}

CPU_LOOP static void level_fill(float *values, size_t n, const level_run *run) {
    const int32_t row = run->row, birth = run->birth, *column = run->column;
    CPU_NO_CARRY
    for (size_t i = 0; i < n; i++) {
        int32_t level = scalar_level_apply(birth, 0, row + column[i], birth, 0);
        values[i] = scalar_float((uint32_t)level << LEVEL_SHIFT);
    }
}

/* ---- means of rows and columns ---- */

/* Masks the elements that count: positive and at most `max`. Compares bits; those of negative elements are below 0. */
SUMS_INLINE void counted(i32x8 *counts, f32x8 *kept, const float *now, int32_t mask, int32_t max) {
    i32x8 bits;
    memcpy(&bits, now, sizeof(bits));
    bits &= mask;
    *counts = (bits > 0) & (bits <= max);
    *kept = AS_FLOATS(bits & *counts);
}

SUMS_INLINE void add_wide(half_doubles to[2], const f32x8 *v) {
    half_floats half[2];
    memcpy(half, v, sizeof(half));
    to[0] += WIDE_HALF(half[0]);
    to[1] += WIDE_HALF(half[1]);
}

typedef struct moment_lanes {
    half_doubles sum[2];
    i32x8 count;
} moment_lanes;

SUMS_INLINE void add_moment(moment_lanes *l, const float *now, int32_t mask, int32_t max) {
    i32x8 counts;
    f32x8 kept;
    counted(&counts, &kept, now, mask, max);
    l->count -= counts;
    add_wide(l->sum, &kept);
}

CPU_LOOP static void moment_row(double sums[2], const float *now, bool magnitudes, float max, size_t n) {
    const int32_t mask = magnitudes ? INT32_MAX : -1, limit = (int32_t)scalar_bits(max);
    moment_lanes l = {.count = {0}};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        add_moment(&l, now + i, mask, limit);
    }
    if (i < n) { /* zeros do not count */
        float rest[LANES] = {0};
        memcpy(rest, now + i, (n - i) * sizeof(float));
        add_moment(&l, rest, mask, limit);
    }
    int64_t count = 0;
    for (int j = 0; j < LANES; j++) {
        count += l.count[j];
    }
    sums[0] += lane_total(l.sum);
    sums[1] += (double)count;
}

typedef struct moment_columns_at {
    const float *now;
    size_t stride;
    const double *scale;
    double *sum, *scales;
    uint32_t *count;
    int32_t mask, max;
} moment_columns_at;

/* Eight columns from `first` on: their sums stay in registers for all rows. */
SUMS_INLINE void add_columns(const moment_columns_at *c, size_t first, size_t rows, bool has_scales) {
    const float *const now = c->now + first;
    const size_t stride = c->stride;
    double *const sum = c->sum + first, *const scales = has_scales ? c->scales + first : NULL;
    uint32_t *const count = c->count + first;
    half_doubles sums[2], of[2] = {{0}, {0}};
    i32x8 counts;
    memcpy(sums, sum, sizeof(sums));
    memcpy(&counts, count, sizeof(counts));
    if (scales) {
        memcpy(of, scales, sizeof(of));
    }
    for (size_t r = 0; r < rows; r++) {
        f32x8 kept;
        i32x8 is;
        counted(&is, &kept, now + r * stride, c->mask, c->max);
        counts -= is;
        add_wide(sums, &kept);
        if (scales) {
            half_floats half[2];
            f32x8 ones = AS_FLOATS(is & (int32_t)scalar_bits(1.0f));
            memcpy(half, &ones, sizeof(half));
            of[0] += WIDE_HALF(half[0]) * c->scale[r];
            of[1] += WIDE_HALF(half[1]) * c->scale[r];
        }
    }
    memcpy(sum, sums, sizeof(sums));
    memcpy(count, &counts, sizeof(counts));
    if (scales) {
        memcpy(scales, of, sizeof(of));
    }
}

/* The last few columns, padded with zeros, which do not count. */
SUMS_INLINE void add_last_columns(const moment_columns_at *c, size_t rows, size_t i, size_t n) {
    double sum[LANES] = {0}, scales[LANES] = {0};
    uint32_t count[LANES] = {0};
    memcpy(sum, c->sum + i, (n - i) * sizeof(double));
    memcpy(count, c->count + i, (n - i) * sizeof(uint32_t));
    if (c->scales) {
        memcpy(scales, c->scales + i, (n - i) * sizeof(double));
    }
    for (size_t r = 0; r < rows; r++) {
        float now[LANES] = {0};
        memcpy(now, c->now + r * c->stride + i, (n - i) * sizeof(float));
        moment_columns_at one = {now, 0, c->scale + r, sum, scales, count, c->mask, c->max};
        add_columns(&one, 0, 1, c->scales != NULL);
    }
    memcpy(c->sum + i, sum, (n - i) * sizeof(double));
    memcpy(c->count + i, count, (n - i) * sizeof(uint32_t));
    if (c->scales) {
        memcpy(c->scales + i, scales, (n - i) * sizeof(double));
    }
}

SUMS_INLINE void add_all_columns(const moment_columns_at *c, bool has_scales, size_t rows, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        add_columns(c, i, rows, has_scales);
    }
    if (i < n) {
        add_last_columns(c, rows, i, n);
    }
}

CPU_LOOP static void moment_columns(const moment_sums *to, const moment_rows *rows, size_t n) {
    moment_columns_at c = {rows->now,
                           rows->stride,
                           rows->scale,
                           to->sum,
                           to->scales,
                           to->count,
                           rows->magnitudes ? INT32_MAX : -1,
                           (int32_t)scalar_bits(rows->limit)};
    if (to->scales) {
        add_all_columns(&c, true, rows->rows, n);
    } else {
        add_all_columns(&c, false, rows->rows, n);
    }
}
