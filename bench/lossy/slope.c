/*
 * The curve of validation loss along the exact run, and its slope. Losses fluctuate between steps by more than the
 * slope, so it comes from many evaluations to both sides of a step.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

enum {
    REACH = 150,      /* steps to each side */
    APART = 5,        /* steps between evaluations */
    EVAL_BATCHES = 16 /* of each: there are many of them */
};

typedef struct curve {
    double step[QUALITY_MAX_CURVE], loss[QUALITY_MAX_CURVE];
    int count;
} curve;

double quality_robust_slope(const double *x, const double *y, int count) {
    double *slopes = bench_allocated(malloc((size_t)(count * count + 1) * sizeof(*slopes)));
    int pairs = 0;
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < i; j++) {
            slopes[pairs++] = (y[i] - y[j]) / (x[i] - x[j]);
        }
    }
    double median = bench_median(slopes, pairs);
    free(slopes);
    return median;
}

uint64_t quality_judged_step(const quality_options *o) {
    int middle = QUALITY_EVALS - QUALITY_LATE_EVALS / 2;
    return quality_last_step(o) + (uint64_t)(o->resumed / QUALITY_EVALS * middle);
}

static void file_of(char path[QUALITY_PATH], const quality_series *s, uint64_t step) {
    snprintf(path, QUALITY_PATH, "%.400s/validation-%" PRIu64 ".txt", s->dir, step);
}

static bool read_curve(curve *c, const quality_series *s, uint64_t step) {
    char path[QUALITY_PATH];
    file_of(path, s, step);
    FILE *f = fopen(path, "r");
    c->count = 0;
    while (f && c->count < QUALITY_MAX_CURVE &&
           fscanf(f, "%lf %lf", &c->step[c->count], &c->loss[c->count]) == 2) {
        c->count++;
    }
    if (f) {
        fclose(f);
    }
    return c->count > 1;
}

/* Under a temporary name first, so that an interruption leaves no part of a curve. */
static void write_curve(const curve *c, const quality_series *s, uint64_t step) {
    char path[QUALITY_PATH], other[QUALITY_PATH + 32];
    file_of(path, s, step);
    snprintf(other, sizeof(other), "%s.%ld", path, (long)getpid());
    FILE *f = bench_open_output(other);
    for (int i = 0; i < c->count; i++) {
        fprintf(f, "%.0f %.6f\n", c->step[i], c->loss[i]);
    }
    bench_close_output(f, other);
    if (rename(other, path) != 0) {
        bench_die(path, "cannot be written");
    }
}

/* Trains again over these steps, evaluating on the way, and keeps as many losses before the step as after it. */
static void make_curve(curve *c, const quality_series *s, uint64_t step) {
    double training[QUALITY_MAX_CURVE], after[QUALITY_MAX_CURVE];
    quality_options o = *s->options;
    quality_series with = *s;
    o.eval_batches = EVAL_BATCHES;
    with.options = &o;
    uint64_t from = quality_state_before(s, step > REACH ? step - REACH : 0);
    uint64_t reach = step - from < REACH ? step - from : REACH;
    int segments = (int)((step + reach - from) / APART);
    if (from >= step || segments < 8 || segments > QUALITY_MAX_CURVE) {
        bench_die("the slope of the validation loss", "no state lies before the step, or none near it");
    }
    quality_state start = quality_load_step(s, from);
    quality_train_on(training, after, NULL, &with, "slope", &start, segments, APART, 0);
    quality_free(&start);
    c->count = 0;
    for (int i = 0; i < segments; i++) {
        uint64_t at = from + (uint64_t)(APART * (i + 1));
        if (at + reach >= step) {
            c->step[c->count] = (double)at;
            c->loss[c->count++] = after[i];
        }
    }
}

double quality_fall(const quality_series *s, uint64_t step) {
    curve c;
    if (!read_curve(&c, s, step)) {
        make_curve(&c, s, step);
        write_curve(&c, s, step);
    }
    double fall = -quality_robust_slope(c.step, c.loss, c.count);
    if (!(fall > 0)) {
        bench_die(s->dir, "the validation loss does not fall, so there is no measure of steps lost");
    }
    return fall;
}
