/* One block of a tile: integers, payload, and the values that they decode to. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/lossy/internal.h"
#include "kernels/scalar_lattice.h"

void lossy_job_free(lossy_job *j) {
    lattice_work_free(&j->work);
    bytes *const all[] = {&j->q, &j->q8, &j->rebuilt, &j->at, &j->bits, &j->other_moment, &j->values};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
}

lattice_block lossy_block_of(const lossy_tile *t, uint64_t at, uint64_t count) {
    lattice_block b = t->plan.lattice;
    uint64_t place = t->shape.phase + at, row = t->shape.columns ? place / t->shape.columns : 0;
    b.count = count;
    b.columns = t->shape.columns;
    b.phase = t->shape.columns ? place % t->shape.columns : 0;
    b.row = b.row ? b.row + row : NULL;
    b.factor = b.factor ? b.factor + row * b.own.rank : NULL;
    return b;
}

/* ---- integers ---- */

/* A row is quantised SLICE elements at a time, so that residuals stay in the nearest cache. */
#define SLICE 2048u

typedef struct source {
    const lossy_job *job; /* block, work */
    const lossy_elements *elements;
    const float *products; /* or NULL */
} source;

typedef struct row_slice {
    uint64_t row, first, column, n;
} row_slice;

static void residual_of(float *to, const source *from, const lattice_run *run, const row_slice *p) {
    static const float zeros[SLICE] = {0};
    const lossy_elements *e = from->elements;
    const float *now = e->tile->input.now + e->at, *parent_values = e->tile->input.parent_values;
    lattice_run slice_run = *run;
    slice_run.column_step = run->column_step ? run->column_step + p->column : NULL;
    e->kernels->lattice_residual(
        to, now + p->first, parent_values ? parent_values + e->at + p->first : zeros,
        from->products ? from->products + p->row * from->job->block.columns + p->column : NULL, p->n,
        &slice_run);
}

uint8_t lossy_offset(double below) {
    return (uint8_t)(below > 0 ? (below < 255.0 / 256 ? lrint(256 * below) : 255) : 0);
}

/* Sets the offsets to the mean position of each integer's values. */
static void choose_offsets(lattice_block *b, const level_sums *s) {
    for (int w = 0; w < 3; w++) {
        b->offset[w] = lossy_offset(s->count[w] ? s->below[w] / (double)s->count[w] : 0);
    }
}

static void add_levels(level_sums *s, const int32_t *q, const float *residual, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        if (q[i]) {
            int32_t level = q[i] < 0 ? -q[i] : q[i];
            int which = level > 2 ? 2 : level - 1;
            s->below[which] += level - fabs((double)residual[i]);
            s->count[which]++;
        }
    }
}

/* Integers go to `q8`, or to q if `q8` is NULL. Returns false if one does not fit a byte. */
static bool quantise_rows(level_sums *sums, int8_t *q8, int32_t *q, const source *from) {
    float residual[SLICE];
    const lattice_block *b = &from->job->block;
    const float *up = from->elements->tile->plan.up;
    const kernels *k = from->elements->kernels;
    for (uint64_t row = 0; row < lattice_rows(b); row++) {
        uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
        lattice_run run = lattice_row_run(b, &from->job->work, row);
        for (uint64_t at = 0; at < n; at += SLICE) {
            uint64_t remaining = n - at;
            row_slice p = {row, first + at, column + at, remaining < SLICE ? remaining : SLICE};
            residual_of(residual, from, &run, &p);
            if (q8 && !k->quantise_q8(q8 + p.first, sums, residual, up, p.n)) {
                return false;
            }
            if (!q8) {
                k->quantise(q + p.first, residual, up, p.n);
                add_levels(sums, q + p.first, residual, p.n);
            }
        }
    }
    return true;
}

static lattice_effort effort_of(const lossy_tile *t) {
    return t->params->effort >= 7 ? LATTICE_SMALL : LATTICE_FAST;
}

/* Uses bytes if they hold all integers, as they nearly always do. LATTICE_SMALL needs wider integers. */
static ckd_status quantise_linear(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    const lossy_tile *t = e->tile;
    lattice_block *b = &j->block;
    if (!(t->plan.up[0] < INFINITY)) {
        return CKD_OK; /* all integers are 0 */
    }
    source from = {j, e, NULL};
    level_sums sums = {{0}, {0}};
    int8_t *q8 = bytes_scratch(&j->q8, b->count, "coding scratch", err);
    ckd_status status = q8 ? lattice_products(&from.products, b, &j->work, e->kernels, err) : CKD_E_NOMEM;
    THEN(status, lattice_steps(b, &j->work, err));
    if (status != CKD_OK) {
        return status;
    }
    if (effort_of(t) == LATTICE_FAST && quantise_rows(&sums, q8, NULL, &from)) {
        b->q8 = q8;
    } else {
        sums = (level_sums){{0}, {0}};
        int32_t *q = bytes_scratch(&j->q, b->count * sizeof(int32_t), "coding scratch", err);
        if (!q) {
            return CKD_E_NOMEM;
        }
        quantise_rows(&sums, NULL, q, &from);
        b->q = q;
    }
    if (sums.count[0] + sums.count[1] + sums.count[2] == 0) {
        b->q8 = NULL;
        b->q = NULL;
    }
    if (t->plan.up[0] > 0.5f) {
        choose_offsets(b, &sums);
    }
    return CKD_OK;
}

static bool any_set(const int32_t *q, uint64_t n) {
    int32_t all = 0;
    for (uint64_t i = 0; i < n; i++) {
        all |= q[i];
    }
    return all != 0;
}

/* Makes integers only if one of them is not 0; rows and columns mostly suffice. */
static ckd_status quantise_levels(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    const float *now = e->tile->input.now + e->at;
    lattice_block *b = &j->block;
    int32_t slice[SLICE], *q = NULL;
    ckd_status status = lattice_steps(b, &j->work, err);
    for (uint64_t row = 0; row < lattice_rows(b) && status == CKD_OK; row++) {
        uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
        level_run run = level_row_run(b, &j->work, row, false);
        for (uint64_t i = 0; i < n && status == CKD_OK; i += SLICE) {
            uint64_t count = n - i < SLICE ? n - i : SLICE, to = first + i;
            level_run slice_run = run;
            slice_run.column += b->own.step ? column + i : 0;
            e->kernels->level_quantise(slice, now + to, now + to, LOSSY_LEVEL_UP, count, &slice_run);
            if (!q && any_set(slice, count)) {
                q = bytes_scratch(&j->q, b->count * sizeof(int32_t), "coding scratch", err);
                status = q ? CKD_OK : CKD_E_NOMEM;
                if (q) {
                    memset(q, 0, to * sizeof(int32_t));
                }
            }
            if (q) {
                memcpy(q + to, slice, count * sizeof(int32_t));
            }
        }
    }
    b->q = q;
    return status;
}

/* ---- errors ---- */

static ckd_status measure(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    const lossy_tile *t = e->tile;
    uint64_t n = j->block.count;
    const float *decoded = (const float *)(const void *)j->values.data;
    if (t->dtype != CKD_F32) {
        float *wide = bytes_scratch(&j->rebuilt, n * sizeof(float), "coding scratch", err);
        if (!wide) {
            return CKD_E_NOMEM;
        }
        e->kernels->widen(wide, t->dtype, j->values.data, n);
        decoded = wide;
    }
    j->decoded = decoded;
    j->error = (lossy_error){0};
    lossy_error_add(&j->error, t->input.now + e->at, decoded, n, e->kernels);
    lossy_check_bound(j, &t->limits);
    return CKD_OK;
}

static ckd_status rebuild(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    const lossy_tile *t = e->tile;
    const float *parent_values = t->input.parent_values ? t->input.parent_values + e->at : NULL;
    uint64_t n = j->block.count;
    size_t size = ckd_dtype_size(t->dtype);
    void *values = bytes_scratch(&j->values, n * size, "coding scratch", err);
    if (!values) {
        return CKD_E_NOMEM;
    }
    if (parent_values && t->dtype == CKD_F32) {
        memcpy(values, parent_values, n * size);
    } else if (parent_values) {
        e->kernels->cast(t->dtype, values, CKD_F32, parent_values, n);
    }
    const lattice_target target = {values, t->dtype, parent_values != NULL};
    return lattice_rebuild_values(&target, &j->block, &j->work, e->kernels, err);
}

ckd_status lossy_block_rebuild(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    ckd_status status = rebuild(j, e, err);
    return status == CKD_OK ? measure(j, e, err) : status;
}

static ckd_status in_steps(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    ckd_status status =
        e->tile->part == LOSSY_SECOND ? quantise_levels(j, e, err) : quantise_linear(j, e, err);
    lossy_no_exceptions(j);
    THEN(status, lossy_find_exceptions(j, e, 0, j->block.count, err));
    return status == CKD_OK ? lossy_block_rebuild(j, e, err) : status;
}

ckd_status lossy_block_without_factor(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    lattice_block *b = &j->block;
    b->factor = NULL;
    if (!b->shared) { /* shared parts may be left unused */
        b->own.rank = 0;
        b->own.shift = b->own.factor = NULL;
    }
    b->q = NULL;
    b->q8 = NULL;
    return in_steps(j, e, err);
}

ckd_status lossy_block(lossy_job *j, bytes *payload, const lossy_elements *e, symbols_workspace *work,
                       ckd_error *err) {
    bool done;
    j->block = lossy_block_of(e->tile, e->at, e->count);
    ckd_status status = lossy_stream(&done, j, e, err);
    if (status == CKD_OK && !done) {
        status = in_steps(j, e, err);
    }
    THEN(status, pair_finish(j, e, err));
    if (status == CKD_OK) {
        bytes_clear(payload);
        status = lattice_encode(payload, &j->block, effort_of(e->tile), &j->work.scratch, work, err);
    }
    return status;
}

/* ---- standalone ---- */

uint64_t lossy_standalone_size(const lossy_tile *t, uint64_t count) {
    return (uint64_t)(t->plan.standalone_bits * (double)count / 8) + 32;
}

ckd_status lossy_block_standalone(lossy_job *j, bytes *payload, const lossy_tile *t, const kernels *k,
                                  symbols_workspace *work, ckd_error *err) {
    uint64_t n = j->block.count;
    lattice_block b = {.map = j->block.map,
                       .count = n,
                       .columns = n ? n : 1,
                       .exponent = j->block.exponent,
                       .step = j->block.map == LATTICE_LEVELS,
                       .birth = j->block.birth,
                       .exceptions = j->block.exceptions,
                       .exception_at = j->block.exception_at,
                       .exception_bits = j->block.exception_bits};
    int32_t *q = bytes_scratch(&j->q, n * sizeof(int32_t), "coding scratch", err);
    float *values = q ? bytes_scratch(&j->rebuilt, n * sizeof(float), "coding scratch", err) : NULL;
    if (!values) {
        return CKD_E_NOMEM;
    }
    k->widen(values, t->dtype, j->values.data, n);
    for (uint32_t i = 0; i < b.exceptions; i++) {
        values[b.exception_at[i]] = 0;
    }
    bool same = true; /* false for -0.0, and for a parent's values that were off the lattice */
    if (b.map == LATTICE_LEVELS) {
        k->level_of(q, values, n);
        for (uint64_t i = 0; i < n; i++) {
            same &= scalar_bits(values[i]) == (uint32_t)q[i] << LEVEL_SHIFT;
            q[i] = q[i] ? q[i] - b.birth : LEVEL_ZERO;
        }
    } else {
        float per_unit = ldexpf(1, -b.exponent), unit = ldexpf(1, b.exponent);
        for (uint64_t i = 0; i < n; i++) {
            q[i] = scalar_units(values[i] * per_unit);
            same &= scalar_bits((float)q[i] * unit) == scalar_bits(values[i]);
        }
    }
    b.q = q;
    bytes_clear(payload);
    if (!same) {
        return CKD_OK; /* no payload: the caller stores the values in another way */
    }
    return lattice_encode(payload, &b, LATTICE_FAST, &j->work.scratch, work, err);
}
