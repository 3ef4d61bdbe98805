/*
 * Judges whether a figure is unlike those before it, by rules for sizes, times, changes and metrics. alarms.c decides
 * what follows.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/session/sensors.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const sensor_rule sensor_size = {.window = SENSOR_WINDOW,
                                 .warm_up = 6,
                                 .high = true,
                                 .low = true,
                                 .deviations = 8,
                                 .above = 1,
                                 .below = 0.9};
const sensor_rule sensor_time = {
    .window = SENSOR_WINDOW, .warm_up = 6, .high = true, .deviations = 16, .above = 4, .distance = 1};
const sensor_rule sensor_change = {
    .window = 24, .warm_up = 8, .high = true, .deviations = 16, .above = 4, .distance = 8};

static bool has_one_of(const char *name, const char *const *words, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (strcasestr(name, words[i])) {
            return true;
        }
    }
    return false;
}

sensor_rule sensor_metric(const char *name) {
    static const char *const costs[] = {"loss", "error", "perplexity", "ppl", "norm"};
    static const char *const gains[] = {"acc", "score", "reward", "f1", "bleu"};
    bool cost = has_one_of(name, costs, sizeof(costs) / sizeof(costs[0]));
    bool gain = !cost && has_one_of(name, gains, sizeof(gains) / sizeof(gains[0]));
    return (sensor_rule){.window = 24,
                         .warm_up = 16,
                         .high = !gain,
                         .low = !cost,
                         .deviations = 16,
                         .above = 0.1,
                         .below = 0.1};
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double middle(double *values, size_t count) {
    qsort(values, count, sizeof(*values), ascending);
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

/* Copies the last figures. */
static size_t copy_window(double out[SENSOR_WINDOW], const sensor_history *h, uint32_t window) {
    size_t count = h->count < window ? (size_t)h->count : window;
    for (size_t i = 0; i < count; i++) {
        out[i] = h->values[(h->count - count + i) % SENSOR_WINDOW];
    }
    return count;
}

double sensor_median(const sensor_history *h) {
    double values[SENSOR_WINDOW];
    size_t count = copy_window(values, h, SENSOR_WINDOW);
    return count > 0 ? middle(values, count) : 0;
}

sensor_reading sensor_judge(const sensor_history *h, const sensor_rule *rule, double value) {
    sensor_reading r = {.verdict = SENSOR_UNKNOWN};
    double values[SENSOR_WINDOW];
    size_t count = copy_window(values, h, rule->window);
    r.verdict = isfinite(value) ? SENSOR_UNKNOWN : SENSOR_NO_NUMBER;
    if (count == 0 || count < rule->warm_up || isnan(value)) {
        return r;
    }
    r.median = middle(values, count);
    for (size_t i = 0; i < count; i++) {
        values[i] = fabs(values[i] - r.median);
    }
    double noise = fmax(rule->deviations * middle(values, count), rule->distance);
    double above = fmax(noise, rule->above * fabs(r.median)),
           below = fmax(noise, rule->below * fabs(r.median));
    r.verdict = rule->high && value > r.median + above  ? SENSOR_HIGH
                : rule->low && value < r.median - below ? SENSOR_LOW
                : isfinite(value)                       ? SENSOR_NORMAL
                                                        : SENSOR_NO_NUMBER;
    r.limit = r.verdict == SENSOR_LOW ? r.median - below : r.median + above;
    return r;
}

bool sensor_observe(sensor_reading *reading, sensor_history *h, const sensor_rule *rule, double value) {
    sensor_reading r = sensor_judge(h, rule, value);
    bool alarmed = r.verdict > SENSOR_NORMAL, first = alarmed && !h->alarmed;
    h->alarmed = alarmed;
    if (isfinite(value)) { /* even if it is unlike the others: a lasting change becomes normal */
        h->values[h->count++ % SENSOR_WINDOW] = value;
    }
    if (reading) {
        *reading = r;
    }
    return first;
}
