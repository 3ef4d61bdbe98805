/* One block of a tile: integers, payload, and the values that they decode to. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/lossy.h"
#include "kernels/scalar_lattice.h"

void lossy_job_free(lossy_job *j) {
    lattice_work_free(&j->work);
    bytes *const all[] = {&j->residual, &j->q, &j->rebuilt, &j->at, &j->bits, &j->values};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        bytes_free(all[i]);
    }
}

/* The tile's plan, for a block of it. */
static lattice_block block_of(const lossy_tile *t, uint64_t at, uint64_t count) {
    lattice_block b = t->plan;
    uint64_t place = t->phase + at, row = t->columns ? place / t->columns : 0;
    b.count = count;
    b.columns = t->columns;
    b.phase = t->columns ? place % t->columns : 0;
    b.row = b.row ? b.row + row : NULL;
    b.factor = b.factor ? b.factor + row * b.own.rank : NULL;
    return b;
}

/* ---- integers ---- */

static ckd_status quantise_linear(lossy_job *j, const lossy_tile *t, uint64_t at, const kernels *k,
                                  ckd_error *err) {
    lattice_block *b = &j->block;
    float *residual = bytes_scratch(&j->residual, b->count * sizeof(float), "coding scratch", err);
    const float *products = NULL;
    ckd_status status = residual ? lattice_products(&products, b, &j->work, k, err) : CKD_E_NOMEM;
    if (status == CKD_OK) {
        status = lattice_steps(b, &j->work, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    if (!t->before) {
        memset(j->rebuilt.data, 0, b->count * sizeof(float));
    }
    const float *before = t->before ? t->before + at : (const float *)(const void *)j->rebuilt.data;
    for (uint64_t row = 0; row < lattice_rows(b); row++) {
        uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
        lattice_run run = lattice_row_run(b, &j->work, row);
        run.column_step = run.column_step ? run.column_step + column : NULL;
        k->lattice_residual(residual + first, t->now + at + first, before + first,
                            products ? products + row * b->columns + column : NULL, n, &run);
    }
    k->quantise((int32_t *)(void *)j->q.data, residual, t->up, b->count);
    return CKD_OK;
}

/* Where the values of each integer lie on average, so that they are put there. */
static void choose_offsets(lossy_job *j) {
    const float *residual = (const float *)(const void *)j->residual.data;
    const int32_t *q = (const int32_t *)(const void *)j->q.data;
    double below[3] = {0, 0, 0};
    uint64_t count[3] = {0, 0, 0};
    for (uint64_t i = 0; i < j->block.count; i++) {
        if (q[i]) {
            int32_t level = q[i] < 0 ? -q[i] : q[i];
            int which = level > 2 ? 2 : level - 1;
            below[which] += level - fabs((double)residual[i]);
            count[which]++;
        }
    }
    for (int w = 0; w < 3; w++) {
        double offset = count[w] ? 256 * below[w] / (double)count[w] : 0;
        j->block.offset[w] = (uint8_t)(offset < 0 ? 0 : (offset > 255 ? 255 : lrint(offset)));
    }
}

static ckd_status quantise_levels(lossy_job *j, const lossy_tile *t, uint64_t at, const kernels *k,
                                  ckd_error *err) {
    lattice_block *b = &j->block;
    ckd_status status = lattice_steps(b, &j->work, err);
    const float *before = t->before ? t->before + at : t->now + at;
    for (uint64_t row = 0; row < lattice_rows(b) && status == CKD_OK; row++) {
        uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
        level_run run = level_row_run(b, &j->work, row, t->before != NULL);
        run.column += b->own.step ? column : 0;
        k->level_quantise((int32_t *)(void *)j->q.data + first, t->now + at + first, before + first, 0.6f, n,
                          &run);
    }
    return status;
}

/* ---- what is kept as it is ---- */

static bool must_keep(const lossy_tile *t, uint64_t i, float most) {
    float value = t->now[i];
    if (fabsf(value) > t->keep_above || (t->before && fabsf(value - t->before[i]) > t->keep_moved)) {
        return true;
    }
    if (t->before && !(fabsf(t->before[i]) <= FLT_MAX)) { /* from which nothing leads back */
        return true;
    }
    return t->part == LOSSY_SECOND ? !(value >= 0 && value <= FLT_MAX) : !(fabsf(value) < most);
}

static uint32_t bits_of(const void *original, ckd_dtype dtype, uint64_t i) {
    uint16_t half;
    uint32_t bits;
    if (ckd_dtype_size(dtype) == 2) {
        memcpy(&half, (const uint8_t *)original + 2 * i, 2);
        return half;
    }
    memcpy(&bits, (const uint8_t *)original + 4 * i, 4);
    return bits;
}

static ckd_status keep_exceptions(lossy_job *j, const lossy_tile *t, uint64_t at, const void *original,
                                  ckd_error *err) {
    lattice_block *b = &j->block;
    float most = ldexpf(1, b->exponent + 29);
    uint32_t n = 0;
    for (uint64_t i = 0; i < b->count; i++) {
        n += must_keep(t, at + i, most);
    }
    b->exceptions = n;
    if (n == 0) {
        return CKD_OK;
    }
    uint32_t *places = bytes_scratch(&j->at, n * sizeof(*places), "coding scratch", err);
    uint32_t *bits = places ? bytes_scratch(&j->bits, n * sizeof(*bits), "coding scratch", err) : NULL;
    if (!bits) {
        return CKD_E_NOMEM;
    }
    int32_t *q = (int32_t *)(void *)j->q.data;
    n = 0;
    for (uint64_t i = 0; i < b->count; i++) {
        if (must_keep(t, at + i, most)) {
            places[n] = (uint32_t)i;
            bits[n++] = bits_of(original, t->dtype, i);
            q[i] = 0;
        }
    }
    b->exception_at = places;
    b->exception_bits = bits;
    return CKD_OK;
}

/* ---- how well it went ---- */

void lossy_error_add(lossy_error *e, const float *given, const float *decoded, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        if (!(fabsf(given[i]) <= FLT_MAX)) {
            e->kept++;
            continue;
        }
        double error = fabs((double)given[i] - decoded[i]);
        e->energy += (double)given[i] * given[i];
        e->error += error * error;
        e->largest = error > e->largest ? error : e->largest;
        e->finite++;
    }
}

static void measure(lossy_job *j, const lossy_tile *t, uint64_t at, const kernels *k) {
    float *got = (float *)(void *)j->rebuilt.data;
    k->widen(got, t->dtype, j->values.data, j->block.count);
    j->error = (lossy_error){0};
    lossy_error_add(&j->error, t->now + at, got, j->block.count);
    j->within = j->error.largest <= t->bound && isfinite(j->error.largest); /* no value has become infinite */
}

static ckd_status rebuild(lossy_job *j, const lossy_tile *t, uint64_t at, const kernels *k, ckd_error *err) {
    uint64_t n = j->block.count;
    size_t size = ckd_dtype_size(t->dtype);
    void *values = bytes_scratch(&j->values, n * size, "coding scratch", err);
    if (!values) {
        return CKD_E_NOMEM;
    }
    if (t->before) {
        if (t->dtype == CKD_F32) {
            memcpy(values, t->before + at, n * size);
        } else {
            k->cast(t->dtype, values, CKD_F32, t->before + at, n);
        }
    }
    return lattice_rebuild_values(values, t->dtype, &j->block, t->before != NULL, &j->work, k, err);
}

static lattice_effort effort_of(const lossy_tile *t) {
    return t->recipe->effort >= 7 ? LATTICE_SMALL : LATTICE_FAST;
}

ckd_status lossy_block(lossy_job *j, bytes *payload, const lossy_tile *t, uint64_t at, uint64_t count,
                       const void *original, const kernels *k, symbols_workspace *work, ckd_error *err) {
    j->block = block_of(t, at, count);
    if (!bytes_scratch(&j->q, count * sizeof(int32_t), "coding scratch", err) ||
        !bytes_scratch(&j->rebuilt, count * sizeof(float), "coding scratch", err)) {
        return CKD_E_NOMEM;
    }
    ckd_status status =
        t->part == LOSSY_SECOND ? quantise_levels(j, t, at, k, err) : quantise_linear(j, t, at, k, err);
    if (status == CKD_OK) {
        status = keep_exceptions(j, t, at, original, err);
    }
    if (status == CKD_OK && t->part != LOSSY_SECOND && t->up[0] > 0.5f) {
        choose_offsets(j);
    }
    j->block.q = (const int32_t *)(const void *)j->q.data;
    if (status == CKD_OK) {
        status = rebuild(j, t, at, k, err);
    }
    if (status == CKD_OK) {
        measure(j, t, at, k);
        bytes_clear(payload);
        status = lattice_encode(payload, &j->block, effort_of(t), &j->work.scratch, work, err);
    }
    return status;
}

/* ---- on its own ---- */

uint64_t lossy_alone_size(const lossy_tile *t, uint64_t count) {
    return (uint64_t)(t->alone_bits * (double)count / 8) + 32;
}

ckd_status lossy_block_alone(lossy_job *j, bytes *payload, const lossy_tile *t, const kernels *k,
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
    if (b.map == LATTICE_LEVELS) {
        k->level_of(q, values, n);
        for (uint64_t i = 0; i < n; i++) {
            q[i] = q[i] ? q[i] - b.birth : LEVEL_ZERO;
        }
    } else {
        float per_unit = ldexpf(1, -b.exponent);
        for (uint64_t i = 0; i < n; i++) {
            q[i] = scalar_units(values[i] * per_unit);
        }
    }
    b.q = q;
    bytes_clear(payload);
    return lattice_encode(payload, &b, LATTICE_FAST, &j->work.scratch, work, err);
}
