#include "engine/lossy/direction.h"

#include <math.h>
#include <string.h>

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

void direction_record(direction_sample *s, uint64_t at, uint64_t count, const float *input,
                      const float *decoded) {
    for (uint64_t i = first_sampled(s, at); i < at + count; i += s->stride) {
        s->input[i / s->stride] = input[i - at];
        s->decoded[i / s->stride] = decoded[i - at];
    }
}

/* 0 where there is no second moment, or no finite quotient. */
static double direction_of(double first, double second, double eps) {
    double d = second > 0 ? first / (sqrt(second) + eps) : 0;
    return isfinite(d) ? d : 0;
}

void direction_add(direction_sums *sums, const direction_sample *s, uint64_t at, uint64_t count,
                   const float *input, const float *decoded, double eps) {
    for (uint64_t i = first_sampled(s, at); i < at + count; i += s->stride) {
        double was = direction_of(input[i - at], s->input[i / s->stride], eps);
        double is = direction_of(decoded[i - at], s->decoded[i / s->stride], eps);
        sums->change += (is - was) * (is - was);
        sums->all += was * was;
    }
}

void direction_take(direction_sums *sums, direction_sample *s, uint64_t from, uint64_t n, const float *input,
                    const float *decoded, double eps) {
    for (uint64_t i = 0; i < n; i++) {
        if (sums) {
            direction_add(sums, s, (from + i) * s->stride, 1, input + i, decoded + i, eps);
        } else {
            direction_record(s, (from + i) * s->stride, 1, input + i, decoded + i);
        }
    }
}

double direction_change(const direction_sums *sums) {
    return sums->all > 0 ? sqrt(sums->change / sums->all) : NAN;
}
