/*
 * Turns the arrays of a lossy block into values. Encoders call it, too: a save must know exactly what its blocks will
 * decode to. values_lattice.c reads the arrays.
 */
#include "engine/decode/internal.h"

#include <string.h>

#include "kernels/scalar_lattice.h"

#define PANEL     8192u      /* elements whose low-rank sums are computed at a time */
#define EXACT_SUM 16777216.0 /* 2^24: a float holds every integer up to it */

void lattice_work_free(lattice_work *w) {
    bytes *const all[] = {&w->values, &w->products, &w->left, &w->columns, &w->right, &w->step, &w->row_step};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
    lattice_scratch_free(&w->scratch);
}

static float power_of_two(int32_t exponent) {
    return scalar_quarter_octaves(4 * exponent);
}

/* ---- the low-rank part ---- */

bool lattice_sums_exact(const float *left, const float *right, uint32_t rank) {
    double bound = 0;
    for (uint32_t k = 0; k < rank; k++) {
        bound += (double)left[k] * (double)right[k];
    }
    return bound < EXACT_SUM;
}

bool lattice_factor_bytes(int8_t *to, const int32_t *factor, uint64_t n, uint32_t rank, uint32_t padded,
                          const int32_t *shift) {
    int64_t multiplier[LATTICE_MAX_RANK];
    bool fit = true;
    for (uint32_t k = 0; k < rank; k++) {
        multiplier[k] = shift ? INT64_C(1) << shift[k] : 1;
    }
    for (uint64_t i = 0; i < n && fit; i++) {
        for (uint32_t k = 0; k < rank; k++) {
            int64_t value = factor[i * rank + k] * multiplier[k];
            fit &= value >= INT8_MIN && value <= INT8_MAX;
            to[i * padded + k] = (int8_t)value;
        }
        memset(to + i * padded + rank, 0, padded - rank);
    }
    return fit;
}

/* Converts the factors to floats in w->left and w->right, the latter in panels of `wide` columns. */
static ckd_status prepare_factors(const lattice_block *b, size_t wide, lattice_work *w, const kernels *k,
                                  ckd_error *err) {
    const lattice_columns *c = &b->own;
    size_t rows = lattice_rows(b), padded = (c->columns + wide - 1) / wide * wide;
    float *left = bytes_scratch(&w->left, rows * c->rank * sizeof(float), "decoding scratch", err);
    float *flat = bytes_scratch(&w->columns, c->columns * c->rank * sizeof(float), "decoding scratch", err);
    float *right = bytes_scratch(&w->right, padded * c->rank * sizeof(float), "decoding scratch", err);
    if (!left || !flat || !right) {
        return CKD_E_NOMEM;
    }
    float largest_left[LATTICE_MAX_RANK], largest_right[LATTICE_MAX_RANK], scale[LATTICE_MAX_RANK];
    memset(largest_left, 0, c->rank * sizeof(float));
    memset(largest_right, 0, c->rank * sizeof(float));
    for (uint32_t i = 0; i < c->rank; i++) {
        scale[i] = (float)(1u << c->shift[i]);
    }
    k->factor_values(left, largest_left, b->factor, rows, c->rank);
    k->factor_values(flat, largest_right, c->factor, c->columns, c->rank);
    k->factor_panels(right, flat, scale, c->columns, c->rank, wide);
    for (uint32_t i = 0; i < c->rank; i++) {
        largest_right[i] *= scale[i];
    }
    return lattice_sums_exact(largest_left, largest_right, c->rank)
               ? CKD_OK
               : err_set(err, CKD_E_CORRUPT, "a lossy block's low-rank part is too large to be exact");
}

/* The same, and makes room in w->products for `rows` rows of sums. */
static ckd_status prepare_products(const lattice_block *b, size_t rows, lattice_work *w, const kernels *k,
                                   ckd_error *err) {
    size_t size = rows * b->columns * sizeof(float);
    return bytes_scratch(&w->products, size, "decoding scratch", err)
               ? prepare_factors(b, b->columns, w, k, err)
               : CKD_E_NOMEM;
}

/* Computes `rows` rows of sums, from row `first` on. */
static const float *products_of(const lattice_block *b, uint64_t first, size_t rows, lattice_work *w,
                                const kernels *k) {
    const float *left = (const float *)(const void *)w->left.data + first * b->own.rank;
    float *sums = (float *)(void *)w->products.data;
    k->products(sums, left, (const float *)(const void *)w->right.data, rows, b->own.rank, b->columns);
    return sums;
}

ckd_status lattice_products(const float **out, const lattice_block *b, lattice_work *w, const kernels *k,
                            ckd_error *err) {
    *out = NULL;
    if (!b->factor) {
        return CKD_OK;
    }
    ckd_status status = prepare_products(b, lattice_rows(b), w, k, err);
    if (status == CKD_OK) {
        *out = products_of(b, 0, lattice_rows(b), w, k);
    }
    return status;
}

/* ---- rows ---- */

uint64_t lattice_row_span(const lattice_block *b, uint64_t row, uint64_t *first, uint64_t *column) {
    uint64_t start = row * b->columns, end = start + b->columns;
    uint64_t from = start > b->phase ? start - b->phase : 0;
    uint64_t to = end - b->phase < b->count ? end - b->phase : b->count;
    *first = from;
    *column = from + b->phase - start;
    return to - from;
}

ckd_status lattice_steps(const lattice_block *b, lattice_work *w, ckd_error *err) {
    bool levels = b->map == LATTICE_LEVELS;
    size_t n = b->own.step ? b->columns : (levels ? b->count : 0);
    void *steps = bytes_scratch(&w->step, n * sizeof(float) + 1, "decoding scratch", err);
    if (!steps) {
        return CKD_E_NOMEM;
    }
    if (levels && b->own.step) {
        memcpy(steps, b->own.step, n * sizeof(int32_t));
    } else if (levels) {
        memset(steps, 0, n * sizeof(int32_t));
    } else {
        float *step = steps;
        for (size_t j = 0; j < n; j++) {
            step[j] = scalar_quarter_octaves(b->own.step[j]);
        }
    }
    return CKD_OK;
}

lattice_run lattice_row_run(const lattice_block *b, const lattice_work *w, uint64_t row) {
    int32_t row_offset = b->row ? b->row[row] : 0;
    return (lattice_run){
        .unit = power_of_two(b->exponent),
        .per_unit = power_of_two(-b->exponent),
        .row_step = scalar_quarter_octaves(scalar_add(b->step, row_offset)),
        .column_step = b->own.step ? (const float *)(const void *)w->step.data : NULL,
        .low_rank_unit = power_of_two(b->low_rank_exponent),
        .offset = {(float)b->offset[0] / 256, (float)b->offset[1] / 256, (float)b->offset[2] / 256}};
}

level_run level_row_run(const lattice_block *b, const lattice_work *w, uint64_t row, bool has_parent) {
    return (level_run){.has_parent = has_parent,
                       .row = b->row ? b->row[row] : 0,
                       .column = (const int32_t *)(const void *)w->step.data,
                       .birth = b->birth,
                       .step = b->step};
}

/* ---- blocks ---- */

#define RUN 1024 /* elements widened at a time */

/* The integers of n elements from `first` on, as the kernels need them; widened into `scratch` if they are narrower. */
static const int32_t *integers_of(int32_t *scratch, const lattice_block *b, uint64_t first, uint64_t n,
                                  const kernels *k) {
    if (b->q) {
        return b->q + first;
    }
    if (b->q8) {
        k->widen_integers(scratch, b->q8 + first, n);
    } else {
        memset(scratch, 0, n * sizeof(*scratch));
    }
    return scratch;
}

static void rebuild_levels(float *values, const lattice_block *b, uint64_t row, bool has_parent,
                           const lattice_work *w, const kernels *k) {
    uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
    level_run levels = level_row_run(b, w, row, has_parent);
    levels.column += b->own.step ? column : 0;
    if (!has_parent && !b->q && !b->q8) {
        k->level_fill(values + first, n, &levels);
        return;
    }
    int32_t scratch[RUN];
    for (uint64_t at = 0; at < n; at += RUN) {
        uint64_t run = n - at < RUN ? n - at : RUN;
        level_run slice = levels;
        slice.column += b->own.step ? at : 0;
        k->level_apply(values + first + at, integers_of(scratch, b, first + at, run, k), run, &slice);
    }
}

/* products: of this row. */
static void rebuild_linear(float *values, const lattice_block *b, const float *products, uint64_t row,
                           const lattice_work *w, const kernels *k) {
    uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
    lattice_run linear = lattice_row_run(b, w, row);
    linear.column_step = linear.column_step ? linear.column_step + column : NULL;
    if (!products && b->q8) {
        k->lattice_apply_q8(values + first, b->q8 + first, n, &linear);
        return;
    }
    int32_t scratch[RUN];
    for (uint64_t at = 0; at < n; at += RUN) {
        uint64_t run = n - at < RUN ? n - at : RUN;
        lattice_run slice = linear;
        slice.column_step = linear.column_step ? linear.column_step + at : NULL;
        k->lattice_apply(values + first + at, integers_of(scratch, b, first + at, run, k),
                         products ? products + column + at : NULL, run, &slice);
    }
}

/* Whether the values are lattice integers and nothing else. */
static bool is_plain(const lattice_block *b, bool has_parent) {
    return !has_parent && b->map == LATTICE_LINEAR && b->q && b->step == 0 && !b->row && !b->own.step &&
           !b->factor && !(b->offset[0] | b->offset[1] | b->offset[2]);
}

/* Whether the values stay as they are: the parent's, or zero. */
static bool stays(const lattice_block *b, bool has_parent) {
    bool linear = b->map == LATTICE_LINEAR;
    return !b->q && !b->q8 && (linear ? !b->factor : has_parent && !b->row && !b->own.step);
}

/* ---- products that change values; at least one matrix row ---- */

/* Applies the products to a row of which the block holds only a part. Works on a copy of the whole row. */
static ckd_status move_part_of_row(float *values, const lattice_block *b, uint64_t row, lattice_work *w,
                                   const kernels *k, ckd_error *err) {
    uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
    const float *row_step = (const float *)(const void *)w->row_step.data + row;
    lattice_run run = lattice_row_run(b, w, 0);
    float *copy = bytes_scratch(&w->products, b->columns * (sizeof(float) + 1), "decoding scratch", err);
    if (!copy) {
        return CKD_E_NOMEM;
    }
    int8_t *q8 = (int8_t *)(copy + b->columns);
    memset(copy, 0, b->columns * (sizeof(float) + 1));
    memcpy(copy + column, values + first, n * sizeof(float));
    if (b->q8) {
        memcpy(q8 + column, b->q8 + first, n);
    }
    k->low_rank_apply(&(low_rank_tile){copy, b->q8 ? q8 : NULL,
                                       (const float *)(const void *)w->left.data + row * b->own.rank,
                                       (const float *)(const void *)w->right.data, row_step, 1, b->own.rank,
                                       b->columns},
                      &run);
    memcpy(values + first, copy + column, n * sizeof(float));
    return CKD_OK;
}

static ckd_status rebuild_low_rank(float *values, const lattice_block *b, lattice_work *w, const kernels *k,
                                   ckd_error *err) {
    uint64_t rows = lattice_rows(b), end = b->phase + b->count;
    ckd_status status = prepare_factors(b, LOW_RANK_PANEL, w, k, err);
    float *row_step =
        status == CKD_OK ? bytes_scratch(&w->row_step, rows * sizeof(float), "decoding scratch", err) : NULL;
    if (!row_step) {
        return status == CKD_OK ? CKD_E_NOMEM : status;
    }
    lattice_run run = lattice_row_run(b, w, 0);
    for (uint64_t row = 0; row < rows; row++) {
        row_step[row] = b->row ? lattice_row_run(b, w, row).row_step : run.row_step;
    }
    uint64_t from = b->phase ? 1 : 0, to = end / b->columns; /* whole rows */
    if (b->phase) {
        status = move_part_of_row(values, b, 0, w, k, err);
    }
    if (from < to) {
        uint64_t first = from * b->columns - b->phase;
        k->low_rank_apply(&(low_rank_tile){values + first, b->q8 ? b->q8 + first : NULL,
                                           (const float *)(const void *)w->left.data + from * b->own.rank,
                                           (const float *)(const void *)w->right.data, row_step + from,
                                           to - from, b->own.rank, b->columns},
                          &run);
    }
    if (status == CKD_OK && to < rows && (to > 0 || !b->phase)) {
        status = move_part_of_row(values, b, to, w, k, err);
    }
    return status;
}

ckd_status lattice_rebuild(float *values, const lattice_block *b, bool has_parent, lattice_work *w,
                           const kernels *k, ckd_error *err) {
    if (stays(b, has_parent)) {
        if (!has_parent) {
            memset(values, 0, b->count * sizeof(float));
        }
        return CKD_OK;
    }
    if (is_plain(b, has_parent)) {
        k->lattice_values(values, b->q, b->count, power_of_two(b->exponent));
        return CKD_OK;
    }
    ckd_status status = lattice_steps(b, w, err);
    bool filled = b->map == LATTICE_LEVELS && !b->q && !b->q8; /* the values are filled row by row */
    if (status == CKD_OK && !has_parent && !filled) {
        memset(values, 0, b->count * sizeof(float));
    }
    if (status == CKD_OK && b->factor && !b->q) {
        return rebuild_low_rank(values, b, w, k, err);
    }
    /* Work on a panel of rows at a time, so that the sums stay in the L1 cache. */
    uint64_t rows = lattice_rows(b), panel = b->columns < PANEL ? PANEL / b->columns : 1;
    panel = panel < rows ? panel : rows;
    if (status == CKD_OK && b->factor) {
        status = prepare_products(b, panel, w, k, err);
    }
    const float *products = NULL;
    for (uint64_t row = 0; row < rows && status == CKD_OK; row++) {
        if (b->factor && row % panel == 0) {
            products = products_of(b, row, rows - row < panel ? rows - row : panel, w, k);
        }
        if (b->map == LATTICE_LEVELS) {
            rebuild_levels(values, b, row, has_parent, w, k);
        } else {
            rebuild_linear(values, b, products ? products + row % panel * b->columns : NULL, row, w, k);
        }
    }
    return status;
}

static ckd_status put_exceptions(void *values, ckd_dtype dtype, const lattice_block *b, ckd_error *err) {
    size_t size = ckd_dtype_size(dtype);
    for (uint32_t i = 0; i < b->exceptions; i++) {
        uint8_t *to = (uint8_t *)values + b->exception_at[i] * size;
        uint32_t bits = b->exception_bits[i];
        if (size == 4) {
            memcpy(to, &bits, 4);
        } else if (bits <= UINT16_MAX) {
            uint16_t half = (uint16_t)bits;
            memcpy(to, &half, 2);
        } else {
            return err_set(err, CKD_E_CORRUPT, "a lossy block keeps a value that is not of its dtype");
        }
    }
    return CKD_OK;
}

ckd_status lattice_rebuild_values(const lattice_target *to, const lattice_block *b, lattice_work *w,
                                  const kernels *k, ckd_error *err) {
    void *values = to->values;
    ckd_dtype dtype = to->dtype;
    if (b->masks || (to->has_parent && stays(b, true))) {
        ckd_status status = lattice_move_values(to, b, w, k, err);
        return status == CKD_OK ? put_exceptions(values, dtype, b, err) : status;
    }
    if (dtype == CKD_F32 && (uintptr_t)values % _Alignof(float) == 0) {
        ckd_status status = lattice_rebuild(values, b, to->has_parent, w, k, err);
        return status == CKD_OK ? put_exceptions(values, dtype, b, err) : status;
    }
    float *floats = bytes_scratch(&w->values, b->count * sizeof(float) + 1, "decoding scratch", err);
    if (!floats) {
        return CKD_E_NOMEM;
    }
    if (to->has_parent) {
        k->widen(floats, dtype, values, b->count);
    }
    ckd_status status = lattice_rebuild(floats, b, to->has_parent, w, k, err);
    if (status != CKD_OK) {
        return status;
    }
    if (dtype == CKD_F32) {
        memcpy(values, floats, b->count * sizeof(float));
    } else {
        k->cast(dtype, values, CKD_F32, floats, b->count);
    }
    return put_exceptions(values, dtype, b, err);
}
