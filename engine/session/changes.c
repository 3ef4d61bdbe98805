/*
 * Computes from samples how much each tensor has changed, and compares this with the other tensors and with its own
 * past. alarms.c reports what is unusual.
 */
#include "engine/session/changes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool changes_make(changes *out, size_t count) {
    *out = (changes){.count = count,
                     .tensors = calloc(count + 1, sizeof(*out->tensors)),
                     .samples = calloc(count * CHANGE_SAMPLE + 1, sizeof(*out->samples)),
                     .found = calloc(count + 1, sizeof(*out->found)),
                     .sorted = calloc(count + 1, sizeof(*out->sorted))};
    if (!out->tensors || !out->samples || !out->found || !out->sorted) {
        changes_free(out);
        return false;
    }
    return true;
}

void changes_free(changes *c) {
    free(c->tensors);
    free(c->samples);
    free(c->found);
    free(c->sorted);
    *c = (changes){.count = 0};
}

/* Slices at equal distances would all lie in the same columns of a matrix. The mixing is that of SplitMix64. */
uint64_t change_slice(uint64_t elements, size_t slice) {
    uint64_t stride = elements / CHANGE_SLICES, mixed = (slice + 1) * UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    mixed ^= mixed >> 31;
    return slice * stride + mixed % (stride - CHANGE_SLICE + 1);
}

double change_replace(double sample[CHANGE_SAMPLE], const double now[CHANGE_SAMPLE]) {
    double sum = 0;
    size_t changed = 0;
    for (size_t i = 0; i < CHANGE_SAMPLE; i++) {
        double difference = now[i] - sample[i];
        sum += difference * difference;
        changed += difference != 0;
        sample[i] = now[i];
    }
    if (!isfinite(sum)) {
        return NAN;
    }
    return changed >= CHANGE_SAMPLE / CHANGE_SHARE ? sqrt(sum / CHANGE_SAMPLE) : 0;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of those that changed; 0: too few did. */
static double find_median(changes *c) {
    size_t count = 0;
    for (size_t i = 0; i < c->count; i++) {
        if (c->found[i] > 0) {
            c->sorted[count++] = c->found[i];
        }
    }
    if (count < CHANGE_TENSORS) {
        return 0;
    }
    qsort(c->sorted, count, sizeof(*c->sorted), ascending);
    return (c->sorted[(count - 1) / 2] + c->sorted[count / 2]) / 2;
}

bool changes_judge(change_alarm *out, changes *c) {
    double median = find_median(c), worst = 0;
    size_t alarmed = 0;
    for (size_t i = 0; i < c->count && median > 0; i++) {
        sensor_reading r;
        double ratio = c->found[i] / median;
        if (!(c->found[i] > 0) || !sensor_observe(&r, &c->tensors[i].history, &sensor_change, ratio)) {
            continue;
        }
        alarmed++;
        if (ratio / r.limit > worst) {
            worst = ratio / r.limit;
            *out = (change_alarm){.tensor = i, .ratio = ratio, .reading = r};
        }
    }
    if (alarmed > 0) {
        out->others = alarmed - 1;
    }
    return alarmed > 0;
}
