/* Codes a block whose tile determines all but its integers: quantises, rebuilds and measures it in one pass. */
#include <math.h>
#include <string.h>

#include "engine/lossy/internal.h"

#define CHUNK \
    16384u /* elements per chunk; together with all their arrays they take a fifth of a second-level cache */

typedef struct stream {
    lossy_job *job;
    const lossy_elements *elements;
    const lossy_tile *tile;
    const kernels *k;
    int8_t *q8;      /* NULL: levels, which have no integers */
    float *floats;   /* decoded values of the block */
    int32_t largest; /* largest integer so far */
} stream;

/* The part of one row that lies in a chunk. */
typedef struct row_part {
    uint64_t row, first, column, n;
} row_part;

static bool next_part(row_part *r, const lattice_block *b, uint64_t end) {
    uint64_t first = r->first + r->n, place = b->phase + first;
    if (first >= end) {
        return false;
    }
    *r = (row_part){place / b->columns, first, place % b->columns, end - first};
    r->n = r->n < b->columns - r->column ? r->n : b->columns - r->column;
    return true;
}

static lattice_run run_of(const stream *s, const row_part *r) {
    lattice_run run = lattice_row_run(&s->job->block, &s->job->work, r->row);
    run.column_step = run.column_step ? run.column_step + r->column : NULL;
    return run;
}

/* Returns false if an integer does not fit a byte. */
static bool quantise_chunk(stream *s, uint64_t from, uint64_t end) {
    const lossy_tile *t = s->tile;
    const float *now = t->input.now + s->elements->at,
                *parent_values = t->input.parent_values ? t->input.parent_values + s->elements->at : NULL;
    for (row_part r = {.first = from}; next_part(&r, &s->job->block, end);) {
        lattice_run run = run_of(s, &r);
        int32_t largest =
            s->k->quantise_run(s->q8 + r.first, now + r.first, parent_values ? parent_values + r.first : NULL,
                               t->plan.up, r.n, &run);
        s->largest = largest > s->largest ? largest : s->largest;
        if (largest > INT8_MAX) {
            return false;
        }
    }
    return true;
}

/* Gives the same values as lattice_rebuild. */
static void rebuild_chunk(stream *s, uint64_t from, uint64_t end) {
    const lossy_tile *t = s->tile;
    const lattice_block *b = &s->job->block;
    size_t size = (end - from) * sizeof(float);
    if (s->q8 && t->input.parent_values) {
        memcpy(s->floats + from, t->input.parent_values + s->elements->at + from, size);
    } else if (s->q8) {
        memset(s->floats + from, 0, size);
    }
    for (row_part r = {.first = from}; next_part(&r, b, end);) {
        if (s->q8) {
            lattice_run run = run_of(s, &r);
            s->k->lattice_apply_q8(s->floats + r.first, s->q8 + r.first, r.n, &run);
        } else {
            level_run run = level_row_run(b, &s->job->work, r.row, false);
            run.column += b->own.step ? r.column : 0;
            s->k->level_fill(s->floats + r.first, r.n, &run);
        }
    }
}

/*
 * Converts the chunk to the tensor's dtype, inserts exceptions from number `first_exception` on, and widens it again.
 */
static void finish_chunk(stream *s, uint64_t from, uint64_t end, uint32_t first_exception) {
    const lattice_block *b = &s->job->block;
    ckd_dtype dtype = s->tile->dtype;
    size_t size = ckd_dtype_size(dtype);
    uint8_t *values = s->job->values.data;
    if (dtype != CKD_F32) {
        s->k->cast(dtype, values + from * size, CKD_F32, s->floats + from, end - from);
    }
    for (uint32_t i = first_exception; i < b->exceptions; i++) {
        memcpy(values + b->exception_at[i] * size,
               (const uint8_t *)s->elements->original + b->exception_at[i] * size, size);
    }
    if (dtype != CKD_F32) {
        s->k->widen(s->floats + from, dtype, values + from * size, end - from);
    }
}

static ckd_status code_chunk(bool *fits, stream *s, uint64_t from, uint64_t end, ckd_error *err) {
    lossy_job *j = s->job;
    uint32_t first_exception = j->block.exceptions;
    *fits = !s->q8 || quantise_chunk(s, from, end);
    ckd_status status = *fits ? lossy_find_exceptions(j, s->elements, from, end, err) : CKD_OK;
    if (status == CKD_OK && *fits) {
        rebuild_chunk(s, from, end);
        finish_chunk(s, from, end, first_exception);
        lossy_error_add(&j->error, s->tile->input.now + s->elements->at + from, s->floats + from, end - from,
                        s->k);
    }
    return status;
}

static ckd_status stream_scratch(stream *s, ckd_error *err) {
    lossy_job *j = s->job;
    uint64_t n = j->block.count;
    void *values = bytes_scratch(&j->values, n * ckd_dtype_size(s->tile->dtype), "coding scratch", err);
    s->floats = values;
    if (values && s->tile->dtype != CKD_F32) {
        s->floats = bytes_scratch(&j->rebuilt, n * sizeof(float), "coding scratch", err);
    }
    if (s->floats && s->tile->part != LOSSY_SECOND) {
        s->q8 = bytes_scratch(&j->q8, n, "coding scratch", err);
    }
    bool all = s->floats && (s->q8 || s->tile->part == LOSSY_SECOND);
    return all ? lattice_steps(&j->block, &j->work, err) : CKD_E_NOMEM;
}

ckd_status lossy_stream(bool *done, lossy_job *j, const lossy_elements *e, ckd_error *err) {
    const lossy_tile *t = e->tile;
    stream s = {.job = j, .elements = e, .tile = t, .k = e->kernels};
    lattice_block *b = &j->block;
    *done = t->part == LOSSY_SECOND ? t->plan.levels_known : t->plan.offsets_known && !b->factor;
    ckd_status status = *done ? stream_scratch(&s, err) : CKD_OK;
    b->q8 = s.q8;
    j->error = (lossy_error){0};
    lossy_no_exceptions(j);
    for (uint64_t from = 0; from < b->count && status == CKD_OK && *done; from += CHUNK) {
        status = code_chunk(done, &s, from, b->count - from < CHUNK ? b->count : from + CHUNK, err);
    }
    if (s.largest == 0 || !*done) {
        b->q8 = NULL;
    }
    j->decoded = s.floats;
    lossy_check_bound(j, &t->limits);
    return status;
}
