/*
 * Bounds the update m / (sqrt(v) + eps) of decoded moments. A v that is rounded down would make a huge update, so its
 * integer is raised; an m is shrunk. Also samples how the direction of updates changes.
 */
#include "engine/lossy/internal.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "codec/common/common.h"
#include "kernels/scalar_moments.h"

#define SLICE       512u /* elements at a time */
#define CHOSEN_MAX  64   /* at most one first moment in 64 becomes an exception; else all of these become 0 */
#define RAISED_STEP 8    /* step in levels where second moments had no integers: an octave */

/* ---- stored values ---- */

CPU_PLAIN void pair_record(uint16_t *to, lossy_part part, bool decoded, const float *values, uint64_t n) {
    bool second = part == LOSSY_SECOND;
    uint32_t up = scalar_moment_up(second, decoded);
    for (uint64_t i = 0; i < n; i++) {
        to[i] = scalar_moment_half(values[i], second, up);
    }
}

CPU_PLAIN static void widen(float *to, const uint16_t *from, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) {
        to[i] = scalar_moment_widen(from[i]);
    }
}

/* ---- updates ---- */

/* Returns the smallest second moment with which the update of `first` is at most `max`. */
static double min_second(double first, double max, double eps) {
    double root = fabs(first) / max - eps;
    return root > 0 ? root * root : 0;
}

/* Tells whether an update is larger than `max`. NaN has no update. */
CPU_PLAIN static bool any_larger(const float *first, const float *second, uint64_t n, double max,
                                 double eps) {
    int any = 0;
    double per = 1 / max;
    for (uint64_t i = 0; i < n; i++) {
        any |= scalar_update_exceeds(first[i], second[i], per, eps);
    }
    return any;
}

static double largest_of(double so_far, const float *first, const float *second, uint64_t n, double eps) {
    for (uint64_t i = 0; i < n; i++) {
        double update = scalar_update(first[i], second[i], eps);
        so_far = update > so_far ? update : so_far;
    }
    return so_far;
}

/* Checks fast first, as few updates are larger. */
static double larger_of(double so_far, const float *first, const float *second, uint64_t n, double eps) {
    bool any = !(so_far > 0) || any_larger(first, second, n, so_far, eps);
    return any ? largest_of(so_far, first, second, n, eps) : so_far;
}

/*
 * Checks both bounds in one pass. `max` belongs to the optimizer's eps and is the smaller maximum. With the low eps it
 * finds all updates that exceed either bound, and few others.
 */
static bool any_doubtful(const float *first, const float *second, uint64_t n, double max,
                         const pair_bound bounds[PAIR_BOUNDS]) {
    return any_larger(first, second, n, max, bounds[PAIR_LOW_EPS].eps);
}

void pair_largest(double so_far[PAIR_BOUNDS], lossy_part part, const float *values, const uint16_t *other,
                  uint64_t n, const pair_bound bounds[PAIR_BOUNDS]) {
    float wide[SLICE];
    for (uint64_t i = 0; i < n; i += SLICE) {
        uint64_t length = n - i < SLICE ? n - i : SLICE;
        widen(wide, other + i, length);
        const float *first = part == LOSSY_SECOND ? wide : values + i,
                    *second = part == LOSSY_SECOND ? values + i : wide;
        double max = so_far[PAIR_EPS];
        bool any = !(max > 0) || any_doubtful(first, second, length, max, bounds);
        for (size_t b = 0; b < PAIR_BOUNDS && any; b++) {
            so_far[b] = larger_of(so_far[b], first, second, length, bounds[b].eps);
        }
    }
}

ckd_status pair_read(uint16_t *to, const lossy_pair *p, bool decoded, uint64_t at, uint64_t n,
                     ckd_error *err) {
    uint64_t from = (decoded ? p->count : 0) + at;
    if (p->values) {
        memcpy(to, p->values + from, n * sizeof(*to));
        return CKD_OK;
    }
    return file_scratch_read(p->file, from * sizeof(*to), to, n * sizeof(*to), err);
}

/* Reads the other moment's decoded values for a block. */
static ckd_status other_of(const float **out, lossy_job *j, const lossy_tile *t, uint64_t at, uint64_t n,
                           ckd_error *err) {
    float *to =
        bytes_scratch(&j->other_moment, n * (sizeof(float) + sizeof(uint16_t)), "coding scratch", err);
    uint16_t *halves = (uint16_t *)(void *)(to + n);
    ckd_status status = to ? CKD_OK : CKD_E_NOMEM;
    for (uint64_t i = 0, length; i < n && status == CKD_OK; i += length) {
        length = pair_in_row(&t->context.pair, at + i, n - i);
        status =
            pair_read(halves + i, &t->context.pair, true, pair_index(&t->context.pair, at + i), length, err);
    }
    if (status == CKD_OK) {
        widen(to, halves, n);
    }
    *out = to;
    return status;
}

typedef struct block_pair {
    const float *first, *second;
    const pair_bound *bounds;
} block_pair;

static block_pair pair_of(const lossy_tile *t, const float *values, const float *other) {
    bool second = t->part == LOSSY_SECOND;
    return (block_pair){second ? other : values, second ? values : other, t->context.pair.bounds};
}

/* Tells whether one of n updates from element i on is too large by either bound. */
static bool any_too_large(const block_pair *p, uint64_t i, uint64_t n) {
    const float *first = p->first + i, *second = p->second + i;
    bool any = false, doubtful = any_doubtful(first, second, n, p->bounds[PAIR_EPS].max, p->bounds);
    for (size_t b = 0; b < PAIR_BOUNDS && doubtful && !any; b++) {
        any = any_larger(first, second, n, p->bounds[b].max, p->bounds[b].eps);
    }
    return any;
}

static bool too_large(const block_pair *p, uint64_t i) {
    return any_too_large(p, i, 1);
}

/* Returns the largest update with the optimizer's eps. */
static double largest_in(const block_pair *p, uint64_t n) {
    double largest = 0;
    for (uint64_t i = 0; i < n; i += SLICE) {
        uint64_t length = n - i < SLICE ? n - i : SLICE;
        largest = larger_of(largest, p->first + i, p->second + i, length, p->bounds[PAIR_EPS].eps);
    }
    return largest;
}

static uint64_t count_too_large(const block_pair *p, uint64_t n) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < n; i += SLICE) {
        uint64_t length = n - i < SLICE ? n - i : SLICE;
        bool any = any_too_large(p, i, length);
        for (uint64_t e = i; any && e < i + length; e++) {
            count += too_large(p, e);
        }
    }
    return count;
}

/* ---- second moments ---- */

/* Gives the block integers that can be raised. *fine = false: their step is too coarse. */
static ckd_status levels_to_raise(bool *fine, lossy_job *j, ckd_error *err) {
    lattice_block *b = &j->block;
    bool all_same = true;
    for (uint64_t i = 0; b->q && i < b->count; i++) {
        all_same = all_same && (b->q[i] == 0 || b->q[i] == LEVEL_ZERO);
    }
    *fine = b->step < LOSSY_LEVELS_NONE || all_same;
    if (*fine && b->step >= LOSSY_LEVELS_NONE) {
        b->step = RAISED_STEP;
    }
    if (*fine && !b->q) {
        int32_t *q = bytes_scratch(&j->q, b->count * sizeof(int32_t), "coding scratch", err);
        if (!q) {
            return CKD_E_NOMEM;
        }
        b->q = memset(q, 0, b->count * sizeof(int32_t));
    }
    return CKD_OK;
}

/* Returns the lowest level that is not below `value`. */
static int32_t level_above(double value) {
    float f = value < FLT_MAX ? (float)value : FLT_MAX;
    f = (double)f < value ? nextafterf(f, INFINITY) : f;
    uint32_t level = (uint32_t)(((uint64_t)scalar_bits(f) + (UINT32_C(1) << LEVEL_SHIFT) - 1) >> LEVEL_SHIFT);
    return level < 1 ? 1 : (level > LEVEL_MAX ? LEVEL_MAX : (int32_t)level);
}

/* Drops exceptions whose updates are too large; only integers can be raised. */
static void drop_exceptions(lossy_job *j, const block_pair *p) {
    lattice_block *b = &j->block;
    uint32_t *places = (uint32_t *)(void *)j->at.data, *bits = (uint32_t *)(void *)j->bits.data,
             remaining = 0;
    for (uint32_t i = 0; i < b->exceptions; i++) {
        if (!too_large(p, places[i])) {
            places[remaining] = places[i];
            bits[remaining++] = bits[i];
        }
    }
    b->exceptions = remaining;
}

/* Returns the smallest second moment that satisfies both bounds. */
static double second_needed(const block_pair *p, uint64_t i) {
    double min = 0;
    for (size_t b = 0; b < PAIR_BOUNDS; b++) {
        min = fmax(min, min_second((double)p->first[i], p->bounds[b].max, p->bounds[b].eps));
    }
    return min;
}

static ckd_status raise_seconds(lossy_job *j, const block_pair *p, ckd_error *err) {
    lattice_block *b = &j->block;
    bool fine;
    ckd_status status = lattice_steps(b, &j->work, err);
    THEN(status, levels_to_raise(&fine, j, err));
    if (status != CKD_OK || !fine) {
        return status;
    }
    int32_t *q = (int32_t *)(void *)j->q.data;
    drop_exceptions(j, p);
    for (uint64_t row = 0; row < lattice_rows(b); row++) {
        uint64_t first, column, n = lattice_row_span(b, row, &first, &column);
        level_run run = level_row_run(b, &j->work, row, false);
        for (uint64_t i = first; i < first + n; i++) {
            if (too_large(p, i)) {
                int32_t from = run.birth + run.row + (b->own.step ? run.column[column + i - first] : 0);
                int32_t distance = level_above(second_needed(p, i)) - from;
                q[i] = distance > 0 ? (distance + run.step - 1) / run.step : -(-distance / run.step);
            }
        }
    }
    return CKD_OK;
}

/* ---- first moments ---- */

/* Returns the bits of the value in the dtype, limited to magnitude `max` and rounded towards zero. */
static uint32_t within_bits(const lossy_elements *e, float value, double max) {
    ckd_dtype dtype = e->tile->dtype;
    float min = fabs((double)value) <= max ? fabsf(value) : (float)max;
    min = (double)min > max && fabs((double)value) > max ? nextafterf(min, 0) : min;
    float limited = value < 0 ? -min : min, widened;
    if (dtype == CKD_F32) {
        return scalar_bits(limited);
    }
    uint16_t half;
    e->kernels->cast(dtype, &half, CKD_F32, &limited, 1);
    e->kernels->widen(&widened, dtype, &half, 1);
    return (uint32_t)half - (fabsf(widened) > min && (half & 0x7fff));
}

static double max_first(const block_pair *p, uint64_t i) {
    double max = INFINITY, root = sqrt((double)p->second[i]);
    for (size_t b = 0; b < PAIR_BOUNDS; b++) {
        max = fmin(max, p->bounds[b].max * (root + p->bounds[b].eps));
    }
    return max * (1 - 0x1p-40);
}

/*
 * Rebuilds the block's exceptions, and shrinks those whose update is too large. chosen: other elements with too large
 * an update become exceptions, too. All integers with too large an update become 0.
 */
static ckd_status keep_firsts(lossy_job *j, const lossy_elements *e, const block_pair *p, bool chosen,
                              ckd_error *err) {
    const float *now = e->tile->input.now + e->at;
    lattice_block *b = &j->block;
    uint32_t old_count = b->exceptions, next = 0;
    uint32_t *old = malloc(2 * ((size_t)old_count + 1) * sizeof(*old));
    if (!old) {
        return err_nomem(err, 2 * (size_t)old_count * sizeof(*old), "coding scratch");
    }
    if (old_count) {
        memcpy(old, b->exception_at, old_count * sizeof(*old));
        memcpy(old + old_count, b->exception_bits, old_count * sizeof(*old));
    }
    lossy_no_exceptions(j);
    int8_t *q8 = b->q8 ? (int8_t *)(void *)j->q8.data : NULL;
    int32_t *q = b->q ? (int32_t *)(void *)j->q.data : NULL;
    for (uint64_t i = 0; i < b->count; i++) {
        bool was_exception = next < old_count && old[next] == i, large = too_large(p, i);
        uint32_t bits = was_exception ? old[old_count + next] : 0;
        next += was_exception;
        if (large && (was_exception || chosen)) {
            bits = within_bits(e, was_exception ? p->first[i] : now[i], max_first(p, i));
        }
        if (was_exception || (large && chosen)) {
            lossy_add_exception(j, (uint32_t)i, bits);
        }
        if (large && q8) {
            q8[i] = 0;
        }
        if (large && q) {
            q[i] = 0;
        }
    }
    free(old);
    return lossy_exceptions_done(j, err);
}

/* ---- a block ---- */

static ckd_status finish_firsts(lossy_job *j, const lossy_elements *e, const float *other, uint64_t large,
                                ckd_error *err) {
    lattice_block *b = &j->block;
    /* Without factors the block would use nothing of its shared rows. */
    bool needs_factor = b->shared_rows && !b->row;
    bool chosen = large <= b->count / CHOSEN_MAX || (b->factor && needs_factor);
    ckd_status status = CKD_OK;
    if (!chosen && b->factor) {
        status = lossy_block_without_factor(j, e, err);
    }
    block_pair p = pair_of(e->tile, j->decoded, other);
    THEN(status, keep_firsts(j, e, &p, chosen, err));
    return status == CKD_OK ? lossy_block_rebuild(j, e, err) : status;
}

ckd_status pair_finish(lossy_job *j, const lossy_elements *e, ckd_error *err) {
    const lossy_tile *t = e->tile;
    uint64_t n = j->block.count;
    const float *other;
    j->update = NAN;
    ckd_status status = pair_known(&t->context.pair) ? other_of(&other, j, t, e->at, n, err) : CKD_OK;
    if (status != CKD_OK || !pair_known(&t->context.pair)) {
        return status;
    }
    block_pair p = pair_of(t, j->decoded, other);
    uint64_t large = t->context.pair.bounds[PAIR_EPS].max > 0 ? count_too_large(&p, n) : 0;
    if (large && t->part == LOSSY_SECOND) {
        status = raise_seconds(j, &p, err);
        THEN(status, lossy_block_rebuild(j, e, err));
    } else if (large) {
        status = finish_firsts(j, e, other, large, err);
    }
    p = pair_of(t, j->decoded, other);
    j->update = largest_in(&p, n);
    return status;
}

ckd_status pair_measure(lossy_job *j, const lossy_tile *t, uint64_t at, const float *decoded, uint64_t n,
                        ckd_error *err) {
    const float *other;
    ckd_status status = other_of(&other, j, t, at, n, err);
    if (status == CKD_OK) {
        block_pair p = pair_of(t, decoded, other);
        j->update = largest_in(&p, n);
    }
    return status;
}

/* ---- direction ---- */

ckd_status direction_begin(direction_sample *s, uint64_t count, ckd_error *err) {
    *s = (direction_sample){.count = count, .stride = count / DIRECTION_SAMPLE + 1, .memory = s->memory};
    size_t n = count / s->stride + 1, size = 2 * n * sizeof(float);
    float *at = bytes_scratch(&s->memory, size, "a sample of second moments", err);
    if (!at) {
        return CKD_E_NOMEM;
    }
    s->input = memset(at, 0, size);
    s->decoded = at + n;
    return CKD_OK;
}

void direction_free(direction_sample *s) {
    bytes_free(&s->memory);
    *s = (direction_sample){0};
}

static uint64_t first_sampled(const direction_sample *s, uint64_t at) {
    return (at + s->stride - 1) / s->stride * s->stride;
}

void direction_record(direction_sample *s, const direction_values *v) {
    for (uint64_t i = first_sampled(s, v->at); i < v->at + v->count; i += s->stride) {
        s->input[i / s->stride] = v->input[i - v->at];
        s->decoded[i / s->stride] = v->decoded[i - v->at];
    }
}

/* Returns 0 without a second moment or a finite quotient. */
static double direction_of(double first, double second, double eps) {
    double d = second > 0 ? first / (sqrt(second) + eps) : 0;
    return isfinite(d) ? d : 0;
}

void direction_add(direction_sums *sums, const direction_sample *s, const direction_values *v, double eps) {
    for (uint64_t i = first_sampled(s, v->at); i < v->at + v->count; i += s->stride) {
        double input = direction_of(v->input[i - v->at], s->input[i / s->stride], eps);
        double decoded = direction_of(v->decoded[i - v->at], s->decoded[i / s->stride], eps);
        sums->change += (decoded - input) * (decoded - input);
        sums->all += input * input;
    }
}

void direction_take(direction_sums *sums, direction_sample *s, const direction_values *v, double eps) {
    for (uint64_t i = 0; i < v->count; i++) {
        direction_values element = {v->input + i, v->decoded + i, (v->at + i) * s->stride, 1};
        if (sums) {
            direction_add(sums, s, &element, eps);
        } else {
            direction_record(s, &element);
        }
    }
}

double direction_change(const direction_sums *sums) {
    return sums->all > 0 ? sqrt(sums->change / sums->all) : NAN;
}
