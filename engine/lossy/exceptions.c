/* Exceptions of a lossy block, and its error. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/lossy/internal.h"
#include "kernels/scalar_lattice.h"

#define SOME 128u /* elements at a time; few such groups have an exception */

static bool is_exception(const lossy_tile *t, uint64_t i, float max) {
    float value = t->input.now[i];
    if (fabsf(value) > t->limits.exception_above ||
        (t->input.parent_values && fabsf(value - t->input.parent_values[i]) > t->limits.exception_moved)) {
        return true;
    }
    if (t->input.parent_values &&
        !(fabsf(t->input.parent_values[i]) < (t->part == LOSSY_SECOND ? INFINITY : max))) {
        return true; /* no integer leads back from such a parent's value */
    }
    if (t->input.parent_values && t->part == LOSSY_SECOND && t->input.parent_values[i] < 0) {
        return true;
    }
    return t->part == LOSSY_SECOND ? !(value >= 0 && value <= FLT_MAX) : !(fabsf(value) < max);
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

void lossy_add_exception(lossy_job *j, uint32_t place, uint32_t bits) {
    bytes_put(&j->at, &place, sizeof(place));
    bytes_put(&j->bits, &bits, sizeof(bits));
}

ckd_status lossy_exceptions_done(lossy_job *j, ckd_error *err) {
    lattice_block *b = &j->block;
    if (j->at.failed || j->bits.failed) {
        bytes_free(&j->at);
        bytes_free(&j->bits);
        return err_nomem(err, b->count, "coding scratch");
    }
    b->exceptions = (uint32_t)(j->at.size / sizeof(uint32_t));
    b->exception_at = b->exceptions ? (const uint32_t *)(const void *)j->at.data : NULL;
    b->exception_bits = b->exceptions ? (const uint32_t *)(const void *)j->bits.data : NULL;
    return CKD_OK;
}

static void add_exception(lossy_job *j, const lossy_elements *e, uint64_t i) {
    lossy_add_exception(j, (uint32_t)i, bits_of(e->original, e->tile->dtype, i));
    if (j->block.q) {
        ((int32_t *)(void *)j->q.data)[i] = 0;
    }
    if (j->block.q8) {
        j->q8.data[i] = 0;
    }
}

/* Computes finite limits for kernels. All exceptions are beyond these limits, but so are some other values. */
static void limits_of(float limits[3], const lossy_tile *t, float max) {
    bool second = t->part == LOSSY_SECOND;
    float below = scalar_float(scalar_bits(max) - 1);
    limits[0] = second || t->limits.exception_above < below ? t->limits.exception_above : below;
    limits[1] = second ? FLT_MAX : below;
    limits[2] = t->limits.exception_moved;
}

void lossy_no_exceptions(lossy_job *j) {
    bytes_clear(&j->at);
    bytes_clear(&j->bits);
}

ckd_status lossy_find_exceptions(lossy_job *j, const lossy_elements *e, uint64_t from, uint64_t to,
                                 ckd_error *err) {
    const lossy_tile *t = e->tile;
    const float *now = t->input.now + e->at,
                *parent_values = t->input.parent_values ? t->input.parent_values + e->at : NULL;
    lattice_block *b = &j->block;
    float max = ldexpf(1, b->exponent + 29), limits[3];
    bool ordinary = t->limits.ordinary && t->limits.largest < max; /* bounds `parent_values`, too */
    limits_of(limits, t, max);
    for (uint64_t i = from; i < to && !ordinary; i += SOME) {
        uint64_t n = to - i < SOME ? to - i : SOME;
        bool any = e->kernels->beyond(now + i, parent_values ? parent_values + i : NULL, limits,
                                      t->part == LOSSY_SECOND, n);
        for (uint64_t at = i; any && at < i + n; at++) {
            if (is_exception(t, e->at + at, max)) {
                add_exception(j, e, at);
            }
        }
    }
    return lossy_exceptions_done(j, err);
}

void lossy_error_add(lossy_error *e, const float *input, const float *decoded, uint64_t n, const kernels *k) {
    error_sums s = {0};
    k->error_of(&s, input, decoded, n);
    e->energy += s.energy;
    e->error += s.error;
    e->largest = (double)s.largest > e->largest ? (double)s.largest : e->largest;
    e->finite += s.finite;
    e->exceptions += n - s.finite;
}

void lossy_check_bound(lossy_job *j, const tile_limits *limits) {
    /* Differences are floats: the largest may have been rounded down. */
    j->within = j->error.largest * (1 + 0x1p-23) <= limits->bound &&
                isfinite(j->error.largest); /* no value has become infinite */
}
