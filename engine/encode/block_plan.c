/* Sizes of a block as symbol streams, on its own and as a delta. block_coder.c and block_delta.c choose by them. */
#include "engine/encode/internal.h"

#include <string.h>

#include "base/vocabulary.h"

/* ---- scratch ---- */

void block_plan_init(block_plan *p, const kernels *k, symbols_workspace *work) {
    *p = (block_plan){.kernels = k, .work = work};
}

void block_plan_free(block_plan *p) {
    bytes_free(&p->integers);
    bytes_free(&p->residual);
    bytes_free(&p->context);
}

#define ANY_NEGATIVE(type)                         \
    for (size_t i = 0; i < n; i++) {               \
        type v;                                    \
        memcpy(&v, at + i * sizeof(v), sizeof(v)); \
        negative |= v < 0;                         \
    }

/*
 * As unsigned integers, small positive and negative values would be far apart. Bytes have a symbol for each value
 * anyway.
 */
static symbols_mode mode_standalone(ckd_dtype dtype, const void *values, size_t n) {
    const uint8_t *at = values;
    bool negative = false;
    if (dtype == CKD_I64) {
        ANY_NEGATIVE(int64_t)
    } else if (dtype == CKD_I32) {
        ANY_NEGATIVE(int32_t)
    } else if (dtype == CKD_I16) {
        ANY_NEGATIVE(int16_t)
    }
    return negative ? SYMBOLS_CLASS : SYMBOLS_SPLIT;
}

/* ---- rows and columns ---- */

#define COLUMNS_MIN 32 /* fewer columns are joined with the next dimension, as in kernels of a convolution */

symbols_grid block_grid(const geometry *g, const ckd_region *region, uint64_t first) {
    bool box = region->kind == CKD_REGION_BOX;
    symbols_grid grid = {1, 0};
    for (uint32_t d = g->ndim; d-- > 0 && grid.columns < COLUMNS_MIN;) {
        grid.columns *= box ? region->lengths[d] : g->shape[d];
    }
    if (grid.columns) {
        grid.phase = ((region->kind == CKD_REGION_FLAT ? region->start : 0) + first) % grid.columns;
    }
    return grid;
}

/* ---- samples ---- */

#define SAMPLE_MIN    4096  /* elements */
#define SAMPLE_SHARE  16    /* 1/SAMPLE_SHARE of a block is sampled */
#define SAMPLE_SLICES 16    /* spread over the block */
#define SAMPLED_FROM  16384 /* smaller blocks are planned whole */

/* A sample: `slices` of `length` elements each, whole rows if rows are short enough. */
typedef struct sampling {
    size_t slices, length, step, first;
} sampling;

static sampling choose_sample(const block_plan *p) {
    size_t target = p->input.count / SAMPLE_SHARE;
    target = target < SAMPLE_MIN ? SAMPLE_MIN : target;
    sampling s = {.length = target / SAMPLE_SLICES, .slices = SAMPLE_SLICES};
    size_t columns = (size_t)p->input.grid.columns;
    if (columns && columns <= target) {
        s.length = columns > s.length ? columns : s.length / columns * columns;
        s.slices = target / s.length;
        s.first = (columns - (size_t)p->input.grid.phase) % columns;
        s.step = (p->input.count - s.first) / s.slices / columns * columns;
    } else {
        s.step = p->input.count / s.slices;
    }
    return s;
}

/* The standalone and the delta estimate see the same elements. */
static void take_sample(uint8_t *to, const sampling *s, const uint8_t *from, unsigned width) {
    for (size_t i = 0; i < s->slices; i++) {
        memcpy(to + i * s->length * width, from + (s->first + i * s->step) * width, s->length * width);
    }
}

/* Provides space in `residual` for a sample of the values, of the previous values, and of integers. */
static ckd_status sampled(block_plan *p, uint8_t **values, uint8_t **previous, uint8_t **integers,
                          const sampling *s, ckd_error *err) {
    size_t size = s->slices * s->length * p->width;
    *values = bytes_scratch(&p->residual, 3 * size, "coding scratch", err);
    if (!*values) {
        return CKD_E_NOMEM;
    }
    *previous = *values + size;
    *integers = *previous + size;
    take_sample(*values, s, p->input.values, p->width);
    return CKD_OK;
}

static ckd_status estimate_standalone(block_plan *p, ckd_error *err) {
    sampling s = choose_sample(p);
    size_t n = s.slices * s.length;
    uint8_t *values, *previous, *integers;
    ckd_status status = sampled(p, &values, &previous, &integers, &s, err);
    if (status == CKD_OK) {
        bool rows = p->input.grid.columns && s.length % p->input.grid.columns == 0;
        symbols_grid grid = {rows ? p->input.grid.columns : 0, 0};
        if (dtype_is_float(p->input.dtype)) {
            p->kernels->rotate_sign(p->input.dtype, integers, values, n);
        }
        p->standalone = symbols_estimate(
            p->work, p->mode,
            &(symbols_input){p->width, n, dtype_is_float(p->input.dtype) ? integers : values, NULL}, &grid,
            p->input.count);
    }
    return status;
}

static ckd_status estimate_delta(block_plan *p, ckd_error *err) {
    sampling s = choose_sample(p);
    size_t n = s.slices * s.length;
    uint8_t *values, *previous, *integers;
    uint8_t *context = bytes_scratch(&p->context, n, "coding scratch", err);
    ckd_status status = context ? sampled(p, &values, &previous, &integers, &s, err) : CKD_E_NOMEM;
    if (status == CKD_OK) {
        take_sample(previous, &s, p->previous, p->width);
        p->kernels->ordered_residual(p->input.dtype, integers, values, previous, n);
        p->kernels->magnitude_context(p->input.dtype, context, previous, n);
        p->delta = symbols_estimate(p->work, SYMBOLS_CLASS, &(symbols_input){p->width, n, integers, context},
                                    NULL, p->input.count);
    }
    return status;
}

/* ---- plans ---- */

ckd_status block_plan_as_standalone(block_plan *p, ckd_error *err) {
    if (p->standalone_planned) {
        return CKD_OK;
    }
    const void *integers = p->input.values;
    if (dtype_is_float(p->input.dtype)) {
        void *rotated = bytes_scratch(&p->integers, p->input.count * p->width, "coding scratch", err);
        if (!rotated) {
            return CKD_E_NOMEM;
        }
        p->kernels->rotate_sign(p->input.dtype, rotated, p->input.values, p->input.count);
        integers = rotated;
    }
    p->standalone = symbols_plan(p->work, 0, p->mode,
                                 &(symbols_input){p->width, p->input.count, integers, NULL}, &p->input.grid);
    p->standalone_planned = true;
    return CKD_OK;
}

static ckd_status plan_delta(block_plan *p, ckd_error *err) {
    void *residual = bytes_scratch(&p->residual, p->input.count * p->width, "coding scratch", err);
    uint8_t *context = residual ? bytes_scratch(&p->context, p->input.count, "coding scratch", err) : NULL;
    if (!context) {
        return CKD_E_NOMEM;
    }
    p->kernels->ordered_residual(p->input.dtype, residual, p->input.values, p->previous, p->input.count);
    p->kernels->magnitude_context(p->input.dtype, context, p->previous, p->input.count);
    p->delta = symbols_plan(p->work, 1, SYMBOLS_CLASS,
                            &(symbols_input){p->width, p->input.count, residual, context}, NULL);
    p->delta_symbols = symbols_coded(p->work, 1);
    p->delta_planned = true;
    return CKD_OK;
}

ckd_status block_plan_begin(block_plan *p, const plan_input *in, bool try_delta, uint64_t expected,
                            ckd_error *err) {
    p->input = *in;
    p->width = (unsigned)ckd_dtype_size(in->dtype);
    p->previous = NULL;
    p->mode = mode_standalone(in->dtype, in->values, in->count);
    p->standalone = p->delta = 0;
    p->standalone_planned = p->delta_planned = p->standalone_sampled = false;
    if (!try_delta || in->count < SAMPLED_FROM) {
        return block_plan_as_standalone(p, err);
    }
    p->standalone = (size_t)expected;
    p->standalone_sampled = !expected;
    return expected ? CKD_OK : estimate_standalone(p, err);
}

/*
 * Samples are off by a percent or two, and by several percent if they must show the gain from levels of rows and
 * columns. A delta must save a few percent to be used, and is given up if it saves less than 1.5 % in a sample. If it
 * wins by far, the exact standalone size is not needed.
 */
#define DELTA_LOST        0.985
#define DELTA_WON_SAMPLED 0.90

ckd_status block_plan_delta(block_plan *p, const void *previous, ckd_error *err) {
    p->previous = previous;
    double won = (double)p->standalone * (p->standalone_sampled ? DELTA_WON_SAMPLED : BLOCK_DELTA_WON);
    if (p->input.count >= SAMPLED_FROM) {
        ckd_status status = estimate_delta(p, err);
        if (status != CKD_OK) {
            return status;
        }
        if ((double)p->delta > DELTA_LOST * (double)p->standalone) {
            status = block_plan_as_standalone(p, err);
            /* The expected size may be far too small, as for a block that was constant and no longer is. */
            if (status != CKD_OK || (double)p->delta > DELTA_LOST * (double)p->standalone) {
                return status;
            }
        }
    }
    ckd_status status = plan_delta(p, err);
    return status == CKD_OK && (double)p->delta > won ? block_plan_as_standalone(p, err) : status;
}

size_t block_plan_encode(block_plan *p, bool delta, void *to, size_t capacity) {
    if (delta) {
        return symbols_encode(p->work, 1, p->residual.data, p->context.data, to, capacity);
    }
    const void *integers = dtype_is_float(p->input.dtype) ? p->integers.data : p->input.values;
    return symbols_encode(p->work, 0, integers, NULL, to, capacity);
}
