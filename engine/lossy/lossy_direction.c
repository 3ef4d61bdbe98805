#include "engine/lossy/lossy_direction.h"

#include <math.h>
#include <string.h>

ckd_status direction_begin(direction_sample *s, uint64_t count, ckd_error *err) {
    *s = (direction_sample){.count = count, .stride = count / DIRECTION_SAMPLE + 1, .memory = s->memory};
    size_t n = count / s->stride + 1, size = 2 * n * sizeof(float);
    float *at = bytes_scratch(&s->memory, size, "a sample of second moments", err);
    if (!at) {
        return CKD_E_NOMEM;
    }
    s->given = memset(at, 0, size);
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

void direction_note(direction_sample *s, uint64_t at, uint64_t count, const float *given,
                    const float *decoded) {
    for (uint64_t i = first_sampled(s, at); i < at + count; i += s->stride) {
        s->given[i / s->stride] = given[i - at];
        s->decoded[i / s->stride] = decoded[i - at];
    }
}

/* 0 where there is no second moment, or no finite quotient. */
static double direction_of(double first, double second, double eps) {
    double d = second > 0 ? first / (sqrt(second) + eps) : 0;
    return isfinite(d) ? d : 0;
}

void direction_add(direction_sums *sums, const direction_sample *s, uint64_t at, uint64_t count,
                   const float *given, const float *decoded, double eps) {
    for (uint64_t i = first_sampled(s, at); i < at + count; i += s->stride) {
        double was = direction_of(given[i - at], s->given[i / s->stride], eps);
        double is = direction_of(decoded[i - at], s->decoded[i / s->stride], eps);
        sums->change += (is - was) * (is - was);
        sums->all += was * was;
    }
}

void direction_take(direction_sums *sums, direction_sample *s, uint64_t from, uint64_t n, const float *given,
                    const float *decoded, double eps) {
    for (uint64_t i = 0; i < n; i++) {
        if (sums) {
            direction_add(sums, s, (from + i) * s->stride, 1, given + i, decoded + i, eps);
        } else {
            direction_note(s, (from + i) * s->stride, 1, given + i, decoded + i);
        }
    }
}

double direction_change(const direction_sums *sums) {
    return sums->all > 0 ? sqrt(sums->change / sums->all) : NAN;
}
