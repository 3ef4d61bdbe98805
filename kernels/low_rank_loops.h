/* Low-rank parts of lossy blocks; part of kernels/cpu_loops.h, which includes it. */

/* ---- factors ---- */

#define RANKS 64 /* components at a time; their magnitudes stay in registers or the nearest cache */

CPU_LOOP static void factor_values(float *values, float *largest, const int32_t *factor, size_t count,
                                   size_t rank) {
    CPU_NO_CARRY
    for (size_t i = 0; i < count * rank; i++) {
        values[i] = (float)factor[i];
    }
    float max[RANKS];
    for (size_t from = 0; from < rank; from += RANKS) {
        size_t n = rank - from < RANKS ? rank - from : RANKS;
        memcpy(max, largest + from, n * sizeof(float));
        for (size_t i = 0; i < count; i++) {
            const float *row = values + i * rank + from;
            CPU_NO_CARRY
            for (size_t k = 0; k < n; k++) {
                float size = scalar_magnitude(row[k]);
                max[k] = size > max[k] ? size : max[k];
            }
        }
        memcpy(largest + from, max, n * sizeof(float));
    }
}

CPU_LOOP static void factor_panels(float *panels, const float *values, const float *scale, size_t columns,
                                   size_t rank, size_t wide) {
    for (size_t at = 0; at < columns; at += wide, panels += rank * wide) {
        size_t n = columns - at < wide ? columns - at : wide;
        if (n < wide) {
            memset(panels, 0, rank * wide * sizeof(float));
        }
        for (size_t j = 0; j < n; j++) {
            const float *from = values + (at + j) * rank;
            for (size_t k = 0; k < rank; k++) {
                panels[k * wide + j] = from[k] * scale[k];
            }
        }
    }
}

/* ---- products applied to values ---- */

#define LOW_RANK_ROWS 4 /* rows at a time; their sums stay in registers */

/* LOW_RANK_ROWS x LOW_RANK_PANEL sums over `rank`. */
EIGHT void low_rank_sums(float *to, const float *const left[LOW_RANK_ROWS], const float *panel, size_t rank) {
    const float *r0 = left[0], *r1 = left[1], *r2 = left[2], *r3 = left[3];
    f32x8 a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0}, d0 = {0}, d1 = {0};
    for (size_t k = 0; k < rank; k++) {
        f32x8 x = FLOATS_AT(panel + k * LOW_RANK_PANEL), y = FLOATS_AT(panel + k * LOW_RANK_PANEL + LANES);
        a0 += r0[k] * x;
        a1 += r0[k] * y;
        b0 += r1[k] * x;
        b1 += r1[k] * y;
        c0 += r2[k] * x;
        c1 += r2[k] * y;
        d0 += r3[k] * x;
        d1 += r3[k] * y;
    }
    const f32x8 sums[2 * LOW_RANK_ROWS] = {a0, a1, b0, b1, c0, c1, d0, d1};
    memcpy(to, sums, sizeof(sums));
}

typedef struct low_rank_rows {
    float *values; /* LOW_RANK_ROWS rows of LOW_RANK_PANEL columns, `stride` elements apart */
    const int8_t *q8;
    size_t stride;
    const float *row_step, *column_step; /* column_step: may be NULL */
} low_rank_rows;

/* lattice_apply on LOW_RANK_ROWS x LOW_RANK_PANEL elements. */
EIGHT void move_panel(const low_rank_rows *to, const float *sums, const lattice_run *run) {
    for (size_t i = 0; i < LOW_RANK_ROWS; i++) {
        for (size_t j = 0; j < LOW_RANK_PANEL; j += LANES) {
            f32x8 step = {0};
            step =
                to->column_step ? FLOATS_AT(to->column_step + j) * to->row_step[i] : step + to->row_step[i];
            f32x8 low = (FLOATS_AT(sums + i * LOW_RANK_PANEL + j) * run->low_rank_unit) * step;
            i32x8 units = UNITS_EIGHT(low);
            if (to->q8) {
                add_own_units(&units, to->q8 + i * to->stride + j, &step, run);
            }
            move_units(to->values + i * to->stride + j, &units, run);
        }
    }
}

/* move_panel for fewer rows or columns, on copies. */
CPU_TARGET static void move_part(const low_rank_rows *to, const float *sums, size_t rows, size_t columns,
                                 const lattice_run *run) {
    float values[LOW_RANK_ROWS * LOW_RANK_PANEL] = {0}, row_step[LOW_RANK_ROWS] = {0},
                                 column_step[LOW_RANK_PANEL] = {0};
    int8_t q8[LOW_RANK_ROWS * LOW_RANK_PANEL] = {0};
    low_rank_rows copy = {values, to->q8 ? q8 : NULL, LOW_RANK_PANEL, row_step,
                          to->column_step ? column_step : NULL};
    memcpy(row_step, to->row_step, rows * sizeof(float));
    if (to->column_step) {
        memcpy(column_step, to->column_step, columns * sizeof(float));
    }
    for (size_t i = 0; i < rows; i++) {
        memcpy(values + i * LOW_RANK_PANEL, to->values + i * to->stride, columns * sizeof(float));
        if (to->q8) {
            memcpy(q8 + i * LOW_RANK_PANEL, to->q8 + i * to->stride, columns);
        }
    }
    move_panel(&copy, sums, run);
    for (size_t i = 0; i < rows; i++) {
        memcpy(to->values + i * to->stride, values + i * LOW_RANK_PANEL, columns * sizeof(float));
    }
}

CPU_LOOP static void low_rank_apply(const low_rank_tile *tile, const lattice_run *run) {
    const lattice_run own = *run;
    float *const values = tile->values;
    const int8_t *const q8 = tile->q8;
    const float *const left = tile->left, *const row_step = tile->row_step, *right = tile->right;
    const size_t rows = tile->rows, rank = tile->rank, columns = tile->columns;
    float sums[LOW_RANK_ROWS * LOW_RANK_PANEL];
    for (size_t j = 0; j < columns; j += LOW_RANK_PANEL, right += rank * LOW_RANK_PANEL) {
        size_t width = columns - j < LOW_RANK_PANEL ? columns - j : LOW_RANK_PANEL;
        for (size_t i = 0; i < rows; i += LOW_RANK_ROWS) {
            size_t height = rows - i < LOW_RANK_ROWS ? rows - i : LOW_RANK_ROWS, at = i * columns + j;
            const float *from[LOW_RANK_ROWS];
            for (size_t r = 0; r < LOW_RANK_ROWS; r++) {
                from[r] = left + (i + (r < height ? r : 0)) * rank;
            }
            low_rank_sums(sums, from, right, rank);
            low_rank_rows to = {values + at, q8 ? q8 + at : NULL, columns, row_step + i,
                                own.column_step ? own.column_step + j : NULL};
            if (height == LOW_RANK_ROWS && width == LOW_RANK_PANEL) {
                move_panel(&to, sums, &own);
            } else {
                move_part(&to, sums, height, width, &own);
            }
        }
    }
}
