/*
 * Histograms of residuals, and the thresholds that are best for one. Each threshold depends on how often levels occur,
 * which depends on the thresholds.
 */
#include "engine/lossy/rate.h"

#include <math.h>

#define LEVELS 34 /* the last level stands for all higher ones */
#define ROUNDS 4
#define UP_MAX 0.98

#define SLICE 512 /* elements at a time */

void rate_add(rate_histogram *h, const float *residual, size_t n, const kernels *k) {
    uint16_t bin[SLICE];
    for (size_t at = 0; at < n; at += SLICE) {
        size_t length = n - at < SLICE ? n - at : SLICE, i = 0;
        k->bins_of(bin, residual + at, RATE_IN_ONE, RATE_BINS - 1, length);
        for (; i + RATE_APART <= length; i += RATE_APART) {
            for (size_t j = 0; j < RATE_APART; j++) {
                h->apart[j][bin[i + j]]++;
            }
        }
        for (; i < length; i++) {
            h->apart[0][bin[i]]++;
        }
    }
    h->n += n;
}

void rate_join(rate_histogram *h, const rate_histogram *from) {
    for (size_t j = 0; j < RATE_APART; j++) {
        for (size_t b = 0; b < RATE_BINS; b++) {
            h->apart[j][b] += from->apart[j][b];
        }
    }
    h->n += from->n;
}

static double count_in(const rate_histogram *h, int bin) {
    uint64_t count = 0;
    for (size_t j = 0; j < RATE_APART; j++) {
        count += h->apart[j][bin];
    }
    return (double)count;
}

static double bin_centre(int bin) {
    return (bin + 0.5) / RATE_IN_ONE;
}

static int level_of(double magnitude, const float up[3]) {
    if (magnitude < up[0]) {
        return 0;
    }
    if (magnitude < 1 + (double)up[1]) {
        return 1;
    }
    int level = (int)(magnitude + 1 - (double)up[2]);
    level = level < 2 ? 2 : level;
    return level < LEVELS - 1 ? level : LEVELS - 1;
}

typedef struct levels {
    double count[LEVELS], sum[LEVELS], length[LEVELS], at[LEVELS];
} levels;

/* Computes for each level the number of its elements, their code length (sign included) and their mean. */
static void measure_levels(levels *l, const rate_histogram *h, const float up[3]) {
    *l = (levels){0};
    for (int bin = 0; bin < RATE_BINS; bin++) {
        double count = count_in(h, bin);
        if (count > 0) { /* a small tile leaves most bins empty */
            int level = level_of(bin_centre(bin), up);
            l->count[level] += count;
            l->sum[level] += count * bin_centre(bin);
        }
    }
    double all = (double)h->n + 0.5;
    for (int i = 0; i < LEVELS; i++) {
        l->length[i] = log2(all / (l->count[i] + 0.02)) + (i > 0);
        l->at[i] = i && l->count[i] > 0 ? l->sum[i] / l->count[i] : i;
    }
}

/* Returns the point where level n becomes cheaper than level n - 1, as a fraction above n - 1. */
static float threshold(const levels *l, int n, double lambda) {
    double gap = l->at[n] - l->at[n - 1];
    double at = (l->at[n] + l->at[n - 1]) / 2 +
                lambda * (l->length[n] - l->length[n - 1]) / (2 * (gap > 0.1 ? gap : 0.1));
    double up = at - (n - 1);
    return (float)(up < 0.5 ? 0.5 : (up > UP_MAX ? UP_MAX : up));
}

static void find_below(rate_plan *p, const levels *l) {
    double count[3] = {0, 0, 0}, below[3] = {0, 0, 0};
    for (int i = 1; i < LEVELS - 1; i++) {
        int which = i > 2 ? 2 : i - 1;
        count[which] += l->count[i];
        below[which] += l->count[i] * (i - l->at[i]);
    }
    for (int w = 0; w < 3; w++) {
        p->below[w] = count[w] > 0 ? below[w] / count[w] : 0;
    }
}

static void weigh(rate_plan *p, const levels *l, const rate_histogram *h) {
    p->bits = p->distortion = 0;
    for (int i = 0; i < LEVELS; i++) {
        p->bits += l->count[i] > 0 ? l->count[i] * l->length[i] : 0;
    }
    for (int bin = 0; bin < RATE_BINS - 1; bin++) {
        double count = count_in(h, bin);
        if (count > 0) {
            double error = bin_centre(bin) - l->at[level_of(bin_centre(bin), p->up)];
            p->distortion += count * error * error;
        }
    }
    p->distortion += count_in(h, RATE_BINS - 1) / 12;
}

rate_plan rate_plan_of(const rate_histogram *h, double lambda) {
    rate_plan p = {.up = {0.6f, 0.6f, 0.55f}};
    levels l;
    for (int round = 0; round < ROUNDS; round++) {
        measure_levels(&l, h, p.up);
        p.up[0] = threshold(&l, 1, lambda);
        p.up[1] = threshold(&l, 2, lambda);
        p.up[2] = threshold(&l, 3, lambda);
    }
    measure_levels(&l, h, p.up);
    find_below(&p, &l);
    weigh(&p, &l, h);
    return p;
}

rate_plan rate_plan_none(const rate_histogram *h) {
    rate_plan p = {.up = {INFINITY, INFINITY, INFINITY}};
    for (int bin = 0; bin < RATE_BINS; bin++) {
        p.distortion += count_in(h, bin) * bin_centre(bin) * bin_centre(bin);
    }
    return p;
}
