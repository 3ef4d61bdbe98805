/*
 * Drift: one long chain of every state without a bound on load costs, and the error of the weights at every depth. The
 * error of a single checkpoint depends on the steps just before it, so means over three checkpoints are printed as
 * well.
 */
#include <math.h>
#include <stdlib.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

enum {
    EARLY = 8, /* the depth that the last one is compared with */
    AROUND = 1 /* depths to each side of the middle of a mean */
};

#define UNBOUNDED 1000 /* base loads */

typedef struct drift_row {
    double errors[QUALITY_MAX_SEEDS][QUALITY_MAX_DELTAS + 1]; /* relative, by depth */
    double bits[QUALITY_MAX_SEEDS];                           /* a parameter, mean of the late half */
} drift_row;

static drift_row table[QUALITY_MAX_CODERS];

static double relative_error(const quality_state *input, const quality_state *output) {
    double error = 0, energy = 0;
    for (size_t t = 0; t < input->count; t++) {
        const float *x = input->tensors[t].parts[0], *y = output->tensors[t].parts[0];
        for (size_t i = 0; i < input->tensors[t].count; i++) {
            error += ((double)y[i] - (double)x[i]) * ((double)y[i] - (double)x[i]);
            energy += (double)x[i] * (double)x[i];
        }
    }
    return sqrt(error / energy);
}

static void measure_chain(drift_row *row, int seed, const quality_coder *coder, const quality_series *series,
                          const quality_state *states) {
    const quality_options *o = series->options;
    quality_library how = coder->library;
    how.max_load_cost = UNBOUNDED;
    char store[QUALITY_PATH];
    snprintf(store, sizeof(store), "%.400s/chain", series->work);
    bench_remove_tree(store);
    for (int depth = 0; depth <= o->deltas; depth++) {
        uint64_t bytes;
        quality_save(store, "chain", &states[depth], &how, depth == 0, NULL);
        quality_state loaded = quality_load(&bytes, store, "chain", states[depth].step);
        row->errors[seed][depth] = relative_error(&states[depth], &loaded);
        if (depth > o->deltas / 2) {
            row->bits[seed] += 8.0 * (double)bytes / (double)loaded.parameters / (o->deltas - o->deltas / 2);
        }
        quality_free(&loaded);
    }
    bench_remove_tree(store);
}

static void measure_seed(int seed, const quality_options *o) {
    quality_series series;
    quality_state states[QUALITY_MAX_DELTAS + 1];
    quality_make_series(&series, o, o->width, o->beta2, seed + 1);
    quality_load_chain(states, &series);
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        fprintf(stderr, "seed %d: %s\n", seed + 1, quality_coders[c].name);
        measure_chain(&table[c], seed, &quality_coders[c], &series, states);
    }
    for (int i = 0; i <= o->deltas; i++) {
        quality_free(&states[i]);
    }
    bench_remove_tree(series.work);
}

/* ---- figures ---- */

/* The mean of the errors around a depth. */
static double mean_around(const double *errors, int depth, int deltas) {
    double sum = 0;
    int count = 0;
    for (int d = depth - AROUND; d <= depth + AROUND && d <= deltas; d++, count++) {
        sum += errors[d];
    }
    return sum / count;
}

typedef struct drift_figures {
    quality_figure early, late, ratio, ratio_of_means, bits;
} drift_figures;

static drift_figures figures_of(const drift_row *row, const quality_options *o) {
    double early[QUALITY_MAX_SEEDS], late[QUALITY_MAX_SEEDS], ratio[QUALITY_MAX_SEEDS],
        means[QUALITY_MAX_SEEDS];
    for (int seed = 0; seed < o->seeds; seed++) {
        const double *errors = row->errors[seed];
        early[seed] = errors[EARLY];
        late[seed] = errors[o->deltas];
        ratio[seed] = late[seed] / early[seed];
        means[seed] = mean_around(errors, o->deltas, o->deltas) / mean_around(errors, EARLY, o->deltas);
    }
    return (drift_figures){quality_figure_of(early, o->seeds), quality_figure_of(late, o->seeds),
                           quality_figure_of(ratio, o->seeds), quality_figure_of(means, o->seeds),
                           quality_figure_of(row->bits, o->seeds)};
}

static void print(const quality_options *o) {
    printf(
        "\nwidth %d, beta2 %g, %d seed%s: one chain, steps %d ... %d by %d; relative error of the weights\n",
        o->width, o->beta2, o->seeds, o->seeds > 1 ? "s" : "", o->start, (int)quality_last_step(o), o->every);
    printf("%-12s %11s %8s %-2d %17s %20s %10s\n", "coder", "at depth 8", "at", o->deltas, "ratio (spread)",
           "of means over 3", "late bits");
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        drift_figures f = figures_of(&table[c], o);
        printf("%-12s %11.4f %11.4f %9.3f (%.3f) %11.3f (%.3f) %10.3f\n", quality_coders[c].name,
               f.early.mean, f.late.mean, f.ratio.mean, f.ratio.spread, f.ratio_of_means.mean,
               f.ratio_of_means.spread, f.bits.mean);
    }
    fflush(stdout);
}

static void write_row(FILE *f, const quality_coder *coder, const drift_row *row, const quality_options *o,
                      int last) {
    fprintf(f, "    {\"coder\": \"%s\", \"seeds\": [\n", coder->name);
    for (int seed = 0; seed < o->seeds; seed++) {
        fprintf(f, "      {\"seed\": %d, \"late_bits\": %.4f, \"errors_by_depth\": [", seed + 1,
                row->bits[seed]);
        for (int depth = 0; depth <= o->deltas; depth++) {
            fprintf(f, "%.5f%s", row->errors[seed][depth], depth < o->deltas ? ", " : "");
        }
        fprintf(f, "]}%s\n", seed + 1 < o->seeds ? "," : "");
    }
    fprintf(f, "    ]}%s\n", last ? "" : ",");
}

static void write_json(const quality_options *o) {
    FILE *f = bench_open_output(o->json);
    fprintf(f, "{\n  \"benchmark\": \"quality, drift\",\n  \"machine\": \"%s\",\n", bench_machine());
    fprintf(f, "  \"width\": %d, \"beta2\": %g, \"start\": %d, \"every\": %d,\n  \"rows\": [\n", o->width,
            o->beta2, o->start, o->every);
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        write_row(f, &quality_coders[c], &table[c], o, quality_next(o, c + 1) == quality_coder_count);
    }
    fprintf(f, "  ]\n}\n");
    bench_close_output(f, o->json);
}

void quality_measure_drift(const quality_options *o) {
    for (int seed = 0; seed < o->seeds; seed++) {
        measure_seed(seed, o);
    }
    print(o);
    write_json(o);
}
